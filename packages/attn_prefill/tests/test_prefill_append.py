"""prefill_append: what it attends to, and that it stores what the host would, byte for byte, and no more."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import (
    batch_prefill,
    plan_append,
    plan_prefill,
    prefill_append,
    prefill_append_reference,
)
from narrowkv.attn_prefill.cases import AXES, PrefillCase, poison_plan
from narrowkv.attn_prefill.plan import PrefillPlan
from narrowkv.attn_prefill.planning import can_pipeline
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.paged_cache.cases import copy_cache, differing_bytes
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import run_as
from narrowkv.runtime.targets import device_target

pytestmark = pytest.mark.sampled

W = PrefillCase.append
K8V4 = CacheFormat(k="fp8_e4m3fn", v="fp4_e2m1")
# "pipelined" is written for Hopper alone.
either_kernel = pytest.mark.parametrize(
    "kernel", ["append_then_attend", "fused", pytest.param("pipelined", marks=pytest.mark.gpu)]
)


def axis(name: str, *fast: object) -> list[Any]:
    """Values of an axis of the sweep, of which only the full run takes those that are not named."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in AXES[name]]


def _same_bytes(a: PagedKVCache, b: PagedKVCache) -> bool:
    return not differing_bytes(a, b)


def _check(
    workload: PrefillCase,
    device: str,
    kernel: str | None = None,
    bound: float = 0.002,
    lse_bound: float = 1e-3,
    plan: dict[str, Any] | None = None,
    **options: Any,
) -> PagedKVCache:
    """Compares o and lse with the reference, and every byte of the cache, old ones and unused ones too."""
    q, k_new, v_new, cache, table, starts, rope = workload.build_append(device)
    if kernel == "pipelined" and not can_pipeline(device_target(q.device), q.dtype, cache):
        pytest.skip("not for this GPU, head_dim or descale")
    made = plan_append(
        q, cache, table, starts, kernel=kernel, fp8_compute=options.get("fp8_compute", False), **(plan or {})
    )
    poison_plan(made)
    before, wanted = copy_cache(cache), copy_cache(cache)
    o, lse = prefill_append(
        q, k_new, v_new, cache, table, starts, rope=rope, return_lse=True, plan=made, **options
    )
    expected, expected_lse = prefill_append_reference(
        q, k_new, v_new, wanted, table, starts, rope=rope, return_lse=True, plan=made, **options
    )
    assert not bool(o.isnan().any())
    assert float((o.float() - expected).abs().sum() / expected.abs().sum()) <= bound, made.explain()
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=lse_bound)
    assert _same_bytes(cache, wanted)
    assert not _same_bytes(cache, before)
    assert made.workspace is not None
    assert int(made.workspace.counters(2**16).abs().sum()) == 0
    return cache


def _compare(
    plan: PrefillPlan,
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    cache: PagedKVCache,
    table: PageTable,
    starts: torch.Tensor,
    parts: tuple[slice, ...] = (slice(None),),
    **options: Any,
) -> None:
    """Compares o, each part of its rows by itself, and every byte of the cache with the reference."""
    wanted = copy_cache(cache)
    o = prefill_append(q, k_new, v_new, cache, table, starts, plan=plan, **options)
    expected = prefill_append_reference(q, k_new, v_new, wanted, table, starts, **options)
    assert isinstance(o, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    for rows in parts:
        error = (o[rows].float() - expected[rows]).abs().sum() / expected[rows].abs().sum()
        assert float(error) <= 0.002
    assert _same_bytes(cache, wanted)


@either_kernel
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", *axis("format", K8V4)], ids=str)
def test_every_cache_format(fmt: str | CacheFormat, kernel: str, device: str) -> None:
    _check(W(format=fmt), device, kernel)


@pytest.mark.parametrize(
    ("fmt", "q_dtype"),
    [
        ("fp8_e4m3fn", torch.float16),
        ("bf16", torch.float16),
        ("fp16", torch.float16),
        ("fp16", torch.bfloat16),
    ],
)
def test_fp16_queries_and_caches(fmt: str, q_dtype: torch.dtype, device: str) -> None:
    _check(W(format=fmt, q_dtype=q_dtype), device)


# A page larger and smaller than the tile; chunks that begin in the middle of a page.
@either_kernel
@pytest.mark.parametrize("page_size", [*axis("page_size", 1, 3, 128), 16])
def test_every_page_size(page_size: int, kernel: str, device: str) -> None:
    _check(W(page_size=page_size, lens=(7, 0, 66), q_lens=(20, 3, 9), num_kv_heads=1), device, kernel)


@either_kernel
@pytest.mark.parametrize(
    ("layout", "page_size"), [("HND", 16), ("tokens", 1), ("concat", 16), ("vectorised", 16)]
)
def test_every_layout(layout: str, page_size: int, kernel: str, device: str) -> None:
    _check(W(layout=layout, page_size=page_size, num_kv_heads=1), device, kernel)


@either_kernel
@pytest.mark.parametrize("rope", ["neox", "gptj"])
def test_rotary_embedding(rope: str, kernel: str, device: str) -> None:
    _check(W(rope=rope, rotary_dim=64 if rope == "neox" else 32, num_kv_heads=1), device, kernel)


@either_kernel
@pytest.mark.parametrize("granularity", AXES["granularity"])
def test_every_descale_shape(granularity: str, kernel: str, device: str) -> None:
    _check(W(granularity=granularity), device, kernel)


@either_kernel
def test_a_window_a_soft_cap_and_sinks(kernel: str, device: str) -> None:
    _check(W(num_kv_heads=1), device, kernel, window_left=12, sinks=torch.linspace(-2, 2, 3, device=device))
    _check(W(num_kv_heads=1), device, kernel, logits_soft_cap=3.0)


@either_kernel
@pytest.mark.parametrize("head_dim", axis("head_dim", 80, 112))
def test_every_head_dim(head_dim: int, kernel: str, device: str) -> None:
    _check(W(head_dim=head_dim, num_kv_heads=1), device, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("window_left", [-1, 500])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tiles", [(), (0,), (2,), (1, 3)], ids=str)
@pytest.mark.parametrize(
    ("fmt", "granularity"), [("fp8_e4m3fn", "float"), ("fp8_e4m3fn", "head"), ("bf16", "float")]
)
def test_new_values_that_differ_by_far_from_tile_to_tile(
    fmt: str, granularity: str, tiles: tuple[int, ...], window_left: int, splits: int
) -> None:
    workload = W(lens=(700,), q_lens=(500,), gqa_ratio=6, head_dim=128, format=fmt, granularity=granularity)
    q, k_new, v_new, cache, table, starts, _ = workload.build_append("cuda")
    if not can_pipeline(device_target(q.device), q.dtype, cache):
        pytest.skip("not for this GPU")
    for tile in tiles:
        v_new[tile * 128 : tile * 128 + 128] *= 512 if fmt == "fp8_e4m3fn" else 2.0**20
    plan = plan_append(q, cache, table, starts, kernel="pipelined", num_splits=splits)
    _compare(plan, q, k_new, v_new, cache, table, starts, window_left=window_left)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window_left", [-1, 200])
@pytest.mark.parametrize(
    ("fmt", "granularity", "head_dim"),
    [
        ("fp8_e4m3fn", "float", 128),
        ("fp8_e4m3fn", "head", 64),
        ("fp8_e5m2", "tensor", 128),
        ("bf16", "float", 128),
    ],
)
@pytest.mark.parametrize("lens", [(700, 0, 1153, 128), (100, 0, 513, 64)], ids=str)
def test_old_keys_that_end_anywhere_in_a_block(
    lens: tuple[int, ...], fmt: str, granularity: str, head_dim: int, window_left: int, splits: int
) -> None:
    workload = W(
        lens=lens,
        q_lens=(130, 40, 300, 1),
        gqa_ratio=6,
        head_dim=head_dim,
        format=fmt,
        granularity=granularity,
    )
    _check(workload, "cuda", "pipelined", plan={"num_splits": splits}, window_left=window_left)


# Old keys of a 16-bit cache in their pages, the chunk's own in the scratch: the former end anywhere.
@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("options", [{}, {"window_left": 200}], ids=str)
@pytest.mark.parametrize(
    ("fmt", "granularity", "layout", "page_size"),
    [
        ("bf16", "float", "NHD", 16),
        ("bf16", "head", "HND", 8),
        ("bf16", "float", "NHD", 256),
        ("fp16", "float", "HND", 32),
        ("bf16", "float", "NHD", 4),
    ],
)
@pytest.mark.parametrize("lens", [(700, 0, 1153, 128), (100, 0, 513, 64)], ids=str)
@pytest.mark.usefixtures("always_in_pages")
def test_old_keys_that_stay_in_their_pages(
    lens: tuple[int, ...], fmt: str, granularity: str, layout: str, page_size: int,
    options: dict[str, Any], splits: int,
) -> None:  # fmt: skip
    workload = W(
        lens=lens, q_lens=(130, 40, 300, 1), gqa_ratio=6, head_dim=128, format=fmt, granularity=granularity,
        layout=layout, page_size=page_size, q_dtype=torch.float16 if fmt == "fp16" else torch.bfloat16,
    )  # fmt: skip
    _check(workload, "cuda", "pipelined", plan={"num_splits": splits}, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("factor", [1.0, 2.0**30, 2.0**-30], ids=str)
@pytest.mark.usefixtures("always_in_pages")
def test_values_of_any_size_whose_keys_stay_in_their_pages(factor: float, splits: int) -> None:
    workload = W(lens=(700,), q_lens=(500,), gqa_ratio=6, head_dim=128, format="bf16")
    q, k_new, v_new, cache, table, starts, _ = workload.build_append("cuda")
    if not can_pipeline(device_target(q.device), q.dtype, cache):
        pytest.skip("not for this GPU")
    values, pages = cache.logical()[1], table.page_ids[0].long()
    values[pages[16:24]] *= factor
    v_new[:64] *= factor
    plan = plan_append(q, cache, table, starts, kernel="pipelined", num_splits=splits)
    assert plan.config.k_in_pages
    _compare(plan, q, k_new, v_new, cache, table, starts)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("position", "window_left"), [(3, -1), (1100, -1), (1100, 500)])
@pytest.mark.usefixtures("always_in_pages")
def test_nan_of_an_old_value_whose_key_stays_in_its_page(
    position: int, window_left: int, splits: int
) -> None:
    # In the second sequence's first tile, or its last one, which ends with rows that are no keys.
    workload = W(lens=(700, 1101), q_lens=(500, 40), gqa_ratio=6, head_dim=128, format="bf16")
    q, k_new, v_new, cache, table, starts, _ = workload.build_append("cuda")
    if not can_pipeline(device_target(q.device), q.dtype, cache):
        pytest.skip("not for this GPU")
    page, slot = table.page_ids[1, position // 16].long(), position % 16
    cache.logical()[1][page, slot, 0, 5] = math.nan
    plan = plan_append(q, cache, table, starts, kernel="pipelined", num_splits=splits)
    o = prefill_append(q, k_new, v_new, cache, table, starts, plan=plan, window_left=window_left)
    assert isinstance(o, torch.Tensor)
    expected = torch.zeros(o.shape[:2], dtype=torch.bool, device="cuda")
    expected[500:, :6] = True
    assert torch.equal(o.isnan().any(-1), expected)


# In the scratch V is float16, in units of the descale and times a power of two where that does not do.
@pytest.mark.parametrize("kernel", ["append_then_attend", "fused"])
@pytest.mark.parametrize("factor", [2.0**-30, 2.0**40], ids=str)
@pytest.mark.parametrize(
    ("fmt", "granularity"),
    [("fp8_e4m3fn", "float"), ("fp8_e4m3fn", "head"), ("bf16", "float"), (K8V4, "float")],
)
def test_new_values_of_any_size(
    fmt: str | CacheFormat, granularity: str, factor: float, kernel: str, device: str
) -> None:
    # The first rows attend to nothing else.
    workload = W(lens=(0, 70), q_lens=(70, 5), num_kv_heads=1, format=fmt, granularity=granularity)
    q, k_new, v_new, cache, table, starts, _ = workload.build_append(device)
    v_new[:64] *= factor
    plan = plan_append(q, cache, table, starts, kernel=kernel)
    _compare(plan, q, k_new, v_new, cache, table, starts, parts=(slice(64), slice(64, None)))


@pytest.mark.parametrize("top", [1e37, 3e38])
def test_new_values_near_the_largest_of_float32(top: float, device: str) -> None:
    workload = W(lens=(0, 20), q_lens=(70, 9), num_kv_heads=1, format="bf16")
    q, k_new, v_new, cache, table, starts, _ = workload.build_append(device)
    v_new.copy_(v_new.clamp(-1, 1) * top)
    wanted = copy_cache(cache)
    plan = plan_append(q, cache, table, starts, kernel="append_then_attend")
    o = prefill_append(q, k_new, v_new, cache, table, starts, plan=plan, out_dtype=torch.float32)
    expected = prefill_append_reference(q, k_new, v_new, wanted, table, starts)
    assert isinstance(o, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert float((o / top - expected / top).abs().sum() / (expected / top).abs().sum()) <= 0.002
    assert _same_bytes(cache, wanted)


@either_kernel
def test_splits_and_sequences_without_new_tokens(kernel: str, device: str) -> None:
    workload = W(lens=(130, 40, 0), q_lens=(9, 0, 70), num_kv_heads=1)
    _check(workload, device, kernel)
    _check(workload, device, kernel, plan={"num_splits": 3})


def test_fp8_compute_on_old_tokens(device: str) -> None:
    # Queries and P are held in two FP8 terms, eight bits.
    _check(W(), device, bound=0.004, lse_bound=4e-3, fp8_compute=True)
    _check(W(rope="neox", granularity="head"), device, bound=0.004, lse_bound=4e-3, fp8_compute=True)


def test_the_code_paths_of_gfx950_when_interpreted() -> None:
    """Other tests on a CPU take those of gfx942."""
    with run_as("gfx950"):
        _check(W(num_kv_heads=1), "cpu")
        _check(W(num_kv_heads=1), "cpu", bound=0.004, lse_bound=4e-3, fp8_compute=True)


def test_nan_of_a_new_token_reaches_only_the_rows_that_attend_to_it(device: str) -> None:
    for kernel in ("append_then_attend", "fused", "pipelined"):
        for which, *bad in ("k", math.nan), ("v", math.nan), ("v", -math.inf, 3e38):
            q, k_new, v_new, cache, table, starts, _ = W(lens=(20,), q_lens=(20,)).build_append(device)
            if kernel == "pipelined" and not can_pipeline(device_target(q.device), q.dtype, cache):
                continue
            plan = plan_append(q, cache, table, starts, kernel=kernel)
            finite = prefill_append(q, k_new, v_new, cache, table, starts, plan=plan)
            {"k": k_new, "v": v_new}[which][7, 1, 3 : 3 + len(bad)] = torch.tensor(bad).to(k_new)
            o = prefill_append(q, k_new, v_new, cache, table, starts, plan=plan)
            assert isinstance(o, torch.Tensor)
            assert isinstance(finite, torch.Tensor)
            sees = torch.zeros(o.shape[:2], dtype=torch.bool, device=device)
            sees[7:, 3:6] = True
            assert torch.equal(o.isnan().any(-1), sees), (kernel, which, bad)
            torch.testing.assert_close(o[~sees], finite[~sees], rtol=1e-2, atol=1e-3)


# What has no page, or one beyond the cache, is attended to and not stored.
@either_kernel
def test_tokens_without_a_page_are_not_stored(kernel: str, device: str) -> None:
    workload = W(lens=(20, 3), q_lens=(25, 5))
    q, k_new, v_new, cache, table, starts, _ = workload.build_append(device)
    if kernel == "pipelined" and not can_pipeline(device_target(q.device), q.dtype, cache):
        pytest.skip("not for this GPU")
    short = PageTable.from_block_table(
        table.page_ids[:, :2].contiguous(), cached_lens=table.seq_lens, page_size=16
    )
    short.page_ids[1, 0] = cache.num_pages
    assert table.seq_lens is not None
    table.seq_lens[1] = 0
    plan = plan_append(q, cache, short, starts, kernel=kernel)
    _compare(plan, q, k_new, v_new, cache, short, starts)
    full = PageTable.from_block_table(short.page_ids, cached_lens=table.seq_lens, page_size=16)
    with pytest.raises(
        ValueError,
        match="must have pages for the new tokens: sequence 0 comes to 45 tokens, got pages for 32",
    ):
        plan_append(q, cache, full, starts, validate=True)


def test_a_call_without_tokens_changes_nothing(device: str) -> None:
    q, k_new, v_new, cache, table, starts, _ = W(q_lens=(0, 0, 0)).build_append(device)
    before = copy_cache(cache)
    o, lse = prefill_append(q, k_new, v_new, cache, table, starts, return_lse=True)
    assert (o.shape, lse.shape) == ((0, 6, 64), (0, 6))
    assert _same_bytes(cache, before)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "k_new in another dtype": ({"k_new": torch.zeros(31, 2, 64)}, "k_new must have dtype"),
    "v_new of another count": ({"v_new": torch.zeros(30, 2, 64).bfloat16()}, "v_new must have shape"),
    "fp32 queries": ({"q": torch.zeros(31, 6, 64)}, "q must have dtype"),
    "negative cap": ({"logits_soft_cap": -1.0}, "logits_soft_cap must be 0"),
    "window -2": ({"window_left": -2}, "window_left must be -1"),
    "sinks of another count": ({"sinks": torch.zeros(5)}, "sinks must have shape"),
    "NaN scale": ({"sm_scale": math.nan}, "sm_scale must be finite"),
    "scale beyond float32": ({"sm_scale": 1e39}, "sm_scale must"),
    "window beyond int32": ({"window_left": 2**31}, "window_left must be -1"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_bad_input_is_refused_by_name_and_changes_nothing(fault: str) -> None:
    change, message = REFUSED[fault]
    q, k_new, v_new, cache, table, starts, _ = W().build_append()
    before, options = copy_cache(cache), dict(change)
    q, k_new, v_new = options.pop("q", q), options.pop("k_new", k_new), options.pop("v_new", v_new)
    with pytest.raises((ValueError, TypeError), match=message):
        prefill_append(q, k_new, v_new, cache, table, starts, **options)
    assert _same_bytes(cache, before)


def test_caches_tables_and_plans_that_cannot_append_are_refused() -> None:
    q, k_new, v_new, cache, table, starts, _ = W(granularity="page_head").build_append()
    with pytest.raises(
        ValueError, match="k_descale must be per tensor, per head or per token-head to append"
    ):
        prefill_append(q, k_new, v_new, cache, table, starts)
    q, k_new, v_new, cache, table, starts, _ = W().build_append()
    ragged = PageTable.from_ragged(*(torch.zeros(n, dtype=torch.int32) for n in (4, 1, 3)), page_size=16)
    with pytest.raises(ValueError, match="page_table must hold the lengths before the append"):
        prefill_append(q, k_new, v_new, cache, ragged, starts)
    plan = plan_prefill(q, cache, replace(table, before_append=False), starts)
    with pytest.raises(ValueError, match="call plan_append again"):
        prefill_append(q, k_new, v_new, cache, table, starts, plan=plan)
    with pytest.raises(ValueError, match=r"page_table must hold the lengths before .*PagePool.table_before"):
        plan_append(q, cache, replace(table, before_append=False), starts)
    plan = plan_append(q, cache, table, starts)
    with pytest.raises(ValueError, match="plan must be made with fp8_compute=True"):
        prefill_append(q, k_new, v_new, cache, table, starts, plan=plan, fp8_compute=True)
    with pytest.raises(ValueError, match="k_new must not require grad"):
        prefill_append(q, k_new.clone().requires_grad_(), v_new, cache, table, starts)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="k_descale"):
            PagedKVCache.from_tensors(cache.k, cache.v, format=cache.format, k_descale=bad, v_descale=1.0)


# Whose lengths are meant is part of the table.
def test_a_table_before_an_append_is_refused_by_operations_that_append_nothing() -> None:
    q, _, _, cache, table, starts, _ = W(lens=(20,), q_lens=(1,)).build_append()
    for call in (
        lambda: batch_prefill(q, cache, table, starts),
        lambda: plan_prefill(q, cache, table, starts),
        lambda: paged_decode(q, cache, table),
    ):
        with pytest.raises(ValueError, match="page_table must hold lengths that include the tokens of this"):
            call()


def test_forced_kernels_that_cannot_serve_a_call_are_refused() -> None:
    q, _, _, cache, table, starts, _ = W(format="fp16").build_append()
    with pytest.raises(UnsupportedError, match="needs keys in fp16 and new ones in bf16 in one scratch"):
        plan_append(q, cache, table, starts, kernel="append_then_attend")
    with pytest.raises(UnsupportedError, match="fp8_compute needs K and V in one FP8 format"):
        plan_append(q, cache, table, starts, fp8_compute=True)
    q, _, _, cache, table, starts, _ = W().build_append()
    with pytest.raises(UnsupportedError, match="fp8_compute has kernel='fused' only"):
        plan_append(q, cache, table, starts, fp8_compute=True, kernel="append_then_attend")
