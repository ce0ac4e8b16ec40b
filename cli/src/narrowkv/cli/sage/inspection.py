"""`narrowkv inspect sage`: what every shipped configuration compiles to for gfx942 and gfx950."""

from __future__ import annotations

from itertools import product

from narrowkv.cli.codegen import KernelCode, compile_call
from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.sage.cases import SageCase, build
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.cli.shipped_code import CallCode, inspect_calls
from narrowkv.quant.sage import SAGE_GRANULARITIES


def shipped_cases() -> list[SageCase]:
    """A call for every precision, granularity and head_dim."""
    return [
        SageCase(qk, granularity, causal="bottom_right", tokens=256, head_dim=head_dim)
        for head_dim, qk, granularity in product((128, 64), ("int8", "int4", "fp8"), SAGE_GRANULARITIES)
    ]


def inspect_case(case: SageCase, target: str) -> CallCode[SageCase]:
    """Compiles every kernel of a case for a target, the pre-pass too."""
    from narrowkv.quant.launch import compile_for

    call = build(case)
    artifacts = compile_call(target, call.call)
    with compile_for(target):
        plan = call.explain()
    return CallCode(target, case, tuple(KernelCode.of(artifact) for artifact in artifacts), plan)


def inspect_sage(cases: list[SageCase], report: Report, *, targets: tuple[str, ...]) -> ExitCode:
    """Compiles calls for each target and shows what came of it; spills and scratch end with exit code 1."""
    return inspect_calls(
        cases, report, targets=targets, inspect_case=inspect_case, kind=CallCode[SageCase], table=_table,
        spell=SageCase.as_dict,
    )  # fmt: skip


def _table(found: list[CallCode[SageCase]]) -> Sheet:
    """The attention kernel of every call; of the pre-pass only what is wrong."""
    figures = ("VGPR", "AGPR", "spilled", "scratch", "LDS", "waves/SIMD", "VALU", "transcendental")
    sheet = Sheet(
        [
            *keys("target", "Q and K", "granularity", "head_dim"),
            *numbers(*figures),
            Column("matrix instructions of the loop"),
        ]
    )
    for code in found:
        *before, main = code.kernels
        for kernel in (*(k for k in before if k.spills or k.scratch_bytes), main):
            mfma = ", ".join(f"{n} {name.removeprefix('v_mfma_')}" for name, n in kernel.mfma.items())
            sheet.add(
                code.target, code.case.qk, code.case.granularity, code.case.head_dim, kernel.vgprs,
                kernel.agprs, kernel.spills, kernel.scratch_bytes, kernel.lds_bytes, kernel.waves_per_simd,
                kernel.loop["valu"], kernel.loop["transcendental"], mfma or kernel.name,
                style="bold red" if kernel.spills or kernel.scratch_bytes else "",
            )  # fmt: skip
    return sheet
