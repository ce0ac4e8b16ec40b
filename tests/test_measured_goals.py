"""The table of goals that a GPU measures: its calls are right, and each line has a name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tool_modules import load_tool

from narrowkv.runtime.launch import recording
from narrowkv.testing.traffic import LayerStep

TOOL = load_tool("measured_goals")
STEPS = [line for line in TOOL.lines() if isinstance(line.step, LayerStep)]


def test_each_line_and_choice_has_a_name_of_its_own() -> None:
    for names in (
        [line.name for line in TOOL.lines()],
        *([choice[0] for choice in line.choices] for line in STEPS),
    ):
        assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.sampled(most=4)
@pytest.mark.parametrize("line", STEPS, ids=lambda line: line.name)
def test_a_line_s_calls_are_right(line: Any, capsys: pytest.CaptureFixture[str]) -> None:
    few = replace(line, choices=line.choices[:1] + line.choices[-2:])
    assert TOOL.rehearse(TOOL.Calls("cpu", "all"), [few]) == 0
    assert capsys.readouterr().out.count("pass") >= 1


def test_a_tile_that_is_tried_is_the_one_that_is_launched() -> None:
    line = next(line for line in STEPS if line.name == "4 tokens of 64 over 8192, K8V4")
    small = replace(line, step=line.step.rehearsal(), choices=line.choices[-1:])
    with recording("gfx942") as recorder:
        for _, call in TOOL.Calls("cpu", "all").of(small):
            call.prepare()()
    (_, _, _, tile), (bound, _) = line.choices[-1], next(iter(recorder.found.values()))
    assert (bound.options.num_warps, bound.options.num_stages) == (tile.warps, tile.stages)
    assert tuple(bound.constexprs["BLOCKS"])[:2] == (tile.rows, tile.keys)
