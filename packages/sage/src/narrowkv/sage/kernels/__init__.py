"""Kernels of Sage attention: the quantising pre-pass, and attention over what it stored."""

from narrowkv.sage.kernels.attention import (
    Mask,
    NarrowKeys,
    NarrowQuery,
    SageOutputs,
    SageSpec,
    _sage_attention_kernel,
)
from narrowkv.sage.kernels.blocks import TileLists, _tile_lists_kernel
from narrowkv.sage.kernels.quantise import (
    ChannelStatistics,
    Groups,
    Narrow,
    Smoothing,
    ValueOrder,
    _channel_statistics_kernel,
    _finish_statistics_kernel,
    _mean_scores_kernel,
    _quantise_keys_values_kernel,
    _quantise_tokens_kernel,
)
from narrowkv.sage.kernels.sequences import ALIGN, Strided, _sequence_bounds_kernel

__all__ = [
    "ALIGN",
    "ChannelStatistics",
    "Groups",
    "Mask",
    "Narrow",
    "NarrowKeys",
    "NarrowQuery",
    "SageOutputs",
    "SageSpec",
    "Smoothing",
    "Strided",
    "TileLists",
    "ValueOrder",
    "_channel_statistics_kernel",
    "_finish_statistics_kernel",
    "_mean_scores_kernel",
    "_quantise_keys_values_kernel",
    "_quantise_tokens_kernel",
    "_sage_attention_kernel",
    "_sequence_bounds_kernel",
    "_tile_lists_kernel",
]
