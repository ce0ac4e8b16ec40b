"""The fused append: optional RoPE on K, offset, balance and rotation of K, quantise, scatter by slot.

What it does to rows of new tokens is shared with prefill that appends.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.quant.device import narrow_fp8
from narrowkv.quant.device_e4m3 import narrow_fp4_e4m3
from narrowkv.quant.device_fp4 import narrow_fp4
from narrowkv.quant.device_hadamard import rotate_parts
from narrowkv.quant.device_int import narrow_int4, narrow_int8, saturated_int8


class NewTokens(NamedTuple):
    """K or V of the new tokens, `[tokens, heads, head_dim]`."""

    ptr: Any
    token: Any
    head: Any


class DescalePointers(NamedTuple):
    """A number, or a descale tensor, float32, E8M0 or E4M3 bytes; strides are 0 where it does not vary.

    The scales of a token's groups are adjacent.
    """

    value: Any
    ptr: Any
    page: Any
    slot: Any
    head: Any


class RopePointers(NamedTuple):
    """cos and sin `[max_position, rotary_dim / 2]` of any float type, positions `[tokens]` int32 or int64."""

    cos: Any
    sin: Any
    positions: Any
    row: Any  # stride of cos and sin over positions
    step: Any  # stride of `positions`
    max_position: Any


class Queries(NamedTuple):
    """Q of the new tokens, `[tokens, heads, head_dim]`, which is rotated in place; a ptr of None for no Q."""

    ptr: Any
    token: Any
    head: Any
    heads: Any
    begin: Any  # the first program of a token that rotates Q: the number of KV heads


# Query heads that one program rotates.
QUERY_HEADS = tl.constexpr(4)


@triton.jit
def product(x, y):
    """X * y rounded by itself: the compiler must not fuse it with the sum that follows."""
    alone = tl.fma(x, y, tl.zeros_like(x))
    # The sum loses a zero's sign.
    return tl.where(alone == 0.0, x * y, alone)


@triton.jit
def load_cos_sin(rope, tokens, mask, angle, rotates):
    """Cosines and sines [N, D] of the angles numbered `angle` [D] at the tokens' positions, float32."""
    position = tl.load(rope.positions + tokens * rope.step, mask=mask, other=0)
    # A position without an angle takes the nearest one that has: the tables end there.
    position = tl.maximum(tl.minimum(position, rope.max_position - 1), 0)
    where = (position.to(tl.int64) * rope.row)[:, None] + angle[None, :]
    cos = tl.load(rope.cos + where, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(rope.sin + where, mask=rotates, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def load_rotated(
    ptr, at, rope, tokens, mask, d,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, CACHING: tl.constexpr = "",
):  # fmt: skip
    """Columns `d` of the rows at `ptr + at`, rotated, float32 [N, D] (RoFormer, Su et al. 2021).

    A column is itself times cos plus its partner times sin, each product rounded, as the host computes it.
    CACHING: the loads' cache modifier; the compiler merges loads only of the same one.
    """
    inside = mask[:, None] & (d < HEAD_DIM)[None, :]
    x = tl.load(ptr + at[:, None] + d[None, :], mask=inside, other=0.0, cache_modifier=CACHING).to(tl.float32)
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
        y = tl.load(ptr + at[:, None] + partner[None, :], mask=rotates, other=0.0, cache_modifier=CACHING)
        y = y.to(tl.float32)
        cos, sin = load_cos_sin(rope, tokens, mask, angle, rotates)
        turned = product(x, cos) + product(tl.where(first[None, :], -y, y), sin)
        x = tl.where(rotates, turned, x)
    return x


@triton.jit
def transform_keys(x, k_offset, k_balance, head, HEAD_DIM: tl.constexpr, BUTTERFLIES: tl.constexpr):
    """Float32 keys [N, D] of one head as a `KeyTransform` stores them.

    k_offset, k_balance: `[heads, HEAD_DIM]` float32, or None: keys lose one and are divided by the other.
    BUTTERFLIES: how they are then rotated, see `rotate_parts`.
    """
    d = tl.arange(0, x.shape[1])
    if k_offset is not None:
        x -= tl.load(k_offset + head * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)[None, :]
    if k_balance is not None:
        x = tl.div_rn(x, tl.load(k_balance + head * HEAD_DIM + d, mask=d < HEAD_DIM, other=1.0)[None, :])
    return rotate_parts((x,), BUTTERFLIES, 1)[0]


@triton.jit
def rotate_in_place(
    q, rope, token, first_head, HEADS: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotates HEADS query heads of a token from `first_head` on, as `load_rotated` rotates rows.

    A lane holds both partners, so that no lane reads what another has written. BLOCK: angles, or more.
    """
    head = first_head + tl.arange(0, HEADS)  # [HEADS]
    inside = head < q.heads
    angle = tl.arange(0, BLOCK)
    rotates = inside[:, None] & (angle < ROTARY_DIM // 2)[None, :]
    if INTERLEAVED:
        first = angle * 2
        second = angle * 2 + 1
    else:
        first = angle
        second = angle + ROTARY_DIM // 2
    rows = q.ptr + (token * q.token + head.to(tl.int64) * q.head)[:, None]
    x = tl.load(rows + first[None, :], mask=rotates, other=0.0).to(tl.float32)
    y = tl.load(rows + second[None, :], mask=rotates, other=0.0).to(tl.float32)
    tokens = token + tl.zeros([HEADS], tl.int64)
    cos, sin = load_cos_sin(rope, tokens, inside, angle, rotates)
    dtype = q.ptr.dtype.element_ty
    tl.store(rows + first[None, :], (product(x, cos) + product(-y, sin)).to(dtype), mask=rotates)
    tl.store(rows + second[None, :], (product(y, cos) + product(x, sin)).to(dtype), mask=rotates)


@triton.jit
def store_offsets(kv, page, slot, head, d, VEC: tl.constexpr, VEC_ON_TOKENS: tl.constexpr):
    """Offsets [N, D] of storage elements `d` of one head, 64-bit as `page` and `slot` are."""
    base = page * kv.page + head.to(tl.int64) * kv.head
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
def divided(x, descale, where, mask, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [BLOCK_N, BLOCK_D] over a static descale: that at `where` [BLOCK_N], or a number if it is None."""
    if where is None:
        scale = tl.full([BLOCK_N], 1.0, tl.float32) * descale.value
    else:
        scale = tl.load(where, mask=mask, other=1.0)
    return tl.div_rn(x, tl.broadcast_to(scale[:, None], [BLOCK_N, BLOCK_D]))


@triton.jit
def store_nibbles(
    codes, kv, page, slot, head, mask, HEAD_DIM: tl.constexpr, VEC: tl.constexpr, VEC_ON_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes int32 codes [BLOCK_N, BLOCK_D] of four bits, column 2i in the low nibble of byte i."""
    even, odd = tl.split(tl.reshape(codes, [BLOCK_N, BLOCK_D // 2, 2]))
    c = tl.arange(0, BLOCK_D // 2)
    at = store_offsets(kv, page, slot, head, c, VEC, VEC_ON_TOKENS)
    inside = mask[:, None] & (c * 2 < HEAD_DIM)[None, :]
    tl.store(kv.ptr + at, (even | (odd << 4)).to(tl.uint8), mask=inside)


@triton.jit
def quantise_rows(
    x, kv, descale, page, slot, head, mask,
    FORMAT: tl.constexpr, SCALING: tl.constexpr, HEAD_DIM: tl.constexpr, FORMAT_MAX: tl.constexpr,
    GROUP: tl.constexpr, RULE: tl.constexpr, VEC: tl.constexpr, VEC_ON_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes float32 rows [BLOCK_N, BLOCK_D] of one head into the cache, in its format.

    Columns past head_dim are zeros. SCALING: what stored numbers are multiplied by: "one", a "number" or a
    "tensor" that the cache has, or the "token"'s own, which is computed and stored (1 in 16-bit formats, E8M0
    in FP4, with a zero point in INT4); "token_e4m3" is FP4 with that scale in E4M3, "tensor_e4m3" besides a
    number for the whole tensor.
    """
    d = tl.arange(0, BLOCK_D)
    inside = mask[:, None] & (d < HEAD_DIM)[None, :]
    if SCALING != "one" and SCALING != "number":
        where = descale.ptr + page * descale.page + slot * descale.slot  # [BLOCK_N]
        where += head.to(tl.int64) * descale.head
    if FORMAT == "bf16" or FORMAT == "fp16":
        if SCALING == "token":
            tl.store(where, tl.full([BLOCK_N], 1.0, tl.float32), mask=mask)
        elif SCALING != "one":
            x = divided(x, descale, where if SCALING == "tensor" else None, mask, BLOCK_N, BLOCK_D)
        at = store_offsets(kv, page, slot, head, d, VEC, VEC_ON_TOKENS)
        tl.store(kv.ptr + at, x.to(kv.ptr.dtype.element_ty), mask=inside)
    elif FORMAT == "fp4_e2m1":
        # Elements past head_dim are zeros: they change neither a group's scale nor its error.
        WIDTH: tl.constexpr = GROUP if GROUP > 0 else BLOCK_D
        GROUPS: tl.constexpr = BLOCK_D // WIDTH
        if SCALING == "tensor_e4m3":
            x = divided(x, descale, None, mask, BLOCK_N, BLOCK_D)
        rows = tl.reshape(x, [BLOCK_N * GROUPS, WIDTH])
        if SCALING == "token_e4m3" or SCALING == "tensor_e4m3":
            codes, scale = narrow_fp4_e4m3(rows)
        else:
            codes, scale = narrow_fp4(rows, RULE)
        g = tl.arange(0, GROUPS)
        scales = tl.reshape(scale, [BLOCK_N, GROUPS])
        tl.store(where[:, None] + g[None, :], scales, mask=mask[:, None] & (g * WIDTH < HEAD_DIM)[None, :])
        store_nibbles(codes, kv, page, slot, head, mask, HEAD_DIM, VEC, VEC_ON_TOKENS, BLOCK_N, BLOCK_D)
    elif FORMAT == "int4":
        codes, scale = narrow_int4(x)
        tl.store(where, scale, mask=mask)
        store_nibbles(codes, kv, page, slot, head, mask, HEAD_DIM, VEC, VEC_ON_TOKENS, BLOCK_N, BLOCK_D)
    elif FORMAT == "int8":
        if SCALING == "token":
            codes, scale = narrow_int8(x)
            tl.store(where, scale, mask=mask)
        else:
            x = divided(x, descale, where if SCALING == "tensor" else None, mask, BLOCK_N, BLOCK_D)
            codes = saturated_int8(x)
        tl.store(kv.ptr + store_offsets(kv, page, slot, head, d, VEC, VEC_ON_TOKENS), codes, mask=inside)
    else:
        if SCALING == "token":
            scale = tl.div_rn(tl.max(tl.abs(x), 1), tl.full([BLOCK_N], FORMAT_MAX, tl.float32))
            # A subnormal scale would lose the value it restores; zeros keep a finite one.
            scale = tl.where(scale < 1.1754943508222875e-38, 1.0, scale)
            tl.store(where, scale, mask=mask)
            x = tl.div_rn(x, tl.broadcast_to(scale[:, None], [BLOCK_N, BLOCK_D]))
        else:
            x = divided(x, descale, where if SCALING == "tensor" else None, mask, BLOCK_N, BLOCK_D)
        at = store_offsets(kv, page, slot, head, d, VEC, VEC_ON_TOKENS)
        tl.store(kv.ptr + at, narrow_fp8(x, FORMAT), mask=inside)


@triton.constexpr_function
def _padded(channels):
    """The power of two that holds a row: SGLang replaces Triton's function by one that no kernel can call."""
    return 1 << (channels - 1).bit_length()


# Triton compiles no variants for these: slot mappings are slices of longer vectors, at any address.
@triton.jit(do_not_specialize=["slot_mapping", "slot_step", "num_slots"])
def _append_kernel(
    k_new, v_new, k, v, k_descale, v_descale, k_offset, k_balance, rope, q, slot_mapping, slot_step,
    num_slots,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, BUTTERFLIES: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    K_MAX: tl.constexpr, V_MAX: tl.constexpr, K_SCALING: tl.constexpr, V_SCALING: tl.constexpr,
    K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, RULE: tl.constexpr,
    K_VEC: tl.constexpr, V_VEC: tl.constexpr,
):  # fmt: skip
    """One program writes one head of one token; nothing if the token's slot is not in the cache.

    With Q, further programs of the token rotate it, wherever the token is stored.

    Args:
        k_new, v_new: `NewTokens`; k, v: `KVPointers`; k_descale, v_descale: `DescalePointers`.
        k_offset, k_balance, BUTTERFLIES: see `transform_keys`. rope: `RopePointers`; q: `Queries`.
        slot_mapping: `[tokens]` int32 or int64 of stride `slot_step`; num_slots: slots of the cache.
        K_MAX, V_MAX: the largest number of the format; K_SCALING, V_SCALING: see `quantise_rows`.
        K_GROUP, V_GROUP: FP4: channels per scale, 0 for one scale; RULE: how its exponent is chosen.
        K_VEC, V_VEC: x of the vectorised layout, else 0.
    """
    BLOCK_D: tl.constexpr = _padded(HEAD_DIM)
    BLOCK_DV: tl.constexpr = _padded(V_HEAD_DIM)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if q.ptr is not None:
        if head >= q.begin:
            first_head = (head - q.begin) * QUERY_HEADS
            rotate_in_place(
                q, rope, token, first_head, QUERY_HEADS, ROTARY_DIM, INTERLEAVED, BLOCK_D // 2
            )  # fmt: skip
            return
    slot = tl.load(slot_mapping + token * slot_step).to(tl.int64)
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
    x = transform_keys(x, k_offset, k_balance, head, HEAD_DIM, BUTTERFLIES)
    at = tokens * v_new.token + head * v_new.head
    d = tl.arange(0, BLOCK_DV)
    y = tl.load(v_new.ptr + at[:, None] + d[None, :], mask=(d < V_HEAD_DIM)[None, :], other=0.0)
    quantise_rows(
        x, k, k_descale, page, slot, head, one, K_FORMAT, K_SCALING, HEAD_DIM, K_MAX, K_GROUP, RULE,
        K_VEC, False, 1, BLOCK_D,
    )  # fmt: skip
    quantise_rows(
        y.to(tl.float32), v, v_descale, page, slot, head, one, V_FORMAT, V_SCALING, V_HEAD_DIM, V_MAX,
        V_GROUP, RULE, V_VEC, True, 1, BLOCK_DV,
    )  # fmt: skip
