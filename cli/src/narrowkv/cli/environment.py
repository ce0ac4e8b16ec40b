"""`narrowkv env`: shows what this machine and its installation are."""

from __future__ import annotations

from rich.text import Text

from narrowkv.cli.report import ExitCode, Report
from narrowkv.testing.machine import describe


def report_environment(report: Report) -> ExitCode:
    """Shows the report."""
    found = describe()
    for section, content in found.items():
        if not content:
            report.line(f"{section}: none")
        for index, part in enumerate(content if isinstance(content, list) else [content]):
            name = section if part is content else f"{section}[{index}]"
            for key, value in part.items():
                text = ", ".join(value) if isinstance(value, list) else str(value)
                report.line(Text.assemble((f"{name}.{key}", "cyan"), f": {text}"))
    return report.finish({"environment": found}, ExitCode.OK)
