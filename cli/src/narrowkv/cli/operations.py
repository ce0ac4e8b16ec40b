"""The case that each contract is: how its formats and shape become one call of an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from narrowkv.attn_decode.cases import DecodeCase
from narrowkv.attn_prefill.cases import QUERIES, PrefillCase
from narrowkv.cli.contracts import (
    APPEND,
    DECODE,
    PREFILL,
    SAGE,
    SPARSE,
    SPARSE_DECODE,
    SPARSE_FP8,
    Contract,
    Shape,
)
from narrowkv.paged_cache import CacheFormat
from narrowkv.runtime.cases import Case
from narrowkv.sage.cases import SageCase
from narrowkv.sparse_fp8.cases import SparseCase


def _cache(contract: Contract, shape: Shape, clean: bool) -> dict[str, Any]:
    """Fields of a paged cache, of the query, and of the heads."""
    return {
        "num_kv_heads": shape.num_kv_heads,
        "gqa_ratio": shape.gqa_ratio,
        "head_dim": shape.head_dim,
        "page_size": contract.page_size,
        "format": contract.k if contract.k == contract.v else CacheFormat(contract.k, contract.v),
        "scale_group": contract.scale_group or None,
        "q_dtype": QUERIES[contract.q],
        "clean": clean,
        "spread": 1.0,
    }


def _decode(contract: Contract, shape: Shape, clean: bool) -> DecodeCase:
    lens = (shape.context,) * shape.batch
    return DecodeCase(lens=lens, q_len=shape.q_len, **_cache(contract, shape, clean))


def _prefill(contract: Contract, shape: Shape, clean: bool) -> PrefillCase:
    return PrefillCase(
        q_lens=(shape.q_len,) * shape.batch, lens=(shape.context,) * shape.batch, ragged=True,
        **_cache(contract, shape, clean),
    )  # fmt: skip


def _append(contract: Contract, shape: Shape, clean: bool) -> PrefillCase:
    """A chunk of `q_len` new tokens of each sequence over `context` older ones."""
    return PrefillCase(
        operation="append", q_lens=(shape.q_len,) * shape.batch,
        lens=(shape.context + shape.q_len,) * shape.batch, **_cache(contract, shape, clean),
    )  # fmt: skip


def _sparse(contract: Contract, shape: Shape, clean: bool) -> SparseCase:
    """Queries of `q_len` tokens, each over `context` rows of a pool."""
    fp8 = contract.k.startswith("fp8_")
    return SparseCase(
        mode=contract.variant or ("decode" if contract.operation == SPARSE_DECODE else "wide"),
        layout="packed584" if fp8 else contract.k,
        prefix_lens=(shape.context,) * shape.q_len,
        num_qo_heads=shape.num_qo_heads,
        q="fp8" if contract.q.startswith("fp8_") else contract.q,
        format=contract.k if fp8 else SparseCase.format,
        page_size=contract.page_size,
        clean=clean,
    )


def _sage(contract: Contract, shape: Shape, clean: bool) -> SageCase:
    """Q of a contract is what Q and K are multiplied in; causal, as in prefill."""
    return SageCase(
        qk_dtype="fp8" if contract.q.startswith("fp8_") else contract.q, causal="bottom_right",
        q_lens=(shape.context,), k_lens=(shape.context,), num_kv_heads=shape.num_kv_heads,
        gqa_ratio=shape.gqa_ratio, head_dim=shape.head_dim,
    )  # fmt: skip


OPERATIONS: dict[str, Callable[[Contract, Shape, bool], Case]] = {
    DECODE: _decode,
    PREFILL: _prefill,
    APPEND: _append,
    SAGE: _sage,
    SPARSE: _sparse,
    SPARSE_FP8: _sparse,
    SPARSE_DECODE: _sparse,
}
"""By the contract's operation: its case, for a cache that is declared clean or not."""


def contract_case(contract: Contract, shape: Shape, *, clean: bool = False) -> Case:
    """The call that a contract asks for at a shape."""
    return OPERATIONS[contract.operation](contract, shape, clean)
