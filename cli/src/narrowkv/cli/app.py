"""The commands and their options; each imports its work when it is called, so that --help needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from narrowkv.cli.report import ExitCode


class _Commands(TyperGroup):
    """Turns what a command cannot do into its exit code."""

    def invoke(self, ctx: Any) -> Any:
        from narrowkv.cli.report import ExitCode, UnsupportedHereError, UsageError

        try:
            return super().invoke(ctx)
        except UsageError as error:
            code = ExitCode.USAGE
            text = str(error)
        except UnsupportedHereError as error:
            code = ExitCode.UNSUPPORTED
            text = f"unsupported here: {error}"
        except ImportError as error:
            # torch or triton; the packages' own words say which and how to get it.
            code = ExitCode.UNSUPPORTED
            text = str(error)
        except OSError as error:
            # A folder that cannot be written; the message says which, and what names another.
            code = ExitCode.UNSUPPORTED
            text = str(error)
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
            text = "interrupted before there was anything to keep"
        typer.echo(f"narrowkv: {text}", err=True)
        raise typer.Exit(int(code))


app = typer.Typer(
    name="narrowkv",
    cls=_Commands,
    help="Attention over narrow-precision paged KV caches: does it work here, how exact is it, how fast, "
    "and what does it compile to.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 all pass, 1 a numerical failure, 2 usage, 3 unsupported here, "
    "4 performance regression, 130 interrupted.",
)

Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout; tables and progress go to stderr.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON document to FILE.")
]
On = Annotated[
    list[str] | None,
    typer.Option(
        "--on",
        metavar="PLACES",
        help="cpu, gpu, or gfx942 or gfx950 emulated; several joined by commas or repeated. "
        "Default: the GPU if there is one, else the CPU.",
    ),
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Processes; default: one for each core, up to 8.")
]
Cases = Annotated[
    list[str] | None,
    typer.Option("--case", metavar="LINE", help="Only this case, as a sweep prints it; repeatable."),
]
DetectRaces = Annotated[
    bool, typer.Option("--detect-races", help="With emulated places: watch LDS for races.")
]
Samples = Annotated[int, typer.Option(min=1, help="The most samples of a row.")]
Targets = Annotated[str, typer.Option("--target", metavar="NAMES", help="AMD targets to compile for.")]
BOTH = "gfx942,gfx950"
Context = Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")]
Count = Annotated[int, typer.Option(min=1)]
Query = Annotated[str, typer.Option(help="bf16 or fp16.")]


def _end(code: ExitCode) -> NoReturn:
    raise typer.Exit(int(code))


@app.command()
def probe(
    contract_set: Annotated[str, typer.Argument(metavar="[CONTRACT-SET]", help="See --list.")] = "glm-gqa12",
    list_sets: Annotated[bool, typer.Option("--list", help="List the contract sets and stop.")] = False,
    on: On = None,
    target: Targets = BOTH,
    jobs: Jobs = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Try each contract of a set on each backend, and compile it for gfx942 and gfx950.

    Without --on, a sample of what was compiled for each target also runs in the emulator.
    """
    from narrowkv.cli import contracts
    from narrowkv.cli.report import Report, UsageError

    report = Report("probe", as_json=as_json, out_file=out)
    if list_sets:
        _end(contracts.list_sets(report))
    chosen = contracts.find_set(contract_set)
    if chosen is None:
        known = ", ".join(contracts.CONTRACT_SETS)
        raise UsageError(f"CONTRACT-SET must be one of {known}; got {contract_set!r}")
    from narrowkv.cli.probe import probe as run
    from narrowkv.cli.workers import default_jobs

    _end(run(chosen, report, on=on, jobs=jobs or default_jobs(), targets=_amd_targets(target)))


def _amd_targets(text: str) -> tuple[str, ...]:
    from narrowkv.cli.report import UsageError

    names = tuple(filter(None, text.split(",")))
    for name in names:
        if name not in ("gfx942", "gfx950"):
            raise UsageError(f"--target must be of gfx942, gfx950; got {name!r}")
    return names


validate = typer.Typer(
    help="Compare operations with their references, and cache formats with the tensors they store.",
    invoke_without_command=True,
)
app.add_typer(validate, name="validate")


@validate.callback()
def validate_decode(
    context: typer.Context,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Many random mixtures, or each value of each axis.")
    ] = False,
    case: Cases = None,
    seed: Annotated[int, typer.Option(help="Of the random mixtures.")] = 0,
    on: On = None,
    detect_races: DetectRaces = False,
    jobs: Jobs = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Sweep the decode contract's axes against the reference: error table, worst cases, repro commands."""
    if context.invoked_subcommand is not None:
        return
    from narrowkv.cli.report import Report

    report = Report("validate", as_json=as_json, out_file=out)
    from narrowkv.cli.cases import DecodeCase
    from narrowkv.cli.validate import sweep
    from narrowkv.cli.validate import validate as run
    from narrowkv.cli.workers import default_jobs

    cases = [DecodeCase.parse(line) for line in case] if case else sweep(full=full, seed=seed)
    _end(run(cases, report, on=on, jobs=jobs or default_jobs(), seed=seed, detect_races=detect_races))


@validate.command("sparse")
def validate_sparse(
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Also cross row lengths, heads and skipped indices.")
    ] = False,
    case: Cases = None,
    on: On = None,
    detect_races: DetectRaces = False,
    jobs: Jobs = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Sweep DeepSeek-V4 sparse attention: ways to attend, layouts, row lengths, heads, options."""
    from narrowkv.cli.report import Report

    report = Report("validate sparse", as_json=as_json, out_file=out)
    from narrowkv.cli.sparse.cases import SPARSE_CASES, SparseCase, sweep
    from narrowkv.cli.validate import validate as run
    from narrowkv.cli.workers import default_jobs

    cases = [SparseCase.parse(line) for line in case] if case else sweep(everything=full)
    jobs = jobs or default_jobs()
    _end(run(cases, report, on=on, jobs=jobs, seed=0, detect_races=detect_races, kind=SPARSE_CASES))


@validate.command("prefill")
def validate_prefill(
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Also cross kernels, formats, sizes and options.")
    ] = False,
    case: Cases = None,
    on: On = None,
    detect_races: DetectRaces = False,
    jobs: Jobs = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Sweep prefill, and prefill that appends, whose cache must be right to the byte."""
    from functools import partial

    from narrowkv.cli.report import Report

    report = Report("validate prefill", as_json=as_json, out_file=out)
    from narrowkv.cli.prefill.cases import PREFILL_CASES, PrefillCase, sweep
    from narrowkv.cli.validate import validate as run
    from narrowkv.cli.workers import default_jobs

    cases = [PrefillCase.parse(line) for line in case] if case else partial(sweep, everything=full)
    jobs = jobs or default_jobs()
    _end(run(cases, report, on=on, jobs=jobs, seed=0, detect_races=detect_races, kind=PREFILL_CASES))


@validate.command("sage")
def validate_sage(
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Also every precision, granularity and mask together.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    on: On = None,
    detect_races: DetectRaces = False,
    jobs: Jobs = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Show what Sage attention's granularities cost in accuracy, beside the published figures."""
    from narrowkv.cli.report import Report

    report = Report("validate sage", as_json=as_json, out_file=out)
    from narrowkv.cli.sage import accuracy
    from narrowkv.cli.workers import default_jobs

    cases = accuracy.sweep(full=full, seed=seed)
    jobs = jobs or default_jobs()
    _end(accuracy.validate_sage(cases, report, on=on, jobs=jobs, seed=seed, detect_races=detect_races))


@validate.command()
def fp4(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of each input set.")] = 3,
    batch: Count = 8,
    context: Context = 4096,
    on: Annotated[
        str | None, typer.Option("--on", help="cpu or gpu; default: the GPU if there is one.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Error over size (extra: plot).")
    ] = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Show what each FP4, FP8 and mixed cache recipe costs in accuracy, on two input sets."""
    from narrowkv.cli.report import Report

    report = Report("validate fp4", as_json=as_json, out_file=out)
    from narrowkv.cli.format_errors import Sizes, validate_fp4

    sizes = Sizes(batch=batch, context=context)
    _end(validate_fp4(report, seeds=seeds, sizes=sizes, on=on, plot_file=plot))


bench = typer.Typer(help="Measure device time against ceilings of the same run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command()
def decode(
    batch: Annotated[str, typer.Option(metavar="LIST", help="Sequences.")] = "1,4,16,64,128",
    context: Annotated[
        str, typer.Option(metavar="LIST", help="Tokens of each sequence.")
    ] = "1024,8192,32768",
    page_size: Annotated[str, typer.Option(metavar="LIST")] = "1,16,64",
    num_kv_heads: Count = 8,
    ratio: Annotated[str, typer.Option(metavar="LIST", help="Query heads for each KV head.")] = "12",
    head_dim: Count = 128,
    cache_format: Annotated[
        str,
        typer.Option(
            "--format",
            "--cache",
            metavar="LIST",
            help="Cache formats; K's and V's as k/v, FP4's scales per 32 as :32.",
        ),
    ] = "fp8_e4m3fn,bf16",
    q: Query = "bf16",
    samples: Samples = 50,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also time torch SDPA, AITER and FlashInfer.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(metavar="BASELINE.json", help="Compare; slower rows end with 4.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="How much slower a row may become.")] = 0.05,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Also write the rows as CSV.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="A roofline plot (extra: plot).")
    ] = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Measure paged decode over batches, contexts, page sizes, ratios and formats."""
    from narrowkv.cli.report import Report

    report = Report("bench", as_json=as_json, out_file=out)
    lists = {"batch": batch, "context": context, "page-size": page_size, "ratio": ratio}
    numbers = {name: _numbers(f"--{name}", text) for name, text in lists.items()}
    from narrowkv.cli.bench.decode import BenchOptions, bench_decode
    from narrowkv.cli.bench.workload import shapes

    rows = shapes(
        batches=numbers["batch"],
        contexts=numbers["context"],
        page_sizes=numbers["page-size"],
        ratios=numbers["ratio"],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q=q,
        formats=[name for name in cache_format.split(",") if name],
    )
    _end(bench_decode(rows, report, BenchOptions(samples, against, threshold, csv, plot, peers)))


@bench.command()
def prefill(
    new: Annotated[str, typer.Option(metavar="LIST", help="New tokens.")] = "128,1024,4096",
    prefix: Annotated[str, typer.Option(metavar="LIST", help="Older tokens.")] = "0,4096,32768",
    heads: Annotated[str, typer.Option(metavar="LIST", help="Query heads / KV heads.")] = "96/8,32/8",
    head_dim: Count = 128,
    page_size: Count = 16,
    cache_format: Annotated[
        str, typer.Option("--format", metavar="LIST", help="Cache formats.")
    ] = "fp8_e4m3fn,bf16",
    samples: Samples = 50,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Measure prefill of one sequence over prefixes, beside torch SDPA, and prefill that appends."""
    from narrowkv.cli.report import Report, UsageError

    report = Report("bench", as_json=as_json, out_file=out)
    pairs = [tuple(part.split("/")) for part in heads.split(",") if part]
    if not pairs or any(len(p) != 2 or not all(n.isdecimal() and int(n) for n in p) for p in pairs):
        raise UsageError(f"--heads must be query heads / KV heads, joined by commas, got {heads!r}")
    from narrowkv.cli.prefill.bench import bench_prefill, shapes

    rows = shapes(
        _numbers("--new", new),
        _numbers("--prefix", prefix, least=0),
        [(int(queries), int(kv)) for queries, kv in pairs],
        [name for name in cache_format.split(",") if name],
        head_dim,
        page_size,
    )
    _end(bench_prefill(list(rows), report, samples))


@bench.command()
def sparse(
    tokens: Annotated[str, typer.Option(metavar="LIST", help="Query tokens.")] = "1024,4096",
    heads: Annotated[str, typer.Option(metavar="LIST", help="Query heads.")] = "16,64,128",
    topk: Annotated[str, typer.Option(metavar="LIST", help="Rows that each token attends to.")] = "512,2048",
    pool: Annotated[int, typer.Option(min=1, help="Rows of the pool.")] = 65536,
    mode: Annotated[
        str, typer.Option(metavar="LIST", help="Of bf16, prepass, fused, fused-fp8q.")
    ] = "bf16,prepass,fused",
    samples: Samples = 50,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Measure DeepSeek-V4 sparse prefill over tokens, heads and top-k, in each mode."""
    from itertools import product

    from narrowkv.cli.report import Report

    report = Report("bench", as_json=as_json, out_file=out)
    lists = {"tokens": tokens, "heads": heads, "topk": topk}
    numbers = [_numbers(f"--{name}", text) for name, text in lists.items()]
    from narrowkv.cli.sparse.bench import SparseShape, bench_sparse

    shapes = [SparseShape(t, h, k, pool) for t, h, k in product(*numbers)]
    _end(bench_sparse(shapes, [name for name in mode.split(",") if name], report, samples))


@bench.command()
def sage(
    batch: Annotated[str, typer.Option(metavar="LIST", help="Sequences.")] = "2",
    context: Annotated[str, typer.Option(metavar="LIST", help="Tokens of Q, and of K.")] = "4096,16384",
    heads: Annotated[int, typer.Option(min=1, help="Heads of Q, K and V.")] = 32,
    head_dim: Count = 128,
    qk: Annotated[str, typer.Option(metavar="LIST", help="Of int8, int4, fp8.")] = "int8",
    granularity: Annotated[
        str, typer.Option(metavar="LIST", help="Of per_tensor, per_block, per_warp, per_thread.")
    ] = "per_thread,per_warp,per_block",
    samples: Samples = 20,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Measure Sage attention, quantisation included, beside torch's SDPA in bf16, unmasked and causal."""
    from itertools import product

    from narrowkv.cli.report import Report

    report = Report("bench", as_json=as_json, out_file=out)
    batches, contexts = _numbers("--batch", batch), _numbers("--context", context)
    from narrowkv.cli.sage.bench import SageShape, bench_sage

    shapes = [
        SageShape(b, c, heads, head_dim, causal) for b, c, causal in product(batches, contexts, (False, True))
    ]
    precisions, groups = ([name for name in text.split(",") if name] for text in (qk, granularity))
    _end(bench_sage(shapes, precisions, groups, report, samples))


@bench.command()
def host(
    samples: Samples = 20,
    shapes: Annotated[int, typer.Option(min=0, help="Random calls of each operation; 0 for none.")] = 50,
    captures: Annotated[str, typer.Option(metavar="LIST", help="Batches of captured graphs.")] = "1,8,64,512",
    context: Annotated[int, typer.Option(min=16, help="Tokens that a captured batch may hold.")] = 131072,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Measure the Python time of each operation beside torch.add_, and the kernels of random shapes."""
    from narrowkv.cli.report import Report

    report = Report("bench host", as_json=as_json, out_file=out)
    sizes = _numbers("--captures", captures)
    from narrowkv.cli.bench.host import bench_host

    _end(bench_host(report, samples=samples, shapes=shapes, captures=sizes, context=context))


def _numbers(option: str, text: str, least: int = 1) -> list[int]:
    from narrowkv.cli.report import UsageError

    parts = [part for part in text.split(",") if part]
    if not parts or not all(part.isdecimal() and int(part) >= least for part in parts):
        raise UsageError(f"{option} must be positive numbers joined by commas, got {text!r}")
    return [int(part) for part in parts]


@app.command()
def inspect(
    operation: Annotated[
        str,
        typer.Argument(
            metavar="[OPERATION]",
            help="decode; prefill or sparse: all that it ships, or one --case; sage: all that it ships.",
        ),
    ] = "decode",
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
            "--format", "--cache", help="Cache format; K's and V's as k/v, FP4's scales per 32 as :32."
        ),
    ] = "fp8_e4m3fn",
    q: Query = "bf16",
    kernel: Annotated[str, typer.Option(help="native or decode; default: the target's.")] = "",
    case: Annotated[
        str | None, typer.Option(metavar="LINE", help="A validate case instead of the sizes above.")
    ] = None,
    asm: Annotated[bool, typer.Option("--asm", help="Show the assembly too.")] = False,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Show what an operation compiles to: registers, LDS, spills, instructions; of decode also a roofline."""
    from narrowkv.cli.report import Report

    report = Report("inspect", as_json=as_json, out_file=out)
    targets = _amd_targets(target)
    if operation == "sparse":
        from narrowkv.cli.sparse.cases import SparseCase
        from narrowkv.cli.sparse.inspection import inspect_sparse
        from narrowkv.cli.sparse.inspection import shipped_cases as sparse_cases

        cases = sparse_cases() if case is None else [SparseCase.parse(case)]
        _end(inspect_sparse(cases, report, targets=targets))
    if operation == "prefill":
        from narrowkv.cli.prefill.cases import PrefillCase
        from narrowkv.cli.prefill.inspection import inspect_prefill
        from narrowkv.cli.prefill.inspection import shipped_cases as prefill_cases

        calls = prefill_cases if case is None else [PrefillCase.parse(case)]
        _end(inspect_prefill(calls, report, targets=targets))
    if operation == "sage":
        from narrowkv.cli.sage.inspection import inspect_sage
        from narrowkv.cli.sage.inspection import shipped_cases as sage_cases

        _end(inspect_sage(sage_cases(), report, targets=targets))
    if operation != "decode":
        from narrowkv.cli.report import UsageError

        raise UsageError(f"OPERATION must be decode, prefill, sparse or sage, got {operation!r}")
    from narrowkv.cli.cases import DecodeCase
    from narrowkv.cli.inspection import inspect as run
    from narrowkv.cli.inspection import inspection_case

    sizes = inspection_case(
        batch=batch,
        context=context,
        ratio=ratio,
        kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        fmt=cache_format,
        q=q,
        kernel=kernel,
    )
    _end(run(DecodeCase.parse(case if case is not None else str(sizes)), report, targets=targets, asm=asm))


@app.command()
def env(as_json: Json = False, out: Out = None) -> None:
    """Report versions, GPUs and settings, to paste into a bug report."""
    from narrowkv.cli.environment import report_environment
    from narrowkv.cli.report import Report

    _end(report_environment(Report("env", as_json=as_json, out_file=out)))


def main() -> None:
    """The console script."""
    app()
