"""Results of parts of the keys, and their merge: `merge_states`, and the key ranges of ranks."""

from __future__ import annotations

import math

import pytest
import torch

from narrowkv.attn_decode import (
    merge_states,
    merge_states_reference,
    paged_decode,
    paged_decode_reference,
    plan_decode,
)
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.checking import assert_agrees

pytestmark = pytest.mark.sampled

W = DecodeCase.small


def _merged(parts):
    """The merge of `(o, lse)` of each part."""
    o, lse = (torch.stack(results) for results in zip(*parts, strict=True))
    return merge_states(o, lse)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_merge_states_agrees_with_the_reference_and_ignores_empty_states(lse_base, strided, device):
    """With sinks, strides and an output in bf16, or with none of them."""
    random = torch.Generator().manual_seed(1)
    sizes = (3, 4, 6) if strided else (3, 6, 4)
    o = torch.randn(*sizes, 80, generator=random).to(device)
    lse = (torch.randn(sizes, generator=random) * 20).to(device)
    options, given = {"lse_base": lse_base}, {}
    if strided:
        o, lse = o.transpose(1, 2), lse.transpose(1, 2)
        options["sinks"] = torch.tensor([0.5, 30.0, -math.inf, -3.0], device=device)
        given["out"] = torch.full((6, 4, 80), math.nan, dtype=torch.bfloat16, device=device)
    lse[1, 2], lse[:, 4, 1], o[1, 2] = -math.inf, -math.inf, math.nan
    merged, total = merge_states(o, lse, **options, **given)
    expected, expected_total = merge_states_reference(o, lse, **options, out_dtype=torch.float32)
    assert merged is given.get("out", merged)
    torch.testing.assert_close(merged.float(), expected, rtol=2**-8 if strided else 1e-5, atol=1e-6)
    torch.testing.assert_close(total, expected_total, rtol=1e-6, atol=1e-5)
    assert bool((merged[4, 1] == 0).all())
    assert strided or float(total[4, 1]) == -math.inf


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"lse_base": "10"}, "lse_base must be one of"),
        ({"sinks": torch.zeros(5)}, "sinks must have shape"),
        ({"out": torch.zeros(5, 6, 63)}, "out must have shape"),
        ({"lse_out": torch.zeros(6, 5)}, "lse_out must have shape"),
        ({"out_dtype": torch.int8}, "out_dtype must be one of"),
    ],
)
def test_merge_states_says_what_it_does_not_take(change, match):
    with pytest.raises(ValueError, match=match):
        merge_states(torch.zeros(2, 5, 6, 64), torch.zeros(2, 5, 6), **change)


# A rank whose shard is empty changes nothing.
def test_splitting_a_sequence_over_ranks_and_merging_is_attention_over_the_whole(device):
    q, cache, table = W(lens=(96,)).build(device)
    options = {"return_lse": True, "out_dtype": torch.float32}
    whole, whole_lse = paged_decode(q, cache, table, **options)
    parts = []
    for first, pages in ((0, 2), (2, 4), (6, 0)):
        ids = table.page_ids[:, first : first + pages] if pages else table.page_ids[:, :1]
        lens = torch.tensor([16 * pages], dtype=torch.int32, device=device)
        part = PageTable.from_block_table(ids.contiguous(), lens, page_size=16)
        parts.append(paged_decode(q, cache, part, **options))
    o, lse = _merged(parts)
    torch.testing.assert_close(o, whole, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-4)


def _shard_ranges(lens, q_len, window, world, rank):
    """Key ranges of a rank that holds the tokens whose position leaves `rank` when divided by `world`."""

    def held(end):
        return len(range(rank, max(end, 0), world))

    rows = [
        [(held(p - window) if window >= 0 else 0, held(p + 1)) for p in range(n - q_len, n)] for n in lens
    ]
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("split", ["none", "even", "per_sequence"])
@pytest.mark.parametrize(("q_len", "window"), [(1, 9), (4, -1), (4, 9), (8, 2)])
def test_key_ranges_of_shards_merge_to_the_whole(split, q_len, window, device):
    lens = (70, 5, 130, 1)
    q, cache, table = W(lens=lens, q_len=q_len, gqa_ratio=2).build(device)
    whole = paged_decode_reference(q, cache, table, window_left=window, return_lse=True)
    # Each rank's table has pages of one token, every other of the sequence.
    k, v = (x.view(-1, 1, *x.shape[2:]) for x in (cache.k, cache.v))
    tokens = PagedKVCache.from_tensors(
        k, v, format=cache.format, k_descale=cache.k_descale, v_descale=cache.v_descale
    )
    parts = []
    for rank in range(2):
        ids = torch.full((len(lens), 65), 2**30, dtype=torch.int32, device=device)
        for seq, n in enumerate(lens):
            own = torch.arange(rank, n, 2, device=device)
            ids[seq, : len(own)] = table.page_ids[seq, own // 16] * 16 + own % 16
        held = torch.tensor([len(range(rank, n, 2)) for n in lens], dtype=torch.int32, device=device)
        local = PageTable.from_block_table(ids, held, page_size=1)
        local = local.with_key_ranges(_shard_ranges(lens, q_len, window, 2, rank).to(device))
        plan = plan_decode(q, tokens, local, split=split)
        parts.append(paged_decode(q, tokens, local, return_lse=True, out_dtype=torch.float32, plan=plan))
        assert_agrees(parts[-1], paged_decode_reference(q, tokens, local, return_lse=True), lse_bound=1e-4)
    assert_agrees(_merged(parts), whole, lse_bound=1e-4)


@pytest.mark.parametrize("q_len", [1, 3])
def test_wrong_key_ranges_stay_in_their_sequence(q_len, device):
    # Unused slots hold NaN: reading one shows.
    q, cache, table = W(lens=(70, 5), q_len=q_len, gqa_ratio=2).build(device)
    worst = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32, device=device)
    wrong = table.with_key_ranges(worst.expand(2, q_len, 2).contiguous())
    assert_agrees(paged_decode(q, cache, wrong), paged_decode_reference(q, cache, wrong))
    nothing = table.with_key_ranges(worst.flip(0).expand(2, q_len, 2).contiguous())
    o, lse = paged_decode(q, cache, nothing, return_lse=True)
    assert bool((o == 0).all())
    assert bool((lse == -math.inf).all())
