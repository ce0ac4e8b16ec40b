"""Public operations of sparse_fp8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from narrowkv.runtime.launch.tracing import traceable
from narrowkv.sparse_fp8.config import check_splits
from narrowkv.sparse_fp8.operation import Result, SparsePlan
from narrowkv.sparse_fp8.options import OPERATIONS, SparseArguments
from narrowkv.sparse_fp8.planner import choose_mode, known_plan, plan_for, remember
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.sparse_fp8.options import SparseDecodeOptions, SparseFp8Options, SparseOptions

__all__ = ["sparse_decode", "sparse_prefill", "sparse_prefill_fp8"]


@traceable
def sparse_prefill(
    q: torch.Tensor,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    *,
    plan: SparsePlan | None = None,
    **options: Unpack[SparseOptions],
) -> Result:
    """Sparse attention over 16-bit rows: each token attends to the rows that its index lists name.

    V is K, all 512 columns, shared by all heads; both sources go through one softmax.

    Args:
        q: `[num_tokens, num_qo_heads, 512]`, bf16 or fp16, last dimension contiguous; 1 to 128 heads.
        prefix: rows of a page-size-1 pool, in the dtype of q; None if there are none.
        extend: rows of this forward's own KV; None if there are none.
        plan: from `plan_sparse`, which then fixes `sm_scale` and whether there is a log-sum-exp.
        **options: `attn_sink`, `sm_scale`, `out`, `lse`, `return_lse` and `validate`; see `SparseOptions`.

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
    return _attend("sparse_prefill", plan, q, prefix, extend, options)


@traceable
def sparse_prefill_fp8(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    *,
    plan: SparsePlan | None = None,
    **options: Unpack[SparseFp8Options],
) -> Result:
    """Sparse attention over FP8 rows (`DSV4Rows`), fused or with a prepass.

    Args:
        q: `[num_tokens, num_qo_heads, 512]` bf16 or fp16, or `DSV4Rows` with `num_tokens * num_qo_heads`
            rows, tokens outermost, in the format of the sources.
        prefix, extend: as for `sparse_prefill`, with `DSV4Rows` of any layout. In mode "prepass" one of them
            may be 16-bit.
        plan: as for `sparse_prefill`.
        **options: those of `sparse_prefill`, `mode` and `num_qo_heads`; see `SparseFp8Options`.

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
    return _attend("sparse_prefill_fp8", plan, q, prefix, extend, options)


@traceable
def sparse_decode(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    *,
    plan: SparsePlan | None = None,
    **options: Unpack[SparseDecodeOptions],
) -> Result:
    """Sparse attention of few tokens over many rows each: several programs share a token's rows.

    Args:
        q: as for `sparse_prefill_fp8` over `DSV4Rows`, as for `sparse_prefill` over 16-bit rows.
        prefix, extend: both `DSV4Rows`, or both 16-bit in the dtype of q.
        plan: as for `sparse_prefill`.
        **options: those of `sparse_prefill`, `num_qo_heads`, `num_splits` and `batch_invariant`; see
            `SparseDecodeOptions`.

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
    return _attend("sparse_decode", plan, q, prefix, extend, options)


# The modes of plans that an operation takes.
_MODES = {
    "sparse_prefill": ("16bit",),
    "sparse_prefill_fp8": ("fused", "prepass"),
    "sparse_decode": ("16bit", "fused"),
}


def _attend(
    operation: str, plan: SparsePlan | None, q: torch.Tensor | DSV4Rows, prefix: KVSource | None,
    extend: KVSource | None, options: Any,
) -> Result:  # fmt: skip
    """A call of the operation, by the plan of calls like it if it has none."""
    if not options.keys() <= OPERATIONS[operation].keywords:
        OPERATIONS[operation].check_keywords(options)
    given = SparseArguments(q, prefix, extend, **options)
    if plan is None:
        key, plan = known_plan(operation, given)
        if plan is None:
            plan = remember(key, plan_for(given, _mode(operation, given)))
    elif type(plan) is not SparsePlan or plan.mode not in _MODES[operation] or given.sm_scale is not None:
        _check_planned(plan, _MODES[operation], sm_scale=given.sm_scale)
    result = plan.call(given)
    return result[0] if given.lse is not None and not given.return_lse else result


def _mode(operation: str, given: SparseArguments) -> str:
    """How a call that was not planned reads its rows."""
    prefix, extend = given.prefix, given.extend
    if operation == "sparse_prefill":
        return "16bit"
    if operation == "sparse_decode":
        check_splits(given.num_splits)
        # Decoding never widens rows to scratch first.
        narrow = any(isinstance(s, KVSource) and isinstance(s.rows, DSV4Rows) for s in (prefix, extend))
        return "fused" if narrow else "16bit"
    if given.mode == "prepass":
        return "prepass"
    return choose_mode(given.q, prefix, extend, mode=given.mode, num_qo_heads=given.num_qo_heads).mode


def _check_planned(plan: SparsePlan, modes: tuple[str, ...], *, sm_scale: float | None) -> None:
    """Refuses a plan for another operation, and what the plan fixes."""
    if not isinstance(plan, SparsePlan):
        raise TypeError(f"plan must be a SparsePlan, got {type(plan).__name__}")
    if plan.mode not in modes:
        raise ValueError(f"plan must have mode {' or '.join(modes)} for this operation, got {plan.mode}")
    if sm_scale is not None:
        raise ValueError("sm_scale must be None with a plan: give it to plan_sparse")
