"""Cases for `virtual-gpu watch` that released versions of Triton change: results, spills, LDS, times.

Each is a small kernel of the form that a public report names.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HEAD_DIM, PAGE, TOKENS = 512, 16, 256


@gluon.jit
def copy_masked(x_ptr, out_ptr, n, BLOCK: gl.constexpr):
    """Copies n numbers through LDS; the rest of the block is -1."""
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [4], [0])
    offsets = gl.arange(0, BLOCK, layout=layout)
    shared = gl.allocate_shared_memory(gl.float32, [BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shared.store(gl.full([BLOCK], 7.0, gl.float32, layout=layout))
    gl.amd.cdna4.async_copy.buffer_load_to_shared(shared, x_ptr, offsets, mask=offsets < n, other=-1.0)
    gl.amd.cdna4.async_copy.commit_group()
    gl.amd.cdna4.async_copy.wait_group(0)
    gl.store(out_ptr + offsets, shared.load(layout))


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, o_ptr, table_ptr, num_tokens,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Causal attention of BLOCK_M queries over pages of keys, one head wide."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=rows[:, None] < num_tokens, other=0.0)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first in range(0, tl.minimum(num_tokens, (tl.program_id(0) + 1) * BLOCK_M), BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        pages = tl.load(table_ptr + keys // PAGE, mask=keys < num_tokens, other=0).to(tl.int64)
        slots = pages * PAGE * HEAD_DIM + (keys % PAGE) * HEAD_DIM
        k = tl.load(k_ptr + slots[None, :] + dims[:, None], mask=keys[None, :] < num_tokens, other=0.0)
        v = tl.load(v_ptr + slots[:, None] + dims[None, :], mask=keys[:, None] < num_tokens, other=0.0)
        scores = tl.dot(q, k) / HEAD_DIM**0.5
        scores = tl.where(keys[None, :] <= rows[:, None], scores, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.exp2((scores - new[:, None]) * 1.4426950408889634)
        factor = tl.exp2((maximum - new) * 1.4426950408889634)
        total = total * factor + tl.sum(p, 1)
        acc = acc * factor[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc)
        maximum = new
    o = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + rows[:, None] * HEAD_DIM + dims[None, :], o, mask=rows[:, None] < num_tokens)


def _attention_inputs():
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(TOKENS, HEAD_DIM, generator=generator).bfloat16() for _ in range(3))


def _attention(stages: int) -> torch.Tensor:
    q, k, v = (x.cuda() for x in _attention_inputs())
    out = torch.empty_like(q)
    table = torch.arange(TOKENS // PAGE, dtype=torch.int32, device="cuda")
    attend[(TOKENS // 64,)](
        q, k, v, out, table, TOKENS, BLOCK_M=64, BLOCK_N=64, HEAD_DIM=HEAD_DIM, PAGE=PAGE,
        num_warps=4, num_stages=stages, waves_per_eu=1,
    )  # fmt: skip
    return out


def case_masked_copy():
    """triton-lang/triton#11256: lanes that the mask leaves out keep what was in LDS, not `other`."""
    if "gfx950" not in torch.cuda.get_device_properties(0).gcnArchName:
        return None  # MI300X has no such copy
    x, out = torch.arange(512.0, device="cuda"), torch.empty(512, device="cuda")
    copy_masked[(1,)](x, out, 300, BLOCK=512, num_warps=4)
    return out


def expected_masked_copy():
    x = torch.arange(512.0)
    return torch.where(x < 300, x, -1.0)


def case_wide_attention():
    """ROCm/aiter#4137, sgl-project/sglang#34741: attention over wide heads spills and takes much longer."""
    return _attention(stages=1)


def expected_wide_attention():
    q, k, v = (x.double() for x in _attention_inputs())
    scores = (q @ k.T / math.sqrt(HEAD_DIM)).masked_fill(
        torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf
    )
    return torch.softmax(scores, -1) @ v


def case_pipelined_attention():
    """triton-lang/triton#9087: a pipeline of two stages has one more buffer in LDS, and does not fit."""
    return _attention(stages=2)
