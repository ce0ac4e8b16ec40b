"""`narrowkv inspect prefill`: what every shipped configuration compiles to for gfx942 and gfx950."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from narrowkv.cli.codegen import KernelCode, compile_call, main_kernel
from narrowkv.cli.prefill.cases import PrefillCase, build, serves
from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.cli.shipped_code import CallCode, inspect_calls
from narrowkv.quant.targets import get_target

FORMATS = ("bf16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp4_e2m1", "fp8_e4m3fn/fp4_e2m1")
HEAD_DIMS = (128, 64)
# A chunk over a prefix, with so many programs that no tile's keys are shared out.
_CALL = PrefillCase(q_lens="1024", lens="4096", kv_heads=8, ratio=12, clean=True)
_APPEND = replace(_CALL, operation="append", kernel="paged")


def shipped_cases(target: str) -> list[PrefillCase]:
    """A call for every shipped configuration of a target: kernels, formats, head_dims."""
    ways = [replace(_CALL, kernel="dense"), replace(_CALL, kernel="fused"), _APPEND]
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


def inspect_prefill(
    cases: Sequence[PrefillCase] | Callable[[str], Sequence[PrefillCase]],
    report: Report,
    *,
    targets: tuple[str, ...],
) -> ExitCode:
    """Compiles calls for each target and shows what came of it; spills and scratch end with exit code 1.

    `cases` may be a function of the target's name.
    """
    return inspect_calls(
        cases, report, targets=targets, inspect_case=inspect_case, kind=CallCode[PrefillCase], table=_table
    )


def _table(found: list[CallCode[PrefillCase]]) -> Sheet:
    """The attention kernel of every call; of the others only what is wrong."""
    sheet = Sheet(
        [
            *keys("target", "kernel", "Q", "cache", "dim"),
            *numbers("VGPR", "spilled", "scalars", "scratch", "LDS", "waves", "matrix"),
            Column("matrix instructions of the loop"),
        ]
    )
    for code in found:
        case, main = code.case, main_kernel(code.kernels)
        for k in (*(k for k in code.kernels if k is not main and (k.spills or k.scratch_bytes)), main):
            mfma = ", ".join(f"{n} {name.removeprefix('v_mfma_f32_')}" for name, n in k.mfma.items())
            sheet.add(
                code.target, case.kernel or k.name, f"{case.q}, fp8_compute" if case.fp8_compute else case.q,
                case.format, case.head_dim, k.vgprs, k.spills, k.sgpr_spills, k.scratch_bytes, k.lds_bytes,
                k.waves_per_simd, f"{k.matrix_share:.0%}", mfma or k.name,
                style="bold red" if k.spills or k.scratch_bytes else "",
            )  # fmt: skip
    return sheet
