"""What decode, prefill and append compile to for targets that nothing has run: no spills."""

from __future__ import annotations

from typing import Any

import pytest

from narrowkv.runtime.targets import UNTRIED
from narrowkv.testing.cases import Case
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.codegen import compile_call

_DECODE: dict[str, Any] = {"lens": (256,), "num_kv_heads": 1, "split": "even"}
_PREFILL: dict[str, Any] = {"q_lens": (64,), "lens": (128,), "num_kv_heads": 1, "gqa_ratio": 4}
_FORMATS = ("bf16", "fp16", "fp8_e4m3fn", "fp4_e2m1", "int8", "int4")
_LDS_BYTES = 64 * 1024

CASES: dict[str, Case] = {
    **{f"decode, {name}": DecodeCase(format=name, **_DECODE) for name in _FORMATS},
    **{f"decode of 4 tokens, {name}": DecodeCase(format=name, q_len=4, **_DECODE) for name in _FORMATS},
    **{
        f"decode, 256 channels, {name}": DecodeCase(format=name, head_dim=256, **_DECODE) for name in _FORMATS
    },
    "decode, 64 channels": DecodeCase(format="fp8_e4m3fn", head_dim=64, **_DECODE),
    "decode, a window": DecodeCase(format="fp8_e4m3fn", window_left=64, **_DECODE),
    **{f"fused prefill, {name}": PrefillCase(kernel="fused", format=name, **_PREFILL) for name in _FORMATS},
    "fused prefill, 256 channels": PrefillCase(kernel="fused", format="fp8_e4m3fn", head_dim=256, **_PREFILL),
    "fused prefill, few tokens": PrefillCase(
        kernel="fused", format="fp8_e4m3fn", q_lens=(3,), lens=(128,), num_kv_heads=1, gqa_ratio=4
    ),
    "split prefill": PrefillCase(kernel="split", format="fp8_e4m3fn", **_PREFILL),
    "dense prefill": PrefillCase(kernel="dense", format="fp8_e4m3fn", **_PREFILL),
    **{
        f"append, {name}": PrefillCase(operation="append", kernel="fused", format=name, **_PREFILL)
        for name in ("bf16", "fp8_e4m3fn", "fp4_e2m1")
    },
    "append, then attend": PrefillCase(
        operation="append", kernel="append_then_attend", format="fp8_e4m3fn", **_PREFILL
    ),
}


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("target", UNTRIED)
@pytest.mark.parametrize("name", CASES)
def test_a_call_does_not_spill(name: str, target: str) -> None:
    artifacts = compile_call(target, CASES[name].inputs().call)
    assert artifacts
    for code in artifacts:
        registers = code.registers
        assert (registers.vgpr_spills, registers.sgpr_spills) == (0, 0), (code.name, registers)
        assert code.lds_bytes <= _LDS_BYTES, code.name


@pytest.mark.parametrize("target", UNTRIED)
def test_products_are_matrix_instructions_of_16_bit_floats(target: str) -> None:
    artifacts = compile_call(target, DecodeCase(format="fp8_e4m3fn", **_DECODE).inputs().call)
    names = {name for code in artifacts for name in code.whole.mnemonics if name.startswith("v_wmma")}
    assert names
    assert all(name.endswith("f16") for name in names), names
