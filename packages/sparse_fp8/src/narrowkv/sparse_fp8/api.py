"""Public operations of sparse_fp8: check, choose, allocate, launch. No mathematics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from narrowkv.quant.device import BITS, widen_route, widening_exponent
from narrowkv.quant.errors import (
    UnsupportedError,
    check_choice,
    check_dtype,
    check_finite_float,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_positive_int,
    check_same_device,
    check_shape,
)
from narrowkv.quant.formats import get_format
from narrowkv.quant.launch import LaunchOptions, active_target, launch
from narrowkv.quant.targets import Target
from narrowkv.sparse_fp8.config import NUM_HEADS, SparseConfig, choose_config
from narrowkv.sparse_fp8.kernels.expand import _expand_kernel
from narrowkv.sparse_fp8.kernels.fused import _sparse_fused_kernel
from narrowkv.sparse_fp8.kernels.results import Output, Partials, _merge_kernel
from narrowkv.sparse_fp8.kernels.rows import Csr, RowPointers
from narrowkv.sparse_fp8.kernels.wide import _sparse_wide_kernel
from narrowkv.sparse_fp8.rows import HEAD_DIM, NOPE_DIM, ROPE_DIM, TOKEN_BYTES, DSV4Rows, KVSource

__all__ = ["ModeChoice", "choose_mode", "sparse_decode", "sparse_prefill", "sparse_prefill_fp8"]

MODES = ("auto", "fused", "prepass")
_LOG2E = math.log2(math.e)
_16_BIT = (torch.bfloat16, torch.float16)
_INT32_MAX = 2**31 - 1
_NO_ROWS = RowPointers(None, None, None, 0, 0, 0, 0)
_NO_CSR = Csr(None, None, 0)


@dataclass(frozen=True)
class ModeChoice:
    """What `mode="auto"` picks, and why.

    Attributes:
        mode: "fused" or "prepass".
        why: one sentence.
    """

    mode: str
    why: str


@dataclass(frozen=True)
class _Call:
    """A checked call."""

    q: torch.Tensor | DSV4Rows
    prefix: KVSource | None
    extend: KVSource | None
    num_tokens: int
    num_heads: int
    scale: float
    sink: torch.Tensor | None
    o: torch.Tensor
    lse: torch.Tensor | None
    target: Target

    @property
    def sources(self) -> list[KVSource]:
        return [source for source in (self.prefix, self.extend) if source is not None]

    @property
    def mean_rows(self) -> int:
        return sum(s.indices.shape[0] for s in self.sources) // max(self.num_tokens, 1)

    def rows_of(self, kind: type) -> list[KVSource]:
        return [source for source in self.sources if isinstance(source.rows, kind)]


def _check(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None,
    attn_sink: torch.Tensor | None,
    sm_scale: float | None,
    out: torch.Tensor | None,
    return_lse: bool,
    validate: bool,
) -> _Call:
    named = {"prefix": prefix, "extend": extend}
    for name, source in named.items():
        if source is not None and not isinstance(source, KVSource):
            raise TypeError(f"{name} must be a KVSource or None, got {type(source).__name__}")
    given = {name: source for name, source in named.items() if source is not None}
    if not given:
        raise ValueError("prefix or extend must be a KVSource, got None for both")
    tokens = next(iter(given.values())).num_tokens
    for name, source in given.items():
        if source.num_tokens != tokens:
            raise ValueError(
                f"{name}.indptr must have num_tokens + 1 = {tokens + 1} elements like prefix.indptr, "
                f"got {source.indptr.shape[0]}"
            )
    heads = _check_query(q, tokens, attn_sink)
    device = check_same_device(
        q=q if isinstance(q, torch.Tensor) else q.data,
        attn_sink=attn_sink,
        **{f"{name}.indices": source.indices for name, source in given.items()},
    )
    if attn_sink is not None:
        check_dtype("attn_sink", attn_sink, torch.float32)
        check_shape("attn_sink", attn_sink, (heads,))
        check_last_dim_contiguous("attn_sink", attn_sink)
    scale = HEAD_DIM**-0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    if validate:
        for name, source in given.items():
            source.check_values(name)
    tensors = {f"{name}.rows": s.rows for name, s in given.items() if isinstance(s.rows, torch.Tensor)}
    if isinstance(q, torch.Tensor):
        tensors["q"] = q
    check_no_grad(attn_sink=attn_sink, **tensors)
    if out is None:
        dtype = q.dtype if isinstance(q, torch.Tensor) else torch.bfloat16
        o = torch.empty(tokens, heads, HEAD_DIM, dtype=dtype, device=device)
    else:
        check_dtype("out", out, (*_16_BIT, torch.float32))
        check_shape("out", out, (tokens, heads, HEAD_DIM))
        check_same_device(q=q if isinstance(q, torch.Tensor) else q.data, out=out)
        check_last_dim_contiguous("out", out)
        check_no_grad(out=out)
        check_no_overlap("out", out, **tensors)
        o = out
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=device) if return_lse else None
    return _Call(q, prefix, extend, tokens, heads, scale, attn_sink, o, lse, active_target(device))


def _check_query(q: torch.Tensor | DSV4Rows, tokens: int, attn_sink: torch.Tensor | None) -> int:
    """The number of heads."""
    if isinstance(q, DSV4Rows):
        if tokens:
            heads = q.num_rows // tokens
        else:
            heads = attn_sink.shape[0] if attn_sink is not None and attn_sink.dim() == 1 else NUM_HEADS[0]
        if heads not in NUM_HEADS or (q.layout != "packed584" and heads * tokens != q.num_rows):
            raise ValueError(
                f"q must hold num_tokens * num_qo_heads rows, heads one of {NUM_HEADS}, for {tokens} tokens; "
                f"got {q.num_rows} rows"
            )
        return heads
    check_dtype("q", q, _16_BIT)
    check_shape("q", q, ("num_tokens", "num_qo_heads", HEAD_DIM))
    if q.shape[0] != tokens:
        raise ValueError(f"q must have {tokens} tokens like the sources' indptr, got {q.shape[0]}")
    if q.shape[1] not in NUM_HEADS:
        raise ValueError(f"q must have num_qo_heads in {NUM_HEADS}, got {q.shape[1]}")
    check_last_dim_contiguous("q", q)
    return q.shape[1]


def _result(call: _Call) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return call.o if call.lse is None else (call.o, call.lse)


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
    if isinstance(q, DSV4Rows):
        raise TypeError("q must be a torch.Tensor, got DSV4Rows: use sparse_prefill_fp8")
    call = _check(q, prefix, extend, attn_sink, sm_scale, out, return_lse, validate)
    _require_wide(call)
    _attend_wide(call, q, call.prefix, call.extend, None)
    return _result(call)


def _require_wide(call: _Call) -> None:
    assert isinstance(call.q, torch.Tensor)
    for name, source in (("prefix", call.prefix), ("extend", call.extend)):
        if source is None:
            continue
        if isinstance(source.rows, DSV4Rows):
            raise UnsupportedError(
                f"{name}.rows must be a bf16 or fp16 tensor here, got DSV4Rows: use sparse_prefill_fp8"
            )
        if source.rows.dtype != call.q.dtype:
            raise TypeError(f"{name}.rows must have the dtype of q, {call.q.dtype}, got {source.rows.dtype}")


def choose_mode(
    q: torch.Tensor | DSV4Rows, prefix: KVSource | None, extend: KVSource | None = None, *, mode: str = "auto"
) -> ModeChoice:
    """What `sparse_prefill_fp8` does with these arguments, and why.

    Args:
        q, prefix, extend: as for `sparse_prefill_fp8`; only metadata is looked at.
        mode: "auto", or a mode that is forced.

    Raises:
        TypeError, ValueError: for what `sparse_prefill_fp8` would refuse.

    Example:
        >>> import torch
        >>> rows = DSV4Rows.quantize(torch.zeros(4, 512))
        >>> one = torch.tensor([0, 1], dtype=torch.int32)
        >>> choose_mode(torch.zeros(1, 16, 512).bfloat16(), KVSource(rows, one, one[:1])).mode
        'fused'
    """
    check_choice("mode", mode, MODES)
    sources = [source for source in (prefix, extend) if source is not None]
    wide = any(isinstance(source.rows, torch.Tensor) for source in sources)
    if mode == "prepass":
        return ModeChoice(mode, "asked for")
    if mode == "fused":
        if wide:
            raise UnsupportedError(
                "mode='fused' needs DSV4Rows in every source; quantise the 16-bit one with "
                "DSV4Rows.quantize, or use mode='prepass', which takes both kinds"
            )
        return ModeChoice(mode, "asked for")
    if wide:
        return ModeChoice("prepass", "one source is 16-bit, which the fused kernel does not read")
    return ModeChoice("fused", "the fused kernel needs no scratch and gathers half the bytes")


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention over FP8 rows (`DSV4Rows`), fused or with a prepass.

    Args:
        q: `[num_tokens, num_qo_heads, 512]` bf16 or fp16, or `DSV4Rows` with `num_tokens * num_qo_heads` rows,
            tokens outermost, in the format of the sources.
        prefix, extend: as for `sparse_prefill`, with `DSV4Rows` of any layout. In mode "prepass" one of them
            may be 16-bit.
        attn_sink, sm_scale, out, return_lse, validate: as for `sparse_prefill`.
        mode: "fused" widens rows on the chip and allocates nothing but the results; QK over NoPE multiplies
            FP8 by FP8 when q is `DSV4Rows` and the target can, else 16-bit q by widened rows. "prepass"
            expands FP8 rows once to 16-bit scratch (all rows of a source, or only the named ones when those
            are fewer) and runs `sparse_prefill`. "auto" picks; `choose_mode` says what and why.

    Returns:
        As `sparse_prefill`; `o` is bf16 when q is `DSV4Rows`.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what came.
        UnsupportedError: the mode is forced and cannot serve the sources.

    Example:
        >>> import torch
        >>> q = torch.ones(1, 16, 512, dtype=torch.bfloat16)
        >>> pool = DSV4Rows.quantize(torch.arange(4.0)[:, None].expand(4, 512), layout="packed584", page_size=2)
        >>> int32 = dict(dtype=torch.int32)
        >>> source = KVSource(pool, torch.tensor([0, 2], **int32), torch.tensor([-1, 3], **int32))
        >>> sparse_prefill_fp8(q, source, mode="fused")[0, 0, 0].item()
        3.0
    """
    call = _check(q, prefix, extend, attn_sink, sm_scale, out, return_lse, validate)
    _check_formats(call)
    if choose_mode(q, prefix, extend, mode=mode).mode == "fused":
        _attend_fused(call, None)
    else:
        _attend_prepass(call, None)
    return _result(call)


def _check_formats(call: _Call) -> None:
    fp8 = call.rows_of(DSV4Rows)
    if not fp8:
        raise UnsupportedError(
            "prefix.rows or extend.rows must be DSV4Rows here, got 16-bit rows: use sparse_prefill"
        )
    formats = {source.rows.format for source in fp8 if isinstance(source.rows, DSV4Rows)}
    if isinstance(call.q, DSV4Rows):
        formats.add(call.q.format)
    if len(formats) > 1:
        raise UnsupportedError(f"q and all sources must have one FP8 format, got {', '.join(sorted(formats))}")
    dtype = _compute_dtype(call)
    for source in call.rows_of(torch.Tensor):
        assert isinstance(source.rows, torch.Tensor)
        if source.rows.dtype != dtype:
            raise TypeError(f"16-bit rows must have the dtype {dtype}, got {source.rows.dtype}")


def _compute_dtype(call: _Call) -> torch.dtype:
    return call.q.dtype if isinstance(call.q, torch.Tensor) else torch.bfloat16


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention of few tokens over many rows each: a token's rows are shared out over programs.

    Args:
        q: as for `sparse_prefill_fp8` over `DSV4Rows`, as for `sparse_prefill` over 16-bit rows.
        prefix, extend: both `DSV4Rows`, or both 16-bit in the dtype of q.
        attn_sink, sm_scale, out, return_lse, validate: as for `sparse_prefill`.
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
    call = _check(q, prefix, extend, attn_sink, sm_scale, out, return_lse, validate)
    if num_splits is not None:
        check_positive_int("num_splits", num_splits)
    if call.rows_of(DSV4Rows):
        _check_formats(call)
        choose_mode(q, prefix, extend, mode="fused")
        _attend_fused(call, num_splits)
    elif isinstance(q, DSV4Rows):
        raise UnsupportedError("q must be 16-bit over 16-bit rows, got DSV4Rows")
    else:
        _require_wide(call)
        _attend_wide(call, q, call.prefix, call.extend, num_splits)
    return _result(call)


def _wide_pointers(rows: torch.Tensor) -> RowPointers:
    return RowPointers(rows, None, None, rows.stride(0), 0, 0, rows.shape[0])


def _fp8_pointers(rows: DSV4Rows) -> RowPointers:
    data = rows.data.view(torch.uint8)
    if rows.layout == "packed584":
        # Pages are read at byte offsets as bytes and, for RoPE, at even ones as bf16.
        stride = data.stride(0) if data.shape[0] > 1 else rows.page_size * 584
        rope = data[:, : rows.page_size * TOKEN_BYTES].view(torch.bfloat16)
        return RowPointers(data, rope, data, stride, stride // 2, stride, rows.num_rows)
    assert rows.rope is not None
    if rows.layout == "row512":
        return RowPointers(data, rows.rope, data, data.stride(0), rows.rope.stride(0), data.stride(0), rows.num_rows)
    assert rows.scale is not None
    return RowPointers(
        data, rows.rope, rows.scale, data.stride(0), rows.rope.stride(0), rows.scale.stride(0), rows.num_rows
    )


def _needs_64_bit(rows: torch.Tensor | DSV4Rows) -> bool:
    data = rows if isinstance(rows, torch.Tensor) else rows.data
    return data.shape[0] * data.stride(0) > _INT32_MAX


def _csr(source: KVSource | None) -> Csr:
    return _NO_CSR if source is None else Csr(source.indptr, source.indices, source.indices.shape[0])


def _output(call: _Call) -> Output:
    stride_l = 0 if call.lse is None else call.lse.stride(0)
    return Output(call.o, call.lse, call.sink, call.o.stride(0), call.o.stride(1), stride_l)


def _partials(call: _Call, config: SparseConfig) -> Partials:
    if config.num_splits == 1:
        return Partials(None, None, None)
    shape = (config.num_splits, call.num_tokens, call.num_heads)
    device = call.o.device
    return Partials(
        torch.empty(*shape, HEAD_DIM, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def _run(
    call: _Call,
    config: SparseConfig,
    kernel: Any,
    query: tuple[Any, ...],
    query_strides: tuple[int, ...],
    sources: tuple[KVSource | None, KVSource | None],
    constexprs: dict[str, Any],
) -> None:
    """Launches an attention kernel, and the merge when the rows were split."""
    partials, out = _partials(call, config), _output(call)
    pointers = []
    for source in sources:
        if source is None:
            pointers += [_NO_ROWS, _NO_CSR]
        elif isinstance(source.rows, torch.Tensor):
            pointers += [_wide_pointers(source.rows), _csr(source)]
        else:
            pointers += [_fp8_pointers(source.rows), _csr(source)]
    split = config.num_splits > 1
    shared = {"HAS_SINK": call.sink is not None, "WRITE_LSE": call.lse is not None}
    launch(
        kernel,
        (call.num_tokens * -(-call.num_heads // config.block_h), config.num_splits),
        (*query, out, partials, *pointers, *query_strides, call.scale * _LOG2E, call.num_tokens, config.num_splits),
        {
            "NUM_HEADS": call.num_heads,
            "HAS_PREFIX": sources[0] is not None,
            "HAS_EXTEND": sources[1] is not None,
            "WIDE_PREFIX": sources[0] is not None and _needs_64_bit(sources[0].rows),
            "WIDE_EXTEND": sources[1] is not None and _needs_64_bit(sources[1].rows),
            **constexprs,
            **shared,
            "SPLIT": split,
            "BLOCK_H": config.block_h,
            "BLOCK_K": config.block_k,
        },
        config.options,
    )
    if split:
        launch(
            _merge_kernel,
            (call.num_tokens * call.num_heads,),
            (out, partials, call.num_tokens, config.num_splits),
            {"NUM_HEADS": call.num_heads, "BLOCK_S": 8, **shared},
            LaunchOptions(num_warps=1, num_stages=1),
        )


def _attend_wide(
    call: _Call, q: torch.Tensor, prefix: KVSource | None, extend: KVSource | None, num_splits: int | None
) -> None:
    config = choose_config(
        call.target,
        kernel="wide",
        num_tokens=call.num_tokens,
        num_heads=call.num_heads,
        mean_rows=call.mean_rows,
        num_splits=num_splits,
    )
    _run(call, config, _sparse_wide_kernel, (q,), (q.stride(0), q.stride(1)), (prefix, extend), {})


def _read_route(call: _Call) -> tuple[str, str]:
    """Format of the FP8 rows of a call, and how all of them are read."""
    fp8 = [s.rows for s in call.sources if isinstance(s.rows, DSV4Rows)]
    if isinstance(call.q, DSV4Rows):
        fp8.append(call.q)
    clean = all(rows.negative_zero_free for rows in fp8)
    return fp8[0].format, widen_route(call.target, fp8[0].format, negative_zero_free=clean)


def _attend_fused(call: _Call, num_splits: int | None) -> None:
    q = call.q
    fp8_q = isinstance(q, DSV4Rows)
    format_name, route = _read_route(call)
    groups = {s.rows.scale_group for s in call.sources if isinstance(s.rows, DSV4Rows)}
    if isinstance(q, DSV4Rows):
        groups.add(q.scale_group)
    fp8_qk = fp8_q and route != BITS and groups == {64}
    config = choose_config(
        call.target,
        kernel="fused",
        num_tokens=call.num_tokens,
        num_heads=call.num_heads,
        mean_rows=call.mean_rows,
        fp8_qk=fp8_qk,
        num_splits=num_splits,
    )
    if isinstance(q, DSV4Rows):
        query, stride_qh = _fp8_pointers(q), 0
        q_layout, q_page, q_group = q.layout, q.page_size, q.scale_group
    else:
        query = RowPointers(q, None, None, q.stride(0), 0, 0, q.shape[0])
        stride_qh, q_layout, q_page, q_group = q.stride(1), "", 1, 64

    def layout(name: str, source: KVSource | None) -> dict[str, Any]:
        rows = source.rows if source is not None and isinstance(source.rows, DSV4Rows) else None
        return {
            f"{name}_LAYOUT": "" if rows is None else rows.layout,
            f"{name}_PAGE_SIZE": 1 if rows is None else rows.page_size,
            f"{name}_GROUP": 64 if rows is None else rows.scale_group,
        }

    _run(
        call,
        config,
        _sparse_fused_kernel,
        (query,),
        (stride_qh,),
        (call.prefix, call.extend),
        {
            "Q_LAYOUT": q_layout,
            "Q_PAGE_SIZE": q_page,
            "Q_GROUP": q_group,
            "FP8_Q": fp8_q,
            **layout("PREFIX", call.prefix),
            **layout("EXTEND", call.extend),
            "FORMAT": format_name,
            "ROUTE": route,
            "EXPONENT": widening_exponent(format_name, route),
            "FP8_QK": fp8_qk,
        },
    )


def _attend_prepass(call: _Call, num_splits: int | None) -> None:
    dtype = _compute_dtype(call)
    q = call.q
    if isinstance(q, DSV4Rows):
        rows = call.num_tokens * call.num_heads
        q = _expand(q, None, rows, dtype, call.target).view(call.num_tokens, call.num_heads, HEAD_DIM)
    expanded = [
        source if source is None or isinstance(source.rows, torch.Tensor) else _expand_source(source, dtype, call.target)
        for source in (call.prefix, call.extend)
    ]
    _attend_wide(call, q, expanded[0], expanded[1], num_splits)


def _expand_source(source: KVSource, dtype: torch.dtype, target: Target) -> KVSource:
    """The source over 16-bit scratch: all its rows, or one row per index when there are fewer indices."""
    rows = source.rows
    assert isinstance(rows, DSV4Rows)
    nnz = source.indices.shape[0]
    if nnz >= rows.num_rows:
        return KVSource(_expand(rows, None, rows.num_rows, dtype, target), source.indptr, source.indices)
    scratch = _expand(rows, source.indices, nnz, dtype, target)
    live = (source.indices >= 0) & (source.indices < rows.num_rows)
    place = torch.arange(nnz, dtype=torch.int32, device=source.indices.device)
    return KVSource(scratch, source.indptr, torch.where(live, place, -1))


def _expand(
    rows: DSV4Rows, indices: torch.Tensor | None, num_out: int, dtype: torch.dtype, target: Target
) -> torch.Tensor:
    """FP8 rows as 16-bit `[num_out, 512]`: the first `num_out`, or those that `indices` name."""
    scratch = torch.empty(num_out, HEAD_DIM, dtype=dtype, device=rows.device)
    route = widen_route(target, rows.format, negative_zero_free=rows.negative_zero_free)
    block = 64 if target.name == "cpu" else 16
    launch(
        _expand_kernel,
        (-(-num_out // block),),
        (scratch, _fp8_pointers(rows), indices, num_out),
        {
            "GATHER": indices is not None,
            "LAYOUT": rows.layout,
            "PAGE_SIZE": rows.page_size,
            "GROUP": rows.scale_group,
            "WIDE_ADDRESS": _needs_64_bit(rows),
            "FORMAT": rows.format,
            "ROUTE": route,
            "EXPONENT": widening_exponent(rows.format, route),
            "BLOCK_R": block,
        },
        LaunchOptions(num_warps=4, num_stages=1),
    )
    return scratch
