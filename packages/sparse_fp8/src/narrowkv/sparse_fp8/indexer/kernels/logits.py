"""Logits of the indexer: sums over index heads of a weight times relu(q . k), over FP8 or FP4 keys."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.quant.device import e8m0_to_fp32, widen, widen_parts

# The power of two that keys of `fp4_as_e4m3` are still to be multiplied by, beside their largest scale.
TABLE_EXPONENT = -6
# Arguments that change from call to call in serving.
SIZES = ["num_tokens", "num_columns", "num_pages", "max_pages", "run"]


class IndexQueries(NamedTuple):
    """FP8 queries `[tokens, heads, head_dim]` and fp32 weights `[tokens, heads]`, with their strides."""

    q: Any
    weights: Any
    stride_t: Any
    stride_h: Any
    stride_wt: Any
    stride_wh: Any


class KeyPages(NamedTuple):
    """Values and scales of pages, with the strides of pages and of tokens in a page."""

    data: Any
    scale: Any
    stride_p: Any
    stride_n: Any
    stride_sp: Any
    stride_sn: Any


class Bounds(NamedTuple):
    """Which keys a token scores. Pages: `ends` are lengths of sequences, `table` holds their page ids.

    Without pages a token scores keys from its number in `starts` up to that in `ends`.
    """

    starts: Any
    ends: Any
    table: Any
    stride_starts: Any
    stride_ends: Any
    stride_seq: Any
    stride_page: Any


class LogitsSpec(NamedTuple):
    """Constants that a kernel is compiled with.

    HEADS: index heads; BLOCK_H: padded to a power of two. HEAD_DIM: channels. PAGE_SIZE: 0 without pages.
    Q_LEN: tokens of a sequence over pages. BLOCK_T: tokens of a program; divides Q_LEN. BLOCK_N: keys of a
    tile. CLEAN: whether columns outside a token's keys become -inf.
    SHUFFLED: keys, and bytes of a key, of a tile of a page; 0 for rows. INT64: offsets take 64 bits.
    Q_FORMAT, K_FORMAT: of the values. ROUTE: "native" multiplies FP8; "bits" widens both sides to float16;
    "bf16" widens both sides to bfloat16, for FP4 keys, and multiplies even and odd channels by two products;
    "table" makes FP4 keys E4M3, on Hopper, and multiplies them in two products of channels by fours.
    Products of widened numbers are still to be multiplied by 2**EXPONENT.
    """

    HEADS: Any
    BLOCK_H: Any
    HEAD_DIM: Any
    PAGE_SIZE: Any
    Q_LEN: Any
    BLOCK_T: Any
    BLOCK_N: Any
    CLEAN: Any
    SHUFFLED: Any
    INT64: Any
    Q_FORMAT: Any
    K_FORMAT: Any
    ROUTE: Any
    EXPONENT: Any


@triton.jit
def clamped(number, most):
    """An int32 or int64 number as an int32 of [0, most]."""
    return tl.minimum(tl.maximum(number, 0), most).to(tl.int32)


@triton.jit
def span_of_token(
    bounds, token, num_tokens, num_columns, num_pages, max_pages, PAGE_SIZE: tl.constexpr, Q_LEN: tl.constexpr
):  # fmt: skip
    """The first column that a token scores, and the column after its last; both 0 for a token beyond all."""
    exists = token < num_tokens
    at = token.to(tl.int64)
    if PAGE_SIZE == 0:
        most = tl.minimum(num_columns, num_pages)
        begin = num_columns * 0
        if bounds.starts is not None:
            begin = clamped(tl.load(bounds.starts + at * bounds.stride_starts, mask=exists, other=0), most)
        end = clamped(tl.load(bounds.ends + at * bounds.stride_ends, mask=exists, other=0), most)
    else:
        length = tl.load(bounds.ends + at // Q_LEN * bounds.stride_ends, mask=exists, other=0)
        # A length counts all tokens of the sequence; each of them scores the keys up to its own.
        end = clamped(length, max_pages * PAGE_SIZE) - (Q_LEN - 1) + token % Q_LEN
        end = tl.minimum(tl.maximum(tl.where(exists, end, 0), 0), num_columns)
        begin = end * 0
    return begin, end


@triton.jit
def key_offsets(
    bounds, keys, seq, n, live, num_pages, PAGE_SIZE: tl.constexpr, SHUFFLED: tl.constexpr,
    INT64: tl.constexpr,
):  # fmt: skip
    """Offsets `[N]` of keys and of their scales, and which keys lie in a page that exists."""
    if PAGE_SIZE == 0:
        page = n.to(tl.int64) if INT64 else n
        value_at, scale_at = page * keys.stride_p, page * keys.stride_sp
    else:
        ids = bounds.table + seq.to(tl.int64) * bounds.stride_seq + (n // PAGE_SIZE) * bounds.stride_page
        page = tl.load(ids, mask=live, other=-1)
        live = live & (page >= 0) & (page < num_pages)
        # Of an int64 id that is no int32 nothing is read.
        page = tl.where(live, page, 0).to(tl.int64 if INT64 else tl.int32)
        slot = n % PAGE_SIZE
        scale_at = page * keys.stride_sp + slot * keys.stride_sn
        if SHUFFLED > 0:
            value_at = slot // SHUFFLED * SHUFFLED * keys.stride_n + slot % SHUFFLED * SHUFFLED
        else:
            value_at = slot * keys.stride_n
        value_at = page * keys.stride_p + value_at
    return value_at, scale_at, live


@triton.jit
def fill_columns(out, first, begin, end, num_tokens, num_columns, stride, SPEC: tl.constexpr):
    """Stores -inf in columns [begin, end) of a program's tokens."""
    minus = tl.full([SPEC.BLOCK_N], float("-inf"), tl.float32)
    for start in range(begin, end, SPEC.BLOCK_N):
        n = start + tl.arange(0, SPEC.BLOCK_N)
        inside = (n < end) & (n < num_columns)
        for t in tl.static_range(SPEC.BLOCK_T):
            row = out + (first + t).to(tl.int64) * stride
            tl.store(row + n, minus, mask=inside & (first + t < num_tokens))


@triton.jit
def load_query(queries, token, num_tokens, d, SPEC: tl.constexpr):
    """Channels d of a query, transposed `[D, BLOCK_H]`, and weights `[BLOCK_H]`, 0 for padded heads."""
    h = tl.arange(0, SPEC.BLOCK_H)
    mask = (h < SPEC.HEADS) & (token < num_tokens)
    at = token.to(tl.int64)
    places = queries.q + at * queries.stride_t + h[None, :] * queries.stride_h + d[:, None]
    q = tl.load(places, mask=mask[None, :], other=0.0 if SPEC.ROUTE == "native" else 0)
    weights = tl.load(queries.weights + at * queries.stride_wt + h * queries.stride_wh, mask=mask, other=0.0)
    if SPEC.ROUTE == "table":
        q = q.to(tl.float8e4nv, bitcast=True)
    elif SPEC.ROUTE != "native":
        q = widen(q, SPEC.Q_FORMAT, "bits", tl.float16, False)
    if SPEC.ROUTE == "bf16":
        q = q.to(tl.bfloat16)
    return q, weights * (2.0**SPEC.EXPONENT)


@triton.jit
def load_fp8(keys, value_at, scale_at, live, d, SPEC: tl.constexpr):
    """FP8 keys `[N, HEAD_DIM]`, as they are or in float16, and their scales `[N]`."""
    other: tl.constexpr = 0.0 if SPEC.ROUTE == "native" else 0
    k = tl.load(keys.data + value_at[:, None] + d[None, :], mask=live[:, None], other=other)
    if SPEC.ROUTE != "native":
        k = widen(k, SPEC.K_FORMAT, SPEC.ROUTE, tl.float16, False)
    return k, tl.load(keys.scale + scale_at, mask=live, other=0.0)


@triton.jit
def load_fp4(keys, value_at, scale_at, live, HEAD_DIM: tl.constexpr):
    """FP4 keys as stored `[N, HEAD_DIM / 2]`, and the E8M0 bytes of their scales `[N, HEAD_DIM / 32]`."""
    b = tl.arange(0, HEAD_DIM // 2)
    x = tl.load(keys.data + value_at[:, None] + b[None, :], mask=live[:, None], other=0)
    g = tl.arange(0, HEAD_DIM // 32)
    return x, tl.load(keys.scale + scale_at[:, None] + g[None, :], mask=live[:, None], other=127)


@triton.jit
def fp4_as_e4m3(x, scales):
    """FP4 keys as E4M3 for NVIDIA, still to be multiplied by their largest scale and 2**TABLE_EXPONENT.

    A group of channels is multiplied by its scale over the key's largest; one of less than 2**-11 of that is
    zero, as such a product is beside others in Hopper's sums. `prmt` looks four codes up at once in a table
    of the magnitudes, whose exponents are the group's, and then the four signs.

    Returns:
        `[N, HEAD_DIM / 2]` twice: of eight channels those of the lower four, and of the upper four; and the
        keys' largest scale `[N]`, 0 for one with a NaN among its scales, whose products count as 0.
    """
    GROUPS: tl.constexpr = scales.shape[1]
    scales = scales.to(tl.int32)
    top = tl.max(scales, 1)
    steps = tl.maximum(scales - top[:, None] + 11, -1) * 0x08080808
    steps = tl.broadcast_to(steps[:, :, None], [x.shape[0], GROUPS, x.shape[1] // GROUPS])
    low, high = tl.inline_asm_elementwise(
        """
        {
            .reg .pred none;
            .reg .b32 small, large, code, sign, t, u;
            setp.lt.s32 none, $3, 0;
            and.b32 small, $3, 0xFFFFFF00;
            add.u32 small, small, 0x14100800;
            selp.b32 small, 0, small, none;
            add.u32 large, $3, 0x24201C18;
            selp.b32 large, 0, large, none;
            and.b32 code, $2, 0x77777777;
            shr.u32 sign, $2, 3;
            and.b32 sign, sign, 0x11111111;
            prmt.b32 t, small, large, code;
            prmt.b32 u, 0x8000, 0, sign;
            shr.u32 code, code, 16;
            shr.u32 sign, sign, 16;
            or.b32 $0, t, u;
            prmt.b32 t, small, large, code;
            prmt.b32 u, 0x8000, 0, sign;
            or.b32 $1, t, u;
        }
        """,
        "=&r,=r,r,r,r,r,r",
        [x, tl.reshape(steps, x.shape)],
        dtype=(tl.uint8, tl.uint8),
        is_pure=True,
        pack=4,
    )
    largest = tl.where(top == 255, 0.0, e8m0_to_fp32(top.to(tl.uint8)))
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True), largest


@triton.jit
def fp4_as_bf16(x, scales):
    """FP4 keys in bfloat16, times their scales: even and odd channels, `[N, HEAD_DIM / 2]` each."""
    GROUPS: tl.constexpr = scales.shape[1]
    scale = e8m0_to_fp32(scales)
    even, odd = widen_parts(x, "fp4_e2m1", "bits", tl.float16, 2)
    even = tl.reshape(even.to(tl.float32), [x.shape[0], GROUPS, 16]) * scale[:, :, None]
    odd = tl.reshape(odd.to(tl.float32), [x.shape[0], GROUPS, 16]) * scale[:, :, None]
    # Four significant bits at most, so that nothing is rounded.
    return tl.reshape(even, x.shape).to(tl.bfloat16), tl.reshape(odd, x.shape).to(tl.bfloat16)


@triton.jit(do_not_specialize=SIZES)
def _index_logits_kernel(
    queries, keys, bounds, out, stride_out, num_tokens, num_columns, num_pages, max_pages, run,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Logits of BLOCK_T tokens at `run` columns, a multiple of BLOCK_N. Grid: blocks of tokens, runs."""
    first = tl.program_id(0) * SPEC.BLOCK_T
    begin = tl.program_id(1) * run
    end = tl.minimum(begin + run, num_columns)
    seq = first // SPEC.Q_LEN
    TABLE: tl.constexpr = SPEC.ROUTE == "table"
    FP4: tl.constexpr = TABLE or SPEC.ROUTE == "bf16"
    q, q_odd, weights, starts, ends = (), (), (), (), ()
    # Channels of the first product of FP4 keys; those of the second are OTHER further.
    OTHER: tl.constexpr = 4 if TABLE else 1
    channels = tl.arange(0, SPEC.HEAD_DIM // 2 if FP4 else SPEC.HEAD_DIM)
    if FP4:
        channels = channels // OTHER * (2 * OTHER) + channels % OTHER
    low, high = end, begin
    for t in tl.static_range(SPEC.BLOCK_T):
        q_t, w_t = load_query(queries, first + t, num_tokens, channels, SPEC)
        if FP4:
            odd_t, _ = load_query(queries, first + t, num_tokens, channels + OTHER, SPEC)
            q_odd = q_odd + (odd_t,)
        start_t, end_t = span_of_token(
            bounds, first + t, num_tokens, num_columns, num_pages, max_pages, SPEC.PAGE_SIZE, SPEC.Q_LEN
        )
        # Triton's language does not unpack tuples.
        q, weights = q + (q_t,), weights + (w_t,)
        starts, ends = starts + (start_t,), ends + (end_t,)
        low = tl.minimum(low, tl.where(start_t < end_t, start_t, low))
        high = tl.maximum(high, end_t)
    # Tiles begin where they do without bounds, so that a logit's place in a tile does not depend on them.
    low = tl.maximum(low, begin) // SPEC.BLOCK_N * SPEC.BLOCK_N
    high = tl.minimum(high, end)
    if SPEC.CLEAN:
        fill_columns(out, first, begin, tl.minimum(low, end), num_tokens, num_columns, stride_out, SPEC)
    d = tl.arange(0, SPEC.HEAD_DIM)
    if SPEC.SHUFFLED > 0:
        d = d // SPEC.SHUFFLED * SPEC.SHUFFLED * SPEC.SHUFFLED + d % SPEC.SHUFFLED
    for start in range(low, high, SPEC.BLOCK_N):
        n = start + tl.arange(0, SPEC.BLOCK_N)
        value_at, scale_at, live = key_offsets(
            bounds, keys, seq, n, n < high, num_pages, SPEC.PAGE_SIZE, SPEC.SHUFFLED, SPEC.INT64
        )
        if FP4:
            x, scales = load_fp4(keys, value_at, scale_at, live, SPEC.HEAD_DIM)
            if TABLE:
                k, k_odd, scale = fp4_as_e4m3(x, scales)
            else:
                k, k_odd = fp4_as_bf16(x, scales)
                scale = 1.0
        else:
            k, scale = load_fp8(keys, value_at, scale_at, live, d, SPEC)
        for t in tl.static_range(SPEC.BLOCK_T):
            # Keys are the rows, so that a sum over heads stays within a lane or few.
            products = tl.dot(k, q[t])  # [BLOCK_N, BLOCK_H]
            if FP4:
                products = tl.dot(k_odd, q_odd[t], products)
            logits = tl.sum(tl.maximum(products, 0.0) * weights[t][None, :], 1) * scale
            inside = live & (n >= starts[t]) & (n < ends[t])
            row = out + (first + t).to(tl.int64) * stride_out
            stored = (n < end) & (first + t < num_tokens)
            if not SPEC.CLEAN:
                stored = stored & inside
            tl.store(row + n, tl.where(inside, logits, float("-inf")), mask=stored)
    if SPEC.CLEAN:
        # The last tile has stored its columns to the end.
        rest = tl.maximum(low + tl.cdiv(tl.maximum(high - low, 0), SPEC.BLOCK_N) * SPEC.BLOCK_N, begin)
        fill_columns(out, first, rest, end, num_tokens, num_columns, stride_out, SPEC)
