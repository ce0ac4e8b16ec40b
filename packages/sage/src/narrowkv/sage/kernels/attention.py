"""Attention over quantised Q, K and V: narrow matrix products, the softmax between them in float32.

Online softmax in base 2 (FlashAttention, Dao et al. 2022) on integer or FP8 scores; P in E4M3, scaled to its
range, against FP8 V, accumulated at two levels where the matrix unit's own sum is short (SageAttention2,
Zhang et al., arXiv 2411.10958).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.runtime.attention.masks import SeenKeys, key_range, seen_keys, visible_range
from narrowkv.runtime.attention.xcds import program_on_its_xcd
from narrowkv.sage.kernels.blocks import entry_of, places_of, row_of
from narrowkv.sage.kernels.quantise import SIZES, codes_of, group_descales, load_tokens
from narrowkv.sage.kernels.sequences import (
    ALIGN,
    Sequences,
    descale_of,
    extent_of,
    sequence_at,
)


class NarrowQuery(NamedTuple):
    """Q `[heads, rows, head_dim]`, its descales, and the terms of its subtracted mean, None without one.

    mean_scores: fp32 `[heads, rows / ALIGN, key rows]`, the scores of each block's mean in base-2 logits.
    shift: fp32 `[heads, rows]`, to be added to lse.
    """

    ptr: Any
    descale: Any
    mean_scores: Any
    shift: Any
    rows: Any


class NarrowKeys(NamedTuple):
    """K `[heads, rows, head_dim]`, V `[heads, head_dim, rows]` with its keys interleaved, and descales."""

    k: Any
    v: Any
    k_descale: Any
    v_descale: Any
    rows: Any


class SageOutputs(NamedTuple):
    """O `[batch, tokens, heads, head_dim]` and lse of its first three dimensions or None; batch may be 0."""

    ptr: Any
    batch: Any
    token: Any
    head: Any
    lse: Any


class Mask(NamedTuple):
    """Which keys a row attends to: LEFT before and RIGHT after its position, -1 for all.

    BOTTOM_RIGHT: the last query stands at the last key; else the first at the first.
    """

    BOTTOM_RIGHT: Any
    LEFT: Any
    RIGHT: Any


class SageSpec(NamedTuple):
    """Constants that a kernel is compiled with.

    FORMAT_MAX: of FORMAT, where programs quantise the rows of Q that they attend; 0 where Q is `NarrowQuery`.
    SMOOTH_Q, SHIFT_LSE: what the means took out is added back, to scores and to lse.
    LOG2_P: log2 of the factor of P. TWO_LEVEL: P @ V of a tile is summed separately, then added in float32.
    TMA: K and V come by tensor descriptor. REREAD_Q: Q is not kept from the tiles without a mask for those
    with one. AHEAD: tiles without a mask are loaded to registers while the tile before is multiplied.
    ORDER: `XcdOrder` of the query heads of a sequence, which go together then; or None.
    Q_TILES: tiles of a block of queries that has one list of key tiles; 0 without a block mask.
    """

    RAGGED: Any
    GQA_RATIO: Any
    HEAD_DIM: Any
    FORMAT: Any
    FORMAT_MAX: Any
    SMOOTH_Q: Any
    SHIFT_LSE: Any
    WRITE_LSE: Any
    LOG2_P: Any
    TWO_LEVEL: Any
    TMA: Any
    REREAD_Q: Any
    AHEAD: Any
    BLOCK_M: Any
    BLOCK_N: Any
    Q_TILES: Any
    ORDER: Any = None


@triton.jit
def int4_halves(words):
    """Even and odd channels of packed int4 as int8, each times 16: one operation a word, and no shuffle."""
    return words << 4, words & -16


@triton.jit
def load_rows(ptr, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr):
    """Scratch rows first..first + BLOCK, [BLOCK, WIDTH]."""
    r, c = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    return tl.load(ptr + first * WIDTH + r[:, None] * WIDTH + c[None, :], cache_modifier=CACHE)


@triton.jit
def load_queries(query, head, first, FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
                 CACHE: tl.constexpr):  # fmt: skip
    """Rows of Q in the form that `scores` takes: one tile, or for int4 one of even, one of odd channels."""
    WIDTH: tl.constexpr = HEAD_DIM // 2 if FORMAT == "int4" else HEAD_DIM
    words = load_rows(query.ptr, head.to(tl.int64) * query.rows + first, WIDTH, BLOCK, CACHE)
    return halves_of(words, FORMAT)


@triton.jit
def halves_of(words, FORMAT: tl.constexpr):
    """Words of Q in the form that `scores` takes."""
    if FORMAT == "int4":
        return int4_halves(words)
    else:
        return (words,)


@triton.jit
def quantised_queries(query, seq, start, first_row, num_queries, head, DTYPE: tl.constexpr,
                      CALL: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    """Rows of Q, `Strided`, in the form that `scores` takes, their words as K's; and descales [BLOCK_M]."""
    token = first_row + tl.arange(0, CALL.BLOCK_M)
    x = load_tokens(query, seq, start, token, token < num_queries, head, CALL.HEAD_DIM)
    _, descale = group_descales(x, CALL.FORMAT, CALL.FORMAT_MAX, GROUPS.SPAN, GROUPS.GROUPS, GROUPS.RUN)
    words = codes_of(x, descale[:, None], CALL.FORMAT, False).to(DTYPE, bitcast=True)
    return halves_of(words, CALL.FORMAT), descale


@triton.jit
def unless_zero(number, q):
    """Tiles of Q, and zeros if `number` is zero."""
    kept = ()
    for i in tl.static_range(len(q)):
        kept = kept + (tl.where(number == 0, 0, q[i].to(tl.int8, bitcast=True)).to(q[i].dtype, bitcast=True),)
    return kept


@triton.jit
def scores(q, words, FORMAT: tl.constexpr):
    """Q @ K^T [M, N] in float32; for int4 both operands are times 16."""
    if FORMAT == "int4":
        even, odd = int4_halves(words)
        s = tl.dot(q[0], tl.trans(even), out_dtype=tl.int32)
        s = tl.dot(q[1], tl.trans(odd), s, out_dtype=tl.int32)
    elif FORMAT == "int8":
        s = tl.dot(q[0], tl.trans(words), out_dtype=tl.int32)
    else:
        s = tl.dot(q[0], tl.trans(words))
    return s.to(tl.float32)


@triton.jit
def by_groups(s, SPAN: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr):
    """S [M, N] as [M, spans, repeats, groups, run]: a group's keys lie along the third and fifth axis."""
    M: tl.constexpr = s.shape[0]
    N: tl.constexpr = s.shape[1]
    if GROUPS == 1 and (SPAN == 0 or SPAN >= N):
        return tl.reshape(s, [M, 1, 1, 1, N])
    else:
        return tl.reshape(s, [M, N // SPAN, SPAN // (GROUPS * RUN), GROUPS, RUN])


@triton.jit
def load_key_scale(descale_ptr, head, first, rows, N: tl.constexpr, SPAN: tl.constexpr, GROUPS: tl.constexpr):
    """Descales of the groups of N keys from scratch row `first` on, in the shape of `by_groups`."""
    if SPAN == 0:
        scale = tl.load(descale_ptr + tl.zeros([1, 1], tl.int32))
    else:
        SPANS: tl.constexpr = N // SPAN if N >= SPAN else 1
        at = first // SPAN * GROUPS + tl.arange(0, SPANS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        scale = tl.load(descale_ptr + head.to(tl.int64) * (rows // SPAN * GROUPS) + at)
    return scale[None, :, None, :, None]


@triton.jit
def row_maximum(s):
    """Largest of each group and row of `by_groups`, in that shape."""
    return tl.max(tl.max(s, 4, keep_dims=True), 2, keep_dims=True)


@triton.jit
def over_groups(top):
    """Largest of all groups of a row, [M]."""
    return tl.max(tl.reshape(top, [top.shape[0], top.shape[1] * top.shape[3]]), 1)


@triton.jit
def interleave_keys(p, GATHER: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of P [M, N] in the order in which V's keys are stored.

    A lane holds WIDTH neighbouring columns of every LANES * WIDTH of a matrix result, and as an FP8 operand
    GATHER * WIDTH neighbours: with the keys reordered so, the numbers are in their lanes already.
    """
    M: tl.constexpr = p.shape[0]
    N: tl.constexpr = p.shape[1]
    if GATHER == 1:
        return p
    else:
        p = tl.reshape(p, [M, N // (GATHER * LANES * WIDTH), GATHER, LANES, WIDTH])
        return tl.reshape(tl.permute(p, (0, 1, 3, 2, 4)), [M, N])


@triton.jit
def load_keys(keys, k_desc, kv_head, first, CALL: tl.constexpr):
    """Words of K [BLOCK_N, words of a row] from scratch row `first` on."""
    WORDS: tl.constexpr = CALL.HEAD_DIM // 2 if CALL.FORMAT == "int4" else CALL.HEAD_DIM
    if CALL.TMA:
        return k_desc.load([(kv_head * keys.rows + first).to(tl.int32), 0])
    else:
        return load_rows(keys.k, kv_head.to(tl.int64) * keys.rows + first, WORDS, CALL.BLOCK_N, "")


@triton.jit
def load_values(keys, v_desc, kv_head, first, CALL: tl.constexpr):
    """V transposed, [HEAD_DIM, BLOCK_N], from scratch row `first` on."""
    if CALL.TMA:
        return v_desc.load([(kv_head * CALL.HEAD_DIM).to(tl.int32), first.to(tl.int32)])
    else:
        d, columns = tl.arange(0, CALL.HEAD_DIM), tl.arange(0, CALL.BLOCK_N)
        at = kv_head.to(tl.int64) * keys.rows * CALL.HEAD_DIM + first
        return tl.load(keys.v + at + d.to(tl.int64)[:, None] * keys.rows + columns[None, :])


@triton.jit
def attend(
    tile, upcoming, words, v, q, acc, m, l, row_scale, keys, k_desc, v_desc, kv_head, base, mean_scores,
    rows, CALL: tl.constexpr, GROUPS: tl.constexpr, ORDER: tl.constexpr,
    MASKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the new accumulator, maximum and sum of each row, and K and V of tile `upcoming`.

    words, v: with AHEAD K and V of this tile; else unused, and returned unchanged.
    rows: the keys that each row attends to, `SeenKeys`.
    """
    first = base + tile * CALL.BLOCK_N
    n = tile * CALL.BLOCK_N + tl.arange(0, CALL.BLOCK_N)
    if AHEAD:
        # Memory answers in order: the scale is needed before the next tile.
        scale = load_key_scale(
            keys.k_descale, kv_head, first, keys.rows, CALL.BLOCK_N, GROUPS.SPAN, GROUPS.GROUPS
        )
        s = scores(q, words, CALL.FORMAT)
        words = load_keys(keys, k_desc, kv_head, base + upcoming * CALL.BLOCK_N, CALL)
    else:
        s = scores(q, load_keys(keys, k_desc, kv_head, first, CALL), CALL.FORMAT)
        scale = load_key_scale(
            keys.k_descale, kv_head, first, keys.rows, CALL.BLOCK_N, GROUPS.SPAN, GROUPS.GROUPS
        )
    s = by_groups(s, GROUPS.SPAN, GROUPS.GROUPS, GROUPS.RUN)
    scale = scale * row_scale[:, None, None, None, None]  # [BLOCK_M, spans, 1, groups, 1]
    SCALED: tl.constexpr = MASKED or CALL.SMOOTH_Q
    if SCALED:
        s = s * scale
        if CALL.SMOOTH_Q:
            shared = tl.load(mean_scores + first + tl.arange(0, CALL.BLOCK_N))
            s += by_groups(shared[None, :], GROUPS.SPAN, GROUPS.GROUPS, GROUPS.RUN)
        if MASKED:
            keep = seen_keys(n, rows, COMPARE_ONCE=True)
            s = tl.where(by_groups(keep, GROUPS.SPAN, GROUPS.GROUPS, GROUPS.RUN), s, float("-inf"))
        top = over_groups(row_maximum(s))
    else:
        # The scale is not negative, so it can wait for the multiply-add that also subtracts the maximum.
        top = over_groups(row_maximum(s) * scale)
    m_new = tl.maximum(m, top)
    m_safe = m_new
    if MASKED:
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    shift = (m_safe - CALL.LOG2_P)[:, None, None, None, None]
    if SCALED:
        p = tl.exp2(s - shift)
    else:
        p = tl.exp2(s * scale - shift)
    p = tl.reshape(p, [p.shape[0], CALL.BLOCK_N])
    correction = tl.exp2(m - m_safe)
    l = l * correction + tl.sum(p, 1)
    if AHEAD:
        values = tl.trans(v)  # [BLOCK_N, HEAD_DIM]
    else:
        values = tl.trans(load_values(keys, v_desc, kv_head, first, CALL))
    p = interleave_keys(p.to(values.dtype), ORDER.GATHER, ORDER.LANES, ORDER.WIDTH)
    if CALL.TWO_LEVEL:
        acc = acc * correction[:, None] + tl.dot(p, values)
    else:
        acc = tl.dot(p, values, acc * correction[:, None])
    if AHEAD:
        v = load_values(keys, v_desc, kv_head, base + upcoming * CALL.BLOCK_N, CALL)
    return acc, m_new, l, words, v


@triton.jit
def attend_to_tiles(
    begin, end, full, full_end, current, upcoming, tiles_ptr, query, head, first_row, q,
    acc, m, l, row_scale, keys, k_desc, v_desc, kv_head, base, mean_scores, rows,
    CALL: tl.constexpr, GROUPS: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Accumulator, maximum and sum of each row over key tiles begin..end; full..full_end need no mask.

    current, upcoming: the first two tiles without a mask. first_row: of the scratch of Q.
    """
    words, v = 0, 0
    if CALL.AHEAD:
        WORDS: tl.constexpr = CALL.HEAD_DIM // 2 if CALL.FORMAT == "int4" else CALL.HEAD_DIM
        words = tl.zeros([CALL.BLOCK_N, WORDS], keys.k.dtype.element_ty)
        v = tl.zeros([CALL.HEAD_DIM, CALL.BLOCK_N], keys.v.dtype.element_ty)
        if full < full_end:
            words = load_keys(keys, k_desc, kv_head, base + current * CALL.BLOCK_N, CALL)
            v = load_values(keys, v_desc, kv_head, base + current * CALL.BLOCK_N, CALL)
    for i in range(full, full_end):
        this, following = i, tl.minimum(i + 1, full_end - 1)
        if CALL.Q_TILES:
            # Entries are loaded a tile before they are addresses.
            this, following = current, upcoming
            current, upcoming = upcoming, entry_of(tiles_ptr, i + 2, full, full_end)
        acc, m, l, words, v = attend(
            this, following, words, v, q, acc, m, l, row_scale, keys, k_desc, v_desc, kv_head, base,
            mean_scores, rows, CALL, GROUPS, ORDER, False, CALL.AHEAD,
        )  # fmt: skip
    if CALL.REREAD_Q:
        # The modifier also keeps compilers from making one load of the two.
        q = load_queries(query, head, first_row, CALL.FORMAT, CALL.HEAD_DIM, CALL.BLOCK_M, ".cg")
    # The key tiles on both sides need the mask: one masked loop for both.
    for i in range(begin, end - (full_end - full)):
        this = tl.where(i < full, i, i + (full_end - full))
        if CALL.Q_TILES:
            this = tl.load(tiles_ptr + this)
        acc, m, l, _words, _v = attend(
            this, 0, 0, 0, q, acc, m, l, row_scale, keys, k_desc, v_desc, kv_head, base,
            mean_scores, rows, CALL, GROUPS, ORDER, True, False,
        )  # fmt: skip
    return acc, m, l


@triton.jit(do_not_specialize=[*SIZES, "lse_batch", "lse_token", "lse_head", "q_blocks", "k_tiles"])
def _sage_attention_kernel(
    query, keys, k_desc, v_desc, out, lists, q_bounds_ptr, k_bounds_ptr, qk_scale, num_heads,
    batch, q_length, k_length, items, tiles, together, lse_batch, lse_token, lse_head,
    q_blocks, k_tiles, CALL: tl.constexpr, Q_GROUPS: tl.constexpr, K_GROUPS: tl.constexpr, MASK: tl.constexpr,
    ORDER: tl.constexpr,
):  # fmt: skip
    """One program attends BLOCK_M query rows of one head. Grid: `items` times `tiles`.

    query: `NarrowQuery`, or with FORMAT_MAX `Strided`. An item is a query head of a sequence, of all
    sequences when RAGGED. `together` items go longest tile first, so that the last ones leave no
    multiprocessor waiting; few enough to share their keys in the L2.
    k_desc, v_desc: of K and V with their heads flattened, for TMA, or None. lists: `TileLists` of a block
    mask, or None, of q_blocks blocks of queries and k_tiles key tiles for each sequence; what lies past them
    is masked. lse_batch, lse_token, lse_head: strides of lse, the first 0 when RAGGED.
    """
    q_seqs, k_seqs = Sequences(q_bounds_ptr, batch, q_length), Sequences(k_bounds_ptr, batch, k_length)
    group = tl.program_id(0) // (together * tiles)
    within = tl.program_id(0) % (together * tiles)
    size = tl.minimum(together, items - group * together)
    within = program_on_its_xcd(within, size * tiles, CALL.ORDER)
    # Programs that start last should have little left to do: under a causal mask, the first rows.
    tile = tiles - 1 - within // size
    item = group * together + within % size
    seq, head = item // num_heads, item % num_heads
    if CALL.RAGGED:
        seq = sequence_at(q_seqs, tile * CALL.BLOCK_M, CALL.RAGGED)
    q_base, q_start, num_queries = extent_of(q_seqs, seq, CALL.RAGGED)
    first_row = tile * CALL.BLOCK_M
    if CALL.RAGGED:
        first_row -= q_base
    if first_row >= num_queries:
        return
    k_base, _, num_keys = extent_of(k_seqs, seq, CALL.RAGGED)
    kv_head = head // CALL.GQA_RATIO
    row = q_base + first_row + tl.arange(0, CALL.BLOCK_M)
    mean_scores = 0
    if CALL.FORMAT_MAX > 0:
        q, row_scale = quantised_queries(
            query, seq, q_start, first_row, num_queries, head, keys.k.dtype.element_ty, CALL, Q_GROUPS
        )
        row_scale *= qk_scale
    else:
        q = load_queries(query, head, q_base + first_row, CALL.FORMAT, CALL.HEAD_DIM, CALL.BLOCK_M, "")
        q_descale = query.descale
        if Q_GROUPS.SPAN > 0:
            q_descale += head.to(tl.int64) * (query.rows // Q_GROUPS.SPAN * Q_GROUPS.GROUPS)
        of_row = descale_of(row, Q_GROUPS.SPAN, Q_GROUPS.GROUPS, Q_GROUPS.RUN)
        row_scale = tl.load(q_descale + of_row) * qk_scale
    if CALL.SMOOTH_Q:
        mean_scores = query.mean_scores
        q_block = head.to(tl.int64) * (query.rows // ALIGN) + (q_base + first_row) // ALIGN
        mean_scores += q_block * keys.rows

    offset = num_keys - num_queries if MASK.BOTTOM_RIGHT else num_keys * 0
    query_pos = offset + first_row + tl.arange(0, CALL.BLOCK_M)
    low, high = visible_range(query_pos, 0, num_keys, False, MASK.LEFT, MASK.RIGHT)
    # Rows may stand past the last key here.
    rows = SeenKeys(low if MASK.LEFT >= 0 else None, tl.minimum(high, num_keys - 1), None, None)
    last_row = tl.minimum(first_row + CALL.BLOCK_M, num_queries) - 1
    begin, end, full, full_end = key_range(
        offset + first_row, offset + last_row, num_keys * 0, num_keys, MASK.LEFT, MASK.RIGHT, CALL.BLOCK_N
    )
    tiles_ptr, current, upcoming = 0, full, 0
    if CALL.Q_TILES:
        # From here on the ranges are of entries of this block's list.
        q_block = first_row // (CALL.BLOCK_M * CALL.Q_TILES)
        row_of_blocks = (seq * num_heads + head).to(tl.int64) * q_blocks + tl.minimum(q_block, q_blocks - 1)
        tiles_ptr, before = row_of(lists, row_of_blocks, k_tiles)
        listed = tl.where(q_block < q_blocks, k_tiles, 0)
        begin, end, full, full_end = places_of(before, listed, begin, end, full, full_end)
        current = entry_of(tiles_ptr, full, full, full_end)
        upcoming = entry_of(tiles_ptr, full + 1, full, full_end)
    m = tl.full([CALL.BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([CALL.BLOCK_M], tl.float32)
    acc = tl.zeros([CALL.BLOCK_M, CALL.HEAD_DIM], tl.float32)
    if CALL.FORMAT_MAX > 0:
        # A product takes Q from registers where Q was computed, from shared memory where a loop has it. So
        # this loop carries it, once around: registers have no room for it.
        once = tl.minimum(num_queries, 1)
        for _ in range(once):
            acc, m, l = attend_to_tiles(
                begin, end, full, full_end, current, upcoming, tiles_ptr, query, head, q_base + first_row, q,
                acc, m, l, row_scale, keys, k_desc, v_desc, kv_head, k_base, mean_scores, rows,
                CALL, K_GROUPS, ORDER,
            )  # fmt: skip
            q = unless_zero(once, q)
    else:
        acc, m, l = attend_to_tiles(
            begin, end, full, full_end, current, upcoming, tiles_ptr, query, head, q_base + first_row, q,
            acc, m, l, row_scale, keys, k_desc, v_desc, kv_head, k_base, mean_scores, rows,
            CALL, K_GROUPS, ORDER,
        )  # fmt: skip

    # Not the maximum, which passes NaN over: a row that attends to anything has a sum of at least 2**LOG2_P.
    empty = l == 0.0
    d = tl.arange(0, CALL.HEAD_DIM)
    v_descale = tl.load(keys.v_descale + (seq * (num_heads // CALL.GQA_RATIO) + kv_head) * CALL.HEAD_DIM + d)
    # P and its sum are both times 2**LOG2_P.
    o = tl.where(empty[:, None], 0.0, acc * (1.0 / l)[:, None] * v_descale[None, :])
    token = (q_start + first_row + tl.arange(0, CALL.BLOCK_M)).to(tl.int64)
    written = first_row + tl.arange(0, CALL.BLOCK_M) < num_queries
    at = seq.to(tl.int64) * out.batch + token * out.token + head.to(tl.int64) * out.head
    tl.store(out.ptr + at[:, None] + d[None, :], o.to(out.ptr.dtype.element_ty), mask=written[:, None])
    if CALL.WRITE_LSE:
        LN2: tl.constexpr = 0.6931471805599453
        lse = (m - CALL.LOG2_P) * LN2 + tl.log(l)
        if CALL.SHIFT_LSE:
            lse += tl.load(query.shift + head.to(tl.int64) * query.rows + row)
        lse = tl.where(empty, float("-inf"), lse)
        at = seq.to(tl.int64) * lse_batch + token * lse_token + head.to(tl.int64) * lse_head
        tl.store(out.lse + at, lse, mask=written)
