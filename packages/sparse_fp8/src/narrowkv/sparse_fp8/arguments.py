"""A checked call: what the kernels may rely on, and its tensors as kernel arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowkv.quant.device import NATIVE, widen_route
from narrowkv.quant.errors import (
    UnsupportedError,
    check_dtype,
    check_finite_float,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_same_device,
    check_shape,
)
from narrowkv.quant.launch import active_target, is_compiled
from narrowkv.quant.targets import Target
from narrowkv.sparse_fp8.config import NUM_HEADS
from narrowkv.sparse_fp8.kernels.results import Output, Partials
from narrowkv.sparse_fp8.kernels.rows import Csr, RowPointers
from narrowkv.sparse_fp8.rows import HEAD_DIM, TOKEN_BYTES, DSV4Rows, query_heads
from narrowkv.sparse_fp8.sources import KVSource

_16_BIT = (torch.bfloat16, torch.float16)
_INT32_MAX = 2**31 - 1
NO_ROWS = RowPointers(None, None, None, 0, 0, 0, 0)
NO_CSR = Csr(None, None, 0)


def compute_dtype(q: torch.Tensor | DSV4Rows) -> torch.dtype:
    """The 16-bit type that rows are widened to: that of q; bf16 for q in FP8."""
    return q.dtype if isinstance(q, torch.Tensor) else torch.bfloat16


@dataclass(frozen=True)
class SparseCall:
    """A checked call and where its results go."""

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
    def named_sources(self) -> dict[str, KVSource]:
        """The sources that are there, by the argument's name."""
        named = {"prefix": self.prefix, "extend": self.extend}
        return {name: source for name, source in named.items() if source is not None}

    @property
    def fp8_rows(self) -> list[DSV4Rows]:
        """The FP8 rows of the sources."""
        return [s.rows for s in self.named_sources.values() if isinstance(s.rows, DSV4Rows)]

    @property
    def mean_rows(self) -> int:
        """Indices of a token on average, those that are skipped included."""
        return sum(source.indices.shape[0] for source in self.named_sources.values()) // max(
            self.num_tokens, 1
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        """`compute_dtype` of q."""
        return compute_dtype(self.q)

    @property
    def result(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """What the operation returns."""
        return self.o if self.lse is None else (self.o, self.lse)


def check_call(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None,
    attn_sink: torch.Tensor | None,
    sm_scale: float | None,
    out: torch.Tensor | None,
    return_lse: bool,
    validate: bool,
    num_qo_heads: int | None = None,
) -> SparseCall:
    """Checks what all operations ask of their arguments, and allocates the results.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    given = _check_sources(prefix, extend)
    tokens = next(iter(given.values())).num_tokens
    heads = _check_query(q, tokens, num_qo_heads)
    data = q if isinstance(q, torch.Tensor) else q.data
    device = check_same_device(
        q=data, attn_sink=attn_sink, **{f"{name}.indices": source.indices for name, source in given.items()}
    )
    if attn_sink is not None:
        check_dtype("attn_sink", attn_sink, torch.float32)
        check_shape("attn_sink", attn_sink, (heads,))
        check_last_dim_contiguous("attn_sink", attn_sink)
    scale = HEAD_DIM**-0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    if validate:
        for name, source in given.items():
            source.check_values(name)
    inputs = {
        f"{name}.rows": s.rows if isinstance(s.rows, torch.Tensor) else s.rows.data
        for name, s in given.items()
    }
    inputs["q"] = data
    check_no_grad(attn_sink=attn_sink, **inputs)
    if out is None:
        out = torch.empty(tokens, heads, HEAD_DIM, dtype=compute_dtype(q), device=device)
    else:
        check_dtype("out", out, (*_16_BIT, torch.float32))
        check_shape("out", out, (tokens, heads, HEAD_DIM))
        check_same_device(q=data, out=out)
        check_last_dim_contiguous("out", out)
        check_no_grad(out=out)
        check_no_overlap("out", out, **inputs)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=device) if return_lse else None
    return SparseCall(q, prefix, extend, tokens, heads, scale, attn_sink, out, lse, active_target(device))


def _check_sources(prefix: KVSource | None, extend: KVSource | None) -> dict[str, KVSource]:
    named = {"prefix": prefix, "extend": extend}
    for name, source in named.items():
        if source is not None and not isinstance(source, KVSource):
            raise TypeError(f"{name} must be a KVSource or None, got {type(source).__name__}")
    given = {name: source for name, source in named.items() if source is not None}
    if not given:
        raise ValueError("prefix or extend must be a KVSource, got None for both")
    if prefix is not None and extend is not None and extend.num_tokens != prefix.num_tokens:
        raise ValueError(
            f"extend.indptr must have {prefix.indptr.shape[0]} elements like prefix.indptr, "
            f"got {extend.indptr.shape[0]}"
        )
    return given


def _check_query(q: torch.Tensor | DSV4Rows, tokens: int, num_qo_heads: int | None) -> int:
    """The number of heads."""
    if isinstance(q, DSV4Rows):
        heads = query_heads(q, tokens, num_qo_heads)
        # Pages are whole: the last may hold rows that are no head's, where the number of heads is given.
        spare = q.num_rows - heads * tokens
        if heads not in NUM_HEADS or not 0 <= spare < (1 if num_qo_heads is None else q.page_size):
            raise ValueError(
                f"q must hold num_tokens * num_qo_heads rows, num_qo_heads one of {NUM_HEADS}, for {tokens} "
                f"tokens; got {q.num_rows} rows and num_qo_heads={num_qo_heads}"
            )
        return heads
    check_dtype("q", q, _16_BIT)
    check_shape("q", q, ("num_tokens", "num_qo_heads", HEAD_DIM))
    if q.shape[0] != tokens:
        raise ValueError(f"q must have {tokens} tokens like the sources' indptr, got {q.shape[0]}")
    if q.shape[1] not in NUM_HEADS:
        raise ValueError(f"q must have num_qo_heads in {NUM_HEADS}, got {q.shape[1]}")
    if num_qo_heads not in (None, q.shape[1]):
        raise ValueError(f"num_qo_heads must be {q.shape[1]} as q has it, got {num_qo_heads}")
    check_last_dim_contiguous("q", q)
    return q.shape[1]


def check_16_bit(call: SparseCall) -> torch.Tensor:
    """Refuses what is not 16-bit rows and a q of their dtype; returns q."""
    if isinstance(call.q, DSV4Rows):
        raise TypeError("q must be a bf16 or fp16 tensor over 16-bit rows, got DSV4Rows")
    for name, source in call.named_sources.items():
        if isinstance(source.rows, DSV4Rows):
            raise UnsupportedError(
                f"{name}.rows must be a bf16 or fp16 tensor here, got DSV4Rows: use sparse_prefill_fp8"
            )
        if source.rows.dtype != call.compute_dtype:
            raise TypeError(
                f"{name}.rows must have the dtype of q, {call.compute_dtype}, got {source.rows.dtype}"
            )
    return call.q


def check_fp8(call: SparseCall) -> None:
    """Refuses a call without FP8 rows, in two FP8 formats, or with 16-bit rows of another type than q."""
    formats = {rows.format for rows in call.fp8_rows}
    if not formats:
        raise UnsupportedError(
            "prefix.rows or extend.rows must be DSV4Rows here, got 16-bit rows: use sparse_prefill"
        )
    if isinstance(call.q, DSV4Rows):
        formats.add(call.q.format)
    if len(formats) > 1:
        raise UnsupportedError(
            f"q and all sources must have one FP8 format, got {', '.join(sorted(formats))}"
        )
    for name, source in call.named_sources.items():
        if isinstance(source.rows, torch.Tensor) and source.rows.dtype != call.compute_dtype:
            raise TypeError(
                f"{name}.rows must be DSV4Rows or have the dtype {call.compute_dtype}, "
                f"got {source.rows.dtype}"
            )


def row_pointers(rows: torch.Tensor | DSV4Rows) -> RowPointers:
    """Rows of any kind as the kernels read them; layout split has its scales as int32 words."""
    if isinstance(rows, torch.Tensor):
        return RowPointers(rows, None, None, rows.stride(0), 0, 0, rows.shape[0])
    data = rows.data.view(torch.uint8)
    if rows.layout == "packed584":
        stride = data.stride(0)
        rope = data[:, : rows.page_size * TOKEN_BYTES].view(torch.bfloat16)
        return RowPointers(data, rope, data, stride, stride // 2, stride, rows.num_rows)
    assert rows.rope is not None
    scale = data if rows.layout == "row512" else rows.scale
    assert scale is not None
    if rows.layout == "split":
        scale = scale.view(torch.int32)
    strides = (data.stride(0), rows.rope.stride(0), scale.stride(0))
    return RowPointers(data, rows.rope, scale, *strides, rows.num_rows)


def csr_pointers(source: KVSource) -> Csr:
    """A source's index lists."""
    return Csr(source.indptr, source.indices, source.indices.shape[0])


def needs_64_bit(rows: torch.Tensor | DSV4Rows) -> bool:
    """Whether an offset into the rows, or into RoPE or scales that lie apart, can pass 31 bits."""
    parts = [rows] if isinstance(rows, torch.Tensor) else [rows.data, rows.rope, rows.scale]
    return any(part.shape[0] * part.stride(0) > _INT32_MAX for part in parts if part is not None)


def heads_need_64_bit(*tensors: torch.Tensor | DSV4Rows) -> bool:
    """Whether an offset from a token's first head to its last, in q or the results, can pass 31 bits."""
    return any(isinstance(x, torch.Tensor) and x.shape[1] * x.stride(1) > _INT32_MAX for x in tensors)


def output_pointers(call: SparseCall) -> Output:
    """Where results go."""
    stride_l = 0 if call.lse is None else call.lse.stride(0)
    return Output(call.o, call.lse, call.sink, call.o.stride(0), call.o.stride(1), stride_l)


def allocate_partials(call: SparseCall, num_splits: int) -> Partials:
    """Room for the partial results of splits; none for one split."""
    if num_splits == 1:
        return Partials(None, None, None)
    shape = (num_splits, call.num_tokens, call.num_heads)
    device = call.o.device
    return Partials(
        torch.empty(*shape, HEAD_DIM, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def fused_suits_hopper(
    q: torch.Tensor | DSV4Rows, prefix: KVSource | None, extend: KVSource | None, target: Target
) -> bool:
    """Whether a kernel for Hopper can read a fused call: FP8 rows, and query, that sm90 converts itself."""
    fp8 = [source.rows for source in (prefix, extend) if source is not None]
    fp8 += [q] if isinstance(q, DSV4Rows) else []
    return (
        is_compiled(q.data if isinstance(q, DSV4Rows) else q)
        and all(
            isinstance(rows, DSV4Rows)
            and widen_route(target, rows.format, negative_zero_free=rows.negative_zero_free) == NATIVE
            for rows in fp8
        )
        and suits_hopper(q, prefix, extend)
    )


def suits_hopper(q: torch.Tensor | DSV4Rows, prefix: KVSource | None, extend: KVSource | None) -> bool:
    """Whether the kernel for Hopper can read the call.

    It copies 16 bytes at once, from rows that begin at multiples of 16 elements, finds heads by 31-bit
    offsets, and reads both sources one way. FP8 rows it widens to bf16, by a scale for 64 columns; a query
    in FP8 is widened first, whatever its layout.
    """
    rows = [source.rows for source in (prefix, extend) if source is not None]
    tensors, strides = [], []
    if isinstance(q, torch.Tensor):
        tensors, strides = [q], [q.stride(0), q.stride(1)]
    for x in rows:
        pointers = row_pointers(x)
        tensors += [pointers.nope, *([] if pointers.rope is None else [pointers.rope])]
        strides += [pointers.stride_n, pointers.stride_r]
    if any(x.data_ptr() % 16 for x in tensors) or any(x % 16 for x in strides) or heads_need_64_bit(q):
        return False
    fp8 = [x for x in rows if isinstance(x, DSV4Rows)]
    if not fp8:
        return True
    alike = len(fp8) == len(rows) and len({x.layout for x in fp8}) == 1
    return alike and compute_dtype(q) == torch.bfloat16 and all(x.scale_group == 64 for x in fp8)
