"""Traced decode and append, beside what tests/plans asks of every traced call."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from narrowkv.attn_decode import paged_decode
from narrowkv.paged_cache import PagedKVCache, Rope, append
from narrowkv.testing.cases.cache import copy_cache, differing_bytes
from narrowkv.testing.cases.decode import DecodeCase

SMALL: dict[str, Any] = {"lens": (20, 5), "num_kv_heads": 1, "gqa_ratio": 2}
BF16 = DecodeCase.small(format="bf16", **SMALL)


def _new(tokens: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, tokens, 1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    return k, v, torch.arange(3, 3 + tokens, dtype=torch.int32)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with a C++ compiler on a CPU")
@pytest.mark.parametrize(
    "case", [BF16, DecodeCase.small(granularity="token_head", ragged=True, **SMALL)], ids=str
)
def test_inductor_does_not_copy_the_cache(case: DecodeCase) -> None:
    q, cache, table = case.build()
    own = copy_cache(cache)

    def step(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, cache: PagedKVCache = cache
    ) -> Any:
        append(cache, k, v, slots)
        return paged_decode(2 * q, cache, table, return_lse=True, window_left=9)

    expected = step(q, *_new(), cache=own)
    got, codes = run_and_get_code(torch.compile(step, fullgraph=True), q, *_new())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not differing_bytes(cache, own)
    lines = "".join(codes).splitlines()
    (call,) = (line for line in lines if "narrowkv.append.default(" in line)
    stored = [name.strip() for name in call.split("default(")[1].split(",")[:2]]
    assert all(name.startswith("arg") for name in stored), "the caller's own tensors"
    for line in lines:
        if "cpp_fused" in line or "clone" in line or "copy_" in line:
            assert not any(f"{name}," in line or f"{name})" in line for name in stored), line


def test_key_ranges_reach_the_operator() -> None:
    q, cache, table = BF16.build()
    ranges = torch.zeros(table.batch_size, q.shape[0] // table.batch_size, 2, dtype=torch.int32)
    ranges[..., 1] = 2
    ranged = table.with_key_ranges(ranges)
    expected = paged_decode(q, cache, ranged)
    assert not torch.equal(expected, paged_decode(q, cache, table))
    compiled = torch.compile(paged_decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, cache, ranged), expected)


def test_queries_are_rotated_in_place_in_a_traced_append() -> None:
    _, cache, _ = BF16.build()
    k, v, slots = _new()
    rope = Rope(torch.rand(9, 16), torch.rand(9, 16), torch.arange(len(slots)))

    def step(q: torch.Tensor) -> torch.Tensor:
        append(cache, k, v, slots, rope=rope, q=q)
        return q + 1

    q = torch.randn(len(slots), 6, cache.head_dim)
    expected = q.clone()
    append(cache, k, v, slots, rope=rope, q=expected)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(q, expected)
    assert torch.equal(got, expected + 1)
