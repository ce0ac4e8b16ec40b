"""`narrowkv inspect`: what a call compiles to for gfx942 and gfx950, and a roofline of its loop."""

from __future__ import annotations

from typing import Any

from narrowkv.cli.modelled import model_families, show_model
from narrowkv.cli.places import check_amd_backend
from narrowkv.cli.report import ExitCode, Report, UsageError
from narrowkv.cli.sheet import Sheet, filled, keys, numbers
from narrowkv.cli.shipped_code import finish_with_kernels
from narrowkv.cli.workers import run_all
from narrowkv.testing.cases import Case
from narrowkv.testing.codegen import CodeTask, main_kernel
from narrowkv.testing.inspection import Inspection, inspect_case
from narrowkv.testing.machine import versions
from narrowkv.testing.operation import OperationEntry
from narrowkv.testing.operations import family_of
from narrowkv.testing.records import number

_FOREMOST = 12  # mnemonics shown of a loop


def inspect(
    operation: OperationEntry, case: Case, report: Report, *, targets: tuple[str, ...], asm: bool,
    modelled: bool = False,
) -> ExitCode:  # fmt: skip
    """Compiles a call for each target and shows registers, instruction mix and the models.

    Spills or scratch end with exit code 1.

    Raises:
        UnsupportedHereError: this Triton cannot compile for AMD.
        UsageError: the operation refuses the case.
    """
    check_amd_backend()
    found: list[Inspection] = []

    def work(task: CodeTask) -> Inspection:
        try:
            return inspect_case(case, task.target, with_assembly=asm)[0]
        except (ValueError, TypeError) as error:
            raise UsageError(f"{task.target}: {error}") from None

    def take(task: CodeTask, inspection: Inspection) -> str:
        found.append(inspection)
        return task.target

    tasks = [CodeTask(target, case) for target in targets]
    interrupted = run_all(report, tasks, work, Inspection, take, what="inspecting", settings={"asm": asm})
    for inspection in found:
        _show(inspection, report)
    spilling = [k for i in found for k in i.kernels if k.faulty]
    body: dict[str, Any] = {"versions": versions(), "inspections": [i.as_dict() for i in found]}
    if modelled and not interrupted:
        family = {str(case): family_of(operation, case)}
        body["model"] = show_model(report, [r for name in targets for r in model_families(name, family)])
    code = ExitCode.NUMERICAL if spilling else ExitCode.OK
    return finish_with_kernels(
        report, body, code, [(i.target, i.case, i.kernels) for i in found], interrupted
    )


def _show(inspection: Inspection, report: Report) -> None:
    width = report.human.width
    report.line(f"{inspection.target}: {inspection.case}", "bold")
    report.line(f"  {inspection.plan}")
    figures = ("VGPR", "AGPR", "SGPR", "spilled", "scratch", "LDS", "warps", "waves/SIMD")
    registers = Sheet([*keys("kernel"), *numbers(*figures)])
    for k in inspection.kernels:
        registers.add(
            k.name, k.vgprs, k.agprs, k.sgprs, k.spills, k.scratch_bytes, k.lds_bytes, k.num_warps,
            k.waves_per_simd, style="bold red" if k.faulty else "",
        )  # fmt: skip
    report.show(registers)
    main = main_kernel(inspection.kernels)
    report.line(f"hot loop of {main.name}")
    mix = [f"{n} {name.replace('_', ' ')}" for name, n in main.loop.items()]
    foremost = list(inspection.mnemonics.items())
    matrix = [item for item in foremost if item[0] in main.mfma]
    rest = [item for item in foremost if item[0] not in main.mfma][:_FOREMOST]
    for parts in (mix, [f"{name} {n}" for name, n in matrix + rest]):
        for line in filled(parts, width, first="  ", then="  "):
            report.line(line)
    if inspection.model is None:
        report.line(f"no roofline: {inspection.model_refusal}", "yellow")
    else:
        if inspection.emulated is not None:
            report.line(f"emulated: means over {inspection.emulated.workgroups} workgroups")
            for line in filled(inspection.emulated.parts(), width, first="  ", then="  "):
                report.line(line)
        counted = "executed instructions" if inspection.counts == "dynamic" else "the text of the loop"
        rows = [(f"a pass of the loop, {counted}", inspection.model)]
        if inspection.whole_model is not None:
            rows.append(("a whole workgroup, executed instructions", inspection.whole_model))
        report.line("model, not a measurement: clocks of a compute unit")
        clocks = Sheet([*keys("of", "bound by"), *numbers("issue / memory", "HBM", "VALU", "MFMA", "LDS")])
        for of, model in rows:
            busy = (model.memory_clk, model.valu_clk, model.mfma_clk, model.lds_clk)
            clocks.add(of, model.bound_by, f"{model.issue_over_memory:.2f}", *(number(clk) for clk in busy))
        report.show(clocks)
        if inspection.static_reason:
            report.line(f"  counts are static: {inspection.static_reason}", "yellow")
    for name, assembly in (inspection.assembly or {}).items():
        report.line(f"\n; ---- {inspection.target} {name} ----\n{assembly}")
    report.line("")
