"""What every operation promises of its arguments: what it refuses, in which words, and where it writes.

A refused call changes nothing. `validate=True` also refuses wrong values; without it they stay within their
own sequence (test_hostile_metadata.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import batch_prefill, plan_append, plan_prefill, prefill_append
from narrowkv.attn_prefill.cases import PrefillCase
from narrowkv.sage import plan_sage, sage_attention
from narrowkv.sage.cases import SageCase
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    choose_mode,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_fp8,
)
from narrowkv.sparse_fp8.cases import SparseCase

pytestmark = pytest.mark.sampled
I32 = torch.int32
NOT_NUMBERS = (0.0, -1.0, math.nan, math.inf)
Arguments = SimpleNamespace


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
class Operation:
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
    "prefill": Operation(batch_prefill, _prefill, plan=plan_prefill),
    "prefill_append": Operation(prefill_append, _prefill_append, plan=plan_append),
    "sage": Operation(sage_attention, _sage),
    "sparse_prefill": Operation(sparse_prefill, lambda device: _sparse(device, layout="bf16")),
    "sparse_prefill_fp8": Operation(sparse_prefill_fp8, _sparse, (("mode", "fused"),)),
    "sparse_prefill_fp8, prepass": Operation(sparse_prefill_fp8, _sparse, (("mode", "prepass"),)),
    "sparse_decode": Operation(sparse_decode, _sparse, (("num_splits", 2),)),
}
SPARSE_FP8 = [name for name, found in OPERATIONS.items() if found.arguments is _sparse]


# ---- refusals

Change = dict[str, Any] | Callable[[Arguments], dict[str, Any]]


def _row(operation: str, name: str, change: Change, message: str, error: type[Exception] = ValueError) -> Any:
    return pytest.param(operation, change, error, message, id=f"{operation}, {name}")


def _wrong(field: str, **changes: Any) -> Change:
    """The argument with other fields, each made from its value, and `validate=True`."""

    def change(a: Arguments) -> dict[str, Any]:
        given = getattr(a, field)
        made = {name: make(getattr(given, name)) for name, make in changes.items()}
        return {field: replace(given, **made), "validate": True}

    return change


def _numbers(field: str, *numbers: int) -> Change:
    return lambda a: {
        field: torch.tensor(numbers, dtype=I32, device=a.q.device), "validate": True,
    }  # fmt: skip


def _at(index: Any, number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A copy of a tensor with another number at an index."""

    def changed(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[index] = number
        return x

    return changed


def _like(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda given: x.to(given.device, given.dtype)


def _kinds() -> Iterator[Any]:
    """Objects of a wrong class: TypeErrors."""
    rows: dict[str, list[tuple[dict[str, Any], str]]] = {
        "prefill": [
            ({"cache": {}}, "cache must be a PagedKVCache"),
            ({"page_table": []}, "page_table must be a PageTable"),
            ({"plan": 1}, "plan must be a PrefillPlan"),
            ({"cu_seqlens_q": [0]}, "cu_seqlens_q must be a torch.Tensor"),
            ({"q": []}, "q must be a torch.Tensor"),
            ({"window_left": True}, "window_left must be an int"),
            ({"out_dtype": "bf16"}, "out_dtype must be a torch.dtype"),
        ],
        "prefill_append": [
            ({"rope": ()}, "rope must be a Rope"),
            ({"k_new": None}, "k_new must be a torch.Tensor"),
        ],
        "sage": [({"k": None}, "k must be a torch.Tensor")],
        "sparse_prefill_fp8": [
            ({"sm_scale": "1"}, "sm_scale must be a float"),
            ({"q": None}, "q must be a torch.Tensor or DSV4Rows"),
            ({"prefix": {}}, "prefix must be a KVSource"),
            ({"attn_sink": 0.5}, "attn_sink must be a torch.Tensor"),
            ({"out": []}, "out must be a torch.Tensor"),
            ({"plan": "fast"}, "plan must be a SparsePlan"),
        ],
        "sparse_decode": [({"prefix": []}, "prefix must be a KVSource")],
    }
    for operation, changes in rows.items():
        for change, message in changes:
            yield _row(operation, f"class of {next(iter(change))}", change, message, TypeError)


def _values() -> Iterator[Any]:
    """Wrong values of metadata, which `validate` finds."""
    for operation in ("prefill", "prefill_append"):
        for starts in ((1, 5, 6, 31), (0, 6, 5, 31), (0, 5, 6, 32), (0, 5, 6, 30)):
            change = _numbers("cu_seqlens_q", *starts)
            yield _row(operation, f"starts {starts}", change, "cu_seqlens_q must rise from 0")
        negative = _wrong("page_table", seq_lens=lambda x: x * 0 - 1)
        yield _row(operation, "negative lengths", negative, "must not be negative")
    beyond = _wrong("page_table", seq_lens=lambda x: x + 900)
    yield _row("prefill", "lengths beyond the table", beyond, "must not exceed the table's capacity")
    for number, message in ((-1, "must not be negative"), (10**6, "must be below num_pages")):
        change = _wrong("page_table", page_ids=lambda x, n=number: torch.full_like(x, n))
        yield _row("prefill", f"page {number}", change, message)
    yield _row(
        "prefill_append", "no pages for the new tokens",
        _wrong("page_table", seq_lens=_like(torch.tensor([20, 5, 75]))),
        "page_table must have pages for the new tokens",
    )  # fmt: skip
    yield _row(
        "prefill_append", "a page of new tokens only", _wrong("page_table", page_ids=_at((2, 5), -1)),
        "page ids must not be negative",
    )  # fmt: skip
    yield _row(
        "prefill_append", "a position without an angle", _wrong("rope", positions=_at(3, 10**4)),
        "rope.positions must lie in",
    )  # fmt: skip
    for field in ("cu_seqlens_q", "cu_seqlens_k"):
        for index, number, message in (
            (0, 1, "must start at 0, got 1"),
            (2, 1, "must not decrease, got"),
            (4, 10**6, "must end within the .* tokens, got 1000000"),
            (3, -(2**31), "must not decrease, got"),
        ):
            starts = [0, 20, 20, 27, 60] if field == "cu_seqlens_q" else [0, 30, 34, 74, 83]
            starts[index] = number
            yield _row("sage", f"{field} {starts}", _numbers(field, *starts), f"{field} {message}")
    for operation in SPARSE_FP8:
        for indptr, message in (
            ([1, 3, 4], r"must start at 0, got 1"),
            ([0, 3, 2], r"must not decrease, got 3 and then 2 at elements 1 and 2"),
            ([0, 3, 9], r"must end within the 4 indices, got 9"),
        ):
            change = _wrong("prefix", indptr=_like(torch.tensor(indptr)))
            yield _row(operation, f"indptr {indptr}", change, rf"prefix\.indptr {message}")
        for index in (-2, -(2**31), 256, 2**30 + 5):
            change = _wrong("prefix", indices=_at(2, index))
            yield _row(operation, f"index {index}", change, f"must be -1 or rows below 256, got {index}")
    yield _row(
        "sparse_prefill", "a sink of NaN", lambda a: {"attn_sink": a.attn_sink * math.nan, "validate": True},
        "attn_sink must not hold NaN",
    )  # fmt: skip


REFUSED = [
    *_kinds(),
    *_values(),
    _row(
        "prefill", "descales of another batch",
        lambda a: {"cache": replace(
            a.cache, k_descale=torch.ones(2, 2, device=a.q.device), k_granularity="sequence_head"
        )},
        r"k_descale must have shape \[3, 2\], got \[2, 2\]",
    ),
    _row("prefill", "out of another dtype",
         lambda a: {"out": a.q.float(), "out_dtype": torch.bfloat16}, "out must have dtype", TypeError),
    _row("prefill_append", "out of another dtype",
         lambda a: {"out": a.q.float(), "out_dtype": torch.bfloat16}, "out must have dtype", TypeError),
    _row("sage", "no query heads", lambda a: {"q": a.q[:, :0]}, "at least 1, got 0"),
    _row("sage", "no KV heads", lambda a: {"k": a.k[:, :0], "v": a.v[:, :0]}, "multiple of k's 0 heads"),
    _row("sage", "lse of another shape", {"lse": torch.empty(3)}, "lse must have shape"),
    _row("sparse_prefill_fp8", "sm_scale beyond float32", {"sm_scale": 1e39}, "sm_scale must be finite"),
    _row("sparse_prefill_fp8", "no heads", lambda a: {"q": a.q[:, :0]}, "num_qo_heads in"),
    _row("sparse_prefill_fp8", "lse in fp16",
         lambda a: {"lse": a.q[..., 0].half()}, "lse must have dtype", TypeError),
    _row("sparse_prefill_fp8", "lse of other heads",
         lambda a: {"lse": a.q.new_empty(2, 9).float()}, "lse must have shape"),
    _row("sparse_decode", "too many splits", {"num_splits": 65536}, "num_splits must be at most 65535"),
    _row("sparse_prefill", "rows that require grad",
         lambda a: {"prefix": replace(a.prefix, rows=a.prefix.rows.clone().requires_grad_())},
         "must not require grad"),
]  # fmt: skip


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif is_dataclass(x):
        for field in fields(x):
            yield from _tensors(getattr(x, field.name))


def _contents(arguments: dict[str, Any]) -> list[torch.Tensor]:
    found = [tensor for value in arguments.values() for tensor in _tensors(value)]
    return [x.detach().contiguous().view(torch.uint8).clone() for x in found]


def _assert_refused(
    call: Callable[[], Any], error: type[Exception], message: str, arguments: dict[str, Any]
) -> None:
    before = _contents(arguments)
    with pytest.raises(error, match=message):
        call()
    assert all(map(torch.equal, before, _contents(arguments)))


@pytest.mark.parametrize(("operation", "change", "error", "message"), REFUSED)
def test_a_wrong_argument_is_refused_in_words_and_nothing_is_written(
    operation: str, change: Change, error: type[Exception], message: str, device: str
) -> None:
    made = OPERATIONS[operation]
    arguments = made.arguments(device)
    changed = change if isinstance(change, dict) else change(Arguments(**arguments))
    arguments = {**arguments, **changed}
    _assert_refused(lambda: made(arguments), error, message, arguments)
    if made.plan and changed.keys() <= {"cache", "page_table", "cu_seqlens_q", "validate"}:
        names = ("q", "cache", "page_table", "cu_seqlens_q")
        planned = [arguments[name] for name in names]
        with pytest.raises(error, match=message):
            made.plan(*planned, validate=True)


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
    planned = [arguments[x] for x in ("q", "cache", "page_table", "cu_seqlens_q")]
    message = f"{name} must be at least {bound + 1} for these lengths, got {bound}"
    plan = made.plan(*planned, **{name: bound})
    _assert_refused(lambda: made(arguments, plan=plan, validate=True), ValueError, message, arguments)
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
    _assert_refused(lambda: made(arguments, validate=True), ValueError, message, arguments)


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


def _get(arguments: dict[str, Any], path: str) -> Any:
    first, *rest = path.split(".")
    found = arguments[first]
    for name in rest:
        found = getattr(found, name)
    return found


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
    _assert_refused(
        lambda: made(arguments, **results), ValueError,
        f"{result} must not share memory with {name}", arguments,
    )  # fmt: skip


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
    arguments = Arguments(**_sage("cpu", ragged=False, q_lens=(20,), k_lens=(30,)))
    plan = plan_sage(arguments.q, arguments.k)
    kv = plan.quantize_kv(arguments.k, arguments.v)
    short = plan_sage(arguments.q[:, 1:], arguments.k)
    with pytest.raises(TypeError, match="kv must be a QuantizedKV"):
        plan.attend(arguments.q, (arguments.k, arguments.v))
    with pytest.raises(ValueError, match="at most 1 sequences and 19 tokens as planned"):
        short.attend(arguments.q, kv)
    with pytest.raises(ValueError, match="cu_seqlens_k must be None"):
        plan.quantize_kv(arguments.k, arguments.v, cu_seqlens_k=arguments.q)
    with pytest.raises(TypeError, match="workspace must be a Workspace"):
        plan.with_workspace(3)
