"""Which workgroups of a launch finish some output rows, and are few enough for a laptop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Workgroup = tuple[int, int, int]


@dataclass(frozen=True)
class SampledLaunch:
    """One launch as a sample sees it.

    Attributes:
        kernel: name of the kernel.
        grid: its workgroups.
        constexprs: its compile-time arguments.
    """

    kernel: str
    grid: Workgroup
    constexprs: dict[str, Any]

    @property
    def size(self) -> int:
        """Workgroups of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def everything(self) -> Iterable[Workgroup]:
        """All workgroups, x fastest."""
        x, y, z = self.grid
        return ((i, j, k) for k in range(z) for j in range(y) for i in range(x))


def corners(launch: SampledLaunch) -> Iterable[Workgroup]:
    """First, middle and last along each axis: for kernels whose workgroups need nothing of each other."""
    x, y, z = ({0, extent // 2, extent - 1} for extent in launch.grid)
    return sorted((i, j, k) for i in x for j in y for k in z)


def whole_rows(launch: SampledLaunch) -> Iterable[Workgroup]:
    """Everything along the second and third axis for the first and the last along x, whose rows these are."""
    x, y, z = launch.grid
    return sorted((i, j, k) for i in {0, x - 1} for j in range(y) for k in range(z))


def _decode_rows(launch: SampledLaunch) -> tuple[int, int, int]:
    """KV heads, rows of each and rows of a tile, of a decode kernel."""
    sizes, blocks = launch.constexprs["SIZES"], launch.constexprs["BLOCKS"]
    return sizes.num_kv_heads, sizes.q_len * sizes.gqa_ratio, blocks.m


def last_head_program(launch: SampledLaunch) -> Iterable[Workgroup]:
    """Every split of every sequence for the last KV head's last rows, which are the ragged ones."""
    from narrowkv.runtime.attention.xcds import order_of_programs  # imports Triton; the CLI starts without it

    heads, rows, block = _decode_rows(launch)
    programs = heads * -(-rows // block)
    runs_as = order_of_programs(launch.grid[0], launch.constexprs["RULES"].order)
    return ((i, 0, 0) for i, program in enumerate(runs_as) if program % programs == programs - 1)


def rows_of_last_head_program(launch: SampledLaunch) -> Iterable[Workgroup]:
    """The rows whose partial results `last_head_program` leaves."""
    heads, rows, block = _decode_rows(launch)
    left = rows - (rows - 1) // block * block
    last = range(heads * rows - left, heads * rows)
    return ((seq + row, 0, 0) for seq in range(0, launch.grid[0], heads * rows) for row in last)


def sparse_programs(launch: SampledLaunch) -> Iterable[Workgroup]:
    """First, middle and last heads and tokens; where rows are split, all splits of the last."""
    if launch.grid[1] == 1:
        return corners(launch)
    return ((launch.grid[0] - 1, split, 0) for split in range(launch.grid[1]))


def rows_of_last_sparse_program(launch: SampledLaunch) -> Iterable[Workgroup]:
    """Heads whose partial results `sparse_programs` leaves: some of the last token's."""
    return ((row, 0, 0) for row in range(max(0, launch.grid[0] - 8), launch.grid[0]))


def splits_of_some_tiles(launch: SampledLaunch) -> Iterable[Workgroup]:
    """All splits of the first and last tile of two heads; places past the last tile hold none."""
    x, _, splits = launch.grid
    return ((i, 0, k) for i in (0, x - 1) for k in range(splits))


def prefill_programs(launch: SampledLaunch) -> Iterable[Workgroup]:
    """All splits of some tiles; with even shares of keys, all programs of the last KV head.

    Which programs share a tile follows from the lengths, which only the device knows. Programs without a
    share return at once, so running all of them costs little.
    """
    if not launch.constexprs["RULES"].shares:
        return splits_of_some_tiles(launch)
    return last_kv_head(launch)


def last_kv_head(launch: SampledLaunch) -> Iterable[Workgroup]:
    """All programs of the last KV head; an append's are of both kinds, and wait for one another at most."""
    heads = launch.constexprs["SIZES"].num_kv_heads
    return ((i, 0, 0) for i in range(heads - 1, launch.grid[0], heads))
