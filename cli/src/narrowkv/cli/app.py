"""The commands and their options; each imports its work when it is called, so that --help needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowkv.cli.command_line import Commands, DecodeByDefault, command
from narrowkv.cli.names import (
    AMD_TARGETS,
    CACHE_FORMATS,
    COMMS,
    DECODE_KERNELS,
    ENGINE_CACHES,
    PLACES,
    QUERY_DTYPES,
    SAGE_GRANULARITIES,
    SAGE_PRECISIONS,
    SPARSE_MODES,
    TINY_MODELS,
    cache_formats,
    check_case_formats,
    choices,
    one_of,
    unknown,
)
from narrowkv.cli.report import ExitCode, Report, UsageError, version

app = typer.Typer(
    name="narrowkv",
    cls=Commands,
    help="Attention over narrow-precision paged KV caches: does it work here, how exact is it, how fast, "
    "and what does it compile to.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all pass, 1 a numerical failure, 2 usage, 3 unsupported here, "
    "4 performance regression, 130 interrupted.",
)
validate = typer.Typer(cls=DecodeByDefault)
bench = typer.Typer(no_args_is_help=True)
inspect = typer.Typer(cls=DecodeByDefault)
engines = typer.Typer(no_args_is_help=True)


def _starting_with(*known: str) -> Callable[[str], list[str]]:
    """Completes the last of names joined by commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in known if name.startswith(last)]

    return complete


def _set_names(incomplete: str) -> list[str]:
    from narrowkv.cli.contracts import CONTRACT_SETS

    return [name for name in CONTRACT_SETS if name.startswith(incomplete)]


On = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        metavar="PLACES",
        help="cpu, gpu, or gfx942 or gfx950 emulated; several joined by commas or repeated. "
        "Default: the GPU if there is one, else the CPU.",
        autocompletion=_starting_with(*PLACES),
    ),
]
BenchOn = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        metavar="PLACES",
        help="gpu, which measures, or gfx942 and gfx950, whose times are a model's. Default: gpu.",
        autocompletion=_starting_with(*PLACES[1:]),
    ),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Processes; default: one for each core, up to 8.")
]
Cases = Annotated[
    list[str] | None,
    typer.Option("--case", metavar="LINE", help="Only this case, as a sweep prints it; repeatable."),
]
Case = Annotated[
    str | None, typer.Option("--case", metavar="LINE", help="Only this case, as validate prints it.")
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
Samples = Annotated[int, typer.Option(min=1, help="The most samples of a row.")]
Model = Annotated[
    bool, typer.Option("--model/--no-model", help="Also show times, bounds and stalls by the timing model.")
]
Targets = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="NAMES",
        help="AMD targets to compile for.",
        autocompletion=_starting_with(*AMD_TARGETS),
    ),
]
BOTH = ",".join(AMD_TARGETS)
# The batches that engines capture graphs of, up to 512.
CAPTURES = ",".join(map(str, [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]))
Context = Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")]
Count = Annotated[int, typer.Option(min=1)]
Query = Annotated[
    str, typer.Option(help="Of the query: bf16 or fp16.", autocompletion=_starting_with(*QUERY_DTYPES))
]
Formats = Annotated[
    str,
    typer.Option(
        "--format",
        "--cache",
        metavar="LIST",
        help="Cache formats; K's and V's as k/v, FP4's scales per 32 as :32.",
        autocompletion=_starting_with(*CACHE_FORMATS),
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"narrowkv {version()}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the whole program."""


def _jobs(given: int | None) -> int:
    from narrowkv.testing.processes import default_jobs

    return given or default_jobs()


def _amd_targets(text: str) -> tuple[str, ...]:
    return tuple(choices("--target", text, AMD_TARGETS))


def _modelled(report: Report, on: list[str] | None, *idle: str) -> list[str]:
    """The targets of a bench that is modelled; none for one that is measured."""
    chosen = choices("--on", on, PLACES[1:]) if on else ["gpu"]
    if chosen == ["gpu"]:
        return []
    if "gpu" in chosen:
        raise UsageError("--on must be gpu, or AMD targets whose times are a model's: measure in another run")
    report.refuse("to modelled times", "samples", *idle)
    return chosen


def _numbers(option: str, text: str, least: int = 1) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise UsageError(f"{option} must be numbers of at least {least} joined by commas, got {text!r}")
    return [int(part) for part in parts]


@command(app, "probe")
def probe(
    report: Report,
    contract_set: Annotated[
        str,
        typer.Argument(metavar="[CONTRACT-SET]", help="What to ask; see --list.", autocompletion=_set_names),
    ] = "glm-gqa12",
    list_sets: Annotated[bool, typer.Option("--list", help="List the contract sets and stop.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Show every contract at every place, and the code of each.")
    ] = False,
    on: On = None,
    target: Targets = BOTH,
    jobs: Jobs = None,
    ranks: Annotated[int, typer.Option(min=1, max=8, help="With cp: processes that are ranks.")] = 2,
) -> ExitCode:
    """Try each contract of a set here, and as gfx942 and gfx950 machine code; show one screen.

    The set cp is decode over ranks, with gloo between processes.

    Without --on, a sample of what is compiled for each target also runs in the emulator.
    """
    if contract_set == "cp":
        report.refuse("to cp", "full", "on", "target", "jobs")
        report.refuse_files("to cp", "plot", "resume")
        from narrowkv.cli.cp import probe_cp

        return probe_cp(report, ranks=ranks)
    report.refuse("to contract sets: it is cp's", "ranks")
    from narrowkv.cli import contracts

    if list_sets:
        report.refuse("with --list", "contract_set", "full", "on", "target", "jobs")
        report.refuse_files("with --list", "plot", "resume")
        return contracts.list_sets(report)
    chosen = contracts.find_set(contract_set)
    if chosen is None:
        raise unknown("CONTRACT-SET", contract_set, contracts.CONTRACT_SETS)
    targets = _amd_targets(target)
    if on:
        choices("--on", on, PLACES)
    from narrowkv.cli.probe import probe as run

    return run(chosen, report, on=on, jobs=_jobs(jobs), targets=targets, full=full)


def _checked_cases(report: Report, on: list[str] | None, case: list[str] | None) -> None:
    """Refuses, before torch is imported, misspelled names and options that a case makes idle."""
    if on:
        choices("--on", on, PLACES)
    if case:
        check_case_formats(case)
        report.refuse("with --case, which says all of a case", "full", "seed")


@command(validate, "decode", title="validate")
def validate_decode(
    report: Report,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Many random mixtures, or each value of each axis.")
    ] = False,
    case: Cases = None,
    seed: Annotated[int, typer.Option(help="Of the random mixtures.")] = 0,
    on: On = None,
    detect_races: DetectRaces = False,
    detect_hazards: DetectHazards = False,
    jobs: Jobs = None,
) -> ExitCode:
    """Sweep decode's axes against the reference: error table, worst cases, commands that repeat them."""
    _checked_cases(report, on, case)
    from narrowkv.cli.cases import DecodeCase
    from narrowkv.cli.validate import sweep
    from narrowkv.cli.validate import validate as run

    cases = [DecodeCase.parse(line) for line in case] if case else sweep(full=full, seed=seed)
    return run(
        cases,
        report,
        on=on,
        jobs=_jobs(jobs),
        seed=seed,
        detect_races=detect_races,
        detect_hazards=detect_hazards,
    )


@command(validate, "prefill", title="validate prefill")
def validate_prefill(
    report: Report,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Also cross kernels, formats, sizes and options.")
    ] = False,
    case: Cases = None,
    on: On = None,
    detect_races: DetectRaces = False,
    detect_hazards: DetectHazards = False,
    jobs: Jobs = None,
) -> ExitCode:
    """Sweep prefill, and prefill that appends, whose cache must be right to the byte."""
    _checked_cases(report, on, case)
    from functools import partial

    from narrowkv.cli.prefill.cases import PREFILL_CASES, PrefillCase, sweep
    from narrowkv.cli.validate import validate as run

    cases = [PrefillCase.parse(line) for line in case] if case else partial(sweep, everything=full)
    return run(
        cases,
        report,
        on=on,
        jobs=_jobs(jobs),
        seed=0,
        detect_races=detect_races,
        detect_hazards=detect_hazards,
        kind=PREFILL_CASES,
    )


@command(validate, "sparse", title="validate sparse")
def validate_sparse(
    report: Report,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Also cross row lengths, heads and skipped indices.")
    ] = False,
    case: Cases = None,
    on: On = None,
    detect_races: DetectRaces = False,
    detect_hazards: DetectHazards = False,
    jobs: Jobs = None,
) -> ExitCode:
    """Sweep DeepSeek-V4 sparse attention: ways to attend, layouts, row lengths, heads, options."""
    _checked_cases(report, on, case)
    from narrowkv.cli.sparse.cases import SPARSE_CASES, SparseCase, sweep
    from narrowkv.cli.validate import validate as run

    cases = [SparseCase.parse(line) for line in case] if case else sweep(everything=full)
    return run(
        cases,
        report,
        on=on,
        jobs=_jobs(jobs),
        seed=0,
        detect_races=detect_races,
        detect_hazards=detect_hazards,
        kind=SPARSE_CASES,
    )


@command(validate, "sage", title="validate sage")
def validate_sage(
    report: Report,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Also every precision, granularity and mask together.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    on: On = None,
    detect_races: DetectRaces = False,
    detect_hazards: DetectHazards = False,
    jobs: Jobs = None,
) -> ExitCode:
    """Show what Sage attention's granularities cost in accuracy, beside the published figures."""
    _checked_cases(report, on, None)
    from narrowkv.cli.sage import accuracy

    cases = accuracy.sweep(full=full, seed=seed)
    return accuracy.validate_sage(
        cases,
        report,
        on=on,
        jobs=_jobs(jobs),
        seed=seed,
        detect_races=detect_races,
        detect_hazards=detect_hazards,
    )


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
            autocompletion=_starting_with(*PLACES[:2]),
        ),
    ] = None,
    jobs: Jobs = None,
) -> ExitCode:
    """Show what each FP4, FP8 and mixed cache recipe costs in accuracy, on two input sets."""
    if on is not None:
        one_of("--on", on, PLACES[:2])
    from narrowkv.cli import format_errors

    sizes = format_errors.Sizes(batch=batch, context=context)
    return format_errors.validate_fp4(report, seeds=seeds, sizes=sizes, on=on, jobs=_jobs(jobs))


@command(bench, "decode", title="bench")
def bench_decode(
    report: Report,
    batch: Annotated[str, typer.Option(metavar="LIST", help="Sequences.")] = "1,4,16,64,128",
    context: Annotated[
        str, typer.Option(metavar="LIST", help="Tokens of each sequence.")
    ] = "1024,8192,32768",
    page_size: Annotated[str, typer.Option(metavar="LIST")] = "1,16,64",
    num_kv_heads: Count = 8,
    ratio: Annotated[str, typer.Option(metavar="LIST", help="Query heads for each KV head.")] = "12",
    head_dim: Count = 128,
    cache_format: Formats = "fp8_e4m3fn,bf16",
    q: Query = "bf16",
    samples: Samples = 50,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also time torch SDPA, AITER and FlashInfer.")
    ] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Plans whose bits do not depend on the batch.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(metavar="BASELINE.json", help="Compare; slower rows end with 4.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="How much slower a row may become.")] = 0.05,
    on: BenchOn = None,
) -> ExitCode:
    """Measure paged decode over batches, contexts, page sizes, ratios and formats."""
    targets = _modelled(report, on, "peers", "batch_invariant", "against", "threshold")
    lists = {"batch": batch, "context": context, "page-size": page_size, "ratio": ratio}
    numbers = {name: _numbers(f"--{name}", text) for name, text in lists.items()}
    formats, q = cache_formats("--format", cache_format), one_of("--q", q, QUERY_DTYPES)
    from narrowkv.cli import bench as tables
    from narrowkv.testing.bench.decode import DecodeBench, decode_sizes

    try:
        rows = decode_sizes(
            batches=numbers["batch"], contexts=numbers["context"], page_sizes=numbers["page-size"],
            ratios=numbers["ratio"], num_kv_heads=num_kv_heads, head_dim=head_dim, q=q, formats=formats,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(f"--context, --page-size: {error}") from None
    if targets:
        return tables.bench_modelled(DecodeBench(), rows, targets, report)
    others = tables.decode_peers() if peers else {}
    return tables.bench(
        DecodeBench(batch_invariant=batch_invariant, peers=others), rows, report, samples=samples,
        settings={"peers": peers, "batch_invariant": batch_invariant}, against=against, threshold=threshold,
    )  # fmt: skip


@command(bench, "prefill", title="bench")
def bench_prefill(
    report: Report,
    new: Annotated[str, typer.Option(metavar="LIST", help="New tokens.")] = "128,1024,4096",
    prefix: Annotated[str, typer.Option(metavar="LIST", help="Older tokens.")] = "0,4096,32768",
    heads: Annotated[str, typer.Option(metavar="LIST", help="Query heads / KV heads.")] = "96/8,32/8",
    head_dim: Count = 128,
    page_size: Count = 16,
    cache_format: Formats = "fp8_e4m3fn,bf16",
    samples: Samples = 50,
    on: BenchOn = None,
) -> ExitCode:
    """Measure prefill of one sequence over prefixes, beside torch SDPA, and prefill that appends."""
    pairs = [tuple(part.split("/")) for part in heads.split(",")]
    if any(len(p) != 2 or not all(n.isdecimal() and int(n) for n in p) for p in pairs):
        raise UsageError(f"--heads must be query heads / KV heads, joined by commas, got {heads!r}")
    lengths = _numbers("--new", new), _numbers("--prefix", prefix, least=0)
    formats = cache_formats("--format", cache_format)
    from narrowkv.cli import bench as tables
    from narrowkv.testing.bench.prefill import PrefillBench, prefill_sizes

    rows = list(prefill_sizes(*lengths, [(int(q), int(kv)) for q, kv in pairs], formats, head_dim, page_size))
    if targets := _modelled(report, on):
        return tables.bench_modelled(PrefillBench(), rows, targets, report)
    return tables.bench(PrefillBench(), rows, report, samples=samples)


@command(bench, "sparse", title="bench")
def bench_sparse(
    report: Report,
    tokens: Annotated[str, typer.Option(metavar="LIST", help="Query tokens.")] = "1024,4096",
    heads: Annotated[str, typer.Option(metavar="LIST", help="Query heads.")] = "16,64,128",
    topk: Annotated[str, typer.Option(metavar="LIST", help="Rows that each token attends to.")] = "512,2048",
    pool: Annotated[int, typer.Option(min=1, help="Rows of the pool.")] = 65536,
    mode: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help=f"Of {', '.join(SPARSE_MODES)}.",
            autocompletion=_starting_with(*SPARSE_MODES),
        ),
    ] = "bf16,prepass,fused",
    samples: Samples = 50,
    on: BenchOn = None,
) -> ExitCode:
    """Measure DeepSeek-V4 sparse prefill over tokens, heads and top-k, in each mode."""
    from itertools import product

    lists = {"tokens": tokens, "heads": heads, "topk": topk}
    numbers = [_numbers(f"--{name}", text) for name, text in lists.items()]
    modes = choices("--mode", mode, SPARSE_MODES)
    from narrowkv.cli import bench as tables
    from narrowkv.testing.bench.sparse import SparseBench, SparseSizes

    rows = [SparseSizes(t, h, k, pool) for t, h, k in product(*numbers)]
    if targets := _modelled(report, on):
        return tables.bench_modelled(SparseBench(modes), rows, targets, report)
    return tables.bench(SparseBench(modes), rows, report, samples=samples, settings={"modes": modes})


@command(bench, "sage", title="bench")
def bench_sage(
    report: Report,
    batch: Annotated[str, typer.Option(metavar="LIST", help="Sequences.")] = "2",
    context: Annotated[str, typer.Option(metavar="LIST", help="Tokens of Q, and of K.")] = "4096,16384",
    heads: Annotated[int, typer.Option(min=1, help="Heads of Q, K and V.")] = 32,
    head_dim: Count = 128,
    qk: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help=f"Of {', '.join(SAGE_PRECISIONS)}.",
            autocompletion=_starting_with(*SAGE_PRECISIONS),
        ),
    ] = "int8",
    granularity: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help=f"Of {', '.join(SAGE_GRANULARITIES)}.",
            autocompletion=_starting_with(*SAGE_GRANULARITIES),
        ),
    ] = "per_thread,per_warp,per_block",
    samples: Samples = 20,
    on: BenchOn = None,
) -> ExitCode:
    """Measure Sage attention, quantisation included, beside torch's SDPA in bf16, unmasked and causal."""
    from itertools import product

    sizes = product(_numbers("--batch", batch), _numbers("--context", context), (False, True))
    precisions = choices("--qk", qk, SAGE_PRECISIONS)
    groups = choices("--granularity", granularity, SAGE_GRANULARITIES)
    from narrowkv.cli import bench as tables
    from narrowkv.testing.bench.sage import SageBench, SageSizes

    rows = [SageSizes(b, c, heads, head_dim, causal) for b, c, causal in sizes]
    sage = SageBench(precisions, groups)
    if targets := _modelled(report, on):
        return tables.bench_modelled(sage, rows, targets, report)
    settings = {"qk": precisions, "granularity": groups}
    return tables.bench(sage, rows, report, samples=samples, settings=settings)


@command(bench, "host", files=("out",), title="bench host")
def bench_host(
    report: Report,
    samples: Samples = 20,
    shapes: Annotated[int, typer.Option(min=0, help="Random calls of each operation; 0 for none.")] = 50,
    captures: Annotated[str, typer.Option(metavar="LIST", help="Batches of captured graphs.")] = CAPTURES,
    context: Annotated[int, typer.Option(min=16, help="Tokens that a captured batch may hold.")] = 131072,
) -> ExitCode:
    """Measure the Python time of each operation beside torch.add_, and the kernels of random shapes."""
    sizes = _numbers("--captures", captures)
    from narrowkv.cli.bench import bench_host as run

    return run(report, samples=samples, shapes=shapes, captures=sizes, context=context)


@command(bench, "cp", files=("out", "csv"), title="bench cp")
def bench_context_parallel(
    report: Report,
    ranks: Annotated[int, typer.Option(min=2, max=8, help="GPUs of this host; without any, processes.")] = 2,
    context: Annotated[str, typer.Option(metavar="LIST", help="Tokens of each sequence.")] = "131072,1048576",
    batch: Annotated[str, typer.Option(metavar="LIST", help="Sequences.")] = "1,8",
    heads: Annotated[str, typer.Option(metavar="Q/KV", help="Query heads and KV heads.")] = "96/8",
    cache_format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="Cache format.")] = (
        "fp8_e4m3fn"
    ),
    comm: Annotated[str, typer.Option(metavar="LIST", help="Exchanges of partial results.")] = (
        "a2a,ag_rs,symm_mem"
    ),
    model: Annotated[bool, typer.Option("--model", help="Modelled times of many GPUs instead.")] = False,
    gpus: Annotated[str, typer.Option(metavar="LIST", help="With --model: GPUs.")] = "2,4,8,16,32,72",
    target: Annotated[str, typer.Option(help="With --model: gfx942, gfx950 or sm90.")] = "gfx942",
    link: Annotated[str, typer.Option(help="With --model: what connects them; default the target's.")] = "",
) -> ExitCode:
    """Time of decode over GPUs: attention, communication, share hidden, rate over one GPU's."""
    pairs = heads.split("/")
    if len(pairs) != 2 or not all(part.isdigit() and int(part) for part in pairs):
        raise UsageError(f"--heads must be query heads and KV heads, for example 96/8, got {heads!r}")
    one_of("--format", cache_format, CACHE_FORMATS)
    from narrowkv.cli.cp import LINK_OF_TARGET, LINKS, Setting, bench_cp, model_cp

    setting = Setting(
        tuple(_numbers("--context", context)), tuple(_numbers("--batch", batch)), int(pairs[0]),
        int(pairs[1]), format=cache_format, comms=tuple(choices("--comm", comm, COMMS)),
    )  # fmt: skip
    if not model:
        report.refuse("without --model", "gpus", "target", "link")
        return bench_cp(report, setting, ranks=ranks)
    report.refuse("with --model", "ranks", "comm")
    one_of("--target", target, tuple(LINK_OF_TARGET))
    link = link or LINK_OF_TARGET[target]
    one_of("--link", link, tuple(LINKS))
    return model_cp(report, setting, gpus=_numbers("--gpus", gpus), target=target, link=link)


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
    cache_format: Annotated[
        str,
        typer.Option(
            "--format",
            "--cache",
            metavar="FORMAT",
            help="Cache format; K's and V's as k/v, FP4's scales per 32 as :32.",
            autocompletion=_starting_with(*CACHE_FORMATS),
        ),
    ] = "fp8_e4m3fn",
    q: Query = "bf16",
    kernel: Annotated[
        str,
        typer.Option(
            help="native or decode; default: the target's.", autocompletion=_starting_with(*DECODE_KERNELS)
        ),
    ] = "",
    case: Case = None,
    asm: Annotated[bool, typer.Option("--asm", help="Show the assembly too.")] = False,
    model: Model = True,
) -> ExitCode:
    """Show what decode compiles to: registers, LDS, spills, instructions, and a modelled roofline."""
    targets = _amd_targets(target)
    cache_formats("--format", cache_format)
    one_of("--q", q, QUERY_DTYPES)
    if kernel:
        one_of("--kernel", kernel, DECODE_KERNELS)
    sizes: dict[str, Any] = {
        "batch": batch, "context": context, "ratio": ratio, "num_kv_heads": num_kv_heads,
        "head_dim": head_dim, "page_size": page_size, "cache_format": cache_format, "q": q, "kernel": kernel,
    }  # fmt: skip
    if case is not None:
        check_case_formats([case])
        report.refuse("with --case, which says all of a case", *sizes)
    from narrowkv.cli.cases import DecodeCase
    from narrowkv.cli.inspection import inspect as run
    from narrowkv.cli.inspection import inspection_case

    chosen = inspection_case(**sizes) if case is None else DecodeCase.parse(case)
    return run(chosen, report, targets=targets, asm=asm, modelled=model)


def _families(wanted: bool, operation: str, case: str | None = None) -> Any:
    """Says which calls to model on a target: the case, or those that stand for the operation's kernels."""
    if not wanted:
        return None
    from narrowkv.cli.modelled import parse_case
    from narrowkv.testing.families import families

    if case is not None:
        return lambda target: {case: parse_case(f"{operation}:{case}")}
    return lambda target: {n: f for n, f in families(target).items() if f.operation == operation}


@command(inspect, "prefill", title="inspect")
def inspect_prefill(
    report: Report, target: Targets = BOTH, case: Case = None, model: Model = True
) -> ExitCode:
    """Show what prefill compiles to: every shipped configuration, or one case."""
    targets = _amd_targets(target)
    check_case_formats(filter(None, [case]))
    from narrowkv.cli.prefill.cases import PrefillCase
    from narrowkv.cli.prefill.inspection import inspect_prefill as run
    from narrowkv.cli.prefill.inspection import shipped_cases

    cases = shipped_cases if case is None else [PrefillCase.parse(case)]
    return run(cases, report, targets=targets, modelled=_families(model, "prefill", case))


@command(inspect, "sparse", title="inspect")
def inspect_sparse(
    report: Report, target: Targets = BOTH, case: Case = None, model: Model = True
) -> ExitCode:
    """Show what sparse attention compiles to: every shipped configuration, or one case."""
    targets = _amd_targets(target)
    check_case_formats(filter(None, [case]))
    from narrowkv.cli.sparse.cases import SparseCase
    from narrowkv.cli.sparse.inspection import inspect_sparse as run
    from narrowkv.cli.sparse.inspection import shipped_cases

    cases = shipped_cases() if case is None else [SparseCase.parse(case)]
    return run(cases, report, targets=targets, modelled=_families(model, "sparse", case))


@command(inspect, "sage", title="inspect")
def inspect_sage(report: Report, target: Targets = BOTH, model: Model = True) -> ExitCode:
    """Show what Sage attention compiles to: every shipped configuration."""
    targets = _amd_targets(target)
    from narrowkv.cli.sage.inspection import inspect_sage as run
    from narrowkv.cli.sage.inspection import shipped_cases

    return run(shipped_cases(), report, targets=targets, modelled=_families(model, "sage"))


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
    targets = _amd_targets(target)
    from narrowkv.cli.modelled import inspect_model as run

    return run(report, targets=targets, names=family or (), cases=case or (), peers=peer or ())


@command(engines, "try", title="engines", files=("out", "csv"))
def engines_try(
    report: Report,
    engine: Annotated[
        str,
        typer.Argument(help="transformers, vllm or sglang.", autocompletion=_starting_with(*ENGINE_CACHES)),
    ],
    model: Annotated[
        str, typer.Option(help="A small model of real shape.", autocompletion=_starting_with(*TINY_MODELS))
    ] = "glm-4.5-air-tiny",
    cache: Annotated[
        str, typer.Option(metavar="LIST", help="Cache dtypes by the engine's names; default all.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=1, help="New tokens.")] = 4,
) -> ExitCode:
    """Generate with a tiny random model by narrowkv and by the engine's own attention, and compare."""
    (name,) = choices("ENGINE", engine, tuple(ENGINE_CACHES))
    choices("--model", model, TINY_MODELS)
    caches = choices("--cache", cache, ENGINE_CACHES[name]) if cache else []
    from narrowkv.cli.engines import try_inside

    return try_inside(report, name, model, caches, tokens)


app.add_typer(
    validate,
    name="validate",
    help="Compare operations with their references, and cache formats with the tensors they store. "
    "Without a command: decode.",
)
app.add_typer(bench, name="bench", help="Measure device time against ceilings of the same run.")
app.add_typer(
    inspect,
    name="inspect",
    help="Show what operations compile to for gfx942 and gfx950. Without a command: decode.",
)
app.add_typer(engines, name="engines", help="Run narrowkv inside inference engines.")


@command(app, "warmup", files=("out",))
def warmup(
    report: Report,
    heads: Annotated[str, typer.Option(metavar="Q/KV", help="Query heads and KV heads.")] = "96/8",
    head_dim: Count = 128,
    page_size: Count = 16,
    num_pages: Annotated[int, typer.Option(min=1, help="Pages of the server's cache.")] = 65536,
    cache_format: Annotated[str, typer.Option("--format", metavar="FORMAT", help="Cache format.")] = (
        "fp8_e4m3fn"
    ),
    q: Query = "bf16",
    max_batch: Annotated[int, typer.Option(min=1, help="Sequences of a decode call.")] = 512,
    max_seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 131072,
    max_num_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a prefill call; 0: no prefill.")] = 0,
    target: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="AMD targets to compile for without a GPU. Default: the GPU.",
            autocompletion=_starting_with(*AMD_TARGETS),
        ),
    ] = "",
    jobs: Jobs = None,
) -> ExitCode:
    """Compile into Triton's cache what a model's decode, append and prefill can reach."""
    pairs = heads.split("/")
    if len(pairs) != 2 or not all(part.isdigit() and int(part) for part in pairs):
        raise UsageError(f"--heads must be query heads and KV heads, for example 96/8, got {heads!r}")
    one_of("--format", cache_format, CACHE_FORMATS)
    one_of("--q", q, QUERY_DTYPES)
    targets = _amd_targets(target) if target else ()
    import torch

    from narrowkv.cli.warmup import model_cache, run_warmup

    device = "cpu" if targets else "cuda"
    if not targets and not torch.cuda.is_available():
        raise UsageError("there is no GPU to compile for: name targets, for example --target gfx942")
    cache = model_cache(cache_format, num_pages, page_size, int(pairs[1]), head_dim, device)
    return run_warmup(
        report, cache, num_qo_heads=int(pairs[0]), max_batch=max_batch, max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens, q_dtype=torch.bfloat16 if q == "bf16" else torch.float16,
        targets=targets, jobs=jobs,
    )  # fmt: skip


@command(app, "env", files=("out",))
def env(report: Report) -> ExitCode:
    """Report versions, GPUs and settings, to paste into a bug report."""
    from narrowkv.cli.environment import report_environment

    return report_environment(report)


@command(app, "report", files=())
def report_machine(
    report: Report,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where the two files go.")] = Path(),
    minutes: Annotated[float, typer.Option(min=0, help="After which nothing more is run.")] = 10.0,
) -> ExitCode:
    """Probe, validate and measure what matters in minutes; write one JSON and one Markdown file to share.

    On an Instinct GPU with the timing model's prediction of each row; without a GPU as a rehearsal.
    """
    from narrowkv.cli.kit import write_report

    return write_report(report, folder=folder, minutes=minutes)


def main() -> None:
    """The console script."""
    app()
