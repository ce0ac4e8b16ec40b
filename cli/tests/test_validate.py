"""`narrowkv validate`: how it ends where a kernel is wrong, and where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cli_support import document, narrowkv

from narrowkv.sage.options import SagePlanOptions
from narrowkv.testing import emulation, format_errors
from narrowkv.testing.cases import parse_case, prefill, sage
from narrowkv.testing.cases.decode import DecodeCase, DecodeInputs, one_at_a_time
from narrowkv.testing.cases.prefill import PrefillCase, PrefillInputs
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.cases.sparse import SparseInputs
from narrowkv.testing.checking import check
from narrowkv.testing.format_errors import InputSizes
from narrowkv.testing.places import find_place

CPU = "--on cpu --jobs 1"


@pytest.mark.parametrize(
    ("operation", "inputs", "is_first", "cases"),
    [
        ("decode", DecodeInputs, lambda inputs: inputs.table.batch_size == 2,
         "--case lens=20+3,ratio=3,head_dim=64 --case lens=9,format=bf16,q=fp16,head_dim=64,q_len=2"),
        ("prefill", PrefillInputs, lambda inputs: not inputs.case.appends,
         "--case lens=20,q_lens=3 --case operation=append,q_lens=3+9,lens=20+30,format=fp4_e2m1"),
        ("sparse", SparseInputs, lambda inputs: inputs.case.mode == "fused",
         "--case lens=20+3 --case mode=16bit,layout=bf16,lens=9"),
    ],
)  # fmt: skip
def test_a_wrong_kernel_ends_with_1_and_a_command_that_repeats_it(
    operation: str, inputs: Any, is_first: Callable[[Any], bool], cases: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = inputs.call

    def wrong(self: Any, **options: Any) -> Any:
        o, lse = right(self, **options)
        return (o * 1.02 if is_first(self) else o), lse

    monkeypatch.setattr(inputs, "call", wrong)
    result = narrowkv(f"validate {operation} {CPU} {cases}", ends=1)
    assert "1 of 2 cases pass" in result.stdout
    (line,) = [line.strip() for line in result.stdout.splitlines() if line.strip().startswith("narrowkv ")]
    again = f"{line.removeprefix('narrowkv ')} --jobs 1"
    narrowkv(again, ends=1)
    monkeypatch.undo()
    narrowkv(again)


def fall_over(result: Any, arguments: Any) -> Any:
    raise RuntimeError("the kernel fell over\nat some length")


def flip_a_bit(part: str) -> Callable[[Any, Any], Any]:
    """Of the last byte of a part of the cache."""

    def flip(result: Any, arguments: Any) -> Any:
        getattr(arguments[3], part).view(torch.uint8).flatten()[-1] ^= 1
        return result

    return flip


APPEND = f"validate prefill {CPU} --case operation=append,q_lens=3+9,lens=20+30"
SAGE = f"validate sage {CPU} --case q_lens=70,k_lens=70,ratio=2,head_dim=64"


@pytest.mark.parametrize(
    ("line", "where", "name", "change", "words"),
    [
        pytest.param(
            f"validate {CPU} --case lens=3 --case lens=4", DecodeInputs, "call", fall_over,
            ["RuntimeError: the kernel fell over"], id="an exception",
        ),
        pytest.param(
            f"{APPEND},format=fp8_e4m3fn", prefill, "prefill_append", flip_a_bit("k"),
            ["1 bytes of k stored wrongly"], id="a stored key",
        ),
        pytest.param(
            f"{APPEND},format=fp4_e2m1", prefill, "prefill_append", flip_a_bit("v_descale"),
            ["1 bytes of v_descale stored wrongly"], id="a stored scale",
        ),
        pytest.param(
            SAGE, sage, "sage_attention", lambda result, _: (result[0] * 1.05, result[1] + 0.01),
            ["bound 0.03", "lse differs"], id="sage",
        ),
    ],
)  # fmt: skip
def test_a_fault_fails_its_cases_and_is_named(
    line: str, where: Any, name: str, change: Callable[[Any, Any], Any], words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    right = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *a, **k: change(right(*a, **k), a))
    for case in document(line, ends=1)["cases"]:
        assert not case["passed"]
        assert all(word in case["detail"] for word in words)
        assert change is not fall_over or case["error"] is None


@pytest.mark.parametrize("worse", [False, True])
def test_a_result_of_sage_that_is_worse_than_published_fails(
    worse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = SageCase(qk_dtype="int4", smooth_q=True)
    if worse:
        monkeypatch.setitem(sage.PUBLISHED, "per_thread", (0.99999, 0.001, 0.001))
    inputs = case.inputs()
    result = check(case, inputs, inputs.reference())
    assert result.passed is not worse
    assert ("worse than published" in result.detail) is worse


def test_the_sweep_of_sage_covers_what_a_call_may_ask_for() -> None:
    quick, full = sage.sweep(), sage.sweep(full=True)
    assert len(quick) == len(set(quick)) == 3 * 4 * 3 + 3 * 13
    assert {case.data for case in full} == {"offset", "outlier", "gaussian"}
    assert {case.smoothing for case in quick} == {"none", "K", "K and Q"}
    assert {case.published for case in quick} == {None, *sage.PUBLISHED.values()}
    assert len(sage.shipped()) == 2 * 3 * 4
    given = [case.inputs().options for case in quick]
    of_calls = {"cu_seqlens_q", "cu_seqlens_k", "block_mask"}
    assert set().union(*given) == {*SagePlanOptions.__annotations__, *of_calls} - {"sm_scale"}
    for name in ("causal", "window", "layout", "block_mask", "qk_dtype", "smooth_k", "smooth_q"):
        assert len({str(options.get(name)) for options in given}) > 1, name


@pytest.mark.usefixtures("few_recipes")
@pytest.mark.parametrize(
    ("sizes", "judged", "ends"), [("", True, 1), ("--batch 1 --context 48 --seeds 1", False, 0)]
)
def test_a_goal_of_formats_that_is_missed_fails_at_its_own_sizes_alone(
    sizes: str, judged: bool, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, small = format_errors.make_inputs, InputSizes(batch=1, context=48)
    monkeypatch.setattr(format_errors, "make_inputs", lambda name, _, *rest: right(name, small, *rest))
    found = document(f"validate fp4 {CPU} {sizes}", ends=ends)["goals"][0]
    assert (found["judged"], found["pass"]) == (judged, False)


def test_a_sweep_asks_each_place_for_its_own_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    few = (
        PrefillCase(q_lens=(3,), lens=(9,)),
        parse_case(PrefillCase, "q=fp8_e4m3fnuz,format=fp8_e4m3fnuz"),
    )
    monkeypatch.setattr(prefill, "quick", lambda: iter(few))
    cases = document("validate prefill --on cpu,gfx950 --jobs 1")["cases"]
    ran = [(case["place"], case["case"]) for case in cases]
    assert ran == [("cpu", str(few[0])), ("cpu", str(few[1])), ("gfx950", str(few[0]))]


@pytest.mark.parametrize("watched", ["", " --detect-races"])
def test_cases_run_as_machine_code_of_several_targets(watched: str) -> None:
    line = "lens=18,ratio=12,head_dim=64,kv_heads=1,page_size=7"
    found = document(f"validate --on gfx942,gfx950 --jobs 1{watched} --case {line}")
    assert found["places"] == [case["place"] for case in found["cases"]] == ["gfx942", "gfx950"]
    assert all(place in found["ran_on"] for place in found["places"])
    assert found["detect_races"] is bool(watched)
    assert found["planned"] == found["passed"] == 2
    for case in found["cases"]:
        repeats = f"narrowkv validate --on {case['place']}{watched} --case {parse_case(DecodeCase, line)}"
        assert case["command"] == repeats


def test_a_race_is_a_failure_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = emulation.load_program
    monkeypatch.setattr(
        emulation, "load_program", lambda text, **o: right(text.replace("s_barrier", "s_nop 0", 1), **o)
    )
    # A ratio above 32 runs on four waves, which share K and V through LDS.
    line = "lens=40,ratio=40,head_dim=64,kv_heads=1,split=none"
    (case,) = document(f"validate --on gfx942 --detect-races --jobs 1 --case {line}", ends=1)["cases"]
    assert case["detail"].startswith("RaceError: LDS race")
    assert "_paged_decode_kernel" in case["detail"]


@pytest.mark.parametrize(
    "place",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)],
)
def test_the_quick_sweep_passes(place: str) -> None:
    line = f"validate --quick --on {place}"
    if place == "gpu" and not find_place(place).has_times:
        # A virtual GPU takes seconds a case; decode's own tests run the machine code of all.
        line = " --case ".join([f"validate --on {place}", *map(str, list(one_at_a_time())[::4])])
    cases = document(line)["cases"]
    assert len(cases) >= 20
    failed = [case["command"] + ": " + case["detail"] for case in cases if not case["passed"]]
    assert not failed, "\n".join(failed)
