"""The launches of an operation's call, prepared once: of later calls only what differs is looked at.

The call's values are known by name. `PreparedCall` writes one Python function of them that launches all
kernels. The caller has compared the metadata of the
tensors: the function reads addresses, and what Triton specialises a kernel on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from narrowkv.runtime.identity import ByIdentity
from narrowkv.runtime.launch import gpu, path
from narrowkv.runtime.launch.descriptors import Encode, is_descriptor
from narrowkv.runtime.launch.path import BoundLaunch
from narrowkv.runtime.launch.written import written

_MAX_ENCODED = 256  # descriptors of blocks at different addresses
_INT32_MAX = 0x7FFFFFFF


class Arg:
    """Stands for a value that each call gives: a tensor, a tensor descriptor, an int or a float.

    Attributes:
        name: of the value.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Arg({self.name!r})"

    def of(self, values: Mapping[str, Any]) -> Any:
        """The value in a call."""
        return values[self.name]


def named(name: str, struct: Any) -> Any:
    """A struct with an `Arg` for each tensor and float in it, named after the struct and the field."""
    return type(struct)(
        *(
            Arg(f"{name}_{field}") if isinstance(value, torch.Tensor | float) else value
            for field, value in zip(struct._fields, struct, strict=True)
        )
    )


def named_values(name: str, struct: Any) -> dict[str, Any]:
    """The tensors and floats of a struct by the names that `named` gives them."""
    # Interned: Python then looks a keyword up by comparing addresses, not characters.
    return {
        sys.intern(f"{name}_{field}"): value
        for field, value in zip(struct._fields, struct, strict=True)
        if isinstance(value, torch.Tensor | float)
    }


class Part:
    """Stands for a tensor within a block of memory that each call gives.

    Attributes:
        block: a contiguous tensor of any dtype, a multiple of 16 bytes long.
        offset: bytes of the block before the part, a multiple of 16.
        dtype: of the part.
    """

    __slots__ = ("block", "dtype", "offset")

    def __init__(self, block: Any, offset: Any, dtype: torch.dtype) -> None:
        self.block, self.offset, self.dtype = block, offset, dtype

    def of(self, values: Mapping[str, Any]) -> torch.Tensor:
        """The block from the part's beginning."""
        block: torch.Tensor = self.block.of(values)
        return block.view(self.dtype)[_filled(self.offset, values) // self.dtype.itemsize :]


class Described:
    """Stands for a tensor descriptor of a part.

    Attributes:
        part: the part.
        size: a number that the descriptor depends on besides.
        make: a function of the part and the number.
    """

    __slots__ = ("make", "part", "size")

    def __init__(self, part: Part, size: Any, make: Callable[[torch.Tensor, int], Any]) -> None:
        self.part, self.size, self.make = part, size, make

    def of(self, values: Mapping[str, Any]) -> Any:
        """The descriptor in a call."""
        return self.make(self.part.of(values), _filled(self.size, values))


_MARKS = (Arg, Part, Described)


class Clear(NamedTuple):
    """A step of a call that sets a tensor to zero.

    Attributes:
        tensor: the tensor, an `Arg` or a `Part`.
        size: elements that are cleared.
    """

    tensor: Any
    size: int


class KernelLaunch(NamedTuple):
    """A step of a call that launches a kernel; see `launch_by_name`.

    Attributes:
        bound: the kernel with its constants and options.
        grid: three extents, each an int or an `Arg`.
        args: runtime arguments in the kernel's order, with marks for what each call gives.
    """

    bound: BoundLaunch
    grid: tuple[Any, Any, Any]
    args: tuple[Any, ...]


def launch_by_name(bound: BoundLaunch, grid: tuple[Any, ...], **arguments: Any) -> KernelLaunch:
    """A launch whose runtime arguments are given by their names in the kernel, in any order.

    Args:
        bound: the kernel with its constants and options.
        grid: one to three extents, each an int or an `Arg`.
        **arguments: tensors, numbers, None, marks (`Arg`, `Part`, `Described`), or named tuples of those.

    Raises:
        TypeError: arguments that are not exactly the kernel's.
    """
    names = [name for name in bound.kernel.arg_names if name not in bound.constexprs]
    if set(names) != set(arguments):
        raise TypeError(f"{bound.kernel.__name__} takes {names}, got {list(arguments)}")
    x, y, z = (*grid, 1, 1)[:3]
    return KernelLaunch(bound, (x, y, z), tuple(arguments[name] for name in names))


def launch_of(bound: BoundLaunch, grid: tuple[Any, ...], arguments: Mapping[str, Any]) -> KernelLaunch:
    """`launch_by_name`, with the kernel's arguments taken from a dictionary that several kernels share."""
    return launch_by_name(
        bound, grid, **{name: arguments[name] for name in bound.kernel.arg_names if name in arguments}
    )


class PreparedCall:
    """The launches of a call, as a function of the values that each call gives.

    Tensors among the values must have the dtypes and the device of those in the first call: the caller has
    compared that. A tensor that is no mark must stay where it is. A tensor descriptor is encoded once as long
    as it lives. The function is written in the second call: most sizes of prefills come once.

    Args:
        names: of the values, in the order in which `run` may be given them; None for those of the first call,
            which gives all by name.
        steps: launches and clears, in order.

    Attributes:
        run: takes the values, by name, launches, interprets or compiles the kernels. Nothing happens for an
            empty grid.

    Example:
        >>> x = Arg("x")
        >>> call = PreparedCall(("x", "n"), [launch_by_name(bound, (8,), x_ptr=x, size=Arg("n"))]
        ... )                                                          # doctest: +SKIP
        >>> call.run(x=torch.ones(5), n=5)                             # doctest: +SKIP
    """

    __slots__ = ("_fill", "_is_known", "_names", "_steps", "run")

    def __init__(self, names: Sequence[str] | None, steps: Sequence[KernelLaunch | Clear]) -> None:
        self._names = None if names is None else tuple(names)
        self._steps, self._is_known = tuple(steps), False
        self._fill: Callable[..., Any] | None = None
        self.run: Callable[..., None] = self._launch

    def _launch(self, *args: Any, **named: Any) -> None:
        names = self._names
        if names is None:
            names = self._names = tuple(named)
        if self._is_known and self._fill is None:
            self._fill = _write_filler(names, self._steps)
        if self._fill is None:
            filled = _filled(self._steps, {**dict(zip(names, args, strict=False)), **named})
        else:
            filled = self._fill(*args, **named)
        launchers: list[Any] = []
        for step in filled:
            if isinstance(step, Clear):
                (step.tensor if step.tensor.numel() == step.size else step.tensor[: step.size]).zero_()
                continue
            bound, grid, given = step
            launch = path.launch(bound.kernel, grid, given, bound.constexprs, bound.options)
            launchers.append(None if launch is None or not self._is_known else launch.launcher(given))
        if launchers and None not in launchers:
            values = {**dict(zip(names, args, strict=False)), **named}
            self.run = _write_call(names, self._steps, values, launchers, self._launch)
        self._is_known = True


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    """The template with values in place of its marks."""
    if isinstance(template, tuple):
        return tuple.__new__(type(template), [_filled(part, values) for part in template])
    return template.of(values) if isinstance(template, _MARKS) else template


def _write_filler(names: tuple[str, ...], steps: Sequence[KernelLaunch | Clear]) -> Callable[..., Any]:
    """Writes the function that gives the steps with a call's values in place of marks."""
    writer = _Writer({})
    filled = writer.spell(tuple(steps))
    body = [*writer.lines(), f"return {filled}"]
    return written("fill", names, body, writer.scope)  # type: ignore[no-any-return]


def _write_call(
    names: tuple[str, ...],
    steps: Sequence[KernelLaunch | Clear],
    values: Mapping[str, Any],
    launchers: Sequence[tuple[gpu.Launcher, Encode | None]],
    fallback: Callable[..., None],
) -> Callable[..., None]:
    """Writes the function that launches with values that specialise like these.

    Args:
        names, steps: as for `PreparedCall`.
        values: of the first call.
        launchers: for each launch, what launches it with addresses in place of tensors and, if there is one,
            the function that encodes all of its descriptors.
        fallback: is called with values that specialise differently.
    """
    writer = _Writer(values)
    calls: list[str] = []
    remaining = iter(launchers)
    for step in steps:
        if isinstance(step, Clear):
            part = f"[:{step.size}]" if isinstance(step.tensor, Part) else ""
            calls.append(f"{writer.spell(step.tensor)}{part}.zero_()")
        else:
            calls += writer.launch(step, *next(remaining))
    given = ", ".join(names)
    body = [
        "try:",
        *(f"    _p_{name} = {name}.data_ptr()" for name in writer.pointers),
        f"    if {writer.conditions()}:",
        f"        return _fallback({given})",
        "except _OTHER_KINDS:",
        f"    return _fallback({given})",
        f"_stream = _current_stream({writer.device})",
        *writer.lines(),
        *calls,
    ]
    return written("call", names, body, writer.scope | {"_fallback": fallback})  # type: ignore[no-any-return]


class _Writer:
    """Spells the launches of one function, and notes what it must compare before them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.device = values, -1
        self.scope: dict[str, Any] = {
            "_executor": path.executor,
            "_current_device": gpu.current_device,
            "_current_stream": gpu.current_stream,
            "_listened": gpu.somebody_listens,
            "_OTHER_KINDS": gpu.OTHER_KINDS,
            "_new": tuple.__new__,
        }
        # In the order in which they came: names of tensors, of aligned ones, of ints; what else has changed.
        self.pointers: dict[str, None] = {}
        self.aligned: dict[str, None] = {}
        self.numbers: dict[str, None] = {}
        self.changed: dict[str, None] = {}
        self.locals: dict[str, str] = {}  # expressions that are computed once in a call
        self.constants: dict[int, str] = {}

    def conditions(self) -> str:
        """What holds if the values need other launches than those that were written."""
        found = [*self.changed, *(f"not _p_{name}" for name in self.pointers)]
        if self.aligned:
            found.append(f"({' | '.join(f'_p_{name}' for name in self.aligned)}) & 15")
        if self.numbers:  # numbers from 0 to 2**31 - 1 have no other bit set
            found.append(f"({' | '.join(self.numbers)}) & ~{_INT32_MAX}")
        found += ["_executor() is not None", f"_current_device() != {self.device}", "_listened()"]
        return " or ".join(found)

    def lines(self) -> list[str]:
        """The lines that compute the local variables."""
        return [f"{name} = {expression}" for expression, name in self.locals.items()]

    def constant(self, value: Any) -> str:
        """A name for a value that no call changes."""
        name = self.constants.setdefault(id(value), f"_c{len(self.constants)}")
        self.scope[name] = value
        return name

    def spell(self, value: Any) -> str:
        """The expression of a value, or of a tuple of values, as kernels are launched with."""
        if isinstance(value, tuple):
            parts = "".join(f"{self.spell(part)}, " for part in value)
            return f"({parts})" if type(value) is tuple else f"_new({self.constant(type(value))}, ({parts}))"
        if isinstance(value, Part):
            viewed = f"{self.spell(value.block)}.view({self.constant(value.dtype)})"
            viewed = self.locals.setdefault(viewed, f"_t{len(self.locals)}")
            part = f"{viewed}[{self.spell(value.offset)} // {value.dtype.itemsize}:]"
            return self.locals.setdefault(part, f"_t{len(self.locals)}")
        if isinstance(value, Described):
            return f"{self.constant(value.make)}({self.spell(value.part)}, {self.spell(value.size)})"
        if isinstance(value, Arg):
            return value.name
        return repr(value) if type(value) is int else self.constant(value)

    def launch(self, step: KernelLaunch, launcher: gpu.Launcher, encode: Encode | None) -> list[str]:
        """The lines that launch one kernel."""
        described: dict[str, tuple[Any, Any]] | None = None if encode is None else {}
        packed = ""
        for value, param in zip(step.args, step.bound.kernel.params, strict=False):
            specialised = not param.do_not_specialize, not param.do_not_specialize_on_alignment
            packed += f"{self.pack(value, specialised, described)}, "
        lines = [] if encode is None or not described else self.encoding(described, encode)
        grid = ", ".join(map(self.spell, step.grid))
        return [*lines, f"{self.constant(launcher)}({grid}, _stream, ({packed}))"]

    def pack(self, value: Any, specialised: tuple[bool, bool], described: dict[str, Any] | None) -> str:
        """The expression of an argument as a launcher takes it: addresses, encoded descriptors.

        Args:
            value: the argument.
            specialised: whether its kernel is compiled for what it is, and for its alignment.
            described: collects tensor descriptors with their values now; None if Triton encodes them.
        """
        if isinstance(value, tuple):
            return "(" + "".join(f"{self.pack(part, (True, True), described)}, " for part in value) + ")"
        if isinstance(value, Part):
            return self.address(value, specialised)
        now = value.of(self.values) if isinstance(value, _MARKS) else value
        if is_descriptor(now) and described is not None:
            name = f"_e{len(self.scope)}"
            self.scope[name] = None  # a name that no other descriptor has
            described[name] = value, now
            return f"*{name}"
        if isinstance(now, torch.Tensor):
            return self.address(value, specialised)
        if isinstance(value, Arg) and isinstance(now, int):
            if 0 <= now <= _INT32_MAX:
                self.numbers[value.name] = None
            else:
                self.changed[f"not -0x80000000 <= {value.name} <= 0x7fffffff"] = None
            if specialised[0]:
                self.changed[f"({value.name} == 1) is not {now == 1}"] = None
            if all(specialised):
                self.changed[f"({value.name} & 15 == 0) is not {now & 15 == 0}"] = None
        return self.spell(value)

    def address(self, value: Any, specialised: tuple[bool, bool] = (False, False)) -> str:
        """The address of a tensor or of a part of it; what a kernel is specialised on is noted."""
        if isinstance(value, Part):
            return f"{self.address(value.block, specialised)} + {self.spell(value.offset)}"
        tensor = value.of(self.values) if isinstance(value, Arg) else value
        self.device = tensor.get_device()
        if not isinstance(value, Arg):
            self.constant(value)  # keeps its memory
            return repr(value.data_ptr())
        name = value.name
        self.pointers[name] = None
        if all(specialised) and tensor.data_ptr() & 15:
            self.changed[f"not _p_{name} & 15"] = None
        elif all(specialised):
            self.aligned[name] = None
        if specialised[0] and torch.version.hip is not None:
            within = tensor.untyped_storage().nbytes() <= _INT32_MAX
            self.changed[f"({name}.untyped_storage().nbytes() <= {_INT32_MAX}) is not {within}"] = None
        return f"_p_{name}"

    def encoding(self, described: dict[str, tuple[Any, Any]], encode: Encode) -> list[str]:
        """The lines that encode those of a launch's descriptors that vary and are new."""
        lines, new, kept = [], [], []
        encoded = encode(*(now for _, now in described.values()))
        for (name, (value, now)), first in zip(described.items(), encoded, strict=True):
            self.scope[name] = first
            if not isinstance(value, _MARKS):
                continue
            known: Any = {} if isinstance(value, Described) else ByIdentity[Any]()
            known_name, key = self.constant(known), f"id({self.spell(value)})"
            if isinstance(value, Described):
                key = f"({self.address(value.part)}, {self.spell(value.size)})"
                kept.append(f"    if len({known_name}) >= {_MAX_ENCODED}: {known_name}.clear()")
                kept.append(f"    {known_name}[{key}] = {name}")
            else:
                known.keep(now, first)
                kept.append(f"    {known_name}.keep({self.spell(value)}, {name})")
            lines.append(f"{name} = {known_name}.get({key})")
            new.append(f"{name} is None")
        if new:
            found = "".join(
                f"{name if isinstance(value, _MARKS) else '_'}, " for name, (value, _) in described.items()
            )
            given = ", ".join(self.spell(value) for value, _ in described.values())
            lines += [f"if {' or '.join(new)}:", f"    {found} = {self.constant(encode)}({given})", *kept]
        return lines
