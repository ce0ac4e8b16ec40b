"""Several query tokens a sequence: rows of a tile, causality and tree masks, against attention in fp32."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from narrowkv.attn_decode import launch, paged_decode, plan_decode
from narrowkv.attn_decode.config import DecodeShape
from narrowkv.paged_cache import pack_tree_mask, tree_mask_from_custom_mask
from narrowkv.runtime.launch import InterpretExecutor, active_target, executing, run_as
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.decode import K8V4, TREES, DecodeCase, draw_tree
from narrowkv.testing.checking import assert_agrees, assert_right

pytestmark = pytest.mark.sampled

W = DecodeCase.small
# Rows of 2 to 256: every ratio and every q_len, and each number of rows on either side of a tile's end.
SHAPES = [
    (1, 2), (1, 16), (2, 3), (3, 5), (4, 4), (4, 16), (5, 7), (5, 13), (6, 11), (7, 9), (8, 8), (9, 15),
    (10, 6), (11, 12), (12, 8), (12, 10), (12, 16), (13, 5), (14, 14), (15, 9), (16, 8), (16, 16),
]  # fmt: skip


def explicit_attention(q, cache, table, seen):
    """O and lse in fp32 where `seen` `[batch, q_len, q_len]` masks the last keys and no others are masked."""
    batch, q_len = seen.shape[:2]
    ratio = q.shape[1] // cache.num_kv_heads
    o, lse = torch.zeros(q.shape, device=q.device), torch.full(q.shape[:2], -math.inf, device=q.device)
    for seq in range(batch):
        k, v = (x.repeat_interleave(ratio, 1) for x in cache.gather(table, seq))
        count = k.shape[0]
        mask = torch.ones(q_len, count, dtype=torch.bool, device=q.device)
        held = min(q_len, count)
        mask[:, count - held :] = seen[seq, :, q_len - held :]
        rows = slice(seq * q_len, (seq + 1) * q_len)
        s = torch.einsum("qhd,lhd->hql", q[rows].float(), k) * q.shape[2] ** -0.5
        s = s.masked_fill(~mask, -math.inf)
        lse[rows] = torch.logsumexp(s, -1).T
        p = torch.softmax(s, -1).nan_to_num(0.0)
        o[rows] = torch.einsum("hql,lhd->qhd", p, v)
    return o, lse


# The interpreter has no inline assembly, by which sm90 reads FP8.
@pytest.mark.parametrize(
    ("ratio", "q_len", "target"),
    [(*shape, ("cpu", "sm90")[number % 2]) for number, shape in enumerate(SHAPES)],
)
def test_every_ratio_and_number_of_tokens(ratio, q_len, target):
    fmt = "fp8_e4m3fn" if target == "cpu" else "bf16"
    shape = {"gqa_ratio": ratio, "q_len": q_len, "lens": (40, q_len - 1)}
    with run_as(target):
        assert_right(W(**shape, num_kv_heads=1, clean=True, format=fmt))


F8 = "fp8_e4m3fn"
# 33 rows and more over E4M3 and FP4, for which Hopper has a kernel of its own.
TALL = partial(DecodeCase, format=F8, head_dim=128, q_len=8, gqa_ratio=12, num_kv_heads=2, stale_columns=0)


def tall_plan(inputs, split):
    """A plan of a call of `TALL` whose launches merge by themselves, which that kernel needs."""
    plan = inputs.plan(split=split)
    plan = replace(plan, config=replace(plan.config, merge_in_launch=split != "none"), workspace=None)
    kernels = {bound.kernel.__name__ for bound in plan.kernels(inputs.cache)}
    assert ("_tall_decode_kernel" in kernels) == (active_target(inputs.q.device).name == "sm90")
    return plan.with_workspace()


@pytest.mark.parametrize("split", ["none", "even", "per_sequence"])
@pytest.mark.parametrize(
    "case",
    [
        TALL(lens=(300, 8, 0, 131), sinks=True), TALL(lens=(300, 5, 1000), granularity="head", page_size=1),
        TALL(lens=(700, 127, 128), ragged=True, q_dtype=torch.float16, layout="HND"),
        TALL(lens=(257, 1, 90), gqa_ratio=16, page_size=64), TALL(lens=(500, 11), gqa_ratio=9),
        TALL(lens=(400, 2), q_len=128, gqa_ratio=1),
        TALL(lens=(300, 8, 0, 131), format=K8V4, sinks=True),
        TALL(lens=(700, 127, 3), format="fp4_e2m1", ragged=True, q_dtype=torch.float16, spread=6.0),
        TALL(lens=(300, 16, 5, 0, 131), q_len=16, sinks=True),
        TALL(lens=(700, 127, 3), q_len=11, format=K8V4),
        TALL(lens=(500, 130), q_len=16, format="fp4_e2m1", spread=6.0, page_size=64),
        TALL(lens=(300, 40, 7), q_len=24, granularity="head"),
        TALL(lens=(300, 4, 0, 131), q_len=4, sinks=True), TALL(lens=(700, 90, 3), q_len=5, format=K8V4),
        TALL(lens=(500, 130), q_len=4, format="fp4_e2m1", spread=6.0),
    ],
    ids=str,
)  # fmt: skip
def test_tall_tiles(case, split, device):
    inputs = case.inputs(device)
    assert_right(case, device, inputs=inputs, plan=tall_plan(inputs, split))


@pytest.mark.parametrize("split", ["none", "per_sequence"])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_of_a_tall_tile_that_is_not_positive(scale, split, device):
    case = TALL(lens=(300, 5))
    inputs = case.inputs(device)
    assert_right(case, device, inputs=inputs, plan=tall_plan(inputs, split), sm_scale=scale)


@pytest.mark.parametrize("split", ["none", "per_sequence"])
@pytest.mark.parametrize(("back", "fmt"), [(0, F8), (4, F8), (7, F8), (100, F8), (0, K8V4), (4, K8V4)])
def test_a_nan_of_v_reaches_only_the_rows_of_a_tall_tile_that_see_it(back, fmt, split, device):
    """back: from the last key; all rows see the seventh before it."""
    case = TALL(lens=(300, 5, 0, 131), format=fmt)
    inputs = case.inputs(device)
    for seq, count in enumerate(case.lens):
        page, slot = divmod(count - 1 - back, 16)
        stored, channel = (inputs.cache.v, (77,)) if fmt == F8 else (inputs.cache.v_descale, ())
        if back < count:
            stored.view(torch.uint8)[(int(inputs.table.page_ids[seq, page]), slot, 1, *channel)] = 0xFF
    (o, lse), (expected, expected_lse) = inputs.call(tall_plan(inputs, split)), inputs.reference()
    spoiled = expected.isnan().any(-1)
    assert bool(spoiled[: case.q_len, case.gqa_ratio :].any(0).all())
    assert torch.equal(o.isnan().any(-1), spoiled)
    assert_agrees((o[~spoiled], lse[~spoiled]), (expected[~spoiled], expected_lse[~spoiled]))
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=case.lse_bound)


def test_a_plan_interprets_no_kernel_that_it_compiled():
    """Another way to run kernels of the same target, after a call by one that compiles them."""

    class Interpreting(LaunchRecorder, InterpretExecutor):
        """Says that it interprets."""

    inputs, plan, kernels = TALL(lens=(40,)).inputs(), None, []
    for executor in (LaunchRecorder("sm90"), Interpreting("sm90")):
        with executing(executor):
            plan = plan or tall_plan(inputs, "none")
            inputs.call(plan)
        kernels += [launch.kernel.__name__ for launch in executor.launches]
    assert kernels == ["_tall_decode_kernel", "_paged_decode_kernel"]


@pytest.mark.parametrize(
    "changes",
    [
        {"window_left": 9}, {"logits_soft_cap": 30.0}, {"tree": "star"}, {"head_dim": 64}, {"q_len": 2},
        {"format": "fp8_e5m2"}, {"format": "int8"}, {"format": "bf16"}, {"q_dtype": torch.float8_e4m3fn},
        {"format": "fp4_e2m1", "scale_format": "e4m3"}, {"format": "fp4_e2m1", "scale_group": 32},
        {"granularity": "token_head"},
    ],
    ids=str,
)  # fmt: skip
def test_other_calls_on_hopper_take_the_kernel_of_all_targets(changes):
    inputs = TALL(lens=(40,), **changes).inputs()
    with executing(LaunchRecorder("sm90")) as recorder:
        inputs.call(inputs.plan(split="none"))
    assert [launch.kernel.__name__ for launch in recorder.launches] == ["_paged_decode_kernel"]


def test_the_kernel_of_a_batch_invariant_plan_does_not_depend_on_the_batch():
    names = set()
    with executing(LaunchRecorder("sm90")):
        for batch in (1, 16, 64):
            inputs = TALL(lens=(40,) * batch).inputs()
            plan = inputs.plan(max_seq_len=8192, batch_invariant=True)
            names |= {bound.kernel.__name__ for bound in plan.kernels(inputs.cache)}
    assert names == {"_paged_decode_kernel", "_merge_splits_kernel"}


@pytest.mark.parametrize("q_len", [2, 4])
@pytest.mark.parametrize("window_left", [-1, 0, 9, 1000])
def test_tokens_are_causal_among_themselves_inside_a_window(q_len, window_left, device):
    assert_right(W(q_len=q_len, gqa_ratio=5, lens=(70, 1, 33), window_left=window_left), device)


@pytest.mark.parametrize("target", ["sm90", "gfx942", "gfx950"])
def test_keys_are_read_once_up_to_128_rows(target):
    sizes = {"batch": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "capacity": 8192}
    for ratio in (1, 4, 8, 12, 16):
        for q_len in range(1, 17):
            shape = DecodeShape(**sizes, q_len=q_len, num_qo_heads=2 * ratio)
            with run_as(target):
                plan = plan_decode(shape, "fp8_e4m3fn", device="cpu")
            rows = ratio * q_len
            times = math.ceil(rows / plan.config.block_m)
            assert times == 1 or rows > 128, (ratio, q_len)
            assert times <= math.ceil(rows / 64), (ratio, q_len)
            assert f"keys are read {'once' if times == 1 else f'{times} times'}" in plan.explain()


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("target", ["cpu", "sm90"])
def test_a_scale_that_is_not_positive(scale, target):
    with run_as(target):
        assert_right(W(q_len=3, gqa_ratio=24, num_kv_heads=1, lens=(150,)), sm_scale=scale)


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize(
    ("ratio", "q_len", "fmt"), [(2, 5, "fp8_e4m3fn"), (12, 8, "bf16"), (1, 40, "fp4_e2m1")]
)
def test_trees_equal_an_explicit_mask(kind, ratio, q_len, fmt, device):
    case = W(q_len=q_len, gqa_ratio=ratio, num_kv_heads=1, lens=(150, q_len, q_len - 1, 64), format=fmt)
    q, cache, table = case.build(device)
    seen = draw_tree(kind, 4, q_len, torch.Generator().manual_seed(3)).to(device)
    got = paged_decode(q, cache, table.with_tree_mask(pack_tree_mask(seen)), return_lse=True)
    assert_agrees(got, explicit_attention(q, cache, table, seen))


@pytest.mark.parametrize("split", ["none", "even", "per_sequence"])
def test_a_tree_with_a_window_sinks_and_splits(split, device):
    shape = {"q_len": 4, "gqa_ratio": 3, "lens": (300, 2, 0)}
    assert_right(W(**shape, tree="random", window_left=70, sinks=True, split=split), device)


def test_a_tree_inside_key_ranges():
    """A window that counts from a token's depth: ranges bound the prefix, the tree the new tokens."""
    q, cache, table = W(q_len=3, gqa_ratio=2, num_kv_heads=1, lens=(90,)).build()
    ranges = torch.tensor([[[60, 90], [61, 90], [61, 90]]], dtype=torch.int32)
    star = torch.tensor([[0b001, 0b011, 0b101]], dtype=torch.int32)
    o = paged_decode(q, cache, table.with_key_ranges(ranges).with_tree_mask(star))
    k, v = cache.gather(table, 0)
    for token, kept in enumerate(([*range(60, 88)], [*range(61, 89)], [*range(61, 88), 89])):
        p = torch.softmax(q[token].float() @ k[kept, 0].T * q.shape[2] ** -0.5, -1)
        torch.testing.assert_close(o[token].float(), p @ v[kept, 0], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bits_past_the_new_tokens_are_ignored(dtype, device):
    # Unused slots hold NaN: reading one shows.
    q, cache, table = W(q_len=3, gqa_ratio=2, lens=(70, 2, 0)).build(device)
    everything = table.with_tree_mask(torch.full((3, 3), -1, dtype=dtype, device=device))
    seen = torch.ones(3, 3, 3, dtype=torch.bool, device=device)
    got = paged_decode(q, cache, everything, return_lse=True)
    assert_agrees(got, explicit_attention(q, cache, table, seen))


def test_a_row_that_sees_no_new_token_sees_the_prefix():
    q, cache, table = W(q_len=1, lens=(70, 1)).build()
    masked = table.with_tree_mask(torch.zeros(2, 1, dtype=torch.int32))
    got = paged_decode(q, cache, masked, return_lse=True)
    assert_agrees(got, explicit_attention(q, cache, table, torch.zeros(2, 1, 1, dtype=torch.bool)))
    assert bool((got[0][1] == 0).all())


def test_a_nan_reaches_only_the_rows_that_see_it():
    q, cache, table = W(q_len=2, gqa_ratio=2, num_kv_heads=1, lens=(20,), format="bf16").build()
    # The first of the two new tokens has a NaN in V, and the second is another branch.
    cache.v[table.page_ids[0, 1], 2, 0, 5] = math.nan
    o = paged_decode(q, cache, table.with_tree_mask(torch.tensor([[0b01, 0b10]], dtype=torch.int32)))
    assert bool(o[0].isnan().all())
    assert bool(o[1].isfinite().all())


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_engines(packed, device):
    q_len, lens = 5, (17, 5, 3, 40)
    seen = draw_tree("random", len(lens), q_len, torch.Generator().manual_seed(7))
    flat, starts = [], [0]
    for seq, count in enumerate(lens):
        rows = torch.ones(q_len, count, dtype=torch.bool)
        held = min(q_len, count)
        rows[:, count - held :] = seen[seq, :, q_len - held :]
        # The first of the keys that do not exist must not be taken from the row before.
        seen[seq, :, : q_len - held] = False
        entries = rows.flatten().tolist()
        if packed:
            entries += [False] * (-len(entries) % 8)
            entries = [sum(entries[i + j] << j for j in range(8)) for i in range(0, len(entries), 8)]
        flat += entries
        starts.append(len(flat))
    mask = torch.tensor(flat, dtype=torch.uint8 if packed else torch.bool, device=device)
    indptr, held_lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, lens))
    got = tree_mask_from_custom_mask(mask, indptr, held_lens, q_len)
    assert torch.equal(got, pack_tree_mask(seen.to(device)))


def test_wrong_indices_of_a_mask_stay_inside_it():
    wrong = torch.tensor([-(2**31), 2**31 - 1])
    assert tree_mask_from_custom_mask(torch.ones(7, dtype=torch.bool), wrong, wrong, 3).shape == (2, 3)


def test_a_mask_may_change_between_calls_of_a_plan(device):
    q, cache, table = W(q_len=3, lens=(70, 5)).build(device)
    star, chain = (draw_tree(kind, 2, 3, torch.Generator()).to(device) for kind in ("star", "chain"))
    mask = pack_tree_mask(star)
    masked = table.with_tree_mask(mask)
    plan = plan_decode(q, cache, masked)
    paged_decode(q, cache, masked, plan=plan)
    mask.copy_(pack_tree_mask(chain))
    got = paged_decode(q, cache, masked, plan=plan, return_lse=True)
    assert_agrees(got, explicit_attention(q, cache, table, chain))


@pytest.mark.parametrize("q_len", [1, 31, 32, 33, 64])
def test_bits_of_every_width(q_len):
    seen = torch.ones(1, q_len, q_len, dtype=torch.bool).tril()
    mask = pack_tree_mask(seen)
    assert mask.dtype == (torch.int32 if q_len <= 32 else torch.int64)
    bits = (mask.long()[..., None] >> torch.arange(q_len)) & 1
    assert torch.equal(bits.bool(), seen)


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (torch.zeros(3, 2, dtype=torch.int32), "tree_mask must have q_len = 1"),
        (torch.zeros(2, 1, dtype=torch.int32), "tree_mask must have shape"),
        (torch.zeros(3, 1, dtype=torch.int16), "tree_mask must have dtype"),
        (torch.zeros(3, 33, dtype=torch.int32), "use int64"),
        (torch.zeros(3, 65, dtype=torch.int64), "no tree has more than 64"),
        (torch.zeros(2, 3, dtype=torch.int32).T, "tree_mask must be contiguous"),
    ],
)
def test_tree_masks_are_checked(mask, match):
    q, cache, table = W().build()
    with pytest.raises((TypeError, ValueError), match=match):
        paged_decode(q, cache, table.with_tree_mask(mask))


def test_a_tree_mask_may_not_be_overwritten_by_the_output():
    q, cache, table = W(q_len=2, num_kv_heads=1, gqa_ratio=1).build()
    block = torch.zeros(q.numel() * 2, dtype=torch.uint8)
    mask = block[:24].view(torch.int32).view(3, 2)
    with pytest.raises(ValueError, match="tree_mask"):
        paged_decode(q, cache, table.with_tree_mask(mask), out=block.view(torch.bfloat16).view(q.shape))


def test_a_tree_mask_reaches_the_operator():
    q, cache, table = W(q_len=2, num_kv_heads=1, gqa_ratio=2).build()
    masked = table.with_tree_mask(torch.tensor([[1, 2]] * 3, dtype=torch.int32))
    expected = paged_decode(q, cache, masked)
    assert not torch.equal(expected, paged_decode(q, cache, table))
    compiled = torch.compile(paged_decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, cache, masked), expected)
    # A plan serves tables with and without a mask.
    plan = plan_decode(q, cache, table)
    assert torch.equal(paged_decode(q, cache, masked, plan=plan), expected)


@pytest.mark.parametrize("fmt", ["fp4_e2m1", K8V4], ids=str)
def test_factors_that_are_computed_once_change_no_bit(fmt, monkeypatch):
    q, cache, table = W(q_len=3, lens=(70, 5), num_kv_heads=1, gqa_ratio=2, format=fmt).build()
    plain = paged_decode(q, cache, table, plan=plan_decode(q, cache, table))
    asked = []
    monkeypatch.setattr(launch, "repeats_loads", lambda *call: asked.append(call) or True)
    once = paged_decode(q, cache, table, plan=plan_decode(q, cache, table))
    assert asked
    assert torch.equal(once, plain)
