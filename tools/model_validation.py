"""Published measurements beside what the timing model says of kernels like them, for docs/amd-timing.md.

Two sets of kernels, both written for this comparison from published configurations:

- matrix products in Gluon (`model_kernels.py`), rows 1 to 14 and 16 to 19: share of clocks with a busy matrix
  unit, clocks of a pass, or bytes per second;
- attention and a matrix product in plain Triton (below), rows 22, 25 and 27. Where the publisher's tuner
  chose among tiles, each is modelled and the fastest counts.

Run one or both:

    python tools/model_validation.py products attention
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# Triton's decorators and the kernels under them have no types.

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import model_kernels as gluon_kernels  # type: ignore[import-not-found]
import model_layouts as layouts  # type: ignore[import-not-found]
import numpy as np
import torch
import triton
import triton.language as tl

from narrowkv.cdna_emulator.timing import MACHINES, Prediction, Reads, cache_shares, until_the_last_ends
from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.launch.compiler import compile_launch
from narrowkv.runtime.targets import get_target
from narrowkv.testing.model import ModelExecutor, Modelled, Scale

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


_HEADS = 256  # batch 16 with 16 heads
_BLOCK_M = 128


def _reads(length: int, causal: bool, head_dim: int) -> Reads:
    """The first 64 heads of the publishers' grid, which runs fastest over the tiles of rows of a head."""
    tiles = length // _BLOCK_M
    number = np.arange(64 * tiles)
    last = number % tiles + 1 if causal else np.full(len(number), tiles)
    return Reads(number // tiles, np.zeros_like(number), last, 2 * 2 * _BLOCK_M * head_dim)


@cache
def _traced(target: str, causal: bool, head_dim: int, block_n: int) -> Modelled:
    """The last tile of rows of 2048 keys."""
    length = 2048
    executor = ModelExecutor(target, _HBM_SHARE)
    q, k, v, o = (torch.zeros(length, head_dim, dtype=torch.bfloat16) for _ in range(4))
    executor.launch(
        _attention_kernel, (length // _BLOCK_M, 1), (q, k, v, o, length, 0.1),
        {"D": head_dim, "BM": _BLOCK_M, "BN": block_n, "CAUSAL": causal},
        LaunchOptions(num_warps=4, num_stages=1),
    )  # fmt: skip
    return executor.modelled[0]


def attention(target: str, length: int, causal: bool, head_dim: int, block_n: int) -> float:
    """TFLOP/s of batch 16 with 16 heads.

    Every tile of rows takes the passes that its number asks for, and its XCD is its number modulo 8: under a
    causal mask XCDs have unequal work where heads have few tiles.
    """
    machine, traced = MACHINES[target], _traced(target, causal, head_dim, block_n)
    held = traced.full.workgroups_per_unit
    p = traced.full_with(cache_shares(_reads(length, causal, head_dim), machine, workgroups_per_unit=held))
    assert p.loop is not None
    tiles = length // _BLOCK_M
    passes = np.arange(tiles) * _BLOCK_M / block_n if causal else np.full(tiles, length / block_n)
    clocks = np.tile(p.loop.first_pass + p.loop.after + passes * p.loop.clocks, _HEADS)
    slots = held * machine.compute_units
    total = until_the_last_ends(clocks, slots, machine.xcds)
    seconds = total / machine.clock(p.matrix_share * float(clocks.sum()) / (slots * total))
    return 4.0 * _HEADS * length**2 * head_dim / (2 if causal else 1) / seconds / 1e12


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


@dataclass(frozen=True)
class Product:
    """One published matrix product C = A B^T.

    Attributes:
        row, what: of the validation set, and the kernel.
        kernel: one of `model_kernels`; constants: its compile-time arguments.
        k: the depth that was measured; workgroups: their number.
        share: measured share of the loop's clocks with a busy matrix unit; clocks: a pass's, if measured.
        rate: measured TFLOP/s.
        vgprs: of the published build.
        fitted: whether a parameter of the model was fitted to its share.
        target, warps, block_k, dtype: configuration.
    """

    row: str
    what: str
    kernel: Any
    constants: dict[str, Any]
    k: int
    workgroups: int
    share: float
    rate: float | None
    vgprs: int | None = None
    clocks: float | None = None
    fitted: bool = False
    target: str = "gfx950"
    warps: int = 4
    dtype: torch.dtype = field(default=torch.float16)

    def predict(self, hbm_share: float = _HBM_SHARE, passes: int = 8) -> tuple[int, Prediction]:
        """VGPRs here, and the prediction from so many passes of one workgroup."""
        sizes = self.constants
        traced = passes * sizes["BK"]
        a, b = (torch.zeros(sizes[name], traced).to(self.dtype) for name in ("BM", "BN"))
        c = torch.zeros(sizes["BM"], sizes["BN"], dtype=torch.float16)
        options = LaunchOptions(num_warps=self.warps, num_stages=1)
        arguments = (self.kernel, (1, 1), (a, b, c, traced, sizes["BN"]), sizes, options)
        executor = ModelExecutor(self.target, hbm_share)
        executor.scale = Scale(workgroups=self.workgroups, passes=self.k / traced)
        executor.launch(*arguments)
        registers = compile_launch(get_target(self.target), *arguments).registers
        assert registers.vgpr_spills == 0, f"{self.what} spills"
        return registers.vgprs, executor.modelled[0].prediction


def _gfx950(
    warps: tuple[int, int], tile: tuple[int, int, int], halves: tuple[int, int], fp8: bool = False
) -> dict[str, Any]:
    """Constants of a kernel on gfx950; `halves` are the parts that A's rows and B's columns are copied in."""
    m, n, k = tile
    mma = layouts.mfma_layout(4, 128 if fp8 else 32, warps)
    part = (m // halves[0], n // halves[1], k)
    return {
        "BM": m, "BN": n, "BK": k, "MMA": mma,
        **layouts.padded_layouts(warps[0] * warps[1], mma, part, fp8),
    }  # fmt: skip


def products() -> Iterator[Product]:
    """Rows 1 to 12 (MI355X) and 16 and 19 (MI300X)."""
    k = gluon_kernels
    tile, four, eight = (256, 256, 64), (2, 2), (2, 4)
    whole = _gfx950(four, tile, (1, 1))
    raw = {**whole, **layouts.raw_layouts(4)}
    plain = {name: value for name, value in raw.items() if name not in ("SA", "SB")}
    fp16: dict[str, Any] = {"WIDTH": 8, "FORMAT": "fp16"}
    yield Product("1", "no load ahead", k.registers_kernel, plain, 8192, 256, 0.25, 541)
    yield Product("2", "direct to LDS, bank conflicts", k.async_kernel, {**raw, "AHEAD": 0}, 8192, 256, 0.33,
                  673, 358)  # fmt: skip
    yield Product("3", "padded LDS", k.async_kernel, {**whole, "AHEAD": 0}, 8192, 256, 0.4166, 755, 420)
    yield Product("4", "copied ahead", k.async_kernel, {**whole, "AHEAD": 1}, 8192, 256, 0.5187, 964, 362)
    yield Product("5", "read ahead", k.async_kernel, {**whole, "AHEAD": 2}, 8192, 256, 0.5863, 1134, 452)
    half_b = {**_gfx950(four, tile, (1, 2)), **fp16, "HALVES_OF_A": 1}
    yield Product("6", "B in halves", k.sliced_kernel, half_b, 8192, 256, 0.6499, 1226, 496)
    quarters = {**_gfx950(four, tile, (2, 2)), **fp16, "HALVES_OF_A": 2}
    yield Product("7", "A and B in halves", k.sliced_kernel, quarters, 8192, 256, 0.6892, 1251, 496)
    for m, n, share, rate, vgprs in _TILES:
        constants = {**_gfx950(four, (m, n, 64), (2, 2)), **fp16, "HALVES_OF_A": 2}
        yield Product("8", f"the same, {m} x {n}", k.sliced_kernel, constants, 8192, 256, share, rate, vgprs)
    groups = {**_gfx950(eight, tile, (2, 2)), **fp16}
    for depth, share, rate in ((8192, 0.998, 1437), (16384, 0.998, 1485), (32768, 0.843, 1291)):
        yield Product("10", f"8 waves in two groups, K {depth}", k.two_groups_kernel, groups, depth, 256,
                      share, rate, 242, fitted=depth == 8192, warps=8)  # fmt: skip
    fp8: dict[str, Any] = {"WIDTH": 16, "FORMAT": "e5m2"}
    deep, e5m2 = (256, 256, 128), torch.float8_e5m2
    yield Product("11", "FP8, A and B in halves", k.sliced_kernel,
                  {**_gfx950(four, deep, (2, 2), True), **fp8, "HALVES_OF_A": 2}, 16384, 256, 0.611, 2723,
                  512, dtype=e5m2)  # fmt: skip
    yield Product("12", "FP8, 8 waves in two groups", k.two_groups_kernel,
                  {**_gfx950(eight, deep, (2, 2), True), **fp8}, 16384, 256, 0.962, 3151, 256, warps=8,
                  dtype=e5m2)  # fmt: skip
    sizes: dict[str, Any] = {"BM": 256, "BN": 256, "BK": 64}
    one = {**sizes, "MMA": layouts.mfma_layout(3, 16, four), **layouts.swizzled_layouts(4)}
    yield Product("16", "stored to LDS", k.stored_kernel, one, 8256, 304, 0.697, 561, 512, 5877,
                  target="gfx942")  # fmt: skip
    for rows, what, clocks, rate_or_none in ((1, "8 waves in two groups", 4180, 572),
                                             (2, "the same, LDS conflicts", 4640, None)):  # fmt: skip
        two = {**sizes, "MMA": layouts.mfma_layout(3, 16, eight), **layouts.swizzled_layouts(8, rows)}
        yield Product("19", what, k.stored_two_groups_kernel, two, 8256, 304, 4096 / clocks, rate_or_none,
                      240, clocks, fitted=rows == 1, target="gfx942", warps=8)  # fmt: skip


# M, N, share, TFLOP/s and VGPRs of row 8.
_TILES = (
    (256, 128, 0.634, 1117, 264), (256, 64, 0.438, 738, 254), (128, 256, 0.660, 1116, 242),
    (128, 128, 0.557, 954, 142), (128, 64, 0.401, 620, 100), (64, 256, 0.494, 732, 234),
    (64, 128, 0.427, 607, 92), (64, 64, 0.275, 367, 60),
)  # fmt: skip
# GB/s of row 14 at 32, 64, ... 256 workgroups.
_STREAMS = (1529, 2864, 4067, 4580, 4828, 5628, 6198, 6442)


def show_products() -> None:
    """Prints the tables of rows 1 to 19."""
    print("| row | target | kernel | VGPRs published, here | busy, measured | model | error | TFLOP/s | "
          "model | error |\n|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    shares: list[tuple[Product, float]] = []
    rates: list[tuple[Product, float]] = []
    for point in products():
        vgprs, prediction = point.predict()
        shares.append((point, prediction.matrix_share / point.share - 1))
        rate = prediction.flops_per_second / 1e12
        cells = [point.row, point.target, point.what, f"{point.vgprs or '-'}, {vgprs}"]
        if point.clocks and prediction.loop:
            cells += [f"{point.clocks:.0f} clocks", f"{prediction.loop.clocks:.0f}"]
        else:
            cells += [f"{point.share:.1%}", f"{prediction.matrix_share:.1%}"]
        cells += [f"{shares[-1][1]:+.0%}{' (fitted)' if point.fitted else ''}"]
        if point.rate:
            rates.append((point, rate / point.rate - 1))
            cells += [f"{point.rate:g}", f"{rate:.0f}", f"{rates[-1][1]:+.0%}"]
        print(f"| {' | '.join(cells + ['-'] * (10 - len(cells)))} |", flush=True)
    free = [(point, error) for point, error in shares if not point.fitted]
    _summary("busy share or clocks, points not fitted", free, 0.15)
    _summary("TFLOP/s by the clock model", rates, 0.20)
    ours = [(point, point.share * (1 + error)) for point, error in shares if point.target == "gfx950"]
    pairs = [(a, b) for i, a in enumerate(ours) for b in ours[i + 1 :] if abs(a[0].share - b[0].share) > 0.02]
    right = sum((a[0].share < b[0].share) == (a[1] < b[1]) for a, b in pairs)
    print(f"order: right in {right} of {len(pairs)} pairs on gfx950 whose shares differ by over 2 points")


def _summary(what: str, errors: Sequence[tuple[Product, float]], bound: float) -> None:
    sizes = [abs(error) for _, error in errors]
    point, worst = max(errors, key=lambda item: abs(item[1]))
    print(f"\n{what}: median error {statistics.median(sizes):.0%}, {sum(s <= bound for s in sizes)} of "
          f"{len(sizes)} within {bound:.0%}; worst {worst:+.0%} (row {point.row}, {point.what})")  # fmt: skip


def show_streams() -> None:
    """Prints row 14: 32 x 256 tiles with 8192 of K, whose B comes from HBM."""
    mma = layouts.mfma_layout(4, 32, (1, 4))
    constants = {
        "BM": 32, "BN": 256, "BK": 64, "MMA": mma, "AHEAD": 1,
        **layouts.padded_layouts(4, mma, (32, 256, 64)),
    }  # fmt: skip
    print("\n| row 14: workgroups | GB/s measured | model | error |\n|---|---|---|---|")
    errors = []
    for index, measured in enumerate(_STREAMS):
        count = 32 * (index + 1)
        point = Product("14", "", gluon_kernels.async_kernel, constants, 8192, count, 1.0, None)
        rate = 8192 * 2 * 256 * count / point.predict(256 / 288, passes=32)[1].seconds / 1e9
        errors.append(abs(rate / measured - 1))
        print(f"| {count} | {measured} | {rate:.0f} | {rate / measured - 1:+.0%} |", flush=True)
    print(f"\nrow 14 (the latency of HBM was fitted to it): median error {statistics.median(errors):.0%}")


def _series(point: Point) -> str:
    """Target and mask: what a factor is fitted to."""
    kept = ("gfx942", "gfx950", "causal", "no mask")
    return ", ".join(part for part in point.what.split(", ") if part in kept)


def show_attention() -> None:
    """Prints the published attention rates (rows 22, 25 and 27) beside the model's.

    The figures go to benchmarks/results/amd-attention.json.

    A factor for each target and mask is fitted to the first, third and fifth length of each series. Its error
    on the other lengths is reported: those had no part in it.
    """
    found = list(points())
    masked = [point for point in found if "attention" in point.what]
    fitted = [point for k, point in enumerate(masked) if k % 5 % 2 == 0]
    held_out = [point for k, point in enumerate(masked) if k % 5 % 2]
    factors = {
        series: statistics.median(p.measured / p.modelled for p in fitted if _series(p) == series)
        for series in sorted({_series(point) for point in masked})
    }
    after = [abs(p.modelled * factors[_series(p)] / p.measured - 1) for p in held_out]
    print("| row | kernel | tile | TFLOP/s measured | model | error |\n|---|---|---|---|---|---|")
    for point in found:
        cells = (point.row, point.what, point.block, f"{point.measured:g}", f"{point.modelled:.0f}")
        print(f"| {' | '.join(cells)} | {point.error:+.0%} |")
    summary = {
        "attention": statistics.median(abs(p.error) for p in masked),
        "products": statistics.median(abs(p.error) for p in found if p not in masked),
        "held_out": statistics.median(after), "held_out_worst": max(after),
    }  # fmt: skip
    print(f"\nmedian errors, and worst of the held-out points: {summary}; factors: {factors}")
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "amd-attention.json"
    body = {
        "command": "python tools/model_validation.py attention", "versions": {"triton": triton.__version__},
        "rows": [{**vars(p), "error": p.error} for p in found], "summary": summary, "factors": factors,
    }  # fmt: skip
    path.write_text(json.dumps(body, indent=1) + "\n")


def main(sets: Sequence[str]) -> None:
    """Prints the tables of "products", "attention" or, without names, of both."""
    if "products" in sets or not sets:
        show_products()
        show_streams()
    if "attention" in sets or not sets:
        show_attention()


if __name__ == "__main__":
    main(sys.argv[1:])
