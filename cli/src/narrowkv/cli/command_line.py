"""Makes commands of plain functions: shared options, default commands, exit codes of errors.

Parsers read the values of options. Nothing here imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError, UsageError, spelled
from narrowkv.testing.cases import unknown
from narrowkv.testing.words import AMD_TARGETS, CACHE_FORMATS, FP4, PLACES, QUERY_DTYPES, SCALE_GROUPS

_MOST_WORKERS = 8  # each imports torch and triton: about 0.5 GB
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
            report = Report(title or name, as_json=as_json, typed=typed, **paths)
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


def starting_with(*known: str) -> Callable[[str], list[str]]:
    """Completes the last of names joined by commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in known if name.startswith(last)]

    return complete


def listed(help: str = "", *known: str, metavar: str = "LIST") -> Any:
    """An option whose text joins values by commas; `known` ones are completed and, without help, named."""
    text = help or (f"Of {', '.join(known)}." if known else None)
    return typer.Option(metavar=metavar, help=text, autocompletion=starting_with(*known) if known else None)


On = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        metavar="PLACES",
        help="cpu, gpu, or gfx942 or gfx950 emulated; several joined by commas or repeated. "
        "Default: the GPU if there is one, else the CPU.",
        autocompletion=starting_with(*PLACES),
    ),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Processes; default: one for each core, up to 8.")
]
DetectRaces = Annotated[
    bool, typer.Option("--detect-races", help="With emulated places: watch LDS for races.")
]
DetectHazards = Annotated[
    bool,
    typer.Option(
        "--detect-hazards", help="With emulated places: check waits for memory and wait states, and races."
    ),
]
Targets = Annotated[str, listed("AMD targets to compile for.", *AMD_TARGETS, metavar="NAMES")]
BOTH = ",".join(AMD_TARGETS)
Context = Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")]
Count = Annotated[int, typer.Option(min=1)]
Heads = Annotated[str, typer.Option("--heads", metavar="Q/KV", help="Query heads and KV heads.")]
OneFormat = Annotated[str, typer.Option("--format", metavar="FORMAT", help="Cache format.")]
Query = Annotated[
    str, typer.Option(help="Of the query: bf16 or fp16.", autocompletion=starting_with(*QUERY_DTYPES))
]
Formats = Annotated[
    str,
    typer.Option(
        "--format",
        "--cache",
        metavar="LIST",
        help="Cache formats; K's and V's as k/v, FP4's scales per 32 as :32, in E4M3 as :e4m3 or :16+e4m3.",
        autocompletion=starting_with(*CACHE_FORMATS),
    ),
]


@dataclass(frozen=True)
class Where:
    """Where cases run, and which checks are on there; a command with such a parameter has these options."""

    on: On = None
    detect_races: DetectRaces = False
    detect_hazards: DetectHazards = False
    jobs: Jobs = None


def jobs(given: int | None) -> int:
    """Processes to use: unless given, one for each core, up to eight."""
    from narrowkv.runtime.launch.warmup import usable_cores

    return given or min(usable_cores(), _MOST_WORKERS)


def amd_targets(text: str) -> tuple[str, ...]:
    """The targets of --target."""
    return tuple(choices("--target", text, AMD_TARGETS))


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    """Numbers joined by commas, each at least `least`."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise UsageError(f"{option} must be numbers of at least {least} joined by commas, got {text!r}")
    return [int(part) for part in parts]


def heads_of(text: str, most: int | None = None) -> list[tuple[int, int]]:
    """Query heads and KV heads of --heads, at most `most` pairs."""
    pairs = [part.split("/") for part in text.split(",")]
    whole = all(len(pair) == 2 and all(n.isdecimal() and int(n) for n in pair) for pair in pairs)
    if not whole or len(pairs) > (most or len(pairs)):
        more = "" if most == 1 else ", pairs joined by commas"
        raise UsageError(f"--heads must be query heads and KV heads, for example 96/8{more}; got {text!r}")
    return [(int(q), int(kv)) for q, kv in pairs]


Option = tuple[str, Any, Any]
"""Name, annotated type and default of a command's parameter."""


def options_of(options: Any) -> list[Option]:
    """The parameters of a command for the fields that `narrowkv.testing.operation.option` made."""
    types = get_type_hints(options)
    return [(f.name, _annotation(f, types[f.name]), _text(f.default)) for f in fields(options)]


def grouped(*options: Option) -> type:
    """A dataclass of parameters, which become options of a command that takes one such object."""
    return make_dataclass("Options", [(name, kind, field(default=value)) for name, kind, value in options])


def read_options(options: Any, given: Any) -> Any:
    """An object of a dataclass of options from the values of a command's parameters.

    Raises:
        UsageError: a value is wrong.
    """
    types = get_type_hints(options)
    return options(**{f.name: _read(f, types[f.name], getattr(given, f.name)) for f in fields(options)})


def _text(default: Any) -> Any:
    if not isinstance(default, tuple):
        return default
    return ",".join("/".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in default)


def _annotation(f: Any, kind: Any) -> Any:
    said = f.metadata
    help, words, metavar = said["help"] or None, said["words"], said["metavar"] or None
    if said["kind"] in ("formats", "query"):
        return Formats if said["kind"] == "formats" else Query
    if isinstance(f.default, tuple):
        return Annotated[str, listed(help or "", *words)]
    if kind is bool:
        return Annotated[bool, typer.Option(spelled(f.name), help=help)]
    if kind is int:
        return Annotated[int, typer.Option(min=said["least"], help=help)]
    completion = starting_with(*words) if words else None
    return Annotated[kind, typer.Option(metavar=metavar, help=help, autocompletion=completion)]


def _read(f: Any, kind: Any, value: Any) -> Any:
    said, name = f.metadata, spelled(f.name)
    if said["kind"] == "formats":
        formats = tuple(cache_formats(name, value))
        if isinstance(f.default, tuple):
            return formats
        if len(formats) > 1:
            raise UsageError(f"{name} must be one format here, got {value}")
    elif said["kind"] == "query":
        one_of(name, value, QUERY_DTYPES)
    elif said["kind"] == "heads":
        return tuple(heads_of(value))
    elif isinstance(f.default, tuple):
        return tuple(
            choices(name, value, said["words"]) if said["words"] else numbers(name, value, said["least"])
        )
    elif said["words"] and value:
        one_of(name, value, said["words"])
    return value


def one_of(what: str, got: str, known: Sequence[str]) -> str:
    """`got`, if it is known.

    Raises:
        UsageError: it is not.
    """
    if got not in known:
        raise UsageError(str(unknown(what, got, known)))
    return got


def choices(option: str, text: str | Iterable[str], known: Sequence[str]) -> list[str]:
    """The known names in a comma-separated text, or in several such texts, without duplicates.

    Raises:
        UsageError: a name is not known, or there is none.
    """
    texts = [text] if isinstance(text, str) else text
    found = dict.fromkeys(name for part in texts for name in part.split(","))
    return [one_of(option, name, known) for name in found]


def _check_cache(text: str) -> None:
    """Checks a cache format: "K" or "K/V", with FP4 also ":CHANNELS", ":e4m3" or ":CHANNELS+e4m3" for scales.

    Raises:
        UsageError: an unknown format, or scales that no FP4 cache has.
    """
    formats, colon, scales = text.partition(":")
    k, slash, v = formats.partition("/")
    k, v = one_of("K's format", k, CACHE_FORMATS), v if slash else k
    one_of("V's format", v, CACHE_FORMATS)
    if not colon:
        return
    groups = list(map(str, SCALE_GROUPS))
    if scales not in [*groups, "e4m3", *(f"{group}+e4m3" for group in groups)]:
        raise UsageError(
            "FP4 has one scale a head or, after a colon, one per "
            f"{' or '.join(groups)} channels; e4m3 or {groups[0]}+e4m3 stores it so; got {scales!r}"
        )
    if FP4 not in (k, v):
        raise UsageError(f"only FP4 has scales {scales}; got {formats}")


def cache_formats(option: str, text: str) -> list[str]:
    """Cache formats joined by commas.

    Raises:
        UsageError: one is none, or there is none.
    """
    found = text.split(",")
    for name in found:
        _check_format(option, name)
    return found


def _check_format(option: str, name: str) -> None:
    try:
        _check_cache(name)
    except UsageError as error:
        raise UsageError(f"{option} {name}: {error}") from None


def check_case_formats(lines: Iterable[str]) -> None:
    """Refuses a --case line with a misspelled format; the rest is checked after torch is imported.

    Raises:
        UsageError: naming the part.
    """
    for line in lines:
        for part in line.split(","):
            name, _, value = part.partition("=")
            if name == "format":
                _check_format("--case format", value)
