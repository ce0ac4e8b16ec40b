"""The indexer's own gfx942 and gfx950 machine code, run on the CPU, against the fp64 reference."""

from __future__ import annotations

import pytest
import torch
from generated_code import both_targets

from narrowkv.paged_cache import Rope
from narrowkv.sparse_fp8 import IndexKeys, append_index_keys, append_index_keys_reference
from narrowkv.testing.cases import parse_case
from narrowkv.testing.cases.indexer import IndexCase, quick
from narrowkv.testing.cases.topk import TopkCase
from narrowkv.testing.checking import run_case
from narrowkv.testing.emulation import emulating

CASES = {
    "packed": "lens=130+5",
    "FNUZ": "lens=70+5,q=fp8_e4m3fnuz,format=fp8_e4m3fnuz",
    "rows": "layout=rows,lens=70+5+0",
    "shuffled": "layout=shuffled,lens=70",
    "several tokens": "lens=70+1,q_len=4,heads=32",
    "FP4, packed, two tokens": "lens=70+1,q_len=2,format=fp4_e2m1",
    "FP4, rows, FNUZ queries": "layout=rows,lens=40,format=fp4_e2m1,q=fp8_e4m3fnuz",
    "two formats": "lens=20,q=fp8_e4m3fnuz",
}


@pytest.mark.sampled(most=4)
@both_targets
@pytest.mark.parametrize("name", CASES)
def test_machine_code_agrees_with_the_reference(name: str, target: str) -> None:
    case = parse_case(IndexCase, CASES[name])
    result = run_case(case, context=lambda: emulating(target, detect_hazards=True))
    assert result.passed, result.detail
    assert result.error is not None
    assert result.error.relative_l1 < 1e-5, "FP8 products are exact, and sums are in fp32"


TOPK = {
    "one launch, ties": "tokens=2,columns=500,topk=64,values=ties,bounds=starts",
    "two launches, rows": "tokens=2,columns=20000,topk=700,bounds=seq_lens,page_size=64",
    "blocks": "tokens=2,columns=3000,topk=200,bounds=seq_lens,block_size=8,values=ties",
    "inside blocks": "tokens=2,columns=3000,topk=64,bounds=ends,block_size=8,num_blocks=200,page_size=64",
    "special values": "tokens=1,columns=3000,topk=100,values=special,bounds=ends",
}


@pytest.mark.sampled(most=2)
@both_targets
@pytest.mark.parametrize("name", TOPK)
def test_machine_code_chooses_exactly_the_columns_of_the_reference(name: str, target: str) -> None:
    case = parse_case(TopkCase, TOPK[name])
    result = run_case(case, context=lambda: emulating(target, detect_hazards=True))
    assert result.passed, result.detail


@pytest.mark.sampled(most=2)
@both_targets
@pytest.mark.parametrize("shuffled", [False, True])
def test_machine_code_writes_the_bytes_of_the_reference(shuffled: bool, target: str) -> None:
    generator = torch.Generator().manual_seed(0)
    k, angle = torch.randn(20, 128, generator=generator).bfloat16(), torch.rand(30, 32, generator=generator)
    found, expected = (
        IndexKeys(torch.zeros(2, 32, 128, dtype=torch.uint8), torch.zeros(2, 32), shuffled=shuffled)
        for _ in range(2)
    )
    slots, positions = torch.randperm(64, generator=generator)[:20], torch.arange(20)
    slots[3] = -1
    rope = Rope(angle.cos(), angle.sin(), positions)
    with emulating(target, detect_hazards=True):
        append_index_keys(k, found, slots, rope=rope, hadamard=True)
    append_index_keys_reference(k, expected, slots, rope=rope, hadamard=True)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.scale, expected.scale)


@pytest.mark.sampled(most=1)
@both_targets
def test_a_wrong_scale_is_caught(target: str) -> None:
    """A key's scale off by a factor of two in the bytes that the code reads, not in the reference's."""
    case = IndexCase(layout="rows", lens=(40,))
    right, wrong = case.inputs(), case.inputs()
    wrong.keys.scale[3] *= 2
    with emulating(target):
        logits = wrong.logits()
    expected, outside = right.reference()
    differs = ~torch.isclose(logits, expected, rtol=1e-4, atol=1e-5) & (outside == 0)
    assert differs.nonzero().tolist() == [[0, 3]]


@pytest.mark.slow
@both_targets
@pytest.mark.parametrize("case", list(quick()), ids=str)
def test_every_value_of_every_axis(case: IndexCase, target: str) -> None:
    result = run_case(case, context=lambda: emulating(target))
    assert result.passed, result.detail
