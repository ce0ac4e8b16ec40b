"""A launch whose kernel, constants and options a plan fixes; a call gives grid and arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from narrowkv.quant.launch.options import LaunchOptions
from narrowkv.quant.launch.path import launch


@dataclass(frozen=True)
class BoundLaunch:
    """A kernel with its `tl.constexpr` arguments and compiler options.

    Attributes:
        kernel: a `@triton.jit` function.
        constexprs: its `tl.constexpr` arguments by name.
        options: compiler options.
    """

    kernel: Any
    constexprs: dict[str, Any]
    options: LaunchOptions

    def __call__(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Launches, interprets or compiles the kernel; nothing happens for an empty grid.

        Args:
            grid: one to three extents.
            args: runtime arguments in the kernel's order: tensors, numbers, None, or tuples of those.
        """
        launch(self.kernel, grid, args, self.constexprs, self.options)
