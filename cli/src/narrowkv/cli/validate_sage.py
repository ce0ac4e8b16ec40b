"""`narrowkv validate sage`: what precision, granularity and smoothing cost, beside published figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from narrowkv.cli.options import Where
from narrowkv.cli.report import ExitCode, Report
from narrowkv.cli.sheet import Sheet, keys, numbers
from narrowkv.cli.validate import Cases, run_cases
from narrowkv.quant.accuracy import ErrorReport
from narrowkv.testing.cases.sage import BOUND, LSE_BOUND, PUBLISHED, SageCase, SageResult
from narrowkv.testing.operation import OperationEntry
from narrowkv.testing.records import jsonable
from narrowkv.testing.result_plots import plot_sage

Found = tuple[SageCase, SageResult]


def validate_sage(
    operation: OperationEntry, cases: Cases, report: Report, where: Where, *, seed: int
) -> ExitCode:
    """Runs cases at every place and shows cosine, relative L1 and RMSE; Ctrl-C keeps what was finished."""
    run = run_cases(cases, report, where, SageResult)
    report.say(f"{operation.title} against attention that quantises nothing, {run.ran_on}")
    report.say("figures: cosine / relative L1 / RMSE, by what was taken out of K and Q first")
    for place in run.places:
        for data in dict.fromkeys(case.data for case, _ in run.results):
            report.say(f"\n{place.name}, data {data}")
            report.show(_table([(c, r) for c, r in run.results if r.place == place.name and c.data == data]))
    for case, result in run.failures:
        report.line(f"FAILED {result.place} {case}: {result.detail}", "bold red")
    run.say_passed(report, f"kernel error <= {BOUND:g}, lse within {LSE_BOUND:g}, no worse than published")
    body = {
        "operation": operation.title,
        "seed": seed,
        "bounds": dict(operation.cases.bounds),
        "published": PUBLISHED,
    }
    records = [{"case": str(case), **jsonable(result)} for case, result in run.results]
    return run.finish(report, body, records, partial(plot_sage, run.results))


def _table(results: Sequence[Found]) -> Sheet:
    """Figures by precision and granularity, a column for each smoothing."""
    found = {(c.qk_dtype, c.granularity, c.smoothing): (c, r) for c, r in results}
    smoothings = list(dict.fromkeys(c.smoothing for c, _ in results))
    means = [f"mean of {s} out" for s in smoothings]
    sheet = Sheet([*keys("Q and K", "granularity"), *numbers(*means, "published", "kernel", "lse")])
    for qk, granularity in dict.fromkeys((c.qk_dtype, c.granularity) for c, _ in results):
        row = [found.get((qk, granularity, s)) for s in smoothings]
        ran = [r for _, r in filter(None, row) if r.total is not None]
        cells = ["-" if one is None or one[1].total is None else _figures(one[1].total) for one in row]
        goal = next((g for c, _ in filter(None, row) if (g := c.published) is not None), None)
        sheet.add(
            qk, granularity, *cells, "" if goal is None else f"{goal[0]:.4f} / {goal[1]:.3f} / {goal[2]:.3f}",
            f"{max((r.kernel_l1 for r in ran), default=float('nan')):.4f}",
            f"{max((r.lse_error for r in ran), default=float('nan')):.1e}",
            style="" if all(one is None or one[1].passed for one in row) else "bold red",
        )  # fmt: skip
    return sheet


def _figures(error: ErrorReport) -> str:
    return f"{error.cosine:.4f} / {error.relative_l1:.3f} / {error.rmse:.3f}"
