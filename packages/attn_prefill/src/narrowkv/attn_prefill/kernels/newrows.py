"""Rows of new tokens: loaded with RoPE, quantised, and scattered into a paged cache."""

import triton
import triton.language as tl

from narrowkv.quant.device import narrow_fp4, narrow_fp8


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
    FORMAT: tl.constexpr, PER_TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr, FORMAT_MAX: tl.constexpr,
    GROUP: tl.constexpr, RULE: tl.constexpr, VEC: tl.constexpr, VEC_ON_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes float32 rows [BLOCK_N, BLOCK_D] of one head into the cache, in its format; columns past head_dim are 0."""
    d = tl.arange(0, BLOCK_D)
    inside = mask[:, None] & (d < HEAD_DIM)[None, :]
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
        if PER_TOKEN:
            scale = tl.div_rn(tl.max(tl.abs(x), 1), tl.full([BLOCK_N], FORMAT_MAX, tl.float32))
            # A subnormal scale would lose the value it restores; zeros keep a finite one.
            scale = tl.where(scale < 1.1754943508222875e-38, 1.0, scale)
            tl.store(where, scale, mask=mask)
        else:
            scale = tl.load(where, mask=mask, other=1.0)
        stored = narrow_fp8(tl.div_rn(x, tl.broadcast_to(scale[:, None], [BLOCK_N, BLOCK_D])), FORMAT)
        at = store_offsets(kv, page, slot, head, d, VEC, VEC_ON_TOKENS)
        tl.store(kv.ptr + at, stored, mask=inside)
