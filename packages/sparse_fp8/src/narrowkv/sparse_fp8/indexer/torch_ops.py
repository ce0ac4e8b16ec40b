"""`torch.ops.narrowkv.index_*`: the indexer as torch.compile, export and fake tensors see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from narrowkv.runtime.launch.tracing import OPTIONS_SCHEMA, as_bytes, plan_of, spell, spelled, traces
from narrowkv.sparse_fp8.indexer.append import append_index_keys
from narrowkv.sparse_fp8.indexer.keys import IndexKeys
from narrowkv.sparse_fp8.indexer.logits import IndexLogitsPlan, index_logits
from narrowkv.sparse_fp8.indexer.topk import IndexTopkPlan, index_topk

_LOGITS = (
    "Tensor q, Tensor weights, Tensor values, Tensor? scale, Tensor? starts, Tensor? ends, "
    f"Tensor? block_table, Tensor? seq_lens, {OPTIONS_SCHEMA}"
)
_TOPK = (
    "Tensor logits, Tensor? starts, Tensor? ends, Tensor? seq_lens, Tensor? block_table, Tensor? slots, "
    + OPTIONS_SCHEMA
)


def _tensors(keys: IndexKeys) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys as operators take them: packed pages in one tensor, since tensors that share memory cannot be."""
    return (as_bytes(keys.values), keys.scale) if keys.buffer is None else (keys.buffer, None)


def _keys(values: torch.Tensor, scale: torch.Tensor | None, options: dict[str, Any]) -> IndexKeys:
    """The keys of `_tensors`; takes their own options out of `options`."""
    format, shuffled = options.pop("format"), options.pop("shuffled")
    if scale is None:
        return IndexKeys.packed(values, format=format, shuffled=shuffled)
    return IndexKeys(values, scale, format, shuffled)


def _logits(
    q: torch.Tensor, weights: torch.Tensor, values: torch.Tensor, scale: torch.Tensor | None,
    starts: torch.Tensor | None, ends: torch.Tensor | None, block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None, *options: Any, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    given = spelled(*options)
    keys = _keys(values, scale, given)
    given["plan"] = plan_of(given.pop("plan"))
    return index_logits(
        q.view(given.pop("q_dtype")), weights, keys, starts=starts, ends=ends, block_table=block_table,
        seq_lens=seq_lens, out=out, **given,
    )  # fmt: skip


def _empty_logits(*args: Any) -> torch.Tensor:
    q, values, table = args[0], args[2], args[6]
    columns = spelled(*args[8:])["num_columns"]
    if columns is None:
        columns = values.shape[0] if table is None else table.shape[1] * values.shape[1]
    empty: torch.Tensor = q.new_empty((q.shape[0], columns), dtype=torch.float32)
    return empty


def _topk(
    logits: torch.Tensor, starts: torch.Tensor | None, ends: torch.Tensor | None,
    seq_lens: torch.Tensor | None, block_table: torch.Tensor | None, slots: torch.Tensor | None,
    *options: Any, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    given = spelled(*options)
    given["plan"] = plan_of(given.pop("plan"))
    return index_topk(
        logits, starts=starts, ends=ends, seq_lens=seq_lens, block_table=block_table, slots=slots, out=out,
        **given,
    )  # fmt: skip


def _empty_topk(*args: Any) -> torch.Tensor:
    empty: torch.Tensor = args[0].new_empty((args[0].shape[0], spelled(*args[6:])["topk"]), dtype=torch.int32)
    return empty


def _register(name: str, schema: str, call: Callable[..., torch.Tensor], empty: Callable[..., Any]) -> Any:
    """Registers the operators of an operation with one result; a function that calls one of them."""

    @torch.library.custom_op(f"narrowkv::{name}", mutates_args=(), schema=f"({schema}) -> Tensor")
    def run(*args: Any) -> torch.Tensor:
        return call(*args)

    run.register_fake(empty)

    @torch.library.custom_op(
        f"narrowkv::{name}_out", mutates_args=("out",), schema=f"({schema}, Tensor(a!) out) -> ()"
    )
    def run_out(*args: Any) -> None:
        *inputs, out = args
        call(*inputs, out=out)

    @run_out.register_fake
    def fake_out(*args: object) -> None:
        """Writes into its output, and returns nothing."""

    functional, into = getattr(torch.ops.narrowkv, name), getattr(torch.ops.narrowkv, f"{name}_out")

    def traced(inputs: tuple[Any, ...], out: torch.Tensor | None) -> torch.Tensor:
        if out is None:
            result: torch.Tensor = functional(*inputs)
            return result
        into(*inputs, out)
        return out

    return traced


_traced_logits = _register("index_logits", _LOGITS, _logits, _empty_logits)
_traced_topk = _register("index_topk", _TOPK, _topk, _empty_topk)


@traces("index_logits")
def traced_index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: IndexKeys,
    *,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    num_columns: int | None = None,
    clean: bool = True,
    out: torch.Tensor | None = None,
    plan: IndexLogitsPlan | None = None,
) -> torch.Tensor:
    """`index_logits` through its operators, which check the arguments when they run."""
    spec = spell(
        q_dtype=q.dtype, format=keys.format, shuffled=keys.shuffled, num_columns=num_columns, clean=clean,
        plan=None if plan is None else plan.handle,
    )  # fmt: skip
    inputs = (
        as_bytes(q), weights, *_tensors(keys), starts, ends, block_table, seq_lens, *spec
    )  # fmt: skip
    result: torch.Tensor = _traced_logits(inputs, out)
    return result


@traces("index_topk")
def traced_index_topk(
    logits: torch.Tensor,
    topk: int,
    *,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    page_size: int | None = None,
    slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: IndexTopkPlan | None = None,
) -> torch.Tensor:
    """`index_topk` through its operators, which check the arguments when they run."""
    spec = spell(topk=topk, page_size=page_size, plan=None if plan is None else plan.handle)
    result: torch.Tensor = _traced_topk((logits, starts, ends, seq_lens, block_table, slots, *spec), out)
    return result


@torch.library.custom_op(
    "narrowkv::append_index_keys",
    mutates_args=("values", "scale"),
    schema=(
        "(Tensor k, Tensor(a!) values, Tensor(b!)? scale, Tensor slot_mapping, Tensor? cos, Tensor? sin, "
        f"Tensor? positions, {OPTIONS_SCHEMA}) -> ()"
    ),
)
def _append_op(*args: Any) -> None:
    k, values, scale, slot_mapping, cos, sin, positions, *options = args
    given = spelled(*options)
    keys = _keys(values, scale, given)
    append_index_keys(k, keys, slot_mapping, cos=cos, sin=sin, positions=positions, **given)


@_append_op.register_fake
def _append_fake(*args: object) -> None:
    """Writes into the keys, and returns nothing."""


@traces("append_index_keys")
def traced_append(
    k: torch.Tensor,
    keys: IndexKeys,
    slot_mapping: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    **options: object,
) -> None:
    """`append_index_keys` through its operator, which checks the arguments when it runs."""
    spec = spell(format=keys.format, shuffled=keys.shuffled, **options)
    torch.ops.narrowkv.append_index_keys(k, *_tensors(keys), slot_mapping, cos, sin, positions, *spec)
