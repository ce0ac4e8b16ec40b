"""The fused append: optional RoPE on K, optional K offset, quantise, scatter by slot."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.quant.device import narrow_fp4, narrow_fp8


class CachePointers(NamedTuple):
    """K or V storage and its strides in elements; see `KVStrides`."""

    ptr: Any
    page: Any
    token: Any
    head: Any
    outer: Any


class NewTokens(NamedTuple):
    """K or V of the new tokens, `[tokens, heads, head_dim]`."""

    ptr: Any
    token: Any
    head: Any


class DescalePointers(NamedTuple):
    """A descale tensor, float32 or E8M0 bytes; strides are 0 where it does not vary, groups are adjacent."""

    ptr: Any
    page: Any
    slot: Any
    head: Any


class RopePointers(NamedTuple):
    """cos and sin `[max_position, rotary_dim / 2]` fp32, positions `[tokens]` int32."""

    cos: Any
    sin: Any
    positions: Any
    row: Any


@triton.jit
def _store_offset(kv, page, slot, head, d, VEC: tl.constexpr, VEC_ON_TOKENS: tl.constexpr):
    base = page * kv.page + head * kv.head
    if VEC > 0 and VEC_ON_TOKENS:
        return base + (slot // VEC) * kv.outer + slot % VEC + d * VEC
    elif VEC > 0:
        return base + slot * VEC + (d // VEC) * kv.outer + d % VEC
    else:
        return base + slot * kv.token + d


@triton.jit
def _rotated(
    new, rope, token, head, d, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """One head of K rotated (RoFormer, Su et al. 2021): element d times cos plus its partner times sin."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    rotates = d < ROTARY_DIM
    if INTERLEAVED:
        angle = d // 2
        partner = d ^ 1
        first = d % 2 == 0
    else:
        angle = d % HALF
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        first = d < HALF
    base = new.ptr + token * new.token + head * new.head
    x = tl.load(base + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    y = tl.load(base + partner, mask=rotates, other=0.0).to(tl.float32)
    row = tl.load(rope.positions + token).to(tl.int64) * rope.row
    cos = tl.load(rope.cos + row + angle, mask=rotates, other=1.0)
    sin = tl.load(rope.sin + row + angle, mask=rotates, other=0.0)
    return tl.where(rotates, x * cos + tl.where(first, -y, y) * sin, x)


@triton.jit
def _quantise_and_store(
    x, kv, descale, page, slot, head, d,
    FORMAT: tl.constexpr, PER_TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr,
    FORMAT_MAX: tl.constexpr, GROUP: tl.constexpr, RULE: tl.constexpr,
    VEC: tl.constexpr, VEC_ON_TOKENS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    mask = d < HEAD_DIM
    where = descale.ptr + page * descale.page + slot * descale.slot + head * descale.head
    offset = _store_offset(kv, page, slot, head, d, VEC, VEC_ON_TOKENS)
    if FORMAT == "bf16" or FORMAT == "fp16":
        tl.store(kv.ptr + offset, x.to(kv.ptr.dtype.element_ty), mask=mask)
    elif FORMAT == "fp4_e2m1":
        # Elements past head_dim are zeros: they change neither a group's scale nor its error.
        WIDTH: tl.constexpr = GROUP if GROUP > 0 else BLOCK_D
        GROUPS: tl.constexpr = BLOCK_D // WIDTH
        codes, scale = narrow_fp4(tl.reshape(x, [GROUPS, WIDTH]), RULE)
        g = tl.arange(0, GROUPS)
        tl.store(where + g, scale, mask=g * WIDTH < HEAD_DIM)
        even, odd = tl.split(tl.reshape(codes, [BLOCK_D // 2, 2]))
        c = tl.arange(0, BLOCK_D // 2)
        offset = _store_offset(kv, page, slot, head, c, VEC, VEC_ON_TOKENS)
        tl.store(kv.ptr + offset, (even | (odd << 4)).to(tl.uint8), mask=c * 2 < HEAD_DIM)
    else:
        if PER_TOKEN:
            amax = tl.max(tl.where(mask, tl.abs(x), 0.0), 0)
            scale = tl.div_rn(amax, FORMAT_MAX)
            # A subnormal scale would lose the value it restores; zeros keep a finite one.
            scale = tl.where(scale < 1.1754943508222875e-38, 1.0, scale)
            tl.store(where, scale)
        else:
            scale = tl.load(where)
        tl.store(kv.ptr + offset, narrow_fp8(tl.div_rn(x, scale), FORMAT), mask=mask)


@triton.jit
def _append_kernel(
    k_new, v_new, k, v, k_descale, v_descale, k_offset_ptr, rope, slot_mapping, num_slots,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_OFFSET: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    K_MAX: tl.constexpr, V_MAX: tl.constexpr, K_PER_TOKEN: tl.constexpr, V_PER_TOKEN: tl.constexpr,
    K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, RULE: tl.constexpr,
    K_VEC: tl.constexpr, V_VEC: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program writes one head of one token.

    K_GROUP, V_GROUP: FP4: channels per scale, 0 for one scale; RULE: how its exponent is chosen.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    page = slot // PAGE_SIZE
    slot = slot % PAGE_SIZE
    d = tl.arange(0, BLOCK_D)
    mask = d < HEAD_DIM
    if ROTARY_DIM > 0:
        x = _rotated(k_new, rope, token, head, d, HEAD_DIM, ROTARY_DIM, INTERLEAVED)
    else:
        x = tl.load(k_new.ptr + token * k_new.token + head * k_new.head + d, mask=mask, other=0.0).to(
            tl.float32
        )
    if HAS_OFFSET:
        x -= tl.load(k_offset_ptr + head * HEAD_DIM + d, mask=mask, other=0.0)
    y = tl.load(v_new.ptr + token * v_new.token + head * v_new.head + d, mask=mask, other=0.0).to(tl.float32)
    _quantise_and_store(
        x, k, k_descale, page, slot, head, d, K_FORMAT, K_PER_TOKEN, HEAD_DIM, K_MAX, K_GROUP, RULE,
        K_VEC, False, BLOCK_D,
    )  # fmt: skip
    _quantise_and_store(
        y, v, v_descale, page, slot, head, d, V_FORMAT, V_PER_TOKEN, HEAD_DIM, V_MAX, V_GROUP, RULE,
        V_VEC, True, BLOCK_D,
    )  # fmt: skip
