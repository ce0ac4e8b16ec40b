"""Runs a kernel: all workgroups of a launch or some of them, batch by batch."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .compiled import engine_refusal
from .compiled.running import run_translated
from .counts import DynamicCounts, classify
from .dispatch import dispatch_packet, pack_arguments
from .errors import EngineUnavailableError, MalformedProgramError
from .execution import Execution
from .hazards import hazard_model
from .memory import Memory
from .profile import Profile, profile
from .program import Program
from .recorder import Recorder
from .stale_reads import StaleReads
from .state import POISON_COPY, Array

# Workgroups that run together by default, by measurement: see the README.
BATCH_WORKGROUPS = 32


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        counts: dynamic counts of the workgroups that ran.
        workgroups: number of workgroups that ran.
        profile: executed instructions by mnemonic and by loop.
    """

    counts: DynamicCounts
    workgroups: int
    profile: Profile


def _check_grid(name: str, value: Any) -> tuple[int, int, int]:
    sizes = tuple(int(x) for x in value)
    if len(sizes) != 3 or min(sizes) < 0:
        raise ValueError(f"{name} must be three numbers of at least 0, got {value!r}")
    return sizes


def run(
    program: Program,
    *,
    grid: tuple[int, int, int],
    args: Sequence[Any],
    memory: Memory,
    workgroups: Iterable[tuple[int, int, int]] | None = None,
    detect_races: bool = False,
    detect_hazards: bool = False,
    check_uninitialised: bool | None = None,
    wave_order: str = "turns",
    batch_workgroups: int = BATCH_WORKGROUPS,
    max_blocks: int = 20_000_000,
    engine: str = "numpy",
    checked: int = 0,
) -> Result:
    """Run a kernel.

    Args:
        program: from `load_program`.
        grid: workgroups of the launch, ``(x, y, z)``.
        args: pointers from `Memory.map` and numbers, in the order of the kernel's arguments.
        memory: the buffers; stores write through to the host arrays.
        workgroups: which to run, in this order. Default: all, x fastest.
        detect_races: watch LDS for two waves that touch a byte between barriers, one of them writing; not
            for two that write the same.
        detect_hazards: check that every result of memory is waited for (s_waitcnt) before it is used or its
            register or LDS bytes are reused, and that dependent instructions have the wait states
            that the ISA asks for, and that stores are waited for before another wave of the workgroup
            publishes them. Includes ``detect_races``, which then also sees accesses that pass a
            barrier before they finish. Registers and wait states are checked on every path of the program,
            including those that this input does not take.
        check_uninitialised: run every wave twice in step, with different initial contents of registers and
            LDS, and report an error if a store or a branch depends on them. It takes 1.2 to 1.8 times as
            long. The compiled engine runs the launch twice, one after the other; where the two leave other
            bytes, the numpy engine runs it in step and says where, or finds that the order of workgroups
            alone is the cause. Without this check an error is reported only if an uninitialised word is
            stored unchanged. Default: True with the numpy engine, False with the compiled one.
        wave_order: ``turns`` runs the waves of a workgroup one after another between barriers, so that a
            missing barrier shows in the result; ``lockstep`` runs them together, which is faster.
        batch_workgroups: workgroups that run together, interleaved; 1 runs each to its end before the next.
        max_blocks: basic blocks that one batch may run before it is considered to hang; with the compiled
            engine, that the waves of one workgroup may run.
        engine: ``numpy``, ``compiled`` or ``auto``. The compiled engine computes the same bits and counts and
            runs workgroups on all cores, in any order and each wave for itself: ``wave_order`` and
            ``batch_workgroups`` do not matter to it. It checks bounds, alignment, LDS limits and endless
            loops. ``auto`` takes it unless it lacks an instruction or a compiler, of which it warns once, or
            a check is asked for that only numpy makes.
        checked: how many of the workgroups the numpy engine runs with the checks asked for, evenly spaced and
            after the compiled engine has run the others. 0: none, and then checks and the compiled engine
            exclude each other.

    Returns:
        The dynamic counts and the profile.

    Raises:
        EngineUnavailableError: if ``engine="compiled"`` cannot run the program or make a check.
        EmulatorError: if the kernel makes an error; see `narrowkv.cdna_emulator.errors`.
        TypeError, ValueError: if an argument has not the form described above.

    Example:
        >>> from narrowkv.cdna_emulator.loading import load_program
        >>> from narrowkv.cdna_emulator.sample import DOUBLE  # the text of a kernel
        >>> memory = Memory()
        >>> x = np.arange(64, dtype=np.float32)
        >>> out = np.zeros_like(x)
        >>> pointers = [memory.map(a.view(np.uint8)) for a in (x, out)]
        >>> result = run(load_program(DOUBLE), grid=(1, 1, 1), args=pointers, memory=memory)
        >>> result.counts.wave_instructions
        8.0
    """
    extent = _check_grid("grid", grid)
    if wave_order not in ("turns", "lockstep"):
        raise ValueError(f"wave_order must be 'turns' or 'lockstep', got {wave_order!r}")
    if engine not in ("numpy", "compiled", "auto"):
        raise ValueError(f"engine must be 'numpy', 'compiled' or 'auto', got {engine!r}")
    if checked < 0:
        raise ValueError(f"checked must be at least 0, got {checked}")
    if batch_workgroups < 1:
        raise ValueError(f"batch_workgroups must be at least 1, got {batch_workgroups}")
    if workgroups is None:
        chosen = [(x, y, z) for z in range(extent[2]) for y in range(extent[1]) for x in range(extent[0])]
    else:
        chosen = [_check_grid("workgroups", w) for w in workgroups]
        for position in chosen:
            if any(p >= size for p, size in zip(position, extent, strict=True)):
                raise ValueError(f"workgroups must lie in the grid {extent}, got {position}")
    arguments = pack_arguments(program, args, extent)
    own = Memory.sharing(memory)
    kernarg = own.map(arguments, name="kernel arguments", readonly=True)
    dispatch = own.map(dispatch_packet(program, extent), name="dispatch packet", readonly=True)
    checks = [
        name
        for name, wanted in {
            "detect_races": detect_races, "detect_hazards": detect_hazards,
        }.items()
        if wanted
    ]  # fmt: skip
    total = DynamicCounts()
    block_counts = [0.0] * len(program.blocks)
    ran = len(chosen)
    if _takes_compiled(engine, program, checks if not checked else ()):
        sample = sorted({round(k * (ran - 1) / max(checked - 1, 1)) for k in range(min(checked, ran))})
        others = [position for k, position in enumerate(chosen) if k not in sample]
        run_compiled = _run_twice if check_uninitialised else run_translated
        found = run_compiled(program, own, kernarg, dispatch, others, max_blocks)
        if found is not None:
            block_counts, moved = found
            total = _counts(program, block_counts, moved, len(others))
            chosen = [chosen[k] for k in sample]
    copies = 1 if check_uninitialised is False else 2
    hazards = hazard_model(program) if detect_hazards else None
    stale = StaleReads(own, chosen) if detect_hazards else None
    with np.errstate(all="ignore"):
        for first in range(0, len(chosen), batch_workgroups):
            batch = chosen[first : first + batch_workgroups]
            execution = Execution(
                program, own, kernarg, dispatch, extent, batch, copies=copies,
                detect_races=detect_races or detect_hazards, turns=wave_order == "turns", limit=max_blocks,
                hazards=hazards, stale=stale,
            )  # fmt: skip
            _finish(execution)
            runs = [times / copies for times in execution.block_counts]
            moved = {kind: amount / copies for kind, amount in execution.bytes.items()}
            total = total + _counts(program, runs, moved, len(batch))
            block_counts = [a + b for a, b in zip(block_counts, runs, strict=True)]
    if hazards is not None:
        hazards.explore()
    return Result(total, ran, profile(program, block_counts))


def _run_twice(
    program: Program, memory: Memory, kernarg: int, dispatch: int,
    positions: Sequence[tuple[int, int, int]], limit: int,
) -> tuple[list[float], dict[str, float]] | None:  # fmt: skip
    """As `run_translated`, with both contents of registers and LDS; None if that makes a difference.

    Memory is then as it was before.
    """
    buffers = [buffer for buffer in memory.buffers if not buffer.readonly]
    before = [buffer.data.copy() for buffer in buffers]
    found = run_translated(program, memory, kernarg, dispatch, positions, limit)
    left = []
    for buffer, old in zip(buffers, before, strict=True):
        stored: Any = slice(None) if buffer.written is None else np.flatnonzero(buffer.written)
        left.append((stored, buffer.data[stored].copy()))
        buffer.data[stored] = old[stored]
    again = run_translated(program, memory, kernarg, dispatch, positions, limit, POISON_COPY)
    same = again == found and all(
        np.array_equal(buffer.data[stored], first)
        and (buffer.written is None or np.count_nonzero(buffer.written) == len(first))
        for buffer, (stored, first) in zip(buffers, left, strict=True)
    )
    if same:
        return found
    for buffer, old in zip(buffers, before, strict=True):
        buffer.data[...] = old
    return None


def _takes_compiled(engine: str, program: Program, checks: Sequence[str]) -> bool:
    """Whether the compiled engine runs a program with these checks.

    Raises:
        EngineUnavailableError: if it is asked for and cannot.
    """
    if engine == "numpy":
        return False
    if engine == "auto" and checks:
        return False
    only_numpy = f"only the numpy engine makes the check {checks[0]}" if checks else None
    reason = only_numpy or engine_refusal(program)
    if reason is None:
        return True
    if engine == "compiled":
        raise EngineUnavailableError(
            f"the compiled engine cannot run this: {reason}", kernel=program.kernel_name
        )
    _warn_once(reason)
    return False


@lru_cache(maxsize=256)
def _warn_once(reason: str) -> None:
    warnings.warn(f"the numpy engine runs instead of the compiled one: {reason}", stacklevel=4)


def record(
    program: Program,
    *,
    grid: tuple[int, int, int],
    args: Sequence[Any],
    memory: Memory,
    workgroup: tuple[int, int, int],
    recorder: Recorder,
    max_blocks: int = 20_000_000,
) -> None:
    """Run one workgroup and pass what its waves execute and access to a recorder.

    Args:
        program, grid, args, memory, max_blocks: as for `run`.
        workgroup: which to run.
        recorder: receives blocks and accesses.

    Raises:
        EmulatorError: if the kernel does what it must not do.
    """
    extent = _check_grid("grid", grid)
    own = Memory.sharing(memory)
    kernarg = own.map(pack_arguments(program, args, extent), name="kernel arguments", readonly=True)
    dispatch = own.map(dispatch_packet(program, extent), name="dispatch packet", readonly=True)
    with np.errstate(all="ignore"):
        Execution(
            program, own, kernarg, dispatch, extent, [_check_grid("workgroup", workgroup)], copies=1,
            detect_races=False, turns=True, limit=max_blocks, recorder=recorder,
        ).run()  # fmt: skip


def count_blocks(
    program: Program,
    *,
    grid: tuple[int, int, int],
    args: Sequence[Any],
    memory: Memory,
    workgroups: list[tuple[int, int, int]],
    max_blocks: int = 20_000_000,
) -> Array:
    """Run workgroups together and count the basic blocks that the waves of each execute.

    Args:
        program, grid, args, memory, workgroups, max_blocks: as for `run`.

    Returns:
        int64 ``[workgroups, blocks]``.

    Raises:
        EmulatorError: if the kernel does what it must not do.
    """
    extent = _check_grid("grid", grid)
    own = Memory.sharing(memory)
    kernarg = own.map(pack_arguments(program, args, extent), name="kernel arguments", readonly=True)
    dispatch = own.map(dispatch_packet(program, extent), name="dispatch packet", readonly=True)
    execution = Execution(
        program, own, kernarg, dispatch, extent, workgroups, copies=1, detect_races=False, turns=False,
        limit=max_blocks,
    )  # fmt: skip
    counts = execution.workgroup_counts = np.zeros((len(workgroups), len(program.blocks)), np.int64)
    with np.errstate(all="ignore"):
        _finish(execution)
    return counts


def _finish(execution: Execution) -> None:
    """Run a batch; operands that an instruction cannot take are reported as errors of the program."""
    try:
        execution.run()
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise MalformedProgramError(
            f"an instruction and its operands do not go together: {type(error).__name__}: {error}",
            kernel=execution.program.kernel_name,
        ) from error


def _counts(
    program: Program, block_counts: Sequence[float], moved: Mapping[str, float], workgroups: int
) -> DynamicCounts:
    """Counts of some workgroups, from the number of times each block ran and the bytes moved."""
    totals: dict[str, Any] = {}
    mfma: dict[str, float] = {}
    for (amounts, matrices), runs in zip(_block_amounts(program), block_counts, strict=True):
        if not runs:
            continue
        for total, part in ((totals, amounts), (mfma, matrices)):
            for kind, amount in part.items():
                total[kind] = total.get(kind, 0) + amount * runs
    return DynamicCounts(mfma=mfma, workgroups=workgroups, **totals, **moved)


_amounts: WeakKeyDictionary[Program, list[tuple[Counter[str], Counter[str]]]] = WeakKeyDictionary()


def _block_amounts(program: Program) -> list[tuple[Counter[str], Counter[str]]]:
    """What one execution of each block adds to the counts, and its matrix instructions by mnemonic."""
    known = _amounts.get(program)
    if known is None:
        known = _amounts[program] = []
        for block in program.blocks:
            amounts: Counter[str] = Counter(wave_instructions=len(block.instructions))
            for inst in block.instructions:
                amounts.update(classify(inst))
            names = (inst.name for inst in block.instructions if inst.name.startswith("v_mfma_"))
            known.append((amounts, Counter(names)))
    return known
