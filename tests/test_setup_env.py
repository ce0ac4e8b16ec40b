"""The set-up never lets pip lay a build for CUDA over a torch for ROCm."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from narrowkv.runtime import toolchain

ROOT = Path(__file__).resolve().parent.parent
SETUP: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "setup_env.py"))


AMD_INDEX = "https://repo.amd.com/rocm/whl-multi-arch/"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lays a torch and a Triton that have no more than their versions before the real ones."""

    def install(version: str, hip: str | None, triton: str = "3.8.0") -> None:
        for name in ("torch", "triton"):
            (tmp_path / name).mkdir()
        torch = tmp_path / "torch"
        (torch / "__init__.py").write_text("raise RuntimeError('the set-up must not import torch')")
        (torch / "version.py").write_text(f"__version__ = {version!r}\nhip = {hip!r}\ncuda = None\n")
        (tmp_path / "triton" / "__init__.py").write_text(f"__version__ = {triton!r}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


@pytest.mark.parametrize(
    ("torch", "triton", "named"),
    [
        ("2.9.1+rocm7.0", "3.5.0", "torch 2.9.1+rocm7.0"),
        ("2.10.0+gitff65f5b", "3.8.0", "torch 2.10.0+gitff65f5b"),
        ("2.8.0", "3.4.0", "torch 2.8.0"),
        ("2.11.0+rocm7.2", "3.6.0+git9844da95", "Triton 3.6.0+git9844da95"),
    ],
)
def test_a_torch_for_rocm_that_is_too_old_or_whose_triton_is_is_refused_with_the_line_to_run(
    installed: Any, torch: str, triton: str, named: str
) -> None:
    installed(torch, "7.0.51831", triton)
    with pytest.raises(SystemExit) as refused:
        SETUP["refuse_old_rocm"](Path(sys.executable))
    message = str(refused.value)
    assert named in message
    assert f"-m pip install --upgrade 'torch[device-all]>=2.11' --index-url {AMD_INDEX}" in message


def test_a_torch_for_rocm_without_a_triton_gets_none_from_pypi(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("2.12.0+rocm7.14.0", "7.14.26222")
    monkeypatch.setitem(SETUP["refuse_old_rocm"].__globals__, "has_module", lambda python, module: False)
    with pytest.raises(SystemExit, match="has no Triton; PyPI's is not the one that it requires") as refused:
        SETUP["refuse_old_rocm"](Path(sys.executable))
    assert AMD_INDEX in str(refused.value)


def test_pip_is_given_the_pins_of_amds_torch_and_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("torch", "2.12.0+rocm7.14.0"), ("triton_rocm", "3.8.0+git2f1c")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(SETUP["DISTRIBUTIONS"], "triton", ("pytorch-triton-rocm", "triton-rocm"))
    pins = [SETUP["installed_pin"](Path(sys.executable), module) for module in ("torch", "triton")]
    assert pins == ["torch==2.12.0+rocm7.14.0", "triton-rocm==3.8.0+git2f1c"]


@pytest.mark.parametrize(
    ("version", "hip", "triton"),
    [
        ("2.11.0+rocm7.14.0", "7.14.25424", "3.8.0+git2f1c"),
        ("2.9.1+cu128", None, "3.5.0"),
        ("2.11.0+cu130", None, "3.6.0"),
        ("2.13.0+cpu", None, "3.9.0"),
    ],
)
def test_another_torch_is_left_to_pip(installed: Any, version: str, hip: str | None, triton: str) -> None:
    installed(version, hip, triton)
    SETUP["refuse_old_rocm"](Path(sys.executable))


@pytest.mark.parametrize(
    ("triton", "too_old"), [("3.6.0", True), ("3.8.0+git2f1c", False), ("3.10.0", False)]
)
def test_a_triton_older_than_the_packages_need_is_found(installed: Any, triton: str, too_old: bool) -> None:
    installed("2.11.0+cu130", None, triton)
    assert SETUP["triton_too_old"](Path(sys.executable)) == (triton if too_old else None)


def test_the_oldest_versions_are_those_of_the_packages() -> None:
    for project in (
        ROOT / "pyproject.toml",
        *ROOT.glob("packages/*/pyproject.toml"),
        ROOT / "cli" / "pyproject.toml",
    ):
        for name in ("torch", "triton"):
            for floor in re.findall(rf'"{name}>=([\d.]+)', project.read_text()):
                assert tuple(map(int, floor.split("."))) == SETUP[f"OLDEST_{name.upper()}"], project


def test_pages_and_readmes_name_the_oldest_versions() -> None:
    named = []
    pattern = re.compile(r"\b(torch|triton)(?:>=([\d.]*\d)| ([\d.]*\d) or later)", re.IGNORECASE)
    for page in (ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/*.md")):
        for name, required, told in pattern.findall(page.read_text()):
            named.append((page.parent.name, name.lower()))
            floor = tuple(map(int, (required or told).split(".")))
            assert floor == SETUP[f"OLDEST_{name.upper()}"], page
    assert {("virtual_gpu", "torch"), ("virtual_gpu", "triton")} <= set(named)


def test_one_line_installs_triton_for_rocm() -> None:
    """Set-up, which imports no package, names the index that the packages name."""
    assert SETUP["ROCM_INDEX"] == AMD_INDEX
    assert AMD_INDEX in toolchain._INSTALL_ROCM
    assert SETUP["OLDEST_TRITON"] == toolchain.OLDEST_TRITON
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"^TRITON \?= (triton==[\d.]+)$", makefile, re.MULTILINE) == [
        toolchain._INSTALL.removeprefix("pip install ")
    ]


def test_the_container_takes_amds_wheels_and_keeps_them() -> None:
    recipe = (ROOT / "tools" / "rocm.Containerfile").read_text()
    steps = [line for line in recipe.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    assert steps[0].startswith("FROM ")
    assert {step.split()[0] for step in steps} <= {"FROM", "RUN", "ENV", "COPY", "VOLUME", "CMD"}
    (torch,) = [step for step in steps if "torch[" in step]
    assert f"--index-url {AMD_INDEX}" in torch
    floor = re.search(r">=(\d+)\.(\d+),<", torch)
    assert floor is not None
    assert tuple(map(int, floor.groups())) == SETUP["OLDEST_TORCH"]
    (install,) = [step for step in steps if step.endswith('torch.__version__"')]
    pattern = re.search(r"grep -iE '([^']+)'", install)
    assert pattern is not None
    for name in (*SETUP["DISTRIBUTIONS"]["torch"], *SETUP["DISTRIBUTIONS"]["triton"]):
        assert re.match(pattern[1], f"{name}==1", re.IGNORECASE), name
    assert install.index("> /torch.txt") < install.index("--constraint /torch.txt /narrowkv")
    last = max(number for number, step in enumerate(steps) if step.startswith("COPY "))
    assert last < steps.index(install)
    command = f"docker build --file {(ROOT / 'tools' / 'rocm.Containerfile').relative_to(ROOT)}"
    assert command in (ROOT / "docs" / "rocm.md").read_text()
