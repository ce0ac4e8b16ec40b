"""Every public function that launches kernels compiles into one graph, with shapes that are fixed or not.

The operations with plans are in tests/plans/test_traced_calls.py, with export, fake tensors and opcheck.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowkv.attn_decode import merge_states, merge_states_reference
from narrowkv.quant.quantize import quantize_per_channel
from narrowkv.quant.sage import quantize_per_token_group, token_groups
from narrowkv.runtime.launch import tracing
from narrowkv.sage import SageOperands, sage_attention_quantized

# Tested with their plans.
IN_TRACED_CALLS = {
    "append", "batch_prefill", "latent_decode", "paged_decode", "prefill_append", "sage_attention",
    "sparse_decode", "sparse_prefill", "sparse_prefill_fp8",
}  # fmt: skip
# These launch nothing, or are plain torch.
NO_KERNELS = {
    "apply_copies", "choose_mode", "compressed_topk", "concat_csr", "csr_from_topk", "pack_tree_mask",
    "packed_page_stride", "sliding_window", "tree_mask_from_custom_mask",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _states(tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(tokens)
    o = torch.randn(3, tokens, 2, 64, generator=random).bfloat16()
    return o, torch.randn(3, tokens, 2, generator=random), torch.randn(2, generator=random)


def _merge(tokens: int, **outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse, sinks = _states(tokens)
    return merge_states(o, lse, sinks=sinks, lse_base="2", **outputs)


def _operands(tokens: int, layout: str = "BSHD") -> SageOperands:
    x = torch.randn(1, tokens, 2, 64, generator=torch.Generator().manual_seed(tokens))
    (q, q_scale), (k, k_scale) = (
        quantize_per_token_group(x, token_groups(side, "per_thread"), "int8") for side in ("q", "k")
    )
    v, v_scale = quantize_per_channel(x[0], "fp8_e4m3fn")
    made = SageOperands(q, k, v[None], q_scale, k_scale, v_scale[None])
    if layout == "BSHD":
        return made
    return replace(
        made, layout=layout, **{name: getattr(made, name).transpose(1, 2).contiguous() for name in "qkv"}
    )


def test_every_public_function_is_tested_somewhere() -> None:
    """A function that launches is sent to its operators while torch traces."""
    found = set()
    for package in ("paged_cache", "attn_decode", "attn_prefill", "sage", "sparse_fp8"):
        module = importlib.import_module(f"narrowkv.{package}")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) and not name.endswith("_reference") and "plan" not in name:
                found.add(name)
    here = {"merge_states", "sage_attention_quantized"}
    in_indexer_traced = {"index_logits", "index_topk", "append_index_keys"}
    assert found == IN_TRACED_CALLS | NO_KERNELS | here | in_indexer_traced
    # Attention of a framework's cache is traced by a function of its adapter.
    assert found - NO_KERNELS == set(tracing._traced) - {"attend_places"}


@pytest.mark.parametrize("dynamic", [False, True])
def test_merge_states_compiles_into_one_graph(dynamic: bool) -> None:
    call = torch.compile(merge_states, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (5, 9) if dynamic else (5,):
        o, lse, sinks = _states(tokens)
        found, expected = call(o, lse, sinks=sinks), merge_states(o, lse, sinks=sinks)
        assert all(map(torch.equal, found, expected))
        reference = merge_states_reference(o, lse, sinks=sinks)
        torch.testing.assert_close(found[0], reference[0], rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(found[1], reference[1])


@pytest.mark.parametrize("given", [("out",), ("lse_out",), ("out", "lse_out")], ids=str)
def test_merge_states_writes_where_a_compiled_call_says(given: tuple[str, ...]) -> None:
    expected = dict(zip(("out", "lse_out"), _merge(5), strict=True))
    outputs = {name: torch.full_like(expected[name], torch.nan) for name in given}
    o, lse, sinks = _states()
    compiled = torch.compile(merge_states, fullgraph=True, backend="aot_eager")
    found = compiled(o, lse, sinks=sinks, lse_base="2", **outputs)
    assert all(map(torch.equal, found, expected.values()))
    assert all(torch.equal(outputs[name], expected[name]) for name in given)


def test_merge_states_is_exported_and_faked() -> None:
    o, lse, sinks = _states()

    class Layer(torch.nn.Module):
        def forward(self, o: torch.Tensor, lse: torch.Tensor) -> Any:
            return merge_states(o, lse, sinks=sinks, out_dtype=torch.float32)

    expected = Layer()(o, lse)
    program = torch.export.export(Layer(), (o, lse), strict=True)
    assert "narrowkv.merge_states" in program.graph_module.code
    assert all(map(torch.equal, program.module()(o, lse), expected))
    with FakeTensorMode(allow_non_fake_inputs=True):
        for fake, real in zip(Layer()(o, lse), expected, strict=True):
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("outputs", [False, True])
def test_opcheck_of_merge_states(outputs: bool) -> None:
    o, lse, sinks = _states()
    inputs: tuple[Any, ...] = (o, lse, sinks, *tracing.spell(lse_base="e", out_dtype=None))
    operators = torch.ops.narrowkv
    if outputs:
        inputs += (torch.empty_like(o[0]), torch.empty_like(lse[0]))
        torch.library.opcheck(operators.merge_states_out, inputs)
    else:
        torch.library.opcheck(operators.merge_states, inputs)


def _quantized(layout: str) -> Callable[[SageOperands], Any]:
    def call(operands: SageOperands) -> Any:
        return sage_attention_quantized(operands, causal="bottom_right", return_lse=True)

    return call


@pytest.mark.parametrize(("layout", "dynamic"), [("BSHD", False), ("BSHD", True), ("BHSD", False)])
def test_prequantised_sage_compiles_into_one_graph(layout: str, dynamic: bool) -> None:
    call = _quantized(layout)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (70, 140) if dynamic else (70,):
        operands = _operands(tokens, layout)
        assert all(map(torch.equal, compiled(operands), call(operands)))


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_opcheck_of_prequantised_sage(layout: str, monkeypatch: Any) -> None:
    seen = []
    real = torch.ops.narrowkv.sage_attention_quantized

    def note(*args: Any) -> Any:
        seen.append(args)
        return real(*args)

    monkeypatch.setattr(torch.ops.narrowkv, "sage_attention_quantized", note)
    tracing._traced["sage_attention_quantized"](_operands(70, layout))
    monkeypatch.undo()
    torch.library.opcheck(real, seen[0])
