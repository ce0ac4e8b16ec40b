"""`narrowkv inspect` of all that an operation ships: its calls compiled for each target, faults found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from narrowkv.cli.cases import spell_case
from narrowkv.cli.environment import versions
from narrowkv.cli.modelled import model_families, show_model
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError, UsageError
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.cli.workers import run_all
from narrowkv.testing.codegen import KernelCode, amd_backend_missing, main_kernel
from narrowkv.testing.families import Family

Case = TypeVar("Case")
Modelled = Callable[[str], Mapping[str, Family]] | None
"""Calls to show under the timing model, for a target's name."""


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


@dataclass(frozen=True)
class Task(Generic[Case]):
    """A case, and what to compile it for."""

    target: str
    case: Case


def inspect_calls(
    cases: Sequence[Case] | Callable[[str], Sequence[Case]],
    report: Report,
    *,
    targets: tuple[str, ...],
    inspect_case: Callable[[Case, str], CallCode[Case]],
    kind: Any,
    columns: Mapping[str, Callable[[Case], object]],
    every_kernel: bool = False,
    spell: Callable[[Case], Any] = str,
    modelled: Modelled = None,
) -> ExitCode:
    """Compiles calls for each target and shows what came of it; a faulty one ends with exit code 1.

    Args:
        cases: what to compile, or a function that says it of a target's name.
        report: where it goes.
        targets: AMD targets.
        inspect_case: compiles one.
        kind: the type of what it gives.
        columns: what says in the table which case it is, by header.
        every_kernel: show all kernels of a call; otherwise the attention kernel, and others with a fault.
        spell: a case for the document.
        modelled: given a target's name, returns the calls whose modelled times are shown too.

    Raises:
        UnsupportedHereError: this Triton cannot compile for AMD.
        UsageError: an operation refuses a case.
    """
    if (missing := amd_backend_missing()) is not None:
        raise UnsupportedHereError(missing)
    codes: list[CallCode[Case]] = []

    def work(task: Task[Case]) -> CallCode[Case]:
        try:
            return inspect_case(task.case, task.target)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{task.target}, {task.case}: {error}") from None

    def take(task: Task[Case], code: CallCode[Case]) -> str:
        codes.append(code)
        return f"{task.target} {task.case}"

    tasks = [Task(name, case) for name in targets for case in (cases(name) if callable(cases) else cases)]
    interrupted = run_all(report, tasks, work, kind, take, what="inspecting")
    report.show(_table(codes, columns, every_kernel))
    plans = {code.target: code.plan for code in reversed(codes) if code.plan}
    for target in dict.fromkeys(code.target for code in codes):
        if target in plans:
            report.line(f"{target}: {plans[target]}")
    faulty = [code for code in codes if code.faulty]
    report.say(f"{len(codes)} of {len(tasks)} calls compiled, {len(faulty)} with spills or scratch")
    inspections = []
    for code in codes:
        plan = {"plan": code.plan} if code.plan else {}
        kernels = [asdict(kernel) for kernel in code.kernels]
        inspections.append({"target": code.target, "case": spell(code.case), **plan, "kernels": kernels})
    body: dict[str, Any] = {"versions": versions(), "inspections": inspections}
    if modelled is not None and not interrupted:
        rows = [row for name in targets for row in model_families(name, modelled(name))]
        body["model"] = show_model(report, rows)
    exit_code = ExitCode.NUMERICAL if faulty else ExitCode.OK
    return finish_with_kernels(
        report, body, exit_code, [(c.target, spell_case(c.case), c.kernels) for c in codes], interrupted
    )


def _table(
    codes: Sequence[CallCode[Case]], columns: Mapping[str, Callable[[Case], object]], every_kernel: bool
) -> Sheet:
    figures = ("VGPR", "AGPR", "spilled", "scalars", "scratch", "LDS", "warps", "waves/SIMD", "VALU")
    sheet = Sheet(
        [
            *keys("target", *columns, "kernel"),
            *numbers(*figures, "transcendental", "matrix"),
            Column("matrix instructions of the loop"),
        ]
    )
    for code in codes:
        main = main_kernel(code.kernels)
        for k in code.kernels:
            fault = k.spills or k.scratch_bytes
            if not (every_kernel or fault or k is main):
                continue
            mfma = ", ".join(f"{n} {name.removeprefix('v_mfma_')}" for name, n in k.mfma.items())
            loop = (
                k.loop.get("valu", 0),
                k.loop.get("transcendental", 0),
                f"{k.matrix_share:.0%}",
            )
            sheet.add(
                code.target, *(show(code.case) for show in columns.values()), k.name, k.vgprs, k.agprs,
                k.spills, k.sgpr_spills, k.scratch_bytes, k.lds_bytes, k.num_warps, k.waves_per_simd, *loop,
                mfma or "none", style="bold red" if code.faulty and (fault or k.sgpr_spills) else "",
            )  # fmt: skip
    return sheet


Compiled = tuple[str, str, tuple[KernelCode, ...]]
"""A target, a case, and its kernels."""


def finish_with_kernels(
    report: Report, body: dict[str, Any], code: ExitCode, compiled: Sequence[Compiled], interrupted: bool
) -> ExitCode:
    """`Report.finish` with a CSV row and a dot in the plot for each kernel."""
    rows = [
        {"target": target, "case": case, **asdict(kernel)}
        for target, case, kernels in compiled
        for kernel in kernels
    ]
    return report.finish(body, code, interrupted=interrupted, rows=rows, plot=partial(_plot, compiled))


def _plot(compiled: Sequence[Compiled], path: Path) -> None:
    """Vector registers of every kernel with matrix instructions."""
    from narrowkv.cli.plot import plot_dots

    dots = [
        (case, f"{target} {kernel.name}", float(kernel.vgprs + kernel.agprs))
        for target, case, kernels in compiled
        for kernel in kernels
    ]
    plot_dots(dots, path, title="registers of a wave", label="VGPRs and AGPRs", log=False)
