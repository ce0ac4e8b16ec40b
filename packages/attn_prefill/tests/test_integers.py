"""Prefill and appending prefill over INT8 and INT4 caches, against the fp32 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import plan_append, plan_prefill
from narrowkv.attn_prefill.cases import PrefillCase
from narrowkv.paged_cache import CacheFormat
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime.errors import UnsupportedError

BOUND = 0.002
K8V4 = CacheFormat(k="int8", v="int4")
CALLS: dict[str, dict[str, Any]] = {
    "dense, INT4": {"kernel": "dense", "format": "int4"},
    "dense, INT8 per token": {"kernel": "dense", "format": "int8", "granularity": "token_head"},
    "dense, K bf16": {"kernel": "dense", "format": CacheFormat(k="bf16", v="int4")},
    "fused, INT4": {"kernel": "fused", "format": "int4"},
    "fused, INT8 for all": {"kernel": "fused", "format": "int8"},
    "fused, K INT8, V FP4": {"kernel": "fused", "format": CacheFormat(k="int8", v="fp4_e2m1")},
    "split, head_dim 80": {"kernel": "split", "format": K8V4, "granularity": "token_head", "head_dim": 80},
    "append, INT4": {"operation": "append", "kernel": "append_then_attend", "format": "int4"},
    "append, INT8": {"operation": "append", "kernel": "fused", "format": "int8"},
    "append, mixed": {
        "operation": "append", "kernel": "append_then_attend", "format": K8V4, "granularity": "token_head",
        "rope": "neox",
    },
    "append, fused, mixed": {
        "operation": "append", "kernel": "fused", "format": K8V4, "granularity": "token_head", "head_dim": 80,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_attention_and_bytes(name: str, device: str) -> None:
    inputs = PrefillCase(q_lens=(5, 1, 12), lens=(20, 5, 40), **CALLS[name]).inputs(device)
    o, lse = inputs.call()
    expected, expected_lse = inputs.reference()
    assert relative_l1(o, expected) <= BOUND
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    assert not inputs.wrong_bytes()


def test_fp8_matrix_units_refuse_integers() -> None:
    inputs = PrefillCase(format="int8").inputs()
    with pytest.raises((TypeError, ValueError, UnsupportedError), match="int8"):
        plan_prefill(inputs.q.to(torch.float8_e4m3fn), inputs.cache, inputs.table, inputs.starts)
    inputs = PrefillCase(operation="append", format=K8V4).inputs()
    with pytest.raises(UnsupportedError, match=r"one FP8 format, got k=int8, v=int4; without it any cache"):
        plan_append(inputs.q, inputs.cache, inputs.table, inputs.starts, fp8_compute=True)
