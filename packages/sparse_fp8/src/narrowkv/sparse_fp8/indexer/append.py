"""`append_index_keys`: rotates, quantises and stores the index keys of new tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from narrowkv.paged_cache import Rope
from narrowkv.paged_cache.rope import FLOATS, check_rope, rope_pointers
from narrowkv.quant import get_format
from narrowkv.runtime.errors import (
    UnsupportedError,
    check_dtype,
    check_index_vector,
    check_instance,
    check_last_dim_contiguous,
    check_no_grad,
    check_same_device,
    check_shape,
    with_defaults,
)
from narrowkv.runtime.launch import BoundLaunch, LaunchOptions
from narrowkv.runtime.launch.tracing import traceable
from narrowkv.sparse_fp8.indexer.kernels.append import AppendSpec, _append_index_keys_kernel
from narrowkv.sparse_fp8.indexer.kernels.logits import KeyPages
from narrowkv.sparse_fp8.indexer.keys import FP4, SHUFFLED_TILE, IndexKeys, IndexKeysFormat
from narrowkv.sparse_fp8.options import APPEND_DEFAULTS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowkv.sparse_fp8.options import IndexAppendOptions

__all__ = ["append_index_keys"]

_BLOCK = 16
_KERNELS = 64


@traceable
def append_index_keys(
    k: torch.Tensor,
    keys: IndexKeys,
    slot_mapping: torch.Tensor,
    **options: Unpack[IndexAppendOptions],
) -> None:
    """Writes the index keys of new tokens into their slots: RoPE, Hadamard rotation, FP8 with a scale a key.

    All of it is computed in fp32 and rounded once. The stored bytes are those of `IndexKeys.quantize`.

    Args:
        k: bf16, fp16 or fp32 `[num_tokens, head_dim]`, last dimension contiguous: normalised keys.
        keys: where to write, in FP8.
        slot_mapping: int32 or int64 `[num_tokens]`: token t goes to slot `slot_mapping[t]`, token `slot %
            page_size` of page `slot // page_size`. -1, and any slot that there is not, is skipped.
        **options: `rope`, `hadamard` and `pow2_scales`; see `IndexAppendOptions`.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what was given.
        UnsupportedError: keys in FP4.

    Source: DeepSeek-V3.2's indexer; the scale is that of vLLM's `indexer_k_quant_and_cache`,
    `max(amax, 1e-4)` over the format's largest number.

    Example:
        >>> keys = IndexKeys.packed(torch.zeros(2, 4, 36, dtype=torch.uint8))
        >>> append_index_keys(torch.ones(1, 32), keys, torch.tensor([5]))
        >>> keys.dequantize()[1, 1, :2]
        tensor([1., 1.])
    """
    given = with_defaults("append_index_keys", options, APPEND_DEFAULTS)
    rope: Rope | None = given["rope"]
    if check_instance("keys", keys, IndexKeys).format == FP4:
        raise UnsupportedError("keys must be in FP8 to be appended to: quantise FP4 by IndexKeys.quantize")
    check_dtype("k", k, FLOATS)
    check_shape("k", k, ("num_tokens", keys.stored.head_dim))
    check_last_dim_contiguous("k", k)
    check_no_grad(k=k)
    check_index_vector("slot_mapping", slot_mapping, k.shape[0])
    check_same_device(k=k, values=keys.values, slot_mapping=slot_mapping)
    if rope is not None:
        check_rope(rope, keys.stored.head_dim, k, name="k")
    values, scale = keys.values.view(torch.uint8), keys.scale
    steps = (values.stride(1), scale.stride(1)) if keys.is_paged else (0, 0)
    num_slots = keys.num_pages * max(1, keys.stored.page_size)
    rotary, neox = (0, False) if rope is None else (rope.rotary_dim, rope.style == "neox")
    kernel = _kernel(keys.stored, rotary, neox, bool(given["hadamard"]), bool(given["pow2_scales"]))
    kernel(
        (-(-k.shape[0] // _BLOCK),),
        (
            k, k.stride(0), slot_mapping, slot_mapping.stride(0),
            KeyPages(values, scale, values.stride(0), steps[0], scale.stride(0), steps[1]),
            rope_pointers(rope), k.shape[0], num_slots,
        ),
    )  # fmt: skip


@lru_cache(maxsize=_KERNELS)
def _kernel(stored: IndexKeysFormat, rotary: int, neox: bool, hadamard: bool, pow2: bool) -> BoundLaunch:
    spec = AppendSpec(
        HEAD_DIM=stored.head_dim,
        ROTARY=rotary,
        NEOX=neox,
        BUTTERFLIES=stored.head_dim.bit_length() - 1 if hadamard else 0,
        POW2=pow2,
        FORMAT=stored.format,
        MAX=get_format(stored.format).max_value,
        BLOCK=_BLOCK,
        PAGE_SIZE=stored.page_size,
        SHUFFLED=SHUFFLED_TILE if stored.shuffled else 0,
    )
    # Products and sums are rounded apart, as the host's are.
    options = LaunchOptions(num_warps=4, num_stages=1, enable_fp_fusion=False)
    return BoundLaunch(_append_index_keys_kernel, {"SPEC": spec}, options)
