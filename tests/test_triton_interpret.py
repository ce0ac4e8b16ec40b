"""Operations of every package where Triton's own switch, TRITON_INTERPRET, is set from the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

# What each example prints when its result is right.
PRINTED = {
    "decode_vllm_fp8": "relative L1 error 1.4e-03",
    "chunked_prefill": "relative L1 error 1.4e-02",
    "sage_attention_int8": "int8, one descale a tensor     error 0.012",
    "sparse_topk": "relative L1 error 2.0e-03",
}
RUN_EACH = """
import runpy, sys
for name in sys.argv[1:]:
    print("example", flush=True)
    runpy.run_path(name, run_name="__main__")
"""


def test_operations_run() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH, *(EXAMPLES / f"{name}.py" for name in PRINTED)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, *outputs = done.stdout.split("example\n")
    for output, (name, expected) in zip(outputs, PRINTED.items(), strict=True):
        assert expected in output, name
