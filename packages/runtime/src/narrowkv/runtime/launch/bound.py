"""A launch whose kernel, constants and options a plan fixes; a call gives grid and arguments."""

from __future__ import annotations

from typing import Any

from narrowkv.runtime.launch import path
from narrowkv.runtime.launch.gpu import GpuLaunch
from narrowkv.runtime.launch.options import LaunchOptions


class BoundLaunch:
    """A kernel with its `tl.constexpr` arguments and compiler options.

    Attributes:
        kernel: a `@triton.jit` function.
        constexprs: its `tl.constexpr` arguments by name; not to be changed.
        options: compiler options.

    Example:
        >>> bound = BoundLaunch(kernel, {"BLOCK": 64}, LaunchOptions())   # doctest: +SKIP
        >>> bound((batch, heads), (q, out, q.stride(0)))                  # doctest: +SKIP
    """

    __slots__ = ("_gpu", "constexprs", "kernel", "options")

    def __init__(self, kernel: Any, constexprs: dict[str, Any], options: LaunchOptions) -> None:
        self.kernel, self.constexprs, self.options = kernel, constexprs, options
        self._gpu: GpuLaunch | None = None

    def __call__(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Launches, interprets or compiles the kernel; nothing happens for an empty grid.

        On a GPU a call whose arguments specialise like those of an earlier one takes a few microseconds.

        Args:
            grid: one to three extents.
            args: runtime arguments in the kernel's order: tensors, numbers, None, or tuples of those.

        Raises:
            TypeError: there is no tensor, or one without memory: a fake, functional, meta or sparse tensor.
        """
        gpu = self._gpu
        if gpu is not None and 0 not in grid and path.executor() is None and gpu.again(grid, args):
            return
        self._gpu = path.launch(self.kernel, grid, args, self.constexprs, self.options) or gpu

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundLaunch):
            return NotImplemented
        mine = (self.kernel, self.constexprs, self.options)
        return mine == (other.kernel, other.constexprs, other.options)

    __hash__ = None  # type: ignore[assignment]  # constexprs is a dict

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundLaunch:
        return self

    def __repr__(self) -> str:
        return f"BoundLaunch({self.kernel!r}, {self.constexprs!r}, {self.options!r})"
