"""`narrowkv inspect sage`: what every shipped configuration compiles to for gfx942 and gfx950."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from rich import box
from rich.table import Table

from narrowkv.cli.codegen import KernelCode, amd_backend_missing, compile_call
from narrowkv.cli.environment import versions
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError
from narrowkv.cli.sage.cases import SageCase, build
from narrowkv.quant.sage import SAGE_GRANULARITIES


@dataclass(frozen=True)
class SageCode:
    """One call compiled for one target."""

    target: str
    case: SageCase
    plan: str
    kernels: tuple[KernelCode, ...]

    @property
    def faulty(self) -> bool:
        """Whether a kernel spills or uses scratch."""
        return any(k.spills or k.scratch_bytes for k in self.kernels)


def shipped_cases() -> list[SageCase]:
    """A call for every precision, granularity and head_dim."""
    return [
        SageCase(qk, granularity, causal="bottom_right", tokens=256, head_dim=head_dim)
        for head_dim, qk, granularity in product((128, 64), ("int8", "int4", "fp8"), SAGE_GRANULARITIES)
    ]


def inspect_case(case: SageCase, target: str) -> SageCode:
    """Compiles every kernel of a case for a target, the pre-pass too."""
    from narrowkv.quant.launch import compile_for

    call = build(case)
    artifacts = compile_call(target, call.call)
    with compile_for(target):
        plan = call.explain()
    return SageCode(target, case, plan, tuple(KernelCode.of(artifact) for artifact in artifacts))


def inspect_sage(cases: list[SageCase], report: Report, *, targets: tuple[str, ...]) -> ExitCode:
    """Compiles calls for each target and shows what came of it; spills and scratch end with exit code 1."""
    if (missing := amd_backend_missing()) is not None:
        raise UnsupportedHereError(missing)
    found: list[SageCode] = []
    interrupted = False
    with report.progress(len(cases) * len(targets), "inspecting") as line:
        try:
            for target, case in product(targets, cases):
                found.append(inspect_case(case, target))
                line.advance(f"{target} {case.qk} {case.granularity}")
        except KeyboardInterrupt:
            interrupted = True
    report.show(_table(found))
    for target in dict.fromkeys(code.target for code in found):
        report.line(f"{target}: {next(code.plan for code in found if code.target == target)}")
    body: dict[str, Any] = {
        "versions": versions(),
        "inspections": [
            {
                "target": code.target,
                "case": code.case.as_dict(),
                "plan": code.plan,
                "kernels": [asdict(k) for k in code.kernels],
            }
            for code in found
        ],
    }
    faulty = any(code.faulty for code in found)
    return report.finish(body, ExitCode.NUMERICAL if faulty else ExitCode.OK, interrupted=interrupted)


def _table(found: list[SageCode]) -> Table:
    """The attention kernel of every call; of the pre-pass only what is wrong."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in ("target", "Q and K", "granularity"):
        table.add_column(column)
    for column in (
        "head_dim",
        "VGPR",
        "AGPR",
        "spilled",
        "scratch",
        "LDS",
        "waves/SIMD",
        "VALU",
        "transcendental",
    ):
        table.add_column(column, justify="right")
    table.add_column("matrix instructions of the loop")
    for code in found:
        *before, main = code.kernels
        for kernel in (*(k for k in before if k.spills or k.scratch_bytes), main):
            numbers = (
                code.case.head_dim, kernel.vgprs, kernel.agprs, kernel.spills, kernel.scratch_bytes,
                kernel.lds_bytes, kernel.waves_per_simd, kernel.loop["valu"], kernel.loop["transcendental"],
            )  # fmt: skip
            mfma = ", ".join(f"{n} {name.removeprefix('v_mfma_')}" for name, n in kernel.mfma.items())
            bad = "bold red" if kernel.spills or kernel.scratch_bytes else ""
            table.add_row(
                code.target, code.case.qk, code.case.granularity, *(str(n) for n in numbers), mfma or
                kernel.name, style=bad,
            )  # fmt: skip
    return table
