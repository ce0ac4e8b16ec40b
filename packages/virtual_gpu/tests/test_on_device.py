"""Runs the files of `on_device` with pytest in processes that have a virtual GPU."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "on_device"


def plugin_options() -> list[str]:
    """What makes pytest load the plugin: nothing where the installed package's entry point already does."""
    installed = importlib.metadata.entry_points(group="pytest11", name="narrowkv_virtual_gpu")
    return [] if installed else ["-p", "narrowkv.virtual_gpu.pytest_plugin"]


def run_tests(file: str, **variables: str) -> str:
    """Runs a file's tests; its output, if all passed."""
    command = [sys.executable, "-m", "pytest", "-n0", *plugin_options()]
    done = subprocess.run(
        [*command, str(FOLDER / file)], capture_output=True, text=True, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
def test_triton_programs(chip: str) -> None:
    out = run_tests("check_triton.py", TRITON_VIRTUAL_GPU=chip)
    assert f"({chip})" in out
    assert "launches" in out


@pytest.mark.parametrize("chip", ["gfx942"])
def test_torch_programs(chip: str) -> None:
    run_tests("check_torch.py", TRITON_VIRTUAL_GPU=chip)


def test_a_chip_by_name_with_every_check() -> None:
    out = run_tests("check_triton.py", TRITON_VIRTUAL_GPU="mi308x", TRITON_VIRTUAL_GPU_CHECK="1")
    assert "80 compute units, checked for races" in out


def test_two_devices() -> None:
    run_tests("check_two_devices.py", TRITON_VIRTUAL_GPU="gfx942", TRITON_VIRTUAL_GPU_COUNT="2")
