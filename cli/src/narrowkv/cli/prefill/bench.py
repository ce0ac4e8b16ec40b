"""`narrowkv bench prefill`: chunks over prefixes, against the floor, torch SDPA, and an append beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
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
from narrowkv.cli.bench.ceilings import Ceilings
from narrowkv.cli.bench.reporter import BenchRow, BenchRun, Columns, judged, time_checked, timed
from narrowkv.cli.bench.timing import GraphTimer
from narrowkv.cli.bench.workload import DecodeShape, Storage
from narrowkv.cli.contracts import BOUND_16_BIT_QUERY
from narrowkv.cli.report import ExitCode, Report, number
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
class PrefillRow(BenchRow):
    """What was measured of a shape: `batch_prefill`, and other ways in microseconds.

    Attributes:
        plan: the configuration, in words.
        sdpa_us: gather, dequantise and torch SDPA.
        append_us: `prefill_append`; apart_us: `append`, then `batch_prefill`.
        decode_us: `paged_decode`, for one new token, where batch_prefill is planned with max_q_len=1.
    """

    shape: PrefillShape
    plan: str
    sdpa_us: float | None = None
    append_us: float | None = None
    apart_us: float | None = None
    decode_us: float | None = None


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
            return math.nan
        return max(compare(out[rows], expected).relative_l1 for rows, expected in ends)

    worse, timing = time_checked(graph, error, BOUND_16_BIT_QUERY, timer)
    row = judged(PrefillRow(shape, plan.explain()), worse, timing, BOUND_16_BIT_QUERY)
    if timing is None or row.status != "pass":
        return row
    row = timed(row, timing, ceilings, shape.bytes_touched, shape.flops)
    row = replace(row, sdpa_us=timer.measure(_sdpa(q, cache, table, shape.new)).median_us)
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
    before = PageTable.from_block_table(
        table.page_ids, cached_lens=table.seq_lens - shape.new, page_size=table.page_size
    )
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
    run: BenchRun[PrefillRow] = BenchRun(
        "prefill",
        PrefillRow,
        report,
        samples=samples,
        seconds=0.2,
        without_a_gpu="`narrowkv probe` and `narrowkv inspect`",
    )

    def work(shape: PrefillShape, ceilings: Ceilings, timer: GraphTimer) -> list[PrefillRow]:
        return [measure(shape, Storage(shape.storage), ceilings, timer)]

    run.measure(rows, work)
    run.show(_COLUMNS)
    return run.finish(("format", "ratio"))


_COLUMNS: Columns[PrefillRow] = Columns(
    labels={"format": lambda row: row.shape.format},
    sizes={
        "heads": lambda row: f"{row.shape.num_kv_heads * row.shape.ratio}/{row.shape.num_kv_heads}",
        "new": lambda row: row.shape.new,
        "prefix": lambda row: row.shape.prefix,
    },
    others={
        "sdpa us": lambda row: number(row.sdpa_us, 4),
        "append us": lambda row: number(row.append_us, 4),
        "apart us": lambda row: number(row.apart_us, 4),
        "decode us": lambda row: number(row.decode_us, 4),
    },
)
