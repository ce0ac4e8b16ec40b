"""Public operations of sparse_fp8: check, choose, launch. No mathematics."""

from __future__ import annotations

import torch

from narrowkv.quant.errors import check_positive_int
from narrowkv.sparse_fp8.arguments import check_16_bit, check_call, check_fp8
from narrowkv.sparse_fp8.attend import attend_fused, attend_prepass, attend_wide
from narrowkv.sparse_fp8.modes import check_fused, choose_mode
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource

__all__ = ["sparse_decode", "sparse_prefill", "sparse_prefill_fp8"]


def sparse_prefill(
    q: torch.Tensor,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    *,
    attn_sink: torch.Tensor | None = None,
    sm_scale: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    validate: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention over 16-bit rows: each token attends to the rows that its index lists name.

    V is K, all 512 columns, shared by all heads; both sources go through one softmax.

    Args:
        q: `[num_tokens, num_qo_heads, 512]`, bf16 or fp16, last dimension contiguous; heads 8, 16, 32, 64
            or 128.
        prefix: rows of a page-size-1 pool, in the dtype of q; None if there are none.
        extend: rows of this forward's own KV; None if there are none.
        attn_sink: `[num_qo_heads]` fp32, a logit with value 0 in the denominator; -inf for none.
        sm_scale: softmax scale, default `512 ** -0.5`.
        out: where to write, `[num_tokens, num_qo_heads, 512]`, bf16, fp16 or fp32.
        return_lse: also return the log-sum-exp.
        validate: also read the index lists on the host and refuse values out of range; otherwise those are
            skipped.

    Returns:
        `o`, or `(o, lse)`; `lse` is `[num_tokens, num_qo_heads]` fp32, natural log of the scaled logits' sum
        **without the sink**. A row without indices has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what came.

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
    call = check_call(q, prefix, extend, attn_sink, sm_scale, out, return_lse, validate)
    attend_wide(call, check_16_bit(call), call.prefix, call.extend, num_splits=None)
    return call.result


def sparse_prefill_fp8(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    *,
    attn_sink: torch.Tensor | None = None,
    sm_scale: float | None = None,
    mode: str = "auto",
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    validate: bool = False,
    num_qo_heads: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention over FP8 rows (`DSV4Rows`), fused or with a prepass.

    Args:
        q: `[num_tokens, num_qo_heads, 512]` bf16 or fp16, or `DSV4Rows` with `num_tokens * num_qo_heads`
            rows, tokens outermost, in the format of the sources.
        prefix, extend: as for `sparse_prefill`, with `DSV4Rows` of any layout. In mode "prepass" one of them
            may be 16-bit.
        attn_sink, sm_scale, out, return_lse, validate: as for `sparse_prefill`.
        mode: "fused" widens rows on the chip and allocates nothing but the results; QK over NoPE multiplies
            FP8 by FP8 when q is `DSV4Rows` and the target can, else 16-bit q by widened rows; a call that
            fills a Hopper GPU expands such a q to bf16 first, which is exact and faster. "prepass" expands
            FP8 rows once to 16-bit scratch (all rows of a source, or only the named ones when those are
            fewer) and runs `sparse_prefill`. "auto" picks; `choose_mode` says what and why.
        num_qo_heads: heads of a `DSV4Rows` query. None takes its rows over the tokens; it must be given where
            the last packed584 page of the query is not full.

    Returns:
        As `sparse_prefill`; `o` is bf16 when q is `DSV4Rows`.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what came.
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
    call = check_call(q, prefix, extend, attn_sink, sm_scale, out, return_lse, validate, num_qo_heads)
    check_fp8(call)
    if choose_mode(q, prefix, extend, mode=mode, num_qo_heads=num_qo_heads).mode == "fused":
        attend_fused(call, num_splits=None)
    else:
        attend_prepass(call, num_splits=None)
    return call.result


def sparse_decode(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    *,
    attn_sink: torch.Tensor | None = None,
    sm_scale: float | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    validate: bool = False,
    num_qo_heads: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention of few tokens over many rows each: a token's rows are shared out over programs.

    Args:
        q: as for `sparse_prefill_fp8` over `DSV4Rows`, as for `sparse_prefill` over 16-bit rows.
        prefix, extend: both `DSV4Rows`, or both 16-bit in the dtype of q.
        attn_sink, sm_scale, out, return_lse, validate: as for `sparse_prefill`.
        num_qo_heads: as for `sparse_prefill_fp8`.
        num_splits: programs a token's rows are shared by; None fills the chip. Splits take whole tiles in
            order, so a given number gives the same bits whatever else is in the batch.

    Returns:
        As `sparse_prefill_fp8`.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what came.

    Source: split-KV decode after Flash-Decoding (Dao et al., 2023).

    Example:
        >>> import torch
        >>> pool = DSV4Rows.quantize(torch.arange(4.0)[:, None].expand(4, 512))
        >>> int32 = dict(dtype=torch.int32)
        >>> source = KVSource(pool, torch.tensor([0, 2], **int32), torch.tensor([3, 3], **int32))
        >>> sparse_decode(torch.ones(1, 16, 512).bfloat16(), source, num_splits=2)[0, 0, 0].item()
        3.0
    """
    call = check_call(q, prefix, extend, attn_sink, sm_scale, out, return_lse, validate, num_qo_heads)
    if num_splits is not None:
        check_positive_int("num_splits", num_splits)
    if call.fp8_rows:
        check_fp8(call)
        check_fused(prefix, extend)
        attend_fused(call, num_splits=num_splits)
    else:
        attend_wide(call, check_16_bit(call), call.prefix, call.extend, num_splits=num_splits)
    return call.result
