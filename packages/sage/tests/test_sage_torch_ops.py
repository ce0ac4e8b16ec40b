"""Sage attention as torch traces it: compiled, exported, faked, functionalised. Calls run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from narrowkv.runtime.launch.tracing import spell
from narrowkv.sage import sage_attention


def _inputs(tokens: int = 5, ragged: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shape = (tokens, 1, 64) if ragged else (1, tokens, 1, 64)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in range(3)]


def _same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("ragged", [False, True])
def test_a_call_compiles_into_one_graph_with_dynamic_shapes(ragged: bool) -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None) -> Any:
        return sage_attention(
            2 * q, k, v, causal="bottom_right", window=(9, -1), cu_seqlens_q=starts, cu_seqlens_k=starts,
            return_lse=True,
        )  # fmt: skip

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 9):
        starts = torch.tensor([0, 2, tokens], dtype=torch.int32) if ragged else None
        args = (*_inputs(tokens, ragged), starts)
        assert _same(compiled(*args), step(*args))


def test_outputs_that_are_given_export_and_functionalisation() -> None:
    q, k, v = _inputs()
    expected = sage_attention(q, k, v, return_lse=True)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:-1])

    def step(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Any:
        return sage_attention(q, k, v, out=out, lse=lse, return_lse=True)

    assert _same(torch.compile(step, fullgraph=True, backend="aot_eager")(q, out, lse), expected)
    assert _same((out, lse), expected)

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return sage_attention(q, k, v)

    program = torch.export.export(Layer(), (q, k, v), strict=True)
    assert "narrowkv.sage_attention" in program.graph_module.code
    assert torch.equal(program.module()(q, k, v), expected[0])
    assert torch.equal(torch.func.functionalize(sage_attention)(q, k, v), expected[0])
    with FakeTensorMode(allow_non_fake_inputs=True):
        o, lse = sage_attention(q, k, v, return_lse=True)
    assert isinstance(o, FakeTensor)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:-1], torch.float32)


def test_opcheck() -> None:
    q, k, v = _inputs()
    inputs = (q, k, v, None, None, *spell(window_left=None, window_right=None, qk_dtype="int4"))
    torch.library.opcheck(torch.ops.narrowkv.sage_attention, inputs)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:-1])
    torch.library.opcheck(torch.ops.narrowkv.sage_attention_out, (*inputs, out, lse))
