"""The launches of an operation's call, prepared once: of later calls only what differs is looked at.

The call's values are known by name. `PreparedCall` writes one Python function of them that launches all
kernels. The function takes them by position, and those that several calls share from dictionaries, in their
order. The caller has compared the metadata of the tensors: the function reads addresses, and what Triton
specialises a kernel on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from narrowkv.runtime.launch import gpu, path
from narrowkv.runtime.launch.descriptors import Encode, is_descriptor
from narrowkv.runtime.launch.path import BoundLaunch
from narrowkv.runtime.launch.written import Specialisation, written

_MAX_ENCODED = 256  # descriptors of blocks at different addresses


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
    return {
        f"{name}_{field}": value
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
    launch = launch_of(bound, grid, arguments)
    if len(launch.args) != len(arguments):
        names = [name for name in bound.kernel.arg_names if name not in bound.constexprs]
        raise TypeError(f"{bound.kernel.__name__} takes {names}, got {list(arguments)}")
    return launch


def launch_of(bound: BoundLaunch, grid: tuple[Any, ...], arguments: Mapping[str, Any]) -> KernelLaunch:
    """`launch_by_name`, with the kernel's arguments taken from a dictionary that several kernels share.

    Raises:
        TypeError: the dictionary lacks one.
    """
    names = [name for name in bound.kernel.arg_names if name not in bound.constexprs]
    if not arguments.keys() >= set(names):
        raise TypeError(f"{bound.kernel.__name__} takes {names}, got {list(arguments)}")
    x, y, z = (*grid, 1, 1)[:3]
    return KernelLaunch(bound, (x, y, z), tuple(arguments[name] for name in names))


class PreparedCall:
    """The launches of a call, as a function of the values that each call gives.

    Tensors among the values must have the dtypes and the device of those in the first call: the caller has
    compared that. A tensor that is no mark must stay where it is. A tensor descriptor is encoded once as long
    as it lives. The function is written in the second call: most sizes of prefills come once.

    Args:
        names: of the values that `run` is given by position.
        steps: launches and clears, in order.

    Attributes:
        run: takes the values of `names`, and dictionaries of all others by name, which have the same names in
            the same order in every call; launches, interprets or compiles the kernels. Nothing happens for an
            empty grid.

    Example:
        >>> x = Arg("x")
        >>> call = PreparedCall(("x",), [launch_by_name(bound, (8,), x_ptr=x, size=Arg("n"))]
        ... )                                                          # doctest: +SKIP
        >>> call.run(torch.ones(5), {"n": 5})                          # doctest: +SKIP
    """

    __slots__ = ("_fill", "_is_known", "_names", "_shared", "_steps", "run")

    def __init__(self, names: Sequence[str], steps: Sequence[KernelLaunch | Clear]) -> None:
        self._names = tuple(names)
        self._shared: Names = ()
        self._steps, self._is_known = tuple(steps), False
        self._fill: Callable[..., Any] | None = None
        self.run: Callable[..., None] = self._launch

    def _launch(self, *args: Any) -> None:
        groups: tuple[Mapping[str, Any], ...] = args[len(self._names) :]
        shared = tuple(map(tuple, groups))
        if not self._is_known:
            self._shared = shared
        elif shared != self._shared:
            raise TypeError(f"a prepared call takes values named {self._shared}, got {shared}")
        elif self._fill is None:
            self._fill = _write_filler(self._names, shared, self._steps)
        values = dict(zip(self._names, args, strict=False))
        for group in groups:
            values |= group
        launchers: list[Any] = []
        for step in _filled(self._steps, values) if self._fill is None else self._fill(*args):
            if isinstance(step, Clear):
                (step.tensor if step.tensor.numel() == step.size else step.tensor[: step.size]).zero_()
                continue
            bound, grid, given = step
            launch = path.launch(bound.kernel, grid, given, bound.constexprs, bound.options)
            launchers.append(None if launch is None or not self._is_known else launch.launcher(given))
        if launchers and None not in launchers:
            names = self._names, shared
            self.run = _write_call(*names, self._steps, values, launchers, self._launch)
        self._is_known = True


Names = tuple[tuple[str, ...], ...]
"""Names of the values in each dictionary that a call is given."""


def _parameters(names: Sequence[str], shared: Names) -> tuple[list[str], list[str]]:
    """Parameters of a call's function, and the lines that name the values in dictionaries."""
    groups = [f"_g{index}" for index in range(len(shared))]
    lines = [
        f"{', '.join(each)}, = {group}.values()" for group, each in zip(groups, shared, strict=True) if each
    ]
    return [*names, *groups], lines


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    """The template with values in place of its marks."""
    if isinstance(template, tuple):
        return tuple.__new__(type(template), [_filled(part, values) for part in template])
    return template.of(values) if isinstance(template, _MARKS) else template


def _write_filler(names: Sequence[str], shared: Names, steps: tuple[Any, ...]) -> Callable[..., Any]:
    """Writes the function that gives the steps with a call's values in place of marks."""
    writer = _Writer({})
    filled = writer.spell(steps)
    parameters, unpacking = _parameters(names, shared)
    body = [*unpacking, *writer.lines, f"return {filled}"]
    return written("fill", parameters, body, writer.scope)  # type: ignore[no-any-return]


def _write_call(
    names: Sequence[str],
    shared: Names,
    steps: Sequence[KernelLaunch | Clear],
    values: Mapping[str, Any],
    launchers: Sequence[gpu.Relaunch],
    fallback: Callable[..., None],
) -> Callable[..., None]:
    """Writes the function that launches with values that specialise like these.

    Args:
        names, steps: as for `PreparedCall`; shared: names of the values in dictionaries.
        values: of the first call, by name.
        launchers: of each launch; they take addresses for tensors.
        fallback: is called with values that specialise differently.
    """
    writer, remaining = _Writer(values), iter(launchers)
    for step in steps:
        if isinstance(step, KernelLaunch):
            writer.launch(step, *next(remaining))
        else:
            writer.lines.append(f"{writer.spell(step.tensor)}[:{step.size}].zero_()")
    parameters, unpacking = _parameters(names, shared)
    specialised, leave = writer.specialised, f"return _fallback({', '.join(parameters)})"
    scope, key, addresses = writer.scope, specialised.key(), specialised.addresses
    scope |= {
        "_executor": path.executor, "_current_device": gpu.current_device, "_OTHER_KINDS": gpu.OTHER_KINDS,
        "_current_stream": gpu.current_stream, "_listened": gpu.somebody_listens, "_fallback": fallback,
        "_key": written("key", tuple(values), [*addresses, f"return {key}"], {})(*values.values()),
    }  # fmt: skip
    changed = [
        f"{key} != _key", *specialised.missing,
        "_executor() is not None", f"_current_device() != {writer.device}", "_listened()",
    ]  # fmt: skip
    read = [*unpacking, *addresses, f"if {' or '.join(changed)}: {leave}"]
    body = [
        "try:", *(f"    {line}" for line in read), f"except _OTHER_KINDS: {leave}",
        f"_stream = _current_stream({writer.device})", *writer.lines,
    ]  # fmt: skip
    return written("call", parameters, body, scope)  # type: ignore[no-any-return]


class _Writer:
    """Writes the lines of one function of a call's values, and what their specialisation depends on."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.device = values, -1
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {"_new": tuple.__new__}
        self.specialised = Specialisation(storage_sizes=torch.version.hip is not None)
        self._names: dict[Any, str] = {}  # of constants by identity, of local variables by expression

    def constant(self, value: Any) -> str:
        """A name for a value that no call changes."""
        name = self._names.setdefault(id(value), f"_c{len(self._names)}")
        self.scope[name] = value
        return name

    def local(self, expression: str) -> str:
        """A name for the value of an expression, which is computed once in a call."""
        if expression not in self._names:
            self._names[expression] = f"_t{len(self._names)}"
            self.lines.append(f"{self._names[expression]} = {expression}")
        return self._names[expression]

    def spell(self, value: Any) -> str:
        """The expression of a value, or of a tuple of values, as `_filled` gives them."""
        if isinstance(value, tuple):
            parts = "".join(f"{self.spell(part)}, " for part in value)
            return f"({parts})" if type(value) is tuple else f"_new({self.constant(type(value))}, ({parts}))"
        if isinstance(value, Part):
            block = self.local(f"{self.spell(value.block)}.view({self.constant(value.dtype)})")
            return self.local(f"{block}[{self.spell(value.offset)} // {value.dtype.itemsize}:]")
        if isinstance(value, Described):
            return f"{self.constant(value.make)}({self.spell(value.part)}, {self.spell(value.size)})"
        if isinstance(value, Arg):
            return value.name
        return repr(value) if type(value) is int else self.constant(value)

    def launch(
        self, step: KernelLaunch, launcher: gpu.Launcher, encode: Encode | None, types: tuple[Any, ...] | None
    ) -> None:
        """Writes the launch of one kernel, given its `Relaunch`."""
        packed = keys = ""
        described: list[Any] = []
        types = types or (None,) * len(step.args)
        for value, kind, param in zip(step.args, types, step.bound.kernel.params, strict=False):
            by_value, by_alignment = not param.do_not_specialize, not param.do_not_specialize_on_alignment
            if encode is None or not self.is_described(value):
                packed += self.packed(value, kind, by_value, by_alignment)
                continue
            packed += f"*_encoded[{len(described)}], "
            described.append(value)
            if isinstance(value, Described):
                keys += f"{self.pack(value.part, False)}, {self.spell(value.size)}, "
            elif isinstance(value, Arg):
                keys += f"{value.name}.base.data_ptr(), *{value.name}.shape, *{value.name}.strides, "
        if described and encode is not None:
            known, templates = self.constant({}), self.constant(tuple(described))
            self.lines += [
                f"_places = ({keys})",
                f"_encoded = {known}.get(_places)",
                "if _encoded is None:",
                f"    if len({known}) >= {_MAX_ENCODED}: {known}.clear()",
                f"    _encoded = {self.constant(encode)}(*{self.constant(_filled)}({templates}, locals()))",
                f"    {known}[_places] = _encoded",
            ]
        grid = ", ".join(map(self.spell, step.grid))
        self.lines.append(f"{self.constant(launcher)}({grid}, _stream, ({packed}))")

    def is_described(self, value: Any) -> bool:
        """Whether an argument is a tensor descriptor in the first call."""
        now = value.of(self.values) if isinstance(value, Arg) else value
        return isinstance(now, Described) or is_descriptor(now)

    def packed(self, value: Any, kind: Any, by_value: bool = True, by_alignment: bool = True) -> str:
        """An argument as a launcher takes it, of a type of the compiled kernel: flat, without constants.

        Where `kind` is None the launcher is Triton's own, which takes the argument whole.
        """
        if kind is not None and isinstance(value, tuple):
            return "".join(self.packed(part, each) for part, each in zip(value, kind, strict=True))
        whole = self.pack(value, by_value, by_alignment)
        return "" if kind == "constexpr" else f"{whole}, "

    def pack(self, value: Any, by_value: bool = True, by_alignment: bool = True) -> str:
        """The expression of an argument as a launcher takes it; see `Specialisation.pack`."""
        if isinstance(value, tuple):
            return "(" + "".join(f"{self.pack(part)}, " for part in value) + ")"
        if isinstance(value, Part):
            return f"{self.pack(value.block, by_value, by_alignment)} + {self.spell(value.offset)}"
        now = value.of(self.values) if isinstance(value, Arg) else value
        if isinstance(now, torch.Tensor):
            self.device = now.get_device()
        if isinstance(value, Arg):
            return self.specialised.pack(value.name, now, by_value, by_alignment)
        return repr(now.data_ptr()) if isinstance(now, torch.Tensor) else self.spell(value)
