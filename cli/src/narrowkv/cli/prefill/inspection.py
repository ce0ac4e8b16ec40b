"""`narrowkv inspect prefill`: what every shipped configuration compiles to for gfx942 and gfx950."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from narrowkv.cli.prefill.cases import PrefillCase, build, serves
from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.shipped_code import CallCode, Modelled, inspect_calls
from narrowkv.runtime.targets import get_target
from narrowkv.testing.codegen import KernelCode, compile_call

FORMATS = ("bf16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp4_e2m1", "fp8_e4m3fn/fp4_e2m1")
HEAD_DIMS = (128, 64)
# A chunk over a prefix, with so many programs that no tile's keys are shared out.
_CALL = PrefillCase(q_lens="1024", lens="4096", kv_heads=8, ratio=12, clean=True)
_APPEND = replace(_CALL, operation="append", kernel="fused")


def shipped_cases(target: str) -> list[PrefillCase]:
    """A call for every shipped configuration of a target: kernels, formats, head_dims."""
    ways = [replace(_CALL, kernel="dense"), replace(_CALL, kernel="fused"), _APPEND]
    ways.append(replace(_APPEND, kernel="append_then_attend"))
    cases = [replace(way, format=name) for way in ways for name in FORMATS]
    for name in ("fp8_e4m3fn", "fp8_e4m3fnuz"):
        cases += [
            replace(_CALL, kernel="fused", q=name, format=name),
            replace(_APPEND, fp8_compute=True, format=name),
        ]
    return [
        replace(case, head_dim=head_dim)
        for head_dim in HEAD_DIMS
        for case in cases
        if serves(case, get_target(target))
    ]


def inspect_case(case: PrefillCase, target: str) -> CallCode[PrefillCase]:
    """Compiles every kernel of a case for a target.

    Raises:
        ValueError, TypeError: what the operation says to a call that it does not take.
    """
    artifacts = compile_call(target, build(case).call)
    return CallCode(target, case, tuple(KernelCode.of(artifact) for artifact in artifacts))


_COLUMNS: dict[str, Callable[[PrefillCase], object]] = {
    "operation": lambda case: case.operation,
    "Q": lambda case: f"{case.q}, fp8_compute" if case.fp8_compute else case.q,
    "cache": lambda case: case.format,
    "head_dim": lambda case: case.head_dim,
}


def inspect_prefill(
    cases: Sequence[PrefillCase] | Callable[[str], Sequence[PrefillCase]],
    report: Report,
    *,
    targets: tuple[str, ...],
    modelled: Modelled = None,
) -> ExitCode:
    """Compiles calls for each target and shows what came of it; spills and scratch end with exit code 1.

    `cases` may be a function of the target's name.
    """
    return inspect_calls(
        cases,
        report,
        targets=targets,
        inspect_case=inspect_case,
        kind=CallCode[PrefillCase],
        columns=_COLUMNS,
        modelled=modelled,
    )
