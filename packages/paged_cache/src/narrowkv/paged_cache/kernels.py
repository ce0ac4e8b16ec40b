"""The fused append: optional RoPE on K, optional K offset, quantise, scatter by slot.

What it does to rows of new tokens is shared with prefill that appends.
"""

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
    """A number, or a descale tensor, float32 or E8M0 bytes; strides are 0 where it does not vary.

    The scales of a token's groups are adjacent.
    """

    value: Any
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
def product(x, y):
    """X * y rounded by itself: the compiler must not fuse it with the sum that follows."""
    alone = tl.fma(x, y, tl.zeros_like(x))
    # The sum loses a zero's sign.
    return tl.where(alone == 0.0, x * y, alone)


@triton.jit
def load_rotated(
    ptr, at, rope, tokens, mask, d,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Columns `d` of the rows at `ptr + at`, rotated, float32 [N, D] (RoFormer, Su et al. 2021).

    A column is itself times cos plus its partner times sin, each product rounded, as the host computes it.
    """
    inside = mask[:, None] & (d < HEAD_DIM)[None, :]
    x = tl.load(ptr + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        if INTERLEAVED:
            angle = d // 2
            partner = d ^ 1
            first = d % 2 == 0
        else:
            angle = d % HALF
            partner = tl.where(d < HALF, d + HALF, d - HALF)
            first = d < HALF
        rotates = mask[:, None] & (d < ROTARY_DIM)[None, :]
        y = tl.load(ptr + at[:, None] + partner[None, :], mask=rotates, other=0.0).to(tl.float32)
        row = tl.load(rope.positions + tokens, mask=mask, other=0).to(tl.int64) * rope.row
        where = row[:, None] + angle[None, :]
        cos = tl.load(rope.cos + where, mask=rotates, other=1.0)
        sin = tl.load(rope.sin + where, mask=rotates, other=0.0)
        turned = product(x, cos) + product(tl.where(first[None, :], -y, y), sin)
        x = tl.where(rotates, turned, x)
    return x


@triton.jit
def store_offsets(kv, page, slot, head, d, VEC: tl.constexpr, VEC_ON_TOKENS: tl.constexpr):
    """Offsets [N, D] of storage elements `d` of one head; places and strides are 64-bit."""
    base = page * kv.page + head * kv.head
    if VEC > 0 and VEC_ON_TOKENS:
        rows = base + (slot // VEC) * kv.outer + slot % VEC
        cols = d * VEC
    elif VEC > 0:
        rows = base + slot * VEC
        cols = (d // VEC) * kv.outer + d % VEC
    else:
        rows = base + slot * kv.token
        cols = d
    return rows[:, None] + cols[None, :]


@triton.jit
def quantise_rows(
    x, kv, descale, page, slot, head, mask,
    FORMAT: tl.constexpr, SCALING: tl.constexpr, HEAD_DIM: tl.constexpr, FORMAT_MAX: tl.constexpr,
    GROUP: tl.constexpr, RULE: tl.constexpr, VEC: tl.constexpr, VEC_ON_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes float32 rows [BLOCK_N, BLOCK_D] of one head into the cache, in its format.

    Columns past head_dim are zeros. SCALING: "number", "tensor", or "token" for one that rows get anew.
    """
    d = tl.arange(0, BLOCK_D)
    inside = mask[:, None] & (d < HEAD_DIM)[None, :]
    if SCALING != "number":
        where = descale.ptr + page * descale.page + slot * descale.slot + head * descale.head  # [BLOCK_N]
    if FORMAT == "bf16" or FORMAT == "fp16":
        at = store_offsets(kv, page, slot, head, d, VEC, VEC_ON_TOKENS)
        tl.store(kv.ptr + at, x.to(kv.ptr.dtype.element_ty), mask=inside)
    elif FORMAT == "fp4_e2m1":
        # Elements past head_dim are zeros: they change neither a group's scale nor its error.
        WIDTH: tl.constexpr = GROUP if GROUP > 0 else BLOCK_D
        GROUPS: tl.constexpr = BLOCK_D // WIDTH
        codes, scale = narrow_fp4(tl.reshape(x, [BLOCK_N * GROUPS, WIDTH]), RULE)
        g = tl.arange(0, GROUPS)
        scales = tl.reshape(scale, [BLOCK_N, GROUPS])
        tl.store(where[:, None] + g[None, :], scales, mask=mask[:, None] & (g * WIDTH < HEAD_DIM)[None, :])
        even, odd = tl.split(tl.reshape(codes, [BLOCK_N, BLOCK_D // 2, 2]))
        c = tl.arange(0, BLOCK_D // 2)
        at = store_offsets(kv, page, slot, head, c, VEC, VEC_ON_TOKENS)
        tl.store(
            kv.ptr + at, (even | (odd << 4)).to(tl.uint8), mask=mask[:, None] & (c * 2 < HEAD_DIM)[None, :]
        )
    else:
        if SCALING == "token":
            scale = tl.div_rn(tl.max(tl.abs(x), 1), tl.full([BLOCK_N], FORMAT_MAX, tl.float32))
            # A subnormal scale would lose the value it restores; zeros keep a finite one.
            scale = tl.where(scale < 1.1754943508222875e-38, 1.0, scale)
            tl.store(where, scale, mask=mask)
        elif SCALING == "tensor":
            scale = tl.load(where, mask=mask, other=1.0)
        else:
            scale = tl.full([BLOCK_N], 1.0, tl.float32) * descale.value
        stored = narrow_fp8(tl.div_rn(x, tl.broadcast_to(scale[:, None], [BLOCK_N, BLOCK_D])), FORMAT)
        at = store_offsets(kv, page, slot, head, d, VEC, VEC_ON_TOKENS)
        tl.store(kv.ptr + at, stored, mask=inside)


@triton.jit
def _append_kernel(
    k_new, v_new, k, v, k_descale, v_descale, k_offset_ptr, rope, slot_mapping, num_slots,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_OFFSET: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    K_MAX: tl.constexpr, V_MAX: tl.constexpr, K_SCALING: tl.constexpr, V_SCALING: tl.constexpr,
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
    one = tl.arange(0, 1) == 0
    page = slot // PAGE_SIZE + tl.zeros([1], tl.int64)
    slot = slot % PAGE_SIZE + tl.zeros([1], tl.int64)
    tokens = token + tl.zeros([1], tl.int64)
    d = tl.arange(0, BLOCK_D)
    x = load_rotated(
        k_new.ptr, tokens * k_new.token + head * k_new.head, rope, tokens, one, d,
        HEAD_DIM, ROTARY_DIM, INTERLEAVED,
    )  # fmt: skip
    if HAS_OFFSET:
        x -= tl.load(k_offset_ptr + head * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)[None, :]
    at = tokens * v_new.token + head * v_new.head
    y = tl.load(v_new.ptr + at[:, None] + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
    quantise_rows(
        x, k, k_descale, page, slot, head, one, K_FORMAT, K_SCALING, HEAD_DIM, K_MAX, K_GROUP, RULE,
        K_VEC, False, 1, BLOCK_D,
    )  # fmt: skip
    quantise_rows(
        y.to(tl.float32), v, v_descale, page, slot, head, one, V_FORMAT, V_SCALING, HEAD_DIM, V_MAX,
        V_GROUP, RULE, V_VEC, True, 1, BLOCK_D,
    )  # fmt: skip
