"""Quantisers of Sage attention: Q and K with one descale per group of tokens, and means to subtract.

SageAttention (Zhang et al., arXiv 2410.02367 and 2411.10958) quantises Q and K at one of four granularities.
Tokens are numbered from the beginning of a sequence; the last column is the group of token t within its span.

===========  ====  ==========  ===============  =================================
granularity  of    span        descales a span  group of token t within its span
===========  ====  ==========  ===============  =================================
per_tensor   Q, K  everything  1                0
per_block    Q, K  128         1                0
per_warp     Q     32          1                0
per_warp     K     64          1                0
per_thread   Q     32          8                t % 8
per_thread   K     64          4                t % 8 // 2
===========  ====  ==========  ===============  =================================

The groups of per_thread are the published ones: 4 tokens of Q and 16 of K, interleaved so that they are the
rows and columns that one thread holds of the result of a 16x8 matrix instruction.

Example:
    >>> import torch
    >>> k = torch.ones(128, 2, 64)  # [tokens, heads, dim]
    >>> stored, descale = quantize_per_token_group(k, token_groups("k", "per_thread"), "int8")
    >>> stored.dtype, descale.shape
    (torch.int8, torch.Size([8, 2]))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from narrowkv.runtime.errors import check_choice, check_positive_int

from .formats import Format
from .quantize import (
    Quantized,
    dequantize_per_block,
    dequantize_per_tensor,
    quantize_per_block,
    quantize_per_tensor,
)
from .rounding import to_fp32

__all__ = [
    "SAGE_GRANULARITIES",
    "TokenGroups",
    "block_mean",
    "dequantize_per_token_group",
    "quantize_per_token_group",
    "token_groups",
    "token_mean",
]


@dataclass(frozen=True)
class TokenGroups:
    """Which tokens share a descale: token t has descale `t // span * groups + t % (groups * run) // run`.

    Attributes:
        span: tokens after which the pattern repeats.
        groups: descales of a span.
        run: neighbouring tokens of a group.
    """

    span: int
    groups: int
    run: int

    @property
    def size(self) -> int:
        """Tokens of a group."""
        return self.span // self.groups

    def of(self, tokens: int) -> torch.Tensor:
        """The descale of each of the first `tokens` tokens, int64 `[tokens]`."""
        t = torch.arange(tokens)
        return t // self.span * self.groups + t % (self.groups * self.run) // self.run


_BLOCK = TokenGroups(span=128, groups=1, run=128)
_GROUPS: Mapping[tuple[str, str], TokenGroups | None] = MappingProxyType(
    {
        ("q", "per_tensor"): None,
        ("k", "per_tensor"): None,
        ("q", "per_block"): _BLOCK,
        ("k", "per_block"): _BLOCK,
        ("q", "per_warp"): TokenGroups(span=32, groups=1, run=32),
        ("k", "per_warp"): TokenGroups(span=64, groups=1, run=64),
        ("q", "per_thread"): TokenGroups(span=32, groups=8, run=1),
        ("k", "per_thread"): TokenGroups(span=64, groups=4, run=2),
    }
)

SAGE_GRANULARITIES: tuple[str, ...] = ("per_tensor", "per_block", "per_warp", "per_thread")
"""From coarse to fine."""


def token_groups(side: str, granularity: str) -> TokenGroups | None:
    """The groups of a granularity for "q" or "k"; None for per_tensor, which has one descale for everything.

    Raises:
        TypeError, ValueError: an unknown side or granularity.
    """
    check_choice("side", side, ("q", "k"))
    check_choice("granularity", granularity, SAGE_GRANULARITIES)
    return _GROUPS[side, granularity]


def _regrouped(groups: TokenGroups, tokens: int) -> torch.Tensor:
    """The order of the tokens of whole spans in which the tokens of a group are adjacent."""
    spans = -(-tokens // groups.span)
    return torch.argsort(groups.of(spans * groups.span), stable=True)


def quantize_per_token_group(
    x: torch.Tensor, groups: TokenGroups | None, format: str | torch.dtype | Format
) -> Quantized:
    """One descale per group of tokens and head; what `narrowkv.quant.quantize` says holds here too.

    Args:
        x: fp32, bf16 or fp16 `[..., tokens, heads, dim]`.
        groups: from `token_groups`; None takes one descale for the whole tensor. The last span may be short.
        format: FP8, FP4, INT8 or INT4.

    Returns:
        `(stored, descale)`; descale is fp32 `[..., ceil(tokens / span) * groups, heads]`, or `[1]`. A group
        that has no tokens has descale 1.

    Raises:
        TypeError: the dtype of `x` is not as above.
        ValueError: `x` has fewer than three dimensions, or dim is odd for a packed format.
        UnsupportedError: `format` is a 16-bit one.
    """
    if groups is None:
        return quantize_per_tensor(x, format)
    if x.dim() < 3:
        raise ValueError(f"x must have shape [..., tokens, heads, dim], got {list(x.shape)}")
    tokens = x.shape[-3]
    order = _regrouped(groups, tokens).to(x.device)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, len(order) - tokens))
    stored, descale = quantize_per_block(padded.index_select(-3, order), groups.size, format)
    return stored.index_select(-3, order.argsort())[..., :tokens, :, :], descale


def dequantize_per_token_group(
    stored: torch.Tensor,
    descale: torch.Tensor,
    groups: TokenGroups | None,
    format: str | torch.dtype | Format | None = None,
) -> torch.Tensor:
    """Undoes `quantize_per_token_group`, up to its rounding.

    Args:
        stored: storage `[..., tokens, heads, dim]`, packed formats `[..., dim / 2]`.
        descale: fp32 `[..., ceil(tokens / span) * groups, heads]`, or `[1]` when `groups` is None.
        groups: as they were quantised.
        format: the stored format; may be left out where the dtype tells it.

    Returns:
        fp32 `[..., tokens, heads, dim]`.

    Raises:
        TypeError: a dtype is not as above.
        ValueError: the shapes do not fit each other.
    """
    if groups is None:
        return dequantize_per_tensor(stored, descale, format)
    index = groups.of(stored.shape[-3]).to(descale.device)
    return dequantize_per_block(stored, descale.index_select(-2, index), 1, format)


def token_mean(x: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens, summed in fp64 so that the result does not depend on the order of the sum.

    Subtracting it from K does not change softmax(QK), because the logits of all keys change by the same
    amount. It removes the offset of channels that makes K hard to quantise.

    Args:
        x: fp32, bf16 or fp16 `[..., tokens, heads, dim]`.

    Returns:
        fp32 `[..., heads, dim]`; zeros where there are no tokens.

    Raises:
        TypeError: the dtype of `x` is not as above.
    """
    total = to_fp32("x", x).double().sum(-3).float()
    return total / torch.full_like(total, max(x.shape[-3], 1))


def block_mean(x: torch.Tensor, block: int = 128) -> torch.Tensor:
    """The mean of each run of `block` tokens; the last run may be short.

    Subtracting it from Q removes what the queries of a block have in common; `mean @ K^T` must then be added
    to the scores.

    Args:
        x: fp32, bf16 or fp16 `[..., tokens, heads, dim]`.
        block: tokens of a run, at least 1.

    Returns:
        fp32 `[..., ceil(tokens / block), heads, dim]`.

    Raises:
        TypeError: the dtype of `x` is not as above, or `block` is not an int.
        ValueError: `block` is below 1.
    """
    check_positive_int("block", block)
    runs = [token_mean(run) for run in torch.split(x, block, -3)] if x.shape[-3] else []
    return torch.stack(runs, -3) if runs else to_fp32("x", x).new_zeros(*x.shape[:-3], 0, *x.shape[-2:])
