"""The set-up never lets pip lay a build for CUDA over a torch for ROCm."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUP: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "setup_env.py"))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lays a distribution of torch, of which no more is there than its version, before the real one."""

    def install(version: str, hip: str | None) -> None:
        package = tmp_path / "torch"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('the set-up must not import torch')")
        (package / "version.py").write_text(f"__version__ = {version!r}\nhip = {hip!r}\ncuda = None\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


@pytest.mark.parametrize("version", ["2.9.1+rocm7.0", "2.9.1+gitff65f5b", "2.8.0"])
def test_an_old_torch_for_rocm_is_refused_with_the_line_to_run(installed: Any, version: str) -> None:
    installed(version, "7.0.51831")
    with pytest.raises(SystemExit) as refused:
        SETUP["refuse_old_rocm"](Path(sys.executable))
    message = str(refused.value)
    assert f"torch {version}" in message
    assert "-m pip install 'torch>=2.10' --index-url https://download.pytorch.org/whl/rocm7.0" in message


@pytest.mark.parametrize(
    ("version", "hip"), [("2.10.0+rocm7.1", "7.1.25424"), ("2.9.1+cu128", None), ("2.13.0+cpu", None)]
)
def test_another_torch_is_left_to_pip(installed: Any, version: str, hip: str | None) -> None:
    installed(version, hip)
    SETUP["refuse_old_rocm"](Path(sys.executable))


def test_the_oldest_torch_is_that_of_the_packages() -> None:
    for project in ROOT.glob("packages/*/pyproject.toml"):
        for floor in re.findall(r'"torch>=([\d.]+)', project.read_text()):
            assert tuple(map(int, floor.split("."))) == SETUP["OLDEST_TORCH"], project
