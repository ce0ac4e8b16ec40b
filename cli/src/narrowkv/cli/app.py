"""The program and its other commands. Each imports its work when it is called: --help needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from narrowkv.cli.app_operations import add_operations
from narrowkv.cli.command_line import (
    BOTH,
    Commands,
    Count,
    Formats,
    Heads,
    Jobs,
    MeasureByDefault,
    On,
    OneFormat,
    Query,
    Targets,
    amd_targets,
    cache_formats,
    choices,
    command,
    heads_of,
    listed,
    numbers,
    one_of,
    starting_with,
)
from narrowkv.cli.command_line import jobs as number_of
from narrowkv.cli.report import ExitCode, Report, UsageError, check_writable, version
from narrowkv.testing.operations import contract_sets
from narrowkv.testing.tune import TUNED_FAMILIES, TUNED_MODELS, SparseHeads, TuneSettings
from narrowkv.testing.words import (
    ACCURACY_RECIPES,
    AMD_TARGETS,
    CACHE_FORMATS,
    ENGINE_CACHES,
    PLACES,
    QUERY_DTYPES,
    TINY_MODELS,
)
from narrowkv.testing.words import Heads as ModelHeads

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
engines = typer.Typer(no_args_is_help=True)
accuracy = typer.Typer(cls=MeasureByDefault)


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


@command(app, "probe")
def probe(
    report: Report,
    contract_set: Annotated[
        str,
        typer.Argument(
            metavar="[CONTRACT-SET]",
            help="What to ask; see --list.",
            autocompletion=starting_with(*contract_sets(), "models", "cp"),
        ),
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

    The set cp is decode over ranks, with gloo between processes. The set models has a row for each model:
    which calls its attention makes with 1 to 8 ranks, and whether each is exact here or refused, and why.

    Without --on, a sample of what is compiled for each target also runs in the emulator.
    """
    if contract_set == "cp":
        report.refuse("to cp", "full", "on", "target", "jobs", "plot", "resume")
        from narrowkv.cli.ranks import probe_cp

        return probe_cp(report, ranks=ranks)
    report.refuse("to contract sets: it is cp's", "ranks")
    if contract_set == "models":
        report.refuse("to models", "target", "plot")
        from narrowkv.cli.probe import probe_models

        if on:
            choices("--on", on, PLACES)
        return probe_models(report, on=on, jobs=number_of(jobs), full=full)
    if list_sets:
        report.refuse("with --list", "contract_set", "full", "on", "target", "jobs", "plot", "resume")
    sets = contract_sets()
    one_of("CONTRACT-SET", contract_set, tuple(sets))
    targets = amd_targets(target)
    if on:
        choices("--on", on, PLACES)
    from narrowkv.cli import probe as work

    if list_sets:
        return work.list_sets(report)
    return work.probe(sets[contract_set], report, on=on, jobs=number_of(jobs), targets=targets, full=full)


@command(engines, "try", title="engines", files=("out", "csv"))
def engines_try(
    report: Report,
    engine: Annotated[
        str,
        typer.Argument(help="transformers, vllm or sglang.", autocompletion=starting_with(*ENGINE_CACHES)),
    ],
    model: Annotated[
        str, typer.Option(help="A small model of real shape.", autocompletion=starting_with(*TINY_MODELS))
    ] = "glm-4.5-air-tiny",
    cache: Annotated[str, listed("Cache dtypes by the engine's names; default all.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="New tokens.")] = 4,
) -> ExitCode:
    """Generate with a tiny random model by narrowkv and by the engine's own attention, and compare."""
    (name,) = choices("ENGINE", engine, tuple(ENGINE_CACHES))
    choices("--model", model, TINY_MODELS)
    caches = choices("--cache", cache, ENGINE_CACHES[name]) if cache else []
    from narrowkv.cli.serving import try_inside

    return try_inside(report, name, model, caches, tokens)


@command(accuracy, "measure", title="accuracy", files=("out", "csv", "plot"))
def accuracy_measure(
    report: Report,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="smollm2, or a folder or name that transformers' from_pretrained takes."
        ),
    ] = "smollm2",
    recipe: Annotated[str, listed("Recipes joined by commas; default all.", *ACCURACY_RECIPES)] = "",
    tokens: Annotated[int, typer.Option(min=2, help="Of the text.")] = 1024,
    context: Annotated[int, typer.Option(min=2, help="Tokens of each sequence.")] = 1024,
    needles: Annotated[int, typer.Option(min=0, help="Sequences with a fact that is asked for.")] = 0,
    save_calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the model's calibration, for NarrowCache (.npz)."),
    ] = None,
) -> ExitCode:
    """Measure perplexity, KL per token against a 16-bit cache, agreement and retrieval with each recipe.

    On a GPU through the kernels; on a CPU with the same bytes dequantised and attended in torch.
    """
    names = choices("--recipe", recipe, ACCURACY_RECIPES) if recipe else []
    check_writable("--save-calibration", save_calibration)
    from narrowkv.cli.accuracy import measure_model

    return measure_model(
        report, model, names, tokens=tokens, context=context, needles=needles, calibration=save_calibration
    )


@command(accuracy, "train-tiny", title="accuracy train-tiny", files=("out",))
def accuracy_train_tiny(
    report: Report,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes.")],
    steps: Annotated[int, typer.Option(min=1, help="Of the training.")] = 1500,
    context: Annotated[int, typer.Option(min=128, help="Tokens (bytes) of a sequence.")] = 4096,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
) -> ExitCode:
    """Train a small model with grouped queries, RoPE and a long context on text that Python ships."""
    from narrowkv.cli.accuracy import train

    return train(report, folder, steps=steps, context=context, seed=seed)


add_operations(app)
app.add_typer(engines, name="engines", help="Run narrowkv inside inference engines.")
app.add_typer(
    accuracy,
    name="accuracy",
    help="Measure what cache recipes cost a language model. Without a command: measure.",
)


@command(app, "warmup", files=("out",))
def warmup(
    report: Report,
    heads: Heads = "96/8",
    head_dim: Count = 128,
    page_size: Count = 16,
    num_pages: Annotated[int, typer.Option(min=1, help="Pages of the server's cache.")] = 65536,
    cache_format: OneFormat = "fp8_e4m3fn",
    q: Query = "bf16",
    max_batch: Annotated[int, typer.Option(min=1, help="Sequences of a decode call.")] = 512,
    max_seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 131072,
    max_num_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a prefill call; 0: no prefill.")] = 0,
    max_q_len: Annotated[
        int, typer.Option(min=1, help="Tokens of a sequence that decodes; above 1: speculation.")
    ] = 8,
    target: Annotated[
        str,
        listed("AMD targets to compile for without a GPU. Default: the GPU.", *AMD_TARGETS, metavar="NAMES"),
    ] = "",
    jobs: Jobs = None,
) -> ExitCode:
    """Compile into Triton's cache what a model's decode, append and prefill can reach."""
    ((num_qo_heads, num_kv_heads),) = heads_of(heads, most=1)
    one_of("--format", cache_format, CACHE_FORMATS)
    one_of("--q", q, QUERY_DTYPES)
    targets = amd_targets(target) if target else ()
    import torch

    from narrowkv.attn_prefill.warmup import model_cache
    from narrowkv.cli.serving import run_warmup

    device = "cpu" if targets else "cuda"
    if not targets and not torch.cuda.is_available():
        raise UsageError("there is no GPU to compile for: name targets, for example --target gfx942")
    cache = model_cache(cache_format, num_pages, page_size, num_kv_heads, head_dim, device)
    return run_warmup(
        report, cache, num_qo_heads=num_qo_heads, max_batch=max_batch, max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens, max_q_len=max_q_len,
        q_dtype=torch.bfloat16 if q == "bf16" else torch.float16, targets=targets, jobs=jobs,
    )  # fmt: skip


@command(app, "env", files=("out",))
def env(
    report: Report,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Also run kernels that show a fault of some Tritons for AMD."),
    ] = False,
) -> ExitCode:
    """Report versions, GPUs, settings and known faults of these versions, to paste into a bug report."""
    from narrowkv.cli.machine import report_environment

    return report_environment(report, probe)


@command(app, "report", files=())
def report_machine(
    report: Report,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where the two files go.")] = Path(),
    minutes: Annotated[float, typer.Option(min=0, help="After which nothing more is run.")] = 10.0,
    quick: Annotated[bool, typer.Option("--quick", help="The smallest sizes: does everything run?")] = False,
) -> ExitCode:
    """Probe, validate and measure what matters in minutes; write one JSON and one Markdown file to share.

    On an Instinct GPU with the timing model's prediction of each row; without a GPU as a rehearsal.
    """
    from narrowkv.cli.machine import write_report

    return write_report(report, folder=folder, minutes=minutes, quick=quick)


@command(app, "tune", files=("out",))
def tune(
    report: Report,
    family: Annotated[str, listed("Families of kernels.", *TUNED_FAMILIES, metavar="NAMES")] = ",".join(
        TUNED_FAMILIES
    ),
    model: Annotated[str, listed("Heads of one GPU's share of a model.", *TUNED_MODELS)] = "glm-4.5-air",
    heads: Annotated[str, typer.Option(metavar="Q/KV", help="Instead: query heads and KV heads.")] = "",
    head_dim: Count = 128,
    sparse_heads: Annotated[
        int, typer.Option(min=0, max=128, help="Instead: query heads of sparse attention.")
    ] = 0,
    layout: Annotated[str, typer.Option(help="With --sparse-heads: of the rows.")] = "packed584",
    topk: Annotated[int, typer.Option(min=1, help="With --sparse-heads: rows of a token.")] = 2048,
    page_size: Count = 16,
    cache_format: Formats = "fp8_e4m3fn",
    q: Query = "bf16",
    batch: Annotated[str, listed("Sequences of a call.")] = "1,2,4,8,16,32,64,128",
    context: Annotated[str, listed("Tokens of each sequence.")] = "1024,2048,4096,8192,16384,32768",
    chunk: Annotated[str, listed("New tokens of a prefill.")] = "512,2048",
    capacity: Annotated[
        int, typer.Option(min=0, help="Of decode: longest sequence that plans are made for; 0: the context.")
    ] = 0,
    file: Annotated[
        Path, typer.Option("--file", metavar="FILE", help="Of the rows; an existing one is continued.")
    ] = Path("narrowkv-tuned.json"),
    minutes: Annotated[
        float, typer.Option(min=0, help="After which nothing further is compiled or tried.")
    ] = 30.0,
    samples: Annotated[
        int, typer.Option(min=1, help="Of a configuration, at first and in each last round.")
    ] = 10,
    jobs: Jobs = None,
    show: Annotated[
        bool, typer.Option("--show", help="Only show the rows of --file beside the shipped ones.")
    ] = False,
) -> ExitCode:
    """Search the fastest configurations for shapes of a model on this GPU, and write them to a file.

    The environment variable NARROWKV_TUNED makes plans take them. The same command goes on after a break.
    """
    from narrowkv.cli import tune as work

    if show:
        return work.show(report, file)
    families = choices("--family", family, TUNED_FAMILIES)
    pairs = heads_of(heads) if heads else []
    shares: list[ModelHeads | SparseHeads] = [ModelHeads(*pair, head_dim) for pair in pairs]
    if sparse_heads:
        from narrowkv.testing.tune.families import SPARSE_LAYOUTS

        one_of("--layout", layout, SPARSE_LAYOUTS)
        shares.append(SparseHeads(sparse_heads, topk, layout))
    else:
        report.refuse("without --sparse-heads", "layout", "topk")
    if not heads:
        report.refuse("without --heads", "head_dim")
    if shares:
        report.refuse("with --heads or --sparse-heads", "model")
    else:
        shares = [TUNED_MODELS[name] for name in choices("--model", model, tuple(TUNED_MODELS))]
    one_of("--q", q, QUERY_DTYPES)
    formats, batches = tuple(cache_formats("--format", cache_format)), tuple(numbers("--batch", batch))
    contexts = tuple(numbers("--context", context))
    chunks = tuple(numbers("--chunk", chunk, least=8))
    settings = [
        TuneSettings(each, formats, page_size, q, batches, contexts, capacity, chunks) for each in shares
    ]
    return work.tune(report, families, settings, file=file, minutes=minutes, samples=samples, jobs=jobs)


def main() -> None:
    """The console script."""
    app()
