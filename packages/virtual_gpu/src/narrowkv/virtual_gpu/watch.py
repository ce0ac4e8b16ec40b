"""What another Triton changes: a file of cases under two versions, on both chips, compared.

A file of cases is a Python file with functions `case_*` that take nothing, launch kernels on tensors of
device "cuda" in any way that Triton or torch has, and return the results: a tensor, or tuples, lists or
dictionaries of tensors. A function `expected_*` of the same name, which returns the right results on the CPU,
lets the table say which version is wrong.

    def case_add():
        x = torch.arange(1000.0, device="cuda")
        y = torch.empty_like(x)
        add_one[(1,)](x, y, x.numel(), BLOCK=1024)
        return y

    def expected_add():
        return torch.arange(1000.0) + 1

Times are those of the emulator's timing model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

TARGETS = ("gfx942", "gfx950")
# The virtual GPU is made before torch is imported.
_START = """import sys, narrowkv.virtual_gpu
narrowkv.virtual_gpu.install_from_environment()
from narrowkv.virtual_gpu.watched import main
main(sys.argv[1:])
"""
# A modelled time that grew by less is not called slower.
_SLOWER = 1.1


@dataclass(frozen=True)
class Run:
    """A file of cases under one Triton on one chip.

    Attributes:
        triton: the version.
        target: the chip.
        records: of each case, see `watched.run_case`, without the outputs.
        outputs: of each case, its results in float64.
        expected: of each case that has them, the right results.
    """

    triton: str
    target: str
    records: dict[str, dict[str, Any]]
    outputs: dict[str, list[np.ndarray[Any, Any]]]
    expected: dict[str, list[np.ndarray[Any, Any]]]


@dataclass(frozen=True)
class Difference:
    """One difference between two runs.

    Attributes:
        target: the chip.
        case: the case.
        kernel: the kernel, or "" for what concerns the case.
        what: what changed: "result", "error", "launches", "registers", "spills", "scratch", "lds", "waves" or
            "modelled time".
        before, after: under the first and the second Triton.
        worse: whether the second is worse.
    """

    target: str
    case: str
    kernel: str
    what: str
    before: str
    after: str
    worse: bool


def triton_folder(wanted: str, cache: Path) -> Path:
    """A folder that holds the package `triton` in the wanted version.

    Args:
        wanted: a version, which pip installs once into `cache`; a wheel; or a folder that holds the package.
        cache: where installed and unpacked versions are kept.

    Raises:
        ValueError: pip cannot install it, or the wheel or the folder holds no Triton.
    """
    given = Path(wanted)
    if (given / "triton" / "__init__.py").is_file():
        return given.resolve()
    if given.is_dir():
        raise ValueError(f"{wanted} holds no package triton")
    place = cache / f"triton-{given.stem if given.suffix == '.whl' else wanted}"
    if place.is_dir():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=cache))
    try:
        if given.suffix == ".whl":
            if not given.is_file():
                raise ValueError(f"there is no wheel {wanted}")
            with zipfile.ZipFile(given) as wheel:
                wheel.extractall(partial)
            if not (partial / "triton" / "__init__.py").is_file():
                raise ValueError(f"{wanted} holds no package triton")
        else:
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                str(partial),
            ]
            done = subprocess.run([*command, f"triton=={wanted}"], capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"pip cannot install triton=={wanted}: {done.stderr.strip()[-400:]}")
        if not place.is_dir():
            partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return place


def run_cases(cases: Path, triton: Path, target: str, cache: Path) -> Run:
    """Runs a file of cases in a process of its own.

    Args:
        cases: the file.
        triton: folder that holds the package triton.
        target: "gfx942" or "gfx950".
        cache: where compiled kernels are kept, apart for each Triton.

    Raises:
        ValueError: the process failed outside of a case; with the end of what it printed.
    """
    environment = dict(os.environ)
    inherited = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(triton), *inherited]),
        "TRITON_VIRTUAL_GPU": target,
        "TRITON_CACHE_DIR": str(cache / f"compiled-{triton.name}"),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-c", _START, str(cases), name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"the cases did not run on {target} under {triton.name}:\n{done.stderr[-2000:]}")
        found = json.loads((folder / "record.json").read_text())
        return Run(
            found["triton"], target, found["cases"],
            {case: _arrays(folder / f"{case}.npz") for case in found["cases"]},
            {case: _arrays(folder / f"{case}.expected.npz") for case in found["expected"]},
        )  # fmt: skip


def compare(before: Run, after: Run, tolerance: float = 1e-2) -> Iterator[Difference]:
    """What changed from one run to another of the same cases on the same chip.

    Args:
        before, after: the runs.
        tolerance: relative L2 difference up to which two results are the same.
    """
    for case, old in before.records.items():
        new = after.records[case]
        if old["error"] != new["error"]:
            yield Difference(
                after.target, case, "", "error", old["error"] or "none", new["error"] or "none",
                new["error"] is not None,
            )  # fmt: skip
        elif old["error"] is None:
            yield from _compare_results(case, before, after, tolerance)
            yield from _compare_launches(after.target, case, old["launches"], new["launches"])


def _compare_results(case: str, before: Run, after: Run, tolerance: float) -> Iterator[Difference]:
    first, second = before.outputs[case], after.outputs[case]
    if not first and not second:
        return  # a case that this chip leaves out
    if case not in after.expected:
        if (difference := distance(first, second)) > tolerance:
            yield Difference(after.target, case, "", "result", "-", f"differs by {difference:.1e}", True)
        return
    old, new = (distance(after.expected[case], outputs) for outputs in (first, second))
    if (old > tolerance) != (new > tolerance):
        yield Difference(
            after.target, case, "", "result", f"error {old:.1e}", f"error {new:.1e}", new > tolerance
        )


def _compare_launches(
    target: str, case: str, old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]
) -> Iterator[Difference]:
    """Compares launch by launch; where another kernel is launched, only that is said."""
    names = [[launch["kernel"] for launch in launches] for launches in (old, new)]
    if names[0] != names[1]:
        yield Difference(target, case, "", "launches", ", ".join(names[0]), ", ".join(names[1]), False)
        return
    said = set()
    for first, second in zip(old, new, strict=True):
        changes = []
        for what in ("registers", "spills", "scratch", "lds", "waves"):
            x, y = first[what], second[what]
            if x != y:
                worse = y < x if what == "waves" else what in ("spills", "scratch") and y > x
                changes.append(Difference(target, case, first["kernel"], what, str(x), str(y), worse))
        x, y = first["modelled_us"], second["modelled_us"]
        if x and y and not 1 / _SLOWER < y / x < _SLOWER:
            times = f"{x:.1f} us", f"{y:.1f} us"
            changes.append(Difference(target, case, first["kernel"], "modelled time", *times, y > x))
        yield from (change for change in changes if change not in said)
        said.update(changes)


def distance(right: Sequence[np.ndarray[Any, Any]], found: Sequence[np.ndarray[Any, Any]]) -> float:
    """The largest relative L2 difference of two lists of arrays; infinite for other shapes, NaN or inf."""
    if [x.shape for x in right] != [x.shape for x in found]:
        return float("inf")
    worst = 0.0
    for x, y in zip(right, found, strict=True):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        difference = np.where(same, 0.0, y - x)
        norm = float(np.linalg.norm(np.where(np.isfinite(x), x, 0.0)))
        part = float(np.linalg.norm(difference)) / (norm or 1.0)
        worst = max(worst, part if np.isfinite(part) else float("inf"))
    return worst


def watch(
    cases: Path,
    versions: Sequence[str],
    cache: Path,
    targets: Sequence[str] = TARGETS,
    tolerance: float = 1e-2,
) -> list[Difference]:
    """Runs a file of cases under two versions on each chip, and compares.

    Args:
        cases: the file.
        versions: two of what `triton_folder` takes.
        cache: see `triton_folder` and `run_cases`.
        targets: the chips.
        tolerance: see `compare`.

    Raises:
        ValueError: a version cannot be had, or the cases cannot be run.
    """
    if len(versions) != 2:
        raise ValueError(f"two versions are compared, got {len(versions)}")
    folders = [triton_folder(version, cache) for version in versions]
    changes: list[Difference] = []
    for target in targets:
        before, after = (run_cases(cases, folder, target, cache) for folder in folders)
        changes += compare(before, after, tolerance)
    return changes


def table(changes: Sequence[Difference], versions: Sequence[str]) -> str:
    """The changes as lines for a person; those for the worse come first."""
    if not changes:
        return "nothing changed"
    rows = [("", "chip", "case", "kernel", "what", *versions)]
    rows += [
        ("worse" if c.worse else "", c.target, c.case, c.kernel or "-", c.what, c.before, c.after)
        for c in sorted(changes, key=lambda c: not c.worse)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def as_json(changes: Sequence[Difference], versions: Sequence[str]) -> str:
    """The changes as one JSON document."""
    return json.dumps(
        {"versions": list(versions), "changes": [asdict(change) for change in changes]}, indent=1
    )


def _arrays(path: Path) -> list[np.ndarray[Any, Any]]:
    with np.load(path) as found:
        return [found[name] for name in found.files]
