"""A virtual MI300X or MI350X: torch tensors of device "cuda" and Triton kernels for AMD, on a CPU.

`install("gfx942")`, or the environment variable TRITON_VIRTUAL_GPU, gives a CPU build of torch devices of
type "cuda" and gives Triton's own HIP driver a HIP runtime. Triton compiles for the chip as on a machine that
has it; the machine code is emulated.

Example:
    >>> import narrowkv.virtual_gpu as virtual_gpu
    >>> virtual_gpu.CHIPS["MI300X"].compute_units
    304
"""

from __future__ import annotations

import os

from .chips import CHIPS, Chip, find_chip
from .errors import VirtualGpuError
from .installed import Installed, current, install

__version__ = "0.1.0"

__all__ = [
    "CHIPS", "Chip", "Installed", "VirtualGpuError", "current", "find_chip", "install",
    "install_from_environment",
]  # fmt: skip


def install_from_environment() -> Installed | None:
    """Installs what TRITON_VIRTUAL_GPU and the variables that begin with it ask for; None without it.

    Raises:
        VirtualGpuError: as `install`; or a variable has a wrong value.
    """
    chip = os.environ.get("TRITON_VIRTUAL_GPU")
    if not chip:
        return None
    count = os.environ.get("TRITON_VIRTUAL_GPU_COUNT") or "1"
    if not count.isdigit():
        raise VirtualGpuError(f"TRITON_VIRTUAL_GPU_COUNT must be a number of devices, got {count!r}")
    switches = {
        "TRITON_VIRTUAL_GPU_CHECK": os.environ.get("TRITON_VIRTUAL_GPU_CHECK") or "0",
        "TRITON_VIRTUAL_GPU_SKIP_BENCHMARKS": os.environ.get("TRITON_VIRTUAL_GPU_SKIP_BENCHMARKS") or "0",
    }
    for name, value in switches.items():
        if value not in ("0", "1"):
            raise VirtualGpuError(f"{name} must be 0 or 1, got {value!r}")
    check, skip = (value == "1" for value in switches.values())
    return install(chip, count=int(count), check=check, skip_benchmarks=skip)
