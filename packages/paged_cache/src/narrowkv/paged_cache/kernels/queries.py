"""Rows of Q as attention over a paged cache multiplies them: loaded, scaled, divided into terms."""

import triton
import triton.language as tl

from narrowkv.paged_cache.kernels.append import load_rotated
from narrowkv.quant.device import columns_of_part, widen
from narrowkv.quant.device_hadamard import rotate_parts


@triton.jit
def load_query(
    q_ptr, tokens, heads, row_mask, stride_qt, stride_qh,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr = False,
):  # fmt: skip
    """Rows of Q as a tuple of parts [M, BLOCK_D / PARTS], with the columns of `columns_of_part`."""
    ZERO: tl.constexpr = 0 if q_ptr.dtype.element_ty.is_int() else 0.0
    rows = tokens[:, None] * stride_qt + heads[:, None] * stride_qh
    parts = ()
    for i in tl.static_range(PARTS):
        d = columns_of_part(i, BLOCK_D // PARTS, PARTS, PAIRS)
        parts = parts + (
            tl.load(q_ptr + rows + d[None, :], mask=row_mask[:, None] & (d < HEAD_DIM)[None, :], other=ZERO),
        )
    return parts


@triton.jit
def widen_query(q, FORMAT: tl.constexpr, PARTS: tl.constexpr, TYPE: tl.constexpr = None):
    """Bytes of E4M3 as float16, exactly but for a factor of 2**widening_exponent(FORMAT, "bits").

    TYPE: of the matrix unit where it multiplies FP8; see `as_fp8`.
    """
    wide = ()
    for i in tl.static_range(PARTS):
        if TYPE is not None:
            wide = wide + (as_fp8(q[i], TYPE, False),)
        else:
            wide = wide + (widen(q[i], FORMAT, "bits", tl.float16, False),)
    return wide


@triton.jit
def transform_query(
    q, k_balance, kv_head,
    HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, BUTTERFLIES: tl.constexpr, PAIRS: tl.constexpr = False,
):  # fmt: skip
    """Q for keys that are stored by a `KeyTransform`, float32 in parts.

    Args:
        q: parts of rows that all belong to `kv_head`.
        k_balance: float32 `[num_kv_heads, HEAD_DIM]`, or None.
        BUTTERFLIES: see `rotate_parts`.
        PAIRS: as for `columns_of_part`.
    """
    PART: tl.constexpr = q[0].shape[1]
    balanced = ()
    for i in tl.static_range(PARTS):
        d = columns_of_part(i, PART, PARTS, PAIRS)
        x = q[i].to(tl.float32)
        if k_balance is not None:
            x *= tl.load(k_balance + kv_head * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)[None, :]
        balanced = balanced + (x,)
    return rotate_parts(balanced, BUTTERFLIES, PARTS)


@triton.jit
def offset_products(
    q_ptr, tokens, heads, row_mask, stride_qt, stride_qh, k_offset, kv_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Products [M] of rows of Q that belong to `kv_head` with the offset of its keys.

    Q is read once more, by loads that the compiler does not merge with earlier ones: a number that a row
    keeps through the loop over keys takes registers there (gfx942, FP4: 302 instead of 208).
    """
    d = tl.arange(0, BLOCK_D)
    at = tokens[:, None] * stride_qt + heads[:, None] * stride_qh + d[None, :]
    inside = row_mask[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0, volatile=True)
    return products_with_offset(q, k_offset, kv_head, HEAD_DIM)


@triton.jit
def products_with_offset(q, k_offset, kv_head, HEAD_DIM: tl.constexpr):
    """Products [M] of rows [M, D] that belong to `kv_head` with the offset of its keys."""
    d = tl.arange(0, q.shape[1])
    offset = tl.load(k_offset + kv_head * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
    return tl.sum(q.to(tl.float32) * offset[None, :], 1)


@triton.jit(do_not_specialize=["num_tokens"])
def _transform_queries_kernel(
    q, out, shift, k_balance, k_offset, rope, q_token, q_head, num_tokens, scale,
    NUM_KV_HEADS: tl.constexpr, GQA_RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, BUTTERFLIES: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of Q of one KV head by `load_rotated` and `transform_query`.

    out and shift are contiguous; shift may be None. Rotated rows are rounded to their own type, as a
    separate rotation would leave them.
    """
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    rows = (tl.program_id(0) // NUM_KV_HEADS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens, heads = rows // GQA_RATIO, kv_head * GQA_RATIO + rows % GQA_RATIO
    row_mask = tokens < num_tokens
    d = tl.arange(0, BLOCK_D)
    rows = load_rotated(
        q, tokens * q_token + heads * q_head, rope, tokens, row_mask, d, HEAD_DIM, ROTARY_DIM, INTERLEAVED
    ).to(q.dtype.element_ty)
    x = transform_query((rows,), k_balance, kv_head, HEAD_DIM, 1, BUTTERFLIES)
    to = tokens * (NUM_KV_HEADS * GQA_RATIO) + heads
    at = out + to[:, None] * HEAD_DIM + d[None, :]
    tl.store(at, x[0].to(out.dtype.element_ty), mask=row_mask[:, None] & (d < HEAD_DIM)[None, :])
    if shift is not None:
        products = products_with_offset(rows, k_offset, kv_head, HEAD_DIM)
        tl.store(shift + to, products * scale, mask=row_mask)


@triton.jit
def largest_magnitude(q, PARTS: tl.constexpr):
    """The largest finite magnitude of a tile; infinite or NaN if no element is finite."""
    for i in tl.static_range(PARTS):
        bits = q[i].to(tl.float32).to(tl.uint32, bitcast=True)
        # Without their sign, bits are ordered as magnitudes are, and those that are not finite wrap to below
        # 2**24. No lane is masked, which would take a pair of scalar registers on AMD.
        bits = (bits << 1) + (1 << 24)
        # All parts before the first exchange between lanes.
        top = bits if i == 0 else tl.maximum(top, bits)  # noqa: F821
    # Rows first: those that one lane holds need no exchange.
    return ((tl.max(tl.max(top, 0), 0) - (1 << 24)) >> 1).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two_to(top, EXPONENT: tl.constexpr):
    """The power of two that brings `top` into [2**EXPONENT, 2**(EXPONENT + 1)), and its inverse."""
    exponent = top.to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 16), 253)
    down = ((127 + EXPONENT + 127 - exponent) << 23).to(tl.float32, bitcast=True)
    return down, ((exponent - EXPONENT) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_to_fp16(q, PARTS: tl.constexpr):
    """Q times the power of two that puts its largest element in [2**14, 2**15), and the inverse.

    One for the tile: a row 2**29 below the largest would begin to lose bits, and its logits are as small.
    """
    down, up = power_of_two_to(largest_magnitude(q, PARTS), 14)
    scaled = ()
    for i in tl.static_range(PARTS):
        scaled = scaled + ((q[i].to(tl.float32) * down).to(tl.float16),)
    return scaled, up


@triton.jit
def split_to_e4m3(q, TERMS: tl.constexpr):
    """Q times a power of two as E4M3 terms, the sum of terms[i] * 2**(-5 * i), and the inverse of the power.

    Two terms hold all eight bits of bfloat16, three all eleven of float16. The largest element comes to lie
    in [2**7, 2**8), and every remainder times 32 at or below 2**8.
    """
    down, up = power_of_two_to(largest_magnitude((q,), 1), 7)
    rest = q.to(tl.float32) * down
    terms = ()
    for _ in tl.static_range(TERMS):
        term = rest.to(tl.float8e4nv)
        terms = terms + (term,)
        rest = (rest - term.to(tl.float32)) * 32.0
    return terms, up


@triton.jit
def split_query(q, DTYPE: tl.constexpr, SPLIT_Q: tl.constexpr, PARTS: tl.constexpr):
    """Q in the compute type, and what that leaves of it where SPLIT_Q asks for a second term."""
    high, low = (), ()
    for i in tl.static_range(PARTS):
        high = high + (q[i].to(DTYPE),)
        if SPLIT_Q:
            low = low + ((q[i].to(tl.float32) - q[i].to(DTYPE).to(tl.float32)).to(DTYPE),)
        else:
            low = low + (high[i],)  # not used
    return high, low


@triton.jit
def times_sign(q, number, PARTS: tl.constexpr):
    """Parts of Q, negated if `number` is negative."""
    signed = ()
    for i in tl.static_range(PARTS):
        signed = signed + (tl.where(number < 0, -q[i], q[i]),)
    return signed


@triton.jit
def as_fp8(x, TYPE: tl.constexpr, CLEAN: tl.constexpr):
    """Stored bytes as the FP8 type of the matrix unit; OCP bytes read as FNUZ are half their value.

    CLEAN: no byte is OCP's negative zero or NaN, which FNUZ reads as NaN and as a number.
    """
    if x.dtype == tl.uint8:
        if not CLEAN:
            x = tl.where(x == 0x80, 0, x)
            x = tl.where((x & 0x7F) == 0x7F, 0x80, x).to(tl.uint8)
        x = x.to(TYPE, bitcast=True)
    return x


@triton.jit
def split_rows_fp8(q, TYPE: tl.constexpr, TOP: tl.constexpr):
    """Rows as two FP8 terms, the first with its largest element at TOP, and their descales."""
    q = q.to(tl.float32)
    descale = tl.maximum(tl.max(tl.abs(q), 1), 1.0e-30) * (1.0 / TOP)
    # The largest may round past TOP, which some casts turn into NaN.
    x = tl.minimum(tl.maximum(q / descale[:, None], -TOP), TOP)
    high = x.to(TYPE)
    return high, (x - high.to(tl.float32)).to(TYPE), descale
