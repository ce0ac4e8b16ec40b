"""Hand-overs between the workgroups of a launch: stores are waited for, published and then read.

Kernels whose last workgroup merges what the others stored are run with the checks of waits. Then the wait
ahead of each release, or the invalidation of the cache after it, is taken out of the assembly, and the
emulator must say so.
"""

from __future__ import annotations

import re

import pytest
import torch
from generated_code import both_targets

from narrowkv.cdna_emulator import AcquireError, EmulatorError, ReleaseError
from narrowkv.testing import emulation
from narrowkv.testing.cases import parse_case
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.checking import check
from narrowkv.testing.emulation import emulating

LENS = "q_lens=3+25,lens=20+150,"
CALLS = {
    "dense": LENS + "splits=2,kernel=dense",
    "fused": LENS + "splits=2,kernel=fused",
    "fused, split": LENS + "kernel=split",
    "append": LENS + "operation=append,splits=2,kernel=fused",
    "append, split": LENS + "operation=append,kernel=split",
}
# What makes a hand-over safe, and what the emulator says without it. That a store was not waited for shows in
# the workgroup that publishes it, and an old value in the one that reads: all workgroups are checked.
FAULTS: dict[str, tuple[re.Pattern[str], type[EmulatorError], str]] = {
    "wait before the release": (
        re.compile(r"(;+#ASMSTART\s+)s_waitcnt vmcnt\(0\)"),
        ReleaseError,
        "of another wave",
    ),
    "invalidation after the acquire": (re.compile(r"()buffer_inv\s+sc1"), AcquireError, "old value"),
}


@pytest.mark.sampled("fault")
@both_targets
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_hand_over_is_right_and_its_fault_is_found(
    fault: str, name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case = parse_case(PrefillCase, CALLS[name])
    inputs = case.inputs()
    with emulating(target, detect_hazards=True, checked=None):
        results = inputs.call()
    result = check(case, inputs, results)
    assert result.passed, result.detail

    pattern, error, words = FAULTS[fault]
    right = emulation.load_program
    monkeypatch.setattr(
        emulation, "load_program", lambda text, **more: right(pattern.sub(r"\1s_nop 0", text), **more)
    )
    with emulating(target, detect_hazards=True, checked=None), pytest.raises(error, match=words):
        case.inputs().call()
