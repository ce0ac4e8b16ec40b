"""The commands `narrowkv bench`: one for each operation of the registry that has a bench, and others.

Each imports its work when it is called.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import Annotated, Any

import typer

from narrowkv.cli.command_line import command
from narrowkv.cli.names import cache_formats, choices, one_of
from narrowkv.cli.options import (
    Formats,
    Heads,
    OneFormat,
    grouped,
    heads_of,
    listed,
    numbers,
    options_of,
    read_options,
    starting_with,
)
from narrowkv.cli.report import ExitCode, Report, UsageError
from narrowkv.testing.operation import OperationEntry
from narrowkv.testing.operations import OPERATIONS
from narrowkv.testing.traffic import MODELS, TRAFFIC
from narrowkv.testing.words import CACHE_FORMATS, COMMS, PLACES

BenchOn = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        metavar="PLACES",
        help="gpu, which measures, or gfx942 and gfx950, whose times are a model's. Default: gpu.",
        autocompletion=starting_with(*PLACES[1:]),
    ),
]
Samples = Annotated[int, typer.Option(min=1, help="The most samples of a row.")]
# Batches up to 512 for which engines capture graphs.
CAPTURES = ",".join(map(str, [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]))


def bench_commands() -> typer.Typer:
    """The group of commands."""
    group = typer.Typer(no_args_is_help=True)
    for operation in OPERATIONS.values():
        if operation.bench is not None:
            _add(group, operation)
    command(group, "traffic", title="bench")(bench_traffic)
    command(group, "host", files=("out",), title="bench host")(bench_host)
    command(group, "cp", files=("out", "csv"), title="bench cp")(bench_cp)
    return group


def _add(group: typer.Typer, operation: OperationEntry) -> None:
    entry = operation.bench
    assert entry is not None

    def work(report: Report, given: Any) -> ExitCode:
        measured = (f.name for f in fields(entry.options) if f.metadata["measured"])
        targets = _targets(report, given.on, *measured)
        options = read_options(entry.options, given)
        from narrowkv.cli import bench as tables

        try:
            chosen, rows, settings = import_module(entry.module).make(options)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if targets:
            return tables.bench_modelled(chosen, rows, targets, report)
        compared = {
            name: getattr(options, name) for name in ("against", "threshold") if hasattr(options, name)
        }
        return tables.bench(chosen, rows, report, samples=options.samples, settings=settings, **compared)

    work.__annotations__["given"] = grouped(*options_of(entry.options), ("on", BenchOn, None))
    work.__doc__ = entry.help
    command(group, operation.name, title="bench")(work)


def _targets(report: Report, on: list[str] | None, *idle: str) -> list[str]:
    """The targets of a bench that is modelled; none for one that is measured."""
    chosen = choices("--on", on, PLACES[1:]) if on else ["gpu"]
    if chosen == ["gpu"]:
        return []
    if "gpu" in chosen:
        raise UsageError("--on must be gpu, or AMD targets whose times are a model's: measure in another run")
    report.refuse("to modelled times", "samples", *idle)
    return chosen


def bench_traffic(
    report: Report,
    model: Annotated[str, listed("Default: all.", *MODELS)] = ",".join(MODELS),
    traffic: Annotated[str, listed("Kinds of steps.", *TRAFFIC)] = ",".join(TRAFFIC),
    batch: Annotated[str, listed("Sequences of a step.")] = "16,64,256",
    cache_format: Formats = "fp8_e4m3fn",
    seed: Annotated[int, typer.Option(help="Of the lengths.")] = 0,
    samples: Samples = 20,
    choices_: Annotated[
        bool,
        typer.Option("--choices", help="Instead: automatic beside every forced kernel and split, on a grid."),
    ] = False,
) -> ExitCode:
    """Measure steps of a serving engine: decode, chunked prefill, speculative and mixed, lognormal lengths.

    Beside torch's SDPA over keys gathered beforehand, and AITER and FlashInfer if installed. Without a GPU a
    rehearsal: smaller steps are checked, and nothing is timed.
    """
    kinds = choices("--traffic", traffic, TRAFFIC)
    models, formats = choices("--model", model, tuple(MODELS)), cache_formats("--format", cache_format)
    batches = numbers("--batch", batch)
    if choices_:
        report.refuse(
            "with --choices, which has a grid of its own", "traffic", "batch", "cache_format", "seed"
        )
    from narrowkv.cli import bench as tables
    from narrowkv.testing.traffic import grid, serving_steps

    if choices_:
        steps = [step for step in grid() if step.model in models]
    else:
        steps = serving_steps(models, kinds, batches, formats, seed)
    return tables.bench_traffic(steps, report, samples=samples, choices=choices_)


def bench_host(
    report: Report,
    samples: Samples = 20,
    shapes: Annotated[int, typer.Option(min=0, help="Random calls of each operation; 0 for none.")] = 50,
    captures: Annotated[str, listed("Batches of captured graphs.")] = CAPTURES,
    context: Annotated[int, typer.Option(min=16, help="Tokens that a captured batch may hold.")] = 131072,
) -> ExitCode:
    """Measure the Python time of each operation beside torch.add_, and the kernels of random shapes."""
    sizes = numbers("--captures", captures)
    from narrowkv.cli.bench import bench_host as run

    return run(report, samples=samples, shapes=shapes, captures=sizes, context=context)


def bench_cp(
    report: Report,
    ranks: Annotated[int, typer.Option(min=2, max=8, help="GPUs of this host; without any, processes.")] = 2,
    context: Annotated[str, listed("Tokens of each sequence.")] = "131072,1048576",
    batch: Annotated[str, listed("Sequences.")] = "1,8",
    heads: Heads = "96/8",
    cache_format: OneFormat = "fp8_e4m3fn",
    comm: Annotated[str, listed("Exchanges of partial results.")] = (",".join(COMMS)),
    model: Annotated[bool, typer.Option("--model", help="Modelled times of many GPUs instead.")] = False,
    gpus: Annotated[str, listed("With --model: GPUs.")] = "2,4,8,16,32,72",
    target: Annotated[str, typer.Option(help="With --model: gfx942, gfx950 or sm90.")] = "gfx942",
    link: Annotated[str, typer.Option(help="With --model: what connects them; default the target's.")] = "",
    hbm: Annotated[float, typer.Option(min=0, help="With --model: TB/s of memory; 0: the target's.")] = 0.0,
) -> ExitCode:
    """Time of decode over GPUs: attention, communication, share hidden, rate over one GPU's."""
    (pair,) = heads_of(heads, most=1)
    one_of("--format", cache_format, CACHE_FORMATS)
    from narrowkv.cli import cp as work
    from narrowkv.testing.bench.context_parallel import Setting
    from narrowkv.testing.bench.context_parallel_model import LINK_OF_TARGET, LINKS

    setting = Setting(
        tuple(numbers("--context", context)), tuple(numbers("--batch", batch)), *pair,
        format=cache_format, comms=tuple(choices("--comm", comm, COMMS)),
    )  # fmt: skip
    if not model:
        report.refuse("without --model", "gpus", "target", "link", "hbm")
        return work.bench_cp(report, setting, ranks=ranks)
    report.refuse("with --model", "ranks", "comm")
    one_of("--target", target, tuple(LINK_OF_TARGET))
    link = one_of("--link", link or LINK_OF_TARGET[target], tuple(LINKS))
    return work.model_cp(report, setting, gpus=numbers("--gpus", gpus), target=target, link=link, hbm=hbm)
