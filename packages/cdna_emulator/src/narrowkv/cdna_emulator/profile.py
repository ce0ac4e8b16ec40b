"""Where a run spent its instructions: how often each mnemonic and each loop of the code was executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .program import Program


@dataclass(frozen=True)
class Loop:
    """One loop of the code: the blocks between a branch back and its target.

    Attributes:
        first_line, last_line: lines of the assembly text that it spans.
        passes: how often waves went through it, over all waves that ran.
        mnemonics: what those passes executed, each instruction counted once for each wave.
    """

    first_line: int
    last_line: int
    passes: float
    mnemonics: Mapping[str, float]

    @property
    def mfma(self) -> float:
        """Matrix instructions that were executed in it."""
        return sum(n for name, n in self.mnemonics.items() if name.startswith("v_mfma_"))


@dataclass(frozen=True)
class Profile:
    """How often the waves of a run executed what.

    Attributes:
        mnemonics: executed wave instructions by mnemonic.
        loops: the loops that were entered, in the order of the code.
    """

    mnemonics: Mapping[str, float] = field(default_factory=dict)
    loops: tuple[Loop, ...] = ()

    @property
    def hot_loop(self) -> Loop | None:
        """The loop that executed the most matrix instructions, the innermost of equals; None without any."""
        candidates = [loop for loop in self.loops if loop.mfma]
        return max(candidates, key=lambda loop: (loop.mfma, loop.first_line - loop.last_line), default=None)


def profile(program: Program, block_counts: Sequence[float]) -> Profile:
    """The profile of a run from how often waves executed each block of the program."""

    def executed(first: int, last: int) -> dict[str, float]:
        total: Counter[str] = Counter()
        for block, times in zip(
            program.blocks[first : last + 1], block_counts[first : last + 1], strict=True
        ):
            if times:
                for inst in block.instructions:
                    total[inst.name] += times  # type: ignore[assignment]
        return dict(total)

    loops = tuple(
        Loop(
            program.blocks[block.target].instructions[0].line,
            block.last.line,
            block_counts[index],
            executed(block.target, index),
        )
        for index, block in enumerate(program.blocks)
        if 0 <= block.target <= index and block_counts[index]
    )
    return Profile(executed(0, len(program.blocks) - 1), loops)
