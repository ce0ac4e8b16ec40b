"""paged_decode against the fp32 reference: a case for every value of every axis, and unusual input."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.config import DecodeShape, choose_config
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import run_as
from narrowkv.runtime.targets import get_target
from narrowkv.testing.cases.decode import QUICK_RANDOM_CASES, DecodeCase, at_random, one_at_a_time
from narrowkv.testing.checking import assert_agrees, assert_right
from narrowkv.testing.places import AMD_TARGETS

pytestmark = pytest.mark.sampled

W = DecodeCase.small
# Seeds are no axis; mixtures have sequences and windows in which every fault shows.
MIXTURES = [
    replace(case, seed=0, lens=(70, 5, 130), window_left=case.window_left or -1)
    for case in at_random(QUICK_RANDOM_CASES, seed=0)
]
# A page of 256 is longer than a tile of keys.
CASES = list(dict.fromkeys([*one_at_a_time(), *MIXTURES, W(head_dim=112, gqa_ratio=3), W(page_size=256)]))
# Layouts and descales are in the sample alone, too: few heads or another format hide what is wrong with them.
ALONE = [case for case in one_at_a_time() if (case.layout, case.granularity) != ("NHD", "float")]


@pytest.mark.sampled("place", always=[{"case": case} for case in ALONE])
@pytest.mark.parametrize(
    "place", ["here", *(pytest.param(t, marks=pytest.mark.slow) for t in AMD_TARGETS)], indirect=True
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case(case, place):
    with place.context():
        assert_right(case, place.device)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_an_output_of_more_bits_is_closer(out_dtype, device):
    case = W(out_dtype=out_dtype)
    o, _ = assert_right(case, device, bound=0.0005)
    assert o.dtype == out_dtype
    q, cache, table = case.build(device)
    assert paged_decode(q, cache, table, out_dtype=out_dtype).dtype == out_dtype


PLANS = [
    {"split": "none"}, {"split": "per_sequence"}, {"split": "even"},
    {"tokens_per_split": 32}, {"tokens_per_split": 1},
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("in_launch", [False, True])
def test_every_split_and_either_merge(plan, in_launch, device):
    case = W(lens=(300, 0, 130, 1), granularity="head", sinks=True)
    inputs = case.inputs(device)
    made = inputs.plan(**plan)
    made = replace(made, config=replace(made.config, merge_in_launch=in_launch))
    assert_right(case, inputs=inputs, plan=made)


def test_a_launch_merges_more_splits_than_a_program_does(device):
    """Sequences of 65 and 9 splits: groups of groups, and groups of one split."""
    case = W(lens=(65 * 128 - 5, 128 * 9, 100), num_kv_heads=1)
    inputs = case.inputs(device)
    made = inputs.plan(tokens_per_split=128)
    assert made.config.num_items == 3 * 65
    made = replace(made, config=replace(made.config, merge_in_launch=True), workspace=None).with_workspace()
    assert_right(case, inputs=inputs, plan=made)
    assert not made.workspace.counters(3 * 65).any()


def test_lengths_around_pages_tiles_and_splits(device):
    case = W(lens=(1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 40), gqa_ratio=2)
    inputs = case.inputs(device)
    assert_right(case, inputs=inputs, plan=inputs.plan(tokens_per_split=32))


# A sample: tests/test_emulated.py runs the machine code of both targets for every format. The even split
# would launch as many programs as fill the chip, most of which find no work.
@pytest.mark.parametrize(
    ("target", "case"),
    [
        ("gfx942", W(split="per_sequence", num_kv_heads=1, gqa_ratio=5)),
        ("gfx950", W(format="fp8_e4m3fnuz", split="per_sequence", num_kv_heads=1, gqa_ratio=5)),
        ("gfx950", W(format="bf16", split="none", num_kv_heads=1, gqa_ratio=5)),
        ("gfx942", W(format="int4", split="per_sequence", layout="padded", head_dim=80)),
        ("gfx942", W(format=CacheFormat("int8", "int4"), split="none", page_size=1, layout="tokens")),
    ],
    ids=str,
)  # fmt: skip
def test_the_code_paths_of_amd_targets_when_interpreted(target, case):
    with run_as(target):
        assert_right(case)


def test_probabilities_over_a_bf16_cache_are_two_terms(device):
    case = W(format="bf16", lens=(70, 200), gqa_ratio=4, split="none", out_dtype=torch.float32)
    # One bf16 term is 1.5e-3 off; two keep 16 bits.
    assert_right(case, device, bound=1e-4)


@pytest.mark.parametrize("grows", [True, False])
def test_v_descales_of_tokens_that_change_from_tile_to_tile(grows, device):
    case = W(lens=(300,), granularity="token_head", gqa_ratio=4, split="none")
    inputs = case.inputs(device)
    factor = 2.0 ** (torch.arange(320, device=device) / 40)
    pages, _ = inputs.table.pages_of(0)
    inputs.cache.v_descale[pages] *= (factor if grows else factor.flip(0))[: 16 * len(pages)].view(-1, 16, 1)
    assert_right(case, inputs=inputs)


# ------------------------------------------------------------------------------------ nothing to attend to


@pytest.mark.parametrize(
    ("lens", "q_len", "empty"),
    [((0, 20, 0), 1, [0, 2]), ((2, 0), 4, [0, 1, 4, 5, 6, 7])],
    ids=["empty sequences", "rows before the first key"],
)
def test_rows_that_attend_to_nothing_are_zero(lens, q_len, empty, device):
    q, cache, table = W(lens=lens, q_len=q_len).build(device)
    o, lse = paged_decode(q, cache, table, return_lse=True)
    nothing = torch.zeros(len(q), dtype=torch.bool, device=device)
    nothing[empty] = True
    assert torch.equal((o == 0).all(-1), nothing[:, None].expand(lse.shape))
    assert torch.equal(lse == -math.inf, nothing[:, None].expand(lse.shape))


# ------------------------------------------------------------------------------------------ the same bits


def test_sequences_may_share_pages(device):
    q, cache, table = W(lens=(64, 64)).build(device)
    shared = PageTable.from_block_table(table.page_ids[[0, 0]].contiguous(), table.seq_lens, page_size=16)
    twice = paged_decode(q[[0, 0]].contiguous(), cache, shared)
    assert torch.equal(twice[0], twice[1])


def test_an_output_may_be_strided(device):
    q, cache, table = W().build(device)
    out = torch.full((3, 24, 100), math.nan, dtype=q.dtype, device=device)[..., 3:67]
    assert paged_decode(q, cache, table, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, paged_decode(q, cache, table))


@pytest.mark.parametrize("tokens_per_split", [None, 64])
def test_batch_invariant_results_are_those_of_a_sequence_alone(tokens_per_split, device):
    """Batches of 1 to 140 sequences (lengths are read 128 at a time), each with a table of another width."""
    lens = torch.randint(0, 20, (140,), generator=torch.Generator().manual_seed(2))
    lens[:3] = torch.tensor([200, 64, 7])
    q, cache, table = W(lens=tuple(lens.tolist()), num_kv_heads=1, gqa_ratio=2, clean=True).build(device)
    alone = {}
    for batch, width in ((1, 13), (1, 40), (2, 20), (3, 13), (140, 15)):
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
    assert_agrees(o, paged_decode_reference(q, cache, table))


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90", "cpu"])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn", "fp4_e2m1"])
def test_a_batch_invariant_configuration_does_not_depend_on_the_batch_or_the_capacity(fmt, target):
    found = set()
    for batch in (*range(1, 20), 64, 300, 4096):
        for capacity in (64, 1024, 131072, 2**20):
            shape = DecodeShape(batch, 1, 96, 8, 128, 16, capacity)
            config = choose_config(get_target(target), shape, fmt, fmt, batch_invariant=True)
            found.add(replace(config, num_items=0))  # how many programs there are is no part of a result
    assert len(found) == 1


def test_batch_invariance_is_asked_of_a_plan_that_has_it(device):
    q, cache, table = W().build(device)
    with pytest.raises(ValueError, match="plan must be made with batch_invariant=True"):
        paged_decode(q, cache, table, plan=plan_decode(q, cache, table), batch_invariant=True)
    plan = plan_decode(q, cache, table, batch_invariant=True)
    planned = paged_decode(q, cache, table, plan=plan)
    assert torch.equal(paged_decode(q, cache, table, batch_invariant=True), planned)


# --------------------------------------------------------------------------------------- unusual numbers


def test_a_nan_before_the_window_reaches_nobody(device):
    q, cache, table = W(lens=(40,)).build(device)
    page = int(table.page_ids[0, 1])
    for stored in (cache.k, cache.v):
        stored.view(torch.uint8)[page, 0] = 0x7F  # token 16
    o = paged_decode(q, cache, table, window_left=20)  # keys 19..39
    assert not bool(o.isnan().any())


# ---------------------------------------------------------------------------------------------- refusals


def test_a_plan_for_shorter_sequences_serves_longer_ones(device):
    longer = W(lens=(70, 5, 900), clean=True).build(device)
    short = plan_decode(*W().build(device), tokens_per_split=64)
    with pytest.raises(ValueError, match="plan must cover the longest sequence of 900 tokens"):
        paged_decode(*longer, plan=short, validate=True)
    error = paged_decode(*longer, plan=short).float() - paged_decode_reference(*longer)
    assert float(error.abs().max()) < 0.02


def _with_pages_of_8(table):
    return PageTable.from_block_table(table.page_ids, table.seq_lens, page_size=8)


def _key_ranges(*sizes, dtype=torch.int32):
    return torch.zeros(sizes, dtype=dtype)


REFUSED = {
    "q dtype": ("q must", lambda q, c, t: paged_decode(q.float(), c, t)),
    "q shape": ("q must have shape", lambda q, c, t: paged_decode(q[0], c, t)),
    "heads": ("multiple of the cache's 2 KV heads", lambda q, c, t: paged_decode(q[:, :23], c, t)),
    "head_dim": ("head_dim", lambda q, c, t: paged_decode(q[..., :63], c, t)),
    "other head_dim": ("cache's head_dim 64", lambda q, c, t: paged_decode(torch.cat([q, q], -1), c, t)),
    "strided columns": ("contiguous", lambda q, c, t: paged_decode(torch.cat([q, q], -1)[..., ::2], c, t)),
    "rows": (r"batch \* q_len rows", lambda q, c, t: paged_decode(torch.cat([q, q[:1]]), c, t)),
    "out shape": ("out must have shape", lambda q, c, t: paged_decode(q, c, t, out=q[:2].clone())),
    "out dtype": ("out", lambda q, c, t: paged_decode(q, c, t, out=q.double())),
    "out is q": ("must not share memory with q", lambda q, c, t: paged_decode(q, c, t, out=q)),
    "grad": ("must not require grad", lambda q, c, t: paged_decode(q.requires_grad_(), c, t)),
    "sinks shape": ("sinks must have shape", lambda q, c, t: paged_decode(q, c, t, sinks=torch.zeros(3))),
    "scale": ("sm_scale must be finite, got nan", lambda q, c, t: paged_decode(q, c, t, sm_scale=math.nan)),
    "window": ("window_left", lambda q, c, t: paged_decode(q, c, t, window_left=-2)),
    "soft cap": ("logits_soft_cap", lambda q, c, t: paged_decode(q, c, t, logits_soft_cap=-1.0)),
    "split": ("split must be", lambda q, c, t: plan_decode(q, c, t, split="odd")),
    "a split of a batch-invariant plan": (
        "split must be None", lambda q, c, t: plan_decode(q, c, t, split="even", batch_invariant=True)),
    "page sizes differ": (
        "cache's page_size 16, got 8", lambda q, c, t: paged_decode(q, c, _with_pages_of_8(t))),
    "key ranges and a window": (
        "window_left must be -1",
        lambda q, c, t: paged_decode(q, c, t.with_key_ranges(_key_ranges(3, 1, 2)), window_left=4)),
    "key ranges of more tokens": (
        "key_ranges must have q_len = 1",
        lambda q, c, t: paged_decode(q, c, t.with_key_ranges(_key_ranges(3, 2, 2)))),
    "key ranges of another batch": (
        "key_ranges must have shape", lambda q, c, t: t.with_key_ranges(_key_ranges(2, 1, 2))),
    "key ranges in int64": (
        "key_ranges must have dtype",
        lambda q, c, t: t.with_key_ranges(_key_ranges(3, 1, 2, dtype=torch.int64))),
    "strided key ranges": (
        "key_ranges must be contiguous",
        lambda q, c, t: t.with_key_ranges(_key_ranges(3, 1, 4)[..., ::2])),
}  # fmt: skip
WRONG_KINDS = ("q dtype", "out dtype", "key ranges in int64")


@pytest.mark.parametrize("fault", REFUSED)
def test_bad_arguments_are_refused_by_name(fault):
    message, call = REFUSED[fault]
    with pytest.raises(TypeError if fault in WRONG_KINDS else ValueError, match=message):
        call(*W().build())


def test_an_unknown_target_lists_the_known_ones():
    with pytest.raises((ValueError, UnsupportedError), match="gfx942"), run_as("gfx906"):
        pass


# ------------------------------------------------------------------------------------------ GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("split", ["none", "per_sequence", "even"])
def test_a_captured_graph_serves_other_lengths(split):
    q, cache, table = W(lens=(500, 300, 17)).build("cuda")
    plan = plan_decode(q, cache, table, split=split)
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device="cuda")
    paged_decode(q, cache, table, out=out, plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_decode(q, cache, table, out=out, plan=plan)
    for lens in ([500, 300, 17], [1, 299, 0], [433, 16, 12]):
        table.seq_lens.copy_(torch.tensor(lens))
        out.fill_(math.nan)
        graph.replay()
        assert_agrees(out, paged_decode_reference(q, cache, table))


@pytest.mark.gpu
def test_another_stream():
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
def test_byte_offsets_beyond_2_31_and_page_ids_beyond_65535():
    pages = 2**31 // (16 * 2 * 64) + 64
    q, small, small_table = W(lens=(40, 33)).build("cuda")
    far = pages - 1 - torch.arange(6, device="cuda").view(2, 3)
    sides = []
    for near in (small.k, small.v):
        sides.append(torch.zeros(pages, 16, 2, 64, dtype=torch.uint8, device="cuda"))
        sides[-1][far] = near.view(torch.uint8)[small_table.page_ids[:, :3].long()]
    descales = {"k_descale": small.k_descale, "v_descale": small.v_descale}
    cache = PagedKVCache.from_tensors(*sides, format="fp8_e4m3fn", **descales)
    assert cache.needs_64_bit_addresses
    table = PageTable.from_block_table(far.int(), small_table.seq_lens, page_size=16)
    assert torch.equal(paged_decode(q, cache, table), paged_decode(q, small, small_table))
