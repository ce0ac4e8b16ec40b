"""narrowkv under FlashMLA's names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from stand_ins.modules import add_module

from narrowkv.sparse_fp8 import DSV4Rows, KVSource, csr_from_topk, sparse_decode, sparse_prefill

__all__ = ["install"]


def _source(rows: Any, indices: torch.Tensor, lengths: torch.Tensor | None) -> KVSource:
    return KVSource(rows, *csr_from_topk(indices.contiguous(), lengths))


def _none_is_infinite(lse: torch.Tensor) -> torch.Tensor:
    """A row that attends to nothing has lse -inf in narrowkv and +inf in FlashMLA."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def flash_mla_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: None, cache_seqlens: None, head_dim_v: int,
    tile_scheduler_metadata: Any, num_splits: None = None, softmax_scale: float | None = None,
    causal: bool = False, is_fp8_kvcache: bool = False, indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None, extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None, topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Sparse decode over FP8 pages: `record656` for 576 columns, `packed584` for 512."""
    assert indices is not None
    assert is_fp8_kvcache
    assert head_dim_v == 512
    batch, tokens, heads, columns = q.shape
    layout = "record656" if columns == 576 else "packed584"

    def rows(cache: torch.Tensor) -> DSV4Rows:
        # [pages, page_size, 1, bytes of a token]
        return DSV4Rows.paged(cache.view(torch.uint8).squeeze(2), layout, page_size=cache.shape[1])

    def source(cache: torch.Tensor, lists: torch.Tensor, lengths: torch.Tensor | None) -> KVSource:
        lengths = None if lengths is None else lengths.repeat_interleave(tokens)
        return _source(rows(cache), lists.reshape(batch * tokens, -1), lengths)

    extend = None
    if extra_k_cache is not None:
        assert extra_indices_in_kvcache is not None
        extend = source(extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    o, lse = sparse_decode(
        q.flatten(0, 1), source(k_cache, indices, topk_length), extend, attn_sink=attn_sink,
        sm_scale=softmax_scale, return_lse=True,
    )  # fmt: skip
    shape = (batch, tokens, heads)
    return o.view(*shape, 512), _none_is_infinite(lse).view(shape).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int = 512,
    attn_sink: torch.Tensor | None = None, topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Sparse prefill over 16-bit rows. narrowkv gives no largest logits: they are computed here, in torch."""
    assert d_v == 512
    lists, rows = indices.squeeze(1), kv.squeeze(1)
    o, lse = sparse_prefill(
        q, _source(rows, lists, topk_length), attn_sink=attn_sink, sm_scale=sm_scale, return_lse=True
    )
    places = torch.arange(lists.shape[1])
    live = (lists >= 0) & (lists < rows.shape[0])
    if topk_length is not None:
        live &= places < topk_length[:, None]
    logits = q.float() @ rows[lists.where(live, 0)].float().transpose(1, 2) * sm_scale
    largest = logits.masked_fill(~live[:, None], -torch.inf).amax(-1)
    return o, largest, _none_is_infinite(lse)


def install(folder: Path, suite: Any) -> None:
    """Adds `flash_mla`; the suite's helpers lie beside its tests."""
    add_module(
        "flash_mla",
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        flash_mla_sparse_fwd=flash_mla_sparse_fwd,
        get_mla_metadata=lambda *_, **__: (None, None),
    )
    sys.path.insert(0, str(folder / "FlashMLA" / "tests"))
