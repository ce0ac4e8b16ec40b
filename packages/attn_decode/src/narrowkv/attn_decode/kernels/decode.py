"""Split-KV paged decode: one program attends one group of query heads to one split of one sequence.

Online softmax in base 2 (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022), split over the keys
and merged by the last program to arrive (Flash-Decoding, Dao et al. 2023; arrival counting as in stream-K
reductions).
"""

import triton
import triton.language as tl

from narrowkv.attn_decode.kernels.loop import Keys, State, attend_to_rows, attend_to_tiles
from narrowkv.attn_decode.kernels.registers import attend_in_registers, load_query_registers
from narrowkv.attn_decode.kernels.registers_cdna import attend_in_lanes, load_first, ordered_columns
from narrowkv.attn_decode.kernels.tiles import (
    attended_span,
    even_split,
    row_limits,
    splits_of_sequence,
    tiles_of,
)
from narrowkv.paged_cache.kernels.outputs import write_rows
from narrowkv.paged_cache.kernels.pages import Table, first_id, sequence_length, times_head_descale
from narrowkv.paged_cache.kernels.queries import (
    load_query,
    offset_products,
    scale_to_fp16,
    split_query,
    split_to_e4m3,
    times_sign,
    transform_query,
    widen_query,
)
from narrowkv.paged_cache.kernels.tiles import LEAST_FACTOR, zeros_in_parts
from narrowkv.quant.device import join_parts
from narrowkv.runtime.attention.handover import begin_next_launch
from narrowkv.runtime.attention.masks import SeenKeys
from narrowkv.runtime.attention.results import (
    merge_partial_results,
    splits_to_merge,
    store_parts_of_result,
)
from narrowkv.runtime.attention.softmax import SoftCap, multiply_values
from narrowkv.runtime.attention.xcds import program_on_its_xcd


@triton.jit
def terms_of_rows(q, io, kv_head, SIZES: tl.constexpr, K: tl.constexpr, RULES: tl.constexpr):
    """Q as the one or two terms that matrix units multiply, in parts, and what scores are multiplied by."""
    if RULES.q_format != "":
        q = widen_query(q, RULES.q_format, K.parts, RULES.fp8)
    if RULES.butterflies > 0 or io.k_balance is not None:
        q = transform_query(
            q, io.k_balance, kv_head, SIZES.head_dim, K.parts, RULES.butterflies, K.route == "cdna4"
        )
    q_low, q_scale = q, 1.0
    Q_TERMS: tl.constexpr = 3 if io.q.dtype.element_ty == tl.float16 else 2
    if RULES.native:
        q, q_scale = split_to_e4m3(q[0], Q_TERMS)
    elif RULES.fp8 is None:
        if RULES.scale_q:
            q, q_scale = scale_to_fp16(q, K.parts)
        # Float16 queries over a bfloat16 cache: two bfloat16 terms hold all eleven bits.
        q, q_low = split_query(q, RULES.compute, RULES.split_q, K.parts)
    return q, q_low, q_scale


@triton.jit
def whole_rows(acc, V: tl.constexpr, RULES: tl.constexpr):
    """Rows of sums of values with their elements in order, from the parts of the loop."""
    if RULES.lanes:
        acc = ordered_columns(acc, V.parts)
    return join_parts(acc, RULES.acc_parts, V.route == "cdna4")


@triton.jit
def finished_sums(acc, m, l, factor, V: tl.constexpr, RULES: tl.constexpr):
    """Sums of values times `factor` in `RULES.kept_parts`; see `multiply_values`.

    Returns:
        The first part, all parts, and m and l of the rows.
    """
    parts = acc if RULES.kept_parts > 1 else (whole_rows(acc, V, RULES),)
    if V.factors:
        acc = ()
        for i in tl.static_range(RULES.kept_parts):
            part, m_multiplied, l_multiplied = multiply_values(parts[i], m, l, factor)
            acc = acc + (part,)
        parts, m, l = acc, m_multiplied, l_multiplied
    return parts[0], parts, m, l


# Values that serving changes from step to step: the kernel is not compiled again for them.
@triton.jit(
    do_not_specialize=[
        "row",
        "num_ids",
        "max_pages",
        "batch",
        "most_splits",
        "tiles_per_split",
        "slots",
        "merge",
    ],
    do_not_specialize_on_alignment=["page_ids", "lens"],
)
def _paged_decode_kernel(
    page_ids, lens, row, num_ids, max_pages, batch, most_splits, tiles_per_split, steps, slots,
    io, k, v, k_descale, v_descale, workspace, qk_scale, out_scale, soft_cap, merge,
    SIZES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RULES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attends the rows of one tile, (query token, head of the group) pairs, to one split of one sequence.

    Args:
        page_ids, lens, row, num_ids, max_pages, steps: of a `Table`; steps: `TableSteps`. What locates keys
            comes first: AMD loads the first 56 bytes of arguments into registers before a program begins.
        most_splits: with an even share the most splits of all sequences together, else those of a sequence,
            for each KV head and row block. Programs run fastest over those heads.
        tiles_per_split: key tiles of a split where the sequence alone decides on its splits; None for 1.
        slots: with an even share the programs that run at once, for each KV head and row block.
        io: `Rows`. k, v: `KVPointers`. k_descale, v_descale: `Descale`. workspace: `Workspace`.
        qk_scale, out_scale: of the logits (in base 2 unless there is a soft cap) and of the output.
        merge: whether the last split to arrive merges, instead of a second kernel.
        SIZES, K, V, RULES, BLOCKS: `Sizes`, `Stored`, `Stored`, `Rules`, `Blocks`.
    """
    PAIRS: tl.constexpr = K.route == "cdna4"
    ROWS: tl.constexpr = SIZES.q_len * SIZES.gqa_ratio
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCKS.m - 1) // BLOCKS.m
    HEAD_PROGRAMS: tl.constexpr = SIZES.num_kv_heads * ROW_BLOCKS
    # All rows attend to the same keys.
    ALIKE: tl.constexpr = SIZES.q_len == 1 and io.tree is None
    REGISTERS: tl.constexpr = RULES.registers and ALIKE
    HAS_LOW: tl.constexpr = RULES.window_left >= 0 or io.ranges is not None
    table = Table(page_ids, row, lens, num_ids, steps.num_pages, max_pages, *steps[1:4])
    if RULES.early:
        begin_next_launch()
    program = program_on_its_xcd(tl.program_id(0), tl.num_programs(0), RULES.order)
    head_program = program % HEAD_PROGRAMS
    kv_head = head_program % SIZES.num_kv_heads
    row_block = head_program // SIZES.num_kv_heads
    item = program // HEAD_PROGRAMS
    if RULES.even:
        seq, first_item, num_splits = even_split(
            table, io.ranges, batch, most_splits, slots, item, True, SIZES.q_len, RULES.window_left,
            SIZES.page_size, SIZES.ragged, BLOCKS.n,
        )  # fmt: skip
        if num_splits == 0:
            return
    else:
        seq = item // most_splits
        first_item = seq * most_splits
    rows = row_block * BLOCKS.m + tl.arange(0, BLOCKS.m)
    row_mask = rows < ROWS
    heads = kv_head * SIZES.gqa_ratio + rows % SIZES.gqa_ratio
    tokens = (seq * SIZES.q_len + rows // SIZES.gqa_ratio).to(tl.int64)
    # Loaded before the length is known, so that both take one latency of memory.
    if REGISTERS:
        q = load_query_registers(io.q, seq.to(tl.int64), kv_head, io.q_token, io.q_head, SIZES.gqa_ratio)
    else:
        q = load_query(
            io.q, tokens, heads, row_mask, io.q_token, io.q_head, SIZES.head_dim, BLOCKS.dk, K.parts, PAIRS
        )
    kv_len = sequence_length(table, seq, seq < batch, SIZES.page_size, SIZES.ragged)
    row_base = first_id(table, seq, SIZES.ragged)
    first, end_key = attended_span(io.ranges, seq, seq < batch, kv_len, SIZES.q_len, RULES.window_left)
    first_tile, num_tiles = tiles_of(first, end_key, BLOCKS.n)
    split = item - first_item
    if not RULES.even:
        num_splits = splits_of_sequence(num_tiles, tiles_per_split, most_splits)
        if split >= num_splits:
            return
    begin = first_tile + (split * num_tiles) // num_splits
    end = first_tile + ((split + 1) * num_tiles) // num_splits

    last = tl.maximum(end_key - 1, 0)
    if RULES.prefetch == "tile":
        # The tile that is loaded ahead of the last one belongs to another split: its keys are not read.
        last = tl.minimum(last, end * BLOCKS.n - 1)
    keys = Keys(row_base, kv_head, first, last)
    loaded = None
    if ALIKE and RULES.prefetch == "tile":
        # Before Q is widened, which takes as long as the loads.
        loaded = load_first(begin, k, v, k_descale, v_descale, table, keys, SIZES, K, V, RULES, BLOCKS)

    if not ALIKE:
        low, high, full_first, full_end = row_limits(
            io, seq, rows // SIZES.gqa_ratio, row_mask, kv_len, first, end_key, SIZES.q_len, RULES.window_left
        )
    q, q_low, q_scale = terms_of_rows(q, io, kv_head, SIZES, K, RULES)
    logit_scale = q_scale * qk_scale
    if io.q_descale is not None:
        logit_scale *= tl.load(io.q_descale)
    logit_scale = times_head_descale(logit_scale, k_descale, seq, kv_head, K.descale)
    ones = tl.full([BLOCKS.m], 1.0, tl.float32)
    o_scale = times_head_descale(ones * out_scale, v_descale, seq, kv_head, V.descale)
    if REGISTERS or (not ALIKE and not RULES.native):
        # The softmax takes the maximum before it scales, so the scale must be positive.
        q = times_sign(q, logit_scale, K.parts)
        q_low = times_sign(q_low, logit_scale, K.parts)
        logit_scale = tl.abs(logit_scale)

    # A soft cap sees the logits of the keys before they lost their offset.
    SHIFT_FIRST: tl.constexpr = RULES.soft_cap and io.k_offset is not None
    shift = None
    if SHIFT_FIRST:
        shift = io.offset_scale * offset_products(
            io.q, tokens, heads, row_mask, io.q_token, io.q_head, io.k_offset, kv_head, SIZES.head_dim,
            BLOCKS.dk,
        )  # fmt: skip
    soft_cap = SoftCap(soft_cap, shift)
    state = State(
        zeros_in_parts(BLOCKS.m, BLOCKS.d, RULES.acc_parts),
        tl.full([BLOCKS.m], float("-inf"), tl.float32),
        tl.zeros([BLOCKS.m], tl.float32),
        out_scale * 0.0 + LEAST_FACTOR,
    )
    if RULES.lanes:
        acc, m, l, v_largest = attend_in_lanes(
            begin, end, q, logit_scale, soft_cap, state, k, v, k_descale, v_descale, table, keys, loaded,
            SIZES, K, V, RULES, BLOCKS,
        )  # fmt: skip
    elif REGISTERS:
        acc, m, l, v_largest = attend_in_registers(
            begin, end, q, logit_scale, soft_cap, state, k, v, k_descale, v_descale, table, keys,
            SIZES, K, V, RULES,
        )  # fmt: skip
    elif ALIKE:
        acc, m, l, v_largest = attend_to_tiles(
            begin, end, end, 0, q, q_low, logit_scale, soft_cap, state, k, v, k_descale, v_descale, table,
            keys, None, loaded, SIZES, K, V, RULES, BLOCKS, "keys",
        )  # fmt: skip
    else:
        full = tl.minimum(tl.maximum(tl.cdiv(full_first, BLOCKS.n), begin), end)
        full_end = tl.maximum(tl.minimum(full_end // BLOCKS.n, end), full)
        tree = None
        if io.tree is not None:
            tree = tl.load(
                io.tree + seq.to(tl.int64) * SIZES.q_len + rows // SIZES.gqa_ratio, mask=row_mask, other=0
            )
        seen = SeenKeys(low if HAS_LOW else None, high, tree, kv_len - SIZES.q_len)
        acc, m, l, v_largest = attend_to_rows(
            num_splits, begin, end, full, full_end, q, q_low, logit_scale, soft_cap, state, k, v, k_descale,
            v_descale, table, keys, seen, SIZES, K, V, RULES, BLOCKS, RULES.q_in_shared,
        )  # fmt: skip

    if io.k_offset is not None and not SHIFT_FIRST:
        # Every split shifts alike, so that they merge as ever.
        m += io.offset_scale * offset_products(
            io.q, tokens, heads, row_mask, io.q_token, io.q_head, io.k_offset, kv_head, SIZES.head_dim,
            BLOCKS.dk,
        )  # fmt: skip
    acc, sums, m, l = finished_sums(acc, m, l, v_largest, V, RULES)
    if RULES.partial:
        if num_splits > 1:
            slot = item.to(tl.int64) * HEAD_PROGRAMS + head_program
            store_parts_of_result(workspace, slot, sums, m, l, row_mask, BLOCKS.m, BLOCKS.d, RULES.kept_parts)
            if not RULES.can_merge:
                return
            else:
                first_slot = first_item * HEAD_PROGRAMS + head_program
                size = splits_to_merge(
                    workspace, acc, m, l, first_slot, HEAD_PROGRAMS, split, num_splits, merge, row_mask,
                    BLOCKS.m, BLOCKS.d, BLOCKS.m < 64,
                )  # fmt: skip
                if size == 0:
                    return
                acc, m, l = merge_partial_results(
                    workspace, acc, m, l, first_slot, size * HEAD_PROGRAMS, tl.cdiv(num_splits, size),
                    row_mask, BLOCKS.m, BLOCKS.d,
                )  # fmt: skip
    if RULES.kept_parts > 1:
        acc = whole_rows(sums, V, RULES)
    write_rows(
        io.o, io.o_scale, io.lse, io.sinks, acc, m, l, o_scale, heads, tokens, row_mask,
        tl.arange(0, BLOCKS.d), io.o_token, io.o_head, io.lse_token, SIZES.v_head_dim, RULES.sinks, RULES.lse,
    )  # fmt: skip
