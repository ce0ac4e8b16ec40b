"""Sparse attention as torch traces it: compiled, exported, faked, functionalised. Calls run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from narrowkv.runtime.launch.tracing import spell
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    plan_sparse,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_fp8,
)
from narrowkv.sparse_fp8.torch_ops import _rows_options, _tensors

HEADS, ROWS = 8, 12
OPERATIONS = {
    "16bit": (sparse_prefill, "bf16"),
    "fp8": (sparse_prefill_fp8, "split"),
    "decode": (sparse_decode, "packed584"),
    "decode wide": (sparse_decode, "bf16"),
}


def _source(layout: str, tokens: int = 3) -> KVSource:
    x = torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(1))
    rows: Any = x.bfloat16() if layout == "bf16" else DSV4Rows.quantize(x, layout=layout, page_size=4)
    indptr = torch.arange(tokens + 1, dtype=torch.int32) * 2
    return KVSource(rows, indptr, torch.arange(2 * tokens, dtype=torch.int32) % ROWS)


def _query(tokens: int = 3) -> torch.Tensor:
    return torch.randn(tokens, HEADS, 512, generator=torch.Generator().manual_seed(tokens)).bfloat16()


def _same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", OPERATIONS)
def test_calls_compile_into_one_graph(name: str) -> None:
    operation, layout = OPERATIONS[name]
    source, sink = _source(layout), torch.linspace(-1, 1, HEADS)

    def step(q: torch.Tensor) -> Any:
        return operation(2 * q, source, attn_sink=sink, return_lse=True)  # type: ignore[operator]

    q = _query()
    assert _same(torch.compile(step, fullgraph=True, backend="aot_eager")(q), step(q))


def test_dynamic_shapes() -> None:
    def step(q: torch.Tensor, pool: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor) -> Any:
        source = KVSource(pool, indptr, indices)
        return sparse_prefill(q, source, return_lse=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 5, 2):
        source = _source("bf16", tokens)
        args = (_query(tokens), source.rows, source.indptr, source.indices)
        assert _same(compiled(*args), step(*args))


def test_outputs_that_are_given_and_plans() -> None:
    source, q = _source("split"), _query()
    plan = plan_sparse(
        num_qo_heads=HEADS, prefix=source.format, device="cpu", max_num_tokens=4, max_indices=16,
        return_lse=True, num_splits=2,
    )  # fmt: skip
    out, lse = torch.zeros_like(q), torch.zeros(3, HEADS)

    def step(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Any:
        return sparse_decode(q, source, out=out, lse=lse, return_lse=True, plan=plan)

    expected = [x.clone() for x in step(q, out, lse)]
    out.zero_()
    lse.zero_()
    assert _same(torch.compile(step, fullgraph=True, backend="aot_eager")(q, out, lse), expected)
    assert _same((out, lse), expected)
    graph = make_fx(lambda q: sparse_decode(q, source, plan=plan), tracing_mode="real")(q)
    assert plan.handle in graph.code


def test_export_fake_tensors_and_functionalisation() -> None:
    source, q = _source("packed584"), _query()
    expected = sparse_prefill_fp8(q, source)

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> Any:
            return sparse_prefill_fp8(q, source)

    program = torch.export.export(Layer(), (q,), strict=True)
    assert "narrowkv.sparse_prefill_fp8" in program.graph_module.code
    assert torch.equal(program.module()(q), expected)
    assert torch.equal(torch.func.functionalize(lambda x: sparse_prefill_fp8(x, source))(q), expected)
    with FakeTensorMode(allow_non_fake_inputs=True):
        o, lse = sparse_decode(q, source, return_lse=True)
        assert isinstance(o, FakeTensor)
        assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:2], torch.float32)


@pytest.mark.parametrize("rows_query", [False, True])
def test_opcheck(rows_query: bool) -> None:
    source, q = _source("split"), _query()
    query: Any = DSV4Rows.quantize(q.reshape(-1, 512)) if rows_query else q
    spec = spell(
        plan=None, **_rows_options("q", query), **_rows_options("prefix", source.rows),
        **_rows_options("extend", None), **({"num_qo_heads": HEADS} if rows_query else {}),
    )  # fmt: skip
    inputs = (*_tensors(query, source, None, None), *spec)
    torch.library.opcheck(torch.ops.narrowkv.sparse_prefill_fp8, inputs)
    out, lse = torch.empty(3, HEADS, 512, dtype=torch.bfloat16), torch.empty(3, HEADS)
    torch.library.opcheck(torch.ops.narrowkv.sparse_prefill_fp8_out, (*inputs, out, lse))


def test_wrong_arguments_are_refused_when_the_operator_runs() -> None:
    source = _source("bf16")
    graph = make_fx(lambda q: sparse_prefill(q, source), tracing_mode="real")(_query())
    with pytest.raises(ValueError, match=r"num_qo_heads|tokens"):
        graph(_query(4))
