"""The oracle of `append`, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.checks import check_append
from narrowkv.paged_cache.convert import quantise_tokens
from narrowkv.paged_cache.options import StoreArguments
from narrowkv.paged_cache.rope import Rope

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.paged_cache.options import StoreOptions


def apply_rope_reference(k: torch.Tensor, rope: Rope) -> torch.Tensor:
    """K `[tokens, heads, head_dim]` after rotary embedding, fp32."""
    half = rope.cos.shape[1]
    positions = rope.positions.long().clamp(0, rope.cos.shape[0] - 1)
    cos, sin = (table[positions][:, None].float() for table in (rope.cos, rope.sin))
    rotated, rest = k[..., : 2 * half].float(), k[..., 2 * half :].float()
    if rope.style == "neox":
        a, b = rotated[..., :half], rotated[..., half:]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([turned, rest], -1)


def append_reference(
    cache: PagedKVCache,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    slot_mapping: torch.Tensor,
    **options: Unpack[StoreOptions],
) -> None:
    """`append` with torch operations, token by token; the same arguments and effect."""
    given = StoreArguments(cache, k_new, v_new, slot_mapping, **options)
    check_append(given)
    rope, q, exponent = given.rope, given.q, given.exponent
    if q is not None and rope is not None:
        q.copy_(apply_rope_reference(q, rope))
    k = k_new.float() if rope is None else apply_rope_reference(k_new, rope)
    if given.k_offset is not None:
        k = k - given.k_offset
    if cache.key_transform is not None:
        k = cache.key_transform.keys(k)
    slots = [
        (token, *divmod(slot, cache.page_size))
        for token, slot in enumerate(slot_mapping.tolist())
        if 0 <= slot < cache.num_pages * cache.page_size
    ]
    for side, new in zip(cache.sides(), (k, v_new.float()), strict=True):
        rows, scales = quantise_tokens(new, side, exponent)
        for token, page, position in slots:
            _write(side.stored, rows[token], cache.layout, page, position, side.is_key)
            if scales is not None:
                assert isinstance(side.descale, torch.Tensor)
                side.descale[page, position] = scales[token]


def _write(
    stored: torch.Tensor, row: torch.Tensor, layout: str, page: int, position: int, is_key: bool
) -> None:
    if stored.element_size() == 1:
        stored, row = stored.view(torch.uint8), row.view(torch.uint8)
    if layout == "tokens":
        stored[page] = row
    elif layout == "HND":
        stored[page, :, position] = row
    elif layout == "vectorised":
        x = stored.shape[4]
        if is_key:
            stored[page, :, :, position] = row.view(row.shape[0], -1, x)
        else:
            stored[page, :, position // x, :, position % x] = row
    else:
        stored[page, position] = row
