"""Cases of every operation: a case is its own line, and a line builds the same inputs each time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from narrowkv.testing.cases import Case, CaseError, decode, parse_case, prefill, sparse, spell_case
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sparse import SparseCase

CASES: dict[str, Iterable[Case]] = {
    "decode": decode.at_random(200, seed=0),
    "prefill": [*list(prefill.quick())[::9], *list(prefill.full())[::61]],
    "sparse": [*sparse.quick(), *list(sparse.full())[::31]],
}


@pytest.mark.parametrize("operation", CASES)
def test_a_case_survives_its_own_line(operation: str) -> None:
    for case in CASES[operation]:
        assert parse_case(type(case), spell_case(case)) == case
        assert " " not in str(case)


def test_an_empty_line_is_the_default() -> None:
    for kind in (DecodeCase, PrefillCase, SparseCase):
        assert parse_case(kind, "") == parse_case(kind, str(kind())) == kind()
    assert parse_case(DecodeCase, "lens=").lens == ()


@pytest.mark.parametrize(
    ("kind", "line", "words"),
    [
        (DecodeCase, "ratio=twelve", "ratio must be an integer, got 'twelve'"),
        (DecodeCase, "colour=red", "a name .colour=red. must be one of lens, kv_heads"),
        (DecodeCase, "head_dims=64", "nearest: head_dim"),
        (DecodeCase, "lens=3+-1", "lens must be numbers joined by"),
        (DecodeCase, "q=int8", "q must be one of bf16, fp16"),
        (DecodeCase, "format=bf16/fp9", "format must be one of bf16, fp16"),
        (DecodeCase, "layout", "name=value pairs of lens"),
        (DecodeCase, "table=list", "table must be one of block_table, ragged"),
        (PrefillCase, "operation=decode", "operation must be one of prefill, append"),
        (PrefillCase, "kernel=append_then_attend", "kernel must be one of dense, fused, split, decode"),
        (PrefillCase, "operation=append,kernel=dense",
         "kernel must be one of append_then_attend, pipelined, fused"),
        (PrefillCase, "layout=NDH", "layout"),
        (PrefillCase, "q=fp32", "q must be one of"),
        (PrefillCase, "q_lens=2+1", "a number for each sequence"),
        (PrefillCase, "operation=append,q_lens=5,lens=4", "count an append's new tokens"),
        (PrefillCase, "operation=append,q=fp8_e4m3fn", "q must be bf16 or fp16 for operation append"),
        (PrefillCase, "operation=append,table=ragged", "ragged is not an option of operation append"),
        (PrefillCase, "rope=neox", "rope is not an option of operation prefill"),
        (PrefillCase, "fp8_compute=1", "fp8_compute is not an option of operation prefill"),
        (PrefillCase, "format=int2", "format"),
        (SparseCase, "mode=fast", "mode"),
        (SparseCase, "layout=NHD", "layout"),
        (SparseCase, "q=fp32", "q"),
        (SparseCase, "page=3", "page"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_case_is_refused(kind: type[Case], line: str, words: str) -> None:
    with pytest.raises(CaseError, match=words):
        parse_case(kind, line)


def bits(value: Any) -> list[torch.Tensor]:
    """Tensors of an object and of its parts, as bytes."""
    if isinstance(value, torch.Tensor):
        return [value.contiguous().view(torch.uint8)]
    if isinstance(value, tuple):
        return [x for part in value for x in bits(part)]
    return [x for part in vars(value).values() for x in bits(part)] if hasattr(value, "__dict__") else []


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(lens=(20, 3), gqa_ratio=3, head_dim=64, num_kv_heads=2),
        PrefillCase.append((3, 9), (17, 21), rope="gptj", sinks=True), SparseCase(q="fp8"),
    ],
    ids=lambda case: type(case).__name__,
)  # fmt: skip
def test_the_same_line_builds_the_same_bits(case: Any) -> None:
    first, second = bits(case.inputs()), bits(case.inputs())
    assert len(first) == len(second) >= 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
