"""Every example is a short program that runs on a CPU and is as exact as it says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# The largest relative L1 error that an example may print. Kernel errors: 0.002, 0.004 for sparse rows. Format
# errors against the original tensors: FP8 with one descale 0.045, FP4 with a scale per head 0.17.
BOUNDS = {
    "bf16_to_fp4": 0.17,
    "chunked_prefill": 0.045,
    "decode_vllm_fp8": 0.002,
    "shared_prefix": 0.002,
    "sparse_topk": 0.004,
}


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_an_example_is_exact_and_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")["error"]
    assert 0 < error <= BOUNDS[name]
    assert f"relative L1 error {error:.1e}" in capsys.readouterr().out


def test_the_sage_example_orders_the_precisions_as_expected() -> None:
    errors = runpy.run_path(str(EXAMPLES / "sage_attention_int8.py"))["main"]()
    assert errors["int8"] < errors["int4, both means taken out"] < errors["int4, nothing taken out"]


def test_every_example_is_tested_and_short() -> None:
    files = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert set(files) == set(BOUNDS) | {"sage_attention_int8"}
    for name in BOUNDS:
        assert len(files[name].read_text().splitlines()) <= 25, name
