"""Every tensor of lengths, places and indices may be int32 or int64 and have any stride."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import batch_prefill, prefill_append
from narrowkv.paged_cache import PageTable, append
from narrowkv.sage import sage_attention
from narrowkv.sparse_fp8 import KVSource, sparse_decode, sparse_prefill
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.cases.sparse import SparseCase
from narrowkv.testing.codegen import compile_call

Change = Callable[[torch.Tensor], torch.Tensor]
SMALL: dict[str, Any] = {"num_kv_heads": 1, "gqa_ratio": 2}


def _table(table: PageTable, name: str, change: Change) -> PageTable:
    return replace(table, **{name: change(getattr(table, name))})


def _decode(name: str, change: Change) -> Any:
    ragged = name in ("kv_indptr", "kv_last_page_len")
    q, cache, table = DecodeCase.small(lens=(20, 5), ragged=ragged, **SMALL).build()
    return paged_decode(q, cache, _table(table, name, change))


def _prefill(name: str, change: Change, **options: Any) -> Any:
    ragged = name in ("kv_indptr", "kv_last_page_len")
    case = PrefillCase.small(q_lens=(5, 1), lens=(20, 5), ragged=ragged, **{**SMALL, **options})
    q, cache, table, starts = case.build()
    if name == "cu_seqlens_q":
        return batch_prefill(q, cache, table, change(starts))
    return batch_prefill(q, cache, _table(table, name, change), starts)


def _prefill_append(name: str, change: Change) -> Any:
    case = PrefillCase.append(q_lens=(5, 1), lens=(20, 5), rope="neox", **SMALL)
    q, k, v, cache, table, starts, rope = case.build_append()
    assert rope is not None
    if name == "cu_seqlens_q":
        starts = change(starts)
    elif name == "positions":
        rope = replace(rope, positions=change(rope.positions))
    else:
        table = _table(table, name, change)
    o = prefill_append(q, k, v, cache, table, starts, rope=rope)
    return o, cache.k.view(torch.uint8).clone(), cache.v.view(torch.uint8).clone()


def _append(name: str, change: Change) -> Any:
    case = PrefillCase.append(q_lens=(5, 1), lens=(20, 5), rope="neox", **SMALL)
    _, k, v, cache, _, _, rope = case.build_append()
    assert rope is not None
    slots = torch.arange(3, 9)
    if name == "positions":
        rope = replace(rope, positions=change(rope.positions))
    else:
        slots = change(slots)
    append(cache, k, v, slots, rope=rope)
    return cache.k.view(torch.uint8).clone(), cache.v.view(torch.uint8).clone()


def _sage(name: str, change: Change) -> Any:
    case = SageCase.small(q_lens=(20, 7), k_lens=(30, 9), ragged=True)
    given = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), case.build(), strict=True))
    given[name] = change(given[name])
    return sage_attention(**given)


def _sparse(name: str, change: Change, operation: Callable[..., Any] = sparse_prefill) -> Any:
    case = SparseCase.small(prefix_lens=(2, 2), extend_lens=(1, 1), num_qo_heads=8, layout="bf16")
    found = case.build()
    lists = {"indptr": found.prefix.indptr, "indices": found.prefix.indices}
    lists[name] = change(lists[name])
    prefix = KVSource(found.prefix.rows, lists["indptr"], lists["indices"])
    return operation(found.q, prefix, found.extend, attn_sink=found.attn_sink)


def _sparse_decode(name: str, change: Change) -> Any:
    return _sparse(name, change, lambda *args, **kwargs: sparse_decode(*args, num_splits=2, **kwargs))


TABLES = ("page_ids", "seq_lens")
RAGGED = ("kv_indptr", "kv_last_page_len")
CALLS: list[tuple[Callable[[str, Change], Any], tuple[str, ...]]] = [
    (_decode, (*TABLES, *RAGGED)),
    (_prefill, (*TABLES, *RAGGED, "cu_seqlens_q")),
    (lambda name, change: _prefill(name, change, kernel="dense"), ("cu_seqlens_q",)),
    (_prefill_append, (*TABLES, "cu_seqlens_q", "positions")),
    (_append, ("slot_mapping", "positions")),
    (_sage, ("cu_seqlens_q", "cu_seqlens_k")),
    (_sparse, ("indptr", "indices")),
    (_sparse_decode, ("indptr", "indices")),
]
IDS = ("decode", "prefill", "prefill, dense", "prefill_append", "append", "sage", "sparse", "sparse_decode")


def _strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with others between them."""
    wide = torch.stack((x, torch.full_like(x, -7)), -1)
    return wide[..., 0]


CHANGES: dict[str, Change] = {
    "int32": lambda x: x.to(torch.int32),
    "int64": lambda x: x.to(torch.int64),
    "int64, strided": lambda x: _strided(x.to(torch.int64)),
    "int32, strided": lambda x: _strided(x.to(torch.int32)),
}


@pytest.mark.parametrize(
    ("call", "name"),
    [(call, name) for call, names in CALLS for name in names],
    ids=[f"{label}-{name}" for label, (_, names) in zip(IDS, CALLS, strict=True) for name in names],
)
def test_integers_of_either_width_and_any_stride(call: Callable[[str, Change], Any], name: str) -> None:
    expected = call(name, lambda x: x)
    for kind, change in CHANGES.items():
        if "strided" in kind and name in ("indptr", "indices"):
            continue  # a last dimension must be contiguous there; see test_sparse_lists_are_contiguous
        found = call(name, change)
        if isinstance(expected, tuple):
            assert all(map(torch.equal, found, expected)), kind
        else:
            assert torch.equal(found, expected), kind


@pytest.mark.parametrize("name", ["indptr", "indices"])
def test_sparse_lists_are_contiguous(name: str) -> None:
    """They are read in vectors of 16 bytes."""
    with pytest.raises(ValueError, match=rf"{name} must have a contiguous last dimension"):
        _sparse(name, _strided)


@pytest.mark.parametrize("kernel", ["dense", "fused"])
def test_int64_starts_compile(kernel: str) -> None:
    """The interpreter takes numbers of any width beside each other; a compiled loop does not."""
    case = PrefillCase.small(q_lens=(5, 1), lens=(20, 5), kernel=kernel, clean=True, **SMALL)
    inputs = case.inputs()
    starts = inputs.starts.long()
    plan = inputs.plan

    def call() -> object:
        return batch_prefill(inputs.q, inputs.cache, inputs.table, starts, plan=plan())

    assert compile_call("gfx942", call)
