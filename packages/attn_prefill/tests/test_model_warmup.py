"""After a model was warmed up, random batches compile nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import DecodeShape, paged_decode, plan_decode
from narrowkv.attn_prefill import batch_prefill, plan_append, plan_prefill, prefill_append
from narrowkv.attn_prefill.warmup import record_model, warmup_model
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable, append
from narrowkv.paged_cache.cache import fp4_scales
from narrowkv.runtime.launch import count_compiles, executing, recording
from narrowkv.runtime.launch.recording import RecordExecutor
from narrowkv.runtime.targets import get_target
from narrowkv.testing.places import find_place

I32 = torch.int32
HEADS, KV_HEADS, DIM, PAGE = 12, 1, 64, 16
MOST_Q_LEN = 8
MODEL: dict[str, Any] = {"num_qo_heads": HEADS, "max_batch": 64, "max_seq_len": 2048, "max_num_tokens": 512}


def _cache(device: str, num_pages: int = 64, format: str | CacheFormat = "fp8_e4m3fn") -> PagedKVCache:
    return PagedKVCache.empty(num_pages, PAGE, KV_HEADS, DIM, format=format, device=device)


def _random_calls(cache: PagedKVCache, count: int, *, seed: int = 0, decode_only: bool = False) -> None:
    """Decode, append and prefill of lognormal batches and lengths, tables as wide as the longest needs.

    Decodes have 1 to 8 query tokens. Decodes and prefills are made with plans and without.
    """
    choose, device = random.Random(seed), cache.k.device
    plans = [
        plan_decode(
            DecodeShape(MODEL["max_batch"], q_len, HEADS, KV_HEADS, DIM, PAGE, MODEL["max_seq_len"]),
            cache.format, device=device, **fp4_scales(cache),
        )
        for q_len in range(1, MOST_Q_LEN + 1)
    ]  # fmt: skip

    def tensor(tokens: int, heads: int) -> torch.Tensor:
        return torch.zeros(tokens, heads, DIM, dtype=torch.bfloat16, device=device)

    for _ in range(count):
        batch = min(int(choose.lognormvariate(2.0, 1.2)) + 1, MODEL["max_batch"])
        lens = [min(int(choose.lognormvariate(5.0, 1.2)) + 1, MODEL["max_seq_len"]) for _ in range(batch)]
        ids = torch.zeros(batch, -(-max(lens) // PAGE), dtype=I32, device=device)
        lengths = torch.tensor(lens, dtype=I32, device=device)
        table = PageTable.from_block_table(ids, lengths, page_size=PAGE)
        for q_len in (1, choose.randint(2, MOST_Q_LEN)):
            paged_decode(tensor(batch * q_len, HEADS), cache, table, plan=plans[q_len - 1])
            paged_decode(tensor(batch * q_len, HEADS), cache, table)
        tokens = choose.randint(1, MODEL["max_num_tokens"])
        slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        append(cache, tensor(tokens, KV_HEADS), tensor(tokens, KV_HEADS), slots)
        if decode_only:
            continue
        tokens = max(tokens, batch)
        cuts = [0, *sorted(choose.randint(0, tokens) for _ in range(batch - 1)), tokens]
        bounds = {"max_q_len": max(b - a for a, b in pairwise(cuts)), "max_seq_len": MODEL["max_seq_len"]}
        starts = torch.tensor(cuts, dtype=I32, device=device)
        q, k, v = tensor(tokens, HEADS), tensor(tokens, KV_HEADS), tensor(tokens, KV_HEADS)
        before = PageTable.from_block_table(ids, cached_lens=torch.zeros_like(lengths), page_size=PAGE)
        for bound in ({}, bounds):
            plan = plan_prefill(q, cache, table, starts, **bound) if bound else None
            batch_prefill(q, cache, table, starts, plan=plan)
            appends = plan_append(q, cache, before, starts, **bound) if bound else None
            prefill_append(q, k, v, cache, before, starts, plan=appends)


@pytest.mark.parametrize(
    ("target", "format", "most", "calls"),
    [
        ("gfx942", "fp8_e4m3fn", 12, 20), ("gfx950", "fp8_e4m3fn", 12, 20), ("sm90", "fp8_e4m3fn", 22, 60),
        ("sm90", CacheFormat("fp8_e4m3fn", "fp4_e2m1"), 22, 20), ("sm90", "fp4_e2m1", 22, 20),
    ],
)  # fmt: skip
def test_random_batches_reach_no_kernel_that_was_not_listed(
    target: str, format: str | CacheFormat, most: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recording_for(_: str | None) -> AbstractContextManager[Any]:
        return executing(RecordExecutor(get_target(target)))

    monkeypatch.setattr("narrowkv.attn_prefill.warmup.recording", recording_for)
    cache = _cache("cpu", format=format)
    listed = record_model(cache, **MODEL).found
    with recording_for(None) as recorder:
        _random_calls(cache, calls)
    assert recorder.found
    assert not recorder.found.keys() - listed.keys()
    names = [bound.kernel.__name__ for bound, _ in listed.values()]
    decode = [name for name in names if name in ("_paged_decode_kernel", "_merge_splits_kernel")]
    assert len(decode) <= 32
    assert len(names) - len(decode) <= most


def test_a_model_without_prefill_lists_its_decode_and_append() -> None:
    cache = _cache("cpu", num_pages=5)
    listed = record_model(cache, target="gfx942", num_qo_heads=HEADS, max_batch=64, max_seq_len=2048).found
    with recording("gfx942") as recorder:
        _random_calls(cache, 20, decode_only=True)
    assert recorder.found.keys() <= listed.keys()
    other = record_model(
        _cache("cpu"), target="gfx942", num_qo_heads=HEADS, max_batch=64, max_seq_len=2048
    ).found
    assert other.keys() != listed.keys(), "64 pages are a multiple of 16, which the compiler is told"


def test_kernels_of_a_narrower_v_are_listed() -> None:
    cache = PagedKVCache.empty(64, PAGE, KV_HEADS, 192, v_head_dim=128, format="fp8_e4m3fn")
    sizes = {"max_batch": 4, "max_seq_len": 256, "max_num_tokens": 64}
    listed = record_model(cache, target="gfx942", num_qo_heads=HEADS, **sizes).found
    q = torch.zeros(8, HEADS, 192, dtype=torch.bfloat16)
    k, v = q[:, :KV_HEADS].contiguous(), q[:, :KV_HEADS, :128].contiguous()
    ids, lens = torch.zeros(2, 16, dtype=I32), torch.tensor([40, 200], dtype=I32)
    starts = torch.tensor([0, 3, 8], dtype=I32)
    table = PageTable.from_block_table(ids, lens, page_size=PAGE)
    before = PageTable.from_block_table(ids, cached_lens=lens - starts.diff(), page_size=PAGE)
    with recording("gfx942") as recorder:
        paged_decode(q[:2], cache, table)
        append(cache, k, v, torch.full((8,), -1))
        batch_prefill(q, cache, table, starts)
        prefill_append(q, k, v, cache, before, starts)
    assert recorder.found
    assert recorder.found.keys() <= listed.keys()


@pytest.mark.gpu
def test_a_thousand_random_batches_compile_nothing(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    cache = _cache("cuda", num_pages=1024)
    found = warmup_model(cache, **MODEL)
    assert found.compiled
    with count_compiles() as compiles:
        _random_calls(
            cache, 1000 if find_place("gpu").has_times else 20
        )  # a virtual GPU takes seconds a call
    torch.cuda.synchronize()
    assert compiles.compiled == []


_KEYS_OF = """
import importlib, sys
kernels = [getattr(importlib.import_module(module), name) for module, name in map(str.split, sys.argv[1:])]
if len(kernels) % 2:
    print({kernels.pop(): "a dictionary asks for a hash"} and "")
print(*(f"{kernel.__name__}={kernel.cache_key}" for kernel in kernels))
"""


@pytest.mark.codegen_all
def test_a_kernels_cache_key_does_not_depend_on_which_kernels_were_hashed_before() -> None:
    kernels = [
        "narrowkv.attn_decode.kernels.merge _merge_splits_kernel",
        "narrowkv.attn_decode.kernels.decode _paged_decode_kernel",
        "narrowkv.attn_prefill.kernels.widen _widen_kernel",
        "narrowkv.attn_prefill.kernels.fused _fused_prefill_kernel",
    ]

    def keys(names: list[str]) -> set[str]:
        return set(subprocess.check_output([sys.executable, "-c", _KEYS_OF, *names], text=True).split())

    expected = keys(kernels)
    assert keys([*kernels[::-1], kernels[1]]) == expected, "in another order, one hashed before"
