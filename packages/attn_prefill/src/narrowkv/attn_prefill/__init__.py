"""Prefill over a paged cache in a narrow format: 16-bit queries at any GQA ratio, or FP8 throughout."""

import narrowkv.runtime.toolchain  # noqa: F401  # first: it says how to get Triton
from narrowkv.attn_prefill.api import batch_prefill, prefill_append
from narrowkv.attn_prefill.arguments import AppendOptions, PrefillOptions
from narrowkv.attn_prefill.plan import AppendPlan, PrefillPlan
from narrowkv.attn_prefill.planning import plan_append, plan_prefill
from narrowkv.attn_prefill.reference import batch_prefill_reference, prefill_append_reference
from narrowkv.attn_prefill.tiles import PrefillShape
from narrowkv.attn_prefill.torch_ops import traced_prefill  # noqa: F401  # torch.ops.narrowkv.batch_prefill

__all__ = [
    "AppendOptions",
    "AppendPlan",
    "PrefillOptions",
    "PrefillPlan",
    "PrefillShape",
    "batch_prefill",
    "batch_prefill_reference",
    "plan_append",
    "plan_prefill",
    "prefill_append",
    "prefill_append_reference",
]
