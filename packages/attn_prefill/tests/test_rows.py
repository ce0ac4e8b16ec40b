"""Geometry of a prefill tile: two ways to say which keys a row sees."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from narrowkv.runtime.attention.masks import visible_keys, visible_range
from narrowkv.runtime.launch import LaunchOptions, launch

ROWS, KEYS = 64, 128


@triton.jit
def _visible_kernel(
    keep_ptr, range_ptr, first_pos, first, num_keys,
    HAS_FIRST: tl.constexpr, WINDOW_LEFT: tl.constexpr, WINDOW_RIGHT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    r, n = tl.arange(0, ROWS), tl.arange(0, KEYS)
    keep = visible_keys(n, first_pos + r, first, num_keys, HAS_FIRST, WINDOW_LEFT, WINDOW_RIGHT)
    low, high = visible_range(first_pos + r, first, num_keys, HAS_FIRST, WINDOW_LEFT, WINDOW_RIGHT)
    tl.store(keep_ptr + r[:, None] * KEYS + n[None, :], keep.to(tl.int32))
    tl.store(range_ptr + 2 * r, low)
    tl.store(range_ptr + 2 * r + 1, high)


@pytest.mark.parametrize("first", [None, 0, 7])
@pytest.mark.parametrize("left", [-1, 0, 9])
@pytest.mark.parametrize("right", [-1, 0, 5])
def test_a_row_sees_the_keys_of_its_range(first: int | None, left: int, right: int, device: str) -> None:
    # The last row is at the last key, as in every call without a window to the right.
    first_pos, num_keys = 30, 30 + ROWS
    keep = torch.zeros((ROWS, KEYS), dtype=torch.int32, device=device)
    limits = torch.zeros((ROWS, 2), dtype=torch.int32, device=device)
    launch(
        _visible_kernel,
        (1,),
        (keep, limits, first_pos, first or 0, num_keys),
        {
            "HAS_FIRST": first is not None, "WINDOW_LEFT": left, "WINDOW_RIGHT": right,
            "ROWS": ROWS, "KEYS": KEYS,
        },
        LaunchOptions(num_warps=4, num_stages=1),
    )  # fmt: skip
    n = torch.arange(KEYS, device=device)
    inside = (n >= limits[:, :1]) & (n <= limits[:, 1:])
    assert torch.equal(inside, keep.bool())
    # Not all, and not none.
    assert 0 < int(inside.sum()) < inside.numel()
