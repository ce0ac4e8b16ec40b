"""What the indexer's kernels compile to for gfx942, gfx950 and Hopper: no spills, FP8 matrix instructions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generated_code import TARGETS, assert_no_spills, compile_case

from narrowkv.paged_cache import Rope
from narrowkv.sparse_fp8 import IndexKeys, append_index_keys
from narrowkv.testing.cases import parse_case
from narrowkv.testing.cases.indexer import FORMATS, IndexCase, shipped
from narrowkv.testing.cases.topk import TopkCase
from narrowkv.testing.cases.topk import shipped as shipped_topk
from narrowkv.testing.codegen import KernelCode, compile_call

pytestmark = pytest.mark.sampled(most=4)
FNUZ = "q=fp8_e4m3fnuz,format=fp8_e4m3fnuz"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [*shipped(), *shipped_topk()], ids=str)
def test_every_shipped_configuration_neither_spills_nor_uses_scratch(
    case: IndexCase | TopkCase, target: str
) -> None:
    for code in compile_case(case, target):
        assert code.lds_bytes <= 80 * 1024


@pytest.mark.parametrize("case", [*shipped(), *shipped_topk()], ids=str)
def test_nothing_spills_on_hopper(case: IndexCase | TopkCase, sm90_code: Any) -> None:
    case.inputs().prepare()()
    for kernel in sm90_code.kernels:
        assert kernel.stack_bytes() == 0
        assert kernel.shared_bytes <= 113 * 1024, "two programs fit a multiprocessor"


def _append() -> None:
    k, angle = torch.randn(64, 128).bfloat16(), torch.rand(30, 32)
    for format in FORMATS:
        keys = IndexKeys(torch.zeros(2, 64, 128, dtype=torch.uint8), torch.zeros(2, 64), format)
        rope = Rope(angle, angle, torch.arange(64))
        append_index_keys(k, keys, torch.arange(64), rope=rope, hadamard=True)


@pytest.mark.parametrize("target", TARGETS)
def test_the_writer_does_not_spill(target: str) -> None:
    assert_no_spills(compile_call(target, _append))


def test_the_writer_does_not_spill_on_hopper(sm90_code: Any) -> None:
    _append()
    assert [kernel.stack_bytes() for kernel in sm90_code.kernels] == [0, 0]


@pytest.mark.parametrize(
    ("target", "line", "words"),
    [
        ("gfx950", "", "f8f6f4"),
        ("gfx950", FNUZ, "f16"),
        ("gfx942", FNUZ, "fp8_fp8"),
        ("gfx942", "", "f16"),
    ],
)
def test_fp8_is_multiplied_where_the_target_can(target: str, line: str, words: str) -> None:
    (code,) = map(KernelCode.of, compile_case(parse_case(IndexCase, line), target))
    assert code.mfma
    assert all(words in name for name in code.mfma)


def test_hopper_multiplies_fp8(sm90_code: Any) -> None:
    IndexCase().inputs().prepare()()
    (kernel,) = sm90_code.kernels
    assert "QGMMA" in kernel.machine_code()
