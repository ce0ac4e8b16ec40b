"""One more way to run a launch: compile it for an AMD target and execute that machine code on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from narrowkv.cdna_emulator import Memory, Program, Result, load_program
from narrowkv.cdna_emulator import run as run_program
from narrowkv.runtime.launch import LaunchOptions, executing
from narrowkv.runtime.launch.artifact import CompiledArtifact
from narrowkv.runtime.launch.compiler import compile_launch
from narrowkv.runtime.targets import get_target
from narrowkv.testing.operation import SampledLaunch, Workgroup

# Workgroups of a launch that the numpy engine runs, by default: it costs little more than one would.
CHECKED = 4


@dataclass(frozen=True)
class EmulatedLaunch:
    """One launch that was emulated.

    Attributes:
        artifact: what ran.
        launched: workgroups of the launch.
        result: counts and profile of those that were run, and how many that were.
    """

    artifact: CompiledArtifact
    launched: int
    result: Result


class EmulateExecutor:
    """Runs every launch as gfx942 or gfx950 machine code in the functional emulator.

    Every storage that a launch is given is a buffer with bounds; an access outside all of them is an error.

    Args:
        target: "gfx942" or "gfx950".
        workgroups: chooses the workgroups to run of a launch; None runs all, and then outputs are complete.
        detect_races: also watch LDS for races.
        detect_hazards: also check waits for memory and wait states; includes `detect_races`.
        checked: workgroups of each launch, evenly spaced, for which the emulator's numpy engine checks
            uninitialised values, races and hazards; the others run in its compiled engine. None checks all;
            without a C compiler all are checked, too. 0: the compiled engine checks uninitialised values in
            all of them, and nobody races and hazards.
        inputs: tensors that no launch may write; a store to the storage of one is an error.

    Attributes:
        runs: what was run, launch by launch.
    """

    def __init__(
        self,
        target: str,
        *,
        workgroups: Callable[[SampledLaunch], Iterable[Workgroup]] | None = None,
        detect_races: bool = False,
        detect_hazards: bool = False,
        checked: int | None = CHECKED,
        inputs: Iterable[torch.Tensor] = (),
    ) -> None:
        self._checked = checked
        self._inputs = {x.untyped_storage().data_ptr() for x in inputs}
        self.target = get_target(target)
        self.runs: list[EmulatedLaunch] = []
        self._programs: dict[tuple[str, int], Program] = {}
        self._workgroups = workgroups
        self._detect_races = detect_races
        self._detect_hazards = detect_hazards
        # By address; holding the storages keeps the allocator from giving an address to another tensor.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._written: dict[int, np.ndarray[Any, np.dtype[np.bool_]]] = {}

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:  # fmt: skip
        """Compiles the launch for the target and executes it on the tensors given, which are CPU tensors."""
        artifact = compile_launch(self.target, kernel, grid, args, constexprs, options)
        x, y, z = (*grid, 1, 1)[:3]
        launch = SampledLaunch(artifact.name, (x, y, z), constexprs)
        code = artifact.assembly, artifact.lds_bytes
        program = self._programs.get(code)
        if program is None:
            program = self._programs[code] = load_program(code[0], lds_bytes=code[1], lazy=True)
        memory, values = self._device_pointers(artifact.args)
        result = run_program(
            program,
            grid=launch.grid,
            args=values,
            memory=memory,
            workgroups=None if self._workgroups is None else self._workgroups(launch),
            detect_races=self._detect_races,
            detect_hazards=self._detect_hazards,
            engine="numpy" if self._checked is None else "auto",
            checked=self._checked or 0,
            check_uninitialised=True if self._checked == 0 else None,
        )
        self.runs.append(EmulatedLaunch(artifact, launch.size, result))

    def _device_pointers(self, args: tuple[Any, ...]) -> tuple[Memory, list[Any]]:
        """The kernel's arguments, every storage mapped once."""
        memory = Memory()
        bases: dict[int, int] = {}
        values: list[Any] = []
        for position, arg in enumerate(args):
            if not isinstance(arg, torch.Tensor):
                values.append(arg)
                continue
            storage = arg.untyped_storage()
            at = storage.data_ptr()
            if at not in bases:
                raw = (ctypes.c_uint8 * storage.nbytes()).from_address(at)
                self._storages[at] = storage
                written = self._written.setdefault(at, np.zeros(storage.nbytes(), np.bool_))
                bases[at] = memory.map(
                    np.ctypeslib.as_array(raw), name=f"argument {position}", written=written,
                    readonly=at in self._inputs,
                )  # fmt: skip
            values.append(bases[at] + arg.storage_offset() * arg.element_size())
        return memory, values

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        """Which elements of a tensor the emulated launches have stored, as bools of its shape.

        Raises:
            ValueError: no launch was given the tensor's storage, so nothing is known of it.
        """
        storage = tensor.untyped_storage()
        mask = self._written.get(storage.data_ptr())
        if mask is None:
            raise ValueError("tensor must be one that an emulated launch was given")
        size = tensor.element_size()
        elements = torch.from_numpy(mask).as_strided(
            (*tensor.shape, size),
            (*(stride * size for stride in tensor.stride()), 1),
            tensor.storage_offset() * size,
        )
        return elements.all(-1)


def emulating(
    target: str, *, detect_races: bool = False, detect_hazards: bool = False, checked: int | None = CHECKED
) -> AbstractContextManager[object]:
    """Every launch inside the block runs as `target`'s machine code; see `EmulateExecutor`."""
    return executing(
        EmulateExecutor(target, detect_races=detect_races, detect_hazards=detect_hazards, checked=checked)
    )
