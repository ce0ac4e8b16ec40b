"""Hazards: memory results that are used before they are waited for, and missing wait states.

Memory instructions write their registers, or LDS, at some time between their issue and the s_waitcnt that
waits for them. A wave's `InFlight` holds these accesses; a `HazardModel` says how a basic block changes it
and which instructions of the block are wrong. Neither depends on values, so each block is examined once
for each state that it is entered with, and a run looks the result up.

Sources: "Data Dependency Resolution" and S_WAITCNT of the CDNA3 and CDNA4 ISA documents:

- vmcnt counts vector memory loads, stores and atomics, which return in order;
- lgkmcnt counts LDS instructions, which return in order, and scalar loads, which do not: with a scalar load
  under way only lgkmcnt(0) says anything;
- flat instructions count in both, and in no order;
- a barrier does not wait for stores: what other waves of the workgroup have in flight there is not published
  by a release behind it (buffer_wbl2);
- expcnt counts exports, which compute kernels have none of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from .errors import HazardError, ReleaseError
from .parser import Instruction
from .program import Program
from .usage import Usage, register_name, usage
from .wait_states import Dependencies, dependencies

_WATCHED = ("ds_read", "ds_write")


class InFlight(NamedTuple):
    """The instructions of a wave that are in flight, as numbers in the order of the text.

    Attributes:
        vector: instructions that vmcnt counts, oldest first.
        local: instructions that lgkmcnt counts, oldest first.
        recent: instructions that later ones need wait states after, with the wait states since then.
        shared: stores that other waves of the workgroup had in flight at the last barrier.
    """

    vector: tuple[int, ...] = ()
    local: tuple[int, ...] = ()
    recent: tuple[tuple[int, int], ...] = ()
    shared: tuple[int, ...] = ()


@dataclass(frozen=True)
class Passage:
    """How a block changes a state.

    Attributes:
        state: number of the state behind the block.
        to_lds: for each LDS read of the block (by `id` of its instruction), the number of loads to LDS of its
            own wave that are in flight at that point, if there are any.
    """

    state: int
    to_lds: dict[int, int] = field(default_factory=dict)


# More wait states of a branch that is taken, which fetches instructions anew: 16 clocks in all, half of what
# LLVM's scheduling model says (SISchedule.td, WriteBranch). LLVM itself counts the branches that end a block,
# those behind the taken one too, and so puts fewer waits at the head of a loop than a path into it has steps.
_TAKEN = 3

_NO_WAIT = {"vmcnt": 63, "expcnt": 7, "lgkmcnt": 15}  # the largest count of each field waits for nothing


def wait_counts(inst: Instruction) -> dict[str, int]:
    """Counters that an s_waitcnt waits for: ``{"vmcnt": 0}`` for ``s_waitcnt vmcnt(0)``."""
    counts = {name: int(n, 0) for name, n in re.findall(r"(vmcnt|lgkmcnt|expcnt)\((\w+)\)", inst.text)}
    if not counts:  # S_WAITCNT's immediate: vmcnt in bits 15:14 and 3:0, expcnt in 6:4, lgkmcnt in 11:8
        code = int(inst.operands[0], 0)
        counts = {
            "vmcnt": code & 15 | (code >> 10) & 0x30,
            "expcnt": (code >> 4) & 7,
            "lgkmcnt": code >> 8 & 15,
        }
    return {name: count for name, count in counts.items() if count < _NO_WAIT[name]}


class HazardModel:
    """The hazards of one program.

    Args:
        program: from `load_program`.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._code: list[Instruction] = []
        self._first: list[int] = []
        for block in program.blocks:
            self._first.append(len(self._code))
            self._code += block.instructions
        self._usage: list[Usage] = [usage(inst, program) for inst in self._code]
        self._dependencies: list[Dependencies] = [
            dependencies(inst, use, program) for inst, use in zip(self._code, self._usage, strict=True)
        ]
        self._states: list[InFlight] = [InFlight()]
        self._numbers: dict[InFlight, int] = {InFlight(): 0}
        self._passages: dict[tuple[int, int], Passage] = {}
        self.has_loads_to_lds = any(use.kind == "to_lds" for use in self._usage)

    def state(self, number: int) -> InFlight:
        """The state with that number; 0 is a wave's first."""
        return self._states[number]

    def pending_lds(self, numbers: Iterable[int]) -> tuple[list[Instruction], list[Instruction]]:
        """LDS instructions and loads to LDS in flight, oldest first; the longest list of several states."""
        local: list[Instruction] = []
        vector: list[Instruction] = []
        for number in numbers:
            state = self._states[number]
            reads_lds = [self._code[k] for k in state.local if self._code[k].name.startswith(_WATCHED)]
            to_lds = [self._code[k] for k in state.vector if self._usage[k].kind == "to_lds"]
            local, vector = max(local, reads_lds, key=len), max(vector, to_lds, key=len)
        return local, vector

    def stores(self, numbers: Iterable[int]) -> set[int]:
        """Stores to device memory that are in flight in any of several states."""
        in_flight = {k for number in numbers for k in self._states[number].vector}
        return {
            k for k in in_flight
            if self._usage[k].kind in ("store", "atomic") and not self._code[k].name.startswith("scratch_")
        }  # fmt: skip

    def behind_barrier(self, number: int, shared: Iterable[int]) -> int:
        """The state behind a barrier at which other waves of the workgroup have stores in flight."""
        return self._number(self._states[number]._replace(shared=tuple(sorted(shared))))

    def _number(self, state: InFlight) -> int:
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self._states)
            self._states.append(state)
        return number

    @staticmethod
    def lds_calls(inst: Instruction) -> int:
        """Number of LDS accesses that the emulator makes for an instruction."""
        if inst.name.startswith(("ds_read2", "ds_write2")):
            return 2
        if inst.name.startswith("ds_"):
            return 1
        wide = re.search(r"dwordx(\d)$", inst.name)
        return int(wide.group(1)) if wide else 1

    def passage(self, block: int, number: int) -> Passage:
        """How a block changes a state.

        Raises:
            HazardError: an instruction of the block uses what it does not wait for.
        """
        known = self._passages.get((block, number))
        if known is None:
            known = self._passages[block, number] = self._examine(block, self._states[number])
        return known

    def explore(self, limit: int = 20_000) -> bool:
        """Examine every block in every state that some path from the entry leads to, taken or not.

        Args:
            limit: pairs of block and state to examine at most; conditional loads in a row double the states.

        Returns:
            Whether all pairs were examined.

        Raises:
            HazardError: some path has a hazard.
        """
        blocks = self.program.blocks
        todo = [(self.program.entry, 0)]
        seen = set(todo)
        while todo:
            block, number = todo.pop()
            after = self.passage(block, number).state
            following = []
            if blocks[block].target >= 0:
                following.append((blocks[block].target, self._after_branch(after)))
            if blocks[block].end not in ("always", "exit") and block + 1 < len(blocks):
                following.append((block + 1, after))
            for pair in following:
                if pair not in seen:
                    if len(seen) >= limit:
                        return False
                    seen.add(pair)
                    todo.append(pair)
        return True

    def _after_branch(self, number: int) -> int:
        """Number of the state behind a branch that is taken."""
        state = self._states[number]
        aged = ((k, age + _TAKEN) for k, age in state.recent)
        recent = tuple((k, age) for k, age in aged if age < self._dependencies[k].horizon)
        return self._number(state._replace(recent=recent))

    def _examine(self, block: int, state: InFlight) -> Passage:
        vector, local = list(state.vector), list(state.local)
        recent = [(k, -age) for k, age in state.recent]
        now = 0
        to_lds: dict[int, int] = {}
        first = self._first[block]
        pending = 0
        for k in (*vector, *local):
            pending |= self._usage[k].writes
        for at in range(first, first + len(self.program.blocks[block].instructions)):
            use, needs = self._usage[at], self._dependencies[at]
            if use.kind == "wait":
                self._wait(self._code[at], vector, local)
                pending = 0
                for k in (*vector, *local):
                    pending |= self._usage[k].writes
            elif (use.reads | use.writes) & pending:
                self._check_pending(at, use, vector, local)
            self._check_fences(at, use, vector, state.shared)
            if recent and needs.used:
                hidden = 0  # registers that a later instruction of `recent` writes: its own distance counts
                for earlier, when in reversed(recent):
                    self._check_distance(at, needs, earlier, now - when, hidden)
                    hidden |= self._usage[earlier].writes
            if use.kind == "ds" and self.has_loads_to_lds:
                count = sum(self.lds_calls(self._code[k]) for k in vector if self._usage[k].kind == "to_lds")
                if count:
                    to_lds[id(self._code[at])] = count
            if use.is_vector_memory:
                vector.append(at)
                # The counter ends at 63: a wave issues no more before its oldest access has completed.
                del vector[: -_NO_WAIT["vmcnt"]]
                pending |= use.writes
            if use.kind in ("ds", "smem") or use.is_flat:
                local.append(at)
                pending |= use.writes
            now += needs.states
            if needs.produced:
                recent = [(k, when) for k, when in recent if now - when < self._dependencies[k].horizon]
                recent.append((at, now))
        kept = tuple((k, now - when) for k, when in recent if now - when < self._dependencies[k].horizon)
        return Passage(self._number(InFlight(tuple(vector), tuple(local), kept, state.shared)), to_lds)

    def _wait(self, inst: Instruction, vector: list[int], local: list[int]) -> None:
        for counter, count in wait_counts(inst).items():
            queue = {"vmcnt": vector, "lgkmcnt": local}.get(counter)
            if queue is None or len(queue) <= count:
                continue
            in_order = counter == "vmcnt" or all(self._usage[k].kind == "ds" for k in queue)
            if count == 0:
                queue.clear()
            elif in_order and not any(self._usage[k].is_flat for k in queue):
                del queue[: len(queue) - count]

    def _error(self, at: int, message: str, kind: type[HazardError] = HazardError) -> HazardError:
        inst = self._code[at]
        return kind(message, kernel=self.program.kernel_name, line=inst.line, source=inst.text)

    def _check_pending(self, at: int, use: Usage, vector: list[int], local: list[int]) -> None:
        for queue, counter in ((vector, "vmcnt"), (local, "lgkmcnt")):
            for position, k in enumerate(queue):
                earlier = self._usage[k]
                read, written = use.reads & earlier.writes, use.writes & earlier.writes
                if written and not read and counter == "vmcnt" and use.is_vector_memory:
                    if not (use.is_flat or earlier.is_flat):
                        written = 0  # results of vector memory return in order
                if not read | written:
                    continue
                count = len(queue) - position - 1
                ordered = not any(self._usage[q].kind == "smem" or self._usage[q].is_flat for q in queue)
                name, verb = register_name(read or written, self.program), "reads" if read else "overwrites"
                raise self._error(
                    at,
                    f"{self._code[at].name} {verb} {name} before line {self._code[k].line} "
                    f"({self._code[k].text}) has written it: wait for {counter}({count if ordered else 0})",
                )

    def _check_fences(self, at: int, use: Usage, vector: list[int], shared: tuple[int, ...]) -> None:
        if use.kind == "writeback" and shared:
            raise self._error(
                at,
                f"{self._code[at].name} publishes line {self._code[shared[0]].line} "
                f"({self._code[shared[0]].text}) of another wave, which may not have reached memory: wait "
                "for vmcnt(0) before the barrier between them",
                ReleaseError,
            )
        if use.kind == "invalidate" and vector:
            raise self._error(
                at,
                f"the cache is invalidated while line {self._code[vector[0]].line} "
                f"({self._code[vector[0]].text}) is under way: wait for vmcnt(0)",
            )
        if use.kind in ("store", "atomic"):
            for k in vector:
                if self._usage[k].kind == "writeback":
                    raise self._error(
                        at,
                        f"{self._code[at].name} publishes before the cache write-back of line "
                        f"{self._code[k].line} ({self._code[k].text}) is done: wait for vmcnt(0)",
                        ReleaseError,
                    )

    def _check_distance(self, at: int, needs: Dependencies, earlier: int, age: int, hidden: int) -> None:
        for rule in self._dependencies[earlier].produced:
            used = needs.used.get(rule.what, 0)
            if not used & rule.registers & ~hidden:
                continue
            states = rule.exact_states if used == rule.registers else rule.states
            if age < states:
                inst = self._code[earlier]
                name = register_name(used & rule.registers, self.program)
                raise self._error(
                    at,
                    f"{rule.what} ({name}, from line {inst.line}: {inst.text}): {states} wait states are "
                    f"needed, there are {age}",
                )


@lru_cache(maxsize=4)
def hazard_model(program: Program) -> HazardModel:
    """The model of a program, kept for its next launches."""
    return HazardModel(program)
