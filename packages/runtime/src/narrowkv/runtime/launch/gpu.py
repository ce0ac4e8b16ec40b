"""Launches on a GPU, with less host work than Triton's own launcher when the same call comes again.

Triton binds and specialises every argument at each launch, which takes longer than a decode kernel runs.
A `GpuLaunch` writes, from the first call's arguments, a Python function that reads of later ones only what a
specialisation depends on: device, dtypes, alignment, ones. Arguments that specialise alike go to the compiled
kernel that Triton returned for the first of them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from narrowkv.runtime.launch.descriptors import Encode, encoder_of, is_descriptor
from narrowkv.runtime.launch.kernel_cache import explained_cache_errors
from narrowkv.runtime.launch.options import LaunchOptions
from narrowkv.runtime.launch.written import Specialisation, written
from narrowkv.runtime.targets import device_target

_knobs = triton.knobs.runtime
# Absent from a torch without GPUs.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


class _Changed(Exception):
    """The arguments are not of the kinds that a key function was written for."""


OTHER_KINDS = (AttributeError, TypeError, ValueError, RuntimeError, _Changed)


def somebody_listens() -> bool:
    """Whether a profiler waits for launches; Triton has one hook or, later, a chain of them."""
    enter, leave = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _describe(descriptor: Any) -> tuple[Any, ...]:
    """The properties of a tensor descriptor, Triton's or Gluon's, that Triton's compiler uses."""
    if not descriptor.base.data_ptr():
        raise _Changed
    return descriptor.base.dtype, tuple(descriptor.block_shape), getattr(descriptor, "layout", None)


def _write_reader(params: list[Any], args: tuple[Any, ...], storage_sizes: bool, packs: bool) -> Any:
    """Writes a function of arguments of the same kinds as these; see `key_function`.

    It returns their key, or with `packs` the key and the arguments with addresses in place of tensors, which
    Triton's launcher takes without asking the driver about each of them.
    """
    names: list[str] = []
    other: list[str] = []  # conditions that hold for arguments of other kinds
    tensors: list[str] = []
    kinds: list[str] = []
    specialised = Specialisation(storage_sizes=storage_sizes)

    def pattern(value: Any, by_value: bool, by_alignment: bool) -> tuple[str, str]:
        """The value's name where arguments are unpacked, and the expression for it where they are packed."""
        if isinstance(value, tuple):
            # Triton specialises on what tuples hold, whatever the parameter says.
            inner = [pattern(part, True, True) for part in value]
            unpacked, packed = ("".join(f"{pair[side]}, " for pair in inner) for side in (0, 1))
            return f"({unpacked})", f"({packed})"
        name = f"v{len(names)}"
        names.append(name)
        if value is None or type(value) is float:
            other.append(f"{name} is {'not ' if value is None else ''}None")
        elif isinstance(value, torch.Tensor):
            tensors.append(name)
            kinds.append(f"{name}.dtype")
        elif hasattr(value, "block_shape"):
            tensors.append(f"{name}.base")
            kinds.append(f"describe({name})")
        elif type(value) is not int:
            raise TypeError(f"a kernel's argument must be a tensor, an int, a float or None, got {value!r}")
        return name, specialised.pack(name, value, by_value, by_alignment)

    unpacking = packing = ""
    for value, param in zip(args, params, strict=False):
        by_alignment = not param.do_not_specialize_on_alignment
        name, packed = pattern(value, not param.do_not_specialize, by_alignment)
        unpacking, packing = f"{unpacking}{name}, ", f"{packing}{packed}, "
    body = [f"{unpacking} = args", *specialised.addresses]
    if wrong := [*other, *specialised.missing]:
        body.append(f"if {' or '.join(wrong)}: raise Changed")
    key = f"({tensors[0]}.get_device(), {', '.join([*kinds, specialised.key()])})"
    body.append(f"return {key}, ({packing})" if packs else f"return {key}")
    return written("read", ("args",), body, {"Changed": _Changed, "describe": _describe})


def key_function(
    params: list[Any], args: tuple[Any, ...], *, storage_sizes: bool
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Writes the function that gives the specialisation of arguments of the same kinds as these.

    Args:
        params: the kernel's parameters, `JITFunction.params`.
        args: runtime arguments: tensors, ints, floats, None, tensor descriptors, or nested tuples of those.
        storage_sizes: whether the compiler is told if a tensor's storage is within 2 GiB, as on AMD.

    Returns:
        A function of the arguments. It raises `AttributeError`, `TypeError`, `ValueError`, `RuntimeError` or
        `_Changed` for arguments of other kinds, among them tensors without memory.
    """
    return _write_reader(params, args, storage_sizes, False)  # type: ignore[no-any-return]


_Reader = Callable[[tuple[Any, ...]], tuple[tuple[Any, ...], tuple[Any, ...]]]
# Launches a compiled kernel: three extents of the grid, stream, arguments.
Launcher = Callable[[int, int, int, int, tuple[Any, ...]], None]


def _needs_wrapper(run: Any) -> bool:
    """Whether Triton's wrapper does more in each call than to pass arguments on."""
    scratch = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    return scratch != [0, 0] or getattr(run, "gsan_enabled", False) or not hasattr(run, "launch")


def flat_annotations(run: Any) -> Any:
    """Annotations with which Triton's launcher takes the arguments of the compiled kernel as they are.

    With Triton's own annotations it takes the arguments of the Python function: every launch flattens their
    tuples, and drops constants and what the kernel was specialised on. None for a launcher that takes no
    annotations.
    """
    annotate = getattr(sys.modules.get(type(run).__module__), "annotate_arguments", None)
    if annotate is None or not hasattr(run, "arg_annotations") or not hasattr(run, "kernel_signature"):
        return None
    return annotate(["i32"] * len(run.kernel_signature))


def _count_arguments(types: Any) -> int:
    """How many arguments a compiled kernel has, by Triton's types of the Python function's."""
    return sum(_count_arguments(t) if isinstance(t, tuple) else t != "constexpr" for t in types)


def launcher_of(
    compiled: Any, tail: tuple[Any, ...], launch: Any = None, annotations: Any = None
) -> Launcher:
    """Launches a compiled kernel without the Python function that Triton wraps around its launcher.

    That function looks after scratch memory and profilers on every call. For a kernel without scratch memory
    its call of the launcher itself is recorded once, and repeated with other arguments.

    Args:
        compiled: what Triton's compiler returned; it stays loaded as long as the result lives.
        tail: the constants that follow the arguments.
        launch: the launcher; None takes the kernel's own.
        annotations: of `flat_annotations`, for a function that takes the compiled kernel's arguments alone.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def whole(x: int, y: int, z: int, stream: int, args: tuple[Any, ...]) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *args, *tail)

    if _needs_wrapper(run):
        return whole
    calls: list[tuple[Any, ...]] = []
    twin = copy.copy(run)
    twin.launch = lambda *given: calls.append(given)
    x, y, z, stream, argument = marks = tuple(object() for _ in range(5))
    twin(x, y, z, stream, function, metadata, None, None, None, argument, *tail)
    scope: dict[str, Any] = {"launch": launch or run.launch, "compiled": compiled, "tail": tail}
    words: list[str] = []
    for index, value in enumerate(calls[0]):
        if isinstance(value, tuple) and value and value[0] is argument:
            words.append("(*args, *tail)" if annotations is None else "args")
        elif annotations is not None and value is run.arg_annotations:
            scope["annotations"] = annotations
            words.append("annotations")
        elif any(value is mark for mark in marks):
            words.append(("x", "y", "z", "stream", "*args")[[value is mark for mark in marks].index(True)])
        else:
            scope[f"c{index}"] = value
            words.append(f"c{index}")
    if annotations is not None and "annotations" not in words:
        raise RuntimeError(f"{type(run).__name__} passes no annotations on: Triton {triton.__version__}")
    body = [f"launch({', '.join(words)})"]
    return written("call", ("x", "y", "z", "stream", "args"), body, scope)  # type: ignore[no-any-return]


class _Entry(NamedTuple):
    """The launch of one specialisation: its device, its launcher, and what the launcher was made from."""

    device: int
    launcher: Launcher
    compiled: Any
    tail: tuple[Any, ...]


Relaunch = tuple[Launcher, Encode | None, tuple[Any, ...] | None]
"""A launcher; where it takes encoded tensor descriptors, the function that encodes them; and where it takes
the compiled kernel's arguments alone, Triton's types of all, nested as they are: "constexpr" for others."""


class GpuLaunch:
    """A kernel with constants and options, and what Triton has compiled of it so far."""

    def __init__(self, kernel: Any, constexprs: dict[str, Any], options: LaunchOptions) -> None:
        self._kernel, self._constexprs, self._options = kernel, constexprs, options
        # One for each combination of kinds of arguments; the one that served last is the last.
        self._variants: list[tuple[_Reader, dict[tuple[Any, ...], _Entry]]] = []

    def again(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> bool:
        """Launches if the arguments are of the kinds of the last call, and what they need is compiled.

        Returns:
            Whether it did.
        """
        if not self._variants:
            return False
        read, entries = self._variants[-1]
        try:
            key, packed = read(args)
        except OTHER_KINDS:
            return False
        entry = entries.get(key)
        if entry is None or current_device() != entry.device or somebody_listens():
            return False
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        entry.launcher(x, y, z, current_stream(entry.device), packed)
        return True

    def launcher(self, args: tuple[Any, ...]) -> Relaunch | None:
        """What launches the specialisation that these arguments need, if it was launched before."""
        if not self._variants:
            return None
        read, entries = self._variants[-1]
        entry = entries.get(read(args)[0]) if self._serves(read, args) else None
        if entry is None:
            return None
        compiled, tail = entry.compiled, entry.tail
        if _needs_wrapper(compiled.run):
            return entry.launcher, None, None
        encoding = encoder_of(compiled, tail, args)
        annotations = flat_annotations(compiled.run)
        if encoding is None and any(map(is_descriptor, args)):
            annotations = None  # Triton's launcher looks for descriptors among all arguments
        launch, encode = encoding or (None, None)
        types = None if annotations is None else tuple(compiled.src.signature.values())[: len(args)]
        # The launcher reads as many arguments as the kernel has, and does not count those that it is given.
        # Encoded descriptors are several arguments each.
        counted = types is None or encode is not None
        if not counted and _count_arguments(types) != len(compiled.run.kernel_signature):
            types = annotations = None
        return launcher_of(compiled, tail, launch, annotations), encode, types

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
        if somebody_listens():
            return
        if not self._variants or not self._serves(self._variants[-1][0], args):
            read = _write_reader(self._kernel.params, args, torch.version.hip is not None, True)
            if not self._serves(read, args):
                return  # an empty tensor, which has no memory: Triton's own launcher takes it each time
            self._variants.append((read, {}))
        read, entries = self._variants[-1]
        tail = tuple(
            self._constexprs.get(param.name, param.default) for param in self._kernel.params[len(args) :]
        )
        entries[read(args)[0]] = _Entry(device.index, launcher_of(compiled, tail), compiled, tail)

    @property
    def spills(self) -> int:
        """The most registers that a specialisation spills of those that were launched, by Triton's count."""
        entries = [entry for _, compiled in self._variants for entry in compiled.values()]
        return max((getattr(entry.compiled, "n_spills", None) or 0 for entry in entries), default=0)

    @staticmethod
    def _serves(read: _Reader, args: tuple[Any, ...]) -> bool:
        """Whether the arguments are of the kinds that the function was written for."""
        try:
            read(args)
        except OTHER_KINDS:
            return False
        return True


_launches: dict[Any, GpuLaunch] = {}


def gpu_launch(kernel: Any, constexprs: dict[str, Any], options: LaunchOptions) -> GpuLaunch:
    """The one launch of this kernel with these constants and options."""
    key = (kernel.fn, options, tuple(constexprs.items()))
    return _launches.get(key) or _launches.setdefault(key, GpuLaunch(kernel, constexprs, options))
