"""After `narrowkv warmup --target gfx942` on a machine without a GPU, a serving process compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_server import WARM

pytestmark = pytest.mark.codegen_all


def run(program: list[str], cache: Path, **variables: str) -> Any:
    """The JSON that a program prints; of Triton's variables it gets the cache folder and those named."""
    foreign = ("TRITON_", "AMDGCN_", "LLVM_", "MLIR_", "USE_IR_LOC", "DISABLE_LLVM_OPT")
    inherited = {name: value for name, value in dict(os.environ).items() if not name.startswith(foreign)}
    inherited["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, *program], env={**inherited, "TRITON_CACHE_DIR": str(cache), **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def warm(cache: Path, *more: str, **variables: str) -> Any:
    """What `narrowkv warmup` reports."""
    line = f"-m narrowkv.cli warmup --target gfx942 {WARM} --jobs 2 --json"
    return run([*line.split(), *more], cache, **variables)


def serve(cache: Path, *more: str, **variables: str) -> Any:
    """The kernels that a serving process compiled and loaded."""
    return run([str(Path(__file__).with_name("warm_server.py")), *more], cache, **variables)


def test_a_server_compiles_nothing_after_a_warm_up_without_a_gpu(tmp_path: Path) -> None:
    found = warm(tmp_path, "--max-num-tokens", "8")
    assert found["kernels"]["gfx942"]["compiled"]
    assert found["variables"] == {}
    served = serve(tmp_path, "prefill")
    assert served["compiled"] == []
    assert served["by_calls"] > 4
    assert {"_paged_decode_kernel", "_append_kernel"} < set(served["loaded"])
    assert len(set(served["loaded"])) >= 4
    preloaded = serve(tmp_path, "prefill", "preload")
    assert preloaded["compiled"] == []
    assert preloaded["by_calls"] == 0


def test_a_variable_in_the_cache_key_is_named(tmp_path: Path) -> None:
    switched = {"TRITON_DEFAULT_FP_FUSION": "1"}  # the default, but part of the key where it is set
    assert warm(tmp_path, **switched)["variables"] == {"TRITON_DEFAULT_FP_FUSION": "true"}
    assert serve(tmp_path, **switched)["compiled"] == []
    assert "_paged_decode_kernel" in serve(tmp_path)["compiled"]
