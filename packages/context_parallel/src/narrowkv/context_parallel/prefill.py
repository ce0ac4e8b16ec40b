"""Prefill over ranks: new tokens are computed in equal shares, and stored by the ranks that own them.

Zigzag shares after striped and load-balanced ring attention (Brandon et al., arXiv 2311.09431; PyTorch's
context parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

import torch
import torch.distributed as dist

from narrowkv.attn_decode import merge_states, paged_decode
from narrowkv.attn_prefill import batch_prefill
from narrowkv.attn_prefill.checks import APPEND_DTYPES
from narrowkv.context_parallel.exchange import ExchangeSizes, Partial
from narrowkv.context_parallel.groups import Group, agreement, all_gather, check_layout, group_of
from narrowkv.context_parallel.ring import gathered, passed_round
from narrowkv.context_parallel.shares import PAGE, PrefillShares
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.paged_cache.binding import bind_cache, bind_table
from narrowkv.paged_cache.checks import (
    check_new_tokens,
    check_one_width,
    check_stores,
    tensors_of,
    written_tensors,
)
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_finite_float,
    check_index_vector,
    check_instance,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_results,
    check_same_device,
    check_shape,
    check_soft_cap,
    check_tensor,
    check_windows,
    refuse_overlap,
)
from narrowkv.runtime.launch import active_target
from narrowkv.runtime.operation import Bounded, Operation, Plan, Prepared, signature_of, spans_of_arguments
from narrowkv.runtime.scales import check_scales

if TYPE_CHECKING:
    from typing_extensions import Unpack

COMMS = ("all_gather", "ring")
_I32 = torch.int32


class CPPrefillOptions(TypedDict, total=False):
    """Keywords of `cp_prefill`, which describes them, beside those that it needs."""

    group: Group
    comm: str
    sm_scale: float | None
    logits_soft_cap: float
    window_left: int
    sinks: torch.Tensor | None
    out: torch.Tensor | None


class CPPrefillArguments(NamedTuple):
    """The arguments of a call; `lse` and `return_lse` are what operations with a log-sum-exp have."""

    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    cache: PagedKVCache
    page_table: PageTable
    shares: PrefillShares
    slot_mapping: torch.Tensor
    group: Group = None
    comm: str = "all_gather"
    sm_scale: float | None = None
    logits_soft_cap: float = 0.0
    window_left: int = -1
    sinks: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: None = None
    return_lse: bool = False

    def attention(self) -> dict[str, Any]:
        """Keywords of attention to one rank's keys."""
        return {"sm_scale": self.sm_scale, "logits_soft_cap": self.logits_soft_cap}


CP_PREFILL = Operation("cp_prefill", CPPrefillOptions, CPPrefillArguments)


def cp_prefill(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    *,
    shares: PrefillShares,
    slot_mapping: torch.Tensor,
    **options: Unpack[CPPrefillOptions],
) -> torch.Tensor:
    """Causal attention of new tokens over themselves and over older ones that are spread over ranks.

    Every rank of the group must make the call. Each computes its share of the new tokens; their keys and
    values go to all ranks unquantised, and each rank appends those that it owns. Older tokens are not sent:
    queries are sent to their ranks, and partial results are sent back. A call whose new tokens have the
    lengths and metadata of an earlier one, as those of a model's next layer have, repeats what was prepared.

    Args:
        q: `[own tokens, num_qo_heads, head_dim]`, bf16 or fp16: tokens `shares.rows()` of the new ones.
        k_new, v_new: `[own tokens, num_kv_heads, head_dim]` in q's dtype, of the same tokens.
        cache: this rank's cache; any format. Written in place.
        page_table: of the whole sequences, made with `cached_lens`, equal on all ranks; see
            `ShardLayout.shard_table` for the kinds of tables.
        shares: which new tokens each rank computes.
        slot_mapping: `[new tokens]` of all ranks, as for `ShardLayout.local_slots`; -1 is not stored.
        group: the ranks, in the order of the layout.
        comm: how keys and values reach the other ranks: "all_gather" in one collective, or "ring", which
            takes the memory of two shares and overlaps with attention.
        sm_scale, logits_soft_cap, window_left, sinks: as for `narrowkv.attn_prefill.batch_prefill`; `sinks`
            of all heads. A window is served token by token, as decode.
        out: where to write, like q.

    Returns:
        `o` like q.

    Raises:
        TypeError, ValueError: for wrong shapes or dtypes, or ranks whose arguments differ, on every rank.

    Example:
        >>> mine = shares.rows()                                                  # doctest: +SKIP
        >>> o = cp_prefill(q[mine], k[mine], v[mine], cache, table,               # doctest: +SKIP
        ...                shares=shares, slot_mapping=slots)
    """
    CP_PREFILL.check_keywords(options)
    check_tensor("q", q)
    return _plan_of(q.device).call(
        CPPrefillArguments(q, k_new, v_new, cache, page_table, shares, slot_mapping, **options)
    )


class BlockKeys(NamedTuple):
    """The new keys of one rank, as queries of this one attend to them.

    Attributes:
        rows: `[tokens]` int64, the rank's tokens among all new ones; places: their slots in its block.
        table: pages of the block: of each sequence's early and late queries or, with a window, of each query.
        starts: `[2 * sequences + 1]` int32, where the queries of each row of `table` begin; None with a
            window.
    """

    rows: torch.Tensor
    places: torch.Tensor
    table: PageTable
    starts: torch.Tensor | None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PreparedCPPrefill(Prepared):
    """A checked call; its index tensors are on the device.

    Attributes:
        equal: values that all ranks must have in common, by name.
        blocks: of every rank.
        rows: int64, sequence and place among its new tokens of every rank's queries, each rank's padded to as
            many, for older keys in a window; else None.
        starts: `[ranks * (sequences + 1) + 1]` int32, where the queries of each rank and sequence begin among
            them, without a window; what pads a rank's stands behind its sequences.
        new: `[new tokens]` int64, sequence and place of each, where pages are a rank's own; else None.
    """

    equal: dict[str, Any]
    blocks: tuple[BlockKeys, ...]
    rows: tuple[torch.Tensor, torch.Tensor] | None
    starts: torch.Tensor | None
    new: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, eq=False, kw_only=True)
class CPPrefillPlan(Plan):
    """Prefills over ranks on one device."""

    operation: ClassVar[Operation] = CP_PREFILL
    most_calls: ClassVar[int] = 8  # each holds indices of its new tokens
    compared: ClassVar[bool] = False  # plans of the attention within compare their calls

    def call(self, given: CPPrefillArguments) -> torch.Tensor:
        """`cp_prefill` by this plan."""
        q, cache, shares = given.q, given.cache, given.shares
        group = group_of(given.group)
        with agreement(group) as equal:
            call, out = self._checked(given, group)
            slots = _local_slots(given, call)
            older = _older_keys(given) if shares.older else None
            equal |= call.equal
        world = shares.layout.world
        states = torch.zeros(world + 1, *q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(states.shape[:3], -torch.inf, device=q.device)
        own = _packed(given, call.blocks[shares.layout.rank].places)
        send = passed_round if given.comm == "ring" else gathered
        for source, block in send(own, group):
            keys = call.blocks[source]
            flat = block.flatten(1, 2)
            append(cache, flat[0][keys.places], flat[1][keys.places], slots[keys.rows])
            if q.shape[0]:
                _attend_block(given, block, keys, source, states[source], lse[source])
        if older is not None:
            _attend_older(given, older, call, group, states[world], lse[world])
        if q.shape[0]:
            merge_states(states, lse, sinks=given.sinks, out=out)
        return out

    def _checked(
        self, given: CPPrefillArguments, group: dist.ProcessGroup
    ) -> tuple[PreparedCPPrefill, torch.Tensor]:
        """What was prepared for such a call, and its output; refuses what is wrong on this rank alone."""
        shares = check_instance("shares", given.shares, PrefillShares)
        check_stores(given.cache)
        cache = bind_cache(given.cache, self.target, (), stores=True)
        table = bind_table(check_instance("page_table", given.page_table, PageTable))
        check_scales(cache.scales)
        signature = (
            cache.number, table.number, table.batch, shares.layout, shares.new_lens, shares.older,
            given.comm, given.sm_scale, given.logits_soft_cap, given.window_left,
            *signature_of(given.q, given.k_new, given.v_new, given.slot_mapping, given.sinks, given.out),
        )  # fmt: skip
        call: PreparedCPPrefill | None = self.calls.find(signature)
        if call is None:
            call = self.calls.keep(signature, self._prepare(given))
        check_layout(shares.layout.world, shares.layout.rank, group)
        out, _ = self.results(call, given, cache.spans, table.spans, cache.store)
        return call, out

    def _prepare(self, given: CPPrefillArguments) -> PreparedCPPrefill:
        """Checks all that does not change from call to call, and finds which keys each query sees."""
        q, cache, shares, window = given.q, given.cache, given.shares, given.window_left
        _check_tokens(given)
        check_choice("comm", given.comm, COMMS)
        if given.sm_scale is not None:
            check_finite_float("sm_scale", given.sm_scale)
        check_soft_cap(given.logits_soft_cap)
        check_windows(window)
        out_dtype = check_results(
            q, given.out, None, given.sinks, None, None, _read_by(given), head_dim=cache.head_dim,
            vendor=self.target.vendor,
        )  # fmt: skip
        world, new = shares.layout.world, None
        if shares.layout.owns_pages(given.page_table, cache.page_size):
            counts = torch.tensor(shares.new_lens, dtype=torch.int64)
            positions = torch.cat([torch.arange(n) for n in (0, *shares.new_lens)])
            seqs = torch.repeat_interleave(torch.arange(len(counts)), counts)
            new = seqs.to(q.device), positions.to(q.device)
        equal = {
            "new_lens": shares.new_lens, "interleave": shares.layout.interleave, "comm": given.comm,
            "window_left": window, "heads of q": q.shape[1], "dtype of q": q.dtype, "older": shares.older,
            "KV heads": cache.num_kv_heads, "head_dim": cache.head_dim, "sm_scale": given.sm_scale,
            "logits_soft_cap": given.logits_soft_cap,
            "page sizes": (cache.page_size, given.page_table.page_size),
        }  # fmt: skip
        return PreparedCPPrefill(
            out=(q.shape, out_dtype), equal=equal, new=new,
            blocks=tuple(_block_keys(shares, source, window, q.device) for source in range(world)),
            rows=_all_rows(shares, q.device) if shares.older and window >= 0 else None,
            starts=_all_starts(shares, q.device) if shares.older and window < 0 else None,
            **spans_of_arguments(given),
        )  # fmt: skip

    def refuse_overlap(self, given: CPPrefillArguments) -> None:
        """Names what a call would write to and reads, if anything."""
        read = {**_read_by(given), "k_new": given.k_new, "v_new": given.v_new}
        written = written_tensors(given.cache)
        for name, tensor in written.items():
            check_no_overlap(name, tensor, **{each: x for each, x in read.items() if each not in written})
        refuse_overlap(given.out, None, read)


_plans: Bounded[CPPrefillPlan] = Bounded(64)


def _plan_of(device: torch.device) -> CPPrefillPlan:
    """The plan of all prefills over ranks on a device."""
    target = active_target(device)
    plan = _plans.find((target, device))
    return plan or _plans.keep((target, device), CPPrefillPlan(target=target, device=device))


def _read_by(given: CPPrefillArguments) -> dict[str, Any]:
    """What a call reads, by the names of messages."""
    return {
        "q": given.q, "k_new": given.k_new, "v_new": given.v_new, "sinks": given.sinks,
        "slot_mapping": given.slot_mapping, **tensors_of(given.cache, given.page_table),
    }  # fmt: skip


def _check_tokens(given: CPPrefillArguments) -> None:
    """Refuses new tokens that are not this rank's share, or that its cache and the page table cannot take."""
    q, cache, page_table, shares = given.q, given.cache, given.page_table, given.shares
    check_one_width(cache, "cp_prefill")
    check_dtype("q", q, APPEND_DTYPES)
    tokens = sum(a + b for a, b in shares.lens(shares.layout.rank))
    check_shape("q", q, (tokens, "num_qo_heads", cache.head_dim))
    check_last_dim_contiguous("q", q)
    check_no_grad(q=q)
    check_same_device(k=cache.k, q=q)
    read = {"q": q, "slot_mapping": given.slot_mapping}
    check_new_tokens(
        cache, given.k_new, given.v_new, None, read, dtypes=(q.dtype,), tokens=tokens, validate=None
    )
    if q.shape[1] % cache.num_kv_heads:
        raise ValueError(
            f"q must have a multiple of the cache's {cache.num_kv_heads} KV heads, got {q.shape[1]} heads"
        )
    check_index_vector("slot_mapping", given.slot_mapping, sum(shares.new_lens))
    of_table = {name: x for name, x in tensors_of(cache, page_table).items() if isinstance(x, torch.Tensor)}
    check_same_device(**{"k": cache.k, "slot_mapping": given.slot_mapping} | of_table)
    if not page_table.before_append or page_table.batch_size != len(shares.new_lens):
        raise ValueError(
            f"page_table must be made with cached_lens of {len(shares.new_lens)} sequences: lengths before "
            "the new tokens are stored"
        )


def _local_slots(given: CPPrefillArguments, call: PreparedCPPrefill) -> torch.Tensor:
    """This rank's slots of all new tokens."""
    layout, page_size = given.shares.layout, given.cache.page_size
    positions = None
    if call.new is not None:
        seqs, places = call.new
        positions = places + given.page_table.seq_lens_tensor()[seqs]
    return layout.local_slots(given.slot_mapping, page_size, positions=positions)


def _packed(given: CPPrefillArguments, places: torch.Tensor) -> torch.Tensor:
    """This rank's new keys and values in pages, `[2, pages, PAGE, heads, head_dim]`, as it sends them."""
    k_new, pages = given.k_new, given.shares.most_pages
    both = k_new.new_zeros(2, pages * PAGE, *k_new.shape[1:])
    both[:, places] = torch.stack((k_new, given.v_new))
    return both.unflatten(1, (pages, PAGE))  # type: ignore[no-untyped-call, no-any-return]


def _block_keys(shares: PrefillShares, source: int, window_left: int, device: torch.device) -> BlockKeys:
    """The new keys that one rank computed, for own queries."""
    rank = shares.layout.rank
    own, theirs = shares.lens(rank), shares.lens(source)
    places, first_pages = shares.places(source)
    rows, places = shares.rows(source).to(device), places.to(device)
    width = max(-(-(a + b) // PAGE) for a, b in theirs)
    ids = (first_pages[:, None] + torch.arange(max(width, 1))).clamp(max=shares.most_pages - 1).to(_I32)
    if window_left >= 0:
        seqs, positions = _rows_of(shares, rank)
        early, late = (
            torch.tensor([[block[i].start, block[i].stop] for block in shares.blocks(source)])[seqs]
            for i in range(2)
        )

        def held(end: torch.Tensor) -> torch.Tensor:
            """How many of the block's tokens stand before a position."""
            return sum(  # type: ignore[return-value]
                (torch.minimum(end, part[:, 1]) - part[:, 0]).clamp(min=0) for part in (early, late)
            )

        ranges = torch.stack((held(positions - window_left), held(positions + 1)), -1).to(_I32)
        lens = torch.tensor([a + b for a, b in theirs], dtype=_I32)[seqs]
        table = PageTable.from_block_table(ids[seqs].to(device), lens.to(device), page_size=PAGE)
        return BlockKeys(rows, places, table.with_key_ranges(ranges[:, None].contiguous().to(device)), None)
    # In its own block, an early query sees the early part. In an earlier rank's block, all see the early
    # part; of a later rank's, late queries see both.
    seen = [
        (0 if source > rank else early, early if source < rank else early + late) for early, late in theirs
    ]
    lens = torch.tensor(seen, dtype=_I32).flatten()
    starts = torch.tensor([0, *(count for pair in own for count in pair)]).cumsum(0)
    table = PageTable.from_block_table(
        ids.repeat_interleave(2, 0).to(device), lens.to(device), page_size=PAGE
    )
    return BlockKeys(rows, places, table, starts.to(device, _I32))


def _all_starts(shares: PrefillShares, device: torch.device) -> torch.Tensor:
    """`PreparedCPPrefill.starts`."""
    counts = []
    for rank in range(shares.layout.world):
        own = [a + b for a, b in shares.lens(rank)]
        counts += [*own, shares.most_rows - sum(own)]
    return torch.tensor([0, *counts]).cumsum(0).to(device, _I32)


def _all_rows(shares: PrefillShares, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`PreparedCPPrefill.rows`; those that pad a rank's are of a sequence behind the last."""
    world, most = shares.layout.world, shares.most_rows
    seqs = torch.full((world, most), len(shares.new_lens))
    positions = torch.zeros(world, most, dtype=torch.int64)
    for rank in range(world):
        found, places = _rows_of(shares, rank)
        seqs[rank, : len(found)], positions[rank, : len(found)] = found, places
    return seqs.flatten().to(device), positions.flatten().to(device)


def _rows_of(shares: PrefillShares, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence of each of a rank's tokens, and its place among the sequence's new tokens."""
    empty = torch.zeros(0, dtype=torch.int64)
    seqs, positions = [empty], [empty]
    for seq, blocks in enumerate(shares.blocks(rank)):
        for block in blocks:
            positions.append(torch.arange(block.start, block.stop))
            seqs.append(torch.full((len(block),), seq))
    return torch.cat(seqs), torch.cat(positions)


def _older_keys(given: CPPrefillArguments) -> PageTable:
    """This rank's block table of the older tokens."""
    whole = replace(given.page_table, before_append=False)
    local = given.shares.layout.shard_table(whole, given.cache.page_size).table
    return local.to_block_table(max(whole.page_ids.shape[-1], 1))


def _attend_block(
    given: CPPrefillArguments, block: torch.Tensor, keys: BlockKeys, source: int, o: torch.Tensor,
    lse: torch.Tensor,
) -> None:  # fmt: skip
    """Own queries over the new keys that one rank computed."""
    q, options = given.q, given.attention()
    stored = "bf16" if q.dtype == torch.bfloat16 else "fp16"
    cache = PagedKVCache.from_tensors(block[0], block[1], format=stored)
    if keys.starts is None:
        paged_decode(q, cache, keys.table, out=o, lse=lse, **options)
        return
    causal = source == given.shares.layout.rank
    batch_prefill(q, cache, keys.table, keys.starts, causal=causal, out=o, lse=lse, **options)


def _attend_older(
    given: CPPrefillArguments, local: PageTable, call: PreparedCPPrefill, group: dist.ProcessGroup,
    o: torch.Tensor, lse: torch.Tensor,
) -> None:  # fmt: skip
    """Attends all ranks' queries to this rank's older keys, `local`; returns own rows over all older keys."""
    q, cache, shares, options = given.q, given.cache, given.shares, given.attention()
    layout, most, device = shares.layout, shares.most_rows, q.device
    world, heads, head_dim = layout.world, q.shape[1], q.shape[2]
    padded = q.new_zeros(most, heads, head_dim)
    padded[: q.shape[0]] = q
    everyone = q.new_empty(world * most, heads, head_dim)
    all_gather(everyone, padded, group=group)
    assert local.seq_lens is not None
    # A sequence without keys takes the rows that pad a rank's share.
    ids = torch.cat([local.page_ids, local.page_ids.new_zeros(1, local.page_ids.shape[1])])
    lens = torch.cat([local.seq_lens, local.seq_lens.new_zeros(1)])
    part_o = torch.zeros(everyone.shape, dtype=torch.float32, device=device)
    part_lse = torch.full(everyone.shape[:2], -torch.inf, device=device)
    if call.rows is None:
        table = PageTable.from_block_table(
            ids.repeat(world, 1), lens.repeat(world), page_size=cache.page_size
        )
        assert call.starts is not None
        batch_prefill(everyone, cache, table, call.starts, causal=False, out=part_o, lse=part_lse, **options)
    else:
        seqs, positions = call.rows
        whole = given.page_table.seq_lens_tensor()
        whole = torch.cat([whole, whole.new_zeros(1)])[seqs]
        begin = layout.local_lens(whole + positions - given.window_left)
        ranges = torch.stack((begin.to(_I32), lens[seqs]), -1)[:, None].contiguous()
        table = PageTable.from_block_table(ids[seqs], lens[seqs], page_size=cache.page_size)
        paged_decode(everyone, cache, table.with_key_ranges(ranges), out=part_o, lse=part_lse, **options)
    # The exchange is by rows instead of by heads: the two change places.
    sizes = ExchangeSizes(world, layout.rank, heads, world * most, head_dim)
    partial = Partial(sizes, torch.float32, "a2a", device)
    partial.o.copy_(part_o.transpose(0, 1))
    partial.lse.copy_(part_lse.t())
    partial.start(group, False, None)
    mine = q.shape[0]
    if mine:
        partial.finish(0, mine, None, o.transpose(0, 1), lse.t())
