"""Decode's public call: make a plan or take one, and run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowkv.attn_decode.options import DecodeArguments
from narrowkv.attn_decode.plan import DecodePlan
from narrowkv.attn_decode.planning import plan_for_call
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.errors import check_instance
from narrowkv.runtime.launch.tracing import traceable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.attn_decode.options import DecodeOptions


@traceable
def paged_decode(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    *,
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
        batch_invariant: the result of a sequence has the same bits alone and in any batch, with any width of
            the page table; see `plan_decode`, which says what it costs.
        plan: from `plan_decode`, which also forces kernels and splits; without one, a plan is made for these
            shapes and kept. A call with a plan allocates only outputs that were not given. No call waits
            for the device, so it can be captured in a graph.
        **options: `sm_scale`, `q_descale`, `out`, `out_dtype`, `logits_soft_cap`, `window_left`, `sinks`,
            `return_lse`, `lse` and `validate`: see `DecodeOptions`.

    An infinite or NaN value of V makes its channel infinite or NaN in rows that attend to it, and may make
    their other channels NaN; other rows are not affected.

    Returns:
        `o`, or `(o, lse)`. `o` is `[batch * q_len, num_qo_heads, v_head_dim]`, as wide as the cache's V.
        `lse` is `[batch * q_len, num_qo_heads]` fp32, natural log of the scaled logits' sum **without the
        sink**, so that partial results merge. A row that attends to nothing has o = 0 and lse = -inf.

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
    return plan.call(DecodeArguments(q, cache, page_table, **options))
