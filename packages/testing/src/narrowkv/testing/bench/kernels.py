"""Kernels that measure how fast memory can be read, and that probe the compiler."""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: its error says how to get Triton
import triton
import triton.language as tl


@triton.jit
def _read_kernel(x_ptr, out_ptr, blocks, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    # Programs take blocks in turn; the start is 64-bit because the buffer is larger than 2 GiB.
    pointers = x_ptr + program.to(tl.int64) * BLOCK + offsets
    for _ in tl.range(program, blocks, STRIDE, num_stages=4):
        total += tl.load(pointers)  # [BLOCK]
        pointers += STRIDE * BLOCK
    tl.store(out_ptr + program, tl.sum(total, 0))


@triton.jit
def _masked_sum_kernel(x_ptr, o_ptr, passes, keep, begin, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(passes):
        # The offset of a pass is the same in all lanes, and falls.
        x = tl.load(x_ptr + (begin - step * BLOCK) + lanes, mask=lanes < keep, other=0.0)  # [BLOCK]
        total += x
    tl.store(o_ptr + lanes, total)
