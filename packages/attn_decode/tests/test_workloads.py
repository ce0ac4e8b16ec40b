"""The inputs themselves: what must never be read is poisoned, and the same seed gives the same call."""

from __future__ import annotations

import pytest
import torch
from decode_support import all_pairs

from narrowkv.attn_decode.workloads import GLM_GQA12, WORKLOADS
from narrowkv.attn_decode.workloads import DecodeWorkload as W


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2"])
@pytest.mark.parametrize(("layout", "page_size"), [("NHD", 7), ("concat", 3), ("vectorised", 16)])
def test_every_slot_that_no_sequence_uses_is_nan(fmt: str, layout: str, page_size: int) -> None:
    workload = W(format=fmt, layout=layout, page_size=page_size, seq_lens=(20, 0, 5))
    _, cache, table = workload.build()
    used = torch.zeros(cache.num_pages, page_size, dtype=torch.bool)
    for seq, n in enumerate(workload.seq_lens):
        token = torch.arange(n)
        used[table.page_ids[seq, token // page_size].long(), token % page_size] = True
    assert int(used.sum()) == 25
    for stored in cache.dequantize():
        assert bool(stored[~used].isnan().all())
        assert bool(stored[used].isfinite().all())


def test_infinities_may_stand_in_for_nans() -> None:
    _, cache, _ = W(format="fp8_e5m2", seq_lens=(5,), unused="inf").build()
    k, v = cache.dequantize()
    assert bool(k.isinf().any())
    assert bool(v.isinf().any())
    assert not bool(k.isnan().any())


def test_page_ids_past_the_end_are_out_of_range_and_the_others_are_shuffled() -> None:
    workload = W(seq_lens=(300, 5))
    _, cache, table = workload.build()
    ids = table.page_ids
    assert bool((ids[1, 1:] >= cache.num_pages).all())
    assert bool((ids[0, :19] < cache.num_pages).all())
    assert not torch.equal(ids[0, :19].sort().values, ids[0, :19])
    assert ids[0, :19].unique().numel() == 19


def test_a_seed_gives_the_same_call_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second, other = W().build(seed=1), W().build(seed=1), W().build(seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1].k.view(torch.uint8), second[1].k.view(torch.uint8))
    assert not torch.equal(first[0], other[0])


def test_either_metadata_says_the_same_lengths() -> None:
    for ragged in (False, True):
        _, _, table = W(seq_lens=(33, 0, 16), ragged=ragged).build()
        assert table.seq_lens_tensor().tolist() == [33, 0, 16]
        assert table.kind == ("ragged" if ragged else "block_table")


def test_the_probe_has_the_shape_it_is_named_after() -> None:
    assert (GLM_GQA12.batch, GLM_GQA12.num_qo_heads, GLM_GQA12.num_kv_heads) == (4, 96, 8)
    assert (GLM_GQA12.head_dim, set(GLM_GQA12.seq_lens), GLM_GQA12.q_len) == (128, {1024}, 1)
    assert WORKLOADS["glm-gqa12"] is GLM_GQA12
    assert all(name == workload.name for name, workload in WORKLOADS.items())


def test_all_pairs_covers_all_pairs() -> None:
    axes = {"a": [0, 1, 2, 3, 4], "b": [0, 1, 2], "c": [0, 1, 2, 3], "d": [0, 1]}
    cases = all_pairs(axes)
    assert len(cases) < 5 * 3 * 4 * 2 / 3
    for first in axes:
        for second in axes:
            if first != second:
                met = {(case[first], case[second]) for case in cases}
                assert len(met) == len(axes[first]) * len(axes[second])
