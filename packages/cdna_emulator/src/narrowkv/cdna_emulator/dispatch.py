"""The initial state of a kernel: the argument block, the dispatch packet, the initial registers.

Sources: "AMDHSA kernel descriptor" and "Initial kernel execution state" of LLVM's AMDGPU user guide; the HSA
runtime specification for the dispatch packet.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from .memory import Memory
from .program import Program
from .state import Array


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
    """Set the initial registers of waves.

    Args:
        program: its descriptor says which registers are set.
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
