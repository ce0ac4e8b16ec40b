"""Split-KV decode over a paged cache in a narrow format, with 16-bit queries at any GQA ratio."""

import narrowkv.runtime.toolchain  # noqa: F401  # first: it says how to get Triton
from narrowkv.attn_decode.api import paged_decode
from narrowkv.attn_decode.config import DecodeShape
from narrowkv.attn_decode.merging import merge_states
from narrowkv.attn_decode.options import AttentionOptions, DecodeOptions, LocalOptions
from narrowkv.attn_decode.plan import DecodePlan
from narrowkv.attn_decode.planning import plan_decode
from narrowkv.attn_decode.reference import merge_states_reference, paged_decode_reference
from narrowkv.attn_decode.torch_ops import traced_decode  # noqa: F401  # torch.ops.narrowkv.paged_decode

__all__ = [
    "AttentionOptions",
    "DecodeOptions",
    "DecodePlan",
    "DecodeShape",
    "LocalOptions",
    "merge_states",
    "merge_states_reference",
    "paged_decode",
    "paged_decode_reference",
    "plan_decode",
]
