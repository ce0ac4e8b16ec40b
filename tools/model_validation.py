"""Published measurements of plain Triton kernels beside what the timing model says of kernels like them.

The kernels below were written for this comparison; each has the tiles, warps and stages of the published one.
None of the points was used to fit the model. Where the publisher's tuner chose among tiles, each is modelled
and the fastest counts. Prints the table of docs/amd-timing.md:

    python tools/model_validation.py
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# Triton's decorators and the kernels under them have no types.

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from narrowkv.runtime.launch import LaunchOptions
from narrowkv.testing.model import ModelExecutor, Scale

_HBM_SHARE = 0.1  # tiles of one row of tiles read the same operands


@triton.jit
def _keys(q, acc, m, l, k_ptr, v_ptr, first, last, rows, length, D: tl.constexpr, BN: tl.constexpr,
          MASKED: tl.constexpr):  # fmt: skip
    for start in range(first, last, BN):
        keys = start + tl.arange(0, BN)
        k = tl.load(k_ptr + keys[None, :] * D + tl.arange(0, D)[:, None])
        s = tl.dot(q, k)
        if MASKED:
            s = tl.where(rows[:, None] >= keys[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        factor = tl.exp2(m - new)
        l = l * factor + tl.sum(p, 1)
        v = tl.load(v_ptr + keys[:, None] * D + tl.arange(0, D)[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None])
        m = new
    return acc, m, l


@triton.jit
def _attention_kernel(q_ptr, k_ptr, v_ptr, o_ptr, length, scale, D: tl.constexpr, BM: tl.constexpr,
                      BN: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """Flash attention of one head over contiguous keys: bf16, base-2 exponentials."""
    head = tl.program_id(1).to(tl.int64) * length * D
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    q = (tl.load(q_ptr + head + at) * scale).to(tl.bfloat16)
    acc = tl.zeros([BM, D], tl.float32)
    m, l = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    diagonal = tl.program_id(0) * BM
    seen = diagonal if CAUSAL else length
    k, v = k_ptr + head, v_ptr + head
    acc, m, l = _keys(q, acc, m, l, k, v, 0, seen, rows, length, D, BN, False)
    if CAUSAL:
        acc, m, l = _keys(q, acc, m, l, k, v, diagonal, diagonal + BM, rows, length, D, BN, True)
    tl.store(o_ptr + head + at, (acc / l[:, None]).to(tl.bfloat16))


@triton.jit
def _matmul_kernel(a_ptr, b_ptr, c_ptr, K, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """C = A B: A row by row, B stored transposed."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :])
        b = tl.load(b_ptr + n[None, :] * K + k[:, None])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc.to(tl.bfloat16))


@dataclass(frozen=True)
class Point:
    """One published measurement and the model's answer, in TFLOP/s."""

    row: str
    what: str
    measured: float
    modelled: float
    block: str

    @property
    def error(self) -> float:
        """Of the model, relative."""
        return self.modelled / self.measured - 1


def attention(target: str, length: int, causal: bool, head_dim: int, block_n: int) -> float:
    """TFLOP/s of batch 16 with 16 heads."""
    traced = 2048
    executor = ModelExecutor(target, _HBM_SHARE)
    more = length / traced
    executor.scale = Scale(workgroups=256 * more, passes=more)
    q, k, v, o = (torch.zeros(traced, head_dim, dtype=torch.bfloat16) for _ in range(4))
    executor.launch(
        _attention_kernel, (traced // 128, 1), (q, k, v, o, traced, 0.1),
        {"D": head_dim, "BM": 128, "BN": block_n, "CAUSAL": causal},
        LaunchOptions(num_warps=4, num_stages=1),
    )  # fmt: skip
    flops = 4.0 * 256 * length**2 * head_dim / (2 if causal else 1)
    return flops / executor.modelled[0].prediction.seconds / 1e12


def matmul(target: str, size: int) -> float:
    """TFLOP/s of a square product."""
    traced, edge = 1024, 512
    executor = ModelExecutor(target, _HBM_SHARE)
    executor.scale = Scale(workgroups=(size / edge) ** 2, passes=size / traced)
    a, b, c = (torch.zeros(edge, n, dtype=torch.bfloat16) for n in (traced, traced, edge))
    executor.launch(
        _matmul_kernel, (2, 2), (a, b, c, traced, edge), {"BM": 256, "BN": 256, "BK": 64},
        LaunchOptions(num_warps=8, num_stages=2, matrix_instr_nonkdim=16),
    )  # fmt: skip
    return 2.0 * size**3 / executor.modelled[0].prediction.seconds / 1e12


# Row of the validation set, target, causal, head_dim, TFLOP/s measured at 1k, 2k, 4k, 8k, 16k.
_ATTENTION = (
    ("22", "gfx942", True, 128, (138.6, 216.1, 260.5, 316.9, 364.0)),
    ("22", "gfx942", True, 64, (103.1, 173.4, 230.7, 271.2, 301.1)),
    ("25", "gfx950", False, 128, (687, 839, 923, 974, 988)),
    ("25", "gfx950", True, 128, (333, 435, 482, 653, 750)),
)
_MATMUL = ("27", "gfx950", (59.4, 270.5, 934.4, 1090.5, 1086.3))


def points() -> Iterator[Point]:
    """Every point, measured and modelled."""
    for row, target, causal, head_dim, measured in _ATTENTION:
        for k, rate in enumerate(measured):
            length = 1024 << k
            tried = {n: attention(target, length, causal, head_dim, n) for n in (32, 64, 128)}
            best = max(tried, key=tried.__getitem__)
            mask = "causal" if causal else "no mask"
            what = f"{target}, attention, D {head_dim}, {mask}, {length}"
            yield Point(row, what, rate, tried[best], f"128 x {best}")
    row, target, measured = _MATMUL
    for k, rate in enumerate(measured):
        size = 1024 << k
        yield Point(row, f"{target}, bf16 product, {size}", rate, matmul(target, size), "256 x 256 x 64")


def main() -> None:
    """Prints the table."""
    print("| row | kernel | tile | TFLOP/s measured | model | error |\n|---|---|---|---|---|---|")
    found = []
    for point in points():
        found.append(point)
        cells = (point.row, point.what, point.block, f"{point.measured:g}", f"{point.modelled:.0f}")
        print(f"| {' | '.join(cells)} | {point.error:+.0%} |", flush=True)
    errors = [abs(point.error) for point in found]
    worst = max(found, key=lambda point: abs(point.error))
    within = sum(error <= 0.2 for error in errors)
    print(
        f"\nmodel: median error {statistics.median(errors):.0%}, {within} of {len(found)} within 20%; "
        f"worst {worst.error:+.0%} ({worst.what})"
    )


if __name__ == "__main__":
    main()
