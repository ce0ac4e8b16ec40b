"""What every operation promises of its arguments: what it refuses, in which words, and where it writes.

A refused call changes nothing. `validate=True` also refuses wrong values; without it they stay within their
own sequence (test_hostile_metadata.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import merge_states, paged_decode, plan_decode
from narrowkv.attn_prefill import batch_prefill, plan_append, plan_prefill, prefill_append
from narrowkv.context_parallel import ShardLayout, cp_paged_decode, plan_cp_decode
from narrowkv.runtime.launch import executing
from narrowkv.sage import plan_sage, sage_attention
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    choose_mode,
    index_topk,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_fp8,
)
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.cases.sparse import SparseCase

pytestmark = pytest.mark.sampled
I32 = torch.int32
NOT_NUMBERS = (0.0, -1.0, math.nan, math.inf)


def _prefill(device: str, **case: Any) -> dict[str, Any]:
    names = ("q", "cache", "page_table", "cu_seqlens_q")
    return dict(zip(names, PrefillCase.small(**case).build(device), strict=True))


def _prefill_append(device: str, **case: Any) -> dict[str, Any]:
    names = ("q", "k_new", "v_new", "cache", "page_table", "cu_seqlens_q", "rope")
    return dict(zip(names, PrefillCase.append(**{"rope": "neox", **case}).build_append(device), strict=True))


def _sage(device: str, **case: Any) -> dict[str, Any]:
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    case = {"q_lens": (20, 0, 7, 33), "k_lens": (30, 4, 40, 9), "ragged": True, **case}
    return dict(zip(names, SageCase.small(**case).build(device), strict=True))


def _sparse(device: str, **case: Any) -> dict[str, Any]:
    case = {"prefix_lens": (2, 2), "extend_lens": (1, 1), "num_qo_heads": 8, "skipped": 0.0, **case}
    inputs = SparseCase.small(**case).build(device)
    return {name: getattr(inputs, name) for name in ("q", "prefix", "extend", "attn_sink")}


@dataclass(frozen=True)
class OperationEntry:
    """An operation and a small call of it.

    Attributes:
        call: the operation.
        arguments: makes the arguments of a valid call, on a device, of the small case with changes.
        fixed: arguments that every call has.
        plan: makes its plan from `q`, `cache`, `page_table` and `cu_seqlens_q`, and looks at their values.
    """

    call: Callable[..., Any]
    arguments: Callable[..., dict[str, Any]]
    fixed: tuple[tuple[str, Any], ...] = ()
    plan: Callable[..., Any] | None = None

    def __call__(self, arguments: dict[str, Any], **options: Any) -> Any:
        return self.call(**{**dict(self.fixed), **arguments, **options})


OPERATIONS = {
    "prefill": OperationEntry(batch_prefill, _prefill, plan=plan_prefill),
    "prefill_append": OperationEntry(prefill_append, _prefill_append, plan=plan_append),
    "sage": OperationEntry(sage_attention, _sage),
    "sparse_prefill": OperationEntry(sparse_prefill, lambda device: _sparse(device, layout="bf16")),
    "sparse_prefill_fp8": OperationEntry(sparse_prefill_fp8, _sparse, (("mode", "fused"),)),
    "sparse_prefill_fp8, prepass": OperationEntry(sparse_prefill_fp8, _sparse, (("mode", "prepass"),)),
    "sparse_decode": OperationEntry(sparse_decode, _sparse, (("num_splits", 2),)),
}
SPARSE_FP8 = [name for name, found in OPERATIONS.items() if found.arguments is _sparse]


PREFILLS = ("prefill", "prefill_append")
PLANNED = ("q", "cache", "page_table", "cu_seqlens_q")


def _get(arguments: dict[str, Any], path: str) -> Any:
    """What is at a path such as "prefix.rows.data"."""
    first, *rest = path.split(".")
    return reduce(getattr, rest, arguments[first])


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif is_dataclass(x):
        for field in fields(x):
            yield from _tensors(getattr(x, field.name))


def _contents(arguments: dict[str, Any]) -> list[torch.Tensor]:
    found = [tensor for value in arguments.values() for tensor in _tensors(value)]
    return [x.detach().flatten().view(torch.uint8).clone() for x in found]


def _assert_refused(
    operation: OperationEntry, arguments: dict[str, Any], message: str, error: type[Exception] = ValueError
) -> None:
    before = _contents(arguments)
    with pytest.raises(error, match=message):
        operation(arguments)
    assert all(map(torch.equal, before, _contents(arguments)))


# ---- refusals

CLASSES: list[tuple[str, dict[str, Any], str]] = [
    ("prefill", {"cache": {}}, "cache must be a PagedKVCache"),
    ("prefill", {"page_table": []}, "page_table must be a PageTable"),
    ("prefill", {"plan": 1}, "plan must be a PrefillPlan"),
    ("prefill", {"cu_seqlens_q": [0]}, "cu_seqlens_q must be a torch.Tensor"),
    ("prefill", {"q": []}, "q must be a torch.Tensor"),
    ("prefill", {"window_left": True}, "window_left must be an int"),
    ("prefill", {"out_dtype": "bf16"}, "out_dtype must be a torch.dtype"),
    *(
        (x, {name: [16, 0]}, f"{name} must be a single value, got \\[16, 0\\]")
        for x in ("prefill", "prefill_append")
        for name in ("sm_scale", "logits_soft_cap", "window_left", "out_dtype", "return_lse")
    ),
    ("sage", {"smooth_q": [True]}, "smooth_q must be a single value"),
    ("sage", {"window": [16]}, "window must be"),
    ("prefill_append", {"rope": ()}, "rope must be a Rope"),
    ("prefill_append", {"k_new": None}, "k_new must be a torch.Tensor"),
    ("sage", {"k": None}, "k must be a torch.Tensor"),
    ("sparse_prefill_fp8", {"sm_scale": "1"}, "sm_scale must be a float"),
    ("sparse_prefill_fp8", {"q": None}, "q must be a torch.Tensor or DSV4Rows"),
    ("sparse_prefill_fp8", {"prefix": {}}, "prefix must be a KVSource"),
    ("sparse_prefill_fp8", {"attn_sink": 0.5}, "attn_sink must be a torch.Tensor"),
    ("sparse_prefill_fp8", {"out": []}, "out must be a torch.Tensor"),
    ("sparse_prefill_fp8", {"plan": "fast"}, "plan must be a SparsePlan"),
    ("sparse_decode", {"prefix": []}, "prefix must be a KVSource"),
]


@pytest.mark.parametrize(("operation", "change", "message"), CLASSES)
def test_an_object_of_a_wrong_class_is_refused(operation: str, change: dict[str, Any], message: str) -> None:
    made = OPERATIONS[operation]
    _assert_refused(made, {**made.arguments("cpu"), **change}, message, TypeError)


# What is changed of the arguments `a`.
REFUSED: list[tuple[str, Callable[[Any], dict[str, Any]], type[Exception], str]] = [
    ("prefill", lambda a: {"cache": replace(
        a.cache, k_descale=torch.ones(2, 2, device=a.q.device), k_granularity="sequence_head"
    )}, ValueError, r"k_descale must have shape \[3, 2\], got \[2, 2\]"),
    *((x, lambda a: {"out": a.q.float(), "out_dtype": torch.bfloat16}, TypeError, "out must have dtype")
      for x in PREFILLS),
    ("sage", lambda a: {"q": a.q[:, :0]}, ValueError, "at least 1, got 0"),
    ("sage", lambda a: {"k": a.k[:, :0], "v": a.v[:, :0]}, ValueError, "multiple of k's 0 heads"),
    ("sage", lambda a: {"lse": torch.empty(3)}, ValueError, "lse must have shape"),
    ("sparse_prefill_fp8", lambda a: {"sm_scale": 1e39}, ValueError, "sm_scale must be finite"),
    ("sparse_prefill_fp8", lambda a: {"q": a.q[:, :0]}, ValueError, "q must have 1 to 128 heads, got 0"),
    ("sparse_prefill", lambda a: {"q": a.q.repeat(1, 17, 1)[:, :129]}, ValueError, "1 to 128 heads, got 129"),
    ("sparse_prefill_fp8", lambda a: {"lse": a.q[..., 0].half()}, TypeError, "lse must have dtype"),
    ("sparse_prefill_fp8", lambda a: {"lse": a.q.float()[:, :7, 0]}, ValueError, "lse must have shape"),
    ("sparse_decode", lambda a: {"num_splits": 65536}, ValueError, "num_splits must be at most 65535"),
    ("sparse_prefill", lambda a: {"prefix": replace(a.prefix, rows=a.prefix.rows.clone().requires_grad_())},
     ValueError, "must not require grad"),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "change", "error", "message"), REFUSED)
def test_an_argument_that_does_not_fit_is_refused(
    operation: str, change: Callable[[Any], dict[str, Any]], error: type[Exception], message: str, device: str
) -> None:
    made = OPERATIONS[operation]
    arguments = made.arguments(device)
    _assert_refused(made, {**arguments, **change(SimpleNamespace(**arguments))}, message, error)


# What is changed in place: the tensor's path, the index and the numbers there.
VALUES: list[tuple[str, str, Any, Any, str]] = [
    *((x, "cu_seqlens_q", ..., starts, "cu_seqlens_q must rise from 0")
      for x in PREFILLS for starts in ([1, 5, 6, 31], [0, 6, 5, 31], [0, 5, 6, 32], [0, 5, 6, 30])),
    *((x, "page_table.seq_lens", ..., -1, "must not be negative") for x in PREFILLS),
    ("prefill", "page_table.seq_lens", 1, 900, "must not exceed the table's capacity"),
    ("prefill", "page_table.page_ids", ..., -1, "must not be negative"),
    ("prefill", "page_table.page_ids", ..., 11, "must be below num_pages = 11"),
    ("prefill_append", "page_table.seq_lens", 2, 75, "page_table must have pages for the new tokens"),
    ("prefill_append", "page_table.page_ids", (2, 5), -1, "page ids must not be negative"),  # of new tokens
    ("prefill_append", "rope.positions", 3, 10**4, "rope.positions must lie in"),
    *(("sage", path, index, number, f"{path} {message}")
      for path in ("cu_seqlens_q", "cu_seqlens_k")
      for index, number, message in (
          (0, 1, "must start at 0, got 1"),
          (2, 1, "must not decrease, got"),
          (3, -(2**31), "must not decrease, got"),
          (4, 10**6, "must end within the .* tokens, got 1000000"),
      )),
    *((x, "prefix.indptr", ..., indptr, rf"prefix\.indptr {message}")
      for x in SPARSE_FP8
      for indptr, message in (
          ([1, 3, 4], "must start at 0, got 1"),
          ([0, 3, 2], "must not decrease, got 3 and then 2 at elements 1 and 2"),
          ([0, 3, 9], "must end within the 4 indices, got 9"),
      )),
    *((x, "prefix.indices", 2, index, f"must be -1 or rows below 256, got {index}")
      for x in SPARSE_FP8 for index in (-2, -(2**31), 256, 2**30 + 5)),
    ("sparse_prefill", "attn_sink", ..., math.nan, "attn_sink must not hold NaN"),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "path", "index", "numbers", "message"), VALUES)
def test_validate_names_a_wrong_value(
    operation: str, path: str, index: Any, numbers: Any, message: str, device: str
) -> None:
    made = OPERATIONS[operation]
    arguments = made.arguments(device)
    tensor = _get(arguments, path)
    tensor[index] = torch.tensor(numbers, dtype=tensor.dtype, device=device)
    _assert_refused(made, {**arguments, "validate": True}, message)
    if made.plan and path.split(".")[0] in PLANNED:
        with pytest.raises(ValueError, match=message):
            made.plan(*(arguments[name] for name in PLANNED), validate=True)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_validate_passes_a_right_call(operation: str, device: str) -> None:
    made = OPERATIONS[operation]
    made(made.arguments(device), validate=True)


@pytest.mark.parametrize(
    ("operation", "name", "bound"),
    [
        ("prefill", "max_q_len", 24), ("prefill", "max_seq_len", 69), ("prefill", "max_kv_tokens", 94),
        ("prefill_append", "max_q_len", 24), ("prefill_append", "max_seq_len", 94),
        ("prefill_append", "max_kv_tokens", 125),
    ],
)  # fmt: skip
def test_a_plan_whose_bound_is_too_low_is_refused(operation: str, name: str, bound: int, device: str) -> None:
    made = OPERATIONS[operation]
    assert made.plan is not None
    arguments = made.arguments(device)
    planned = [arguments[x] for x in PLANNED]
    message = f"{name} must be at least {bound + 1} for these lengths, got {bound}"
    plan = made.plan(*planned, **{name: bound})
    _assert_refused(made, {**arguments, "plan": plan, "validate": True}, message)
    if device == "cpu":  # where the lengths are there to be read
        for _ in range(2):  # a refused call is not kept
            _assert_refused(made, {**arguments, "plan": plan}, message)
    with pytest.raises(ValueError, match=message):
        made.plan(*planned, **{name: bound}, validate=True)


# The descale of a token that the call reads, where there are several.
USED = {
    "page_head": lambda table: (table.page_ids[2, 4].long(),),
    "token_head": lambda table: (table.page_ids[2, 4].long(), 5),
}


@pytest.mark.parametrize("value", NOT_NUMBERS)
@pytest.mark.parametrize("side", ["k_descale", "v_descale"])
@pytest.mark.parametrize(
    ("operation", "granularity"),
    [
        *(("prefill", x) for x in ("tensor", "head", "sequence_head", "page_head", "token_head")),
        *(("prefill_append", x) for x in ("tensor", "head", "token_head")),
    ],
)
def test_a_descale_that_is_no_positive_number_is_found(
    operation: str, granularity: str, side: str, value: float, device: str
) -> None:
    made = OPERATIONS[operation]
    arguments = made.arguments(device, granularity=granularity)
    descale = getattr(arguments["cache"], side)
    descale[USED.get(granularity, lambda table: -1)(arguments["page_table"])] = value
    message = f"{side} must be finite and greater than 0"
    _assert_refused(made, {**arguments, "validate": True}, message)


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_a_descale_of_queries_that_is_no_positive_number_is_found(value: float, device: str) -> None:
    arguments = _prefill(device, q_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="q_descale must be finite and greater than 0"):
        batch_prefill(**arguments, q_descale=torch.tensor([value], device=device), validate=True)


@pytest.mark.parametrize("scale", [*NOT_NUMBERS, 3.0])
@pytest.mark.parametrize("place", ["prefix", "extend", "q"])
def test_a_scale_that_is_no_power_of_two_is_found(place: str, scale: float, device: str) -> None:
    arguments = _sparse(device)
    arguments["q"] = DSV4Rows.quantize(arguments["q"], layout="split")
    sparse_prefill_fp8(**arguments, mode="fused", validate=True)
    rows = arguments["q"] if place == "q" else arguments[place].rows
    rows.scale[0 if place == "q" else int(arguments[place].indices[0]), 2] = scale
    with pytest.raises(ValueError, match=rf"{place}\.rows must have scales that are powers of two"):
        sparse_prefill_fp8(**arguments, mode="fused", validate=True)


@pytest.mark.parametrize("operation", SPARSE_FP8)
def test_scales_of_rows_that_no_index_names_are_not_looked_at(operation: str, device: str) -> None:
    made = OPERATIONS[operation]
    arguments = made.arguments(device, layout="packed584")
    rows = arguments["prefix"].rows
    assert bool(rows.unpack()[2].isnan().any() | rows.dequantize().isnan().any())
    made(arguments, validate=True)


def test_choose_mode_refuses_other_classes() -> None:
    arguments = _sparse("cpu")
    with pytest.raises(TypeError, match="q must be"):
        choose_mode(None, arguments["prefix"])
    with pytest.raises(TypeError, match="prefix must be"):
        choose_mode(arguments["q"], 3)


# ---- outputs


def _put(arguments: dict[str, Any], path: str, tensor: torch.Tensor) -> dict[str, Any]:
    """The arguments with another tensor at a path such as "prefix.rows.data"."""
    parent, _, name = path.rpartition(".")
    if not parent:
        return {**arguments, name: tensor}
    return _put(arguments, parent, replace(_get(arguments, parent), **{name: tensor}))


def _results(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    q = arguments["q"]
    return {"out": torch.zeros_like(q), "lse": q.new_zeros(q.shape[:2], dtype=torch.float32)}


# What a message calls a tensor, and where it is among the arguments.
TABLE = {"page ids": "page_table.page_ids", "seq_lens": "page_table.seq_lens"}
READ: dict[str, dict[str, str]] = {
    "prefill": {x: x for x in ("q", "cache.k", "cache.v", "cu_seqlens_q", "sinks")} | TABLE,
    "prefill_append": {x: x for x in ("q", "k_new", "v_new", "cache.k", "cu_seqlens_q")} | TABLE,
    "sage": {x: x for x in ("q", "cu_seqlens_q")},
    "sparse_prefill_fp8": {
        x: x
        for x in (
            "q", "attn_sink", "prefix.rows.data", "prefix.rows.rope", "prefix.rows.scale", "prefix.indptr",
            "prefix.indices", "extend.rows.data", "extend.indices",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("result", ["out", "lse"])
@pytest.mark.parametrize(("operation", "name"), [(x, name) for x, names in READ.items() for name in names])
def test_results_share_no_memory_with_what_a_call_reads(
    operation: str, name: str, result: str, device: str
) -> None:
    made = OPERATIONS[operation]
    arguments = made.arguments(device)
    arguments["sinks"] = torch.zeros(arguments["q"].shape[1], device=device)
    path, results = READ[operation][name], _results(arguments)
    read = _get(arguments, path)
    memory = torch.zeros(read.nbytes + results[result].nbytes, dtype=torch.uint8, device=device)
    placed = memory[: read.nbytes].view(read.dtype).view(read.shape)
    placed.view(torch.uint8).copy_(read.contiguous().view(torch.uint8))
    if "sinks" not in READ[operation]:
        del arguments["sinks"]
    arguments = _put(arguments, path, placed)
    x = results[result]
    results[result] = memory[: x.nbytes].view(x.dtype).view(x.shape)
    _assert_refused(made, {**arguments, **results}, f"{result} must not share memory with {name}")


@pytest.mark.parametrize("operation", READ)
def test_results_overlap_neither_themselves_nor_each_other(operation: str, device: str) -> None:
    made = OPERATIONS[operation]
    arguments = made.arguments(device)
    for result, x in _results(arguments).items():
        closer = x.as_strided(x.shape, (x.stride(0) - 1, *x.stride()[1:]))
        for overlapping in (x[:1].expand(x.shape), closer, *([x[:, :1].expand(x.shape)] * (x.dim() == 3))):
            with pytest.raises(ValueError, match=f"{result} must not overlap itself"):
                made(arguments, **{result: overlapping})
    results = _results(arguments)
    memory = torch.zeros(results["out"].nbytes, dtype=torch.uint8, device=device)
    out = memory.view(results["out"].dtype).view(results["out"].shape)
    lse = memory[: results["lse"].nbytes].view(torch.float32).view(results["lse"].shape)
    with pytest.raises(ValueError, match=r"must not share memory with (lse|o|out),"):
        made(arguments, out=out, lse=lse)


def _planned(name: str) -> tuple[Callable[..., Any], torch.Tensor]:
    """A call with a plan, where an operation has one, and the input that an output could lie over."""
    if name == "merge_states":
        o = torch.zeros(2, 3, 4, 64)
        return lambda out: merge_states(o, torch.zeros(2, 3, 4), out=out), o[1]
    if name == "index_topk":
        logits = torch.zeros(3, 8)
        return lambda out: index_topk(logits, 8, out=out), logits.view(I32)
    if name in ("decode", "cp_decode"):
        q, cache, table = DecodeCase.small(lens=(20, 5)).build()
        if name == "decode":
            return partial(_with_out, paged_decode, q, cache, table, plan=plan_decode(q, cache, table)), q
        table = ShardLayout(world=1, rank=0, interleave=16).shard_table(table, cache.page_size)
        return partial(_with_out, cp_paged_decode, q, cache, table, plan=plan_cp_decode(q, cache, table)), q
    if name == "prefill":
        given = _prefill("cpu")
        return partial(_with_out, batch_prefill, **given, plan=plan_prefill(**given)), given["q"]
    given = _sage("cpu")
    return partial(_with_out, sage_attention, **given), given["q"]


def _with_out(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    *args, out = args
    return call(*args, out=out, **options)


@pytest.mark.parametrize("name", ["decode", "cp_decode", "prefill", "sage", "merge_states", "index_topk"])
def test_a_later_call_may_not_write_over_its_inputs(name: str) -> None:
    """The shapes and dtypes of a later call are not checked again; where its tensors lie is."""
    with executing(LaunchRecorder("gfx950")):
        call, read = _planned(name)
        call(torch.zeros_like(read))
        with pytest.raises(ValueError, match="out must not share memory with"):
            call(read)


@pytest.mark.parametrize("name", ["k_new", "v_new", "sinks"])
def test_an_append_writes_over_none_of_its_inputs(name: str, device: str) -> None:
    arguments = _prefill_append(device, format="bf16")
    read = arguments.get(name, arguments["q"][0, :, 0])
    inside = arguments["cache"].k.flatten()[: read.numel()].view(read.shape)
    with pytest.raises(ValueError, match=rf"cache.k must not share memory with {name}"):
        prefill_append(**{**arguments, name: inside})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_results_that_the_caller_gives_are_written_and_nothing_beside_them(
    operation: str, device: str
) -> None:
    made = OPERATIONS[operation]
    o, lse = made(made.arguments(device), return_lse=True)
    arguments = made.arguments(device)
    tokens, heads, dim = o.shape
    wide = torch.full((tokens, heads, dim + 16), math.nan, dtype=o.dtype, device=device)
    log_sums = torch.full((tokens, heads + 3), math.nan, device=device)
    found = made(arguments, out=wide[..., :dim], lse=log_sums[:, :heads])
    assert isinstance(found, torch.Tensor)
    assert found.data_ptr() == wide.data_ptr()
    assert torch.equal(wide[..., :dim], o)
    assert torch.equal(log_sums[:, :heads], lse)
    assert bool(wide[..., dim:].isnan().all())
    assert bool(log_sums[:, heads:].isnan().all())


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name.startswith("sparse")])
def test_an_lse_of_any_strides_is_written(operation: str, device: str) -> None:
    made = OPERATIONS[operation]
    _, expected = made(made.arguments(device), return_lse=True)
    buffer = torch.full((8, 3, 2), math.nan, device=device)
    made(made.arguments(device), lse=buffer[:, 1].T)
    assert torch.equal(buffer[:, 1].T, expected)
    assert bool(buffer[:, ::2].isnan().all())


def test_a_sage_plan_refuses_what_it_is_not_for() -> None:
    q, k, v, *_ = _sage("cpu", ragged=False, q_lens=(20,), k_lens=(30,)).values()
    plan = plan_sage(q, k)
    with pytest.raises(TypeError, match="kv must be a QuantizedKV"):
        plan.attend(q, (k, v))
    with pytest.raises(ValueError, match="at most 1 sequences and 19 tokens as planned"):
        plan_sage(q[:, 1:], k).attend(q, plan.quantize_kv(k, v))
    with pytest.raises(ValueError, match="cu_seqlens_k must be None"):
        plan.quantize_kv(k, v, cu_seqlens_k=q)
    with pytest.raises(TypeError, match="workspace must be a Workspace"):
        plan.with_workspace(3)


def test_a_list_is_as_good_as_a_tuple() -> None:
    q, k, v, *_ = _sage("cpu", ragged=False, q_lens=(20,), k_lens=(30,)).values()
    mask = torch.ones(1, q.shape[2], 1, 1, dtype=torch.bool)
    for kind in (tuple, list):
        pairs = {"window": kind((16, 0)), "block_mask": mask, "block_sizes": kind((128, 64))}
        found = sage_attention(q, k, v, **pairs), plan_sage(q, k, window=kind((16, 0)))
        if kind is tuple:
            expected, plan = found
    assert torch.equal(found[0], expected)
    assert found[1] is plan


def test_decode_names_a_keyword_that_is_a_list() -> None:
    call, q = _planned("decode")
    with pytest.raises(TypeError, match=r"window_left must be a single value, got \[16\]"):
        call(torch.zeros_like(q), window_left=[16])
