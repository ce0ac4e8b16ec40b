"""What Sage attention compiles to for gfx942 and gfx950: no spills or scratch, narrow matrix instructions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from narrowkv.quant.sage import SAGE_GRANULARITIES
from narrowkv.runtime.launch import compile_for
from narrowkv.runtime.launch.artifact import CompiledArtifact
from narrowkv.runtime.toolchain import TRITON
from narrowkv.sage import plan_sage

pytestmark = pytest.mark.sampled(most=2)

TARGETS = ["gfx942", "gfx950"]
both_targets = pytest.mark.parametrize("target", TARGETS)


def compiled(
    target: str, *, head_dim: int = 128, ragged: bool = False, lse: bool = True, **options: Any
) -> list[CompiledArtifact]:
    """Every kernel of a call, the attention kernel last."""
    sizes = (300, 4, head_dim) if ragged else (1, 300, 4, head_dim)
    q = torch.empty(sizes, dtype=torch.bfloat16)
    if ragged:
        starts = torch.tensor([0, 100, 300], dtype=torch.int32)
        options = {**options, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    k = q[..., :2, :]
    with compile_for(target) as artifacts:
        plan = plan_sage(q, k, **options)
        plan.attend(q, plan.quantize_kv(k, k), return_lse=lse)
    return list(artifacts)


def _check_registers(artifacts: list[CompiledArtifact]) -> None:
    for artifact in artifacts:
        registers = artifact.registers
        assert registers.vgpr_spills == 0, artifact.name
        assert registers.scratch_bytes == 0, artifact.name
    assert artifacts[-1].waves_per_simd >= 2


QK = {
    ("gfx942", "int8"): "v_mfma_i32_32x32x16_i8",
    ("gfx942", "int4"): "v_mfma_i32_32x32x16_i8",
    ("gfx942", "fp8"): "v_mfma_f32_32x32x16_fp8_fp8",
    ("gfx950", "int8"): "v_mfma_i32_32x32x32_i8",
    ("gfx950", "int4"): "v_mfma_i32_32x32x32_i8",
    ("gfx950", "fp8"): "v_mfma_f32_32x32x64_f8f6f4",
}
PV = {"gfx942": "v_mfma_f32_32x32x16_fp8_fp8", "gfx950": "v_mfma_f32_32x32x64_f8f6f4"}


@both_targets
@pytest.mark.parametrize("qk_dtype", ["int8", "int4", "fp8"])
def test_both_products_run_on_narrow_matrix_instructions(target: str, qk_dtype: str) -> None:
    artifacts = compiled(target, qk_dtype=qk_dtype, causal="bottom_right")
    _check_registers(artifacts)
    mfma = {name: n for name, n in artifacts[-1].loop.mnemonics.items() if "mfma" in name}
    assert set(mfma) == {QK[target, qk_dtype], PV[target]}
    # A wave's 32 rows by 64 keys by 128 channels, twice.
    depth = {name: int(name.split("x")[2].split("_")[0]) for name in mfma}
    assert sum(n * depth[name] for name, n in mfma.items()) * 32 * 32 == 2 * 32 * 64 * 128


@both_targets
def test_the_loop_moves_p_between_the_products_inside_its_lanes(target: str) -> None:
    """No LDS write but those of K and V, and no exchange of lanes but for the row's maximum and sum."""
    loop = compiled(target, causal="bottom_right")[-1].loop
    # Two pipeline stages, on gfx950, exchange halves of a wave for V, too.
    exchanges = 6 if target == "gfx950" and TRITON >= (3, 8) else 2
    assert loop.total("ds_bpermute", "ds_permute", "ds_swizzle", "v_permlane") <= exchanges
    assert loop.total("ds_write") <= 4  # 8 KB each of K and V over 256 lanes
    assert loop.valu < 220
    assert loop.total("buffer_load_dwordx4") >= 2


@both_targets
def test_a_descale_for_each_thread_costs_no_more_than_one_for_a_tile(target: str) -> None:
    coarse, fine = (
        compiled(target, k_granularity=granularity)[-1].loop for granularity in ("per_block", "per_thread")
    )
    assert fine.valu <= coarse.valu + 4


@both_targets
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("qk_dtype", ["int8", "int4", "fp8"])
def test_the_heaviest_options_spill_nothing(qk_dtype: str, ragged: bool, head_dim: int, target: str) -> None:
    _check_registers(
        compiled(
            target, head_dim=head_dim, ragged=ragged, qk_dtype=qk_dtype, smooth_q=True, window=(100, 50),
            q_granularity="per_thread", k_granularity="per_thread",
        )
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.codegen_all
@both_targets
@pytest.mark.parametrize("qk_dtype", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(
    ("q_granularity", "k_granularity"), list(itertools.product(SAGE_GRANULARITIES, repeat=2))
)
def test_every_shipped_configuration_spills_nothing(
    target: str, qk_dtype: str, q_granularity: str, k_granularity: str
) -> None:
    masks: list[dict[str, Any]] = [
        {},
        {"causal": "top_left"},
        {"causal": "bottom_right"},
        {"window": (100, 50)},
    ]
    for head_dim, ragged, smooth_q, mask in itertools.product((64, 128), (False, True), (False, True), masks):
        _check_registers(
            compiled(
                target, head_dim=head_dim, ragged=ragged, smooth_q=smooth_q, qk_dtype=qk_dtype,
                q_granularity=q_granularity, k_granularity=k_granularity, **mask,
            )
        )  # fmt: skip
