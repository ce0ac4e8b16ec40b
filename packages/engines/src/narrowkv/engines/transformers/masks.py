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
_OTHER_RULE = (
    'attn_implementation="narrowkv" serves causal masks, sliding windows and padding, got a mask made of '
    '{0} (packed sequences, chunks and image blocks are not served): use attn_implementation="sdpa" for this '
    "model or this input"
)
_HOLE = (
    "attention_mask must have the 0s of a call's tokens at the ends of a row, and in a model with sliding "
    "windows all 0s, got a 0 between two 1s: move the padding to the ends, or use "
    'attn_implementation="sdpa"'
)


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

    Causality and windows come from the attention call itself. The device is read only for a mask of more than
    one new token, to see that it has no holes; where torch traces or captures a graph, the device itself
    stops at a hole.

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
        1, 1, kv_length + q_length]` bool, of each key and then of each query whether it is a token.
        (transformers hands masks of four dimensions on as they are.)

    Raises:
        ValueError: for a rule that narrowkv does not serve, and for padding between tokens.
    """
    if torch.compiler.is_compiling():
        _check_values(batch_size, q_length, kv_length, mask_function, q_offset, kv_offset, local_size, options)
    else:
        _check_names(mask_function)
    end, width = q_offset + q_length, kv_offset + kv_length
    static = isinstance(end, torch.Tensor) or end != width
    if attention_mask is None and not static:
        return None
    device = options["device"] if attention_mask is None else attention_mask.device
    if attention_mask is None:
        attention_mask = torch.ones(1, width, dtype=torch.bool, device=device)
    elif not isinstance(end, torch.Tensor) and attention_mask.shape[1] < end:
        raise ValueError(
            f"attention_mask must have {end} columns, of the tokens in the cache and of the new ones, got shape "
            f"{list(attention_mask.shape)}"
        )
    elif attention_mask.shape[1] < width:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, width - attention_mask.shape[1]))
    keys = attention_mask[:, kv_offset:width]
    if isinstance(end, torch.Tensor):
        queries = attention_mask.index_select(1, q_offset + torch.arange(q_length, device=device))
    else:
        queries = attention_mask[:, end - q_length : end]
    if static:  # the keys after the newest token are not there yet
        keys = keys & (torch.arange(kv_offset, width, device=device) < end)
    if local_size is not None or q_length > 2:  # of two tokens both are at an end
        _check_holes(queries if local_size is None else keys, wait=q_length > 1)
    if not static and attention_mask.shape[1] == width:
        return attention_mask
    return torch.cat([keys, queries], 1).expand(batch_size, -1)[:, None, None]


def _check_names(mask_function: Callable[..., Any]) -> None:
    """Refuses a rule that is made of functions that narrowkv does not serve."""
    refused = sorted(set(_parts(mask_function)) - _SERVED)
    if refused:
        raise ValueError(_OTHER_RULE.format(", ".join(refused)))


def _parts(function: Callable[..., Any]) -> Iterator[str]:
    """The names of a mask function and of the mask functions that it is composed of."""
    yield getattr(function, "__qualname__", repr(function))
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for part in held if isinstance(held, tuple | list) else (held,):
            if callable(part) and not isinstance(part, torch.Tensor):
                yield from _parts(part)


def _check_values(
    batch: int, queries: int, keys: int, mask_function: Callable[..., Any], q_offset: int | torch.Tensor,
    kv_offset: int, window: int | None, options: dict[str, Any],
) -> None:  # fmt: skip
    """The same by what the rule says of each pair: a trace sees no closures, and finds packed sequences in all.

    The graph that runs compares, and the device stops where the rule is another.
    """
    device = options["device"]
    rows = torch.arange(batch, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    q = q_offset + torch.arange(queries, device=device)[:, None]
    k = kv_offset + torch.arange(keys, device=device)
    served = k <= q
    if window is not None:
        served = served & (k > q - window)
    torch._assert_async(
        (mask_function(rows, head, q, k) == served).all(), _OTHER_RULE.format("another rule")
    )


def _check_holes(mask: torch.Tensor, *, wait: bool) -> None:
    """Refuses rows `[batch, tokens]` that have padding between tokens.

    Args:
        mask: False for padding.
        wait: whether the device may be read, which gives an error that can be caught.
    """
    begins = mask[:, 1:] & ~mask[:, :-1]
    whole = (begins.sum(1) + mask[:, 0] <= 1).all()
    reads = mask.device.type == "cpu" or (wait and not torch.cuda.is_current_stream_capturing())
    if torch.compiler.is_compiling() or not reads:
        torch._assert_async(whole, _HOLE)
    elif not whole:
        raise ValueError(_HOLE)


def tokens_of(
    attention_mask: object, batch: int, keys: int, queries: int
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Which keys `[batch, keys]` and which queries `[batch, queries]` are tokens, of an attention call's mask.

    Args:
        attention_mask: what `padding_of` returned, or `[batch, at least keys]`, whose last columns are the
            keys, the last of which are the queries.
        batch, keys, queries: sizes of the call.

    Returns:
        Two masks, 0 for padding; None twice if there is none.

    Raises:
        ValueError: a mask with an entry for each pair of tokens, or of another size.
    """
    if attention_mask is None:
        return None, None
    if isinstance(attention_mask, torch.Tensor) and attention_mask.shape[0] == batch:
        shape = attention_mask.shape
        if len(shape) == 4 and shape[1] == shape[2] == 1 and shape[3] == keys + queries:
            flat = attention_mask.flatten(1)
            return flat[:, :keys], flat[:, keys:]
        if len(shape) == 2 and shape[1] >= keys:
            return attention_mask[:, -keys:], attention_mask[:, -queries:]
    found = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else attention_mask
    raise ValueError(
        f"attention_mask must be None or [{batch}, {keys} or more tokens] (1 for tokens, 0 for padding), got "
        f'{found}: use attn_implementation="sdpa" for masks of one\'s own'
    )
