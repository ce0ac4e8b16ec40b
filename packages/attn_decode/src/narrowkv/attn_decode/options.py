"""The keywords of `paged_decode`: one list for the call, the plan, the reference and the operator."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch

from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.operation import Operation


class DecodeOptions(TypedDict, total=False):
    """Keywords of `paged_decode`, `DecodePlan.run` and `paged_decode_reference`.

    Attributes:
        sm_scale: softmax scale; default `head_dim ** -0.5`.
        q_descale: what FP8 queries are multiplied by: a float or an fp32 tensor `[1]`. They are widened to 16
            bits, exactly.
        out: where to write, `[batch * q_len, num_qo_heads, v_head_dim]`.
        out_dtype: dtype of a new output; default q's, and bf16 for FP8 queries. fp32 is allowed, and with
            `out_scale` FP8.
        out_scale: fp32 `[1]`, for an output in FP8 (E4M3; FNUZ on AMD only): the output is `o / out_scale`,
            by its reciprocal, rounded to nearest even and saturated.
        logits_soft_cap: `c * tanh(logits / c)` when positive.
        window_left: a row attends to at most this many keys before itself; -1 for all.
        sinks: `[num_qo_heads]`, a logit per head with value 0: it enters the denominator of `o`.
        return_lse: also return the log-sum-exp.
        lse: where to write the log-sum-exp, `[batch * q_len, num_qo_heads]` fp32, last dimension contiguous.
            It is returned only with `return_lse`.
        validate: True looks at lengths, page ids and descales, which waits for the device. Otherwise, wrong
            values make wrong results of their sequences, and nothing is read or written outside of a tensor:
            lengths are brought into what the page table holds, page ids into the cache. None reads descale
            tensors per tensor, head or sequence in the first call that has them, and again if they have
            changed in place; False reads nothing.
    """

    sm_scale: float | None
    q_descale: float | torch.Tensor
    out: torch.Tensor | None
    out_dtype: torch.dtype | None
    out_scale: torch.Tensor | None
    logits_soft_cap: float
    window_left: int
    sinks: torch.Tensor | None
    return_lse: bool
    lse: torch.Tensor | None
    validate: bool | None


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
