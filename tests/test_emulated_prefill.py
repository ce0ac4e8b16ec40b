"""Prefill's own gfx942 and gfx950 machine code, run on the CPU, against the fp32 reference."""

from __future__ import annotations

from dataclasses import replace
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
from narrowkv.attn_prefill.cases import PrefillCase, PrefillInputs
from narrowkv.paged_cache import CacheFormat
from narrowkv.paged_cache.cases import copy_cache, differing_bytes
from narrowkv.quant import KeyTransform
from narrowkv.runtime.launch import executing
from narrowkv.runtime.toolchain import TRITON
from narrowkv.testing.emulation import EmulateExecutor

pytestmark = pytest.mark.slow  # about two minutes together

both_targets = pytest.mark.parametrize("target", ["gfx942", "gfx950"])
P, A = PrefillCase.small, PrefillCase.append
SMALL: dict[str, Any] = {"q_lens": (3, 25), "lens": (20, 40), "num_kv_heads": 1}
K8V4 = CacheFormat(k="fp8_e4m3fn", v="fp4_e2m1")

BATCH: dict[str, tuple[PrefillCase, str | None, dict[str, Any]]] = {
    "dense, OCP": (P(**SMALL), "dense", {}),
    "dense, bf16, a window": (P(format="bf16", **SMALL), "dense", {"window_left": 9}),
    "dense, K FP8 and V FP4, fp16 queries": (P(format=K8V4, q_dtype=torch.float16, **SMALL), "dense", {}),
    "fused, OCP, ragged, page 3": (P(page_size=3, ragged=True, **SMALL), "fused", {}),
    "fused, FNUZ, descale of each token, no mask": (
        P(format="fp8_e4m3fnuz", granularity="token_head", **SMALL), "fused", {"causal": False},
    ),
    "fused, bf16, soft cap": (P(format="bf16", **SMALL), "fused", {"logits_soft_cap": 3.0}),
    "fused, FP4, page 1": (P(format="fp4_e2m1", page_size=1, layout="tokens", **SMALL), "fused", {}),
    "fused, FP4, E4M3 scales": (P(format="fp4_e2m1", scale_format="e4m3", **SMALL), "fused", {}),
    "fused, INT4": (P(format="int4", **SMALL), "fused", {}),
    "dense, K INT8, V INT4": (
        P(format=CacheFormat("int8", "int4"), granularity="token_head", **SMALL), "dense", {}
    ),
    "head_dim 80": (P(head_dim=80, **SMALL), "fused", {}),
    "more queries than keys": (P(q_lens=(9, 1), lens=(4, 0), num_kv_heads=1), "dense", {}),
}  # fmt: skip


def _error(o: torch.Tensor, expected: torch.Tensor) -> float:
    assert not bool(o.isnan().any())
    return float((o.float() - expected).abs().sum() / expected.abs().sum())


@both_targets
@pytest.mark.parametrize("name", BATCH)
def test_batch_prefill_machine_code_agrees_with_the_reference(name: str, target: str) -> None:
    workload, kernel, options = BATCH[name]
    q, cache, table, starts = workload.build()
    out = torch.full_like(q, torch.nan)
    executor = EmulateExecutor(target, detect_hazards=True)
    with executing(executor):
        plan = plan_prefill(q, cache, table, starts, kernel=kernel)
        o, lse = batch_prefill(q, cache, table, starts, out=out, return_lse=True, plan=plan, **options)
    expected, expected_lse = batch_prefill_reference(q, cache, table, starts, return_lse=True, **options)
    assert _error(o, expected) <= 0.002
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    assert sum(run.result.counts.mfma_flops for run in executor.runs) > 0


LARGE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "head_dim 64, splits": ({"head_dim": 64}, {}, {"num_splits": 2}),
    "bf16, a window": ({"format": "bf16"}, {"window_left": 90}, {}),
    "bf16, fp16 queries": ({"format": "bf16", "q_dtype": torch.float16}, {}, {}),
    "descale of each key, soft cap": ({"granularity": "token_head"}, {"logits_soft_cap": 3.0}, {}),
}  # fmt: skip


@both_targets
@pytest.mark.parametrize("name", LARGE)
def test_tiles_of_128_rows_agree_with_the_reference(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are for calls with a tile for every compute unit, which would take the emulator long."""
    monkeypatch.setattr("narrowkv.attn_prefill.tiles.units_of", lambda target: 1)
    axes, options, forced = LARGE[name]
    sizes: dict[str, Any] = {"q_lens": (40, 3), "lens": (260, 40), "num_kv_heads": 1, "gqa_ratio": 8}
    q, cache, table, starts = P(**{**sizes, "head_dim": 128, **axes}).build()
    out = torch.full_like(q, torch.nan)
    with executing(EmulateExecutor(target, detect_hazards=True)):
        plan = plan_prefill(q, cache, table, starts, kernel="dense", **forced)
        o, lse = batch_prefill(q, cache, table, starts, out=out, return_lse=True, plan=plan, **options)
    assert plan.config.block_m == 128
    expected, expected_lse = batch_prefill_reference(q, cache, table, starts, return_lse=True, **options)
    assert _error(o, expected) <= 0.002
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)


take_turns = pytest.mark.skipif(TRITON < (3, 8), reason="waves take turns from Triton 3.8 on")
TURNS: dict[str, Any] = {"num_kv_heads": 1, "gqa_ratio": 8, "head_dim": 128}
APPEND_IN_TURNS: dict[str, Any] = {"operation": "append", "kernel": "append_then_attend"}
IN_TURNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"window_left": 150},
    "no mask": {"causal": False},
    "FP8 queries": {"q_dtype": torch.float8_e4m3fn},
    "bf16": {"format": "bf16"},
    "append": APPEND_IN_TURNS,
    "append, a descale of each head, a window": {
        **APPEND_IN_TURNS, "granularity": "head", "window_left": 150,
    },
}  # fmt: skip


def _run_in_turns(
    inputs: PrefillInputs, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(o, lse)` of a call on gfx950 in tiles of 256 rows, for any number of tiles."""
    monkeypatch.setattr("narrowkv.attn_prefill.tiles.units_of", lambda target: 1)
    executor = EmulateExecutor("gfx950", detect_races=True, detect_hazards=True)
    with executing(executor):
        o, lse = inputs.call()
    assert executor.runs[-1].artifact.name == "_cdna_prefill_kernel"
    return o, lse


@take_turns
@pytest.mark.parametrize("name", IN_TURNS)
def test_waves_that_take_turns_agree_with_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of waves reads what the other one has copied."""
    case = {"kernel": "dense", "q_lens": (70, 3), "lens": (400, 40), **TURNS, **IN_TURNS[name]}
    inputs = P(**case).inputs()
    o, lse = _run_in_turns(inputs, monkeypatch)
    expected, expected_lse = inputs.reference()
    assert _error(o, expected) <= 0.002
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    assert not inputs.wrong_bytes()


@take_turns
def test_waves_take_turns_beside_a_decode_of_the_same_append(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowkv.attn_prefill.cost._most_together", lambda *_: 1)
    inputs = P((100, 1), (400, 40), operation="append", **TURNS).inputs()
    o, lse = _run_in_turns(inputs, monkeypatch)
    assert [part.kernel for part in inputs.plan().config.few] == ["split"]
    expected, expected_lse = inputs.reference()
    assert _error(o, expected) <= 0.002
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    assert not inputs.wrong_bytes()


@take_turns
@pytest.mark.parametrize("window", [-1, 150])
@pytest.mark.parametrize("way", [{"kernel": "dense"}, APPEND_IN_TURNS], ids=["prefill", "append"])
def test_values_of_any_size_while_waves_take_turns(
    way: dict[str, Any], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of values have powers of two far apart, and each row takes the values of one block."""
    old, new = 384, 66
    inputs = P((new,), (old + new,), format="bf16", window_left=window, **TURNS, **way).inputs()
    block = torch.arange(old + new) // 64
    factor = torch.tensor([40, -30, 20, 9, -9, 0, -60, 33]).exp2()[block][:, None, None].bfloat16()
    mark = torch.eye(8, dtype=torch.bfloat16)
    for cache in filter(None, (inputs.cache, inputs.wanted)):
        page = inputs.table.page_ids[0, torch.arange(old + new) // cache.page_size].long()
        slot = torch.arange(old + new) % cache.page_size
        k, v = cache.logical()
        k[page, slot, :, :8] = 12 * mark[block][:, None]
        v[page, slot] *= factor
    if inputs.new:
        k_new, v_new = inputs.new
        k_new[:, :, :8] = 12 * mark[block[old:]][:, None]
        v_new *= factor[old:]
    inputs.q[:, :, :8] = 80 * mark[torch.arange(new) % 8][:, None]
    o, lse = _run_in_turns(inputs, monkeypatch)
    expected, expected_lse = inputs.reference()
    error = (o.float() - expected).abs().sum(-1) / expected.abs().sum(-1)
    assert float(error.max()) <= 0.004
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)


@both_targets
@pytest.mark.parametrize(("kernel", "splits"), [("fused", 1), ("fused", 3), ("dense", 1), ("dense", 2)])
def test_fp8_queries_in_machine_code(
    target: str, kernel: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrowkv.attn_prefill.tiles.units_of", lambda target: 1)
    large = {"gqa_ratio": 8, "head_dim": 128} if splits == 1 else {}
    kinds = ["fp8_e4m3fn", "fp8_e4m3fnuz"] if target == "gfx942" else ["fp8_e4m3fn"]
    for fmt in kinds:
        dtype = torch.float8_e4m3fn if fmt == "fp8_e4m3fn" else torch.float8_e4m3fnuz
        q, cache, table, starts = P(format=fmt, q_dtype=dtype, **SMALL, **large).build()
        for clean in (True, False):
            held = replace(cache, negative_zero_free=clean)
            with executing(EmulateExecutor(target, detect_hazards=True)):
                plan = plan_prefill(q, held, table, starts, num_splits=splits, kernel=kernel)
                o = batch_prefill(q, held, table, starts, plan=plan, q_descale=0.5)
            expected = batch_prefill_reference(q, cache, table, starts, q_descale=0.5)
            assert isinstance(o, torch.Tensor)
            assert isinstance(expected, torch.Tensor)
            assert _error(o, expected) <= (0.02 if kernel == "fused" else 0.002)


APPEND: dict[str, tuple[PrefillCase, dict[str, Any]]] = {
    "OCP, a chunk that begins inside a page": (A(**SMALL), {}),
    "FNUZ, rope": (A(format="fp8_e4m3fnuz", rope="neox", **SMALL), {}),
    "bf16, fp16 queries": (A(format="bf16", q_dtype=torch.float16, **SMALL), {}),
    "descale of each token, page 1": (
        A(granularity="token_head", page_size=1, layout="tokens", **SMALL), {},
    ),
    "FP4": (A(format="fp4_e2m1", **SMALL), {}),
    "FP4, E4M3 scales": (A(format="fp4_e2m1", scale_format="e4m3", **SMALL), {}),
    "K INT8, V INT4, rope": (
        A(format=CacheFormat("int8", "int4"), granularity="token_head", rope="neox", **SMALL), {},
    ),
    "INT4": (A(format="int4", **SMALL), {}),
    "vectorised, a window": (A(layout="vectorised", **SMALL), {"window_left": 8}),
}  # fmt: skip


@both_targets
@pytest.mark.parametrize("name", APPEND)
def test_append_machine_code_attends_and_stores_byte_for_byte(name: str, target: str) -> None:
    workload, options = APPEND[name]
    q, k_new, v_new, cache, table, starts, rope = workload.build_append()
    _, _, _, wanted, _, _, _ = workload.build_append()
    with executing(EmulateExecutor(target, detect_hazards=True)):
        o, lse = prefill_append(q, k_new, v_new, cache, table, starts, rope=rope, return_lse=True, **options)
    expected, expected_lse = prefill_append_reference(
        q, k_new, v_new, wanted, table, starts, rope=rope, return_lse=True, **options
    )
    assert _error(o, expected) <= 0.002
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    assert not differing_bytes(cache, wanted)


@both_targets
@pytest.mark.parametrize("kernel", ["fused", "append_then_attend"])
def test_an_append_to_transformed_keys_in_machine_code(kernel: str, target: str) -> None:
    """An offset, a balance, a rotation, and ahead of them RoPE; a soft cap sees the offset."""
    case = A(format=K8V4, scale_format="e4m3", rope="neox", **SMALL)
    q, k_new, v_new, cache, table, starts, rope = case.build_append()
    random = torch.Generator().manual_seed(1)
    offset, factor = (torch.randn(1, case.head_dim, generator=random) for _ in range(2))
    cache = replace(cache, key_transform=KeyTransform(offset, (0.3 * factor).exp()))
    wanted, exactly = copy_cache(cache), copy_cache(cache)
    options: dict[str, Any] = {"rope": rope, "logits_soft_cap": 3.0, "return_lse": True}
    with executing(EmulateExecutor(target, detect_hazards=True)):
        plan = plan_append(q, cache, table, starts, kernel=kernel)
        o, lse = prefill_append(q, k_new, v_new, cache, table, starts, plan=plan, **options)
    expected, _ = prefill_append_reference(q, k_new, v_new, wanted, table, starts, **options)
    exact, exact_lse = prefill_append_reference(
        q.float(), k_new.float(), v_new.float(), exactly, table, starts, **options
    )
    assert _error(o, exact) <= _error(expected, exact) + 0.002
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=5e-3)
    assert not differing_bytes(cache, wanted)


@both_targets
def test_old_tokens_on_fp8_matrix_units_in_machine_code(target: str) -> None:
    fmt = "fp8_e4m3fnuz" if target == "gfx942" else "fp8_e4m3fn"
    q, k_new, v_new, cache, table, starts, _ = A(format=fmt, **SMALL).build_append()
    _, _, _, wanted, _, _, _ = A(format=fmt, **SMALL).build_append()
    with executing(EmulateExecutor(target)):
        plan = plan_append(q, cache, table, starts, fp8_compute=True)
        o = prefill_append(q, k_new, v_new, cache, table, starts, plan=plan, fp8_compute=True)
    expected = prefill_append_reference(q, k_new, v_new, wanted, table, starts)
    assert isinstance(o, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert _error(o, expected) <= 0.02


MIXED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "OCP": ({}, {}),
    "FNUZ, a window and sinks": ({"format": "fp8_e4m3fnuz"}, {"window_left": 90}),
    "bf16, soft cap": ({"format": "bf16"}, {"logits_soft_cap": 3.0}),
}


@both_targets
@pytest.mark.parametrize("operation", ["prefill", "append"])
@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_batch_in_machine_code(
    name: str, operation: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long decode in splits, a speculative sequence, one without tokens, and a chunk."""
    monkeypatch.setattr("narrowkv.attn_prefill.tiles.units_of", lambda target: 1)
    monkeypatch.setattr("narrowkv.attn_prefill.cost._most_together", lambda *_: 1)
    axes, options = MIXED[name]
    case = PrefillCase.small(
        (1, 3, 0, 49), (300, 60, 20, 70), operation=operation, num_kv_heads=1, gqa_ratio=8, **axes, **options
    )
    inputs = case.inputs()
    with executing(EmulateExecutor(target, detect_hazards=True, detect_races=True)):
        o, lse = inputs.call()
        assert [part.kernel for part in inputs.plan().config.few] == ["split"]
    expected, expected_lse = inputs.reference()
    assert _error(o, expected) <= 0.002
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    assert not inputs.wrong_bytes()
