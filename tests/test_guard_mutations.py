"""Every bounds guard is needed: with the guard taken out, a test fails.

Each row of `guard_mutations.toml` names a file, a piece of it, what replaces it, and tests of which one must
then fail. The mutation is made in a copy of the packages, and the tests run against the copy.
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
    """A guard, and how it is taken out.

    Attributes:
        name: of the guard, for people.
        file: where it stands.
        old, new: its text, which occurs once, and what replaces it.
        test, select: a test file, and the expression (`-k`) that selects tests in it.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    select: str


ROWS = tomllib.loads((Path(__file__).parent / "guard_mutations.toml").read_text())["guard"]
MUTATIONS = [Mutation(**row) for row in ROWS]


def test_every_guard_stands_where_its_row_says() -> None:
    for mutation in MUTATIONS:
        assert (ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation
        assert (ROOT / mutation.test).exists(), mutation


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_without_its_guard_a_test_fails(mutation: Mutation, tmp_path: Path) -> None:
    for source in SOURCES:
        shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path / mutation.file
    target.write_text(target.read_text().replace(mutation.old, mutation.new))
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(str(tmp_path / source) for source in SOURCES))
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "--run-slow", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, mutation.test, "-k", mutation.select],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return
    # 1: a test failed; below 0: the process crashed. Anything else (nothing selected, say) proves nothing.
    assert done.returncode == 1 or done.returncode < 0, done.stdout[-2000:] + done.stderr[-2000:]
