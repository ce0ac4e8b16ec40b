"""append: byte-exact against the host reference, in every layout and format, touching nothing else.

Wrong slots and positions are in tests/test_hostile_metadata.py.
"""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowkv.paged_cache import CacheFormat, PagedKVCache, Rope, append, append_reference
from narrowkv.paged_cache.kernels.append import store_offsets
from narrowkv.paged_cache.kernels.pages import KVPointers
from narrowkv.paged_cache.options import StoreArguments, StoreOptions
from narrowkv.quant import KeyTransform
from narrowkv.quant.formats import get_format
from narrowkv.runtime.launch import LaunchOptions, executing, launch
from narrowkv.testing.calls import LaunchRecorder, functions_entered
from narrowkv.testing.cases.cache import copy_cache, differing_bytes
from narrowkv.testing.places import AMD_TARGETS, Place

pytestmark = pytest.mark.sampled

I32 = torch.int32
FORMATS = ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2")
LAYOUTS = (("NHD", 3), ("HND", 16), ("tokens", 1), ("concat", 7), ("vectorised", 16))
HEADS, DIM, PAGES = 2, 64, 6


@dataclass(frozen=True)
class Stored:
    """How a cache stores tokens; the fields are arguments of `PagedKVCache.empty`.

    Attributes:
        descale: a number, "head" for one of each head, or None for a scale per token and head.
        exponent: as for `append`.
        turned: "rope", "gptj", "offset", "both" or "gptj, transform" for what changes K before it is stored;
            "gptj" takes half of the channels.
        dtype: of the tokens that are given.
        queries: query heads that are rotated, too.
        wrong: some slots and positions are out of range, all in columns of int64 tables; angles are bf16.
    """

    format: str | CacheFormat = "fp8_e4m3fn"
    layout: str = "NHD"
    page_size: int = 3
    head_dim: int = DIM
    descale: float | str | None = 0.03
    scale_group: int | None = None
    scale_format: str = "e8m0"
    exponent: str = "mse"
    turned: str = ""
    dtype: torch.dtype = torch.float32
    queries: int = 0
    wrong: bool = False

    def cache(self, device: str = "cpu") -> PagedKVCache:
        """A cache full of 0x5A: what is not appended must stay as it is."""
        descales: dict[str, Any] = {}
        for side in "kv":
            kind = get_format(getattr(CacheFormat.parse(self.format), side)).kind
            if self.descale is None:
                descales[f"{side}_descale"] = torch.zeros(PAGES, self.page_size, HEADS, device=device)
            elif self.descale == "head":
                descales[f"{side}_descale"] = torch.tensor([0.03, 0.7], device=device)
            elif kind in ("float", "fp8") or self.scale_format == "e4m3":
                descales[f"{side}_descale"] = self.descale
        cache = PagedKVCache.empty(
            PAGES, self.page_size, HEADS, self.head_dim, format=self.format, layout=self.layout,
            scale_group=self.scale_group, scale_format=self.scale_format, device=device, **descales,
        )  # fmt: skip
        for x in (cache.k, cache.v, *(() if self.descale == "head" else (cache.k_descale, cache.v_descale))):
            if isinstance(x, torch.Tensor):
                x.view(torch.uint8).fill_(0x5A)
        if "transform" not in self.turned:
            return cache
        shift = torch.linspace(-1, 2, HEADS * self.head_dim, device=device).view(HEADS, -1)
        return replace(cache, key_transform=KeyTransform(shift, 1.5 - shift.abs() / 2))


def _stored() -> Iterator[Stored]:
    integers = ("int8", "int4", *(CacheFormat(*x) for x in (("int8", "int4"), ("bf16", "int4"))))
    integers += (CacheFormat("int8", "fp4_e2m1"),)
    fp4 = ("fp4_e2m1", CacheFormat("fp8_e4m3fn", "fp4_e2m1"))
    for layout, size in LAYOUTS:
        at = {"layout": layout, "page_size": size}
        yield from (Stored(fmt, descale=None, **at) for fmt in ("fp8_e4m3fn", "bf16"))
        for fmt in (*FORMATS, *integers, *fp4, CacheFormat("bf16", "fp8_e4m3fn")):
            formats = CacheFormat.parse(fmt)
            packed = any(get_format(name).is_packed for name in (formats.k, formats.v))
            if (layout == "vectorised" and packed) or (layout == "concat" and formats.k != formats.v):
                continue
            odd = 80 if fmt in integers else 112
            yield Stored(fmt, **at)
            yield Stored(fmt, head_dim=odd, turned="rope", **at)
            if layout == "HND":
                yield from (Stored(fmt, turned=turned, **at) for turned in ("offset", "both"))
            if layout == "HND" and fmt in fp4:
                yield Stored(fmt, descale=1.0, scale_format="e4m3", turned="both", **at)
            if fmt not in fp4:
                continue
            for group in (None, 16, 32):
                for exponent in ("mse", "floor", "ceil") if layout == "NHD" else ("mse",):
                    yield Stored(fmt, head_dim=96, scale_group=group, exponent=exponent, **at)
                for number in (1.0, 0.3, 0.01):
                    yield Stored(fmt, descale=number, scale_group=group, scale_format="e4m3", **at)


BF16, FP4 = torch.bfloat16, "fp4_e2m1"
OTHERS = [
    Stored(dtype=BF16, turned="gptj"),
    Stored(dtype=BF16, turned="gptj", head_dim=112, wrong=True, queries=3),
    Stored(FP4, dtype=BF16, turned="both", exponent="floor", queries=6),
    Stored(FP4, descale=1.0, scale_format="e4m3", head_dim=96, turned="gptj, transform"),
    Stored(FP4, scale_group=32, exponent="ultraquant"),
    Stored(FP4, scale_group=16, exponent="sglang"),
    Stored(descale=None, dtype=BF16, turned="transform"),
    Stored(descale="head"),
    Stored("bf16", descale="head", dtype=BF16),
    Stored(layout="HND", dtype=torch.float16),
]
# Machine code takes seconds a case: every third of the product.
EVERYWHERE = [
    *((case, "here") for case in (*_stored(), *OTHERS)),
    *((case, target) for target in AMD_TARGETS for case in (*list(_stored())[::3], *OTHERS)),
]


def _tokens(count: int, device: str = "cpu", head_dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    """Ordinary tokens, and from the second on: zeros, tiny and huge, ties, one sign, far apart in size."""
    generator = torch.Generator().manual_seed(2)
    k, v = torch.randn(2, max(count, 6), HEADS, head_dim, generator=generator)
    k[1], k[2, 0], k[2, 1], v[4] = 0, 1e-40, 1e30, v[4].abs() + 1
    k[3, :, 0], k[3, :, 1:] = 7.5, 0.5
    k[5] *= torch.logspace(-3, 3, head_dim)
    return k[:count].to(device), v[:count].to(device)


def _rope(positions: torch.Tensor, rotary_dim: int = 32, style: str = "neox", rows: int = 11) -> Rope:
    angle = torch.rand(rows, rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    return Rope(angle.cos().to(positions.device), angle.sin().to(positions.device), positions, style)


def _both(cache: PagedKVCache, *args: Any, **options: Any) -> PagedKVCache:
    """Appends, and compares with what the host reference appends to a copy; returns the cache before."""
    before, want = copy_cache(cache), copy_cache(cache)
    append(cache, *args, **options)
    append_reference(want, *args, **options)
    assert not differing_bytes(cache, want)
    return before


def _of_case(case: Stored, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Six tokens of a case, their slots, and the options of `append`."""
    k, v = (x.to(case.dtype) for x in _tokens(6, device, case.head_dim))
    if "fp4" in str(case.format) or "int" in str(case.format):
        k[0, 0, 3], k[0, 1, 5], v[3, 1, 7] = math.nan, math.inf, math.nan
    slots = torch.tensor([4, 0, 1, -1, 3, 2], dtype=I32, device=device)
    positions = torch.tensor([0, 10, 3, 7, 2, 5], device=device)
    options: dict[str, Any] = {"exponent": case.exponent}
    if case.wrong:
        slots = torch.tensor([[4, 0], [2**32 + 5, 0], [1, 0], [PAGES * case.page_size, 0], [3, 0], [2, 0]])
        slots, positions = slots.to(device)[:, 0], positions.repeat(2, 1).T[:, 0]
        positions[1:3] = torch.tensor([2**40, -9], device=device)
    if "gptj" in case.turned:
        options["rope"] = _rope(positions, case.head_dim // 2, "gptj")
    if case.turned in ("rope", "both"):
        options["rope"] = _rope(positions, case.head_dim)
    if case.turned in ("offset", "both"):
        options["k_offset"] = torch.linspace(-1, 1, HEADS * case.head_dim, device=device).view(HEADS, -1)
    if case.wrong:
        rope = options["rope"]
        options["rope"] = replace(rope, cos=rope.cos.bfloat16(), sin=rope.sin.bfloat16())
    return k, v, slots, options


@pytest.mark.sampled("place", most=dict.fromkeys(AMD_TARGETS, 4))
@pytest.mark.parametrize(("case", "place"), EVERYWHERE, ids=str, indirect=["place"])
def test_bytes_equal_the_host_quantiser(case: Stored, place: Place) -> None:
    """Also as machine code, watched for races and hazards."""
    cache = case.cache(place.device)
    k, v, slots, options = _of_case(case, place.device)
    before, want = copy_cache(cache), copy_cache(cache)
    queries = torch.randn(6, case.queries, case.head_dim, generator=torch.manual_seed(4))
    mine, twin = (queries.to(place.device, case.dtype) if case.queries else None for _ in range(2))
    with place.context():
        append(cache, k, v, slots, q=mine, **options)
    append_reference(want, k, v, slots, q=twin, **options)
    assert not differing_bytes(cache, want)
    assert mine is None or twin is None or torch.equal(mine, twin)
    assert cache.dequantize()[1].shape == (PAGES, case.page_size, HEADS, case.head_dim)
    differ = differing_bytes(cache, before)
    assert {"k", "v"} <= differ.keys()
    for name in ("k", "v", "k_descale", "v_descale"):
        now, then = getattr(cache, name), getattr(before, name)
        if isinstance(now, torch.Tensor) and now.dim() > 2 and case.layout == "NHD":
            now, then = (x.view(torch.uint8).flatten(0, 1)[5:] for x in (now, then))
            assert torch.equal(now, then), f"{name}: a slot that was not named was written"


def test_a_row_of_zeros_has_a_descale_of_one(device: str) -> None:
    cache = Stored(descale=None).cache(device)
    append(cache, *_tokens(2, device), torch.tensor([0, 4], device=device))
    assert isinstance(cache.k_descale, torch.Tensor)
    assert cache.k_descale[1, 1].tolist() == [1.0, 1.0]


# ---- RoPE


@pytest.mark.parametrize(("style", "rotary_dim"), [("neox", 64), ("gptj", 64), ("neox", 32), ("gptj", 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rope_takes_the_halves_of_an_engines_table(
    dtype: torch.dtype, style: str, rotary_dim: int, device: str
) -> None:
    rope = _rope(torch.tensor([0, 10, 3, 7], device=device), rotary_dim, style)
    cos, sin = torch.cat([rope.cos, rope.sin], 1).to(dtype).split(rotary_dim // 2, 1)
    slots = torch.arange(4, device=device)
    _both(Stored().cache(device), *_tokens(4, device), slots, rope=replace(rope, cos=cos, sin=sin))


@pytest.mark.parametrize(("style", "rotary_dim"), [("neox", 64), ("gptj", 64), ("neox", 32), ("gptj", 32)])
@pytest.mark.parametrize("num_qo_heads", [2, 14])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_queries_packed_with_keys_are_rotated_in_the_same_launch(
    dtype: torch.dtype, num_qo_heads: int, style: str, rotary_dim: int, device: str
) -> None:
    rope = _rope(torch.tensor([0, 10, 3, 7], device=device), rotary_dim, style)
    slots = torch.tensor([5, -1, 2, 400], device=device)  # two of them are stored nowhere
    packed = torch.randn(4, num_qo_heads + 2 * HEADS, DIM, generator=torch.manual_seed(4)).to(device, dtype)
    twin, caches = packed.clone(), [Stored().cache(device) for _ in range(2)]
    for _ in range(2):  # the second call finds the launch prepared
        for operation, cache, x in ((append, caches[0], packed), (append_reference, caches[1], twin)):
            q, k, v = x.split([num_qo_heads, HEADS, HEADS], 1)
            operation(cache, k, v, slots, rope=rope, q=q)
        assert torch.equal(packed, twin)
    assert not differing_bytes(*caches)


def test_rope_rotates_by_the_angle() -> None:
    cache = PagedKVCache.empty(1, 2, 1, 64, format="fp16")
    angle = torch.full((1, 32), math.pi / 2)
    k = torch.zeros(1, 1, 64)
    k[0, 0, 0] = 1.0
    append(
        cache, k, k, torch.zeros(1, dtype=I32), rope=Rope(angle.cos(), angle.sin(), torch.zeros(1, dtype=I32))
    )
    stored = cache.k[0, 0, 0].float()
    assert stored[32] == 1.0, "a quarter turn takes the first half to the second"
    assert abs(float(stored[0])) < 1e-6


# ---- numbers


# Tiny values are kept, large ones saturate, zeros never become 0x80.
@pytest.mark.parametrize(
    ("fmt", "top"), [("fp8_e4m3fn", 448.0), ("fp8_e4m3fnuz", 240.0), ("fp8_e5m2", 57344.0)]
)
def test_extremes_saturate_and_zero_is_never_negative(fmt: str, top: float, device: str) -> None:
    cache = PagedKVCache.empty(1, 1, 1, 64, format=fmt, device=device)
    x = torch.zeros(1, 1, 64, device=device)
    smallest = float(torch.finfo(cache.k.dtype).smallest_normal) / (4 if fmt == "fp8_e5m2" else 8)
    x[0, 0, :6] = torch.tensor([1e9, -math.inf, smallest, -smallest, -smallest / 4, -0.0], device=device)
    append(cache, x, x, torch.zeros(1, device=device, dtype=I32))
    assert cache.k.view(-1).float()[:6].tolist() == [top, -top, smallest, -smallest, 0.0, 0.0]
    assert not bool((cache.k.view(torch.uint8) == 0x80).any())


@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_stays_in_its_place(fmt: str, device: str) -> None:
    cache = PagedKVCache.empty(1, 1, 2, 64, format=fmt, device=device)
    x = torch.ones(1, 2, 64, device=device)
    x[0, 1, 5] = math.nan
    append(cache, x, x, torch.zeros(1, device=device, dtype=I32))
    assert cache.k.float().isnan().nonzero().tolist() == [[0, 0, 1, 5]]


@pytest.mark.parametrize("descale", [4.0, torch.tensor(4.0), torch.tensor([4.0]), torch.tensor([4.0, 2.0])])
@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8_e4m3fn"])
def test_static_descales_divide_what_is_stored(fmt: str, descale: Any, device: str) -> None:
    given = descale.to(device) if isinstance(descale, torch.Tensor) else descale
    cache = PagedKVCache.empty(1, 1, HEADS, DIM, format=fmt, device=device, k_descale=given, v_descale=given)
    x = torch.full((1, HEADS, DIM), 6.0, device=device)
    _both(cache, x, x, torch.zeros(1, device=device, dtype=I32))
    assert cache.k[0, 0, 0, 0] == 1.5
    for back in cache.dequantize():
        assert back.unique().tolist() == [6.0]


def test_a_16_bit_cache_with_descales_per_token_gets_ones(device: str) -> None:
    descales = {name: torch.full((1, 2, HEADS), 9.0, device=device) for name in ("k_descale", "v_descale")}
    cache = PagedKVCache.empty(1, 2, HEADS, DIM, format="bf16", device=device, **descales)
    k, v = _tokens(1, device)
    append(cache, k, v, torch.ones(1, device=device, dtype=I32))
    assert descales["k_descale"].tolist() == [[[9.0, 9.0], [1.0, 1.0]]]
    assert torch.equal(cache.dequantize()[1][0, 1], v[0].bfloat16().float())


# ---- refusals

WIDE, SLOTS = torch.zeros(2, HEADS + 1, DIM), torch.arange(2, dtype=I32)
GAPS, Q, PACKED = torch.zeros(2, HEADS, DIM, 2)[..., 0], torch.zeros(2, 6, DIM), torch.zeros(2, 8, DIM)
ROPE = _rope(torch.zeros(2, dtype=I32), 16, rows=4)
# Changes that a later call must see are of one thing alone: dtypes and strides stay.
RIGHT: dict[str, Any] = {"k_new": WIDE[:, :HEADS], "v_new": WIDE[:, :HEADS], "slot_mapping": SLOTS}


def _slots(*slots: int, **more: Any) -> dict[str, Any]:
    return {"slot_mapping": torch.tensor(slots), **more}


def _turned(**changes: Any) -> dict[str, Any]:
    return {"rope": replace(ROPE, **changes)}


def _at(*positions: int) -> dict[str, Any]:
    return {**_turned(positions=torch.tensor(positions)), "validate": True}


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("dtype", {"k_new": WIDE[:, :HEADS].to(torch.int8)}, TypeError, "k_new"),
    ("heads", {"k_new": WIDE}, ValueError, "k_new must have shape"),
    ("heads of both, strides as before", {"k_new": WIDE, "v_new": WIDE}, ValueError, "k_new must have shape"),
    ("heads that are the page size", {"k_new": WIDE}, ValueError,
     r"k_new must have shape \[tokens, 2, 64\] .*page_size 3 and 2 KV heads: .* in layout 'HND'\?"),
    ("lengths", {"v_new": torch.zeros(3, HEADS + 1, DIM)[:, :HEADS]}, ValueError, "v_new must have shape"),
    ("gaps in K", {"k_new": GAPS}, ValueError, "k_new must have a contiguous last dimension"),
    ("gaps in V", {"v_new": GAPS}, ValueError, "v_new must have a contiguous last dimension"),
    ("grad", {"k_new": WIDE.clone()[:, :HEADS].requires_grad_()}, ValueError, "must not require"),
    ("K's class", {"k_new": [[1.0]]}, TypeError, "k_new must be a torch.Tensor, got list"),
    ("another device", {"v_new": torch.zeros(2, HEADS, DIM, device="meta")}, ValueError,
     "v_new must be on cpu like k, got meta"),
    ("cache's class", {"cache": {}}, TypeError, "cache must be a PagedKVCache, got dict"),
    ("offset's shape", {"k_offset": torch.zeros(DIM)}, ValueError, "k_offset must have shape"),
    ("exponent", {"exponent": ["mse"]}, TypeError, "exponent must be a str"),
    ("slots' class", {"slot_mapping": [0, 1]}, TypeError, "slot_mapping must be a torch.Tensor, got list"),
    ("slots' dtype", {"slot_mapping": SLOTS.short()}, TypeError, "slot_mapping"),
    ("slots' length", {"slot_mapping": torch.arange(3).int()}, ValueError, "slot_mapping must have shape"),
    ("slot out of range", _slots(0, 18, validate=True), ValueError, "slot_mapping must hold -1 or slots in"),
    ("negative slot", _slots(-2, 1, validate=True), ValueError, "slot_mapping must hold -1 or slots in"),
    ("slot beyond 32 bits", _slots(2**32 + 5, 1, validate=True), ValueError, "slot_mapping must hold -1"),
    ("slot twice", _slots(4, 4, validate=True), ValueError, "slot_mapping must not hold a slot twice"),
    ("rope's class", {"rope": (ROPE.cos,) * 3}, TypeError, "rope must be a Rope, got tuple"),
    ("rope too wide", {"rope": _rope(SLOTS, 2 * DIM)}, ValueError, "rope.cos must have at most"),
    ("rope's style", _turned(style="llama"), ValueError, "rope.style"),
    ("no position", _turned(cos=ROPE.cos[:0], sin=ROPE.sin[:0]), ValueError, "cos must have at least one"),
    ("cos in fp64", _turned(cos=ROPE.cos.double()), TypeError, "rope.cos must have dtype"),
    ("sin of another length", _turned(sin=ROPE.sin[:3]), ValueError, "rope.sin must have shape"),
    ("positions' length", _turned(positions=torch.arange(3, dtype=I32)), ValueError,
     r"rope.positions must have shape \[2\]"),
    ("positions' dtype", _turned(positions=torch.zeros(2)), TypeError, "rope.positions must have dtype"),
    *((f"position {bad}", _at(bad, bad), ValueError, rf"positions must lie in \[0, 4\), got {bad}..{bad}")
      for bad in (4, -1, 2**32 + 1, -(2**32) + 1)),
    ("queries without rope", {"q": Q}, ValueError, "q must come with rope"),
    ("queries' tokens", {"rope": ROPE, "q": Q[:1]}, ValueError,
     r"q must have shape \[2, num_qo_heads, 64\]"),
    ("queries' dtype", {"rope": ROPE, "q": Q.int()}, TypeError, "q must have dtype"),
    ("queries that are keys", {"rope": ROPE, "q": RIGHT["k_new"]}, ValueError,
     "q must not share memory with k_new"),
    ("queries that reach into keys", {"rope": ROPE, "q": PACKED[:, 1:7], "k_new": PACKED[:, 6:]}, ValueError,
     "q must not share memory with k_new"),
    ("queries that overlap", {"rope": ROPE, "q": Q[:, :1].expand(2, 6, DIM)}, ValueError,
     "q must not overlap itself"),
]  # fmt: skip


@functools.cache
def _prepare() -> None:
    """Calls with RoPE and queries, which prepare the launches of caches of the same kind."""
    for options in ({}, {"q": Q}):
        append(Stored().cache(), **RIGHT, rope=ROPE, **options)


@pytest.mark.sampled("prepared")
@pytest.mark.parametrize("prepared", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize(("change", "error", "match"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_a_refused_append_leaves_the_cache_as_it_was(
    change: dict[str, Any], error: type[Exception], match: str, prepared: bool
) -> None:
    cache = Stored().cache()
    if prepared:
        _prepare()
        append(cache, **RIGHT)
    before = copy_cache(cache)
    with pytest.raises(error, match=match):
        append(**{"cache": cache, **RIGHT, **change})
    assert not differing_bytes(cache, before)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("shape", [(), (1,), (HEADS,)], ids=str)
@pytest.mark.parametrize("side", ["k_descale", "v_descale"])
def test_bad_values_of_descale_tensors_are_found(
    side: str, shape: tuple[int, ...], bad: float, device: str
) -> None:
    descale = torch.full(shape, 0.5, device=device)
    descale.view(-1)[-1] = bad
    cache = PagedKVCache.empty(
        2, 4, HEADS, DIM, format="fp8_e4m3fn", device=device, validate=False, **{side: descale}
    )
    arguments = *_tokens(2, device), torch.arange(2, device=device)
    append(cache, *arguments, validate=False)
    before = copy_cache(cache)
    for validate in (None, True):
        with pytest.raises(ValueError, match=f"{side} must be finite and greater than 0"):
            append(cache, *arguments, validate=validate)
        assert not differing_bytes(cache, before)


INSIDE: dict[str, Callable[[PagedKVCache], dict[str, Any]]] = {
    "cache.k": lambda cache: {"k_new": cache.k[1]},
    "cache.v": lambda cache: {"v_new": cache.v[0]},
    "cache.v_descale": lambda cache: {
        "rope": Rope(*cache.v_descale[:, :, 0].split(1, 1)[:2], torch.arange(4, device=cache.k.device))  # type: ignore[index]
    },
    r"q must not share memory with cache.k": lambda cache: {
        "q": cache.k[1], "rope": _rope(torch.arange(4, device=cache.k.device))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_new_tokens_within_the_cache_are_refused_in_every_call(name: str, device: str) -> None:
    descales = {name: torch.ones(PAGES, 4, HEADS, device=device) for name in ("k_descale", "v_descale")}
    cache = PagedKVCache.empty(PAGES, 4, HEADS, DIM, format="bf16", device=device, **descales)
    x, slots = torch.zeros(4, HEADS, DIM, device=device).bfloat16(), torch.arange(4, device=device)
    message = name if name.startswith("q ") else f"{name} must not share memory with"
    for _ in range(2):
        append(cache, x, x, slots)
        before = copy_cache(cache)
        with pytest.raises(ValueError, match=message):
            append(cache, **{"k_new": x, "v_new": x, "slot_mapping": slots, **INSIDE[name](cache)})
        assert not differing_bytes(cache, before)


def test_caches_that_cannot_be_appended_to_are_refused() -> None:
    one = torch.zeros(1, HEADS, DIM)
    k = torch.zeros(1, 4, HEADS, DIM).bfloat16().expand(3, 4, HEADS, DIM)
    with pytest.raises(ValueError, match=r"cache.k must not overlap itself"):
        append(PagedKVCache.from_tensors(k, k, format="bf16"), one, one, SLOTS[:1])
    k = torch.zeros(4, 2, HEADS, DIM, dtype=torch.float8_e4m3fn)
    per_page = PagedKVCache.from_tensors(
        k, k.clone(), format="fp8_e4m3fn", k_descale=torch.ones(4, HEADS), v_descale=1.0,
        k_granularity="page_head",
    )  # fmt: skip
    with pytest.raises(ValueError, match="cannot change the descale of tokens that are stored already"):
        append(per_page, one, one, SLOTS[:1])


def test_a_cache_of_some_heads_of_another_is_of_another_kind(device: str) -> None:
    stored = torch.zeros(2, 2, 4, 2 * HEADS, DIM, device=device).bfloat16()
    new = torch.ones(3, 2 * HEADS, DIM, device=device).bfloat16()
    slots = torch.arange(3, device=device)
    for heads in (2 * HEADS, HEADS):  # of equal strides
        stored.zero_()
        part = stored[..., :heads, :]
        own = new[:, :heads]
        append(PagedKVCache.from_tensors(part[0], part[1], format="bf16"), own, own, slots)
        assert stored.count_nonzero() == 2 * 3 * heads * DIM


def test_no_tokens_and_no_pages_change_nothing(device: str) -> None:
    cache = Stored().cache(device)
    before = copy_cache(cache)
    for dtype in (I32, torch.int64):
        append(cache, *_tokens(0, device), torch.zeros(0, dtype=dtype, device=device))
        append(cache, *_tokens(0, device), torch.zeros(0, dtype=dtype, device=device), validate=True)
    assert not differing_bytes(cache, before)
    none = torch.zeros(0, 4, HEADS, DIM, device=device).bfloat16()
    empty = PagedKVCache.from_tensors(none, none, format="bf16")
    append(empty, *_tokens(2, device), torch.tensor([0, 3], device=device))


# ---- addresses


@pytest.mark.gpu
@pytest.mark.large_memory
def test_slots_beyond_2_31_bytes() -> None:
    pages = (2**31 // (16 * HEADS * DIM)) + 2
    cache = PagedKVCache.empty(pages, 16, HEADS, DIM, format="fp8_e4m3fn", device="cuda")
    assert cache.needs_64_bit_addresses
    x = torch.ones(1, HEADS, DIM, device="cuda")
    append(cache, x, 2 * x, torch.tensor([pages * 16 - 1], device="cuda", dtype=I32))
    assert cache.v[-1, -1].float().unique().tolist() == [2.0]
    assert int(cache.v[:-1].view(torch.uint8).count_nonzero()) == 0


def test_heads_far_apart_in_memory_are_found(device: str) -> None:
    """The second head lies 2**31 elements behind the first: its offset does not fit 32 bits."""
    memory = torch.empty(2**31 + 4 * DIM, dtype=torch.uint8, device=device)
    far = memory.as_strided((2, 1, 2, DIM), (DIM, DIM, 2**31, 1)).view(torch.float8_e4m3fn)
    v = torch.zeros(2, 1, 2, DIM, dtype=torch.float8_e4m3fn, device=device)
    cache = PagedKVCache.from_tensors(far, v, format="fp8_e4m3fn", k_descale=1.0, v_descale=1.0)
    assert cache.needs_64_bit_addresses
    x = torch.ones(1, 2, DIM, device=device)
    append(cache, 2 * x, x, torch.ones(1, device=device, dtype=I32))
    assert far[1].float().unique().tolist() == [2.0]


def test_new_tokens_far_apart_in_memory_are_found(device: str) -> None:
    """The third head lies 2**31 elements behind the first: its offset does not fit 32 bits."""
    memory = torch.empty(2**31 + DIM, dtype=torch.bfloat16, device=device)
    far = memory.as_strided((1, 3, DIM), (DIM, 2**30, 1))
    far.copy_(torch.arange(1.0, 4.0, device=device)[None, :, None].expand(1, 3, DIM))
    cache = PagedKVCache.empty(1, 1, 3, DIM, format="bf16", device=device)
    append(cache, far, far, torch.zeros(1, device=device, dtype=I32))
    for stored in (cache.k, cache.v):
        assert stored[0, 0, :, 0].tolist() == [1.0, 2.0, 3.0]


@triton.jit
def _offsets_kernel(out, kv, head, VEC: tl.constexpr):
    one = tl.arange(0, 1).to(tl.int64)
    at = store_offsets(kv, one, one, head, tl.arange(0, 2), VEC, True)
    tl.store(out + tl.arange(0, 1)[:, None] + tl.arange(0, 2)[None, :], at)


@pytest.mark.parametrize("vec", [0, 16])
def test_a_heads_offset_has_64_bits_whatever_its_number_has(vec: int, device: str) -> None:
    out = torch.zeros(2, dtype=torch.int64, device=device)
    kv = KVPointers(out, 1, 1, 2**30, 1)
    launch(_offsets_kernel, (1,), (out, kv, 6), {"VEC": vec}, LaunchOptions(num_warps=1))
    assert out.tolist() == [6 * 2**30, 6 * 2**30 + max(vec, 1)]


# ---- calls


def test_tensors_without_memory_never_reach_the_kernel() -> None:
    cache, real, slots = Stored().cache(), _tokens(2), torch.arange(2)
    append(cache, *real, slots)
    before = copy_cache(cache)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (*real, slots)]
        fake_cache = PagedKVCache.empty(2, 3, HEADS, DIM, format="fp8_e4m3fn")
        append(fake_cache, *fakes)  # goes through torch.ops.narrowkv.append, which runs nothing
    with pytest.raises(TypeError, match="needs tensors that have memory, got a FakeTensor"):
        append(cache, *fakes)
    functional = [torch._to_functional_tensor(x) for x in (*real, slots)]
    with pytest.raises(TypeError, match="needs tensors that have memory, got a FunctionalTensor"):
        append(cache, *functional)
    assert not differing_bytes(cache, before)


def test_what_append_remembers_of_a_cache_does_not_keep_its_memory() -> None:
    cache = Stored("bf16").cache()
    append(cache, *_tokens(2), torch.arange(2))
    memory = weakref.ref(cache.k)
    del cache
    gc.collect()
    assert memory() is None


def test_a_later_call_of_a_kind_enters_few_python_functions() -> None:
    caches = [Stored().cache() for _ in range(2)]
    with executing(LaunchRecorder("sm90")) as recorder:
        for cache in caches:  # layers of one model
            append(cache, *_tokens(4), torch.arange(4), rope=_rope(torch.zeros(4, dtype=I32)))
        for tokens in (4, 1, 7):
            k, v = _tokens(tokens)
            slots, turn = torch.arange(tokens), _rope(torch.zeros(tokens, dtype=I32))
            assert len(functions_entered(lambda: append(caches[1], k, v, slots, rope=turn))) <= 17  # noqa: B023
    constants = [launch.constexprs for launch in recorder.launches]
    assert all(c is constants[0] for c in constants), "every layer and count launches what was prepared once"


def test_options_are_the_keywords_of_the_arguments_and_others_are_refused() -> None:
    assert StoreOptions.__annotations__.keys() == StoreArguments._field_defaults.keys()
    for way in (append, append_reference):
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'offset'"):
            way(Stored().cache(), **RIGHT, offset=None)


@pytest.mark.gpu
def test_tensors_of_another_device_are_refused_in_every_call() -> None:
    cache, slots = Stored().cache("cuda"), torch.arange(2, device="cuda")
    k, v = _tokens(2, "cuda")
    for _ in range(2):
        append(cache, k, v, slots)
        for change in ({"k_new": k.cpu()}, {"v_new": v.cpu()}, {"slot_mapping": slots.cpu()}):
            with pytest.raises(ValueError, match="must be on cuda:0 like k, got cpu"):
                append(cache, **({"k_new": k, "v_new": v, "slot_mapping": slots} | change))


@pytest.mark.gpu
def test_a_captured_append_stores_what_its_inputs_hold_when_it_is_replayed() -> None:
    cache = Stored().cache("cuda")
    k, v = torch.randn(2, 3, HEADS, DIM, device="cuda").bfloat16()
    slots = torch.arange(3, device="cuda")
    append(cache, k, v, slots)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(cache, k, v, slots)
    for begin in (5, 11):
        k.mul_(2)
        slots.copy_(torch.arange(begin, begin + 3))
        graph.replay()
        one = PagedKVCache.empty(1, 3, HEADS, DIM, format="fp8_e4m3fn", k_descale=0.03, device="cuda")
        append_reference(one, k, v, torch.arange(3, device="cuda"))
        got = cache.dequantize()[0].view(-1, HEADS, DIM)[begin : begin + 3]
        assert torch.equal(got, one.dequantize()[0][0])
