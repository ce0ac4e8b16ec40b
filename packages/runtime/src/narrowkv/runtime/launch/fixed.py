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

from narrowkv.runtime.launch import gpu, path
from narrowkv.runtime.launch.bound import BoundLaunch


class _Varies:
    """The kind of `VARIES`."""

    def __repr__(self) -> str:
        return "VARIES"


# Stands for an argument that each call gives anew: a tensor, a tensor descriptor, an int or a float.
VARIES = _Varies()


class FixedLaunch:
    """A bound launch with most of its arguments.

    Tensors that vary must have the dtypes and the device of those in the first call: the caller has compared
    that. Only their alignment is looked at here, on AMD the size of their storage, and of an int what the
    kernel is specialised on. A tensor that does not vary must stay where it is.

    Args:
        bound: the launch.
        args: runtime arguments in the kernel's order, as for a `BoundLaunch`, with `VARIES` for what each
            call gives anew.

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
        self.args = _write_filler(args)
        self._template = args
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
            self._fast = _write_launch(bound.kernel.params, self._template, values, launcher)


@lru_cache(maxsize=1024)
def _code(source: str) -> CodeType:
    return compile(source, f"{__file__} (written)", "exec")


def _write_filler(template: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Writes the function that puts values into the template."""
    scope: dict[str, Any] = {"new": tuple.__new__}
    names: list[str] = []

    def spelled(value: Any) -> str:
        if value is VARIES:
            names.append(f"v{len(names)}")
            return names[-1]
        name = f"c{len(scope)}"
        if isinstance(value, tuple):
            scope[name] = type(value)
            return f"new({name}, ({''.join(f'{spelled(part)}, ' for part in value)}))"
        scope[name] = value
        return name

    filled = "".join(f"{spelled(value)}, " for value in template)
    unpacking = f"    {', '.join(names)}, = values\n" if names else ""
    exec(_code(f"def args(values):\n{unpacking}    return ({filled})\n"), scope)
    return scope["args"]  # type: ignore[no-any-return]


def _write_launch(
    params: list[Any], template: tuple[Any, ...], values: tuple[Any, ...], launcher: gpu.Launcher
) -> Callable[[tuple[int, int, int], tuple[Any, ...]], bool]:
    """Writes the function that launches with values that specialise like these, and says whether it did."""
    storage_sizes = torch.version.hip is not None
    scope: dict[str, Any] = {
        "launch": launcher,
        "executor": path.executor,
        "current_device": gpu.current_device,
        "current_stream": gpu.current_stream,
        "listened": gpu.somebody_listens,
        "OTHER_KINDS": gpu.OTHER_KINDS,
    }
    left = iter(values)
    names: list[str] = []
    pointers: list[str] = []
    aligned: list[str] = []
    changed: list[str] = []
    device = -1

    def packed(value: Any, specialised: bool, by_alignment: bool) -> str:
        nonlocal device
        if isinstance(value, tuple):
            return "(" + "".join(f"{packed(part, True, True)}, " for part in value) + ")"
        if value is not VARIES:
            name = f"c{len(scope)}"
            if isinstance(value, torch.Tensor):
                scope[f"{name}_memory"], value = value, value.data_ptr()
            scope[name] = value
            return name
        name, now = f"v{len(names)}", next(left)
        names.append(name)
        if not isinstance(now, torch.Tensor):
            if isinstance(now, int):
                changed.append(f"not -0x80000000 <= {name} <= 0x7fffffff")
                if specialised:
                    changed.append(f"({name} == 1) is not {now == 1}")
                    if by_alignment:
                        changed.append(f"({name} & 15 == 0) is not {now & 15 == 0}")
            return name
        device = now.get_device()
        pointer = f"p_{name}"
        pointers.append(pointer)
        if specialised and by_alignment:
            if now.data_ptr() & 15:
                changed.append(f"not {pointer} & 15")
            else:
                aligned.append(pointer)
        if specialised and storage_sizes:
            within = now.untyped_storage().nbytes() <= 0x7FFFFFFF
            changed.append(f"({name}.untyped_storage().nbytes() <= 0x7fffffff) is not {within}")
        return pointer

    packing = "".join(
        f"{packed(value, not param.do_not_specialize, not param.do_not_specialize_on_alignment)}, "
        for value, param in zip(template, params, strict=False)
    )
    changed += [f"not {pointer}" for pointer in pointers]
    if aligned:
        changed.append(f"({' | '.join(aligned)}) & 15")
    changed += ["executor() is not None", f"current_device() != {device}", "listened()"]
    lines = [
        "def fast(grid, values):",
        "    try:",
        f"        {', '.join(names)}, = values",
        *(f"        {pointer} = {pointer.removeprefix('p_')}.data_ptr()" for pointer in pointers),
        f"        if {' or '.join(changed)}: return False",
        "    except OTHER_KINDS: return False",
        "    x, y, z = grid",
        f"    launch(x, y, z, current_stream({device}), ({packing}))",
        "    return True",
    ]
    exec(_code("\n".join(lines) + "\n"), scope)
    return scope["fast"]  # type: ignore[no-any-return]
