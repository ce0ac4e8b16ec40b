"""A launch of which a call changes only some tensors and numbers: what its calls share.

A bound launch still looks at every argument of a call. Where the caller has compared the metadata of its
tensors already, only addresses are left to look at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from narrowkv.runtime.identity import ByIdentity
from narrowkv.runtime.launch import gpu, path
from narrowkv.runtime.launch.bound import BoundLaunch
from narrowkv.runtime.launch.descriptors import Encode, is_descriptor

_MAX_ENCODED = 256  # descriptors of blocks at different addresses


class Varies:
    """Stands for an argument that each call gives: a tensor, a tensor descriptor, an int or a float.

    Attributes:
        index: which value of a call it is; None for the one behind the last value that was named.
    """

    __slots__ = ("index",)

    def __init__(self, index: int | None = None) -> None:
        self.index = index

    def __repr__(self) -> str:
        return "VARIES" if self.index is None else f"Varies({self.index})"


VARIES = Varies()


class Part:
    """Stands for a tensor within a block of memory that each call gives.

    Attributes:
        block: index of the block, a contiguous tensor of any dtype.
        offset: index of the number of bytes before the part, a multiple of 16.
        dtype: of the part.
    """

    __slots__ = ("block", "dtype", "offset")

    def __init__(self, block: int, offset: int, dtype: torch.dtype) -> None:
        self.block, self.offset, self.dtype = block, offset, dtype

    def of(self, values: tuple[Any, ...]) -> torch.Tensor:
        """The block from the part's beginning."""
        block: torch.Tensor = values[self.block]
        return block.view(torch.uint8)[values[self.offset] :].view(self.dtype)


class Described:
    """Stands for a tensor descriptor of a part.

    Attributes:
        part: the part; size: index of the number that the descriptor depends on besides.
        make: a function of the part and the number.
    """

    __slots__ = ("make", "part", "size")

    def __init__(self, part: Part, size: int, make: Callable[[torch.Tensor, int], Any]) -> None:
        self.part, self.size, self.make = part, size, make

    def of(self, values: tuple[Any, ...]) -> Any:
        """The descriptor."""
        return self.make(self.part.of(values), values[self.size])


class FixedLaunch:
    """A bound launch with most of its arguments.

    Tensors that vary must have the dtypes and the device of those in the first call: the caller has compared
    that. Only their alignment is looked at here, on AMD the size of their storage, and of an int what the
    kernel is specialised on. A tensor that does not vary must stay where it is. A tensor descriptor is
    encoded once as long as it lives.

    Args:
        bound: the launch.
        args: runtime arguments in the kernel's order, as for a `BoundLaunch`, with `VARIES` for what each
            call gives, or `Varies(i)` for the value at index i, `Part` and `Described` for what lies in such
            a value. Values that no argument names are ignored, so that several launches can share them.

    Attributes:
        bound: the launch.
        args: a function that gives the kernel's arguments with the values of a call.

    Example:
        >>> attend = FixedLaunch(bound, (Rows(VARIES, 128), VARIES))   # doctest: +SKIP
        >>> attend((batch, heads, 1), (q, length))                                  # doctest: +SKIP
    """

    __slots__ = ("_fast", "_template", "args", "bound")

    def __init__(self, bound: BoundLaunch, args: tuple[Any, ...]) -> None:
        self.bound = bound
        self._template = _numbered(args, [0])
        self.args = _write_filler(self._template)
        self._fast: Callable[[tuple[int, int, int], tuple[Any, ...]], bool] | None = None

    def __call__(self, grid: tuple[int, int, int], values: tuple[Any, ...]) -> None:
        """Launches, interprets or compiles the kernel; nothing happens for an empty grid.

        Args:
            grid: three extents.
            values: what varies, in the order of the marks.
        """
        fast = self._fast
        if fast is None or not fast(grid, values):
            self._launch(grid, values)

    def _launch(self, grid: tuple[int, int, int], values: tuple[Any, ...]) -> None:
        bound, args = self.bound, self.args(values)
        launch = path.launch(bound.kernel, grid, args, bound.constexprs, bound.options)
        launcher = None if launch is None else launch.launcher(args)
        if launcher is not None:
            self._fast = _write_launch(bound.kernel.params, self._template, values, *launcher)


@lru_cache(maxsize=1024)
def _code(source: str) -> CodeType:
    return compile(source, f"{__file__} (written)", "exec")


def _numbered(template: Any, following: list[int]) -> Any:
    """The template with an index in each mark; `following[0]` is the index of the next `VARIES`."""
    if isinstance(template, tuple):
        return tuple.__new__(type(template), [_numbered(part, following) for part in template])
    if not isinstance(template, Varies):
        return template
    index = following[0] if template.index is None else template.index
    following[0] = index + 1
    return Varies(index)


def _write_filler(template: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Writes the function that puts values into the template."""
    scope: dict[str, Any] = {"new": tuple.__new__}

    def spelled(value: Any) -> str:
        if isinstance(value, Varies):
            return f"values[{value.index}]"
        name = f"c{len(scope)}"
        if isinstance(value, Part | Described):
            scope[name] = value.of
            return f"{name}(values)"
        if isinstance(value, tuple):
            scope[name] = type(value)
            return f"new({name}, ({''.join(f'{spelled(part)}, ' for part in value)}))"
        scope[name] = value
        return name

    filled = "".join(f"{spelled(value)}, " for value in template)
    exec(_code(f"def args(values):\n    return ({filled})\n"), scope)
    return scope["args"]  # type: ignore[no-any-return]


def _write_launch(
    params: list[Any],
    template: tuple[Any, ...],
    values: tuple[Any, ...],
    launcher: gpu.Launcher,
    encode: Encode | None,
) -> Callable[[tuple[int, int, int], tuple[Any, ...]], bool]:
    """Writes the function that launches with values that specialise like these, and says whether it did.

    Args:
        params: the kernel's parameters, `JITFunction.params`.
        template: the arguments, with marks that have an index.
        values: of the first call.
        launcher: launches with addresses in place of tensors and, if `encode` is given, encoded descriptors.
        encode: encodes all descriptors of a launch.
    """
    storage_sizes = torch.version.hip is not None
    scope: dict[str, Any] = {
        "launch": launcher,
        "encode": encode,
        "executor": path.executor,
        "current_device": gpu.current_device,
        "current_stream": gpu.current_stream,
        "listened": gpu.somebody_listens,
        "OTHER_KINDS": gpu.OTHER_KINDS,
    }
    pointers: list[str] = []
    aligned: list[str] = []
    unaligned: list[str] = []
    numbers: list[str] = []
    changed: list[str] = []
    descriptors: dict[str, Any] = {}
    keys: dict[str, str] = {}
    device = -1

    def constant(value: Any) -> str:
        name = f"c{len(scope)}"
        scope[name] = value
        return name

    def passed(name: str, value: Any) -> str:
        if encode is None or not is_descriptor(value):
            return name
        descriptors[name] = value
        return f"*e_{name}"

    def packed(value: Any, specialised: bool, by_alignment: bool) -> str:
        nonlocal device
        if isinstance(value, tuple):
            return "(" + "".join(f"{packed(part, True, True)}, " for part in value) + ")"
        if isinstance(value, Described):
            part, name = value.part, f"d{len(scope)}"
            pointers.append(f"v{part.block}")
            scope[f"make_{name}"] = value.of
            keys[name] = f"p_v{part.block} + v{part.offset}, v{value.size}"
            return passed(name, value.of(values)) if encode is not None else f"make_{name}(values)"
        if isinstance(value, Part):
            return f"{packed(Varies(value.block), specialised, by_alignment)} + v{value.offset}"
        if not isinstance(value, Varies):
            if isinstance(value, torch.Tensor):
                device = value.get_device()
                constant(value)  # keeps its memory
                return constant(value.data_ptr())
            return passed(constant(value), value)
        assert value.index is not None
        name, now = f"v{value.index}", values[value.index]
        if isinstance(now, torch.Tensor):
            device = now.get_device()
            pointers.append(name)
            if specialised and by_alignment:
                (unaligned if now.data_ptr() & 15 else aligned).append(name)
            if specialised and storage_sizes:
                within = now.untyped_storage().nbytes() <= 0x7FFFFFFF
                changed.append(f"({name}.untyped_storage().nbytes() <= 0x7fffffff) is not {within}")
            return f"p_{name}"
        if isinstance(now, int):
            if 0 <= now <= 0x7FFFFFFF:
                numbers.append(name)
            else:
                changed.append(f"not -0x80000000 <= {name} <= 0x7fffffff")
            if specialised:
                changed.append(f"({name} == 1) is not {now == 1}")
                if by_alignment:
                    changed.append(f"({name} & 15 == 0) is not {now & 15 == 0}")
        return passed(name, now)

    packing = "".join(
        f"{packed(value, not param.do_not_specialize, not param.do_not_specialize_on_alignment)}, "
        for value, param in zip(template, params, strict=False)
    )
    changed = list(dict.fromkeys(changed))
    changed += [f"not p_{name}" for name in dict.fromkeys(pointers)]
    changed += [f"not p_{name} & 15" for name in dict.fromkeys(unaligned)]
    if aligned:
        changed.append(f"({' | '.join(f'p_{name}' for name in dict.fromkeys(aligned))}) & 15")
    if numbers:
        # Numbers from 0 to 2**31 - 1 have no other bit set.
        changed.append(f"({' | '.join(numbers)}) & ~0x7fffffff")
    changed += ["executor() is not None", f"current_device() != {device}", "listened()"]
    lines = [
        "def fast(grid, values):",
        "    try:",
        f"        {''.join(f'v{index}, ' for index in range(len(values)))} = values"
        if values
        else "        pass",
        *(f"        p_{name} = {name}.data_ptr()" for name in dict.fromkeys(pointers)),
        f"        if {' or '.join(changed)}: return False",
        "    except OTHER_KINDS: return False",
    ]
    if encode is not None:
        # Those that vary are encoded when they are new; the others here.
        varying = [name for name in descriptors if not name.startswith("c")]
        for (name, first), encoded in zip(descriptors.items(), encode(*descriptors.values()), strict=True):
            if name in keys:
                scope[f"known_{name}"] = {}
                lines.append(f"    e_{name} = known_{name}.get(({keys[name]}))")
            elif name in varying:
                scope[f"known_{name}"] = known = ByIdentity[Any]()
                known.keep(first, encoded)
                lines.append(f"    e_{name} = known_{name}.get(id({name}))")
            else:
                scope[f"e_{name}"] = encoded
        if varying:
            given = ", ".join(f"make_{name}(values)" if name in keys else name for name in descriptors)
            found = "".join(f"{f'e_{name}' if name in varying else '_'}, " for name in descriptors)
            lines.append(f"    if {' or '.join(f'e_{name} is None' for name in varying)}:")
            lines.append(f"        {found} = encode({given})")
            for name in varying:
                if name in keys:
                    lines.append(f"        if len(known_{name}) >= {_MAX_ENCODED}: known_{name}.clear()")
                    lines.append(f"        known_{name}[{keys[name]}] = e_{name}")
                else:
                    lines.append(f"        known_{name}.keep({name}, e_{name})")
    lines += [
        "    x, y, z = grid",
        f"    launch(x, y, z, current_stream({device}), ({packing}))",
        "    return True",
    ]
    exec(_code("\n".join(lines) + "\n"), scope)
    return scope["fast"]  # type: ignore[no-any-return]
