"""Metadata of decode at its edges; wrong numbers of all operations are in tests/test_hostile_metadata.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.launch import executing
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.memory_guards import CheckedInterpreter

SMALL = DecodeCase.small(lens=(70, 5, 33), num_kv_heads=1, gqa_ratio=2)


def _call(q: torch.Tensor, cache: PagedKVCache, table: PageTable, split: str) -> tuple[torch.Tensor, ...]:
    """O, which was NaN before, and lse; on a CPU every address is checked."""
    out = torch.full_like(q, math.nan)
    with executing(CheckedInterpreter()):
        plan = plan_decode(q, cache, table, split=split)
        return paged_decode(q, cache, table, out=out, return_lse=True, plan=plan)


def test_a_negative_length_takes_no_programs_from_other_sequences() -> None:
    """A negative number of tiles would make the even share of all tiles too small for the launch."""
    q, cache, table = replace(SMALL, lens=(2600, 0, 2600)).build()
    assert table.seq_lens is not None
    expected = paged_decode_reference(q, cache, table)
    wrong = table.seq_lens.clone()
    wrong[1] = -(2**31)
    o, _ = _call(q, cache, replace(table, seq_lens=wrong), "even")
    torch.testing.assert_close(o.float(), expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("split", ["none", "per_sequence", "even"])
@pytest.mark.parametrize("granularity", ["float", "token_head"])
def test_a_sequence_whose_page_ids_end_before_they_begin_is_empty(granularity: str, split: str) -> None:
    q, cache, table = replace(SMALL, ragged=True, clean=True, granularity=granularity).build()
    table.page_ids.clamp_(0, cache.num_pages - 1)
    decreasing = replace(table, kv_indptr=torch.tensor([0, 5, 2, 9], dtype=torch.int32))
    o, _ = _call(q, cache, decreasing, split)
    torch.testing.assert_close(o.float(), paged_decode_reference(q, cache, decreasing), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("granularity", ["float", "page_head", "token_head"])
def test_a_cache_without_pages_is_not_read(ragged: bool, granularity: str) -> None:
    q, cache, table = replace(SMALL, ragged=ragged, granularity=granularity).build()
    descales = {name: getattr(cache, name) for name in ("k_descale", "v_descale")}
    if granularity != "float":
        descales = {name: value[:0] for name, value in descales.items()}
    empty = replace(cache, k=cache.k[:0], v=cache.v[:0], num_pages=0, **descales)
    o, lse = _call(q, empty, table, "even")
    assert bool((o == 0).all())
    assert bool((lse == -math.inf).all())


def test_a_table_without_page_ids_is_of_empty_sequences() -> None:
    q, cache, table = SMALL.build()
    o, lse = _call(q, cache, replace(table, page_ids=table.page_ids[:, :0]), "none")
    assert bool((o == 0).all())
    assert bool((lse == -math.inf).all())
