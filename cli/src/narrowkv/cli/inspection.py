"""`narrowkv inspect`: what decode compiles to for gfx942 and gfx950, and a roofline of its loop.

The roofline counts what a few workgroups of the very artifact execute in the emulator; where that cannot be,
it counts the text of the loop and says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from narrowkv.cdna_emulator import EmulatorError, Loop
from narrowkv.cli.cases import DecodeCase, DecodeInputs, build, parse_format
from narrowkv.cli.codegen import KernelCode, amd_backend_missing, compile_call
from narrowkv.cli.emulation import EmulateExecutor, Run
from narrowkv.cli.environment import versions
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError, UsageError, number
from narrowkv.cli.roofline import Roofline, roofline
from narrowkv.cli.samples import a_few
from narrowkv.quant.launch import compile_for, executing
from narrowkv.quant.launch.artifact import CompiledArtifact, InstructionMix
from narrowkv.quant.targets import Target, get_target

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
    kv_heads: int,
    head_dim: int,
    page_size: int,
    fmt: str,
    q: str,
    kernel: str,
) -> DecodeCase:
    """A decode call by its sizes; `fmt` as `bench` takes it: "K", "K/V" or "K/V:GROUP".

    Raises:
        UsageError: a format that a cache does not have, or a kernel that there is not.
    """
    try:
        formats, group = parse_format(fmt)
    except ValueError as error:
        raise UsageError(f"--format {fmt}: {error}") from None
    if kernel not in ("", "native", "decode"):
        raise UsageError(f"--kernel must be native or decode, got {kernel!r}")
    lens = "+".join([str(context)] * batch)
    return DecodeCase(
        lens=lens,
        kv_heads=kv_heads,
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


def _models(
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
            model, whole, emulated = _models(run, loop, hardware, bytes_per_pass)
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


def inspect(case: DecodeCase, report: Report, *, targets: tuple[str, ...], asm: bool) -> ExitCode:
    """Compiles a decode call for each target and shows registers, instruction mix and the models.

    Spills or scratch end with exit code 1.
    """
    if (missing := amd_backend_missing()) is not None:
        raise UnsupportedHereError(missing)
    found = []
    interrupted = False
    with report.progress(len(targets), "inspecting") as line:
        try:
            for target in targets:
                try:
                    inspection, _ = inspect_case(case, target, with_assembly=asm)
                except (ValueError, TypeError) as error:
                    raise UsageError(f"{target}: {error}") from None
                found.append(inspection)
                line.advance(target)
        except KeyboardInterrupt:
            interrupted = True
    for inspection in found:
        _show(inspection, report)
    spilling = [k for i in found for k in i.kernels if k.spills or k.scratch_bytes]
    body = {"versions": versions(), "inspections": [_as_dict(i) for i in found]}
    return report.finish(body, ExitCode.NUMERICAL if spilling else ExitCode.OK, interrupted=interrupted)


def _as_dict(inspection: Inspection) -> dict[str, Any]:
    models = {
        name: model.as_dict() if model is not None else None
        for name, model in (("model", inspection.model), ("whole_model", inspection.whole_model))
    }
    body = {name: getattr(inspection, name) for name in inspection.__dataclass_fields__}
    if inspection.assembly is None:
        del body["assembly"]
    return {**body, **models}


def _show(inspection: Inspection, report: Report) -> None:
    registers = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in ("kernel", "VGPR", "AGPR", "SGPR", "spilled", "scratch", "LDS", "warps", "waves/SIMD"):
        registers.add_column(column, justify="left" if column == "kernel" else "right")
    for k in inspection.kernels:
        bad = "bold red" if k.spills or k.scratch_bytes else ""
        numbers = (
            k.vgprs,
            k.agprs,
            k.sgprs,
            k.spills,
            k.scratch_bytes,
            k.lds_bytes,
            k.num_warps,
            k.waves_per_simd,
        )
        registers.add_row(k.name, *(str(n) for n in numbers), style=bad)
    report.show(
        Panel(
            registers, title=f"{inspection.target}: {inspection.case}", subtitle=inspection.plan, expand=False
        )
    )
    main = max(inspection.kernels, key=lambda kernel: sum(kernel.mfma.values()))
    mix = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in main.loop.items())
    report.line(f"hot loop of {main.name}: {mix}")
    foremost = list(inspection.mnemonics.items())
    matrix = [item for item in foremost if item[0] in main.mfma]
    rest = [item for item in foremost if item[0] not in main.mfma][:_FOREMOST]
    report.line("  " + ", ".join(f"{name} {n}" for name, n in matrix + rest), "dim")
    if inspection.model is None:
        report.line(f"no roofline: {inspection.model_refusal}", "yellow")
    else:
        if inspection.emulated is not None:
            report.line(_emulated_line(inspection.emulated))
        counted = "executed instructions" if inspection.counts == "dynamic" else "the text of the loop"
        report.show(_model_line(f"a pass of the loop, {counted}", inspection.model))
        if inspection.whole_model is not None:
            report.show(_model_line("a whole workgroup, executed instructions", inspection.whole_model))
        if inspection.static_reason:
            report.line(f"  counts are static: {inspection.static_reason}", "yellow")
    for name, assembly in (inspection.assembly or {}).items():
        report.line(f"\n; ---- {inspection.target} {name} ----\n{assembly}")


def _emulated_line(emulated: Emulated) -> str:
    share = emulated.loop_wave_instructions / emulated.wave_instructions
    return (
        f"emulated: {emulated.workgroups} workgroups, each {number(emulated.wave_instructions, 5)} wave "
        f"instructions ({share:.0%} in the loop), {number(emulated.passes)} passes, "
        f"{number(emulated.loaded_bytes, 6)} bytes asked for, {number(emulated.stored_bytes, 6)} stored, "
        f"{number(emulated.lds_bytes, 6)} through LDS"
    )


def _model_line(of: str, model: Roofline) -> Text:
    busy = (
        ("HBM", model.memory_clk),
        ("VALU", model.valu_clk),
        ("MFMA", model.mfma_clk),
        ("LDS", model.lds_clk),
    )
    clocks = ", ".join(f"{name} {number(clk)}" for name, clk in busy)
    text = Text(f"model, not a measurement ({of}): ")
    text.append(f"bound by {model.bound_by}", style="green" if model.bound_by == "memory" else "bold red")
    return text.append(f", issue / memory {model.issue_over_memory:.2f}; clocks: {clocks}")
