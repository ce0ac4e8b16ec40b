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
from narrowkv.runtime.launch.bound import BoundLaunch
from narrowkv.runtime.launch.descriptors import Encode, is_descriptor
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
        names: of the values.
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

    def __init__(self, names: Sequence[str], steps: Sequence[KernelLaunch | Clear]) -> None:
        self._names, self._steps, self._is_known = tuple(names), tuple(steps), False
        self._fill: Callable[..., Any] | None = None
        self.run: Callable[..., None] = self._launch

    def _launch(self, *args: Any, **named: Any) -> None:
        if self._is_known and self._fill is None:
            self._fill = _write_filler(self._names, self._steps)
        if self._fill is None:
            filled = _filled(self._steps, self._values(args, named))
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
            values = self._values(args, named)
            self.run = _write_call(self._names, self._steps, values, launchers, self._launch)
        self._is_known = True

    def _values(self, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self._names, args, strict=False)), **named}


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    """The template with values in place of its marks."""
    if isinstance(template, tuple):
        return tuple.__new__(type(template), [_filled(part, values) for part in template])
    return template.of(values) if isinstance(template, _MARKS) else template


def _write_filler(names: tuple[str, ...], steps: Sequence[KernelLaunch | Clear]) -> Callable[..., Any]:
    """Writes the function that gives the steps with a call's values in place of marks."""
    writer = _Writer({})
    filled = writer.filled(tuple(steps))
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
            calls.append(f"{writer.tensor(step.tensor)}{part}.zero_()")
        else:
            calls += writer.launch(step, *next(remaining))
    given = ", ".join(names)
    body = [
        "try:",
        *(f"    _p_{name} = {name}.data_ptr()" for name in writer.pointers),
        f"    if {' or '.join(writer.conditions())}:",
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
        self.values = values
        self.scope: dict[str, Any] = {
            "_executor": path.executor,
            "_current_device": gpu.current_device,
            "_current_stream": gpu.current_stream,
            "_listened": gpu.somebody_listens,
            "_OTHER_KINDS": gpu.OTHER_KINDS,
            "_new": tuple.__new__,
        }
        self.pointers: dict[str, None] = {}
        self.device = -1
        self._aligned: dict[str, None] = {}
        self._unaligned: dict[str, None] = {}
        self._numbers: dict[str, None] = {}
        self._changed: dict[str, None] = {}
        self._locals: dict[str, str] = {}
        self._makers: dict[str, str] = {}  # expressions of descriptors of parts

    def conditions(self) -> list[str]:
        """What holds if the values need other launches than those that were written."""
        found = [*self._changed]
        found += [f"not _p_{name}" for name in self.pointers]
        found += [f"not _p_{name} & 15" for name in self._unaligned]
        if self._aligned:
            found.append(f"({' | '.join(f'_p_{name}' for name in self._aligned)}) & 15")
        if self._numbers:
            # Numbers from 0 to 2**31 - 1 have no other bit set.
            found.append(f"({' | '.join(self._numbers)}) & ~{_INT32_MAX}")
        return [*found, "_executor() is not None", f"_current_device() != {self.device}", "_listened()"]

    def constant(self, value: Any) -> str:
        """A name for a value that no call changes."""
        name = f"_c{len(self.scope)}"
        self.scope[name] = value
        return name

    def number(self, value: Any) -> str:
        """An extent of a grid or an offset."""
        return value.name if isinstance(value, Arg) else repr(value)

    def tensor(self, value: Any) -> str:
        """The expression of a tensor itself."""
        if not isinstance(value, Part):
            return value.name if isinstance(value, Arg) else self.constant(value)
        block, offset, size = self.tensor(value.block), self.number(value.offset), value.dtype.itemsize
        viewed = self._local(f"{block}.view({self._dtype(value.dtype)})")
        return self._local(f"{viewed}[{offset} // {size}:]")

    def _dtype(self, dtype: torch.dtype) -> str:
        name = f"_{str(dtype).removeprefix('torch.')}"
        self.scope[name] = dtype
        return name

    def _local(self, expression: str) -> str:
        """A local variable that holds an expression, which is computed once in a call."""
        if expression not in self._locals:
            self._locals[expression] = f"_t{len(self._locals)}"
        return self._locals[expression]

    def lines(self) -> list[str]:
        """The lines that compute the local variables."""
        return [f"{name} = {expression}" for expression, name in self._locals.items()]

    def filled(self, value: Any) -> str:
        """The expression of a value, or of a tuple of values, as kernels are launched with."""
        if isinstance(value, tuple):
            parts = "".join(f"{self.filled(part)}, " for part in value)
            return f"({parts})" if type(value) is tuple else f"_new({self.constant(type(value))}, ({parts}))"
        if isinstance(value, Described):
            return f"{self.constant(value.make)}({self.tensor(value.part)}, {self.number(value.size)})"
        return self.tensor(value)

    def launch(self, step: KernelLaunch, launcher: gpu.Launcher, encode: Encode | None) -> list[str]:
        """The lines that launch one kernel."""
        described: dict[str, tuple[Any, str | None]] = {}  # a descriptor of these values, and its key
        packed = ""
        for value, param in zip(step.args, step.bound.kernel.params, strict=False):
            specialised, by_alignment = not param.do_not_specialize, not param.do_not_specialize_on_alignment
            packed += f"{self._packed(value, specialised, by_alignment, described, encode is not None)}, "
        lines = [] if encode is None else self._encoding(described, encode)
        grid = ", ".join(map(self.number, step.grid))
        return [*lines, f"{self.constant(launcher)}({grid}, _stream, ({packed}))"]

    def _packed(
        self, value: Any, specialised: bool, by_alignment: bool, described: dict[str, Any], encodes: bool
    ) -> str:
        """The expression of an argument as a launcher takes it: addresses, encoded descriptors."""
        if isinstance(value, tuple):
            inner = [self._packed(part, True, True, described, encodes) for part in value]
            return "(" + "".join(f"{part}, " for part in inner) + ")"
        if isinstance(value, Described):
            part = value.part
            address = self._address(part, part.block.of(self.values), specialised=False, by_alignment=False)
            name, make = f"_d{len(self.scope)}", self.constant(value.make)
            size = self.number(value.size)
            made = f"{make}({self.tensor(part)}, {size})"
            if not encodes:
                return made
            described[name] = value.of(self.values), f"({address}, {size})"
            self._makers[name] = made
            return f"*_e{name}"
        if isinstance(value, Part):
            return self._address(value, value.block.of(self.values), specialised, by_alignment)
        now = value.of(self.values) if isinstance(value, Arg) else value
        if is_descriptor(now) and encodes:
            name = value.name if isinstance(value, Arg) else self.constant(value)
            described[name] = now, "" if isinstance(value, Arg) else None
            return f"*_e{name}"
        if isinstance(value, Arg):
            if isinstance(now, torch.Tensor):
                return self._address(value, now, specialised, by_alignment)
            if isinstance(now, int):
                self._compare_int(value.name, now, specialised, by_alignment)
            return value.name
        if isinstance(value, torch.Tensor):
            self.device = value.get_device()
            self.constant(value)  # keeps its memory
            return self.constant(value.data_ptr())
        return self.constant(value)

    def _address(
        self, mark: Any, tensor: torch.Tensor, specialised: bool = True, by_alignment: bool = True
    ) -> str:
        """The address of a call's tensor or of a part of it; what a kernel is specialised on is noted."""
        if isinstance(mark, Part):
            base = self._address(mark.block, tensor, specialised, by_alignment)
            return f"{base} + {self.number(mark.offset)}"
        name = mark.name
        self.device = tensor.get_device()
        self.pointers[name] = None
        if specialised and by_alignment:
            (self._unaligned if tensor.data_ptr() & 15 else self._aligned)[name] = None
        if specialised and torch.version.hip is not None:
            within = tensor.untyped_storage().nbytes() <= _INT32_MAX
            self._changed[f"({name}.untyped_storage().nbytes() <= {_INT32_MAX}) is not {within}"] = None
        return f"_p_{name}"

    def _compare_int(self, name: str, now: int, specialised: bool, by_alignment: bool) -> None:
        if 0 <= now <= _INT32_MAX:
            self._numbers[name] = None
        else:
            self._changed[f"not -0x80000000 <= {name} <= 0x7fffffff"] = None
        if specialised:
            self._changed[f"({name} == 1) is not {now == 1}"] = None
            if by_alignment:
                self._changed[f"({name} & 15 == 0) is not {now & 15 == 0}"] = None

    def _encoding(self, described: dict[str, tuple[Any, str | None]], encode: Encode) -> list[str]:
        """The lines that encode those of a launch's descriptors that vary and are new.

        A descriptor's key is None if it does not vary, "" if it is found by identity, else an expression.
        """
        lines, varying, kept = [], [], []
        encoded = encode(*(descriptor for descriptor, _ in described.values()))
        for (name, (first, key)), now in zip(described.items(), encoded, strict=True):
            if key is None:
                self.scope[f"_e{name}"] = now
                continue
            varying.append(name)
            known: Any = {} if key else ByIdentity[Any]()
            known_name = self.constant(known)
            if key:
                lines.append(f"_e{name} = {known_name}.get({key})")
                kept.append(f"    if len({known_name}) >= {_MAX_ENCODED}: {known_name}.clear()")
                kept.append(f"    {known_name}[{key}] = _e{name}")
            else:
                known.keep(first, now)
                lines.append(f"_e{name} = {known_name}.get(id({name}))")
                kept.append(f"    {known_name}.keep({name}, _e{name})")
        if varying:
            given = ", ".join(self._makers.get(name, name) for name in described)
            found = "".join(f"{f'_e{name}' if name in varying else '_'}, " for name in described)
            lines.append(f"if {' or '.join(f'_e{name} is None' for name in varying)}:")
            lines += [f"    {found} = {self.constant(encode)}({given})", *kept]
        return lines
