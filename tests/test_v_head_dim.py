"""Caches whose V is narrower than K: every operation and kernel that takes them, and what refuses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import DecodeShape, paged_decode, plan_decode
from narrowkv.attn_prefill import plan_prefill
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope, append, append_reference
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.checking import check

WIDTHS: dict[str, Any] = {"head_dim": 192, "v_head_dim": 128}
LATENT: dict[str, Any] = {"head_dim": 576, "v_head_dim": 512}
FORMATS = ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz")
SPLITS: dict[str, Any] = {"num_splits": 3, "lens": (20, 5, 200)}
OPTIONS: dict[str, Any] = {"window_left": 12, "sinks": True, "logits_soft_cap": 3.0}


def decodes() -> list[DecodeCase]:
    base = DecodeCase(lens=(70, 5, 130), num_kv_heads=2, gqa_ratio=3, page_size=8, **WIDTHS)
    changes: list[dict[str, Any]] = [
        *({"format": name} for name in FORMATS),
        *({"split": split, "format": "bf16"} for split in ("none", "even", "per_sequence")),
        *({"layout": layout, "page_size": 16} for layout in ("HND", "concat", "vectorised", "padded")),
        *({"granularity": name} for name in ("head", "sequence_head", "page_head", "token_head")),
        {"q_len": 4, "tree": "random", "split": "even"}, {"q_len": 30, "gqa_ratio": 4, "sinks": True},
        {"window_left": 40, "sinks": True, "logits_soft_cap": 5.0, "ragged": True},
        {"q_dtype": torch.float8_e4m3fn}, {"head_dim": 96, "v_head_dim": 80},
        *({"format": name, **LATENT} for name in ("bf16", "fp8_e4m3fn")), {"q_len": 4, **LATENT},
    ]  # fmt: skip
    return [replace(base, **change) for change in changes]


def prefills() -> list[PrefillCase]:
    changes: list[dict[str, Any]] = [{}, {"format": "bf16"}, SPLITS, {**OPTIONS, "granularity": "token_head"}]
    reads = [PrefillCase(kernel=kernel, **WIDTHS) for kernel in ("dense", "fused", "split")]
    found = [replace(case, **change) for case in reads for change in changes if case.kernel != "split" or not
             change.keys() & SPLITS.keys()]  # fmt: skip
    found.append(PrefillCase(kernel="decode", q_lens=(1, 1, 1), **WIDTHS))
    found.append(PrefillCase(q_dtype=torch.float8_e4m3fn, **WIDTHS))
    changes.append({"rope": "neox", "rotary_dim": 64})
    for kernel in ("append_then_attend", "fused", "split"):
        case = PrefillCase(operation="append", kernel=kernel, **WIDTHS)
        found += [replace(case, **each) for each in changes if kernel != "split" or "num_splits" not in each]
    return [*found, PrefillCase(operation="append", fp8_compute=True, **WIDTHS)]


@pytest.mark.sampled(always=[{"case": PrefillCase(kernel="dense", **WIDTHS)}], most=12)
@pytest.mark.parametrize("case", [*decodes(), *prefills()], ids=str)
def test_attention_agrees_with_the_reference(case: Any) -> None:
    inputs = case.inputs()
    results = inputs.call()
    assert results[0].shape == (*inputs.q.shape[:2], case.v_head_dim)
    assert check(case, inputs, results).passed
    assert not inputs.wrong_bytes()


@pytest.mark.sampled(always=[{"head_dim": 96, "fmt": "fp8_e4m3fn", "layout": "NHD"}], most=5)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", ["NHD", "HND", "concat", "vectorised"])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(192, 128), (96, 80), (576, 512)])
def test_append_stores_what_the_reference_stores(
    head_dim: int, v_head_dim: int, layout: str, fmt: str
) -> None:
    descale = 0.05 if fmt.startswith("fp8") else None
    own, wanted = (
        PagedKVCache.empty(
            4,
            16,
            2,
            head_dim,
            v_head_dim=v_head_dim,
            format=fmt,
            layout=layout,
            k_descale=descale,
            v_descale=descale,
        )
        for _ in range(2)
    )
    assert own.bytes_per_token() == 2 * (head_dim + v_head_dim) * own.k.element_size()
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(7, 2, width, generator=generator).bfloat16() for width in (head_dim, v_head_dim))
    angle = torch.rand(9, 32, generator=generator)
    slots, rope = torch.tensor([63, 5, 0, -1, 17, 16, 40]), Rope(angle.cos(), angle.sin(), torch.arange(7))
    for one in (k, v):
        one[3] = torch.nan  # padding
    append(own, k, v, slots, rope=rope)
    append_reference(wanted, k, v, slots, rope=rope)
    for stored, right in zip(own.logical(), wanted.logical(), strict=True):
        assert torch.equal(stored.view(torch.uint8), right.view(torch.uint8))
    assert [x.shape[3] for x in own.dequantize()] == [head_dim, v_head_dim]
    assert own.dequantize()[1].any()


def test_a_conversion_keeps_both_widths() -> None:
    cache = PagedKVCache.empty(4, 16, 2, 192, v_head_dim=128, format="bf16")
    cache.v.fill_(3.0)
    stored = cache.convert("fp8_e4m3fn", layout="HND")
    assert (stored.head_dim, stored.v_head_dim) == (192, 128)
    assert torch.allclose(stored.dequantize()[1], torch.tensor(3.0), rtol=1e-6)
    with pytest.raises(UnsupportedError, match="unless K and V are both in 16 bits or FP8"):
        cache.convert("int8")


def _empty(head_dim: int, v_head_dim: int, fmt: str = "bf16") -> Callable[[], object]:
    return lambda: PagedKVCache.empty(4, 16, 2, head_dim, v_head_dim=v_head_dim, format=fmt)


def _of_tensors(k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    return lambda: PagedKVCache.from_tensors(k, v, format="bf16")


_K = torch.zeros(4, 16, 2, 128).bfloat16()
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a wider V": (_empty(128, 192), "v_head_dim must be head_dim, or less"),
    "a wider V of an engine": (_of_tensors(_K, torch.zeros(4, 16, 2, 192).bfloat16()), "or less and one of"),
    "a V that no kernel has": (_empty(128, 72), "got v_head_dim 72 with head_dim 128"),
    "K of 576 channels with as wide a V": (_empty(576, 576), "got v_head_dim 576 with head_dim 576"),
    "no channels": (_empty(128, 0), "v_head_dim"),
    "FP4": (_empty(192, 128, "fp4_e2m1"), "both in 16 bits or FP8, got v_head_dim 128"),
    "INT8": (_empty(192, 128, "int8"), "both in 16 bits or FP8"),
    "other heads": (_of_tensors(_K, torch.zeros(4, 16, 1, 64).bfloat16()), "v must hold the same"),
    "a plan": (
        lambda: plan_decode(
            DecodeShape(1, 1, 2, 2, 192, 16, 64, v_head_dim=128), "int4", device="cpu"
        ), "both in 16 bits or FP8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "match"), REFUSED.values(), ids=REFUSED)
def test_widths_that_no_kernel_serves_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_tensors_of_the_wrong_width_are_refused() -> None:
    inputs = DecodeCase.small(**WIDTHS).inputs()
    q, cache, table = inputs.q, inputs.cache, inputs.table
    with pytest.raises(ValueError, match=r"out must have shape \[3, 24, 128\]"):
        paged_decode(q, cache, table, out=torch.empty_like(q))
    k, slots = torch.zeros(2, 2, 192), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"v_new must have shape \[tokens, 2, 128\]"):
        append(cache, k, k, slots)
    one_width = PagedKVCache.empty(4, 16, 2, 192, format="fp8_e4m3fn")
    for plan in (plan_decode(q, cache, table), plan_prefill(q, cache, table, torch.arange(4).int())):
        with pytest.raises(ValueError, match="v_head_dim, page_size"):
            plan.kernels(one_width)


def test_prefill_refuses_the_width_that_only_decode_has() -> None:
    inputs = DecodeCase.small(**LATENT).inputs()
    with pytest.raises(ValueError, match=r"q must have head_dim in \(64, .*512\), got 576"):
        plan_prefill(inputs.q, inputs.cache, inputs.table, torch.arange(4).int())


def test_shapes_say_their_width_and_forget_it_when_it_is_that_of_k() -> None:
    shape = DecodeShape(1, 1, 2, 2, 192, 16, 64, v_head_dim=128)
    assert shape.v_dim == 128
    same = replace(shape, v_head_dim=192)
    assert (same.v_dim, replace(same, head_dim=64).v_dim) == (192, 64)
    assert same == DecodeShape(1, 1, 2, 2, 192, 16, 64)


def test_a_compiled_call_has_the_width_of_v() -> None:
    inputs = DecodeCase.small(**WIDTHS).inputs()
    cache = inputs.cache
    assert isinstance(inputs.table.seq_lens, torch.Tensor)

    def attend(q: torch.Tensor, ids: torch.Tensor, lens: torch.Tensor) -> Any:
        return paged_decode(q, cache, PageTable.from_block_table(ids, lens, page_size=16))

    given = inputs.q, inputs.table.page_ids, inputs.table.seq_lens
    found = torch.compile(attend, backend="eager", fullgraph=True)(*given)
    assert found.shape == (3, 24, 128)
    assert torch.equal(found, attend(*given))
    right, _ = inputs.reference()
    assert relative_l1(found, right) < 0.002


def _on_hopper() -> list[Any]:
    decode = DecodeCase(lens=(64,) * 4, num_kv_heads=8, stale_columns=512, clean=True, **WIDTHS)
    chunk = PrefillCase(
        q_lens=(512,), lens=(512,), num_kv_heads=8, gqa_ratio=12, stale_columns=352, clean=True, **WIDTHS
    )
    appended = replace(chunk, operation="append")
    cases = [
        decode, replace(decode, q_len=2), replace(decode, gqa_ratio=1),
        replace(decode, **LATENT), replace(decode, q_len=4, **LATENT),
        *(replace(chunk, kernel=kernel) for kernel in ("dense", "fused", "split")),
        *(replace(appended, kernel=kernel) for kernel in ("append_then_attend", "fused", "split")),
    ]  # fmt: skip
    return [replace(case, format=name) for case in cases for name in ("bf16", "fp8_e4m3fn")]


@pytest.mark.codegen_all
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("case", _on_hopper(), ids=str)
def test_at_most_four_registers_spill_on_hopper(case: Any, sm90_code: Any) -> None:
    inputs = case.inputs()
    inputs.call(inputs.plan())
    assert sm90_code.kernels
    for kernel in sm90_code.kernels:
        # Over FP8 ptxas spills registers of programs that widen, to keep 64 or 128: two, in "split" four.
        assert kernel.stack_bytes() <= 16, kernel.compiled.metadata.name
        assert kernel.shared_bytes <= 227 * 1024
