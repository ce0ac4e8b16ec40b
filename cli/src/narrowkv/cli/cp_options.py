"""The options of `narrowkv bench cp`; its work is imported when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from narrowkv.cli.names import CACHE_FORMATS, COMMS, choices, one_of
from narrowkv.cli.options import heads_of, numbers
from narrowkv.cli.report import ExitCode, Report


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
    hbm: Annotated[float, typer.Option(min=0, help="With --model: TB/s of memory; 0: the target's.")] = 0.0,
) -> ExitCode:
    """Time of decode over GPUs: attention, communication, share hidden, rate over one GPU's."""
    (pair,) = heads_of(heads, most=1)
    one_of("--format", cache_format, CACHE_FORMATS)
    from narrowkv.cli.cp import LINK_OF_TARGET, LINKS, Setting, bench_cp, model_cp

    setting = Setting(
        tuple(numbers("--context", context)), tuple(numbers("--batch", batch)), *pair,
        format=cache_format, comms=tuple(choices("--comm", comm, COMMS)),
    )  # fmt: skip
    if not model:
        report.refuse("without --model", "gpus", "target", "link", "hbm")
        return bench_cp(report, setting, ranks=ranks)
    report.refuse("with --model", "ranks", "comm")
    one_of("--target", target, tuple(LINK_OF_TARGET))
    link = link or LINK_OF_TARGET[target]
    one_of("--link", link, tuple(LINKS))
    return model_cp(report, setting, gpus=numbers("--gpus", gpus), target=target, link=link, hbm=hbm)
