"""`narrowkv inspect`: what calls compile to for gfx942 and gfx950, rooflines, and modelled times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from narrowkv.cdna_emulator import EmulatorError
from narrowkv.cli.report import Column, ExitCode, Report, Sheet, UsageError, filled, keys, numbers
from narrowkv.cli.running import check_amd_backend, parse_case, run_all
from narrowkv.testing.cases import Case
from narrowkv.testing.codegen import (
    CallCode,
    Inspection,
    KernelCode,
    compile_case,
    inspect_case,
    main_kernel,
)
from narrowkv.testing.machine import versions
from narrowkv.testing.model import Modelled, main_launch, model_call, model_peer, waits
from narrowkv.testing.operation import Family, OperationEntry
from narrowkv.testing.operations import OPERATIONS, families, family_of
from narrowkv.testing.plot import plot_registers
from narrowkv.testing.records import number

_FOREMOST = 12  # mnemonics shown of a loop


def sheet(rows: Sequence[tuple[str, Sequence[Modelled]]]) -> Sheet:
    """Calls under the timing model: the hot loop of each on a full chip, and the time of all its launches."""
    table = Sheet([
        *keys("target", "call"),
        *numbers("model us", "waves/CU", "loop clk", "matrix", "VALU", "LDS", "memory"),
        *numbers("TFLOP/s", "at peak clock"),
        Column("bound by"), Column("waves wait for"),
    ])  # fmt: skip
    for name, launches in rows:
        p = main_launch(launches).full
        seconds = sum(m.prediction.seconds for m in launches)
        cells: list[str] = [p.target, name, f"{1e6 * seconds:.0f}", str(p.waves_per_unit)]
        loop = p.loop
        if loop is None:
            table.add(*cells, *[""] * 7, p.bound, "no loop of four passes")
            continue
        shares = [f"{loop.busy[unit]:.0%}" for unit in ("matrix", "vector ALU", "LDS", "memory")]
        rate = f"{p.loop_flops_per_second / 1e12:.0f}"
        peak = f"{p.loop_flops_at_peak_clock / 1e12:.0f}"
        cells += [f"{loop.clocks:.0f}", *shares, rate, peak, p.bound.split(" (")[0], waits(p)]
        table.add(*cells)
    return table


def parse_call(text: str) -> Family:
    """A call by its operation and case: ``decode:lens=4096,ratio=12``.

    Raises:
        UsageError: no operation has that name, or the case is none of its.
    """
    name, _, line = text.partition(":")
    if name not in OPERATIONS:
        *others, last = (f"{one}:" for one in OPERATIONS)
        raise UsageError(f"--case must begin with {', '.join(others)} or {last}, got {text!r}")
    return family_of(OPERATIONS[name], parse_case(OPERATIONS[name], line))


def _peer(path: Path) -> Modelled:
    try:
        return model_peer(path)
    except (OSError, UnicodeDecodeError, EmulatorError, ValueError) as error:
        raise UsageError(f"--peer {path}: {error}") from None


def model_families(target: str, chosen: Mapping[str, Family]) -> list[tuple[str, list[Modelled]]]:
    """Models calls on a target.

    Raises:
        UsageError: an operation refuses its call, or the emulator cannot run it.
    """
    rows = []
    for name, family in chosen.items():
        try:
            rows.append((name, model_call(target, family.call, hbm_share=family.hbm_share)))
        except (ValueError, TypeError, EmulatorError) as error:
            raise UsageError(f"{target}, {name}: {error}") from None
    return rows


def show_model(report: Report, rows: Sequence[tuple[str, Sequence[Modelled]]]) -> list[dict[str, Any]]:
    """Shows calls under the model, and gives them for the document."""
    report.line("timing model, not a measurement; loop figures are of a full chip")
    report.show(sheet(rows))
    return [{"call": name, "launches": [m.as_dict() for m in launches]} for name, launches in rows]


def inspect_model(
    report: Report,
    *,
    targets: tuple[str, ...],
    names: Sequence[str] = (),
    cases: Sequence[str] = (),
    peers: Sequence[Path] = (),
) -> ExitCode:
    """Models calls on each target, and the hot loops of other assembly beside them.

    Args:
        report: where it goes.
        targets: AMD targets.
        names: families to model, of `families`; without names and cases, all.
        cases: calls as `parse_call` reads them.
        peers: files of assembly.

    Raises:
        UnsupportedHereError: this Triton cannot compile for AMD.
        UsageError: a name, case or file is wrong.
    """
    check_amd_backend()
    rows: list[tuple[str, list[Modelled]]] = [(m.name, [m]) for m in map(_peer, peers)]
    for target in targets:
        known = families(target)
        if wrong := [name for name in names if name not in known]:
            raise UsageError(f"--family must be one of {'; '.join(known)}; got {wrong[0]!r}")
        chosen = {name: known[name] for name in (names or ([] if cases or peers else known))}
        rows += model_families(target, chosen | {case: parse_call(case) for case in cases})
    body = {"versions": versions(), "model": show_model(report, rows)}
    return report.finish(body, ExitCode.OK)


CodeTask = tuple[str, Case]
"""A target, and the case to compile for it."""


def _compile(task: CodeTask) -> CallCode:
    target, case = task
    try:
        return compile_case(case, target)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{target}, {case}: {error}") from None


def inspect_calls(
    operation: OperationEntry,
    report: Report,
    *,
    targets: tuple[str, ...],
    case: Case | None = None,
    modelled: Callable[[str], Mapping[str, Family]] | None = None,
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
    chosen = operation.cases.shipped if case is None else lambda target: [case]
    tasks = [(target, one) for target in targets for one in chosen(target)]
    done, interrupted = run_all(
        report, tasks, _compile, CallCode, what="inspecting", said=lambda task, _: f"{task[0]} {task[1]}"
    )
    codes = [(one, code) for (_, one), code in done]
    report.show(_table(codes, operation))
    plans = {code.target: code.plan for _, code in reversed(codes) if code.plan}
    for target in dict.fromkeys(code.target for _, code in codes):
        if target in plans:
            report.line(f"{target}: {plans[target]}")
    faulty = [code for _, code in codes if code.faulty]
    report.say(f"{len(codes)} of {len(tasks)} calls compiled, {len(faulty)} with spills or scratch")
    return _finish(
        report, targets, [code.as_dict(one) for one, code in codes],
        [(code.target, str(one), code.kernels) for one, code in codes], modelled, interrupted,
    )  # fmt: skip


def _table(codes: Sequence[tuple[Case, CallCode]], operation: OperationEntry) -> Sheet:
    columns = operation.cases.columns
    sheet = Sheet([
        *keys("target", *columns, "kernel"),
        *numbers("VGPR", "AGPR", "spilled", "scalars", "in loops", "scratch", "LDS", "warps", "waves/SIMD"),
        *numbers("VALU", "transcendental", "matrix"), Column("matrix instructions of the loop"),
    ])  # fmt: skip
    for case, code in codes:
        main = main_kernel(code.kernels)
        for k in code.kernels:
            if not (operation.every_kernel or k.faulty or k is main):
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


def _finish(
    report: Report, targets: Sequence[str], inspections: list[dict[str, Any]], compiled: Sequence[Compiled],
    modelled: Callable[[str], Mapping[str, Family]] | None, interrupted: bool,
) -> ExitCode:  # fmt: skip
    """Shows modelled times, if any, and ends with a CSV row and a dot in the plot for each kernel."""
    body: dict[str, Any] = {"versions": versions(), "inspections": inspections}
    if modelled is not None and not interrupted:
        calls = [row for name in targets for row in model_families(name, modelled(name))]
        body["model"] = show_model(report, calls)
    faulty = any(kernel.faulty for _, _, kernels in compiled for kernel in kernels)
    code = ExitCode.NUMERICAL if faulty else ExitCode.OK
    rows = [
        {"target": target, "case": case, **asdict(kernel)}
        for target, case, kernels in compiled
        for kernel in kernels
    ]
    plot = partial(plot_registers, compiled)
    return report.finish(body, code, interrupted=interrupted, rows=rows, plot=plot)


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

    def work(task: CodeTask) -> Inspection:
        try:
            return inspect_case(case, task[0], with_assembly=asm)[0]
        except (ValueError, TypeError) as error:
            raise UsageError(f"{task[0]}: {error}") from None

    tasks = [(target, case) for target in targets]
    done, interrupted = run_all(
        report,
        tasks,
        work,
        Inspection,
        what="inspecting",
        said=lambda task, _: task[0],
        settings={"asm": asm},
    )
    found = [inspection for _, inspection in done]
    for inspection in found:
        _show(inspection, report)
    family = {str(case): family_of(operation, case)}
    return _finish(
        report, targets, [i.as_dict() for i in found], [(i.target, i.case, i.kernels) for i in found],
        (lambda target: family) if modelled else None, interrupted,
    )  # fmt: skip


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
