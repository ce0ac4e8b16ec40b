"""The mask function: narrowkv takes rules and lengths, not a mask with an entry for each pair of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

# The functions that transformers composes its masks of, and that attention by rules and lengths expresses.
_SERVED = {
    "causal_mask_function",
    "and_masks.<locals>.and_mask",
    "sliding_window_overlay.<locals>.inner_mask",
}


def padding_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """The part of a mask that attention uses: which tokens are padding.

    Causality and windows come from the attention call itself. Nothing is read from the device.

    Args:
        batch_size, q_length, kv_length: sizes of the mask, in tokens.
        mask_function: transformers' rule; it must be causal, with a sliding window or without.
        attention_mask: `[batch_size, tokens]` bool, False for padding; None for no padding.
        **options: everything else that transformers passes.

    Returns:
        `attention_mask`.

    Raises:
        ValueError: for a rule that narrowkv does not serve.
    """
    refused = sorted(set(_parts(mask_function)) - _SERVED)
    if refused:
        raise ValueError(
            f'attn_implementation="narrowkv" serves causal masks, sliding windows and padding, got a mask '
            f"made of {', '.join(refused)} (packed sequences, chunks and image blocks are not served): "
            'use attn_implementation="sdpa" for this model or this input'
        )
    return attention_mask


def _parts(function: Callable[..., Any]) -> Iterator[str]:
    """The names of a mask function and of the mask functions that it is composed of."""
    yield getattr(function, "__qualname__", repr(function))
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for part in held if isinstance(held, tuple | list) else (held,):
            if callable(part) and not isinstance(part, torch.Tensor):
                yield from _parts(part)


def check_padding(attention_mask: object, batch: int) -> torch.Tensor | None:
    """The padding mask that an attention call got.

    Raises:
        ValueError: a mask with an entry for each pair of tokens, or of another batch.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else attention_mask
        raise ValueError(
            "attention_mask must be None or [batch, tokens] (1 for tokens, 0 for padding), got "
            f'{shape}: use attn_implementation="sdpa" for masks of one\'s own'
        )
    if attention_mask.shape[0] != batch:
        raise ValueError(f"attention_mask must have {batch} rows, got {attention_mask.shape[0]}")
    return attention_mask
