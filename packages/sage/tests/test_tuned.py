"""Rows of a tune file: which Sage plans take their configurations, and what those plans compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime import get_target
from narrowkv.runtime.launch import executing
from narrowkv.runtime.tuned import TunedRow, TuneFile
from narrowkv.sage import SagePlan, SageShape, plan_sage, sage_attention, sage_attention_reference
from narrowkv.sage.config import choose_config
from narrowkv.sage.config_tuned import SageChoice, choices, orders, shape_class, with_choice
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.sage import BOUND

SHAPE = SageShape(1, 4096, 4096, 32, 32, 128, False)


def _plan(shape: SageShape = SHAPE, target: str = "gfx942", **options: Any) -> SagePlan:
    with executing(LaunchRecorder(target)):
        return plan_sage(shape, device="cpu", **options)


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes plans take a configuration for the class of a plan."""

    def name(choice: SageChoice, plan: SagePlan) -> None:
        named = shape_class(plan.shape, plan.options)
        row = TunedRow("sage", named, asdict(choice), "", (10.0,), (8.0,), 0.0, ("4096",), 1, 0, 0, 0)
        path = tmp_path / "tuned.json"
        TuneFile.of(plan.target, "GPU", [row]).write(path)
        monkeypatch.setenv("NARROWKV_TUNED", str(path))

    return name


def test_plans_of_the_class_take_the_row(use: Callable[..., None]) -> None:
    shipped = _plan()
    choice = replace(SageChoice.of(shipped.config), block_n=128, strategy="max-ilp", xcd_rows=4)
    use(choice, shipped)
    for tokens in (4096, 2500):
        found = _plan(replace(SHAPE, q_tokens=tokens, k_tokens=tokens))
        assert SageChoice.of(found.config) == choice
        assert "tuned on this GPU" in found.explain()
    assert SageChoice.of(shipped.config) != choice


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({"q_tokens": 4097}, {}), ({"k_tokens": 2048}, {}), ({"batch": 2}, {}), ({"num_kv_heads": 8}, {}),
        ({}, {"causal": "bottom_right"}), ({}, {"qk_dtype": "fp8"}), ({}, {"smooth_q": True}),
        ({}, {"block_sizes": (128, 128)}), ({}, {"window": (64, 0)}),
    ],
    ids=str,
)  # fmt: skip
def test_other_calls_keep_the_shipped_configuration(
    use: Callable[..., None], changed: dict[str, int], options: dict[str, Any]
) -> None:
    shape = replace(SHAPE, **changed)
    shipped = _plan(shape, **options)
    use(replace(SageChoice.of(_plan().config), xcd_rows=4), _plan())
    assert _plan(shape, **options).config == shipped.config


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "gfx90a", "sm90", "cpu"])
def test_every_configuration_that_is_tried_can_be_stored(name: str) -> None:
    target = get_target(name)
    shipped = choose_config(target)
    tried = choices(target, shipped)
    assert len(tried) == len(set(tried)) >= 2
    assert with_choice(shipped, tried[0]) == shipped
    for choice in (*tried, *orders(tried[0])):
        assert SageChoice(**asdict(choice)) == choice
        assert SageChoice.of(with_choice(shipped, choice)) == choice


def test_a_call_that_was_not_planned_takes_the_row_and_gives_the_results_of_the_reference(
    use: Callable[..., None],
) -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 200, 3, 64, generator=random).bfloat16() for _ in range(3))
    plan = plan_sage(q, k)
    use(replace(SageChoice.of(plan.config), block_m=64, block_n=64), plan)
    tuned = plan_sage(q, k)
    assert (tuned.config.block_m, tuned.config.block_n) == (64, 64)
    planned, free = tuned.run(q, k, v), sage_attention(q, k, v)
    assert isinstance(planned, torch.Tensor)
    assert isinstance(free, torch.Tensor)
    assert torch.equal(planned, free)
    expected = sage_attention_reference(q, k, v)
    assert isinstance(expected, torch.Tensor)
    assert relative_l1(planned, expected) < BOUND
