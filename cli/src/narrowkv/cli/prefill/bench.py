"""`narrowkv bench prefill`: chunks over prefixes, against the floor, torch SDPA, and an append beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_prefill import (
    batch_prefill,
    batch_prefill_reference,
    plan_append,
    plan_prefill,
    prefill_append,
)
from narrowkv.cli.bench.ceilings import Ceilings, measure_ceilings
from narrowkv.cli.bench.timing import FLUSH_BYTES, GraphTimer
from narrowkv.cli.bench.workload import DecodeShape, Storage
from narrowkv.cli.contracts import BOUND_16_BIT_QUERY
from narrowkv.cli.environment import gpus, versions
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError, number
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.quant.accuracy import compare

_CHECKED_TOKENS = 16  # at either end of the chunk; those between differ only in their positions


@dataclass(frozen=True)
class PrefillShape:
    """One row: a chunk of one sequence over a prefix."""

    new: int
    prefix: int
    num_kv_heads: int
    ratio: int
    head_dim: int
    page_size: int
    format: str

    @property
    def storage(self) -> DecodeShape:
        """The cache of the prefix and the chunk."""
        return DecodeShape(
            1, self.length, self.page_size, self.num_kv_heads, self.ratio, self.head_dim, "bf16", self.format
        )

    @property
    def length(self) -> int:
        """Keys, rounded up to whole pages."""
        return -(-(self.new + self.prefix) // self.page_size) * self.page_size

    @property
    def bytes_touched(self) -> float:
        """Every byte that the call must touch, once."""
        q_and_o = self.num_kv_heads * self.ratio * self.head_dim * 2
        return self.storage.bytes_touched + 2 * (self.new - 1) * q_and_o

    @property
    def flops(self) -> float:
        """Multiplications and additions of QK and PV that the causal mask leaves."""
        pairs = self.new * (self.length - self.new) + self.new * (self.new + 1) / 2
        return 4.0 * self.head_dim * self.num_kv_heads * self.ratio * pairs


@dataclass(frozen=True)
class PrefillRow:
    """What was measured of a shape, in microseconds; None where it was not.

    Attributes:
        shape: the shape.
        plan: the configuration, in words.
        relative_l1: of the checked tokens, before and after timing; o was NaN before each check.
        median_us, p10_us, p90_us: `batch_prefill`; floor_us: the least possible time.
        sdpa_us: gather, dequantise and torch SDPA.
        append_us: `prefill_append`; apart_us: `append`, then `batch_prefill`.
        decode_us: `paged_decode`, for one new token, where batch_prefill is planned with max_q_len=1.
    """

    shape: PrefillShape
    plan: str
    relative_l1: float
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    floor_us: float | None = None
    sdpa_us: float | None = None
    append_us: float | None = None
    apart_us: float | None = None
    decode_us: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound."""
        return self.relative_l1 <= BOUND_16_BIT_QUERY

    @property
    def ratio_to_floor(self) -> float | None:
        """Time over the floor."""
        return None if self.median_us is None or self.floor_us is None else self.median_us / self.floor_us

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        measured = asdict(self)
        return {**measured.pop("shape"), **measured, "ratio_to_floor": self.ratio_to_floor}


def shapes(
    new: Sequence[int], prefixes: Sequence[int], heads: Sequence[tuple[int, int]],
    formats: Sequence[str], head_dim: int, page_size: int,
) -> Iterator[PrefillShape]:  # fmt: skip
    """Every combination; `heads` are numbers of query and KV heads."""
    for fmt, (queries, kv_heads), n, prefix in product(formats, heads, new, prefixes):
        yield PrefillShape(n, prefix, kv_heads, queries // kv_heads, head_dim, page_size, fmt)


def _ends(q: torch.Tensor, cache: PagedKVCache, table: PageTable) -> Iterator[tuple[slice, torch.Tensor]]:
    """The first and last tokens of the chunk and what they should give."""
    tokens, count = q.shape[0], min(_CHECKED_TOKENS, q.shape[0])
    assert table.seq_lens is not None
    for rows, dropped in ((slice(0, count), tokens - count), (slice(tokens - count, tokens), 0)):
        part = PageTable.from_block_table(table.page_ids, table.seq_lens - dropped, page_size=table.page_size)
        starts = torch.tensor([0, count], dtype=torch.int32, device=q.device)
        expected = batch_prefill_reference(q[rows], cache, part, starts)
        assert isinstance(expected, torch.Tensor)
        yield rows, expected


def _sdpa(q: torch.Tensor, cache: PagedKVCache, table: PageTable, new: int) -> Callable[[], torch.Tensor]:
    """Gather, dequantise, attend: what an engine does without a kernel for its cache."""

    def call() -> torch.Tensor:
        sides = ((cache.k, cache.k_descale), (cache.v, cache.v_descale))
        k, v = (x[table.page_ids[0].long()].flatten(0, 1).to(q.dtype).mul_(descale) for x, descale in sides)
        rows, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if k.shape[2] == new:
            return scaled_dot_product_attention(rows, k, v, is_causal=True, enable_gqa=True)
        mask = causal_lower_right(new, k.shape[2])
        return scaled_dot_product_attention(rows, k, v, attn_mask=mask, enable_gqa=True)

    return call


def measure(shape: PrefillShape, storage: Storage, ceilings: Ceilings, timer: GraphTimer) -> PrefillRow:
    """Checks and times one shape; a wrong result is not timed."""
    _, cache, table = storage.inputs(shape.storage)
    random = torch.Generator("cuda").manual_seed(shape.new)
    heads = shape.num_kv_heads * shape.ratio
    q = torch.randn((shape.new, heads, shape.head_dim), generator=random, device="cuda").bfloat16()
    starts = torch.tensor([0, shape.new], dtype=torch.int32, device="cuda")
    plan = plan_prefill(q, cache, table, starts, max_q_len=shape.new)
    out = torch.empty_like(q)
    ends = list(_ends(q, cache, table))

    def attend() -> None:
        batch_prefill(q, cache, table, starts, out=out, plan=plan)

    graph = timer.capture(attend)

    def error() -> float:
        out.fill_(math.nan)
        graph.replay()
        timer.wait()
        if not bool(torch.isfinite(out).all()):
            return math.inf
        return max(compare(out[rows], expected).relative_l1 for rows, expected in ends)

    row = PrefillRow(shape, plan.explain(), error())
    if not row.passed:
        return row
    timing = timer.replay(graph)
    row = replace(
        row,
        relative_l1=max(row.relative_l1, error()),
        median_us=timing.median_us,
        p10_us=timing.p10_us,
        p90_us=timing.p90_us,
        floor_us=ceilings.floor_us(shape.bytes_touched, shape.flops),
        sdpa_us=timer.measure(_sdpa(q, cache, table, shape.new)).median_us,
    )
    if shape.new == 1:
        decode_plan = plan_decode(q, cache, table)
        decode = timer.measure(lambda: paged_decode(q, cache, table, out=out, plan=decode_plan))
        return replace(row, decode_us=decode.median_us)
    together, apart = _append_times(shape, q, cache, table, starts, timer)
    return replace(row, append_us=together, apart_us=apart)


def _append_times(
    shape: PrefillShape, q: torch.Tensor, cache: PagedKVCache, table: PageTable, starts: torch.Tensor,
    timer: GraphTimer,
) -> tuple[float, float]:  # fmt: skip
    """Of `prefill_append`, and of `append` followed by `batch_prefill`."""
    k_new, v_new = (
        torch.randn((shape.new, shape.num_kv_heads, shape.head_dim), device="cuda").bfloat16()
        for _ in range(2)
    )
    assert table.seq_lens is not None
    before = PageTable.from_block_table(table.page_ids, table.seq_lens - shape.new, page_size=table.page_size)
    places = torch.arange(shape.length - shape.new, shape.length, device="cuda")
    pages = table.page_ids[0].long()[places // table.page_size]
    slots = (pages * table.page_size + places % table.page_size).int()
    together = plan_append(q, cache, before, starts)
    apart = plan_prefill(q, cache, table, starts)

    def one() -> None:
        prefill_append(q, k_new, v_new, cache, before, starts, plan=together)

    def two() -> None:
        append(cache, k_new, v_new, slots)
        batch_prefill(q, cache, table, starts, plan=apart)

    return timer.measure(one).median_us, timer.measure(two).median_us


def bench_prefill(rows: Sequence[PrefillShape], report: Report, samples: int) -> ExitCode:
    """Measures every shape and reports; Ctrl-C keeps the rows that were finished."""
    if not torch.cuda.is_available():
        raise UnsupportedHereError(
            f"bench measures device time and needs a GPU; torch {torch.__version__} sees none. "
            "`narrowkv probe` and `narrowkv inspect` work without one"
        )
    timer = GraphTimer(samples=samples, seconds=0.2)
    done: list[PrefillRow] = []
    ceilings: Ceilings | None = None
    interrupted = False
    with report.progress(len(rows) + 1, "measuring") as line:
        try:
            ceilings = measure_ceilings(timer)
            line.advance("ceilings")
            for shape in rows:
                done.append(measure(shape, Storage(shape.storage), ceilings, timer))
                line.advance(str(shape))
        except KeyboardInterrupt:
            interrupted = True
    if ceilings is not None:
        report.say(
            f"measured ceilings: read {ceilings.read_bytes_per_s / 1e9:.0f} GB/s, "
            f"bf16 {ceilings.bf16_flops_per_s / 1e12:.0f} TFLOP/s"
        )
    report.show(_table(done))
    body = {
        "bench": "prefill",
        "device": gpus()[torch.cuda.current_device()],
        "versions": versions(),
        "method": {"flush_bytes": FLUSH_BYTES, "flush": "read", "samples": samples, "graph": True},
        "ceilings": ceilings,
        "rows": [row.as_dict() for row in done],
    }
    code = ExitCode.OK if all(row.passed for row in done) else ExitCode.NUMERICAL
    return report.finish(body, code, interrupted=interrupted)


def _table(rows: Sequence[PrefillRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("format")
    for column in (
        "heads", "new", "prefix", "us", "p10", "p90", "floor us", "x floor", "sdpa us", "append us",
        "apart us", "decode us", "rel. L1",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        s = row.shape
        times = (row.median_us, row.p10_us, row.p90_us, row.floor_us)
        ratio = "-" if row.ratio_to_floor is None else f"{row.ratio_to_floor:.2f}"
        others = (row.sdpa_us, row.append_us, row.apart_us, row.decode_us)
        table.add_row(
            s.format, f"{s.num_kv_heads * s.ratio}/{s.num_kv_heads}", str(s.new), str(s.prefix),
            *(number(x, 4) for x in times), ratio, *(number(x, 4) for x in others), f"{row.relative_l1:.1e}",
            style="" if row.passed else "bold red",
        )  # fmt: skip
    return table
