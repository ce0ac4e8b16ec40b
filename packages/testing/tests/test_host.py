"""Host time of calls: on a CPU launches do nothing, and the Python code of a call is what is measured."""

from __future__ import annotations

import pytest
import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.runtime.launch import RecordExecutor, executing
from narrowkv.runtime.targets import get_target
from narrowkv.testing.bench.host import NullExecutor, kernels_of_random_calls, measure_calls
from narrowkv.testing.cases.decode import DecodeCase

# Coarse: about three times what was measured, so that only a call that became much slower fails.
MOST_TIMES_ADD = {
    ("append", True): 12.0,
    ("paged_decode", True): 18.0,
    ("paged_decode", False): 28.0,
    ("batch_prefill", True): 25.0,
    ("batch_prefill", False): 35.0,
    ("prefill_append", True): 35.0,
    ("prefill_append", False): 40.0,
    ("sparse_prefill_fp8 fused", True): 15.0,
    ("sparse_prefill_fp8 fused", False): 22.0,
    ("sparse_prefill_fp8 prepass", True): 24.0,
    ("sparse_prefill_fp8 prepass", False): 26.0,
    ("sparse_decode", True): 15.0,
    ("sparse_decode", False): 20.0,
    ("sage attend", True): 18.0,
    ("sage_attention", True): 35.0,
    ("sage_attention", False): 40.0,
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's own launches are measured there")
def test_python_of_a_call_beside_add() -> None:
    slow = set(MOST_TIMES_ADD)
    for _ in range(3):  # a busy machine disturbs one measurement, and another call in the next
        rows = measure_calls("cpu", 5, lambda: executing(NullExecutor(get_target("gfx942"))))
        assert rows[0].operation == "torch.add_"
        assert rows[0].ratio_to_add == 1.0
        ours = {(row.operation, row.planned): row.ratio_to_add for row in rows[2:]}
        assert ours.keys() == MOST_TIMES_ADD.keys()
        slow = {call for call in slow if ours[call] > MOST_TIMES_ADD[call]}
        if not slow:
            break
    assert not slow


def test_the_same_call_is_one_kernel_and_another_format_another() -> None:
    executor = RecordExecutor(get_target("gfx942"))
    with executing(executor):
        for fmt in ("bf16", "bf16", "fp8_e4m3fn"):
            out = paged_decode(*DecodeCase.small(lens=(5,), format=fmt).build())
            assert isinstance(out, torch.Tensor)
    assert len(executor.found) == 2, "a decode of a sequence that is not split, in two formats"


def test_random_shapes_are_counted_and_repeat() -> None:
    target = get_target("gfx942")
    first = kernels_of_random_calls(target, "cpu", 3)
    assert first == kernels_of_random_calls(target, "cpu", 3)
    assert first.keys() == {"paged_decode", "batch_prefill", "prefill_append", "append"}
    assert all(count >= 1 for count in first.values())
