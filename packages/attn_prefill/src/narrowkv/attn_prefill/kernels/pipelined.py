"""The dense attention of Hopper: one warp copies keys, two warpgroups attend, each at its own pace.

Each warpgroup holds half a tile's rows. It issues the scores of the next key tile, then P @ V of the current
one, and computes the next softmax while the matrix unit works: the overlap of FlashAttention-3 (Shah et al.,
2024). Programs stay and take tile after tile, so that copies of a tile's first keys run during the end of the
tile before. Written in Gluon, since plain Triton schedules by itself; the functions around the loop are plain
Triton's own.
If V is out of float16's range, one warpgroup attends to all of the launch instead, step by step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from narrowkv.attn_prefill.kernels import rows
from narrowkv.attn_prefill.kernels.pipelined_copies import (
    Pages,
    copy_keys,
    key_ring,
    load_pieces,
    places_of,
    rows_in_pages,
)
from narrowkv.attn_prefill.kernels.pipelined_items import (
    Work,
    keys_of,
    order_of,
    row_of,
)
from narrowkv.attn_prefill.kernels.pipelined_loop import (
    Scales,
    attend,
    softmax_of_tile,
)
from narrowkv.attn_prefill.kernels.pipelined_rows import (
    copy_queries,
    product_layout,
    write_half_tile,
)
from narrowkv.paged_cache.kernels import pages
from narrowkv.runtime.attention import handover
from narrowkv.runtime.launch.gluon import in_gluon

await_previous_launch = in_gluon(handover.await_previous_launch)
scheduled_tile = in_gluon(rows.scheduled_tile)
sized_table = in_gluon(pages.sized_table)
times_head_descale = in_gluon(pages.times_head_descale)


@gluon.jit
def attend_with_factors(
    work, q, out, scales, scratch, k_desc, v_desc, page_desc, pages, k_ring, v_ring, q_tile, copied,
    NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, RAGGED: gl.constexpr, K_DESCALE: gl.constexpr, V_DESCALE: gl.constexpr,
    PAD: gl.constexpr, TWO_SCALES: gl.constexpr,
    WINDOW_LEFT: gl.constexpr, WINDOW_RIGHT: gl.constexpr, HAS_SINKS: gl.constexpr, WRITE_LSE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """All half tiles by one warpgroup, step by step: blocks of V have factors of their own.

    Keys in pages have one as well: NaN where their V is not finite.
    """
    ROWS: gl.constexpr = BLOCK_M // 2
    S: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK_N))
    O: gl.constexpr = product_layout(HEAD_DIM)
    phase = 0
    async_copy.wait_group(0)
    for number in range(gl.program_id(0), 2 * work.num_tiles * NUM_KV_HEADS, gl.num_programs(0)):
        kv_head = number // 2 % NUM_KV_HEADS
        half = number % 2
        tile = scheduled_tile(work.schedule, number // 2 // NUM_KV_HEADS)
        begin, end, _full, _full_end = keys_of(
            tile, GQA_RATIO, PAD, WINDOW_LEFT, WINDOW_RIGHT, BLOCK_M, BLOCK_N
        )
        end = gl.where(tile.seq >= 0, end, begin)
        order = order_of(tile, begin, end, PAD, BLOCK_N)
        copy_queries(q, tile, kv_head, True, q_tile, half, GQA_RATIO)
        async_copy.wait_group(0)
        rows = tile.number * BLOCK_M + half * ROWS + gl.arange(0, ROWS, S)
        query_pos = tile.before + rows // GQA_RATIO
        seq = gl.maximum(tile.seq, 0)
        scale = times_head_descale(scales.old, scales.k_descale, seq, kv_head, K_DESCALE)
        base = kv_head * work.rows + tile.base
        m = gl.full([ROWS], float("-inf"), gl.float32, S)
        l = gl.zeros([ROWS], gl.float32, S)
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, O)
        factor = gl.to_tensor(1.0)
        for i in range(end - begin):
            row = row_of(order, i, PAD, BLOCK_N)
            # All warps are done with what lies there.
            fence_async_shared()
            gl.barrier()
            mbarrier.expect(copied, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            tma.async_load(v_desc, [base + row, 0], copied, v_ring.tiles.index(0))
            if page_desc is None:
                tma.async_load(k_desc, [base + row, 0], copied, k_ring.tiles.index(0))
            elif row < rows_in_pages(tile, PAD):
                places = places_of(pages, page_desc, tile, kv_head, row, PAGE_SIZE, RAGGED, PAD, BLOCK_N)
                PIECES: gl.constexpr = k_ring.pieces.shape[0] // k_ring.tiles.shape[0]
                load_pieces(page_desc, places, kv_head * pages.columns, k_ring.pieces, 0, PIECES, copied)
            else:
                tma.async_load(k_desc, [base + row, 0], copied, k_ring.tiles.index(0))
            mbarrier.wait(copied, phase)
            phase ^= 1
            zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, product_layout(BLOCK_N))
            s = warpgroup_mma(q_tile, k_ring.tiles.index(0).permute((1, 0)), zeros, use_acc=False)
            if page_desc is not None:
                n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, product_layout(BLOCK_N)))
                s *= gl.load(scratch.k_factor + base + row + n)[None, :]
            own_scale = scale
            if TWO_SCALES:
                own_scale = gl.where(row < tile.before, scale, scales.new)
            p, correction, m, l = softmax_of_tile(
                s, m, l, own_scale, scales.soft_cap, query_pos, row,
                gl.where(i == 0, order.stop, tile.kv_len),
                True, PAD is not None, WINDOW_LEFT, WINDOW_RIGHT, HEAD_DIM,
            )  # fmt: skip
            own_factor = gl.load(scratch.v_block_factor + (base + row) // BLOCK_N)
            correction *= factor / own_factor
            factor = own_factor
            acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, O))[:, None]
            acc = warpgroup_mma(p, v_ring.tiles.index(0), acc)
        m = gl.convert_layout(m, gl.SliceLayout(1, O))
        l = gl.convert_layout(l, gl.SliceLayout(1, O))
        o_scale = times_head_descale(scales.out, scales.v_descale, seq, kv_head, V_DESCALE) * factor
        write_half_tile(
            q,
            out,
            acc,
            m,
            l,
            o_scale,
            tile,
            kv_head,
            half,
            NUM_KV_HEADS,
            GQA_RATIO,
            WINDOW_RIGHT,
            HAS_SINKS,
            WRITE_LSE,
        )
    # Whoever is last leaves both numbers as the next launch expects them.
    gl.barrier()
    if gl.atomic_add(work.factor_flag + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(work.factor_flag, 0)
        gl.store(work.factor_flag + 1, 0)


@gluon.jit(do_not_specialize=rows.RUNTIME_SIZES)
def _pipelined_prefill_kernel(
    q, out, scratch, k_desc, v_desc, page_desc, pages, k_descale, v_descale, workspace,
    qk_scale, new_scale, out_scale, soft_cap, table_row, num_ids, max_pages, num_tiles, num_splits,
    SIZES: gl.constexpr, RULES: gl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_M rows over the widened keys; see `_dense_prefill_kernel` for the arguments.

    An item is a (split, tile, head), by the schedule in the order of falling work; `item_number` says which
    of them a program takes. page_desc, pages: K is in the cache's pages, but for the chunk's own keys; None:
    all is in the scratch. new_scale: of logits of the chunk's own keys. soft_cap: None without one.
    SIZES, RULES: `Sizes`, `PipelinedRules`.
    """
    if page_desc is not None:
        table = sized_table(pages.table, table_row, num_ids, max_pages, SIZES.ragged)
        pages = Pages(table, pages.page, pages.head, pages.columns)
    work = Work(scratch.schedule, num_tiles, num_splits, scratch.rows, scratch.factor_flag)
    scales = Scales(qk_scale, new_scale, out_scale, k_descale, v_descale, soft_cap)
    KIND: gl.constexpr = q.ptr.dtype.element_ty
    if RULES.v_block_factors:
        copied = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(copied, count=1)
    q_tiles = gl.allocate_shared_memory(
        KIND, [2, RULES.block_m // 2, SIZES.head_dim],
        gl.NVMMASharedLayout.get_default_for([RULES.block_m // 2, SIZES.head_dim], KIND),
    )  # fmt: skip
    k_ring = key_ring(k_desc, page_desc, RULES.stages)
    v_ring = key_ring(v_desc, None, RULES.stages)
    fence_async_shared()
    await_previous_launch()
    if RULES.v_block_factors:
        with_factors = gl.load(scratch.factor_flag) != 0
    gl.warp_specialize(
        [
            (
                attend,
                (
                    work, q, out, scales, workspace, k_ring, v_ring, q_tiles.index(0), 0,
                    SIZES.num_kv_heads, SIZES.gqa_ratio, SIZES.head_dim,
                    RULES.k_descale, RULES.v_descale, RULES.pad, RULES.two_scales,
                    RULES.window_left, RULES.window_right, RULES.sinks, RULES.lse, RULES.split,
                    RULES.block_m, RULES.block_n, RULES.stages,
                ),
            ),
            (
                attend,
                (
                    work, q, out, scales, workspace, k_ring, v_ring, q_tiles.index(1), 1,
                    SIZES.num_kv_heads, SIZES.gqa_ratio, SIZES.head_dim,
                    RULES.k_descale, RULES.v_descale, RULES.pad, RULES.two_scales,
                    RULES.window_left, RULES.window_right, RULES.sinks, RULES.lse, RULES.split,
                    RULES.block_m, RULES.block_n, RULES.stages,
                ),
            ),
            (
                copy_keys,
                (
                    work, k_desc, v_desc, page_desc, pages, k_ring, v_ring,
                    SIZES.num_kv_heads, SIZES.gqa_ratio, SIZES.page_size, SIZES.ragged, RULES.pad,
                    RULES.window_left, RULES.window_right, RULES.split,
                    RULES.block_m, RULES.block_n, RULES.stages,
                ),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 32],
    )  # fmt: skip
    if RULES.v_block_factors:
        if with_factors:
            attend_with_factors(
                work, q, out, scales, scratch, k_desc, v_desc, page_desc, pages, k_ring, v_ring,
                q_tiles.index(0), copied, SIZES.num_kv_heads, SIZES.gqa_ratio, SIZES.head_dim,
                SIZES.page_size, SIZES.ragged, RULES.k_descale, RULES.v_descale, RULES.pad, RULES.two_scales,
                RULES.window_left, RULES.window_right, RULES.sinks, RULES.lse, RULES.block_m, RULES.block_n,
            )  # fmt: skip
