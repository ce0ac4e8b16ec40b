"""The commands `narrowkv inspect`; each imports its work when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from narrowkv.cli.command_line import DecodeByDefault, command
from narrowkv.cli.names import DECODE_KERNELS, QUERY_DTYPES, cache_formats, check_case_formats, one_of
from narrowkv.cli.options import BOTH, Context, Count, Formats, Query, Targets, amd_targets, starting_with
from narrowkv.cli.report import ExitCode, Report, UsageError

inspect = typer.Typer(cls=DecodeByDefault)
Case = Annotated[
    str | None, typer.Option("--case", metavar="LINE", help="Only this case, as validate prints it.")
]
Model = Annotated[
    bool, typer.Option("--model/--no-model", help="Also show times, bounds and stalls by the timing model.")
]


@command(inspect, "decode", title="inspect")
def inspect_decode(
    report: Report,
    target: Targets = BOTH,
    batch: Count = 4,
    context: Context = 1024,
    ratio: Annotated[int, typer.Option(min=1, help="Query heads for each KV head.")] = 12,
    num_kv_heads: Count = 8,
    head_dim: Count = 128,
    page_size: Count = 16,
    cache_format: Formats = "fp8_e4m3fn",
    q: Query = "bf16",
    kernel: Annotated[
        str,
        typer.Option(
            help="native or decode; default: the target's.", autocompletion=starting_with(*DECODE_KERNELS)
        ),
    ] = "",
    case: Case = None,
    asm: Annotated[bool, typer.Option("--asm", help="Show the assembly too.")] = False,
    model: Model = True,
) -> ExitCode:
    """Show what decode compiles to: registers, LDS, spills, instructions, and a modelled roofline."""
    targets = amd_targets(target)
    if len(cache_formats("--format", cache_format)) > 1:
        raise UsageError(f"--format must be one format here, got {cache_format}")
    one_of("--q", q, QUERY_DTYPES)
    if kernel:
        one_of("--kernel", kernel, DECODE_KERNELS)
    if case is not None:
        check_case_formats([case])
        report.refuse(
            "with --case, which says all of a case", "batch", "context", "ratio", "num_kv_heads", "head_dim",
            "page_size", "cache_format", "q", "kernel",
        )  # fmt: skip
    from narrowkv.cli.cases import parse_case
    from narrowkv.cli.inspection import inspect as run
    from narrowkv.testing.bench.decode import DecodeSizes
    from narrowkv.testing.kinds import DECODE

    sizes = DecodeSizes(batch, context, page_size, num_kv_heads, ratio, head_dim, q, cache_format)
    chosen = sizes.case(kernel) if case is None else parse_case(DECODE, case)
    return run(chosen, report, targets=targets, asm=asm, modelled=model)


def _families(wanted: bool, operation: str, case: str | None = None) -> Any:
    """A function from a target to the calls to model: the case, or one of each family of kernels."""
    if not wanted:
        return None
    from narrowkv.cli.modelled import parse_call
    from narrowkv.testing.families import families

    if case is not None:
        return lambda target: {case: parse_call(f"{operation}:{case}")}
    return lambda target: {n: f for n, f in families(target).items() if f.operation == operation}


def _inspect_shipped(
    operation: str, report: Report, target: str, model: bool, case: str | None = None
) -> ExitCode:
    targets = amd_targets(target)
    check_case_formats(filter(None, [case]))
    from narrowkv.cli.cases import parse_case
    from narrowkv.cli.shipped_code import inspect_calls
    from narrowkv.testing.kinds import KINDS

    one = None if case is None else parse_case(KINDS[operation], case)
    return inspect_calls(
        operation, report, targets=targets, case=one, modelled=_families(model, operation, case)
    )


@command(inspect, "prefill", title="inspect")
def inspect_prefill(
    report: Report, target: Targets = BOTH, case: Case = None, model: Model = True
) -> ExitCode:
    """Show what prefill compiles to: every shipped configuration, or one case."""
    return _inspect_shipped("prefill", report, target, model, case)


@command(inspect, "sparse", title="inspect")
def inspect_sparse(
    report: Report, target: Targets = BOTH, case: Case = None, model: Model = True
) -> ExitCode:
    """Show what sparse attention compiles to: every shipped configuration, or one case."""
    return _inspect_shipped("sparse", report, target, model, case)


@command(inspect, "sage", title="inspect")
def inspect_sage(report: Report, target: Targets = BOTH, model: Model = True) -> ExitCode:
    """Show what Sage attention compiles to: every shipped configuration."""
    return _inspect_shipped("sage", report, target, model)


@command(inspect, "model", title="inspect", files=("out",))
def inspect_model(
    report: Report,
    target: Targets = BOTH,
    family: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this family of kernels; repeatable.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="OPERATION:LINE", help="A case of decode, prefill or sparse; repeatable."),
    ] = None,
    peer: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="AMD assembly of another kernel, to model its loop; repeatable."),
    ] = None,
) -> ExitCode:
    """Show modelled times, bounds and stalls: a call of every family, cases, or other assembly."""
    targets = amd_targets(target)
    from narrowkv.cli.modelled import inspect_model as run

    return run(report, targets=targets, names=family or (), cases=case or (), peers=peer or ())
