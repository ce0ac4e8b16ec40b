"""What the shipped configurations compile to for gfx942 and gfx950: no spills, the expected instructions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_decode.kernels import _paged_decode_kernel
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.quant.launch import compile_for
from narrowkv.quant.launch.artifact import CompiledArtifact

I32 = torch.int32
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


def _decode(
    target: str, fmt: str, *, page_size: int = 16, ratio: int = 12, clean: bool = True
) -> CompiledArtifact:
    """The attention kernel of the probe's shape, compiled by an ordinary call."""
    pages = 1024 // page_size
    cache = PagedKVCache.empty(4 * pages, page_size, 8, 128, format=fmt)
    cache = replace(cache, negative_zero_free=clean)
    table = PageTable.from_block_table(
        torch.arange(4 * pages, dtype=I32).view(4, pages),
        torch.full((4,), 1024, dtype=I32),
        page_size=page_size,
    )
    with compile_for(target) as artifacts:
        paged_decode(torch.zeros(4, 8 * ratio, 128, dtype=torch.bfloat16), cache, table)
    (attention,) = [a for a in artifacts if a.name == _paged_decode_kernel.__name__]
    return attention


def _issue_over_memory(artifact: CompiledArtifact, bytes_per_tile: int) -> float:
    """Static model: clocks of a CU for one tile's vector instructions, over clocks of HBM for its bytes."""
    figures = artifact.target.figures
    assert figures is not None
    loop = artifact.loop
    multiplies = loop.total("v_mul_lo", "v_mul_hi", "v_mad_u64")
    plain = loop.valu - loop.transcendental - multiplies
    clocks = (
        plain * figures.valu_clk
        + loop.transcendental * figures.transcendental_clk
        + multiplies * figures.int_mul_clk
    )
    issue = clocks * artifact.num_warps / figures.simds_per_unit
    return issue / (bytes_per_tile * figures.units * figures.clock_hz / figures.hbm_bytes_per_s)


# (target, format, whether narrowkv wrote the cache, key tile, matrix instruction, native convert or None)
SHIPPED = [
    ("gfx942", "fp8_e4m3fnuz", True, 32, "v_mfma_f32_16x16x16_f16", "v_cvt_pk_f32_fp8"),
    ("gfx942", "fp8_e4m3fn", True, 32, "v_mfma_f32_16x16x16_f16", "v_cvt_pk_f32_fp8"),
    ("gfx942", "fp8_e4m3fn", False, 64, "v_mfma_f32_16x16x16_f16", None),
    ("gfx950", "fp8_e4m3fn", True, 64, "v_mfma_f32_16x16x32_f16", "v_cvt_scalef32_pk_f16_fp8"),
]
IDS = [f"{t}-{f}-{'own' if c else 'foreign'}" for t, f, c, *_ in SHIPPED]


@pytest.mark.codegen_all
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("target", "fmt", "clean", "block_n", "mfma", "convert"), SHIPPED, ids=IDS)
def test_decode_at_ratio_12_neither_spills_nor_uses_scratch(
    target: str, fmt: str, clean: bool, block_n: int, mfma: str, convert: str | None, page_size: int
) -> None:
    code = _decode(target, fmt, page_size=page_size, clean=clean)
    assert code.registers.vgpr_spills == 0
    assert code.registers.sgpr_spills == 0
    assert code.registers.scratch_bytes == 0
    assert code.lds_bytes <= 64 * 1024
    assert code.waves_per_simd >= 1


@pytest.mark.skipif(
    TRITON < (3, 9), reason="instruction choice is asserted for Triton 3.9, the development version"
)
@pytest.mark.parametrize(("target", "fmt", "clean", "block_n", "mfma", "convert"), SHIPPED, ids=IDS)
def test_decode_at_ratio_12_is_bound_by_memory_and_uses_native_instructions(
    target: str, fmt: str, clean: bool, block_n: int, mfma: str, convert: str | None
) -> None:
    code = _decode(target, fmt, clean=clean)
    loop = code.loop
    # QK and PV of one tile: 2 * block_n * 128 * 16 multiply-adds, each product computed once.
    flops_each = {"v_mfma_f32_16x16x16_f16": 16 * 16 * 16, "v_mfma_f32_16x16x32_f16": 16 * 16 * 32}[mfma]
    assert loop.mnemonics[mfma] * flops_each == 2 * block_n * 128 * 16
    assert loop.mfma == loop.mnemonics[mfma]
    assert loop.mnemonics["buffer_load_dwordx4"] * 16 * 64 == 2 * block_n * 128, (
        "K and V come in 16-byte loads"
    )
    if convert is not None:
        # Each converts two elements a lane.
        assert (
            sum(n for name, n in loop.mnemonics.items() if name.startswith(convert)) * 2 * 64
            == 2 * block_n * 128
        )
    assert _issue_over_memory(code, 2 * block_n * 128) < 1.0


@pytest.mark.codegen_all
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("ratio", [1, 4, 8, 17])
def test_other_ratios_and_bf16_neither_spill_nor_use_scratch(target: str, ratio: int) -> None:
    for fmt in ("bf16", "fp8_e4m3fn"):
        code = _decode(target, fmt, ratio=ratio)
        assert (code.registers.vgpr_spills, code.registers.scratch_bytes) == (0, 0), fmt


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_append_neither_spills_nor_uses_scratch(target: str) -> None:
    cache = PagedKVCache.empty(4, 16, 8, 128, format="fp8_e4m3fn")
    new = torch.zeros(4, 8, 128, dtype=torch.bfloat16)
    with compile_for(target) as artifacts:
        append(cache, new, new, torch.arange(4, dtype=I32))
    (code,) = artifacts
    assert (code.registers.vgpr_spills, code.registers.scratch_bytes) == (0, 0)
    assert not bool(cache.k.view(torch.uint8).any()), "compiling writes nothing"
