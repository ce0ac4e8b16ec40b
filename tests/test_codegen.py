"""What the shipped configurations compile to for gfx942 and gfx950: no spills, the expected instructions."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_decode.cases import K8V4
from narrowkv.attn_decode.config import DecodeShape, choose_config
from narrowkv.attn_decode.kernels import _paged_decode_kernel
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable, Rope, append
from narrowkv.quant import KeyTransform
from narrowkv.runtime.launch import compile_for
from narrowkv.runtime.launch.artifact import CompiledArtifact
from narrowkv.runtime.targets import get_target
from narrowkv.runtime.toolchain import TRITON

pytestmark = pytest.mark.sampled(most=2)

I32 = torch.int32


def _decode(
    target: str,
    fmt: str | CacheFormat,
    *,
    page_size: int = 16,
    ratio: int = 12,
    head_dim: int = 128,
    scale_group: int | None = None,
    scale_format: str = "e8m0",
    kernel: str | None = None,
    q_dtype: torch.dtype = torch.bfloat16,
    q_len: int = 1,
    key_transform: KeyTransform | None = None,
    soft_cap: float = 0.0,
) -> CompiledArtifact:
    """The attention kernel of the probe's shape, compiled by an ordinary call."""
    pages = 1024 // page_size
    cache = PagedKVCache.empty(
        4 * pages, page_size, 8, head_dim, format=fmt, scale_group=scale_group, scale_format=scale_format
    )
    cache = replace(cache, key_transform=key_transform)
    table = PageTable.from_block_table(
        torch.arange(4 * pages, dtype=I32).view(4, pages),
        torch.full((4,), 1024, dtype=I32),
        page_size=page_size,
    )
    with compile_for(target) as artifacts:
        q = torch.zeros(4 * q_len, 8 * ratio, head_dim, dtype=q_dtype)
        plan = plan_decode(q, cache, table, kernel=kernel)
        paged_decode(q, cache, table, plan=plan, logits_soft_cap=soft_cap)
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


@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "fp4_e2m1"])
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_a_key_transform_stays_out_of_the_loop(target: str, fmt: str, soft_cap: float) -> None:
    moved = KeyTransform(torch.zeros(8, 128), torch.ones(8, 128))
    plain, code = (_decode(target, fmt, key_transform=t, soft_cap=soft_cap) for t in (None, moved))
    assert code.registers.vgpr_spills == code.registers.scratch_bytes == 0
    assert code.waves_per_simd == plain.waves_per_simd
    assert code.loop.mfma == plain.loop.mfma
    assert code.loop.valu <= 1.01 * plain.loop.valu


# (target, format, matrix instruction, native convert or None); 64 keys a tile
SHIPPED = [
    ("gfx942", "fp8_e4m3fnuz", "v_mfma_f32_16x16x16_f16", "v_cvt_pk_f32_fp8"),
    ("gfx942", "fp8_e4m3fn", "v_mfma_f32_16x16x16_f16", None),
    ("gfx950", "fp8_e4m3fn", "v_mfma_f32_16x16x32_f16", "v_cvt_scalef32_pk_f16_fp8"),
]
IDS = [f"{target}-{fmt}" for target, fmt, *_ in SHIPPED]
BLOCK_N = 64


@pytest.mark.codegen_all
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("target", "fmt", "mfma", "convert"), SHIPPED, ids=IDS)
def test_decode_at_ratio_12_neither_spills_nor_uses_scratch(
    target: str, fmt: str, mfma: str, convert: str | None, page_size: int
) -> None:
    code = _decode(target, fmt, page_size=page_size)
    assert code.registers.vgpr_spills == 0
    assert code.registers.sgpr_spills == 0
    assert code.registers.scratch_bytes == 0
    assert code.lds_bytes <= 64 * 1024
    assert code.waves_per_simd >= 1


@pytest.mark.skipif(
    TRITON < (3, 9), reason="instruction choice is asserted for Triton 3.9, the development version"
)
@pytest.mark.parametrize(("target", "fmt", "mfma", "convert"), SHIPPED, ids=IDS)
def test_decode_at_ratio_12_is_bound_by_memory_and_uses_native_instructions(
    target: str, fmt: str, mfma: str, convert: str | None
) -> None:
    code = _decode(target, fmt)
    loop = code.loop
    # QK and PV of one tile: 2 * BLOCK_N * 128 * 16 multiply-adds, each product computed once.
    flops_each = {"v_mfma_f32_16x16x16_f16": 16 * 16 * 16, "v_mfma_f32_16x16x32_f16": 16 * 16 * 32}[mfma]
    assert loop.mnemonics[mfma] * flops_each == 2 * BLOCK_N * 128 * 16
    assert loop.mfma == loop.mnemonics[mfma]
    assert loop.mnemonics["buffer_load_dwordx4"] * 16 * 64 == 2 * BLOCK_N * 128, (
        "K and V come in 16-byte loads"
    )
    if convert is not None:
        # Each converts two elements a lane.
        assert (
            sum(n for name, n in loop.mnemonics.items() if name.startswith(convert)) * 2 * 64
            == 2 * BLOCK_N * 128
        )
    assert _issue_over_memory(code, 2 * BLOCK_N * 128) < 1.0


@pytest.mark.codegen_all
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn"])
@pytest.mark.parametrize("ratio", [1, 4, 8, 17])
def test_other_ratios_and_bf16_neither_spill_nor_use_scratch(ratio: int, fmt: str, target: str) -> None:
    code = _decode(target, fmt, ratio=ratio)
    assert (code.registers.vgpr_spills, code.registers.scratch_bytes) == (0, 0)


SIZES: list[dict[str, Any]] = [
    {}, {"page_size": 1}, {"ratio": 1}, {"ratio": 17}, {"head_dim": 64}, {"head_dim": 256},
    {"head_dim": 256, "q_dtype": torch.float16},
]  # fmt: skip
SCALES: list[dict[str, Any]] = [
    {"scale_group": 32}, {"scale_group": 16}, {"scale_group": 16, "scale_format": "e4m3"},
    {"scale_format": "e4m3"}, {"scale_group": 16, "q_len": 2, "ratio": 8},
]  # fmt: skip
FP4 = [
    *product(("gfx942", "gfx950"), ("decode",), ("fp4_e2m1", K8V4), SIZES + SCALES),
    *product(("gfx950",), ("native",), ("fp4_e2m1",), SIZES + SCALES[:1] + SCALES[3:4]),
]


@pytest.mark.codegen_all
@pytest.mark.parametrize(("target", "kernel", "fmt", "case"), FP4, ids=str)
def test_fp4_neither_spills_nor_uses_scratch(
    target: str, kernel: str, fmt: str | CacheFormat, case: dict[str, Any]
) -> None:
    code = _decode(target, fmt, kernel=kernel, **case)
    assert (code.registers.vgpr_spills, code.registers.scratch_bytes) == (0, 0)
    if "ratio" not in case:
        assert code.registers.sgpr_spills == 0


@pytest.mark.codegen_all
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("fmt", ["int8", "int4", CacheFormat("int8", "int4")], ids=str)
@pytest.mark.parametrize("case", [*SIZES, {"q_len": 4}], ids=str)
def test_integers_neither_spill_nor_use_scratch(
    case: dict[str, Any], fmt: str | CacheFormat, target: str
) -> None:
    code = _decode(target, fmt, **case)
    assert (code.registers.vgpr_spills, code.registers.scratch_bytes) == (0, 0)
    if not case:
        assert code.waves_per_simd == 2


@pytest.mark.skipif(
    TRITON < (3, 9), reason="instructions are counted for Triton 3.9, the development version"
)
def test_int4_takes_no_more_instructions_than_fp4() -> None:
    """A mask and a subtraction widen two codes; E2M1 takes two shifts and a mask."""
    int4, fp4 = (_decode("gfx942", fmt).loop.valu for fmt in ("int4", "fp4_e2m1"))
    assert int4 <= fp4


@pytest.mark.codegen_all
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
def test_the_native_kernel_with_two_tokens_of_wide_heads_neither_spills_nor_uses_scratch(
    q_dtype: torch.dtype,
) -> None:
    code = _decode("gfx950", "fp4_e2m1", head_dim=192, scale_group=32, q_len=2, q_dtype=q_dtype)
    assert (code.registers.vgpr_spills, code.registers.scratch_bytes) == (0, 0)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scale_group", [None, 32])
def test_the_native_kernel_multiplies_stored_fp4_keys(head_dim: int, scale_group: int | None) -> None:
    native = _decode("gfx950", "fp4_e2m1", head_dim=head_dim, scale_group=scale_group, kernel="native").loop
    scaled = sum(n for name, n in native.mnemonics.items() if name.startswith("v_mfma_scale_f32_16x16x128"))
    assert scaled > 0
    # QK is the scaled instruction alone: what is left of the others is PV.
    software = _decode("gfx950", "fp4_e2m1", head_dim=head_dim, scale_group=scale_group, kernel="decode").loop
    assert not any(name.startswith("v_mfma_scale") for name in software.mnemonics)
    assert software.mfma > 0


@pytest.mark.skipif(TRITON < (3, 9), reason="instruction choice is asserted for Triton 3.9")
def test_the_native_kernel_does_not_widen_keys() -> None:
    """A shift serves two elements of FP4; V alone is widened, and each of two warps widens half."""
    code = _decode("gfx950", "fp4_e2m1", kernel="native")
    plain = {n: c for n, c in code.loop.mnemonics.items() if n.startswith("v_mfma") and "scale" not in n}
    # PV: [16, 128 keys] by [128 keys, 128].
    assert sum(plain.values()) * 16 * 16 * 32 * code.num_warps == 16 * 128 * 128
    scaled = {n: c for n, c in code.loop.mnemonics.items() if "mfma_scale" in n}
    # QK: two E4M3 terms of Q; the warps share the keys.
    assert sum(scaled.values()) * 16 * 16 * 128 * code.num_warps == 2 * 16 * 128 * 128
    assert code.loop.mnemonics["v_pk_ashrrev_i16"] * 2 * 64 * code.num_warps == 128 * 128


@pytest.mark.skipif(TRITON < (3, 9), reason="instruction choice is asserted for Triton 3.9")
@pytest.mark.parametrize("fmt", ["fp4_e2m1", K8V4], ids=["fp4", "k8v4"])
def test_fp4_on_gfx950_is_converted_by_its_instruction(fmt: str | CacheFormat) -> None:
    """Two elements an instruction, and wait states around sixteen, which the compiler does not insert."""
    loop = _decode("gfx950", fmt).loop
    converts = loop.mnemonics["v_cvt_scalef32_pk_f16_fp4"]
    assert converts * 2 * 64 == BLOCK_N * 128 * (1 if fmt == K8V4 else 2)
    assert loop.mnemonics["s_nop"] >= converts // 4
    assert loop.mnemonics["v_pack_b32_f16"] == 0


@pytest.mark.skipif(TRITON < (3, 9), reason="instruction choice is asserted for Triton 3.9")
@pytest.mark.parametrize(("group", "scale"), [(32, "e8m0"), (16, "e8m0"), (16, "e4m3")])
def test_scales_of_groups_on_gfx950_are_work_for_each_group(group: int, scale: str) -> None:
    """Each lane has four or eight groups of a tile; work for each of 16384 elements would be 256 or more."""
    code = _decode("gfx950", "fp4_e2m1", scale_group=group, scale_format=scale)
    plain = _decode("gfx950", "fp4_e2m1")
    assert code.loop.mnemonics["v_cvt_scalef32_pk_f16_fp4"] == 128
    assert code.loop.valu - plain.loop.valu <= 180
    assert code.waves_per_simd == plain.waves_per_simd == 2


def test_two_tokens_with_scales_of_groups_on_gfx950_leave_room_for_two_waves() -> None:
    code = _decode("gfx950", "fp4_e2m1", scale_group=32, q_len=2, ratio=8)
    assert (code.registers.vgpr_spills, code.registers.scratch_bytes, code.waves_per_simd) == (0, 0, 2)


@pytest.mark.skipif(TRITON < (3, 9), reason="instruction choice is asserted for Triton 3.9")
@pytest.mark.parametrize("fmt", ["fp4_e2m1", K8V4], ids=["fp4", "k8v4"])
def test_fp4_on_gfx942_is_bound_by_memory(fmt: str | CacheFormat) -> None:
    bits = 4 + (8 if fmt == K8V4 else 4)
    assert _issue_over_memory(_decode("gfx942", fmt), BLOCK_N * 128 * bits // 8) < 1.0


@pytest.mark.parametrize(
    ("target", "kernel"), [("gfx942", "decode"), ("gfx950", "decode"), ("gfx950", "native")]
)
def test_an_e4m3_scale_is_work_for_each_key_and_not_for_each_element(target: str, kernel: str) -> None:
    """A tile has 128 elements for each key: work for elements would show as hundreds of instructions."""
    e8m0, e4m3 = (
        _decode(target, "fp4_e2m1", kernel=kernel, scale_format=scale).loop for scale in ("e8m0", "e4m3")
    )
    assert e4m3.mfma == e8m0.mfma
    assert e4m3.valu - e8m0.valu <= 40


def test_one_warp_can_not_be_chosen_for_the_native_kernel() -> None:
    """The compiler lowers a scaled dot of one warp to bf16 multiplications without a word."""
    target = get_target("gfx950")
    for batch, q_len, ratio, head_dim in product((1, 64), (1, 4), (1, 12, 71), (64, 128, 256)):
        shape = DecodeShape(batch, q_len, 2 * ratio, 2, head_dim, 16, 8192)
        config = choose_config(target, shape, "fp4_e2m1", "fp4_e2m1", kernel="native")
        assert config.options.num_warps >= 2


@pytest.mark.codegen_all
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("fmt", "scales"),
    [
        ("fp8_e4m3fn", {}), ("fp4_e2m1", {}), ("fp4_e2m1", {"scale_group": 32}), (K8V4, {}),
        ("fp4_e2m1", {"scale_format": "e4m3"}),
    ],
    ids=str,
)  # fmt: skip
def test_append_neither_spills_nor_uses_scratch(
    fmt: str | CacheFormat, scales: dict[str, Any], target: str
) -> None:
    cache = PagedKVCache.empty(4, 16, 8, 128, format=fmt, **scales)
    new = torch.zeros(4, 8, 128, dtype=torch.bfloat16)
    with compile_for(target) as artifacts:
        append(cache, new, new, torch.arange(4, dtype=I32))
    (code,) = artifacts
    assert (code.registers.vgpr_spills, code.registers.scratch_bytes) == (0, 0)
    assert not bool(cache.k.view(torch.uint8).any()), "compiling writes nothing"


@pytest.mark.parametrize("head_dim", [112, 256])
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_append_with_rope_neither_spills_nor_uses_scratch(target: str, head_dim: int) -> None:
    cache = PagedKVCache.empty(4, 16, 8, head_dim, format="fp8_e4m3fn")
    new, table = torch.zeros(4, 8, head_dim, dtype=torch.bfloat16), torch.zeros(9, 64, dtype=torch.bfloat16)
    rope = Rope(table[:, :32], table[:, 32:], torch.zeros(4, dtype=torch.int64), "gptj")
    with compile_for(target) as artifacts:
        append(cache, new, new, torch.arange(8)[::2], rope=rope)
        append(cache, new, new, torch.arange(8)[::2], rope=rope, q=torch.zeros(4, 96, head_dim).bfloat16())
    assert len(artifacts) == 2
    for code in artifacts:
        assert (code.registers.vgpr_spills, code.registers.scratch_bytes) == (0, 0)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn", "fp4_e2m1"])
def test_appends_of_any_size_take_few_kernels(fmt: str) -> None:
    """Token counts, caches of other sizes and slices of longer vectors compile nothing new."""
    slots, positions, table = torch.arange(1200), torch.zeros(600, dtype=torch.int64), torch.zeros(9, 64)
    calls = ((1, 0, 0, 4), (2, 1, 0, 5), (15, 0, 3, 16), (16, 3, 16, 17), (64, 5, 33, 33), (512, 16, 7, 64))
    with compile_for("gfx942") as artifacts:
        for tokens, slot, position, pages in calls:
            cache = PagedKVCache.empty(pages, 16, 8, 128, format=fmt)
            new = torch.zeros(tokens, 8, 128, dtype=torch.bfloat16)
            rope = Rope(table, table.clone(), positions[position : position + tokens])
            step = 2 if tokens == 15 else 1
            append(cache, new, new, slots[slot::step][:tokens], rope=rope)
    assert len(artifacts) == 6
    # Positions may be aligned or not.
    assert len({artifact.code_object for artifact in artifacts}) <= 2
