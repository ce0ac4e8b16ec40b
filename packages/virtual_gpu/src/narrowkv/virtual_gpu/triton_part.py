"""What Triton needs to know of the virtual GPU: where its HIP runtime is, and a hook for assembly."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from .assembly import remember_assembly

__all__ = ["install_triton", "name_hip_runtime", "skip_benchmarks"]


def name_hip_runtime(library: Path) -> None:
    """Tells Triton, by its own variable, which HIP runtime to load; before Triton looks for a driver."""
    os.environ["TRITON_LIBHIP_PATH"] = str(library)


def install_triton() -> None:
    """Registers the hook and makes failed launches say why; when Triton is imported."""
    import triton
    from triton.backends.amd.driver import HIPLauncher

    triton.knobs.runtime.kernel_load_start_hook.add(remember_assembly)
    if not hasattr(HIPLauncher.__call__, "__wrapped__"):
        HIPLauncher.__call__ = _raising_the_cause(HIPLauncher.__call__)


def skip_benchmarks() -> None:
    """Lets `triton.testing.perf_report` skip what it would time, and say so; when Triton is imported."""
    from triton.testing import Mark

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        benchmarks = self.benchmarks if isinstance(self.benchmarks, list) else [self.benchmarks]
        for benchmark in benchmarks:
            print(
                f"virtual GPU: skipped the benchmark {benchmark.plot_name}, as "
                "TRITON_VIRTUAL_GPU_SKIP_BENCHMARKS asks: times of an emulation say nothing about a GPU",
                file=sys.stderr,
            )

    Mark.run = run


def _raising_the_cause(launch: Any) -> Any:
    """A launch that raises the launch's own error.

    Triton's driver.c calls the exit hook with the error of a failed launch still set. Python then reports
    "SystemError: ... returned a result with an exception set" and has the error as its cause.
    """

    @functools.wraps(launch)
    def call(self: Any, *args: Any) -> Any:
        try:
            return launch(self, *args)
        except SystemError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None

    return call
