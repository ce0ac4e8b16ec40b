"""What the prefill kernel for Hopper compiles to, on a machine without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from narrowkv.attn_prefill import batch_prefill, plan_append, plan_prefill, prefill_append
from narrowkv.attn_prefill.workloads import AppendWorkload, PrefillWorkload
from narrowkv.quant.launch.gluon import has_gluon

pytestmark = pytest.mark.skipif(not has_gluon(), reason="this Triton has no Gluon for Hopper")


def _check(kernel: Any, head_dim: int, loops: int) -> None:
    """Each product of a round is computed once and beside other work, and nothing is spilled in a loop."""
    assert kernel.name == "_pipelined_prefill_kernel"
    assert kernel.shared_bytes <= 227 * 1024
    found = kernel.product_loops()
    assert len(found) == loops * 2  # of two warpgroups
    for loop in found:
        text = "\n".join(loop)
        # Q @ K^T over head_dim, P @ V over 128 keys, 16 at a time.
        assert len(re.findall("HGMMA", text)) == head_dim // 16 + 128 // 16
        # One wait for the scores with P @ V still under way, one for P @ V: nothing was serialised.
        assert len(re.findall(r"WARPGROUP\.DEPBAR", text)) == 2
        assert len(re.findall(r"gsb0, 0x1\b", text)) == 1
        assert not re.search(r"\b(STL|LDL)\b", text)


@pytest.mark.parametrize(("fmt", "head_dim"), [("fp8_e4m3fn", 128), ("bf16", 128), ("fp8_e4m3fn", 64)])
def test_scores_and_values_overlap(fmt: str, head_dim: int, sm90_code: Any) -> None:
    workload = PrefillWorkload(
        q_lens=(1024,), lens=(1024,), num_kv_heads=8, gqa_ratio=12, head_dim=head_dim, format=fmt
    )
    q, cache, table, starts = workload.build()
    batch_prefill(q, cache, table, starts, plan=plan_prefill(q, cache, table, starts))
    _check(sm90_code.kernels[-1], head_dim, loops=2)  # with a mask, and without


def test_an_append_adds_a_loop_for_the_keys_that_pad_the_first_block(sm90_code: Any) -> None:
    workload = AppendWorkload(q_lens=(512,), lens=(512,), num_kv_heads=8, gqa_ratio=12, head_dim=128)
    q, k_new, v_new, cache, table, starts, _ = workload.build_append()
    prefill_append(q, k_new, v_new, cache, table, starts, plan=plan_append(q, cache, table, starts))
    assert sm90_code.kernels[0].name == "_produce_kernel"
    _check(sm90_code.kernels[-1], 128, loops=3)


def test_an_append_to_few_keys_attends_in_plain_triton(sm90_code: Any) -> None:
    workload = AppendWorkload(q_lens=(128,), lens=(256,), num_kv_heads=8, gqa_ratio=12, head_dim=128)
    q, k_new, v_new, cache, table, starts, _ = workload.build_append()
    prefill_append(q, k_new, v_new, cache, table, starts, plan=plan_append(q, cache, table, starts))
    produce, attend = sm90_code.kernels
    assert (produce.name, attend.name) == ("_produce_kernel", "_dense_prefill_kernel")
    for kernel in sm90_code.kernels:
        assert not re.search(r"\b(STL|LDL)\b", kernel.machine_code())
