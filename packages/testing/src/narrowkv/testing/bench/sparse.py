"""The bench of sparse attention: 16-bit rows, the prepass and the fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from narrowkv.quant.accuracy import compare
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    sparse_prefill,
    sparse_prefill_fp8,
    sparse_prefill_reference,
)
from narrowkv.testing.bench.measure import Bench, Call, Columns, ModelCall, keeping_last, ratio_of
from narrowkv.testing.bench.timing import GraphTimer
from narrowkv.testing.cases.sparse import BOUND_16_BIT_QUERY, BOUND_FP8_QK, SparseCase
from narrowkv.testing.model import ModelExecutor, Scale
from narrowkv.testing.operations import SparseRows

HEAD_DIM = 512
_PAGE_SIZE = 64
_CHECKED_TOKENS = 4
_TRACED_TOKENS = 320  # by the model: so many that none is split
_TRACED_ROWS = 512
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"mode": "16bit", "layout": "bf16"}, "prepass": {"mode": "prepass"}, "fused": {},
    "fused-fp8q": {"q": "fp8"},
}  # fmt: skip


@dataclass(frozen=True)
class SparseSizes:
    """`tokens` queries, each of which attends with `heads` heads to `topk` of `pool` rows."""

    tokens: int
    heads: int
    topk: int
    pool: int

    @property
    def flops(self) -> float:
        """Multiplications and additions of QK and PV."""
        return 4.0 * self.tokens * self.heads * self.topk * HEAD_DIM

    def bytes_touched(self, row_bytes: float) -> float:
        """Rows, indices, and q and o in bf16, each byte once."""
        rows = min(self.pool, self.tokens * self.topk) * row_bytes
        return rows + 2 * 2 * self.tokens * self.heads * HEAD_DIM + 4 * self.tokens * (self.topk + 1)


class Pool:
    """Rows on a device, in FP8 and as the same numbers in bf16."""

    def __init__(self, rows: int, device: str) -> None:
        self.random = torch.Generator(device).manual_seed(0)
        x = torch.randn(rows, HEAD_DIM, generator=self.random, device=device)
        self.fp8 = DSV4Rows.quantize(x, layout="packed584", page_size=_PAGE_SIZE)
        self.bf16 = self.fp8.dequantize()[:rows].bfloat16()
        self.rows = rows


def sparse_bench(modes: Sequence[str], device: str = "cuda") -> Bench[SparseSizes]:
    """Sparse prefill in each mode.

    Further figures: `scratch_bytes`, the largest memory that a call allocates besides its output, and
    `ratio_to_bf16`, the time over that of mode "bf16".

    Args:
        modes: of "bf16", "prepass", "fused" and "fused-fp8q" (queries in FP8).
        device: of the tensors.
    """
    pools = keeping_last(partial(Pool, device=device), lambda rows: rows)
    columns = Columns(
        {"mode": "mode"},
        {"tokens": "tokens", "heads": "heads", "top-k": "topk"},
        ("mode", "heads"),
        {
            "x bf16": ratio_of("ratio_to_bf16"),
            "scratch MB": lambda row: (
                "-" if row["scratch_bytes"] is None else f"{row['scratch_bytes'] / 1e6:.1f}"
            ),
        },
    )
    return Bench(
        name="sparse",
        columns=columns,
        calls=lambda shape: (_call(shape, mode, pools(shape.pool), device) for mode in modes),
        # Some tokens and rows of each mode.
        modelled=lambda shape: [
            ModelCall(mode, shape, shape.flops, 0.5, partial(_trace, shape, mode)) for mode in modes
        ],
        ratio="ratio_to_bf16",
        is_baseline=lambda row: row.labels["mode"] == "bf16",
    )


def _call(shape: SparseSizes, mode: str, pool: Pool, device: str) -> Call:
    size = (shape.tokens, shape.heads, HEAD_DIM)
    q = torch.randn(size, generator=pool.random, device=device).bfloat16()
    nnz = shape.tokens * shape.topk
    indices = torch.randint(0, pool.rows, (nnz,), generator=pool.random, device=device).int()
    indptr = torch.arange(0, nnz + 1, shape.topk, device=device).int()
    fp8_query = DSV4Rows.quantize(q) if mode == "fused-fp8q" else None
    out = torch.empty_like(q)

    def run() -> torch.Tensor:
        if mode == "bf16":
            sparse_prefill(q, KVSource(pool.bf16, indptr, indices), out=out)
        else:
            rows = KVSource(pool.fp8, indptr, indices)
            query = q if fp8_query is None else fp8_query
            sparse_prefill_fp8(query, rows, mode=mode.partition("-")[0], out=out)
        return out

    count = min(_CHECKED_TOKENS, shape.tokens)
    tokens = torch.linspace(0, shape.tokens - 1, count, device=device).round().long()
    chosen = indices.view(shape.tokens, shape.topk)[tokens].reshape(-1).contiguous()
    part = KVSource(pool.bf16, indptr[: count + 1].contiguous(), chosen)
    query = q if fp8_query is None else fp8_query.dequantize().view(size)
    expected = sparse_prefill_reference(query[tokens], part)
    assert isinstance(expected, torch.Tensor)
    row_bytes = 2.0 * HEAD_DIM if mode == "bf16" else float(pool.fp8.bytes_per_row())
    return Call(
        {"mode": mode},
        lambda: run,
        shape.bytes_touched(row_bytes),
        shape.flops,
        lambda o: compare(o[tokens], expected).relative_l1,
        BOUND_16_BIT_QUERY if fp8_query is None else BOUND_FP8_QK,
        extra={"scratch_bytes": partial(_scratch_bytes, run) if q.is_cuda else None},
    )


def _scratch_bytes(run: Callable[[], object], timer: GraphTimer) -> float:
    """Memory that a call allocates at its peak."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    timer.wait()
    return torch.cuda.max_memory_allocated() - before


def _trace(shape: SparseSizes, mode: str, executor: ModelExecutor) -> object:
    """Makes a smaller call of the mode."""
    tokens, rows = min(shape.tokens, _TRACED_TOKENS), min(shape.topk, _TRACED_ROWS)
    more = shape.tokens / tokens
    executor.scale = Scale(workgroups=more, passes=shape.topk / rows, keys=more * shape.topk / rows)
    case = SparseCase(num_qo_heads=shape.heads, prefix_lens=(rows,) * tokens, **WAYS[mode])
    return case.inputs().call()


def make(options: SparseRows) -> tuple[Bench[SparseSizes], list[SparseSizes], dict[str, Any]]:
    """The bench, its rows, and the settings that they depend on."""
    sizes = product(options.tokens, options.heads, options.topk)
    rows = [SparseSizes(*each, options.pool) for each in sizes]
    return sparse_bench(options.mode), rows, {"modes": options.mode}
