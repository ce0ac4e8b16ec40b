"""What sparse attention compiles to for gfx942 and gfx950: no spills, FP8 matrix instructions, LDS use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from generated_code import TARGETS, both_targets, compile_case

from narrowkv.testing.cases import parse_case
from narrowkv.testing.cases.sparse import SparseCase, shipped
from narrowkv.testing.codegen import KernelCode

LDS_OF_GFX942 = 64 * 1024
ATTENTION = ("_sparse_16bit_kernel", "_sparse_fused_kernel", "_sparse_cdna_kernel")
FUSED = replace(shipped(two_sources=False)[0], mode="fused", layout="packed584")


def _name(case: SparseCase) -> str:
    written_by = "own" if case.clean else "foreign"
    return f"{case.mode}-{case.num_qo_heads}-{case.q}-{case.layout}-{case.format}-{written_by}"


def _is_default(case: SparseCase) -> bool:
    """Whether it is a prefill with 64 heads, at which the published kernel spills, over narrowkv's E4M3."""
    return case.num_qo_heads == 64 and case.mode != "decode" and case.clean and case.format == "fp8_e4m3fn"


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize(
    ("case", "target"),
    [
        pytest.param(
            case, target, id=f"{_name(case)}-{target}", marks=() if _is_default(case) else pytest.mark.slow
        )
        for case in shipped()
        for target in TARGETS
    ],
)
def test_every_shipped_configuration_neither_spills_nor_uses_scratch(case: SparseCase, target: str) -> None:
    for code in compile_case(case, target, lse=True):
        # On gfx950 the kernel for CDNA keeps two tiles of 64 rows in LDS.
        large = (target, code.name) == ("gfx950", "_sparse_cdna_kernel")
        assert large or code.lds_bytes <= LDS_OF_GFX942, code.name
        if case.num_qo_heads != 64 or case.q == "fp16":
            assert code.registers.sgpr_spills == 0, code.name


@pytest.mark.codegen_all
@pytest.mark.parametrize("line", ["q=fp8,format=fp8_e4m3fnuz", "mode=decode,layout=bf16"])
def test_configurations_that_once_spilled_do_not(line: str) -> None:
    compile_case(parse_case(SparseCase, f"lens=16+16,extend=16+16,heads=64,{line}"), "gfx950", lse=True)


@pytest.mark.sampled(most=2)
@both_targets
@pytest.mark.parametrize("heads", [6, 12, 24, 40, 96, 128])
@pytest.mark.parametrize(
    "line", ["mode=16bit,layout=bf16", "mode=decode,layout=bf16", "mode=decode", "layout=record656", "q=fp8"]
)
def test_any_number_of_heads_compiles_without_spills(line: str, heads: int, target: str) -> None:
    """Tiles whose last heads are none of the call's."""
    case = parse_case(SparseCase, f"lens=16+16,extend=16+16,heads={heads},{line}")
    compile_case(case, target, lse=True)


@pytest.mark.codegen_all
def _attention(case: SparseCase, target: str) -> KernelCode:
    (code,) = [k for k in map(KernelCode.of, compile_case(case, target, lse=True)) if k.name in ATTENTION]
    return code


@pytest.mark.sampled(most=1)
@both_targets
def test_rows_are_widened_once_and_multiplied_in_bf16(target: str) -> None:
    """In FP8 the scores of seven tiles would be scaled one by one, which takes more than it saves."""
    fp8, bf16 = (_attention(replace(FUSED, q=q), target) for q in ("fp8", "bf16"))
    assert fp8.mfma == bf16.mfma
    assert fp8.loop["converts"] == bf16.loop["converts"]
    assert bf16.mfma
    assert all("bf16" in name for name in bf16.mfma)
    # A quarter of 16 rows of 512 columns, two a conversion, and a few of P; all of it where warps repeat it.
    assert 16 <= bf16.loop["converts"] <= 24
