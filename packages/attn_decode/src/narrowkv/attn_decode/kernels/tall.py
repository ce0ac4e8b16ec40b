"""Decode of more than 32 rows over E4M3 and FP4 on Hopper: one to three warpgroups attend, one widens.

Each attending warpgroup has 64 rows. It issues the scores of the next key tile, then P @ V of the current
one, and computes the next softmax while the matrix unit works: the overlap of FlashAttention-3 (Shah et al.,
2024). Written in Gluon, since plain Triton schedules by itself; the functions around the loop are plain
Triton's own.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from narrowkv.attn_decode.kernels import tiles
from narrowkv.paged_cache.kernels import outputs, pages, queries
from narrowkv.paged_cache.kernels.tiles import LEAST_FACTOR
from narrowkv.quant import device, device_fp4_registers
from narrowkv.runtime.attention import results, softmax
from narrowkv.runtime.launch.gluon import in_gluon, reinterpret

even_split = in_gluon(tiles.even_split)
splits_of_sequence = in_gluon(tiles.splits_of_sequence)
first_id = in_gluon(pages.first_id)
load_page_ids = in_gluon(pages.load_page_ids)
place_of = in_gluon(pages.place_of)
sequence_length = in_gluon(pages.sequence_length)
times_head_descale = in_gluon(pages.times_head_descale)
scale_to_fp16 = in_gluon(queries.scale_to_fp16)
times_sign = in_gluon(queries.times_sign)
write_rows = in_gluon(outputs.write_rows)
merge_partial_results = in_gluon(results.merge_partial_results)
splits_to_merge = in_gluon(results.splits_to_merge)
store_partial_result = in_gluon(results.store_partial_result)
softmax_step = in_gluon(softmax.softmax_step)
multiply_values = in_gluon(softmax.multiply_values)
e8m0_to_fp32 = in_gluon(device.e8m0_to_fp32)
widen_words = in_gluon(device_fp4_registers.widen_words)

_ROWS = gl.constexpr(64)  # of a warpgroup
_LEAST_SCALE = gl.constexpr(1.1754944e-38)  # so that -inf times a scale is -inf


class WidenedRing(NamedTuple):
    """Tiles of K or V in shared memory: as stored, in 16 bits, and which of the latter are there or free.

    nan_keys: for V, which keys of each 16-bit tile held a NaN; only in tiles that need a causal mask, and 0
        at first.
    factor: what a 16-bit tile is still to be multiplied by; None for 1.
    """

    narrow: Any
    tiles: Any
    filled: Any
    emptied: Any
    nan_keys: Any
    factor: Any


class OutputRows(NamedTuple):
    """Results, as in `Rows`."""

    o: Any
    lse: Any
    sinks: Any
    o_token: Any
    o_head: Any
    lse_token: Any
    o_scale: Any


class TallTask(NamedTuple):
    """A block of a KV head's rows and a split of a sequence's keys: tiles [begin, end), none without work.

    q_start, q_len: the sequence's query tokens; num_rows: its rows; row: the first one in the block.
    first, step: the block's first split is program `first`, the next one `step` programs later.
    """

    seq: Any
    kv_head: Any
    q_start: Any
    q_len: Any
    num_rows: Any
    row: Any
    kv_len: Any
    begin: Any
    end: Any
    first: Any
    step: Any
    split: Any
    num_splits: Any


@gluon.constexpr_function
def _product_layout(columns):
    """How a warpgroup holds a product of 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _line_layout(elements, warps):
    """How warps hold rows of 128 channels, of which a thread has `elements` adjacent ones."""
    return gl.BlockedLayout([1, elements], [elements // 4, 128 // elements], [warps, 1], [1, 0])


@gluon.constexpr_function
def _copy_layout(num_bytes, warps):
    """How warps copy rows of so many bytes, each by 8 threads."""
    return gl.BlockedLayout([1, num_bytes // 8], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def _keys_layout(warps):
    """How warps hold what belongs to keys, each by one thread."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def _make_ring(
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, NARROW_STAGES: gl.constexpr, STORED: gl.constexpr,
    READERS: gl.constexpr,
):  # fmt: skip
    """An empty ring that READERS warpgroups read."""
    BYTES: gl.constexpr = 64 if STORED.factors else 128
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 128], gl.float16)
    ring = WidenedRing(
        gl.allocate_shared_memory(
            gl.uint8, [NARROW_STAGES, BLOCK_N, BYTES], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        ),
        gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, 128], WIDE),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        if STORED.factors
        else None,
    )
    for stage in gl.static_range(STAGES):
        ring.nan_keys.index(stage).store(gl.zeros([BLOCK_N], gl.int32, _keys_layout(gl.num_warps())))
        mbarrier.init(ring.filled.index(stage), count=1)
        mbarrier.init(ring.emptied.index(stage), count=READERS)
    return ring


@gluon.jit
def _masked_tiles(task, GQA_RATIO: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many tiles of a task, its last ones, some row does not see whole; 0 or less if there are none."""
    full_end = gl.maximum(task.kv_len - task.q_len + task.row // GQA_RATIO + 1, 0) // BLOCK_N
    return gl.minimum(task.end - full_end, task.end - task.begin)


@gluon.jit
def _copy_rows(kv, page, slot, kv_head, target):
    """Starts the copy of stored rows."""
    BYTES: gl.constexpr = kv.ptr.dtype.element_ty.primitive_bitwidth // 8
    COPY: gl.constexpr = _copy_layout(target.shape[1], gl.num_warps())
    at = (page * kv.page + slot * kv.token + kv_head * kv.head) * BYTES
    at = gl.convert_layout(at, gl.SliceLayout(1, COPY), assert_trivial=True)
    d = gl.arange(0, target.shape[1], gl.SliceLayout(0, COPY))
    source = kv.ptr.to(gl.pointer_type(gl.uint8), bitcast=True) + (at[:, None] + d[None, :])
    async_copy.async_load(target, gl.multiple_of(source, [8, 8] if target.shape[1] == 64 else [16, 16]))


@gluon.jit
def _copy_tile(
    k, v, table, page_ids, first_key, last, kv_head, k_ring, v_ring, stage,
    SIZES: gl.constexpr, RULES: gl.constexpr,
):  # fmt: skip
    """Starts the copy of a tile of K and V as they are stored; keys past the last one take its place."""
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[1]
    keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, _line_layout(16, gl.num_warps())))
    page, slot = place_of(table, page_ids, keys, 0, last, SIZES.page_size, RULES.int64_offsets)
    _copy_rows(k, page, slot, kv_head, k_ring.narrow.index(stage))
    _copy_rows(v, page, slot, kv_head, v_ring.narrow.index(stage))
    async_copy.commit_group()


@gluon.jit
def _confine_nans(ring, i, narrow_stage):
    """Makes NaN of the i-th tile 0 and notes its keys: 0 * NaN would reach rows that do not see them."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    BLOCK_N: gl.constexpr = ring.tiles.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    tile = reinterpret(
        ring.narrow.index(narrow_stage), gl.int32, [BLOCK_N, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    mbarrier.wait(ring.emptied.index(i % STAGES), (i // STAGES) & 1 ^ 1)
    for start in gl.static_range(0, BLOCK_N, 32):
        part = tile.slice(start, 32)
        words = part.load(LINES)
        nans = (words & 0x7F7F7F7F) + 0x01010101 >> 7 & 0x01010101  # 1 for each byte that is 0x7F or 0xFF
        ring.nan_keys.index(i % STAGES).slice(start, 32).store(gl.max(nans, 1))
        part.store(words & ~(nans * 255))
    gl.barrier()


@gluon.jit
def _load_scales(
    k_descale, v_descale, table, page_ids, keys, last, kv_head,
    SIZES: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RULES: gl.constexpr,
):  # fmt: skip
    """E8M0 bytes of the keys of a tile of K and V; 0 for a side that has none."""
    k_scales, v_scales = 0, 0
    if K.factors or V.factors:
        page, slot = place_of(table, page_ids, keys, 0, last, SIZES.page_size, RULES.int64_offsets)
        if K.factors:
            at = page * k_descale.major + slot * k_descale.token + kv_head * k_descale.head
            k_scales = gl.load(k_descale.ptr + at).to(gl.int32)
        if V.factors:
            at = page * v_descale.major + slot * v_descale.token + kv_head * v_descale.head
            v_scales = gl.load(v_descale.ptr + at).to(gl.int32)
    return k_scales, v_scales


@gluon.jit
def _widen_fp4_tile(ring, i, narrow_stage, scales, confine):
    """Widens the i-th tile of FP4 times 2**15 over the largest scale of its keys, once there is room.

    A key whose scale is 2**-29 of the largest or less becomes 0. NaN is confined as by `_confine_nans`.
    """
    STAGES: gl.constexpr = ring.tiles.shape[0]
    BLOCK_N: gl.constexpr = ring.tiles.shape[1]
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [gl.num_warps(), 1], [1, 0])
    stage = i % STAGES
    is_nan = scales == 255
    top = gl.max(gl.where(is_nan, 0, scales), 0)
    relative = gl.where(is_nan, 0x7E00, gl.maximum(scales - top + 30, 0) << 10)  # bits of float16
    mbarrier.wait(ring.emptied.index(stage), (i // STAGES) & 1 ^ 1)
    if confine:
        ring.nan_keys.index(stage).store(is_nan.to(gl.int32))
        relative = gl.where(is_nan, 0, relative)
    relative = gl.convert_layout(relative * 0x10001, gl.SliceLayout(1, WORDS))
    words = reinterpret(
        ring.narrow.index(narrow_stage), gl.int32, [BLOCK_N, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ).load(WORDS)
    a, b, c, d = widen_words(words, gl.zeros_like(words) + relative[:, None])
    pairs = gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [BLOCK_N, 64])
    reinterpret(ring.tiles.index(stage), gl.int32, [BLOCK_N, 64], gl.NVMMASharedLayout(128, 32)).store(pairs)
    factor = gl.full([1], 2.0**-15, gl.float32, _keys_layout(gl.num_warps())) * e8m0_to_fp32(top)
    ring.factor.index(stage).store(factor)
    fence_async_shared()
    gl.barrier()
    mbarrier.arrive(ring.filled.index(stage))


@gluon.jit
def _widen_tile(ring, i, narrow_stage):
    """Widens the i-th tile of FP8 into the ring once there is room."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    stage = i % STAGES
    stored = ring.narrow.index(narrow_stage).load(_line_layout(8, gl.num_warps()))
    mbarrier.wait(ring.emptied.index(stage), (i // STAGES) & 1 ^ 1)
    ring.tiles.index(stage).store(stored.to(gl.float8e4nv, bitcast=True).to(gl.float16))
    fence_async_shared()
    gl.barrier()
    mbarrier.arrive(ring.filled.index(stage))


@gluon.jit
def _widen_tiles(
    k, v, k_descale, v_descale, table, task, k_ring, v_ring,
    SIZES: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RULES: gl.constexpr,
):  # fmt: skip
    """Copies and widens the task's tiles of K and V, the last one first."""
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[1]
    NARROW: gl.constexpr = k_ring.narrow.shape[0]
    last = gl.maximum(task.kv_len - 1, 0)
    row_base = first_id(table, task.seq, SIZES.ragged)
    first_key = (task.end - 1) * BLOCK_N
    r = gl.arange(0, BLOCK_N, gl.SliceLayout(1, _line_layout(16, gl.num_warps())))
    page_ids = load_page_ids(table, row_base, first_key + r, 0, last, SIZES.page_size)
    for i in gl.static_range(NARROW - 1):
        _copy_tile(k, v, table, page_ids, first_key, last, task.kv_head, k_ring, v_ring, i, SIZES, RULES)
        first_key -= BLOCK_N
        page_ids = load_page_ids(table, row_base, first_key + r, 0, last, SIZES.page_size)
    # Scales are loaded a tile ahead of its widening, and their page ids two.
    keys = task.end * BLOCK_N + gl.arange(0, BLOCK_N, _keys_layout(gl.num_warps()))
    scale_ids = 0
    if K.factors or V.factors:
        scale_ids = load_page_ids(table, row_base, keys - BLOCK_N, 0, last, SIZES.page_size)
    k_scales, v_scales = _load_scales(
        k_descale, v_descale, table, scale_ids, keys - BLOCK_N, last, task.kv_head, SIZES, K, V, RULES
    )
    if K.factors or V.factors:
        scale_ids = load_page_ids(table, row_base, keys - 2 * BLOCK_N, 0, last, SIZES.page_size)
    masked = _masked_tiles(task, SIZES.gqa_ratio, BLOCK_N)
    for i in range(task.end - task.begin):
        gl.barrier()  # all warps have read what is overwritten
        ahead = (i + NARROW - 1) % NARROW
        _copy_tile(k, v, table, page_ids, first_key, last, task.kv_head, k_ring, v_ring, ahead, SIZES, RULES)
        first_key -= BLOCK_N
        page_ids = load_page_ids(table, row_base, first_key + r, 0, last, SIZES.page_size)
        async_copy.wait_group(NARROW - 1)
        gl.barrier()
        if not K.factors:
            _widen_tile(k_ring, i, i % NARROW)
        k_now, v_now = k_scales, v_scales
        keys = (task.end - 2 - i) * BLOCK_N + gl.arange(0, BLOCK_N, _keys_layout(gl.num_warps()))
        k_scales, v_scales = _load_scales(
            k_descale, v_descale, table, scale_ids, keys, last, task.kv_head, SIZES, K, V, RULES
        )
        if K.factors or V.factors:
            scale_ids = load_page_ids(table, row_base, keys - BLOCK_N, 0, last, SIZES.page_size)
        if K.factors:
            _widen_fp4_tile(k_ring, i, i % NARROW, k_now, False)
        if V.factors:
            _widen_fp4_tile(v_ring, i, i % NARROW, v_now, i < masked)
        else:
            if i < masked:
                _confine_nans(v_ring, i, i % NARROW)
            _widen_tile(v_ring, i, i % NARROW)
    async_copy.wait_group(0)


@gluon.jit
def _load_query(
    io, k_descale, task, q_tile, qk_scale, WARPGROUP: gl.constexpr, SIZES: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Stores a warpgroup's rows of Q in float16 in shared memory; returns their scores' positive scale."""
    LINES: gl.constexpr = _line_layout(8, gl.num_warps())
    rows = task.row + WARPGROUP * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, LINES))
    d = gl.arange(0, 128, gl.SliceLayout(0, LINES))
    tokens = (task.q_start + rows // SIZES.gqa_ratio).to(gl.int64)
    heads = task.kv_head * SIZES.gqa_ratio + rows % SIZES.gqa_ratio
    at = tokens[:, None] * io.q_token + heads[:, None] * io.q_head + d[None, :]
    parts = (gl.load(io.q + at, mask=(rows < task.num_rows)[:, None], other=0.0),)
    scale = times_head_descale(qk_scale, k_descale, task.seq, task.kv_head, K.descale)
    if io.q_descale is not None:
        scale *= gl.load(io.q_descale)
    if io.q.dtype.element_ty != gl.float16:
        parts, up = scale_to_fp16(parts, 1)
        scale *= up
    q_tile.store(times_sign(parts, scale, 1)[0])  # the softmax takes the maximum before it scales
    return gl.where(scale < 0, -scale, scale) + _LEAST_SCALE


@gluon.jit
def _issue_scores(q_tile, ring, i):
    """Q @ K^T of the ring's i-th tile, still under way."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    BLOCK_N: gl.constexpr = ring.tiles.shape[1]
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, _product_layout(BLOCK_N))
    mbarrier.wait(ring.filled.index(i % STAGES), (i // STAGES) & 1)
    tile = ring.tiles.index(i % STAGES).permute((1, 0))
    return warpgroup_mma(q_tile, tile, zeros, use_acc=False, is_async=True)


@gluon.jit
def _issue_values(p, acc, ring, i):
    """Acc + P @ V of the ring's i-th tile, still under way."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.filled.index(i % STAGES), (i // STAGES) & 1)
    return warpgroup_mma(p, ring.tiles.index(i % STAGES), acc, is_async=True)


@gluon.jit
def _factor_of_tile(ring, i):
    """What the ring's i-th tile is still to be multiplied by, once it is there."""
    factor = ring.factor.index(i % ring.tiles.shape[0]).load(_keys_layout(gl.num_warps()))
    return gl.max(factor, 0)


@gluon.jit
def _scale_of_tile(scale, k_ring, i):
    """What the scores of the i-th tile of K are still to be multiplied by; positive."""
    if k_ring.factor is not None:
        scale = scale * _factor_of_tile(k_ring, i) + _LEAST_SCALE
    return scale


@gluon.jit
def _softmax_of_tile(s, m, l, largest, scale, v_ring, i, first_key, high, MASKED: gl.constexpr):
    """P as the left operand of the next product, the correction factor of earlier sums, new m, l and largest.

    largest: the largest factor of a tile of V so far; P and sums of values are in units of it.
    MASKED: rows see keys up to `high`. P of a key whose V has a NaN, which V's i-th tile lacks, is NaN.
    """
    KEYS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    STAGES: gl.constexpr = v_ring.tiles.shape[0]
    if MASKED:
        keys = first_key + gl.arange(0, s.shape[1], KEYS)
        s = gl.where(keys[None, :] <= high[:, None], s, float("-inf"))
    p, m, l, correction = softmax_step(s, m, l, gl.full_like(m, 1.0) * scale)
    if MASKED or v_ring.factor is not None:
        mbarrier.wait(v_ring.filled.index(i % STAGES), (i // STAGES) & 1)
    if v_ring.factor is not None:
        factor = _factor_of_tile(v_ring, i)
        if factor > largest:
            correction *= largest / factor
            largest = factor
        elif factor < largest:
            p *= factor / largest
    if MASKED:
        is_nan = v_ring.nan_keys.index(i % STAGES).load(KEYS) != 0
        p = gl.where(is_nan[None, :] & (keys[None, :] <= high[:, None]), float("nan"), p)
    p = gl.convert_layout(p.to(gl.float16), gl.DotOperandLayout(0, _product_layout(128), 2))
    return p, correction, m, l, largest


@gluon.jit
def _attend_tiles(
    p, acc, m, l, largest, q_tile, k_ring, v_ring, scale, high, task, first, stop, MASKED: gl.constexpr,
):  # fmt: skip
    """Tiles number `first` to `stop` of a task, counted from its last one down."""
    K_STAGES: gl.constexpr = k_ring.tiles.shape[0]
    V_STAGES: gl.constexpr = v_ring.tiles.shape[0]
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[1]
    for i in range(first, stop):
        scores = _issue_scores(q_tile, k_ring, i)
        values = _issue_values(p, acc, v_ring, i - 1)
        # Marks of keys take the registers of the last P, which its product holds until it has ended.
        s = warpgroup_mma_wait(0 if MASKED else 1, deps=(scores,))
        tile_scale = _scale_of_tile(scale, k_ring, i)
        mbarrier.arrive(k_ring.emptied.index(i % K_STAGES))
        p, correction, m, l, largest = _softmax_of_tile(
            s, m, l, largest, tile_scale, v_ring, i, (task.end - 1 - i) * BLOCK_N, high, MASKED
        )
        # Named here, the softmax is not put off until after the wait.
        acc, p, correction, m, l = warpgroup_mma_wait(0, deps=(values, p, correction, m, l))
        mbarrier.arrive(v_ring.emptied.index((i - 1) % V_STAGES))
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
    return p, acc, m, l, largest


@gluon.jit
def _attend_rows(
    shared, q_tile, scale, WARPGROUP: gl.constexpr, SIZES: gl.constexpr, V: gl.constexpr, RULES: gl.constexpr,
    BLOCKS: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """A warpgroup's rows of a task: their result, or a partial one."""
    io, v_descale, workspace, task, k_ring, v_ring, out_scale, merge = shared
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[1]
    S: gl.constexpr = gl.SliceLayout(1, _product_layout(BLOCK_N))
    O: gl.constexpr = _product_layout(128)
    own_row = task.row + WARPGROUP * _ROWS
    high = task.kv_len - task.q_len + (own_row + gl.arange(0, _ROWS, S)) // SIZES.gqa_ratio
    m = gl.full([_ROWS], float("-inf"), gl.float32, S)
    l = gl.zeros([_ROWS], gl.float32, S)
    largest = gl.to_tensor(LEAST_FACTOR)
    acc = gl.zeros([_ROWS, 128], gl.float32, O)
    num_tiles = task.end - task.begin
    if num_tiles > 0:
        masked = gl.maximum(_masked_tiles(task, SIZES.gqa_ratio, BLOCK_N), 1)
        s = warpgroup_mma_wait(0, deps=(_issue_scores(q_tile, k_ring, 0),))
        tile_scale = _scale_of_tile(scale, k_ring, 0)
        mbarrier.arrive(k_ring.emptied.index(0))
        p, _correction, m, l, largest = _softmax_of_tile(
            s, m, l, largest, tile_scale, v_ring, 0, (task.end - 1) * BLOCK_N, high, True
        )
        p, acc, m, l, largest = _attend_tiles(
            p, acc, m, l, largest, q_tile, k_ring, v_ring, scale, high, task, 1, masked, True
        )
        p, acc, m, l, largest = _attend_tiles(
            p, acc, m, l, largest, q_tile, k_ring, v_ring, scale, high, task, masked, num_tiles, False
        )
        acc = warpgroup_mma_wait(0, deps=(_issue_values(p, acc, v_ring, num_tiles - 1),))
    m = gl.convert_layout(m, gl.SliceLayout(1, O))
    l = gl.convert_layout(l, gl.SliceLayout(1, O))
    if V.factors:
        acc, m, l = multiply_values(acc, m, l, largest)
    rows = own_row + gl.arange(0, _ROWS, gl.SliceLayout(1, O))
    row_mask = rows < task.num_rows
    write = task.num_splits == 1
    if PARTIAL:
        if task.num_splits > 1:
            WARPGROUPS: gl.constexpr = BLOCKS.m // _ROWS
            step = task.step * WARPGROUPS
            first_slot = task.first * WARPGROUPS + WARPGROUP
            own_slot = (first_slot + task.split * step).to(gl.int64)
            store_partial_result(workspace, own_slot, acc, m, l, row_mask, _ROWS, 128)
            size = splits_to_merge(
                workspace, acc, m, l, first_slot, step, task.split, task.num_splits, merge, row_mask,
                _ROWS, 128, False,
            )  # fmt: skip
            if size > 0:
                acc, m, l = merge_partial_results(
                    workspace, acc, m, l, first_slot, size * step, gl.cdiv(task.num_splits, size), row_mask,
                    _ROWS, 128,
                )  # fmt: skip
            write = size > 0
    if write:
        tokens = (task.q_start + rows // SIZES.gqa_ratio).to(gl.int64)
        heads = task.kv_head * SIZES.gqa_ratio + rows % SIZES.gqa_ratio
        o_scale = times_head_descale(
            gl.full([_ROWS], 1.0, gl.float32, gl.SliceLayout(1, O)) * out_scale, v_descale, task.seq,
            task.kv_head, V.descale,
        )  # fmt: skip
        write_rows(
            io.o, io.o_scale, io.lse, io.sinks, acc, m, l, o_scale, heads, tokens, row_mask,
            gl.arange(0, 128, gl.SliceLayout(0, O)), io.o_token, io.o_head, io.lse_token, 128, RULES.sinks,
            RULES.lse,
        )  # fmt: skip


@gluon.jit
def attend_task(
    io, k, v, k_descale, v_descale, table, workspace, task, qk_scale, out_scale, merge,
    SIZES: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RULES: gl.constexpr, BLOCKS: gl.constexpr,
    PARTIAL: gl.constexpr,
):  # fmt: skip
    """Attends a task's rows to its keys and writes their result, or a partial one until the last split ends.

    BLOCKS: 64 rows for each warpgroup that attends; PARTIAL: a sequence can have several splits; the
    others as in `_paged_decode_kernel`.
    """
    WARPGROUPS: gl.constexpr = BLOCKS.m // _ROWS
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, 128], gl.float16)
    q_tiles = gl.allocate_shared_memory(gl.float16, [WARPGROUPS, _ROWS, 128], Q)
    scales = ()
    for i in gl.static_range(WARPGROUPS):
        scales = scales + (_load_query(io, k_descale, task, q_tiles.index(i), qk_scale, i, SIZES, K),)
    out = OutputRows(io.o, io.lse, io.sinks, io.o_token, io.o_head, io.lse_token, io.o_scale)
    k_ring = _make_ring(BLOCKS.n, 2 if V.factors or WARPGROUPS == 3 else 1, 2, K, WARPGROUPS)
    v_ring = _make_ring(BLOCKS.n, 2, 2, V, WARPGROUPS)
    fence_async_shared()
    shared = (out, v_descale, workspace, task, k_ring, v_ring, out_scale, merge)
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_attend_rows, (shared, q_tiles.index(0), scales[0], 0, SIZES, V, RULES, BLOCKS, PARTIAL)),
                (_widen_tiles, (k, v, k_descale, v_descale, table, task, k_ring, v_ring, SIZES, K, V, RULES)),
            ],
            worker_num_warps=[4],
            worker_num_regs=[72],
        )  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_attend_rows, (shared, q_tiles.index(0), scales[0], 0, SIZES, V, RULES, BLOCKS, PARTIAL)),
                (_attend_rows, (shared, q_tiles.index(1), scales[1], 1, SIZES, V, RULES, BLOCKS, PARTIAL)),
                (_widen_tiles, (k, v, k_descale, v_descale, table, task, k_ring, v_ring, SIZES, K, V, RULES)),
            ],
            worker_num_warps=[4, 4],
            worker_num_regs=[208, 88] if K.factors or V.factors else [216, 72],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend_rows, (shared, q_tiles.index(0), scales[0], 0, SIZES, V, RULES, BLOCKS, PARTIAL)),
                (_attend_rows, (shared, q_tiles.index(1), scales[1], 1, SIZES, V, RULES, BLOCKS, PARTIAL)),
                (_attend_rows, (shared, q_tiles.index(2), scales[2], 2, SIZES, V, RULES, BLOCKS, PARTIAL)),
                (_widen_tiles, (k, v, k_descale, v_descale, table, task, k_ring, v_ring, SIZES, K, V, RULES)),
            ],
            worker_num_warps=[4, 4, 4],
            worker_num_regs=[152, 152, 56],
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "row", "num_ids", "max_pages", "batch", "most_splits", "tiles_per_split", "slots", "merge",
    ],
    do_not_specialize_on_alignment=["page_ids", "lens"],
)  # fmt: skip
def _tall_decode_kernel(
    page_ids, lens, row, num_ids, max_pages, batch, most_splits, tiles_per_split, steps, slots,
    io, k, v, k_descale, v_descale, workspace, qk_scale, out_scale, soft_cap, merge,
    SIZES: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RULES: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Attends a KV head's rows to one split of one sequence; arguments as those of `_paged_decode_kernel`."""
    table = pages.Table(
        page_ids, row, lens, num_ids, steps.num_pages, max_pages, steps[1], steps[2], steps[3]
    )
    ROWS: gl.constexpr = SIZES.q_len * SIZES.gqa_ratio
    ROW_BLOCKS: gl.constexpr = (ROWS + BLOCKS.m - 1) // BLOCKS.m
    HEAD_PROGRAMS: gl.constexpr = SIZES.num_kv_heads * ROW_BLOCKS
    head_program = gl.program_id(0) % HEAD_PROGRAMS
    item = gl.program_id(0) // HEAD_PROGRAMS
    if RULES.even:
        zeros = (
            gl.zeros([128], gl.int32, gl.BlockedLayout([1], [32], [4], [0])),
            gl.zeros([128], gl.int32, gl.SliceLayout(0, _line_layout(4, gl.num_warps()))),
        )
        seq, first_item, num_splits = even_split(
            table, None, batch, most_splits, slots, item, True, SIZES.q_len, -1, SIZES.page_size,
            SIZES.ragged, BLOCKS.n, zeros,
        )  # fmt: skip
        kv_len = sequence_length(table, seq, seq < batch, SIZES.page_size, SIZES.ragged)
        num_tiles = gl.cdiv(kv_len, BLOCKS.n)
    else:
        seq = item // most_splits
        first_item = seq * most_splits
        kv_len = sequence_length(table, seq, seq < batch, SIZES.page_size, SIZES.ragged)
        num_tiles = gl.cdiv(kv_len, BLOCKS.n)
        num_splits = splits_of_sequence(num_tiles, tiles_per_split, most_splits)
        num_splits = gl.where(item - first_item < num_splits, num_splits, 0)
    split = item - first_item
    parts = gl.maximum(num_splits, 1)
    task = TallTask(
        seq, head_program % SIZES.num_kv_heads, seq * SIZES.q_len, SIZES.q_len, ROWS,
        head_program // SIZES.num_kv_heads * BLOCKS.m, kv_len,
        gl.where(num_splits > 0, split * num_tiles // parts, 0),
        gl.where(num_splits > 0, (split + 1) * num_tiles // parts, 0),
        first_item * HEAD_PROGRAMS + head_program, HEAD_PROGRAMS, split, num_splits,
    )  # fmt: skip
    attend_task(
        io, k, v, k_descale, v_descale, table, workspace, task, qk_scale, out_scale, merge,
        SIZES, K, V, RULES, BLOCKS, RULES.partial,
    )  # fmt: skip
