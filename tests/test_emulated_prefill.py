"""Prefill's own gfx942 and gfx950 machine code, run on the CPU, against the fp32 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from generated_code import both_targets, emulate

from narrowkv.attn_prefill.tiles import xcd_rows
from narrowkv.paged_cache import CacheFormat
from narrowkv.quant import KeyTransform
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime.attention.xcds import xcd_order
from narrowkv.runtime.launch import compile_for, executing
from narrowkv.runtime.targets import TARGETS
from narrowkv.testing.cases.cache import copy_cache
from narrowkv.testing.cases.decode import K8V4
from narrowkv.testing.cases.prefill import PrefillCase, PrefillInputs
from narrowkv.testing.emulation import EmulateExecutor

pytestmark = pytest.mark.slow  # about two minutes together

INTEGERS = CacheFormat("int8", "int4")
DENSE: dict[str, Any] = {"kernel": "dense"}
FUSED: dict[str, Any] = {"kernel": "fused"}
APPEND_IN_TURNS: dict[str, Any] = {"operation": "append", "kernel": "append_then_attend"}


def small(*changes: dict[str, Any], **more: Any) -> PrefillCase:
    """A prefill of two sequences; one begins inside a page and one inside a tile."""
    values: dict[str, Any] = {"q_lens": (3, 25), "lens": (20, 40), "num_kv_heads": 1}
    for change in (*changes, more):
        values |= change
    return PrefillCase(**values)


def append(**changes: Any) -> PrefillCase:
    return PrefillCase.append((3, 25), (20, 40), **{"num_kv_heads": 1, **changes})


CASES: dict[str, PrefillCase] = {
    "dense, OCP": small(DENSE),
    "dense, bf16, a window": small(DENSE, format="bf16", window_left=9),
    "dense, K FP8 and V FP4, fp16 queries": small(DENSE, format=K8V4, q_dtype=torch.float16),
    "dense, K INT8, V INT4": small(DENSE, format=INTEGERS, granularity="token_head"),
    "dense, more queries than keys": small(DENSE, q_lens=(9, 1), lens=(4, 0)),
    "fused, OCP, ragged, page 3": small(FUSED, page_size=3, ragged=True),
    "fused, FNUZ, descale of each token, no mask": small(
        FUSED, format="fp8_e4m3fnuz", granularity="token_head", causal=False
    ),
    "fused, bf16, soft cap": small(FUSED, format="bf16", logits_soft_cap=3.0),
    "fused, FP4, page 1": small(FUSED, format="fp4_e2m1", page_size=1, layout="tokens"),
    "fused, FP4, E4M3 scales": small(FUSED, format="fp4_e2m1", scale_format="e4m3"),
    "fused, INT4": small(FUSED, format="int4"),
    "fused, head_dim 80": small(FUSED, head_dim=80),
    "dense, V narrower than K": small(DENSE, head_dim=192, v_head_dim=128),
    "fused, bf16, V narrower than K": small(FUSED, head_dim=192, v_head_dim=128, format="bf16"),
    "append, V narrower than K, rope": append(head_dim=192, v_head_dim=128, rope="neox"),
    "dense, head_dim 512, a window": small(DENSE, head_dim=512, window_left=9),
    "fused, head_dim 512, bf16": small(FUSED, head_dim=512, format="bf16"),
    "fused, head_dim 320, K FP8 and V FP4": small(FUSED, head_dim=320, format=K8V4),
    "append, fused, head_dim 512, FP4, E4M3 scales": append(
        head_dim=512, format="fp4_e2m1", scale_group=16, scale_format="e4m3", rope="neox"
    ),
    "append in turns, head_dim 320, rope": append(
        head_dim=320, kernel="append_then_attend", rope="neox", rotary_dim=64
    ),
    "append, OCP, a chunk that begins inside a page": append(),
    "append, FNUZ, rope": append(format="fp8_e4m3fnuz", rope="neox"),
    "append, bf16, fp16 queries": append(format="bf16", q_dtype=torch.float16),
    "append, descale of each token, page 1": append(granularity="token_head", page_size=1, layout="tokens"),
    "append, FP4": append(format="fp4_e2m1"),
    "append, FP4, E4M3 scales": append(format="fp4_e2m1", scale_format="e4m3"),
    "append, K INT8, V INT4, rope": append(format=INTEGERS, granularity="token_head", rope="neox"),
    "append, INT4": append(format="int4"),
    "append, vectorised, a window": append(layout="vectorised", window_left=8),
}


@both_targets
@pytest.mark.parametrize("name", CASES)
def test_machine_code_agrees_with_the_reference(name: str, target: str) -> None:
    result, _ = emulate(CASES[name], target)
    assert result.passed, result.detail


@both_targets
@pytest.mark.parametrize("kernel", ["dense", "fused"])
def test_programs_ordered_for_eight_xcds(kernel: str, target: str) -> None:
    case = PrefillCase(
        q_lens=(70,), lens=(100,), num_kv_heads=3, gqa_ratio=8, head_dim=64, kernel=kernel
    )  # fmt: skip
    result, _ = emulate(case, target)
    assert result.passed, result.detail
    order = xcd_order(TARGETS[target].xcds, 3, xcd_rows(TARGETS[target], case.inputs().plan().shape, 64))
    assert order is not None
    assert order.rows * order.columns <= 3 * -(-70 * 8 // 64)


@both_targets
def test_old_tokens_on_fp8_matrix_units(target: str) -> None:
    case = append(format="fp8_e4m3fnuz" if target == "gfx942" else "fp8_e4m3fn", fp8_compute=True)
    result, _ = emulate(case, target)
    assert result.passed, result.detail


@pytest.fixture
def one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tiles are for calls with a tile for every compute unit, which would take the emulator long."""
    monkeypatch.setattr("narrowkv.attn_prefill.tiles.compute_units_of", lambda target: 1)


@both_targets
@pytest.mark.usefixtures("one_unit")
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"head_dim": 64, "num_splits": 2}, {"format": "bf16", "window_left": 90},
        {"format": "bf16", "q_dtype": torch.float16}, {"granularity": "token_head", "logits_soft_cap": 3.0},
    ],
    ids=str,
)  # fmt: skip
def test_tiles_of_128_rows(changes: dict[str, Any], target: str) -> None:
    sizes = {"q_lens": (40, 3), "lens": (260, 40), "gqa_ratio": 8, "head_dim": 128}
    case = small(DENSE, sizes, changes)
    result, _ = emulate(case, target)
    assert result.passed, result.detail
    with compile_for(target):
        assert case.inputs().plan().config.block_m == 128


@both_targets
@pytest.mark.usefixtures("one_unit")
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("kernel", "splits"), [("fused", 1), ("fused", 3), ("dense", 1), ("dense", 2)])
def test_fp8_queries(kernel: str, splits: int, clean: bool, target: str) -> None:
    sizes = {"gqa_ratio": 8, "head_dim": 128} if splits == 1 else {}
    for fmt in ("fp8_e4m3fn", "fp8_e4m3fnuz") if target == "gfx942" else ("fp8_e4m3fn",):
        dtype = torch.float8_e4m3fn if fmt == "fp8_e4m3fn" else torch.float8_e4m3fnuz
        case = small(sizes, kernel=kernel, num_splits=splits, format=fmt, q_dtype=dtype, clean=clean)
        result, _ = emulate(case, target, bound=case.bound if kernel == "fused" else 0.002)
        assert result.passed, result.detail


@pytest.fixture
def one_program(monkeypatch: pytest.MonkeyPatch, one_unit: None) -> None:
    """A batch's short sequences have a launch of their own, however many programs run together."""
    monkeypatch.setattr("narrowkv.attn_prefill.cost._most_together", lambda *_: 1)


def few(inputs: PrefillInputs, target: str) -> list[str]:
    """The kernels of the sequences with few query tokens."""
    with compile_for(target):
        return [part.kernel for part in inputs.plan().config.short_queries]


@both_targets
@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize("operation", ["prefill", "append"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"format": "fp8_e4m3fnuz", "window_left": 90}, {"format": "bf16", "logits_soft_cap": 3.0}],
    ids=str,
)
def test_a_mixed_batch(changes: dict[str, Any], operation: str, target: str) -> None:
    """A long decode in splits, a speculative sequence, one without tokens, and a chunk."""
    sizes = {"q_lens": (1, 3, 0, 49), "lens": (300, 60, 20, 70), "gqa_ratio": 8}
    case = small(sizes, changes, operation=operation)
    result, _ = emulate(case, target)
    assert result.passed, result.detail
    assert few(case.inputs(), target) == ["split"]


TURNS: dict[str, Any] = {"gqa_ratio": 8, "head_dim": 128}


@pytest.mark.usefixtures("one_unit")
@pytest.mark.parametrize(
    "changes",
    [
        {}, {"window_left": 150}, {"causal": False}, {"q_dtype": torch.float8_e4m3fn}, {"format": "bf16"},
        APPEND_IN_TURNS, {**APPEND_IN_TURNS, "granularity": "head", "window_left": 150},
    ],
    ids=str,
)  # fmt: skip
def test_waves_that_take_turns(changes: dict[str, Any]) -> None:
    """Each group of waves reads what the other one has copied."""
    case = small(DENSE, TURNS, {"q_lens": (70, 3), "lens": (400, 40)}, changes)
    result, kernels = emulate(case, "gfx950", bound=0.002)
    assert result.passed, result.detail
    assert kernels[-1].name == "_cdna_prefill_kernel"


@pytest.mark.usefixtures("one_program")
def test_waves_take_turns_beside_a_decode_of_the_same_append() -> None:
    case = small(TURNS, q_lens=(100, 1), lens=(400, 40), operation="append")
    result, kernels = emulate(case, "gfx950")
    assert result.passed, result.detail
    assert few(case.inputs(), "gfx950") == ["split"]
    assert kernels[-1].name == "_cdna_prefill_kernel"


@pytest.mark.usefixtures("one_unit")
@pytest.mark.parametrize("window", [-1, 150])
@pytest.mark.parametrize("way", [DENSE, APPEND_IN_TURNS], ids=["prefill", "append"])
def test_values_of_any_size_while_waves_take_turns(way: dict[str, Any], window: int) -> None:
    """Blocks of values have powers of two far apart, and each row takes the values of one block."""
    old, new = 384, 66
    case = small(TURNS, way, q_lens=(new,), lens=(old + new,), format="bf16", window_left=window)
    inputs = case.inputs()
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
    executor = EmulateExecutor("gfx950", detect_races=True, detect_hazards=True)
    with executing(executor):
        o, lse = inputs.call()
    assert executor.runs[-1].artifact.name == "_cdna_prefill_kernel"
    expected, expected_lse = inputs.reference()
    error = (o.float() - expected).abs().sum(-1) / expected.abs().sum(-1)
    assert float(error.max()) <= 0.004
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)


@both_targets
@pytest.mark.parametrize("kernel", ["fused", "append_then_attend"])
def test_an_append_to_transformed_keys(kernel: str, target: str) -> None:
    """An offset, a balance, a rotation, and ahead of them RoPE; a soft cap sees the offset."""
    case = append(format=K8V4, scale_format="e4m3", rope="neox", logits_soft_cap=3.0, kernel=kernel)
    random = torch.Generator().manual_seed(1)
    offset, factor = (torch.randn(1, case.head_dim, generator=random) for _ in range(2))
    inputs = case.inputs()
    cache = replace(inputs.cache, key_transform=KeyTransform(offset, (0.3 * factor).exp()))
    inputs = replace(inputs, cache=cache, wanted=copy_cache(cache))
    exactly = replace(
        inputs, q=inputs.q.float(), new=tuple(x.float() for x in inputs.new), wanted=copy_cache(cache)
    )
    with executing(EmulateExecutor(target, detect_hazards=True)):
        o, lse = inputs.call()
    expected, _ = inputs.reference()
    exact, exact_lse = exactly.reference()
    assert relative_l1(o, exact) <= relative_l1(expected, exact) + 0.002
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=5e-3)
    assert not inputs.wrong_bytes()
