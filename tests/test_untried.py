"""GPUs that nothing has run: refused unless the user opts in; then first calls are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from narrowkv.attn_decode.plan import DecodePlan
from narrowkv.context_parallel import ShardLayout, cp_paged_decode, plan_cp_decode
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime import targets, untried
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.targets import UNTRIED, device_target, get_target
from narrowkv.sage import SagePlan
from narrowkv.sparse_fp8 import SparsePlan
from narrowkv.testing.cases import Case
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase

CASES: dict[str, Case] = {
    "decode": DecodeCase(lens=(20, 5), num_kv_heads=1, head_dim=64, seed=41),
    "prefill": PrefillCase(q_lens=(9, 3), lens=(25, 3), num_kv_heads=1, head_dim=64, seed=42),
    "append": PrefillCase(
        operation="append", q_lens=(9, 3), lens=(25, 3), num_kv_heads=1, head_dim=64, seed=43
    ),
    "append, FP4": PrefillCase(
        operation="append", format="fp4_e2m1", q_lens=(6,), lens=(22,), num_kv_heads=1, head_dim=64, seed=44
    ),
}


@pytest.fixture
def untried_cpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Makes the interpreter a target that nothing has run; counts the comparisons by plan."""
    monkeypatch.setattr(targets, "UNTRIED", {**UNTRIED, "cpu": get_target("cpu")})
    counts: dict[str, int] = {}

    def counted(kind: type, reference: Callable[..., Any]) -> Callable[..., Any]:
        def compare(**arguments: Any) -> Any:
            counts[kind.__name__] = counts.get(kind.__name__, 0) + 1
            return reference(**arguments)

        return compare

    for kind, reference in untried._references.items():
        monkeypatch.setitem(untried._references, kind, counted(kind, reference))
    return counts


@pytest.mark.parametrize("name", CASES)
def test_a_first_call_is_compared_and_gives_its_result(name: str, untried_cpu: dict[str, int]) -> None:
    inputs = CASES[name].inputs()
    result = inputs.call()
    o = result[0] if isinstance(result, tuple) else result
    expected = CASES[name].inputs().reference()[0].float()
    assert float((o.float() - expected).abs().sum() / expected.abs().sum()) < CASES[name].bound
    assert sum(untried_cpu.values()) >= 1


def test_a_rank_compares_its_own_attention(untried_cpu: dict[str, int]) -> None:
    layout = ShardLayout(world=1, rank=0, interleave=16)
    cache = PagedKVCache.empty(2, 16, 1, 64, format="bf16")
    cache.k.normal_()
    cache.v.normal_()
    whole = PageTable.from_block_table(torch.tensor([[1, 0]]), torch.tensor([20]), page_size=16)
    table, q = layout.shard_table(whole, cache.page_size), torch.randn(1, 4, 64).bfloat16()
    cp_paged_decode(q, cache, table, plan=plan_cp_decode(q, cache, table))
    assert untried_cpu == {"DecodePlan": 1}


def test_later_calls_are_not_compared(untried_cpu: dict[str, int]) -> None:
    inputs = DecodeCase(lens=(30, 7, 2), num_kv_heads=1, head_dim=64).inputs()
    inputs.call()
    inputs.call()
    assert untried_cpu == {"DecodePlan": 1}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_first_call_is_an_error(
    name: str, untried_cpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, reference in untried._references.items():
        monkeypatch.setitem(
            untried._references, kind, lambda reference=reference, **given: 2 * reference(**given)
        )
    inputs = replace(CASES[name], page_size=32).inputs()  # calls that no other test has made
    for _ in range(2):  # the next one is not trusted either
        with pytest.raises(RuntimeError, match=r"nothing had run before, is wrong: relative L1 error 0\.5"):
            inputs.call()


def test_an_append_that_stores_other_bytes_is_an_error(
    untried_cpu: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, reference in untried._references.items():

        def other(reference: Any = reference, **given: Any) -> Any:
            expected = reference(**given)
            if "k_new" in given:
                given["cache"].v.view(torch.uint8)[...] ^= 1
            return expected

        monkeypatch.setitem(untried._references, kind, other)
    with pytest.raises(RuntimeError, match="of the stored bytes differ"):
        CASES["append"].inputs().call()


def test_a_gpu_is_refused_unless_the_user_opts_in(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(gcnArchName="gfx1201", multi_processor_count=28)
    monkeypatch.setattr(torch.version, "hip", "7.14")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    targets._gpu_target.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match="nothing has run it: set NARROWKV_UNTRIED_GPU=1"):
            device_target(0)
        monkeypatch.setenv("NARROWKV_UNTRIED_GPU", "1")
        found = device_target(0)
        assert (found.name, found.compute_units, found.is_untried, found.is_wave32) == (
            "gfx1201",
            28,
            True,
            True,
        )
    finally:
        targets._gpu_target.cache_clear()


@pytest.mark.parametrize("kind", [SagePlan, SparsePlan])
def test_operations_whose_first_calls_are_not_compared_are_refused(kind: type) -> None:
    gpu = torch.device("cuda")
    with pytest.raises(UnsupportedError, match=f"{kind.__name__} is not for gfx1201.*AppendPlan, DecodePlan"):
        untried.refuse_untried(kind, UNTRIED["gfx1201"], gpu)
    untried.refuse_untried(kind, UNTRIED["gfx1201"], torch.device("cpu"))
    untried.refuse_untried(kind, get_target("gfx942"), gpu)
    untried.refuse_untried(DecodePlan, UNTRIED["gfx1201"], gpu)
