"""The one place that runs a kernel: the emulator of narrowkv-cdna-emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from narrowkv.cdna_emulator import Memory, load_program, run

__all__ = ["Engine"]


@dataclass(frozen=True)
class Engine:
    """Runs launches.

    Attributes:
        checked: run every check that the emulator has (races, uninitialised values, waits and hazards),
            with numpy; otherwise the compiled engine where there is a compiler, which checks bounds,
            alignment, LDS limits and endless loops.
    """

    checked: bool = False

    def load(self, assembly: str, lds_bytes: int) -> Any:
        """The program of a kernel's assembly, for `run`."""
        return load_program(assembly, lds_bytes=lds_bytes, lazy=True)

    def run(self, program: Any, grid: tuple[int, int, int], args: Sequence[int], memory: Memory) -> float:
        """Runs all workgroups.

        Returns:
            The number of wave instructions.
        """
        options: dict[str, Any]
        if self.checked:
            options = {"detect_races": True, "detect_hazards": True}
        else:
            options = {"engine": "auto", "check_uninitialised": False, "wave_order": "lockstep"}
        result = run(program, grid=grid, args=args, memory=memory, **options)
        return result.counts.wave_instructions
