"""Sparse attention on Hopper (sm90) for up to 32 heads straight from FP8 rows, in Gluon.

As over 16-bit rows both products are swapped. But a thread that widens FP8 has numbers in registers, where
wgmma takes the rows of A from, too: QK is done by the warps that gather and widen, and reads only Q from
shared memory. Two warpgroups do that, with every other tile each, and the softmax of their tiles; a third
sums PV. A thread's bytes of the next tile are under way while it widens those of this one.

A thread loads 16 columns in a row; for wgmma they must be columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of four steps
of 16. Any order of columns gives the same scores if Q has it too: Q lies permuted in shared memory.

Source of the structure: warp specialisation as in FlashAttention-3 (Shah et al., 2024).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from narrowkv.quant.device import e8m0_to_fp32
from narrowkv.sparse_fp8.kernels.few_wide import _following, _indices, _some_item, _store_item
from narrowkv.sparse_fp8.kernels.hopper import _barrier, _choose, _copy_async, _locate_rows, _publish


@gluon.jit
def _copy_query(
    query, q_ptr, stride_qt, stride_qh, token, head_block, asked, NUM_HEADS: gl.constexpr
):  # fmt: skip
    """An item's heads to shared memory, 64 columns at a time in the order of `_operand`; others are zeros."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    heads = head_block * query.shape[0] + gl.arange(0, query.shape[0], gl.SliceLayout(1, COPY))
    k = gl.arange(0, 512, gl.SliceLayout(0, COPY))
    column = (k // 64) * 64 + (k // 2 % 4) * 16 + (k // 16 % 4) * 4 + (k // 8 % 2) * 2 + k % 2
    column = gl.max_contiguous(gl.multiple_of(column, 2), 2)
    places = q_ptr + token.to(gl.int64) * stride_qt + ((heads * stride_qh)[:, None] + column[None, :])
    _copy_async(query, places, mask=(heads < NUM_HEADS)[:, None])
    # Counts the copies under way; the phase ends when they have.
    async_copy.mbarrier_arrive(asked)
    _barrier()
    mbarrier.arrive(asked, count=1)


@gluon.jit
def _operand(wide, OPERAND: gl.constexpr):
    """64 columns of rows as A: a thread's 16 columns in a row become its columns of four steps of wgmma."""
    parts = gl.permute(gl.reshape(wide, [wide.shape[0], 4, 4, 2, 2]), (0, 2, 3, 1, 4))
    return gl.convert_layout(gl.reshape(parts, [wide.shape[0], 64]), OPERAND)


@gluon.jit
def _widen(words, scale):
    """int32 words `[rows, 16]` of four E4M3, times float32 powers of two, as bf16 `[rows, 64]`: exact."""
    a, b, c, d = gl.inline_asm_elementwise(
        """
        {
            .reg .b16 p, q, h, i, j, k;
            .reg .b32 x, y, u, v, s;
            .reg .f32 f, g;
            cvt.rn.bf16x2.f32 s, $5, $5;
            mov.b32 {p, q}, $4;
            cvt.rn.f16x2.e4m3x2 x, p;
            cvt.rn.f16x2.e4m3x2 y, q;
            mov.b32 {h, i}, x;
            mov.b32 {j, k}, y;
            cvt.f32.f16 f, h;
            cvt.f32.f16 g, i;
            mov.b32 u, f;
            mov.b32 v, g;
            prmt.b32 x, u, v, 0x7632;
            mul.bf16x2 x, x, s;
            mov.b32 {$0, $1}, x;
            cvt.f32.f16 f, j;
            cvt.f32.f16 g, k;
            mov.b32 u, f;
            mov.b32 v, g;
            prmt.b32 y, u, v, 0x7632;
            mul.bf16x2 y, y, s;
            mov.b32 {$2, $3}, y;
        }
        """,
        "=&h,=&h,=h,=h,r,r",
        [words, scale],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    # [rows, 16, 2 of a pair, 2 pairs]
    wide = gl.permute(gl.join(gl.join(a, b), gl.join(c, d)), (0, 1, 3, 2))
    return gl.reshape(wide, [words.shape[0], 64])


@gluon.jit
def _split(words):
    """int32 words `[rows, 32]` of two bf16 as bf16 `[rows, 64]`."""
    a, b = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(a, b), [words.shape[0], 64])


@gluon.jit
def _load_words(base, at, live, FIRST: gl.constexpr, WORDS: gl.constexpr):
    """int32 words of rows from word FIRST on; `at` counts elements of `base`."""
    d = FIRST + gl.arange(0, WORDS.shape[1], gl.SliceLayout(0, WORDS))
    SIZE: gl.constexpr = base.dtype.element_ty.primitive_bitwidth
    words = base.to(gl.pointer_type(gl.int32), bitcast=True) + ((at // (32 // SIZE))[:, None] + d[None, :])
    return gl.load(words, mask=live[:, None], other=0)


@gluon.jit
def _load_scales(base, at, live, LAYOUT: gl.constexpr):
    """Scales of the seven NoPE tiles of rows, as words where they are bytes: a tuple, see `_scale`."""
    scales = ()
    if LAYOUT == "split":
        for t in gl.static_range(7):
            scales = scales + (gl.load(base + (at + t), mask=live, other=1.0),)
    else:
        # row512 has a byte for every 32 columns.
        words = base.to(gl.pointer_type(gl.int32), bitcast=True)
        for i in gl.static_range(4 if LAYOUT == "row512" else 2):
            scales = scales + (gl.load(words + (at // 4 + i), mask=live, other=0x7F7F7F7F),)
    return scales


@gluon.jit
def _scale(scales, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """The scales of a NoPE tile, float32 `[rows, 1]`."""
    if LAYOUT == "split":
        scale = scales[TILE]
    elif LAYOUT == "row512":
        scale = e8m0_to_fp32(scales[TILE // 2] >> (TILE % 2 * 16) & 0xFF)
    else:
        scale = e8m0_to_fp32(scales[TILE // 4] >> (TILE % 4 * 8) & 0xFF)
    return scale[:, None]


@gluon.jit
def _score_warps(
    qk_scale, prefix, prefix_csr, extend, extend_csr,
    num_tokens, num_splits, num_items,
    query, tiles, numerators, corrections, maxima, states, asked, scored, empty, finished, released,
    WHICH: gl.constexpr, HEAD_BLOCKS: gl.constexpr,
    HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, LAYOUT: gl.constexpr,
    PREFIX_PAGE_SIZE: gl.constexpr, EXTEND_PAGE_SIZE: gl.constexpr, WIDE_ADDRESS: gl.constexpr,
    SPLIT: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    SLACK: gl.constexpr,
):  # fmt: skip
    """Tile WHICH of each pair: FP8 rows, as bf16, into the ring; QK; the softmax."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2)
    # Rows as in SCORES and OPERAND, two a thread, 8 apart; 16 columns in a row, as words of FP8 and of bf16.
    NARROW: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )
    PAIRS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
    ROW: gl.constexpr = gl.SliceLayout(1, NARROW)
    PAIR_ROW: gl.constexpr = gl.SliceLayout(1, PAIRS)
    r = gl.arange(0, BLOCK_K, ROW)
    zeros = gl.full([BLOCK_K, BLOCK_H], 0.0, gl.float32, SCORES)
    lowest = gl.full([BLOCK_H], float("-inf"), gl.float32, HEAD)
    number, pair = gl.program_id(0), 0
    item = _some_item(
        prefix_csr, extend_csr, number, num_tokens, num_splits, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K, 2,
    )  # fmt: skip
    upcoming = _some_item(
        prefix_csr, extend_csr, number + gl.num_programs(0), num_tokens, num_splits, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K, 2,
    )  # fmt: skip
    index, first = _indices(
        prefix_csr, extend_csr, number, WHICH, item, r, num_items, HAS_PREFIX, HAS_EXTEND, BLOCK_K
    )
    live, nope_at, rope_at, scale_at = _locate_rows(
        prefix, extend, first, index, HAS_PREFIX, HAS_EXTEND, LAYOUT,
        PREFIX_PAGE_SIZE, EXTEND_PAGE_SIZE, WIDE_ADDRESS,
    )  # fmt: skip
    nope = _choose(first, prefix.nope, extend.nope, HAS_PREFIX, HAS_EXTEND)
    rope = _choose(first, prefix.rope, extend.rope, HAS_PREFIX, HAS_EXTEND)
    narrow = ()
    for t in gl.static_range(7):
        narrow = narrow + (_load_words(nope, nope_at, live, 16 * t, NARROW),)
    tail = _load_words(rope, gl.convert_layout(rope_at, PAIR_ROW), gl.convert_layout(live, PAIR_ROW), 0, PAIRS)
    scales = _load_scales(
        _choose(first, prefix.scale, extend.scale, HAS_PREFIX, HAS_EXTEND), scale_at, live, LAYOUT
    )
    loaded = number
    number, pair, item, upcoming = _following(
        prefix_csr, extend_csr, number, pair, item, upcoming, num_tokens, num_splits, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K, 2,
    )  # fmt: skip
    index, first = _indices(
        prefix_csr, extend_csr, number, 2 * pair + WHICH, item, r, num_items,
        HAS_PREFIX, HAS_EXTEND, BLOCK_K,
    )  # fmt: skip
    m, parts = lowest, zeros
    begins = gl.program_id(0) >= 0
    count, turn = WHICH + pair * 0, pair * 0
    while loaded < num_items:
        # The tile after this one of these warps.
        next_live, nope_at, rope_at, scale_at = _locate_rows(
            prefix, extend, first, index, HAS_PREFIX, HAS_EXTEND, LAYOUT,
            PREFIX_PAGE_SIZE, EXTEND_PAGE_SIZE, WIDE_ADDRESS,
        )  # fmt: skip
        nope = _choose(first, prefix.nope, extend.nope, HAS_PREFIX, HAS_EXTEND)
        rope = _choose(first, prefix.rope, extend.rope, HAS_PREFIX, HAS_EXTEND)
        next_scales = _load_scales(
            _choose(first, prefix.scale, extend.scale, HAS_PREFIX, HAS_EXTEND), scale_at, next_live, LAYOUT
        )
        ends = pair == 0
        loaded = number
        number, pair, item, upcoming = _following(
            prefix_csr, extend_csr, number, pair, item, upcoming, num_tokens, num_splits, num_items,
            HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K, 2,
        )  # fmt: skip
        index, first = _indices(
            prefix_csr, extend_csr, number, 2 * pair + WHICH, item, r, num_items,
            HAS_PREFIX, HAS_EXTEND, BLOCK_K,
        )  # fmt: skip
        stage = count % STAGES
        mbarrier.wait(asked, turn & 1)
        fence_async_shared()
        mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
        tile = tiles.index(stage)
        next_narrow = ()
        wide = _widen(narrow[0], _scale(scales, 0, LAYOUT))
        tile.slice(0, 64, dim=1).store(wide)
        a = _operand(wide, OPERAND)
        s = warpgroup_mma(
            a, query.slice(0, 64, dim=1).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        for t in gl.static_range(1, 8):
            next_narrow = next_narrow + (_load_words(nope, nope_at, next_live, 16 * (t - 1), NARROW),)
            if t == 7:
                wide = _split(tail)
            else:
                wide = _widen(narrow[t], _scale(scales, t, LAYOUT))
            tile.slice(64 * t, 64, dim=1).store(wide)
            b = _operand(wide, OPERAND)
            s, a = warpgroup_mma_wait(0, deps=[s, a])
            a = b
            s = warpgroup_mma(a, query.slice(64 * t, 64, dim=1).permute((1, 0)), s, is_async=True)
        tail = _load_words(
            rope, gl.convert_layout(rope_at, PAIR_ROW), gl.convert_layout(next_live, PAIR_ROW), 0, PAIRS
        )
        s, a = warpgroup_mma_wait(0, deps=[s, a])
        masked = gl.where(live, 0.0, float("-inf"))
        s = s * qk_scale + gl.convert_layout(masked, gl.SliceLayout(1, SCORES))[:, None]
        top = gl.max(s, 0)
        # Maxima are handed on from tile to tile, and so from one group of warps to the other.
        before = (count + STAGES - 1) % STAGES
        mbarrier.wait(scored.index(before), ((count - 1) // STAGES) & 1, pred=count > 0)
        if WHICH == 0:
            m_old = gl.where(begins, lowest, maxima.index(before).load(HEAD))
        else:
            m_old = maxima.index(before).load(HEAD)
        m_new = gl.where(top > m_old + SLACK, top, m_old)
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s - m_safe[None, :])
        maxima.index(stage).store(m_new)
        corrections.index(stage).store(gl.exp2(m_old - m_safe))
        numerators.index(stage).store(p.to(gl.bfloat16))
        parts = parts * gl.exp2(m - m_safe)[None, :] + p
        m = m_new
        _publish()
        mbarrier.arrive(scored.index(stage), count=1)
        if ends:
            l = gl.sum(parts, 0)
            mbarrier.wait(released, (turn & 1) ^ 1)
            states.index(2 * WHICH).store(m)
            states.index(2 * WHICH + 1).store(l)
            _barrier()
            mbarrier.arrive(finished, count=1)
        m = gl.where(ends, lowest, m)
        parts = gl.where(ends, zeros, parts)
        turn = gl.where(ends, turn + 1, turn)
        begins = ends
        live, narrow, scales = next_live, next_narrow, next_scales
        count += 2


@gluon.jit
def _sum_warps(
    q_ptr, stride_qt, stride_qh, out, partials, prefix_csr, extend_csr, num_tokens, num_splits, num_items,
    query, tiles, numerators, corrections, states, asked, scored, empty, finished, released,
    NUM_HEADS: gl.constexpr, HEAD_BLOCKS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr,
    SPLIT: gl.constexpr, HAS_SINK: gl.constexpr, WRITE_LSE: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Q into shared memory; PV: sums the tiles' rows by their numerators, and stores the results."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_H, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, SUMS)
    count, turn = 0, 0
    upcoming = _some_item(
        prefix_csr, extend_csr, gl.program_id(0), num_tokens, num_splits, num_items,
        HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K, 2,
    )  # fmt: skip
    _copy_query(query, q_ptr, stride_qt, stride_qh, upcoming[0], upcoming[1], asked, NUM_HEADS)
    for number in range(gl.program_id(0), num_items, gl.num_programs(0)):
        token, head_block, split = upcoming[0], upcoming[1], upcoming[2]
        # Not a range, as over 16-bit rows.
        last = count + 2 * upcoming[3]
        upcoming = _some_item(
            prefix_csr, extend_csr, number + gl.num_programs(0), num_tokens, num_splits, num_items,
            HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, BLOCK_K, 2,
        )  # fmt: skip
        acc = gl.full([512, BLOCK_H], 0.0, gl.float32, SUMS)
        while count < last:
            stage = count % STAGES
            mbarrier.wait(scored.index(stage), count // STAGES & 1)
            if count + 1 == last:
                # Both groups have their last scores: the next item's Q may come.
                _copy_query(
                    query, q_ptr, stride_qt, stride_qh, upcoming[0], upcoming[1], asked, NUM_HEADS
                )
            acc = acc * corrections.index(stage).load(HEAD)[None, :]
            acc = warpgroup_mma(
                tiles.index(stage).permute((1, 0)), numerators.index(stage), acc, is_async=True
            )
            acc = warpgroup_mma_wait(0, deps=[acc])
            _barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            count += 1
        mbarrier.wait(finished, turn & 1)
        m = states.index(2).load(HEAD)
        # Both groups' denominators under the last maximum, which the second one has.
        l = states.index(1).load(HEAD) * gl.exp2(
            states.index(0).load(HEAD) - gl.where(m == float("-inf"), 0.0, m)
        ) + states.index(3).load(HEAD)
        _barrier()
        mbarrier.arrive(released, count=1)
        turn += 1  # noqa: SIM113 - Gluon has no enumerate
        _store_item(
            acc, m, l, out, partials, token, head_block, split, num_tokens,
            NUM_HEADS, SPLIT, HAS_SINK, WRITE_LSE,
        )  # fmt: skip
    async_copy.wait_group(0)


@gluon.jit
def _sparse_few_fp8_kernel(
    q_ptr, out, partials, prefix, prefix_csr, extend, extend_csr,
    stride_qt, stride_qh, qk_scale, num_tokens, num_splits, num_items,
    NUM_HEADS: gl.constexpr, HAS_PREFIX: gl.constexpr, HAS_EXTEND: gl.constexpr, LAYOUT: gl.constexpr,
    PREFIX_PAGE_SIZE: gl.constexpr, EXTEND_PAGE_SIZE: gl.constexpr, WIDE_ADDRESS: gl.constexpr,
    HAS_SINK: gl.constexpr, WRITE_LSE: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLACK: gl.constexpr,
):  # fmt: skip
    """One program a multiprocessor; each works through items in steps of the grid."""
    HEAD_BLOCKS: gl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_H, 512], WIDE)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, 512], WIDE)
    numerators = gl.allocate_shared_memory(
        gl.bfloat16,
        [STAGES, BLOCK_K, BLOCK_H],
        gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_H], gl.bfloat16),
    )
    corrections = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_H], LINE)
    maxima = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_H], LINE)
    states = gl.allocate_shared_memory(gl.float32, [4, BLOCK_H], LINE)
    # Q of an item is there.
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    # For each tile of the ring: it and its numerators are there; it has been summed and may be overwritten.
    scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # For the states of an item, likewise.
    finished = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    released = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(scored.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(asked, count=1)
    mbarrier.init(finished, count=2)
    mbarrier.init(released, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _sum_warps,
                (
                    q_ptr, stride_qt, stride_qh, out, partials, prefix_csr, extend_csr,
                    num_tokens, num_splits, num_items, query, tiles, numerators, corrections, states,
                    asked, scored, empty, finished, released,
                    NUM_HEADS, HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, SPLIT, HAS_SINK, WRITE_LSE,
                    BLOCK_H, BLOCK_K, STAGES,
                ),
            ),
            (
                _score_warps,
                (
                    qk_scale, prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
                    query, tiles, numerators, corrections, maxima, states,
                    asked, scored, empty, finished, released,
                    0, HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, LAYOUT,
                    PREFIX_PAGE_SIZE, EXTEND_PAGE_SIZE, WIDE_ADDRESS, SPLIT, BLOCK_H, BLOCK_K, STAGES, SLACK,
                ),
            ),
            (
                _score_warps,
                (
                    qk_scale, prefix, prefix_csr, extend, extend_csr, num_tokens, num_splits, num_items,
                    query, tiles, numerators, corrections, maxima, states,
                    asked, scored, empty, finished, released,
                    1, HEAD_BLOCKS, HAS_PREFIX, HAS_EXTEND, LAYOUT,
                    PREFIX_PAGE_SIZE, EXTEND_PAGE_SIZE, WIDE_ADDRESS, SPLIT, BLOCK_H, BLOCK_K, STAGES, SLACK,
                ),
            ),
        ],
        [4, 4],
        [168, 168],
    )  # fmt: skip
