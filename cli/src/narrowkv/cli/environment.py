"""`narrowkv env`: shows what this machine and its installation are."""

from __future__ import annotations

import torch
from rich.text import Text

from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError
from narrowkv.testing.machine import describe
from narrowkv.testing.masked_loads import masked_load_errors


def report_environment(report: Report, probe: bool = False) -> ExitCode:
    """Shows the report.

    Args:
        report: where it goes.
        probe: also run kernels that show faults of the compiler.

    Raises:
        UnsupportedHereError: there is no GPU to probe.
    """
    found = describe()
    if probe:
        if not torch.cuda.is_available():
            raise UnsupportedHereError(f"--probe needs a GPU; torch {torch.__version__} sees none")
        found["probes"] = {"wrong elements of masked loads": masked_load_errors()}
    for section, content in found.items():
        if not content:
            report.line(f"{section}: none")
        for index, part in enumerate(content if isinstance(content, list) else [content]):
            name = section if part is content else f"{section}[{index}]"
            for key, value in part.items():
                text = ", ".join(value) if isinstance(value, list) else str(value)
                report.line(Text.assemble((f"{name}.{key}", "cyan"), f": {text}"))
    wrong = any(found.get("probes", {}).values())
    return report.finish({"environment": found}, ExitCode.NUMERICAL if wrong else ExitCode.OK)
