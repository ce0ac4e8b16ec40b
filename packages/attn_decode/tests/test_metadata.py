"""Wrong metadata: nothing outside a tensor is read or written, and other sequences keep their results.

On a CPU every address that a kernel reads or writes is compared with the tensors of the call.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.cases import DecodeCase
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.launch import executing
from narrowkv.testing.memory_guards import CheckedInterpreter

I32, I64 = torch.int32, torch.int64
LENS = (70, 5, 33)
SMALL = DecodeCase.small(lens=LENS, num_kv_heads=1, gqa_ratio=2)
PLANS: list[dict[str, Any]] = [{"split": "none"}, {"split": "uniform"}, {"split": "even"}]


def _call(
    q: torch.Tensor,
    cache: PagedKVCache,
    table: PageTable,
    plan: dict[str, Any],
    in_launch: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    made = plan_decode(q, cache, table, **plan)
    made = replace(made, config=replace(made.config, merge_in_launch=in_launch))
    out = torch.full(q.shape, math.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:2], math.nan)
    with executing(CheckedInterpreter()):
        paged_decode(q, cache, table, out=out, lse=lse, return_lse=True, plan=made)
    return out, lse


# A length that is read as another one, which is what the table's pages hold.
LENGTHS = {
    "negative": (-1, 0),
    "most negative": (-(2**31), 0),
    "one over the capacity": (81, 80),
    "far over the capacity": (10_000, 80),
    "largest": (2**31 - 1, 80),
}


@pytest.mark.parametrize(
    ("plan", "in_launch"),
    [(plan, late) for plan in PLANS for late in (False, True) if not (late and plan["split"] == "none")],
    ids=str,
)
@pytest.mark.parametrize("fault", LENGTHS)
def test_a_wrong_length_is_clamped_and_the_other_sequences_keep_their_results(
    fault: str, plan: dict[str, Any], in_launch: bool
) -> None:
    wrong, meant = LENGTHS[fault]
    q, cache, table = replace(SMALL, clean=True).build()
    ids = table.page_ids.clamp(0, cache.num_pages - 1)
    expected = paged_decode_reference(
        q, cache, PageTable.from_block_table(ids, torch.tensor([70, meant, 33], dtype=I32), page_size=16)
    )
    bad = PageTable.from_block_table(ids, torch.tensor([70, wrong, 33], dtype=I32), page_size=16)
    o, _ = _call(q, cache, bad, plan, in_launch)
    torch.testing.assert_close(o.float(), expected, rtol=0.02, atol=0.01)


def test_a_negative_length_takes_no_programs_from_other_sequences() -> None:
    """A negative number of tiles would make the even share of all tiles too small for the launch."""
    q, cache, table = replace(SMALL, lens=(2600, 5, 2600), clean=True).build()
    assert table.seq_lens is not None
    ids = table.page_ids.clamp(0, cache.num_pages - 1)
    lens = table.seq_lens.clone()
    lens[1] = 0
    expected = paged_decode_reference(q, cache, PageTable.from_block_table(ids, lens, page_size=16))
    lens = lens.clone()
    lens[1] = -(2**31)
    bad = PageTable.from_block_table(ids, lens, page_size=16)
    o, _ = _call(q, cache, bad, {"split": "even"})
    torch.testing.assert_close(o.float(), expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("page", [-1, -(2**31), -12345, 7, 54321, 2**30 + 54321, 2**31 - 1])
def test_a_page_id_out_of_range_is_never_followed(page: int, plan: dict[str, Any]) -> None:
    q, cache, table = replace(SMALL, granularity="token_head", lens=(64, 5, 2)).build()
    page = max(page, cache.num_pages) if page == 7 else page
    expected, _ = _call(q, cache, table, plan)
    table.page_ids[1, 0] = page
    o, _ = _call(q, cache, table, plan)
    assert torch.equal(o[[0, 2]], expected[[0, 2]])


INDPTRS = {
    "far beyond the page ids": [0, 5, 2**30, 9],
    "largest": [0, 5, 2**31 - 1, 2**31 - 1],
    "decreasing": [0, 5, 2, 9],
    "negative": [0, -(2**31), 6, 9],
    "all beyond": [2**30, 2**30 + 5, 2**30 + 6, 2**30 + 9],
}


@pytest.mark.parametrize("granularity", ["float", "token_head"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("fault", INDPTRS)
def test_an_indptr_beyond_the_page_ids_is_clamped(fault: str, plan: dict[str, Any], granularity: str) -> None:
    q, cache, table = replace(SMALL, ragged=True, clean=True, granularity=granularity).build()
    table.page_ids.clamp_(0, cache.num_pages - 1)
    wrong = torch.tensor(INDPTRS[fault], dtype=I32)
    # Descales of a key are read ahead of the keys, of an empty sequence at the end of the page ids too.
    right = replace(table, kv_indptr=wrong.clamp(0, table.page_ids.shape[0]))
    expected = paged_decode_reference(q, cache, right)
    o, _ = _call(q, cache, replace(table, kv_indptr=wrong), plan)
    torch.testing.assert_close(o.float(), expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("last", [-(2**31), -1, 0, 17, 2**31 - 1])
def test_a_wrong_length_of_a_last_page_is_clamped(last: int) -> None:
    q, cache, table = replace(SMALL, ragged=True, clean=True).build()
    assert table.kv_last_page_len is not None
    lens = table.kv_last_page_len.clone()
    lens[0] = min(max(last, 0), 16)
    expected = paged_decode_reference(q, cache, replace(table, kv_last_page_len=lens))
    lens = lens.clone()
    lens[0] = last
    o, _ = _call(q, cache, replace(table, kv_last_page_len=lens), {"split": "even"})
    torch.testing.assert_close(o.float(), expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("granularity", ["float", "page_head", "token_head"])
def test_a_cache_without_pages_is_not_read(ragged: bool, granularity: str) -> None:
    q, cache, table = replace(SMALL, ragged=ragged, granularity=granularity).build()
    descales = {name: getattr(cache, name) for name in ("k_descale", "v_descale")}
    if granularity != "float":
        descales = {name: value[:0] for name, value in descales.items()}
    none = replace(cache, k=cache.k[:0], v=cache.v[:0], num_pages=0, **descales)
    o, lse = _call(q, none, table, {"split": "even"})
    assert bool((o == 0).all())
    assert bool((lse == -math.inf).all())


def test_a_table_without_page_ids_is_of_empty_sequences() -> None:
    q, cache, table = SMALL.build()
    narrow = replace(table, page_ids=table.page_ids[:, :0])
    o, lse = _call(q, cache, narrow, {"split": "none"})
    assert bool((o == 0).all())
    assert bool((lse == -math.inf).all())


def _spread(tensor: torch.Tensor, dtype: torch.dtype, *steps: int) -> torch.Tensor:
    """The same numbers in `dtype`, with strides, between numbers that are no page and no length."""
    sizes = [size * step for size, step in zip(tensor.shape, steps, strict=True)]
    room = torch.full(sizes, 2**31 - 2, dtype=dtype)
    view = room[tuple(slice(None, None, step) for step in steps)]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("dtype", [I32, I64])
@pytest.mark.parametrize("ragged", [False, True])
def test_strided_tables_and_lengths_of_either_integer_are_read_as_they_are(
    ragged: bool, dtype: torch.dtype
) -> None:
    q, cache, table = replace(SMALL, ragged=ragged, page_size=1, layout="tokens").build()
    expected, _ = _call(q, cache, table, {"split": "even"})
    if ragged:
        assert table.kv_indptr is not None
        assert table.kv_last_page_len is not None
        strided = PageTable.from_ragged(
            _spread(table.kv_indptr, dtype, 3),
            _spread(table.page_ids, dtype, 2),
            _spread(table.kv_last_page_len, dtype, 2),
            page_size=1,
        )
    else:
        assert table.seq_lens is not None
        strided = PageTable.from_block_table(
            _spread(table.page_ids, dtype, 2, 3), _spread(table.seq_lens, dtype, 2), page_size=1
        )
    o, _ = _call(q, cache, strided, {"split": "even"})
    assert torch.equal(o, expected)


@pytest.mark.parametrize("wrong", [-(2**40), 2**32 + 5, 2**62])
def test_64_bit_lengths_and_page_ids_are_clamped_before_they_are_cut_to_32_bits(wrong: int) -> None:
    q, cache, table = replace(SMALL, clean=True).build()
    assert table.seq_lens is not None
    ids, lens = table.page_ids.long(), table.seq_lens.long()
    ids.clamp_(0, cache.num_pages - 1)
    lens[1], ids[0, 0] = wrong, wrong
    meant = PageTable.from_block_table(
        ids.clamp(0, cache.num_pages - 1), lens.clamp(0, table.capacity), page_size=16
    )
    o, _ = _call(q, cache, PageTable.from_block_table(ids, lens, page_size=16), PLANS[2])
    torch.testing.assert_close(o.float(), paged_decode_reference(q, cache, meant), rtol=0.02, atol=0.01)
