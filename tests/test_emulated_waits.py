"""Every s_waitcnt of decode, fused prefill and sparse kernels, removed or weakened: the emulator must notice.

What one workgroup's waves execute is recorded once. A changed text is then judged by its hazards along the
recorded blocks, and where those do not tell, by a run that watches LDS. Waits that are removed unnoticed must
be needless: listed here is the only kind that there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from narrowkv.attn_prefill import batch_prefill, plan_prefill
from narrowkv.attn_prefill.workloads import PrefillWorkload
from narrowkv.cdna_emulator import EmulatorError, HazardError, Memory, Program, load_program
from narrowkv.cdna_emulator import program as programs
from narrowkv.cdna_emulator import run as run_program
from narrowkv.cdna_emulator.hazards import HazardModel
from narrowkv.cdna_emulator.launch import record
from narrowkv.cli.cases import DecodeCase, build
from narrowkv.cli.emulation import EmulateExecutor
from narrowkv.cli.samples import Workgroup
from narrowkv.cli.sparse.cases import SparseCase
from narrowkv.cli.sparse.cases import build as build_sparse
from narrowkv.runtime.launch import LaunchOptions, executing
from narrowkv.runtime.launch.artifact import CompiledArtifact
from narrowkv.runtime.launch.compiler import compile_launch

both_targets = pytest.mark.parametrize("target", ["gfx942", "gfx950"])
SMALL: dict[str, Any] = {"q_lens": (3, 25), "lens": (20, 40), "num_kv_heads": 1}


def _decode(text: str) -> Callable[[], object]:
    return lambda: build(DecodeCase.parse("head_dim=64,kv_heads=1," + text)).call()


def _sparse(text: str) -> Callable[[], object]:
    return lambda: build_sparse(SparseCase.parse(text)).call()


def _prefill(kernel: str, **axes: Any) -> Callable[[], object]:
    def call() -> object:
        q, cache, table, starts = PrefillWorkload(**SMALL, **axes).build()
        plan = plan_prefill(q, cache, table, starts, kernel=kernel)
        return batch_prefill(q, cache, table, starts, plan=plan)

    return call


CALLS: dict[str, Callable[[], object]] = {
    "decode, four waves, bf16": _decode("split=none,ratio=40,k=bf16,v=bf16"),
    "decode, one wave, OCP": _decode("split=none,ratio=12,lens=70+5,clean=1"),
    "decode, four waves, OCP": _decode("split=none,ratio=71,clean=1"),
    "decode, splits": _decode("split=uniform,lens=64+37+1,sinks=1"),
    "fused prefill": _prefill("fused", page_size=3, ragged=True),
    "sparse, fused": _sparse("lens=37+0,sink=1"),
    "sparse, 16-bit rows": _sparse("mode=wide,layout=bf16,lens=37,sink=1"),
}
QUICK = ("decode, four waves, bf16",)


@dataclass
class Recorded:
    """One launch: what it ran on, and the blocks that the waves of some workgroups executed."""

    artifact: CompiledArtifact
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
    """Runs launches, and records of each what its first and last workgroup execute."""

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
        chosen = list(dict.fromkeys([(0, 0, 0), (x - 1, y - 1, z - 1)]))
        case = Recorded(artifact, (x, y, z), values, memory, chosen, before)
        program = load_program(artifact.assembly, lds_bytes=artifact.lds_bytes)
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


def _executed_lines(case: Recorded) -> set[int]:
    program = load_program(case.artifact.assembly, lds_bytes=case.artifact.lds_bytes)
    blocks = {block for path in case.paths for block in path}
    return {inst.line for block in blocks for inst in program.blocks[block].instructions}


def _mutants(case: Recorded) -> Iterator[tuple[int, str]]:
    """The line of each executed wait, with the text without it and with each of its counts one higher."""
    text, lines = case.artifact.assembly, _executed_lines(case)
    for match in re.finditer(r"^\ts_waitcnt ([^;\n]*)", text, re.M):
        line = text.count("\n", 0, match.start()) + 1
        if line not in lines:
            continue
        counts = re.findall(r"(\w+)\((\d+)\)", match.group(1))
        waits = ["s_nop 0"]
        for changed in range(len(counts)):
            weaker = [f"{name}({int(n) + (k == changed)})" for k, (name, n) in enumerate(counts)]
            waits.append("s_waitcnt " + " ".join(weaker))
        for wait in waits:
            yield line, text[: match.start()] + "\t" + wait + text[match.end() :]


def _fails(case: Recorded, text: str) -> bool:
    """Whether a run of the text that watches hazards and LDS ends with an error."""
    case.restore()
    program = load_program(text, lds_bytes=case.artifact.lds_bytes)
    try:
        run_program(
            program, grid=case.grid, args=case.args, memory=case.memory, workgroups=case.workgroups,
            detect_hazards=True,
        )  # fmt: skip
    except EmulatorError:
        return True
    return False


def _unbound(case: Recorded, text: str, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The program without what its instructions do, of which only the hazards are looked at."""
    with monkeypatch.context() as patch:
        patch.setattr(programs, "bind", lambda inst, program: None)
        return load_program(text, lds_bytes=case.artifact.lds_bytes)


def _is_caught(case: Recorded, text: str, unbound: Program) -> bool:
    try:
        _follow(unbound, case.paths)
        if _fails(case, text):
            return True
        HazardModel(unbound).explore()  # a wait for the sake of a path that this input does not take
    except HazardError:
        return True
    return False


def _takes_lds_past(case: Recorded, unbound: Program, line: int) -> bool:
    """Whether LDS accesses are under way behind the block of a line, on the recorded paths."""
    model = HazardModel(unbound)
    held = {k for k, block in enumerate(unbound.blocks) if any(i.line == line for i in block.instructions)}
    for path in case.paths:
        state = 0
        for block in path:
            state = model.passage(block, state).state
            if block in held and any(model.pending_lds([state])):
                return True
    return False


def _is_needless(case: Recorded, text: str, unbound: Program, line: int) -> bool:
    """Whether nothing is wrong without the wait, given that no register needs it.

    So it is in a workgroup of one wave, whose LDS accesses are served in order; where no LDS access is under
    way; where the wave waits again before its next barrier; and before a barrier that is needless itself
    because each wave reads only what it wrote.
    """
    if case.artifact.num_warps == 1 or not _takes_lds_past(case, unbound, line):
        return True
    lines = text.splitlines()
    for k in range(line, len(lines)):
        code = lines[k].split(";")[0].strip()
        if code.startswith("s_waitcnt") and "lgkmcnt" in code:
            return True
        if code.startswith("s_barrier"):
            lines[k] = "\ts_nop 0"
            return not _fails(case, "\n".join(lines))
    return True


@both_targets
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CALLS]
)
def test_every_removed_or_weakened_wait_is_noticed(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutants, needless = 0, 0

    def examine(case: Recorded) -> None:
        nonlocal mutants, needless
        program = load_program(case.artifact.assembly, lds_bytes=case.artifact.lds_bytes)
        _follow(program, case.paths)  # as it is shipped it has no hazard
        removal: dict[int, bool] = {}
        for line, text in _mutants(case):
            mutants += 1
            unbound = _unbound(case, text, monkeypatch)
            caught = _is_caught(case, text, unbound)
            # A weaker count may leave only accesses under way that nothing conflicts with.
            if not caught and not removal.setdefault(line, caught):
                assert _is_needless(case, text, unbound, line), f"{case.artifact.name} line {line}"
                needless += 1
            removal.setdefault(line, caught)

    torch.manual_seed(0)
    with executing(Recording(target, examine)):
        CALLS[name]()
    assert mutants >= 10
    assert needless <= mutants // 4
    print(f"{name}, {target}: {mutants} mutants, {needless} of them needless waits")
