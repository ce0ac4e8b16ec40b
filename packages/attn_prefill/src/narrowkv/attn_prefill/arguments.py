"""The arguments of `batch_prefill` and `prefill_append`: one list, by which every call of them is checked."""

from __future__ import annotations

from typing import NamedTuple

import torch

from narrowkv.attn_decode.options import LocalOptions
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
from narrowkv.runtime.operation import Operation


class AppendOptions(LocalOptions, total=False):
    """Keywords of `prefill_append`, `AppendPlan.run` and `prefill_append_reference`.

    Attributes:
        rope: rotary embedding of q and k_new, by each new token's position. Rotated queries and keys are
            rounded to q's dtype for attention; the cache gets the keys before that rounding.

    The other attributes are those of `LocalOptions`.
    """

    rope: Rope | None


class PrefillOptions(LocalOptions, total=False):
    """Keywords of `batch_prefill`, `PrefillPlan.run` and `batch_prefill_reference`.

    Attributes:
        causal: a row attends to keys up to its own position; the same as `window_right=0`. True by default.
        q_descale: FP8 queries: a float or an fp32 tensor `[1]`.
        window_right: how many keys after itself a row attends to; -1 for all.
        batch_invariant: a sequence's result has the same bits alone and in any batch; see `plan_prefill`.

    The other attributes are those of `LocalOptions`.
    """

    causal: bool
    q_descale: float | torch.Tensor
    window_right: int
    batch_invariant: bool


class Arguments(NamedTuple):
    """The arguments of a call by a plan, with the values of those that are left out or that it does not have.

    See `PrefillOptions` and `AppendOptions`; `batch_prefill` has no `k_new` and `v_new`.
    """

    q: torch.Tensor
    cache: PagedKVCache
    page_table: PageTable
    cu_seqlens_q: torch.Tensor
    k_new: torch.Tensor | None = None
    v_new: torch.Tensor | None = None
    rope: Rope | None = None
    q_descale: float | torch.Tensor = 1.0
    sinks: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    validate: bool | None = None
    # From here on: values that a call is prepared for as they are.
    causal: bool = True
    sm_scale: float | None = None
    logits_soft_cap: float = 0.0
    window_left: int = -1
    window_right: int = -1
    out_dtype: torch.dtype | None = None
    return_lse: bool = False
    batch_invariant: bool = False


PLAIN_VALUES = slice(Arguments._fields.index("causal"), None)
PREFILL = Operation("batch_prefill", PrefillOptions, Arguments, "plan_prefill")
APPEND = Operation("prefill_append", AppendOptions, Arguments, "plan_append")
