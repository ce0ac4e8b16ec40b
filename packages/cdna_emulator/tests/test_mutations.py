"""Deliberate faults in compiled code that must not go unnoticed."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import emulator_kernels as kernels  # noqa: E402
from emulator_support import TARGETS, compile_kernel, emulate  # noqa: E402
from test_kernels import paged_case  # noqa: E402
from test_matrix import _scaled_operand  # noqa: E402

from narrowkv.cdna_emulator import EmulatorError, RaceError  # noqa: E402

both_targets = pytest.mark.parametrize("target", TARGETS)


def decode(target, edit=None, warps=4, **run_options):
    arguments, constants, want = paged_case(torch.bfloat16, batch=1, heads=1, lengths=(70,))
    emulate(
        kernels.paged_decode,
        target,
        (1, 1),
        arguments,
        constants | {"STAGES": 1},
        num_warps=warps,
        edit=edit,
        run_options=run_options,
    )
    return arguments["o_ptr"].float(), want


def wrong(target, edit, **options):
    """Whether an edit is noticed: an error, or a result further off than bf16 rounding."""
    try:
        got, want = decode(target, edit, **options)
    except EmulatorError:
        return True
    return not bool((got - want).abs().max() < 3 * 2**-9 * want.abs().max())


def nth(pattern, index, replacement):
    """An edit that replaces one match."""

    def edit(text):
        match = list(re.finditer(pattern, text, re.M))[index]
        new = replacement(match) if callable(replacement) else match.expand(replacement)
        return text[: match.start()] + new + text[match.end() :]

    return edit


def _without_barriers(text):
    return text.replace("\ts_barrier", "\ts_nop 0")


def text_of(target, warps=4):
    arguments, constants, _ = paged_case(torch.bfloat16, batch=1, heads=1, lengths=(70,))
    return compile_kernel(
        kernels.paged_decode, target, arguments, constants | {"STAGES": 1}, num_warps=warps
    ).asm["amdgcn"]


@both_targets
def test_unedited_code_is_right_and_free_of_races(target):
    assert not wrong(target, None, detect_races=True, check_uninitialised=True)


@both_targets
def test_every_removed_barrier_is_noticed(target):
    count = len(re.findall(r"^\ts_barrier", text_of(target), re.M))
    assert count >= 2
    unnoticed = [
        k for k in range(count) if not wrong(target, nth(r"^\ts_barrier", k, r"\ts_nop 0"), detect_races=True)
    ]
    assert unnoticed == []


@both_targets
def test_a_removed_barrier_is_a_race(target):
    with pytest.raises(RaceError):
        decode(target, _without_barriers, detect_races=True, check_uninitialised=False, wave_order="lockstep")


@both_targets
def test_changed_lds_offset(target):
    pattern = r"^\t(ds_read\w*b(?:64|128)\w* .*?offset\d?:)(\d+)"
    found = re.findall(pattern, text_of(target, 1), re.M)
    assert found
    edit = nth(
        pattern, 0, lambda m: f"\t{m.group(1)}{int(m.group(2)) + (8 if 'offset:' in m.group(1) else 1)}"
    )
    assert wrong(target, edit, warps=1)


@both_targets
def test_swapped_mfma_operands(target):
    assert wrong(target, nth(r"^\t(v_mfma_\S+) (\S+), (v\S+), (v\S+), ", 0, r"\t\1 \2, \4, \3, "), warps=1)


@both_targets
def test_mfma_of_another_type(target):
    assert wrong(
        target, lambda text: re.sub(r"(v_mfma_f32_\d+x\d+x\d+)_bf16", r"\1_f16", text, count=1), warps=1
    )


def test_changed_scale_selection():
    def scaled(edit):
        rng = np.random.default_rng(2)
        (a, av), (b, bv) = _scaled_operand(rng, "e4m3", 32, 128), _scaled_operand(rng, "e2m1", 32, 128)
        sa, sb = (torch.from_numpy(rng.integers(120, 134, (32, 4)).astype(np.uint8)) for _ in range(2))
        grow = lambda s: torch.exp2(s.double() - 127).repeat_interleave(32, 1)  # noqa: E731
        c = torch.zeros(32, 32)
        arguments = {"a_ptr": a, "a_scale_ptr": sa, "b_ptr": b.T.contiguous(), "b_scale_ptr": sb, "c_ptr": c}
        constants = {
            "M": 32,
            "N": 32,
            "K": 128,
            "A_FORMAT": "e4m3",
            "B_FORMAT": "e2m1",
            "A_PACK": 1,
            "B_PACK": 2,
        }
        emulate(kernels.dot_scaled, "gfx950", (1,), arguments, constants, num_warps=4, edit=edit)
        return bool(torch.allclose(c.double(), (av * grow(sa)) @ (bv * grow(sb)).T, rtol=1e-5, atol=1e-3))

    pattern = r"(v_mfma_scale_.*?op_sel_hi:\[)(\d)"
    assert scaled(None)
    assert not scaled(lambda text: re.sub(pattern, lambda m: m.group(1) + str(1 - int(m.group(2))), text))
    with pytest.raises(EmulatorError):  # the registers of the operand no longer fit the format
        scaled(lambda text: re.sub(r"(v_mfma_scale_.*)(cbsz|blgp):4", r"\1\2:0", text))
