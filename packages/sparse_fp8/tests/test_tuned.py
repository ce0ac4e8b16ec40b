"""Rows of a tune file: which sparse calls take their configurations, and what those compute."""

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
from narrowkv.sparse_fp8 import RowsFormat, SparsePlan, plan_sparse, sparse_decode
from narrowkv.sparse_fp8.config import choose_splits
from narrowkv.sparse_fp8.config_tuned import SparseChoice, choices, fills, shape_class, with_choice
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.sparse import SparseCase

ROWS = RowsFormat("packed584", 64, 64, "fp8_e4m3fn", True)
SIZES = {"max_num_tokens": 64, "max_indices": 64 * 512}
PORTABLE = SparseChoice(False, 32, 8, 1, "", 2)


def _plan(target: str = "gfx942", heads: int = 64, **options: Any) -> SparsePlan:
    with executing(LaunchRecorder(target)):
        return plan_sparse(num_qo_heads=heads, prefix=ROWS, device="cpu", **{**SIZES, **options})


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes plans take a configuration for the class of a call."""

    def name(choice: SparseChoice, plan: SparsePlan, tokens: int = 64, indices: int = 64 * 512) -> None:
        named = shape_class(plan, tokens, indices)
        row = TunedRow("sparse", named, asdict(choice), "", (10.0,), (8.0,), 0.0, ("64",), 1, 0, 0, 0)
        path = tmp_path / "tuned.json"
        TuneFile.of(plan.target, "GPU", [row]).write(path)
        monkeypatch.setenv("NARROWKV_TUNED", str(path))

    return name


def test_calls_of_the_class_take_the_row(use: Callable[..., None]) -> None:
    shipped = _plan()
    use(PORTABLE, shipped)
    for sizes in ({}, {"max_num_tokens": 40, "max_indices": 40 * 300}):
        found = _plan(**sizes)
        assert (found.portable.block_k, found.portable.options.num_warps, found.portable.fill) == (32, 8, 2)
        assert found.specialised is None
        assert "tuned on this GPU" in found.explain()
        assert found.workspace_bytes() > 0


@pytest.mark.parametrize(
    "changed",
    [
        {"max_num_tokens": 65, "max_indices": 65 * 512}, {"max_indices": 64 * 256}, {"heads": 32},
        {"num_splits": 2}, {"batch_invariant": True}, {"max_num_tokens": None, "max_indices": None},
        {"query": "fp16"}, {"extend": ROWS},
    ],
    ids=str,
)  # fmt: skip
def test_other_and_forced_calls_keep_the_shipped_configuration(
    use: Callable[..., None], changed: dict[str, Any]
) -> None:
    shipped = _plan(**changed)
    use(PORTABLE, _plan())
    found = _plan(**changed)
    assert (found.portable, found.specialised) == (shipped.portable, shipped.specialised)


def test_a_row_of_the_kernel_for_the_family_leaves_the_portable_one(use: Callable[..., None]) -> None:
    shipped = _plan()
    assert shipped.specialised is not None
    use(SparseChoice(True, 32, 8, 2, "max-ilp", 0), shipped)
    found = _plan()
    assert found.specialised is not None
    assert (found.specialised.stages, found.specialised.options.num_stages) == (2, 1)
    assert found.specialised.options.llvm_fn_attrs == "amdgpu-sched-strategy=max-ilp"
    assert found.portable == shipped.portable


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "cpu"])
@pytest.mark.parametrize("heads", [16, 64])
def test_every_configuration_that_is_tried_can_be_stored_and_has_room_for_its_partial_results(
    name: str, heads: int
) -> None:
    plan = replace(_plan(name, heads), max_num_tokens=None, max_indices=None, workspace=None)
    tried = choices(plan)
    assert len(tried) == len(set(tried)) >= 2
    for choice in (*tried, *fills(tried[0])):
        assert SparseChoice(**asdict(choice)) == choice
        chosen = with_choice(plan, choice)
        config = chosen.specialised if choice.specialised else chosen.portable
        assert config is not None
        for tokens in (1, 3, 64):
            programs = tokens * config.head_blocks(heads)
            splits = choose_splits(plan.target, config, programs, 64, 0)
            assert splits == 1 or splits * tokens <= chosen._most_partials(64)
    assert with_choice(plan, tried[0]).portable == plan.portable


def test_a_call_that_was_not_planned_takes_the_row_and_gives_the_results_of_the_reference(
    use: Callable[..., None],
) -> None:
    case = SparseCase.small(layout="packed584", mode="decode")
    inputs = case.inputs()
    q, prefix = inputs.q, inputs.prefix
    assert prefix is not None
    tokens, indices = prefix.num_tokens, prefix.nnz
    plan = plan_sparse(
        num_qo_heads=16, prefix=prefix.format, device="cpu", max_num_tokens=tokens, max_indices=indices
    )
    first = sparse_decode(q, prefix)
    use(SparseChoice(False, 32, 4, 2, "", 4), plan, tokens, indices)
    tuned = plan_sparse(
        num_qo_heads=16, prefix=prefix.format, device="cpu", max_num_tokens=tokens, max_indices=indices
    )
    assert tuned.portable.block_k == 32
    o = tuned.run(q, prefix)
    assert isinstance(o, torch.Tensor)
    assert isinstance(first, torch.Tensor)
    assert relative_l1(o, inputs.reference()[0]) < case.bound
    fresh = replace(prefix, indices=prefix.indices[: prefix.nnz].clone())
    again = sparse_decode(q[:, :12].contiguous(), fresh)  # no such call was made before: its plan is new
    assert isinstance(again, torch.Tensor)
    assert relative_l1(again, inputs.reference()[0][:, :12]) < case.bound
    assert get_target("cpu") == tuned.target
