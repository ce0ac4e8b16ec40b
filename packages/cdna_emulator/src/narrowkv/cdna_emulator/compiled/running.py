"""Runs a translated program: workgroups on all cores, and the place and kind of an error."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from narrowkv.cdna_emulator.dispatch import initial_registers
from narrowkv.cdna_emulator.errors import (
    DeadlockError,
    EmulatorError,
    MisalignedError,
    OutOfRangeError,
    UninitialisedError,
)
from narrowkv.cdna_emulator.memory import Memory
from narrowkv.cdna_emulator.program import Program
from narrowkv.cdna_emulator.state import EXEC, POISON, SGPR_PAIRS, VCC, Array

from .library import library
from .operations import OPERATION, SCALARS
from .translation import Translated, translated

# These mirror the structs of c/wave.h and c/engine.c.
_BUFFER = np.dtype([("base", "u8"), ("end", "u8"), ("written", "u8"), ("readonly", "u8")])
_LAUNCH = np.dtype(
    [(name, "u8") for name in ("entry", "scalars", "constants", "buffers", "positions")]
    + [(name, "i8") for name in ("buffer_count", "workgroups", "blocks", "limit", "slots")]
    + [
        (name, "i4")
        for name in (
            "scalar_count",
            "register_rows",
            "rows",
            "waves",
            "lds_bytes",
            "scratch_bytes",
            "id_x",
            "id_y",
            "id_z",
            "stop",
        )
    ]
    + [("contents", "u4"), ("pad", "u4"), ("next", "u8")]
)
_COUNTS = ("vmem_bytes_loaded", "vmem_bytes_stored", "lds_bytes_read", "lds_bytes_written")
_WORKER = np.dtype(
    [("bytes", "u8", len(_COUNTS)), ("fault_address", "u8"), ("fault_workgroup", "i8")]
    + [
        (name, "i4")
        for name in ("fault", "fault_wave", "fault_lane", "fault_size", "fault_instruction", "pad")
    ]
)
# Mirrors enum Fault of c/wave.h: error class, message.
_FAULTS: tuple[tuple[type[EmulatorError], str], ...] = (
    (EmulatorError, ""),
    (OutOfRangeError, "load of {size} bytes out of range: {where}"),
    (OutOfRangeError, "store of {size} bytes out of range: {where}"),
    (OutOfRangeError, "store to read-only buffer {buffer!r}"),
    (UninitialisedError, "an uninitialised register is stored"),
    (OutOfRangeError, "atomic out of range: {where}"),
    (MisalignedError, "misaligned atomic"),
    (OutOfRangeError, "LDS access of {size} bytes past the {lds} bytes of the workgroup"),
    (MisalignedError, "misaligned LDS access of {size} bytes"),
    (OutOfRangeError, "load of {size} bytes out of range: {where}"),
    (DeadlockError, "no end after {limit} blocks: waves wait for each other or loop"),
    (EmulatorError, "no memory for a workgroup"),
)
_SCALAR_RANGE, _ENDLESS, _NO_MEMORY = 9, 10, 11
_MAX_SLOTS = 32  # workgroups that one thread runs interleaved, if they wait for each other


def run_translated(
    program: Program,
    memory: Memory,
    kernarg: int,
    dispatch: int,
    positions: Sequence[tuple[int, int, int]],
    limit: int,
    contents: int = POISON,
) -> tuple[list[float], dict[str, float]]:
    """Run workgroups of a launch.

    Args:
        program: what to run; it must be translatable.
        memory: the buffers, with those of the next two arguments.
        kernarg: device address of the argument block.
        dispatch: device address of the dispatch packet.
        positions: ids of the workgroups.
        limit: blocks that the waves of a workgroup may run before it is considered to hang.
        contents: word that registers and LDS hold at the start.

    Returns:
        How often waves executed each block, and the bytes moved by name of the count.

    Raises:
        EmulatorError: if the kernel makes an error.
    """
    if not positions:
        return [0.0] * len(program.blocks), {}
    engine, code = library(), translated(program)
    if engine.size_of_op() != OPERATION.itemsize or engine.size_of_launch() != _LAUNCH.itemsize:
        raise EmulatorError("the compiled engine's library does not fit this version of the package")
    buffers = _buffers(memory)
    scalars, ids = _initial_scalars(program, code, memory, kernarg, dispatch, contents)
    places = np.array(positions, np.uint32).reshape(-1, 3)
    rows = code.register_rows + len(code.constants)
    launch = np.zeros(1, _LAUNCH)
    for name, value in {
        "entry": code.operations.ctypes.data + code.entry * OPERATION.itemsize,
        "scalars": scalars.ctypes.data,
        "constants": code.constants.ctypes.data,
        "buffers": buffers.ctypes.data,
        "positions": places.ctypes.data,
        "buffer_count": len(buffers),
        "workgroups": len(places),
        "blocks": len(program.blocks),
        "limit": min(limit, 1 << 62),
        "slots": _MAX_SLOTS,
        "scalar_count": len(scalars),
        "register_rows": code.register_rows,
        "rows": rows,
        "waves": program.num_warps,
        "lds_bytes": program.lds_bytes,
        "scratch_bytes": program.scratch_bytes,
        "id_x": ids[0],
        "id_y": ids[1],
        "id_z": ids[2],
        "contents": contents,
    }.items():
        launch[name] = value
    count = max(min(_cores(), len(places)), 1)
    workers = np.zeros(count, _WORKER)
    blocks = np.zeros((count, len(program.blocks)), np.uint64)
    _work(engine, launch, workers, blocks)
    failed = np.flatnonzero(workers["fault"])
    if len(failed):
        first = min(failed, key=lambda k: int(workers["fault_workgroup"][k]))
        raise _error(workers[first], program, code, memory, positions, limit)
    amounts = {name: float(total) for name, total in zip(_COUNTS, workers["bytes"].sum(axis=0), strict=True)}
    return [float(n) for n in blocks.sum(axis=0)], amounts


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _work(engine: ctypes.CDLL, launch: Array, workers: Array, blocks: Array) -> None:
    def part(k: int) -> None:
        engine.work(
            ctypes.c_void_p(launch.ctypes.data),
            ctypes.c_void_p(workers[k : k + 1].ctypes.data),
            ctypes.c_void_p(blocks[k].ctypes.data),
        )

    threads = [threading.Thread(target=part, args=(k,), daemon=True) for k in range(1, len(workers))]
    for thread in threads:
        thread.start()
    try:
        part(0)
    finally:
        for thread in threads:
            thread.join()


def _buffers(memory: Memory) -> Array:
    buffers = np.zeros(len(memory.buffers), _BUFFER)
    for k, buffer in enumerate(memory.buffers):
        written = 0 if buffer.written is None else buffer.written.ctypes.data
        buffers[k] = (buffer.base, buffer.end, written, buffer.readonly)
    return buffers


def _initial_scalars(
    program: Program, code: Translated, memory: Memory, kernarg: int, dispatch: int, contents: int
) -> tuple[Array, list[int]]:
    """Scalar registers and constants, and the registers of the workgroup's ids (-1: none)."""
    markers = np.array([[1 << 20, 2 << 20, 3 << 20]])  # where these numbers land, the ids belong
    states = []
    for position in (np.zeros((1, 3), np.int64), markers):
        s = np.full((SGPR_PAIRS, 1), (contents << 32) | contents, np.uint64)
        s[EXEC >> 1], s[VCC >> 1] = 0xFFFFFFFFFFFFFFFF, 0
        v = np.zeros((1, 1, 64), np.uint32)
        initial_registers(program, memory, v, s, kernarg, dispatch, position, np.zeros(1, np.int64))
        states.append(s.view(np.uint32).reshape(-1))
    plain, marked = states
    ids = []
    for axis in range(3):
        at = np.flatnonzero((plain != marked) & (marked == markers[0, axis]))
        ids.append(int(at[0]) if len(at) else -1)
    scalars = code.scalars.copy()
    scalars[:SCALARS] = plain
    return scalars, ids


def _error(
    worker: Any,
    program: Program,
    code: Translated,
    memory: Memory,
    positions: Sequence[tuple[int, int, int]],
    limit: int,
) -> EmulatorError:
    fault, address, size = int(worker["fault"]), int(worker["fault_address"]), int(worker["fault_size"])
    kind, message = _FAULTS[fault]
    if fault == _NO_MEMORY:
        return kind(message, kernel=program.kernel_name)
    inst = code.instructions[int(worker["fault_instruction"])]
    buffer = memory.find(address, address + size)
    text = message.format(
        size=size,
        where=memory.describe(address),
        buffer=buffer.name if buffer else "",
        lds=program.lds_bytes,
        limit=limit,
    )
    has_lane, ends = fault not in (_SCALAR_RANGE, _ENDLESS), fault == _ENDLESS
    return kind(
        text,
        kernel=program.kernel_name,
        line=0 if ends else inst.line,
        source="" if ends else inst.text,
        workgroup=positions[int(worker["fault_workgroup"])],
        wave=int(worker["fault_wave"]),
        lane=int(worker["fault_lane"]) if has_lane else None,
        address=None if ends else address,
    )
