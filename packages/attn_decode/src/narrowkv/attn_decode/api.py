"""Decode's public call: make a plan or take one, and run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch

from narrowkv.attn_decode.plan import DecodePlan
from narrowkv.attn_decode.planning import plan_for_call
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.errors import check_instance
from narrowkv.runtime.launch.tracing import traceable

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DecodeOptions(TypedDict, total=False):
    """Keywords that say where the log-sum-exp goes and what is checked.

    Attributes:
        lse: where to write the log-sum-exp, `[batch * q_len, num_qo_heads]` fp32, last dimension contiguous.
            It is returned only with `return_lse`.
        validate: True looks at lengths, page ids and descales, which waits for the device. Otherwise, wrong
            values make wrong results of their sequences, and nothing is read or written outside of a tensor:
            lengths are brought into what the page table holds, page ids into the cache. None reads descale
            tensors per tensor, head or sequence in the first call that has them, and again if they have
            changed in place; False reads nothing.
    """

    lse: torch.Tensor | None
    validate: bool | None


@traceable
def paged_decode(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    *,
    sm_scale: float | None = None,
    q_descale: float | torch.Tensor = 1.0,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    plan: DecodePlan | None = None,
    **options: Unpack[DecodeOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's newest tokens over its paged KV cache, which already holds them.

    Args:
        q: `[batch * q_len, num_qo_heads, head_dim]`, bf16 or fp16, or over an FP8 cache FP8 (E4M3, of either
            kind), last dimension contiguous. With q_len > 1
            (speculative tokens) row i of a sequence stands at position `seq_len - q_len + i` and attends to
            keys up
            to itself.
        cache: keys and values; any layout and page size, in bf16, fp16, FP8 or FP4. q is not quantised, but
            inside the native FP4 kernel. With a `key_transform` the kernel balances and rotates q where it
            loads it, and results, lse and sinks too, are those of the keys before it.
        page_table: which pages each sequence occupies, and its length.
        sm_scale: softmax scale; default `head_dim ** -0.5`.
        q_descale: what FP8 queries are multiplied by: a float or an fp32 tensor `[1]`. They are widened to 16
            bits, exactly.
        out: where to write, `[batch * q_len, num_qo_heads, head_dim]`.
        out_dtype: dtype of a new output; default q's, and bf16 for FP8 queries. fp32 is allowed.
        logits_soft_cap: `c * tanh(logits / c)` when positive.
        window_left: a row attends to at most this many keys before itself; -1 for all.
        sinks: `[num_qo_heads]`, a logit per head with value 0: it enters the denominator of `o`.
        return_lse: also return the log-sum-exp.
        batch_invariant: the result of a sequence has the same bits alone and in any batch, with any width of
            the page table; see `plan_decode`, which says what it costs.
        plan: from `plan_decode`, which also forces kernels and splits; without one, a plan is made for these
            shapes and kept. A call with a plan allocates only outputs that were not given. No call waits
            for the device, so it can be captured in a graph.
        **options: `lse` and `validate`: see `DecodeOptions`.

    An infinite or NaN value of V makes its channel infinite or NaN in rows that attend to it, and may make
    their other channels NaN; other rows are not affected.

    Returns:
        `o`, or `(o, lse)`; `lse` is `[batch * q_len, num_qo_heads]` fp32, natural log of the scaled logits'
        sum **without the sink**, so that partial results merge. A row that attends to nothing has o = 0 and
        lse = -inf.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what came.
        UnsupportedError: for formats that the kernel does not read, or a forced kernel that the target lacks.

    Source: split-KV decode after Flash-Decoding (Dao et al., 2023).

    Example:
        >>> o = paged_decode(q, cache, table, sm_scale=128**-0.5)                       # doctest: +SKIP
        >>> o, lse = paged_decode(q, cache, table, return_lse=True, plan=plan)          # doctest: +SKIP
    """
    if plan is None:
        plan = plan_for_call(q, cache, page_table, batch_invariant)
    elif type(plan) is not DecodePlan:
        check_instance("plan", plan, DecodePlan)
    elif batch_invariant and not plan.batch_invariant:
        raise ValueError(
            "plan must be made with batch_invariant=True, got one without: call plan_decode again"
        )
    return plan.run(
        q, cache, page_table, sm_scale=sm_scale, q_descale=q_descale, out=out, out_dtype=out_dtype,
        logits_soft_cap=logits_soft_cap, window_left=window_left, sinks=sinks, return_lse=return_lse,
        **options,
    )  # fmt: skip
