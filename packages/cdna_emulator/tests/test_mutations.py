"""Deliberate faults in compiled code that must not go unnoticed."""

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import emulator_kernels as kernels  # noqa: E402
from emulator_cases import PagedDecode, ScaledProduct  # noqa: E402
from emulator_support import TARGETS, compile_kernel  # noqa: E402

from narrowkv.cdna_emulator import EmulatorError, RaceError  # noqa: E402

both_targets = pytest.mark.parametrize("target", TARGETS)


def case():
    return PagedDecode(torch.bfloat16, batch=1, heads=1, lengths=(70,))


def wrong(target, edit, warps=4, **run_options):
    """Whether an edit is noticed: an error, or a result further off than bf16 rounding."""
    decode = case()
    try:
        decode.run(target, edit=edit, warps=warps, **run_options)
    except EmulatorError:
        return True
    return not decode.is_right()


def nth(pattern, index, replacement):
    """An edit that replaces one match."""

    def edit(text):
        match = list(re.finditer(pattern, text, re.M))[index]
        new = replacement(match) if callable(replacement) else match.expand(replacement)
        return text[: match.start()] + new + text[match.end() :]

    return edit


def text_of(target):
    decode = case()
    constants = decode.constants | {"STAGES": 1}
    return compile_kernel(kernels.paged_decode, target, decode.arguments, constants, num_warps=4).asm[
        "amdgcn"
    ]


@both_targets
def test_unedited_code_is_right_and_free_of_races(target):
    assert not wrong(target, None, detect_races=True, check_uninitialised=True)


@both_targets
def test_every_removed_barrier_is_noticed(target):
    count = len(re.findall(r"^\ts_barrier", text_of(target), re.M))
    assert count >= 2
    for k in range(count):
        assert wrong(target, nth(r"^\ts_barrier", k, r"\ts_nop 0"), detect_races=True), k


@both_targets
def test_a_removed_barrier_is_a_race(target):
    def without_barriers(text):
        return text.replace("\ts_barrier", "\ts_nop 0")

    options = {"detect_races": True, "check_uninitialised": False, "wave_order": "lockstep"}
    with pytest.raises(RaceError):
        case().run(target, warps=4, edit=without_barriers, **options)


FAULTS = {
    "LDS offset": nth(
        r"^\t(ds_read\w*b(?:64|128)\w* .*?offset\d?:)(\d+)", 0,
        lambda m: f"\t{m.group(1)}{int(m.group(2)) + (8 if 'offset:' in m.group(1) else 1)}",
    ),
    "swapped MFMA operands": nth(r"^\t(v_mfma_\S+) (\S+), (v\S+), (v\S+), ", 0, r"\t\1 \2, \4, \3, "),
    "MFMA of another type": nth(r"(v_mfma_f32_\d+x\d+x\d+)_bf16", 0, r"\1_f16"),
}  # fmt: skip


@both_targets
@pytest.mark.parametrize("fault", FAULTS)
def test_a_changed_instruction_is_noticed(fault, target):
    assert wrong(target, FAULTS[fault], warps=1)


def test_changed_scale_selection():
    def right(edit):
        product = ScaledProduct(("e4m3", "e2m1"), 32, 32, 128, seed=2)
        product.run(edit=edit)
        return product.is_right()

    pattern = r"(v_mfma_scale_.*?op_sel_hi:\[)(\d)"
    assert right(None)
    assert not right(lambda text: re.sub(pattern, lambda m: m.group(1) + str(1 - int(m.group(2))), text))
    with pytest.raises(EmulatorError):  # the registers of the operand no longer fit the format
        right(lambda text: re.sub(r"(v_mfma_scale_.*)(cbsz|blgp):4", r"\1\2:0", text))
