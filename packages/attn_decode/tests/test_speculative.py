"""Several query tokens a sequence: rows of a tile, causality and tree masks, against attention in fp32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.cases import TREES, DecodeCase, draw_tree
from narrowkv.attn_decode.config import DecodeShape
from narrowkv.paged_cache import PagedKVCache, PageTable, pack_tree_mask, tree_mask_from_custom_mask
from narrowkv.runtime.launch import run_as

pytestmark = pytest.mark.sampled

W = DecodeCase.small
# Rows of 2 to 256: every ratio and every q_len, and each number of rows on either side of a tile's end.
SHAPES = [
    (1, 2), (1, 16), (2, 3), (3, 5), (4, 4), (4, 16), (5, 7), (5, 13), (6, 11), (7, 9), (8, 8), (9, 15),
    (10, 6), (11, 12), (12, 8), (12, 10), (12, 16), (13, 5), (14, 14), (15, 9), (16, 8), (16, 16),
]  # fmt: skip


def explicit_attention(
    q: torch.Tensor, cache: PagedKVCache, table: PageTable, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
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


def _compare(got: Any, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    o, lse = got
    error = (o.float() - expected[0]).abs().sum() / expected[0].abs().sum()
    assert float(error) <= 0.002
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("ratio", "q_len", "target"),
    [(*shape, ("cpu", "sm90")[number % 2]) for number, shape in enumerate(SHAPES)],
)
def test_every_ratio_and_number_of_tokens(ratio: int, q_len: int, target: str) -> None:
    # The interpreter has no inline assembly, by which sm90 reads FP8.
    case = W(
        gqa_ratio=ratio, q_len=q_len, num_kv_heads=1, lens=(70, q_len - 1), clean=True,
        format="fp8_e4m3fn" if target == "cpu" else "bf16",
    )  # fmt: skip
    q, cache, table = case.build()
    with run_as(target):
        got = paged_decode(q, cache, table, return_lse=True)
    expected = paged_decode_reference(q, cache, table, return_lse=True)
    _compare(got, (expected[0], expected[1]))


@pytest.mark.parametrize("target", ["sm90", "gfx942", "gfx950"])
def test_keys_are_read_once_up_to_128_rows(target: str) -> None:
    for ratio in (1, 4, 8, 12, 16):
        for q_len in range(1, 17):
            shape = DecodeShape(
                batch=8, q_len=q_len, num_qo_heads=2 * ratio, num_kv_heads=2, head_dim=128, page_size=16,
                capacity=8192,
            )  # fmt: skip
            with run_as(target):
                plan = plan_decode(shape, "fp8_e4m3fn", device="cpu")
            rows = ratio * q_len
            times = math.ceil(rows / plan.config.block_m)
            assert times == 1 or rows > 128, (ratio, q_len)
            assert times <= math.ceil(rows / 64), (ratio, q_len)
            assert f"keys are read {'once' if times == 1 else f'{times} times'}" in plan.explain()


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("target", ["cpu", "sm90"])
def test_a_scale_that_is_not_positive(scale: float, target: str) -> None:
    q, cache, table = W(q_len=3, gqa_ratio=24, num_kv_heads=1, lens=(150,)).build()
    with run_as(target):
        got = paged_decode(q, cache, table, sm_scale=scale, return_lse=True)
    expected = paged_decode_reference(q, cache, table, sm_scale=scale, return_lse=True)
    _compare(got, (expected[0], expected[1]))


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize(
    ("ratio", "q_len", "fmt"), [(2, 5, "fp8_e4m3fn"), (12, 8, "bf16"), (1, 40, "fp4_e2m1")]
)
def test_trees_equal_an_explicit_mask(kind: str, ratio: int, q_len: int, fmt: str, device: str) -> None:
    case = W(q_len=q_len, gqa_ratio=ratio, num_kv_heads=1, lens=(150, q_len, q_len - 1, 64), format=fmt)
    q, cache, table = case.build(device)
    seen = draw_tree(kind, 4, q_len, torch.Generator().manual_seed(3)).to(device)
    got = paged_decode(q, cache, table.with_tree_mask(pack_tree_mask(seen)), return_lse=True)
    _compare(got, explicit_attention(q, cache, table, seen))


def test_a_chain_is_causal() -> None:
    q, cache, table = W(q_len=6).build()
    seen = torch.ones(3, 6, 6, dtype=torch.bool).tril()
    chained = table.with_tree_mask(pack_tree_mask(seen))
    expected = paged_decode_reference(q, cache, table, return_lse=True)
    _compare(paged_decode(q, cache, chained, return_lse=True), (expected[0], expected[1]))


@pytest.mark.parametrize("split", ["none", "even", "uniform"])
def test_a_tree_with_a_window_sinks_and_splits(split: str, device: str) -> None:
    q, cache, table = W(q_len=4, gqa_ratio=3, lens=(300, 2, 0)).build(device)
    seen = draw_tree("random", 3, 4, torch.Generator().manual_seed(5)).to(device)
    masked = table.with_tree_mask(pack_tree_mask(seen))
    options: dict[str, Any] = {"window_left": 70, "sinks": torch.linspace(-1, 1, 6, device=device)}
    got = paged_decode(
        q, cache, masked, return_lse=True, plan=plan_decode(q, cache, masked, split=split), **options
    )
    expected = paged_decode_reference(q, cache, masked, return_lse=True, **options)
    _compare(got, (expected[0], expected[1]))


def test_a_tree_inside_key_ranges() -> None:
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
def test_bits_past_the_new_tokens_are_ignored(dtype: torch.dtype, device: str) -> None:
    # Unused slots hold NaN: reading one shows.
    q, cache, table = W(q_len=3, gqa_ratio=2, lens=(70, 2, 0)).build(device)
    everything = table.with_tree_mask(torch.full((3, 3), -1, dtype=dtype, device=device))
    o, lse = paged_decode(q, cache, everything, return_lse=True)
    assert bool(o.isfinite().all())
    seen = torch.ones(3, 3, 3, dtype=torch.bool, device=device)
    _compare((o, lse), explicit_attention(q, cache, table, seen))


def test_a_row_that_sees_no_new_token_sees_the_prefix() -> None:
    q, cache, table = W(q_len=1, lens=(70, 1)).build()
    masked = table.with_tree_mask(torch.zeros(2, 1, dtype=torch.int32))
    o, lse = paged_decode(q, cache, masked, return_lse=True)
    _compare((o, lse), explicit_attention(q, cache, table, torch.zeros(2, 1, 1, dtype=torch.bool)))
    assert bool((o[1] == 0).all())
    assert bool((lse[1] == -math.inf).all())


def test_a_nan_reaches_only_the_rows_that_see_it() -> None:
    q, cache, table = W(q_len=2, gqa_ratio=2, num_kv_heads=1, lens=(20,), format="bf16").build()
    # The first of the two new tokens has a NaN in V, and the second is another branch.
    cache.v[table.page_ids[0, 1], 2, 0, 5] = math.nan
    o = paged_decode(q, cache, table.with_tree_mask(torch.tensor([[0b01, 0b10]], dtype=torch.int32)))
    assert bool(o[0].isnan().all())
    assert bool(o[1].isfinite().all())


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_engines(packed: bool, device: str) -> None:
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


def test_wrong_indices_of_a_mask_stay_inside_it() -> None:
    mask = torch.ones(7, dtype=torch.bool)
    wrong = torch.tensor([-(2**31), 2**31 - 1])
    assert tree_mask_from_custom_mask(mask, wrong, wrong, 3).shape == (2, 3)


def test_a_mask_may_change_between_calls_of_a_plan(device: str) -> None:
    q, cache, table = W(q_len=3, lens=(70, 5)).build(device)
    seen = draw_tree("star", 2, 3, torch.Generator()).to(device)
    mask = pack_tree_mask(seen)
    masked = table.with_tree_mask(mask)
    plan = plan_decode(q, cache, masked)
    paged_decode(q, cache, masked, plan=plan)
    chain = draw_tree("chain", 2, 3, torch.Generator()).to(device)
    mask.copy_(pack_tree_mask(chain))
    got = paged_decode(q, cache, masked, plan=plan, return_lse=True)
    _compare(got, explicit_attention(q, cache, table, chain))


@pytest.mark.parametrize("q_len", [1, 31, 32, 33, 64])
def test_bits_of_every_width(q_len: int) -> None:
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
def test_tree_masks_are_checked(mask: torch.Tensor, match: str) -> None:
    q, cache, table = W().build()
    with pytest.raises((TypeError, ValueError), match=match):
        paged_decode(q, cache, table.with_tree_mask(mask))


def test_a_tree_mask_may_not_be_overwritten_by_the_output() -> None:
    q, cache, table = W(q_len=2, num_kv_heads=1, gqa_ratio=1).build()
    block = torch.zeros(q.numel() * 2, dtype=torch.uint8)
    mask = block[:24].view(torch.int32).view(3, 2)
    with pytest.raises(ValueError, match="tree_mask"):
        paged_decode(q, cache, table.with_tree_mask(mask), out=block.view(torch.bfloat16).view(q.shape))


def test_a_tree_mask_reaches_the_operator() -> None:
    q, cache, table = W(q_len=2).build()
    masked = table.with_tree_mask(torch.tensor([[1, 2]] * 3, dtype=torch.int32))
    expected = paged_decode(q, cache, masked)
    assert not torch.equal(expected, paged_decode(q, cache, table))
    compiled = torch.compile(paged_decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, cache, masked), expected)
    # A plan serves tables with and without a mask.
    plan = plan_decode(q, cache, table)
    assert torch.equal(paged_decode(q, cache, masked, plan=plan), expected)
