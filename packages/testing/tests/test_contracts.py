"""The contract sets ask what they are named after."""

from __future__ import annotations

import dataclasses

import pytest

from narrowkv.testing.contracts import CONTRACT_SETS, DECODE, PREFILL, Contract

EVERY = pytest.mark.parametrize("name", list(CONTRACT_SETS))


def test_the_main_set_has_the_shape_of_the_job() -> None:
    shape = CONTRACT_SETS["glm-gqa12"].shape
    sizes = dataclasses.astuple(shape)
    assert sizes == (4, 1, 1024, 96, 8, 128)
    assert shape.gqa_ratio == 12


def test_the_main_set_asks_for_every_mixed_contract_at_every_page() -> None:
    asked = {(c.operation, c.q, c.k, c.v, c.page_size): c for c in CONTRACT_SETS["glm-gqa12"].contracts}
    for page in (1, 16, 64):
        for q in ("bf16", "fp16"):
            for cache in ("bf16", "fp8_e4m3fn", "fp8_e4m3fnuz"):
                contract = asked[DECODE, q, cache, cache, page]
                assert contract.bound == 0.002
            for k in ("fp4_e2m1", "fp8_e4m3fn"):
                assert (DECODE, q, k, "fp4_e2m1", page) in asked


def test_batch_prefill_is_asked_for_every_query() -> None:
    contracts = CONTRACT_SETS["batch-prefill"].contracts
    assert {c.operation for c in contracts} == {PREFILL}
    assert {c.q for c in contracts} == {"bf16", "fp16", "fp8_e4m3fn"}
    assert {c.page_size for c in contracts} >= {1, 16}


@EVERY
def test_no_contract_is_asked_twice(name: str) -> None:
    contracts = CONTRACT_SETS[name].contracts
    assert contracts
    assert len(set(contracts)) == len(contracts)


def test_a_contract_names_its_cache_and_function() -> None:
    contract = Contract("c", "bf16", "fp8_e4m3fn", "fp4_e2m1", 16, 0.002)
    assert contract.function == "c"
    assert contract.cache == "fp8_e4m3fn/fp4_e2m1"
