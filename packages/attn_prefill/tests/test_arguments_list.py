"""One list of arguments: every way into an operation has its keywords, and refuses others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import (
    batch_prefill,
    batch_prefill_reference,
    plan_append,
    plan_prefill,
    prefill_append,
    prefill_append_reference,
)
from narrowkv.attn_prefill.arguments import APPEND, PREFILL, AppendOptions, Arguments, PrefillOptions
from narrowkv.attn_prefill.torch_ops import traced_append, traced_prefill
from narrowkv.testing.cases.prefill import PrefillCase


@pytest.mark.parametrize("operation", [batch_prefill, prefill_append])
def test_the_list_has_the_keywords_of_the_operation(operation: Callable[..., Any]) -> None:
    parameters = inspect.signature(operation).parameters.values()
    named = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert named <= {"plan", "fp8_compute"}, "these choose the plan; the others are of the list"
    (known,) = (each for each in (PREFILL, APPEND) if each.name == operation.__name__)
    assert known.keywords <= Arguments._field_defaults.keys()
    both = PrefillOptions.__annotations__ | AppendOptions.__annotations__
    assert both.keys() | {"k_new", "v_new"} == Arguments._field_defaults.keys()


@pytest.mark.parametrize("appends", [False, True])
def test_an_unknown_keyword_is_refused_everywhere(appends: bool) -> None:
    if appends:
        q, k, v, cache, table, starts, _ = PrefillCase.append().build_append()
        call, plan = (q, k, v, cache, table, starts), plan_append(q, cache, table, starts)
        ways = (prefill_append, plan.run, prefill_append_reference, traced_append)
    else:
        call = PrefillCase.small().build()
        ways = (batch_prefill, plan_prefill(*call).run, batch_prefill_reference, traced_prefill)
    wrong: dict[str, Any] = {"causal" if appends else "rope": None}
    for way in ways:
        for options in (wrong, {"out_dtype": torch.float32, "window": 3}):
            with pytest.raises(TypeError, match="got an unexpected keyword argument"):
                way(*call, **options)
