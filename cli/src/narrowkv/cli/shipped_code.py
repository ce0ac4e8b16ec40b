"""`narrowkv inspect` of the shipped configurations of an operation, compiled for each target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from narrowkv.cli.modelled import model_families, show_model
from narrowkv.cli.places import check_amd_backend
from narrowkv.cli.report import ExitCode, Report, UsageError
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.cli.workers import run_all
from narrowkv.testing.cases import Case
from narrowkv.testing.codegen import (
    CallCode,
    CodeTask,
    KernelCode,
    compile_case,
    main_kernel,
)
from narrowkv.testing.machine import versions
from narrowkv.testing.operation import Family, OperationEntry
from narrowkv.testing.result_plots import plot_registers

Modelled = Callable[[str], Mapping[str, Family]] | None
"""Calls to show under the timing model, for a target's name."""


def _compile(task: CodeTask) -> CallCode:
    try:
        return compile_case(task.case, task.target)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{task.target}, {task.case}: {error}") from None


def inspect_calls(
    operation: OperationEntry,
    report: Report,
    *,
    targets: tuple[str, ...],
    case: Case | None = None,
    modelled: Modelled = None,
) -> ExitCode:
    """Compiles calls for each target and shows the code; spills or scratch memory end with exit code 1.

    Args:
        operation: whose shipped configurations, or case, are compiled.
        report: where it goes.
        targets: AMD targets.
        case: compiled instead of all that the operation ships.
        modelled: given a target's name, returns the calls whose modelled times are shown too.

    Raises:
        UnsupportedHereError: this Triton cannot compile for AMD.
        UsageError: the operation refuses a case.
    """
    check_amd_backend()
    codes: list[tuple[Case, CallCode]] = []

    def take(task: CodeTask, code: CallCode) -> str:
        codes.append((task.case, code))
        return f"{task.target} {task.case}"

    chosen = operation.cases.shipped if case is None else lambda target: [case]
    tasks = [CodeTask(target, one) for target in targets for one in chosen(target)]
    interrupted = run_all(report, tasks, _compile, CallCode, take, what="inspecting")
    report.show(_table(codes, operation))
    plans = {code.target: code.plan for _, code in reversed(codes) if code.plan}
    for target in dict.fromkeys(code.target for _, code in codes):
        if target in plans:
            report.line(f"{target}: {plans[target]}")
    faulty = [code for _, code in codes if code.faulty]
    report.say(f"{len(codes)} of {len(tasks)} calls compiled, {len(faulty)} with spills or scratch")
    inspections = [code.as_dict(one) for one, code in codes]
    body: dict[str, Any] = {"versions": versions(), "inspections": inspections}
    if modelled is not None and not interrupted:
        rows = [row for name in targets for row in model_families(name, modelled(name))]
        body["model"] = show_model(report, rows)
    exit_code = ExitCode.NUMERICAL if faulty else ExitCode.OK
    compiled = [(code.target, str(one), code.kernels) for one, code in codes]
    return finish_with_kernels(report, body, exit_code, compiled, interrupted)


def _table(codes: Sequence[tuple[Case, CallCode]], operation: OperationEntry) -> Sheet:
    columns = operation.cases.columns
    every_kernel = operation.inspect is not None and operation.inspect.every_kernel
    figures = (
        "VGPR",
        "AGPR",
        "spilled",
        "scalars",
        "in loops",
        "scratch",
        "LDS",
        "warps",
        "waves/SIMD",
        "VALU",
    )
    sheet = Sheet([
        *keys("target", *columns, "kernel"), *numbers(*figures, "transcendental", "matrix"),
        Column("matrix instructions of the loop"),
    ])  # fmt: skip
    for case, code in codes:
        main = main_kernel(code.kernels)
        for k in code.kernels:
            if not (every_kernel or k.faulty or k is main):
                continue
            mfma = ", ".join(f"{n} {name.removeprefix('v_mfma_')}" for name, n in k.mfma.items())
            loop = (k.loop.get("valu", 0), k.loop.get("transcendental", 0), f"{k.matrix_share:.0%}")
            sheet.add(
                code.target, *(show(case) for show in columns.values()), k.name, k.vgprs, k.agprs,
                k.spills, k.sgpr_spills, k.spills_in_loops, k.scratch_bytes, k.lds_bytes, k.num_warps,
                k.waves_per_simd, *loop, mfma or "none", style="bold red" if k.faulty else "",
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
    plot = partial(plot_registers, compiled)
    return report.finish(body, code, interrupted=interrupted, rows=rows, plot=plot)
