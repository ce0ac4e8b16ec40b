"""The oracle: sparse attention over the dequantised rows in float32 (float64 sums), in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from narrowkv.sparse_fp8.layouts import HEAD_DIM
from narrowkv.sparse_fp8.options import SparseArguments
from narrowkv.sparse_fp8.rows import DSV4Rows, query_heads
from narrowkv.sparse_fp8.sources import KVSource

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.sparse_fp8.options import SparseDecodeOptions, SparseFp8Options, SparseRowsOptions

__all__ = ["sparse_decode_reference", "sparse_prefill_fp8_reference", "sparse_prefill_reference"]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _as_float32(rows: torch.Tensor | DSV4Rows) -> torch.Tensor:
    return rows.dequantize() if isinstance(rows, DSV4Rows) else rows.float()


def _attend(given: SparseArguments) -> Result:
    """What all three operations compute, token by token."""
    q, prefix, extend, attn_sink, out = given[:5]
    sources = [source for source in (prefix, extend) if source is not None]
    tokens = sources[0].num_tokens
    query = _as_float32(q)
    scale = query.shape[-1] ** -0.5 if given.sm_scale is None else given.sm_scale
    if isinstance(q, DSV4Rows):
        heads = query_heads(q, tokens, given.num_qo_heads)
        query = query[: tokens * heads].view(tokens, heads, -1)
    device = query.device
    o = torch.zeros((*query.shape[:2], HEAD_DIM), dtype=torch.float32, device=device)
    lse = torch.full(query.shape[:2], -math.inf, device=device)
    pools = [_as_float32(source.rows) for source in sources]
    indptrs = [source.indptr.tolist() for source in sources]
    for token in range(tokens):
        parts = []
        for source, pool, indptr in zip(sources, pools, indptrs, strict=True):
            index = source.indices[indptr[token] : indptr[token + 1]].long()
            parts.append(pool[index[(index >= 0) & (index < source.num_rows)]])
        kv = torch.cat(parts)
        if kv.shape[0] == 0:
            continue
        s = (query[token] @ kv.T * scale).double()
        log_sum = torch.logsumexp(s, -1)
        denominator = log_sum
        if attn_sink is not None:
            denominator = torch.logaddexp(log_sum, attn_sink.double())
        p = torch.exp(s - denominator[:, None]).float()
        o[token] = p @ kv[:, :HEAD_DIM]
        lse[token] = log_sum.float()
    if out is not None:
        o = out.copy_(o)
    return (o, lse) if given.return_lse else o


def sparse_prefill_reference(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    **options: Unpack[SparseRowsOptions],
) -> Result:
    """`sparse_prefill` (and `_fp8`, and `sparse_decode`) token by token; same arguments.

    The result is float32 unless `out` says otherwise. Indices and indptr are read on the host.
    """
    return _attend(SparseArguments(q, prefix, extend, **options))


def sparse_prefill_fp8_reference(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    **options: Unpack[SparseFp8Options],
) -> Result:
    """`sparse_prefill_fp8` in float32 on the dequantised rows, whatever the mode."""
    return _attend(SparseArguments(q, prefix, extend, **options))


def sparse_decode_reference(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    **options: Unpack[SparseDecodeOptions],
) -> Result:
    """`sparse_decode` in float32 on the dequantised rows, without splitting."""
    return _attend(SparseArguments(q, prefix, extend, **options))
