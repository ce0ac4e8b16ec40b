"""Sparse attention in the commands: cases, `probe`, `validate`, `inspect`, `bench`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.testing import samples
from narrowkv.testing.contracts import CONTRACT_SETS, SPARSE_DECODE, SPARSE_FP8
from narrowkv.testing.probing import PASS, Task, run_task
from narrowkv.testing.samples import Launch, sample

run = CliRunner().invoke
SET = CONTRACT_SETS["dsv4-sparse"]


def test_an_operation_that_is_none_ends_with_2() -> None:
    assert run(app, ["validate", "parse"]).exit_code == 2
    result = run(app, ["inspect", "parse"])
    assert result.exit_code == 2
    assert "Did you mean 'sparse'?" in result.stderr


def test_the_set_asks_for_every_mode_and_both_queries() -> None:
    asked = {(c.operation, c.variant, c.q, c.k) for c in SET.contracts}
    assert (SPARSE_FP8, "fused", "bf16", "fp8_e4m3fn") in asked
    assert (SPARSE_FP8, "fused", "fp8_e4m3fn", "fp8_e4m3fn") in asked
    assert (SPARSE_FP8, "prepass", "bf16", "fp8_e4m3fn") in asked
    assert any(operation == SPARSE_DECODE for operation, *_ in asked)
    assert all(c.bound <= (0.02 if c.q.startswith("fp8") else 0.004) for c in SET.contracts)


@pytest.mark.parametrize("index", range(len(SET.contracts)))
def test_a_contract_holds_on_the_cpu(index: int) -> None:
    shape = replace(SET.shape, q_len=2, context=40, num_qo_heads=16)
    outcome = run_task(Task(SET.contracts[index], shape, place="cpu"))
    (answer,) = outcome.answers
    assert answer.status == PASS, answer.detail
    assert answer.kv_bytes_per_token == (1024 if SET.contracts[index].k == "bf16" else 583)


def test_a_contract_is_compiled_and_a_sample_of_it_emulated() -> None:
    contract = next(c for c in SET.contracts if c.variant == "fused" and c.q == "bf16")
    shape = replace(SET.shape, q_len=5, context=20, num_qo_heads=16)
    outcome = run_task(Task(contract, shape, target="gfx942", emulate=True))
    assert outcome.compiled is not None
    assert outcome.compiled.status == PASS, outcome.compiled.detail
    (answer,) = outcome.answers
    assert answer.status == PASS, answer.detail
    assert answer.sample is not None
    assert (answer.sample.workgroups, answer.sample.launched) == (3, 5)


def test_samples_of_a_split_call_fit_together() -> None:
    assert list(sample(Launch("_sparse_fused_kernel", (6, 3, 1), {}))) == [(5, 0, 0), (5, 1, 0), (5, 2, 0)]
    rows = list(sample(Launch("_merge_sparse_kernel", (96, 1, 1), {})))
    assert rows[0] == (88, 0, 0)
    assert rows[-1] == (95, 0, 0)
    assert {"_sparse_16bit_kernel", "_sparse_fused_kernel", "_merge_sparse_kernel"} <= set(samples.SAMPLES)


def test_inspect_shows_registers_and_matrix_instructions() -> None:
    line = "lens=16+16,q=fp8"  # Q is widened: 16-bit products are faster
    result = run(app, ["inspect", "sparse", "--target", "gfx942", "--case", line, "--no-model", "--json"])
    assert result.exit_code == 0, result.stderr
    (inspection,) = json.loads(result.stdout)["inspections"]
    (kernel,) = inspection["kernels"]
    assert kernel["spills"] == kernel["scratch_bytes"] == 0
    assert kernel["mfma"]
    assert all("f16" in name for name in kernel["mfma"])
