"""Decode and append as torch traces them: compiled, exported, faked, functionalised. Calls run on the CPU."""

from __future__ import annotations

import gc
import shutil
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_decode.cases import DecodeCase
from narrowkv.attn_decode.torch_ops import traced_decode
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope, append
from narrowkv.paged_cache.torch_ops import cache_options, cache_tensors, traced_append
from narrowkv.runtime.launch.tracing import as_bytes, spell, spelled

HEADS: dict[str, Any] = {"num_kv_heads": 1, "gqa_ratio": 2, "head_dim": 64}
FORMATS = {
    "bf16": DecodeCase.small(lens=(20, 5), format="bf16", **HEADS),
    "fp8": DecodeCase.small(lens=(20, 5), format="fp8_e4m3fn", **HEADS),
    "fp8 token_head": DecodeCase.small(
        lens=(20, 5), format="fp8_e4m3fn", granularity="token_head", ragged=True, **HEADS
    ),
    "fp4": DecodeCase.small(lens=(20, 5), format="fp4_e2m1", scale_group=32, **HEADS),
}


def _new(tokens: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k, v = (torch.randn(tokens, 1, 64, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    return k.bfloat16(), v.bfloat16(), torch.arange(3, 3 + tokens, dtype=torch.int32)


def _bytes(cache: PagedKVCache) -> list[torch.Tensor]:
    tensors = (cache.k, cache.v, cache.k_descale, cache.v_descale)
    return [x.view(torch.uint8).clone() for x in tensors if isinstance(x, torch.Tensor)]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    cache: PagedKVCache,
    table: PageTable,
) -> Any:
    append(cache, k, v, slots)
    return paged_decode(2 * q, cache, table, return_lse=True, window_left=9)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_step_compiles_into_one_graph(fmt: str) -> None:
    q, cache, table = FORMATS[fmt].build()
    _, eager_cache, eager_table = FORMATS[fmt].build()
    expected = _step(q, *_new(), eager_cache, eager_table)
    before = _bytes(cache)
    got = torch.compile(_step, fullgraph=True, backend="aot_eager")(q, *_new(), cache, table)
    assert not _same(_bytes(cache), before)
    assert _same(_bytes(cache), _bytes(eager_cache))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_dynamic_shapes_and_another_cache_are_told_apart() -> None:
    compiled = torch.compile(_step, fullgraph=True, backend="aot_eager", dynamic=True)
    for lens, fmt in (((20, 5), "bf16"), ((9, 30, 4), "bf16"), ((9, 30, 4, 1), "fp8_e5m2")):
        q, cache, table = DecodeCase.small(lens=lens, format=fmt, **HEADS).build()
        _, eager_cache, eager_table = DecodeCase.small(lens=lens, format=fmt, **HEADS).build()
        new = _new(len(lens))
        expected = _step(q, *new, eager_cache, eager_table)
        got = compiled(q, *new, cache, table)
        assert _same(_bytes(cache), _bytes(eager_cache))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_outputs_and_rope_that_are_given() -> None:
    q, cache, table = FORMATS["fp8"].build()
    _, eager_cache, _ = FORMATS["fp8"].build()
    angle = torch.rand(50, 16)
    rope = Rope(angle.cos(), angle.sin(), torch.tensor([4, 40]), style="gptj")
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2])
    sinks = torch.linspace(-1, 1, 2)
    new = _new()

    def step(out: torch.Tensor, lse: torch.Tensor) -> Any:
        append(cache, *new, rope=rope, k_offset=torch.ones(1, 64))
        return paged_decode(q, cache, table, sinks=sinks, out=out, lse=lse)

    result = torch.compile(step, fullgraph=True, backend="aot_eager")(out, lse)
    append(eager_cache, *_new(), rope=rope, k_offset=torch.ones(1, 64))
    expected, expected_lse = paged_decode(q, eager_cache, table, sinks=sinks, return_lse=True)
    assert torch.equal(result, expected)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert _same(_bytes(cache), _bytes(eager_cache))


class _Layer(torch.nn.Module):
    def __init__(self, cache: PagedKVCache, table: PageTable) -> None:
        super().__init__()
        self.cache, self.table = cache, table
        for name in ("k", "v"):
            self.register_buffer(name, getattr(cache, name))

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        cache = PagedKVCache.from_tensors(self.k, self.v, format=self.cache.format)
        o = paged_decode(q, cache, self.table)
        assert isinstance(o, torch.Tensor)
        return o


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with a C++ compiler on a CPU")
@pytest.mark.parametrize("fmt", ["bf16", "fp8 token_head"])
def test_inductor_does_not_copy_the_cache(fmt: str) -> None:
    q, cache, table = FORMATS[fmt].build()
    _, eager_cache, eager_table = FORMATS[fmt].build()
    expected = _step(q, *_new(), eager_cache, eager_table)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Any:
        return _step(q, k, v, slots, cache, table)

    got, codes = run_and_get_code(torch.compile(step, fullgraph=True), q, *_new())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert _same(_bytes(cache), _bytes(eager_cache))
    lines = "".join(codes).splitlines()
    (call,) = (line for line in lines if "narrowkv.append.default(" in line)
    stored = [name.strip() for name in call.split("default(")[1].split(",")[:2]]
    assert all(name.startswith("arg") for name in stored), "the caller's own tensors"
    for line in lines:
        if "cpp_fused" in line or "clone" in line or "copy_" in line:
            assert not any(f"{name}," in line or f"{name})" in line for name in stored), line


def test_export() -> None:
    q, cache, table = DecodeCase.small(lens=(20, 5), format="bf16", **HEADS).build()
    layer = _Layer(cache, table)
    program = torch.export.export(layer, (q,), strict=True)
    assert "narrowkv.paged_decode" in program.graph_module.code
    assert torch.equal(program.module()(q), layer(q))


def test_fake_tensors() -> None:
    q, cache, table = FORMATS["fp8"].build()
    with FakeTensorMode(allow_non_fake_inputs=True):
        o, lse = paged_decode(q, cache, table, return_lse=True, out_dtype=torch.float32)
        append(cache, *_new())
    assert isinstance(o, FakeTensor)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, torch.float32, q.shape[:2], torch.float32)


def test_functionalisation_and_fx() -> None:
    q, cache, table = FORMATS["fp8"].build()
    expected = paged_decode(q, cache, table)
    assert torch.equal(torch.func.functionalize(lambda x: paged_decode(x, cache, table))(q), expected)
    graph = make_fx(lambda x: paged_decode(x, cache, table), tracing_mode="real")(q)
    assert "narrowkv.paged_decode" in graph.code
    assert torch.equal(graph(q), expected)


def test_key_ranges_reach_the_operator() -> None:
    q, cache, table = FORMATS["bf16"].build()
    ranges = torch.zeros(table.batch_size, q.shape[0] // table.batch_size, 2, dtype=torch.int32)
    ranges[..., 1] = 2
    ranged = table.with_key_ranges(ranges)
    expected = paged_decode(q, cache, ranged)
    assert not torch.equal(expected, paged_decode(q, cache, table))
    compiled = torch.compile(paged_decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, cache, ranged), expected)


@pytest.mark.parametrize("fmt", FORMATS)
def test_opcheck(fmt: str) -> None:
    q, cache, table = FORMATS[fmt].build()
    # opcheck compares what an operator left of its arguments, which torch cannot do with FP8.
    tensors = tuple(x if x is None else as_bytes(x) for x in cache_tensors(cache))
    spec = spell(
        plan=None, kind=table.kind, page_size=table.page_size, before_append=False, out_dtype=None,
        **cache_options(cache),
    )  # fmt: skip
    inputs = (
        q, *tensors, table.page_ids, table.kv_indptr, table.kv_last_page_len, table.seq_lens,
        table.key_ranges, table.tree_mask, None, *spec,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.narrowkv.paged_decode, inputs)
    torch.library.opcheck(
        torch.ops.narrowkv.paged_decode_out, (*inputs, torch.empty_like(q), torch.empty(q.shape[:2]))
    )
    spec = spell(**cache_options(cache), rope=None)
    torch.library.opcheck(torch.ops.narrowkv.append, (*tensors, *_new(), None, None, None, None, None, *spec))


def test_queries_are_rotated_in_place_in_a_traced_append() -> None:
    _, cache, _ = FORMATS["bf16"].build()
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


def test_eager_calls_do_not_meet_the_dispatcher() -> None:
    q, cache, table = FORMATS["fp8"].build()
    with torch.profiler.profile() as seen, torch.inference_mode():
        _step(q, *_new(), cache, table)
    names = {event.name for event in seen.events()}
    assert names, "torch's own operators are seen"
    assert not [name for name in names if name.startswith("narrowkv")]
    with torch.profiler.profile() as seen:
        torch.func.functionalize(lambda x: paged_decode(x, cache, table))(q)
    assert "narrowkv::paged_decode" in {event.name for event in seen.events()}


def test_a_plan_that_is_traced_is_the_one_that_runs() -> None:
    q, cache, table = FORMATS["bf16"].build()
    plan = plan_decode(q, cache, table, split="even")

    def step(q: torch.Tensor) -> Any:
        return paged_decode(q, cache, table, plan=plan, return_lse=True)

    expected = step(q)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    graph = make_fx(step, tracing_mode="real")(q)
    assert plan.handle in graph.code
    assert all(torch.equal(a, b) for a, b in zip(graph(q), expected, strict=True))
    with pytest.raises(ValueError, match=r"must have a positive multiple|plan must be made for"):
        traced_decode(q[:, :1], cache, table, plan=plan)


def test_a_plan_that_is_gone_is_missed_by_name() -> None:
    q, cache, table = FORMATS["bf16"].build()
    plans = [plan_decode(q, cache, table)]
    graph = make_fx(lambda x: paged_decode(x, cache, table, plan=plans[0]), tracing_mode="real")(q)
    plans.clear()
    gc.collect()
    with pytest.raises(ValueError, match="must be alive in the process"):
        graph(q)


def test_wrong_arguments_are_refused_when_the_operator_runs() -> None:
    _, cache, _ = FORMATS["bf16"].build()
    k, v, slots = _new()
    with pytest.raises(ValueError, match="k_new"):
        traced_append(cache, k[:, :, :32], v, slots)


def test_options_survive_the_string() -> None:
    options = {"a": "x y", "b": -1, "c": 1e-30, "d": None, "e": True, "f": torch.float16, "g": 0.1}
    assert spelled(*spell(**options)) == options
