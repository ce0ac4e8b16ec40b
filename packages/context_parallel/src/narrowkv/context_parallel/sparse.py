"""DeepSeek-V4 sparse attention over rows that are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from narrowkv.context_parallel.exchange import merge_over_ranks
from narrowkv.context_parallel.groups import Group, all_gather, check_layout, group_of
from narrowkv.context_parallel.layout import ShardLayout
from narrowkv.runtime.errors import check_shape
from narrowkv.sparse_fp8 import KVSource, sparse_decode


def localize_source(source: KVSource, layout: ShardLayout) -> KVSource:
    """A source whose indices name rows of the whole pool, with those that this rank holds; the others are -1.

    Args:
        source: `rows` are this rank's, in the order of the layout; `indices` name rows of the whole.
        layout: which rank holds which row.

    Returns:
        A source for `narrowkv.sparse_fp8`, which skips -1. Its index list is new; nothing waits for the
        device.
    """
    return replace(source, indices=layout.localize(source.indices))


def cp_sparse_attention(
    q: torch.Tensor,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    *,
    layout: ShardLayout,
    group: Group = None,
    attend: Callable[..., Any] = sparse_decode,
    comm: str = "a2a",
    partial_dtype: torch.dtype = torch.float32,
    attn_sink: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention of all ranks over their rows; every rank must call it.

    Args:
        q: `[tokens, own heads, 512]` bf16 or fp16, this rank's heads. The heads of all ranks together are a
            number that `attend` takes.
        prefix, extend: each with this rank's rows and, equal on all ranks, index lists over the whole.
        layout: which rank holds which row of a source.
        group: the ranks, in the order of the layout.
        attend: `sparse_decode`, `sparse_prefill` or `sparse_prefill_fp8` of `narrowkv.sparse_fp8`.
        comm, partial_dtype: as for `plan_cp_decode`.
        attn_sink: `[own heads]` fp32.
        **options: of `attend`, such as `sm_scale`.

    Returns:
        `(o, lse)` of this rank's heads over the rows of all ranks, in q's dtype and fp32.

    Raises:
        TypeError, ValueError: for wrong shapes, or a layout that is not this group's.

    Example:
        >>> o, lse = cp_sparse_attention(q, KVSource(rows, indptr, indices), layout=layout)  # doctest: +SKIP
    """
    ranks = group_of(group)
    check_layout(layout.world, layout.rank, ranks)
    check_shape("q", q, ("tokens", "own heads", 512))
    tokens, heads, width = q.shape
    everyone = q.new_empty(layout.world, tokens, heads, width)
    all_gather(everyone.flatten(0, 1), q.contiguous(), group=ranks)
    whole = everyone.transpose(0, 1).flatten(1, 2)
    local = [None if each is None else localize_source(each, layout) for each in (prefix, extend)]
    o, lse = attend(
        whole, *local, return_lse=True, out=whole.new_empty(whole.shape, dtype=torch.float32), **options
    )
    return merge_over_ranks(
        o, lse, group=ranks, comm=comm, partial_dtype=partial_dtype, sinks=attn_sink, out_dtype=q.dtype
    )
