"""Appending new tokens to a paged cache in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.descales import PER_TOKEN_GRANULARITIES, SCALE_GROUP
from narrowkv.paged_cache.kernels import (
    CachePointers,
    DescalePointers,
    NewTokens,
    RopePointers,
    _append_kernel,
)
from narrowkv.quant.errors import (
    check_choice,
    check_dtype,
    check_int32,
    check_last_dim_contiguous,
    check_no_grad,
    check_same_device,
    check_shape,
)
from narrowkv.quant.formats import get_format
from narrowkv.quant.launch import LaunchOptions, launch

EXPONENT_RULES = ("mse", "floor", "ceil")
_NEW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding of K on its way into the cache.

    Attributes:
        cos, sin: `[max_position, rotary_dim / 2]` fp32.
        positions: `[tokens]` int32, the position of each new token.
        style: "neox" (the halves of the rotary dims are partners) or "gptj" (neighbours are).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    style: str = "neox"

    @property
    def rotary_dim(self) -> int:
        """Leading dims that are rotated; the rest pass through."""
        return 2 * int(self.cos.shape[1])


def check_new_tokens(
    cache: PagedKVCache,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    rope: Rope | None,
    exponent: str,
    validate: bool,
) -> None:
    """Refuses new tokens that cannot be stored in the cache, before anything is written."""
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        check_dtype(name, new, _NEW_DTYPES)
        check_shape(name, new, ("tokens", cache.num_kv_heads, cache.head_dim))
        check_last_dim_contiguous(name, new)
    tokens = k_new.shape[0]
    check_choice("exponent", exponent, EXPONENT_RULES)
    check_shape("v_new", v_new, (tokens, cache.num_kv_heads, cache.head_dim))
    check_same_device(k=cache.k, k_new=k_new, v_new=v_new)
    check_no_grad(k_new=k_new, v_new=v_new)
    for name, kind in (("k_descale", cache.k_granularity), ("v_descale", cache.v_granularity)):
        if kind in ("page_head", "sequence_head"):
            raise ValueError(
                f"{name} must be per tensor, per head or per token-head to append, got {kind!r}: "
                "a new token cannot change the "
                "descale of tokens that are stored already"
            )
    if rope is not None:
        _check_rope(rope, cache.head_dim, k_new)
    if validate:
        for name, value in (("k_descale", cache.k_descale), ("v_descale", cache.v_descale)):
            kind = cache.k_granularity if name == "k_descale" else cache.v_granularity
            if (
                isinstance(value, torch.Tensor)
                and kind not in PER_TOKEN_GRANULARITIES
                and not bool(((value > 0) & value.isfinite()).all())
            ):
                raise ValueError(f"{name} must be finite and greater than 0")
        if rope is not None and tokens:
            low, high = int(rope.positions.min()), int(rope.positions.max())
            if low < 0 or high >= rope.cos.shape[0]:
                raise ValueError(f"rope.positions must lie in [0, {rope.cos.shape[0]}), got {low}..{high}")


def _check_rope(rope: Rope, head_dim: int, k_new: torch.Tensor) -> None:
    check_choice("rope.style", rope.style, ("neox", "gptj"))
    for name, table in (("rope.cos", rope.cos), ("rope.sin", rope.sin)):
        check_dtype(name, table, (torch.float32,))
        check_shape(name, table, tuple(rope.cos.shape))
        check_last_dim_contiguous(name, table)
    if rope.cos.stride() != rope.sin.stride():
        raise ValueError(
            f"rope.sin must have the strides of rope.cos {rope.cos.stride()}, got {rope.sin.stride()}"
        )
    check_int32("rope.positions", rope.positions)
    check_shape("rope.positions", rope.positions, (k_new.shape[0],))
    check_same_device(k_new=k_new, cos=rope.cos, sin=rope.sin, positions=rope.positions)
    if rope.rotary_dim > head_dim:
        raise ValueError(
            f"rope.cos must have at most head_dim / 2 = {head_dim // 2} columns, got {rope.cos.shape[1]}"
        )


def check_append(
    cache: PagedKVCache,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    slot_mapping: torch.Tensor,
    rope: Rope | None,
    k_offset: torch.Tensor | None,
    exponent: str,
    validate: bool,
) -> None:
    """Refuses what `append` cannot do, before anything is written."""
    check_new_tokens(cache, k_new, v_new, rope, exponent, validate)
    check_int32("slot_mapping", slot_mapping)
    check_shape("slot_mapping", slot_mapping, (k_new.shape[0],))
    check_same_device(k=cache.k, slot_mapping=slot_mapping, k_offset=k_offset)
    if k_offset is not None:
        check_dtype("k_offset", k_offset, (torch.float32,))
        check_shape("k_offset", k_offset, (cache.num_kv_heads, cache.head_dim))
        if not k_offset.is_contiguous():
            raise ValueError(f"k_offset must be contiguous, got strides {k_offset.stride()}")
    if validate:
        _check_slots(slot_mapping, cache.num_pages * cache.page_size)


def _check_slots(slot_mapping: torch.Tensor, num_slots: int) -> None:
    used = slot_mapping[slot_mapping != -1].cpu()
    if bool(((used < 0) | (used >= num_slots)).any()):
        raise ValueError(f"slot_mapping must hold -1 or slots in [0, {num_slots}), got {used.tolist()[:16]}")
    if len(set(used.tolist())) != used.numel():
        raise ValueError(f"slot_mapping must not hold a slot twice, got {used.sort().values.tolist()[:16]}")


def append(
    cache: PagedKVCache,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    rope: Rope | None = None,
    k_offset: torch.Tensor | None = None,
    exponent: str = "mse",
    validate: bool = False,
) -> None:
    """Writes new tokens into the cache: optional RoPE on K, optional K offset, quantise, scatter. One launch.

    Args:
        cache: written in place; bytes of other slots do not change. Static descales (float, `[1]`,
            `[num_kv_heads]`) are applied as they are (stored = saturate(x / descale)); a per token-head
            descale tensor gets the new
            tokens' own, and so do the E8M0 scales of FP4.
        k_new, v_new: `[tokens, num_kv_heads, head_dim]`, bf16, fp16 or fp32, last dimension contiguous.
        slot_mapping: `[tokens]` int32, `page * page_size + position in the page`; -1 skips a token. Slots
            beyond the cache are never written.
        rope: rotary embedding of K.
        k_offset: `[num_kv_heads, head_dim]` fp32, subtracted from K after RoPE (`narrowkv.quant.transforms`).
        exponent: FP4: how a group's scale is chosen: "mse" (least squared error), "floor" (OCP MX) or "ceil"
            (nothing saturates); see `narrowkv.quant.e8m0`.
        validate: also check slots, descales and positions, which waits for the device.

    Raises:
        TypeError, ValueError: before anything is written.

    Example:
        >>> cache = PagedKVCache.empty(4, 16, 2, 64, format="fp8_e4m3fn")
        >>> new = torch.ones(1, 2, 64)
        >>> append(cache, new, 2 * new, torch.tensor([17], dtype=torch.int32))
        >>> float(cache.dequantize()[1][1, 1, 0, 0])
        2.0
    """
    check_append(cache, k_new, v_new, slot_mapping, rope, k_offset, exponent, validate)
    launch(
        _append_kernel,
        (k_new.shape[0], cache.num_kv_heads),
        (
            new_tokens(k_new),
            new_tokens(v_new),
            *cache_pointers(cache),
            k_offset,
            rope_pointers(rope),
            slot_mapping,
            cache.num_pages * cache.page_size,
        ),
        {
            **storage_constants(cache, exponent),
            **rope_constants(rope),
            "PAGE_SIZE": cache.page_size,
            "HEAD_DIM": cache.head_dim,
            "HAS_OFFSET": k_offset is not None,
            "BLOCK_D": 1 << (cache.head_dim - 1).bit_length(),
        },
        LaunchOptions(num_warps=1, num_stages=1, enable_fp_fusion=False),
    )


def new_tokens(x: torch.Tensor) -> NewTokens:
    """K or V of new tokens as a kernel argument."""
    return NewTokens(x, x.stride(0), x.stride(1))


def rope_pointers(rope: Rope | None) -> RopePointers:
    """The tables of a rotary embedding as a kernel argument."""
    if rope is None:
        return RopePointers(None, None, None, 0)
    return RopePointers(rope.cos, rope.sin, rope.positions, rope.cos.stride(0))


def rope_constants(rope: Rope | None) -> dict[str, Any]:
    """What a kernel must know of a rotary embedding when it is compiled."""
    return {
        "ROTARY_DIM": 0 if rope is None else rope.rotary_dim,
        "INTERLEAVED": rope is not None and rope.style == "gptj",
    }


def cache_pointers(
    cache: PagedKVCache,
) -> tuple[CachePointers, CachePointers, DescalePointers, DescalePointers]:
    """K, V and their descales as kernel arguments that are written to."""
    sides = []
    for stored, strides in ((cache.k, cache.k_strides), (cache.v, cache.v_strides)):
        # The kernel writes FP8 as bytes: casts differ between targets, and FNUZ is no type of CUDA's.
        words = stored.view(torch.uint8) if stored.element_size() == 1 else stored
        sides.append(CachePointers(words, strides.page, strides.token, strides.head, strides.outer))
    return (
        sides[0],
        sides[1],
        _descale_pointers(cache.k_descale, cache.k_granularity),
        _descale_pointers(cache.v_descale, cache.v_granularity),
    )


def storage_constants(cache: PagedKVCache, exponent: str) -> dict[str, Any]:
    """How a kernel quantises into this cache."""
    constants: dict[str, Any] = {"RULE": exponent}
    for side, name, descale, kind, vec in (
        ("K", cache.format.k, cache.k_descale, cache.k_granularity, cache.k_strides.vec),
        ("V", cache.format.v, cache.v_descale, cache.v_granularity, cache.v_strides.vec),
    ):
        stored = "token" if kind in PER_TOKEN_GRANULARITIES else "tensor"
        constants |= {
            f"{side}_FORMAT": name,
            f"{side}_MAX": get_format(name).max_value,
            f"{side}_SCALING": stored if isinstance(descale, torch.Tensor) else "number",
            f"{side}_GROUP": SCALE_GROUP if kind == "token_head_group" else 0,
            f"{side}_VEC": vec,
        }
    return constants


def _descale_pointers(value: float | torch.Tensor, kind: str) -> DescalePointers:
    if not isinstance(value, torch.Tensor):
        return DescalePointers(value, None, 0, 0, 0)
    if kind in PER_TOKEN_GRANULARITIES:
        return DescalePointers(1.0, value, value.stride(0), value.stride(1), value.stride(2))
    return DescalePointers(1.0, value, 0, 0, value.stride(0) if kind == "head" else 0)
