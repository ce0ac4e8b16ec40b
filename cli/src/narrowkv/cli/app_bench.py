"""The commands `narrowkv bench`; each imports its work when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from narrowkv.cli.command_line import command
from narrowkv.cli.names import (
    CACHE_FORMATS,
    COMMS,
    PLACES,
    QUERY_DTYPES,
    SAGE_GRANULARITIES,
    SAGE_PRECISIONS,
    SPARSE_MODES,
    TRAFFIC,
    TRAFFIC_MODELS,
    cache_formats,
    choices,
    one_of,
)
from narrowkv.cli.options import (
    Count,
    Formats,
    Heads,
    OneFormat,
    Query,
    heads_of,
    listed,
    numbers,
    starting_with,
)
from narrowkv.cli.report import ExitCode, Report, UsageError

bench = typer.Typer(no_args_is_help=True)
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


def _targets(report: Report, on: list[str] | None, *idle: str) -> list[str]:
    """The targets of a bench that is modelled; none for one that is measured."""
    chosen = choices("--on", on, PLACES[1:]) if on else ["gpu"]
    if chosen == ["gpu"]:
        return []
    if "gpu" in chosen:
        raise UsageError("--on must be gpu, or AMD targets whose times are a model's: measure in another run")
    report.refuse("to modelled times", "samples", *idle)
    return chosen


def _run(report: Report, chosen: Any, rows: Sequence[Any], targets: list[str], **measured: Any) -> ExitCode:
    """Models the rows on the targets, or without any measures them."""
    from narrowkv.cli import bench as tables

    if targets:
        return tables.bench_modelled(chosen, rows, targets, report)
    return tables.bench(chosen, rows, report, **measured)


@command(bench, "decode", title="bench")
def bench_decode(
    report: Report,
    batch: Annotated[str, listed("Sequences.")] = "1,4,16,64,128",
    context: Annotated[str, listed("Tokens of each sequence.")] = "1024,8192,32768",
    page_size: Annotated[str, listed()] = "1,16,64",
    num_kv_heads: Count = 8,
    ratio: Annotated[str, listed("Query heads for each KV head.")] = "12",
    head_dim: Count = 128,
    cache_format: Formats = "fp8_e4m3fn,bf16",
    q: Query = "bf16",
    samples: Samples = 50,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also time torch SDPA, AITER, FlashInfer, vLLM and SGLang.")
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
    targets = _targets(report, on, "peers", "batch_invariant", "against", "threshold")
    lists = {"batch": batch, "context": context, "page-size": page_size, "ratio": ratio}
    sizes = {name: numbers(f"--{name}", text) for name, text in lists.items()}
    formats, q = cache_formats("--format", cache_format), one_of("--q", q, QUERY_DTYPES)
    from narrowkv.testing.bench.decode import DecodeBench, decode_peers, decode_sizes

    try:
        rows = decode_sizes(
            batches=sizes["batch"], contexts=sizes["context"], page_sizes=sizes["page-size"],
            ratios=sizes["ratio"], num_kv_heads=num_kv_heads, head_dim=head_dim, q=q, formats=formats,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(f"--context, --page-size: {error}") from None
    chosen = DecodeBench(batch_invariant=batch_invariant, peers=decode_peers() if peers else {})
    return _run(
        report, chosen, rows, targets, samples=samples, against=against, threshold=threshold,
        settings={"peers": peers, "batch_invariant": batch_invariant},
    )  # fmt: skip


@command(bench, "prefill", title="bench")
def bench_prefill(
    report: Report,
    new: Annotated[str, listed("New tokens.")] = "128,1024,4096",
    prefix: Annotated[str, listed("Older tokens.")] = "0,4096,32768",
    heads: Annotated[str, listed("Query heads / KV heads.")] = "96/8,32/8",
    head_dim: Count = 128,
    page_size: Count = 16,
    cache_format: Formats = "fp8_e4m3fn,bf16",
    samples: Samples = 50,
    on: BenchOn = None,
) -> ExitCode:
    """Measure prefill of one sequence over prefixes, beside torch SDPA, and prefill that appends."""
    pairs = heads_of(heads)
    lengths = numbers("--new", new), numbers("--prefix", prefix, least=0)
    formats = cache_formats("--format", cache_format)
    from narrowkv.testing.bench.prefill import PrefillBench, prefill_sizes

    rows = list(prefill_sizes(*lengths, pairs, formats, head_dim, page_size))
    return _run(report, PrefillBench(), rows, _targets(report, on), samples=samples)


@command(bench, "sparse", title="bench")
def bench_sparse(
    report: Report,
    tokens: Annotated[str, listed("Query tokens.")] = "1024,4096",
    heads: Annotated[str, listed("Query heads.")] = "16,64,128",
    topk: Annotated[str, listed("Rows that each token attends to.")] = "512,2048",
    pool: Annotated[int, typer.Option(min=1, help="Rows of the pool.")] = 65536,
    mode: Annotated[str, listed("", *SPARSE_MODES)] = "bf16,prepass,fused",
    samples: Samples = 50,
    on: BenchOn = None,
) -> ExitCode:
    """Measure DeepSeek-V4 sparse prefill over tokens, heads and top-k, in each mode."""
    lists = {"tokens": tokens, "heads": heads, "topk": topk}
    sizes = [numbers(f"--{name}", text) for name, text in lists.items()]
    modes = choices("--mode", mode, SPARSE_MODES)
    from narrowkv.testing.bench.sparse import SparseBench, SparseSizes

    rows = [SparseSizes(t, h, k, pool) for t, h, k in product(*sizes)]
    settings = {"modes": modes}
    return _run(report, SparseBench(modes), rows, _targets(report, on), samples=samples, settings=settings)


@command(bench, "sage", title="bench")
def bench_sage(
    report: Report,
    batch: Annotated[str, listed("Sequences.")] = "2",
    context: Annotated[str, listed("Tokens of Q, and of K.")] = "4096,16384",
    heads: Annotated[int, typer.Option(min=1, help="Heads of Q, K and V.")] = 32,
    head_dim: Count = 128,
    qk: Annotated[str, listed("", *SAGE_PRECISIONS)] = "int8",
    granularity: Annotated[str, listed("", *SAGE_GRANULARITIES)] = "per_thread,per_warp,per_block",
    samples: Samples = 20,
    on: BenchOn = None,
) -> ExitCode:
    """Measure Sage attention, quantisation included, beside torch's SDPA in bf16, unmasked and causal."""
    sizes = product(numbers("--batch", batch), numbers("--context", context), (False, True))
    precisions = choices("--qk", qk, SAGE_PRECISIONS)
    groups = choices("--granularity", granularity, SAGE_GRANULARITIES)
    from narrowkv.testing.bench.sage import SageBench, SageSizes

    rows = [SageSizes(b, c, heads, head_dim, causal) for b, c, causal in sizes]
    sage, settings = SageBench(precisions, groups), {"qk": precisions, "granularity": groups}
    return _run(report, sage, rows, _targets(report, on), samples=samples, settings=settings)


@command(bench, "traffic", title="bench")
def bench_traffic(
    report: Report,
    model: Annotated[str, listed("Default: all.", *TRAFFIC_MODELS)] = ",".join(TRAFFIC_MODELS),
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
    models, formats = choices("--model", model, TRAFFIC_MODELS), cache_formats("--format", cache_format)
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


@command(bench, "host", files=("out",), title="bench host")
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


@command(bench, "cp", files=("out", "csv"), title="bench cp")
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
