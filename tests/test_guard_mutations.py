"""The tests find faults: with a guard taken out, or a defect planted, a test fails.

Each row of `guard_mutations.toml` (bounds guards) and of `planted_defects.toml` (wrong arithmetic, indices
and strides, in every package) names a file, a piece of its text, what replaces it, and tests of which one
must then fail. The change is made in a copy of the packages, and the tests run against the copy, with the
samples that `make test` takes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path.relative_to(ROOT) for path in (*ROOT.glob("packages/*/src"), ROOT / "cli/src"))
# Without a guard against endless loops a test does not end.
SECONDS = 240


@dataclass(frozen=True)
class Mutation:
    """A change of the source that makes it wrong.

    Attributes:
        name: of the guard or the defect, for people.
        file: where it stands.
        old, new: the right text, which occurs once in the file, and what replaces it.
        test, select: a test file, and the expression (`-k`) that selects tests in it.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    select: str


def mutations(file: str, table: str) -> list[Mutation]:
    rows = tomllib.loads((Path(__file__).parent / file).read_text())[table]
    return [Mutation(**row) for row in rows]


GUARDS = mutations("guard_mutations.toml", "guard")
DEFECTS = mutations("planted_defects.toml", "defect")


def run_tests_of(mutation: Mutation, place: Path) -> subprocess.CompletedProcess[str] | None:
    """Runs the tests of a mutation against changed packages in `place`; None if they do not end."""
    for source in SOURCES:
        shutil.copytree(ROOT / source, place / source, ignore=shutil.ignore_patterns("__pycache__"))
    target = place / mutation.file
    target.write_text(target.read_text().replace(mutation.old, mutation.new))
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(str(place / source) for source in SOURCES))
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "-p", "no:cacheprovider"]
    try:
        return subprocess.run(
            [*command, mutation.test, "-k", mutation.select],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None


def assert_found(mutation: Mutation, place: Path) -> None:
    done = run_tests_of(mutation, place)
    # 1: a test failed; below 0: the process crashed. Anything else (nothing selected, say) proves nothing.
    assert done is None or done.returncode == 1 or done.returncode < 0, (
        done.stdout[-2000:] + done.stderr[-2000:]
    )


@pytest.mark.parametrize("mutation", [*GUARDS, *DEFECTS], ids=lambda mutation: mutation.name)
def test_every_mutation_stands_where_its_row_says(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert (ROOT / mutation.test).exists()


def test_defects_are_planted_in_every_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    assert {Path(mutation.file).parts[1] for mutation in DEFECTS} >= packages
    assert len(DEFECTS) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("mutation", GUARDS, ids=lambda mutation: mutation.name)
def test_without_its_guard_a_test_fails(mutation: Mutation, tmp_path: Path) -> None:
    assert_found(mutation, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", DEFECTS, ids=lambda mutation: mutation.name)
def test_a_planted_defect_is_found(mutation: Mutation, tmp_path: Path) -> None:
    assert_found(mutation, tmp_path)
