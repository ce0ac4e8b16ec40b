"""Dense decode over latent rows (multi-head latent attention), by the kernels of sparse decode."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from narrowkv.paged_cache import PageTable
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_finite_float,
    check_instance,
    check_last_dim_contiguous,
    check_positive_int,
    check_same_device,
    check_tensor,
)
from narrowkv.runtime.launch import active_target, executor, is_compiled
from narrowkv.runtime.launch.tracing import traceable
from narrowkv.runtime.operation import Bounded
from narrowkv.sparse_fp8.binding import INT32_MAX, QUERY_FORMATS, RowsFormat
from narrowkv.sparse_fp8.config import MOST_HEADS, check_heads, check_splits
from narrowkv.sparse_fp8.kernels.rows import PagedForm
from narrowkv.sparse_fp8.layouts import HEAD_DIM
from narrowkv.sparse_fp8.operation import Result, SparsePlan
from narrowkv.sparse_fp8.options import LATENT_PLAIN_VALUES, LatentArguments
from narrowkv.sparse_fp8.planner import make_plan
from narrowkv.sparse_fp8.reference import sparse_decode_reference
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource, PagedSource

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.sparse_fp8.options import LatentOptions

__all__ = ["latent_decode", "latent_decode_reference", "plan_latent"]

MOST_QUERIES = 8


def plan_latent(
    *,
    num_qo_heads: int,
    rows: RowsFormat,
    page_size: int,
    q_len: int = 1,
    ragged: bool = False,
    query: str = "bf16",
    device: torch.device | str,
    sm_scale: float | None = None,
    has_sinks: bool = False,
    return_lse: bool = False,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    max_batch: int | None = None,
    max_seq_len: int | None = None,
) -> SparsePlan:
    """Plans `latent_decode` from formats and a device, before there are tensors.

    Args:
        num_qo_heads: query heads, 1 to 128.
        rows: how the rows are stored: `DSV4Rows.bound.format`, or `RowsFormat("bf16", columns=576)`.
        page_size: of the page table.
        q_len: query tokens of a sequence, 1 to 8.
        ragged: whether the page table is one of `PageTable.from_ragged`.
        query: "bf16" or "fp16".
        device: where all tensors lie.
        sm_scale: softmax scale, default `head_dim ** -0.5`.
        has_sinks: whether calls have `sinks`.
        return_lse: whether calls write the log-sum-exp.
        num_splits, batch_invariant: as for `latent_decode`.
        max_batch: the largest call, in sequences, which the plan's workspace is for; plans that never run at
            the same time may share one by `plan.with_workspace`. Without it a call allocates partial results.
        max_seq_len: rows of the longest sequence, which the number of splits is chosen for; None takes what
            the page table has room for. Longer sequences are right, and slower.

    Returns:
        A plan for `latent_decode(plan=)`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.

    Example:
        >>> rows = RowsFormat("record656", page_size=64, scale_group=128, format="fp8_e4m3fn")
        >>> plan = plan_latent(num_qo_heads=12, rows=rows, page_size=64, device="cpu", max_batch=4)
        >>> plan.workspace_bytes() <= plan.workspace.num_bytes
        True
    """
    check_heads(num_qo_heads)
    if check_positive_int("q_len", q_len) > MOST_QUERIES:
        raise ValueError(f"q_len must be at most {MOST_QUERIES}, got {q_len}")
    check_instance("rows", rows, RowsFormat)
    check_positive_int("page_size", page_size)
    check_choice("query", query, ("bf16", "fp16"))
    for name, most in (("max_batch", max_batch), ("max_seq_len", max_seq_len)):
        if most is not None:
            check_positive_int(name, most)
    if not rows.is_quantized and rows.layout != query:
        raise ValueError(f"query must be {rows.layout} over rows in {rows.layout}, got {query}")
    place = torch.empty(0, device=device).device  # with the index of the current GPU
    plan = _plan(
        PagedForm(page_size, ragged, q_len, num_qo_heads), rows, query, place,
        is_compiled(torch.empty(0, device=place)), sm_scale, has_sinks, return_lse, num_splits,
        batch_invariant,
    )  # fmt: skip
    if max_seq_len is not None:
        plan = replace(plan, max_seq_len=max_seq_len)
    if max_batch is None:
        return plan
    return replace(plan, max_num_tokens=max_batch, max_indices=INT32_MAX).with_workspace()


def _plan(
    pages: PagedForm, rows: RowsFormat, query: str, device: torch.device, compiled: bool,
    sm_scale: float | None, has_sinks: bool, writes_lse: bool, num_splits: int | None, batch_invariant: bool,
) -> SparsePlan:  # fmt: skip
    check_splits(num_splits)
    scale = rows.head_dim**-0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    return make_plan(
        mode="fused" if rows.is_quantized else "16bit", target=active_target(device), compiled=compiled,
        device=device, num_qo_heads=pages.Q_LEN * pages.HEADS, query=QUERY_FORMATS[query, rows.head_dim],
        prefix=rows, extend=None, sm_scale=scale, has_sink=has_sinks, writes_lse=writes_lse,
        num_splits=num_splits, batch_invariant=batch_invariant, pages=pages,
    )  # fmt: skip


def _query_len(q: torch.Tensor, source: PagedSource) -> int:
    """Query tokens of a sequence of a query that fits the rows.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
    """
    check_dtype("q", q, (torch.bfloat16, torch.float16))
    columns = source.format.head_dim
    if q.dim() != 3 or q.shape[2] != columns:
        wanted = f"[batch * q_len, num_qo_heads, {columns}]"
        raise ValueError(f"q must have shape {wanted} like the rows' columns, got {list(q.shape)}")
    if not source.format.is_quantized and q.dtype != source.format.dtype:
        raise TypeError(f"q must have the dtype of rows, {source.format.dtype}, got {q.dtype}")
    check_last_dim_contiguous("q", q)
    check_same_device(q=q, page_table=source.table.page_ids)
    tokens, heads, _ = q.shape
    batch = source.num_tokens
    if (batch == 0 and tokens) or (batch and (tokens % batch or tokens == 0)):
        raise ValueError(f"q must have batch * q_len rows for batch {batch}, got {tokens}")
    if not 1 <= heads <= MOST_HEADS:
        raise ValueError(f"q must have 1 to {MOST_HEADS} heads, got {heads}")
    q_len = tokens // batch if batch else 1
    if q_len > MOST_QUERIES:
        raise ValueError(f"q must have at most {MOST_QUERIES} query tokens a sequence, got {q_len}")
    return q_len


def _joined(name: str, x: torch.Tensor, q_len: int) -> torch.Tensor:
    """`[batch * q_len, heads, ...]` as `[batch, q_len * heads, ...]`, without a copy.

    Raises:
        ValueError: its strides do not allow that.
    """
    if q_len == 1:
        return x
    tokens, heads, *rest = x.shape
    if heads > 1 and x.stride(0) != heads * x.stride(1):
        raise ValueError(
            f"{name} must have a stride between tokens of heads times that between heads, "
            f"{heads * x.stride(1)}, where q_len is above 1, got {x.stride(0)}: pass {name}.contiguous()"
        )
    step = x.stride(1) if heads > 1 else x.stride(0)
    shape = (tokens // q_len, q_len * heads, *rest)
    return x.as_strided(shape, (q_len * x.stride(0), step, *x.stride()[2:]))


_known: Bounded[SparsePlan] = Bounded(1024)


@traceable
def latent_decode(
    q: torch.Tensor,
    rows: torch.Tensor | DSV4Rows,
    page_table: PageTable,
    *,
    plan: SparsePlan | None = None,
    **options: Unpack[LatentOptions],
) -> Result:
    """Attention of each sequence's newest tokens over its paged latent rows, which already hold theirs.

    Multi-head latent attention (MLA) with the up-projections absorbed into q and the output: all heads share
    one row a token, K is the whole row and V its first 512 columns.

    Args:
        q: `[batch * q_len, num_qo_heads, head_dim]`, bf16 or fp16, last dimension contiguous; head_dim is
            576, or 512 for rows without RoPE columns; 1 to 128 heads. With q_len from 2 to 8 (speculative
            tokens) row i of a sequence stands at position `seq_len - q_len + i` and attends to rows up to
            itself, and the heads of all tokens must have one stride.
        rows: 16-bit `[num_pages, page_size, head_dim]` or `[num_rows, head_dim]` in the dtype of q, or
            `DSV4Rows` of any layout: "tensor576" and "tensor512" have one FP8 scale, "record656" is V3.2's
            row, "packed584" V4's.
        page_table: which pages each sequence occupies, and its length; its pages have the size of those of
            rows, or 1.
        plan: from `plan_latent`, which then fixes `sm_scale`, the splits and whether there is a log-sum-exp.
        **options: `sm_scale`, `sinks`, `num_splits`, `batch_invariant`, `out`, `lse`, `return_lse` and
            `validate`; see `LatentOptions`.

    Returns:
        `o`, or `(o, lse)`; `lse` is fp32, natural log of the scaled logits' sum **without the sink**, so that
        partial results merge. A row that attends to nothing has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what was given.

    Source: absorbed MLA (DeepSeek-V2, 2024); split-KV decode after Flash-Decoding (Dao et al., 2023).

    Example:
        >>> rows = torch.arange(4.0).bfloat16()[:, None, None].expand(4, 1, 576).contiguous()
        >>> int32 = dict(dtype=torch.int32)
        >>> block_table, lens = torch.tensor([[3, 3]], **int32), torch.tensor([2], **int32)
        >>> table = PageTable.from_block_table(block_table, lens, page_size=1)
        >>> latent_decode(torch.ones(1, 12, 576).bfloat16(), rows, table)[0, 11, 0].item()
        3.0
    """
    given = LatentArguments(q, rows, page_table, **options)
    sinks, out, lse, return_lse = given.sinks, given.out, given.lse, given.return_lse
    check_tensor("q", q)
    source = PagedSource(rows, page_table)
    q_len = _query_len(q, source)
    pages = source.pages._replace(Q_LEN=q_len, HEADS=q.shape[1])
    if plan is None:
        writes = return_lse or lse is not None
        running = executor()
        target = None if running is None else running.target.name
        options_key = (given[LATENT_PLAIN_VALUES], type(given.num_splits), sinks is None, writes)
        key = (pages, q.dtype, q.device, source.format, target, *options_key)
        plan = _known.find(key)
        if plan is None:
            query = "fp16" if q.dtype == torch.float16 else "bf16"
            plan = _plan(
                pages, source.format, query, q.device, is_compiled(q), given.sm_scale, sinks is not None,
                writes, given.num_splits, given.batch_invariant,
            )  # fmt: skip
            _known.keep(key, plan)
    else:
        _check_planned(plan, pages, given.sm_scale)
    result = plan.run(
        _joined("q", q, q_len), source, attn_sink=sinks, validate=given.validate,
        out=None if out is None else _joined("out", _checked("out", out, q), q_len),
        lse=None if lse is None else _joined("lse", _checked("lse", lse, q), q_len),
    )  # fmt: skip
    o, sums = result if isinstance(result, tuple) else (result, None)
    o = o.view(*q.shape[:2], HEAD_DIM) if out is None else out
    if sums is None or (lse is not None and not return_lse):
        return o
    return o, (sums.view(q.shape[:2]) if lse is None else lse)


def _checked(name: str, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """An output of the shape of a query's results."""
    wanted = q.shape[:2] if name == "lse" else (*q.shape[:2], HEAD_DIM)
    if check_tensor(name, x).shape != wanted:
        raise ValueError(f"{name} must have shape {list(wanted)}, got {list(x.shape)}")
    return x


def _check_planned(plan: SparsePlan, pages: PagedForm, sm_scale: float | None) -> None:
    """Refuses a plan for other calls, and what the plan fixes."""
    check_instance("plan", plan, SparsePlan)
    if plan.pages is None:
        raise ValueError("plan must be one of plan_latent, got one of plan_sparse")
    if plan.pages != pages:
        given, planned = (
            f"q_len={one.Q_LEN}, num_qo_heads={one.HEADS}, page_size={one.PAGE_SIZE}, ragged={one.RAGGED}"
            for one in (pages, plan.pages)
        )
        raise ValueError(f"plan must be for this call, {given}; got one for {planned}")
    if sm_scale is not None:
        raise ValueError("sm_scale must be None with a plan: give it to plan_latent")


def latent_decode_reference(
    q: torch.Tensor,
    rows: torch.Tensor | DSV4Rows,
    page_table: PageTable,
    **options: Unpack[LatentOptions],
) -> Result:
    """`latent_decode` in float32 on the dequantised rows, token by token; same arguments.

    The result is float32 unless `out` says otherwise. The page table is read on the host.
    """
    q_len = q.shape[0] // max(page_table.batch_size, 1)
    lists: list[Any] = []
    for seq in range(page_table.batch_size):
        ids, length = page_table.pages_of(seq)
        slots = torch.arange(page_table.page_size, device=ids.device)
        own = (ids[:, None] * page_table.page_size + slots).flatten()[:length]
        lists += [own[: max(length - q_len + 1 + i, 0)] for i in range(q_len)]
    lens = torch.tensor([0, *(len(one) for one in lists)])
    indices = torch.cat(lists) if lists else torch.zeros(0, dtype=torch.int64, device=q.device)
    if isinstance(rows, torch.Tensor):
        rows = rows.reshape(-1, rows.shape[-1])
    source = KVSource(rows, lens.cumsum(0).to(q.device), indices.to(q.device))
    given = LatentArguments(q, rows, page_table, **options)
    return sparse_decode_reference(
        q, source, attn_sink=given.sinks, sm_scale=given.sm_scale, out=given.out, return_lse=given.return_lse
    )
