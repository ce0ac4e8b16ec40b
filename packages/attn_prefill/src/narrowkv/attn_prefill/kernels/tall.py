"""Kernel "split" of more than 32 rows over E4M3 and FP4 on Hopper, by decode's `kernels/tall.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from narrowkv.attn_decode.kernels.tall import TallTask, attend_task
from narrowkv.attn_decode.kernels.tiles import Rows
from narrowkv.attn_prefill.kernels.rows import RUNTIME_SIZES, sized_queries
from narrowkv.attn_prefill.kernels.shares import find_share
from narrowkv.paged_cache.kernels.pages import sequence_length, sized_table
from narrowkv.runtime.attention.masks import SEQUENCES
from narrowkv.runtime.launch.gluon import in_gluon

find_share = in_gluon(find_share)
sequence_length = in_gluon(sequence_length)
sized_queries, sized_table = in_gluon(sized_queries), in_gluon(sized_table)
_SEQUENCES = gl.constexpr(SEQUENCES.value)


@gluon.jit(do_not_specialize=RUNTIME_SIZES)
def _tall_prefill_kernel(
    workspace, q, out, cache, table, qk_scale, out_scale,
    batch, num_tokens, max_q_len, least_len, most_len, table_row, num_ids, max_pages, num_splits,
    SIZES: gl.constexpr, K: gl.constexpr, V: gl.constexpr, RULES: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """One tile of rows of one KV head over an even share of keys; arguments as those of the fused kernel."""
    q = sized_queries(q, num_tokens, max_q_len, least_len, most_len)
    table = sized_table(table, table_row, num_ids, max_pages, SIZES.ragged)
    kv_head = gl.program_id(0) % SIZES.num_kv_heads
    zeros = gl.zeros([_SEQUENCES], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    share = find_share(
        q, table, batch, gl.program_id(0) // SIZES.num_kv_heads, num_splits, False, SIZES.gqa_ratio, -1,
        SIZES.page_size, SIZES.ragged, BLOCKS.m, BLOCKS.n, False, False, zeros,
    )  # fmt: skip
    seq = gl.maximum(share.seq, 0)
    num_splits = gl.where(share.seq >= 0, share.num_splits, 0)
    kv_len = sequence_length(table, seq, share.seq >= 0, SIZES.page_size, SIZES.ragged)
    row = share.number * BLOCKS.m
    served = gl.minimum(share.q_len, q.max_len)
    last_token = gl.minimum((row + BLOCKS.m - 1) // SIZES.gqa_ratio, served - 1)
    num_tiles = gl.cdiv(gl.maximum(kv_len - share.q_len + last_token + 1, 0), BLOCKS.n)
    parts = gl.maximum(num_splits, 1)
    task = TallTask(
        seq, kv_head, share.q_start, share.q_len, served * SIZES.gqa_ratio, row, kv_len,
        gl.where(num_splits > 0, share.split * num_tiles // parts, 0),
        gl.where(num_splits > 0, (share.split + 1) * num_tiles // parts, 0),
        share.first_item * SIZES.num_kv_heads + kv_head, share.step * SIZES.num_kv_heads, share.split,
        num_splits,
    )  # fmt: skip
    io = Rows(
        q.ptr, q.token, q.head, out.ptr, out.lse, out.sinks, out.token, out.head, out.lse_token,
        q_descale=q.descale, o_scale=out.scale,
    )  # fmt: skip
    attend_task(
        io, cache.k, cache.v, cache.k_descale, cache.v_descale, table, workspace, task, qk_scale, out_scale,
        1, SIZES, K, V, RULES, BLOCKS, True,
    )  # fmt: skip
