"""The figures of AMD code in the documentation are what the commands beside them give.

`tools/results.py --check` (test_docs.py) compares the pages with the stored rows; here rows are made again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tool_modules import load_tool

from narrowkv.testing.machine import versions
from narrowkv.testing.operations import families

ROOT = Path(__file__).resolve().parent.parent


TOOL = load_tool("amd_figures")


def _stored(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    made_with = document["versions"]["triton"]
    if versions()["triton"] != made_with:
        pytest.skip(
            f"the stored figures are of Triton {made_with}: python tools/amd_figures.py makes them again"
        )
    return document


def _row(name: str, figure: Any) -> dict[str, Any]:
    wanted = vars(figure)
    (row,) = [row for row in _stored(name)["rows"] if wanted.items() <= row.items()]
    return row


def test_every_figure_is_stored() -> None:
    for name, figures in (("amd-code", TOOL.CODE), ("amd-model", TOOL.MODELLED)):
        stored = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
        assert [{key: row[key] for key in vars(figures[0])} for row in stored] == list(map(vars, figures))


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize(
    "figure", TOOL.CODE, ids=lambda figure: f"{figure.table}-{figure.name}-{figure.target}"
)
def test_compiled_figures_are_made_again(figure: Any) -> None:
    assert TOOL.code_row(figure) == _row("amd-code", figure)


@pytest.mark.slow
@pytest.mark.parametrize("figure", TOOL.MODELLED, ids=lambda figure: f"{figure.name}-{figure.target}")
def test_modelled_figures_are_made_again(figure: Any) -> None:
    made, stored = TOOL.model_row(figure), _row("amd-model", figure)
    assert made.keys() == stored.keys()
    for key, value in made.items():
        assert value == (pytest.approx(stored[key], rel=0.01) if isinstance(value, float) else stored[key]), (
            key
        )


def test_every_family_of_every_target_is_among_them() -> None:
    names = {(figure.name, figure.target) for figure in TOOL.MODELLED}
    assert names >= {(name, target) for target in ("gfx942", "gfx950") for name in families(target)}


_FIGURE = re.compile(r"\d (?:VGPRs|TFLOP/s|TOP/s)|\d% of (?:HBM|the time that HBM)")


def test_figures_of_amd_code_are_in_generated_tables() -> None:
    """Outside of them no page gives registers, rates or shares of the model."""
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")):
        prose = re.sub(r"<!-- table .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        found = [line for line in prose.splitlines() if _FIGURE.search(line)]
        assert not found, f"{page.name}: {found}"
        assert "istory, of an earlier" not in prose, page.name
