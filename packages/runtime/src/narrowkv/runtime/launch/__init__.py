"""One launch path for every kernel: a GPU, the interpreter on a CPU, or compile-only for a named target."""

import narrowkv.runtime.toolchain  # noqa: F401  # first: it says how to get Triton
from narrowkv.runtime.launch.kernel_cache import Compiles, cache_variables, count_compiles
from narrowkv.runtime.launch.options import LaunchOptions
from narrowkv.runtime.launch.path import (
    BoundLaunch,
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
from narrowkv.runtime.launch.prepared import (
    Arg,
    Clear,
    Described,
    KernelLaunch,
    Part,
    PreparedCall,
    launch_by_name,
    launch_of,
    named,
    named_values,
)
from narrowkv.runtime.launch.recording import RecordExecutor, recording
from narrowkv.runtime.launch.warmup import KernelSpec, TensorSpec, Warmup, load_kernels, warmup
from narrowkv.runtime.launch.workspace import Workspace, block_bytes

__all__ = [
    "Arg",
    "BoundLaunch",
    "Clear",
    "Compiles",
    "Described",
    "Executor",
    "InterpretExecutor",
    "KernelLaunch",
    "KernelSpec",
    "LaunchOptions",
    "Part",
    "PreparedCall",
    "RecordExecutor",
    "TensorSpec",
    "Warmup",
    "Workspace",
    "active_target",
    "block_bytes",
    "cache_variables",
    "compile_for",
    "count_compiles",
    "executing",
    "executor",
    "is_compiled",
    "launch",
    "launch_by_name",
    "launch_of",
    "load_kernels",
    "named",
    "named_values",
    "recording",
    "run_as",
    "warmup",
]
