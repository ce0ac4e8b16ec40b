"""Device memory that a caller allocates once and that plans share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from narrowkv.runtime.errors import check_positive_int
from narrowkv.runtime.launch.gpu import current_stream

_ALIGNMENT = 256
# Arrival counters of launches that merge partial results, which calls share unless they need more. Every
# kernel leaves them zero.
MOST_COUNTERS = 1 << 16

Block = tuple[Sequence[int], torch.dtype]


def block_bytes(blocks: Sequence[Block]) -> int:
    """Bytes that blocks of these shapes and dtypes take, each aligned to 256 bytes."""
    return sum(-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in blocks)


class Workspace:
    """One buffer for the partial results of every plan that uses it.

    Plans may share a workspace if their calls never run at the same time: calls on one stream do not.

    Args:
        num_bytes: at least the largest `plan.workspace_bytes()` of the plans that use it; may be 0.
        device: where the plans' tensors are.

    Example:
        >>> workspace = Workspace(1024, "cpu")
        >>> acc, ml = workspace.carve([((4, 8), torch.float32), ((4, 2), torch.float32)])
        >>> acc.shape, ml.shape
        (torch.Size([4, 8]), torch.Size([4, 2]))
    """

    def __init__(self, num_bytes: int, device: torch.device | str) -> None:
        self.num_bytes = check_positive_int("num_bytes", num_bytes) if num_bytes else 0
        self._buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self._counters = torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
        self.device = self._buffer.device

    def carve(self, blocks: Sequence[Block]) -> tuple[torch.Tensor, ...]:
        """Views of the buffer's beginning, one a block; their contents are undefined.

        Raises:
            ValueError: the workspace is too small; the message says what is needed.
        """
        needed = block_bytes(blocks)
        if needed > self.num_bytes:
            raise ValueError(f"workspace must have at least {needed} bytes, got {self.num_bytes}")
        views, begin = [], 0
        for shape, dtype in blocks:
            size = math.prod(shape) * dtype.itemsize
            views.append(self._buffer[begin : begin + size].view(dtype).view(*shape))
            begin += block_bytes([(shape, dtype)])
        return tuple(views)

    def counters(self, count: int) -> torch.Tensor:
        """`[count]` int32 arrival counters, zero before and after every launch that uses them.

        More than the workspace has are allocated. Plans ask for them when they are made, so that none are
        while a graph is captured.
        """
        if count > self._counters.numel():
            self._counters = self._counters.new_zeros(count)
        return self._counters[:count]


_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def zeroed_counters(count: int, device: torch.device) -> torch.Tensor:
    """At least `count` arrival counters of a call whose plan has none.

    Calls on one stream share them, because every launch leaves them zero. A graph has its own: it may be
    replayed on another stream.
    """
    if count > MOST_COUNTERS or device.type == "cpu" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device, current_stream(device.index))
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
    return found
