"""One launch path for every kernel: a GPU, the interpreter on a CPU, or compile-only for a named target."""

import narrowkv.quant.toolchain  # noqa: F401  # first: it says how to get Triton
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

__all__ = [
    "Executor",
    "InterpretExecutor",
    "LaunchOptions",
    "active_target",
    "compile_for",
    "executing",
    "is_compiled",
    "launch",
    "run_as",
]
