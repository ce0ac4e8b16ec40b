"""`narrowkv inspect`: what decode compiles to for gfx942 and gfx950, and a roofline of its loop.

The roofline counts what a few workgroups of the very artifact execute in the emulator; where that cannot be,
it counts the text of the loop and says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from narrowkv.cdna_emulator import EmulatorError, Loop
from narrowkv.cli.cases import DecodeCase, DecodeInputs, build, parse_format
from narrowkv.cli.environment import versions
from narrowkv.cli.modelled import model_families, show_model
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError, UsageError, number
from narrowkv.cli.sheet import Sheet, filled, keys, numbers
from narrowkv.cli.shipped_code import Task, finish_with_kernels
from narrowkv.cli.workers import run_all
from narrowkv.runtime.launch import compile_for, executing
from narrowkv.runtime.launch.artifact import CompiledArtifact, InstructionMix
from narrowkv.runtime.targets import Target, get_target
from narrowkv.testing.codegen import KernelCode, amd_backend_missing, compile_call
from narrowkv.testing.emulation import EmulateExecutor, Run
from narrowkv.testing.families import Family
from narrowkv.testing.roofline import Roofline, roofline
from narrowkv.testing.samples import a_few

_FOREMOST = 12  # mnemonics shown of a loop
_WORKGROUPS = 8  # emulated for the counts


@dataclass(frozen=True)
class Emulated:
    """What the emulated workgroups of the attention kernel executed: means over workgroups.

    Attributes:
        workgroups: how many ran.
        passes: passes through the hot loop.
        wave_instructions: all instructions, of all waves.
        loop_wave_instructions: those inside the hot loop.
        loaded_bytes, stored_bytes: what lanes asked of vector memory, each lane counted.
        lds_bytes: read and written.
        loop: executed in one pass by one wave, by mnemonic.
    """

    workgroups: int
    passes: float
    wave_instructions: float
    loop_wave_instructions: float
    loaded_bytes: float
    stored_bytes: float
    lds_bytes: float
    loop: dict[str, float]


@dataclass(frozen=True)
class Inspection:
    """One decode call compiled for one target.

    Attributes:
        target: the target.
        case: the call.
        plan: the configuration, in words.
        kernels: every kernel of the call.
        model: roofline of a pass through the attention kernel's hot loop; None if it has no loop.
        model_refusal: why there is none.
        whole_model: roofline of a whole workgroup, from its prologue to its stores; None without emulation.
        counts: what the models count: "dynamic", executed instructions, or "static", the loop's text.
        static_reason: why the counts are static.
        emulated: the dynamic counts; None if they are static.
        mnemonics: static counts of the hot loop.
        assembly: of every kernel by name; only when asked for.
    """

    target: str
    case: str
    plan: str
    kernels: tuple[KernelCode, ...]
    model: Roofline | None
    model_refusal: str
    whole_model: Roofline | None
    counts: str
    static_reason: str
    emulated: Emulated | None
    mnemonics: dict[str, int]
    assembly: dict[str, str] | None


def inspection_case(
    *,
    batch: int,
    context: int,
    ratio: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    cache_format: str,
    q: str,
    kernel: str,
) -> DecodeCase:
    """A decode call by its sizes; `cache_format` as `bench` takes it: "K", "K/V" or "K/V:GROUP".

    Raises:
        UsageError: a format that a cache does not have.
    """
    formats, group = parse_format(cache_format)
    lens = "+".join([str(context)] * batch)
    return DecodeCase(
        lens=lens,
        kv_heads=num_kv_heads,
        ratio=ratio,
        head_dim=head_dim,
        page_size=page_size,
        q=q,
        k=formats.k,
        v=formats.v,
        group=group,
        kernel=kernel,
    )


def tile_bytes(inputs: DecodeInputs, target: str) -> tuple[float, str]:
    """HBM bytes of one pass of the hot loop by one workgroup, and the plan in words."""
    with compile_for(target):
        plan = inputs.plan()
    cache, config, shape = inputs.cache, plan.config, plan.shape
    row_bytes = cache.bytes_per_token() / cache.num_kv_heads
    row_blocks = -(-shape.q_len * shape.gqa_ratio // config.block_m)
    # Row blocks of one KV head read the same keys: HBM gives them once, a cache the other times.
    return config.block_n * row_bytes / row_blocks, plan.explain()


def _run_a_few(target: str, call: Callable[[], object]) -> tuple[list[CompiledArtifact], list[Run], str]:
    """Compiles every launch and emulates a few workgroups of each, or says why they could not be."""
    executor = EmulateExecutor(target, workgroups=a_few(_WORKGROUPS))
    try:
        with executing(executor):
            call()
    except EmulatorError as error:
        return compile_call(target, call), [], f"{type(error).__name__}: {error}"
    return [run.artifact for run in executor.runs], executor.runs, ""


def models(
    run: Run, loop: Loop, target: Target, bytes_per_pass: float
) -> tuple[Roofline, Roofline, Emulated]:
    """Models of one pass and of one workgroup, from what all waves of all emulated workgroups executed."""
    counts, groups = run.result.counts, run.result.workgroups
    passes = loop.passes / run.artifact.num_warps
    kv_bytes = bytes_per_pass * passes
    executed = {"loop": loop.mnemonics, "whole": run.result.profile.mnemonics}
    # The waves are in the counts already, so they stand for one wave here.
    totals = {
        name: InstructionMix(Counter({m: round(n) for m, n in mix.items()})) for name, mix in executed.items()
    }
    whole_bytes = kv_bytes + counts.vmem_bytes_stored
    return (
        roofline(totals["loop"], target, num_warps=1, hbm_bytes=kv_bytes).divided(passes),
        roofline(totals["whole"], target, num_warps=1, hbm_bytes=whole_bytes).divided(groups),
        Emulated(
            workgroups=groups,
            passes=passes / groups,
            wave_instructions=counts.wave_instructions / groups,
            loop_wave_instructions=sum(loop.mnemonics.values()) / groups,
            loaded_bytes=counts.vmem_bytes_loaded / groups,
            stored_bytes=counts.vmem_bytes_stored / groups,
            lds_bytes=(counts.lds_bytes_read + counts.lds_bytes_written) / groups,
            loop={name: n / loop.passes for name, n in loop.mnemonics.items()},
        ),
    )


def inspect_case(
    case: DecodeCase, target: str, *, with_assembly: bool = False
) -> tuple[Inspection, list[CompiledArtifact]]:
    """Compiles a decode call for a target, emulates a few of its workgroups, and models its hot loop.

    Raises:
        ValueError, TypeError: what the operation says to a call that it does not take.
    """
    inputs = build(case)
    artifacts, runs, static_reason = _run_a_few(target, inputs.call)
    main = max(artifacts, key=lambda a: a.loop.mfma)
    bytes_per_pass, words = tile_bytes(inputs, target)
    hardware = get_target(target)
    model = whole = emulated = None
    refusal = ""
    try:
        loop = next((run.result.profile.hot_loop for run in runs if run.artifact is main), None)
        if loop is not None:
            (run,) = (run for run in runs if run.artifact is main)
            model, whole, emulated = models(run, loop, hardware, bytes_per_pass)
        else:
            static_reason = static_reason or "none of the emulated workgroups went through the loop"
            model = roofline(main.loop, hardware, num_warps=main.num_warps, hbm_bytes=bytes_per_pass)
    except ValueError as error:
        refusal = str(error)
    return (
        Inspection(
            target=target,
            case=str(case),
            plan=words,
            kernels=tuple(KernelCode.of(a) for a in artifacts),
            model=model,
            model_refusal=refusal,
            whole_model=whole,
            counts="static" if emulated is None else "dynamic",
            static_reason=static_reason,
            emulated=emulated,
            mnemonics=dict(main.loop.mnemonics.most_common()),
            assembly={a.name: a.assembly for a in artifacts} if with_assembly else None,
        ),
        artifacts,
    )


def inspect(
    case: DecodeCase, report: Report, *, targets: tuple[str, ...], asm: bool, modelled: bool = False
) -> ExitCode:
    """Compiles a decode call for each target and shows registers, instruction mix and the models.

    Spills or scratch end with exit code 1.

    Raises:
        UnsupportedHereError: this Triton cannot compile for AMD.
        UsageError: the operation refuses the case.
    """
    if (missing := amd_backend_missing()) is not None:
        raise UnsupportedHereError(missing)
    found: list[Inspection] = []

    def work(task: Task[DecodeCase]) -> Inspection:
        try:
            return inspect_case(task.case, task.target, with_assembly=asm)[0]
        except (ValueError, TypeError) as error:
            raise UsageError(f"{task.target}: {error}") from None

    def take(task: Task[DecodeCase], inspection: Inspection) -> str:
        found.append(inspection)
        return task.target

    tasks = [Task(target, case) for target in targets]
    interrupted = run_all(report, tasks, work, Inspection, take, what="inspecting", settings={"asm": asm})
    for inspection in found:
        _show(inspection, report)
    spilling = [k for i in found for k in i.kernels if k.spills or k.scratch_bytes]
    body: dict[str, Any] = {"versions": versions(), "inspections": [_as_dict(i) for i in found]}
    if modelled and not interrupted:
        family = {str(case): Family(lambda: build(case).call(), None, "decode")}
        body["model"] = show_model(report, [r for name in targets for r in model_families(name, family)])
    code = ExitCode.NUMERICAL if spilling else ExitCode.OK
    return finish_with_kernels(
        report, body, code, [(i.target, i.case, i.kernels) for i in found], interrupted
    )


def _as_dict(inspection: Inspection) -> dict[str, Any]:
    rooflines = {
        name: model.as_dict() if model is not None else None
        for name, model in (("model", inspection.model), ("whole_model", inspection.whole_model))
    }
    body = {name: getattr(inspection, name) for name in inspection.__dataclass_fields__}
    if inspection.assembly is None:
        del body["assembly"]
    return {**body, **rooflines}


def _show(inspection: Inspection, report: Report) -> None:
    width = report.human.width
    report.line(f"{inspection.target}: {inspection.case}", "bold")
    report.line(f"  {inspection.plan}")
    figures = ("VGPR", "AGPR", "SGPR", "spilled", "scratch", "LDS", "warps", "waves/SIMD")
    registers = Sheet([*keys("kernel"), *numbers(*figures)])
    for k in inspection.kernels:
        registers.add(
            k.name, k.vgprs, k.agprs, k.sgprs, k.spills, k.scratch_bytes, k.lds_bytes, k.num_warps,
            k.waves_per_simd, style="bold red" if k.spills or k.scratch_bytes else "",
        )  # fmt: skip
    report.show(registers)
    main = max(inspection.kernels, key=lambda kernel: sum(kernel.mfma.values()))
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
            for line in filled(_executed(inspection.emulated), width, first="  ", then="  "):
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


def _executed(emulated: Emulated) -> list[str]:
    share = emulated.loop_wave_instructions / emulated.wave_instructions
    return [
        f"wave instructions {number(emulated.wave_instructions, 5)} ({share:.0%} in the loop)",
        f"passes {number(emulated.passes)}",
        f"bytes asked for {number(emulated.loaded_bytes, 6)}",
        f"stored {number(emulated.stored_bytes, 6)}",
        f"through LDS {number(emulated.lds_bytes, 6)}",
    ]
