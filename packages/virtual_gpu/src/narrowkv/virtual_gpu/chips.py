"""The chips that the virtual GPU can be, with the properties that a program can ask a HIP runtime for.

Sources: AMD's data sheets of the Instinct MI300A, MI300X, MI325X, MI350X and MI355X; for the MI308X and the
partitions of a chip (CPX), AMD's "GPU hardware specifications" in the ROCm documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CHIPS", "Chip", "find_chip"]

_GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One chip, or one partition of it.

    Attributes:
        name: "MI300X".
        arch: "gfx942" or "gfx950".
        compute_units: what `multi_processor_count` says.
        memory_bytes: HBM. Allocations beyond it fail, although only touched pages exist on the host.
        clock_khz: peak engine clock.
        memory_clock_khz, memory_bus_bits: of the HBM.
    """

    name: str
    arch: str
    compute_units: int
    memory_bytes: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int = 8192

    @property
    def lds_bytes(self) -> int:
        """LDS of a compute unit, the most that a workgroup can have."""
        return {"gfx942": 64 << 10, "gfx950": 160 << 10}[self.arch]

    @property
    def l2_bytes(self) -> int:
        """L2 cache of one of the chip's dies."""
        return 4 << 20

    @property
    def full_name(self) -> str:
        """The device name that programs see."""
        return f"AMD Instinct {self.name} (virtual)"


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip("MI300X", "gfx942", 304, 192 * _GIB, 2_100_000, 1_300_000),
            Chip("MI300A", "gfx942", 228, 128 * _GIB, 2_100_000, 1_300_000),
            Chip("MI308X", "gfx942", 80, 192 * _GIB, 1_420_000, 1_300_000),
            Chip("MI325X", "gfx942", 304, 256 * _GIB, 2_100_000, 1_500_000),
            Chip("MI350X", "gfx950", 256, 288 * _GIB, 2_200_000, 2_000_000),
            Chip("MI355X", "gfx950", 256, 288 * _GIB, 2_400_000, 2_000_000),
            # One of the eight dies as a device of its own (CPX); memory is not partitioned (NPS1).
            Chip("MI300X-CPX", "gfx942", 38, 192 * _GIB, 2_100_000, 1_300_000),
            Chip("MI355X-CPX", "gfx950", 32, 288 * _GIB, 2_400_000, 2_000_000),
        )
    }
)
"""Every chip by name."""

_OF_ARCH = {"gfx942": "MI300X", "gfx950": "MI355X"}


def find_chip(name: str) -> Chip:
    """The chip of a name, in any case, or the chip that stands for an architecture.

    Args:
        name: a key of `CHIPS`, "gfx942" (an MI300X) or "gfx950" (an MI355X).

    Raises:
        ValueError: there is no such chip; the message lists those there are.

    Example:
        >>> find_chip("mi300a").compute_units, find_chip("gfx950").name
        (228, 'MI355X')
    """
    wanted = _OF_ARCH.get(name.lower(), name).upper()
    if wanted not in CHIPS:
        known = ", ".join([*_OF_ARCH, *CHIPS])
        raise ValueError(f"the virtual GPU must be one of {known}; got {name!r}")
    return CHIPS[wanted]
