"""Profile of a run: how often each mnemonic and each loop of the code was executed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .program import Program


@dataclass(frozen=True)
class Loop:
    """One loop of the code.

    Attributes:
        first_line, last_line: lines of the assembly text within which it lies.
        passes: iterations, summed over all waves that ran.
        mnemonics: instructions executed in those iterations, counted once for each wave.
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
    """Instructions that the waves of a run executed.

    Attributes:
        mnemonics: executed wave instructions by mnemonic.
        loops: the loops that were entered, in the order of the code.
    """

    mnemonics: Mapping[str, float] = field(default_factory=dict)
    loops: tuple[Loop, ...] = ()

    @property
    def hot_loop(self) -> Loop | None:
        """The loop that executed the most matrix instructions, the innermost if several did; or None."""
        candidates = [loop for loop in self.loops if loop.mfma]
        return max(candidates, key=lambda loop: (loop.mfma, loop.first_line - loop.last_line), default=None)


def _successors(program: Program) -> dict[int, list[int]]:
    after: dict[int, list[int]] = {}
    for index, block in enumerate(program.blocks):
        after[index] = [block.target] if block.target >= 0 else []
        if block.end not in ("always", "exit") and index + 1 < len(program.blocks):
            after[index].append(index + 1)
    return after


def _finishing_order(blocks: Iterable[int], after: Mapping[int, Sequence[int]]) -> list[int]:
    """Blocks in the order in which a depth-first search leaves them."""
    order, seen = [], set()
    for root in blocks:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(after[root]))]
        while stack:
            new = next((b for b in stack[-1][1] if b not in seen), None)
            if new is None:
                order.append(stack.pop()[0])
            else:
                seen.add(new)
                stack.append((new, iter(after[new])))
    return order


def _cycles(blocks: set[int], after: Mapping[int, Sequence[int]]) -> Iterator[set[int]]:
    """The strongly connected parts of some blocks that are loops (Sharir 1981)."""
    inside = {b: [a for a in after[b] if a in blocks] for b in blocks}
    before: dict[int, list[int]] = {b: [] for b in blocks}
    for block, following in inside.items():
        for other in following:
            before[other].append(block)
    left = set(blocks)
    for root in reversed(_finishing_order(sorted(blocks), inside)):
        if root not in left:
            continue
        part, todo = {root}, [root]
        while todo:
            new = [b for b in before[todo.pop()] if b in left and b not in part]
            part.update(new)
            todo.extend(new)
        left -= part
        if len(part) > 1 or root in inside[root]:
            yield part


def _loops(
    blocks: set[int], after: Mapping[int, Sequence[int]], counts: Sequence[float]
) -> Iterator[tuple[int, set[int]]]:
    """Head and blocks of each loop, outer ones first. The compiler may lay out a loop in any order."""
    for part in _cycles(blocks, after):
        entered = part & {b for a, following in after.items() if a not in part for b in following}
        head = max(entered or part, key=lambda b: (counts[b], -b))
        yield head, part
        yield from _loops(part - {head}, after, counts)


def loop_bodies(program: Program, block_counts: Sequence[float]) -> list[tuple[int, set[int]]]:
    """Head and blocks of each loop of a program, outer loops before those inside them."""
    after = _successors(program)
    return list(_loops(set(after), after, block_counts))


def profile(program: Program, block_counts: Sequence[float]) -> Profile:
    """The profile of a run from how often waves executed each block of the program."""

    def executed(blocks: Iterable[int]) -> dict[str, float]:
        total: dict[str, float] = {}
        for index in sorted(blocks):
            if block_counts[index]:
                for inst in program.blocks[index].instructions:
                    total[inst.name] = total.get(inst.name, 0.0) + block_counts[index]
        return total

    loops = tuple(
        Loop(
            min(program.blocks[index].instructions[0].line for index in body),
            max(program.blocks[index].last.line for index in body),
            block_counts[head],
            executed(body),
        )
        for head, body in sorted(loop_bodies(program, block_counts), key=lambda item: min(item[1]))
        if block_counts[head]
    )
    return Profile(executed(range(len(program.blocks))), loops)
