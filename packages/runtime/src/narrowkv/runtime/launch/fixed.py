"""A launch whose values are given by position, for operations that do not prepare whole calls yet."""

from __future__ import annotations

from typing import Any

from narrowkv.runtime.launch.bound import BoundLaunch
from narrowkv.runtime.launch.prepared import Arg, Described, KernelLaunch, Part, PreparedCall

_GRID = ("x", "y", "z")


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


class FixedLaunch:
    """A bound launch with most of its arguments; see `PreparedCall`, which takes values by name.

    Args:
        bound: the launch.
        args: runtime arguments in the kernel's order, as for a `BoundLaunch`, with `VARIES` for what each
            call gives, or `Varies(i)` for the value at index i, `Part` and `Described` with indices for what
            lies in such a value. Values that no argument names are ignored, so that several launches can
            share them.

    Attributes:
        bound: the launch.
    """

    __slots__ = ("_args", "_call", "bound")

    def __init__(self, bound: BoundLaunch, args: tuple[Any, ...]) -> None:
        self.bound = bound
        self._args = _named(args, [0])
        self._call: PreparedCall | None = None

    def __call__(self, grid: tuple[int, int, int], values: tuple[Any, ...]) -> None:
        """Launches, interprets or compiles the kernel; nothing happens for an empty grid.

        Args:
            grid: three extents.
            values: what varies, in the order of the marks.
        """
        call = self._call
        if call is None:
            names = (*_GRID, *(f"v{index}" for index in range(len(values))))
            x, y, z = map(Arg, _GRID)
            call = self._call = PreparedCall(names, [KernelLaunch(self.bound, (x, y, z), self._args)])
        call.run(*grid, *values)


def _named(template: Any, following: list[int]) -> Any:
    """The template with a name in each mark; `following[0]` is the index of the next `VARIES`."""
    if isinstance(template, tuple):
        return tuple.__new__(type(template), [_named(part, following) for part in template])
    if isinstance(template, Described):
        return Described(_named(template.part, following), Arg(f"v{template.size}"), template.make)
    if isinstance(template, Part):
        return Part(Arg(f"v{template.block}"), Arg(f"v{template.offset}"), template.dtype)
    if not isinstance(template, Varies):
        return template
    index = following[0] if template.index is None else template.index
    following[0] = index + 1
    return Arg(f"v{index}")
