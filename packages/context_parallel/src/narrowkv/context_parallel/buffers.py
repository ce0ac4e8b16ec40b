"""Memory of context-parallel decode steps: received queries, partial results, merged rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from narrowkv.attn_decode import DecodeShape
from narrowkv.context_parallel.exchange import Partial, Sizes, block_elements
from narrowkv.context_parallel.layout import ShardLayout
from narrowkv.context_parallel.symmetric import SymmetricMemory

HEADS = ("sharded", "replicated")


@dataclass(frozen=True)
class Moves:
    """Buffers that steps send to other ranks; the fields are those of `CPDecodePlan`."""

    layout: ShardLayout
    comm: str
    partial_dtype: torch.dtype
    heads: str
    head_groups: int
    shape: DecodeShape
    device: torch.device


class Buffers(NamedTuple):
    """Memory of calls with one number of query tokens.

    Attributes:
        gathered: `[world, tokens, own heads, head_dim]`, received queries; None for replicated ones.
        q: queries of each head group, `[tokens, heads of the group, head_dim]`.
        partial: of each head group.
        merged: `[tokens, own heads, head_dim]`, and everyone's, for replicated heads only.
    """

    gathered: torch.Tensor | None
    q: torch.Tensor | None
    partial: list[Partial]
    merged: tuple[torch.Tensor, torch.Tensor] | None
    merged_lse: tuple[torch.Tensor, torch.Tensor] | None


def allocate(moves: Moves, tokens: int, memory: SymmetricMemory | None) -> Buffers:
    """Buffers of calls with this many query tokens; those that other ranks write are in symmetric memory."""
    shape, world, groups = moves.shape, moves.layout.world, moves.head_groups
    own = (tokens, shape.num_qo_heads // world, shape.head_dim)
    per_group = Sizes(world, moves.layout.rank, tokens, shape.num_qo_heads // groups, shape.head_dim)
    device, dtype = moves.device, shape.q_dtype
    gathered: torch.Tensor | None = None
    received: list[torch.Tensor | None] = [None] * groups
    if memory is not None:
        queries, places = symmetric_places(moves)
        size = block_elements(per_group, moves.partial_dtype)
        size *= per_group.heads * moves.partial_dtype.itemsize
        received = [memory.buffer[at : at + size].view(moves.partial_dtype) for at in places[:-1]]
        if queries:
            size = world * own[0] * own[1] * own[2] * dtype.itemsize
            gathered = memory.buffer[:size].view(dtype).view(world, *own)
    elif moves.heads == "sharded":
        gathered = torch.empty(world, *own, dtype=dtype, device=device)
    partial = [
        Partial(
            per_group, moves.partial_dtype, moves.comm, device,
            None if got is None else (torch.empty_like(got), got),
        )
        for got in received
    ]  # fmt: skip
    q = None
    if groups > 1 or (gathered is not None and tokens > 1):
        q = torch.empty(groups, tokens, per_group.heads, shape.head_dim, dtype=dtype, device=device)
    merged = merged_lse = None
    if moves.heads == "replicated":
        merged = (
            torch.empty(own, dtype=torch.float32, device=device),
            torch.empty(world, *own, dtype=torch.float32, device=device),
        )
        merged_lse = (
            torch.empty(own[:2], dtype=torch.float32, device=device),
            torch.empty(world, *own[:2], dtype=torch.float32, device=device),
        )
    return Buffers(gathered, q, partial, merged, merged_lse)


def symmetric_places(moves: Moves) -> tuple[int, list[int]]:
    """The parts of a rank's symmetric buffer.

    Every batch uses the offsets of the largest batch, because a rank may write queries of the next step, of
    another batch, while this rank still reads partial results.

    Returns:
        Bytes of gathered queries, at the beginning; and where each head group's arriving partial results
        begin, and the buffer ends.
    """
    shape = moves.shape
    tokens, groups = shape.batch * shape.q_len, moves.head_groups
    sizes = Sizes(moves.layout.world, moves.layout.rank, tokens, shape.num_qo_heads // groups, shape.head_dim)
    block = block_elements(sizes, moves.partial_dtype) * moves.partial_dtype.itemsize
    queries = tokens * shape.num_qo_heads * shape.head_dim * shape.q_dtype.itemsize
    queries = _aligned(queries) if moves.heads == "sharded" else 0
    return queries, [queries + number * _aligned(sizes.heads * block) for number in range(groups + 1)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256
