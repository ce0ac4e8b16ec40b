"""`narrowkv inspect` of all that an operation ships: its calls compiled for each target, faults found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from rich.table import Table

from narrowkv.cli.codegen import KernelCode, amd_backend_missing
from narrowkv.cli.environment import versions
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError

Case = TypeVar("Case")


@dataclass(frozen=True)
class CallCode(Generic[Case]):
    """One call compiled for one target; `plan` is its configuration in words, where the operation says it."""

    target: str
    case: Case
    kernels: tuple[KernelCode, ...]
    plan: str = ""

    @property
    def faulty(self) -> bool:
        """Whether a kernel spills vector registers or uses scratch."""
        return any(k.spills or k.scratch_bytes for k in self.kernels)


def inspect_calls(
    cases: Sequence[Case] | Callable[[str], Sequence[Case]],
    report: Report,
    *,
    targets: tuple[str, ...],
    inspect_case: Callable[[Case, str], CallCode[Case]],
    table: Callable[[list[CallCode[Case]]], Table],
    spell: Callable[[Case], Any],
) -> ExitCode:
    """Compiles calls for each target and shows what came of it; a faulty one ends with exit code 1.

    Args:
        cases: what to compile, or a function that says it of a target's name.
        report: where it goes.
        targets: AMD targets.
        inspect_case: compiles one.
        table: of what was compiled, for a person.
        spell: a case for the document.
    """
    if (missing := amd_backend_missing()) is not None:
        raise UnsupportedHereError(missing)
    found: list[CallCode[Case]] = []
    interrupted = False
    work = [(name, case) for name in targets for case in (cases(name) if callable(cases) else cases)]
    with report.progress(len(work), "inspecting") as line:
        try:
            for target, case in work:
                found.append(inspect_case(case, target))
                line.advance(f"{target} {case}")
        except KeyboardInterrupt:
            interrupted = True
    report.show(table(found))
    plans = {code.target: code.plan for code in reversed(found) if code.plan}
    for target in dict.fromkeys(code.target for code in found):
        if target in plans:
            report.line(f"{target}: {plans[target]}")
    inspections = []
    for code in found:
        plan = {"plan": code.plan} if code.plan else {}
        kernels = [asdict(kernel) for kernel in code.kernels]
        inspections.append({"target": code.target, "case": spell(code.case), **plan, "kernels": kernels})
    exit_code = ExitCode.NUMERICAL if any(code.faulty for code in found) else ExitCode.OK
    body = {"versions": versions(), "inspections": inspections}
    return report.finish(body, exit_code, interrupted=interrupted)
