"""paged_decode against the fp32 reference over the contract's axes, and what must happen on every fault."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowkv.attn_decode import (
    merge_states,
    merge_states_reference,
    paged_decode,
    paged_decode_reference,
    plan_decode,
)
from narrowkv.attn_decode.cases import AXES, QUERIES, DecodeCase
from narrowkv.attn_decode.config import DecodeShape, choose_config
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import run_as
from narrowkv.runtime.targets import get_target

pytestmark = pytest.mark.sampled

W = DecodeCase.small


def _check(
    workload: DecodeCase, device: str, plan: dict[str, Any] | None = None, **options: Any
) -> torch.Tensor:
    """Runs with a poisoned output and compares o and lse; returns o."""
    q, cache, table = workload.build(device)
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device=device)
    made = plan_decode(q, cache, table, **(plan or {}))
    o, lse = paged_decode(q, cache, table, out=out, return_lse=True, plan=made, **options)
    expected, expected_lse = paged_decode_reference(q, cache, table, return_lse=True, **options)
    assert o.data_ptr() == out.data_ptr()
    assert not bool(o.isnan().any())
    error = (o.float() - expected).abs().sum() / expected.abs().sum().clamp_min(1e-30)
    assert float(error) <= 0.002, made.explain()
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    return o


@pytest.mark.parametrize("ratio", AXES["gqa_ratio"])
def test_every_gqa_ratio(ratio: int, device: str) -> None:
    _check(W(gqa_ratio=ratio), device)


@pytest.mark.parametrize("head_dim", [*AXES["head_dim"], 112])
def test_every_head_dim(head_dim: int, device: str) -> None:
    _check(W(head_dim=head_dim, gqa_ratio=3), device)


# Page sizes that are no power of two, smaller and larger than the key tile.
@pytest.mark.parametrize("page_size", [*AXES["page_size"], 256])
def test_every_page_size(page_size: int, device: str) -> None:
    _check(W(page_size=page_size, ragged=page_size % 2 == 1), device)


@pytest.mark.parametrize("fmt", AXES["k"])
@pytest.mark.parametrize("q_dtype", QUERIES.values())
def test_every_cache_format_with_either_query(fmt: str, q_dtype: torch.dtype, device: str) -> None:
    _check(W(format=fmt, q_dtype=q_dtype), device)


@pytest.mark.parametrize("layout", AXES["layout"])
def test_every_layout(layout: str, device: str) -> None:
    _check(W(layout=layout, page_size=1 if layout == "tokens" else 16), device)


@pytest.mark.parametrize("granularity", AXES["granularity"])
def test_every_descale_shape(granularity: str, device: str) -> None:
    _check(W(granularity=granularity), device)
    _check(W(granularity=granularity, page_size=1, layout="tokens", gqa_ratio=5), device)


@pytest.mark.parametrize("q_len", [2, 4])
@pytest.mark.parametrize("window_left", [-1, 0, 9, 1000])
def test_speculative_tokens_are_causal_among_themselves_inside_a_window(
    q_len: int, window_left: int, device: str
) -> None:
    _check(W(q_len=q_len, gqa_ratio=5, lens=(70, 1, 33)), device, window_left=window_left)


def test_a_soft_cap_and_sinks(device: str) -> None:
    sinks = torch.linspace(-3, 3, 24, device=device)
    _check(W(), device, logits_soft_cap=3.0)
    _check(W(), device, sinks=sinks)
    _check(W(), device, sinks=sinks.bfloat16().float(), logits_soft_cap=1.0, window_left=20)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_output_may_have_another_dtype(out_dtype: torch.dtype, device: str) -> None:
    q, cache, table = W().build(device)
    o = paged_decode(q, cache, table, out_dtype=out_dtype)
    assert isinstance(o, torch.Tensor)
    assert o.dtype == out_dtype
    expected = paged_decode_reference(q, cache, table)
    bound = 0.002 if out_dtype == torch.bfloat16 else 0.0005
    assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= bound


PLANS: list[dict[str, Any]] = [
    {"split": "none"}, {"split": "uniform"}, {"split": "even"},
    {"tokens_per_split": 32}, {"tokens_per_split": 1},
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("in_launch", [False, True])
def test_every_split_and_either_merge(plan: dict[str, Any], in_launch: bool, device: str) -> None:
    workload = W(lens=(300, 0, 130, 1), granularity="head")
    q, cache, table = workload.build(device)
    made = plan_decode(q, cache, table, **plan)
    made = replace(made, config=replace(made.config, merge_in_launch=in_launch))
    sinks = torch.linspace(-1, 1, 24, device=device)
    o, lse = paged_decode(q, cache, table, plan=made, return_lse=True, sinks=sinks)
    expected, expected_lse = paged_decode_reference(q, cache, table, return_lse=True, sinks=sinks)
    assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 31, 32, 33, 127, 128, 129])
def test_lengths_around_pages_tiles_and_splits(n: int, device: str) -> None:
    _check(W(lens=(n, 40), gqa_ratio=2), device, plan={"tokens_per_split": 32})


# A sample: tests/test_emulated.py runs the machine code of both targets for every format.
# The even split launches as many programs as fill the chip, most of which find no work: once is enough.
@pytest.mark.parametrize(
    ("target", "fmt", "plan"),
    [
        ("gfx942", "fp8_e4m3fn", {}),
        ("gfx950", "fp8_e4m3fnuz", {"tokens_per_split": 64}),
        ("gfx950", "bf16", {"tokens_per_split": 64}),
    ],
)
def test_the_code_paths_of_amd_targets_when_interpreted(target: str, fmt: str, plan: dict[str, Any]) -> None:
    with run_as(target):
        _check(W(format=fmt, num_kv_heads=1, gqa_ratio=5), "cpu", plan)


@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=5),
    st.sampled_from([1, 3, 16, 64]),
    st.booleans(),
    st.sampled_from(["none", "uniform", "even"]),
)
@settings(max_examples=15)
def test_any_ragged_batch(lens: list[int], page_size: int, ragged: bool, split: str) -> None:
    _check(
        W(lens=tuple(lens), page_size=page_size, ragged=ragged, num_kv_heads=1, gqa_ratio=3),
        "cpu",
        plan={"split": split},
    )


def test_empty_batches_and_sequences_are_defined(device: str) -> None:
    q, cache, table = W(lens=(0, 20, 0)).build(device)
    o, lse = paged_decode(q, cache, table, return_lse=True)
    assert torch.equal(o[[0, 2]], torch.zeros_like(o[[0, 2]]))
    assert bool((lse[[0, 2]] == -math.inf).all())
    none = PageTable.from_block_table(
        torch.zeros(0, 1, dtype=torch.int32, device=device),
        torch.zeros(0, dtype=torch.int32, device=device),
        page_size=16,
    )
    assert paged_decode(q[:0], cache, none).shape == (0, 24, 64)


def test_rows_before_the_first_key_attend_to_nothing(device: str) -> None:
    q, cache, table = W(lens=(2, 0), q_len=4).build(device)
    o, lse = paged_decode(q, cache, table, return_lse=True)
    assert bool((o[:2] == 0).all())
    assert bool((lse[:2] == -math.inf).all())
    assert bool((o[2:4] != 0).any(-1).all())


def test_permuted_and_repeated_pages_give_the_same_bits(device: str) -> None:
    q, cache, table = W(lens=(64, 64), layout="NHD").build(device)
    first = paged_decode(q, cache, table)
    assert torch.equal(first, paged_decode(q, cache, table))
    order = torch.randperm(cache.num_pages, device=device)
    moved_k, moved_v = torch.empty_like(cache.k), torch.empty_like(cache.v)
    for moved, stored in ((moved_k, cache.k), (moved_v, cache.v)):
        moved.view(torch.uint8)[order] = stored.view(torch.uint8)
    moved_table = PageTable.from_block_table(order[table.page_ids.long()].int(), table.seq_lens, page_size=16)
    assert torch.equal(first, paged_decode(q, replace(cache, k=moved_k, v=moved_v), moved_table))
    shared = PageTable.from_block_table(table.page_ids[[0, 0]].contiguous(), table.seq_lens, page_size=16)
    twice = paged_decode(q[[0, 0]].contiguous(), cache, shared)
    assert torch.equal(twice[0], twice[1])


@pytest.mark.parametrize("which", ["k", "v"])
def test_a_nan_reaches_only_the_rows_that_attend_to_it(which: str, device: str) -> None:
    q, cache, table = W(lens=(40, 40), q_len=2, gqa_ratio=2).build(device)
    page = int(table.page_ids[0, 2])
    getattr(cache, which).view(torch.uint8)[page, 39 % 16, 1, 3] = 0x7F  # the newest token, KV head 1
    o = paged_decode(q, cache, table)
    bad = o.isnan().any(-1)
    expected = torch.zeros_like(bad)
    expected[1, 2:4] = True  # sequence 0, second query token, heads of KV head 1
    assert torch.equal(bad, expected)


def test_a_nan_before_the_window_reaches_nobody(device: str) -> None:
    q, cache, table = W(lens=(40,)).build(device)
    page = int(table.page_ids[0, 1])
    for stored in (cache.k, cache.v):
        stored.view(torch.uint8)[page, 0] = 0x7F  # token 16
    o = paged_decode(q, cache, table, window_left=20)  # keys 19..39
    assert not bool(o.isnan().any())


def test_huge_logits_extreme_sinks_and_a_zero_scale(device: str) -> None:
    q, cache, table = W().build(device)
    for cap in (0.0, 5.0):
        o, lse = paged_decode((q * 1000).to(q.dtype), cache, table, logits_soft_cap=cap, return_lse=True)
        assert bool(o.isfinite().all())
        assert bool(lse.isfinite().all())
    plain = paged_decode(q, cache, table)
    assert torch.equal(
        paged_decode(q, cache, table, sinks=torch.full((24,), -math.inf, device=device)), plain
    )
    assert bool((paged_decode(q, cache, table, sinks=torch.full((24,), math.inf, device=device)) == 0).all())
    uniform = paged_decode(q, cache, table, sm_scale=0.0)
    mean = torch.stack([cache.gather(table, seq)[1].mean(0).repeat_interleave(12, 0) for seq in range(3)])
    torch.testing.assert_close(uniform.float(), mean, rtol=0.01, atol=0.01)
    with pytest.raises(ValueError, match="sm_scale must be finite, got nan"):
        paged_decode(q, cache, table, sm_scale=math.nan)


def test_a_dirty_workspace_does_not_matter(device: str) -> None:
    q, cache, table = W(lens=(300, 5)).build(device)
    plan = plan_decode(q, cache, table, tokens_per_split=32)
    first = paged_decode(q, cache, table, plan=plan)
    assert plan.workspace is not None
    (memory,) = plan.workspace.carve([((plan.workspace.num_bytes // 4,), torch.float32)])
    memory.fill_(math.nan)
    assert torch.equal(first, paged_decode(q, cache, table, plan=plan))
    assert int(plan.workspace.counters(64).abs().sum()) == 0


def test_a_plan_for_another_call_is_refused_with_what_is_needed(device: str) -> None:
    q, cache, table = W().build(device)
    plan = plan_decode(q, cache, table)
    other_q, other_cache, other_table = W(gqa_ratio=5).build(device)
    with pytest.raises(ValueError, match="call plan_decode again"):
        paged_decode(other_q, other_cache, other_table, plan=plan)
    longer = W(lens=(70, 5, 900), clean=True).build(device)
    short = plan_decode(q, cache, table, tokens_per_split=64)
    with pytest.raises(ValueError, match="plan must cover the longest sequence of 900 tokens"):
        paged_decode(*longer, plan=short, validate=True)
    expected = paged_decode_reference(*longer)
    assert float((paged_decode(*longer, plan=short).float() - expected).abs().max()) < 0.02


@pytest.mark.parametrize("tokens_per_split", [None, 64])
def test_batch_invariant_results_are_those_of_a_sequence_alone(
    tokens_per_split: int | None, device: str
) -> None:
    """Batches of 1 to 140 sequences (lengths are read 128 at a time), each with a table of another width."""
    random = torch.Generator().manual_seed(2)
    lens = torch.randint(0, 20, (140,), generator=random)
    lens[:3] = torch.tensor([500, 64, 7])
    workload = W(lens=tuple(lens.tolist()), num_kv_heads=1, gqa_ratio=2, clean=True)
    q, cache, table = workload.build(device)
    assert table.seq_lens is not None
    alone = {}
    for batch, width in ((1, 32), (1, 72), (2, 36), (3, 32), (9, 100), (140, 47)):
        ids = torch.full((batch, width), -1, dtype=torch.int32, device=device)
        used = min(width, table.page_ids.shape[1])
        ids[:, :used] = table.page_ids[:batch, :used]
        part = PageTable.from_block_table(ids, table.seq_lens[:batch].clone(), page_size=16)
        rows = q[:batch]
        plan = plan_decode(rows, cache, part, tokens_per_split=tokens_per_split, batch_invariant=True)
        o, lse = plan.run(rows, cache, part, return_lse=True)
        for seq in range(min(batch, 3)):
            first = alone.setdefault(seq, (o[seq], lse[seq]))
            assert torch.equal(o[seq], first[0]), (batch, width, seq)
            assert torch.equal(lse[seq], first[1]), (batch, width, seq)
    assert len(alone) == 3
    expected = paged_decode_reference(q, cache, table)
    assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90", "cpu"])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn", "fp4_e2m1"])
def test_a_batch_invariant_configuration_does_not_depend_on_the_batch_or_the_capacity(
    fmt: str, target: str
) -> None:
    found = set()
    for batch in (*range(1, 20), 64, 300, 4096):
        for capacity in (64, 1024, 131072, 2**20):
            shape = DecodeShape(batch, 1, 96, 8, 128, 16, capacity)
            config = choose_config(get_target(target), shape, fmt, fmt, batch_invariant=True)
            found.add(replace(config, num_units=0))  # how many programs there are is no part of a result
    assert len(found) == 1


def test_batch_invariance_is_asked_of_a_plan_that_has_it(device: str) -> None:
    q, cache, table = W().build(device)
    with pytest.raises(ValueError, match="plan must be made with batch_invariant=True"):
        paged_decode(q, cache, table, plan=plan_decode(q, cache, table), batch_invariant=True)
    with pytest.raises(ValueError, match="split must be None"):
        plan_decode(q, cache, table, split="even", batch_invariant=True)
    plan = plan_decode(q, cache, table, batch_invariant=True)
    assert torch.equal(
        paged_decode(q, cache, table, batch_invariant=True), paged_decode(q, cache, table, plan=plan)
    )


def test_strided_queries_outputs_and_unaligned_storage(device: str) -> None:
    q, cache, table = W().build(device)
    expected = paged_decode(q, cache, table)
    wide = torch.zeros(3, 2 * 24, 80, dtype=q.dtype, device=device)
    strided = wide[:, ::2, 5:69]
    strided.copy_(q)
    out = torch.full((3, 24, 100), math.nan, dtype=q.dtype, device=device)[..., 3:67]
    assert torch.equal(paged_decode(strided, cache, table, out=out), expected)
    raw = torch.zeros(cache.k.numel() + 3, dtype=torch.uint8, device=device)
    raw[3:] = cache.k.view(torch.uint8).flatten()
    unaligned = raw[3:].view(cache.k.shape).view(cache.k.dtype)
    moved = replace(cache, k=unaligned)
    torch.testing.assert_close(paged_decode(q, moved, table), expected, rtol=0, atol=0)
    raw[3:] = cache.v.view(torch.uint8).flatten()
    assert torch.equal(paged_decode(q, replace(cache, v=unaligned), table), expected)


def _refused(change: Any) -> Any:
    q, cache, table = W().build()
    return lambda: change(q, cache, table)


REFUSALS: list[tuple[str, Any, type[Exception], str]] = [
    ("q dtype", lambda q, c, t: paged_decode(q.float(), c, t), TypeError, "q must"),
    ("q shape", lambda q, c, t: paged_decode(q[0], c, t), ValueError, "q must have shape"),
    (
        "heads",
        lambda q, c, t: paged_decode(q[:, :23], c, t),
        ValueError,
        "multiple of the cache's 2 KV heads",
    ),
    ("head_dim", lambda q, c, t: paged_decode(q[..., :63], c, t), ValueError, "head_dim"),
    (
        "other head_dim",
        lambda q, c, t: paged_decode(torch.cat([q, q], -1), c, t),
        ValueError,
        "cache's head_dim 64",
    ),
    (
        "strided last dim",
        lambda q, c, t: paged_decode(torch.cat([q, q], -1)[..., ::2], c, t),
        ValueError,
        "contiguous",
    ),
    ("rows", lambda q, c, t: paged_decode(torch.cat([q, q[:1]]), c, t), ValueError, "batch \\* q_len rows"),
    (
        "out shape",
        lambda q, c, t: paged_decode(q, c, t, out=q[:2].clone()),
        ValueError,
        "out must have shape",
    ),
    ("out dtype", lambda q, c, t: paged_decode(q, c, t, out=q.double()), TypeError, "out"),
    (
        "out aliases q",
        lambda q, c, t: paged_decode(q, c, t, out=q),
        ValueError,
        "must not share memory with q",
    ),
    ("grad", lambda q, c, t: paged_decode(q.requires_grad_(), c, t), ValueError, "must not require grad"),
    (
        "sinks shape",
        lambda q, c, t: paged_decode(q, c, t, sinks=torch.zeros(3)),
        ValueError,
        "sinks must have shape",
    ),
    ("window", lambda q, c, t: paged_decode(q, c, t, window_left=-2), ValueError, "window_left"),
    ("soft cap", lambda q, c, t: paged_decode(q, c, t, logits_soft_cap=-1.0), ValueError, "logits_soft_cap"),
    ("split", lambda q, c, t: plan_decode(q, c, t, split="odd"), ValueError, "split must be"),
    (
        "page sizes differ",
        lambda q, c, t: paged_decode(q, c, PageTable.from_block_table(t.page_ids, t.seq_lens, page_size=8)),
        ValueError,
        "cache's page_size 16, got 8",
    ),
]


@pytest.mark.parametrize(
    ("change", "error", "match"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
def test_bad_arguments_are_refused_by_name(change: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        _refused(change)()


def test_an_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises((ValueError, UnsupportedError), match="gfx942"), run_as("gfx906"):
        pass


def test_merge_states_agrees_with_the_reference_and_ignores_empty_states(device: str) -> None:
    torch.manual_seed(0)
    o, lse = torch.randn(4, 5, 6, 80, device=device), torch.randn(4, 5, 6, device=device) * 20
    lse[1, 2], lse[:, 4, 1] = -math.inf, -math.inf
    o[1, 2] = math.nan
    merged, total = merge_states(o, lse)
    expected, expected_total = merge_states_reference(o, lse)
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, expected_total, rtol=1e-6, atol=1e-5)
    assert bool((merged[4, 1] == 0).all())
    assert float(total[4, 1]) == -math.inf


# A rank whose shard is empty changes nothing.
def test_splitting_a_sequence_over_ranks_and_merging_is_attention_over_the_whole(device: str) -> None:
    q, cache, table = W(lens=(96,)).build(device)
    whole, whole_lse = paged_decode(q, cache, table, return_lse=True, out_dtype=torch.float32)
    parts = []
    for first, n in ((0, 32), (2, 64), (6, 0)):
        ids = (
            table.page_ids[:, first : first + max(n // 16, 1)].contiguous()
            if n
            else table.page_ids[:, :1].contiguous()
        )
        lens = torch.tensor([n], dtype=torch.int32, device=device)
        part = PageTable.from_block_table(ids, lens, page_size=16)
        parts.append(paged_decode(q, cache, part, return_lse=True, out_dtype=torch.float32))
    o, lse = merge_states(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    torch.testing.assert_close(o, whole, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("split", ["none", "uniform", "even"])
def test_a_captured_graph_serves_other_lengths(split: str) -> None:
    q, cache, table = W(lens=(500, 300, 17)).build("cuda")
    plan = plan_decode(q, cache, table, split=split)
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device="cuda")
    paged_decode(q, cache, table, out=out, plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_decode(q, cache, table, out=out, plan=plan)
    assert table.seq_lens is not None
    for lens in ([500, 300, 17], [1, 299, 0], [433, 16, 12]):
        table.seq_lens.copy_(torch.tensor(lens))
        out.fill_(math.nan)
        graph.replay()
        expected = paged_decode_reference(q, cache, table)
        assert float((out.float() - expected).abs().sum() / expected.abs().sum()) <= 0.002


@pytest.mark.gpu
def test_another_stream() -> None:
    q, cache, table = W(lens=(500, 300)).build("cuda")
    expected = paged_decode(q, cache, table)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        o = paged_decode(q, cache, table)
    stream.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.gpu
@pytest.mark.large_memory
def test_byte_offsets_beyond_2_31_and_page_ids_beyond_65535() -> None:
    pages = 2**31 // (16 * 2 * 64) + 64
    stored = torch.zeros(pages, 16, 2, 64, dtype=torch.uint8, device="cuda")
    q, small, small_table = W(lens=(40, 33)).build("cuda")
    ids = small_table.page_ids.clone().long()
    used = torch.tensor([[0, 1, 2], [0, 1, 2]], device="cuda")
    far = pages - 1 - torch.arange(6, device="cuda").view(2, 3)
    for seq in range(2):
        stored[far[seq]] = small.k.view(torch.uint8)[ids[seq][used[seq]]]
    v = torch.zeros_like(stored)
    for seq in range(2):
        v[far[seq]] = small.v.view(torch.uint8)[ids[seq][used[seq]]]
    cache = PagedKVCache.from_tensors(
        stored, v, format="fp8_e4m3fn", k_descale=small.k_descale, v_descale=small.v_descale
    )
    assert cache.needs_64_bit_addresses
    table = PageTable.from_block_table(far.int(), small_table.seq_lens, page_size=16)
    assert torch.equal(paged_decode(q, cache, table), paged_decode(q, small, small_table))


@pytest.mark.parametrize("lse_base", ["e", "2"])
def test_merge_states_takes_sinks_strides_and_both_bases(lse_base: str, device: str) -> None:
    random = torch.Generator().manual_seed(1)
    o = torch.randn(3, 4, 6, 80, generator=random).to(device).transpose(1, 2)
    lse = (torch.randn(3, 4, 6, generator=random) * 20).to(device).transpose(1, 2)
    lse[1, 2], lse[:, 4, 1] = -math.inf, -math.inf
    o[1, 2] = math.nan
    sinks = torch.tensor([0.5, 30.0, -math.inf, -3.0], device=device)
    out = torch.full((6, 4, 80), math.nan, dtype=torch.bfloat16, device=device)
    merged, total = merge_states(o, lse, sinks=sinks, lse_base=lse_base, out=out)
    expected, expected_total = merge_states_reference(
        o, lse, sinks=sinks, lse_base=lse_base, out_dtype=torch.float32
    )
    assert merged is out
    torch.testing.assert_close(merged.float(), expected, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(total, expected_total, rtol=1e-6, atol=1e-5)
    assert bool((merged[4, 1] == 0).all())


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
def test_merge_states_says_what_it_does_not_take(change: dict[str, object], match: str) -> None:
    o, lse = torch.zeros(2, 5, 6, 64), torch.zeros(2, 5, 6)
    with pytest.raises(ValueError, match=match):
        merge_states(o, lse, **change)


def _shard_ranges(lens: tuple[int, ...], q_len: int, window: int, world: int, rank: int) -> torch.Tensor:
    """Key ranges of a rank that holds the tokens whose position leaves `rank` when divided by `world`."""

    def held(end: int) -> int:
        return len(range(rank, max(end, 0), world))

    rows = [
        [(held(p - window) if window >= 0 else 0, held(p + 1)) for p in range(n - q_len, n)] for n in lens
    ]
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("split", ["none", "even", "uniform"])
@pytest.mark.parametrize(("q_len", "window"), [(1, 9), (4, -1), (4, 9), (8, 2)])
def test_key_ranges_of_shards_merge_to_the_whole(split: str, q_len: int, window: int, device: str) -> None:
    lens = (70, 5, 130, 1)
    q, cache, table = W(lens=lens, q_len=q_len, gqa_ratio=2).build(device)
    whole, whole_lse = paged_decode_reference(q, cache, table, window_left=window, return_lse=True)
    assert table.seq_lens is not None
    slots = [
        table.page_ids[seq, torch.arange(n) // 16].long() * 16 + torch.arange(n) % 16
        for seq, n in enumerate(lens)
    ]
    # Each rank's table has pages of one token, every other of the sequence.
    k, v = (x.view(-1, 1, *x.shape[2:]) for x in (cache.k, cache.v))
    tokens = PagedKVCache.from_tensors(
        k, v, format=cache.format, k_descale=cache.k_descale, v_descale=cache.v_descale
    )
    parts = []
    for rank in range(2):
        ids = torch.full((len(lens), 65), 2**30, dtype=torch.int32)
        for seq, own in enumerate(slots):
            ids[seq, : len(own[rank::2])] = own[rank::2].int()
        held = torch.tensor([len(range(rank, n, 2)) for n in lens], dtype=torch.int32)
        local = PageTable.from_block_table(ids.to(device), held.to(device), page_size=1).with_key_ranges(
            _shard_ranges(lens, q_len, window, 2, rank).to(device)
        )
        plan = plan_decode(q, tokens, local, split=split)
        got = paged_decode(q, tokens, local, return_lse=True, out_dtype=torch.float32, plan=plan)
        expected = paged_decode_reference(q, tokens, local, return_lse=True)
        torch.testing.assert_close(got[0], expected[0], rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-4)
        parts.append(got)
    o, lse = merge_states(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    torch.testing.assert_close(o, whole, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("q_len", [1, 3])
def test_wrong_key_ranges_stay_in_their_sequence(q_len: int, device: str) -> None:
    # Unused slots hold NaN: reading one shows.
    q, cache, table = W(lens=(70, 5), q_len=q_len, gqa_ratio=2).build(device)
    worst = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32, device=device)
    wrong = table.with_key_ranges(worst.expand(2, q_len, 2).contiguous())
    o = paged_decode(q, cache, wrong)
    assert bool(o.isfinite().all())
    expected = paged_decode_reference(q, cache, wrong)
    torch.testing.assert_close(o.float(), expected, rtol=2e-2, atol=2e-3)
    nothing = table.with_key_ranges(worst.flip(0).expand(2, q_len, 2).contiguous())
    o, lse = paged_decode(q, cache, nothing, return_lse=True)
    assert bool((o == 0).all())
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize(
    ("ranges", "options", "match"),
    [
        (torch.zeros(3, 1, 2, dtype=torch.int32), {"window_left": 4}, "window_left must be -1"),
        (torch.zeros(3, 2, 2, dtype=torch.int32), {}, "key_ranges must have q_len = 1"),
        (torch.zeros(2, 1, 2, dtype=torch.int32), {}, "key_ranges must have shape"),
        (torch.zeros(3, 1, 2, dtype=torch.int64), {}, "key_ranges must have dtype"),
        (torch.zeros(3, 1, 4, dtype=torch.int32)[..., ::2], {}, "key_ranges must be contiguous"),
    ],
)
def test_key_ranges_are_checked(ranges: torch.Tensor, options: dict[str, int], match: str) -> None:
    q, cache, table = W().build()
    with pytest.raises((TypeError, ValueError), match=match):
        paged_decode(q, cache, table.with_key_ranges(ranges), **options)
