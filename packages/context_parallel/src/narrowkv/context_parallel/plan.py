"""The host work of context-parallel decode steps, done once: agreement of ranks, buffers, local plans."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from narrowkv.attn_decode import DecodePlan, DecodeShape, plan_decode
from narrowkv.attn_decode.options import PLAIN_VALUES, AttentionOptions, DecodeArguments
from narrowkv.context_parallel.buffers import (
    HEADS,
    Buffers,
    Moves,
    allocate,
    exchange_bytes,
    symmetric_places,
)
from narrowkv.context_parallel.exchange import COMMS, PARTIAL_DTYPES, Partial, SymmetricMemory, sent_bytes
from narrowkv.context_parallel.groups import Group, agreement, all_gather, check_layout, group_of
from narrowkv.context_parallel.heads import every_nth_head
from narrowkv.context_parallel.layout import ShardedTable, ShardLayout
from narrowkv.paged_cache import PagedKVCache
from narrowkv.paged_cache.binding import bind_cache, bind_table
from narrowkv.paged_cache.checks import check_one_width, tensors_of
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_instance,
    check_last_dim_contiguous,
    check_positive_int,
    check_results,
    check_shape,
    refuse_overlap,
)
from narrowkv.runtime.launch import Workspace
from narrowkv.runtime.operation import (
    Operation,
    Plan,
    Prepared,
    refuse_containers,
    signature_of,
    spans_of_arguments,
)
from narrowkv.runtime.scales import check_scales

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, eq=False, kw_only=True)
class CPDecodePlan(Plan):
    """Decode steps over a sequence that is spread over ranks; made by `plan_cp_decode`.

    A plan serves every layer of a model and every batch up to its own. Its calls share its buffers, so they
    must run one after the other on one stream, and all ranks must make the same calls in the same order.

    Attributes:
        layout: which rank holds which token.
        comm, partial_dtype, heads, head_groups: see `plan_cp_decode`.
        shape: of a rank's attention over all heads; `batch` is the maximum.
        local: plans of a rank's attention, one a head group.
        group: the ranks; None in a world of one.
        memory: what other ranks write with "symm_mem".
        exchange: memory of queries and partial results; see `with_workspaces`.

    The other attributes are those of `narrowkv.runtime.operation.Plan`.
    """

    operation: ClassVar[Operation] = Operation(
        "cp_paged_decode", AttentionOptions, DecodeArguments, "plan_cp_decode"
    )
    compared: ClassVar[bool] = False  # local plans compare their calls
    layout: ShardLayout
    comm: str
    partial_dtype: torch.dtype
    heads: str
    head_groups: int
    shape: DecodeShape
    local: tuple[DecodePlan, ...]
    group: dist.ProcessGroup | None
    memory: SymmetricMemory | None = field(repr=False, default=None)
    exchange: Workspace | None = field(repr=False, default=None)
    _buffers: dict[int, Buffers] = field(init=False, repr=False, default_factory=dict)

    def explain(self) -> str:
        """One line for a person: the steps of a call."""
        groups = "" if self.head_groups == 1 else f", {self.head_groups} head groups overlapped"
        return (
            f"rank {self.layout.rank} of {self.layout.world}, interleave {self.layout.interleave}: "
            f"{self.comm} of {str(self.partial_dtype).removeprefix('torch.')} partials, {self.heads} "
            f"heads{groups}; "
            f"{self.local[0].explain()}"
        )

    def sent_bytes(self, batch: int | None = None) -> dict[str, int]:
        """Bytes that this rank sends to others in a step: of queries, of partial results, of merged O."""
        world, shape = self.layout.world, self.shape
        tokens = (shape.batch if batch is None else batch) * shape.q_len
        if world == 1:
            return {"q": 0, "partials": 0, "o": 0}
        others = tokens * shape.num_qo_heads // world * (world - 1)
        partials = self.head_groups * sent_bytes(self.moves.sizes(tokens), self.partial_dtype, self.comm)
        sharded = self.heads == "sharded"
        return {
            "q": others * shape.head_dim * shape.q_dtype.itemsize if sharded else 0,
            "partials": partials,
            "o": 0 if sharded else others * shape.head_dim * 4,
        }

    def workspace_bytes(self) -> int:
        """Bytes of a workspace for a rank's own attention."""
        return max(each.workspace_bytes() for each in self.local)

    def exchange_bytes(self) -> int:
        """Bytes of a workspace for queries and partial results on their way between ranks."""
        return 0 if self.layout.world == 1 else exchange_bytes(self.moves)

    def with_workspaces(self, workspace: Workspace, exchange: Workspace) -> CPDecodePlan:
        """The same plan in the caller's memory. Plans may share it if their calls run one after another.

        Without it, a rank's attention allocates its memory in every call, and the plan allocates what ranks
        exchange in its first call.

        Args:
            workspace: at least `workspace_bytes()`, for a rank's own attention.
            exchange: at least `exchange_bytes()`, for what ranks exchange; a workspace of its own.

        Raises:
            ValueError: a workspace is too small.
        """
        for name, given, least in (
            ("workspace", workspace, self.workspace_bytes()), ("exchange", exchange, self.exchange_bytes())
        ):  # fmt: skip
            if given.num_bytes < least:
                raise ValueError(f"{name} must have at least {least} bytes, got {given.num_bytes}")
        return replace(self.with_workspace(workspace), exchange=exchange)

    def with_workspace(self, workspace: Workspace | None = None) -> CPDecodePlan:
        """The same plan with memory for this rank's own attention, or in a workspace that plans share."""
        made = super().with_workspace(workspace)
        local = tuple(replace(each, workspace=made.workspace) for each in made.local)
        return replace(made, local=local)

    @cached_property
    def moves(self) -> Moves:
        """What steps send to other ranks."""
        return Moves(
            self.layout, self.comm, self.partial_dtype, self.heads, self.head_groups, self.shape, self.device
        )

    @cached_property
    def _workspace(self) -> Workspace:
        return Workspace(self.exchange_bytes(), self.device) if self.exchange is None else self.exchange

    def _of(self, tokens: int) -> Buffers:
        """Buffers of calls with this many query tokens; calls with more or fewer use the same memory."""
        if tokens not in self._buffers:
            symmetric = None if self.memory is None else self.memory.buffer
            self._buffers[tokens] = allocate(self.moves, tokens, symmetric, self._workspace)
        return self._buffers[tokens]

    def run(
        self, q: torch.Tensor, cache: PagedKVCache, table: ShardedTable, **options: Unpack[AttentionOptions]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`cp_paged_decode` by this plan: the same arguments and results."""
        self.operation.check_keywords(options)
        whole = check_instance("table", table, ShardedTable).table
        check_instance("cache", cache, PagedKVCache)
        given = DecodeArguments(q, cache, whole, **options)
        signature = signature_of(
            table.layout, table.q_len, whole.batch_size, q, given.out, given.lse, given.sinks,
            given[PLAIN_VALUES],
        )  # fmt: skip
        call = self.calls.find(signature)
        if call is None:
            refuse_containers(given, PLAIN_VALUES)
            call = self.prepared(signature, self._check(given, table), given)
        check_scales(cache.static_scales(), given.validate)
        if self.layout.world == 1:
            return self.local[0].call(given)
        spans = bind_cache(cache, self.target, ()).spans
        out, lse = self.results(call, given, spans, bind_table(whole).spans)
        if q.shape[0]:
            assert self.group is not None
            self._step(given, out, lse, self.group)
        return (out, lse) if given.return_lse and lse is not None else out

    def _step(
        self, given: DecodeArguments, out: torch.Tensor, lse: torch.Tensor | None, group: dist.ProcessGroup
    ) -> None:
        q, sinks, groups = given.q, given.sinks, self.head_groups
        buffers = self._of(q.shape[0])
        queries = self._gather_queries(q, buffers, group)
        pending = []
        for number, partial in enumerate(buffers.partial):
            part = given._replace(
                q=queries[number], cache=every_nth_head(given.cache, number, groups), out=partial.o,
                out_dtype=None, lse=partial.lse, return_lse=False, sinks=None,
            )  # fmt: skip
            self.local[number].call(part)
            pending.append(partial.start(group, groups > 1, self.memory))
        if self.memory is not None:
            self.memory.barrier()
        to, to_lse = out, lse
        if buffers.merged is not None and buffers.merged_lse is not None:
            to, to_lse = buffers.merged[0], buffers.merged_lse[0]
            if sinks is not None:
                own = out.shape[1] // self.layout.world
                sinks = sinks[self.layout.rank * own : (self.layout.rank + 1) * own]
        for number, partial in enumerate(buffers.partial):
            if pending[number] is not None:
                pending[number].wait()
            self._merge(number, partial, sinks, to, to_lse)
        if buffers.merged is not None and buffers.merged_lse is not None:
            world = self.layout.world
            all_gather(buffers.merged[1].flatten(0, 1), buffers.merged[0], group=group)
            out.view(q.shape[0], world, -1, q.shape[2]).copy_(buffers.merged[1].transpose(0, 1))
            if lse is not None:
                all_gather(buffers.merged_lse[1].flatten(0, 1), buffers.merged_lse[0], group=group)
                lse.view(q.shape[0], world, -1).copy_(buffers.merged_lse[1].transpose(0, 1))

    def _gather_queries(
        self, q: torch.Tensor, buffers: Buffers, group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        """Queries of each head group, of all ranks' heads in rank order."""
        if buffers.gathered is None:
            whole = q[None]  # [1, tokens, heads, head_dim]
        elif self.memory is not None:
            self.memory.push(q.contiguous().expand(self.layout.world, *q.shape), buffers.gathered)
            whole = buffers.gathered
        else:
            all_gather(buffers.gathered.flatten(0, 1), q.contiguous(), group=group)
            whole = buffers.gathered
        if self.memory is not None:
            # Queries have arrived, and no rank still reads what this step's partial results overwrite.
            self.memory.barrier()
        if buffers.q is None:
            return [whole.transpose(0, 1).flatten(1, 2)]
        ratio = self.shape.gqa_ratio if self.head_groups > 1 else 1
        # [ranks, tokens, KV heads of a group, groups, ratio, head_dim]
        tokens = q.shape[0]
        parted = whole.view(whole.shape[0], tokens, -1, self.head_groups, ratio, q.shape[2])
        grouped = buffers.q.view(self.head_groups, tokens, whole.shape[0], -1, ratio, q.shape[2])
        grouped.copy_(parted.permute(3, 1, 0, 2, 4, 5))
        return list(buffers.q)

    def _merge(
        self, number: int, partial: Partial, sinks: torch.Tensor | None, out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Merges the heads of a head group, which are every `head_groups`-th KV head of the output."""
        groups, own = self.head_groups, partial.sizes.own_heads
        run = own if groups == 1 else self.shape.gqa_ratio
        for first in range(0, own, run):
            begin = first * groups + number * run
            heads = slice(begin, begin + run)
            partial.finish(
                first, first + run, None if sinks is None else sinks[heads], out[:, heads],
                None if lse is None else lse[:, heads],
            )  # fmt: skip

    def _check(self, given: DecodeArguments, table: ShardedTable) -> Prepared:
        """Refuses a call that the plan was not made for."""
        q, shape, world = given.q, self.shape, self.layout.world
        if table.layout != self.layout or table.q_len != shape.q_len:
            raise ValueError(
                f"table must be made by {self.layout} with q_len={shape.q_len}, as the plan is, got one of "
                f"{table.layout} with q_len={table.q_len}"
            )
        heads = shape.num_qo_heads // (world if self.heads == "sharded" else 1)
        check_dtype("q", q, shape.q_dtype)
        rows = table.table.batch_size * shape.q_len
        check_shape("q", q, (rows, heads, shape.head_dim))
        check_last_dim_contiguous("q", q)
        if table.table.batch_size > shape.batch:
            raise ValueError(
                f"q must have at most the plan's {shape.batch} sequences, got {table.table.batch_size}: call "
                "plan_cp_decode with max_batch"
            )
        dtype = check_results(
            q, given.out, given.lse, given.sinks, given.out_dtype, given.out_scale, _inputs(given),
            head_dim=shape.head_dim, vendor=self.target.vendor,
        )  # fmt: skip
        return Prepared(out=(q.shape, dtype), lse=(q.shape[:2], torch.float32), **spans_of_arguments(given))

    def refuse_overlap(self, given: DecodeArguments) -> None:
        """Refuses results that lie over each other or an input, naming both."""
        refuse_overlap(given.out, given.lse, _inputs(given))


def _inputs(given: DecodeArguments) -> dict[str, Any]:
    """What a call reads, by the names of messages."""
    return {"q": given.q, "sinks": given.sinks, **tensors_of(given.cache, given.page_table)}


def plan_cp_decode(
    q: torch.Tensor,
    cache: PagedKVCache,
    table: ShardedTable,
    *,
    group: Group = None,
    comm: str = "a2a",
    partial_dtype: torch.dtype = torch.float32,
    heads: str = "sharded",
    head_groups: int = 1,
    max_batch: int | None = None,
    max_seq_len: int | None = None,
    batch_invariant: bool = False,
) -> CPDecodePlan:
    """Plans decode steps of all ranks of a group; every rank must call it, with the same arguments.

    Ranks compare layouts, shapes and options, so that a mismatch is an error on every rank and not a hang.

    Args:
        q: this rank's queries, of which only the metadata is used: `[batch * q_len, own heads, head_dim]`
            bf16 or fp16, or all heads with `heads="replicated"`.
        cache: this rank's cache, with all KV heads that the group's query heads need.
        table: this rank's page table, from `ShardLayout.shard_table`.
        group: the ranks that share sequences, in the order of the layout: a process group, a mesh of one
            dimension, or None for all ranks.
        comm: "a2a" sends partial O and lse to the ranks that own the heads in one all-to-all and merges them
            in rank order: the result has the same bits every time. "ag_rs" gathers lse, rescales O and
            reduce-scatters it: the order of its sums is the library's. "symm_mem" is "a2a" by writing into
            the other GPUs' memory, and also gathers queries so.
        partial_dtype: of partial O on its way, fp32 or bf16 (half the bytes, one more rounding).
        heads: "sharded": q holds this rank's heads (tensor parallelism), and so does the result. Heads of the
            group lie in rank order. "replicated": q and the result hold all heads, on every rank.
        head_groups: parts that KV heads are divided into, so that a part's communication runs beside the next
            part's attention. A rank's share of KV heads must be a multiple of it.
        max_batch: sequences of a call, at most; default q's.
        max_seq_len, batch_invariant: of this rank's attention; see `narrowkv.attn_decode.plan_decode`.

    Returns:
        A plan for `cp_paged_decode(..., plan=plan)`.

    Raises:
        TypeError, ValueError: on every rank, for arguments that a rank refuses or that differ.
        UnsupportedError: formats that the kernel does not read; "symm_mem" where memory cannot be shared.
        RuntimeError: `torch.distributed` is not initialised, or a rank is gone (raised by the backend within
            the group's timeout).

    Example:
        >>> from narrowkv.context_parallel import ShardLayout
        >>> from narrowkv.paged_cache import PageTable
        >>> cache = PagedKVCache.empty(2, 16, 1, 64, format="bf16")
        >>> whole = PageTable.from_block_table(torch.tensor([[1, 0]]), torch.tensor([20]), page_size=16)
        >>> table = ShardLayout(world=1, rank=0, interleave=16).shard_table(whole, cache.page_size)
        >>> plan_cp_decode(torch.zeros(1, 4, 64).bfloat16(), cache, table).sent_bytes()
        {'q': 0, 'partials': 0, 'o': 0}
    """
    check_instance("table", table, ShardedTable)
    if table.layout.world == 1:
        return _plan(
            q, cache, table, None, comm, partial_dtype, heads, head_groups, max_batch, max_seq_len,
            batch_invariant,
        )  # fmt: skip
    ranks = group_of(group)
    with agreement(ranks) as equal:
        plan = _plan(
            q, cache, table, ranks, comm, partial_dtype, heads, head_groups, max_batch, max_seq_len,
            batch_invariant,
        )  # fmt: skip
        shape = plan.shape
        equal |= {
            "interleave": table.layout.interleave, "q_len": table.q_len, "window_left": table.window_left,
            "comm": comm, "partial_dtype": partial_dtype, "heads": heads, "head_groups": head_groups,
            "batch": shape.batch, "num_qo_heads": shape.num_qo_heads, "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim, "dtype of q": shape.q_dtype,
        }  # fmt: skip
    if comm != "symm_mem":
        return plan
    memory = SymmetricMemory(symmetric_places(plan.moves)[1][-1], ranks, plan.device)
    return replace(plan, memory=memory)


def _plan(
    q: torch.Tensor, cache: PagedKVCache, table: ShardedTable, group: dist.ProcessGroup | None, comm: str,
    partial_dtype: torch.dtype, heads: str, head_groups: int, max_batch: int | None, max_seq_len: int | None,
    batch_invariant: bool,
) -> CPDecodePlan:  # fmt: skip
    """A plan without symmetric memory; refuses arguments that are wrong on this rank alone."""
    layout = table.layout
    world = layout.world
    if group is not None:
        check_layout(world, layout.rank, group)
    check_choice("comm", comm, COMMS)
    check_choice("heads", heads, HEADS)
    check_positive_int("head_groups", head_groups)
    if partial_dtype not in PARTIAL_DTYPES:
        raise ValueError(f"partial_dtype must be one of {PARTIAL_DTYPES}, got {partial_dtype}")
    check_dtype("q", q, (torch.bfloat16, torch.float16))
    check_shape("q", q, ("batch * q_len", "num_qo_heads", cache.head_dim))
    check_one_width(cache, "cp_decode")
    batch = table.table.batch_size
    check_shape("q", q, (batch * table.q_len, None, None))
    all_heads = q.shape[1] * (world if heads == "sharded" else 1)
    if all_heads % world or all_heads % cache.num_kv_heads:
        raise ValueError(
            f"q must have heads that the {world} ranks and the cache's {cache.num_kv_heads} KV heads divide, "
            f"got {all_heads} in all"
        )
    if head_groups > 1 and cache.num_kv_heads % (world * head_groups):
        raise ValueError(
            f"head_groups must divide a rank's share of the cache's {cache.num_kv_heads} KV heads over "
            f"{world} ranks, got {head_groups}"
        )
    if world == 1:
        head_groups = 1  # there is no communication to overlap
    like = q.new_empty(q.shape[0], all_heads // head_groups, q.shape[2])
    options: dict[str, Any] = {
        "max_batch": max_batch, "max_seq_len": max_seq_len, "batch_invariant": batch_invariant
    }  # fmt: skip
    parts = (every_nth_head(cache, number, head_groups) for number in range(head_groups))
    local = tuple(plan_decode(like, part, table.table, **options) for part in parts)
    shape = DecodeShape(
        batch=max_batch or batch, q_len=table.q_len, num_qo_heads=all_heads, num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim, page_size=cache.page_size, capacity=table.table.capacity, q_dtype=q.dtype,
    )  # fmt: skip
    return CPDecodePlan(
        target=local[0].target, device=q.device, layout=layout, comm=comm, partial_dtype=partial_dtype,
        heads=heads, head_groups=head_groups, shape=shape, local=local, group=group,
    )  # fmt: skip
