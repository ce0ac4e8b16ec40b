"""One launch path for every kernel: a GPU, the interpreter on a CPU, or compile-only for a named target."""

import narrowkv.quant.toolchain  # noqa: F401  # first: it says how to get Triton
from narrowkv.quant.launch.bound import BoundLaunch
from narrowkv.quant.launch.options import LaunchOptions
from narrowkv.quant.launch.path import (
    Executor,
    InterpretExecutor,
    active_target,
    compile_for,
    executing,
    is_compiled,
    launch,
    run_as,
)
from narrowkv.quant.launch.workspace import Workspace, block_bytes

__all__ = [
    "BoundLaunch",
    "Executor",
    "InterpretExecutor",
    "LaunchOptions",
    "Workspace",
    "active_target",
    "block_bytes",
    "compile_for",
    "executing",
    "is_compiled",
    "launch",
    "run_as",
]
