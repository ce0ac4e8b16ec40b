"""The indexer in plain torch and fp64: what the kernels are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowkv.paged_cache import apply_rope_reference
from narrowkv.quant import decode
from narrowkv.quant import hadamard as rotate
from narrowkv.runtime.errors import with_defaults
from narrowkv.sparse_fp8.indexer.keys import IndexKeys
from narrowkv.sparse_fp8.options import APPEND_DEFAULTS, LOGITS_DEFAULTS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.sparse_fp8.options import IndexAppendOptions, IndexLogitsOptions

__all__ = ["append_index_keys_reference", "index_logits_reference", "index_topk_reference"]


def index_logits_reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: IndexKeys,
    **options: Unpack[IndexLogitsOptions],
) -> torch.Tensor:
    """`index_logits` in fp64, from the numbers that the kernels read; see there. `out` is not written."""
    starts, ends, block_table, seq_lens, num_columns, _ = with_defaults(
        "index_logits_reference", options, LOGITS_DEFAULTS
    ).values()
    queries, scales = decode(q).double(), weights.double()
    numbers = keys.dequantize(torch.float64)
    if not keys.is_paged:
        assert starts is not None
        assert ends is not None
        column = torch.arange(keys.num_pages, device=q.device)
        inside = (column >= starts[:, None]) & (column < ends[:, None])
        return _logits(queries, scales, numbers).masked_fill(~inside, -torch.inf)
    assert block_table is not None
    assert seq_lens is not None
    batch, max_pages = block_table.shape
    page_size = keys.stored.page_size
    capacity, q_len = max_pages * page_size, q.shape[0] // max(batch, 1)
    width = capacity if num_columns is None else num_columns
    out = torch.full((q.shape[0], width), -torch.inf, dtype=torch.float64, device=q.device)
    column = torch.arange(min(width, capacity), device=q.device)
    for token in range(q.shape[0]):
        seq = token // q_len
        length = int(seq_lens[seq].clamp(0, capacity)) - q_len + 1 + token % q_len
        pages = block_table[seq].long()[column // page_size]
        good = (column < length) & (pages >= 0) & (pages < keys.num_pages)
        if bool(good.any()):
            chosen = numbers[pages[good], column[good] % page_size]
            row = _logits(queries[token : token + 1], scales[token : token + 1], chosen)[0]
            out[token, column[good]] = row
    return out


def _logits(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """fp64 `[num_tokens, num_keys]`; a product that is NaN counts as 0."""
    products = torch.einsum("thd,nd->thn", q, keys)
    return torch.einsum("thn,th->tn", torch.where(products > 0, products, 0.0), weights)


def append_index_keys_reference(
    k: torch.Tensor,
    keys: IndexKeys,
    slot_mapping: torch.Tensor,
    **options: Unpack[IndexAppendOptions],
) -> None:
    """`append_index_keys` in plain torch; see there."""
    given = with_defaults("append_index_keys_reference", options, APPEND_DEFAULTS)
    rope = given["rope"]
    x = k.float() if rope is None else apply_rope_reference(k[:, None], rope)[:, 0]
    if given["hadamard"]:
        x = rotate(x)
    new = IndexKeys.quantize(x, format=keys.format, pow2_scales=given["pow2_scales"])
    size = max(1, keys.stored.page_size)
    slots = slot_mapping.long()
    good = (slots >= 0) & (slots < keys.num_pages * size)
    slots, values, scale = slots[good], new.values[good].view(torch.uint8), new.scale[good]
    stored = keys.values.view(torch.uint8)
    if not keys.is_paged:
        stored[slots], keys.scale[slots] = values, scale
        return
    page, within = slots // size, slots % size
    keys.scale[page, within] = scale
    if not keys.shuffled:
        stored[page, within] = values
        return
    tiles = stored.view(keys.num_pages, size // 16, -1, 16, 16)
    tiles[page, within // 16, :, within % 16] = values.view(len(slots), -1, 16)


def index_topk_reference(
    logits: torch.Tensor,
    topk: int,
    *,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    block_size: int | None = None,
    blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`index_topk` by a stable sort; see there. Columns are not mapped to rows."""
    columns = logits.shape[1]
    at = torch.arange(columns, device=logits.device)
    own = torch.ones_like(logits, dtype=torch.bool)
    if starts is not None:
        own &= at >= starts[:, None]
    if ends is not None:
        own &= at < ends[:, None]
    inside = own & (logits > -torch.inf)
    if blocks is not None:
        assert block_size is not None
        number = at // block_size
        inside &= (blocks.long()[:, :, None] == number).any(1)
    elif block_size is not None:
        logits = _largest_of_blocks(torch.where(inside, logits, -torch.inf), own, block_size)
        inside, columns = logits > -torch.inf, logits.shape[1]
    ranked = torch.where(inside, logits, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    chosen = torch.where(inside.gather(1, order), order, columns).sort(-1).values
    chosen = torch.where(chosen < columns, chosen, -1).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[1]), value=-1)


def _largest_of_blocks(logits: torch.Tensor, own: torch.Tensor, block_size: int) -> torch.Tensor:
    """The largest logit of each block, infinity for that of each row's last column among its `own`."""
    padding = (0, -logits.shape[1] % block_size)
    numbers = torch.nn.functional.pad(logits, padding, value=-torch.inf)
    largest = numbers.view(len(logits), numbers.shape[1] // block_size, block_size).amax(-1)
    last = (own * torch.arange(1, own.shape[1] + 1, device=own.device)).amax(1) - 1
    has_any = last >= 0
    largest[has_any, last[has_any] // block_size] = torch.inf
    return largest
