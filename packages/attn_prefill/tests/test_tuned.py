"""Rows of a tune file: which prefills take them in the place of shipped configurations, and their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import PrefillShape, batch_prefill, config, plan_prefill
from narrowkv.attn_prefill.config_tuned import PrefillChoice, choices, shape_class, splits, with_choice
from narrowkv.attn_prefill.tiles import partial_programs
from narrowkv.paged_cache import PagedKVCache
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime import get_target
from narrowkv.runtime.launch import executing
from narrowkv.runtime.tuned import TunedRow, TuneFile
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.prefill import PrefillCase

FP8 = "fp8_e4m3fn"
SHAPE = PrefillShape(
    batch=1, num_tokens=512, max_q_len=512, num_qo_heads=96, num_kv_heads=8, head_dim=128, page_size=16,
    max_seq_len=8192, kv_tokens=8192,
)  # fmt: skip
CHOICE = PrefillChoice("fused", 64, 8, 1, 16, 4)


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes plans take a configuration for the class of a shape."""

    def name(choice: PrefillChoice, shape: PrefillShape, target: str) -> None:
        named = shape_class(shape, (FP8, FP8), True)
        row = TunedRow(
            "prefill", named, asdict(choice), "", (10.0,), (8.0,), 0.0, ("8 over 8",), 1, 0, 0, 0
        )  # fmt: skip
        path = tmp_path / "tuned.json"
        TuneFile.of(get_target(target), "GPU", [row]).write(path)
        monkeypatch.setenv("NARROWKV_TUNED", str(path))

    return name


def _plan(shape: PrefillShape = SHAPE, **options: Any) -> Any:
    cache = PagedKVCache.empty(1, 16, shape.num_kv_heads, shape.head_dim, format=FP8)
    with executing(LaunchRecorder("gfx942")):
        return plan_prefill(shape, cache, **options)


def test_chunks_of_one_sequence_take_the_row_of_their_class(use: Callable[..., None]) -> None:
    shipped = _plan().config
    use(CHOICE, SHAPE, "gfx942")
    for shape in (SHAPE, replace(SHAPE, num_tokens=300, max_q_len=300, max_seq_len=5000)):
        found = _plan(shape)
        assert (found.config.kernel, found.config.block_n, found.config.num_splits) == ("fused", 64, 4)
        assert (found.config.options.num_warps, found.config.options.num_stages) == (8, 1)
        assert "tuned on this GPU" in found.explain()
        assert found.workspace_bytes() > 0
    assert shipped != found.config


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({"batch": 2}, {}), ({"num_tokens": 513, "max_q_len": 513}, {}), ({"max_seq_len": 4096}, {}),
        ({}, {"kernel": "dense"}), ({}, {"num_splits": 2}), ({}, {"batch_invariant": True}),
        ({"num_tokens": 1, "max_q_len": 1}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_other_and_forced_calls_keep_the_shipped_configuration(
    use: Callable[..., None], changed: dict[str, int], options: dict[str, Any]
) -> None:
    shape = replace(SHAPE, **changed)
    shipped = _plan(shape, **options).config
    use(CHOICE, SHAPE, "gfx942")
    assert _plan(shape, **options).config == shipped


def test_a_row_that_needs_scratch_is_left_where_there_is_none(use: Callable[..., None]) -> None:
    shipped = _plan(scratch_limit_bytes=0).config
    use(replace(CHOICE, kernel="dense"), SHAPE, "gfx942")
    assert _plan().config.kernel == "dense"
    assert "tuned" in _plan().config.why
    assert _plan(scratch_limit_bytes=0).config == shipped


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "sm90", "cpu"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_every_configuration_that_is_tried_can_be_stored_and_has_room_for_its_partial_results(
    name: str, head_dim: int
) -> None:
    target, shape = get_target(name), replace(SHAPE, head_dim=head_dim, num_tokens=2048, max_q_len=2048)
    tried = choices(target, head_dim)
    assert len(tried) == len(set(tried)) >= 2
    for choice in (*tried, *chain.from_iterable(splits(each) for each in tried[:2])):
        assert PrefillChoice(**asdict(choice)) == choice
        base = config.choose_config(
            target, shape, (FP8, FP8), q_fp8=None, scratch_fits=True, can_decode=False, kernel=choice.kernel
        )
        found = with_choice(target, shape, base, choice)
        programs = shape.row_tiles(found.block_m) * shape.num_kv_heads
        assert found.num_splits == 1 or found.num_splits * programs <= partial_programs(target, 2)
        assert not (target.is_nvidia and found.block_m >= 64 and found.block_n < 64)


@pytest.mark.parametrize("kernel", ["dense", "fused"])
def test_a_plan_with_a_row_gives_the_results_of_the_reference_and_looks_no_row_up_again(
    use: Callable[..., None], monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    case = PrefillCase.small(q_lens=(7,), lens=(300,), num_kv_heads=1, format=FP8, clean=True)
    inputs = case.inputs()
    q, cache, table = inputs.q, inputs.cache, inputs.table
    starts = torch.tensor([0, 7], dtype=torch.int32)
    use(PrefillChoice(kernel, 32, 4, 2, 0, 2), plan_prefill(q, cache, table, starts).shape, "cpu")
    plan = plan_prefill(q, cache, table, starts)
    assert "tuned on this GPU" in plan.explain()
    assert (plan.config.kernel, plan.config.num_splits) == (kernel, 2)
    first = batch_prefill(q, cache, table, starts, plan=plan)
    monkeypatch.setattr(config, "tuned_choice", lambda *_: pytest.fail("a call looks for a row"))
    again = batch_prefill(q, cache, table, starts, plan=plan)
    assert isinstance(first, torch.Tensor)
    assert isinstance(again, torch.Tensor)
    assert torch.equal(first, again)
    assert relative_l1(first, inputs.reference()[0]) < case.bound
