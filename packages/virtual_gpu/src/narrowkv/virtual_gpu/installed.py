"""The virtual GPU of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .after_import import after_import
from .chips import Chip, find_chip
from .errors import VirtualGpuError

if TYPE_CHECKING:
    from .runtime import Launch, Runtime, Totals

__all__ = ["Installed", "current", "install"]

_MAX_DEVICES = 16


class Installed:
    """The virtual GPU of this process.

    Attributes:
        runtime: its HIP runtime.
        chip: which chip each device is.
        count: number of devices.
        check: whether every launch is checked for races, uninitialised values, waits and hazards.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.chip: Chip = runtime.chip
        self.count: int = runtime.devices
        self.check: bool = runtime.engine.checked

    @property
    def launches(self) -> Sequence[Launch]:
        """The last 10,000 launches, the latest last."""
        return tuple(self.runtime.launches)

    @property
    def totals(self) -> Totals:
        """Number of launches and of wave instructions since the start."""
        return self.runtime.totals

    def __repr__(self) -> str:
        return f"<virtual GPU: {self.count} x {self.chip.name} ({self.chip.arch})>"


_installed: Installed | None = None


def current() -> Installed | None:
    """The virtual GPU of this process, or None if there is none."""
    return _installed


def install(
    chip: str = "gfx942", *, count: int = 1, check: bool = False, skip_benchmarks: bool = False
) -> Installed:
    """Gives torch devices of type "cuda" and Triton's HIP driver a runtime, for the rest of the process.

    The first call for a version of torch compiles a library, which takes half a minute.

    Args:
        chip: "gfx942" (an MI300X), "gfx950" (an MI355X), or a name of `CHIPS`.
        count: number of devices; all are alike.
        check: check every launch for races, uninitialised values, missing waits and hazards, which is slower.
        skip_benchmarks: let the benchmarks of `triton.testing.perf_report` say that they are skipped.

    Returns:
        The virtual GPU; the same one when called again with the same arguments.

    Raises:
        ValueError: the chip or the count is wrong.
        VirtualGpuError: torch has a GPU build; there is no compiler; another GPU was installed before.

    Example:
        >>> program = (
        ...     "import narrowkv.virtual_gpu as virtual_gpu; virtual_gpu.install('gfx942');"
        ...     "import torch; print(torch.ones(3, device='cuda').sum().item())"
        ... )
        >>> import subprocess, sys
        >>> subprocess.check_output([sys.executable, "-c", program]).strip()
        b'3.0'
    """
    import torch  # noqa: F401  # with TRITON_VIRTUAL_GPU set this installs what the variable asks for

    global _installed
    wanted = find_chip(chip)
    if not 1 <= count <= _MAX_DEVICES:
        raise ValueError(f"count must be within 1..{_MAX_DEVICES}, got {count}")
    if _installed is not None:
        if (_installed.chip, _installed.count, _installed.check) != (wanted, count, check):
            raise VirtualGpuError(
                f"a process has one virtual GPU: {_installed!r} was installed before; {chip!r} needs another "
                "process"
            )
        return _installed

    from . import build, triton_part
    from .engine import Engine
    from .runtime import Runtime
    from .torch_cuda import install_torch_cuda

    library = build.hip_runtime()
    runtime = Runtime(library, wanted, count, Engine(check))
    install_torch_cuda(build.torch_device(), runtime)
    triton_part.name_hip_runtime(library)
    after_import("triton", triton_part.install_triton)
    if skip_benchmarks:
        after_import("triton", triton_part.skip_benchmarks)
    _installed = Installed(runtime)
    return _installed
