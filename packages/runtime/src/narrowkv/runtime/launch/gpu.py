"""Launches on a GPU, with less host work than Triton's own launcher when the same call comes again.

Triton binds and specialises every argument anew at each launch, which takes longer than a decode kernel runs.
A `GpuLaunch` writes, from the first call's arguments, a Python function that reads of later ones only what a
specialisation depends on: device, dtypes, alignment, ones. Arguments that specialise alike go to the compiled
kernel that Triton returned for the first of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from narrowkv.runtime.launch.cache_folder import explained_cache_errors
from narrowkv.runtime.launch.options import LaunchOptions
from narrowkv.runtime.targets import device_target

_INT32_MAX = 2**31 - 1
_knobs = triton.knobs.runtime
# Absent from a torch without GPUs.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)

_Key = Callable[[tuple[Any, ...]], tuple[Any, ...]]


class _Changed(Exception):
    """The arguments are not of the kinds that a key function was written for."""


_OTHER_KINDS = (AttributeError, TypeError, ValueError, RuntimeError, _Changed)


def _somebody_listens() -> bool:
    """Whether a profiler waits for launches; Triton has one hook or, later, a chain of them."""
    enter, leave = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _describe(descriptor: Any) -> tuple[Any, ...]:
    """What Triton's compiler knows of a tensor descriptor, Triton's or Gluon's."""
    if not descriptor.base.data_ptr():
        raise _Changed
    return descriptor.base.dtype, tuple(descriptor.block_shape), getattr(descriptor, "layout", None)


def key_function(params: list[Any], args: tuple[Any, ...], *, storage_sizes: bool) -> _Key:
    """Writes the function that gives the specialisation of arguments of the same kinds as these.

    Args:
        params: the kernel's parameters, `JITFunction.params`.
        args: runtime arguments: tensors, ints, floats, None, tensor descriptors, or nested tuples of those.
        storage_sizes: whether the compiler is told if a tensor's storage is within 2 GiB, as on AMD.

    Returns:
        A function of the arguments. It raises `AttributeError`, `TypeError`, `ValueError`, `RuntimeError` or
        `_Changed` for arguments of other kinds, among them tensors without memory.
    """
    names: list[str] = []
    none: list[str] = []
    pointers: list[str] = []
    aligned: list[str] = []
    tensors: list[str] = []
    parts: list[str] = []

    def pattern(value: Any, param: Any) -> str:
        if isinstance(value, tuple):
            return "(" + "".join(pattern(inner, param) + ", " for inner in value) + ")"
        name = f"v{len(names)}"
        names.append(name)
        specialised = not param.do_not_specialize
        if value is None:
            none.append(f"{name} is not None")
        elif isinstance(value, torch.Tensor):
            tensors.append(name)
            pointers.append(f"p_{name}")
            parts.append(f"{name}.dtype")
            if specialised:
                aligned.append(f"p_{name}")
                if storage_sizes:
                    parts.append(f"{name}.untyped_storage().nbytes() <= {_INT32_MAX}")
        elif type(value) is int:
            # 32 bits, or else the sign and whether 64 bits hold it.
            parts.append(f"{name} >> 31 in (0, -1) or ({name} >> 63,)")
            if specialised:
                parts.append(f"{name} == 1")
                parts.append(f"{name} & 15 == 0")
        elif hasattr(value, "block_shape"):
            tensors.append(f"{name}.base")
            parts.append(f"describe({name})")
        elif type(value) is not float:
            raise TypeError(f"a kernel's argument must be a tensor, an int, a float or None, got {value!r}")
        return name

    unpacking = "".join(pattern(value, param) + ", " for value, param in zip(args, params, strict=False))
    body = [f"{unpacking} = args"]
    body += [f"{pointer} = {pointer.removeprefix('p_')}.data_ptr()" for pointer in pointers]
    wrong = [*none, *(f"not {pointer}" for pointer in pointers)]
    if wrong:
        body.append(f"if {' or '.join(wrong)}: raise Changed")
    if aligned:
        each = "".join(f"{pointer} & 15 == 0, " for pointer in aligned)
        parts.insert(0, f"not ({' | '.join(aligned)}) & 15 or ({each})")
    body.append(f"return {tensors[0]}.get_device(), {', '.join(parts)}")
    scope: dict[str, Any] = {"Changed": _Changed, "describe": _describe}
    exec("def key(args):\n" + "".join(f"    {line}\n" for line in body), scope)
    return scope["key"]  # type: ignore[no-any-return]


# What a call needs of a compiled kernel: device, launcher, function, metadata, the constants that follow the
# arguments, and the kernel itself, which Triton unloads when nobody holds it.
_Entry = tuple[int, Callable[..., None], int, Any, tuple[Any, ...], Any]


class GpuLaunch:
    """A kernel with constants and options, and what Triton has compiled of it so far."""

    def __init__(self, kernel: Any, constexprs: dict[str, Any], options: LaunchOptions) -> None:
        self._kernel, self._constexprs, self._options = kernel, constexprs, options
        # One for each combination of kinds of arguments; the one that served last is the last.
        self._variants: list[tuple[_Key, dict[tuple[Any, ...], _Entry]]] = []

    def again(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> bool:
        """Launches if the arguments are of the kinds of the last call, and what they need is compiled.

        Returns:
            Whether it did.
        """
        if not self._variants:
            return False
        key_of, entries = self._variants[-1]
        try:
            entry = entries.get(key_of(args))
        except _OTHER_KINDS:
            return False
        if entry is None or _current_device() != entry[0] or _somebody_listens():
            return False
        device, run, function, metadata, tail, _ = entry
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        run(x, y, z, _current_stream(device), function, metadata, None, None, None, *args, *tail)
        return True

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], device: torch.device) -> None:
        """Launches on `device`, which is the current one; tensors must have memory, or no elements."""
        for variant in self._variants:
            if self._serves(variant[0], args):
                self._variants = [other for other in self._variants if other is not variant] + [variant]
                break
        if self.again(grid, args):
            return
        with explained_cache_errors():
            compiled = self._kernel[grid](
                *args, **self._constexprs, **self._options.for_target(device_target(device))
            )
        if _somebody_listens():
            return
        if not self._variants or not self._serves(self._variants[-1][0], args):
            key_of = key_function(self._kernel.params, args, storage_sizes=torch.version.hip is not None)
            if not self._serves(key_of, args):
                return  # an empty tensor, which has no memory: Triton's own launcher takes it each time
            self._variants.append((key_of, {}))
        key_of, entries = self._variants[-1]
        tail = tuple(
            self._constexprs.get(param.name, param.default) for param in self._kernel.params[len(args) :]
        )
        entries[key_of(args)] = (
            device.index, compiled.run, compiled.function, compiled.packed_metadata, tail, compiled,
        )  # fmt: skip

    @staticmethod
    def _serves(key_of: _Key, args: tuple[Any, ...]) -> bool:
        """Whether the arguments are of the kinds that the function was written for."""
        try:
            key_of(args)
        except _OTHER_KINDS:
            return False
        return True


_launches: dict[Any, GpuLaunch] = {}


def gpu_launch(kernel: Any, constexprs: dict[str, Any], options: LaunchOptions) -> GpuLaunch:
    """The one launch of this kernel with these constants and options."""
    key = (kernel.fn, options, tuple(constexprs.items()))
    return _launches.get(key) or _launches.setdefault(key, GpuLaunch(kernel, constexprs, options))
