"""The mask function: narrowkv takes rules and lengths, not a mask with an entry for each pair of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import causal_mask_function

# The functions that transformers composes its masks of, and that attention by rules and lengths expresses.
_SERVED = {
    "causal_mask_function",
    "and_masks.<locals>.and_mask",
    "sliding_window_overlay.<locals>.inner_mask",
}


class Tokens(NamedTuple):
    """What an attention call's mask says, 0 for no; None for a yes throughout.

    Attributes:
        keys: `[batch, keys]`, which keys are tokens.
        queries: `[batch, tokens]`, which queries are tokens.
        served: `[batch, 1]`, which rows narrowkv serves: the others get NaN.
    """

    keys: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    served: torch.Tensor | None = None


def padding_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """The part of a mask that attention uses: which keys and which queries are tokens.

    Causality and windows come from the attention call itself. Padding between tokens is refused: between new
    ones, and in a model with sliding windows between any. The device is read for that only if there are
    several new tokens, and never where torch traces or captures a graph; rows that are not read get NaN.

    Args:
        batch_size, q_length, kv_length: sizes of the mask, in tokens.
        mask_function: transformers' rule; it must be causal, with a sliding window or without.
        attention_mask: `[batch_size, tokens]` bool, False for padding; None for no padding.
        q_offset: tokens before the queries, a tensor in a static cache.
        kv_offset: tokens before the keys.
        local_size: the sliding window.
        **options: everything else that transformers passes.

    Returns:
        None if all keys are tokens; `attention_mask` if its last columns are the queries; else `[batch_size,
        1, 1, kv_length + q_length]` bool, of each key and then of each query whether it is a token, and, with
        a column more, whether the row is served. (transformers hands masks of four dimensions on.)

    Raises:
        ValueError: for a rule that narrowkv does not serve, and for padding between tokens.
    """
    served = _check_rule(
        mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, local_size, options
    )
    end, width = q_offset + q_length, kv_offset + kv_length
    static = isinstance(end, torch.Tensor) or end != width
    if attention_mask is None and not static and served is None:
        return None
    if attention_mask is None:
        attention_mask = torch.ones(1, width, dtype=torch.bool, device=options["device"])
    elif not isinstance(end, torch.Tensor) and attention_mask.shape[1] < end:
        raise ValueError(
            f"attention_mask must have {end} columns, of the tokens in the cache and of the new ones, got "
            f"shape {list(attention_mask.shape)}"
        )
    device = attention_mask.device
    mask = torch.nn.functional.pad(attention_mask, (0, max(width - attention_mask.shape[1], 0)))
    keys = mask[:, kv_offset:width]
    if isinstance(end, torch.Tensor):
        queries = mask.index_select(1, q_offset + torch.arange(q_length, device=device))
    else:
        queries = mask[:, end - q_length : end]
    if static:  # keys after the newest token are not there yet
        keys = keys & (torch.arange(kv_offset, width, device=device) < end)
    if local_size is not None or q_length > 2:  # of two tokens both are at an end
        whole = _check_holes(queries if local_size is None else keys, reads=q_length > 1)
        served = whole if served is None or whole is None else served & whole
    if not static and served is None and attention_mask.shape[1] == width:
        return attention_mask
    parts = [part.expand(batch_size, -1) for part in (keys, queries, served) if part is not None]
    return torch.cat(parts, 1)[:, None, None]


def _check_rule(
    mask_function: Callable[..., Any], batch: int, queries: int, keys: int, q_offset: int | torch.Tensor,
    kv_offset: int, window: int | None, options: dict[str, Any],
) -> torch.Tensor | None:  # fmt: skip
    """Refuses a rule that narrowkv does not serve; the arguments are those of `padding_of`.

    torch.compile sees of a composed rule neither its parts nor whether its sequences are packed, so what the
    rule says of each pair of tokens is compared by the graph.

    Returns:
        None for a rule that is served; a compiled graph may get the rows that are, `[1 or batch, 1]`.
    """
    if not torch.compiler.is_compiling():
        refused = sorted(set(_parts(mask_function)) - _SERVED)
        if refused:
            raise ValueError(
                'attn_implementation="narrowkv" serves causal masks, sliding windows and padding, got a mask '
                f"made of {', '.join(refused)} (packed sequences, chunks and image blocks are not served): "
                'use attn_implementation="sdpa" for this model or this input'
            )
        return None
    if window is None and mask_function is causal_mask_function:
        return None
    device = options["device"]
    rows = torch.arange(batch, device=device)[:, None, None, None]
    q = q_offset + torch.arange(queries, device=device)[:, None]
    k = kv_offset + torch.arange(keys, device=device)
    expected = k <= q
    if window is not None:
        expected = expected & (k > q - window)
    other: torch.Tensor = mask_function(rows, torch.zeros_like(rows), q, k) ^ expected
    return ~other.reshape(-1, queries * keys).any(1, keepdim=True)


def _parts(function: Callable[..., Any]) -> Iterator[str]:
    """The names of a mask function and of the mask functions that it is composed of."""
    yield getattr(function, "__qualname__", repr(function))
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for part in held if isinstance(held, tuple | list) else (held,):
            if callable(part) and not isinstance(part, torch.Tensor):
                yield from _parts(part)


def _check_holes(mask: torch.Tensor, *, reads: bool) -> torch.Tensor | None:
    """Refuses rows `[batch, tokens]` that have padding between tokens.

    Args:
        mask: False for padding.
        reads: whether the device may be waited for.

    Returns:
        None if no row has; where the device is not read, `[batch, 1]`, False for a row that has.
    """
    begins = (mask[:, 1:] & ~mask[:, :-1]).sum(1, keepdim=True) + mask[:, :1]
    whole = begins <= 1
    captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or captured or not reads:
        return whole
    if not whole.all():
        raise ValueError(
            "attention_mask must have the 0s of a call's tokens at the ends of a row, and in a model with "
            "sliding windows all 0s of a row, got a 0 between two 1s: move the padding to the ends, or use "
            'attn_implementation="sdpa"'
        )
    return None


def tokens_of(attention_mask: object, batch: int, keys: int, queries: int) -> Tokens:
    """What an attention call's mask says.

    Args:
        attention_mask: what `padding_of` returned, or `[batch, at least keys]`, whose last columns are the
            keys, the last of which are the queries.
        batch, keys, queries: sizes of the call.

    Raises:
        ValueError: a mask with an entry for each pair of tokens, or of another size.
    """
    if attention_mask is None:
        return Tokens()
    if isinstance(attention_mask, torch.Tensor) and attention_mask.shape[0] == batch:
        shape, both = attention_mask.shape, keys + queries
        # Not `in`: torch.compile finds no symbolic size in a tuple.
        if len(shape) == 4 and shape[1] == shape[2] == 1 and both <= shape[3] <= both + 1:
            flat = attention_mask.flatten(1)
            served = flat[:, both:] if shape[3] > both else None
            return Tokens(flat[:, :keys], flat[:, keys:both], served)
        if len(shape) == 2 and shape[1] >= keys:
            return Tokens(attention_mask[:, -keys:], attention_mask[:, -queries:])
    found = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else attention_mask
    raise ValueError(
        "attention_mask must be None or [batch, tokens] (1 for tokens, 0 for padding), here "
        f'[{batch}, {keys} or more], got {found}: use attn_implementation="sdpa" for masks of one\'s own'
    )
