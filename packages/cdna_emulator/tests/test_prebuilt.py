"""The compiled engine in the wheel: when it is taken, and wheels built with and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from emulator_machine import assembly

from narrowkv.cdna_emulator import engine_refusal, load_program

PROGRAM = load_program(assembly("gfx942", "s_nop 0"))
# `narrowkv.cdna_emulator.compiled.library` is also the name of the function.
library = sys.modules["narrowkv.cdna_emulator.compiled.library"]
pytestmark = pytest.mark.skipif(
    engine_refusal(PROGRAM) is not None or not library._is_x86(), reason="no C compiler for x86-64"
)
ALL = set().union(*library._LEVELS.values())
LOADED = """
import sys
import numpy, narrowkv.cdna_emulator.compiled
module = sys.modules["narrowkv.cdna_emulator.compiled.library"]
print(module.library()._name)
"""


@pytest.fixture
def prebuilt(tmp_path, monkeypatch):
    """A folder with copies of a library under the names of those of a wheel."""
    for level in library._LEVELS:
        shutil.copy(library._built(), tmp_path / library._prebuilt_name(level))
    monkeypatch.setattr(library, "_PREBUILT", tmp_path)
    monkeypatch.setattr(library, "processor_flags", lambda: ALL)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "level"), [(ALL, "x86-64-v4"), (library._LEVELS["x86-64-v3"], "x86-64-v3"), ({"sse2"}, None)]
)
def test_the_best_library_for_the_processor_is_taken(prebuilt, monkeypatch, flags, level):
    monkeypatch.setattr(library, "processor_flags", lambda: flags)
    want = prebuilt / library._prebuilt_name(level) if level else library._built()
    assert library._load()._name == str(want)


def test_a_library_of_other_sources_is_not_taken(prebuilt, monkeypatch):
    monkeypatch.setattr(library, "text_of", lambda sources: ["changed"])
    assert library._load()._name == str(library._built())


def test_a_library_that_cannot_be_loaded_is_built(prebuilt):
    for level in library._LEVELS:
        (prebuilt / library._prebuilt_name(level)).write_bytes(b"of another libc")
    assert library._load()._name == str(library._built())


def build_wheel(folder: Path, **variables: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    source = folder / "source"  # a build in a checkout might leave files there
    shutil.copytree(Path(__file__).parents[1], source, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)], check=True, env={**os.environ, **variables}
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_a_wheel_brings_the_engine_and_needs_no_compiler(tmp_path):
    path = build_wheel(tmp_path)
    assert path.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "site")
    paths = [str(tmp_path / "site"), str(Path(np.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CC": "/nowhere"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    command = [sys.executable, "-S", "-c", LOADED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_wheel_is_pure_without_a_compiler(tmp_path):
    path = build_wheel(tmp_path, CC="/nowhere")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
