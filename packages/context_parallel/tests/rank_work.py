"""Prefill, sparse attention and Sage over ranks, compared with one GPU's; each runs on every rank."""

from __future__ import annotations

from typing import Any

import rank_faults
import torch
import torch.distributed as dist

from narrowkv.attn_prefill import batch_prefill
from narrowkv.context_parallel import (
    PrefillShares,
    ShardLayout,
    cp_prefill,
    cp_sparse_attention,
    ring_sage_attention,
)
from narrowkv.context_parallel.cases import check_cases
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.runtime.attention.reference import attention_reference
from narrowkv.sage import sage_attention
from narrowkv.sparse_fp8 import DSV4Rows, KVSource, sparse_decode, sparse_prefill_fp8

PREFILLS: dict[str, dict[str, Any]] = {
    "a prompt": {"older": (0, 0), "new": (37, 5)},
    "a prompt by a ring, sinks": {"older": (0, 0), "new": (37, 2), "comm": "ring", "sinks": True},
    "a chunk": {"older": (21, 0), "new": (9, 16)},
    "a chunk by a ring, own pages": {"older": (8, 33), "new": (11, 4), "comm": "ring", "own": True},
    "a chunk in a window": {"older": (21, 3), "new": (9, 14), "window": 6, "interleave": 1},
    "fewer tokens than blocks": {"older": (5, 0, 7), "new": (1, 0, 2), "sinks": True},
    "an FP8 cache": {"older": (13, 2), "new": (6, 5), "format": "fp8_e4m3fn"},
}


def prefill(name: str) -> tuple[float, float]:
    """A chunk over ranks: relative error against float32, and whether the cache has its bytes (0 if so)."""
    case = PREFILLS[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    older, new, page = case["older"], case["new"], 4
    own_pages, fmt = case.get("own", False), case.get("format", "bf16")
    layout = ShardLayout(world, rank, case.get("interleave", page))
    random = torch.Generator().manual_seed(3)
    totals = [a + b for a, b in zip(older, new, strict=True)]
    q = torch.randn(sum(new), 4, 64, generator=random).bfloat16()
    k, v = (torch.randn(sum(totals), 2, 64, generator=random).bfloat16() for _ in range(2))
    covers = page if own_pages else page * world
    width = -(-max(totals) // covers)
    ids = torch.randperm(len(totals) * width, generator=random).view(len(totals), -1)
    seqs = torch.repeat_interleave(torch.arange(len(totals)), torch.tensor(totals))
    positions = torch.cat([torch.arange(n) for n in totals])
    slots = ids[seqs, positions // covers] * covers + positions % covers
    is_new = positions >= torch.tensor(older)[seqs]

    def local(tokens: torch.Tensor) -> torch.Tensor:
        where = positions[tokens] if own_pages else None
        return layout.local_slots(slots[tokens], page, positions=where)

    def empty() -> PagedKVCache:
        return PagedKVCache.empty(ids.numel(), page, 2, 64, format=fmt, k_descale=0.02, v_descale=0.02)

    cache, expected_cache = empty(), empty()
    append(cache, k[~is_new], v[~is_new], local(~is_new))
    append(expected_cache, k, v, local(torch.ones_like(is_new)))
    table = PageTable.from_block_table(ids, cached_lens=torch.tensor(older), page_size=covers)
    shares = PrefillShares(layout, new, older=any(older))
    mine = shares.rows()
    sinks = torch.linspace(-1, 1, 4) if case.get("sinks") else None
    k_new, v_new = k[is_new][mine], v[is_new][mine]
    window = case.get("window", -1)
    o = cp_prefill(
        q[mine], k_new, v_new, cache, table, shares=shares, slot_mapping=slots[is_new],
        comm=case.get("comm", "all_gather"), sinks=sinks, window_left=window,
    )  # fmt: skip
    pairs = (cache.k, expected_cache.k), (cache.v, expected_cache.v)
    differs = sum(not torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    # Older tokens were stored in the cache's format; new ones are exact.
    stored_k, stored_v = (x.float() if fmt == "bf16" else _stored(x, is_new) for x in (k, v))
    found = []
    first = 0
    for seq, (before, count) in enumerate(zip(older, new, strict=True)):
        rows = q[first : first + count]
        of_seq = seqs == seq
        expected, _ = attention_reference(
            rows, stored_k[of_seq], stored_v[of_seq], before + torch.arange(count), sm_scale=64**-0.5,
            logits_soft_cap=0.0, window_left=window, window_right=0, sinks=sinks,
        )  # fmt: skip
        found.append(expected)
        first += count
    expected = torch.cat(found)[mine]
    error = float((o.float() - expected).abs().sum() / expected.abs().sum().clamp_min(1e-30))
    return error, float(differs)


def _stored(x: torch.Tensor, is_new: torch.Tensor) -> torch.Tensor:
    """Tokens as an FP8 cache of descale 0.02 holds the older of them."""
    cache = PagedKVCache.empty(x.shape[0], 1, 2, 64, format="fp8_e4m3fn", k_descale=0.02, v_descale=0.02)
    append(cache, x, x, torch.arange(x.shape[0]))
    stored = cache.dequantize()[0][:, 0]
    return torch.where(is_new[:, None, None], x.float(), stored)


def one_gpu_error() -> float:
    """Relative error of one GPU's prefill in bf16, which bounds are made of."""
    random = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(40, heads, 64, generator=random).bfloat16() for heads in (4, 2, 2))
    cache = PagedKVCache.from_tensors(k[:, None], v[:, None], format="bf16")
    table = PageTable.from_block_table(torch.arange(40)[None], torch.tensor([40]), page_size=1)
    o = batch_prefill(q, cache, table, torch.tensor([0, 40], dtype=torch.int32))
    expected, _ = attention_reference(
        q, k.float(), v.float(), torch.arange(40), sm_scale=64**-0.5, logits_soft_cap=0.0, window_left=-1,
        window_right=0, sinks=None,
    )  # fmt: skip
    assert isinstance(o, torch.Tensor)
    return float((o.float() - expected).abs().sum() / expected.abs().sum())


def sparse() -> dict[str, float]:
    """Decode and FP8 prefill over a pool whose rows are dealt to ranks: differences from one rank's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(5)
    heads, tokens = 8 * world, 3
    rows = torch.randn(40, 512, generator=random)
    q = torch.randn(tokens, heads, 512, generator=random).bfloat16()
    sink = torch.linspace(-1, 1, heads)
    indptr = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    indices = torch.randint(-1, 40, (20,), generator=random).int()
    layout = ShardLayout(world, rank, 4)
    own = layout.globalize(torch.arange(layout.local_lens(40)))
    found = {}
    mine = slice(rank * heads // world, (rank + 1) * heads // world)
    for name, attend, pool, part in (
        ("bf16 decode", sparse_decode, rows.bfloat16(), rows[own].bfloat16()),
        ("FP8 prefill", sparse_prefill_fp8, DSV4Rows.quantize(rows, layout="split"),
         DSV4Rows.quantize(rows[own], layout="split")),
    ):  # fmt: skip
        whole, whole_lse = attend(
            q, KVSource(pool, indptr, indices), attn_sink=sink, return_lse=True,
            out=torch.empty(q.shape, dtype=torch.float32),
        )  # fmt: skip
        o, lse = cp_sparse_attention(
            q[:, mine].contiguous(), KVSource(part, indptr, indices), layout=layout, attend=attend,
            attn_sink=sink[mine],
        )  # fmt: skip
        difference = (o.float() - whole[:, mine]).abs().sum() / whole[:, mine].abs().sum()
        finite = whole_lse[:, mine].isfinite()
        assert torch.equal(finite, lse.isfinite())
        torch.testing.assert_close(lse[finite], whole_lse[:, mine][finite], rtol=1e-3, atol=1e-3)
        found[name] = float(difference)
    return found


def sage() -> dict[str, tuple[float, float]]:
    """Sage over a ring: relative error against float32, and that of one GPU's Sage."""
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, 24 * world, heads, 64, generator=random).bfloat16() for heads in (2, 1, 1))
    mine = slice(24 * rank, 24 * (rank + 1))
    found = {}
    for causal in (False, True):
        o, lse = ring_sage_attention(q[:, mine], k[:, mine], v[:, mine], causal=causal, qk_dtype="int8")
        again, _ = ring_sage_attention(q[:, mine], k[:, mine], v[:, mine], causal=causal, qk_dtype="int8")
        assert torch.equal(o, again)
        alone = sage_attention(q, k, v, causal="top_left" if causal else None, qk_dtype="int8")
        expected, log_sum = attention_reference(
            q[0], k[0].float(), v[0].float(), torch.arange(24 * world), sm_scale=64**-0.5,
            logits_soft_cap=0.0, window_left=-1, window_right=0 if causal else -1, sinks=None,
        )  # fmt: skip
        assert isinstance(alone, torch.Tensor)
        torch.testing.assert_close(lse[0], log_sum[mine], rtol=2e-2, atol=2e-2)
        error, one = (
            float((x.float() - expected[mine]).abs().sum() / expected[mine].abs().sum())
            for x in (o[0], alone[0, mine])
        )
        found["causal" if causal else "full"] = error, one
    return found


def everything(
    cases: tuple[str, ...], prefills: tuple[str, ...], with_sparse: bool, with_sage: bool, with_faults: bool
) -> dict[str, Any]:
    """All of it in one set of processes, with the cases of decode and the prefills of these names."""
    return {
        "decode": check_cases(cases),
        "prefill": {name: prefill(name) for name in prefills},
        "sparse": sparse() if with_sparse else {},
        "sage": sage() if with_sage else {},
        "faults": rank_faults.every_fault() if with_faults else [],
    }
