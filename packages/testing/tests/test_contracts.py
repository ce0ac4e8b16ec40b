"""The contract sets ask what they are named after, and what they ask holds."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from narrowkv.testing import operations
from narrowkv.testing.operation import Contract, SampledLaunch
from narrowkv.testing.operations import BATCH_PREFILL as PREFILL
from narrowkv.testing.operations import PAGED_DECODE as DECODE
from narrowkv.testing.operations import SPARSE_DECODE, contract_sets, sample
from narrowkv.testing.operations import SPARSE_PREFILL_FP8 as SPARSE_FP8
from narrowkv.testing.probing import PASS, Task, run_task

SPARSE = contract_sets()["dsv4-sparse"]


def test_the_main_set_asks_for_every_mixed_contract_at_every_page() -> None:
    shape = contract_sets()["glm-gqa12"].shape
    assert dataclasses.astuple(shape) == (4, 1, 1024, 96, 8, 128)
    assert shape.gqa_ratio == 12
    asked = {(c.operation, c.q, c.k, c.v, c.page_size): c for c in contract_sets()["glm-gqa12"].contracts}
    for page in (1, 16, 64):
        for q in ("bf16", "fp16"):
            for cache in ("bf16", "fp8_e4m3fn", "fp8_e4m3fnuz"):
                assert asked[DECODE, q, cache, cache, page].bound == 0.002
            for k in ("fp4_e2m1", "fp8_e4m3fn"):
                assert (DECODE, q, k, "fp4_e2m1", page) in asked


def test_batch_prefill_is_asked_for_every_query() -> None:
    contracts = contract_sets()["batch-prefill"].contracts
    assert {c.operation for c in contracts} == {PREFILL}
    assert {c.q for c in contracts} == {"bf16", "fp16", "fp8_e4m3fn"}
    assert {c.page_size for c in contracts} >= {1, 16}


@pytest.mark.parametrize("name", list(contract_sets()))
def test_no_contract_is_asked_twice(name: str) -> None:
    contracts = contract_sets()[name].contracts
    assert contracts
    assert len(set(contracts)) == len(contracts)


def test_a_contract_names_its_cache_and_function() -> None:
    contract = Contract("c", "bf16", "fp8_e4m3fn", "fp4_e2m1", 16, 0.002)
    assert (contract.function, contract.cache) == ("c", "fp8_e4m3fn/fp4_e2m1")


def test_the_sparse_set_asks_for_every_mode_and_both_queries() -> None:
    asked = {(c.operation, c.variant, c.q, c.k) for c in SPARSE.contracts}
    assert (SPARSE_FP8, "fused", "bf16", "fp8_e4m3fn") in asked
    assert (SPARSE_FP8, "fused", "fp8_e4m3fn", "fp8_e4m3fn") in asked
    assert (SPARSE_FP8, "prepass", "bf16", "fp8_e4m3fn") in asked
    assert any(operation == SPARSE_DECODE for operation, *_ in asked)
    assert all(c.bound <= (0.02 if c.q.startswith("fp8") else 0.004) for c in SPARSE.contracts)


@pytest.mark.parametrize("index", range(len(SPARSE.contracts)))
def test_a_sparse_contract_holds_on_the_cpu(index: int) -> None:
    shape = replace(SPARSE.shape, q_len=2, context=40, num_qo_heads=16)
    (answer,), _ = run_task(Task(SPARSE.contracts[index], shape, place="cpu"))
    assert answer.status == PASS, answer.detail
    assert answer.kv_bytes_per_token == (1024 if SPARSE.contracts[index].k == "bf16" else 583)


def test_a_sparse_contract_is_compiled_and_a_sample_of_it_emulated() -> None:
    contract = next(c for c in SPARSE.contracts if c.variant == "fused" and c.q == "bf16")
    shape = replace(SPARSE.shape, q_len=5, context=20, num_qo_heads=16)
    (answer,), compiled = run_task(Task(contract, shape, target="gfx942", emulate=True))
    assert compiled is not None
    assert compiled.status == PASS, compiled.detail
    assert answer.status == PASS, answer.detail
    assert answer.sample is not None
    assert (answer.sample.workgroups, answer.sample.launched) == (3, 5)


def test_samples_of_a_split_sparse_call_fit_together() -> None:
    found = list(sample(SampledLaunch("_sparse_fused_kernel", (6, 3, 1), {})))
    assert found == [(5, 0, 0), (5, 1, 0), (5, 2, 0)]
    rows = list(sample(SampledLaunch("_merge_sparse_kernel", (96, 1, 1), {})))
    assert rows[0] == (88, 0, 0)
    assert rows[-1] == (95, 0, 0)
    kernels = {"_sparse_16bit_kernel", "_sparse_fused_kernel", "_merge_sparse_kernel"}
    assert kernels <= set(operations.listed())
