"""Runs a file of cases on the virtual GPU of this process, and writes down what every launch was and gave.

`watch` starts one process of this for each Triton and chip; see there for what a file of cases is.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from narrowkv.cdna_emulator import EmulatorError, Memory, Program, load_program
from narrowkv.cdna_emulator.timing import MACHINES, predict, trace_workgroup

from .installed import current
from .runtime import Launch, Runtime


def load_module(path: Path) -> ModuleType:
    """Imports a Python file.

    Raises:
        ValueError: it is none.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def functions(module: ModuleType, prefix: str) -> dict[str, Callable[[], Any]]:
    """The module's functions whose names begin with a prefix, by the rest of their names."""
    return {name[len(prefix) :]: getattr(module, name) for name in dir(module) if name.startswith(prefix)}


def run_case(case: Callable[[], Any], runtime: Runtime) -> dict[str, Any]:
    """Runs one case.

    Returns:
        `launches`: a record of each launch. `outputs`: arrays. `error`: the last line of the exception that
        ended the case, or None.
    """
    launches: list[dict[str, Any]] = []
    outputs: list[np.ndarray[Any, Any]] = []
    error = None

    def note(launch: Launch, assembly: str, args: list[int], memory: Memory) -> None:
        launches.append(record(launch, assembly, args, memory))

    torch.manual_seed(0)
    runtime.before_launch.append(note)
    try:
        outputs = [as_array(x) for x in leaves(case())]
    except Exception as raised:
        error = traceback.format_exception_only(raised)[-1].strip()
    finally:
        runtime.before_launch.remove(note)
    return {"launches": launches, "outputs": outputs, "error": error}


def record(launch: Launch, assembly: str, args: Sequence[int], memory: Memory) -> dict[str, Any]:
    """What `watch` compares of a launch that is about to run."""
    program = load_program(assembly, lds_bytes=launch.lds_bytes)
    machine, warps, registers = (
        MACHINES[program.target],
        launch.threads // 64,
        _figure(assembly, "vgpr_count"),
    )
    groups = machine.workgroups_per_unit(warps, registers, launch.lds_bytes)
    return {
        "kernel": launch.kernel,
        "registers": registers,
        "spills": _figure(assembly, "vgpr_spill_count"),
        "scratch": _figure(assembly, "private_segment_fixed_size"),
        "lds": launch.lds_bytes,
        "waves": min(groups * warps // machine.simds, machine.waves_per_simd),
        "modelled_us": modelled_microseconds(launch, program, registers, args, memory),
    }


def _figure(assembly: str, name: str) -> int:
    """A number of the kernel's metadata."""
    found = re.search(rf"\.{name}:\s+(\d+)", assembly)
    return int(found.group(1)) if found else 0


def modelled_microseconds(
    launch: Launch, program: Program, registers: int, args: Sequence[int], memory: Memory
) -> float | None:
    """The timing model's time of a launch, from the busiest of its first, middle and last workgroups.

    The traced workgroups write to the launch's buffers, whose bytes are put back. None if the model cannot
    trace the kernel.
    """
    before = [buffer.data.copy() for buffer in memory.buffers]
    x, y, z = launch.grid
    traces = []
    try:
        for workgroup in {(0, 0, 0), (x // 2, y // 2, z // 2), (x - 1, y - 1, z - 1)}:
            traces.append(
                trace_workgroup(
                    program, grid=launch.grid, args=list(args), memory=memory, workgroup=workgroup
                )
            )
    except EmulatorError:
        return None
    finally:
        for buffer, data in zip(memory.buffers, before, strict=True):
            buffer.data[:] = data
    busiest = max(traces, key=lambda trace: sum(map(len, trace.waves)))
    found = predict(busiest, workgroups=x * y * z, registers=registers, lds_bytes=launch.lds_bytes)
    return round(found.seconds * 1e6, 3)


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a case's result: a tensor, or tuples, lists and dictionaries of tensors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from leaves(each)
    elif value is not None:
        raise TypeError(
            f"a case returns tensors, or tuples, lists or dictionaries of them; got {type(value)}"
        )


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's values in float64."""
    return tensor.detach().cpu().to(torch.float64).numpy()


def main(arguments: list[str]) -> None:
    """Writes FOLDER/record.json, and FOLDER/CASE.npz and FOLDER/CASE.expected.npz of each case of FILE."""
    source, folder = Path(arguments[0]), Path(arguments[1])
    installed = current()
    assert installed is not None, "TRITON_VIRTUAL_GPU names the chip"
    module = load_module(source)
    cases, expected = functions(module, "case_"), functions(module, "expected_")
    if not cases:
        raise SystemExit(f"{source} has no function whose name begins with case_")
    if unknown := sorted(expected.keys() - cases.keys()):
        raise SystemExit(f"{source} has expected_{unknown[0]}, but no case_{unknown[0]}")
    records = {}
    for name, case in cases.items():
        records[name] = run_case(case, installed.runtime)
        np.savez(folder / f"{name}.npz", *records[name].pop("outputs"))
    for name, right in expected.items():
        np.savez(folder / f"{name}.expected.npz", *(as_array(x) for x in leaves(right())))
    found = {"triton": importlib.metadata.version("triton"), "cases": records, "expected": sorted(expected)}
    (folder / "record.json").write_text(json.dumps(found))
