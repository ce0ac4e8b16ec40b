"""`narrowkv warmup`, before a server starts, and `narrowkv engines try`, inside an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from narrowkv.attn_prefill.warmup import model_kernels
from narrowkv.cli.report import ExitCode, Report, Sheet, UnsupportedHereError, keys, numbers
from narrowkv.engines.trial import try_engine
from narrowkv.paged_cache import PagedKVCache
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import cache_variables, warmup

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
    rows = [asdict(trial) for trial in trials]
    exit_code = ExitCode.NUMERICAL if failed else ExitCode.OK
    return report.finish({"engine": engine, "model": model, "trials": rows}, exit_code, rows=rows)


def run_warmup(
    report: Report, cache: PagedKVCache, *, targets: tuple[str, ...], jobs: int | None, **calls: Any
) -> ExitCode:
    """Compiles for each target, or for the GPU where none is named, and shows what was compiled.

    Args:
        report: where it goes.
        cache: of the model.
        targets: AMD targets.
        jobs: processes.
        **calls: heads and sizes of the calls, as `model_kernels` takes them.
    """
    import triton  # after narrowkv.runtime, which says what to do where there is none

    body = {}
    for target in targets or (None,):
        # An engine's cache may hold negative zeros; one that `PagedKVCache.empty` made holds none.
        kernels = [
            kernel
            for clean in (False, True)
            for kernel in model_kernels(replace(cache, negative_zero_free=clean), target=target, **calls)
        ]
        where = target or "the GPU"
        with report.progress(len(kernels), f"compiling for {where}") as line:
            found = warmup(
                kernels, target, processes=jobs, progress=lambda done, total: line.advance() if done else None
            )  # fmt: skip
        names = Counter((*found.compiled, *found.cached))
        report.line(
            f"{where}: {len(found.compiled)} kernels compiled, {len(found.cached)} were in Triton's cache ("
            + ", ".join(f"{name} {count}" for name, count in sorted(names.items()))
            + ")"
        )
        body[where] = {"compiled": list(found.compiled), "cached": list(found.cached)}
    variables = cache_variables()
    said = ", ".join(f"{name}={value}" for name, value in sorted(variables.items())) or "none"
    report.line(
        f"triton {triton.__version__}; environment variables in its cache key: {said}. A server that starts "
        "with the same Triton and the same of them compiles none of these kernels"
    )
    return report.finish({"triton": triton.__version__, "variables": variables, "kernels": body}, ExitCode.OK)
