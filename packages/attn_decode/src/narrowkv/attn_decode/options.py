"""The keywords of `paged_decode`, and those that it shares with prefill and context parallelism."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch

from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.operation import Operation


class AttentionOptions(TypedDict, total=False):
    """Keywords of every operation that attends over a paged cache, context parallelism among them.

    Attributes:
        sm_scale: softmax scale; default `head_dim ** -0.5`.
        logits_soft_cap: `c * tanh(logits / c)` when positive.
        sinks: `[num_qo_heads]`, a logit per head with value 0: it enters the denominator of `o`.
        out: where to write, `[tokens of q, num_qo_heads, v_head_dim]`, bf16, fp16 or fp32; it must not
            overlap any other tensor of the call.
        out_dtype: bf16, fp16 or fp32, of a new output; default q's dtype, and bf16 for FP8 queries.
        return_lse: also return the log-sum-exp.
        lse: where to write the log-sum-exp, `[tokens of q, num_qo_heads]` fp32, last dimension contiguous. It
            is returned only with `return_lse`.
        validate: True looks at the values of all metadata first (cu_seqlens_q, lengths, page ids, descales,
            positions, bounds of the plan), which waits for the device. Otherwise, wrong values make wrong
            results of their sequences, and nothing is read or written outside of a tensor. None, the default,
            reads `q_descale` and descale tensors per tensor, head or sequence in the first call that has
            them, and again if they have changed in place; if lengths are on the CPU, the first call of some
            size by a plan of prefill refuses those beyond the plan's maxima. False reads nothing.
    """

    sm_scale: float | None
    logits_soft_cap: float
    sinks: torch.Tensor | None
    out: torch.Tensor | None
    out_dtype: torch.dtype | None
    return_lse: bool
    lse: torch.Tensor | None
    validate: bool | None


class LocalOptions(AttentionOptions, total=False):
    """Keywords of decode and prefill over a cache that one device holds whole.

    Attributes:
        window_left: a row attends to at most this many keys before itself; -1 for all.
        out_scale: fp32 `[1]`, for an output in FP8 (E4M3 `out` or `out_dtype`; FNUZ on AMD only): it is
            `o / out_scale`, by its reciprocal, rounded to nearest even and saturated.

    The other attributes are those of `AttentionOptions`.
    """

    window_left: int
    out_scale: torch.Tensor | None


class DecodeOptions(LocalOptions, total=False):
    """Keywords of `paged_decode`, `DecodePlan.run` and `paged_decode_reference`.

    Attributes:
        q_descale: what FP8 queries are multiplied by: a float or an fp32 tensor `[1]`. They are widened to 16
            bits, exactly.

    The other attributes are those of `LocalOptions`.
    """

    q_descale: float | torch.Tensor


class DecodeArguments(NamedTuple):
    """The arguments of a call, with the values of those of `DecodeOptions` that are left out."""

    q: torch.Tensor
    cache: PagedKVCache
    page_table: PageTable
    q_descale: float | torch.Tensor = 1.0
    out: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    validate: bool | None = None
    # From here on: values that a call is prepared for as they are.
    sm_scale: float | None = None
    out_dtype: torch.dtype | None = None
    logits_soft_cap: float = 0.0
    window_left: int = -1
    return_lse: bool = False


DECODE = Operation("paged_decode", DecodeOptions, DecodeArguments, "plan_decode")
PLAIN_VALUES = slice(DecodeArguments._fields.index("sm_scale"), None)
