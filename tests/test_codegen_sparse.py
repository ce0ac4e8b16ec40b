"""What sparse attention compiles to for gfx942 and gfx950: no spills, FP8 matrix instructions, LDS use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton

from narrowkv.cli.codegen import KernelCode, compile_call
from narrowkv.cli.sparse.cases import SparseCase, build
from narrowkv.cli.sparse.inspection import inspect_case, shipped_cases

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
LDS_OF_GFX942 = 64 * 1024
ATTENTION = ("_sparse_wide_kernel", "_sparse_fused_kernel")
both_targets = pytest.mark.parametrize("target", ["gfx942", "gfx950"])

# The published kernel spills at 64 heads.
DEFAULT = [
    case
    for case in shipped_cases()
    if case.heads == 64 and case.mode != "decode" and case.clean and case.format == "fp8_e4m3fn"
]


def _name(case: SparseCase) -> str:
    return (
        f"{case.mode}-{case.heads}-{case.q}-{case.layout}-{case.format}-{'own' if case.clean else 'foreign'}"
    )


def _attention(case: SparseCase, target: str) -> KernelCode:
    (code,) = [k for k in inspect_case(case, target).kernels if k.name in ATTENTION]
    return code


def _check(case: SparseCase, target: str) -> None:
    for artifact in compile_call(target, build(case).call):
        registers = artifact.registers
        assert (registers.vgpr_spills, registers.scratch_bytes) == (0, 0), (artifact.name, registers)
        assert artifact.lds_bytes <= LDS_OF_GFX942, artifact.name
        # Scalars may wait in lanes of a vector register, but not within a loop.
        assert artifact.loop.total("v_readlane", "v_writelane") == 0, artifact.name
        if case.heads != 64 or case.q != "bf16":
            assert registers.sgpr_spills == 0, artifact.name


@both_targets
@pytest.mark.parametrize("case", DEFAULT, ids=_name)
def test_64_heads_neither_spill_nor_use_scratch(case: SparseCase, target: str) -> None:
    _check(case, target)


@pytest.mark.slow
@both_targets
@pytest.mark.parametrize("case", [case for case in shipped_cases() if case not in DEFAULT], ids=_name)
def test_every_shipped_configuration_neither_spills_nor_uses_scratch(case: SparseCase, target: str) -> None:
    if (*TRITON, target, case.heads) == (3, 7, "gfx950", 32):
        pytest.skip("Triton 3.7 keeps two scalars in lanes of a vector register")
    _check(case, target)


@pytest.mark.skipif(
    TRITON < (3, 9), reason="instruction choice is asserted for Triton 3.9, the development version"
)
@both_targets
def test_nope_scores_of_an_fp8_query_use_fp8_matrix_instructions(target: str) -> None:
    """Each of seven tiles of 64 columns, once for each 16 heads and 16 rows of a wave's share."""
    code = _attention(
        replace(shipped_cases(two_sources=False)[0], mode="fused", layout="packed584", q="fp8"), target
    )
    fp8 = {name: n for name, n in code.mfma.items() if "fp8" in name or "f8f6f4" in name}
    assert sum(fp8.values()) >= 7
    # Products over 64 columns by instructions of 32: nothing of NoPE's scores is left to 16-bit ones.
    assert sum(fp8.values()) % 14 == 0


@both_targets
def test_a_bf16_query_stays_in_bf16_and_rows_are_widened_once(target: str) -> None:
    code = _attention(replace(shipped_cases(two_sources=False)[0], mode="fused", layout="packed584"), target)
    assert code.mfma
    assert all("bf16" in name for name in code.mfma)
    # A quarter of 16 rows of 512 columns, two a conversion, and a few of P; all of it where warps repeat it.
    assert 16 <= code.loop["converts"] <= 24
