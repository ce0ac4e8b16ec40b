"""Time of decode steps over GPUs of one host: attention, communication, both, and one GPU alone.

Every rank captures several steps in a graph, so that ranks run in lockstep inside it, and replays it between
two events. The time of a step is the slowest rank's median. A cache of the measured sizes is larger than any
L2, so no flush is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.context_parallel.api import cp_paged_decode
from narrowkv.context_parallel.layout import ShardedTable, ShardLayout
from narrowkv.context_parallel.plan import CPDecodePlan, plan_cp_decode
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.errors import UnsupportedError

_STEPS = 8  # in a graph
_REPLAYS = 12
_I32 = torch.int32


@dataclass(frozen=True)
class Setting:
    """A model's attention and the contexts to measure.

    Attributes:
        contexts, batches: tokens of each sequence, and sequences.
        num_qo_heads, num_kv_heads, head_dim, format, page_size: of the model and its cache.
        comms: ways to exchange partial results.
    """

    contexts: tuple[int, ...] = (131072, 1048576)
    batches: tuple[int, ...] = (1, 8)
    num_qo_heads: int = 96
    num_kv_heads: int = 8
    head_dim: int = 128
    format: str = "fp8_e4m3fn"
    page_size: int = 64
    comms: tuple[str, ...] = ("a2a", "ag_rs", "symm_mem")


@dataclass(frozen=True)
class Measured:
    """A step of some GPUs.

    Attributes:
        world, context, batch, comm, partials, head_groups: what was run; `partials` names the dtype.
        cache_gib: of all sequences, over all ranks.
        one_gpu_us: a step of one GPU; step_us: of all; attention_us, communication_us: of its parts alone,
            the latter with the merge and launches that find nothing to attend to.
        sent_bytes: of one rank in a step.
        error: relative L1 difference of the result from one GPU's.
        repeats: whether a second step gave the same bits.
        captured: whether a captured step served other lengths.
        refusal: why it was not run; the numbers are then 0.
    """

    world: int
    context: int
    batch: int
    comm: str
    partials: str
    head_groups: int
    cache_gib: float = 0.0
    one_gpu_us: float = 0.0
    step_us: float = 0.0
    attention_us: float = 0.0
    communication_us: float = 0.0
    sent_bytes: int = 0
    error: float = 0.0
    repeats: bool = False
    captured: bool = False
    refusal: str = ""

    @property
    def speedup(self) -> float:
        """Decode rate over one GPU's."""
        return self.one_gpu_us / self.step_us if self.step_us else 0.0

    @property
    def hidden(self) -> float:
        """Share of the communication that runs beside attention."""
        if not self.communication_us:
            return 0.0
        saved = self.attention_us + self.communication_us - self.step_us
        return min(max(saved / self.communication_us, 0.0), 1.0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all sequences that one layer's attention lets through in a second."""
        return self.batch / self.step_us * 1e6 if self.step_us else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields, and the figures derived from them."""
        derived = {"speedup": self.speedup, "hidden": self.hidden, "tokens_per_s": self.tokens_per_s}
        return {**asdict(self), **derived}

    @property
    def context_at_equal_time(self) -> int:
        """Tokens that the GPUs attend to together in the time of one GPU at `context`."""
        rest = self.one_gpu_us - (self.step_us - self.attention_us)
        return int(self.context * max(rest, 0.0) / self.attention_us) if self.attention_us else 0


def measure_ranks(setting: Setting) -> list[Measured]:
    """Measures every row of a setting; runs on every rank of the default NCCL group, for `run_ranks`.

    Rank 0 also writes each row to stderr when it is measured.
    """
    rows = []
    for context in setting.contexts:
        for batch in setting.batches:
            for row in _measure(setting, context, batch):
                rows.append(row)
                if dist.get_rank() == 0:
                    print(line_of(row), file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
    return rows


def line_of(row: Measured) -> str:
    """A row as one line of text."""
    name = f"{row.world} GPUs {row.context:>8} x {row.batch:<2} {row.comm:8} {row.partials:4} "
    name += f"g{row.head_groups}"
    if row.refusal:
        return f"{name}  not run: {row.refusal}"
    return (
        f"{name}  one {row.one_gpu_us:8.1f} us  step {row.step_us:8.1f} us  {row.speedup:.2f} x  attention "
        f"{row.attention_us:8.1f}  communication {row.communication_us:6.1f} us {row.sent_bytes} B  hidden "
        f"{row.hidden:.0%}  error {row.error:.1e}  repeats {row.repeats}  graph {row.captured}"
    )


def _variants(setting: Setting, world: int) -> Iterator[tuple[str, torch.dtype, int]]:
    for comm in setting.comms:
        yield comm, torch.float32, 1
        yield comm, torch.bfloat16, 1
        if setting.num_kv_heads % (2 * world) == 0:
            yield comm, torch.bfloat16, 2


@dataclass(frozen=True)
class _Step:
    """A step's tensors: all ranks make the same ones, from one seed.

    Attributes:
        q: of all heads. cache, table: of the whole sequences, on every rank; a rank attends to its own pages.
        lens: what `table` refers to. own: this rank's queries. local: this rank's table.
    """

    q: torch.Tensor
    cache: PagedKVCache
    table: PageTable
    lens: torch.Tensor
    own: torch.Tensor
    local: ShardedTable


def _build(setting: Setting, context: int, batch: int, layout: ShardLayout) -> _Step:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    pages = -(-context // setting.page_size)
    cache = PagedKVCache.empty(
        batch * pages, setting.page_size, setting.num_kv_heads, setting.head_dim, format=setting.format,
        device=device,
    )  # fmt: skip
    for stored in (cache.k, cache.v):
        if stored.element_size() == 1:
            # Without the highest bit of the exponent no byte is NaN or Inf, and no number is large.
            stored.view(torch.uint8).random_(0, 256).bitwise_and_(0xBF)
        else:
            stored.normal_(std=0.5)
    cache = replace(cache, negative_zero_free=False)
    ids = torch.randperm(batch * pages, device=device).to(_I32).view(batch, pages)
    lens = torch.full((batch,), context, dtype=_I32, device=device)
    table = PageTable.from_block_table(ids, lens, page_size=setting.page_size)
    q = torch.randn(batch, setting.num_qo_heads, setting.head_dim, dtype=torch.bfloat16, device=device)
    heads = setting.num_qo_heads // layout.world
    own = q[:, layout.rank * heads : (layout.rank + 1) * heads].contiguous()
    return _Step(q, cache, table, lens, own, layout.shard_table(table, setting.page_size))


def _measure(setting: Setting, context: int, batch: int) -> Iterator[Measured]:
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = ShardLayout(world, rank, setting.page_size)
    step = _build(setting, context, batch, layout)
    plan = plan_decode(step.q, step.cache, step.table)
    out = torch.empty_like(step.q)
    one = _time(lambda: paged_decode(step.q, step.cache, step.table, out=out, plan=plan))
    local = plan_decode(step.q, step.cache, step.local.table)
    o, lse = torch.empty_like(step.q, dtype=torch.float32), step.q.new_empty(step.q.shape[:2]).float()
    attention = _time(lambda: paged_decode(step.q, step.cache, step.local.table, out=o, lse=lse, plan=local))
    base = Measured(
        world, context, batch, "", "", 1, one_gpu_us=one, attention_us=attention,
        cache_gib=step.cache.bytes_per_token() * context * batch / 2**30,
    )  # fmt: skip
    for comm, dtype, groups in _variants(setting, world):
        name = "fp32" if dtype == torch.float32 else "bf16"
        row = replace(base, comm=comm, partials=name, head_groups=groups)
        try:
            planned = plan_cp_decode(
                step.own, step.cache, step.local, comm=comm, partial_dtype=dtype, head_groups=groups
            )
        except UnsupportedError as error:
            yield replace(row, refusal=str(error))
            continue
        yield _measured(row, planned, step, layout, setting.page_size)


def _measured(
    row: Measured, plan: CPDecodePlan, step: _Step, layout: ShardLayout, page_size: int
) -> Measured:
    out = torch.empty_like(step.own)
    nothing = replace(step.local.table, seq_lens=torch.zeros_like(step.lens))
    empty = replace(step.local, table=nothing)

    def run(table: ShardedTable, **options: Any) -> Any:
        return cp_paged_decode(step.own, step.cache, table, plan=plan, **options)

    precise = {"out_dtype": torch.float32}
    first, second = run(step.local, **precise), run(step.local, **precise)
    error = _difference(first, step, layout)
    seconds = _time(lambda: run(step.local, out=out)), _time(lambda: run(empty, out=out))
    return replace(
        row, step_us=seconds[0], communication_us=seconds[1], error=error,
        repeats=bool(torch.equal(first, second)), sent_bytes=sum(plan.sent_bytes().values()),
        captured=_serves_other_lengths(plan, step, layout, page_size),
    )  # fmt: skip


def _difference(o: torch.Tensor, step: _Step, layout: ShardLayout) -> float:
    """Relative L1 difference of this rank's heads from one GPU's result."""
    whole = paged_decode(step.q, step.cache, step.table, out_dtype=torch.float32)
    assert isinstance(whole, torch.Tensor)
    heads = o.shape[1]
    expected = whole[:, layout.rank * heads : (layout.rank + 1) * heads]
    return float((o.float() - expected).abs().sum() / expected.abs().sum())


def _serves_other_lengths(plan: CPDecodePlan, step: _Step, layout: ShardLayout, page_size: int) -> bool:
    """Whether a captured step, with the making of its table, is right after the lengths have changed."""
    out = torch.empty_like(step.own, dtype=torch.float32)

    def call() -> None:
        table = layout.shard_table(step.table, page_size)
        cp_paged_decode(step.own, step.cache, table, plan=plan, out=out)

    graph = _captured(call, 1)
    before = step.lens.clone()
    worst = 0.0
    for lens in (before // 3 + 1, torch.ones_like(before)):
        step.lens.copy_(lens)
        out.fill_(float("nan"))
        graph.replay()
        worst = max(worst, _difference(out, step, layout))
    step.lens.copy_(before)
    return worst < 2.0**-7


def _captured(call: Callable[[], Any], steps: int) -> torch.cuda.CUDAGraph:
    """A graph of some steps, captured after the call has compiled and communicated."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            call()
    return graph


def _time(call: Callable[[], Any]) -> float:
    """Microseconds of a step on the slowest rank."""
    graph = _captured(call, _STEPS)
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / _STEPS)
    slowest = torch.tensor(sorted(times[2:])[(len(times) - 2) // 2], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
