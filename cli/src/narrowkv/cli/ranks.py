"""Decode over ranks: `narrowkv probe cp` and `narrowkv bench cp`, whose ranks are processes of this host."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from narrowkv.cli.report import ExitCode, Report, Sheet, UsageError, keys, numbers
from narrowkv.context_parallel.ranks import run_ranks
from narrowkv.testing.bench.context_parallel import LINKS, Measured, Setting, measure_ranks, predict
from narrowkv.testing.cases.context_parallel import CASES, Checked, check_cases
from narrowkv.testing.records import number


def probe_cp(report: Report, *, ranks: int) -> ExitCode:
    """Checks every case over `ranks` processes with gloo, and shows the largest error of any rank."""
    found: list[list[Checked]] = run_ranks(check_cases, ranks)
    sheet = Sheet([*keys("case"), *numbers("error", "one rank", "bound", "sent bytes", "repeats", "")])
    rows: list[dict[str, Any]] = []
    for case, checks in zip(CASES, zip(*found, strict=True), strict=True):
        worst = max(checks, key=lambda checked: checked.error / checked.bound)
        passed = all(checked.passed for checked in checks)
        repeats = all(checked.repeats for checked in checks)
        sheet.add(
            case.name, number(worst.error), number(worst.one_rank), number(worst.bound), worst.sent_bytes,
            "yes" if repeats else "no", "pass" if passed else "FAIL", style="" if passed else "red",
        )  # fmt: skip
        rows.append({**asdict(worst), "passed": passed, "repeats": repeats})
    report.show(sheet)
    failed = [row for row in rows if not row["passed"]]
    report.say(f"{len(rows) - len(failed)} of {len(rows)} cases equal one rank's attention on {ranks} ranks")
    code = ExitCode.NUMERICAL if failed else ExitCode.OK
    return report.finish({"ranks": ranks, "backend": "gloo", "cases": rows}, code, rows=rows)


def bench_cp(report: Report, setting: Setting, *, ranks: int) -> ExitCode:
    """Measures on GPUs; without them, shows correctness and bytes as `probe cp` does."""
    if torch.cuda.device_count() < ranks:
        if torch.cuda.is_available():
            raise UsageError(f"--ranks must be at most the GPUs of this host, {torch.cuda.device_count()}")
        report.say("There is no GPU: only correctness and bytes are shown; --model shows modelled times.")
        return probe_cp(report, ranks=ranks)
    found: list[Measured] = run_ranks(measure_ranks, ranks, setting, device="cuda")[0]
    sheet = Sheet([
        *keys("context", "batch", "exchange", "partials", "groups"),
        *numbers(
            "cache GiB", "1 GPU us", "step us", "speed-up", "attention", "comm us", "hidden",
            "bytes sent", "tokens/s", "equal time", "error", "same bits", "graph",
        ),
    ])  # fmt: skip
    for row in found:
        cells: list[object] = [row.refusal or "-", *["-"] * 12]
        if not row.refusal:
            cells = [
                f"{row.cache_gib:.2f}", f"{row.one_gpu_us:.1f}", f"{row.step_us:.1f}", f"{row.speedup:.2f}",
                f"{row.attention_us:.1f}", f"{row.communication_us:.1f}", f"{row.hidden:.0%}", row.sent_bytes,
                f"{row.tokens_per_s:.0f}", row.context_at_equal_time, f"{row.error:.1e}",
                "yes" if row.repeats else "no", "yes" if row.captured else "NO",
            ]  # fmt: skip
        sheet.add(row.context, row.batch, row.comm, row.partials, row.head_groups, *cells)
    report.show(sheet)
    ran = [row for row in found if not row.refusal]
    wrong = [row for row in ran if not (row.captured and row.error < 2.0**-7)]
    body = {"ranks": ranks, "setting": asdict(setting), "device": torch.cuda.get_device_name()}
    rows = [row.as_dict() for row in found]
    return report.finish({**body, "rows": rows}, ExitCode.NUMERICAL if wrong else ExitCode.OK, rows=rows)


def model_cp(
    report: Report, setting: Setting, *, gpus: list[int], target: str, link: str, hbm: float
) -> ExitCode:
    """Shows modelled steps of many GPUs."""
    figures = ("cache GiB/GPU", "1 GPU us", "attention us", "comm us", "step us", "speed-up", "bytes sent")
    sheet = Sheet([*keys("GPUs", "context", "batch"), *numbers(*figures)])
    rows = [
        predict(setting, world, context, batch, target=target, link=link, hbm_bytes_per_s=hbm * 1e12)
        for world in gpus
        for context in setting.contexts
        for batch in setting.batches
    ]
    for row in rows:
        sheet.add(
            row.world, row.context, row.batch, number(row.cache_gib / row.world), f"{row.one_gpu_us:.1f}",
            f"{row.attention_us:.1f}", f"{row.communication_us:.1f}", f"{row.step_us:.1f}",
            f"{row.speedup:.2f}", row.sent_bytes,
        )  # fmt: skip
    report.show(sheet)
    report.say(f"{target} and {LINKS[link].name}, by a model: {LINKS[link].source}")
    listed = [row.as_dict() for row in rows]
    return report.finish({"target": target, "link": link, "rows": listed}, ExitCode.OK, rows=listed)
