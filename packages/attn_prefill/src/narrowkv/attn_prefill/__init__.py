"""Prefill over a paged cache in a narrow format: 16-bit queries at any GQA ratio, or FP8 throughout."""

import narrowkv.quant.toolchain  # noqa: F401  # first: it says how to get Triton
from narrowkv.attn_prefill.api import batch_prefill, prefill_append
from narrowkv.attn_prefill.config import PrefillShape
from narrowkv.attn_prefill.plan import AppendPlan, PrefillPlan, plan_append, plan_prefill
from narrowkv.attn_prefill.reference import batch_prefill_reference, prefill_append_reference
from narrowkv.attn_prefill.sage import (
    QuantizedKV,
    SagePlan,
    plan_sage,
    sage_attention,
    sage_attention_reference,
)

__all__ = [
    "AppendPlan",
    "PrefillPlan",
    "PrefillShape",
    "QuantizedKV",
    "SagePlan",
    "batch_prefill",
    "batch_prefill_reference",
    "plan_append",
    "plan_prefill",
    "plan_sage",
    "prefill_append",
    "prefill_append_reference",
    "sage_attention",
    "sage_attention_reference",
]
