"""`narrowkv bench prefill` without a GPU: what a row asks, and how it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.cli.bench.reporter import judged
from narrowkv.cli.bench.timing import Timing
from narrowkv.cli.contracts import BOUND_16_BIT_QUERY
from narrowkv.cli.prefill.bench import PrefillRow, shapes
from narrowkv.cli.report import ExitCode


def test_rows_are_every_combination_with_floors_from_the_causal_triangle() -> None:
    rows = list(shapes([128, 1024], [0, 4096], [(96, 8)], ["fp8_e4m3fn"], 128, 16))
    assert [(row.new, row.prefix) for row in rows] == [(128, 0), (128, 4096), (1024, 0), (1024, 4096)]
    pairs = sum(4096 + 1 + i for i in range(1024))
    assert rows[-1].flops == 4 * 128 * 96 * pairs
    cache, q_and_o = 2 * 5120 * 8 * 128, 2 * 1024 * 96 * 128 * 2
    assert rows[-1].bytes_touched == cache + q_and_o + 4 * 5120 / 16


def test_a_row_over_its_bound_does_not_pass() -> None:
    (shape,) = shapes([16], [0], [(12, 1)], ["bf16"], 128, 16)
    row, timing = PrefillRow(shape, ""), Timing.of([1.0])
    statuses = {e: judged(row, e, timing, BOUND_16_BIT_QUERY).status for e in (0.0019, 0.0021, math.nan)}
    assert list(statuses.values()) == ["pass", "fail", "fail"]
    assert judged(row, 0.0019, None, BOUND_16_BIT_QUERY).status == "fail", "it was not timed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(app, ["bench", "prefill"])
    assert result.exit_code == ExitCode.UNSUPPORTED
    assert "needs a GPU" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--heads", "96"], "--heads must be"), (["--new", "0"], "--new must be")]
)
def test_bad_lists_are_usage_errors(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "prefill", *arguments])
    assert result.exit_code == ExitCode.USAGE
    assert message in result.output
