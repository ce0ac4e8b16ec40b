"""`tools/measured_goals.py`: its calls, how shards share its lines, what verdicts compare."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tool_modules import load_tool

from narrowkv.testing.bench.traffic import LayerStep

TOOL = load_tool("measured_goals")
LINES = TOOL.lines()
STEPS = [line for line in LINES if isinstance(line.work, LayerStep)]


def test_each_line_and_choice_has_a_name_of_its_own() -> None:
    for names in ([line.name for line in LINES], *([choice[0] for choice in line.choices] for line in STEPS)):
        assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.sampled(most=4)
@pytest.mark.parametrize("line", STEPS, ids=lambda line: line.name)
def test_a_line_s_calls_are_right(line: Any, capsys: pytest.CaptureFixture[str]) -> None:
    few = replace(line, choices=line.choices[:1] + line.choices[-2:])
    assert TOOL.rehearse(TOOL.Calls("cpu", "all"), [few]) == 0
    assert capsys.readouterr().out.count("pass") >= 1


def test_shards_have_every_line_once_and_lines_beside_those_they_are_compared_with() -> None:
    shards = [TOOL.shard(LINES, i, 4) for i in range(4)]
    assert sorted(line.name for shard in shards for line in shard) == sorted(line.name for line in LINES)
    names = [{line.name for line in shard} for shard in shards]
    every = {line.name for line in LINES}
    for line in LINES:
        if line.goal is not None and line.goal.of in every:
            assert any({line.name, line.goal.of} <= shard for shard in names)


def rows_of(line: str, **medians: float) -> list[dict[str, Any]]:
    return [
        {
            "line": line,
            "choice": choice,
            "is_peer": choice == "peer",
            "median_us": us,
            "ratio_to_floor": us / 10,
        }
        for choice, us in medians.items()
    ]


@pytest.mark.parametrize(
    ("goal", "reached", "met"),
    [
        (TOOL.Goal(12, "us"), 12.0, True),
        (TOOL.Goal(1.1), 1.2, False),
        (TOOL.Goal(1.0, "the fastest peer"), 0.6, True),
        (TOOL.Goal(1.1, "other"), 1.2, False),
        (TOOL.Goal(0.5, "base"), 0.5, True),
    ],
)
def test_a_verdict_compares_the_own_call_with_what_the_goal_names(
    goal: Any, reached: float, met: bool
) -> None:
    chosen = [
        TOOL.Line("line", goal, ("x", True), own="own"),
        TOOL.Line("base", None, ("x", True), own="own"),
    ]
    rows = rows_of("line", own=12.0, other=10.0, peer=20.0) + rows_of("base", own=24.0)
    (verdict,) = TOOL.judged(chosen, rows)
    assert (verdict["reached"], verdict["met"]) == (reached, met)
    assert (verdict["best_choice"], verdict["best_peer"]) == (["other", 10.0], ["peer", 20.0])


def test_documents_of_several_kinds_of_gpus_are_not_merged() -> None:
    empty: dict[str, Any] = {"rows": [], "ceilings": {}}
    documents = [{**empty, "device": name} for name in ("H100", "H200")]
    with pytest.raises(ValueError, match="one kind of GPU"):
        TOOL.merged(documents, "")
