"""The commands `validate`, `bench` and `inspect`: one for each operation of the registry, and a few others.

Each imports its work when it is called: --help needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowkv.cli.command_line import (
    BOTH,
    Context,
    Count,
    DecodeByDefault,
    Formats,
    Heads,
    Jobs,
    OneFormat,
    Option,
    Targets,
    Where,
    amd_targets,
    cache_formats,
    check_case_formats,
    choices,
    command,
    grouped,
    heads_of,
    listed,
    numbers,
    one_of,
    options_of,
    read_options,
    starting_with,
)
from narrowkv.cli.command_line import jobs as number_of
from narrowkv.cli.report import ExitCode, Report, UsageError
from narrowkv.testing.operation import Family, OperationEntry
from narrowkv.testing.operations import OPERATIONS
from narrowkv.testing.words import CACHE_FORMATS, COMMS, PLACES, SERVED_MODELS, TRAFFIC


def add_operations(program: typer.Typer) -> None:
    """Adds the groups of commands that are made from the registry of operations."""
    validate, inspect = typer.Typer(cls=DecodeByDefault), typer.Typer(cls=DecodeByDefault)
    bench = typer.Typer(no_args_is_help=True)
    for operation in OPERATIONS.values():
        _add_validate(validate, operation)
        if operation.bench:
            _add_bench(bench, operation)
        if operation.inspect:
            _add_inspect(inspect, operation)
    command(validate, "fp4", title="validate fp4")(validate_fp4)
    command(bench, "traffic", title="bench")(bench_traffic)
    command(bench, "host", files=("out",), title="bench host")(bench_host)
    command(bench, "cp", files=("out", "csv"), title="bench cp")(bench_cp)
    command(inspect, "model", title="inspect", files=("out",))(inspect_model)
    program.add_typer(
        validate, name="validate",
        help="Compare operations with their references, and cache formats with the tensors they store. "
        "Without a command: decode.",
    )  # fmt: skip
    program.add_typer(bench, name="bench", help="Measure device time against ceilings of the same run.")
    program.add_typer(
        inspect, name="inspect",
        help="Show what operations compile to for gfx942 and gfx950. Without a command: decode.",
    )  # fmt: skip


Full = Annotated[
    bool, typer.Option("--full/--quick", help="Mix the axes with each other, or take each value once.")
]
Lines = Annotated[
    list[str] | None,
    typer.Option("--case", metavar="LINE", help="Only this case, as a sweep prints it; repeatable."),
]


def _add_validate(group: typer.Typer, operation: OperationEntry) -> None:
    options: list[Option] = [("full", Full, False), ("case", Lines, None)]
    if operation.seed:
        options.append(("seed", Annotated[int, typer.Option(help=operation.seed)], 0))

    def work(report: Report, given: Any, *, where: Where) -> ExitCode:
        return _validate(operation, report, given, where)

    work.__annotations__["given"] = grouped(*options)
    work.__doc__ = operation.validate
    default = operation.name == DecodeByDefault.default
    command(group, operation.name, title="validate" if default else f"validate {operation.name}")(work)


def _validate(operation: OperationEntry, report: Report, given: Any, where: Where) -> ExitCode:
    """Validates cases of an operation: those that are named, or a sweep of what a place serves."""
    # Misspelled names, and options that have no effect, are refused before torch is imported.
    if where.on:
        choices("--on", where.on, PLACES)
    full, lines, seed = given.full, given.case, getattr(given, "seed", 0)
    if lines:
        check_case_formats(lines)
        report.refuse("with --case, which says all of a case", "full", "seed")
    from narrowkv.cli.running import parse_case
    from narrowkv.cli.validate import validate

    cases: Any = [parse_case(operation, line) for line in lines or ()]
    sweep = operation.cases.sweep
    return validate(
        operation, cases or (lambda place: sweep(place.target, full, seed)), report, where, seed=seed
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


def _add_bench(group: typer.Typer, operation: OperationEntry) -> None:
    def work(report: Report, given: Any) -> ExitCode:
        measured = (f.name for f in fields(operation.bench_rows) if f.metadata["measured"])
        targets = _targets(report, given.on, *measured)
        options = read_options(operation.bench_rows, given)
        from narrowkv.cli import bench as tables

        try:
            chosen, rows, settings = import_module(operation.bench_module).make(options)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if targets:
            return tables.bench_modelled(chosen, rows, targets, report)
        compared = {
            name: getattr(options, name) for name in ("against", "threshold") if hasattr(options, name)
        }
        return tables.bench(chosen, rows, report, samples=options.samples, settings=settings, **compared)

    work.__annotations__["given"] = grouped(*options_of(operation.bench_rows), ("on", BenchOn, None))
    work.__doc__ = operation.bench
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
    model: Annotated[str, listed("Default: all.", *SERVED_MODELS)] = ",".join(SERVED_MODELS),
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
    models, formats = choices("--model", model, tuple(SERVED_MODELS)), cache_formats("--format", cache_format)
    batches = numbers("--batch", batch)
    if choices_:
        report.refuse(
            "with --choices, which has a grid of its own", "traffic", "batch", "cache_format", "seed"
        )
    from narrowkv.cli import bench as tables
    from narrowkv.testing.bench.traffic import grid, serving_steps

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
    from narrowkv.cli import ranks as over_ranks
    from narrowkv.testing.bench.context_parallel import LINK_OF_TARGET, LINKS, Setting

    setting = Setting(
        tuple(numbers("--context", context)), tuple(numbers("--batch", batch)), *pair,
        format=cache_format, comms=tuple(choices("--comm", comm, COMMS)),
    )  # fmt: skip
    if not model:
        report.refuse("without --model", "gpus", "target", "link", "hbm")
        return over_ranks.bench_cp(report, setting, ranks=ranks)
    report.refuse("with --model", "ranks", "comm")
    one_of("--target", target, tuple(LINK_OF_TARGET))
    link = one_of("--link", link or LINK_OF_TARGET[target], tuple(LINKS))
    return over_ranks.model_cp(
        report, setting, gpus=numbers("--gpus", gpus), target=target, link=link, hbm=hbm
    )


Line = Annotated[
    str | None, typer.Option("--case", metavar="LINE", help="Only this case, as validate prints it.")
]
Assembly = Annotated[bool, typer.Option("--asm", help="Show the assembly too.")]
Model = Annotated[
    bool, typer.Option("--model/--no-model", help="Also show times, bounds and stalls by the timing model.")
]


def _add_inspect(group: typer.Typer, operation: OperationEntry) -> None:
    call = operation.inspect_call
    options: list[Option] = [
        ("target", Targets, BOTH), *(options_of(call) if call else ()), ("case", Line, None)
    ]  # fmt: skip
    if call:
        options.append(("asm", Assembly, False))
    options.append(("model", Model, True))

    def work(report: Report, given: Any) -> ExitCode:
        return (_one_call if call else _shipped)(operation, report, given)

    work.__annotations__["given"] = grouped(*options)
    work.__doc__ = operation.inspect
    command(group, operation.name, title="inspect")(work)


def _one_call(operation: OperationEntry, report: Report, given: Any) -> ExitCode:
    targets, options, line = (
        amd_targets(given.target),
        read_options(operation.inspect_call, given),
        given.case,
    )
    if line is not None:
        check_case_formats([line])
        report.refuse("with --case, which says all of a case", *(f.name for f in fields(options)))
    from narrowkv.cli.inspection import inspect
    from narrowkv.cli.running import parse_case

    made = import_module(operation.bench_module)
    case = made.case_of(options) if line is None else parse_case(operation, line)
    return inspect(operation, case, report, targets=targets, asm=given.asm, modelled=given.model)


def _shipped(operation: OperationEntry, report: Report, given: Any) -> ExitCode:
    targets, line = amd_targets(given.target), given.case
    check_case_formats(filter(None, [line]))
    from narrowkv.cli.inspection import inspect_calls
    from narrowkv.cli.running import parse_case

    case = None if line is None else parse_case(operation, line)
    modelled = _families(operation, line) if given.model else None
    return inspect_calls(operation, report, targets=targets, case=case, modelled=modelled)


def _families(operation: OperationEntry, line: str | None) -> Callable[[str], Mapping[str, Family]]:
    """A function from a target to the calls to model: the case, or one of each family of kernels."""
    from narrowkv.cli.inspection import parse_call
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
        typer.Option(metavar="OPERATION:LINE", help="A case, as validate prints it; repeatable."),
    ] = None,
    peer: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="AMD assembly of another kernel, to model its loop; repeatable."),
    ] = None,
) -> ExitCode:
    """Show modelled times, bounds and stalls: a call of every family, cases, or other assembly."""
    targets = amd_targets(target)
    from narrowkv.cli.inspection import inspect_model as run

    return run(report, targets=targets, names=family or (), cases=case or (), peers=peer or ())
