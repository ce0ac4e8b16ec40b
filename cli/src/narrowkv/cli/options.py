"""Options that several commands share, and parsers of their values; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from narrowkv.cli.names import AMD_TARGETS, CACHE_FORMATS, PLACES, QUERY_DTYPES, choices
from narrowkv.cli.report import UsageError


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
    """Processes to use."""
    from narrowkv.testing.processes import default_jobs

    return given or default_jobs()


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
