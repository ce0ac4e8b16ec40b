"""The commands `narrowkv inspect`, made from the registry. Each imports its work when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowkv.cli.command_line import DecodeByDefault, command
from narrowkv.cli.names import check_case_formats
from narrowkv.cli.options import BOTH, Option, Targets, amd_targets, grouped, options_of, read_options
from narrowkv.cli.report import ExitCode, Report
from narrowkv.testing.operation import Family, OperationEntry
from narrowkv.testing.operations import OPERATIONS

Line = Annotated[
    str | None, typer.Option("--case", metavar="LINE", help="Only this case, as validate prints it.")
]
Assembly = Annotated[bool, typer.Option("--asm", help="Show the assembly too.")]
Model = Annotated[
    bool, typer.Option("--model/--no-model", help="Also show times, bounds and stalls by the timing model.")
]


def inspect_commands() -> typer.Typer:
    """The group of commands."""
    group = typer.Typer(cls=DecodeByDefault)
    for operation in OPERATIONS.values():
        if operation.inspect is not None:
            _add(group, operation)
    command(group, "model", title="inspect", files=("out",))(inspect_model)
    return group


def _add(group: typer.Typer, operation: OperationEntry) -> None:
    entry = operation.inspect
    assert entry is not None
    options: list[Option] = [("target", Targets, BOTH), *(options_of(entry.call) if entry.call else ())]
    if operation.validate.one_shape is None:
        options.append(("case", Line, None))
    if entry.call:
        options.append(("asm", Assembly, False))
    options.append(("model", Model, True))

    def work(report: Report, given: Any) -> ExitCode:
        return (_one_call if entry.call else _shipped)(operation, report, given)

    work.__annotations__["given"] = grouped(*options)
    work.__doc__ = entry.help
    command(group, operation.name, title="inspect")(work)


def _one_call(operation: OperationEntry, report: Report, given: Any) -> ExitCode:
    entry = operation.inspect
    assert entry is not None
    targets, options, line = amd_targets(given.target), read_options(entry.call, given), given.case
    if line is not None:
        check_case_formats([line])
        report.refuse("with --case, which says all of a case", *(f.name for f in fields(options)))
    from narrowkv.cli.cases import parse_case
    from narrowkv.cli.inspection import inspect

    case = import_module(entry.module).case_of(options) if line is None else parse_case(operation, line)
    return inspect(operation, case, report, targets=targets, asm=given.asm, modelled=given.model)


def _shipped(operation: OperationEntry, report: Report, given: Any) -> ExitCode:
    targets, line = amd_targets(given.target), getattr(given, "case", None)
    check_case_formats(filter(None, [line]))
    from narrowkv.cli.cases import parse_case
    from narrowkv.cli.shipped_code import inspect_calls

    case = None if line is None else parse_case(operation, line)
    modelled = _families(operation, line) if given.model else None
    return inspect_calls(operation, report, targets=targets, case=case, modelled=modelled)


def _families(operation: OperationEntry, line: str | None) -> Callable[[str], Mapping[str, Family]]:
    """A function from a target to the calls to model: the case, or one of each family of kernels."""
    from narrowkv.cli.modelled import parse_call
    from narrowkv.testing.operations import families

    if line is not None:
        return lambda target: {line: parse_call(f"{operation.name}:{line}")}
    return lambda target: {n: f for n, f in families(target).items() if f.operation == operation.name}


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
