"""Which splits an even share cuts sequences into."""

from __future__ import annotations

import math
import random

import pytest
import torch
import triton
import triton.language as tl

from narrowkv.attn_decode.kernels.tiles import even_split
from narrowkv.paged_cache.kernels.pages import Table
from narrowkv.runtime.launch import LaunchOptions, launch

_TILE, _START = 32, 3


@triton.jit
def _split_kernel(lens, out, batch, num_items, slots, BY_ITEM: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sequence, first item and number of splits of each program, an item or a sequence, `[programs, 3]`."""
    table = Table(lens, None, lens, 0, 1, 1 << 16, 1, 1, 1)
    wanted = tl.program_id(0)
    seq, first_item, num_splits = even_split(
        table, None, batch, num_items, slots, wanted, BY_ITEM, 1, -1, 16, False, BLOCK_N
    )
    tl.store(out + wanted * 3, seq)
    tl.store(out + wanted * 3 + 1, first_item)
    tl.store(out + wanted * 3 + 2, num_splits)


def _splits(lens: list[int], num_items: int, slots: int | None) -> list[int]:
    """The number of splits of each sequence, once every item has found the same."""
    tensor = torch.tensor(lens, dtype=torch.int32)
    by_item, by_sequence = (torch.zeros(n, 3, dtype=torch.int32) for n in (num_items, len(lens)))
    for out, by in ((by_item, True), (by_sequence, False)):
        args = (tensor, out, len(lens), num_items, slots)
        launch(_split_kernel, (len(out), 1, 1), args, {"BY_ITEM": by, "BLOCK_N": _TILE}, LaunchOptions())
    found = [splits for _, _, splits in by_sequence.tolist()]
    first = 0
    for seq, splits in enumerate(found):
        assert splits >= 1
        assert by_item[first : first + splits].tolist() == [[seq, first, splits]] * splits
        first += splits
    assert not by_item[first:, 2].any(), "items past the last one have no splits"
    return found


def _cost(tiles: list[int], splits: list[int], slots: int) -> int:
    """Waves of programs, times the tiles of the longest one and what a program's start takes."""
    size = max(-(-count // parts) for count, parts in zip(tiles, splits, strict=True))
    return -(-sum(splits) // slots) * (size + _START)


@pytest.mark.parametrize(
    ("batch", "tokens", "slots", "expected"),
    [
        (64, 8192, 132, 2),  # one wave
        (128, 8192, 198, 3),  # two waves: one split would fill two thirds of a wave
        pytest.param(192, 8192, 198, 1, marks=pytest.mark.slow),
        # four waves, not one full and one for 58 programs
        pytest.param(256, 8192, 198, 3, marks=pytest.mark.slow),
        (200, 0, 132, 1),
    ],
)
def test_equal_sequences_fill_whole_waves(batch: int, tokens: int, slots: int, expected: int) -> None:
    num_items = -(-5 * batch // (2 * slots)) * slots
    assert _splits([tokens] * batch, num_items, slots) == [expected] * batch


@pytest.mark.parametrize("slots", [None, 40])
def test_unequal_sequences_need_no_more_items_than_there_are(slots: int | None) -> None:
    draw = random.Random(0)
    for batch in (1, 7, 40, 130):
        lens = [min(int(draw.lognormvariate(math.log(2000), 1.2)), 60_000) for _ in range(batch)]
        tiles = [-(-length // _TILE) for length in lens]
        num_items = -(-5 * batch // 80) * 40 if slots else max(40, 2 * batch)
        found = _splits(lens, num_items, slots)
        assert sum(found) <= num_items
        if slots:
            plain = _splits(lens, num_items, None)
            assert _cost(tiles, found, slots) <= 1.05 * _cost(tiles, plain, slots)
