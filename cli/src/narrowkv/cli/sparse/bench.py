"""`narrowkv bench sparse`: 16-bit rows, the prepass and the fused kernel, checked and timed in one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table

from narrowkv.cli.bench.ceilings import Ceilings, measure_ceilings
from narrowkv.cli.bench.timing import FLUSH_BYTES, GraphTimer, Timing
from narrowkv.cli.environment import gpus, versions
from narrowkv.cli.places import find_place
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError, UsageError, number
from narrowkv.cli.sparse.cases import BOUND_16_BIT_QUERY, BOUND_FP8_QK
from narrowkv.quant.accuracy import compare
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    sparse_prefill,
    sparse_prefill_fp8,
    sparse_prefill_reference,
)

HEAD_DIM = 512
MODES = ("bf16", "prepass", "fused", "fused-fp8q")
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
class SparseRow:
    """One measured call.

    Attributes:
        shape: what was called.
        mode: one of `MODES`.
        relative_l1: the worse of the checks before and after timing.
        median_us, p10_us, p90_us: device time.
        floor_us: the least possible time by the ceilings of this run.
        ratio_to_floor: median over floor.
        ratio_to_bf16: median over that of mode bf16 at this shape, if it was measured.
        flops_per_s: flops over the median.
        scratch_bytes: memory that a call allocated at its peak, its results apart.
        status: "pass" or "fail".
        detail: why.
    """

    shape: SparseShape
    mode: str
    relative_l1: float
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    floor_us: float | None = None
    ratio_to_floor: float | None = None
    ratio_to_bf16: float | None = None
    flops_per_s: float | None = None
    scratch_bytes: int | None = None
    status: str = "pass"
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "shape"}
        return {**vars(self.shape), **own}


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

    first = error()
    timing: Timing | None = timer.replay(graph) if first <= bound else None
    worse = first if timing is None else max(first, error())
    if timing is None or not worse <= bound:
        detail = f"relative L1 {worse:.3g}, bound {bound:g}"
        return SparseRow(shape, mode, worse, status="fail", detail=detail)
    row_bytes = 2.0 * HEAD_DIM if mode == "bf16" else float(pool.fp8.bytes_per_row())
    floor = ceilings.floor_us(shape.bytes_touched(row_bytes), shape.flops)
    return SparseRow(
        shape,
        mode,
        worse,
        timing.median_us,
        timing.p10_us,
        timing.p90_us,
        floor,
        timing.median_us / floor,
        flops_per_s=shape.flops / (timing.median_us * 1e-6),
        scratch_bytes=scratch,
    )


def bench_sparse(
    shapes: Sequence[SparseShape], modes: Sequence[str], report: Report, samples: int
) -> ExitCode:
    """Measures every shape in every mode; Ctrl-C keeps the rows that were finished."""
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise UsageError(f"--mode must be of {', '.join(MODES)}; got {unknown[0]!r}")
    if not torch.cuda.is_available():
        raise UnsupportedHereError(
            f"bench measures device time and needs a GPU; torch {torch.__version__} sees none. "
            "`narrowkv probe dsv4-sparse` and `narrowkv inspect sparse` work without one"
        )
    timer = GraphTimer(samples=samples)
    rows: list[SparseRow] = []
    ceilings: Ceilings | None = None
    interrupted = False
    with report.progress(len(shapes) * len(modes) + 1, "measuring") as line:
        try:
            ceilings = measure_ceilings(timer)
            line.advance("ceilings")
            pool: Pool | None = None
            for shape in shapes:
                if pool is None or pool.rows != shape.pool:
                    pool = None  # the old one is freed before the new one is made
                    pool = Pool(shape.pool)
                rows += _of_shape(shape, modes, pool, ceilings, timer, line)
        except KeyboardInterrupt:
            interrupted = True
    if ceilings is not None:
        report.say(f"{find_place('gpu').description}; {ceilings}")
    report.show(_table(rows))
    body = {
        "bench": "sparse",
        "device": gpus()[torch.cuda.current_device()],
        "versions": versions(),
        "method": {"flush_bytes": FLUSH_BYTES, "flush": "read", "samples": samples, "graph": True},
        "ceilings": ceilings,
        "rows": [row.as_dict() for row in rows],
    }
    failed = any(row.status == "fail" for row in rows)
    return report.finish(body, ExitCode.NUMERICAL if failed else ExitCode.OK, interrupted=interrupted)


def _of_shape(
    shape: SparseShape, modes: Sequence[str], pool: Pool, ceilings: Ceilings, timer: GraphTimer, line: Any
) -> list[SparseRow]:
    rows: list[SparseRow] = []
    for mode in modes:
        row = measure(shape, mode, pool, ceilings, timer)
        base = next((r.median_us for r in rows if r.mode == "bf16"), None)
        if base is not None and row.median_us is not None:
            row = SparseRow(**{**_fields(row), "ratio_to_bf16": row.median_us / base})
        rows.append(row)
        line.advance(f"{shape} {mode}")
    return rows


def _fields(row: SparseRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def _table(rows: Sequence[SparseRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("mode")
    for column in (
        "tokens", "heads", "top-k", "us", "p10", "p90", "floor us", "x floor", "x bf16", "TFLOP/s",
        "scratch MB", "rel. L1",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    table.add_column("")
    for row in rows:
        s = row.shape
        times = [number(x, 4) for x in (row.median_us, row.p10_us, row.p90_us, row.floor_us)]
        ratios = [f"{x:.2f}" if x is not None else "-" for x in (row.ratio_to_floor, row.ratio_to_bf16)]
        rate = number(row.flops_per_s / 1e12) if row.flops_per_s else "-"
        scratch = f"{row.scratch_bytes / 1e6:.1f}" if row.scratch_bytes is not None else "-"
        table.add_row(
            row.mode, str(s.tokens), str(s.heads), str(s.topk), *times, *ratios, rate, scratch,
            f"{row.relative_l1:.2e}", row.detail, style="bold red" if row.status == "fail" else "",
        )  # fmt: skip
    return table
