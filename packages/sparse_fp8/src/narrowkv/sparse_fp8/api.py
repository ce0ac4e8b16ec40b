"""Public operations of sparse_fp8."""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import check_positive_int
from narrowkv.runtime.launch.tracing import traceable
from narrowkv.sparse_fp8.config import MOST_SPLITS
from narrowkv.sparse_fp8.modes import choose_mode
from narrowkv.sparse_fp8.operation import SparsePlan
from narrowkv.sparse_fp8.planner import known_plan, plan_for, remember
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource

__all__ = ["sparse_decode", "sparse_prefill", "sparse_prefill_fp8"]


@traceable
def sparse_prefill(
    q: torch.Tensor,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    *,
    attn_sink: torch.Tensor | None = None,
    sm_scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    validate: bool = False,
    plan: SparsePlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention over 16-bit rows: each token attends to the rows that its index lists name.

    V is K, all 512 columns, shared by all heads; both sources go through one softmax.

    Args:
        q: `[num_tokens, num_qo_heads, 512]`, bf16 or fp16, last dimension contiguous; 1 to 128 heads.
        prefix: rows of a page-size-1 pool, in the dtype of q; None if there are none.
        extend: rows of this forward's own KV; None if there are none.
        attn_sink: `[num_qo_heads]` fp32, a logit with value 0 in the denominator; -inf for none.
        sm_scale: softmax scale, default `512 ** -0.5`.
        out: where to write, `[num_tokens, num_qo_heads, 512]`, bf16, fp16 or fp32.
        lse: where to write the log-sum-exp, fp32 `[num_tokens, num_qo_heads]`; returned only with
            `return_lse`.
        return_lse: also return the log-sum-exp.
        validate: also read index lists and scales on the host and refuse wrong values, which waits for the
            device. Otherwise an index out of range is skipped, and an `indptr` that is no CSR names other
            indices, at most all of them for each token; nothing is read or written outside the tensors.
        plan: from `plan_sparse`, which then fixes `sm_scale` and whether there is a log-sum-exp.

    Returns:
        `o`, or `(o, lse)`; `lse` is `[num_tokens, num_qo_heads]` fp32, natural log of the scaled logits' sum
        **without the sink**. A row without indices has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what was given.

    Source: FlashAttention's online softmax (Dao et al., 2022) over gathered rows (DeepSeek sparse attention).

    Example:
        >>> import torch
        >>> q = torch.ones(1, 16, 512, dtype=torch.bfloat16)
        >>> pool = torch.arange(4.0).bfloat16()[:, None].expand(4, 512).contiguous()
        >>> int32 = dict(dtype=torch.int32)
        >>> source = KVSource(pool, torch.tensor([0, 2], **int32), torch.tensor([-1, 3], **int32))
        >>> sparse_prefill(q, source)[0, 0, 0].item()
        3.0
    """
    if plan is None:
        writes = return_lse or lse is not None
        key, plan = known_plan(q, prefix, extend, "16bit", attn_sink is None, sm_scale, writes)
        if plan is None:
            plan = plan_for(
                q, prefix, extend, mode="16bit", attn_sink=attn_sink, sm_scale=sm_scale, return_lse=writes,
                num_qo_heads=None,
            )  # fmt: skip
            remember(key, plan)
    else:
        _check_planned(plan, ("16bit",), sm_scale=sm_scale)
    result = plan.run(q, prefix, extend, attn_sink=attn_sink, out=out, lse=lse, validate=validate)
    return result[0] if lse is not None and not return_lse else result


@traceable
def sparse_prefill_fp8(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    *,
    attn_sink: torch.Tensor | None = None,
    sm_scale: float | None = None,
    mode: str = "auto",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    validate: bool = False,
    num_qo_heads: int | None = None,
    plan: SparsePlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention over FP8 rows (`DSV4Rows`), fused or with a prepass.

    Args:
        q: `[num_tokens, num_qo_heads, 512]` bf16 or fp16, or `DSV4Rows` with `num_tokens * num_qo_heads`
            rows, tokens outermost, in the format of the sources.
        prefix, extend: as for `sparse_prefill`, with `DSV4Rows` of any layout. In mode "prepass" one of them
            may be 16-bit.
        attn_sink, sm_scale, out, lse, return_lse, validate: as for `sparse_prefill`.
        mode: "fused" widens rows on the chip and allocates only the results; QK over NoPE multiplies
            FP8 by FP8 when q is `DSV4Rows` and the target can, else 16-bit q by widened rows; a call that
            fills a Hopper GPU expands such a q to bf16 first, which is exact and faster. "prepass" expands
            FP8 rows once to 16-bit scratch (all rows of a source, or only the named ones when those are
            fewer) and runs `sparse_prefill`. "auto" picks; `choose_mode` says what and why.
        num_qo_heads: heads of a `DSV4Rows` query. None takes its rows over the tokens; it must be given where
            the last packed584 page of the query is not full.

    Returns:
        As `sparse_prefill`; `o` is bf16 when q is `DSV4Rows`.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what was given.
        UnsupportedError: the mode is forced and cannot serve the sources.

    Example:
        >>> import torch
        >>> q = torch.ones(1, 16, 512, dtype=torch.bfloat16)
        >>> x = torch.arange(4.0)[:, None].expand(4, 512)
        >>> pool = DSV4Rows.quantize(x, layout="packed584", page_size=2)
        >>> int32 = dict(dtype=torch.int32)
        >>> source = KVSource(pool, torch.tensor([0, 2], **int32), torch.tensor([-1, 3], **int32))
        >>> sparse_prefill_fp8(q, source, mode="fused")[0, 0, 0].item()
        3.0
    """
    if plan is None:
        writes = return_lse or lse is not None
        key, plan = known_plan(
            q, prefix, extend, "fp8", mode, attn_sink is None, sm_scale, writes, num_qo_heads
        )
        if plan is None:
            if mode != "prepass":
                mode = choose_mode(q, prefix, extend, mode=mode, num_qo_heads=num_qo_heads).mode
            plan = plan_for(
                q, prefix, extend, mode=mode, attn_sink=attn_sink, sm_scale=sm_scale, return_lse=writes,
                num_qo_heads=num_qo_heads,
            )  # fmt: skip
            remember(key, plan)
    else:
        _check_planned(plan, ("fused", "prepass"), sm_scale=sm_scale)
    result = plan.run(q, prefix, extend, attn_sink=attn_sink, out=out, lse=lse, validate=validate)
    return result[0] if lse is not None and not return_lse else result


@traceable
def sparse_decode(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    *,
    attn_sink: torch.Tensor | None = None,
    sm_scale: float | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    validate: bool = False,
    num_qo_heads: int | None = None,
    plan: SparsePlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention of few tokens over many rows each: several programs share a token's rows.

    Args:
        q: as for `sparse_prefill_fp8` over `DSV4Rows`, as for `sparse_prefill` over 16-bit rows.
        prefix, extend: both `DSV4Rows`, or both 16-bit in the dtype of q.
        attn_sink, sm_scale, out, lse, return_lse, validate: as for `sparse_prefill`.
        num_qo_heads: as for `sparse_prefill_fp8`.
        num_splits: programs that share a token's rows, up to 65535; None chooses as many as fill the chip, or
            4 with `batch_invariant`. Splits take whole tiles in order.
        batch_invariant: a token's result has the same bits alone and in a batch of any size. Every call then
            uses the portable kernel with one number of splits: few tokens fill less of the chip, and every
            call writes and reads partial results of 2 KiB a head and split.

    Returns:
        As `sparse_prefill_fp8`.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what was given.

    Source: split-KV decode after Flash-Decoding (Dao et al., 2023).

    Example:
        >>> import torch
        >>> pool = DSV4Rows.quantize(torch.arange(4.0)[:, None].expand(4, 512))
        >>> int32 = dict(dtype=torch.int32)
        >>> source = KVSource(pool, torch.tensor([0, 2], **int32), torch.tensor([3, 3], **int32))
        >>> sparse_decode(torch.ones(1, 16, 512).bfloat16(), source, num_splits=2)[0, 0, 0].item()
        3.0
    """
    if plan is None:
        writes = return_lse or lse is not None
        key, plan = known_plan(
            q, prefix, extend, "decode", attn_sink is None, sm_scale, writes, num_qo_heads, type(num_splits),
            num_splits, batch_invariant,
        )  # fmt: skip
        if plan is None:
            if num_splits is not None and check_positive_int("num_splits", num_splits) > MOST_SPLITS:
                raise ValueError(f"num_splits must be at most {MOST_SPLITS}, got {num_splits}")
            plan = plan_for(
                q, prefix, extend, mode=_decode_mode(prefix, extend), attn_sink=attn_sink, sm_scale=sm_scale,
                return_lse=writes, num_qo_heads=num_qo_heads, num_splits=num_splits,
                batch_invariant=batch_invariant,
            )  # fmt: skip
            remember(key, plan)
    else:
        _check_planned(plan, ("16bit", "fused"), sm_scale=sm_scale)
    result = plan.run(q, prefix, extend, attn_sink=attn_sink, out=out, lse=lse, validate=validate)
    return result[0] if lse is not None and not return_lse else result


def _decode_mode(*sources: KVSource | None) -> str:
    """Decoding never widens rows to scratch first: "fused" if a source is in FP8."""
    narrow = any(isinstance(s, KVSource) and isinstance(s.rows, DSV4Rows) for s in sources)
    return "fused" if narrow else "16bit"


def _check_planned(plan: SparsePlan, modes: tuple[str, ...], *, sm_scale: float | None) -> None:
    """Refuses a plan for another operation, and what the plan fixes."""
    if not isinstance(plan, SparsePlan):
        raise TypeError(f"plan must be a SparsePlan, got {type(plan).__name__}")
    if plan.mode not in modes:
        raise ValueError(f"plan must have mode {' or '.join(modes)} for this operation, got {plan.mode}")
    if sm_scale is not None:
        raise ValueError("sm_scale must be None with a plan: give it to plan_sparse")
