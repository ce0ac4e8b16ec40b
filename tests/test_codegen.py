"""What decode and append compile to for gfx942 and gfx950: no spills, the expected instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from generated_code import assert_no_spills, both_targets, compile_case

from narrowkv.attn_decode.config import DecodeShape, choose_config
from narrowkv.paged_cache import CacheFormat, PagedKVCache, Rope, append
from narrowkv.quant import KeyTransform
from narrowkv.runtime.launch.artifact import CompiledArtifact
from narrowkv.runtime.targets import get_target
from narrowkv.testing.cases.decode import K8V4, DecodeCase
from narrowkv.testing.codegen import compile_call

CONTEXT = 1024
BLOCK_N = 64  # keys of a tile


def shape(format: str | CacheFormat = "fp8_e4m3fn", **changes: Any) -> DecodeCase:
    """Four sequences at 96/8 heads, whose page table has room for 1024 keys."""
    made = DecodeCase(lens=(1,) * 4, num_kv_heads=8, clean=True, format=format, **changes)
    return replace(made, stale_columns=CONTEXT // made.page_size - 1)


def decode(target: str, fmt: str | CacheFormat, **changes: Any) -> CompiledArtifact:
    """The kernel that attends."""
    return compile_case(shape(fmt, **changes), target)[0]


SIZES: list[dict[str, Any]] = [
    {}, {"page_size": 1}, {"gqa_ratio": 1}, {"gqa_ratio": 17}, {"head_dim": 64}, {"head_dim": 256},
    {"head_dim": 256, "q_dtype": torch.float16},
]  # fmt: skip
TWO_TOKENS: dict[str, Any] = {
    "format": "fp4_e2m1", "scale_group": 32, "q_len": 2, "gqa_ratio": 8, "kernel": "decode",
}  # fmt: skip
SCALES: list[dict[str, Any]] = [
    {"scale_group": 32}, {"scale_group": 16}, {"scale_group": 16, "scale_format": "e4m3"},
    {"scale_format": "e4m3"}, {"scale_group": 16, "q_len": 2, "gqa_ratio": 8},
]  # fmt: skip
INTEGERS: list[dict[str, Any]] = [
    {"format": "int8", "granularity": "token_head"}, {"format": "int4"},
    {"format": CacheFormat("int8", "int4"), "granularity": "token_head"},
]  # fmt: skip
TALL: list[dict[str, Any]] = [
    *({"q_len": q_len} for q_len in (2, 4, 8)), {"q_len": 8, "tree": "chain"}, {"q_len": 8, "head_dim": 256},
    {"q_len": 8, "format": "bf16"}, {"q_len": 8, "format": "fp4_e2m1"},
]  # fmt: skip


WIDE: list[dict[str, Any]] = [
    *({"head_dim": n, "format": fmt} for n in (320, 512) for fmt in ("bf16", "fp8_e4m3fn", "fp8_e4m3fnuz")),
    *({"head_dim": n, "gqa_ratio": 8, **extra} for n in (320, 512) for extra in INTEGERS),
    *(
        {"head_dim": n, "gqa_ratio": 8, "kernel": "decode", "format": fmt, **extra}
        for n, fmt, extra in product(
            (320, 512), ("fp4_e2m1", K8V4),
            ({}, {"scale_group": 32}, {"scale_group": 16, "scale_format": "e4m3"}),
        )
    ),
    *(
        {"head_dim": 512, "gqa_ratio": 8, "format": fmt, **extra}
        for fmt, extra in product(
            ("bf16", "fp8_e4m3fn", "fp4_e2m1", K8V4),
            ({"q_len": 2}, {"q_len": 4}, {"q_len": 2, "tree": "chain"}),
        )
    ),
    {"head_dim": 512, "gqa_ratio": 17}, {"head_dim": 512, "logits_soft_cap": 30.0, "window_left": 100},
    {"head_dim": 512, "page_size": 1}, {"head_dim": 512, "granularity": "token_head"},
    {"head_dim": 512, "q_dtype": torch.float8_e4m3fn},
    {"head_dim": 512, "q_dtype": torch.float16, "format": "bf16"},
]  # fmt: skip


def kernels() -> Iterator[tuple[DecodeCase, str]]:
    """Every kind of kernel with the target that it is compiled for."""
    pages: list[dict[str, Any]] = [{"page_size": size} for size in (1, 16, 64)]
    yield from ((shape("fp8_e4m3fnuz", **page), "gfx942") for page in pages)
    # Long enough for splits of some tiles of 32 keys.
    for fmt in ("fp8_e4m3fn", "fp8_e5m2"):
        yield replace(shape(fmt), stale_columns=511), "gfx942"
    yield shape("fp8_e4m3fnuz", q_dtype=torch.float8_e4m3fnuz), "gfx942"
    for target, dtype in product(("gfx942", "gfx950"), (torch.float8_e4m3fn, torch.float8_e4m3fnuz)):
        if target == "gfx942" or dtype == torch.float8_e4m3fn:
            for changes in [{}, {"scale_format": "e4m3"}, {"logits_soft_cap": 30.0}]:
                yield shape("fp4_e2m1", kernel="fp8", q_dtype=dtype, **changes), target
    for changes in [*SIZES, {"scale_group": 32}, {"scale_format": "e4m3"}]:
        yield shape("fp4_e2m1", kernel="native", **changes), "gfx950"
    for dtype in (torch.bfloat16, torch.float16):
        yield shape("fp4_e2m1", head_dim=192, scale_group=32, q_len=2, q_dtype=dtype), "gfx950"
    for target in ("gfx942", "gfx950"):
        for changes in [*pages, *TALL, *WIDE, TWO_TOKENS]:
            yield shape(**changes), target
        for changes in [{}, {"q_len": 8}, {"gqa_ratio": 17}, {"head_dim": 256}]:
            yield shape(q_dtype=torch.float8_e4m3fn, **changes), target
        for fmt, ratio in product(("bf16", "fp8_e4m3fn"), (1, 4, 8, 17)):
            yield shape(fmt, gqa_ratio=ratio), target
        for fmt, changes in product(("bf16", "fp8_e4m3fn"), ({}, {"gqa_ratio": 17}, {"q_len": 8})):
            yield shape(fmt, head_dim=192, v_head_dim=128, **changes), target
            yield shape(fmt, head_dim=576, v_head_dim=512, **changes), target
        for fmt, changes in product(("fp4_e2m1", K8V4), SIZES + SCALES):
            yield shape(fmt, kernel="decode", **changes), target
        for integers, changes in product(INTEGERS, [*SIZES, {"q_len": 4}]):
            yield shape(**integers, **changes), target


@pytest.mark.codegen_all
@pytest.mark.sampled(most=4)
@pytest.mark.parametrize(("case", "target"), list(kernels()), ids=str)
def test_decode_neither_spills_nor_uses_scratch(case: DecodeCase, target: str) -> None:
    code = compile_case(case, target)[0]
    assert code.lds_bytes <= 64 * 1024
    narrow = case.q_len == 1 and case.head_dim <= 256
    if case.gqa_ratio == 12 and narrow and case.formats.k.startswith("fp"):
        assert code.registers.sgpr_spills == 0
    if case in [shape(**integers) for integers in INTEGERS]:
        assert code.waves_per_simd == 2


def _issue_over_memory(code: CompiledArtifact, bytes_per_tile: int) -> float:
    """Static model: clocks of a CU for one tile's vector instructions, over clocks of HBM for its bytes."""
    figures, loop = code.target.figures, code.loop
    assert figures is not None
    multiplies = loop.total("v_mul_lo", "v_mul_hi", "v_mad_u64")
    plain = loop.valu - loop.transcendental - multiplies
    clocks = (
        plain * figures.valu_clk
        + loop.transcendental * figures.transcendental_clk
        + multiplies * figures.int_mul_clk
    )
    issue = clocks * code.num_warps / figures.simds_per_unit
    return issue / (bytes_per_tile * figures.compute_units * figures.clock_hz / figures.hbm_bytes_per_s)


FP8_CONVERT, FP4_CONVERT = "v_cvt_scalef32_pk_f16_fp8", "v_cvt_scalef32_pk_f16_fp4"


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize(
    ("target", "fmt", "convert", "converted"),
    [
        ("gfx942", "fp8_e4m3fnuz", "v_cvt_pk_f32_fp8", 2), ("gfx942", "fp8_e4m3fn", None, 0),
        ("gfx942", "fp4_e2m1", None, 0), ("gfx942", K8V4, None, 0),
        ("gfx950", "fp8_e4m3fn", FP8_CONVERT, 2), ("gfx950", "fp4_e2m1", FP4_CONVERT, 2),
        ("gfx950", K8V4, FP4_CONVERT, 1),
    ],
    ids=str,
)  # fmt: skip
def test_decode_is_bound_by_memory_and_uses_native_instructions(
    target: str, fmt: str | CacheFormat, convert: str | None, converted: int
) -> None:
    """`converted` of K and V are widened by an instruction for two elements of a lane, others by shifts."""
    code = decode(target, fmt, kernel="decode")
    counts, elements = code.loop.mnemonics, BLOCK_N * 128
    # QK and PV of one tile: each product is computed once.
    depth = {"gfx942": 16, "gfx950": 32}[target]
    assert counts[f"v_mfma_f32_16x16x{depth}_f16"] * 16 * 16 * depth == 2 * elements * 16
    assert code.loop.mfma == counts[f"v_mfma_f32_16x16x{depth}_f16"]
    stored = CacheFormat.parse(fmt)
    bits = sum(4 if side == "fp4_e2m1" else 8 for side in (stored.k, stored.v))
    assert _issue_over_memory(code, elements * bits // 8) < 1.0
    if bits == 16:
        assert counts["buffer_load_dwordx4"] * 16 * 64 == 2 * elements, "K and V come in 16-byte loads"
    if convert is not None:
        converts = sum(n for name, n in counts.items() if name.startswith(convert))
        assert converts * 2 * 64 == elements * converted
        if convert == FP4_CONVERT:
            # Wait states around the converts of two words, or of eight, which the compiler does not insert.
            assert counts["s_nop"] >= converts // (4 if converted == 1 else 16)
            assert counts["v_pack_b32_f16"] == 0


def test_int4_takes_no_more_instructions_than_fp4() -> None:
    """A mask and a subtraction widen two codes; E2M1 takes two shifts and a mask, in loops over LDS."""
    int4, fp4 = (decode("gfx942", fmt, kernel="decode", q_len=2).loop.valu for fmt in ("int4", "fp4_e2m1"))
    assert int4 <= fp4


@pytest.mark.sampled(always=[{"head_dim": 128, "scale_group": None}], most=1)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scale_group", [None, 32])
def test_the_native_kernel_multiplies_stored_fp4_keys(head_dim: int, scale_group: int | None) -> None:
    sizes = {"head_dim": head_dim, "scale_group": scale_group}
    native, software = (decode("gfx950", "fp4_e2m1", kernel=name, **sizes) for name in ("native", "decode"))
    assert native.loop.total("v_mfma_scale_f32_16x16x128") > 0
    # QK is the scaled instruction alone: what is left of the others is PV.
    assert software.loop.total("v_mfma_scale") == 0
    assert software.loop.mfma > 0


def test_the_native_kernel_does_not_widen_keys() -> None:
    """A shift serves two elements of FP4; V alone is widened, and each of two warps widens half."""
    code = decode("gfx950", "fp4_e2m1", kernel="native")
    scaled = code.loop.total("v_mfma_scale")
    # PV: [16, 128 keys] by [128 keys, 128].
    assert (code.loop.total("v_mfma") - scaled) * 16 * 16 * 32 * code.num_warps == 16 * 128 * 128
    # QK: two E4M3 terms of Q; the warps share the keys.
    assert scaled * 16 * 16 * 128 * code.num_warps == 2 * 16 * 128 * 128
    assert code.loop.mnemonics["v_pk_ashrrev_i16"] * 2 * 64 * code.num_warps == 128 * 128


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(("group", "scale"), [(16, "e4m3"), (32, "e8m0"), (16, "e8m0")])
def test_scales_of_groups_on_gfx950_are_work_for_each_group(group: int, scale: str) -> None:
    """Each lane has four or eight groups of a tile; work for each of 16384 elements would be 256 or more."""
    plain = decode("gfx950", "fp4_e2m1", kernel="decode")
    code = decode("gfx950", "fp4_e2m1", kernel="decode", scale_group=group, scale_format=scale)
    assert code.loop.mnemonics[FP4_CONVERT] == 128
    assert code.loop.valu - plain.loop.valu <= 180
    assert code.waves_per_simd == plain.waves_per_simd == 2
    # Two query tokens leave room for two waves, too.
    assert compile_case(shape(**TWO_TOKENS), "gfx950")[0].waves_per_simd == 2


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    ("target", "kernel"), [("gfx942", "decode"), ("gfx950", "decode"), ("gfx950", "native")]
)
def test_an_e4m3_scale_is_work_for_each_key_and_not_for_each_element(target: str, kernel: str) -> None:
    """A tile has 128 elements for each key: work for elements would show as hundreds of instructions."""
    e8m0, e4m3 = (
        decode(target, "fp4_e2m1", kernel=kernel, scale_format=scale).loop for scale in ("e8m0", "e4m3")
    )
    assert e4m3.mfma == e8m0.mfma
    assert e4m3.valu - e8m0.valu <= 40


@both_targets
@pytest.mark.sampled(always=[{"fmt": "fp4_e2m1", "target": "gfx942", "soft_cap": 0.0}], most=1)
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "fp4_e2m1"])
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
def test_a_key_transform_stays_out_of_the_loop(soft_cap: float, fmt: str, target: str) -> None:
    case = shape(fmt, logits_soft_cap=soft_cap, kernel="decode" if fmt == "fp4_e2m1" else "")
    inputs = case.inputs()
    transform = KeyTransform(torch.zeros(8, 128), torch.ones(8, 128))
    moved = replace(inputs, cache=replace(inputs.cache, key_transform=transform))
    artifacts = compile_call(target, lambda: moved.prepare()())
    assert_no_spills(artifacts)
    (code,) = [each for each in artifacts if each.name == "_paged_decode_kernel"]
    plain = compile_case(case, target)[0]
    assert code.waves_per_simd == plain.waves_per_simd
    assert code.loop.mfma == plain.loop.mfma
    assert code.loop.valu <= 1.01 * plain.loop.valu


def test_one_warp_can_not_be_chosen_for_the_native_kernel() -> None:
    """The compiler lowers a scaled dot of one warp to bf16 multiplications without a word."""
    target = get_target("gfx950")
    for batch, q_len, ratio, head_dim in product((1, 64), (1, 4), (1, 12, 71), (64, 128, 256)):
        shape = DecodeShape(batch, q_len, 2 * ratio, 2, head_dim, 16, 8192)
        config = choose_config(target, shape, "fp4_e2m1", "fp4_e2m1", kernel="native")
        assert config.options.num_warps >= 2


def _append(target: str, cache: PagedKVCache, **options: Any) -> CompiledArtifact:
    k, v = (torch.zeros(4, 8, width, dtype=torch.bfloat16) for width in (cache.head_dim, cache.v_head_dim))
    artifacts = compile_call(target, lambda: append(cache, k, v, torch.arange(8)[::2], **options))
    assert_no_spills(artifacts)
    (code,) = artifacts
    return code


@pytest.mark.codegen_all
@both_targets
@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("head_dim", [128, 320, 512])
@pytest.mark.parametrize(
    ("fmt", "scales"),
    [
        ("fp8_e4m3fn", {}), ("fp4_e2m1", {}), ("fp4_e2m1", {"scale_group": 32}), (K8V4, {}),
        ("fp4_e2m1", {"scale_format": "e4m3"}),
    ],
    ids=str,
)  # fmt: skip
def test_append_neither_spills_nor_uses_scratch(
    fmt: str | CacheFormat, scales: dict[str, Any], head_dim: int, target: str
) -> None:
    cache = PagedKVCache.empty(4, 16, 8, head_dim, format=fmt, **scales)
    _append(target, cache)
    assert not bool(cache.k.view(torch.uint8).any()), "compiling writes nothing"


@both_targets
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("widths", [(192, 128), (576, 512)])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn"])
def test_append_of_a_narrower_v_neither_spills_nor_uses_scratch(
    fmt: str, widths: tuple[int, int], target: str
) -> None:
    _append(target, PagedKVCache.empty(4, 16, 8, widths[0], v_head_dim=widths[1], format=fmt))


@both_targets
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("head_dim", [112, 256, 512])
def test_append_with_rope_neither_spills_nor_uses_scratch(head_dim: int, target: str) -> None:
    cache = PagedKVCache.empty(4, 16, 8, head_dim, format="fp8_e4m3fn")
    table = torch.zeros(9, 64, dtype=torch.bfloat16)
    rope = Rope(table[:, :32], table[:, 32:], torch.zeros(4, dtype=torch.int64), "gptj")
    for q in (None, torch.zeros(4, 96, head_dim).bfloat16()):
        _append(target, cache, rope=rope, q=q)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn", "fp4_e2m1"])
def test_appends_of_any_size_take_few_kernels(fmt: str) -> None:
    """Token counts, caches of other sizes and slices of longer vectors compile nothing new."""
    slots, positions, table = torch.arange(1200), torch.zeros(600, dtype=torch.int64), torch.zeros(9, 64)
    calls = ((1, 0, 0, 4), (2, 1, 0, 5), (15, 0, 3, 16), (16, 3, 16, 17), (64, 5, 33, 33), (512, 16, 7, 64))
    codes = set()
    for tokens, slot, position, pages in calls:
        cache = PagedKVCache.empty(pages, 16, 8, 128, format=fmt)
        new = torch.zeros(tokens, 8, 128, dtype=torch.bfloat16)
        rope = Rope(table, table.clone(), positions[position : position + tokens])
        taken = slots[slot :: 2 if tokens == 15 else 1][:tokens]
        (code,) = compile_call("gfx942", lambda: append(cache, new, new, taken, rope=rope))  # noqa: B023
        codes.add(code.code_object)
    # Positions may be aligned or not.
    assert len(codes) <= 2
