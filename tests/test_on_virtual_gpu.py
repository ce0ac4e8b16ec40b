"""Some of the tests marked gpu, and the probe, on virtual GPUs; `make test-virtual` runs all of them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from narrowkv.testing.machine_report import commands
from narrowkv.testing.operations import OPERATIONS

ROOT = Path(__file__).resolve().parent.parent
# Plans, other arguments, graphs: what a GPU's launch path does and an emulated launch does not.
SELECTION = (
    "packages/attn_decode/tests/test_decode.py",
    "packages/paged_cache/tests/test_append.py",
    "tests/test_kernels_hub.py",
)


def plugin_options() -> list[str]:
    """What makes pytest load the plugin: nothing where the installed package's entry point already does."""
    installed = importlib.metadata.entry_points(group="pytest11", name="narrowkv_virtual_gpu")
    return [] if installed else ["-p", "narrowkv.virtual_gpu.pytest_plugin"]


def on_virtual_gpu(chip: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_VIRTUAL_GPU": chip}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment
    )


@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
def test_gpu_tests_pass_on_a_virtual_gpu(chip: str) -> None:
    done = on_virtual_gpu(chip, "-m", "pytest", "-n0", "-m", "gpu", *plugin_options(), *SELECTION)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 8
    assert f"({chip})" in done.stdout


def test_the_report_runs_whole_on_a_virtual_gpu(tmp_path: Path) -> None:
    """As on the first owner's machine, without times, at the smallest sizes; its first step is a probe."""
    options = ["report", "--quick", "--minutes", "9", "--folder", str(tmp_path)]
    done = on_virtual_gpu("gfx942", "-m", "narrowkv.cli", *options)
    found = json.loads((tmp_path / "narrowkv-report.json").read_text())
    assert "MI300X (virtual)" in found["device"]
    assert [step["command"] for step in found["steps"]] == commands("gfx942", quick=True)
    failed = [(step["command"], step["said"]) for step in found["steps"] if step["exit_code"] != 0]
    assert not failed
    assert done.returncode == 0, done.stderr
    assert {row["bench"] for row in found["rows"]} == {
        name for name, operation in OPERATIONS.items() if operation.report_quick
    }
    assert {row["status"] for row in found["rows"]} == {"pass"}
    assert all(row["measured_us"] is None for row in found["rows"]), "a virtual GPU has no times"


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["gfx942", "gfx950"])
def test_the_probe_passes_on_a_virtual_gpu(chip: str) -> None:
    code = (
        "import narrowkv.virtual_gpu as v; v.install_from_environment();"
        "from narrowkv.cli.app import main; import sys;"
        "sys.argv[1:] = 'probe glm-gqa12 --on gpu --jobs 1 --json'.split(); main()"
    )
    done = on_virtual_gpu(chip, "-c", code)
    rows = [row for row in json.loads(done.stdout)["rows"] if row["backend"] == "narrowkv"]
    assert rows, done.stderr
    assert {row["status"] for row in rows} == {"pass"}, [row["detail"] for row in rows]
    assert all(row["time_us"] is None for row in rows), "a virtual GPU has no times"
