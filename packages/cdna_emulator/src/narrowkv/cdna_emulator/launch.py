"""Starting a kernel: the argument block, the dispatch packet, the first registers, and `run`.

Sources: "AMDHSA kernel descriptor" and "Initial kernel execution state" of LLVM's AMDGPU user guide; the HSA
runtime specification for the dispatch packet.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .counts import DynamicCounts, classify
from .errors import MalformedProgramError
from .memory import Memory
from .profile import Profile, profile
from .program import Program
from .state import Array

if TYPE_CHECKING:
    from .execution import Execution
    from .recorder import Recorder

# Workgroups that run together by default, by measurement: see the README.
BATCH_WORKGROUPS = 32


@dataclass(frozen=True)
class Result:
    """What a run gives back.

    Attributes:
        counts: dynamic counts of the workgroups that ran.
        workgroups: how many those were.
        profile: executed instructions by mnemonic and by loop.
    """

    counts: DynamicCounts
    workgroups: int
    profile: Profile


def pack_arguments(program: Program, args: Sequence[Any], grid: tuple[int, int, int]) -> Array:
    """The argument block as the metadata lays it out.

    Args:
        program: the kernel.
        args: pointers and scalars in the order of the metadata's ``.args``. Pointers that Triton appends
            (global scratch, profile) may be left out and are 0.
        grid: workgroups of the launch, for the hidden arguments.

    Raises:
        TypeError: if an argument is neither a number nor None.
        ValueError: if there are too few or too many, or one does not fit its field.
    """
    explicit = [a for a in program.kernarg if not a.kind.startswith("hidden_")]
    missing = explicit[len(args) :]
    if len(args) > len(explicit) or len(missing) > 2 or any(a.kind != "global_buffer" for a in missing):
        raise ValueError(f"args must have {len(explicit)} entries for {program.kernel_name}, got {len(args)}")
    block = bytearray(max(program.kernarg_bytes, 16))
    for position, (argument, value) in enumerate(zip(explicit, args, strict=False)):
        value = 0 if value is None else value
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, (int, float)):
            raise TypeError(f"args[{position}] must be an int, a float or None, got {type(value).__name__}")
        try:
            block[argument.offset : argument.offset + argument.size] = _pack(value, argument.size)
        except (struct.error, OverflowError, KeyError) as error:
            raise ValueError(
                f"args[{position}] must fit {argument.size} bytes, got {value!r}: {error}"
            ) from None
    sizes = {"hidden_group_size_x": 64 * program.num_warps, "hidden_group_size_y": 1,
    "hidden_group_size_z": 1,
             "hidden_grid_dims": 3}  # fmt: skip
    sizes |= {f"hidden_block_count_{axis}": n for axis, n in zip("xyz", grid, strict=True)}
    for argument in program.kernarg:
        if argument.kind in sizes:
            field = sizes[argument.kind].to_bytes(argument.size, "little")
            block[argument.offset : argument.offset + argument.size] = field
    return np.frombuffer(bytes(block), np.uint8).copy()


def _pack(value: int | float, size: int) -> bytes:
    if isinstance(value, float):
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
    return int(value).to_bytes(size, "little", signed=value < 0)


def dispatch_packet(program: Program, grid: tuple[int, int, int]) -> Array:
    """The part of the kernel dispatch packet that code reads: workgroup and grid sizes."""
    size = 64 * program.num_warps
    packet = struct.pack("<HHHHHHIII", 0, 3, size, 1, 1, 0, grid[0] * size, grid[1], grid[2])
    return np.frombuffer(packet.ljust(64, b"\0"), np.uint8).copy()


def initial_registers(
    program: Program,
    memory: Memory,
    v: Array,
    s: Array,
    kernarg: int,
    dispatch: int,
    position: Array,
    wave: Array,
) -> None:
    """Set the registers that a wave finds when it starts.

    Args:
        program: whose descriptor says what is wanted.
        memory: holds the argument block, for arguments preloaded into registers.
        v: ``[registers, n, 64]``; v0 gets the work-item id.
        s: ``[64, n]`` register pairs.
        kernarg: device address of the argument block.
        dispatch: device address of the dispatch packet.
        position: ``[n, 3]`` workgroup ids.
        wave: ``[n]`` wave index in the workgroup.
    """
    flags, n = program.descriptor, len(wave)
    words = s.view(np.uint32).reshape(64, n, 2)

    def put(register: int, value: Any) -> None:
        words[register >> 1, :, register & 1] = value

    at = 0
    for name, value in (
        ("dispatch_ptr", dispatch),
        ("queue_ptr", 0),
        ("kernarg_segment_ptr", kernarg),
        ("dispatch_id", 0),
    ):
        if flags.get(f"user_sgpr_{name}", 0):
            put(at, value & 0xFFFFFFFF)
            put(at + 1, value >> 32)
            at += 2
    if flags.get("user_sgpr_flat_scratch_init", 0):
        at += 2
    if flags.get("user_sgpr_private_segment_size", 0):
        put(at, program.scratch_bytes)
        at += 1
    preload = flags.get("user_sgpr_kernarg_preload_length", 0)
    first = flags.get("user_sgpr_kernarg_preload_offset", 0)
    if preload:
        base = np.array([[kernarg + 4 * first]], np.int64)
        count = min(preload, program.kernarg_bytes // 4 - first)
        for k, word in enumerate(memory.load(base, None, 4 * count)):
            put(at + k, word[0, 0])
    at = flags.get("user_sgpr_count", at + preload)
    for axis, name in enumerate("xyz"):
        if flags.get(f"system_sgpr_workgroup_id_{name}", 1 if axis == 0 else 0):
            put(at, position[:, axis].astype(np.uint32))
            at += 1
    v[0] = (wave[:, None] * 64 + np.arange(64)).astype(np.uint32)


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
    check_uninitialised: bool = True,
    wave_order: str = "turns",
    batch_workgroups: int = BATCH_WORKGROUPS,
    max_blocks: int = 20_000_000,
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
            register or LDS bytes are used otherwise, and that dependent instructions have the wait states
            that the ISA asks for. Includes ``detect_races``, which then also sees accesses that pass a
            barrier unfinished. Registers and wait states are checked on every path of the program, also on
            those that this input does not take.
        check_uninitialised: run every wave twice in step, with different initial contents of registers and
            LDS, and report what depends on them when it is stored or decides a branch. Costs 1.2 to 1.8
            times the time; without it only an untouched register or LDS word that is stored is found.
        wave_order: ``turns`` runs the waves of a workgroup one after another between barriers, so that a
            missing barrier shows in the result; ``lockstep`` runs them together, which is faster.
        batch_workgroups: workgroups that run together. Those of one batch interleave as independent ones may;
            1 runs each to its end before the next.
        max_blocks: basic blocks that one batch may run before it is taken to hang.

    Returns:
        The dynamic counts and the profile.

    Raises:
        EmulatorError: if the kernel does what it must not do.
        TypeError, ValueError: if an argument is not of the form given.

    Example:
        >>> memory = Memory()
        >>> x = np.arange(256, dtype=np.float32)
        >>> out = np.zeros_like(x)
        >>> pointers = [memory.map(a.view(np.uint8)) for a in (x, out)]
        >>> run(program, grid=(1, 1, 1), args=[*pointers, 256], memory=memory).counts.wave_instructions
    """
    from .execution import Execution
    from .hazards import HazardModel

    extent = _check_grid("grid", grid)
    if wave_order not in ("turns", "lockstep"):
        raise ValueError(f"wave_order must be 'turns' or 'lockstep', got {wave_order!r}")
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
    total = DynamicCounts()
    hazards = HazardModel(program) if detect_hazards else None
    block_counts = [0.0] * len(program.blocks)
    with np.errstate(all="ignore"):
        for first in range(0, len(chosen), batch_workgroups):
            batch = chosen[first : first + batch_workgroups]
            execution = Execution(
                program, own, kernarg, dispatch, extent, batch, copies=2 if check_uninitialised else 1,
                detect_races=detect_races or detect_hazards, turns=wave_order == "turns", limit=max_blocks,
                hazards=hazards,
            )  # fmt: skip
            _finish(execution)
            total = total + _counts(execution)
            runs = (times / execution.copies for times in execution.block_counts)
            block_counts = [a + b for a, b in zip(block_counts, runs, strict=True)]
    if hazards is not None:
        hazards.explore()
    return Result(total, len(chosen), profile(program, block_counts))


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
    """Run one workgroup and tell a recorder what its waves run and access.

    Args:
        program, grid, args, memory, max_blocks: as for `run`.
        workgroup: which to run.
        recorder: what is told.

    Raises:
        EmulatorError: if the kernel does what it must not do.
    """
    from .execution import Execution

    extent = _check_grid("grid", grid)
    own = Memory.sharing(memory)
    kernarg = own.map(pack_arguments(program, args, extent), name="kernel arguments", readonly=True)
    dispatch = own.map(dispatch_packet(program, extent), name="dispatch packet", readonly=True)
    with np.errstate(all="ignore"):
        Execution(
            program, own, kernarg, dispatch, extent, [_check_grid("workgroup", workgroup)], copies=1,
            detect_races=False, turns=True, limit=max_blocks, recorder=recorder,
        ).run()  # fmt: skip


def _finish(execution: Execution) -> None:
    """Run a batch; what its instructions cannot compute is the program's fault."""
    try:
        execution.run()
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise MalformedProgramError(
            f"an instruction and its operands do not go together: {type(error).__name__}: {error}",
            kernel=execution.program.kernel_name,
        ) from error


def _counts(execution: Execution) -> DynamicCounts:
    """Counts of a batch from how often each block ran."""
    totals: dict[str, Any] = {}
    mfma: dict[str, float] = {}
    for block, times in zip(execution.program.blocks, execution.block_counts, strict=True):
        if not times:
            continue
        runs = times / execution.copies
        for inst in block.instructions:
            totals["wave_instructions"] = totals.get("wave_instructions", 0) + runs
            for kind, amount in classify(inst).items():
                totals[kind] = totals.get(kind, 0) + amount * runs
            if inst.name.startswith("v_mfma_"):
                mfma[inst.name] = mfma.get(inst.name, 0) + runs
    for kind, amount in execution.bytes.items():
        totals[kind] = amount / execution.copies
    return DynamicCounts(mfma=mfma, workgroups=len(execution.workgroups), **totals)
