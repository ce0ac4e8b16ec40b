"""`append`'s own gfx942 and gfx950 machine code, run on the CPU: it stores what the reference stores."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from generated_code import both_targets

from narrowkv.paged_cache import CacheFormat, PagedKVCache, Rope, append, append_reference
from narrowkv.quant import KeyTransform, get_format
from narrowkv.testing.cases.cache import differing_bytes
from narrowkv.testing.cases.decode import K8V4
from narrowkv.testing.emulation import emulating

FP4: dict[str, Any] = {"fmt": "fp4_e2m1"}
TOKENS: dict[str, Any] = {"descale": "token_head"}
CASES: dict[str, dict[str, Any]] = {
    **{fmt: {"fmt": fmt} for fmt in ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2")},
    "fp4": {**FP4, "layout": "HND"},
    "fp4, scale group 32": {**FP4, "scale_group": 32, "layout": "HND"},
    "k8v4": {"fmt": K8V4, "head_dim": 96},
    "k8v4, scale group 32": {"fmt": K8V4, "scale_group": 32, "head_dim": 96},
    "fp4, UltraQuant's scales": {**FP4, "scale_group": 32, "exponent": "ultraquant"},
    "fp4, SGLang's scales": {**FP4, "scale_group": 16, "exponent": "sglang"},
    "fp4, NVFP4": {**FP4, "scale_group": 16, "scale_format": "e4m3", "descale": "number"},
    "fp4, E4M3 scales": {**FP4, "scale_format": "e4m3", "layout": "HND"},
    "int4, rope, head_dim 80": {"fmt": "int4", "rope": "neox", "head_dim": 80},
    "int8 with a descale, int4": {"fmt": CacheFormat("int8", "int4"), "layout": "HND", "descale": "own"},
    "int8 with a scale of each token": {"fmt": "int8", **TOKENS, "offset": True},
    "fp4, rope and a K offset, floor": {
        **FP4, "rope": "neox", "offset": True, "exponent": "floor", "queries": 6
    },
    "fp4, rope and a key transform": {
        **FP4, "scale_format": "e4m3", "rope": "gptj", "head_dim": 96, "transform": True
    },
    "descale of each token and a key transform": {**TOKENS, "transform": True},
    "neox rope, all of the head": {"rope": "neox"},
    "gptj rope on a part of the head": {"rope": "gptj", "rotary": 32},
    "rope and a K offset": {"rope": "neox", "offset": True},
    "descale of each token": TOKENS,
    "descale of each head, fp32 input": {"descale": "head", "dtype": torch.float32},
    "vectorised layout": {"layout": "vectorised", "page_size": 16},
    "vectorised bf16": {"layout": "vectorised", "page_size": 16, "fmt": "bf16"},
    "token pool, head_dim 80": {"layout": "tokens", "page_size": 1, "head_dim": 80},
    "HND, fp16 input": {"layout": "HND", "dtype": torch.float16},
    "bf16 with a descale of each head": {"fmt": "bf16", "descale": "head"},
    "bf16 with a descale of each token": {"fmt": "bf16", **TOKENS},
    "head_dim 112, strided columns of wrong numbers beside right ones": {
        "rope": "gptj", "head_dim": 112, "wrong": True, "queries": 3
    },
}  # fmt: skip
PAGES = (("NHD", 3), ("HND", 16), ("tokens", 1), ("concat", 16), ("vectorised", 16))
VALUES = ((None, "head", True), ("neox", "token_head", False), ("gptj", "float", True))
MIXTURES = [
    {"fmt": fmt, "layout": layout, "page_size": size, "rope": rope, "descale": descale, "offset": offset}
    for fmt, (layout, size), (rope, descale, offset) in product(
        ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2"), PAGES, VALUES
    )
    if not (fmt in ("bf16", "fp16") and descale == "token_head")
]


def check_append(
    target: str,
    *,
    fmt: str | CacheFormat = "fp8_e4m3fn",
    scale_group: int | None = None,
    scale_format: str = "e8m0",
    exponent: str = "mse",
    layout: str = "NHD",
    page_size: int = 3,
    head_dim: int = 64,
    rope: str | None = None,
    rotary: int = 64,
    descale: str = "float",
    offset: bool = False,
    transform: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    wrong: bool = False,
    queries: int = 0,
) -> None:
    """`append` as machine code and in torch write the same bytes, and touch no others.

    wrong: some slots and positions are out of range, all in columns of int64 tables; angles are bf16.
    queries: query heads that are rotated, too.
    """
    random = torch.Generator().manual_seed(3)
    heads, pages = 2, 20 // page_size + 1

    def empty() -> PagedKVCache:
        by = {
            "float": (0.03, 0.7),
            "number": (0.03, 0.02),
            "own": (0.03, None),
            "head": (torch.tensor([0.03, 0.05]), torch.tensor([0.7, 0.4])),
            "token_head": tuple(torch.ones(pages, page_size, heads) for _ in range(2)),
        }[descale]
        parsed = CacheFormat.parse(fmt)
        own = get_format(parsed.k).is_packed or get_format(parsed.v).is_packed
        given = {} if own and descale not in ("number", "own") else {"k_descale": by[0], "v_descale": by[1]}
        made = PagedKVCache.empty(
            pages, page_size, heads, head_dim, format=fmt, layout=layout, scale_group=scale_group,
            scale_format=scale_format, **given,
        )  # fmt: skip
        for stored in (made.k, made.v):
            stored.view(torch.uint8).fill_(0x5A)
        return replace(made, key_transform=moved)

    angle = torch.rand(11, rotary // 2, generator=random) * 6
    turn = Rope(
        angle.cos(), angle.sin(), torch.tensor([0, 10, 3, 7], dtype=torch.int32), style=rope or "neox"
    )
    k, v = (torch.randn(4, heads, head_dim, generator=random) for _ in range(2))
    k[2] = 0.0
    k, v = (k * 3).to(dtype), v.to(dtype)
    shift = torch.randn(heads, head_dim, generator=random) if offset else None
    moved = None
    if transform:
        balance = torch.rand(heads, head_dim, generator=random) + 0.5
        moved = KeyTransform(torch.randn(heads, head_dim, generator=random), balance)
    slots = torch.tensor([7, -1, 2, 19], dtype=torch.int32)
    if wrong:
        slots = torch.tensor([[7, 0], [2**32 + 5, 0], [2, 0], [pages * page_size, 0]])[:, 0]
        positions = torch.tensor([[2**40, 0], [3, 0], [-9, 0], [11, 0]])[:, 0]
        turn = replace(turn, cos=turn.cos.bfloat16(), sin=turn.sin.bfloat16(), positions=positions)
    got, want = empty(), empty()
    options: dict[str, Any] = {"rope": turn if rope else None, "k_offset": shift, "exponent": exponent}
    q = torch.randn(4, queries, head_dim, generator=random).to(dtype) if queries else None
    twin = None if q is None else q.clone()
    with emulating(target, detect_hazards=True):
        append(got, k, v, slots, q=q, **options)
    append_reference(want, k, v, slots, q=twin, **options)
    assert q is None or torch.equal(q, twin)
    assert not differing_bytes(got, want)


@pytest.mark.sampled(most=8)
@both_targets
@pytest.mark.parametrize("name", CASES)
def test_append_machine_code_is_byte_exact(name: str, target: str) -> None:
    check_append(target, **CASES[name])


@pytest.mark.slow
@both_targets
@pytest.mark.parametrize("options", MIXTURES, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_append_machine_code_of_every_mixture_is_byte_exact(options: dict[str, Any], target: str) -> None:
    check_append(target, **options)
