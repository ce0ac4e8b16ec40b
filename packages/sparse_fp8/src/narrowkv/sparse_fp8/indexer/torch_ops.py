"""`torch.ops.narrowkv.index_*`: the indexer as torch.compile, export and fake tensors see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


_WHERE = ("starts", "ends", "block_table", "seq_lens")
"""Tensors among the keywords of `index_logits`."""


def _logits(*args: Any, **output: Any) -> torch.Tensor:
    q, weights, values, scale, *where, given = args
    keys = _keys(values, scale, given)
    named = dict(zip(_WHERE, where, strict=True))
    return index_logits(q.view(given.pop("q_dtype")), weights, keys, **named, **given, **output)


def _logits_results(tensors: Tensors, options: Mapping[str, Any]) -> Results:
    q, values, table = tensors[0], tensors[2], tensors[4 + _WHERE.index("block_table")]
    assert q is not None
    assert values is not None
    columns = options["num_columns"]
    if columns is None:
        columns = values.shape[0] if table is None else table.shape[1] * values.shape[1]
    return (((q.shape[0], columns), torch.float32),)


def _optional(names: Iterable[str]) -> str:
    """Arguments of an operator that may be None."""
    return ", ".join(f"Tensor? {name}" for name in names)


_call_logits = register(
    "index_logits",
    f"Tensor q, Tensor weights, Tensor values, Tensor? scale, {_optional(_WHERE)}",
    _logits,
    _logits_results,
    outputs=("out",),
    aliases="a",
)


@traces("index_logits")
def traced_index_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: IndexKeys,
    *,
    num_columns: int | None = None,
    out: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """`index_logits` through its operators, which check the arguments when they run."""
    where = [options.pop(name, None) for name in _WHERE]
    options |= {"format": keys.format, "shuffled": keys.shuffled, "num_columns": num_columns}
    tensors = (as_bytes(q), weights, *_tensors(keys), *where)
    return _call_logits(tensors, {"q_dtype": q.dtype, **options}, out)


_BOUNDS = ("starts", "ends", "seq_lens", "block_table", "slots", "blocks")
"""Tensors among the keywords of `index_topk`."""


def _topk(*args: Any, **output: Any) -> torch.Tensor:
    logits, *bounds, given = args
    return index_topk(logits, **dict(zip(_BOUNDS, bounds, strict=True)), **given, **output)


def _topk_results(tensors: Tensors, options: Mapping[str, Any]) -> Results:
    assert tensors[0] is not None
    return (((tensors[0].shape[0], options["topk"]), torch.int32),)


_call_topk = register(
    "index_topk",
    f"Tensor logits, {_optional(_BOUNDS)}",
    _topk,
    _topk_results,
    outputs=("out",),
    aliases="a",
)


@traces("index_topk")
def traced_index_topk(
    logits: torch.Tensor, topk: int, *, out: torch.Tensor | None = None, **options: Any
) -> Any:
    """`index_topk` through its operators, which check the arguments when they run."""
    tensors = (logits, *[options.pop(name, None) for name in _BOUNDS])
    return _call_topk(tensors, {"topk": topk, **options}, out)


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
