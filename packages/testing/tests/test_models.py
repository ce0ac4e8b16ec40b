"""The rows of `narrowkv probe models`: every call is one of the cases, and what comes of it is an answer."""

from __future__ import annotations

import pytest

from narrowkv.quant.accuracy import compare
from narrowkv.testing import models
from narrowkv.testing.cases import CaseError, parse_case
from narrowkv.testing.checking import CaseResult
from narrowkv.testing.models import (
    EXACT,
    MODELS,
    RANKS,
    REFUSED,
    WRONG,
    ModelTask,
    Need,
    all_tasks,
    answer,
    tasks_of,
)
from narrowkv.testing.operations import OPERATIONS

MAY_BE_MISSING = {"candidate_topk"}  # operations that not every version has


def test_the_rows_name_models_once_and_say_where_their_sizes_are_public() -> None:
    names = [model.name for model in MODELS]
    assert len(set(names)) == len(names)
    families = ("GLM-4.5", "GLM-5", "DeepSeek-V3.2", "DeepSeek-V4-", "DeepSeek-V4.1", "Kimi-K3", "Qwen3.8",
                "Llama-4", "gpt-oss", "Gemma-4")  # fmt: skip
    assert all(any(name.startswith(family) for name in names) for family in families)
    for model in MODELS:
        assert model.source
        assert model.needs
        assert len({need.what for need in model.needs}) == len(model.needs)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_call_is_a_case_with_the_heads_of_a_rank(model: models.Model) -> None:
    for need in model.needs:
        for ranks in RANKS:
            line = need.line(ranks)
            assert line is not None, "heads of these models are multiples of 8"
            if need.operation in MAY_BE_MISSING - set(OPERATIONS):
                continue
            kind = OPERATIONS[need.operation].cases.case
            if "v_head_dim" in line and not hasattr(kind, "v_head_dim"):
                with pytest.raises(CaseError, match="v_head_dim"):
                    parse_case(kind, line)
                continue
            case = parse_case(kind, line)
            if hasattr(case, "gqa_ratio"):
                assert case.gqa_ratio * case.num_kv_heads == need.heads // ranks
                assert case.num_kv_heads == max(need.kv_heads // ranks, 1)
            elif need.heads:
                assert case.num_qo_heads == need.heads // ranks


def test_ranks_that_do_not_divide_the_heads_have_no_call() -> None:
    need = Need("decode", "", "kv_heads={kv},ratio={ratio}", heads=12, kv_heads=2)
    assert list(tasks_of(need, "cpu")) == [1, 2, 4]
    assert need.line(4) == "kv_heads=1,ratio=3"


def test_calls_that_models_have_in_common_are_made_once() -> None:
    tasks = all_tasks()
    assert len(set(tasks)) == len(tasks)
    assert len(tasks) < sum(len(tasks_of(need, "cpu")) for model in MODELS for need in model.needs)


SMALL = ModelTask("decode", "kv_heads=1,ratio=3,head_dim=64,lens=33+5", "cpu")


def test_a_call_is_exact_refused_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answer(SMALL)
    assert found.status == EXACT
    assert found.relative_l1 is not None
    assert 0 < found.relative_l1 < 0.002
    for operation, line, why in (
        ("nothing", "", "narrowkv has no operation nothing"),
        ("decode", "wings=2", "decode has no wings=2"),
        ("decode", "head_dim=1024,lens=5", "head_dim must be"),
    ):
        refused = answer(ModelTask(operation, line, "cpu"))
        assert refused.status == REFUSED
        assert why in refused.detail

    def off(case: object, *_: object) -> CaseResult:
        import torch

        return CaseResult("", compare(torch.ones(2), torch.zeros(2)), 0.0, False, "far off")

    monkeypatch.setattr(models, "run_case", off)
    assert answer(SMALL).status == WRONG
    assert answer(SMALL).detail == "far off"

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(models, "run_case", broken)
    assert answer(SMALL) == models.ModelAnswer(WRONG, "RuntimeError: a defect")
