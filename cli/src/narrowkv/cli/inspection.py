"""`narrowkv inspect`: what decode compiles to for gfx942 and gfx950, and a static roofline of its loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from narrowkv.attn_decode import plan_decode
from narrowkv.cli.cases import DecodeCase, DecodeInputs, build
from narrowkv.cli.codegen import KernelCode, amd_backend_missing, compile_call
from narrowkv.cli.environment import versions
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError, UsageError, number
from narrowkv.cli.roofline import Roofline, roofline
from narrowkv.quant.formats import get_format
from narrowkv.quant.launch import compile_for
from narrowkv.quant.launch.artifact import CompiledArtifact
from narrowkv.quant.targets import get_target

_FOREMOST = 12  # mnemonics shown of a loop


@dataclass(frozen=True)
class Inspection:
    """One decode call compiled for one target.

    Attributes:
        target: the target.
        case: the call.
        plan: the configuration, in words.
        kernels: every kernel of the call.
        model: static roofline of the attention kernel's hot loop; None if it has no loop.
        model_refusal: why there is none.
        mnemonics: static counts of the hot loop.
        assembly: of every kernel by name; only when asked for.
    """

    target: str
    case: str
    plan: str
    kernels: tuple[KernelCode, ...]
    model: Roofline | None
    model_refusal: str
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
    clean: bool,
) -> DecodeCase:
    """A decode call by its sizes; `fmt` is one format, or K's and V's joined by a slash."""
    k, _, v = fmt.partition("/")
    lens = "+".join([str(context)] * batch)
    return DecodeCase(
        lens=lens,
        kv_heads=kv_heads,
        ratio=ratio,
        head_dim=head_dim,
        page_size=page_size,
        q=q,
        k=k,
        v=v or k,
        clean=clean,
    )


def tile_bytes(inputs: DecodeInputs, target: str) -> tuple[float, str]:
    """HBM bytes of one pass of the hot loop by one workgroup, and the plan in words."""
    with compile_for(target):
        plan = plan_decode(inputs.q, inputs.cache, inputs.table, split=inputs.split)
    cache, config, shape = inputs.cache, plan.config, plan.shape
    bits = get_format(cache.format.k).bits + get_format(cache.format.v).bits
    row_blocks = -(-shape.q_len * shape.gqa_ratio // config.block_m)
    # Row blocks of one KV head read the same keys: HBM gives them once, a cache the other times.
    return config.block_n * cache.head_dim * bits / 8 / row_blocks, plan.explain()


def inspect_case(
    case: DecodeCase, target: str, *, with_assembly: bool = False
) -> tuple[Inspection, list[CompiledArtifact]]:
    """Compiles a decode call for a target and models its hot loop.

    Raises:
        ValueError, TypeError: what the operation says to a call that it does not take.
    """
    # Only shapes matter: one page of each length is enough to compile, but the plan looks at the capacity.
    inputs = build(case)
    artifacts = compile_call(target, inputs.call)
    main = max(artifacts, key=lambda a: a.loop.mfma)
    bytes_per_pass, words = tile_bytes(inputs, target)
    model, refusal = None, ""
    try:
        model = roofline(main.loop, get_target(target), num_warps=main.num_warps, hbm_bytes=bytes_per_pass)
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
            mnemonics=dict(main.loop.mnemonics.most_common()),
            assembly={a.name: a.assembly for a in artifacts} if with_assembly else None,
        ),
        artifacts,
    )


def inspect(case: DecodeCase, report: Report, *, targets: tuple[str, ...], asm: bool) -> ExitCode:
    """Compiles a decode call for each target and shows registers, instruction mix and the model.

    Spills or scratch end with exit code 1.
    """
    if (missing := amd_backend_missing()) is not None:
        raise UnsupportedHereError(missing)
    found = []
    interrupted = False
    with report.progress(len(targets), "compiling") as line:
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
    model = inspection.model.as_dict() if inspection.model is not None else None
    body = {name: getattr(inspection, name) for name in inspection.__dataclass_fields__}
    if inspection.assembly is None:
        del body["assembly"]
    return {**body, "model": model}


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
        report.line(f"no static roofline: {inspection.model_refusal}", "yellow")
    else:
        report.show(_model_line(inspection.model))
    for name, assembly in (inspection.assembly or {}).items():
        report.line(f"\n; ---- {inspection.target} {name} ----\n{assembly}")


def _model_line(model: Roofline) -> Text:
    busy = (
        ("HBM", model.memory_clk),
        ("VALU", model.valu_clk),
        ("MFMA", model.mfma_clk),
        ("LDS", model.lds_clk),
    )
    clocks = ", ".join(f"{name} {number(clk)}" for name, clk in busy)
    text = Text("model (not a measurement): ")
    text.append(f"bound by {model.bound_by}", style="green" if model.bound_by == "memory" else "bold red")
    return text.append(f", issue / memory {model.issue_over_memory:.2f}; clocks a pass: {clocks}\n")
