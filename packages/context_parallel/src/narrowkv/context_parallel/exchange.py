"""Partial results of all heads on every rank, brought to the ranks that own the heads and merged there.

"a2a" is the exchange of Helix Parallelism (Bhatia et al., arXiv 2507.07120): one all-to-all of partial O and
lse packed together. "ag_rs" is the lse all-gather and reduce-scatter that engines had before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from narrowkv.attn_decode.merging import launch_merge
from narrowkv.context_parallel.groups import Group, all_gather, group_of, padded, reduce_scatter
from narrowkv.runtime.errors import (
    UnsupportedError,
    check_choice,
    check_dtype,
    check_out_dtype,
    check_shape,
    check_sinks,
)

COMMS = ("a2a", "ag_rs", "symm_mem")
PARTIAL_DTYPES = (torch.float32, torch.bfloat16)
# A function like `torch.empty`: takes a shape, and a dtype by keyword.
Take = Callable[..., torch.Tensor]


class SymmetricMemory:
    """A buffer of every rank's that all ranks can write, and a barrier on the device.

    Args:
        num_bytes: of each rank's buffer; equal on all ranks.
        group: the ranks.
        device: this rank's GPU.

    Raises:
        UnsupportedError: no GPU, a torch without symmetric memory, or GPUs that do not reach each other.
    """

    def __init__(self, num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        other = "use comm='a2a', which needs collectives only"
        if device.type != "cuda":
            raise UnsupportedError(f"comm='symm_mem' needs GPUs, got {device}: {other}")
        try:
            import torch.distributed._symmetric_memory as symmetric_memory
        except ImportError as error:
            raise UnsupportedError(
                f"comm='symm_mem' needs torch.distributed._symmetric_memory, which torch {torch.__version__} "
                f"has not: {other}"
            ) from error
        try:
            self.buffer = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
            self._handle: Any = symmetric_memory.rendezvous(self.buffer, group)
        except (RuntimeError, AttributeError) as error:
            raise UnsupportedError(
                f"comm='symm_mem' cannot share memory between these GPUs ({error}): {other}"
            ) from error
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._buffers = [
            self.buffer
            if peer == self._rank
            else self._handle.get_buffer(peer, [num_bytes], torch.uint8).view(torch.uint8)
            for peer in range(self._world)
        ]

    def push(self, pieces: torch.Tensor, into: torch.Tensor) -> None:
        """Writes `pieces[peer]` to `into[own rank]` of each peer; `into` is a view of this rank's buffer.

        Both are `[world, ...]`, contiguous. Peers see it after the next `barrier`.
        """
        begin = into.data_ptr() - self.buffer.data_ptr()
        size = into[0].numel() * into.element_size()
        at = begin + self._rank * size
        for step in range(self._world):
            peer = (self._rank + step) % self._world
            piece = pieces[peer].reshape(-1).view(torch.uint8)
            self._buffers[peer][at : at + size].copy_(piece)

    def barrier(self) -> None:
        """Waits, on the device's current stream, until all ranks' earlier writes have landed."""
        self._handle.barrier(channel=0)


@dataclass(frozen=True)
class ExchangeSizes:
    """Sizes of an exchange: `tokens` rows of `heads` heads of `head_dim` channels over `world` ranks."""

    world: int
    rank: int
    tokens: int
    heads: int
    head_dim: int

    @property
    def own_heads(self) -> int:
        """Heads whose merged result a rank has."""
        return self.heads // self.world


class Partial:
    """Memory for one rank's partial result of some heads, and for the merged result.

    A head's block is its tokens' rows of O and then their lse. A collective sends whole blocks of heads,
    attention writes its rows in place, and the merge reads received blocks without copying them.

    Args:
        sizes: sizes of the exchange.
        dtype: of partial O on its way, fp32 or bf16.
        comm: see `COMMS`.
        device: where the memory is.
        take: makes each tensor; `torch.empty` on the device if None.
        received: memory to receive into, of this dtype, `block_elements` for each head; `take` makes it if
            None.
    """

    def __init__(
        self, sizes: ExchangeSizes, dtype: torch.dtype, comm: str, device: torch.device,
        take: Take | None = None, received: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        s = self.sizes = sizes
        self.comm, self.dtype = comm, dtype
        take = functools.partial(torch.empty, device=device) if take is None else take
        self.lse = take((s.tokens, s.heads), dtype=torch.float32)
        if comm == "ag_rs":
            self.o = take((s.tokens, s.heads, s.head_dim), dtype=dtype)
            self.everyones_lse = take((s.world, s.tokens, s.heads), dtype=torch.float32)
            self.merged_lse = take((s.tokens, s.heads), dtype=torch.float32)
            self.send = take((s.heads, s.tokens, s.head_dim), dtype=dtype)
            self.recv = take((s.own_heads, s.tokens, s.head_dim), dtype=dtype)
            return
        width = block_elements(s, dtype)
        self.send = take((s.heads, width), dtype=dtype)
        received = take((s.heads, width), dtype=dtype) if received is None else received
        self.recv = received.view(s.world, s.own_heads, width)
        self.o = self.send.as_strided((s.tokens, s.heads, s.head_dim), (s.head_dim, width, 1))
        rows = s.tokens * s.head_dim
        begin = rows * dtype.itemsize // 4
        sent, got = self.send.view(torch.float32), self.recv.view(torch.float32)
        self.sent_lse = sent[:, begin : begin + s.tokens].t()  # [tokens, heads]
        self.got_o = self.recv[..., :rows].view(s.world, s.own_heads, s.tokens, s.head_dim).transpose(1, 2)
        self.got_lse = got[..., begin : begin + s.tokens].transpose(1, 2)  # [world, tokens, own heads]

    def start(self, group: dist.ProcessGroup, overlap: bool, memory: SymmetricMemory | None) -> Any:
        """Begins the exchange of what `o` and `lse` hold; returns what `finish` waits for, or None."""
        if self.comm == "ag_rs":
            all_gather(self.everyones_lse.flatten(0, 1), self.lse, group=group)
            launch_merge(
                self.o[None], self.everyones_lse, None, self.send.transpose(0, 1), self.merged_lse,
                only=self.sizes.rank,
            )  # fmt: skip
            return reduce_scatter(self.recv, self.send, group=group, async_op=overlap)
        self.sent_lse.copy_(self.lse)
        if memory is not None:
            memory.push(self.send.view(self.sizes.world, -1), self.recv.view(self.sizes.world, -1))
            return None
        return dist.all_to_all_single(self.recv.flatten(0, 1), self.send, group=group, async_op=overlap)

    def finish(
        self, begin: int, end: int, sinks: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Merges this rank's heads [begin, end) of those exchanged into `out` `[tokens, heads, D]`."""
        own = slice(begin, end)
        if self.comm == "ag_rs":
            first = self.sizes.rank * self.sizes.own_heads
            merged = self.merged_lse[None, :, first + begin : first + end]
            launch_merge(self.recv[own].transpose(0, 1)[None], merged, sinks, out, lse)
        else:
            launch_merge(self.got_o[:, :, own], self.got_lse[:, :, own], sinks, out, lse)


def sent_bytes(s: ExchangeSizes, dtype: torch.dtype, comm: str) -> int:
    """Bytes that a rank sends to others in one exchange of partial O in this dtype."""
    others = s.world - 1
    if comm == "ag_rs":
        # As a ring sends them: lse to each other rank, and world - 1 steps of one share of O.
        share = s.own_heads * s.tokens * s.head_dim * dtype.itemsize
        return others * (s.tokens * s.heads * 4 + share)
    return others * s.own_heads * block_elements(s, dtype) * dtype.itemsize


def block_elements(sizes: ExchangeSizes, dtype: torch.dtype) -> int:
    """Elements of a head's block: rows of O, then lse in fp32."""
    return padded(sizes.tokens * sizes.head_dim + sizes.tokens * 4 // dtype.itemsize, dtype)


def merge_over_ranks(
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    group: Group = None,
    comm: str = "a2a",
    partial_dtype: torch.dtype = torch.float32,
    sinks: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the ranks' results of attention to their own keys, of any attention; every rank must call it.

    Args:
        o: `[tokens, heads, head_dim]`, bf16, fp16 or fp32: this rank's results of all heads, each normalised,
            without sinks.
        lse: `[tokens, heads]` fp32, natural logarithms; -inf where this rank has no keys.
        group, comm, partial_dtype: as for `plan_cp_decode`, but "symm_mem", which needs a plan.
        sinks: `[heads / ranks]` of this rank's heads: a logit with value 0 in the denominator.
        out_dtype: of the result; default o's.

    Returns:
        `(o, lse)` over all ranks' keys, `[tokens, heads / ranks, head_dim]` and `[tokens, heads / ranks]`, of
        this rank's heads; the heads lie in rank order.

    Raises:
        TypeError, ValueError: for wrong shapes or dtypes, or heads that the ranks do not divide.

    Example:
        >>> o, lse = merge_over_ranks(o_partial, lse_partial, group=mesh["cp"])          # doctest: +SKIP
    """
    ranks = group_of(group)
    check_choice("comm", comm, [name for name in COMMS if name != "symm_mem"])
    check_dtype("o", o, (torch.bfloat16, torch.float16, torch.float32))
    check_shape("o", o, ("tokens", "heads", "head_dim"))
    check_dtype("lse", lse, torch.float32)
    check_shape("lse", lse, tuple(o.shape[:2]))
    if partial_dtype not in PARTIAL_DTYPES:
        raise ValueError(f"partial_dtype must be one of {PARTIAL_DTYPES}, got {partial_dtype}")
    tokens, heads, head_dim = o.shape
    if heads % ranks.size():
        raise ValueError(f"o must have heads that the {ranks.size()} ranks divide, got {heads}")
    sizes = ExchangeSizes(ranks.size(), ranks.rank(), tokens, heads, head_dim)
    check_sinks(sinks, sizes.own_heads, o.device, like="o")
    check_out_dtype(out_dtype)
    partial = Partial(sizes, partial_dtype, comm, o.device)
    partial.o.copy_(o)
    partial.lse.copy_(lse)
    merged = o.new_empty(tokens, sizes.own_heads, head_dim, dtype=out_dtype or o.dtype)
    merged_lse = lse.new_empty(tokens, sizes.own_heads)
    if tokens:
        partial.start(ranks, False, None)
        partial.finish(0, sizes.own_heads, sinks, merged, merged_lse)
    return merged, merged_lse
