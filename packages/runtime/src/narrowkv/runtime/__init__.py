"""narrowkv.runtime: targets, the launch path, workspaces and argument checks, which all packages share.

The names exported here run on any torch device and need no Triton. `narrowkv.runtime.launch` launches,
interprets and compiles kernels.

Example:
    >>> from narrowkv.runtime import get_target
    >>> get_target("gfx950").native_fp8
    'fp8_e4m3fn'
"""

from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.targets import TARGETS, Figures, Target, device_target, get_target

__version__ = "0.1.0"

__all__ = ["TARGETS", "Figures", "Target", "UnsupportedError", "device_target", "get_target"]
