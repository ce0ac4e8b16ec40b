"""Prefill over heads of 320 and 512 channels: every kernel and format, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowkv.paged_cache import CacheFormat
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.checking import check

WAYS = [("prefill", kernel) for kernel in ("dense", "fused", "split")]
WAYS += [("append", kernel) for kernel in ("append_then_attend", "fused", "split")]
CALLS: dict[str, dict[str, Any]] = {
    "FP8": {},
    "bf16, a window": {"format": "bf16", "window_left": 20},
    "NVFP4, a soft cap": {
        "format": "fp4_e2m1", "scale_group": 16, "scale_format": "e4m3", "logits_soft_cap": 5.0,
    },
    "FP8 keys, FP4 values": {"format": CacheFormat("fp8_e4m3fn", "fp4_e2m1")},
    "INT4, sinks": {"format": "int4", "sinks": True, "gqa_ratio": 8},
    "descales of keys": {"granularity": "token_head", "gqa_ratio": 17, "num_kv_heads": 1},
}  # fmt: skip


def _case(way: tuple[str, str], **changes: Any) -> PrefillCase:
    operation, kernel = way
    # Nothing follows the last sequence's odd number of blocks of 16 keys.
    sizes: dict[str, Any] = {"q_lens": (9, 20, 1), "lens": (40, 20, 33), "num_kv_heads": 2, "gqa_ratio": 3}
    return PrefillCase(**{**sizes, "operation": operation, "kernel": kernel, **changes})


@pytest.mark.sampled(most=8)
@pytest.mark.parametrize("head_dim", [320, 512])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_wide_heads_agree_with_the_reference(
    name: str, way: tuple[str, str], head_dim: int, device: str
) -> None:
    case = _case(way, head_dim=head_dim, **CALLS[name])
    result = check(case, case.inputs(device))
    assert result.passed, result.detail


@pytest.mark.parametrize(
    "changes",
    [
        {"way": ("prefill", "fused"), "q_dtype": torch.float8_e4m3fn},
        {"way": ("append", "fused"), "fp8_compute": True},
    ],
)
def test_products_in_fp8_are_refused(changes: dict[str, Any]) -> None:
    inputs = _case(changes.pop("way"), head_dim=512, **changes).inputs("cpu")
    with pytest.raises(UnsupportedError, match="heads of 256 channels or fewer, got 512"):
        inputs.plan()
