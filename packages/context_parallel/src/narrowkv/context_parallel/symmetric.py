"""Memory that the GPUs of a group write into directly: `torch.distributed._symmetric_memory`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from narrowkv.runtime.errors import UnsupportedError


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
