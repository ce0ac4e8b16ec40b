"""One more way to run a launch: compile it for an AMD target and execute that machine code on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from narrowkv.cdna_emulator import DynamicCounts, Memory, load_program
from narrowkv.cdna_emulator import run as run_program
from narrowkv.quant.launch import LaunchOptions, executing
from narrowkv.quant.launch.artifact import CompiledArtifact
from narrowkv.quant.launch.compiler import compile_launch
from narrowkv.quant.targets import get_target


def _device_pointers(args: tuple[Any, ...]) -> tuple[Memory, list[Any]]:
    """The kernel's arguments, every storage mapped once: accesses outside any are errors."""
    memory = Memory()
    bases: dict[int, int] = {}
    values: list[Any] = []
    for position, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor):
            values.append(arg)
            continue
        storage = arg.untyped_storage()
        if storage.data_ptr() not in bases:
            raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
            bases[storage.data_ptr()] = memory.map(np.ctypeslib.as_array(raw), name=f"argument {position}")
        values.append(bases[storage.data_ptr()] + arg.storage_offset() * arg.element_size())
    return memory, values


class EmulateExecutor:
    """Runs every launch as gfx942 or gfx950 machine code in the functional emulator.

    Args:
        target: "gfx942" or "gfx950".
        workgroups: chooses the workgroups to run from a grid; None runs all, and then outputs are complete.
        detect_races: also watch LDS for races.

    Attributes:
        runs: for each launch, the artifact and its dynamic instruction counts.
    """

    def __init__(
        self,
        target: str,
        *,
        workgroups: Callable[[tuple[int, int, int]], Iterable[tuple[int, int, int]]] | None = None,
        detect_races: bool = False,
    ) -> None:
        self.target = get_target(target)
        self.runs: list[tuple[CompiledArtifact, DynamicCounts]] = []
        self._workgroups = workgroups
        self._detect_races = detect_races

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:
        """Compiles the launch for the target and executes it on the tensors given, which are CPU tensors."""
        artifact = compile_launch(self.target, kernel, grid, args, constexprs, options)
        x, y, z = (*grid, 1, 1)[:3]
        memory, values = _device_pointers(artifact.args)
        result = run_program(
            load_program(artifact.assembly, lds_bytes=artifact.lds_bytes),
            grid=(x, y, z),
            args=values,
            memory=memory,
            workgroups=None if self._workgroups is None else self._workgroups((x, y, z)),
            detect_races=self._detect_races,
        )
        self.runs.append((artifact, result.counts))


def emulating(target: str) -> AbstractContextManager[object]:
    """Every launch inside the block runs as `target`'s machine code."""
    return executing(EmulateExecutor(target))
