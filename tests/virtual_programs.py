"""Programs for a GPU that know nothing of narrowkv: vector addition, softmax of rows, an autotuned matmul.

`test_install.py` runs this file on the virtual GPU of an environment with torch, Triton and two wheels.
"""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl

SIZE = 512  # rows, columns and depth of the matmul


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=inside) + tl.load(y_ptr + at, mask=inside), mask=inside)


def add() -> None:
    """98,432 numbers, which no block divides."""
    x, y = torch.randn(2, 98_432, device="cuda")
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK=1024)
    assert torch.equal(out, x + y)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=-float("inf"))
        powers = tl.exp(x - tl.max(x, 0))
        tl.store(out_ptr + row * columns + at, powers / tl.sum(powers, 0), mask=at < columns)


def softmax() -> None:
    """1,823 rows of 781 columns, several rows a program."""
    x = torch.randn(1823, 781, device="cuda")
    out = torch.empty_like(x)
    softmax_kernel[(304,)](x, out, *x.shape, BLOCK=1024, STAGES=2, num_warps=8)
    torch.testing.assert_close(out, torch.softmax(x, 1))


@triton.autotune(
    [
        triton.Config({"M": m, "N": n, "K": k, "GROUP": group}, num_warps=warps, num_stages=2)
        for m, n, k, group, warps in (
            (256, 256, 16, 6, 8), (128, 256, 16, 6, 8), (256, 128, 32, 4, 8), (128, 128, 32, 8, 8),
            (64, 128, 32, 1, 4), (64, 64, 32, 4, 4), (32, 64, 64, 8, 4), (128, 32, 64, 8, 4),
        )
    ],
    key=["size"],
)  # fmt: skip
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, size,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Square matrices; GROUP rows of tiles run side by side."""
    down, right = tl.cdiv(size, M), tl.cdiv(size, N)
    tile_m, tile_n = tl.swizzle2d(tl.program_id(0) // right, tl.program_id(0) % right, down, right, GROUP)
    m, n, k = tile_m * M + tl.arange(0, M), tile_n * N + tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, size, K):
        a = tl.load(a_ptr + m[:, None] * size + start + k[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * size + n[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + m[:, None] * size + n[None, :], total.to(c_ptr.dtype.element_ty))


def matmul() -> None:
    """Every configuration is launched, and the best one's result compared."""
    a, b = torch.randn(2, SIZE, SIZE, device="cuda").half()
    c = torch.empty_like(a)
    matmul_kernel[lambda meta: (triton.cdiv(SIZE, meta["M"]) * triton.cdiv(SIZE, meta["N"]),)](a, b, c, SIZE)
    assert len(matmul_kernel.configs_timings) == len(matmul_kernel.configs)
    torch.testing.assert_close(c.float(), a.float() @ b.float(), atol=1e-2, rtol=2**-10)


if __name__ == "__main__":
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), triton.runtime.driver.active.get_current_target().arch)
    for program in (add, softmax, matmul):
        started = time.process_time()
        program()
        print(f"{program.__name__}: {time.process_time() - started:.1f} s of CPU time")
