"""Every s_waitcnt of a kernel of each shipped family, removed or weakened: the emulator must notice.

What one workgroup's waves execute is recorded once. A changed text is then judged by its hazards along the
recorded blocks, and where those do not tell, by a run that watches LDS. A wait that is removed unnoticed must
be needless; `_is_needless` says when it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from narrowkv.cdna_emulator import EmulatorError, HazardError, Memory, Program, load_program
from narrowkv.cdna_emulator import run as run_program
from narrowkv.cdna_emulator.hazards import HazardModel
from narrowkv.cdna_emulator.launch import record
from narrowkv.runtime.launch import LaunchOptions, executing
from narrowkv.runtime.launch.artifact import CompiledArtifact
from narrowkv.runtime.launch.compiler import compile_launch
from narrowkv.testing.cases import parse_case
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.cases.sparse import SparseCase
from narrowkv.testing.emulation import EmulateExecutor
from narrowkv.testing.operation import Workgroup

_NATIVE_FP8 = {"gfx942": "fp8_e4m3fnuz", "gfx950": "fp8_e4m3fn"}


DECODE = (DecodeCase, "head_dim=64,kv_heads=1,")
PREFILL = (PrefillCase, "q_lens=3+25,lens=20+150,")
SPARSE = (SparseCase, "")
SAGE = (SageCase, "q_lens=256,k_lens=256,head_dim=64,causal=bottom_right,")
# FP8 is the format that the target multiplies.
CALLS: dict[str, tuple[tuple[Any, str], str]] = {
    "decode, four waves, bf16": (DECODE, "split=none,ratio=40,format=bf16"),
    "decode, one wave, OCP": (DECODE, "split=none,ratio=12,lens=70+5,clean=1"),
    "decode, four waves, OCP": (DECODE, "split=none,ratio=71,clean=1"),
    "decode, splits": (DECODE, "split=per_sequence,lens=64+37+1,sinks=1"),
    "decode, FP4 native": (DECODE, "split=none,kernel=native,format=fp4_e2m1,head_dim=128,layout=HND"),
    "dense prefill": (PREFILL, "kernel=dense"),
    "dense prefill, tiles shared": (PREFILL, "kernel=dense,splits=2"),
    "fused prefill, tiles shared": (PREFILL, "kernel=fused,splits=2"),
    "fused prefill": (PREFILL, "kernel=fused,page_size=3,table=ragged"),
    "prefill, FP8 queries": (PREFILL, "kernel=fused,q=FP8,format=FP8"),
    "append, fused": (PREFILL, "operation=append,kernel=fused"),
    "append, FP8 compute": (PREFILL, "operation=append,kernel=fused,fp8_compute=1,format=FP8"),
    "sparse, fused": (SPARSE, "lens=37+0,sink=1"),
    "sparse, 16-bit rows": (SPARSE, "mode=16bit,layout=bf16,lens=37,sink=1"),
    "sparse, expanded first": (SPARSE, "mode=prepass,lens=37"),
    "sparse, FP8 query": (SPARSE, "q=fp8,lens=37"),
    "sparse decode": (SPARSE, "mode=decode,lens=37"),
    "Sage, int8": (SAGE, "qk=int8"),
    "Sage, FP8": (SAGE, "qk=fp8"),
}
_GFX950_ONLY = ("decode, FP4 native",)
_SAMPLED = 5  # mutants of a kernel that `make test` looks at


@dataclass
class Recorded:
    """One launch: what it ran on, and the blocks that the waves of some workgroups executed."""

    artifact: CompiledArtifact
    program: Program
    grid: Workgroup
    args: list[Any]
    memory: Memory
    workgroups: list[Workgroup]
    before: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
    paths: set[tuple[int, ...]] = field(default_factory=set)

    def restore(self) -> None:
        """Give the buffers what they held before the launch."""
        for data, held in self.before:
            data[...] = held


class _Paths:
    """Records the blocks of each wave."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}

    def block(self, wave: int, index: int) -> None:
        self.blocks.setdefault(wave, []).append(index)

    def lds(self, *access: object) -> None:
        pass

    def memory(self, *access: object) -> None:
        pass


class Recording(EmulateExecutor):
    """Runs launches, and records of each what its first, middle and last workgroup execute."""

    def __init__(self, target: str, done: Callable[[Recorded], None]) -> None:
        super().__init__(target)
        self._done = done

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:
        artifact = compile_launch(self.target, kernel, grid, args, constexprs, options)
        x, y, z = (*grid, 1, 1)[:3]
        memory, values = self._device_pointers(artifact.args)
        before = [(buffer.data, buffer.data.copy()) for buffer in memory.buffers]
        chosen = list(dict.fromkeys([(0, 0, 0), (x // 2, y // 2, z // 2), (x - 1, y - 1, z - 1)]))
        program = load_program(artifact.assembly, lds_bytes=artifact.lds_bytes)
        case = Recorded(artifact, program, (x, y, z), values, memory, chosen, before)
        for workgroup in chosen:
            paths = _Paths()
            record(program, grid=case.grid, args=values, memory=memory, workgroup=workgroup, recorder=paths)
            case.paths |= {tuple(blocks) for blocks in paths.blocks.values()}
        case.restore()
        self._done(case)
        case.restore()
        super().launch(kernel, grid, args, constexprs, options)


def _follow(program: Program, paths: set[tuple[int, ...]]) -> None:
    """Examine the hazards along recorded paths."""
    model = HazardModel(program)
    for path in paths:
        state = 0
        for block in path:
            state = model.passage(block, state).state


def _changed(program: Program, line: int, text: str) -> Program:
    """The program with another s_waitcnt or an s_nop on a line: neither does anything in the emulator."""
    name, _, operands = text.partition(" ")
    blocks = [
        replace(block, instructions=[
            replace(inst, name=name, operands=(operands,), text=text) if inst.line == line else inst
            for inst in block.instructions
        ]) if any(inst.line == line for inst in block.instructions) else block
        for block in program.blocks
    ]  # fmt: skip
    return replace(program, blocks=blocks)


@dataclass(frozen=True)
class Mutant:
    """A program with one wait less.

    Attributes:
        program: it.
        line: of the wait.
        is_removal: whether the wait is gone; otherwise one of its counts is one higher.
        is_executed: whether the recorded workgroups come to it.
    """

    program: Program
    line: int
    is_removal: bool
    is_executed: bool


def _mutants(case: Recorded) -> Iterator[Mutant]:
    """The program without each of its waits, and with each count of each executed wait one higher.

    Ahead of the entry lies code for firmware that loads no arguments into registers; it is not reached.
    """
    executed = {block for path in case.paths for block in path}
    for index, block in enumerate(case.program.blocks):
        for inst in block.instructions:
            if inst.name != "s_waitcnt" or index < case.program.entry:
                continue
            reached = index in executed
            yield Mutant(_changed(case.program, inst.line, "s_nop 0"), inst.line, True, reached)
            counts = re.findall(r"(\w+)\((\d+)\)", inst.text) if reached else []
            for changed in range(len(counts)):
                weaker = [f"{name}({int(n) + (k == changed)})" for k, (name, n) in enumerate(counts)]
                text = "s_waitcnt " + " ".join(weaker)
                yield Mutant(_changed(case.program, inst.line, text), inst.line, False, True)


def _fails(case: Recorded, program: Program, **watched: Any) -> bool:
    """Whether a run that watches hazards and LDS, or what is said, ends with an error."""
    case.restore()
    try:
        run_program(
            program, grid=case.grid, args=case.args, memory=case.memory, workgroups=case.workgroups,
            **(watched or {"detect_hazards": True}),
        )  # fmt: skip
    except EmulatorError:
        return True
    return False


def _is_caught(case: Recorded, mutant: Mutant) -> bool:
    try:
        _follow(mutant.program, case.paths)
        if mutant.is_executed and _fails(case, mutant.program):
            return True
        HazardModel(mutant.program).explore()  # a wait for the sake of a path that this input does not take
    except HazardError:
        return True
    return False


def _lds_under_way(case: Recorded, mutant: Mutant) -> set[int]:
    """Lines of the LDS accesses that are under way behind the block of the wait, on the recorded paths."""
    model, line = HazardModel(mutant.program), mutant.line
    blocks = enumerate(mutant.program.blocks)
    held = {k for k, block in blocks if any(inst.line == line for inst in block.instructions)}
    found: set[int] = set()
    for path in case.paths:
        state = 0
        for block in path:
            state = model.passage(block, state).state
            if block in held:
                found |= {inst.line for queue in model.pending_lds([state]) for inst in queue}
    return found


def _is_needless(case: Recorded, mutant: Mutant) -> bool:
    """Whether nothing is wrong without the wait, given that no register needs it.

    So it is in a workgroup of one wave, whose LDS accesses are served in order; where no LDS access is under
    way; where the wave waits again before its next barrier; and where the barrier may as well come before
    the access, which is the latest that the access can be: a run of that order, with the waves in step so
    that all write before one reads, has no race. It has none if the waves write the same values, and each
    reads what it wrote itself.
    """
    under_way = _lds_under_way(case, mutant)
    if case.artifact.num_warps == 1 or not under_way:
        return True
    for block in mutant.program.blocks:
        for inst in block.instructions:
            if inst.line <= mutant.line:
                continue
            if inst.name == "s_waitcnt" and "lgkmcnt" in inst.text:
                return True
            if inst.name == "s_barrier":
                lines = case.artifact.assembly.splitlines()
                barrier = lines.pop(inst.line - 1)
                start = block.instructions[0].line  # other paths may lead to what is ahead of the block
                lines.insert(min(line for line in under_way if line >= start) - 1, barrier)
                program = load_program("\n".join(lines), lds_bytes=case.artifact.lds_bytes)
                return not _fails(case, program, detect_races=True, wave_order="lockstep")
    return True


def _examine(name: str, target: str, every: Callable[[list[Mutant]], list[Mutant]]) -> None:
    mutants, needless, unreached = 0, 0, 0

    def examine(case: Recorded) -> None:
        nonlocal mutants, needless, unreached
        _follow(case.program, case.paths)  # as it is shipped it has no hazard
        removal: dict[int, bool] = {}
        for mutant in every(list(_mutants(case))):
            line = mutant.line
            mutants += 1
            caught = _is_caught(case, mutant)
            # A weaker count may leave only accesses under way that nothing conflicts with.
            if not caught and not mutant.is_executed:
                unreached += 1
            elif not caught and not removal.get(line, False):
                assert _is_needless(case, mutant), f"{case.artifact.name} line {line}"
                needless += 1
            if mutant.is_removal:
                removal[line] = caught

    torch.manual_seed(0)
    with executing(Recording(target, examine)):
        (kind, base), line = CALLS[name]
        parse_case(kind, (base + line).replace("FP8", _NATIVE_FP8[target])).inputs().call()
    assert mutants
    assert needless <= max(mutants // 4, 1)
    assert unreached <= max(mutants // 10, 1)  # for LDS alone, where none of the recorded workgroups comes
    print(f"{name}, {target}: {mutants} mutants, {needless} needless waits, {unreached} not executed")


CASES = [
    (name, target)
    for target in ("gfx942", "gfx950")
    for name in CALLS
    if target == "gfx950" or name not in _GFX950_ONLY
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), CASES)
def test_every_removed_or_weakened_wait_is_noticed(name: str, target: str) -> None:
    _examine(name, target, lambda mutants: mutants)


@pytest.mark.parametrize(
    ("name", "target"), [*CASES[1:17:8], *CASES[19::9], ("decode, FP4 native", "gfx950")]
)
def test_some_removed_waits_are_noticed(name: str, target: str) -> None:
    def some(mutants: list[Mutant]) -> list[Mutant]:
        removals = [mutant for mutant in mutants if mutant.is_removal]
        return removals[:: max(len(removals) // _SAMPLED, 1)]

    _examine(name, target, some)
