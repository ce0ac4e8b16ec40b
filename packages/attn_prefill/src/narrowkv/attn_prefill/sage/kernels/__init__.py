"""Kernels of Sage attention: the quantising pre-pass, and attention over what it stored."""

from narrowkv.attn_prefill.sage.kernels.attention import (
    NarrowKeys,
    NarrowQuery,
    Outputs,
    _sage_attention_kernel,
)
from narrowkv.attn_prefill.sage.kernels.quantise import (
    Narrow,
    Smoothing,
    Statistics,
    _channel_statistics_kernel,
    _finish_statistics_kernel,
    _mean_scores_kernel,
    _quantise_keys_values_kernel,
    _quantise_tokens_kernel,
)
from narrowkv.attn_prefill.sage.kernels.sequences import ALIGN, Sequences, Strided

__all__ = [
    "ALIGN",
    "Narrow",
    "NarrowKeys",
    "NarrowQuery",
    "Outputs",
    "Sequences",
    "Smoothing",
    "Statistics",
    "Strided",
    "_channel_statistics_kernel",
    "_finish_statistics_kernel",
    "_mean_scores_kernel",
    "_quantise_keys_values_kernel",
    "_quantise_tokens_kernel",
    "_sage_attention_kernel",
]
