"""Device helpers (`@triton.jit`) that write rows of the output, of lse, and partial results of splits."""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl

from narrowkv.runtime.attention.softmax import natural_lse, output_share


@triton.jit
def store_partial(workspace, slot, acc, m, l, row_mask, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Workspace layout: acc [slot, BLOCK_M, BLOCK_D], ml [slot, 2, BLOCK_M]; slot = (unit, head program)."""
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    part = slot * (BLOCK_M * BLOCK_D) + r[:, None] * BLOCK_D + d[None, :]
    tl.store(workspace.acc + part, acc, mask=row_mask[:, None])
    tl.store(workspace.ml + slot * (2 * BLOCK_M) + r, m)
    tl.store(workspace.ml + slot * (2 * BLOCK_M) + BLOCK_M + r, l)


@triton.jit
def output_rows(sinks_ptr, acc, m, l, out_scale, heads, row_mask, HAS_SINKS: tl.constexpr):
    """Rows of O: acc / (l + sink), times `out_scale`."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads, mask=row_mask, other=float("-inf")).to(tl.float32)
        share = output_share(m, l, sink)
    else:
        share = tl.where(l == 0.0, 0.0, 1.0 / l)
    return acc * (share * out_scale)[:, None]


@triton.jit
def write_lse(lse_ptr, m, l, heads, tokens, row_mask, stride_lse):
    """The natural-log lse of rows, which leaves the sink out."""
    tl.store(lse_ptr + tokens * stride_lse + heads, natural_lse(m, l), mask=row_mask)


@triton.jit
def write_rows(o_ptr, lse_ptr, sinks_ptr, acc, m, l, out_scale, heads, tokens, row_mask, d,
                stride_ot, stride_oh, stride_lse,
                HEAD_DIM: tl.constexpr, HAS_SINKS: tl.constexpr, WRITE_LSE: tl.constexpr):  # fmt: skip
    """Rows of O and of lse into memory."""
    o = output_rows(sinks_ptr, acc, m, l, out_scale, heads, row_mask, HAS_SINKS)
    o_off = tokens[:, None] * stride_ot + heads[:, None] * stride_oh + d[None, :]
    tl.store(o_ptr + o_off, o.to(o_ptr.dtype.element_ty), mask=row_mask[:, None] & (d < HEAD_DIM)[None, :])
    if WRITE_LSE:
        write_lse(lse_ptr, m, l, heads, tokens, row_mask, stride_lse)
