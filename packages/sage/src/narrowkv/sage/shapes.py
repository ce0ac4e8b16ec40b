"""Sizes of a Sage attention, and keys and values that are quantised once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from narrowkv.quant.sage import TokenGroups
from narrowkv.runtime.errors import span_bytes
from narrowkv.runtime.operation import Bounded
from narrowkv.sage.config import KeyOrder
from narrowkv.sage.kernels import ALIGN

ROW_ALIGNMENT: int = ALIGN.value  # scratch rows that a sequence begins at a multiple of
_kinds: Bounded[int] = Bounded(1024)
_sizes: Bounded[tuple[int, int, int]] = Bounded(1024)  # bytes that tensors span, by kind
_numbers = itertools.count()


@dataclass(frozen=True)
class SageShape:
    """Sizes of a call.

    Attributes:
        batch: sequences.
        q_tokens, k_tokens: tokens of each sequence, or of all together when `ragged`.
        num_qo_heads, num_kv_heads, head_dim: heads.
        ragged: sequences differ in length.
    """

    batch: int
    q_tokens: int
    k_tokens: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    ragged: bool

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def rows(self, tokens: int) -> int:
        """Scratch rows of one head: every sequence in whole blocks."""
        if self.ragged:
            return (tokens // ROW_ALIGNMENT + self.batch) * ROW_ALIGNMENT
        return self.batch * -(-tokens // ROW_ALIGNMENT) * ROW_ALIGNMENT


@dataclass(frozen=True, eq=False)
class QuantizedKV:
    """K and V as attention reads them, quantised once; made by `SagePlan.quantize_kv`.

    Sequences lie one after the other, each from a multiple of 128 rows on.

    Attributes:
        k: `[num_kv_heads, rows, head_dim]`, int4 `[..., head_dim / 2]`.
        k_descale: fp32 `[num_kv_heads, groups]`, or `[1]`.
        k_mean: fp32 `[batch, num_kv_heads, head_dim]` that was subtracted, or None.
        v: `[num_kv_heads, head_dim, rows]`, keys in `key_order`.
        v_descale: fp32 `[batch, num_kv_heads, head_dim]`.
        shape: sizes it was made for.
        qk_format, fp8: stored formats of K and of V.
        k_groups: which tokens share a descale.
        key_order: of V.
        bounds: int32 `[batch, 2]`, first token and number of tokens of each sequence, or None.
        k_source: K as it came, where Q's smoothing needs it.
    """

    k: torch.Tensor
    k_descale: torch.Tensor
    k_mean: torch.Tensor | None
    v: torch.Tensor
    v_descale: torch.Tensor
    shape: SageShape
    qk_format: str
    fp8: str
    k_groups: TokenGroups | None
    key_order: KeyOrder
    bounds: torch.Tensor | None
    k_source: torch.Tensor | None

    @cached_property
    def kind(self) -> int:
        """A number that operands of the same sizes, formats and strides have in common."""
        source = self.k_source
        key = (
            self.shape, self.qk_format, self.fp8, self.k_groups, self.key_order, self.k.device,
            self.k_mean is None, self.bounds is None,
            None if source is None else (source.dtype, source.shape, source.stride()),
        )  # fmt: skip
        known = _kinds.get(key)
        return _kinds.keep(key, next(_numbers)) if known is None else known

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The quantised tensors by the names that launches know them by; None for those that are absent."""
        return {
            "k_codes": self.k, "k_descale": self.k_descale, "k_mean": self.k_mean, "v_codes": self.v,
            "v_descale": self.v_descale, "k_bounds": self.bounds,
        }  # fmt: skip

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Addresses that attention reads."""
        k, v, source, sizes = self.k.data_ptr(), self.v.data_ptr(), self.k_source, _sizes.get(self.kind)
        if sizes is None:
            sizes = _sizes.keep(self.kind, (span_bytes(self.k), span_bytes(self.v), span_bytes(source)))
        found = [(k, k + sizes[0]), (v, v + sizes[1])]
        if source is not None:
            found.append((source.data_ptr(), source.data_ptr() + sizes[2]))
        return found

    @cached_property
    def _described(self) -> dict[int, tuple[Any, Any]]:
        """Tensor descriptors that were made, by the keys of a tile."""
        return {}

    def descriptors(self, block_n: int) -> tuple[Any, Any]:
        """Tensor descriptors of K and V by tiles of `block_n` keys, with heads and rows as one dimension."""
        found = self._described.get(block_n)
        if found is None:
            k, v = self.k, self.v
            found = self._described[block_n] = (
                descriptor_of(k.view(-1, k.shape[2]), [block_n, k.shape[2]]),
                descriptor_of(v.view(-1, v.shape[2]), [v.shape[1], block_n]),
            )
        return found


def descriptor_of(flat: torch.Tensor, block: list[int]) -> Any:
    """The tensor descriptor of `[rows, columns]` by tiles of `block`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), block)
