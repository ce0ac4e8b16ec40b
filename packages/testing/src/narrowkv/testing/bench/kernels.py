"""The kernel that measures how fast memory can be read."""

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
