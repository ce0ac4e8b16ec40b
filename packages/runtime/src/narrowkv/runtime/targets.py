"""The targets that narrowkv knows. Their hardware figures are in `narrowkv.runtime.figures`.

Nothing here asks a device at import; `device_target` asks once per device and remembers the answer.

Example:
    >>> get_target("gfx950").native_fp8
    'fp8_e4m3fn'
    >>> device_target("cpu").name
    'cpu'
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType

import torch

from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.figures import H100, MI300X, MI355X, Figures

__all__ = [
    "TARGETS",
    "UNTRIED",
    "WARPGROUP_ROWS",
    "Figures",
    "Target",
    "compile_target",
    "device_target",
    "get_target",
    "least_columns",
]

# Bytes of a cache line of the L2.
CACHE_LINE = 128
# Rows of a tile from which NVIDIA's warpgroups multiply it: all four warps issue one product together.
WARPGROUP_ROWS = 64


@dataclass(frozen=True)
class Target:
    """A GPU architecture that kernels are compiled for, or the CPU interpreter.

    Attributes:
        name: "gfx942", "gfx950", "gfx90a", "sm90", "cuda" or "cpu"; one of `UNTRIED`.
        vendor: "amd", "nvidia" or "none".
        description: one line for tables.
        chip: the chip that `figures` describe; empty if there are none.
        wave_size: lanes of a wave (warp).
        native_fp8: the FP8 E4M3 format that the hardware converts and multiplies; None if there is none.
        has_scaled_mfma: whether block-scaled FP8/FP4 matrix instructions exist (`tl.dot_scaled` is native).
        fp8_formats: the FP8 formats that the compiler for this target accepts as tensor element types.
        backend: Triton's backend name, "hip" or "cuda"; empty for the interpreter.
        arch: Triton's architecture: a gfx name, or a compute capability as an int; None if it is not
            fixed.
        figures: hardware figures, or None where no model is offered.
        compute_units: compute units (AMD) or multiprocessors (NVIDIA) that a configuration is to fill: of the
            GPU for a target that `device_target` gave, else those that are published for `chip`, or a few.
    """

    name: str
    vendor: str
    description: str
    chip: str
    wave_size: int
    native_fp8: str | None
    has_scaled_mfma: bool
    fp8_formats: tuple[str, ...]
    backend: str
    arch: str | int | None
    figures: Figures | None
    compute_units: int

    @cached_property
    def is_amd(self) -> bool:
        """Whether kernels for it are AMD code objects."""
        return self.vendor == "amd"

    @cached_property
    def xcds(self) -> int:
        """XCDs, dies with an L2 of their own, that workgroups are spread over in turns; 1 elsewhere."""
        return 1 if self.figures is None else self.figures.xcds

    @cached_property
    def is_wave32(self) -> bool:
        """Whether it is an AMD GPU whose waves have 32 lanes."""
        return self.is_amd and self.wave_size == 32

    @cached_property
    def store_wait(self) -> str:
        """What copies a register once a wave's stores have reached memory, on AMD; empty elsewhere."""
        if not self.is_amd:
            return ""
        wait = "s_wait_storecnt 0x0" if self.is_wave32 else "s_waitcnt vmcnt(0)"
        return f"{wait}\nv_mov_b32 $0, $1"

    @property
    def is_untried(self) -> bool:
        """Whether neither a GPU nor an emulator has run kernels for it."""
        return self.name in UNTRIED

    @cached_property
    def is_nvidia(self) -> bool:
        """Whether kernels for it are CUDA binaries."""
        return self.vendor == "nvidia"

    def __str__(self) -> str:
        return self.name


_ALL_FP8 = ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2")
_OCP_FP8 = ("fp8_e4m3fn", "fp8_e5m2")

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        t.name: t
        for t in (
            Target(
                name="gfx942",
                vendor="amd",
                description="AMD CDNA 3 (MI300X, MI325X)",
                chip="MI300X",
                wave_size=64,
                native_fp8="fp8_e4m3fnuz",
                has_scaled_mfma=False,
                fp8_formats=_ALL_FP8,
                backend="hip",
                arch="gfx942",
                figures=MI300X,
                compute_units=MI300X.compute_units,
            ),
            Target(
                name="gfx950",
                vendor="amd",
                description="AMD CDNA 4 (MI350X, MI355X)",
                chip="MI355X",
                wave_size=64,
                native_fp8="fp8_e4m3fn",
                has_scaled_mfma=True,
                fp8_formats=_ALL_FP8,
                backend="hip",
                arch="gfx950",
                figures=MI355X,
                compute_units=MI355X.compute_units,
            ),
            Target(
                name="gfx90a",
                vendor="amd",
                description="AMD CDNA 2 (MI210, MI250X); untuned",
                chip="",
                wave_size=64,
                native_fp8=None,
                has_scaled_mfma=False,
                fp8_formats=_ALL_FP8,
                backend="hip",
                arch="gfx90a",
                figures=None,
                compute_units=104,  # MI210; a die of an MI250X has 110
            ),
            Target(
                name="sm90",
                vendor="nvidia",
                description="NVIDIA Hopper (H100, H200)",
                chip="H100 SXM",
                wave_size=32,
                native_fp8="fp8_e4m3fn",
                has_scaled_mfma=False,
                fp8_formats=_OCP_FP8,
                backend="cuda",
                arch=90,
                figures=H100,
                compute_units=H100.compute_units,
            ),
            Target(
                name="cuda",
                vendor="nvidia",
                description="another NVIDIA GPU with FP8 (compute capability 8.9 or from 10.0); untuned",
                chip="",
                wave_size=32,
                native_fp8="fp8_e4m3fn",
                has_scaled_mfma=False,
                fp8_formats=_OCP_FP8,
                backend="cuda",
                arch=None,
                figures=None,
                compute_units=4,
            ),
            Target(
                name="cpu",
                vendor="none",
                description="any CPU, by Triton's interpreter",
                chip="",
                wave_size=1,
                native_fp8=None,
                has_scaled_mfma=False,
                fp8_formats=_ALL_FP8,
                backend="",
                arch=None,
                figures=None,
                compute_units=4,
            ),
        )
    }
)
"""Every known target by name."""


UNTRIED: Mapping[str, Target] = MappingProxyType(
    {
        t.name: t
        for t in (
            Target(
                name="gfx1201",
                vendor="amd",
                description="AMD RDNA 4 (Radeon RX 9070, AI PRO R9700); nothing ran",
                chip="",
                wave_size=32,
                native_fp8=None,  # Triton 3.8 converts it in software, at the cost of spilled scalars
                has_scaled_mfma=False,
                fp8_formats=_ALL_FP8,
                backend="hip",
                arch="gfx1201",
                figures=None,
                compute_units=32,
            ),
            Target(
                name="gfx1250",
                vendor="amd",
                description="AMD gfx1250; nothing ran",
                chip="",
                wave_size=32,
                native_fp8="fp8_e4m3fn",
                has_scaled_mfma=True,
                fp8_formats=_ALL_FP8,
                backend="hip",
                arch="gfx1250",
                figures=None,
                compute_units=4,
            ),
        )
    }
)
"""Targets that kernels compile for, and that neither a GPU nor an emulator has run.

A GPU of such a target is refused unless the environment variable NARROWKV_UNTRIED_GPU is 1: see
`narrowkv.runtime.untried`.
"""


def compile_target(name: str | Target) -> Target:
    """The AMD target of that name, including those that kernels are only compiled for.

    Raises:
        TypeError: `name` is neither a name nor a `Target`.
        UnsupportedError: the name is unknown, or no AMD target that kernels compile for.
    """
    known = ", ".join([t.name for t in TARGETS.values() if t.is_amd] + list(UNTRIED))
    if isinstance(name, str):
        if name in UNTRIED:
            return UNTRIED[name]
        if name.startswith(("gfx10", "gfx11", "gfx12")):
            raise UnsupportedError(
                f"target {name} is an RDNA GPU: kernels are not written for its matrix instructions; they "
                f"compile for {known}"
            )
        if name.startswith("gfx") and name not in TARGETS:
            raise UnsupportedError(f"target {name} is not known; kernels compile for {known}")
    target = get_target(name)
    if not target.is_amd:
        raise UnsupportedError(f"an AMD target is needed, one of {known}; got {target.name!r}")
    return target


def least_columns(target: Target, rows: int) -> int:
    """The fewest columns of a product of a tile of `rows` rows that a compiler gets right.

    The columns of Q K^T are a tile's keys, those of P V the channels of one part of V. On sm90 products of
    warpgroups with 32 columns or fewer beside wider ones come out wrong for some tiles (relative L1 0.2 to
    1e8), or read shared memory that is not theirs: Triton 3.6 and 3.8, H200. Those with right results
    were slower. Tiles of prefill, decode and Sage keep to this: see `tests/test_tiles.py`.
    """
    return 64 if target.is_nvidia and rows >= WARPGROUP_ROWS else 1


def get_target(name: str | Target) -> Target:
    """The target of that name; a `Target` is passed through.

    Raises:
        TypeError: `name` is neither.
        UnsupportedError: the name is unknown; the message lists the known ones (it is a `ValueError`).
    """
    if isinstance(name, Target):
        return name
    if not isinstance(name, str):
        raise TypeError(f"target must be a name or a Target, got {type(name).__name__}")
    if name not in TARGETS:
        raise UnsupportedError(f"target must be one of {', '.join(TARGETS)}; got {name!r}")
    return TARGETS[name]


def _amd_target(gcn_arch_name: str) -> Target:
    arch = gcn_arch_name.split(":", 1)[0]  # "gfx942:sramecc+:xnack-" carries feature flags
    target = TARGETS.get(arch)
    if arch in UNTRIED:
        if os.environ.get("NARROWKV_UNTRIED_GPU") == "1":
            return UNTRIED[arch]
        raise UnsupportedError(
            f"AMD architecture {arch!r} compiles, but nothing has run it: set NARROWKV_UNTRIED_GPU=1 to try "
            "decode, prefill and append, whose first calls are then compared with the reference"
        )
    if target is None or not target.is_amd:
        known = ", ".join(t.name for t in TARGETS.values() if t.is_amd)
        raise UnsupportedError(f"AMD architecture {arch!r} is not known; known: {known}")
    return target


def _nvidia_target(capability: tuple[int, int]) -> Target:
    if capability[0] == 9:
        return TARGETS["sm90"]
    if capability >= (8, 9):
        return TARGETS["cuda"]
    major, minor = capability
    raise UnsupportedError(
        f"an NVIDIA GPU must have compute capability 8.9 or higher (FP8), got {major}.{minor}"
    )


@cache
def _gpu_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        target = _amd_target(str(properties.gcnArchName))
    else:
        target = _nvidia_target((properties.major, properties.minor))
    # Chips and partitions of one architecture differ in this: an MI308X has 80, an MI300X 304.
    units = properties.multi_processor_count
    if target.compute_units == units:
        return target
    figures = None if target.figures is None else replace(target.figures, compute_units=units)
    return replace(target, figures=figures, compute_units=units)


def device_target(device: str | int | torch.device) -> Target:
    """The target of `device`, found once per device and remembered; its compute units are the device's own.

    Args:
        device: a torch device, its name, or a GPU index. "cuda" without an index is the current device.

    Raises:
        UnsupportedError: the device is of a kind, an architecture or a compute capability that is not known.
    """
    if isinstance(device, int):
        return _gpu_target(device)
    where = torch.device(device)
    if where.type == "cpu":
        return TARGETS["cpu"]
    if where.type == "cuda":
        return _gpu_target(torch.cuda.current_device() if where.index is None else where.index)
    raise UnsupportedError(
        f"device must be a CPU, a ROCm GPU or a CUDA GPU, got {where}; known targets: {', '.join(TARGETS)}"
    )
