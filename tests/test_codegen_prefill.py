"""What prefill compiles to for gfx942 and gfx950, as shipped: no spills, the expected instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from generated_code import TARGETS, assert_no_spills, both_targets, compile_case

from narrowkv.attn_prefill.tiles import PrefillConfig
from narrowkv.quant import KeyTransform
from narrowkv.runtime.launch import compile_for
from narrowkv.runtime.launch.artifact import CompiledArtifact
from narrowkv.runtime.toolchain import TRITON
from narrowkv.testing.cases.decode import K8V4
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.codegen import compile_call, matrix_share

NATIVE = {"gfx942": "fp8_e4m3fnuz", "gfx950": "fp8_e4m3fn"}
FP8_QUERIES = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e4m3fnuz": torch.float8_e4m3fnuz}

DENSE: dict[str, Any] = {"kernel": "dense"}
FUSED: dict[str, Any] = {"kernel": "fused"}
APPEND: dict[str, Any] = {"operation": "append"}
APPEND_FUSED: dict[str, Any] = {**APPEND, **FUSED}
APPEND_THEN_ATTEND: dict[str, Any] = {**APPEND, "kernel": "append_then_attend"}
FORMATS: list[dict[str, Any]] = [{"format": "bf16"}, {"format": "fp4_e2m1"}]
INTEGERS: list[dict[str, Any]] = [{"format": "int8", "granularity": "token_head"}, {"format": "int4"}]
WAYS = (DENSE, FUSED, APPEND_FUSED, APPEND_THEN_ATTEND)


def call(*changes: dict[str, Any], room: int = 4096, **more: Any) -> PrefillCase:
    """A chunk of a prompt at 96/8 heads, of a cache that narrowkv wrote, with room for so many keys."""
    values: dict[str, Any] = {"q_lens": (1024,), "num_kv_heads": 8, "gqa_ratio": 12, "head_dim": 128}
    values["clean"] = True
    for change in (*changes, more):
        values |= change
    case = PrefillCase(**values, lens=values["q_lens"])
    return replace(case, stale_columns=(room - case.lens[0]) // case.page_size)


def shorter(*changes: dict[str, Any]) -> PrefillCase:
    """Half as many tokens, whose tiles have 128 rows; of a cache from elsewhere."""
    return call({"q_lens": (512,), "clean": False}, *changes, room=1024)


# What holds more numbers for a row or a key than the plain case.
PER_KEY_CAP_WINDOW_SPLITS: dict[str, Any] = {
    "granularity": "token_head", "logits_soft_cap": 3.0, "window_left": 600, "num_splits": 3,
}  # fmt: skip
OF_DENSE: list[dict[str, Any]] = [
    {"format": "bf16", "q_dtype": torch.float16}, {"logits_soft_cap": 3.0}, {"num_splits": 3},
    {"format": "bf16", "window_left": 600}, {"granularity": "token_head"}, PER_KEY_CAP_WINDOW_SPLITS,
    {"causal": False}, {"head_dim": 64}, {"q_lens": (8,)},
]  # fmt: skip
# Attention of an append in two launches has a factor for each block and rotates queries.
OF_APPEND: list[dict[str, Any]] = [
    {}, {"rope": "neox"}, {"rope": "gptj", "head_dim": 64},
    {"rope": "neox", "logits_soft_cap": 3.0}, {"rope": "neox", "window_left": 600},
    {"rope": "neox", "num_splits": 3}, {**PER_KEY_CAP_WINDOW_SPLITS, "rope": "neox"}, {"head_dim": 96},
    {"head_dim": 256, "rope": "neox"}, {"q_lens": (8,)},
    {"rope": "neox", "q_lens": (1024,)},
]  # fmt: skip
IN_TURNS: list[dict[str, Any]] = [
    {}, {"q_dtype": torch.float8_e4m3fn}, {"format": "bf16"}, APPEND, {**APPEND, "format": "bf16"},
    {**APPEND, "granularity": "head"},
]  # fmt: skip
# Heads wider than 256: formats, and what holds more numbers for a row or a key.
WIDE: list[dict[str, Any]] = [
    *({"head_dim": n, **fmt} for n in (320, 512) for fmt in ({}, *FORMATS, *INTEGERS, {"format": K8V4})),
    {"head_dim": 320, "format": "fp4_e2m1", "scale_group": 16, "scale_format": "e4m3"},
    {"head_dim": 512, "granularity": "token_head", "logits_soft_cap": 3.0, "window_left": 600},
    {"head_dim": 512, "q_lens": (1,)}, {"head_dim": 512, "q_dtype": torch.float16},
]  # fmt: skip


def kernels() -> Iterator[tuple[PrefillCase, str]]:
    """Every kind of kernel with the target that it is compiled for."""
    for way in WAYS:
        yield call(way, format="fp8_e4m3fnuz"), "gfx942"
    for target in TARGETS:
        for way, fmt in product(WAYS, ({}, {"clean": False}, *FORMATS, *INTEGERS)):
            yield call(way, fmt), target
        for fmt in INTEGERS:
            yield call(fmt, kernel="split"), target
        for fmt, (ratio, tokens) in product(({}, FORMATS[0]), ((1, 1024), (4, 200), (12, 1), (12, 3))):
            yield call(FUSED, fmt, gqa_ratio=ratio, q_lens=(tokens,)), target
        for way, head_dim in product((DENSE, FUSED), (64, 80, 96, 192, 256)):
            yield call(way, head_dim=head_dim), target
        for way, fmt in product((*WAYS, {"kernel": "split"}), ({}, FORMATS[0])):
            yield call(way, fmt, head_dim=192, v_head_dim=128), target
        yield call(APPEND_THEN_ATTEND, rope="neox", head_dim=192, v_head_dim=128), target
        for way, changes in product((*WAYS, {"kernel": "split"}, {**APPEND, "kernel": "split"}), WIDE):
            yield call(way, changes), target
        for way, page_size in product((DENSE, FUSED), (1, 3, 64)):
            yield call(way, page_size=page_size), target
        yield call(APPEND_FUSED, rope="neox", rotary_dim=128), target
        for way, fmt in product(({"kernel": "split"}, APPEND), ({}, *FORMATS)):
            yield call(way, fmt, q_lens=(1,)), target
        yield from ((shorter(DENSE, changes), target) for changes in OF_DENSE)
        yield from ((shorter(APPEND_THEN_ATTEND, changes), target) for changes in OF_APPEND)


SCALARS_IN_LANES = (
    "_prefill_append_kernel", "_dense_prefill_kernel", "_cdna_prefill_kernel", "_produce_kernel",
)  # fmt: skip
LAUNCHES = {
    "_prefill_append_kernel": 1, "_fused_prefill_kernel": 1, "_dense_prefill_kernel": 2,
    "_cdna_prefill_kernel": 2,
}  # fmt: skip


def assert_scalars_stay(artifacts: list[CompiledArtifact]) -> None:
    """Only kernels of several programs or loops keep scalars in lanes of vector registers.

    They are what one kind of program, or one of the two loops, needs while another runs. In the hot loop none
    moves.
    """
    for code in artifacts:
        assert code.name in SCALARS_IN_LANES or code.registers.sgpr_spills == 0, (code.name, code.registers)


def config_of(case: PrefillCase, target: str) -> PrefillConfig:
    """What the plan of a case says."""
    with compile_for(target):
        return case.inputs().plan().config


def attending(case: PrefillCase, target: str) -> tuple[PrefillConfig, CompiledArtifact]:
    """The kernel that attends, and its configuration."""
    config, code = config_of(case, target), compile_case(case, target)[-1]
    if code.name == "_cdna_prefill_kernel":
        assert config.ping_pong is not None
        config = config.ping_pong
    return config, code


@pytest.mark.codegen_all
@pytest.mark.sampled(most=4)
@pytest.mark.parametrize(("case", "target"), list(kernels()), ids=str)
def test_prefill_neither_spills_nor_uses_scratch(case: PrefillCase, target: str) -> None:
    artifacts = compile_case(case, target)
    assert_scalars_stay(artifacts)
    assert len(artifacts) == LAUNCHES[artifacts[-1].name]
    if case.kernel == "append_then_attend":
        assert artifacts[0].name == "_produce_kernel"
    if artifacts[-1].name == "_cdna_prefill_kernel":
        assert (case.q_lens, case.rope) == ((1024,), None)


@both_targets
def test_a_plan_suits_the_number_of_rows(target: str) -> None:
    assert config_of(shorter(DENSE), target).block_m == 128
    assert config_of(shorter(DENSE, {"q_lens": (8,)}), target).block_m == 64
    for way in ({"kernel": "split"}, APPEND):
        assert config_of(call(way, q_lens=(1,)), target).kernel == "split"


CONVERTS = {"fp8_e4m3fnuz": "v_cvt_pk_f32_fp8", "fp8_e4m3fn": "v_cvt_scalef32_pk_f16_fp8"}


@both_targets
@pytest.mark.sampled(always=[{"target": "gfx950", "fmt": "fp8_e4m3fn"}], most=1)
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "fp8_e4m3fnuz", "bf16", "fp4_e2m1"])
def test_the_fused_loop_widens_each_key_tile_once_with_native_instructions(fmt: str, target: str) -> None:
    for clean in (True, False) if fmt == "fp8_e4m3fn" else (True,):
        config, code = attending(call(FUSED, format=fmt, clean=clean), target)
        loop, rows, keys = code.loop, config.block_m, config.block_n
        terms = 2 if fmt == "bf16" else 1  # of P
        depth = {"gfx942": 16, "gfx950": 32}[target]
        mfma = f"v_mfma_f32_16x16x{depth}_{'bf16' if fmt == 'bf16' else 'f16'}"
        products = rows * keys * 128 * (1 + terms)
        assert loop.mnemonics[mfma] * 16 * 16 * depth * code.num_warps == products
        assert loop.mfma == loop.mnemonics[mfma]
        if fmt == NATIVE[target]:
            # Each converts two elements of a lane. K and V of a tile are shared by four waves through LDS,
            # or widened by each: 64 rows of queries either way.
            converted = loop.total(CONVERTS[fmt]) * 2 * 64
            assert 0 < converted <= 2 * keys * 128


@both_targets
@pytest.mark.sampled(always=[{"target": "gfx950", "fmt": "fp8_e4m3fn"}], most=1)
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "fp8_e4m3fnuz", "bf16", "fp4_e2m1"])
def test_the_dense_loop_multiplies_16_bit_numbers_and_converts_only_p(fmt: str, target: str) -> None:
    case = call(DENSE, format=fmt)
    config, dense = attending(case, target)
    widen = compile_case(case, target)[0]
    depth, loop = {"gfx942": 8, "gfx950": 16}[target], dense.loop
    one = config.block_m * config.block_n * 128 // (32 * 32 * depth * dense.num_warps)
    assert loop.mnemonics[f"v_mfma_f32_32x32x{depth}_bf16"] == one, "Q @ K in Q's type"
    assert loop.mnemonics[f"v_mfma_f32_32x32x{depth}_f16"] == one, "P @ V in float16"
    assert loop.mfma == 2 * one
    assert loop.converts <= config.block_m * config.block_n // (64 * dense.num_warps), "of P"
    # Keys that every row sees are not compared with its position.
    assert not any(name.startswith("v_cmp") and "_i32" in name for name in loop.mnemonics)
    assert widen.loop.mfma == 0
    if fmt == NATIVE[target]:
        assert widen.whole.total("v_cvt_pk_f32_fp8", "v_cvt_scalef32_pk") > 0


@both_targets
@pytest.mark.sampled(always=[{"target": "gfx950"}], most=1)
def test_the_share_of_matrix_instructions_in_the_hot_loop_is_what_the_structure_promises(target: str) -> None:
    """Clocks of the matrix unit over clocks of all instructions: a model, never a measurement."""
    share = {}
    for way in (DENSE, FUSED):
        code = compile_case(call(way), target)[-1]
        assert code.target.figures is not None
        share[way["kernel"]] = matrix_share(code.loop, code.target.figures)
    print(f"{target}: matrix instructions take {share} of the loop's issue clocks")
    assert share["dense"] > share["fused"]


def ping_pong(*changes: dict[str, Any]) -> CompiledArtifact:
    """The kernel whose waves take turns, of a call with tiles of 256 rows for all compute units of gfx950."""
    artifacts = compile_case(call({"clean": False}, *changes), "gfx950")
    assert_scalars_stay(artifacts)
    attend = artifacts[-1]
    assert attend.name == "_cdna_prefill_kernel"
    # The matrix unit of gfx950 delays packed float32 instructions.
    assert not [name for name in attend.loop.mnemonics if name.startswith("v_pk_") and name.endswith("_f32")]
    assert attend.loop.mnemonics["s_setprio"] == 2
    assert attend.loop.mnemonics["s_barrier"] == 2
    return attend


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("changes", IN_TURNS, ids=str)
@pytest.mark.parametrize("window", [-1, 600], ids=["no window", "window"])
def test_waves_take_turns_without_spills_and_without_packed_arithmetic(
    window: int, changes: dict[str, Any]
) -> None:
    ping_pong(changes, {"window_left": window})


def test_factors_of_blocks_take_few_vector_instructions_where_waves_take_turns() -> None:
    plain, bf16, append = (ping_pong(changes).loop for changes in ({}, FORMATS[0], APPEND))
    assert bf16.valu - plain.valu <= 8
    assert append.valu - plain.valu <= 10
    loads = [loop.mnemonics.get("global_load_dword", 0) for loop in (plain, bf16, append)]
    assert loads == [0, 1, 2]


@pytest.mark.slow
def test_bf16_queries_over_a_float16_cache_have_the_kernel_that_converts_them() -> None:
    artifacts = compile_case(call(format="fp16"), "gfx950")
    assert artifacts[-1].name == "_dense_prefill_kernel"
    assert_scalars_stay(artifacts)


@pytest.mark.codegen_all
@pytest.mark.sampled(always=[{"target": "gfx942", "fmt": "fp8_e4m3fnuz", "way": {}}], most=1)
@pytest.mark.parametrize("way", [{}, FUSED], ids=str)
@pytest.mark.parametrize(
    ("target", "fmt"), [("gfx942", "fp8_e4m3fnuz"), ("gfx942", "fp8_e4m3fn"), ("gfx950", "fp8_e4m3fn")]
)
def test_fp8_queries_are_multiplied_by_fp8_matrix_units(target: str, fmt: str, way: dict[str, Any]) -> None:
    case = call(way, format=fmt, q_dtype=FP8_QUERIES[fmt])
    config, code = attending(case, target)
    assert_scalars_stay(compile_case(case, target))
    fp8 = sum(n for name, n in code.loop.mnemonics.items() if name.endswith(("_fp8_fp8", "_f8f6f4")))
    if way == FUSED:
        assert code.loop.mfma == fp8
        return
    assert config_of(case, target).kernel == "dense"
    # Q @ K alone; P @ V is in float16.
    depth = {"gfx942": 16, "gfx950": 64}[target]
    one = config.block_m * config.block_n * 128 // (32 * 32 * depth * code.num_warps)
    assert fp8 == one or TRITON < (3, 9)


@pytest.mark.codegen_all
@both_targets
@pytest.mark.sampled(always=[{"rope": "neox", "target": "gfx942"}], most=1)
@pytest.mark.parametrize("rope", [None, "neox"])
def test_an_append_on_fp8_matrix_units_and_with_rope(rope: str | None, target: str) -> None:
    case = call(APPEND, format=NATIVE[target], fp8_compute=True, rope=rope, rotary_dim=128)
    artifacts = compile_case(case, target)
    assert_scalars_stay(artifacts)
    assert artifacts[0].whole.total("v_mfma_f32_16x16x32_fp8_fp8", "v_mfma_f32_16x16x128_f8f6f4") > 0


@both_targets
@pytest.mark.sampled(always=[{"way": APPEND_FUSED, "scale_format": "e4m3", "target": "gfx950"}], most=1)
@pytest.mark.parametrize("scale_format", ["e8m0", "e4m3"])
@pytest.mark.parametrize("way", [APPEND_FUSED, APPEND_THEN_ATTEND], ids=str)
def test_an_append_that_transforms_keys_neither_spills_nor_uses_scratch(
    way: dict[str, Any], scale_format: str, target: str
) -> None:
    case = call(way, FORMATS[1], q_lens=(128,), rope="neox", rotary_dim=128, scale_format=scale_format)
    inputs = case.inputs()
    moved = KeyTransform(torch.zeros(8, 128), torch.ones(8, 128))
    inputs = replace(inputs, cache=replace(inputs.cache, key_transform=moved))
    artifacts = compile_call(target, lambda: inputs.prepare()())
    assert artifacts[0].name == "_transform_queries_kernel"
    assert_no_spills(artifacts)
    assert_scalars_stay(artifacts)


@both_targets
@pytest.mark.sampled(most=1)
def test_partial_results_are_in_memory_before_they_are_announced(target: str) -> None:
    """A barrier does not wait for stores, and the wave that counts waits for its own only."""
    code = compile_case(shorter(DENSE, {"num_splits": 3}), target)[-1]
    lines = [line.strip() for line in code.assembly.splitlines()]
    counts = next(i for i, line in enumerate(lines) if line.startswith("global_atomic_add"))
    stored = max(i for i, line in enumerate(lines[:counts]) if "_store_dword" in line)
    barrier = next(i for i in range(stored, counts) if lines[i].startswith("s_barrier"))
    assert any(line.startswith("s_waitcnt vmcnt(0)") for line in lines[stored:barrier])
