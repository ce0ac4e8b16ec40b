"""Prefill over ranks: new tokens are computed in equal shares, and stored by the ranks that own them.

Zigzag shares after striped and load-balanced ring attention (Brandon et al., arXiv 2311.09431; PyTorch's
context parallelism).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from narrowkv.paged_cache.checks import check_new_tokens, check_one_width, check_stores, tensors_of
from narrowkv.paged_cache.descales import static_scales
from narrowkv.runtime.checks import check_results, check_soft_cap, check_windows
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_finite_float,
    check_index_vector,
    check_instance,
    check_last_dim_contiguous,
    check_no_grad,
    check_same_device,
    check_shape,
)
from narrowkv.runtime.launch import active_target
from narrowkv.runtime.scales import check_scales

COMMS = ("all_gather", "ring")
_I32 = torch.int32


def cp_prefill(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    *,
    shares: PrefillShares,
    slot_mapping: torch.Tensor,
    group: Group = None,
    comm: str = "all_gather",
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens over themselves and over older ones that are spread over ranks.

    Every rank of the group must make the call. Each computes its share of the new tokens; their keys and
    values go to all ranks unquantised, and each rank appends those that it owns. Older tokens are not sent:
    queries are sent to their ranks, and partial results are sent back.

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
    ranks = group_of(group)
    with agreement(ranks) as equal:
        _check_tokens(q, k_new, v_new, cache, page_table, shares, slot_mapping)
        check_choice("comm", comm, COMMS)
        if sm_scale is not None:
            check_finite_float("sm_scale", sm_scale)
        check_soft_cap(logits_soft_cap)
        check_windows(window_left)
        read = {"q": q, "k_new": k_new, "v_new": v_new, "sinks": sinks, **tensors_of(cache, page_table)}
        target = active_target(q.device)
        out_dtype = check_results(
            q, out, None, sinks, None, None, read, head_dim=cache.head_dim, target=target
        )
        check_layout(shares.layout.world, shares.layout.rank, ranks)
        slots = _local_slots(shares, slot_mapping, cache.page_size, page_table)
        older = _older_keys(shares, cache, page_table) if shares.older else None
        equal |= {
            "new_lens": shares.new_lens, "interleave": shares.layout.interleave, "comm": comm,
            "window_left": window_left, "heads of q": q.shape[1], "dtype of q": q.dtype,
            "older": shares.older, "KV heads": cache.num_kv_heads, "head_dim": cache.head_dim,
            "sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap,
            "page sizes": (cache.page_size, page_table.page_size),
        }  # fmt: skip
    options: dict[str, Any] = {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap}
    world = shares.layout.world
    states = torch.zeros(world + 1, *q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(states.shape[:3], -torch.inf, device=q.device)
    own = _packed(k_new, v_new, shares)
    send = passed_round if comm == "ring" else gathered
    for source, block in send(own, ranks):
        keys = _block_cache(block, q.dtype)
        rows, places = (each.to(q.device) for each in (shares.rows(source), shares.places(source)[0]))
        flat = block.flatten(1, 2)
        append(cache, flat[0][places], flat[1][places], slots[rows])
        if q.shape[0]:
            _attend_block(q, keys, shares, source, window_left, states[source], lse[source], options)
    if older is not None:
        _attend_older(
            q, cache, page_table, older, shares, ranks, window_left, states[world], lse[world], options
        )
    if not q.shape[0]:
        return torch.empty_like(q) if out is None else out
    o, _ = merge_states(states, lse, sinks=sinks, out=out, out_dtype=out_dtype)
    return o


def _check_tokens(
    q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, cache: PagedKVCache,
    page_table: PageTable, shares: PrefillShares, slot_mapping: torch.Tensor,
) -> None:  # fmt: skip
    """Refuses new tokens that are not this rank's share, or that its cache and the page table cannot take."""
    check_stores(cache)
    check_one_width(cache, "cp_prefill")
    check_scales(static_scales(cache))
    check_instance("shares", shares, PrefillShares)
    check_dtype("q", q, APPEND_DTYPES)
    tokens = sum(a + b for a, b in shares.lens(shares.layout.rank))
    check_shape("q", q, (tokens, "num_qo_heads", cache.head_dim))
    check_last_dim_contiguous("q", q)
    check_no_grad(q=q)
    check_same_device(k=cache.k, q=q)
    read = {"q": q, "slot_mapping": slot_mapping}
    check_new_tokens(cache, k_new, v_new, None, read, dtypes=(q.dtype,), tokens=tokens, validate=None)
    if q.shape[1] % cache.num_kv_heads:
        raise ValueError(
            f"q must have a multiple of the cache's {cache.num_kv_heads} KV heads, got {q.shape[1]} heads"
        )
    check_index_vector("slot_mapping", slot_mapping, sum(shares.new_lens))
    check_instance("page_table", page_table, PageTable)
    of_table = {name: x for name, x in tensors_of(cache, page_table).items() if isinstance(x, torch.Tensor)}
    check_same_device(**{"k": cache.k, "slot_mapping": slot_mapping} | of_table)
    if not page_table.before_append or page_table.batch_size != len(shares.new_lens):
        raise ValueError(
            f"page_table must be made with cached_lens of {len(shares.new_lens)} sequences: lengths before "
            "the new tokens are stored"
        )


def _local_slots(
    shares: PrefillShares, slot_mapping: torch.Tensor, page_size: int, page_table: PageTable
) -> torch.Tensor:
    """This rank's slots of all new tokens."""
    layout, device = shares.layout, slot_mapping.device
    if not layout.owns_pages(page_table, page_size):
        return layout.local_slots(slot_mapping, page_size)
    counts = torch.tensor(shares.new_lens, dtype=torch.int64)
    seqs = torch.repeat_interleave(torch.arange(len(counts)), counts).to(device)
    positions = torch.cat([torch.arange(n) for n in (0, *shares.new_lens)]).to(device)
    positions = positions + page_table.seq_lens_tensor()[seqs]
    return layout.local_slots(slot_mapping, page_size, positions=positions)


def _packed(k_new: torch.Tensor, v_new: torch.Tensor, shares: PrefillShares) -> torch.Tensor:
    """This rank's new keys and values in pages, `[2, pages, PAGE, heads, head_dim]`, as it sends them."""
    both = k_new.new_zeros(2, shares.most_pages * PAGE, *k_new.shape[1:])
    places, _ = shares.places(shares.layout.rank)
    both[:, places.to(k_new.device)] = torch.stack((k_new, v_new))
    return both.unflatten(1, (shares.most_pages, PAGE))  # type: ignore[no-untyped-call, no-any-return]


def _block_cache(block: torch.Tensor, dtype: torch.dtype) -> PagedKVCache:
    return PagedKVCache.from_tensors(block[0], block[1], format="bf16" if dtype == torch.bfloat16 else "fp16")


def _attend_block(
    q: torch.Tensor, keys: PagedKVCache, shares: PrefillShares, source: int, window_left: int,
    o: torch.Tensor, lse: torch.Tensor, options: dict[str, Any],
) -> None:  # fmt: skip
    """Own queries over the new keys that one rank computed."""
    rank = shares.layout.rank
    own, theirs = shares.lens(rank), shares.lens(source)
    _, first_pages = shares.places(source)
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
        table = PageTable.from_block_table(ids[seqs].to(q.device), lens.to(q.device), page_size=PAGE)
        table = table.with_key_ranges(ranges[:, None].contiguous().to(q.device))
        paged_decode(q, keys, table, out=o, lse=lse, **options)
        return
    # In its own block, an early query sees the early part. In an earlier rank's block, all see the early
    # part; of a later rank's, late queries see both.
    seen = [
        (0 if source > rank else early, early if source < rank else early + late) for early, late in theirs
    ]
    lens = torch.tensor(seen, dtype=_I32).flatten()
    starts = torch.tensor([0, *(count for pair in own for count in pair)]).cumsum(0).to(q.device, _I32)
    table = PageTable.from_block_table(
        ids.repeat_interleave(2, 0).to(q.device), lens.to(q.device), page_size=PAGE
    )
    batch_prefill(q, keys, table, starts, causal=source == rank, out=o, lse=lse, **options)


def _rows_of(shares: PrefillShares, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence of each of a rank's tokens, and its place among the sequence's new tokens."""
    empty = torch.zeros(0, dtype=torch.int64)
    seqs, positions = [empty], [empty]
    for seq, blocks in enumerate(shares.blocks(rank)):
        for block in blocks:
            positions.append(torch.arange(block.start, block.stop))
            seqs.append(torch.full((len(block),), seq))
    return torch.cat(seqs), torch.cat(positions)


def _older_keys(shares: PrefillShares, cache: PagedKVCache, page_table: PageTable) -> PageTable:
    """This rank's block table of the older tokens."""
    whole = replace(page_table, before_append=False)
    local = shares.layout.shard_table(whole, cache.page_size).table
    return local.to_block_table(max(whole.page_ids.shape[-1], 1))


def _attend_older(
    q: torch.Tensor, cache: PagedKVCache, page_table: PageTable, local: PageTable, shares: PrefillShares,
    group: dist.ProcessGroup, window_left: int, o: torch.Tensor, lse: torch.Tensor, options: dict[str, Any],
) -> None:  # fmt: skip
    """Attends all ranks' queries to this rank's older keys, `local`; returns own rows over all older keys."""
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
    batch = len(shares.new_lens)
    if window_left >= 0:
        seqs = torch.full((world, most), batch)
        positions = torch.zeros(world, most, dtype=torch.int64)
        for rank in range(world):
            found, places = _rows_of(shares, rank)
            seqs[rank, : len(found)], positions[rank, : len(found)] = found, places
        of_row = seqs.flatten().to(device)
        whole = torch.cat([page_table.seq_lens_tensor(), lens.new_zeros(1).to(page_table.seq_lens_tensor())])[
            of_row
        ]
        begin = layout.local_lens(whole + positions.flatten().to(device) - window_left)
        ranges = torch.stack((begin.to(_I32), lens[of_row]), -1)[:, None].contiguous()
        table = PageTable.from_block_table(ids[of_row], lens[of_row], page_size=cache.page_size)
        paged_decode(everyone, cache, table.with_key_ranges(ranges), out=part_o, lse=part_lse, **options)
    else:
        counts = []
        for rank in range(world):
            own = [a + b for a, b in shares.lens(rank)]
            counts += [*own, most - sum(own)]
        starts = torch.tensor([0, *counts]).cumsum(0).to(device, _I32)
        table = PageTable.from_block_table(
            ids.repeat(world, 1), lens.repeat(world), page_size=cache.page_size
        )
        batch_prefill(everyone, cache, table, starts, causal=False, out=part_o, lse=part_lse, **options)
    # The exchange is by rows instead of by heads: the two change places.
    sizes = ExchangeSizes(world, layout.rank, heads, world * most, head_dim)
    partial = Partial(sizes, torch.float32, "a2a", device)
    partial.o.copy_(part_o.transpose(0, 1))
    partial.lse.copy_(part_lse.t())
    partial.start(group, False, None)
    mine = q.shape[0]
    if mine:
        partial.finish(0, mine, None, o.transpose(0, 1), lse.t())
