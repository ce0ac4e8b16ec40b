"""AITER's functions of DeepSeek's indexer, against fp64, and in AITER's place."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from narrowkv.engines import aiter
from narrowkv.engines.aiter import patching
from narrowkv.quant import relative_l1
from narrowkv.sparse_fp8 import IndexKeys

HEADS, DIM, PAGE, NEXT_N = 8, 128, 16, 2
LOGITS = 1e-5  # relative L1 error in the interpreter
random = torch.Generator().manual_seed(0)
KEYS = torch.randn(6 * PAGE, DIM, generator=random)
TABLE = torch.tensor([[3, 1, 5], [4, 0, 2]], dtype=torch.int32)
LENS = torch.tensor([40, 17], dtype=torch.int32)


def queries(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(tokens, HEADS, DIM, generator=random).to(torch.float8_e4m3fn)
    return q, torch.rand(tokens, HEADS, generator=random)


def exact(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    products = torch.einsum("thd,nd->thn", q.double(), keys.double()).relu()
    return torch.einsum("thn,th->tn", products, weights.double())


def assert_logits(found: torch.Tensor, wanted: torch.Tensor, seen: torch.Tensor) -> None:
    assert torch.equal(found.isinf(), ~seen)
    assert relative_l1(found[seen], wanted[seen].float()) <= LOGITS


def test_fp8_mqa_logits_scores_keys_one_after_another() -> None:
    keys = IndexKeys.quantize(KEYS)
    q, weights = queries(3)
    starts, ends = torch.tensor([[0, 5, 90], [96, 6, 96]], dtype=torch.int32)
    found = aiter.fp8_mqa_logits(q, keys.values, keys.scale[:, None], weights, starts, ends)
    column = torch.arange(len(KEYS))
    seen = (column >= starts[:, None]) & (column < ends[:, None])
    assert_logits(found, exact(q, weights, keys.dequantize()), seen)


@pytest.mark.parametrize("shuffled", [False, True])
def test_paged_logits_are_those_of_aiters_pages(shuffled: bool) -> None:
    keys = IndexKeys.quantize(KEYS, page_size=PAGE)
    assert keys.buffer is not None
    cache = keys.buffer.clone().view(len(TABLE.flatten()), PAGE, 1, DIM + 4)
    if shuffled:  # rows of tiles of 16 tokens by 16 channels
        values = cache.view(6, -1)[:, : PAGE * DIM]
        values.copy_(values.clone().view(6, 1, 16, DIM // 16, 16).transpose(2, 3).reshape(6, -1))
    q, weights = queries(2 * NEXT_N)
    out = torch.full((2 * NEXT_N, 48), torch.nan)
    found = aiter.deepgemm_fp8_paged_mqa_logits(
        q.view(2, NEXT_N, HEADS, DIM), cache, weights, out, LENS, TABLE, 48, Preshuffle=shuffled,
        KVBlockSize=PAGE, WavePerEU=2,
    )  # fmt: skip
    assert found is out
    pages = keys.dequantize().view(6, PAGE, DIM)
    for row, (table, length) in enumerate(zip(TABLE, LENS.tolist(), strict=True)):
        part = slice(row * NEXT_N, (row + 1) * NEXT_N)
        wanted = exact(q[part], weights[part], pages[table.long()].flatten(0, 1))
        ends = torch.tensor([[length - 1], [length]])
        assert_logits(out[part], wanted, torch.arange(48) < ends)
    with pytest.raises(ValueError, match="KVBlockSize must be the tokens of a page of kv_cache, 16, got 1"):
        aiter.deepgemm_fp8_paged_mqa_logits(
            q.view(2, NEXT_N, HEADS, DIM), cache, weights, out, LENS, TABLE, 48
        )  # fmt: skip


def test_patch_of_everything_takes_the_indexer_in_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for places in (patching._PLACES, patching._INDEXER_PLACES):
        for name, (modules, *_) in places.items():
            for path in modules:
                parts = path.split(".")
                for end in range(1, len(parts) + 1):
                    module = sys.modules.get(".".join(parts[:end])) or types.ModuleType("")
                    monkeypatch.setitem(sys.modules, ".".join(parts[:end]), module)
                monkeypatch.setattr(sys.modules[path], name, lambda *args: "theirs", raising=False)
    place = sys.modules["aiter.ops.triton.attention.fp8_mqa_logits"]
    keys, (q, weights) = IndexKeys.quantize(KEYS), queries(1)
    bounds = torch.tensor([[0], [9]], dtype=torch.int32)
    arguments = q, keys.values, keys.scale, weights, *bounds
    undo = aiter.patch()
    assert place.fp8_mqa_logits(*arguments) == "theirs"
    undo()
    patching._announced.clear()
    undo = aiter.patch(everything=True)
    with pytest.warns(UserWarning, match=r"stands in for aiter's fp8_mqa_logits: patch\(everything=True\)"):
        found = place.fp8_mqa_logits(*arguments)
    assert torch.equal(found, aiter.fp8_mqa_logits(*arguments))
    undo()
    assert place.fp8_mqa_logits(*arguments) == "theirs"
