"""The pre-pass: Q, K and V to narrow scratch, and before that the statistics of K's and V's channels.

Bit for bit `narrowkv.quant.sage` and `quantize_per_channel`: every division and rounding is the host's, and
sums over tokens are kept in float64, where their order does not show.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.quant.device import cast_fp8
from narrowkv.sage.kernels.sequences import ALIGN, Sequences, extent_of, sequence_at

# Arguments that change from call to call in serving.
SIZES = ["batch", "length", "q_length", "k_length", "items", "tiles", "together", "q_blocks"]


class Smoothing(NamedTuple):
    """The means that are subtracted, and their terms that later kernels need; None for those without.

    block_mean: of Q, fp32 `[heads, blocks, head_dim]`, written.
    k_mean: of K, fp32 `[batch, kv heads, head_dim]`.
    shift: fp32 `[heads, rows]`, what the mean takes from a row's lse.
    """

    block_mean: Any
    k_mean: Any
    shift: Any


class Narrow(NamedTuple):
    """Quantised rows `[heads, rows, head_dim]`, fp32 descales `[heads, rows / SPAN * GROUPS]`.

    amax: fp32 bits as int32 `[1]`, the largest magnitude of the whole tensor where one descale serves it all.
    """

    ptr: Any
    descale: Any
    amax: Any
    rows: Any


class Groups(NamedTuple):
    """Which tokens share a descale; see `narrowkv.quant.sage.TokenGroups`. SPAN 0: one for everything."""

    SPAN: Any
    GROUPS: Any
    RUN: Any


class ValueOrder(NamedTuple):
    """The order of V's keys in scratch; see `interleave_keys`."""

    GATHER: Any
    LANES: Any
    WIDTH: Any


class ChannelStatistics(NamedTuple):
    """Of each channel: parts `[batch, heads, PARTS, head_dim]`, the whole fp32 `[batch, heads, head_dim]`."""

    partial: Any
    result: Any


@triton.jit
def load_tokens(x, seq, start, token, inside, head, HEAD_DIM: tl.constexpr):
    """Rows of one head as float32, [BLOCK, HEAD_DIM]; zeros where not `inside`."""
    d = tl.arange(0, HEAD_DIM)
    at = seq.to(tl.int64) * x.batch + (start + token).to(tl.int64) * x.token + head.to(tl.int64) * x.head
    return tl.load(x.ptr + at[:, None] + d[None, :], mask=inside[:, None], other=0.0).to(tl.float32)


@triton.jit
def magnitudes(x):
    """|x| with Inf as the largest finite number, without NaN."""
    return tl.where(x == x, tl.minimum(tl.abs(x), 3.4028234663852886e38), 0.0)


@triton.jit
def largest(x, HAS_NAN: tl.constexpr):
    """`magnitudes`' largest in each row of x; of a format without NaN Inf is a mark that there was one."""
    if HAS_NAN:
        return tl.max(magnitudes(x), 1)
    else:
        # Compared as integers, NaN is larger than Inf.
        bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        bits = tl.where(bits > 0x7F800000, 0x7F800000, tl.minimum(bits, 0x7F7FFFFF))
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def descale_from(amax, FORMAT_MAX: tl.constexpr):
    """The host's descale: 1 for zeros, never subnormal, NaN for a marked NaN."""
    scale = tl.maximum(tl.div_rn(amax, tl.zeros_like(amax) + FORMAT_MAX), 1.1754943508222875e-38)
    # As the host caps it: FORMAT_MAX times it is finite, also where the quotient was rounded up.
    MOST: tl.constexpr = 3.4028234663852886e38 / FORMAT_MAX * (1 - 2.0**-23)
    scale = tl.minimum(scale, MOST)
    return tl.where(amax == float("inf"), float("nan"), tl.where(amax == 0.0, 1.0, scale))


@triton.jit
def round_to_int(x):
    """Nearest integer of small numbers, ties to even."""
    # Adding 1.5 * 2**23 leaves the rounded integer in the low mantissa bits.
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def quotients(x, y, WIDE: tl.constexpr):
    """Of x [M, N] over y [M, 1] or [1, N], rounded as a division rounds; 0 where y is NaN. x is finite.

    A multiplication by the reciprocal and two corrections, whose remainders are exact (Markstein, IBM J. Res.
    Dev. 34, 1990): a third of the instructions of a division. Without WIDE one correction, which is enough if
    x has at most 11 bits and y is such a number over a format's largest one: a test divides all of them.
    """
    factor = tl.where(y < 5.421010862427522e-20, 1.8446744073709552e19, 1.0)  # 2**-64 and 2**64
    known = y == y
    y = tl.where(known, y * factor, 0.0)
    inverse = tl.where(known, tl.div_rn(tl.zeros_like(y) + 1.0, y), 0.0)
    x = x * tl.broadcast_to(factor, x.shape)
    inverse, y = tl.broadcast_to(inverse, x.shape), tl.broadcast_to(y, x.shape)
    q = x * inverse
    # Remainders with this sign keep -0.
    if WIDE:
        q = tl.fma(-tl.fma(y, q, -x), inverse, q)
    return tl.fma(-tl.fma(y, q, -x), inverse, q)


@triton.jit
def codes_of(x, descale, FORMAT: tl.constexpr, WIDE: tl.constexpr):
    """Of x [M, N] over descales [M, 1] or [1, N], rounded to the format as by the host; int4 two to a byte.

    x is at most FORMAT_MAX times its descale, or infinite. WIDE: see `quotients`.
    """
    if FORMAT == "int8" or FORMAT == "int4":
        MOST: tl.constexpr = 3.4028234663852886e38
        codes = round_to_int(quotients(tl.minimum(tl.maximum(x, -MOST), MOST), descale, WIDE))
        if FORMAT == "int4":
            low, high = tl.split(tl.reshape(codes, [x.shape[0], x.shape[1] // 2, 2]))
            codes = (low & 15) | (high << 4)
        return codes.to(tl.int8)
    else:
        return cast_fp8(tl.where(tl.abs(x) < float("inf"), quotients(x, descale, WIDE), x), FORMAT)


@triton.jit
def group_descales(x, FORMAT: tl.constexpr, FORMAT_MAX: tl.constexpr,
                   SPAN: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr):  # fmt: skip
    """Descales of rows [BLOCK, HEAD_DIM], whole spans: of groups [BLOCK / SPAN, GROUPS], and of rows."""
    HAS_NAN: tl.constexpr = FORMAT != "int8" and FORMAT != "int4"
    SPANS: tl.constexpr = x.shape[0] // SPAN
    REPEATS: tl.constexpr = SPAN // (GROUPS * RUN)
    amax = largest(x, HAS_NAN)  # [BLOCK]
    # The tokens of a group are RUN neighbours, REPEATS times.
    grouped = tl.max(tl.max(tl.reshape(amax, [SPANS, REPEATS, GROUPS, RUN]), 3), 1)
    descale = descale_from(grouped, FORMAT_MAX)
    spread = tl.broadcast_to(descale[:, None, :, None], [SPANS, REPEATS, GROUPS, RUN])
    return descale, tl.reshape(spread, [x.shape[0]])


@triton.jit
def channel_statistics(
    x, seqs, stats, seq, head, num_heads, part,
    STATISTIC: tl.constexpr, RAGGED: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One of PARTS parts of a sequence: float64 sums ("mean") or largest magnitudes ("descale")."""
    _, start, length = extent_of(seqs, seq, RAGGED)
    d = tl.arange(0, HEAD_DIM)
    size = tl.cdiv(tl.cdiv(length, PARTS), BLOCK) * BLOCK
    end = tl.minimum((part + 1) * size, length)
    if STATISTIC == "mean":
        result = tl.zeros([BLOCK, HEAD_DIM], tl.float64)
    else:
        result = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    for first in tl.range(part * size, end, BLOCK, num_stages=4):
        token = first + tl.arange(0, BLOCK)
        tile = load_tokens(x, seq, start, token, token < end, head, HEAD_DIM)
        if STATISTIC == "mean":
            result += tile.to(tl.float64)
        else:
            result = tl.maximum(result, magnitudes(tile))
    result = tl.sum(result, 0) if STATISTIC == "mean" else tl.max(result, 0)
    row = (seq * num_heads + head).to(tl.int64)
    tl.store(stats.partial + (row * PARTS + part) * HEAD_DIM + d, result)


@triton.jit
def finish_statistics(
    seqs, stats, seq, head, num_heads,
    STATISTIC: tl.constexpr, RAGGED: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
):  # fmt: skip
    """A sequence's means or descales of each channel from their parts."""
    d = tl.arange(0, HEAD_DIM)
    row = (seq * num_heads + head).to(tl.int64)
    at = (row * PARTS + tl.arange(0, PARTS))[:, None] * HEAD_DIM + d[None, :]
    partial = tl.load(stats.partial + at)
    if STATISTIC == "mean":
        _, _, length = extent_of(seqs, seq, RAGGED)
        result = mean_of(tl.sum(partial, 0), length)
    else:
        result = descale_from(tl.max(partial, 0), FORMAT_MAX)
    tl.store(stats.result + row * HEAD_DIM + d, result)


@triton.jit
def mean_shift(x, k_mean_ptr, seq, kv_head, num_kv_heads, sm_scale):
    """The term of K's mean that lse lacks, for rows of Q [BLOCK, HEAD_DIM]: [BLOCK]."""
    at = (seq * num_kv_heads + kv_head).to(tl.int64) * x.shape[1] + tl.arange(0, x.shape[1])
    return tl.sum(x * tl.load(k_mean_ptr + at)[None, :], 1) * sm_scale


@triton.jit(do_not_specialize=SIZES)
def _channel_statistics_kernel(
    k, v, bounds_ptr, k_stats, v_stats, batch, length, num_heads,
    RAGGED: tl.constexpr, SMOOTH: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Parts of V's descales and, where K is smoothed, its means.

    Grid: heads, times PARTS, times the batch of V, then of K.
    """
    head, item = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads
    part, item = item % PARTS, item // PARTS
    seqs = Sequences(bounds_ptr, batch, length)
    seq = item % batch
    if item < batch:
        channel_statistics(
            v, seqs, v_stats, seq, head, num_heads, part, "descale", RAGGED, PARTS, HEAD_DIM, BLOCK
        )
    elif SMOOTH:
        channel_statistics(
            k, seqs, k_stats, seq, head, num_heads, part, "mean", RAGGED, PARTS, HEAD_DIM, BLOCK
        )


@triton.jit(do_not_specialize=SIZES)
def _finish_statistics_kernel(
    bounds_ptr, k_stats, v_stats, batch, length,
    RAGGED: tl.constexpr, SMOOTH: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr,
    V_FORMAT_MAX: tl.constexpr,
):  # fmt: skip
    """Combines the partial statistics. Grid: batch of V, then of K; heads."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    seqs = Sequences(bounds_ptr, batch, length)
    seq = tl.program_id(0) % batch
    if tl.program_id(0) < batch:
        finish_statistics(
            seqs, v_stats, seq, head, num_heads, "descale", RAGGED, PARTS, HEAD_DIM, V_FORMAT_MAX
        )
    elif SMOOTH:
        finish_statistics(seqs, k_stats, seq, head, num_heads, "mean", RAGGED, PARTS, HEAD_DIM, 1.0)


@triton.jit
def mean_of(total, count):
    """A float64 sum over a number of tokens as the host divides it."""
    return tl.div_rn(total.to(tl.float32), tl.zeros_like(total).to(tl.float32) + tl.maximum(count, 1))


@triton.jit
def has_tokens(block, base, length, BLOCK: tl.constexpr):
    """Whether attention may read a block of BLOCK rows: tiles are read to their end, at most ALIGN rows."""
    return block * BLOCK // ALIGN * ALIGN - base < length


@triton.jit
def quantise_tokens(
    x, seqs, smoothing, out, sm_scale, block, head, num_heads,
    RAGGED: tl.constexpr, SMOOTH: tl.constexpr, WRITE_SHIFT: tl.constexpr, GQA_RATIO: tl.constexpr,
    FORMAT: tl.constexpr, FORMAT_MAX: tl.constexpr, MEASURE: tl.constexpr, GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scratch block `block` of BLOCK tokens of Q or K: subtracts a mean, finds descales, rounds, stores.

    SMOOTH: "none", "sequence" (K's mean) or "block" (Q's, over ALIGN tokens, which BLOCK is then).
    MEASURE: only finds `amax`. GROUPS.SPAN 0: one descale, from `amax`.
    """
    seq = sequence_at(seqs, block * BLOCK, RAGGED)
    base, start, length = extent_of(seqs, seq, RAGGED)
    row = block * BLOCK + tl.arange(0, BLOCK)
    inside = row - base < length
    if has_tokens(block, base, length, BLOCK):
        d = tl.arange(0, HEAD_DIM)
        raw = load_tokens(x, seq, start, row - base, inside, head, HEAD_DIM)
        if SMOOTH == "sequence":
            mean = tl.load(smoothing.k_mean + (seq * num_heads + head).to(tl.int64) * HEAD_DIM + d)
        elif SMOOTH == "block":
            count = tl.minimum(length - (block * BLOCK - base), BLOCK)
            mean = mean_of(tl.sum(raw.to(tl.float64), 0), count)
            blocks = out.rows // ALIGN
            tl.store(smoothing.block_mean + (head.to(tl.int64) * blocks + block) * HEAD_DIM + d, mean)
        if SMOOTH == "none":
            smooth = raw
        else:
            smooth = tl.where(inside[:, None], raw - mean[None, :], 0.0)
        if WRITE_SHIFT:
            # Q's own mean is subtracted, so the term q . k_mean is that of the smoothed rows.
            shift = mean_shift(
                smooth, smoothing.k_mean, seq, head // GQA_RATIO, num_heads // GQA_RATIO, sm_scale
            )
            tl.store(smoothing.shift + head.to(tl.int64) * out.rows + row, shift)
        if MEASURE:
            HAS_NAN: tl.constexpr = FORMAT != "int8" and FORMAT != "int4"
            amax = tl.max(largest(smooth, HAS_NAN), 0)
            tl.atomic_max(out.amax, amax.to(tl.int32, bitcast=True))
        else:
            if GROUPS.SPAN == 0:
                descale = descale_from(tl.load(out.amax).to(tl.float32, bitcast=True), FORMAT_MAX)
                tl.store(out.descale, descale)
                of_row = tl.zeros([BLOCK], tl.float32) + descale
            else:
                descale, of_row = group_descales(
                    smooth, FORMAT, FORMAT_MAX, GROUPS.SPAN, GROUPS.GROUPS, GROUPS.RUN
                )
                SPANS: tl.constexpr = BLOCK // GROUPS.SPAN
                first = head.to(tl.int64) * (out.rows // GROUPS.SPAN * GROUPS.GROUPS) + block * (
                    SPANS * GROUPS.GROUPS
                )
                index = tl.arange(0, SPANS)[:, None] * GROUPS.GROUPS + tl.arange(0, GROUPS.GROUPS)[None, :]
                tl.store(out.descale + first + index, descale)
            # With one correction codes of int4 spill 8 bytes on Hopper.
            codes = codes_of(smooth, of_row[:, None], FORMAT, SMOOTH != "none" or FORMAT == "int4")
            WIDTH: tl.constexpr = codes.shape[1]
            at = (head.to(tl.int64) * out.rows + row)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
            tl.store(out.ptr + at, codes)


@triton.jit(do_not_specialize=SIZES)
def _quantise_tokens_kernel(
    x, bounds_ptr, smoothing, out, sm_scale, batch, length, num_heads,
    RAGGED: tl.constexpr, SMOOTH: tl.constexpr, WRITE_SHIFT: tl.constexpr, GQA_RATIO: tl.constexpr,
    FORMAT: tl.constexpr, FORMAT_MAX: tl.constexpr, MEASURE: tl.constexpr, GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`quantise_tokens` of Q, or the largest magnitude of Q or K. Grid: heads times rows / BLOCK."""
    quantise_tokens(
        x, Sequences(bounds_ptr, batch, length), smoothing, out, sm_scale,
        tl.program_id(0) // num_heads, tl.program_id(0) % num_heads, num_heads,
        RAGGED, SMOOTH, WRITE_SHIFT, GQA_RATIO, FORMAT, FORMAT_MAX, MEASURE, GROUPS, HEAD_DIM, BLOCK,
    )  # fmt: skip


@triton.jit
def key_at(position, GATHER: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """The key that scratch position `position` of V holds; see `interleave_keys`."""
    PERIOD: tl.constexpr = GATHER * LANES * WIDTH
    lane = position // (GATHER * WIDTH) % LANES
    part = position // WIDTH % GATHER
    return position // PERIOD * PERIOD + part * (LANES * WIDTH) + lane * WIDTH + position % WIDTH


@triton.jit
def quantise_values(
    v, seqs, descale_ptr, out_ptr, rows, block, head, num_heads,
    RAGGED: tl.constexpr, FORMAT: tl.constexpr, ORDER: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Scratch block `block` of BLOCK tokens of V, stored transposed, `[heads, head_dim, rows]`.

    Matrix units take FP8 operands with the summed dimension contiguous.
    """
    seq = sequence_at(seqs, block * BLOCK, RAGGED)
    base, start, length = extent_of(seqs, seq, RAGGED)
    if has_tokens(block, base, length, BLOCK):
        d = tl.arange(0, HEAD_DIM)
        position = tl.arange(0, BLOCK)
        token = block * BLOCK - base + key_at(position, ORDER.GATHER, ORDER.LANES, ORDER.WIDTH)
        tile = load_tokens(v, seq, start, token, token < length, head, HEAD_DIM)
        descale = tl.load(descale_ptr + (seq * num_heads + head).to(tl.int64) * HEAD_DIM + d)
        codes = codes_of(tile, descale[None, :], FORMAT, False)
        at = (head * HEAD_DIM + d).to(tl.int64)[:, None] * rows + (block * BLOCK + position)[None, :]
        tl.store(out_ptr + at, tl.trans(codes))


@triton.jit(do_not_specialize=SIZES)
def _quantise_keys_values_kernel(
    k, v, bounds_ptr, smoothing, v_descale_ptr, k_out, v_out_ptr, batch, length, num_heads,
    RAGGED: tl.constexpr, SMOOTH: tl.constexpr, FORMAT: tl.constexpr, FORMAT_MAX: tl.constexpr,
    GROUPS: tl.constexpr, V_FORMAT: tl.constexpr, ORDER: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantises a block of tokens of one head, of K or of V.

    Grid: heads * (rows / BLOCK + rows / V_BLOCK), where rows are those of the scratch.

    From the last block to the first, and K before V: what the statistics read last may still be in the L2.
    """
    seqs = Sequences(bounds_ptr, batch, length)
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    head, block = place % num_heads, place // num_heads
    v_blocks = k_out.rows // V_BLOCK
    if block >= v_blocks:
        quantise_tokens(
            k, seqs, smoothing, k_out, 0.0, block - v_blocks, head, num_heads,
            RAGGED, "sequence" if SMOOTH else "none", False, 1, FORMAT, FORMAT_MAX, False, GROUPS, HEAD_DIM,
            BLOCK,
        )  # fmt: skip
    else:
        quantise_values(
            v, seqs, v_descale_ptr, v_out_ptr, k_out.rows, block, head, num_heads,
            RAGGED, V_FORMAT, ORDER, HEAD_DIM, V_BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _mean_scores_kernel(
    k, q_bounds_ptr, k_bounds_ptr, q_mean_ptr, out_ptr, q_blocks, k_rows, qk_scale, batch, q_length, k_length,
    RAGGED: tl.constexpr, GQA_RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Q's block means times the unsmoothed keys: `[heads, q_blocks, k_rows]` fp32, in base-2 logits.

    Grid: k_rows / ALIGN, blocks of Q / BLOCK_Q of a sequence, query heads. A mean is two 16-bit terms.
    """
    q_seqs, k_seqs = Sequences(q_bounds_ptr, batch, q_length), Sequences(k_bounds_ptr, batch, k_length)
    block, part, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = sequence_at(k_seqs, block * ALIGN, RAGGED)
    k_base, k_start, k_length = extent_of(k_seqs, seq, RAGGED)
    q_base, _, q_length = extent_of(q_seqs, seq, RAGGED)
    if (part * BLOCK_Q * ALIGN >= q_length) | (block * ALIGN - k_base >= k_length):
        return
    d = tl.arange(0, HEAD_DIM)
    n = block * ALIGN + tl.arange(0, ALIGN)
    in_seq = part * BLOCK_Q + tl.arange(0, BLOCK_Q)
    exists = in_seq * ALIGN < q_length
    q_block = (head.to(tl.int64) * q_blocks + q_base // ALIGN + in_seq)[:, None]
    mean = tl.load(q_mean_ptr + q_block * HEAD_DIM + d[None, :], mask=exists[:, None], other=0.0)
    tile = load_tokens(k, seq, k_start, n - k_base, n - k_base < k_length, head // GQA_RATIO, HEAD_DIM)
    keys = tl.trans(tile.to(k.ptr.dtype.element_ty))
    high = mean.to(k.ptr.dtype.element_ty)
    low = (mean - high.to(tl.float32)).to(k.ptr.dtype.element_ty)
    scores = tl.dot(low, keys)
    scores = tl.dot(high, keys, scores) * qk_scale
    tl.store(out_ptr + q_block * k_rows + n[None, :], scores, mask=exists[:, None])
