"""The interface of a recorder of a run: the blocks that each wave runs and the addresses that it requests."""

from __future__ import annotations

from typing import Protocol

from .parser import Instruction
from .state import Array


class Recorder(Protocol):
    """Watches the waves of one workgroup; see `launch.record`."""

    def block(self, wave: int, index: int) -> None:
        """A wave enters a basic block."""

    def lds(self, wave: int, inst: Instruction, offsets: Array, active: Array | None, size: int) -> None:
        """A wave accesses LDS: ``[64]`` byte offsets, and the lanes that do (None: all)."""

    def memory(self, wave: int, inst: Instruction, addresses: Array, active: Array | None, size: int) -> None:
        """A wave accesses device memory: ``[64]`` addresses, and the lanes that do (None: all)."""
