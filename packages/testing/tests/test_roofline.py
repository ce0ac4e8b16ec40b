"""The roofline: by hand on made-up loops, and on what decode really compiles to and executes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from narrowkv.cdna_emulator import UnknownInstructionError
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch.artifact import InstructionMix
from narrowkv.runtime.targets import Target, get_target
from narrowkv.testing import emulation
from narrowkv.testing.cases.decode import GLM_GQA12, DecodeCase
from narrowkv.testing.codegen import inspect_case, lds_bytes, mfma_clocks, mfma_flops, roofline, valu_clocks

GFX942, GFX950 = get_target("gfx942"), get_target("gfx950")


def mix(**mnemonics: int) -> InstructionMix:
    return InstructionMix(Counter(mnemonics))


def test_vector_instructions_take_four_clocks_and_slow_ones_more() -> None:
    loop = mix(
        v_fma_f32=10, v_exp_f32_e32=3, v_mul_lo_u32=2, v_mfma_f32_16x16x16_f16=5, s_nop=9, ds_read_b128=4
    )
    for target, exponential in ((GFX942, 16), (GFX950, 8)):
        assert target.figures is not None
        assert valu_clocks(loop, target.figures) == 10 * 4 + 3 * exponential + 2 * 16


@pytest.mark.parametrize(
    ("target", "name", "flops", "flops_a_clock"),
    [
        (GFX942, "v_mfma_f32_16x16x16_bf16", 8192, 2048),
        (GFX942, "v_mfma_f32_16x16x16_f16", 8192, 2048),
        (GFX942, "v_mfma_f32_32x32x8_f16", 16384, 2048),
        (GFX942, "v_mfma_f32_16x16x32_fp8_fp8", 16384, 4096),
        (GFX942, "v_mfma_f32_4x4x4_16b_f16", 2048, 2048),
        (GFX942, "v_mfma_f32_16x16x4_f32", 2048, 256),
        (GFX950, "v_mfma_scale_f32_16x16x128_f8f6f4", 2 * 16 * 16 * 128, 8192),  # at the FP8 rate
    ],
)
def test_matrix_instructions_by_their_shape_and_type(
    target: Target, name: str, flops: float, flops_a_clock: float
) -> None:
    assert target.figures is not None
    assert mfma_flops(mix(**{name: 3})) == 3 * flops
    assert mfma_clocks(mix(**{name: 3}), target.figures) == pytest.approx(3 * flops / flops_a_clock)


def test_an_unknown_matrix_instruction_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="v_smfmac_f32_16x16x32_bf16"):
        roofline(mix(v_smfmac_f32_16x16x32_bf16=1), GFX942, num_warps=1, hbm_bytes=1024)


def test_lds_bytes_count_widths_pairs_and_whole_banks() -> None:
    assert lds_bytes(mix(ds_read_b128=1)) == 16 * 64
    assert lds_bytes(mix(ds_write2st64_b32=1)) == 2 * 4 * 64
    assert lds_bytes(mix(ds_read_b64_tr_b8=1)) == 8 * 64
    assert lds_bytes(mix(ds_read_u8_d16=1)) == 4 * 64
    assert lds_bytes(mix(v_mov_b32_e32=7)) == 0


def test_the_memory_share_of_a_unit() -> None:
    # 5.3 TB/s over 304 units at 2.1 GHz is 8.30 bytes a clock.
    model = roofline(mix(v_fma_f32=4), GFX942, num_warps=1, hbm_bytes=8192)
    assert model.memory_clk == pytest.approx(8192 / (5.3e12 / 2.1e9 / 304))
    assert model.valu_clk == 4 * 4 / 4
    assert model.bound_by == "memory"
    assert model.resource == "hbm"
    assert model.as_dict()["label"] == "model"


def test_a_loop_with_too_many_instructions_is_bound_by_issue() -> None:
    few = roofline(mix(v_fma_f32=900), GFX942, num_warps=1, hbm_bytes=8192)
    many = roofline(mix(v_fma_f32=1100), GFX942, num_warps=1, hbm_bytes=8192)
    assert (few.bound_by, many.bound_by) == ("memory", "issue")
    assert many.resource == "valu"
    assert many.issue_over_memory == pytest.approx(1100 * 4 / 4 / many.memory_clk)
    four_waves = roofline(mix(v_fma_f32=900), GFX942, num_warps=4, hbm_bytes=8192)
    assert four_waves.bound_by == "issue"


@pytest.mark.parametrize(("hbm_bytes", "num_warps"), [(0, 1), (-1, 1), (1024, 0)])
def test_nothing_to_divide_by_is_refused(hbm_bytes: float, num_warps: int) -> None:
    with pytest.raises(ValueError, match="hbm_bytes and num_warps"):
        roofline(mix(v_fma_f32=1), GFX942, num_warps=num_warps, hbm_bytes=hbm_bytes)


def test_no_loop_and_no_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        roofline(InstructionMix(), GFX942, num_warps=1, hbm_bytes=1)
    with pytest.raises(UnsupportedError, match="cpu"):
        roofline(mix(v_fma_f32=1), get_target("cpu"), num_warps=1, hbm_bytes=1)


def glm(fmt: str) -> DecodeCase:
    return replace(GLM_GQA12, format=fmt)


@pytest.mark.parametrize(
    ("target", "fmt"), [("gfx942", "fp8_e4m3fnuz"), ("gfx942", "fp8_e4m3fn"), ("gfx950", "fp8_e4m3fn")]
)
def test_decode_at_ratio_12_is_bound_by_memory_and_spills_nothing(target: str, fmt: str) -> None:
    inspection, artifacts = inspect_case(glm(fmt), target, with_assembly=True)
    assert len(artifacts) == len(inspection.kernels)
    assert all(k.spills == 0 and k.scratch_bytes == 0 for k in inspection.kernels)
    assert inspection.model is not None
    assert inspection.model.bound_by == "memory", inspection.model.as_dict()
    # QK and PV of 16 rows, the tile's keys, 128 columns: no less is computed, whatever the compiler does.
    keys = inspection.model.hbm_bytes / (128 * 2)
    assert inspection.model.mfma_flops >= 2 * 2 * 16 * keys * 128
    assert inspection.assembly == {a.name: a.assembly for a in artifacts}
    assert any("v_mfma" in text for text in inspection.assembly.values())


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_the_models_count_what_emulated_workgroups_execute(target: str) -> None:
    # Unsplit, so that a workgroup passes once for each tile of its sequence, here of two lengths.
    case = DecodeCase(lens=(300, 20), split="none", clean=True, num_kv_heads=1, head_dim=64)
    inspection, artifacts = inspect_case(case, target)
    (main,) = artifacts
    assert (inspection.counts, inspection.static_reason, inspection.assembly) == ("dynamic", "", None)
    counted = inspection.emulated
    assert counted is not None
    assert counted.workgroups == 2
    tile = 64 if "64 keys" in inspection.plan else 32
    assert counted.passes == (-(-300 // tile) + -(-20 // tile)) / 2
    # The loop has no branch inside, so that a pass executes its text.
    assert sum(counted.loop.values()) == pytest.approx(main.loop.total())
    assert counted.loop_wave_instructions < counted.wave_instructions
    assert counted.stored_bytes >= 12 * 64 * 2
    static = roofline(
        main.loop, get_target(target), num_warps=main.num_warps, hbm_bytes=tile * 64 * 2
    ).as_dict()
    assert inspection.model is not None
    assert inspection.model.as_dict() == pytest.approx(static)
    whole = inspection.whole_model
    assert whole is not None
    assert whole.label == "model"
    assert whole.mfma_clk == pytest.approx(inspection.model.mfma_clk * counted.passes), (
        "all of it in the loop"
    )
    assert whole.valu_clk > inspection.model.valu_clk * counted.passes


def test_masked_tiles_are_not_in_the_loop() -> None:
    """With several query tokens the last tile, which they do not all see, has a loop of its own."""
    inspection, artifacts = inspect_case(
        DecodeCase(lens=(300,), q_len=2, split="none", clean=True, num_kv_heads=1, head_dim=64), "gfx942"
    )
    assert inspection.counts == "dynamic"
    assert inspection.emulated is not None
    (main,) = artifacts
    assert inspection.emulated.passes == 4
    assert sum(inspection.emulated.loop.values()) == pytest.approx(main.loop.total(), rel=1e-3)
    # The whole has two products of the masked tile, too.
    assert main.whole.mfma > main.loop.mfma


def test_four_waves_count_as_four() -> None:
    case = DecodeCase(lens=(100,), gqa_ratio=40, split="none", clean=True, num_kv_heads=1, head_dim=64)
    inspection, artifacts = inspect_case(case, "gfx942")
    (main,) = artifacts
    assert main.num_warps == 4
    bytes_per_pass = inspection.model.hbm_bytes if inspection.model is not None else 0.0
    static = roofline(main.loop, GFX942, num_warps=4, hbm_bytes=bytes_per_pass)
    assert inspection.counts == "dynamic"
    assert inspection.model is not None
    assert inspection.model.as_dict() == pytest.approx(static.as_dict())


def test_without_emulation_the_counts_are_static_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: object, **options: object) -> object:
        raise UnknownInstructionError("instruction v_new_thing is not implemented for gfx942")

    monkeypatch.setattr(emulation, "load_program", refuses)
    inspection, artifacts = inspect_case(glm("fp8_e4m3fnuz"), "gfx942")
    assert inspection.counts == "static"
    assert "v_new_thing" in inspection.static_reason
    assert inspection.emulated is None
    assert inspection.whole_model is None
    assert inspection.model is not None
    assert inspection.model.valu_clk == valu_clocks(artifacts[0].loop, GFX942.figures) / 4  # type: ignore[arg-type]


def test_workgroups_without_keys_leave_the_counts_static() -> None:
    inspection, _ = inspect_case(DecodeCase(lens=(0, 0), split="none", clean=True, head_dim=64), "gfx942")
    assert inspection.counts == "static"
    assert "went through the loop" in inspection.static_reason
    assert inspection.model is not None
