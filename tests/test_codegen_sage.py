"""What Sage attention compiles to for gfx942 and gfx950: no spills or scratch, narrow matrix instructions."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from generated_code import assert_no_spills, both_targets

from narrowkv.quant.sage import SAGE_GRANULARITIES
from narrowkv.runtime.launch import compile_for
from narrowkv.runtime.launch.artifact import CompiledArtifact, InstructionMix
from narrowkv.sage import SagePlan, plan_sage, sage_attention
from narrowkv.testing.cases.sage import PRECISIONS

qk_dtypes = pytest.mark.parametrize("qk_dtype", PRECISIONS)


@cache
def compiled(target: str, *, head_dim: int = 128, ragged: bool = False, **options: Any) -> CompiledArtifact:
    """The attention kernel of a call, the last of its launches; none spills."""
    sizes = (300, 4, head_dim) if ragged else (1, 300, 4, head_dim)
    q = torch.empty(sizes, dtype=torch.bfloat16)
    if ragged:
        starts = torch.tensor([0, 100, 300], dtype=torch.int32)
        options = {**options, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    k = q[..., :2, :]
    with compile_for(target) as artifacts:
        plan = plan_sage(q, k, **options)
        plan.attend(q, plan.quantize_kv(k, k), return_lse=True, block_mask=_flags(plan))
    assert_no_spills(artifacts)
    assert artifacts[-1].waves_per_simd >= 2
    return artifacts[-1]


def _flags(plan: SagePlan) -> torch.Tensor | None:
    """A block mask of a call of the plan's size, for a plan with one."""
    if plan.block_sizes is None:
        return None
    blocks = (-(-300 // size) for size in plan.block_sizes)
    return torch.ones(1, 4, *blocks, dtype=torch.uint8)


def causal(target: str, qk_dtype: str, **options: Any) -> InstructionMix:
    """The hot loop of a causal call."""
    return compiled(target, qk_dtype=qk_dtype, causal="bottom_right", **options).loop


QK = {
    ("gfx942", "int8"): "v_mfma_i32_32x32x16_i8",
    ("gfx942", "int4"): "v_mfma_i32_32x32x16_i8",
    ("gfx942", "fp8"): "v_mfma_f32_32x32x16_fp8_fp8",
    ("gfx950", "int8"): "v_mfma_i32_32x32x32_i8",
    ("gfx950", "int4"): "v_mfma_i32_32x32x32_i8",
    ("gfx950", "fp8"): "v_mfma_f32_32x32x64_f8f6f4",
}
PV = {"gfx942": "v_mfma_f32_32x32x16_fp8_fp8", "gfx950": "v_mfma_f32_32x32x64_f8f6f4"}


@pytest.mark.sampled(always=[{"target": "gfx950", "qk_dtype": "int8"}], most=2)
@both_targets
@qk_dtypes
def test_both_products_run_on_narrow_matrix_instructions(qk_dtype: str, target: str) -> None:
    mfma = {name: n for name, n in causal(target, qk_dtype).mnemonics.items() if "mfma" in name}
    assert set(mfma) == {QK[target, qk_dtype], PV[target]}
    # A wave's 32 rows by 64 keys by 128 channels, twice.
    depth = {name: int(name.split("x")[2].split("_")[0]) for name in mfma}
    assert sum(n * depth[name] for name, n in mfma.items()) * 32 * 32 == 2 * 32 * 64 * 128


@pytest.mark.sampled(always=[{"target": "gfx950"}], most=1)
@both_targets
def test_the_loop_moves_p_between_the_products_inside_its_lanes(target: str) -> None:
    """No LDS write but those of K and V, and no exchange of lanes but for the row's maximum and sum."""
    loop = causal(target, "int8")
    # Two pipeline stages, on gfx950, exchange halves of a wave for V, too.
    exchanges = 6 if target == "gfx950" else 2
    assert loop.total("ds_bpermute", "ds_permute", "ds_swizzle", "v_permlane") <= exchanges
    assert loop.total("ds_write") <= 4  # 8 KB each of K and V over 256 lanes
    assert loop.valu < 220
    assert loop.total("buffer_load_dwordx4") >= 2


@pytest.mark.sampled(always=[{"target": "gfx950"}], most=1)
@both_targets
def test_a_descale_for_each_thread_costs_no_more_than_one_for_a_tile(target: str) -> None:
    fine, coarse = causal(target, "int8"), causal(target, "int8", k_granularity="per_block")
    assert fine.valu <= coarse.valu + 4


@pytest.mark.sampled(most=1)
@both_targets
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ragged", [False, True])
@qk_dtypes
def test_the_heaviest_options_spill_nothing(qk_dtype: str, ragged: bool, head_dim: int, target: str) -> None:
    compiled(
        target, head_dim=head_dim, ragged=ragged, qk_dtype=qk_dtype, smooth_q=True, window=(100, 50),
        q_granularity="per_thread", k_granularity="per_thread",
    )  # fmt: skip


@pytest.mark.sampled(always=[{"target": "gfx942"}], most=1)
@both_targets
def test_a_window_spills_no_scalars(target: str) -> None:
    """Two comparisons for each key, one for each bound of the window, took too many scalar registers."""
    code = compiled(
        target, qk_dtype="int4", smooth_q=True, window=(100, 50), q_granularity="per_block",
        k_granularity="per_thread",
    )  # fmt: skip
    assert code.registers.sgpr_spills == 0


MASKED: tuple[dict[str, Any], ...] = (
    {"qk_dtype": "int8"},
    {"qk_dtype": "int8", "causal": "bottom_right", "block_sizes": (256, 128)},
    {"qk_dtype": "fp8", "smooth_q": True, "window": (100, 50)},
    {"qk_dtype": "int4", "smooth_q": True, "window": (100, 50)},
)  # fmt: skip


@pytest.mark.sampled(most=2)
@both_targets
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", MASKED, ids=str)
def test_block_masks_spill_nothing(options: dict[str, Any], head_dim: int, target: str) -> None:
    compiled(target, head_dim=head_dim, **{"block_sizes": (128, 64), **options})


@pytest.mark.sampled(always=[{"target": "gfx942"}], most=1)
@both_targets
def test_a_list_of_tiles_costs_the_loop_a_few_addresses(target: str) -> None:
    masked, plain = causal(target, "int8", block_sizes=(128, 64)), causal(target, "int8")
    assert masked.valu <= plain.valu + 16
    assert masked.total("ds_write") == plain.total("ds_write")


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("block_sizes", [(128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("options", MASKED, ids=str)
def test_block_masks_spill_nothing_on_hopper(
    options: dict[str, Any], block_sizes: tuple[int, int], sm90_code: Any
) -> None:
    q = torch.empty(1, 300, 4, 128, dtype=torch.bfloat16)
    plan = plan_sage(q, q, **{"block_sizes": block_sizes, **options})
    plan.attend(q, plan.quantize_kv(q, q), return_lse=True, block_mask=_flags(plan))
    for kernel in sm90_code.kernels:
        assert kernel.stack_bytes() == 0


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("causal", [None, "bottom_right"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("qk_dtype", ["int8", "fp8"])
def test_attention_quantises_q_without_spills_on_hopper(
    qk_dtype: str, head_dim: int, causal: str | None, ragged: bool, sm90_code: Any
) -> None:
    starts = torch.tensor([0, 100, 300], dtype=torch.int32) if ragged else None
    q = torch.empty(*(() if ragged else (1,)), 300, 4, head_dim, dtype=torch.bfloat16)
    sage_attention(q, q, q, qk_dtype=qk_dtype, causal=causal, cu_seqlens_q=starts, cu_seqlens_k=starts)
    assert "_quantise_tokens_kernel" not in [kernel.name for kernel in sm90_code.kernels]
    for kernel in sm90_code.kernels:
        assert kernel.stack_bytes() == 0


@pytest.mark.slow
@pytest.mark.codegen_all
@both_targets
@qk_dtypes
@pytest.mark.parametrize(("q_granularity", "k_granularity"), list(product(SAGE_GRANULARITIES, repeat=2)))
def test_every_shipped_configuration_spills_nothing(
    q_granularity: str, k_granularity: str, qk_dtype: str, target: str
) -> None:
    masks: tuple[dict[str, Any], ...] = (
        {}, {"causal": "top_left"}, {"causal": "bottom_right"}, {"window": (100, 50)},
    )  # fmt: skip
    for head_dim, ragged, smooth_q, mask in product((64, 128), (False, True), (False, True), masks):
        compiled(
            target, head_dim=head_dim, ragged=ragged, smooth_q=smooth_q, qk_dtype=qk_dtype,
            q_granularity=q_granularity, k_granularity=k_granularity, **mask,
        )  # fmt: skip
