"""Rows of a tune file: which calls take them in the place of shipped configurations, and their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import DecodeShape, config, paged_decode, plan_decode
from narrowkv.attn_decode.config import choose_config, shape_class, with_choice
from narrowkv.attn_decode.config_tuned import DecodeChoice, choices, merges
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime import get_target
from narrowkv.runtime.tuned import TunedRow, TuneFile
from narrowkv.testing.cases.decode import DecodeCase

FP8 = "fp8_e4m3fn"
SHAPE = DecodeShape(48, 1, 96, 8, 128, 16, 6000)
CHOICE = DecodeChoice(32, 2, 1, "even", 4, 64, 4)
CASE = DecodeCase.small(lens=(70, 5, 130), num_kv_heads=1, gqa_ratio=4)


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes plans take a configuration for the class of a shape."""

    def name(choice: DecodeChoice, shape: DecodeShape, target: str) -> None:
        row = TunedRow(
            "decode", shape_class(shape, FP8, FP8, 0), asdict(choice), "", (10.0,), (8.0,), 0.0, ("1 x 1",),
            1, 0, 0, 0,
        )  # fmt: skip
        path = tmp_path / "tuned.json"
        TuneFile.of(get_target(target), "GPU", [row]).write(path)
        monkeypatch.setenv("NARROWKV_TUNED", str(path))

    return name


def _choose(shape: DecodeShape = SHAPE, **options: Any) -> config.DecodeConfig:
    return choose_config(get_target("gfx942"), shape, FP8, FP8, **options)


def test_shapes_of_a_class_take_its_row(use: Callable[..., None]) -> None:
    shipped = _choose()
    use(CHOICE, replace(SHAPE, batch=64, capacity=8192), "gfx942")
    found = _choose()
    assert found != shipped
    assert (found.block_n, found.split, found.num_items) == (32, "even", 304 * 4 // 8)
    assert (found.options.num_warps, found.merge.splits, found.merge.warps) == (2, 64, 4)
    assert "8.0 us instead of 10.0" in found.explain(SHAPE)
    assert "tuned" not in shipped.explain(SHAPE)


@pytest.mark.parametrize(
    "other",
    [{"batch": 32}, {"batch": 65}, {"capacity": 4096}, {"num_kv_heads": 4}, {"q_len": 2}, {"head_dim": 64}],
    ids=str,
)
def test_other_shapes_keep_the_shipped_configuration(use: Callable[..., None], other: dict[str, int]) -> None:
    shape = replace(SHAPE, **other)
    shipped = _choose(shape)
    use(CHOICE, SHAPE, "gfx942")
    assert _choose(shape) == shipped


@pytest.mark.parametrize(
    "forced",
    [{"batch_invariant": True}, {"split": "none"}, {"tokens_per_split": 256}, {"kernel": "decode"}],
    ids=str,
)
def test_batch_invariant_and_forced_configurations_ignore_the_file(
    use: Callable[..., None], forced: dict[str, Any]
) -> None:
    shipped = _choose(**forced)
    use(CHOICE, SHAPE, "gfx942")
    assert _choose(**forced) == shipped


def test_a_file_of_another_gpu_is_refused_when_a_plan_is_made(use: Callable[..., None]) -> None:
    use(CHOICE, SHAPE, "gfx950")
    with pytest.raises(ValueError, match="is of gfx950 with 256 compute units, and this is gfx942 with 304"):
        _choose()


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "sm90", "cpu"])
@pytest.mark.parametrize("batch", [1, 48])
def test_every_configuration_that_is_tried_can_be_stored_and_shares_out_all_keys(
    name: str, batch: int
) -> None:
    target, shape = get_target(name), replace(SHAPE, batch=batch)
    shipped = choose_config(target, shape, FP8, FP8)
    tried = choices(target, shape.head_dim, shape.capacity)
    assert len(tried) == len(set(tried))
    assert len(tried) >= (50 if name != "cpu" else 18)
    for choice in (*tried, *chain.from_iterable(merges(target, each) for each in tried[:8])):
        assert DecodeChoice(**asdict(choice)) == choice
        found = with_choice(target, shape, shipped, choice)
        assert found.num_items >= shape.batch
        assert found.block_m == shipped.block_m
        assert not (target.is_amd and found.merge_in_launch)


def test_a_plan_with_a_row_gives_the_results_of_the_reference_and_looks_no_row_up_again(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = CASE.inputs()
    q, cache, table = inputs.q, inputs.cache, inputs.table
    shape = plan_decode(q, cache, table).shape
    use(DecodeChoice(32, 4, 2, "even", 8, 16, 1), shape, "cpu")
    plan = plan_decode(q, cache, table)
    assert plan.config.split == "even"
    assert "tuned on this GPU" in plan.explain()
    first = paged_decode(q, cache, table, plan=plan)
    monkeypatch.setattr(config, "tuned_choice", lambda *_: pytest.fail("a call looks for a row"))
    again = paged_decode(q, cache, table, plan=plan)
    assert isinstance(first, torch.Tensor)
    assert isinstance(again, torch.Tensor)
    assert torch.equal(first, again)
    assert relative_l1(first, inputs.reference()[0]) < CASE.bound
