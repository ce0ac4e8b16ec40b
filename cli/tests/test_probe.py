"""`narrowkv probe`: every status comes from asking, and the exit code from the statuses."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from narrowkv.cli import probe
from narrowkv.cli.app import app
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.testing import backends, codegen, contracts, emulation, probing, samples
from narrowkv.testing.contracts import DECODE, PREFILL, Contract, ContractSet, Shape, contract_case

run = CliRunner().invoke
SHAPE = Shape(batch=2, q_len=1, context=48, num_qo_heads=24, num_kv_heads=2, head_dim=64)
FP8 = Contract(DECODE, "bf16", "fp8_e4m3fn", "fp8_e4m3fn", 16, 0.002)
FP4 = replace(FP8, k="fp4_e2m1", v="fp4_e2m1")


@pytest.fixture(autouse=True)
def small_sets(add_set: Any) -> None:
    add_set(ContractSet("t", "for tests", SHAPE, (FP8, FP4)))
    add_set(ContractSet("only-fp8", "one", SHAPE, (FP8,)))


def ask(name: str = "t", *options: str) -> tuple[Any, dict[str, Any]]:
    result = run(app, ["probe", name, "--on", "cpu", "--jobs", "1", "--json", *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result, json.loads(result.stdout)


def own(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    rows = [row for row in document["rows"] if row["backend"] == "narrowkv"]
    return {(row["contract"]["operation"], row["contract"]["k"]): row for row in rows}


def test_what_works_passes_here_and_compiles() -> None:
    result, document = ask()
    assert result.exit_code == 0, result.stderr
    rows = own(document)
    good = rows[DECODE, "fp8_e4m3fn"]
    assert good["status"] == "pass"
    assert 0 < good["relative_l1"] <= 0.002
    assert good["kv_bytes_per_token"] == 2 * 2 * 64
    assert good["time_us"] is None
    for target in ("gfx942", "gfx950"):
        compiled = good["compiled"][target]
        assert compiled["status"] == "pass"
        kernel = max(compiled["kernels"], key=lambda k: sum(k["mfma"].values()))
        assert kernel["vgprs"] > 0
        assert kernel["spills"] == kernel["scratch_bytes"] == 0
        assert kernel["mfma"]


def test_a_refusal_fails_in_the_operations_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: object, inputs: object) -> Any:
        raise UnsupportedError("this target has no scaled MFMA")

    monkeypatch.setattr(backends.Narrowkv, "prepare", refuses)
    result, document = ask("only-fp8")
    (row,) = own(document).values()
    assert row["status"] == "fail"
    assert "this target has no scaled MFMA" in row["detail"]
    assert result.exit_code == 1


def test_an_inexact_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = backends.Narrowkv.prepare

    def inexact(self: backends.Narrowkv, inputs: Any) -> Any:
        call = right(self, inputs)
        return lambda: call() * 1.01

    monkeypatch.setattr(backends.Narrowkv, "prepare", inexact)
    result, document = ask("only-fp8")
    (row,) = own(document).values()
    assert row["status"] == "fail"
    assert row["relative_l1"] == pytest.approx(0.01, rel=0.2)
    assert result.exit_code == 1
    assert "1 fail" in result.stderr


def test_a_nan_anywhere_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = backends.Narrowkv.prepare

    def poisoned(self: backends.Narrowkv, inputs: Any) -> Any:
        call = right(self, inputs)
        return lambda: call().index_fill(0, torch.tensor([1]), float("nan"))

    monkeypatch.setattr(backends.Narrowkv, "prepare", poisoned)
    result, document = ask("only-fp8")
    (row,) = own(document).values()
    assert (row["status"], row["relative_l1"]) == ("fail", None)
    assert result.exit_code == 1


@pytest.mark.parametrize("fault", ["spills", "scratch_bytes"])
def test_a_kernel_that_spills_fails_its_contract(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right = codegen.KernelCode.of
    monkeypatch.setattr(probing.KernelCode, "of", lambda artifact: replace(right(artifact), **{fault: 8}))
    result, document = ask("only-fp8")
    (row,) = own(document).values()
    assert row["status"] == "fail"
    assert "gfx942" in row["detail"]
    assert result.exit_code == 1


def test_a_triton_without_amd_skips_the_code_and_still_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "amd_backend_missing", lambda: "no AMD backend here")
    result, document = ask("only-fp8")
    (row,) = own(document).values()
    assert row["status"] == "pass"
    assert {c["status"] for c in row["compiled"].values()} == {"skipped"}
    assert result.exit_code == 0


class Refuser:
    """A peer that is installed and says no."""

    name = "refuser"

    def absent(self, on_gpu: bool) -> str | None:
        return None

    def prepare(self, inputs: Any) -> Any:
        raise RuntimeError("Unsupported group_size: 12\nsomewhere in C++")


class Absent(Refuser):
    name = "absent one"

    def absent(self, on_gpu: bool) -> str | None:
        return "not installed"


def test_peers_are_shown_in_their_own_words_and_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (probe, probing):
        monkeypatch.setattr(module, "PEERS", (Refuser(), Absent()))
    result, document = ask("only-fp8")
    assert result.exit_code == 0
    (refused,) = [row for row in document["rows"] if row["backend"] == "refuser"]
    assert refused["status"] == "refused"
    assert refused["detail"] == "RuntimeError: Unsupported group_size: 12"
    assert document["backends"]["absent one"]["absent"] == "not installed"
    assert not [row for row in document["rows"] if row["backend"] == "absent one"]
    assert "Unsupported group_size: 12" in result.stderr
    assert "not installed" in result.stderr


def test_torch_sdpa_answers_beside_us() -> None:
    _, document = ask("only-fp8")
    (row,) = [row for row in document["rows"] if row["backend"] == "torch sdpa"]
    assert row["status"] in ("pass", "inexact")
    assert 0 < row["relative_l1"] < 0.01
    assert row["compiled"] == {}


def test_the_table_goes_to_stdout_when_stdout_is_for_people() -> None:
    result = run(app, ["probe", "only-fp8", "--on", "cpu", "--jobs", "1"])
    assert result.exit_code == 0
    for word in ("gfx942 code", "gfx950 code", "ok compiled", "paged_decode", "1 contract: 1 pass, 0 fail"):
        assert word in result.stdout
    assert "VGPR" not in result.stdout
    assert "probing" in result.stderr


def test_full_adds_every_answer_and_the_code(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    result = run(app, ["probe", "t", "--on", "cpu", "--jobs", "1", "--full", "--csv", str(rows)])
    assert result.exit_code == 0
    for word in ("VGPR", "tokens/GiB", "2 contracts: 2 pass"):
        assert word in result.stdout
    with rows.open() as lines:
        found = list(csv.DictReader(lines))
    assert {row["contract.k"] for row in found} == {"fp8_e4m3fn", "fp4_e2m1"}
    assert all(float(row["relative_l1"]) > 0 for row in found if row["status"] == "pass")


def test_two_processes_give_what_one_gives() -> None:
    _, one = ask("only-fp8", "--target", "gfx950")
    contract_set = contracts.CONTRACT_SETS["only-fp8"]
    tasks = [
        probing.Task(FP8, contract_set.shape, "cpu"),
        probing.Task(FP8, contract_set.shape, target="gfx950"),
    ]
    from narrowkv.testing.processes import in_processes

    found = dict(in_processes(probing.run_task, tasks, jobs=2))
    (row,) = own(one).values()
    assert found[tasks[0]].answers[0].relative_l1 == row["relative_l1"]
    compiled = found[tasks[1]].compiled
    assert compiled is not None
    assert compiled.kernels[0].vgprs == row["compiled"]["gfx950"]["kernels"][0]["vgprs"]
    assert "gfx942" not in row["compiled"]


def test_ctrl_c_keeps_the_answers_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    right = probing.run_task
    seen: list[probing.Task] = []

    def until_third(task: probing.Task) -> Any:
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append(task)
        return right(task)

    monkeypatch.setattr(probe, "run_task", until_third)
    result, document = ask()
    assert result.exit_code == 130
    assert document["interrupted"] is True
    assert [row["status"] for row in document["rows"] if row["backend"] == "narrowkv"] == ["pass"]


def test_every_operation_that_is_asked_about_has_its_case() -> None:
    asked = {c.operation for s in contracts.CONTRACT_SETS.values() for c in s.contracts}
    assert set(contracts.OPERATIONS) == asked
    for contract_set in contracts.CONTRACT_SETS.values():
        for contract in contract_set.contracts:
            assert contract_case(contract, contract_set.shape).bound == contract.bound


def test_the_fp8_query_contract_gets_an_fp8_query() -> None:
    contract = Contract(PREFILL, "fp8_e4m3fn", "fp8_e4m3fn", "fp8_e4m3fn", 16, 0.02)
    inputs: Any = contract_case(contract, SHAPE).inputs()
    assert inputs.q.dtype is torch.float8_e4m3fn
    assert bool(torch.isfinite(inputs.q.float()).all())


def rows_at(document: dict[str, Any], place: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if (row["backend"], row["place"]) == ("narrowkv", place)]


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def default(*options: str) -> tuple[Any, dict[str, Any]]:
    result = run(app, ["probe", "only-fp8", "--jobs", "1", "--json", *options])
    return result, json.loads(result.stdout)


@pytest.mark.usefixtures("without_gpu")
def test_by_default_a_sample_of_both_targets_machine_code_runs() -> None:
    result, document = default()
    assert result.exit_code == 0, result.stderr
    assert document["places"] == ["cpu"]
    assert rows_at(document, "cpu")[0]["sample"] is None
    for target in ("gfx942", "gfx950"):
        (row,) = rows_at(document, target)
        assert row["status"] == "pass"
        assert target in row["ran_on"]
        assert "emulated" in row["ran_on"]
        assert 0 < row["relative_l1"] <= 0.002
        taken = row["sample"]
        # One KV head of two, all of both sequences: half of everything.
        assert taken["rows"] * 2 == taken["all_rows"] == SHAPE.batch * SHAPE.num_qo_heads
        assert taken["workgroups"] * 2 == taken["launched"]
        assert taken["wave_instructions"] > 0
        model = rows_at(document, "cpu")[0]["compiled"][target]["model"]
        assert model["bound_by"] in ("memory", "issue")
        assert f"issue {model['issue_over_memory']:.2f}" in result.stderr
        assert f"{target} code" in result.stderr
    assert document["emulation"]["samples"] == 2
    assert "48 of 96 output rows" in result.stderr


@pytest.mark.usefixtures("without_gpu")
def test_only_targets_that_are_compiled_are_sampled() -> None:
    _, document = default("--target", "gfx950")
    assert [row["place"] for row in document["rows"] if row["backend"] == "narrowkv"] == ["cpu", "gfx950"]
    _, document = default("--on", "cpu", "--target", "gfx950")
    assert [row["place"] for row in document["rows"] if row["backend"] == "narrowkv"] == ["cpu"]
    assert document["emulation"] == {}


@pytest.mark.usefixtures("without_gpu")
def test_machine_code_that_is_wrong_fails_the_emulated_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    right = emulation.load_program

    def with_another_scale(text: str, **options: Any) -> Any:
        # exp2 of something else: what a wrong logit scale does.
        return right(text.replace("v_exp_f32_e32", "v_sqrt_f32_e32"), **options)

    monkeypatch.setattr(emulation, "load_program", with_another_scale)
    result, document = default("--target", "gfx942")
    assert result.exit_code == 1
    assert rows_at(document, "cpu")[0]["status"] == "pass"
    assert rows_at(document, "gfx942")[0]["status"] == "fail"
    assert "FAIL" in result.stderr
    assert "ok" in result.stderr


@pytest.mark.usefixtures("without_gpu")
def test_a_sample_that_does_not_fit_together_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = ContractSet(
        "only-fp8", "split, so that a merge has to follow", replace(SHAPE, context=200), (FP8,)
    )
    monkeypatch.setitem(contracts.CONTRACT_SETS, "only-fp8", longer)
    monkeypatch.setitem(samples.SAMPLES, "_paged_decode_kernel", lambda launch: [(0, 0, 0)])
    monkeypatch.setitem(samples.SAMPLES, "_merge_splits_kernel", lambda launch: [])
    result, document = default("--target", "gfx942")
    assert result.exit_code == 1
    (row,) = rows_at(document, "gfx942")
    assert row["status"] == "fail"
    assert row["sample"]["rows"] < document["shape"]["num_qo_heads"]


def test_several_places_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    right = emulation.run_program

    def watched(program: Any, **options: Any) -> Any:
        ran.append(program.target)
        assert options["workgroups"] is None, "where a place is asked for, everything runs there"
        return right(program, **options)

    monkeypatch.setattr(emulation, "run_program", watched)
    options = ["--on", "gfx950,cpu", "--on", "gfx942", "--on", "cpu", "--target", "gfx942", "--json"]
    result = run(app, ["probe", "only-fp8", "--jobs", "1", *options])
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["places"] == ["gfx950", "cpu", "gfx942"]
    assert [(row["backend"], row["place"]) for row in document["rows"]] == [
        ("narrowkv", "gfx950"), ("narrowkv", "cpu"), ("narrowkv", "gfx942"), ("torch sdpa", "cpu"),
    ]  # fmt: skip
    assert all(row["sample"] is None for row in document["rows"])
    assert "gfx942" in document["rows"][0]["compiled"], "what was compiled stands with the first"
    assert list(dict.fromkeys(ran)) == ["gfx950", "gfx942"]


@pytest.fixture
def stand_in_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU under the name of a GPU, with a timer that makes up its times."""
    from narrowkv.testing.bench.timing import Timing
    from narrowkv.testing.places import Place

    class Timer:
        def measure(self, call: Any) -> Timing:
            call()
            return Timing(12.5, 12.0, 13.0, 10)

    class GpuPlace(Place):
        is_gpu = True

    place = GpuPlace("gpu", "cpu", "stand-in GPU")
    monkeypatch.setattr(probing, "find_place", lambda name: place)
    monkeypatch.setattr(probe, "find_places", lambda names: [place])
    monkeypatch.setattr(probing, "_timer", Timer)


@pytest.mark.usefixtures("stand_in_gpu")
def test_on_a_gpu_the_table_has_times() -> None:
    result, document = ask("only-fp8", "--target", "gfx950", "--full")
    assert result.exit_code == 0
    (row,) = own(document).values()
    assert row["time_us"] == {"median": 12.5, "p10": 12.0, "p90": 13.0}
    assert row["ran_on"] == "stand-in GPU"
    assert "12.5" in result.stderr


@pytest.mark.usefixtures("stand_in_gpu")
def test_a_call_of_ours_that_cannot_be_captured_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def measure(self, call: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(probing, "_timer", Refusing)
    result, document = ask("only-fp8", "--target", "gfx950")
    assert result.exit_code == 1
    (row,) = own(document).values()
    assert row["status"] == "fail"
    assert "not capturable" in row["detail"]
    (peer,) = [row for row in document["rows"] if row["backend"] == "torch sdpa"]
    assert peer["time_us"] is None
    assert peer["status"] in ("pass", "inexact")


@pytest.mark.gpu
def test_the_main_set_on_a_gpu() -> None:
    result = run(app, ["probe", "glm-gqa12", "--on", "gpu", "--json"])
    document = json.loads(result.stdout)
    required = [r for r in document["rows"] if r["backend"] == "narrowkv"]
    # Only a right result is timed. Other tests compile for AMD, under Tritons whose AMD backend is known.
    bad = [(r["contract"], r["detail"]) for r in required if not r["time_us"]]
    assert not bad
    assert all(r["time_us"]["median"] > 0 for r in required)
