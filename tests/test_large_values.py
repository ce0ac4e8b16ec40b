"""Values of V near the largest of float32, and values that are not finite, through every operation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import merge_states, merge_states_reference
from narrowkv.paged_cache import PagedKVCache
from narrowkv.sage import sage_attention
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sparse import SparseCase
from narrowkv.testing.checking import assert_agrees

pytestmark = pytest.mark.sampled

# Values of up to 2**127 stay below float32's largest, 2**128, and the sum of any few does not.
TOP = 2.0**126
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = ("fused", "split", "dense")


def _large(values: torch.Tensor) -> torch.Tensor:
    """Values between TOP and 2 * TOP."""
    return (1.0 + values.float().abs().clamp(max=0.98)) * TOP


def _enlarge(cache: PagedKVCache) -> None:
    """Makes V of a cache large: its elements in 16-bit formats, its descales elsewhere."""
    values = cache.logical()[1]
    if values.dtype.itemsize == 2 and values.dtype.is_floating_point:
        values.copy_(_large(values))
    else:
        assert isinstance(cache.v_descale, torch.Tensor)
        # Kernels widen integers as multiples of 2**-24, so a descale is multiplied by 2**24 before a mean is.
        largest = {torch.int8: 128.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}[values.dtype]
        most = 2.0**103 if values.dtype == torch.int8 and cache.v_descale.numel() < 9 else 2 * TOP / largest
        factor = 2.0 ** math.floor(math.log2(most / float(cache.v_descale.max())))
        cache.v_descale.copy_(cache.v_descale.double() * factor)


def _agrees(results: Any, expected: Any, bound: float = 0.003) -> None:
    """Compares `(o, lse)`, or `o`, in units of the largest result."""
    if isinstance(results, torch.Tensor):
        results, expected = (results,), (expected,)
    unit = float(expected[0].abs().max())
    assert 2**90 < unit < math.inf
    o, expected_o = (each[0].double() / unit for each in (results, expected))
    assert_agrees((o, *results[1:]), (expected_o, *expected[1:]), bound=bound)


@pytest.mark.parametrize("plan", [{"split": "none"}, {"tokens_per_split": 32}], ids=str)
@pytest.mark.parametrize("in_launch", [True, False])
@pytest.mark.parametrize("changes", [{}, {"q_dtype": FP16}, {"q_len": 4}, {"sinks": True}], ids=str)
def test_decode_of_a_mean_that_is_finite(changes, in_launch, plan, device):
    inputs = DecodeCase.small(format="bf16", lens=(600, 3), num_kv_heads=1, out_dtype=FP32, **changes).inputs(
        device
    )
    _enlarge(inputs.cache)
    made = inputs.plan(**plan)
    made = replace(made, config=replace(made.config, merge_in_launch=in_launch))
    _agrees(inputs.call(made), inputs.reference())


# Descales of tokens multiply sums at the end; those of heads and tensors multiply means.
@pytest.mark.parametrize("granularity", ["token_head", "head", "tensor"])
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "int8", "fp8_e5m2"])
def test_descales_near_the_largest_float32(fmt, granularity, device):
    changes = {"format": fmt, "granularity": granularity, "num_kv_heads": 1, "clean": True}
    inputs = DecodeCase.small(lens=(600, 3), out_dtype=FP32, **changes).inputs(device)
    _enlarge(inputs.cache)
    for plan in ({"split": "none"}, {"tokens_per_split": 64}):
        _agrees(inputs.call(inputs.plan(**plan)), inputs.reference())
    for kernel in KERNELS:
        prefill = PrefillCase.small((5, 1), (400, 3), kernel=kernel, **changes).inputs(device)
        _enlarge(prefill.cache)
        _agrees(prefill.call(), prefill.reference())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "changes", [{}, {"q_dtype": FP16}, {"num_splits": 3, "sinks": True}, {"window_left": 150}], ids=str
)
def test_prefill_of_a_mean_that_is_finite(changes, kernel, device):
    if kernel == "split" and "num_splits" in changes:
        pytest.skip("the kernel itself decides on splits")
    inputs = PrefillCase.small(
        (20, 1), (300, 3), format="bf16", num_kv_heads=1, kernel=kernel, **changes
    ).inputs(device)
    _enlarge(inputs.cache)
    _agrees(inputs.run(inputs.plan(), return_lse=True, out_dtype=FP32), inputs.reference())


@pytest.mark.parametrize("kernel", ["fused", "split", "append_then_attend"])
@pytest.mark.parametrize("granularity", ["float", "head", "token_head"])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn"])
def test_an_append_of_a_mean_that_is_finite(fmt, granularity, kernel, device):
    if fmt == "bf16" and granularity != "float":
        pytest.skip("no descales")
    if (fmt, granularity, kernel) == ("fp8_e4m3fn", "float", "append_then_attend"):
        pytest.skip("old values are small; see docs/prefill.md")
    changes = {"format": fmt, "granularity": granularity, "num_kv_heads": 1, "kernel": kernel}
    inputs = PrefillCase.append((70, 1), (200, 3), **changes).inputs(device)
    if fmt == "bf16" or granularity != "float":
        _enlarge(inputs.cache)
        _enlarge(inputs.wanted)
    inputs.new[1].copy_(_large(inputs.new[1]))
    _agrees(inputs.run(inputs.plan(), return_lse=True, out_dtype=FP32), inputs.reference())


@pytest.mark.parametrize("large", [True, False])
def test_float16_tokens_are_added_to_sums_over_a_bf16_cache(large, device):
    """Numerators of the cache's keys are too small for float16, in which the chunk's own are multiplied."""
    case = PrefillCase.append((70, 1), (200, 3), format="bf16", q_dtype=FP16, num_kv_heads=1, kernel="fused")
    inputs = case.inputs(device)
    if large:
        _enlarge(inputs.cache)
        _enlarge(inputs.wanted)
        _agrees(inputs.run(inputs.plan(), return_lse=True, out_dtype=FP32), inputs.reference())
    else:
        assert_agrees(
            inputs.run(inputs.plan(), return_lse=True, out_dtype=FP32), inputs.reference(), bound=5e-4
        )


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("states", [1, 300])
def test_a_merge_of_states_whose_mean_is_finite(states, sinks, device):
    random = torch.Generator().manual_seed(0)
    o = _large(torch.rand(states, 3, 2, 64, generator=random)).to(device)
    lse = torch.rand(states, 3, 2, generator=random).to(device)
    options = {"sinks": torch.tensor([1.0, -1.0], device=device)} if sinks else {}
    _agrees(
        merge_states(o, lse, **options), merge_states_reference(o, lse, **options, out_dtype=FP32), bound=1e-5
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "16bit", "layout": "bf16"}, {"mode": "decode", "layout": "bf16", "splits": 3},
        {"mode": "fused", "layout": "split512"}, {"mode": "decode", "layout": "split512", "splits": 3},
    ],
    ids=str,
)  # fmt: skip
def test_sparse_rows_of_a_mean_that_is_finite(changes, device):
    """Rows serve as keys, too: Q is zero."""
    case = SparseCase.small(**changes, prefix_lens=(200, 0, 33), num_qo_heads=16)
    call = case.inputs(device)
    call.q.zero_()
    rows = call.prefix.rows
    if isinstance(rows, torch.Tensor):
        rows[::2].copy_(_large(rows[::2]))
    else:
        rows.scale.mul_(2.0**110)
    _agrees(call.call(), call.reference(), bound=0.01)


def test_sage_of_a_mean_that_is_finite(device):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, size, 2, 64, generator=random).to(device, BF16) for size in (70, 300, 300))
    v.copy_(_large(v))
    wanted = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 8, -1)
    wanted = torch.einsum("bhqk,bkhd->bqhd", wanted, v.double())
    _agrees(sage_attention(q, k, v), wanted, bound=0.04)


# ------------------------------------------------------------------------------- values that are not finite


def _store(cache: PagedKVCache, place: tuple[Any, ...], value: float) -> None:
    values = cache.logical()[1]
    if values.dtype.itemsize == 1:
        codes = {math.inf: 0x7C, -math.inf: 0xFC, math.nan: 0x7F}
        values.view(torch.uint8)[place] = codes[value]
    else:
        values[place] = value


@pytest.mark.parametrize("kernel", ["decode", *KERNELS])
@pytest.mark.parametrize("fmt", ["fp8_e5m2", "bf16", "fp16"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("key", [5, 79])
def test_an_infinite_value_makes_rows_that_attend_to_it_infinite_or_nan(key, value, fmt, kernel, device):
    """Which of the two depends on the tile; other rows and heads are as they are without it."""
    if kernel == "decode":
        case: Any = DecodeCase.small(lens=(80, 40), gqa_ratio=2, q_len=2, format=fmt)
        first, stop = max(key - 78, 0), 2
    else:
        case = PrefillCase.small((40, 3), (80, 40), gqa_ratio=2, format=fmt, kernel=kernel)
        first, stop = max(key - 40, 0), 40
    inputs = case.inputs(device)
    expected, _ = inputs.reference()
    _store(inputs.cache, (int(inputs.table.page_ids[0, key // 16]), key % 16, 1, 3), value)
    o, lse = inputs.call()
    attends = torch.zeros(o.shape[:2], dtype=torch.bool, device=device)
    attends[first:stop, 2:4] = True
    found = o[attends][:, 3]
    assert not bool(found.isfinite().any())
    assert bool((found.isnan() | (found == value)).all())
    assert not bool(lse[~attends].isnan().any())
    assert_agrees(o[~attends], expected[~attends])


@pytest.mark.parametrize("fmt", ["fp8_e5m2", "fp16"])
@pytest.mark.parametrize(("values", "wanted"), [((1,), math.inf), ((-1,), -math.inf), ((1, -1), math.nan)])
def test_decode_of_one_token_keeps_infinite_values_in_their_channel(values, wanted, fmt, device):
    """In tiles of 16-bit keys before the last tile, where no key is masked."""
    inputs = DecodeCase.small(lens=(300,), gqa_ratio=2, format=fmt, out_dtype=FP32, split="none").inputs(
        device
    )
    expected, _ = inputs.reference()
    for key, sign in enumerate(values, 4):
        _store(inputs.cache, (int(inputs.table.page_ids[0, 0]), key, 1, 3), sign * math.inf)
    o, _ = inputs.call()
    assert torch.equal(o[0, 2:4, 3], torch.full((2,), wanted, device=device)) or math.isnan(wanted)
    assert not bool(o[0, 2:4, 3].isfinite().any())
    o[0, 2:4, 3] = expected[0, 2:4, 3]
    assert_agrees(o, expected)


@pytest.mark.parametrize("kernel", ["decode", *KERNELS])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_query_that_is_not_finite_leaves_other_rows_as_they_are(value, kernel, device):
    """The power of two of a tile of Q goes by its finite elements."""
    if kernel == "decode":
        case: Any = DecodeCase.small(lens=(80, 40), gqa_ratio=2)
    else:
        case = PrefillCase.small((40, 3), (80, 40), gqa_ratio=2, kernel=kernel)
    inputs = case.inputs(device)
    expected, _ = inputs.reference()
    inputs.q[1, 2, 5] = value
    o, lse = inputs.call()
    others = torch.ones(o.shape[:2], dtype=torch.bool, device=device)
    others[1, 2] = False
    assert_agrees(o[others], expected[others])
    assert bool(lse[others].isfinite().all())
