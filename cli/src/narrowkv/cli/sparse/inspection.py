"""`narrowkv inspect sparse`: what every shipped configuration compiles to for gfx942 and gfx950."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.shipped_code import CallCode, Modelled, inspect_calls
from narrowkv.cli.sparse.cases import QUERIES, SparseCase, build
from narrowkv.testing.codegen import KernelCode, compile_call

_ROWS = "16+16"  # so few rows that nothing is split


class SparseCode(CallCode[SparseCase]):
    """One call compiled for one target."""


def shipped_cases(*, two_sources: bool = True) -> list[SparseCase]:
    """A call for every shipped configuration: ways to attend, layouts, formats, numbers of heads."""
    extend = _ROWS if two_sources else ""
    ways = [
        SparseCase(mode="wide", layout="bf16"),
        SparseCase(),
        SparseCase(q="fp16"),
        SparseCase(q="fp8"),
        SparseCase(layout="split"),
        SparseCase(layout="split", q="fp8"),
        SparseCase(layout="row512"),
        SparseCase(layout="row512", q="fp8"),
        SparseCase(clean=False),
        SparseCase(format="fp8_e4m3fnuz"),
        SparseCase(format="fp8_e4m3fnuz", q="fp8"),
        SparseCase(mode="decode", layout="bf16"),
        SparseCase(mode="decode"),
        SparseCase(mode="decode", q="fp8"),
    ]
    # 8 heads are padded to 16; 128 are two programs of 64.
    cases = [replace(way, heads=heads) for way in ways for heads in (16, 32, 64)]
    # What expands rows does not know of heads.
    cases += [replace(way, mode="prepass", heads=64) for way in ways if way.mode == "fused"]
    return [replace(case, lens=_ROWS, extend=extend) for case in cases]


def inspect_case(case: SparseCase, target: str) -> SparseCode:
    """Compiles a case for a target.

    Raises:
        ValueError, TypeError: what the operation says to a call that it does not take.
    """
    artifacts = compile_call(target, build(case).call)
    return SparseCode(target, case, tuple(KernelCode.of(artifact) for artifact in artifacts))


def _rows(case: SparseCase) -> str:
    """Layout and format of the rows."""
    if case.layout in QUERIES:
        return case.layout
    return f"{case.layout} {case.format}{'' if case.clean else ', foreign'}"


_COLUMNS: dict[str, Callable[[SparseCase], object]] = {
    "mode": lambda case: case.mode,
    "Q": lambda case: case.q,
    "rows": _rows,
    "heads": lambda case: case.heads,
}


def inspect_sparse(
    cases: list[SparseCase], report: Report, *, targets: tuple[str, ...], modelled: Modelled = None
) -> ExitCode:
    """Compiles calls for each target and shows what came of it; spills and scratch end with exit code 1."""
    return inspect_calls(
        cases,
        report,
        targets=targets,
        inspect_case=inspect_case,
        kind=SparseCode,
        every_kernel=True,
        columns=_COLUMNS,
        modelled=modelled,
    )
