"""Memory of context-parallel decode steps: received queries, partial results, merged rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from narrowkv.attn_decode import DecodeShape
from narrowkv.context_parallel.exchange import ExchangeSizes, Partial, Take, block_elements
from narrowkv.context_parallel.layout import ShardLayout
from narrowkv.runtime.launch import Workspace, block_bytes
from narrowkv.runtime.launch.workspace import Block

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

    def sizes(self, tokens: int) -> ExchangeSizes:
        """Sizes of the exchange of one head group in calls with this many query tokens."""
        shape, layout = self.shape, self.layout
        return ExchangeSizes(
            layout.world, layout.rank, tokens, shape.num_qo_heads // self.head_groups, shape.head_dim
        )


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


def allocate(moves: Moves, tokens: int, symmetric: torch.Tensor | None, workspace: Workspace) -> Buffers:
    """Buffers of calls with this many query tokens, from the beginning of the workspace.

    Args:
        moves: what steps send.
        tokens: query tokens of a call.
        symmetric: the symmetric buffer that other ranks write, see `symmetric_places`; None if ranks send by
            collectives.
        workspace: at least `exchange_bytes(moves)`.
    """
    views = iter(workspace.carve(_blocks(moves, tokens, symmetric)))
    return _buffers(moves, tokens, symmetric, lambda shape, dtype: next(views))


def exchange_bytes(moves: Moves) -> int:
    """Bytes of a workspace that `allocate` can use for every number of query tokens up to the largest."""
    symmetric = None
    if moves.comm == "symm_mem":
        symmetric = torch.empty(symmetric_places(moves)[1][-1], dtype=torch.uint8, device="meta")
    return block_bytes(_blocks(moves, moves.shape.batch * moves.shape.q_len, symmetric))


def _blocks(moves: Moves, tokens: int, symmetric: torch.Tensor | None) -> list[Block]:
    """Shapes and dtypes of the tensors that `_buffers` makes, in order."""
    blocks: list[Block] = []

    def take(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        blocks.append((shape, dtype))
        return torch.empty(shape, dtype=dtype, device="meta")

    _buffers(moves, tokens, symmetric, take)
    return blocks


def _buffers(moves: Moves, tokens: int, symmetric: torch.Tensor | None, take: Take) -> Buffers:
    shape, world, groups = moves.shape, moves.layout.world, moves.head_groups
    own = (tokens, shape.num_qo_heads // world, shape.head_dim)
    per_group, dtype = moves.sizes(tokens), shape.q_dtype
    gathered: torch.Tensor | None = None
    received: list[torch.Tensor | None] = [None] * groups
    if symmetric is not None:
        queries, places = symmetric_places(moves)
        size = block_elements(per_group, moves.partial_dtype)
        size *= per_group.heads * moves.partial_dtype.itemsize
        received = [symmetric[at : at + size].view(moves.partial_dtype) for at in places[:-1]]
        if queries:
            size = world * own[0] * own[1] * own[2] * dtype.itemsize
            gathered = symmetric[:size].view(dtype).view(world, *own)
    elif moves.heads == "sharded":
        gathered = take((world, *own), dtype=dtype)
    partial = [
        Partial(per_group, moves.partial_dtype, moves.comm, moves.device, take, got) for got in received
    ]
    q = None
    if groups > 1 or (gathered is not None and tokens > 1):
        q = take((groups, tokens, per_group.heads, shape.head_dim), dtype=dtype)
    merged = merged_lse = None
    if moves.heads == "replicated":
        merged = take(own, dtype=torch.float32), take((world, *own), dtype=torch.float32)
        merged_lse = take(own[:2], dtype=torch.float32), take((world, *own[:2]), dtype=torch.float32)
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
    sizes = moves.sizes(tokens)
    block = block_elements(sizes, moves.partial_dtype) * moves.partial_dtype.itemsize
    queries = tokens * shape.num_qo_heads * shape.head_dim * shape.q_dtype.itemsize
    queries = _aligned(queries) if moves.heads == "sharded" else 0
    return queries, [queries + number * _aligned(sizes.heads * block) for number in range(groups + 1)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256
