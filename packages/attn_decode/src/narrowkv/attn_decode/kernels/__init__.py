"""Kernels of attn_decode; the tile mathematics in `tiles` is shared with prefill."""

from narrowkv.attn_decode.kernels.decode import _paged_decode_kernel
from narrowkv.attn_decode.kernels.merge import States, _merge_splits_kernel, _merge_states_kernel
from narrowkv.attn_decode.kernels.tiles import Blocks, PartialResults, Rows, Rules, Sizes

__all__ = [
    "Blocks",
    "PartialResults",
    "Rows",
    "Rules",
    "Sizes",
    "States",
    "_merge_splits_kernel",
    "_merge_states_kernel",
    "_paged_decode_kernel",
]
