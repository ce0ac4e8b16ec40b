"""The commands `narrowkv validate`, made from the registry. Each imports its work when it is called."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Annotated, Any

import typer

from narrowkv.cli.command_line import DecodeByDefault, command
from narrowkv.cli.names import check_case_formats, choices, one_of
from narrowkv.cli.options import (
    Context,
    Count,
    Jobs,
    Option,
    Where,
    grouped,
    options_of,
    read_options,
    starting_with,
)
from narrowkv.cli.options import jobs as number_of
from narrowkv.cli.report import ExitCode, Report, UsageError
from narrowkv.testing.operation import OperationEntry
from narrowkv.testing.operations import OPERATIONS
from narrowkv.testing.words import PLACES

Full = Annotated[
    bool, typer.Option("--full/--quick", help="Mix the axes with each other, or take each value once.")
]
Lines = Annotated[
    list[str] | None,
    typer.Option("--case", metavar="LINE", help="Only this case, as a sweep prints it; repeatable."),
]


def validate_commands() -> typer.Typer:
    """The group of commands."""
    group = typer.Typer(cls=DecodeByDefault)
    for operation in OPERATIONS.values():
        _add(group, operation)
    command(group, "fp4", title="validate fp4")(validate_fp4)
    return group


def _add(group: typer.Typer, operation: OperationEntry) -> None:
    entry = operation.validate
    options: list[Option] = [("full", Full, False)]
    if entry.one_shape is None:
        options.append(("case", Lines, None))
    if entry.seed:
        options.append(("seed", Annotated[int, typer.Option(help=entry.seed)], 0))
    if entry.one_shape is not None:
        options += options_of(entry.one_shape)

    def work(report: Report, given: Any, *, where: Where) -> ExitCode:
        return _validate(operation, report, given, where)

    work.__annotations__["given"] = grouped(*options)
    work.__doc__ = entry.help
    default = operation.name == DecodeByDefault.default
    command(group, operation.name, title="validate" if default else f"validate {operation.name}")(work)


def _validate(operation: OperationEntry, report: Report, given: Any, where: Where) -> ExitCode:
    """Validates cases of an operation: those that are named, or a sweep of what a place serves."""
    # Misspelled names, and options that have no effect, are refused before torch is imported.
    if where.on:
        choices("--on", where.on, PLACES)
    full, lines, seed = given.full, getattr(given, "case", None), getattr(given, "seed", 0)
    if lines:
        check_case_formats(lines)
        report.refuse("with --case, which says all of a case", "full", "seed")
    shape = None
    if operation.validate.one_shape is not None:
        shape = read_options(operation.validate.one_shape, given)
        first, *others = (f.name for f in fields(shape))
        if getattr(shape, first) is None:
            report.refuse(f"without --{first}", *others)
            shape = None
        else:
            report.refuse(f"with --{first}", "full")
    from narrowkv.cli.cases import parse_case
    from narrowkv.cli.validate import validate, validate_sage

    known = operation.cases
    cases: Any = [parse_case(operation, line) for line in lines or ()]
    if shape is not None and known.one_shape is not None:
        try:
            cases = known.one_shape(**asdict(shape), seed=seed)
        except ValueError as error:
            raise UsageError(f"--{error}") from None
    run = validate if known.check is None else validate_sage
    return run(
        operation, cases or (lambda place: known.sweep(place.target, full, seed)), report, where, seed=seed
    )


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
    from narrowkv.cli.validate import validate_fp4 as run
    from narrowkv.testing.format_errors import InputSizes

    sizes = InputSizes(batch=batch, context=context)
    return run(report, seeds=seeds, sizes=sizes, on=on, jobs=number_of(jobs))
