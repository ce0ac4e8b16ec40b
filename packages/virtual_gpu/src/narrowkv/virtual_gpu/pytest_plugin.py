"""With TRITON_VIRTUAL_GPU set, tests find an AMD GPU; without it this plugin does nothing.

pytest loads it by its entry point. Where the package is not installed: `pytest -p narrowkv.virtual_gpu.pytest_plugin`.
"""

from __future__ import annotations

from typing import Any

from . import current, install_from_environment

install_from_environment()


def pytest_report_header() -> str | None:
    """The line that names the GPU."""
    gpu = current()
    if gpu is None:
        return None
    checks = ", checked for races, uninitialised values, waits and hazards" if gpu.check else ""
    return f"virtual GPU: {gpu.count} x {gpu.chip.name} ({gpu.chip.arch}), {gpu.chip.compute_units} compute units{checks}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The number of launches of this process."""
    gpu = current()
    if gpu is not None and gpu.totals.launches:
        totals = gpu.totals
        terminalreporter.write_line(
            f"virtual GPU: {totals.launches} launches, {totals.wave_instructions:.3g} wave instructions"
        )
