"""Tree masks of speculative tokens: bits per query token, packed from the masks that engines keep."""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import (
    check_dtype,
    check_index_vector,
    check_positive_int,
    check_same_device,
    check_shape,
)

MOST_TOKENS = 64


def pack_tree_mask(seen: torch.Tensor) -> torch.Tensor:
    """The tree mask for `PageTable.with_tree_mask`, packed on the device without a host synchronisation.

    Args:
        seen: `[batch, q_len, q_len]` bool: whether query token i of a sequence attends to its new token j: to
            itself and its ancestors in the tree. q_len is at most 64.

    Returns:
        `[batch, q_len]`, int32 if q_len is at most 32, else int64: bit j of element i is `seen[b, i, j]`.

    Raises:
        TypeError, ValueError: for a wrong dtype or shape.

    Example:
        >>> chain = torch.ones(1, 3, 3, dtype=torch.bool).tril()
        >>> pack_tree_mask(chain)
        tensor([[1, 3, 7]], dtype=torch.int32)
    """
    check_dtype("seen", seen, (torch.bool,))
    check_shape("seen", seen, ("batch", "q_len", "q_len"))
    q_len = seen.shape[-1]
    if not 0 < q_len <= MOST_TOKENS:
        raise ValueError(f"seen must have q_len from 1 to {MOST_TOKENS}, got {q_len}")
    bits = (seen.long() << torch.arange(q_len, device=seen.device)).sum(-1)
    return bits.to(torch.int32) if q_len <= 32 else bits


def tree_mask_from_custom_mask(
    custom_mask: torch.Tensor, mask_indptr: torch.Tensor, seq_lens: torch.Tensor, q_len: int
) -> torch.Tensor:
    """The tree mask of a mask over all keys, as FlashInfer and SGLang keep it; without a synchronisation.

    Such a mask holds `q_len * seq_len` entries a sequence, row by row, in one flat tensor. Entries of keys
    before the last q_len are not read: every query token attends to those keys.

    Args:
        custom_mask: flat; bool (FlashInfer's `custom_mask`, SGLang's `spec_info.custom_mask`), an element an
            entry; or uint8 (FlashInfer's `packed_custom_mask`), eight entries a byte from the lowest bit on,
            and each sequence begins at a new byte.
        mask_indptr: `[batch]` or longer, int32 or int64: the element of `custom_mask` at which each sequence
            begins.
        seq_lens: `[batch]`, int32 or int64: keys of each sequence, the new ones included.
        q_len: query tokens of each sequence, at most 64.

    Returns:
        `[batch, q_len]` for `PageTable.with_tree_mask`.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape or device.

    Example:
        >>> mask = torch.tensor([1, 1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)  # 2 tokens, 4 keys
        >>> tree_mask_from_custom_mask(mask, torch.tensor([0, 8]), torch.tensor([4]), 2)
        tensor([[1, 2]], dtype=torch.int32)
    """
    check_dtype("custom_mask", custom_mask, (torch.bool, torch.uint8))
    check_shape("custom_mask", custom_mask, ("entries",))
    check_index_vector("seq_lens", seq_lens, "batch")
    check_index_vector("mask_indptr", mask_indptr, "batch")
    check_same_device(custom_mask=custom_mask, mask_indptr=mask_indptr, seq_lens=seq_lens)
    check_positive_int("q_len", q_len)
    batch = seq_lens.shape[0]
    if mask_indptr.shape[0] < batch:
        raise ValueError(
            f"mask_indptr must have an element for each of {batch} sequences, got {mask_indptr.shape[0]}"
        )
    keys = seq_lens.long()[:, None, None]
    token = torch.arange(q_len, device=custom_mask.device)
    key = keys - q_len + token  # [batch, 1, q_len]
    entry = token[:, None] * keys + key
    begin = mask_indptr[:batch].long()[:, None, None]
    packed = custom_mask.dtype == torch.uint8
    at = begin + (entry // 8 if packed else entry)
    if custom_mask.numel() == 0:
        return pack_tree_mask(torch.zeros_like(entry, dtype=torch.bool))
    value = custom_mask[at.clamp(0, custom_mask.numel() - 1)]
    seen = (value >> (entry % 8)) & 1 if packed else value
    return pack_tree_mask(seen.bool() & (key >= 0))
