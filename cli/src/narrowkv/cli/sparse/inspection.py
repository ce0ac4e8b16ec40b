"""`narrowkv inspect sparse`: what every shipped configuration compiles to for gfx942 and gfx950."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.table import Table

from narrowkv.cli.codegen import KernelCode, amd_backend_missing, compile_call
from narrowkv.cli.environment import versions
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError
from narrowkv.cli.sparse.cases import SparseCase, build

_ROWS = "16+16"  # so few rows that nothing is split


@dataclass(frozen=True)
class SparseCode:
    """One call compiled for one target."""

    target: str
    case: SparseCase
    kernels: tuple[KernelCode, ...]

    @property
    def faulty(self) -> bool:
        """Whether a kernel spills or uses scratch."""
        return any(k.spills or k.sgpr_spills or k.scratch_bytes for k in self.kernels)


def shipped_cases(*, two_sources: bool = True) -> list[SparseCase]:
    """A call for every shipped configuration: ways to attend, formats, numbers of heads."""
    extend = _ROWS if two_sources else ""
    ways = [
        SparseCase(mode="wide", layout="bf16"),
        SparseCase(),
        SparseCase(q="fp8"),
        SparseCase(clean=False),
        SparseCase(format="fp8_e4m3fnuz"),
        SparseCase(format="fp8_e4m3fnuz", q="fp8"),
        SparseCase(mode="decode", layout="bf16"),
        SparseCase(mode="decode"),
        SparseCase(mode="decode", q="fp8"),
    ]
    # 8 heads are padded to 16; 128 are two programs of 64.
    return [replace(way, lens=_ROWS, extend=extend, heads=heads) for way in ways for heads in (16, 32, 64)]


def inspect_case(case: SparseCase, target: str) -> SparseCode:
    """Compiles a case for a target.

    Raises:
        ValueError, TypeError: what the operation says to a call that it does not take.
    """
    artifacts = compile_call(target, build(case).call)
    return SparseCode(target, case, tuple(KernelCode.of(artifact) for artifact in artifacts))


def inspect_sparse(cases: list[SparseCase], report: Report, *, targets: tuple[str, ...]) -> ExitCode:
    """Compiles calls for each target and shows what came of it; spills and scratch end with exit code 1."""
    if (missing := amd_backend_missing()) is not None:
        raise UnsupportedHereError(missing)
    found: list[SparseCode] = []
    interrupted = False
    with report.progress(len(cases) * len(targets), "inspecting") as line:
        try:
            for target in targets:
                for case in cases:
                    found.append(inspect_case(case, target))
                    line.advance(f"{target} {case.mode}")
        except KeyboardInterrupt:
            interrupted = True
    report.show(_table(found))
    body: dict[str, Any] = {
        "versions": versions(),
        "inspections": [
            {"target": code.target, "case": str(code.case), "kernels": [asdict(k) for k in code.kernels]}
            for code in found
        ],
    }
    code = ExitCode.NUMERICAL if any(code.faulty for code in found) else ExitCode.OK
    return report.finish(body, code, interrupted=interrupted)


def _table(found: list[SparseCode]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in ("target", "kernel", "Q", "rows"):
        table.add_column(column)
    for column in ("heads", "VGPR", "AGPR", "spilled", "scratch", "LDS", "warps"):
        table.add_column(column, justify="right")
    table.add_column("matrix instructions of the loop")
    for code in found:
        for k in code.kernels:
            case = code.case
            rows = case.layout if case.mode == "wide" else f"{case.format}{'' if case.clean else ', foreign'}"
            numbers = (case.heads, k.vgprs, k.agprs, k.spills + k.sgpr_spills, k.scratch_bytes, k.lds_bytes)
            mfma = ", ".join(f"{name.removeprefix('v_mfma_')} {n}" for name, n in k.mfma.items())
            table.add_row(
                code.target, k.name, case.q, rows, *(str(n) for n in numbers), str(k.num_warps), mfma,
                style="bold red" if code.faulty else "",
            )  # fmt: skip
    return table
