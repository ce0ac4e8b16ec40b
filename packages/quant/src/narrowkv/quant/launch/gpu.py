"""Launches on a GPU, with less host work than Triton's own launcher when the same call comes again.

Triton binds and specialises every argument anew at each launch, which takes longer than a decode kernel runs.
A launch whose arguments specialise alike reuses the compiled kernel that the first one returned.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from narrowkv.quant.launch.cache_folder import explained_cache_errors
from narrowkv.quant.launch.options import LaunchOptions
from narrowkv.quant.targets import device_target

_INT32_MAX = 2**31 - 1
_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def _specialisation(args: tuple[Any, ...]) -> list[Any]:
    """What Triton's compiler may know of the arguments: types, alignment, ones."""
    key: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is int:
            key.append((arg == 1, arg % 16 == 0, -_INT32_MAX <= arg <= _INT32_MAX))
        elif kind is float or arg is None:
            key.append(kind)
        elif isinstance(arg, torch.Tensor):
            # AMD also specialises on whether offsets into the storage fit 32 bits.
            key.append((arg.dtype, arg.data_ptr() % 16 == 0, arg.untyped_storage().nbytes() <= _INT32_MAX))
        elif hasattr(arg, "block_shape"):  # a tensor descriptor, Triton's or Gluon's
            key.append((arg.base.dtype, tuple(arg.block_shape), getattr(arg, "layout", None)))
        else:
            key.append(tuple(_specialisation(arg)))
    return key


def launch_on_gpu(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constexprs: dict[str, Any],
    options: LaunchOptions,
    device: torch.device,
) -> None:
    """Launches on `device`, which is the current one, and on its current stream."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    if any(getattr(hook, "calls", hook) for hook in hooks):
        # A profiler listens: leave everything to Triton.
        kernel[grid](*args, **constexprs, **options.for_target(device_target(device)))
        return
    key = (kernel.fn, device.index, options, tuple(constexprs.items()), tuple(_specialisation(args)))
    known = _compiled.get(key)
    if known is None:
        with explained_cache_errors():
            compiled = kernel[grid](*args, **constexprs, **options.for_target(device_target(device)))
        tail = tuple(constexprs[name] for name in kernel.arg_names[len(args) :])
        _compiled[key] = compiled, tail
        return
    compiled, tail = known
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, *hooks, *args, *tail)
