"""Latent decode's own gfx942 and gfx950 machine code: no spills, and run on the CPU against the reference."""

from __future__ import annotations

import pytest
from generated_code import TARGETS, both_targets, compile_case

from narrowkv.testing.cases import parse_case
from narrowkv.testing.cases.latent import LatentCase, shipped
from narrowkv.testing.checking import run_case
from narrowkv.testing.emulation import emulating

# Few rows, since every row is executed.
CASES = {
    "bf16": "lens=37+0,sinks=1,splits=1",
    "bf16 without RoPE, query tokens, splits": "columns=512,lens=37+3,q_len=3,heads=6,splits=2",
    "one scale, ragged": "layout=tensor576,lens=20+5,ragged=1,sinks=1,splits=1",
    "one scale without RoPE, 24 heads": "layout=tensor512,lens=20,heads=24,splits=1",
    "656 bytes": "layout=record656,lens=20,splits=1",
    "V4": "layout=packed584,lens=20,page_size=1,splits=1",
}
SLOW = {
    "one scale, FNUZ": "layout=tensor576,lens=20,format=fp8_e4m3fnuz,splits=1",
    "one scale, from elsewhere": "layout=tensor576,lens=20,clean=0,splits=2",
    "one scale, fp16 query, query tokens": "layout=tensor576,lens=20,q=fp16,q_len=2,splits=1",
    "bf16, 40 heads": "lens=37+5,heads=40,page_size=64,splits=1",
    "656 bytes, 128 heads, query tokens": "layout=record656,lens=20,heads=128,q_len=2,splits=1",
}


@pytest.mark.sampled(most=6)
@both_targets
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_machine_code_agrees_with_the_reference(name: str, target: str) -> None:
    case = parse_case(LatentCase, (CASES | SLOW)[name])
    result = run_case(case, context=lambda: emulating(target, detect_hazards=True))
    assert result.passed, result.detail


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", shipped(), ids=str)
def test_every_shipped_configuration_neither_spills_nor_uses_scratch(case: LatentCase, target: str) -> None:
    compile_case(case, target, lse=True)
