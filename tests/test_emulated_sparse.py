"""Sparse attention's own gfx942 and gfx950 machine code, run on the CPU, against the fp32 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from generated_code import both_targets

from narrowkv.quant.accuracy import compare
from narrowkv.runtime.launch import executing
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    sparse_prefill_fp8,
    sparse_prefill_fp8_reference,
    sparse_prefill_reference,
)
from narrowkv.testing.cases import parse_case
from narrowkv.testing.cases.sparse import SparseCase, full, quick
from narrowkv.testing.checking import CaseResult, run_case
from narrowkv.testing.emulation import EmulateExecutor, emulating
from narrowkv.testing.operations import sample

# Each compiles to a kernel of its own; few rows, since every row is executed.
CASES = {
    "16-bit rows": "mode=16bit,layout=bf16,lens=37+0,sink=1",
    "fused, FP8 query": "lens=37+0,q=fp8",
    "fused, two sources": "lens=17+0,extend=3+20",
    "fused FNUZ": "lens=20,format=fp8_e4m3fnuz",
    "fused row512": "lens=20,layout=row512",
    "V4.1, MXFP4 beside FP8": "lens=17,extend=3,layout=packed272,extend_layout=packed528",
    "V3.2, FP4, prepass": "mode=prepass,lens=20,layout=record352",
    "decode": "mode=decode,lens=70+5,splits=3,sink=1",
    "512 FP8 columns, FNUZ": "mode=decode,layout=split512,format=fp8_e4m3fnuz,lens=37+5,splits=2,sink=1",
    # The kernel for CDNA: more tiles than LDS has places for, and fewer.
    "many heads, sink": "mode=16bit,layout=bf16,heads=64,lens=200+0+1,sink=1",
    "many heads, splits": "mode=decode,heads=64,lens=300+5,splits=3,sink=1",
    "many heads, FP8 split, two sources": "layout=split,heads=32,lens=70+3,extend=0+130",
    "many heads, FP8 with negative zeros": "heads=32,lens=70,clean=0",
    # Tiles whose last heads are none of the call's.
    "12 heads": "mode=decode,heads=12,lens=37+5,splits=2,sink=1",
    "24 heads": "heads=24,lens=40+3,sink=1",
    "40 heads": "mode=decode,layout=bf16,heads=40,lens=70+5,splits=2,sink=1",
}
SLOW = {
    "fused": "lens=37+0,sink=1",
    "fused from elsewhere": "lens=20,clean=0",
    "fused split": "lens=20,layout=split",
    "FNUZ beside OCP": "lens=17,extend=3,extend_format=fp8_e4m3fnuz,clean=0",
    "V4.1": "lens=20,layout=packed528",
    "V4.1, NVFP4": "lens=20,layout=record288",
    "V3.2": "lens=20,layout=record656",
    "prepass": "mode=prepass,lens=20",
    "512 FP8 columns, many heads": "layout=split512,lens=20,extend=3,heads=64",
    "many heads, fp16, two sources": "mode=16bit,layout=fp16,q=fp16,heads=32,lens=70+3,extend=0+130",
    "many heads, expanded rows, two blocks": "mode=prepass,heads=128,lens=65",
    "many heads, FP8": "heads=64,lens=150+0+1,sink=1",
    "many heads, FP8 row512, two blocks": "layout=row512,heads=128,lens=65,q=fp8",
    "6 heads": "layout=record656,heads=6,lens=20",
    "40 heads, FP8": "heads=40,lens=40+3,sink=1",
    "many heads, FNUZ": "heads=64,lens=40,format=fp8_e4m3fnuz",
    "many heads, FNUZ query, two sources": "heads=64,lens=20+70,extend=40+0,q=fp8,format=fp8_e4m3fnuz",
    "many heads, splits, two sources": "mode=decode,layout=bf16,heads=64,lens=150+5,extend=70+0,splits=3",
}


def run(case: SparseCase, target: str, **watch: bool) -> CaseResult:
    return run_case(case, context=lambda: emulating(target, **watch))


@pytest.mark.sampled(most=6)
@both_targets
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_machine_code_agrees_with_the_reference(name: str, target: str) -> None:
    case = parse_case(SparseCase, (CASES | SLOW)[name])
    # With an FP8 query several waves hold the same scores, and write the same number to one place when the
    # compiler changes its layout; the watch for races does not look at numbers.
    watched = {"detect_hazards": True} if case.num_qo_heads > 16 else {"detect_races": case.q != "fp8"}
    result = run(case, target, **watched)
    assert result.passed, result.detail


@pytest.mark.sampled(most=1)
@both_targets
def test_scales_for_32_columns(target: str) -> None:
    """The second half of every 64 columns has a scale of its own."""
    x = torch.randn(90, 512, generator=torch.Generator().manual_seed(0))
    rows = DSV4Rows.quantize(x, layout="row512")
    assert rows.data is not None
    data = rows.data.clone()
    data[:, 449:462:2] = data[:, 448:462:2] - 1
    finer = DSV4Rows.row512(data, rows.rope, scale_group=32, negative_zero_free=True)
    source = KVSource(finer, torch.tensor([0, 70], dtype=torch.int32), torch.arange(70, dtype=torch.int32))
    q = torch.randn(1, 32, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    with emulating(target, detect_hazards=True):
        o = sparse_prefill_fp8(q, source, mode="fused")
    expected = sparse_prefill_fp8_reference(q, source)
    assert compare(o, expected).relative_l1 <= 0.004


@pytest.mark.sampled(most=1)
@both_targets
def test_a_prepass_rounds_products_with_fp32_scales_to_bf16(target: str) -> None:
    """Exactly those rounded rows are attended."""
    call = SparseCase(mode="prepass", layout="split512", prefix_lens=(20,)).inputs()
    with emulating(target, detect_hazards=True):
        o, lse = call.call()
    source = call.prefix
    assert source is not None
    assert isinstance(source.rows, DSV4Rows)
    rounded = replace(source, rows=source.rows.dequantize().bfloat16())
    expected, sums = sparse_prefill_reference(call.q, rounded, return_lse=True)
    assert compare(o, expected).relative_l1 <= call.case.bound
    assert torch.allclose(lse, sums, atol=call.case.lse_bound, rtol=0)


@pytest.mark.sampled(most=1)
@both_targets
@pytest.mark.parametrize("q", ["bf16", "fp8"])
def test_64_heads_on_sampled_workgroups(q: str, target: str) -> None:
    """The configuration of 64 heads a workgroup: the first, middle and last token are run of nine."""
    case = SparseCase(prefix_lens=(33, 20, 1, 0, 40, 7, 9, 16, 35), num_qo_heads=64, q=q)
    call = case.inputs()
    executor = EmulateExecutor(target, workgroups=sample)
    with executing(executor):
        o = call.call(return_lse=False)
    owned = executor.written(o).all(-1)
    assert owned.any(-1).tolist() == [i in (0, 4, 8) for i in range(9)]
    expected, _ = call.reference()
    assert compare(o[owned], expected[owned]).relative_l1 <= case.bound


@pytest.mark.sampled(most=1)
@both_targets
def test_a_wrong_scale_is_caught(target: str) -> None:
    """A tile's scale off by a factor of two in the bytes that the code reads, not in the reference's."""
    case = SparseCase(prefix_lens=(20,), layout="split")
    right, wrong = case.inputs(), case.inputs()
    assert wrong.prefix is not None
    rows = wrong.prefix.rows
    assert not isinstance(rows, torch.Tensor)
    assert rows.scale is not None
    rows.scale[:, 3] *= 2
    with executing(EmulateExecutor(target)):
        o, _ = wrong.call()
    expected, _ = right.reference()
    assert compare(o, expected).relative_l1 > 2 * case.bound


AXES = [case for case in quick() if case.layout != "fp16"]


@pytest.mark.slow
@both_targets
@pytest.mark.parametrize("case", [*AXES, *list(full())[::17]], ids=str)
def test_every_value_of_every_axis_and_mixtures(case: SparseCase, target: str) -> None:
    result = run(replace(case, num_qo_heads=min(case.num_qo_heads, 64)), target)
    assert result.passed, result.detail
