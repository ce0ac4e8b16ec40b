"""Sage attention."""

import narrowkv.quant.toolchain  # noqa: F401  # first: it says how to get Triton
from narrowkv.attn_prefill.sage import (
    QuantizedKV,
    SagePlan,
    plan_sage,
    sage_attention,
    sage_attention_reference,
)

__all__ = [
    "QuantizedKV",
    "SagePlan",
    "plan_sage",
    "sage_attention",
    "sage_attention_reference",
]
