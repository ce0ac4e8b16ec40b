"""The launch before dense attention: it gathers and widens the cache into contiguous scratch, once.

K becomes Q's type and V float16, both exactly but for small elements of V in bf16 or FP4, see
`to_fp16_with_exponent`. Beside FP8 queries K keeps its stored bytes, for the FP8 matrix unit.
"""

import triton
import triton.language as tl

from narrowkv.attn_prefill.kernels.arguments import Scratch
from narrowkv.attn_prefill.kernels.rows import (
    RUNTIME_SIZES,
    find_block,
    find_held_block,
    held_blocks,
    schedule_tiles,
    sized_queries,
)
from narrowkv.paged_cache.kernels.pages import (
    first_id,
    load_key_scale,
    load_page_ids,
    place_of,
    sized_table,
)
from narrowkv.paged_cache.kernels.queries import as_fp8
from narrowkv.paged_cache.kernels.tiles import load_tile, widen_tile
from narrowkv.quant.device import join_parts
from narrowkv.runtime.attention.handover import begin_next_launch

# V of a bf16 or FP4 cache times 2**this is float16 without a factor of its own from 2**-17 to 2**10.
VALUE_EXPONENT = tl.constexpr(5)


@triton.jit
def to_fp16_with_exponent(widened, top, EXPONENT: tl.constexpr):
    """A float32 tile times 2**EXPONENT, as float16 and the power of two that it is still to be multiplied by.

    If `top` times 2**EXPONENT is from 2**-12 to 2**15, the power is 1, and elements too small to keep all
    their bits are off by at most 2**-13 of the largest. Otherwise the largest element comes to lie in
    [2**14, 2**15), or below if it was below 2**-26.

    Args:
        top: the largest magnitude of the rows that are used, finite. Other rows become undefined values.
    """
    exponent = (top.to(tl.int32, bitcast=True) >> 23) - 127 + EXPONENT
    usual = (top == 0) | ((exponent >= -12) & (exponent < 15))
    exponent = tl.where(usual, 0, tl.maximum(exponent - 14, -40))
    down = ((127 - exponent + EXPONENT) << 23).to(tl.float32, bitcast=True)
    return (widened * down).to(tl.float16), ((127 + exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def finite_rows(v, inside):
    """Which rows of a tile of V are inside and hold neither NaN nor Inf, and the largest magnitude in these.

    Other rows are stored as zeros, for 0 * NaN would reach every row of the output. The keys of those inside
    become NaN instead: the mask keeps them from rows that do not see them.
    """
    # As integers magnitudes are in the same order, Inf above what is finite, and NaN above Inf.
    bits = v.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(bits, 1)
    finite = inside & (largest < 0x7F800000)
    return finite, tl.max(tl.where(finite, largest, 0), 0).to(tl.float32, bitcast=True)


@triton.jit
def store_value_power(scratch, power, factor_flag, at):
    """Stores the power of two that a block of V is still to be multiplied by.

    factor_flag: whether the pipelined kernel must read such powers or factors of keys; it sets a flag then.
    """
    tl.store(scratch.v_block_factor + at, power)
    if scratch.factor_flag is not None:
        tl.store(scratch.factor_flag, 1, mask=factor_flag)


@triton.jit
def store_block(target, words, kv_head, block, rows, keep, rest, HEAD_DIM: tl.constexpr,
                BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Rows of a block `[BLOCK_N, BLOCK_D]` into `[heads, rows, head_dim]`, `rest` for those not to `keep`."""
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    at = ((kv_head.to(tl.int64) * rows + block * BLOCK_N) * HEAD_DIM) + n[:, None] * HEAD_DIM + d[None, :]
    value = tl.where(keep[:, None], words, rest).to(target.dtype.element_ty)
    if HEAD_DIM == BLOCK_D:
        tl.store(target + at, value)
    else:
        tl.store(target + at, value, mask=(d < HEAD_DIM)[None, :])


@triton.jit
def keys_without_value(inside, KIND: tl.constexpr):
    """What is stored for keys without a finite value, `[N, 1]`: NaN, or zero where there is no key."""
    if KIND.is_fp8():
        NAN: tl.constexpr = 0x80 if tl.float8e4b8 == KIND else 0x7F
        return tl.where(inside, NAN, 0).to(tl.uint8)[:, None]
    else:
        return tl.where(inside, float("nan"), 0.0).to(KIND)[:, None]


@triton.jit
def widen_block(
    k, v, k_descale, v_descale, table, scratch, seq, block, first_row, kv_head, kv_len, k_block_factor,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_TYPE: tl.constexpr, BLOCK_FACTORS: tl.constexpr,
    FILLING: tl.constexpr, BLOCKS: tl.constexpr, first_ids=None,
):  # fmt: skip
    """Gathers, widens and stores one block of one head: keys from `first_row` of `seq` to block `block`.

    Args:
        k_block_factor: with BLOCK_FACTORS, what K is still to be multiplied by, stored beside the block.
        K_TYPE: what K becomes; the matrix unit's FP8 type keeps the bytes as stored; None leaves K in its
            pages and stores a factor for each key, which is NaN where its V is not finite.
        first_ids: page ids of the block if `seq` is the first sequence, loaded already, or None.
    """
    BLOCK_N: tl.constexpr = BLOCKS.s
    row_base = first_id(table, seq, SIZES.ragged)
    n = first_row + tl.arange(0, BLOCK_N)
    inside = (n >= 0) & (n < kv_len)
    page_ids = first_ids
    if first_ids is None:  # noqa: SIM114 - a constant
        page_ids = load_page_ids(table, row_base, n, 0, kv_len - 1, SIZES.page_size)
    elif seq > 0:
        page_ids = load_page_ids(table, row_base, n, 0, kv_len - 1, SIZES.page_size)
    page, slot = place_of(table, page_ids, n, 0, kv_len - 1, SIZES.page_size, FILLING.int64_offsets)
    K_SCALES: tl.constexpr = K.descale != "scalar" and K.descale != "head"
    V_SCALES: tl.constexpr = V.descale != "scalar" and V.descale != "head"
    # A lane loads the elements that it stores, 16 bytes at a time. If it loaded 16 bytes, the compiler would
    # pass the widened tile through shared memory.
    V_WORDS: tl.constexpr = 8 // V.parts
    if K_TYPE is not None:
        K_WORDS: tl.constexpr = 16 if K_TYPE.is_fp8() else 8 // K.parts
        k_words = load_tile(k, page, slot, kv_head, False, K.vec, K.parts, SIZES.head_dim, BLOCKS.dk, K_WORDS)
    v_words = load_tile(v, page, slot, kv_head, True, V.vec, V.parts, SIZES.v_head_dim, BLOCKS.d, V_WORDS)
    k_scale = 1.0
    v_scale = 1.0
    if K_SCALES:
        k_scale = load_key_scale(k_descale, page, slot, kv_head, K.descale, False, SIZES.head_dim, BLOCKS.dk)
    if V_SCALES:
        v_scale = load_key_scale(v_descale, page, slot, kv_head, V.descale, False, SIZES.v_head_dim, BLOCKS.d)
    factors = kv_head.to(tl.int64) * scratch.rows + block * BLOCK_N + tl.arange(0, BLOCK_N)
    blocks = kv_head.to(tl.int64) * (scratch.rows // BLOCK_N) + block
    if V.format == "bf16":
        widened_v = v_words
        v_factor = v_scale
    else:
        parts, v_factor = widen_tile(v_words, v_scale, V.format, V.route, tl.float16, V.parts, V.descale)
        widened_v = join_parts(parts, V.parts)
    if V_SCALES and not FILLING.v_per_key:
        widened_v = widened_v.to(tl.float32) * v_factor[:, None]
    finite, top = finite_rows(widened_v, inside)
    power = tl.full([], 1.0, tl.float32)
    if FILLING.v_exponent is not None:
        widened_v, power = to_fp16_with_exponent(widened_v.to(tl.float32), top, FILLING.v_exponent)
    if FILLING.v_per_key:
        finite = finite & (tl.abs(v_factor) < float("inf"))
        tl.store(scratch.v_factor + factors, tl.where(finite, v_factor, 0.0))
    store_block(
        scratch.v, widened_v, kv_head, block, scratch.rows, finite, 0.0, SIZES.v_head_dim, BLOCKS.d, BLOCK_N
    )
    factor_flag = power != 1.0
    if K_TYPE is None:
        bad = inside & ~finite
        tl.store(scratch.k_factor + factors, tl.where(bad, float("nan"), 1.0))
        factor_flag = factor_flag | (tl.max(bad.to(tl.int32), 0) > 0)
    else:
        if K_TYPE.is_fp8():
            widened_k = as_fp8(k_words, K_TYPE, False).to(tl.uint8, bitcast=True)
            k_factor = k_scale
        else:
            parts, k_factor = widen_tile(k_words, k_scale, K.format, K.route, K_TYPE, K.parts, K.descale)
            widened_k = join_parts(parts, K.parts)
            if K_SCALES and not FILLING.k_per_key:
                widened_k = (widened_k.to(tl.float32) * k_factor[:, None]).to(K_TYPE)
        store_block(
            scratch.k, widened_k, kv_head, block, scratch.rows, finite, keys_without_value(inside, K_TYPE),
            SIZES.head_dim, BLOCKS.dk, BLOCK_N,
        )  # fmt: skip
        if FILLING.k_per_key:
            tl.store(scratch.k_factor + factors, tl.where(inside, k_factor, 0.0))
        if BLOCK_FACTORS:
            tl.store(scratch.k_block_factor + blocks, k_block_factor)
    if scratch.v_block_factor is not None:
        store_value_power(scratch, power, factor_flag, blocks)


@triton.jit(do_not_specialize=RUNTIME_SIZES)
def _widen_kernel(
    q, cache, table, scratch,
    batch, num_tokens, max_q_len, least_len, block_m, table_row, num_ids, max_pages, max_keys, key_blocks,
    num_blocks, num_tiles,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, FILLING: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The first programs widen blocks of one head each, the last ones order the tiles that attend.

    Args:
        q: `Queries`; cache: `Cache`; table: `Table`; scratch: `Scratch`: without the sizes that follow.
        block_m: rows of a tile of the launch that attends. num_tiles: how many there are at most.
        num_blocks: programs of a head that widen; each takes every `num_blocks`th block. CDNA has a program
            for each block: in a loop the compiler keeps 80 registers instead of 55.
        SIZES, K, V, FILLING, BLOCKS: `Sizes`, `Stored`, `Stored`, `Filling`, `Blocks`.
    """
    if FILLING.early:
        begin_next_launch()
    k, v, k_descale, v_descale = cache
    q = sized_queries(q, num_tokens, max_q_len, least_len, None)
    table = sized_table(table, table_row, num_ids, max_pages, SIZES.ragged)
    scratch = Scratch(*scratch[0:9], max_keys, key_blocks)
    pid = tl.program_id(0)
    if pid >= num_blocks * SIZES.num_kv_heads:
        schedule_tiles(
            q, table, scratch, batch, num_tiles, pid - num_blocks * SIZES.num_kv_heads, block_m,
            SIZES.page_size, SIZES.ragged, False, SIZES.gqa_ratio, FILLING.causal, BLOCKS.s, BLOCKS.i,
        )  # fmt: skip
        return
    kv_head = pid % SIZES.num_kv_heads
    first = pid // SIZES.num_kv_heads
    if FILLING.loops:
        limit, total = held_blocks(q, table, scratch, batch, False, SIZES.page_size, SIZES.ragged, BLOCKS.s)
        for block in range(first, total, num_blocks):
            seq, in_seq, kv_len, _, _, _ = find_block(
                q, table, scratch, batch, block, limit, True, False, SIZES.page_size, SIZES.ragged, BLOCKS.s,
                FILLING.nvidia,
            )  # fmt: skip
            widen_block(
                k, v, k_descale, v_descale, table, scratch, seq, block, in_seq * BLOCKS.s, kv_head, kv_len,
                1.0, SIZES, K, V, FILLING.k_type, False, FILLING, BLOCKS,
            )  # fmt: skip
    else:
        # Beside the lengths, not after them: ids of the first sequence, of which some may not be its own.
        n = first * BLOCKS.s + tl.arange(0, BLOCKS.s)
        first_ids = load_page_ids(table, first_id(table, 0, SIZES.ragged), n, 0, 2**31 - 1, SIZES.page_size)
        tl.debug_barrier()  # the compiler would move the load to where it is used
        seq, in_seq, kv_len, _, _ = find_held_block(
            q, table, scratch, batch, first, False, SIZES.page_size, SIZES.ragged, BLOCKS.s, FILLING.nvidia
        )
        if seq >= 0:
            widen_block(
                k, v, k_descale, v_descale, table, scratch, seq, first, in_seq * BLOCKS.s, kv_head, kv_len,
                1.0, SIZES, K, V, FILLING.k_type, False, FILLING, BLOCKS, first_ids,
            )  # fmt: skip
