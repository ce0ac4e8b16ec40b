"""The indexer's logits against fp64, what is refused, and what wrong numbers stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.quant import compare
from narrowkv.runtime.launch import run_as
from narrowkv.sparse_fp8.indexer import (
    IndexKeys,
    IndexKeysFormat,
    index_logits,
    index_logits_reference,
    plan_index_logits,
)
from narrowkv.testing.cases.indexer import FORMATS, LAYOUTS, IndexCase
from narrowkv.testing.checking import check

pytestmark = pytest.mark.sampled

C = IndexCase.small
FP8 = torch.float8_e4m3fn
I32, I64 = torch.int32, torch.int64
# The interpreter multiplies exactly and sums in fp32.
EXACT = 1e-6


def assert_right(case: IndexCase, device: str) -> None:
    inputs = case.inputs(device)
    result = check(case, inputs, bound=EXACT if device == "cpu" else None)
    assert result.passed, f"{case}: {result.detail}"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_format(layout: str, format: str, device: str) -> None:
    for lens in ((70, 5, 33), (0, 1), (16, 17, 15), (129,)):
        assert_right(C(layout=layout, format=format, q=format, lens=lens), device)


@pytest.mark.parametrize("q", FORMATS)
@pytest.mark.parametrize("layout", ["rows", "pages", "packed"])
def test_fp4_keys(layout: str, q: str, device: str) -> None:
    for head_dim, lens in ((32, (70, 5)), (64, (0, 1)), (128, (33,)), (256, (129,))):
        assert_right(C(layout=layout, format="fp4_e2m1", q=q, head_dim=head_dim, lens=lens), device)
    if layout != "rows":
        assert_right(C(layout=layout, format="fp4_e2m1", q=q, q_len=3, lens=(20, 5)), device)


def test_fp4_groups_of_very_different_size(device: str) -> None:
    x = torch.randn(40, 128) * torch.exp2(torch.arange(4) * 20.0 - 40).repeat_interleave(32)
    keys = IndexKeys.quantize(x, format="fp4_e2m1")
    keys = IndexKeys(keys.values.to(device), keys.scale.to(device), keys.format)
    inputs = C(layout="rows", head_dim=128, lens=(31,)).inputs(device)
    where = {name: bound.clamp(max=40) for name, bound in inputs.where.items()}
    found = index_logits(inputs.q, inputs.weights, keys, **where)
    expected = index_logits_reference(inputs.q, inputs.weights, keys, **where)
    # Terms of both signs may all but cancel: the error is bounded by their magnitudes.
    terms = index_logits_reference(inputs.q, inputs.weights.abs(), keys, **where)
    inside = expected > -torch.inf
    assert ((found[inside].double() - expected[inside]).abs() <= 1e-5 * terms[inside]).all()


def test_packed_fp4_pages_end_with_the_scales_of_their_groups() -> None:
    buffer = torch.zeros(3, 64, 68, dtype=torch.uint8)
    keys = IndexKeys.packed(buffer, format="fp4_e2m1")
    assert (keys.values.shape, keys.scale.shape) == ((3, 64, 64), (3, 64, 4))
    page = buffer[1].view(-1)
    page[5 * 64 + 16] = 0x72  # key 5, channels 32 and 33: codes 2 and 7, which are 1 and 6
    page[64 * 64 + 5 * 4 + 1] = 128
    assert keys.dequantize()[1, 5, 32:34].tolist() == [2.0, 12.0]
    assert int(keys.dequantize().count_nonzero()) == 2


@pytest.mark.parametrize("q", FORMATS)
@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90"])
def test_formats_that_a_target_does_not_multiply(q: str, target: str) -> None:
    for format in FORMATS:
        case = C(q=q, format=format, lens=(70, 5))
        with run_as(target):
            results = case.inputs().call()
        assert check(case, case.inputs(), results, bound=EXACT).passed


@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 5, 6, 7, 8])
def test_each_token_of_a_sequence_scores_the_keys_up_to_its_own(q_len: int, device: str) -> None:
    case = C(q_len=q_len, lens=(70, 3, q_len))
    assert_right(case, device)
    logits = case.inputs(device).logits()
    keys = (logits > -torch.inf).sum(-1).view(3, q_len).tolist()
    assert keys == [[max(0, length - q_len + 1 + j) for j in range(q_len)] for length in case.lens]


@pytest.mark.parametrize("heads", [1, 7, 16, 33, 64, 128])
def test_any_number_of_heads(heads: int, device: str) -> None:
    assert_right(C(num_heads=heads, lens=(70, 5)), device)
    assert_right(C(num_heads=heads, layout="rows", lens=(70, 5)), device)


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_every_head_dim(head_dim: int, device: str) -> None:
    assert_right(C(head_dim=head_dim, layout="packed", lens=(70, 5)), device)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 100])
def test_any_page_size(page_size: int, device: str) -> None:
    assert_right(C(page_size=page_size, layout="pages", lens=(70, 5, 101)), device)


def test_what_is_outside_is_left_as_it_is(device: str) -> None:
    for layout in ("rows", "packed"):
        inputs = C(layout=layout, clean=False).inputs(device)
        inside = inputs.reference()[1] == 0
        out = torch.full(inside.shape, 7.0, device=device)
        assert inputs.logits(out=out) is out
        assert bool((out[~inside] == 7.0).all())
        assert torch.equal(out[inside], replace(inputs.case, clean=True).inputs(device).logits()[inside])


def test_columns_beyond_and_before_a_table_and_outputs_apart(device: str) -> None:
    inputs = C(q_len=2).inputs(device)
    whole = inputs.logits()
    assert torch.equal(inputs.logits(num_columns=40), whole[:, :40])
    wider = inputs.logits(num_columns=whole.shape[1] + 9)
    assert torch.equal(wider[:, :-9], whole)
    assert bool((wider[:, -9:] == -torch.inf).all())
    room = torch.full((whole.shape[0], 2 * whole.shape[1]), 7.0, device=device)
    inputs.logits(out=room[:, : whole.shape[1]])
    assert torch.equal(room[:, : whole.shape[1]], whole)
    assert bool((room[:, whole.shape[1] :] == 7.0).all())


def test_strided_queries_weights_tables_and_lengths(device: str) -> None:
    for layout in ("rows", "packed"):
        t = C(layout=layout).inputs(device)
        q = torch.zeros(t.q.shape[0], 2, *t.q.shape[1:], dtype=torch.uint8, device=device)
        q[:, 1] = t.q.view(torch.uint8)
        weights = t.weights.T.contiguous().T
        where = {name: torch.stack([x, x - 1], -1)[..., 0] for name, x in t.where.items()}
        found = index_logits(q[:, 1].view(FP8), weights, t.keys, **where)
        assert torch.equal(found, t.logits())
        wide = {name: x.long() for name, x in where.items()}
        assert torch.equal(index_logits(t.q, t.weights, t.keys, **wide), found)


def test_a_packed_cache_is_read_where_it_lies() -> None:
    buffer = torch.zeros(5, 16, 1, 36, dtype=torch.uint8)
    apart = torch.zeros(5, 640, dtype=torch.uint8).as_strided((5, 16, 36), (640, 36, 1))
    for cache in (buffer, buffer.view(FP8), apart):
        keys = IndexKeys.packed(cache)
        keys.values[3, 2] = 0x38
        keys.scale[3, 2] = 0.5
        page = cache.view(torch.uint8)[3].reshape(-1)
        assert page[64:96].tolist() == [0x38] * 32
        assert page[16 * 32 + 8 : 16 * 32 + 12].tolist() == [0, 0, 0, 0x3F]
        assert keys.dequantize()[3, 2].tolist() == [0.5] * 32


def test_shuffled_pages_are_tiles_of_16_keys_by_16_channels() -> None:
    plain = IndexKeys.quantize(torch.randn(64, 64), page_size=32)
    tiles = plain.values.reshape(2, 2, 16, 4, 16).transpose(2, 3).contiguous().view(2, 32, 64)
    assert torch.equal(IndexKeys(tiles, plain.scale, shuffled=True).dequantize(), plain.dequantize())


def test_nan_products_count_as_zero_and_a_nan_scale_shows(device: str) -> None:
    t = C(layout="rows", lens=(40,)).inputs(device)
    t.keys.values.view(torch.uint8)[3, 5] = 0x7F
    t.keys.scale[4] = torch.nan
    logits = t.logits()
    assert logits[0, 3] == 0.0
    assert torch.isnan(logits[0, 4])
    assert torch.isfinite(logits[0, 5:40]).all()


def test_one_kernel_serves_calls_of_all_lengths_and_widths() -> None:
    plan = plan_index_logits(num_heads=8, keys=IndexKeysFormat(head_dim=32, page_size=16), device="cpu")
    assert len(plan.kernels()) == 1
    for lens in ((70, 5, 33), (1,), (0, 0)):
        t = C(lens=lens).inputs()
        found = plan.run(t.q, t.weights, t.keys, **t.where)
        assert torch.equal(found, t.logits())
        assert torch.equal(index_logits(t.q, t.weights, t.keys, **t.where, plan=plan), found)
    assert plan.kernels() == plan.kernels()
    assert "16 tokens" not in plan.explain()


def _call(layout: str = "packed", **changes: Any) -> Any:
    inputs = C(layout=layout, lens=(20, 5), q_len=1).inputs()
    arguments = {"q": inputs.q, "weights": inputs.weights, "keys": inputs.keys, **inputs.where}
    arguments |= {name: change(arguments) if callable(change) else change for name, change in changes.items()}
    return index_logits(**arguments)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "16-bit queries": ({"q": lambda a: a["q"].bfloat16()}, "q must have dtype one of"),
    "queries of another width": (
        {"q": torch.zeros(2, 8, 64).to(FP8)},
        r"q must have shape \[num_tokens, 8, 32\]",
    ),
    "weights of fewer heads": ({"weights": torch.ones(2, 7)}, r"weights must have shape \[2, 8\]"),
    "16-bit weights": ({"weights": torch.ones(2, 8).half()}, "weights must have dtype torch.float32"),
    "a tensor as keys": ({"keys": torch.zeros(2, 8)}, "keys must be a IndexKeys, got Tensor"),
    "no table": (
        {"block_table": None},
        "keys in pages go with block_table and seq_lens alone, got block_table = None",
    ),
    "bounds beside pages": ({"starts": torch.zeros(2, dtype=I32)}, "alone, got starts"),
    "lengths of another batch": ({"seq_lens": torch.zeros(3, dtype=I32)}, r"seq_lens must have shape \[2\]"),
    "lengths in fp32": ({"seq_lens": torch.zeros(2)}, "seq_lens must have dtype"),
    "a table of one dimension": ({"block_table": torch.zeros(2, dtype=I32)}, "block_table must have shape"),
    "a ninth token": (
        {"q": torch.zeros(18, 8, 32).to(FP8), "weights": torch.ones(18, 8)},
        "q must have 1 to 8 tokens for each",
    ),
    "tokens without a sequence": ({"q": torch.zeros(3, 8, 32).to(FP8)}, "q must have 1 to 8 tokens for each"),
    "no columns": ({"num_columns": 0}, "num_columns must be at least 1"),
    "an output of another width": ({"out": torch.zeros(2, 5)}, r"out must have shape \[2, 48\]"),
    "an output in bf16": ({"out": torch.zeros(2, 48).bfloat16()}, "out must have dtype"),
    "an output over its weights": ({"out": lambda a: a["weights"].expand(2, 8)}, "out must have shape"),
    "129 heads": ({"q": torch.zeros(2, 129, 32).to(FP8)}, "num_heads must be at most 128"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused(what: str) -> None:
    changes, message = WRONG[what]
    with pytest.raises((TypeError, ValueError), match=message):
        _call(**changes)


def test_keys_without_pages_take_bounds_alone() -> None:
    with pytest.raises(ValueError, match="num_columns must be None"):
        _call("rows", num_columns=3)
    with pytest.raises(ValueError, match="keys without pages go with starts and ends alone, got seq_lens"):
        _call("rows", seq_lens=torch.zeros(2, dtype=I32))
    with pytest.raises(ValueError, match="alone, got ends = None"):
        _call("rows", ends=None)


def test_plans_refuse_other_calls() -> None:
    plan = plan_index_logits(
        num_heads=8, keys=IndexKeysFormat(head_dim=32, page_size=16), q_len=2, device="cpu"
    )
    with pytest.raises(ValueError, match="q must have 4 tokens, 2 for each of 2 sequences"):
        _call(plan=plan)
    with pytest.raises(ValueError, match="keys must be stored as planned"):
        _call("rows", plan=plan)
    with pytest.raises(ValueError, match="clean must be left out with a plan"):
        _call(plan=plan, clean=False)
    with pytest.raises(ValueError, match="q_len must be at most 1"):
        plan_index_logits(num_heads=8, keys=IndexKeysFormat(), q_len=2, device="cpu")
    with pytest.raises(ValueError, match="q_len must be at most 8"):
        plan_index_logits(num_heads=8, keys=IndexKeysFormat(page_size=64), q_len=9, device="cpu")


BAD_KEYS: dict[str, tuple[Any, str]] = {
    "a width of 48": (
        lambda: IndexKeys(torch.zeros(3, 48).to(FP8), torch.ones(3)),
        "head_dim must be one of",
    ),
    "scales of fewer keys": (
        lambda: IndexKeys(torch.zeros(3, 32).to(FP8), torch.ones(2)),
        "scale must have shape",
    ),
    "scales in fp16": (
        lambda: IndexKeys(torch.zeros(3, 32).to(FP8), torch.ones(3).half()),
        "scale must have dtype",
    ),
    "another format": (
        lambda: IndexKeys(torch.zeros(3, 32).to(FP8), torch.ones(3), "fp8_e4m3fnuz"),
        "values in format fp8_e4m3fnuz",
    ),
    "FP8 of two mantissa bits": (
        lambda: IndexKeys(torch.zeros(3, 32, dtype=torch.uint8), torch.ones(3), "fp8_e5m2"),
        "format must be one of",
    ),
    "scales that require grad": (
        lambda: IndexKeys(torch.zeros(3, 32).to(FP8), torch.ones(3, requires_grad=True)), "pass scale.detach",
    ),
    "shuffled pages of 24 tokens": (
        lambda: IndexKeys(torch.zeros(2, 24, 32).to(FP8), torch.ones(2, 24), shuffled=True),
        "multiple of 16 tokens",
    ),
    "shuffled rows": (
        lambda: IndexKeys(torch.zeros(32, 32).to(FP8), torch.ones(32), shuffled=True),
        "multiple of 16 tokens",
    ),
    "FP4 with one scale a key": (
        lambda: IndexKeys(torch.zeros(3, 16, dtype=torch.uint8), torch.ones(3), "fp4_e2m1"),
        "scale must have dtype torch.uint8",
    ),
    "FP4 with scales of fewer groups": (
        lambda: IndexKeys(
            torch.zeros(3, 64, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8), "fp4_e2m1"
        ),
        "scale must have shape",
    ),
    "shuffled FP4": (
        lambda: IndexKeys(
            torch.zeros(2, 16, 64, dtype=torch.uint8), torch.zeros(2, 16, 4, dtype=torch.uint8), "fp4_e2m1",
            True,
        ),
        "shuffled keys must be in FP8",
    ),
    "136 bytes a key": (
        lambda: IndexKeys.packed(torch.zeros(2, 64, 136, dtype=torch.uint8)), "bytes a key, got 136",
    ),
    "pages with gaps": (
        lambda: IndexKeys.packed(torch.zeros(2, 64, 140, dtype=torch.uint8)[:, :, :132]), "contiguous pages",
    ),
    "pages two bytes apart": (
        lambda: IndexKeys.packed(torch.zeros(999, dtype=torch.uint8).as_strided((2, 4, 36), (146, 36, 1))),
        "at a multiple of 4 bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_KEYS)
def test_keys_cannot_claim_what_their_tensors_do_not_hold(what: str) -> None:
    make, message = BAD_KEYS[what]
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_an_output_that_overlaps_an_input_is_refused() -> None:
    inputs = C(layout="rows", lens=(8,)).inputs()
    room = torch.zeros(8 + inputs.keys.num_pages)
    weights = room[:8].view(1, 8).copy_(inputs.weights)
    with pytest.raises(ValueError, match="out must not share memory with weights"):
        index_logits(
            inputs.q, weights, inputs.keys, **inputs.where, out=room[None, 4 : 4 + inputs.keys.num_pages]
        )


def test_empty_calls(device: str) -> None:
    keys = IndexKeys.quantize(torch.randn(4, 32)[:0])
    bound = torch.zeros(0, dtype=I32)
    q = torch.zeros(0, 8, 32).to(FP8)
    assert index_logits(q, torch.zeros(0, 8), keys, starts=bound, ends=bound).shape == (0, 0)
    some = torch.zeros(2, dtype=I32)
    assert index_logits(
        torch.zeros(2, 8, 32).to(FP8), torch.zeros(2, 8), keys, starts=some, ends=some
    ).shape == (2, 0)


def test_the_reference_is_what_the_model_says() -> None:
    """One logit, written out."""
    inputs = C(layout="packed", lens=(20,), q_len=2).inputs()
    logits = index_logits_reference(inputs.q, inputs.weights, inputs.keys, **inputs.where)
    page, slot = int(inputs.where["block_table"][0, 1]), 2
    key = inputs.keys.native[page, slot].double() * inputs.keys.scale[page, slot].double()
    wanted = sum(
        float(w) * max(float(q.double() @ key), 0.0)
        for w, q in zip(inputs.weights[0], inputs.q[0], strict=True)
    )
    assert float(logits[0, 18]) == pytest.approx(wanted, rel=1e-12)
    assert logits[0, 19] == -torch.inf
    assert logits[1, 19] > -torch.inf


def test_a_quantised_key_is_near() -> None:
    x = torch.randn(100, 128)
    for format in FORMATS:
        assert compare(IndexKeys.quantize(x, format=format).dequantize(), x).relative_l1 < 0.03
