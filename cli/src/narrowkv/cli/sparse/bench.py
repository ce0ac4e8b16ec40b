"""`narrowkv bench sparse`: 16-bit rows, the prepass and the fused kernel, checked and timed in one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from narrowkv.cli.bench.ceilings import Ceilings
from narrowkv.cli.bench.reporter import BenchRow, BenchRun, Columns, judged, ratio, time_checked, timed
from narrowkv.cli.bench.timing import GraphTimer
from narrowkv.cli.report import ExitCode, Report
from narrowkv.quant.accuracy import compare
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    sparse_prefill,
    sparse_prefill_fp8,
    sparse_prefill_reference,
)
from narrowkv.sparse_fp8.cases import BOUND_16_BIT_QUERY, BOUND_FP8_QK

HEAD_DIM = 512
_PAGE_SIZE = 64
_CHECKED_TOKENS = 4


@dataclass(frozen=True)
class SparseShape:
    """One row of the bench: tokens that attend with `heads` heads to `topk` rows each of a pool."""

    tokens: int
    heads: int
    topk: int
    pool: int

    @property
    def flops(self) -> float:
        """Multiplications and additions of QK and PV."""
        return 4.0 * self.tokens * self.heads * self.topk * HEAD_DIM

    def bytes_touched(self, row_bytes: float) -> float:
        """Every byte that must be touched, once: rows, q, o in bf16 and the indices."""
        rows = min(self.pool, self.tokens * self.topk) * row_bytes
        return rows + 2 * 2 * self.tokens * self.heads * HEAD_DIM + 4 * self.tokens * (self.topk + 1)


@dataclass(frozen=True)
class SparseRow(BenchRow):
    """One measured call.

    Attributes:
        mode: one of `SPARSE_MODES`.
        ratio_to_bf16: median over that of mode bf16 at this shape, if it was measured.
        scratch_bytes: memory that a call allocated at its peak, its results apart.
    """

    shape: SparseShape
    mode: str
    ratio_to_bf16: float | None = None
    scratch_bytes: int | None = None


class Pool:
    """Rows on the GPU, as FP8 and as the same numbers in bf16."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        self.random = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(rows, HEAD_DIM, generator=self.random, device="cuda")
        self.fp8 = DSV4Rows.quantize(x, layout="packed584", page_size=_PAGE_SIZE)
        self.bf16 = self.fp8.dequantize()[:rows].bfloat16()
        self.rows = rows

    def call(
        self, shape: SparseShape, mode: str
    ) -> tuple[Callable[[torch.Tensor], object], Callable[[], Any]]:
        """(the call into an output, the reference of some tokens)."""
        size = (shape.tokens, shape.heads, HEAD_DIM)
        q = torch.randn(size, generator=self.random, device="cuda").bfloat16()
        nnz = shape.tokens * shape.topk
        indices = torch.randint(0, self.rows, (nnz,), generator=self.random, device="cuda").int()
        indptr = torch.arange(0, nnz + 1, shape.topk, device="cuda").int()
        fp8_query = DSV4Rows.quantize(q) if mode == "fused-fp8q" else None
        wide, narrow = KVSource(self.bf16, indptr, indices), KVSource(self.fp8, indptr, indices)

        def run(out: torch.Tensor) -> object:
            if mode == "bf16":
                return sparse_prefill(q, wide, out=out)
            name = mode.partition("-")[0]
            return sparse_prefill_fp8(q if fp8_query is None else fp8_query, narrow, mode=name, out=out)

        def reference() -> tuple[torch.Tensor, torch.Tensor]:
            tokens = torch.linspace(0, shape.tokens - 1, _CHECKED_TOKENS, device="cuda").round().long()
            some = indices.view(shape.tokens, shape.topk)[tokens].reshape(-1).contiguous()
            part = KVSource(self.bf16, indptr[: _CHECKED_TOKENS + 1].contiguous(), some)
            query = q if fp8_query is None else fp8_query.dequantize().view(size)
            expected = sparse_prefill_reference(query[tokens], part)
            assert isinstance(expected, torch.Tensor)
            return tokens, expected

        return run, reference


def measure(shape: SparseShape, mode: str, pool: Pool, ceilings: Ceilings, timer: GraphTimer) -> SparseRow:
    """Checks a call, times it, and checks it again with a poisoned output."""
    run, reference = pool.call(shape, mode)
    tokens, expected = reference()
    out = torch.empty(shape.tokens, shape.heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    bound = BOUND_FP8_QK if mode == "fused-fp8q" else BOUND_16_BIT_QUERY
    run(out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(out)
    scratch = torch.cuda.max_memory_allocated() - before
    graph = timer.capture(lambda: run(out))

    def error() -> float:
        out.fill_(math.nan)
        graph.replay()
        timer.wait()
        return compare(out[tokens], expected).relative_l1 if bool(out.isfinite().all()) else math.nan

    worse, timing = time_checked(graph, error, bound, timer)
    row = judged(SparseRow(shape, mode), worse, timing, bound)
    if timing is None or row.status != "pass":
        return row
    row_bytes = 2.0 * HEAD_DIM if mode == "bf16" else float(pool.fp8.bytes_per_row())
    row = timed(row, timing, ceilings, shape.bytes_touched(row_bytes), shape.flops)
    return replace(row, scratch_bytes=scratch)


def bench_sparse(
    shapes: Sequence[SparseShape], modes: Sequence[str], report: Report, samples: int
) -> ExitCode:
    """Measures every shape in every mode; Ctrl-C keeps the rows that were finished."""
    run: BenchRun[SparseRow] = BenchRun(
        "sparse",
        SparseRow,
        report,
        samples=samples,
        without_a_gpu="`narrowkv probe dsv4-sparse` and `narrowkv inspect sparse`",
    )

    pool: Pool | None = None

    def work(step: tuple[SparseShape, str], ceilings: Ceilings, timer: GraphTimer) -> list[SparseRow]:
        nonlocal pool
        shape, mode = step
        if pool is None or pool.rows != shape.pool:
            pool = None  # the old one is freed before the new one is made
            pool = Pool(shape.pool)
        row = measure(shape, mode, pool, ceilings, timer)
        base = next((r.median_us for r in run.rows if (r.shape, r.mode) == (shape, "bf16")), None)
        if base is not None and row.median_us is not None:
            row = replace(row, ratio_to_bf16=row.median_us / base)
        return [row]

    run.measure(list(product(shapes, modes)), work)
    run.show(_COLUMNS)
    return run.finish(("mode", "heads"))


_COLUMNS: Columns[SparseRow] = Columns(
    labels={"mode": lambda row: row.mode},
    sizes={
        "tokens": lambda row: row.shape.tokens,
        "heads": lambda row: row.shape.heads,
        "top-k": lambda row: row.shape.topk,
    },
    others={
        "x bf16": lambda row: ratio(row.ratio_to_bf16),
        "scratch MB": lambda row: "-" if row.scratch_bytes is None else f"{row.scratch_bytes / 1e6:.1f}",
    },
)
