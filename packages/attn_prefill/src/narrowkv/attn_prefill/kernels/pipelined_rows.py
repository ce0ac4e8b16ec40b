"""Rows of Q and O of Hopper's prefill, as lines of memory and as a warpgroup holds products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
)

from narrowkv.attn_prefill.kernels import rows
from narrowkv.paged_cache.kernels import outputs
from narrowkv.runtime.attention import results
from narrowkv.runtime.launch.gluon import in_gluon

rows_of = in_gluon(rows.rows_of)
shifted_maximum = in_gluon(rows.shifted_maximum)
sum_of_held_keys = in_gluon(rows.sum_of_held_keys)
output_rows = in_gluon(results.output_rows)
write_lse = in_gluon(results.write_lse)
narrow_output = in_gluon(outputs.narrow_output)


@gluon.constexpr_function
def product_layout(columns):
    """How a warpgroup holds a product of 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def line_layout(head_dim):
    """How a warpgroup holds rows that come from memory, or go there, as whole lines."""
    return gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [4, 1], [1, 0])


@gluon.jit
def opaque_copy(x):
    """The int32 `x` as a number that the compiler knows nothing of: it computes again what depends on it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def lines_of(x, tile, kv_head, part, GQA_RATIO: gl.constexpr, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Where a tile's part of ROWS rows lies in Q or O, in whole lines, and which of them are there.

    Counted from the part's first token everything but where that lies is small, and 32 bits do.
    """
    LINES: gl.constexpr = line_layout(HEAD_DIM)
    first = part * ROWS
    token = first // GQA_RATIO
    # Where the ratio divides ROWS, this is 0, and all that follows of it would be kept.
    rows = (opaque_copy(first - token * GQA_RATIO) + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))).to(
        gl.uint32
    )
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LINES))
    begin = (tile.q_start + token).to(gl.int64) * x.token + (kv_head * GQA_RATIO).to(gl.int64) * x.head
    at = (rows // GQA_RATIO).to(gl.int32) * x.token + (rows % GQA_RATIO).to(gl.int32) * x.head
    left = gl.where(tile.seq >= 0, gl.maximum(tile.q_len - token, 0) * GQA_RATIO, 0)
    return x.ptr + begin + (at[:, None] + d[None, :]), (rows.to(gl.int32) < left)[:, None]


@gluon.jit
def copy_queries(q, tile, kv_head, there, q_tile, half, GQA_RATIO: gl.constexpr):
    """Starts to copy the rows of a tile that exists into shared memory; rows past the last are undefined."""
    at, mask = lines_of(q, tile, kv_head, tile.number * 2 + half, GQA_RATIO, q_tile.shape[0], q_tile.shape[1])
    async_copy.async_load(q_tile, at, mask=mask & there)
    async_copy.commit_group()


@gluon.jit
def half_rows(tile, kv_head, half, GQA_RATIO: gl.constexpr, ROWS: gl.constexpr):
    """Token, head and mask of a half tile's rows."""
    q_len = gl.where(tile.seq >= 0, tile.q_len, 0)
    return rows_of(tile.q_start, q_len, opaque_copy(tile.number * 2 + half), kv_head, GQA_RATIO, ROWS)


@gluon.jit
def write_half_tile(
    q, out, acc, m, l, o_scale, tile, kv_head, half,
    NUM_KV_HEADS: gl.constexpr, GQA_RATIO: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    HAS_SINKS: gl.constexpr, WRITE_LSE: gl.constexpr,
):  # fmt: skip
    """O and lse of a half tile's rows."""
    ROWS: gl.constexpr = acc.shape[0]
    HEAD_DIM: gl.constexpr = acc.shape[1]
    tokens, heads, row_mask, within = half_rows(tile, kv_head, half, GQA_RATIO, ROWS)
    l = sum_of_held_keys(l, tile, within, WINDOW_RIGHT)
    m = shifted_maximum(m, q.shift, tokens, heads, row_mask, NUM_KV_HEADS * GQA_RATIO, False)
    o = output_rows(out.sinks, acc, m, l, o_scale, heads, row_mask, HAS_SINKS)
    if WRITE_LSE:
        write_lse(out.lse, m, l, heads, tokens, row_mask, out.lse_token)
    o = gl.convert_layout(narrow_output(o, out.ptr, out.scale), line_layout(HEAD_DIM))
    at, mask = lines_of(out, tile, kv_head, tile.number * 2 + half, GQA_RATIO, ROWS, HEAD_DIM)
    gl.store(at, o, mask=mask)
