"""The keywords of `append`: one list for the call, the reference and the operator."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.rope import Rope
from narrowkv.runtime.operation import Operation


class StoreOptions(TypedDict, total=False):
    """Keywords of `append` and of `append_reference`.

    Attributes:
        rope: rotary embedding of K, and of `q`.
        k_offset: `[num_kv_heads, head_dim]` fp32, subtracted from K after RoPE (`narrowkv.quant.transforms`),
            of which attention knows nothing; an offset in `cache.key_transform` is also put back into an lse.
        q: `[tokens, num_qo_heads, head_dim]`, bf16, fp16 or fp32, last dimension contiguous: rotated in place
            by `rope`, tokens of slot -1 too. It may be packed with K and V in one tensor; K is left as it is.
        exponent: FP4: how a group's scale is chosen: "mse" (least squared error), "floor" (OCP MX) or "ceil"
            (nothing saturates); see `narrowkv.quant.e8m0`. E4M3 scales have "mse" only.
        validate: True also checks the values of slots (in range, none twice), descales and positions, which
            waits for the device. None reads static descale tensors (and a balance of keys) in the first call
            that has them, and again if they have changed in place; False reads nothing.
    """

    rope: Rope | None
    k_offset: torch.Tensor | None
    q: torch.Tensor | None
    exponent: str
    validate: bool | None


class StoreArguments(NamedTuple):
    """The arguments of `append`, with the values of those of `StoreOptions` that are left out."""

    cache: PagedKVCache
    k_new: torch.Tensor
    v_new: torch.Tensor
    slot_mapping: torch.Tensor
    rope: Rope | None = None
    k_offset: torch.Tensor | None = None
    q: torch.Tensor | None = None
    exponent: str = "mse"
    validate: bool | None = None


APPEND = Operation("append", StoreOptions, StoreArguments)
