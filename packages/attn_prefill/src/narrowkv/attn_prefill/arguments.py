"""The arguments of `batch_prefill` and `prefill_append`: one list, by which every call of them is checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypedDict

import torch

from narrowkv.paged_cache import PagedKVCache, PageTable, Rope


class AppendOptions(TypedDict, total=False):
    """Keywords that say where results go and what is checked.

    Attributes:
        out_dtype: bf16, fp16 or fp32, of a new output; default q's dtype, and bf16 for FP8 queries.
        return_lse: also return the log-sum-exp.
        lse: where to write the log-sum-exp, `[tokens, num_qo_heads]` fp32, last dimension contiguous. It is
            returned only with `return_lse`.
        validate: True looks at the values of all metadata first (cu_seqlens_q, lengths, page ids, descales,
            positions, bounds of the plan), which waits for the device. None, the default, reads `q_descale`
            and descale tensors per tensor, head or sequence in the first call that has them, and again if
            they have changed in place; if lengths are on the CPU, the first call of some size refuses those
            beyond the plan's maxima. False reads nothing.
    """

    out_dtype: torch.dtype | None
    return_lse: bool
    lse: torch.Tensor | None
    validate: bool | None


class PrefillOptions(AppendOptions, total=False):
    """`AppendOptions`, and whether the bits of a result may depend on the batch.

    Attributes:
        batch_invariant: a sequence's result has the same bits alone and in any batch; see `plan_prefill`.
    """

    batch_invariant: bool


class Arguments(NamedTuple):
    """The arguments of a call by a plan, with the values of those that are left out.

    `prefill_append` has no `causal`, `q_descale`, `window_right` and `batch_invariant`; `batch_prefill` has
    no `k_new`, `v_new` and `rope`. See these functions and `PrefillOptions`.
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
_KEYWORDS = frozenset(Arguments._field_defaults) - {"k_new", "v_new"}
# The keywords of `PrefillPlan.run` and of `AppendPlan.run`, by the operation.
KEYWORDS = {
    "batch_prefill": _KEYWORDS - {"rope"},
    "prefill_append": _KEYWORDS - {"causal", "q_descale", "window_right", "batch_invariant"},
}


def check_keywords(operation: str, given: Iterable[str]) -> None:
    """Raises for a keyword that the operation does not have.

    Raises:
        TypeError: as Python does.
    """
    for name in given:
        if name not in KEYWORDS[operation]:
            raise TypeError(f"{operation}() got an unexpected keyword argument {name!r}")
