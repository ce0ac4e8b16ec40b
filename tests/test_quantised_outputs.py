"""Outputs in FP8 with a scale: bytes, refusals, and what the kernels compile to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from generated_code import both_targets, compile_case, emulate

from narrowkv.attn_decode import merge_states, paged_decode
from narrowkv.quant import quantize_with_descale
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import executing
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.checking import check

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
KINDS = {FN: "fp8_e4m3fn", FNUZ: "fp8_e4m3fnuz"}
_kinds = pytest.mark.parametrize("kind", [FN, FNUZ], ids=KINDS.values())
_LONG: dict[str, Any] = {
    "q_lens": (1024,), "lens": (4096,), "num_kv_heads": 8, "gqa_ratio": 12, "clean": True, "head_dim": 128,
}  # fmt: skip
# Every kernel that writes rows of outputs, in a shipped configuration.
SHIPPED: dict[str, DecodeCase | PrefillCase] = {
    "decode": DecodeCase(lens=(2048,) * 2, num_kv_heads=8),
    "decode, unsplit": DecodeCase(lens=(70, 5), split="none"),
    "decode, four tokens": DecodeCase(lens=(2048,), q_len=4),
    "decode, FP4": DecodeCase(lens=(2048,), format="fp4_e2m1", clean=True),
    "prefill, dense": PrefillCase(kernel="dense", **_LONG),
    "prefill, fused": PrefillCase(kernel="fused", **_LONG),
    "prefill, FP8 queries": PrefillCase(q_dtype=FN, **_LONG),
    "append, fused": PrefillCase(operation="append", kernel="fused", **_LONG),
    "append, two launches": PrefillCase(operation="append", kernel="append_then_attend", **_LONG),
}
_SMALL: dict[str, Any] = {"gqa_ratio": 3, "num_kv_heads": 1, "head_dim": 64}
SMALL: dict[str, DecodeCase | PrefillCase] = {
    "decode, unsplit": DecodeCase.small(split="none", **_SMALL),
    "decode, merged": DecodeCase(lens=(300, 5), split="per_sequence", **_SMALL),
    "decode, four tokens, sinks": DecodeCase.small(q_len=4, sinks=True, window_left=20, **_SMALL),
    "prefill, dense": PrefillCase(kernel="dense"),
    "prefill, dense, split": PrefillCase(kernel="dense", num_splits=3, lens=(20, 5, 200)),
    "prefill, fused": PrefillCase(kernel="fused"),
    "append, fused": PrefillCase(operation="append", kernel="fused"),
    "append, two launches": PrefillCase(operation="append", kernel="append_then_attend"),
}
_small = pytest.mark.parametrize("case", SMALL.values(), ids=SMALL)


def _numbers(case: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a case in FP8, as numbers, and in fp32."""
    inputs = case.inputs()
    fp8 = inputs.call()[0]
    wide = replace(case, out_dtype=torch.float32).inputs().call()[0]
    return fp8, wide


@_kinds
@_small
def test_bytes_are_those_of_the_quantised_fp32_output(case: Any, kind: torch.dtype) -> None:
    case = replace(case, out_dtype=kind)
    inputs = case.inputs()
    fp8, wide = _numbers(case)
    assert fp8.dtype == kind
    scale = inputs.options["out_scale"]
    wanted = quantize_with_descale(wide, KINDS[kind], scale)
    # The kernel multiplies by the scale's reciprocal: halfway numbers may round the other way.
    differ = fp8.view(torch.uint8).int() != wanted.view(torch.uint8).int()
    assert differ.float().mean() < 1e-3
    torch.testing.assert_close(fp8.float(), wanted.float(), rtol=0.14, atol=2.0**-9)
    assert check(case, inputs, inputs.call()).passed


@_small
def test_outputs_saturate_and_zeros_stay_zeros(case: Any) -> None:
    inputs = replace(case, out_dtype=FN).inputs()
    for scale in (1e-6, 1e-40, 2.0**-126):
        inputs.options["out_scale"] = torch.tensor([scale])
        o, wide = inputs.call()[0].float(), replace(case, out_dtype=torch.float32).inputs().call()[0]
        assert not o.isnan().any()
        large = wide.abs() > 1e-3
        assert (o[large].abs() == 448.0).all()
        assert torch.equal(o[large].sign(), wide[large].sign())
        assert (o[wide == 0.0] == 0.0).all()


def test_rows_without_keys_are_zeros_over_any_scale() -> None:
    inputs = DecodeCase.small(lens=(0, 5), out_dtype=FN, sinks=True).inputs()
    for scale in (1e-44, 1.0, 3e38):
        inputs.options["out_scale"] = torch.tensor([scale])
        o, lse = inputs.call()
        assert (o.view(torch.uint8)[0] == 0).all()
        assert (lse[0] == -torch.inf).all()


_REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no FP8 output": ({"out_scale": torch.ones(1)}, ValueError, "out_dtype must be one of .*float8"),
    "a 16-bit output": (
        {"out_scale": torch.ones(1), "out_dtype": torch.bfloat16}, ValueError, "out_dtype must be one of",
    ),
    "no scale": ({"out_dtype": FN}, ValueError, "out_dtype must be one of"),
    "E5M2": (
        {"out_scale": torch.ones(1), "out_dtype": torch.float8_e5m2}, ValueError, "out_dtype must be one of",
    ),
    "a number": ({"out_scale": 1.0, "out_dtype": FN}, TypeError, "out_scale must be"),
    "a scale in fp16": ({"out_scale": torch.ones(1).half(), "out_dtype": FN}, TypeError, "out_scale must"),
    "a scale a head": ({"out_scale": torch.ones(3), "out_dtype": FN}, ValueError, "out_scale must have"),
    "zero": ({"out_scale": torch.zeros(1), "out_dtype": FN}, ValueError, "out_scale must be finite"),
    "NaN": ({"out_scale": torch.ones(1) * torch.nan, "out_dtype": FN}, ValueError, "out_scale must be"),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [DecodeCase.small(), PrefillCase(), PrefillCase(operation="append")], ids=str
)
@pytest.mark.parametrize(("options", "error", "message"), _REFUSED.values(), ids=_REFUSED)
def test_wrong_scales_and_dtypes_are_refused_before_any_launch(
    case: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    inputs = case.inputs()
    inputs.options.pop("out_dtype", None)
    inputs.options.update(options)
    with executing(LaunchRecorder("gfx950")) as recorder, pytest.raises(error, match=message):
        inputs.prepare()()
    assert not recorder.launches


@_small
def test_compiled_functions_write_the_same_bytes(case: Any) -> None:
    inputs = replace(case, out_dtype=FN).inputs()
    plan, wanted = inputs.plan(), inputs.call()[0]
    scale = inputs.options.pop("out_scale")

    def run(q: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        given = {**inputs.options, "out_scale": scale, "plan": plan, "out": out}
        if isinstance(case, DecodeCase):
            return paged_decode(q, inputs.cache, inputs.table, **given)
        return replace(inputs, q=q).run(plan, out_scale=scale, out=out)

    torch._dynamo.reset()  # all cases share the code of `run`, which is compiled again only a few times
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for out in (None, torch.zeros_like(wanted)):
        found = compiled(inputs.q, scale, out)
        assert found.dtype == FN
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        assert out is None or torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))


def test_results_may_not_lie_over_the_scale() -> None:
    inputs = DecodeCase.small().inputs()
    memory = torch.ones(inputs.q.numel() // 4 + 1)
    out = memory.view(torch.uint8)[: inputs.q.numel()].view(FN).view(inputs.q.shape)
    with pytest.raises(ValueError, match="out_scale"):
        paged_decode(inputs.q, inputs.cache, inputs.table, out=out, out_scale=memory[:1])


def test_partial_results_that_are_merged_are_not_in_fp8() -> None:
    with pytest.raises(ValueError, match="out_dtype must be one of"):
        merge_states(torch.zeros(2, 3, 4, 64), torch.zeros(2, 3, 4), out_dtype=FN)


def test_fnuz_is_refused_on_nvidia(sm90_code: Any) -> None:
    inputs = DecodeCase.small(out_dtype=FNUZ).inputs()
    with pytest.raises(UnsupportedError, match="NVIDIA's GPUs have float8_e4m3fn"):
        inputs.call()
    assert not sm90_code.kernels


@pytest.mark.codegen_all
@pytest.mark.sampled(most=3)
@_kinds
@both_targets
@pytest.mark.parametrize("case", SHIPPED.values(), ids=SHIPPED)
def test_no_kernel_spills(case: Any, target: str, kind: torch.dtype) -> None:
    plain, fp8 = (compile_case(replace(case, out_dtype=dtype), target) for dtype in (None, kind))
    assert [code.name for code in plain] == [code.name for code in fp8]
    for before, after in zip(plain, fp8, strict=True):
        # The merge of one sequence has too few programs to fill a SIMD with the waves that fit.
        assert after.waves_per_simd >= before.waves_per_simd or before.name == "_merge_splits_kernel"
        assert after.lds_bytes <= before.lds_bytes


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("case", SHIPPED.values(), ids=SHIPPED)
def test_hopper_spills_hardly_more(case: Any, sm90_code: Any) -> None:
    spilled = []
    for dtype in (None, FN):
        sm90_code.kernels.clear()
        replace(case, out_dtype=dtype).inputs().prepare()()
        spilled.append({kernel.name: kernel.stack_bytes() for kernel in sm90_code.kernels})
    assert spilled[0].keys() == spilled[1].keys()
    # Registers of the loop are allotted a little differently: 184 and 192 bytes for four tokens.
    assert all(after <= spilled[0][name] + 8 for name, after in spilled[1].items()), spilled


@pytest.mark.sampled(most=3)
@_kinds
@both_targets
@_small
def test_machine_code_gives_the_references_bytes(case: Any, target: str, kind: torch.dtype) -> None:
    result, _ = emulate(replace(case, out_dtype=kind), target)
    assert result.passed, result
