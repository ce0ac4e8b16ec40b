"""Prefill's cases: sweeps meet every axis, and what a target is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowkv.runtime.targets import get_target
from narrowkv.testing.cases.prefill import (
    AXES,
    FORMATS,
    HEAD_DIMS,
    OF_APPEND,
    OF_BOTH,
    OF_PREFILL,
    QUERIES,
    PrefillCase,
    can_be,
    quick,
    serves,
    shipped,
    sweep,
)


def test_the_sweep_meets_every_value_of_every_axis_with_each_kernel() -> None:
    cases = sweep(get_target("cpu"))
    assert len(set(cases)) == len(cases)
    for kernel, own in (
        *(("dense", OF_PREFILL), ("fused", OF_PREFILL)),
        *((kernel, OF_APPEND) for kernel in ("append_then_attend", "fused")),
    ):
        operation = "prefill" if own is OF_PREFILL else "append"
        of_kernel = {case for case in cases if case.kernel == kernel and case.operation == operation}
        alone = [{name: value} for name, values in AXES.items() for value in values]
        for change in (*alone, *OF_BOTH, *own):
            wanted = replace(PrefillCase(operation=operation, kernel=kernel), **change)
            assert wanted in of_kernel or not can_be(wanted), wanted
    assert any(case.fp8_compute for case in cases)
    assert {case.q_dtype for case in cases} == set(QUERIES.values())
    assert len(sweep(get_target("cpu"), everything=True)) > 2 * len(cases)


@pytest.mark.parametrize(("target", "units"), [("gfx942", 2), ("gfx950", 1), ("sm90", 1), ("cpu", 2)])
def test_a_target_is_asked_for_what_it_has(target: str, units: int) -> None:
    """An OCP cache feeds gfx942's FNUZ units; no other target multiplies both kinds."""
    served = [case for case in quick() if serves(case, get_target(target))]
    assert len({case.native_fp8 for case in served} - {""}) == units
    assert {case for case in quick() if not case.native_fp8} <= set(served)


def test_what_is_shipped_covers_kernels_formats_and_fp8_units() -> None:
    for target, units in (("gfx942", {"fp8_e4m3fn", "fp8_e4m3fnuz"}), ("gfx950", {"fp8_e4m3fn"})):
        cases = shipped(target)
        for way in (
            ("prefill", "dense"),
            ("prefill", "fused"),
            ("append", "append_then_attend"),
            ("append", "fused"),
        ):
            own = [case for case in cases if (case.operation, case.kernel) == way]
            found = {(case.format, case.head_dim) for case in own}
            assert found == {(fmt, head_dim) for fmt in FORMATS for head_dim in HEAD_DIMS}
        assert {case.format for case in cases if case.fp8_compute} == units
        assert {case.q_dtype for case in cases} == {torch.bfloat16, *(QUERIES[name] for name in units)}
