"""One launch path for every kernel: a GPU, the interpreter on a CPU, or compile-only for a named target."""

import narrowkv.quant.toolchain  # noqa: F401  # first: it says how to get Triton
from narrowkv.quant.launch.bound import BoundLaunch
from narrowkv.quant.launch.compiles import Compiles, count_compiles
from narrowkv.quant.launch.fixed import FixedLaunch, Varying
from narrowkv.quant.launch.options import LaunchOptions
from narrowkv.quant.launch.path import (
    Executor,
    InterpretExecutor,
    active_target,
    compile_for,
    executing,
    executor,
    is_compiled,
    launch,
    run_as,
)
from narrowkv.quant.launch.warmup import KernelSpec, TensorSpec, Warmup, warmup
from narrowkv.quant.launch.workspace import Workspace, block_bytes

__all__ = [
    "BoundLaunch",
    "Compiles",
    "Executor",
    "FixedLaunch",
    "InterpretExecutor",
    "KernelSpec",
    "LaunchOptions",
    "TensorSpec",
    "Varying",
    "Warmup",
    "Workspace",
    "active_target",
    "block_bytes",
    "compile_for",
    "count_compiles",
    "executing",
    "executor",
    "is_compiled",
    "launch",
    "run_as",
    "warmup",
]
