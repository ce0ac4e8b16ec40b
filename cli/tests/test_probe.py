"""`narrowkv probe`: every status comes from asking, and the exit code from the statuses."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cli_support import FP8, SHAPE, counted, document, narrowkv
from typer.testing import CliRunner

from narrowkv.cli import probe
from narrowkv.cli.app import app
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.testing import backends, codegen, emulation, probing
from narrowkv.testing.backends import Backend
from narrowkv.testing.bench.timing import Timing
from narrowkv.testing.operation import Contract, ContractSet
from narrowkv.testing.operations import BATCH_PREFILL as PREFILL
from narrowkv.testing.operations import OPERATIONS, contract_case, contract_sets
from narrowkv.testing.operations import PAGED_DECODE as DECODE
from narrowkv.testing.places import Place

CPU = "--on cpu --jobs 1"


@pytest.fixture(autouse=True)
def small_sets(add_set: Any) -> None:
    add_set(ContractSet("two", "for tests", SHAPE, (FP8, replace(FP8, k="fp4_e2m1", v="fp4_e2m1"))))
    add_set(ContractSet("one", "one", SHAPE, (FP8,)))


def own(found: dict[str, Any], place: str = "cpu") -> dict[str, Any]:
    """The answer of narrowkv at a place about the first contract."""
    return next(row for row in found["rows"] if (row["backend"], row["place"]) == ("narrowkv", place))


def test_what_works_passes_here_and_compiles() -> None:
    found = document(f"probe two {CPU}")
    row = own(found)
    assert (row["contract"]["operation"], row["contract"]["k"]) == (DECODE, "fp8_e4m3fn")
    assert row["status"] == "pass"
    assert 0 < row["relative_l1"] <= 0.002
    assert row["kv_bytes_per_token"] == 2 * 2 * 64
    assert row["time_us"] is None
    for target in ("gfx942", "gfx950"):
        compiled = row["compiled"][target]
        assert compiled["status"] == "pass"
        kernel = max(compiled["kernels"], key=lambda k: sum(k["mfma"].values()))
        assert kernel["vgprs"] > 0
        assert kernel["spills"] == kernel["scratch_bytes"] == 0
        assert kernel["mfma"]
    (peer,) = (row for row in found["rows"][:2] if row["backend"] == "torch sdpa")
    assert peer["status"] in ("pass", "inexact")
    assert 0 < peer["relative_l1"] < 0.01
    assert peer["compiled"] == {}


def test_the_screen_goes_to_stdout_when_stdout_is_for_people() -> None:
    result = narrowkv(f"probe one {CPU}")
    for word in ("gfx942 code", "gfx950 code", "ok compiled", "paged_decode", "1 contract: 1 pass, 0 fail"):
        assert word in result.stdout
    assert "VGPR" not in result.stdout
    assert "probing" in result.stderr


Patch = Callable[[pytest.MonkeyPatch], None]


def calls(change: Callable[[Any], Any]) -> Patch:
    """Changes what a prepared call returns."""

    def prepare(inputs: Any) -> Any:
        call = backends.OURS.prepare(inputs)
        return lambda: change(call())

    return lambda patch: patch.setattr(probing, "OURS", replace(backends.OURS, prepare=prepare))


def refuse(patch: pytest.MonkeyPatch) -> None:
    def prepare(inputs: object) -> Any:
        raise UnsupportedError("this target has no scaled MFMA")

    patch.setattr(probing, "OURS", replace(backends.OURS, prepare=prepare))


def compiles_with(fault: str) -> Patch:
    right = codegen.KernelCode.of
    code = lambda artifact: replace(right(artifact), **{fault: 8})  # noqa: E731
    return lambda patch: patch.setattr(probing.KernelCode, "of", code)


def lack_the_amd_backend(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(probing, "amd_backend_missing", lambda: "no AMD backend here")


@dataclass(frozen=True)
class Broken:
    """A fault and what is said of it: the row's status, a part of its detail, its error, the exit code."""

    break_it: Patch
    status: str = "fail"
    detail: str = ""
    error: Any = None
    compiled: str = "pass"
    ends: int = 1


EXACT, ABOUT_1_PERCENT = pytest.approx(0.001, abs=0.001), pytest.approx(0.01, rel=0.2)
BROKEN = {
    "refuses": Broken(refuse, detail="this target has no scaled MFMA", compiled="fail"),
    "inexact": Broken(calls(lambda o: o * 1.01), error=ABOUT_1_PERCENT),
    "a NaN": Broken(calls(lambda o: o.index_fill(0, torch.tensor([1]), float("nan")))),
    "spills": Broken(compiles_with("spills"), detail="gfx942", error=EXACT, compiled="fail"),
    "scratch": Broken(compiles_with("scratch_bytes"), detail="gfx942", error=EXACT, compiled="fail"),
    "cannot compile": Broken(lack_the_amd_backend, "pass", error=EXACT, compiled="skipped", ends=0),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_fails_its_contract_and_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BROKEN[name]
    broken.break_it(monkeypatch)
    result = narrowkv(f"probe one {CPU} --json", ends=broken.ends)
    row = own(json.loads(result.stdout))
    assert (row["status"], row["relative_l1"]) == (broken.status, broken.error)
    assert broken.detail in row["detail"]
    assert {compiled["status"] for compiled in row["compiled"].values()} == {broken.compiled}
    assert f"{broken.ends} fail" in result.stderr


def says_no(inputs: Any) -> Any:
    raise RuntimeError("Unsupported group_size: 12\nsomewhere in C++")


def test_peers_are_shown_in_their_own_words_and_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (probe, probing):
        peers = Backend("refuser", says_no), Backend("absent one", says_no, "no_such_package")
        monkeypatch.setattr(module, "PEERS", peers)
    result = narrowkv(f"probe one {CPU} --json")
    found = json.loads(result.stdout)
    own_row, refused = found["rows"]
    assert (own_row["backend"], own_row["status"]) == ("narrowkv", "pass")
    assert (refused["backend"], refused["status"]) == ("refuser", "refused")
    assert refused["detail"] == "RuntimeError: Unsupported group_size: 12"
    assert found["backends"]["absent one"]["absent"] == "not installed"
    assert "Unsupported group_size: 12" in result.stderr
    assert "not installed" in result.stderr


def test_ctrl_c_keeps_the_answers_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "run_task", counted(probing.run_task, most=1)[0])
    found = document(f"probe two {CPU}", ends=130)
    assert found["interrupted"] is True
    assert [row["status"] for row in found["rows"] if row["backend"] == "narrowkv"] == ["pass"]


def test_every_operation_that_is_asked_about_has_its_case() -> None:
    asked = {c.operation for s in contract_sets().values() for c in s.contracts}
    functions = {function for entry in OPERATIONS.values() for function in entry.functions}
    assert functions == asked
    for contract_set in contract_sets().values():
        for contract in contract_set.contracts:
            assert contract_case(contract, contract_set.shape).bound == contract.bound
    contract = Contract(PREFILL, "fp8_e4m3fn", "fp8_e4m3fn", "fp8_e4m3fn", 16, 0.02)
    inputs: Any = contract_case(contract, SHAPE).inputs()
    assert inputs.q.dtype is torch.float8_e4m3fn
    assert bool(torch.isfinite(inputs.q.float()).all())


def test_outcomes_survive_the_way_between_processes() -> None:
    """As test_processes shows, the tasks of a command then run anywhere."""
    task = probing.Task(FP8, SHAPE, "cpu")
    answers, compiled = probing.run_task(pickle.loads(pickle.dumps(task)))
    assert pickle.loads(pickle.dumps((answers, compiled))) == (answers, compiled)
    assert answers[0].relative_l1 == own(document(f"probe one {CPU} --target gfx942"))["relative_l1"]


@pytest.mark.usefixtures("without_gpu")
def test_by_default_a_sample_of_both_targets_machine_code_runs() -> None:
    result = narrowkv("probe one --jobs 1 --json")
    found = json.loads(result.stdout)
    assert found["places"] == ["cpu"]
    assert own(found)["sample"] is None
    for target in ("gfx942", "gfx950"):
        row = own(found, target)
        assert row["status"] == "pass"
        assert target in row["ran_on"]
        assert "emulated" in row["ran_on"]
        assert 0 < row["relative_l1"] <= 0.002
        taken = row["sample"]
        # One KV head of two, all of both sequences: half of everything.
        assert taken["rows"] * 2 == taken["all_rows"] == SHAPE.batch * SHAPE.num_qo_heads
        assert taken["workgroups"] * 2 == taken["launched"]
        assert taken["wave_instructions"] > 0
        model = own(found)["compiled"][target]["model"]
        assert model["bound_by"] in ("memory", "issue")
        assert f"issue {model['issue_over_memory']:.2f}" in result.stderr
        assert f"{target} code" in result.stderr
    assert found["emulation"]["samples"] == 2
    assert "48 of 96 output rows" in result.stderr


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(("on", "places"), [("", ["cpu", "gfx950"]), ("--on cpu", ["cpu"])])
def test_only_targets_that_are_compiled_are_sampled(on: str, places: list[str]) -> None:
    found = document(f"probe one --jobs 1 --target gfx950 {on}")
    assert [row["place"] for row in found["rows"] if row["backend"] == "narrowkv"] == places
    assert bool(found["emulation"]) is not bool(on)


@pytest.mark.usefixtures("without_gpu")
def test_machine_code_that_is_wrong_fails_the_emulated_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    right = emulation.load_program

    def with_another_scale(text: str, **options: Any) -> Any:
        # exp2 of something else: what a wrong logit scale does.
        return right(text.replace("v_exp_f32_e32", "v_sqrt_f32_e32"), **options)

    monkeypatch.setattr(emulation, "load_program", with_another_scale)
    result = narrowkv("probe one --jobs 1 --target gfx942 --json", ends=1)
    found = json.loads(result.stdout)
    assert (own(found)["status"], own(found, "gfx942")["status"]) == ("pass", "fail")
    assert "FAIL" in result.stderr
    assert "ok" in result.stderr


@pytest.mark.usefixtures("without_gpu")
def test_a_sample_that_does_not_fit_together_fails(monkeypatch: pytest.MonkeyPatch, add_set: Any) -> None:
    add_set(ContractSet("one", "split, so that a merge has to follow", replace(SHAPE, context=200), (FP8,)))
    wrong = {"_paged_decode_kernel": lambda launch: [(0, 0, 0)], "_merge_splits_kernel": lambda launch: []}
    monkeypatch.setitem(OPERATIONS, "decode", replace(OPERATIONS["decode"], samples=wrong))
    found = document("probe one --jobs 1 --target gfx942", ends=1)
    row = own(found, "gfx942")
    assert row["status"] == "fail"
    assert row["sample"]["rows"] < found["shape"]["num_qo_heads"]


def test_several_places_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    right = emulation.run_program

    def watched(program: Any, **options: Any) -> Any:
        ran.append(program.target)
        assert options["workgroups"] is None, "where a place is asked for, everything runs there"
        return right(program, **options)

    monkeypatch.setattr(emulation, "run_program", watched)
    found = document("probe one --jobs 1 --on gfx950,cpu --on gfx942 --on cpu --target gfx942")
    assert found["places"] == ["gfx950", "cpu", "gfx942"]
    assert [(row["backend"], row["place"]) for row in found["rows"]] == [
        ("narrowkv", "gfx950"), ("narrowkv", "cpu"), ("narrowkv", "gfx942"), ("torch sdpa", "cpu"),
    ]  # fmt: skip
    assert all(row["sample"] is None for row in found["rows"])
    assert "gfx942" in found["rows"][0]["compiled"], "what was compiled stands with the first"
    assert list(dict.fromkeys(ran)) == ["gfx950", "gfx942"]


class GpuPlace(Place):
    """The CPU under the name of a GPU."""

    is_gpu = has_times = True


@pytest.mark.parametrize("captures", [True, False])
def test_calls_are_timed_on_a_gpu_and_ours_must_be_capturable(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Timer:
        def measure(self, call: Any) -> Timing:
            if not captures:
                raise RuntimeError("operation not permitted when stream is capturing")
            call()
            return Timing(12.5, 12.0, 13.0, 10)

    place = GpuPlace("gpu", "cpu", "stand-in GPU")
    monkeypatch.setattr(probing, "find_place", lambda name: place)
    monkeypatch.setattr(probe, "find_places", lambda names: [place])
    monkeypatch.setattr(probing, "_timer", Timer)
    result = narrowkv("probe one --jobs 1 --target gfx950 --full --json", ends=0 if captures else 1)
    found = json.loads(result.stdout)
    row, (peer,) = own(found, "gpu"), (row for row in found["rows"] if row["backend"] == "torch sdpa")
    assert row["ran_on"] == "stand-in GPU"
    assert peer["status"] in ("pass", "inexact")
    if captures:
        assert row["time_us"] == {"median": 12.5, "p10": 12.0, "p90": 13.0}
        assert "12.5" in result.stderr
    else:
        assert row["status"] == "fail"
        assert "not capturable" in row["detail"]
        assert peer["time_us"] is None


@pytest.mark.gpu
def test_the_main_set_on_a_gpu() -> None:
    line = "probe glm-gqa12 --on gpu --json"
    found = json.loads(CliRunner().invoke(app, line.split()).stdout)  # its exit code is about AMD, too
    required = [r for r in found["rows"] if r["backend"] == "narrowkv"]
    # Only a right result is timed. Other tests compile for AMD, under Tritons whose AMD backend is known.
    bad = [(r["contract"], r["detail"]) for r in required if not r["time_us"]]
    assert not bad
    assert all(r["time_us"]["median"] > 0 for r in required)
