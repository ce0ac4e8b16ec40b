"""What decode with many rows a tile compiles to: no spills on AMD, two programs fit on Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_decode.kernels import _paged_decode_kernel
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.runtime.launch import compile_for


def _call(fmt: str | CacheFormat, q_len: int, head_dim: int, ratio: int, *, tree: bool) -> None:
    cache = PagedKVCache.empty(256, 16, 8, head_dim, format=fmt)
    ids = torch.arange(256, dtype=torch.int32).view(4, 64)
    table = PageTable.from_block_table(ids, torch.full((4,), 1024, dtype=torch.int32), page_size=16)
    if tree:
        table = table.with_tree_mask(torch.zeros(4, q_len, dtype=torch.int32))
    paged_decode(torch.zeros(4 * q_len, 8 * ratio, head_dim, dtype=torch.bfloat16), cache, table)


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("fmt", "q_len", "head_dim", "tree"),
    [
        ("fp8_e4m3fn", 2, 128, False), ("fp8_e4m3fn", 4, 128, False), ("fp8_e4m3fn", 8, 128, False),
        ("fp8_e4m3fn", 8, 128, True), ("fp8_e4m3fn", 8, 256, False), ("bf16", 8, 128, False),
        ("fp4_e2m1", 8, 128, False),
    ],
)  # fmt: skip
def test_tall_tiles_do_not_spill(fmt: str, q_len: int, head_dim: int, tree: bool, target: str) -> None:
    with compile_for(target) as artifacts:
        _call(fmt, q_len, head_dim, 12, tree=tree)
    (code,) = [each for each in artifacts if each.name == _paged_decode_kernel.__name__]
    assert code.registers.vgpr_spills == 0
    assert code.registers.scratch_bytes == 0
    assert code.lds_bytes <= 64 * 1024


def test_two_programs_of_128_rows_fit_on_hopper(sm90_code: Any) -> None:
    _call("fp8_e4m3fn", 8, 128, 12, tree=False)
    attend = sm90_code.kernels[0]
    assert attend.registers() <= 128
    assert attend.shared_bytes <= 113 * 1024
    loop = attend.product_loops()[0]
    # 128 rows x 64 keys are 8 + 4 products of a warpgroup, issued together: a wait behind each is serial.
    assert sum("HGMMA" in text for text in loop) == 12
    assert sum("WARPGROUP" in text for text in loop) <= 6
    # No key is masked in this loop.
    assert len(loop) <= 430


@pytest.mark.parametrize(
    ("fmt", "head_dim"),
    [(CacheFormat("fp8_e4m3fn", "fp4_e2m1"), 128), ("fp4_e2m1", 128), ("int8", 64)],
    ids=str,
)
def test_no_product_is_32_columns_wide_on_hopper(
    fmt: str | CacheFormat, head_dim: int, sm90_code: Any
) -> None:
    """Triton 3.6 gets those wrong beside wider ones."""
    _call(fmt, 8, head_dim, 12, tree=False)
    assert "HGMMA.64x32" not in sm90_code.kernels[0].machine_code()
