"""Time of decode steps over GPUs of one host, measured, and of more GPUs by a cost model.

Measured: attention, communication, both, and one GPU alone. Every rank captures several steps in a graph, so
that ranks run in lockstep inside it, and replays it between two events. The time of a step is the slowest
rank's median. A cache of the measured sizes is larger than any L2, so no flush is needed.

Modelled from published figures (bytes, latency and bandwidth): a step is attention over the rank's share of
the keys, then two collectives (queries over heads, partial results by heads), each a latency and a transfer.
Nothing overlaps, so that head groups can only do better.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.context_parallel.api import cp_paged_decode
from narrowkv.context_parallel.exchange import ExchangeSizes, block_elements
from narrowkv.context_parallel.layout import ShardedTable, ShardLayout
from narrowkv.context_parallel.plan import CPDecodePlan, plan_cp_decode
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.targets import get_target

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
    return relative_l1(o, expected)


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


# Share of the peak HBM bandwidth that decode reaches on long contexts, and the time of a step that reads
# nothing: the two launches of attention and merge. Both are what `narrowkv bench decode` shows on an H100.
_HBM_SHARE = 0.85
_LAUNCHES_US = 6.0


@dataclass(frozen=True)
class Link:
    """How GPUs of a scale-up domain, and domains, are connected.

    Attributes:
        name: for people.
        domain: GPUs that are connected so.
        bytes_per_s: what a GPU sends to all others of its domain together, in one direction.
        peer_bytes_per_s: what it sends to one of them.
        latency_us: of a collective, however small; hop_us: for each further GPU of the domain.
        network_bytes_per_s, network_hop_us: of a GPU's network adapter to GPUs of other domains.
        source: where the figures come from.
    """

    name: str
    domain: int
    bytes_per_s: float
    peer_bytes_per_s: float
    latency_us: float
    hop_us: float
    network_bytes_per_s: float
    network_hop_us: float
    source: str


_LATENCY = (
    "latencies of a ring with the low-latency protocol by NCCL's table (src/graph/tuning.cc): 6.6 us a "
    "collective, 0.6 us an NVLink hop, 2.7 us a network hop; RDMA of one 400 Gb/s adapter a GPU"
)
LINKS: MappingProxyType[str, Link] = MappingProxyType(
    {
        "xgmi4": Link(
            "XGMI of MI300X", 8, 7 * 64e9, 64e9, 6.6, 0.6, 50e9, 2.7,
            f"AMD MI300X data sheet: seven links of 128 GB/s in both directions; {_LATENCY}",
        ),
        "xgmi4-355": Link(
            "XGMI of MI355X", 8, 7 * 76.8e9, 76.8e9, 6.6, 0.6, 50e9, 2.7,
            f"AMD MI355X data sheet: seven links of 153.6 GB/s in both directions; {_LATENCY}",
        ),
        "nvlink4": Link(
            "NVLink 4 of H100 and H200", 8, 450e9, 450e9, 6.6, 0.6, 50e9, 2.7,
            f"NVIDIA H100 data sheet: 900 GB/s in both directions through NVSwitch; {_LATENCY}",
        ),
        "nvlink5": Link(
            "NVLink 5 of GB200 NVL72", 72, 900e9, 900e9, 6.6, 0.6, 50e9, 2.7,
            f"NVIDIA GB200 NVL72 data sheet: 1.8 TB/s a GPU in both directions, 72 GPUs; {_LATENCY}",
        ),
    }
)  # fmt: skip
LINK_OF_TARGET = MappingProxyType({"gfx942": "xgmi4", "gfx950": "xgmi4-355", "sm90": "nvlink4"})


@dataclass(frozen=True)
class Predicted:
    """A modelled step.

    Attributes:
        world, context, batch: GPUs, tokens of each sequence, sequences.
        cache_gib: of all sequences, over all GPUs.
        one_gpu_us: of one GPU, whether or not the cache fits it. attention_us, communication_us, step_us: of
            all.
        sent_bytes: of one GPU.
    """

    world: int
    context: int
    batch: int
    cache_gib: float
    one_gpu_us: float
    attention_us: float
    communication_us: float
    step_us: float
    sent_bytes: int

    @property
    def speedup(self) -> float:
        """Decode rate over one GPU's."""
        return self.one_gpu_us / self.step_us

    def as_dict(self) -> dict[str, Any]:
        """The fields and the speed-up."""
        return {**asdict(self), "speedup": self.speedup}


def collective_us(link: Link, world: int, bytes_per_peer: float) -> float:
    """Microseconds of a collective in which each GPU sends this many bytes to every other.

    Raises:
        ValueError: fewer than one GPU.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    if world == 1:
        return 0.0
    near = min(world, link.domain) - 1
    far = world - 1 - near
    inside = max(near * bytes_per_peer / link.bytes_per_s, bytes_per_peer / link.peer_bytes_per_s)
    outside = far * bytes_per_peer / link.network_bytes_per_s
    domains = -(-world // link.domain)
    latency = link.latency_us + near * link.hop_us + (domains - 1) * link.network_hop_us
    return latency + max(inside, outside) * 1e6


def predict(
    setting: Setting, world: int, context: int, batch: int, *, target: str, link: str,
    partial_dtype: torch.dtype = torch.bfloat16, hbm_bytes_per_s: float | None = None,
) -> Predicted:  # fmt: skip
    """A step of `world` GPUs by the model.

    Args:
        setting: the model's heads and the cache's format. Heads that the GPUs do not divide are rounded up.
        world, context, batch: GPUs, tokens of each sequence, sequences.
        target: "gfx942", "gfx950" or "sm90": whose memory bandwidth.
        link: one of `LINKS`.
        partial_dtype: of partial results on their way.
        hbm_bytes_per_s: peak memory bandwidth of another chip of the target, such as 4.8e12 of an H200.

    Raises:
        ValueError: a target without figures.

    Example:
        >>> step = predict(Setting(), 8, 2**20, 1, target="gfx942", link="xgmi4")
        >>> 1 < step.speedup < 8
        True
    """
    own_heads = -(-setting.num_qo_heads // world)
    one_page = PagedKVCache.empty(
        1, setting.page_size, setting.num_kv_heads, setting.head_dim, format=setting.format
    )
    num_bytes = one_page.bytes_per_token() * context * batch
    figures = get_target(target).figures
    if figures is None:
        raise ValueError(f"target must be a GPU with known figures: gfx942, gfx950 or sm90, got {target!r}")
    rate = (hbm_bytes_per_s or figures.hbm_bytes_per_s) * _HBM_SHARE
    sizes = ExchangeSizes(world, 0, batch, own_heads * world, setting.head_dim)
    queries = batch * own_heads * setting.head_dim * 2
    partials = own_heads * block_elements(sizes, partial_dtype) * partial_dtype.itemsize
    communication = sum(collective_us(LINKS[link], world, each) for each in (queries, partials))
    one_gpu = _LAUNCHES_US + num_bytes / rate * 1e6
    attention = _LAUNCHES_US + num_bytes / world / rate * 1e6
    return Predicted(
        world, context, batch, num_bytes / 2**30, one_gpu, attention, communication,
        attention + communication, (world - 1) * (queries + partials),
    )  # fmt: skip
