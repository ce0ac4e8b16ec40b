"""`narrowkv engines try`: compares narrowkv inside an engine with the engine's own attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError
from narrowkv.cli.sheet import Sheet, keys, numbers
from narrowkv.engines.trial import try_engine
from narrowkv.runtime.errors import UnsupportedError

# Bound on the difference of log-probabilities between two 16-bit computations of the same attention.
_BOUND = 0.1


def try_inside(report: Report, engine: str, model: str, caches: Sequence[str], tokens: int) -> ExitCode:
    """Runs the trials and shows them; a 16-bit cache that differs from the engine's own is a failure."""
    try:
        trials = try_engine(engine, model, caches, tokens=tokens)
    except ImportError as error:
        raise UnsupportedHereError(f"{engine} cannot be imported: {error}") from None
    except UnsupportedError as error:
        raise UnsupportedHereError(str(error)) from None
    columns = ("same tokens", "logprob diff", "calls", "seconds", "in narrowkv")
    sheet = Sheet([*keys("cache"), *numbers(*columns)])
    failed = False
    for trial in trials:
        wrong = trial.cache in ("bf16", "auto") and not trial.difference < _BOUND
        failed |= wrong
        sheet.add(
            trial.cache, f"{trial.same}/{len(trial.tokens)}", f"{trial.difference:.4f}",
            sum(trial.calls.values()), f"{trial.seconds:.2f}", f"{sum(trial.spent.values()):.2f}",
            style="red" if wrong else "",
        )  # fmt: skip
    report.show(sheet)
    rows = [dataclasses.asdict(trial) for trial in trials]
    exit_code = ExitCode.NUMERICAL if failed else ExitCode.OK
    return report.finish({"engine": engine, "model": model, "trials": rows}, exit_code, rows=rows)
