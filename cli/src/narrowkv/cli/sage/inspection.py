"""`narrowkv inspect sage`: what every shipped configuration compiles to for gfx942 and gfx950."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.sage.cases import SageCase, build
from narrowkv.cli.shipped_code import CallCode, Modelled, inspect_calls
from narrowkv.quant.sage import SAGE_GRANULARITIES
from narrowkv.testing.codegen import KernelCode, compile_call


def shipped_cases() -> list[SageCase]:
    """A call for every precision, granularity and head_dim."""
    return [
        SageCase(qk, granularity, causal="bottom_right", tokens=256, head_dim=head_dim)
        for head_dim, qk, granularity in product((128, 64), ("int8", "int4", "fp8"), SAGE_GRANULARITIES)
    ]


def inspect_case(case: SageCase, target: str) -> CallCode[SageCase]:
    """Compiles every kernel of a case for a target, the pre-pass too."""
    from narrowkv.runtime.launch import compile_for

    call = build(case)
    artifacts = compile_call(target, call.call)
    with compile_for(target):
        plan = call.explain()
    return CallCode(target, case, tuple(KernelCode.of(artifact) for artifact in artifacts), plan)


_COLUMNS: dict[str, Callable[[SageCase], object]] = {
    "Q and K": lambda case: case.qk,
    "granularity": lambda case: case.granularity,
    "head_dim": lambda case: case.head_dim,
}


def inspect_sage(
    cases: list[SageCase], report: Report, *, targets: tuple[str, ...], modelled: Modelled = None
) -> ExitCode:
    """Compiles calls for each target and shows what came of it; spills and scratch end with exit code 1."""
    return inspect_calls(
        cases, report, targets=targets, inspect_case=inspect_case, kind=CallCode[SageCase], columns=_COLUMNS,
        spell=SageCase.as_dict, modelled=modelled,
    )  # fmt: skip
