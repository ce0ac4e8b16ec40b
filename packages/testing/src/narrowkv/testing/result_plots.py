"""A plot of each kind of result: which values are its dots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from narrowkv.testing.backends import OURS
from narrowkv.testing.cases import Case
from narrowkv.testing.cases.sage import SageCase, SageResult
from narrowkv.testing.checking import CaseResult
from narrowkv.testing.codegen import KernelCode
from narrowkv.testing.format_errors import SETS, FormatError
from narrowkv.testing.operation import OperationEntry
from narrowkv.testing.plot import plot_dots
from narrowkv.testing.probing import Answer

__all__ = ["plot_answers", "plot_cases", "plot_recipes", "plot_registers", "plot_sage"]


def plot_answers(rows: Sequence[Answer], path: Path) -> None:
    """Every error: a row for each contract but its page size, a series for each backend and place."""
    dots = [
        (
            f"{row.contract.function}: {row.contract.q} over {row.contract.cache}",
            f"{row.backend}, {row.place}" if row.backend == OURS.name else row.backend,
            row.relative_l1,
        )
        for row in rows
        if row.relative_l1 is not None
    ]
    queries: dict[float, dict[str, None]] = {}
    for row in rows:
        queries.setdefault(row.contract.bound, {})[row.contract.q] = None
    bounds = {f"Q {', '.join(found)}": bound for bound, found in queries.items()}
    plot_dots(dots, path, title="error against fp32", label="relative L1 error", bounds=bounds)


def plot_cases(results: Sequence[tuple[Case, CaseResult]], operation: OperationEntry, path: Path) -> None:
    """Every case's error, a row for each query and cache, a colour for each place."""
    dots = sorted(
        (f"{case.kind[0]} over {case.kind[1]}", result.place, result.error.relative_l1)
        for case, result in results
        if result.error is not None
    )
    plot_dots(
        dots,
        path,
        title=f"{operation.title} against fp32",
        label="relative L1 error",
        bounds=operation.cases.bounds,
    )


def plot_recipes(errors: Sequence[FormatError], path: Path) -> None:
    """Every recipe's error on each input set, the smallest recipes last."""
    dots = [
        (f"{e.recipe}: {e.bits:.2f} bits", f"{name} inputs", e.rmse[name])
        for e in sorted(errors, key=lambda e: -e.bits)
        for name in SETS
        if e.rmse.get(name)
    ]
    title = "what a cache recipe costs: bits are of an element, scales included"
    plot_dots(dots, path, title=title, label="RMSE of attention's output", with_values=True)


def plot_sage(results: Sequence[tuple[SageCase, SageResult]], path: Path) -> None:
    """Every case's error against attention that quantises nothing."""
    dots = [
        (f"{c.qk_dtype}, {c.granularity}, {c.data}", f"mean of {c.smoothing} out, {r.place}",
         r.total.relative_l1)
        for c, r in results
        if r.total is not None
    ]  # fmt: skip
    plot_dots(dots, path, title="sage_attention against fp32, nothing quantised", label="relative L1 error")


def plot_registers(compiled: Sequence[tuple[str, str, tuple[KernelCode, ...]]], path: Path) -> None:
    """Vector registers of every kernel with matrix instructions."""
    dots = [
        (case, f"{target} {kernel.name}", float(kernel.vgprs + kernel.agprs))
        for target, case, kernels in compiled
        for kernel in kernels
    ]
    plot_dots(dots, path, title="registers of a wave", label="VGPRs and AGPRs", log=False)
