"""A roofline plot of measured rows; needs the extra `plot`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowkv.cli.bench.ceilings import Ceilings
from narrowkv.cli.report import UnsupportedHereError


def require_matplotlib() -> None:
    """Refuses before a long run.

    Raises:
        UnsupportedHereError: saying what to install.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedHereError("--plot needs matplotlib: pip install 'narrowkv-cli[plot]'")


def plot_roofline(rows: Sequence[Mapping[str, Any]], ceilings: Ceilings, path: Path, device: str) -> None:
    """Flops a byte against flops a second, under the measured ceilings.

    Args:
        rows: records of a bench; those without a time are left out.
        ceilings: of the same run.
        path: the file to write; its suffix decides the format.
        device: for the title.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in rows if row["median_us"] is not None]
    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    intensities = [row["flops_per_s"] / row["bytes_per_s"] for row in timed]
    ridge = ceilings.bf16_flops_per_s / ceilings.read_bytes_per_s
    low, high = min([*intensities, ridge]) / 2, max([*intensities, ridge]) * 2
    axes.plot(
        [low, ridge, high],
        [low * ceilings.read_bytes_per_s / 1e12, *[ceilings.bf16_flops_per_s / 1e12] * 2],
        color="black",
        label="measured ceilings: "
        f"read {ceilings.read_bytes_per_s / 1e9:.0f} GB/s, "
        f"bf16 {ceilings.bf16_flops_per_s / 1e12:.0f} TFLOP/s",
    )
    series = sorted({(row["backend"], row["format"]) for row in timed})
    for backend, fmt in series:
        of_series = [
            (x, row["flops_per_s"] / 1e12)
            for x, row in zip(intensities, timed, strict=True)
            if (row["backend"], row["format"]) == (backend, fmt)
        ]
        axes.scatter(*zip(*of_series, strict=True), s=18, alpha=0.7, label=f"{backend}, {fmt}")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="flops a byte",
        ylabel="TFLOP/s",
        title=f"paged decode on {device}, measured",
    )
    axes.legend()
    axes.grid(which="both", alpha=0.2)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
