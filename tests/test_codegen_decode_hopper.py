"""What decode's kernels compile to for Hopper, on a machine without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_decode.cases import K8V4, DecodeCase


def _decode(sm90_code: Any, capacity: int, batch: int = 1, **changes: Any) -> None:
    """Compiles a call whose plan is for `capacity` keys."""
    case = DecodeCase(lens=(64,) * batch, num_kv_heads=8, **changes)
    q, cache, table = case.build()
    paged_decode(q, cache, table, plan=plan_decode(q, cache, table, max_seq_len=capacity))


@pytest.mark.parametrize(("batch", "capacity"), [(4, 1024), (1, 32768)])
def test_the_merge_begins_before_attention_has_ended(batch: int, capacity: int, sm90_code: Any) -> None:
    _decode(sm90_code, capacity, batch)
    attend, merge = sm90_code.kernels
    assert (attend.name, merge.name) == ("_paged_decode_kernel", "_merge_splits_kernel")
    assert not attend.compiled.metadata.launch_pdl
    assert merge.compiled.metadata.launch_pdl
    assert len(re.findall(r"\bPREEXIT\b", attend.machine_code())) == 1
    # Which splits there are is known before the wait; partial results are read after it, on every way.
    ahead, *behind = re.split(r"\bACQBULK\b", merge.machine_code())
    assert behind
    assert re.search(r"\bLDG\b", ahead)
    assert re.search(r"\bLDG\.E\.128\b", behind[-1])
    assert not re.search(r"\bEXIT\b|\bLDG\.E\.128\b", ahead)


def test_a_launch_that_merges_itself_lets_no_other_begin(sm90_code: Any) -> None:
    _decode(sm90_code, 8192, 64)
    (attend,) = sm90_code.kernels
    assert not re.search(r"\bPREEXIT\b", attend.machine_code())


@pytest.mark.parametrize("batch", [1, 64])
def test_four_programs_share_a_multiprocessor_beside_fp4_values(batch: int, sm90_code: Any) -> None:
    _decode(sm90_code, {1: 32768, 64: 1024}[batch], batch, format=K8V4)
    attend = sm90_code.kernels[0]
    assert attend.compiled.metadata.num_warps == 4
    assert attend.registers() <= 128
    assert attend.stack_bytes() <= 8  # with Triton 3.6
    assert 4 * (attend.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("group", [None, 32])
def test_fp4_is_converted_two_numbers_at_once(group: int | None, sm90_code: Any) -> None:
    _decode(sm90_code, 8192, 64, format="fp4_e2m1", scale_group=group)
    (attend,) = sm90_code.kernels
    # K and V of a tile of 32 keys by one warp, in a loop that stands there once.
    pairs = 2 * 32 * 128 // 2 // 32
    assert len(re.findall(r"\bF2FP\.F16\.E4M3\.UNPACK_B\b", attend.machine_code())) == pairs
