"""Sparse attention in the commands: cases, `probe`, `validate`, `inspect`, `bench`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowkv.cli.app import app
from narrowkv.sparse_fp8.cases import SparseCall
from narrowkv.testing import samples
from narrowkv.testing.contracts import CONTRACT_SETS, SPARSE_DECODE, SPARSE_FP8
from narrowkv.testing.probing import PASS, Task, run_task
from narrowkv.testing.samples import Launch, sample

run = CliRunner().invoke
FEW = ["--case", "lens=20+3", "--case", "mode=16bit,layout=bf16,lens=9"]
SET = CONTRACT_SETS["dsv4-sparse"]


def test_validate_passes_and_says_what_it_ran() -> None:
    result = run(app, ["validate", "sparse", "--on", "cpu", "--jobs", "1", "--json", *FEW])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["planned"] == document["passed"] == 2
    assert "sparse_prefill" in document["operation"]
    assert document["bounds"]["relative_l1"] == 0.004
    assert "2 of 2 cases pass" in result.stderr


def test_a_wrong_kernel_ends_with_1_and_a_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SparseCall.call

    def wrong(self: SparseCall, **options: Any) -> Any:
        o, lse = right(self, **options)
        return (o * 1.02 if self.case.mode == "fused" else o), lse

    monkeypatch.setattr(SparseCall, "call", wrong)
    result = run(app, ["validate", "sparse", "--on", "cpu", "--jobs", "1", *FEW])
    assert result.exit_code == 1
    (line,) = [line.strip() for line in result.stdout.splitlines() if "--case lens=20+3" in line]
    assert line.startswith("narrowkv validate sparse ")
    monkeypatch.undo()
    assert run(app, line.split()[1:]).exit_code == 0


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


def test_bench_refuses_an_unknown_mode() -> None:
    assert run(app, ["bench", "sparse", "--mode", "best"]).exit_code == 2
    assert run(app, ["bench", "sparse", "--tokens", "0"]).exit_code == 2
