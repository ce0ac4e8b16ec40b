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

from narrowkv.cdna_emulator import AcquireError, ReleaseError
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
ACQUIRE = re.compile(r"buffer_inv\s+sc1")
SETTLE = re.compile(r"(;+#ASMSTART\s+)s_waitcnt vmcnt\(0\)")


@pytest.mark.sampled
@both_targets
@pytest.mark.parametrize("name", CALLS)
def test_a_release_publishes_stores_that_were_waited_for(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case = parse_case(PrefillCase, CALLS[name])
    inputs = case.inputs()
    with emulating(target, detect_hazards=True):
        results = inputs.call()
    result = check(case, inputs, results)
    assert result.passed, result.detail

    right = emulation.load_program
    monkeypatch.setattr(
        emulation, "load_program", lambda text, **more: right(SETTLE.sub(r"\1s_nop 0", text), **more)
    )
    everywhere = emulating(target, detect_hazards=True, checked=None)  # also the one that publishes
    with everywhere, pytest.raises(ReleaseError, match="of another wave"):
        case.inputs().call()


@pytest.mark.sampled
@both_targets
@pytest.mark.parametrize("name", CALLS)
def test_what_others_published_is_read_after_the_cache_was_invalidated(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case = parse_case(PrefillCase, CALLS[name])
    inputs = case.inputs()
    with emulating(target, detect_hazards=True, checked=None):
        results = inputs.call()
    result = check(case, inputs, results)
    assert result.passed, result.detail

    right = emulation.load_program
    monkeypatch.setattr(
        emulation, "load_program", lambda text, **more: right(ACQUIRE.sub("s_nop 0", text), **more)
    )
    with emulating(target, detect_hazards=True, checked=None), pytest.raises(AcquireError, match="old value"):
        case.inputs().call()
