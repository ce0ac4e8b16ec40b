"""The indexer as torch traces it, and as a graph captures it: logits, top-k and sparse attention in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowkv.runtime.launch.tracing import as_bytes, spell
from narrowkv.sparse_fp8 import (
    IndexKeys,
    KVSource,
    append_index_keys,
    index_logits,
    index_topk,
    plan_index_logits,
    plan_index_topk,
    sparse_decode,
)
from narrowkv.sparse_fp8.indexer.torch_ops import _tensors
from narrowkv.testing.cases.indexer import IndexCall, IndexCase

TOPK = 8
LAYOUTS = ("rows", "packed", "shuffled")
I32 = torch.int32


def _inputs(layout: str, device: str = "cpu") -> IndexCall:
    return IndexCase.small(layout=layout, lens=(40, 5, 23)).inputs(device)


def _step(inputs: IndexCall, weights: torch.Tensor, pool: torch.Tensor, q: torch.Tensor) -> Any:
    """Logits, the rows that they choose, and attention to those."""
    where = inputs.where
    logits = index_logits(inputs.q, 2 * weights, inputs.keys, **where)
    bounds = {name: where[name] for name in ("starts", "ends", "seq_lens") if name in where}
    chosen = index_topk(logits, TOPK, **bounds)
    indptr = torch.arange(0, chosen.numel() + 1, TOPK, dtype=I32, device=q.device)
    return chosen, sparse_decode(2 * q, KVSource(pool, indptr, chosen.view(-1)))


def _attention(inputs: IndexCall) -> tuple[torch.Tensor, torch.Tensor]:
    device, generator = inputs.q.device, torch.Generator().manual_seed(0)
    pool = torch.randn(200, 512, generator=generator).bfloat16()
    return pool.to(device), torch.randn(inputs.q.shape[0], 8, 512, generator=generator).bfloat16().to(device)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_compiles_into_one_graph(layout: str, dynamic: bool) -> None:
    torch.compiler.reset()
    inputs = _inputs(layout)
    expected = _step(inputs, inputs.weights, *_attention(inputs))
    compiled = torch.compile(_step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for found, wanted in zip(compiled(inputs, inputs.weights, *_attention(inputs)), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dynamic", [False, True])
def test_blocks_and_the_columns_inside_them_compile_into_one_graph(dynamic: bool) -> None:
    torch.compiler.reset()

    def step(logits: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = index_topk(2 * logits, 6, block_size=8, ends=ends)
        return blocks, index_topk(-logits, 9, block_size=8, blocks=blocks, ends=ends)

    inputs = torch.randn(3, 130), torch.tensor([130, 77, 4], dtype=I32)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert all(map(torch.equal, compiled(*inputs), step(*inputs)))


def test_outputs_and_plans_in_a_trace() -> None:
    inputs = _inputs("packed")
    expected = index_logits(inputs.q, inputs.weights, inputs.keys, **inputs.where)
    plan = plan_index_logits(num_heads=8, keys=inputs.keys.stored, device="cpu")
    top = plan_index_topk(topk=TOPK, num_columns=expected.shape[1], device="cpu", max_num_tokens=3)
    out, chosen = torch.zeros_like(expected), torch.zeros(3, TOPK, dtype=I32)

    def step(weights: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        index_logits(inputs.q, weights + 0.0, inputs.keys, **inputs.where, out=out, plan=plan)
        index_topk(out, TOPK, out=chosen, plan=top)
        return chosen + 1

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(inputs.weights, out, chosen)
    assert torch.equal(out, expected)
    assert torch.equal(chosen, index_topk(expected, TOPK))
    assert torch.equal(found, chosen + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_append_and_the_logits_over_it_are_one_graph(layout: str) -> None:
    torch.compiler.reset()

    def step(k: torch.Tensor, slots: torch.Tensor, inputs: IndexCall) -> torch.Tensor:
        append_index_keys(2 * k, inputs.keys, slots, hadamard=True)
        return index_logits(inputs.q, inputs.weights, inputs.keys, **inputs.where)

    k, slots = torch.randn(5, 32).bfloat16(), torch.tensor([3, 40, 17, -1, 8], dtype=I32)
    own, traced = _inputs(layout), _inputs(layout)
    expected = step(k, slots, own)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(k, slots, traced)
    assert torch.equal(found, expected)
    assert torch.equal(own.keys.native.view(torch.uint8), traced.keys.native.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operators_keep_what_they_say(layout: str) -> None:
    t = _inputs(layout)
    options = spell(
        q_dtype=t.q.dtype,
        format=t.keys.format,
        shuffled=t.keys.shuffled,
        num_columns=None,
        clean=True,
        plan=None,
    )
    where = [t.where.get(name) for name in ("starts", "ends", "block_table", "seq_lens")]
    inputs = (as_bytes(t.q), t.weights, *_tensors(t.keys), *where, *options)
    torch.library.opcheck(torch.ops.narrowkv.index_logits, inputs)
    logits = torch.randn(3, 40)
    blocks = torch.tensor([[0, 3, -1]] * 3, dtype=I32)
    for block_size, named in ((None, None), (8, None), (8, blocks)):
        options = spell(topk=5, page_size=None, block_size=block_size, plan=None)
        inputs = (logits, None, None, None, None, None, named, *options)
        torch.library.opcheck(torch.ops.narrowkv.index_topk, inputs)
    torch.library.opcheck(torch.ops.narrowkv.index_topk_out, (*inputs, torch.zeros(3, 5, dtype=I32)))


def test_fake_tensors_have_the_shapes() -> None:
    with FakeTensorMode():
        q = torch.empty(6, 8, 32, dtype=torch.float8_e4m3fn)
        keys = IndexKeys.packed(torch.empty(9, 16, 36, dtype=torch.uint8))
        where = {"block_table": torch.empty(3, 4, dtype=I32), "seq_lens": torch.empty(3, dtype=I32)}
        logits = index_logits(q, torch.empty(6, 8), keys, **where)
        assert (logits.shape, logits.dtype) == ((6, 64), torch.float32)
        assert index_logits(q, torch.empty(6, 8), keys, **where, num_columns=70).shape == (6, 70)
        chosen = index_topk(logits, 5)
        assert (chosen.shape, chosen.dtype) == ((6, 5), I32)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_is_replayed_with_other_numbers(layout: str) -> None:
    inputs = _inputs(layout, "cuda")
    where = inputs.where
    bounds = {name: where[name] for name in ("starts", "ends", "seq_lens") if name in where}
    plan = plan_index_logits(num_heads=8, keys=inputs.keys.stored, device="cuda")
    width = index_logits(inputs.q, inputs.weights, inputs.keys, **where).shape[1]
    sizes = {"num_columns": width, "device": "cuda", "max_num_tokens": 3}
    top = plan_index_topk(topk=TOPK, **sizes)
    outer = plan_index_topk(topk=3, block_size=8, **sizes)
    inner = plan_index_topk(topk=TOPK, block_size=8, num_blocks=3, **sizes)

    k, slots = torch.randn(2, 32, device="cuda").bfloat16(), torch.tensor([0, 3], dtype=I32, device="cuda")

    def step() -> torch.Tensor:
        append_index_keys(k, inputs.keys, slots)
        logits = plan.run(inputs.q, inputs.weights, inputs.keys, **where)
        blocks = outer.run(logits, block_size=8, **bounds)
        inside = inner.run(logits, block_size=8, blocks=blocks, **bounds)
        return torch.cat((top.run(logits, **bounds), blocks, inside), 1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = step()
    for turn in range(3):
        inputs.weights.copy_(torch.randn_like(inputs.weights))
        k.copy_(torch.randn_like(k))
        for vector in bounds.values():
            vector.sub_(turn)
        graph.replay()
        assert torch.equal(chosen, step())
