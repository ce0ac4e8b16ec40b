"""What decode's kernels compile to for Hopper, on a machine without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from generated_code import stale_codes

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_prefill import config
from narrowkv.testing.cases.decode import K8V4, DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sage import SageCase

FP8 = torch.float8_e4m3fn


def _decode(sm90_code: Any, capacity: int, batch: int = 1, **changes: Any) -> Any:
    """The kernels of a call whose plan is for `capacity` keys."""
    case = DecodeCase(lens=(64,) * batch, num_kv_heads=8, **changes)
    q, cache, table = case.build()
    paged_decode(q, cache, table, plan=plan_decode(q, cache, table, max_seq_len=capacity))
    return sm90_code.kernels


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(("batch", "capacity"), [(4, 1024), (1, 32768)])
def test_the_merge_begins_before_attention_has_ended(batch: int, capacity: int, sm90_code: Any) -> None:
    attend, merge = _decode(sm90_code, capacity, batch)
    assert (attend.name, merge.name) == ("_paged_decode_kernel", "_merge_splits_kernel")
    assert not attend.compiled.metadata.launch_pdl
    assert merge.compiled.metadata.launch_pdl
    assert len(re.findall(r"\bPREEXIT\b", attend.machine_code())) == 1
    # Which splits there are is known before the wait; partial results are read after it, on every way.
    ahead, *behind = re.split(r"\bACQBULK\b", merge.machine_code())
    assert behind
    assert re.search(r"\bLDG\b", ahead)
    assert re.search(r"\bLDG\.E\.128\b", behind[-1])
    assert not re.search(r"\bEXIT\b|\bLDG\.E\.128\b", ahead)


def test_a_launch_that_merges_itself_lets_no_other_begin(sm90_code: Any) -> None:
    (attend,) = _decode(sm90_code, 8192, 64)
    assert not re.search(r"\bPREEXIT\b", attend.machine_code())


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(("batch", "capacity"), [(1, 32768), (64, 1024)])
def test_four_programs_share_a_multiprocessor_beside_fp4_values(
    batch: int, capacity: int, sm90_code: Any
) -> None:
    attend = _decode(sm90_code, capacity, batch, format=K8V4)[0]
    assert attend.compiled.metadata.num_warps == 4
    assert attend.registers() <= 128
    assert attend.stack_bytes() <= 24  # with Triton 3.8.0; 8 with 3.9.0
    assert 4 * (attend.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.sampled(always=[{"group": 32, "scale": "e8m0"}], most=1)
@pytest.mark.parametrize(
    ("group", "scale"), [(None, "e8m0"), (32, "e8m0"), (16, "e8m0"), (32, "e4m3"), (16, "e4m3")]
)
def test_fp4_goes_from_memory_to_registers_and_is_converted_two_numbers_at_once(
    group: int | None, scale: str, sm90_code: Any
) -> None:
    (attend,) = _decode(sm90_code, 8192, 64, format="fp4_e2m1", scale_group=group, scale_format=scale)
    code = attend.machine_code()
    if scale == "e8m0" and group != 16:
        # K and V of a tile of 32 keys by one warp, in a loop that stands there once.
        assert len(re.findall(r"\bF2FP\.F16\.E4M3\.UNPACK_B\b", code)) == 2 * 32 * 128 // 2 // 32
    if group is not None:
        assert attend.stack_bytes() <= 48  # with Triton 3.9, a scale per 32 channels in 224 registers
        (loop,) = ("\n".join(instructions) for instructions in attend.product_loops())
        assert not re.search(r"\b(LDGSTS|LDSM|LDS|STS)\b", loop)
        assert len(re.findall(r"\bLDG\.E\.128\b", loop)) == 4  # K of a tile


@pytest.mark.sampled(always=[{"changes": {}}], most=3)
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"granularity": "head", "sinks": True}, {"ragged": True}, {"format": K8V4},
        {"format": "fp4_e2m1"}, {"q_len": 16}, {"q_len": 16, "format": K8V4},
        {"q_len": 16, "format": "fp4_e2m1"}, {"q_len": 4}, {"q_len": 4, "format": K8V4},
        {"q_len": 4, "format": "fp4_e2m1"},
    ],
    ids=str,
)  # fmt: skip
def test_tall_tiles_spill_nothing(changes: dict[str, Any], sm90_code: Any) -> None:
    given = {"q_len": 8, "gqa_ratio": 12, "head_dim": 128, "format": "fp8_e4m3fn", **changes}
    (attend,) = _decode(sm90_code, 8192, 64, **given)
    assert attend.name == "_tall_decode_kernel"
    # Beside three warpgroups that attend, what only the end of a program needs is spilled before its loops.
    assert attend.stack_bytes() == 0 or given["q_len"] == 16
    assert attend.shared_bytes <= 227 * 1024
    loops = attend.product_loops()
    spilled = [text for loop in loops for text in loop if re.search(r"\b(STL|LDL)\b", text)]
    # Over FP4 one register of the first of three warpgroups is loaded again in each pass.
    assert len(spilled) <= ((given["q_len"], given["format"]) == (16, "fp4_e2m1"))
    # The loop without masks: P @ V is issued while the scores are still under way.
    loop = loops[1]
    assert sum("HGMMA" in text for text in loop) == (16 if given["q_len"] == 8 else 12)
    assert any("WARPGROUP.DEPBAR.LE gsb0, 0x1" in text for text in loop)


def test_tiles_of_128_rows_and_128_keys_fit(sm90_code: Any) -> None:
    attend, _ = _decode(sm90_code, 32768, q_len=8)
    assert attend.stack_bytes() <= 16
    assert attend.shared_bytes <= 227 * 1024
    loop = attend.product_loops()[0]
    # 128 rows x 128 keys are 8 + 8 products of a warpgroup, issued together: a wait behind each is serial.
    assert sum("HGMMA" in text for text in loop) == 16
    assert sum("WARPGROUP" in text for text in loop) <= 6
    # No key is masked in this loop.
    assert len(loop) <= 690  # with Triton 3.8.0


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("changes", [{}, {"format": K8V4}, {"format": "fp4_e2m1"}], ids=str)
def test_widened_values_do_not_pass_through_shared_memory(changes: dict[str, Any], sm90_code: Any) -> None:
    """Triton 3.8 lays out one result of inline assembly as a product reads it, and stores the others."""
    (attend,) = _decode(sm90_code, 8192, 64, **changes)
    assert not re.search(r"local_alloc %\S+ : \(tensor<(32|64)x\d+xf16", attend.compiled.asm["ttgir"])


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    "changes", [{"format": K8V4}, {"format": "fp4_e2m1"}, {"format": "int8", "head_dim": 64}], ids=str
)
def test_no_product_is_32_columns_wide(changes: dict[str, Any], sm90_code: Any) -> None:
    """Triton 3.6 gets those wrong beside wider ones."""
    attend = _decode(sm90_code, 32768, q_len=8, **changes)[0]
    assert "HGMMA.64x32" not in attend.machine_code()


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(("fmt", "most"), [(K8V4, 1000), ("fp4_e2m1", 1130)], ids=str)
def test_factors_of_keys_are_not_loaded_by_every_thread(fmt: Any, most: int, sm90_code: Any) -> None:
    attend = _decode(sm90_code, 32768, q_len=8, format=fmt)[0]
    loop = attend.product_loops()[0]
    assert sum(bool(re.search(r"\bLDG\b", text)) for text in loop) <= 12
    assert len(loop) <= most
    assert attend.stack_bytes() == 0


@pytest.mark.sampled(always=[{"fmt": "fp8_e4m3fn", "head_dim": 512, "q_len": 1}], most=1)
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("head_dim", [320, 512])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn", "int8", "int4", "fp4_e2m1", K8V4], ids=str)
def test_heads_wider_than_256_spill_nothing(fmt: Any, head_dim: int, q_len: int, sm90_code: Any) -> None:
    attend = _decode(sm90_code, 8192, 64, format=fmt, head_dim=head_dim, q_len=q_len)[0]
    assert attend.stack_bytes() == 0
    assert attend.shared_bytes <= 227 * 1024


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(("q_len", "gqa_ratio"), [(1, 8), (4, 8), (4, 16)])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn"])
def test_keys_of_192_channels_with_values_of_128_spill_nothing(
    fmt: str, q_len: int, gqa_ratio: int, sm90_code: Any
) -> None:
    case = DecodeCase(
        lens=(64,), num_kv_heads=2, head_dim=192, v_head_dim=128, q_len=q_len, gqa_ratio=gqa_ratio, format=fmt
    )
    q, cache, table = case.build()
    paged_decode(q, cache, table)
    assert sm90_code.kernels[0].stack_bytes() == 0


FP8_CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "prefill": (PrefillCase, {"q_dtype": FP8, "q_lens": (128,), "lens": (192,)}),
    "append": (PrefillCase.append, {"fp8_compute": True, "q_lens": (128,), "lens": (192,)}),
    "decode": (DecodeCase, {"q_dtype": FP8, "lens": (192,), "q_len": 4}),
    "Sage": (SageCase.small, {"qk_dtype": "fp8", "q_lens": (128,), "k_lens": (192,), "head_dim": 128}),
}


def _fp8_call(name: str, head_dim: int, sm90_code: Any) -> list[Any]:
    make, case = FP8_CALLS[name]
    own = {} if name == "Sage" else {"num_kv_heads": 2, "gqa_ratio": 8, "format": "fp8_e4m3fn"}
    make(**{**case, **own, "head_dim": head_dim}).inputs().prepare()()
    return list(sm90_code.kernels)


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", FP8_CALLS)
def test_no_loop_widens_codes_of_the_pass_before(name: str, head_dim: int, sm90_code: Any) -> None:
    for kernel in _fp8_call(name, head_dim, sm90_code):
        assert not stale_codes(kernel.instructions()), kernel.name


def test_tiles_that_are_not_chosen_widen_codes_of_the_pass_before(sm90_code: Any, monkeypatch: Any) -> None:
    """Of a Triton where this fails, prefill's FP8 products may have tiles of 64 rows: see `_fp8_block_m`."""
    monkeypatch.setattr(config, "_fp8_block_m", lambda target, shape: 64)
    (kernel,) = _fp8_call("prefill", 128, sm90_code)
    assert len(stale_codes(kernel.instructions())) >= 8


@pytest.mark.parametrize(("first", "found"), [("R8", []), ("R9", ["R9"])])
def test_stale_codes_are_found(first: str, found: list[str]) -> None:
    code = [
        "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R8, R1, R2, RZ", f"F2FP.F16.E4M3.UNPACK_B R3, {first}",
        "PRMT R9, R8, 0x7610, R9", "@P0 BRA 0x0",
    ]  # fmt: skip
    assert stale_codes([(16 * number, text) for number, text in enumerate(code)]) == found
