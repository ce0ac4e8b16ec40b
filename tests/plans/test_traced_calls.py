"""Calls as torch traces them: compiled, exported, faked, functionalised. Calls run on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from planned_operations import BY_NAME, Arguments, Decode, Latent, Operation, Sparse, mapped, same_bits
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from narrowkv.attn_decode import paged_decode
from narrowkv.paged_cache import PagedKVCache, Rope, append
from narrowkv.runtime.launch.tracing import as_bytes, spell, spelled
from narrowkv.sparse_fp8 import KVSource, sparse_prefill
from narrowkv.testing.cases.latent import LatentCase


def _step(
    cache: PagedKVCache, k_new: torch.Tensor, v_new: torch.Tensor, slot_mapping: torch.Tensor, rope: Rope,
    k_offset: torch.Tensor, **decode: Any,
) -> Any:  # fmt: skip
    append(cache, k_new, v_new, slot_mapping, rope=rope, k_offset=k_offset)
    return paged_decode(cache=cache, **decode, window_left=9)


class Step(Decode):
    """An append to the cache, and the decode that reads it."""

    def arguments(self, size: tuple[int, ...], device: str = "cpu") -> Arguments:
        arguments, tokens = super().arguments(size, device), len(size)
        generator = torch.Generator().manual_seed(tokens)
        k_new, v_new = torch.randn(2, tokens, 1, 64, generator=generator).bfloat16()
        angle = torch.rand(50, 16, generator=generator)
        rope = Rope(angle.cos(), angle.sin(), torch.tensor([4, 40, 8])[:tokens], style="gptj")
        new = {"k_new": k_new, "v_new": v_new, "slot_mapping": torch.arange(3, 3 + tokens, dtype=torch.int32)}
        sinks = torch.linspace(-1, 1, arguments["q"].shape[1])
        return {**arguments, **new, "rope": rope, "k_offset": torch.ones(1, 64), "sinks": sinks}

    def prepare(self, plan: Any, arguments: Arguments) -> Callable[..., Any]:
        return partial(_step, **arguments, plan=plan)


def _source_in_the_graph(
    q: torch.Tensor, rows: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, **options: Any
) -> Any:
    return sparse_prefill(q, KVSource(rows, indptr, indices), **options)


class SparseOfTensors(Sparse):
    """Whose source is made where the call is traced."""

    def arguments(self, size: Any, device: str = "cpu") -> Arguments:
        arguments = super().arguments(size, device)
        prefix = arguments["prefix"]
        return {"q": arguments["q"], "rows": prefix.rows, "indptr": prefix.indptr, "indices": prefix.indices}

    def prepare(self, plan: Any, arguments: Arguments) -> Callable[..., Any]:
        return partial(_source_in_the_graph, **arguments)


DECODES = ((20, 5), (9, 30, 4))
PREFILLS = (((5, 2), (20, 5)), ((3, 9, 1), (9, 30, 4)))
TOKENS = ((2, 2, 2), (2, 2, 2, 2, 2), (2, 2))
SAGE = {"qk_dtype": "int4", "causal": "bottom_right", "window": (9, -1)}
BY_TOKEN: dict[str, Any] = {"granularity": "token_head", "ragged": True}
FP4: dict[str, Any] = {"format": "fp4_e2m1", "scale_group": 32}


def like(
    planned: str, name: str, sizes: Any, kind: type[Operation] | None = None,
    options: dict[str, Any] | None = None, **changes: Any,
) -> Operation:  # fmt: skip
    """An operation with calls of other sizes, and of a case with some fields changed."""
    found = BY_NAME[planned]
    case = replace(found.case, **changes)
    options = found.options if options is None else options
    return (kind or type(found))(name, case, found.largest, sizes, (), options)


CALLS: tuple[Operation, ...] = (
    like("decode", "paged_decode", DECODES, format="bf16"),
    like("decode", "paged_decode, FP8 queries", DECODES, q_dtype=torch.float8_e4m3fn),
    like("decode", "step, bf16", DECODES, Step, format="bf16"),
    like("decode", "step, FP8", DECODES, Step),
    like("decode", "step, descales of tokens, ragged", DECODES, Step, **BY_TOKEN),
    like("decode", "step, FP4", DECODES, Step, **FP4),
    like("decode", "paged_decode, heads of 320", DECODES, head_dim=320),
    like("prefill, fused", "batch_prefill", PREFILLS, format="bf16"),
    like("prefill", "batch_prefill, heads of 320", PREFILLS, head_dim=320),
    like("prefill", "batch_prefill, ragged", PREFILLS, window_left=9, **BY_TOKEN),
    like("prefill", "batch_prefill, FP8 queries", PREFILLS, q_dtype=torch.float8_e4m3fn),
    like("prefill", "batch_prefill, FP4", PREFILLS, **FP4),
    like("append, rope", "prefill_append", PREFILLS),
    like("append, rope", "prefill_append, heads of 320", PREFILLS, head_dim=320),
    like(
        "append", "prefill_append, descales of tokens", PREFILLS, format="fp8_e4m3fn",
        granularity="token_head", sinks=True,
    ),
    like("sage, int8", "sage_attention", (((5,), (5,)), ((9,), (9,))), options=SAGE),
    like("sage, ragged", "sage_attention, ragged", (((2, 3), (2, 3)), ((2, 7), (2, 7))), options=SAGE),
    like("sage, block mask", "sage_attention, block mask", (((5,), (150,)), ((9,), (200,)))),
    like("sparse, 16bit", "sparse_prefill", TOKENS),
    like("sparse, 16bit", "sparse_prefill, source in the graph", TOKENS, SparseOfTensors),
    like("sparse, fused", "sparse_prefill_fp8", TOKENS),
    like("sparse, fused", "sparse_prefill_fp8, FP8 query", TOKENS, layout="split", q="fp8"),
    like("sparse, splits", "sparse_decode", TOKENS, layout="split"),
    like("sparse, 16bit", "sparse_decode, 16 bits", TOKENS, options={"num_splits": 2}),
    Latent("latent_decode", LatentCase(columns=512, num_qo_heads=6), {"max_batch": 4}, DECODES, (), {}),
    Latent(
        "latent_decode, one scale", LatentCase(layout="tensor512", num_qo_heads=6, q_len=2, ragged=True),
        {"max_batch": 4}, DECODES, (), {},
    ),
)  # fmt: skip
CALLS_BY_NAME = {str(each): each for each in CALLS}


def calls(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("operation", [CALLS_BY_NAME[name] for name in names], ids=str)


READERS = (
    "paged_decode", "batch_prefill", "sage_attention",
    "sparse_prefill", "sparse_prefill_fp8", "sparse_decode", "latent_decode",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    """All tests compile one function, of which torch keeps a few graphs."""
    torch.compiler.reset()


def traced(operation: Operation, plan: Any = None) -> Callable[..., Any]:
    """The call as part of a larger graph: its 16-bit tensors are computed in it."""

    def step(arguments: Arguments, **outputs: torch.Tensor) -> Any:
        computed = {
            name: 2 * value if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value
            for name, value in arguments.items()
        }
        return operation.prepare(plan, computed)(**outputs, return_lse=True)

    return step


def compiled(operation: Operation, plan: Any = None, **options: Any) -> Callable[..., Any]:
    return torch.compile(traced(operation, plan), fullgraph=True, backend="aot_eager", **options)


def of_queries(operation: Operation, arguments: Arguments, plan: Any = None) -> Callable[..., Any]:
    """The call as a function of its queries."""
    return lambda q: operation.prepare(plan, {**arguments, "q": q})(return_lse=True)


# The others are compiled with dynamic shapes.
@calls(*(each.name for each in CALLS if each.name != "paged_decode" and "sage" not in each.name))
def test_a_call_compiles_into_one_graph(operation: Operation) -> None:
    arguments = operation.arguments(operation.sizes[0])
    before, own = (mapped(arguments, torch.clone) for _ in range(2))
    expected = traced(operation)(own)
    assert same_bits(compiled(operation)(arguments), expected)
    assert same_bits(arguments, own)
    assert same_bits(arguments, before) != operation.kind.startswith(("step", "prefill_append"))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("step, bf16", "step, FP8"),
        ("batch_prefill", "batch_prefill, ragged"),
        ("sage_attention", "sage_attention, ragged"),
        ("sage_attention, block mask", "sage_attention, block mask"),
        ("sparse_prefill, source in the graph", "sparse_prefill, source in the graph"),
    ],
)
def test_dynamic_shapes_and_another_kind_are_told_apart(name: str, other: str) -> None:
    operation = CALLS_BY_NAME[name]
    call = compiled(operation, dynamic=True)
    given = [operation.arguments(size) for size in operation.sizes]
    for arguments in (*given, CALLS_BY_NAME[other].arguments(operation.sizes[-1])):
        own = mapped(arguments, torch.clone)
        assert same_bits(call(arguments), traced(operation)(own))
        assert same_bits(arguments, own)


@calls("step, FP8", *READERS[1:], "prefill_append, descales of tokens")
def test_outputs_that_are_given(operation: Operation) -> None:
    arguments = operation.arguments(operation.sizes[0])
    own = mapped(arguments, torch.clone)
    o, lse = traced(operation)(own)
    dtype = torch.float32 if "cache" in arguments else o.dtype
    given = {"out": torch.zeros_like(o, dtype=dtype), "lse": torch.zeros_like(lse)}
    expected = {name: torch.zeros_like(each) for name, each in given.items()}
    traced(operation)(mapped(arguments, torch.clone), **expected)
    assert same_bits(compiled(operation)(arguments, **given), given)
    assert same_bits(given, expected)
    assert same_bits(given["lse"], lse)
    assert same_bits(arguments, own)


@calls(*READERS)
def test_export_functionalisation_and_fx(operation: Operation) -> None:
    arguments = operation.arguments(operation.sizes[0])
    call, q = of_queries(operation, arguments), arguments["q"]
    expected = call(q)

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> Any:
            return call(q)

    program = torch.export.export(Layer(), (q,), strict=True)
    graph = make_fx(call, tracing_mode="real")(q)
    for code in (program.graph_module.code, graph.code):
        assert f"narrowkv.{operation}" in code
    for found in (program.module()(q), torch.func.functionalize(call)(q), graph(q)):
        assert same_bits(found, expected)


@calls(
    "step, FP8",
    "paged_decode, FP8 queries",
    "batch_prefill, FP8 queries",
    "sparse_prefill_fp8, FP8 query",
    "prefill_append",
    *READERS,
)
def test_fake_tensors(operation: Operation) -> None:
    arguments = operation.arguments(operation.sizes[0])
    expected = operation.prepare(None, mapped(arguments, torch.clone))(return_lse=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        results = operation.prepare(None, arguments)(return_lse=True)
    for found, real in zip(results, expected, strict=True):
        assert isinstance(found, FakeTensor)
        assert (found.shape, found.dtype) == (real.shape, real.dtype)


class Operators(TorchDispatchMode):
    """Notes the operators of narrowkv that a block calls, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "narrowkv":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.sampled(most=6)
@pytest.mark.parametrize("given", [False, True])
@calls(
    "step, FP8", "step, descales of tokens, ragged", "step, FP4", "paged_decode, FP8 queries",
    "batch_prefill", "batch_prefill, ragged",
    "prefill_append", "prefill_append, descales of tokens", "sage_attention", "sparse_prefill_fp8",
    "sparse_prefill_fp8, FP8 query",
)  # fmt: skip
def test_opcheck(operation: Operation, given: bool) -> None:
    arguments = operation.arguments(operation.sizes[0])
    o, lse = operation.prepare(None, mapped(arguments, torch.clone))(return_lse=True)
    outputs = {"out": torch.empty_like(o), "lse": torch.empty_like(lse)} if given else {}
    with Operators() as seen:
        operation.prepare(None, arguments)(**outputs, return_lse=True)
    assert ("_out" in str(seen.calls[-1][0])) == given
    for operator, args in seen.calls:
        # opcheck compares what an operator left of its arguments, which torch cannot do with FP8.
        torch.library.opcheck(operator, tuple(mapped(arg, as_bytes) for arg in args))


@calls("step, bf16", "prefill_append", *READERS[1:])
def test_eager_calls_do_not_meet_the_dispatcher(operation: Operation) -> None:
    arguments = operation.arguments(operation.sizes[0])
    with torch.profiler.profile() as seen, torch.inference_mode():
        operation.prepare(None, arguments)()
    names = {event.name for event in seen.events()}
    assert names, "torch's own operators are seen"
    assert not [name for name in names if name.startswith("narrowkv")]


# ---------------------------------------------------------------------------- plans, and what is refused


@calls("paged_decode", "batch_prefill", "prefill_append", "sparse_decode")
def test_a_plan_that_is_traced_is_the_one_that_runs(operation: Operation) -> None:
    arguments = operation.arguments(operation.sizes[0])
    own, for_graph = (mapped(arguments, torch.clone) for _ in range(2))
    plan = operation.plan()
    expected = traced(operation, plan)(own)
    assert same_bits(compiled(operation, plan)(arguments), expected)
    assert same_bits(arguments, own)
    graph = make_fx(of_queries(operation, for_graph, plan), tracing_mode="real")(for_graph["q"])
    assert plan.handle in graph.code
    assert same_bits(graph(for_graph["q"]), of_queries(operation, for_graph, plan)(for_graph["q"]))


@calls("paged_decode", "batch_prefill", "prefill_append", "sparse_decode")
def test_a_plan_that_is_gone_is_missed_by_name(operation: Operation) -> None:
    arguments = operation.arguments(operation.sizes[0])
    graph = make_fx(of_queries(operation, arguments, operation.plan()), tracing_mode="real")(arguments["q"])
    gc.collect()
    with pytest.raises(ValueError, match="must be alive in the process"):
        graph(arguments["q"])


@pytest.mark.parametrize(
    ("name", "message", "change"),
    [
        ("step, bf16", "k_new", lambda given: {"k_new": given["k_new"][:, :, :32]}),
        ("sparse_prefill", "num_qo_heads|tokens", lambda given: {"q": given["q"][:2]}),
        ("paged_decode", "must have a positive multiple|plan must be made for",
         lambda given: {"q": given["q"][:, :1], "plan": CALLS_BY_NAME["paged_decode"].plan()}),
        ("prefill_append", "plan must be made by plan_append",
         lambda given: {"plan": BY_NAME["prefill"].plan()}),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_when_the_operator_runs(
    name: str, message: str, change: Callable[[Arguments], Arguments]
) -> None:
    operation = CALLS_BY_NAME[name]
    arguments = operation.arguments(operation.sizes[0])
    changed = change(arguments)
    plan = changed.pop("plan", None)
    with Operators() as seen, pytest.raises(ValueError, match=message):
        operation.prepare(plan, {**arguments, **changed})()
    assert seen.calls


def test_options_survive_the_string() -> None:
    options = {"a": "x y", "b": -1, "c": 1e-30, "d": None, "e": True, "f": torch.float16, "g": 0.1}
    assert spelled(*spell(**options)) == options
