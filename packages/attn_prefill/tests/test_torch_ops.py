"""Prefill as torch traces it: compiled, exported, faked, functionalised. Calls run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from narrowkv.attn_prefill import batch_prefill, plan_append, plan_prefill, prefill_append
from narrowkv.attn_prefill.cases import PrefillCase
from narrowkv.attn_prefill.torch_ops import traced_append
from narrowkv.paged_cache import PagedKVCache
from narrowkv.paged_cache.cases import copy_cache, differing_bytes
from narrowkv.paged_cache.torch_ops import cache_options, cache_tensors
from narrowkv.runtime.launch.tracing import as_bytes, spell

SIZES: dict[str, Any] = {"q_lens": (5, 2), "lens": (20, 5), "num_kv_heads": 1, "gqa_ratio": 2, "clean": True}
PREFILLS = {
    "bf16": PrefillCase.small(format="bf16", **SIZES),
    "ragged": PrefillCase.small(granularity="token_head", ragged=True, **SIZES),
    "fp8": PrefillCase.small(q_dtype=torch.float8_e4m3fn, **SIZES),
    "fp4": PrefillCase.small(format="fp4_e2m1", scale_group=32, **SIZES),
}
APPENDS = {
    "bf16": PrefillCase.append(format="bf16", rope="neox", **SIZES),
    "fp8": PrefillCase.append(granularity="token_head", **SIZES),
}


def _same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("fmt", PREFILLS)
def test_a_prefill_compiles_into_one_graph(fmt: str) -> None:
    q, cache, table, starts = PREFILLS[fmt].build()
    options: dict[str, Any] = {
        "return_lse": True,
        "window_left": 9,
        "q_descale": 0.5 if fmt == "fp8" else 1.0,
    }

    def step(x: torch.Tensor) -> Any:
        return batch_prefill(x, cache, table, starts, **options)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert _same(compiled(q), step(q))


@pytest.mark.parametrize("fmt", APPENDS)
def test_an_append_compiles_into_one_graph(fmt: str) -> None:
    q, k_new, v_new, cache, table, starts, rope = APPENDS[fmt].build_append()
    wanted, before = copy_cache(cache), copy_cache(cache)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: PagedKVCache) -> Any:
        return prefill_append(q, 2 * k, v, cache, table, starts, rope=rope, return_lse=True)

    expected = step(q, k_new, v_new, wanted)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k_new, v_new, cache)
    assert _same(found, expected)
    assert not differing_bytes(cache, wanted)
    assert differing_bytes(cache, before)


def test_dynamic_shapes() -> None:
    def step(q: torch.Tensor, cache: PagedKVCache, table: Any, starts: torch.Tensor) -> Any:
        return batch_prefill(2 * q, cache, table, starts)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for q_lens, lens in (((5, 2), (20, 5)), ((3, 9, 1), (9, 30, 4))):
        inputs = PrefillCase.small(q_lens, lens, num_kv_heads=1, gqa_ratio=2, format="bf16").build()
        assert torch.equal(compiled(*inputs), step(*inputs))


def test_outputs_that_are_given() -> None:
    q, k_new, v_new, cache, table, starts, _ = APPENDS["fp8"].build_append()
    wanted = copy_cache(cache)
    sinks = torch.linspace(-1, 1, 2)
    out, lse = torch.zeros(q.shape), torch.zeros(q.shape[:2])

    def step(out: torch.Tensor, lse: torch.Tensor, cache: PagedKVCache) -> Any:
        return prefill_append(q, k_new, v_new, cache, table, starts, sinks=sinks, out=out, lse=lse)

    torch.compile(step, fullgraph=True, backend="aot_eager")(out, lse, cache)
    expected = prefill_append(
        q, k_new, v_new, wanted, table, starts, sinks=sinks, return_lse=True, out_dtype=torch.float32
    )
    assert _same((out, lse), expected)
    assert not differing_bytes(cache, wanted)


class _Layer(torch.nn.Module):
    def __init__(self, cache: PagedKVCache, table: Any, starts: torch.Tensor) -> None:
        super().__init__()
        self.cache, self.table = cache, table
        for name, value in (("k", cache.k), ("v", cache.v), ("starts", starts)):
            self.register_buffer(name, value)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        cache = PagedKVCache.from_tensors(self.k, self.v, format=self.cache.format)
        o = batch_prefill(q, cache, self.table, self.starts)
        assert isinstance(o, torch.Tensor)
        return o


def test_export() -> None:
    q, cache, table, starts = PREFILLS["bf16"].build()
    layer = _Layer(cache, table, starts)
    program = torch.export.export(layer, (q,), strict=True)
    assert "narrowkv.batch_prefill" in program.graph_module.code
    assert torch.equal(program.module()(q), layer(q))


def test_fake_tensors() -> None:
    q, k_new, v_new, cache, table, starts, _ = APPENDS["fp8"].build_append()
    fp8 = PREFILLS["fp8"].build()
    with FakeTensorMode(allow_non_fake_inputs=True):
        o, lse = prefill_append(q, k_new, v_new, cache, table, starts, return_lse=True)
        wide = batch_prefill(*fp8)
    assert isinstance(o, FakeTensor)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:2], torch.float32)
    assert isinstance(wide, FakeTensor)
    assert wide.dtype == torch.bfloat16


def test_functionalisation_and_fx() -> None:
    q, cache, table, starts = PREFILLS["bf16"].build()
    expected = batch_prefill(q, cache, table, starts)
    call = torch.func.functionalize(lambda x: batch_prefill(x, cache, table, starts))
    assert torch.equal(call(q), expected)
    graph = make_fx(lambda x: batch_prefill(x, cache, table, starts), tracing_mode="real")(q)
    assert "narrowkv.batch_prefill" in graph.code
    assert torch.equal(graph(q), expected)


def _as_bytes(cache: PagedKVCache) -> tuple[Any, ...]:
    """The cache's tensors: opcheck compares what is left of them, which torch cannot do with FP8."""
    return tuple(x if x is None else as_bytes(x) for x in cache_tensors(cache))


@pytest.mark.parametrize("fmt", ["bf16", "ragged"])
def test_opcheck_of_a_prefill(fmt: str) -> None:
    q, cache, table, starts = PREFILLS[fmt].build()
    spec = spell(
        plan=None, kind=table.kind, page_size=table.page_size, before_append=False, out_dtype=None,
        q_dtype=q.dtype, q_number=1.0, **cache_options(cache),
    )  # fmt: skip
    inputs = (
        q, *_as_bytes(cache), table.page_ids, table.kv_indptr, table.kv_last_page_len, table.seq_lens,
        starts, None, None, *spec,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.narrowkv.batch_prefill, inputs)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    torch.library.opcheck(torch.ops.narrowkv.batch_prefill_out, (*inputs, out, lse))


@pytest.mark.parametrize("fmt", APPENDS)
def test_opcheck_of_an_append(fmt: str) -> None:
    q, k_new, v_new, cache, table, starts, rope = APPENDS[fmt].build_append()
    spec = spell(
        plan=None, kind=table.kind, page_size=table.page_size, before_append=True, out_dtype=None,
        rope=None if rope is None else rope.style, **cache_options(cache),
    )  # fmt: skip
    angles = (None, None, None) if rope is None else (rope.cos, rope.sin, rope.positions)
    inputs = (
        q, k_new, v_new, *_as_bytes(cache), table.page_ids, table.seq_lens, starts, *angles, None, *spec
    )  # fmt: skip
    torch.library.opcheck(torch.ops.narrowkv.prefill_append, inputs)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    torch.library.opcheck(torch.ops.narrowkv.prefill_append_out, (*inputs, out, lse))


def test_a_plan_that_is_traced_is_the_one_that_runs() -> None:
    q, *rest = PREFILLS["bf16"].build()
    plan = plan_prefill(q, *rest, kernel="fused")

    def step(q: torch.Tensor) -> Any:
        return batch_prefill(q, *rest, plan=plan, return_lse=True)

    expected = step(q)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    graph = make_fx(step, tracing_mode="real")(q)
    assert plan.handle in graph.code
    assert all(torch.equal(a, b) for a, b in zip(graph(q), expected, strict=True))


def test_a_plan_of_an_append_that_is_traced_is_the_one_that_runs() -> None:
    q, k_new, v_new, cache, table, starts, _ = APPENDS["fp8"].build_append()
    plan = plan_append(q, cache, table, starts)
    own = copy_cache(cache)
    expected = prefill_append(q, k_new, v_new, own, table, starts, plan=plan)
    got = traced_append(q, k_new, v_new, cache, table, starts, plan=plan)
    assert torch.equal(got, expected)  # type: ignore[arg-type]
    assert not differing_bytes(cache, own)
    with pytest.raises(ValueError, match="plan must be made by plan_append"):
        traced_append(q, k_new, v_new, cache, table, starts, plan=plan_prefill(*PREFILLS["bf16"].build()))  # type: ignore[arg-type]
