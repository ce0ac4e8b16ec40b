"""What every operation's plain configurations compile to for gfx90a, whose GPUs run them: no spills.

gfx90a multiplies 16-bit floats and int8; it neither multiplies FP8 nor converts it.
"""

from __future__ import annotations

from typing import Any

import pytest

from narrowkv.runtime.launch import compile_for
from narrowkv.runtime.targets import get_target
from narrowkv.testing.cases import Case
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import QUERIES, PrefillCase
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.cases.sparse import SparseCase
from narrowkv.testing.codegen import compile_call

_DECODE: dict[str, Any] = {"lens": (256,), "num_kv_heads": 1, "split": "even"}
_PREFILL: dict[str, Any] = {"q_lens": (64,), "lens": (128,), "num_kv_heads": 1, "gqa_ratio": 4}
_SPARSE: dict[str, Any] = {"prefix_lens": (16, 16)}
_SAGE: dict[str, Any] = {"q_lens": (256,), "k_lens": (256,)}
_FORMATS = ("bf16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp4_e2m1", "int8", "int4")

CASES: dict[str, Case] = {
    **{f"decode, {name}": DecodeCase(format=name, **_DECODE) for name in _FORMATS},
    **{f"prefill, {name}": PrefillCase(kernel="fused", format=name, **_PREFILL) for name in _FORMATS},
    "prefill, split": PrefillCase(kernel="split", **_PREFILL),
    "prefill, dense": PrefillCase(kernel="dense", **_PREFILL),
    "prefill, FP8 queries": PrefillCase(
        kernel="fused", q_dtype=QUERIES["fp8_e4m3fn"], format="fp8_e4m3fn", **_PREFILL
    ),
    "append, fused": PrefillCase(operation="append", kernel="fused", **_PREFILL),
    "append, then attend": PrefillCase(operation="append", kernel="append_then_attend", **_PREFILL),
    **{
        f"sparse, {way}, {heads} heads": SparseCase(num_qo_heads=heads, **options, **_SPARSE)
        for way, options in {
            "16 bits": {"mode": "16bit", "layout": "bf16"},
            "FP8": {},
            "FP8 query": {"q": "fp8"},
            "expanded first": {"mode": "prepass"},
            "fp32 scales": {"layout": "split512"},
            "FP4": {"layout": "packed288"},
        }.items()
        for heads in (16, 64)
    },
    **{
        f"Sage, {name}, {mask or 'no mask'}": SageCase(qk_dtype=name, causal=mask, **_SAGE)
        for name in ("int8", "int4", "fp8")
        for mask in ("", "bottom_right")
    },
}


@pytest.mark.sampled(most=4)
@pytest.mark.parametrize("name", CASES)
def test_a_plain_configuration_neither_spills_nor_uses_scratch(name: str) -> None:
    artifacts = compile_call("gfx90a", CASES[name].inputs().call)
    assert artifacts
    for code in artifacts:
        registers = code.registers
        assert (registers.vgpr_spills, registers.scratch_bytes) == (0, 0), (code.name, registers)
        assert code.lds_bytes <= 64 * 1024, code.name


def test_products_are_in_16_bits() -> None:
    artifacts = compile_call("gfx90a", DecodeCase(**_DECODE).inputs().call)
    names = {name for code in artifacts for name in code.whole.mnemonics if name.startswith("v_mfma")}
    assert names
    assert all("f16" in name for name in names)


def test_what_takes_scaled_matrix_instructions_is_refused_with_the_reason() -> None:
    case = DecodeCase(format="fp4_e2m1", kernel="native", **_DECODE)
    with pytest.raises(ValueError, match="scaled"), compile_for("gfx90a"):
        case.inputs().call()
    assert not get_target("gfx90a").has_scaled_mfma
