"""Samples of a launch's workgroups: enough to finish some output rows, few enough for a laptop.

A kernel that is not listed here is run whole, which is right and slow. A new kernel joins by one entry in
`SAMPLES`; which rows its workgroups own is found by watching what they store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Workgroup = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
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


def corners(launch: Launch) -> Iterable[Workgroup]:
    """First, middle and last along each axis: for kernels whose workgroups need nothing of each other."""
    x, y, z = ({0, extent // 2, extent - 1} for extent in launch.grid)
    return sorted((i, j, k) for i in x for j in y for k in z)


def _decode_rows(launch: Launch) -> tuple[int, int, int]:
    """KV heads, rows of each and rows of a tile, of a decode kernel."""
    sizes, blocks = launch.constexprs["SIZES"], launch.constexprs["BLOCKS"]
    return sizes.num_kv_heads, sizes.q_len * sizes.gqa_ratio, blocks.m


def _last_head_program(launch: Launch) -> Iterable[Workgroup]:
    """Every split of every sequence for the last KV head's last rows, which are the ragged ones."""
    heads, rows, block = _decode_rows(launch)
    programs = heads * -(-rows // block)
    return ((i, 0, 0) for i in range(programs - 1, launch.grid[0], programs))


def _rows_of_last_head_program(launch: Launch) -> Iterable[Workgroup]:
    """The rows whose partial results `_last_head_program` leaves."""
    heads, rows, block = _decode_rows(launch)
    left = rows - (rows - 1) // block * block
    last = range(heads * rows - left, heads * rows)
    return ((seq + row, 0, 0) for seq in range(0, launch.grid[0], heads * rows) for row in last)


def _sparse_programs(launch: Launch) -> Iterable[Workgroup]:
    """First, middle and last heads and tokens; where rows are split, all splits of the last."""
    if launch.grid[1] == 1:
        return corners(launch)
    return ((launch.grid[0] - 1, split, 0) for split in range(launch.grid[1]))


def _rows_of_last_sparse_program(launch: Launch) -> Iterable[Workgroup]:
    """Heads whose partial results `_sparse_programs` leaves: some of the last token's."""
    return ((row, 0, 0) for row in range(max(0, launch.grid[0] - 8), launch.grid[0]))


def _splits_of_some_tiles(launch: Launch) -> Iterable[Workgroup]:
    """All splits of the first and last tile of two heads; places past the last tile hold none."""
    x, _, splits = launch.grid
    return ((i, 0, k) for i in (0, x - 1) for k in range(splits))


def _prefill_programs(launch: Launch) -> Iterable[Workgroup]:
    """Some tiles; of even shares all of the last KV head, since only the device knows which make up a tile.

    Programs past the last share return at once, so the many places that stand ready for shares cost little.
    """
    constexprs = launch.constexprs
    if not constexprs["RULES"].shares:
        return _splits_of_some_tiles(launch)
    heads = constexprs["SIZES"].num_kv_heads
    return ((i, 0, 0) for i in range(heads - 1, launch.grid[0], heads))


def _last_head_of_an_append(launch: Launch) -> Iterable[Workgroup]:
    """Programs of the last KV head, of both kinds; they wait for one another at most."""
    heads = launch.constexprs["SIZES"].num_kv_heads
    return ((i, 0, 0) for i in range(heads - 1, launch.grid[0], heads))


SAMPLES: dict[str, Callable[[Launch], Iterable[Workgroup]]] = {
    "_paged_decode_kernel": _last_head_program,
    "_merge_splits_kernel": _rows_of_last_head_program,
    "_merge_states_kernel": corners,
    "_append_kernel": corners,
    "_sparse_16bit_kernel": _sparse_programs,
    "_sparse_fused_kernel": _sparse_programs,
    "_sparse_cdna_kernel": _sparse_programs,
    "_merge_sparse_kernel": _rows_of_last_sparse_program,
    "_sage_attention_kernel": corners,
    "_fused_prefill_kernel": _prefill_programs,
    "_prefill_append_kernel": _last_head_of_an_append,
    "_dense_prefill_kernel": _splits_of_some_tiles,  # after all of _widen_kernel
    "_cdna_prefill_kernel": _splits_of_some_tiles,  # likewise
}
"""By the name of the kernel. Samples of kernels that one operation launches must fit together."""


def sample(launch: Launch) -> Iterable[Workgroup]:
    """The sampled workgroups of a launch; all of them for a kernel that `SAMPLES` does not list."""
    choose = SAMPLES.get(launch.kernel)
    return launch.everything() if choose is None else choose(launch)


def a_few(count: int) -> Callable[[Launch], list[Workgroup]]:
    """The first `count` workgroups of the sample: for counting instructions, when results are not read."""

    def choose(launch: Launch) -> list[Workgroup]:
        return [workgroup for _, workgroup in zip(range(count), sample(launch), strict=False)]

    return choose
