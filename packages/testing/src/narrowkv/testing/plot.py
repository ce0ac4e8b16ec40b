"""Plots of results, and which values are the dots of each kind of result; needs matplotlib.

Series differ in colour and in marker, so that they can be told apart in grey and by colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowkv.testing.backends import OURS
from narrowkv.testing.cases import Case
from narrowkv.testing.checking import CaseResult
from narrowkv.testing.codegen import KernelCode
from narrowkv.testing.format_errors import SETS, FormatError
from narrowkv.testing.operation import OperationEntry
from narrowkv.testing.probing import Answer

if TYPE_CHECKING:
    from narrowkv.testing.bench.timing import Ceilings

__all__ = ["plot_answers", "plot_cases", "plot_recipes", "plot_registers"]


# The palette of Okabe and Ito without its yellow, which is too light for dots on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_INCHES_PER_ROW = 0.28


def style_of(index: int) -> dict[str, Any]:
    """Colour and marker of series `index`; 63 of them differ."""
    return {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)]}


@contextmanager
def _figure(path: Path, title: str, size: tuple[float, float]) -> Iterator[Any]:
    """Axes that are written to `path` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.25}):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        figure.suptitle(title, fontsize=10)
        yield axes
        figure.savefig(path, dpi=200)
        pyplot.close(figure)


def plot_dots(
    dots: Sequence[tuple[str, str, float]],
    path: Path,
    *,
    title: str,
    label: str,
    bounds: Mapping[str, float] | None = None,
    log: bool = True,
    with_values: bool = False,
) -> None:
    """A dot for each value: a row for each name, a colour and a marker for each series.

    Args:
        dots: (row, series, value).
        path: the file to write.
        title: of the plot.
        label: of the axis of values.
        bounds: vertical lines, by name.
        log: whether the axis is logarithmic.
        with_values: also write each value beside its dot.
    """
    names = list(dict.fromkeys(row for row, _, _ in dots))
    series = list(dict.fromkeys(name for _, name, _ in dots))
    with _figure(path, title, (8, 1.6 + _INCHES_PER_ROW * len(names))) as axes:
        for index, name in enumerate(series):
            mine = [(value, names.index(row)) for row, owner, value in dots if owner == name]
            # Series of one row stand beside each other, not on top.
            shift = (index - (len(series) - 1) / 2) * 0.6 / len(series)
            x, y = zip(*((value, row + shift) for value, row in mine), strict=True)
            axes.scatter(x, y, s=26, label=name, edgecolors="black", linewidths=0.3, **style_of(index))
            for value, height in zip(x, y, strict=True) if with_values else ():
                axes.annotate(
                    f"{value:.3g}", (value, height), xytext=(6, 0), textcoords="offset points", fontsize=7,
                    va="center",
                )  # fmt: skip
        for (name, value), line in zip((bounds or {}).items(), ("--", ":", "-."), strict=False):
            axes.axvline(value, color="black", linestyle=line, linewidth=1, label=f"bound {value:g}, {name}")
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel=label, xscale="log" if log else "linear")
        axes.margins(x=0.18 if with_values else 0.05)
        axes.invert_yaxis()
        axes.figure.legend(loc="outside lower center", ncols=3, fontsize=8)


def plot_frontier(points: Sequence[tuple[str, float, float, bool]], path: Path, *, title: str) -> None:
    """Bits against KL, a dot for each recipe, and a line through those that no other recipe beats.

    Args:
        points: (recipe, bits, KL, whether it is on the frontier).
        path: the file to write; its suffix decides the format.
        title: of the plot.
    """
    with _figure(path, title, (8, 5)) as axes:
        best = sorted((bits, kl) for _, bits, kl, frontier in points if frontier)
        if best:
            axes.plot(*zip(*best, strict=True), color="black", linewidth=1, linestyle="--", label="frontier")
        for index, (name, bits, kl, _) in enumerate(points):
            axes.scatter(
                [bits], [kl], s=30, label=name, edgecolors="black", linewidths=0.3, **style_of(index)
            )
        axes.set(xlabel="bits of an element, scales included", ylabel="KL, nats a token", yscale="log")
        axes.figure.legend(loc="outside right upper", fontsize=8)


def plot_roofline(
    rows: Sequence[Mapping[str, Any]], ceilings: Ceilings, path: Path, *, title: str, series: Sequence[str]
) -> None:
    """Flops a byte against flops a second, under the measured ceilings.

    Args:
        rows: records of a bench; those without a time are left out.
        ceilings: of the same run.
        path: the file to write; its suffix decides the format.
        title: of the plot.
        series: the fields of a record that tell series apart.
    """
    timed = [row for row in rows if row["median_us"] is not None]
    found: dict[str, list[tuple[float, float]]] = {}
    for row in timed:
        point = (row["flops_per_s"] / row["bytes_per_s"], row["flops_per_s"] / 1e12)
        found.setdefault(", ".join(str(row[name]) for name in series if row[name] != ""), []).append(point)
    ridge = ceilings.bf16_flops_per_s / ceilings.read_bytes_per_s
    intensities = [ridge, *(x for points in found.values() for x, _ in points)]
    low, high = min(intensities) / 2, max(intensities) * 2
    with _figure(path, title, (8, 5.5)) as axes:
        axes.plot(
            [low, ridge, high],
            [low * ceilings.read_bytes_per_s / 1e12, *[ceilings.bf16_flops_per_s / 1e12] * 2],
            color="black",
            label="measured ceilings: "
            f"read {ceilings.read_bytes_per_s / 1e9:.0f} GB/s, "
            f"bf16 {ceilings.bf16_flops_per_s / 1e12:.0f} TFLOP/s",
        )
        for index, (name, points) in enumerate(sorted(found.items())):
            axes.scatter(*zip(*points, strict=True), s=26, alpha=0.8, label=name, **style_of(index))
        axes.set(xscale="log", yscale="log", xlabel="flops a byte", ylabel="TFLOP/s")
        axes.legend(fontsize=8)


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
    """Every case's error, a row for each query and cache, a colour for each place.

    The error against attention without quantisation, where there is one, has colours of its own.
    """
    dots = sorted(
        (f"{case.kind[0]} over {case.kind[1]}", f"{result.place}{against}", error.relative_l1)
        for case, result in results
        for against, error in (("", result.error), (", quantisation included", result.total))
        if error is not None
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


def plot_registers(compiled: Sequence[tuple[str, str, tuple[KernelCode, ...]]], path: Path) -> None:
    """Vector registers of every kernel with matrix instructions."""
    dots = [
        (case, f"{target} {kernel.name}", float(kernel.vgprs + kernel.agprs))
        for target, case, kernels in compiled
        for kernel in kernels
    ]
    plot_dots(dots, path, title="registers of a wave", label="VGPRs and AGPRs", log=False)
