"""What prefill compiles to for gfx942 and gfx950, as shipped: no spills, the expected instructions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import batch_prefill, plan_append, plan_prefill, prefill_append
from narrowkv.attn_prefill.cases import PrefillCase
from narrowkv.attn_prefill.shapes import PrefillConfig
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
from narrowkv.quant import KeyTransform
from narrowkv.runtime.launch import compile_for
from narrowkv.runtime.launch.artifact import CompiledArtifact
from narrowkv.runtime.toolchain import TRITON
from narrowkv.testing.roofline import matrix_share

pytestmark = pytest.mark.sampled(most=1)

I32 = torch.int32
TARGETS = ["gfx942", "gfx950"]
both_targets = pytest.mark.parametrize("target", TARGETS)
# Operations of one instruction: a product of M x N x K multiply-adds.
MFMA = {
    "v_mfma_f32_16x16x16_bf16": 16,
    "v_mfma_f32_16x16x16_f16": 16,
    "v_mfma_f32_16x16x32_bf16": 32,
    "v_mfma_f32_16x16x32_f16": 32,
    "v_mfma_f32_16x16x32_fp8_fp8": 32,
    "v_mfma_f32_16x16x128_f8f6f4": 128,
}
TOKENS, PREFIX = 1024, 3072


def _compile(
    target: str,
    fmt: str,
    kernel: str | None = None,
    *,
    head_dim: int = 128,
    ratio: int = 12,
    page_size: int = 16,
    clean: bool = True,
    q_dtype: torch.dtype = torch.bfloat16,
    tokens: int = TOKENS,
    fp8_compute: bool = False,
    rope: bool = False,
    transform: KeyTransform | None = None,
    scale_format: str = "e8m0",
) -> tuple[PrefillConfig, list[CompiledArtifact]]:
    """The kernels of one call, compiled by an ordinary call."""
    appends = kernel is not None and kernel.startswith("append")
    kernel = {"append": None, "append fused": "fused", "append then attend": "append_then_attend"}.get(
        kernel or "", kernel
    )
    length = PREFIX + TOKENS
    pages = -(-length // page_size)
    cache = PagedKVCache.empty(pages, page_size, 8, head_dim, format=fmt, scale_format=scale_format)
    cache = replace(cache, negative_zero_free=clean, key_transform=transform)
    lens = {"cached_lens": PREFIX} if appends else {"seq_lens": length}
    table = PageTable.from_block_table(
        torch.arange(pages, dtype=I32)[None],
        **{name: torch.tensor([tokens], dtype=I32) for name, tokens in lens.items()},
        page_size=page_size,
    )
    q = torch.zeros(tokens, 8 * ratio, head_dim).to(q_dtype)
    starts = torch.tensor([0, tokens], dtype=I32)
    with compile_for(target) as artifacts:
        if appends:
            new = torch.zeros(tokens, 8, head_dim, dtype=q_dtype)
            angles = torch.zeros(length, head_dim // 2)
            turn = Rope(angles, angles, torch.zeros(tokens, dtype=I32)) if rope else None
            plan = plan_append(q, cache, table, starts, fp8_compute=fp8_compute, kernel=kernel)
            prefill_append(q, new, new, cache, table, starts, rope=turn, fp8_compute=fp8_compute, plan=plan)
        else:
            plan = plan_prefill(q, cache, table, starts, kernel=kernel)
            batch_prefill(q, cache, table, starts, plan=plan)
    return plan.config, artifacts


_SCALARS_IN_LANES = (
    "_prefill_append_kernel", "_dense_prefill_kernel", "_cdna_prefill_kernel", "_produce_kernel",
)  # fmt: skip


def _assert_clean(artifacts: list[CompiledArtifact]) -> None:
    for code in artifacts:
        registers = code.registers
        assert (registers.vgpr_spills, registers.scratch_bytes) == (0, 0), (code.name, registers)
        if code.name in _SCALARS_IN_LANES:
            # Scalar registers may be kept in lanes of vector registers, but hardly within the hot loop: what
            # one kind of program or one of the two loops needs while another runs.
            assert code.loop.total("v_readlane", "v_writelane") <= code.loop.valu // 200
        else:
            assert registers.sgpr_spills == 0, (code.name, registers)
        assert code.target.figures is not None
        assert code.lds_bytes <= code.target.figures.lds_bytes
        assert code.waves_per_simd >= 1


@both_targets
@pytest.mark.parametrize("kernel", ["split", "append"])
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "bf16", "fp4_e2m1"])
def test_equal_shares_of_keys_for_few_query_tokens(fmt: str, kernel: str, target: str) -> None:
    config, artifacts = _compile(target, fmt, kernel, tokens=1)
    assert config.kernel == "split"
    assert len(artifacts) == 1
    _assert_clean(artifacts)


# (target, format, whether narrowkv wrote the cache, widened in the loop: V's matrix instruction and convert)
FUSED = [
    ("gfx942", "fp8_e4m3fnuz", True, "v_mfma_f32_16x16x16_f16", "v_cvt_pk_f32_fp8"),
    ("gfx942", "fp8_e4m3fn", True, "v_mfma_f32_16x16x16_f16", None),
    ("gfx942", "fp8_e4m3fn", False, "v_mfma_f32_16x16x16_f16", None),
    ("gfx942", "bf16", True, "v_mfma_f32_16x16x16_bf16", None),
    ("gfx942", "fp4_e2m1", True, "v_mfma_f32_16x16x16_f16", None),
    ("gfx950", "fp8_e4m3fn", True, "v_mfma_f32_16x16x32_f16", "v_cvt_scalef32_pk_f16_fp8"),
    ("gfx950", "fp8_e4m3fn", False, "v_mfma_f32_16x16x32_f16", "v_cvt_scalef32_pk_f16_fp8"),
    ("gfx950", "bf16", True, "v_mfma_f32_16x16x32_bf16", None),
    ("gfx950", "fp4_e2m1", True, "v_mfma_f32_16x16x32_f16", None),
]
FUSED_IDS = [f"{t}-{f}-{'own' if c else 'foreign'}" for t, f, c, *_ in FUSED]


@pytest.mark.codegen_all
@pytest.mark.parametrize(("target", "fmt", "clean", "mfma", "convert"), FUSED, ids=FUSED_IDS)
@pytest.mark.parametrize("kernel", ["dense", "fused", "append fused", "append then attend"])
def test_a_prefill_at_ratio_12_neither_spills_nor_uses_scratch(
    target: str, fmt: str, clean: bool, mfma: str, convert: str | None, kernel: str
) -> None:
    _, artifacts = _compile(target, fmt, kernel, clean=clean)
    _assert_clean(artifacts)


@pytest.mark.codegen_all
@both_targets
@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("kernel", ["dense", "fused", "split", "append fused", "append then attend"])
def test_a_prefill_over_integers_neither_spills_nor_uses_scratch(kernel: str, fmt: str, target: str) -> None:
    _, artifacts = _compile(target, fmt, kernel)
    _assert_clean(artifacts)


@pytest.mark.skipif(
    TRITON < (3, 9), reason="instruction choice is asserted for Triton 3.9, the development version"
)
@pytest.mark.parametrize(("target", "fmt", "clean", "mfma", "convert"), FUSED, ids=FUSED_IDS)
def test_the_fused_loop_widens_each_key_tile_once_with_native_instructions(
    target: str, fmt: str, clean: bool, mfma: str, convert: str | None
) -> None:
    config, (code,) = _compile(target, fmt, "fused", clean=clean)
    loop, rows, keys = code.loop, config.block_m, config.block_n
    terms = 2 if fmt == "bf16" else 1  # of P
    products = rows * keys * 128 * (1 + terms)
    assert loop.mnemonics[mfma] * 16 * 16 * MFMA[mfma] * code.num_warps == products
    assert loop.mfma == loop.mnemonics[mfma]
    if convert is not None:
        # Each converts two elements of a lane. K and V of a tile are shared by four waves through LDS, or
        # widened by each: 64 rows of queries either way.
        converted = sum(n for name, n in loop.mnemonics.items() if name.startswith(convert)) * 2 * 64
        assert converted * code.num_warps <= 2 * keys * 128 * code.num_warps
        assert converted > 0


def _run(target: str, *axes: dict[str, Any]) -> tuple[PrefillConfig, list[CompiledArtifact]]:
    """The kernels of a case at 96/8 heads."""
    sizes: dict[str, Any] = {"num_kv_heads": 8, "gqa_ratio": 12, "head_dim": 128}
    for part in ({"q_lens": (512,), "lens": (1024,)}, *axes):
        sizes |= part
    inputs = PrefillCase.small(**sizes).inputs()
    with compile_for(target) as artifacts:
        plan = inputs.plan()
        inputs.run(plan)
    return plan.config, artifacts


# What holds more numbers for a row or a key than the plain case.
DENSE: dict[str, dict[str, Any]] = {
    "fp16 queries over bf16": {"format": "bf16", "q_dtype": torch.float16},
    "soft cap": {"logits_soft_cap": 3.0},
    "window": {"format": "bf16", "window_left": 600},
    "descale of each key": {"granularity": "token_head"},
    "descale of each key, cap, window, splits": {
        "granularity": "token_head", "logits_soft_cap": 3.0, "window_left": 600, "num_splits": 3,
    },
    "splits": {"num_splits": 3},
    "no mask": {"causal": False},
    "head_dim 64": {"head_dim": 64},
    "few rows": {"q_lens": (8,)},
}  # fmt: skip


def _attending(config: PrefillConfig, artifact: CompiledArtifact) -> PrefillConfig:
    """The configuration that a kernel was compiled for."""
    if artifact.name != "_cdna_prefill_kernel":
        return config
    assert config.in_turns is not None
    return config.in_turns


take_turns = pytest.mark.skipif(TRITON < (3, 8), reason="waves take turns from Triton 3.8 on")
IN_TURNS: dict[str, dict[str, Any]] = {
    "FP8 cache": {},
    "FP8 queries": {"q_dtype": torch.float8_e4m3fn},
    "bf16 cache": {"format": "bf16"},
    "append": {"operation": "append"},
    "append, bf16 cache": {"operation": "append", "format": "bf16"},
    "append, a descale of each head": {"operation": "append", "granularity": "head"},
}


def _large_call(**axes: Any) -> list[CompiledArtifact]:
    """The kernels of a call on gfx950 with tiles of 256 rows for all compute units."""
    return _run("gfx950", {"q_lens": (1024,), "lens": (2048,)}, axes)[1]


@take_turns
@pytest.mark.parametrize("name", IN_TURNS)
@pytest.mark.parametrize("window", [-1, 600], ids=["no window", "window"])
def test_waves_take_turns_without_spills_and_without_packed_arithmetic(window: int, name: str) -> None:
    artifacts = _large_call(window_left=window, **IN_TURNS[name])
    _assert_clean(artifacts)
    attend = artifacts[-1]
    assert attend.name == "_cdna_prefill_kernel"
    # The matrix unit of gfx950 delays packed float32 instructions.
    assert not [name for name in attend.loop.mnemonics if name.startswith("v_pk_") and name.endswith("_f32")]
    assert attend.loop.mnemonics["s_setprio"] == 2
    assert attend.loop.mnemonics["s_barrier"] == 2


@take_turns
def test_factors_of_blocks_take_few_vector_instructions_where_waves_take_turns() -> None:
    plain, bf16, append = (
        _large_call(**IN_TURNS[name])[-1].loop for name in ("FP8 cache", "bf16 cache", "append")
    )
    assert bf16.valu - plain.valu <= 8
    assert append.valu - plain.valu <= 10
    loads = [loop.mnemonics.get("global_load_dword", 0) for loop in (plain, bf16, append)]
    assert loads == [0, 1, 2]


def test_bf16_queries_over_a_float16_cache_have_the_kernel_that_converts_them() -> None:
    artifacts = _large_call(format="fp16")
    assert artifacts[-1].name == "_dense_prefill_kernel"
    _assert_clean(artifacts)


@pytest.mark.codegen_all
@both_targets
@pytest.mark.parametrize("name", DENSE)
def test_dense_prefill_neither_spills_nor_uses_scratch(name: str, target: str) -> None:
    config, artifacts = _run(target, {"kernel": "dense"}, DENSE[name])
    assert config.block_m == (64 if name == "few rows" else 128)
    _assert_clean(artifacts)


@pytest.mark.skipif(
    TRITON < (3, 9), reason="instruction choice is asserted for Triton 3.9, the development version"
)
@both_targets
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "fp8_e4m3fnuz", "bf16", "fp4_e2m1"])
def test_the_dense_loop_multiplies_16_bit_numbers_and_converts_only_p(target: str, fmt: str) -> None:
    config, (widen, dense) = _compile(target, fmt, "dense")
    config = _attending(config, dense)
    depth = 8 if target == "gfx942" else 16
    loop = dense.loop
    one = config.block_m * config.block_n * 128 // (32 * 32 * depth * dense.num_warps)
    assert loop.mnemonics[f"v_mfma_f32_32x32x{depth}_bf16"] == one, "Q @ K in Q's type"
    assert loop.mnemonics[f"v_mfma_f32_32x32x{depth}_f16"] == one, "P @ V in float16"
    assert loop.mfma == 2 * one
    p_elements = config.block_m * config.block_n // (64 * dense.num_warps)
    assert loop.converts <= p_elements
    # Keys that every row sees are not compared with its position.
    assert not any(name.startswith("v_cmp") and "_i32" in name for name in loop.mnemonics)
    assert widen.loop.mfma == 0
    native = {"gfx942": "fp8_e4m3fnuz", "gfx950": "fp8_e4m3fn"}[target]
    if fmt == native:
        assert widen.whole.total("v_cvt_pk_f32_fp8", "v_cvt_scalef32_pk") > 0


@pytest.mark.codegen_all
@both_targets
@pytest.mark.parametrize("kernel", ["fused", None])
def test_fp8_queries_are_multiplied_by_fp8_matrix_units(target: str, kernel: str | None) -> None:
    caches = ["fp8_e4m3fn", "fp8_e4m3fnuz"] if target == "gfx942" else ["fp8_e4m3fn"]
    for fmt in caches:
        dtype = torch.float8_e4m3fn if fmt == "fp8_e4m3fn" else torch.float8_e4m3fnuz
        config, artifacts = _compile(target, fmt, kernel, q_dtype=dtype)
        _assert_clean(artifacts)
        loop = artifacts[-1].loop
        fp8 = {name: n for name, n in loop.mnemonics.items() if name.endswith(("_fp8_fp8", "_f8f6f4"))}
        if kernel == "fused":
            assert loop.mfma == sum(fp8.values())
            continue
        assert config.kernel == "dense"
        config = _attending(config, artifacts[-1])
        # Q @ K alone; P @ V is in float16.
        rows, depth = (32, 16) if target == "gfx942" else (32, 64)
        one = config.block_m * config.block_n * 128 // (rows * rows * depth * artifacts[-1].num_warps)
        assert sum(fp8.values()) == one or TRITON < (3, 9)


@pytest.mark.codegen_all
@both_targets
@pytest.mark.parametrize("rope", [False, True])
def test_an_append_on_fp8_matrix_units_and_with_rope(target: str, rope: bool) -> None:
    fmt = "fp8_e4m3fnuz" if target == "gfx942" else "fp8_e4m3fn"
    _, artifacts = _compile(target, fmt, "append", fp8_compute=True, rope=rope)
    _assert_clean(artifacts)
    assert artifacts[0].whole.total("v_mfma_f32_16x16x32_fp8_fp8", "v_mfma_f32_16x16x128_f8f6f4") > 0
    _, artifacts = _compile(target, "fp8_e4m3fn", "append fused", rope=rope)
    _assert_clean(artifacts)
    (code,) = artifacts  # one launch
    assert code.name == "_prefill_append_kernel"


# Of an append in two launches, whose attention has a factor for each block and rotates queries.
APPENDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rope": {"rope": "neox"},
    "rope, pairs of neighbours": {"rope": "gptj", "head_dim": 64},
    "rope, soft cap": {"rope": "neox", "logits_soft_cap": 3.0},
    "rope, window": {"rope": "neox", "window_left": 600},
    "rope, splits": {"rope": "neox", "num_splits": 3},
    "descale of each key, rope, cap, window, splits": {
        **DENSE["descale of each key, cap, window, splits"], "rope": "neox",
    },
    "head_dim 96": {"head_dim": 96},
    "head_dim 256, rope": {"head_dim": 256, "rope": "neox"},
    "few rows": {"q_lens": (8,)},
    "rope, many rows": {"rope": "neox", "q_lens": (1024,), "lens": (2048,)},
}  # fmt: skip


@pytest.mark.codegen_all
@both_targets
@pytest.mark.parametrize("name", APPENDS)
def test_an_append_in_two_launches_neither_spills_nor_uses_scratch(name: str, target: str) -> None:
    _, artifacts = _run(target, {"operation": "append", "kernel": "append_then_attend"}, APPENDS[name])
    assert [code.name for code in artifacts] == ["_produce_kernel", "_dense_prefill_kernel"]
    _assert_clean(artifacts)


@both_targets
@pytest.mark.parametrize("scale_format", ["e8m0", "e4m3"])
@pytest.mark.parametrize("kernel", ["append fused", "append then attend"])
def test_an_append_that_transforms_keys_neither_spills_nor_uses_scratch(
    kernel: str, scale_format: str, target: str
) -> None:
    moved = KeyTransform(torch.zeros(8, 128), torch.ones(8, 128))
    _, artifacts = _compile(
        target, "fp4_e2m1", kernel, tokens=128, rope=True, transform=moved, scale_format=scale_format
    )
    assert artifacts[0].name == "_transform_queries_kernel"
    _assert_clean(artifacts)


@pytest.mark.codegen_all
@both_targets
@pytest.mark.parametrize("kernel", ["dense", "fused"])
@pytest.mark.parametrize("sizes", [*({"head_dim": n} for n in (64, 80, 96, 192, 256)),
                                   *({"page_size": n} for n in (1, 3, 64))], ids=str)  # fmt: skip
def test_other_sizes_neither_spill_nor_use_scratch(sizes: dict[str, int], kernel: str, target: str) -> None:
    _, artifacts = _compile(target, "fp8_e4m3fn", kernel, **sizes)  # type: ignore[arg-type]
    _assert_clean(artifacts)


@pytest.mark.codegen_all
@both_targets
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "bf16"])
@pytest.mark.parametrize(("ratio", "tokens"), [(1, 1024), (4, 200), (12, 1), (12, 3)])
def test_other_ratios_and_short_chunks_neither_spill_nor_use_scratch(
    ratio: int, tokens: int, fmt: str, target: str
) -> None:
    _, artifacts = _compile(target, fmt, "fused", ratio=ratio, tokens=tokens)
    _assert_clean(artifacts)


@both_targets
def test_the_share_of_matrix_instructions_in_the_hot_loop_is_what_the_structure_promises(target: str) -> None:
    """Clocks of the matrix unit over clocks of all instructions: a model, never a measurement."""
    clocks = {}
    for kernel in ("dense", "fused"):
        _, artifacts = _compile(target, "fp8_e4m3fn", kernel)
        code = artifacts[-1]
        figures = code.target.figures
        assert figures is not None
        clocks[kernel] = matrix_share(code.loop, figures)
        print(f"{target} {kernel}: matrix instructions take {clocks[kernel]:.0%} of the loop's issue clocks")
    assert clocks["dense"] > clocks["fused"]


@both_targets
def test_partial_results_are_in_memory_before_they_are_announced(target: str) -> None:
    """A barrier does not wait for stores, and the wave that counts waits for its own only."""
    _, artifacts = _run(target, {"q_lens": (30,), "lens": (2000,), "num_kv_heads": 2, "num_splits": 3})
    lines = [line.strip() for line in artifacts[-1].assembly.splitlines()]
    counts = next(i for i, line in enumerate(lines) if line.startswith("global_atomic_add"))
    stored = max(i for i, line in enumerate(lines[:counts]) if "_store_dword" in line)
    barrier = next(i for i in range(stored, counts) if lines[i].startswith("s_barrier"))
    assert any(line.startswith("s_waitcnt vmcnt(0)") for line in lines[stored:barrier])
