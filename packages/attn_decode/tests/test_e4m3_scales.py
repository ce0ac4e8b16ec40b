"""Decode over FP4 caches with E4M3 scales, by both kernels, against the fp32 reference."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpreterBuilder

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.attn_decode.cases import K8V4, DecodeCase
from narrowkv.paged_cache import CacheFormat
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime.launch import run_as

F4 = "fp4_e2m1"
BOUND = 0.002


@pytest.mark.parametrize("fmt", [F4, K8V4, CacheFormat(k=F4, v="bf16")], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_and_values_with_e4m3_scales(fmt: str | CacheFormat, head_dim: int, device: str) -> None:
    workload = DecodeCase.small(format=fmt, scale_format="e4m3", head_dim=head_dim, layout="HND")
    q, cache, table = workload.build(device)
    o = paged_decode(q, cache, table, out_dtype=torch.float32)
    assert relative_l1(o, paged_decode_reference(q, cache, table)) <= BOUND


def test_the_native_kernel_multiplies_scores_by_the_scale() -> None:
    if not hasattr(InterpreterBuilder, "create_dot_scaled"):
        pytest.skip(f"the interpreter of Triton {triton.__version__} has no tl.dot_scaled")
    workload = DecodeCase.small(format=F4, scale_format="e4m3", head_dim=128, q_len=2)
    q, cache, table = workload.build()
    with run_as("gfx950"):
        plan = plan_decode(q, cache, table, kernel="native", split="none")
        o = paged_decode(q, cache, table, plan=plan, out_dtype=torch.float32)
    assert relative_l1(o, paged_decode_reference(q, cache, table)) <= BOUND
