"""`torch.ops.narrowkv.index_*`: the indexer as torch.compile, export and fake tensors see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from narrowkv.paged_cache import Rope
from narrowkv.paged_cache.torch_ops import rope_from, rope_tensors
from narrowkv.runtime.launch.tracing import Results, Tensors, as_bytes, register, traces
from narrowkv.sparse_fp8.indexer.append import append_index_keys
from narrowkv.sparse_fp8.indexer.keys import IndexKeys
from narrowkv.sparse_fp8.indexer.logits import index_logits
from narrowkv.sparse_fp8.indexer.topk import index_topk


def _tensors(keys: IndexKeys) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys as operators take them: packed pages in one tensor, since tensors that share memory cannot be."""
    return (as_bytes(keys.values), keys.scale) if keys.buffer is None else (keys.buffer, None)


def _keys(values: torch.Tensor, scale: torch.Tensor | None, options: dict[str, Any]) -> IndexKeys:
    """The keys of `_tensors`; takes their own options out of `options`."""
    format, shuffled = options.pop("format"), options.pop("shuffled")
    if scale is None:
        return IndexKeys.packed(values, format=format, shuffled=shuffled)
    return IndexKeys(values, scale, format, shuffled)


def _logits(*args: Any, **output: Any) -> torch.Tensor:
    q, weights, values, scale, starts, ends, block_table, seq_lens, given = args
    keys = _keys(values, scale, given)
    return index_logits(
        q.view(given.pop("q_dtype")), weights, keys, starts=starts, ends=ends, block_table=block_table,
        seq_lens=seq_lens, **given, **output,
    )  # fmt: skip


def _logits_results(tensors: Tensors, options: Mapping[str, Any]) -> Results:
    q, values, table = tensors[0], tensors[2], tensors[6]
    assert q is not None
    assert values is not None
    columns = options["num_columns"]
    if columns is None:
        columns = values.shape[0] if table is None else table.shape[1] * values.shape[1]
    return (((q.shape[0], columns), torch.float32),)


_call_logits = register(
    "index_logits",
    "Tensor q, Tensor weights, Tensor values, Tensor? scale, Tensor? starts, Tensor? ends, "
    "Tensor? block_table, Tensor? seq_lens",
    _logits,
    _logits_results,
    outputs=("out",),
    aliases="a",
)


def _topk(*args: Any, **output: Any) -> torch.Tensor:
    logits, starts, ends, seq_lens, block_table, slots, given = args
    return index_topk(
        logits, starts=starts, ends=ends, seq_lens=seq_lens, block_table=block_table, slots=slots, **given,
        **output,
    )  # fmt: skip


def _topk_results(tensors: Tensors, options: Mapping[str, Any]) -> Results:
    assert tensors[0] is not None
    return (((tensors[0].shape[0], options["topk"]), torch.int32),)


_call_topk = register(
    "index_topk",
    "Tensor logits, Tensor? starts, Tensor? ends, Tensor? seq_lens, Tensor? block_table, Tensor? slots",
    _topk,
    _topk_results,
    outputs=("out",),
    aliases="a",
)


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
    out: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """`index_logits` through its operators, which check the arguments when they run."""
    options = {
        "q_dtype": q.dtype, "format": keys.format, "shuffled": keys.shuffled, "num_columns": num_columns,
        **options,
    }  # fmt: skip
    tensors = (as_bytes(q), weights, *_tensors(keys), starts, ends, block_table, seq_lens)
    result: torch.Tensor = _call_logits(tensors, options, out)
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
    slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """`index_topk` through its operators, which check the arguments when they run."""
    tensors = (logits, starts, ends, seq_lens, block_table, slots)
    result: torch.Tensor = _call_topk(tensors, {"topk": topk, **options}, out)
    return result


def _append(*args: Any) -> None:
    k, values, scale, slot_mapping, cos, sin, positions, given = args
    keys = _keys(values, scale, given)
    rope = rope_from((cos, sin, positions), given)
    append_index_keys(k, keys, slot_mapping, rope=rope, **given)


_call_append = register(
    "append_index_keys",
    "Tensor k, Tensor(a!) values, Tensor(b!)? scale, Tensor slot_mapping, Tensor? cos, Tensor? sin, "
    "Tensor? positions",
    _append,
    written=("values", "scale"),
)


@traces("append_index_keys")
def traced_append(
    k: torch.Tensor,
    keys: IndexKeys,
    slot_mapping: torch.Tensor,
    *,
    rope: Rope | None = None,
    **options: object,
) -> None:
    """`append_index_keys` through its operator, which checks the arguments when it runs."""
    style = None if rope is None else rope.style
    options = {"format": keys.format, "shuffled": keys.shuffled, "rope": style, **options}
    _call_append((k, *_tensors(keys), slot_mapping, *rope_tensors(rope)), options)
