"""Sage attention over keys with an offset of each channel: what precision, granularity and smoothing cost.

Quantises K and V once and attends twice. Runs on a GPU where there is one, else on the CPU through Triton's
interpreter.
"""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.quant import relative_l1
from narrowkv.sage import plan_sage, sage_attention_reference

BATCH, TOKENS, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 1, 200, 2, 1, 64


def main() -> dict[str, float]:
    """Relative L1 errors against attention that quantises nothing, by what was asked."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    def tokens(heads: int, offset: float) -> torch.Tensor:
        x = torch.randn(BATCH, TOKENS, heads, HEAD_DIM) + offset * torch.randn(heads, HEAD_DIM)
        return x.to(device, torch.bfloat16)

    q, k, v = tokens(NUM_QO_HEADS, 1.0), tokens(NUM_KV_HEADS, 4.0), tokens(NUM_KV_HEADS, 1.0)
    asked: dict[str, dict[str, Any]] = {
        "int8": {},
        "int8, one descale a tensor": {"q_granularity": "per_tensor", "k_granularity": "per_tensor"},
        "fp8": {"qk_dtype": "fp8"},
        "int4, nothing taken out": {"qk_dtype": "int4", "smooth_k": False},
        "int4, K's mean taken out": {"qk_dtype": "int4"},
        "int4, both means taken out": {"qk_dtype": "int4", "smooth_q": True},
    }
    errors = {}
    for name, options in asked.items():
        plan = plan_sage(q, k, causal="bottom_right", **options)
        kv = plan.quantize_kv(k, v)  # once; any number of queries may attend to it
        o, lse = plan.attend(q, kv, return_lse=True)
        last = plan_sage(q[:, -1:], k, causal="bottom_right", **options).attend(q[:, -1:], kv)
        assert isinstance(last, torch.Tensor)
        exact = sage_attention_reference(q, k, v, qk_dtype=None, causal="bottom_right")
        assert isinstance(exact, torch.Tensor)
        errors[name] = relative_l1(o, exact)
        print(
            f"{name:30} error {errors[name]:.3f}, the last query alone {relative_l1(last, exact[:, -1:]):.3f}"
        )
        assert bool(lse.isfinite().all())
    return errors


if __name__ == "__main__":
    main()
