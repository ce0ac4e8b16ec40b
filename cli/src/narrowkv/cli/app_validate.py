"""The commands `narrowkv validate`; each imports its work when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowkv.cli.command_line import DecodeByDefault, command
from narrowkv.cli.names import PLACES, check_case_formats, choices, one_of
from narrowkv.cli.options import Context, Count, Jobs, Where, starting_with
from narrowkv.cli.options import jobs as number_of
from narrowkv.cli.report import ExitCode, Report, UsageError

validate = typer.Typer(cls=DecodeByDefault)
Full = Annotated[
    bool, typer.Option("--full/--quick", help="Mix the axes with each other, or take each value once.")
]
Cases = Annotated[
    list[str] | None,
    typer.Option("--case", metavar="LINE", help="Only this case, as a sweep prints it; repeatable."),
]


def _check(report: Report, where: Where, case: list[str] | None = None) -> None:
    """Refuses, before torch is imported, misspelled names and options that have no effect with a case."""
    if where.on:
        choices("--on", where.on, PLACES)
    if case:
        check_case_formats(case)
        report.refuse("with --case, which says all of a case", "full", "seed")


def _run(
    operation: str, report: Report, where: Where, case: list[str] | None, full: bool, seed: int = 0
) -> ExitCode:
    """Validates cases of an operation: those that are named, or a sweep of what a place serves."""
    _check(report, where, case)
    from narrowkv.cli.cases import parse_case
    from narrowkv.cli.validate import validate as run
    from narrowkv.testing.kinds import KINDS

    kind = KINDS[operation]
    lines = [parse_case(kind, line) for line in case or ()]
    cases = lines or (lambda place: kind.sweep(place.target, full, seed))
    return run(cases, report, where, seed=seed, kind=kind)


@command(validate, "decode", title="validate")
def validate_decode(
    report: Report,
    full: Full = False,
    case: Cases = None,
    seed: Annotated[int, typer.Option(help="Of the random mixtures.")] = 0,
    *,
    where: Where,
) -> ExitCode:
    """Sweep decode's axes against the reference: error table, worst cases, commands that repeat them."""
    return _run("decode", report, where, case, full, seed)


@command(validate, "prefill", title="validate prefill")
def validate_prefill(report: Report, full: Full = False, case: Cases = None, *, where: Where) -> ExitCode:
    """Sweep prefill, and prefill that appends, whose cache must be right to the byte."""
    return _run("prefill", report, where, case, full)


@command(validate, "sparse", title="validate sparse")
def validate_sparse(report: Report, full: Full = False, case: Cases = None, *, where: Where) -> ExitCode:
    """Sweep DeepSeek-V4 sparse attention: ways to attend, layouts, row lengths, heads, options."""
    return _run("sparse", report, where, case, full)


@command(validate, "sage", title="validate sage")
def validate_sage(
    report: Report,
    full: Full = False,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    shape: Annotated[
        str | None, typer.Option("--shape", metavar="SIZES", help="One shape, as b=1,h=8,s=1024,d=128.")
    ] = None,
    precision: Annotated[str, typer.Option(help="Of --shape: int8, int4 or fp8; default: all.")] = "",
    granularity: Annotated[
        str, typer.Option(help="Of --shape: per_tensor, per_block, per_warp or per_thread; default: all.")
    ] = "",
    *,
    where: Where,
) -> ExitCode:
    """Show what Sage attention's granularities cost in accuracy, beside the published figures."""
    _check(report, where)
    if shape is None:
        report.refuse("without --shape", "precision", "granularity")
    else:
        report.refuse("with --shape", "full")
    from narrowkv.cli.validate_sage import validate_sage as run
    from narrowkv.testing.cases import sage as cases

    if shape is None:
        return run(cases.sweep(full=full, seed=seed), report, where, seed=seed)
    try:
        chosen = cases.one_shape(shape, precision=precision, granularity=granularity, seed=seed)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    return run(chosen, report, where, seed=seed)


@command(validate, "fp4", title="validate fp4")
def validate_fp4(
    report: Report,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each input set.")] = 3,
    batch: Count = 8,
    context: Context = 4096,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            help="cpu or gpu; default: the GPU if there is one.",
            autocompletion=starting_with(*PLACES[:2]),
        ),
    ] = None,
    jobs: Jobs = None,
) -> ExitCode:
    """Show what each FP4, FP8 and mixed cache recipe costs in accuracy, on two input sets."""
    if on is not None:
        one_of("--on", on, PLACES[:2])
    from narrowkv.cli.validate_fp4 import validate_fp4 as run
    from narrowkv.testing.format_errors import Sizes

    return run(report, seeds=seeds, sizes=Sizes(batch=batch, context=context), on=on, jobs=number_of(jobs))
