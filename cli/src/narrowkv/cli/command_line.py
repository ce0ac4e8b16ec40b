"""Makes commands of plain functions: common options, default commands, and exit codes of errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from narrowkv.cli.report import ExitCode, Report, ReportFiles, UnsupportedHereError, UsageError

_File = Path | None
_JSON = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout; tables and progress go to stderr.")
]
_FILES: dict[str, Any] = {
    "out": Annotated[
        _File, typer.Option("--out", metavar="FILE", help="Also write the JSON document to FILE.")
    ],
    "csv": Annotated[_File, typer.Option("--csv", metavar="FILE", help="Also write the rows as CSV.")],
    "plot": Annotated[
        _File,
        typer.Option("--plot", metavar="FILE", help="Also plot them: .png, .svg or .pdf (extra: plot)."),
    ],
    "resume": Annotated[
        _File,
        typer.Option(
            "--resume", metavar="FILE", help="Keep finished cases in FILE, and skip those it has already."
        ),
    ],
}


class Commands(TyperGroup):
    """A group that ends with the exit code of an error that a command raised."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            code = ExitCode.USAGE
            text = str(error)
        except UnsupportedHereError as error:
            code = ExitCode.UNSUPPORTED
            text = f"unsupported here: {error}"
        except BrokenPipeError:
            raise  # the reader of the pipe has closed it
        except (ImportError, OSError) as error:
            # torch or triton is missing, or a folder cannot be written; the message says which.
            code = ExitCode.UNSUPPORTED
            text = str(error)
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
            text = "interrupted before there was anything to keep"
        typer.echo(f"narrowkv: {text}", err=True)
        raise typer.Exit(int(code))


class DecodeByDefault(TyperGroup):
    """A group whose default command is `decode`, so that `validate --full` is decode's full sweep."""

    default = "decode"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Adds the name of the default command if the first argument is an option, or there is none."""
        # During completion there may be no argument yet, and the name of a command may follow.
        named = (
            not args[0].startswith("-") or args[0] in ctx.help_option_names if args else ctx.resilient_parsing
        )
        ctx.meta["narrowkv.decode_is_meant"] = not named
        return super().parse_args(ctx, args if named else [self.default, *args])

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; explains that options before a command's name belong to the default command."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            message = getattr(error, "message", "")
            if ctx.meta["narrowkv.decode_is_meant"] and "unexpected extra argument" in message:
                hint = f"options follow the operation: {ctx.command_path} OPERATION --option"
                error.message = f"{message}; {hint}"  # type: ignore[attr-defined]
            raise


class MeasureByDefault(DecodeByDefault):
    """A group whose default command is `measure`."""

    default = "measure"


def command(
    group: typer.Typer, name: str, *, files: Sequence[str] = tuple(_FILES), title: str = ""
) -> Callable[[Callable[..., ExitCode]], Callable[..., ExitCode]]:
    """Registers a function as a command with --json and the options of its files.

    The function's first parameter is the `Report`; the others are the command's own options. A parameter
    whose type is a dataclass becomes an option for each of its fields.

    Args:
        group: what to register it with.
        name: what to type.
        files: names of the files that it can write.
        title: the command's name in the document; `name` without one.
    """

    def register(work: Callable[..., ExitCode]) -> Callable[..., ExitCode]:
        def run(ctx: typer.Context, **values: Any) -> None:
            as_json, paths = values.pop("as_json"), {name: values.pop(name) for name in files}
            typed = frozenset(name for name in (*values, *files) if _is_typed(ctx, name))
            for parameter, group in groups.items():
                values[parameter] = group(**{f.name: values.pop(f.name) for f in fields(group)})
            report = Report(title or name, as_json=as_json, files=ReportFiles(**paths), typed=typed)
            raise typer.Exit(int(work(report, **values)))

        own = list(inspect.signature(work, eval_str=True).parameters.values())[1:]
        keyword = inspect.Parameter.KEYWORD_ONLY
        groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}
        parameters = [
            inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
            *(option for parameter in own for option in _options(parameter)),
            inspect.Parameter("as_json", keyword, default=False, annotation=_JSON),
            *(inspect.Parameter(file, keyword, default=None, annotation=_FILES[file]) for file in files),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__doc__ = work.__doc__
        group.command(name)(run)
        return work

    return register


def _options(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """The options of a parameter of a command."""
    keyword, group = inspect.Parameter.KEYWORD_ONLY, parameter.annotation
    if not is_dataclass(group):
        return [parameter.replace(kind=keyword)]
    types = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(f.name, keyword, default=f.default, annotation=types[f.name]) for f in fields(group)
    ]


def _is_typed(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
