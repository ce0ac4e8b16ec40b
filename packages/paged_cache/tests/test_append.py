"""append: byte-exact against the host reference, in every layout and format, touching nothing else."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowkv.paged_cache import CacheFormat, PagedKVCache, Rope, append, append_reference
from narrowkv.paged_cache.kernels.append import store_offsets
from narrowkv.paged_cache.kernels.pages import KVPointers
from narrowkv.runtime.launch import LaunchOptions, executing, launch
from narrowkv.testing.calls import LaunchRecorder, functions_entered

pytestmark = pytest.mark.sampled

I32 = torch.int32
LAYOUTS = [("NHD", 3), ("HND", 16), ("tokens", 1), ("concat", 7), ("vectorised", 16)]
FORMATS = ["bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2"]
HEADS, DIM, PAGES = 2, 64, 5


def _bytes(cache: PagedKVCache) -> list[torch.Tensor]:
    return [t.contiguous().view(torch.uint8).clone() for t in (cache.k, cache.v)]


def _cache(
    fmt: str | CacheFormat, layout: str, page_size: int, device: str, per_token: bool = False
) -> PagedKVCache:
    descale: dict[str, object] = {"k_descale": 0.03, "v_descale": 0.7}
    if per_token:
        descale = {name: torch.zeros(PAGES, page_size, HEADS, device=device) for name in descale}
    cache = PagedKVCache.empty(
        PAGES, page_size, HEADS, DIM, format=fmt, layout=layout, device=device, **descale
    )
    torch.manual_seed(1)
    for t in (cache.k, cache.v):  # poison: what is not appended must stay as it is
        raw = t.view(torch.uint8) if t.element_size() == 1 else t.view(torch.int16)
        raw.copy_(torch.randint(0, 127, raw.shape, device=device))
    return cache


def _tokens(count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    k = torch.randn(count, HEADS, DIM, device=device) * 3
    v = torch.randn(count, HEADS, DIM, device=device)
    return k.bfloat16(), v.bfloat16()


def _both(cache: PagedKVCache, twin: PagedKVCache, *args: object, **options: object) -> None:
    append(cache, *args, **options)  # type: ignore[arg-type]
    append_reference(twin, *args, **options)  # type: ignore[arg-type]
    for got, want in zip(_bytes(cache), _bytes(twin), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("layout", "page_size"), LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_bytes_equal_the_host_quantiser_in_every_layout_and_format(
    fmt: str, layout: str, page_size: int, device: str
) -> None:
    k, v = _tokens(5, device)
    slots = torch.randperm(PAGES * page_size)[:5].to(device, I32)
    slots[2] = -1
    _both(*(_cache(fmt, layout, page_size, device) for _ in range(2)), k, v, slots)


@pytest.mark.parametrize(("layout", "page_size"), LAYOUTS)
def test_per_token_head_descales_are_computed_and_stored(layout: str, page_size: int, device: str) -> None:
    k, v = _tokens(4, device)
    k[1] = 0
    cache, twin = (_cache("fp8_e4m3fn", layout, page_size, device, per_token=True) for _ in range(2))
    slots = torch.tensor([4, 0, 3, 1], device=device, dtype=I32)
    _both(cache, twin, k, v, slots)
    assert torch.equal(cache.k_descale, twin.k_descale)
    assert torch.equal(cache.v_descale, twin.v_descale)
    page, position = divmod(0, page_size)
    assert cache.k_descale[page, position].tolist() == [1.0, 1.0], "an all-zero row has a finite descale"


@pytest.mark.parametrize("style", ["neox", "gptj"])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rope_is_fused_in_both_styles_and_leaves_the_rest_of_the_head(
    style: str, rotary_dim: int, device: str
) -> None:
    angle = torch.rand(11, rotary_dim // 2, device=device) * 6
    positions = torch.tensor([0, 10, 3, 7], device=device, dtype=I32)
    rope = Rope(angle.cos(), angle.sin(), positions, style)
    k, v = _tokens(4, device)
    _both(
        *(_cache("fp8_e4m3fn", "NHD", 3, device) for _ in range(2)),
        k,
        v,
        torch.arange(4, device=device, dtype=I32),
        rope=rope,
    )


@pytest.mark.parametrize(("style", "rotary_dim"), [("neox", 64), ("gptj", 64), ("neox", 32), ("gptj", 32)])
@pytest.mark.parametrize("num_qo_heads", [2, 14])
def test_queries_packed_with_keys_are_rotated_in_the_same_launch(
    num_qo_heads: int, style: str, rotary_dim: int, device: str
) -> None:
    angle = torch.rand(11, rotary_dim // 2, device=device) * 6
    table = torch.cat([angle.cos(), angle.sin()], 1).bfloat16()
    positions = torch.tensor([0, 10, 3, 7], device=device)
    rope = Rope(table[:, : rotary_dim // 2], table[:, rotary_dim // 2 :], positions, style)
    slots = torch.tensor([5, -1, 2, 400], device=device)  # two of them are stored nowhere
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator().manual_seed(4)
        packed = torch.randn(4, num_qo_heads + 2 * HEADS, DIM, generator=generator).to(device, dtype)
        twin = packed.clone()
        caches = [_cache("fp8_e4m3fn", "NHD", 3, device) for _ in range(2)]
        for _ in range(2):  # the second call finds the launch prepared
            for operation, cache, x in ((append, caches[0], packed), (append_reference, caches[1], twin)):
                q, k, v = x.split([num_qo_heads, HEADS, HEADS], 1)
                operation(cache, k, v, slots, rope=rope, q=q)
            assert torch.equal(packed, twin)
        assert all(torch.equal(a, b) for a, b in zip(*map(_bytes, caches), strict=True))


def test_queries_that_cannot_be_rotated_in_place_are_refused() -> None:
    cache, slots, rope = _cache("bf16", "NHD", 3, "cpu"), torch.arange(4), _rope(4, 16)
    k, v = _tokens(4, "cpu")
    q = torch.zeros(4, 6, DIM).bfloat16()
    packed = torch.zeros(4, 8, DIM).bfloat16()
    inside = torch.zeros(PAGES, 4, HEADS, DIM).bfloat16()
    for _ in range(2):
        append(cache, k, v, slots, rope=rope, q=q)
        for wrong, message in (
            ({"q": q, "rope": None}, "q must come with rope"),
            ({"q": q[:3]}, r"q must have shape \[4, num_qo_heads, 64\]"),
            ({"q": q.int()}, "q must have dtype"),
            ({"q": k}, "q must not share memory with k_new"),
            ({"q": packed[:, 1:7], "k_new": packed[:, 6:]}, "q must not share memory with k_new"),
            ({"q": q[:, :1].expand(4, 6, DIM)}, "q must not overlap itself"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                append(cache, **({"k_new": k, "v_new": v, "slot_mapping": slots, "rope": rope} | wrong))
        own = PagedKVCache.from_tensors(inside, inside.clone(), format="bf16")
        with pytest.raises(ValueError, match=r"q must not share memory with cache.k"):
            append(own, k, v, slots, rope=rope, q=inside[0])


def test_rope_rotates_by_the_angle() -> None:
    cache = PagedKVCache.empty(1, 2, 1, 64, format="fp16")
    angle = torch.full((1, 32), math.pi / 2)
    k = torch.zeros(1, 1, 64)
    k[0, 0, 0] = 1.0
    rope = Rope(angle.cos(), angle.sin(), torch.zeros(1, dtype=I32), "neox")
    append(cache, k, k, torch.zeros(1, dtype=I32), rope=rope)
    stored = cache.k[0, 0, 0].float()
    assert stored[32] == 1.0, "a quarter turn takes the first half to the second"
    assert abs(float(stored[0])) < 1e-6


def test_an_offset_is_subtracted_after_rope_and_before_quantising(device: str) -> None:
    offset = torch.randn(HEADS, DIM, device=device)
    k, v = _tokens(3, device)
    args = k, v, torch.arange(3, device=device, dtype=I32)
    _both(*(_cache("fp8_e4m3fn", "NHD", 3, device) for _ in range(2)), *args, k_offset=offset)


def test_k_and_v_may_differ_in_format(device: str) -> None:
    fmt = CacheFormat(k="bf16", v="fp8_e4m3fn")
    _both(
        *(_cache(fmt, "HND", 16, device) for _ in range(2)),
        *_tokens(3, device),
        torch.arange(3, device=device, dtype=I32),
    )


def _guarded(fmt: str, layout: str, page_size: int, device: str) -> tuple[PagedKVCache, list[torch.Tensor]]:
    """A cache in the middle of larger tensors, and these tensors: nothing around it may change."""
    guard, around = 7, []
    one = PagedKVCache.empty(PAGES, page_size, HEADS, DIM, format=fmt, layout=layout, scale_group=None)
    parts = {}
    for name in ("k", "v", "k_descale", "v_descale"):
        stored = getattr(one, name)
        if isinstance(stored, torch.Tensor):
            rows = torch.zeros((PAGES + 2 * guard, *stored.shape[1:]), dtype=stored.dtype, device=device)
            rows.view(torch.uint8).fill_(0x5A)
            around.append(rows)
            parts[name] = rows[guard : guard + PAGES]
    return replace(one, **parts), around


# Near ones lie in the guard zones, the low 32 bits of far ones are slots of the cache.
NEAR_SLOTS = [-1, 15, 16, -7]
FAR_SLOTS = [2**32, 2**32 + 5, 2**33 + 14, 5 - 2**32, 2**40 + 3, -(2**63)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn", "fp4_e2m1"])
def test_padding_and_slots_beyond_the_cache_write_nothing(fmt: str, layout: str, device: str) -> None:
    cache, around = _guarded(fmt, layout, 3, device)
    before = [t.clone() for t in around]
    for wrong, dtype in ((NEAR_SLOTS, I32), (FAR_SLOTS, torch.int64), ([*NEAR_SLOTS, 2**31 - 1], I32)):
        slots = torch.tensor(wrong, device=device, dtype=dtype)
        append(cache, *_tokens(len(wrong), device), slots)
        for a, b in zip(before, around, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    append(cache, *_tokens(1, device), torch.tensor([14], device=device))
    assert not torch.equal(before[0].view(torch.uint8), around[0].view(torch.uint8)), "the last slot is one"


@pytest.mark.parametrize(
    "slots",
    [[0, 15], [-2, 1], [4, 4], [2**32 + 5, 1]],
    ids=["out of range", "negative", "twice", "beyond 32 bits"],
)
def test_bad_slots_are_found_under_validate_and_the_cache_is_unchanged(slots: list[int], device: str) -> None:
    cache = _cache("fp8_e4m3fn", "NHD", 3, device)
    before = _bytes(cache)
    with pytest.raises(ValueError, match="slot_mapping must"):
        append(cache, *_tokens(2, device), torch.tensor(slots, device=device), validate=True)
    assert all(torch.equal(a, b) for a, b in zip(before, _bytes(cache), strict=True))


# Tiny values are kept, large ones saturate, zeros never become 0x80.
def test_extremes_saturate_and_zero_is_never_negative(device: str) -> None:
    for fmt, top in [("fp8_e4m3fn", 448.0), ("fp8_e4m3fnuz", 240.0), ("fp8_e5m2", 57344.0)]:
        cache = PagedKVCache.empty(1, 1, 1, 64, format=fmt, device=device)
        x = torch.zeros(1, 1, 64, device=device)
        smallest = float(torch.finfo(cache.k.dtype).smallest_normal) / (4 if fmt == "fp8_e5m2" else 8)
        x[0, 0, :6] = torch.tensor([1e9, -math.inf, smallest, -smallest, -smallest / 4, -0.0], device=device)
        append(cache, x, x, torch.zeros(1, device=device, dtype=I32))
        stored = cache.k.view(-1).float()[:6].tolist()
        assert stored == [top, -top, smallest, -smallest, 0.0, 0.0]
        assert not bool((cache.k.view(torch.uint8) == 0x80).any())


def test_nan_stays_in_its_place(device: str) -> None:
    for fmt in FORMATS:
        cache = PagedKVCache.empty(1, 1, 2, 64, format=fmt, device=device)
        x = torch.ones(1, 2, 64, device=device)
        x[0, 1, 5] = math.nan
        append(cache, x, x, torch.zeros(1, device=device, dtype=I32))
        assert cache.k.float().isnan().nonzero().tolist() == [[0, 0, 1, 5]], fmt


def _rope(tokens: int, rotary_dim: int, **options: Any) -> Rope:
    angle = torch.ones(4, rotary_dim // 2)
    return Rope(angle, angle.clone(), torch.zeros(tokens, dtype=I32), **options)


REFUSED = [
    ("dtype", {"k_new": torch.zeros(2, HEADS, DIM, dtype=torch.int8)}, TypeError, "k_new"),
    ("heads", {"k_new": torch.zeros(2, 3, DIM)}, ValueError, "k_new must have shape"),
    (
        "heads of both",
        {name: torch.zeros(2, 5, DIM) for name in ("k_new", "v_new")},
        ValueError,
        "k_new must have shape",
    ),
    ("lengths", {"v_new": torch.zeros(3, HEADS, DIM)}, ValueError, "v_new must have shape"),
    ("slots' dtype", {"slot_mapping": torch.zeros(2, dtype=torch.int16)}, TypeError, "slot_mapping"),
    (
        "slots' length",
        {"slot_mapping": torch.zeros(3, dtype=I32)},
        ValueError,
        "slot_mapping must have shape",
    ),
    (
        "strided last dimension",
        {"v_new": torch.zeros(2, HEADS, 2 * DIM)[..., ::2]},
        ValueError,
        "contiguous last dimension",
    ),
    ("offset's shape", {"k_offset": torch.zeros(DIM)}, ValueError, "k_offset must have shape"),
    ("grad", {"k_new": torch.zeros(2, HEADS, DIM, requires_grad=True)}, ValueError, "must not require grad"),
    (
        "rope too wide",
        {"rope": _rope(2, 2 * DIM)},
        ValueError,
        "rope.cos must have at most",
    ),
    (
        "rope style",
        {"rope": _rope(2, 16, style="llama")},
        ValueError,
        "rope.style",
    ),
    ("rope's class", {"rope": (torch.ones(4, 8),) * 3}, TypeError, "rope must be a Rope, got tuple"),
    ("positions' length", {"rope": _rope(3, 16)}, ValueError, r"rope.positions must have shape \[2\]"),
    (
        "positions' dtype",
        {"rope": replace(_rope(2, 16), positions=torch.zeros(2))},
        TypeError,
        "rope.positions must have dtype",
    ),
    (
        "no position",
        {"rope": replace(_rope(2, 16), cos=torch.ones(0, 8), sin=torch.ones(0, 8))},
        ValueError,
        "rope.cos must have at least one position",
    ),
    (
        "cos in fp64",
        {"rope": replace(_rope(2, 16), cos=torch.ones(4, 8).double())},
        TypeError,
        "rope.cos must have dtype",
    ),
    (
        "sin of another length",
        {"rope": replace(_rope(2, 16), sin=torch.ones(3, 8))},
        ValueError,
        "rope.sin must have shape",
    ),
    ("exponent", {"exponent": ["mse"]}, TypeError, "exponent must be a str"),
    ("K's class", {"k_new": [[1.0]]}, TypeError, "k_new must be a torch.Tensor, got list"),
    ("slots' class", {"slot_mapping": [0, 1]}, TypeError, "slot_mapping must be a torch.Tensor, got list"),
    ("cache's class", {"cache": {}}, TypeError, "cache must be a PagedKVCache, got dict"),
    (
        "another device",
        {"v_new": torch.zeros(2, HEADS, DIM, device="meta")},
        ValueError,
        "v_new must be on cpu like k, got meta",
    ),
    (
        "heads that are the page size",
        {"k_new": torch.zeros(2, 3, DIM)},
        ValueError,
        r"k_new must have shape \[tokens, 2, 64\] .*page_size 3 and 2 KV heads: .* in layout 'HND'\?",
    ),
]


@pytest.mark.parametrize("prepared", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize(("change", "error", "match"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_a_refused_append_leaves_the_cache_as_it_was(
    change: dict[str, Any], error: type[Exception], match: str, prepared: bool
) -> None:
    cache = _cache("fp8_e4m3fn", "NHD", 3, "cpu")
    arguments: dict[str, Any] = {"k_new": torch.zeros(2, HEADS, DIM), "v_new": torch.zeros(2, HEADS, DIM)}
    arguments["slot_mapping"] = torch.arange(2, dtype=I32)
    if prepared:
        append(cache, **arguments)
        append(cache, **arguments, rope=_rope(2, 16))
    before = _bytes(cache)
    with pytest.raises(error, match=match):
        append(**({"cache": cache} | arguments | change))
    assert all(torch.equal(a, b) for a, b in zip(before, _bytes(cache), strict=True))


def test_a_refused_append_is_told_by_one_tensor_alone() -> None:
    cache = _cache("fp8_e4m3fn", "NHD", 3, "cpu")
    wide, slots = torch.zeros(2, HEADS + 1, DIM), torch.arange(2)
    good = wide[:, :HEADS]
    append(cache, good, good, slots)
    with pytest.raises(ValueError, match="k_new must have shape"):
        append(cache, wide, wide, slots)  # of the same strides
    gaps = torch.zeros(2, HEADS, DIM, 2)[..., 0]
    for k_new, v_new, name in ((gaps, good, "k_new"), (good, gaps, "v_new")):
        with pytest.raises(ValueError, match=f"{name} must have a contiguous last dimension"):
            append(cache, k_new, v_new, slots)


def test_a_descale_of_a_page_cannot_be_appended_under() -> None:
    k = torch.zeros(4, 2, HEADS, DIM, dtype=torch.float8_e4m3fn)
    cache = PagedKVCache.from_tensors(
        k,
        k.clone(),
        format="fp8_e4m3fn",
        k_descale=torch.ones(4, HEADS),
        v_descale=1.0,
        k_granularity="page_head",
    )
    with pytest.raises(ValueError, match="cannot change the descale of tokens that are stored already"):
        append(cache, torch.zeros(1, HEADS, DIM), torch.zeros(1, HEADS, DIM), torch.zeros(1, dtype=I32))


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


def _variants(numbers: list[int], device: str) -> list[torch.Tensor]:
    """The same vector, contiguous and strided, in both integer types; what lies between is far away."""
    found = []
    for dtype in (I32, torch.int64):
        wide = torch.full((len(numbers), 3), 2**31 - 1, dtype=dtype, device=device)
        wide[:, 1] = torch.tensor(numbers, device=device)
        found += [wide[:, 1].contiguous(), wide[:, 1]]
    return found


def test_slots_and_positions_may_be_strided_and_of_either_type(device: str) -> None:
    angle = torch.rand(11, 16, device=device) * 6
    k, v = _tokens(4, device)
    want = None
    for slots, positions in zip(
        _variants([7, 0, 3, 12], device), _variants([10, 0, 3, 7], device)[::-1], strict=True
    ):
        cache, twin = (_cache("fp8_e4m3fn", "NHD", 3, device) for _ in range(2))
        _both(cache, twin, k, v, slots, rope=Rope(angle.cos(), angle.sin(), positions), validate=True)
        want = want or _bytes(cache)
        assert all(torch.equal(a, b) for a, b in zip(want, _bytes(cache), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rope_takes_the_halves_of_an_engines_table(dtype: torch.dtype, device: str) -> None:
    angle = torch.rand(11, 16, device=device) * 6
    table = torch.cat([angle.cos(), angle.sin()], 1).to(dtype)
    rope = Rope(table[:, :16], table[:, 16:], torch.tensor([0, 10, 3, 7], device=device))
    caches = [_cache("fp8_e4m3fn", "NHD", 3, device) for _ in range(2)]
    _both(*caches, *_tokens(4, device), torch.arange(4, device=device), rope=rope)


# The angles lie between NaN, which a read outside them would store.
def test_positions_without_an_angle_take_the_nearest_and_are_found_under_validate(device: str) -> None:
    around = torch.full((2, 3 + 4 + 40, 32), math.nan, device=device)
    around[:, 3:7] = torch.rand(2, 4, 32, device=device)
    near = [-1, 4, 6, 30, -3, 3]
    far = [2**32, 2**32 + 1, 2**40, -(2**32) + 2, -(2**63), 2**63 - 1]
    for wrong, dtype in ((near, I32), (near + far, torch.int64)):
        positions = torch.tensor(wrong, dtype=dtype, device=device)
        rope = Rope(around[0, 3:7], around[1, 3:7], positions)
        right = replace(rope, positions=torch.tensor([0 if n < 0 else 3 for n in wrong], device=device))
        caches = [_cache("bf16", "NHD", 3, device) for _ in range(3)]
        arguments = *_tokens(len(wrong), device), torch.arange(len(wrong), device=device)
        _both(caches[0], caches[1], *arguments, rope=rope)
        append(caches[2], *arguments, rope=right)
        assert torch.equal(caches[0].k, caches[2].k)
        assert not bool(caches[0].k.float().isnan().any())
    before = _bytes(caches[0])
    k, v = _tokens(1, device)
    for bad in (4, -1, 2**32 + 1, -(2**32) + 1):
        wrong_one = replace(rope, positions=torch.tensor([bad], device=device))
        with pytest.raises(ValueError, match=rf"rope.positions must lie in \[0, 4\), got {bad}..{bad}"):
            append(caches[0], k, v, torch.tensor([0], device=device), rope=wrong_one, validate=True)
    assert all(torch.equal(a, b) for a, b in zip(before, _bytes(caches[0]), strict=True))


def test_new_tokens_within_the_cache_are_refused_in_every_call(device: str) -> None:
    descales = {name: torch.zeros(PAGES, 4, HEADS, device=device) for name in ("k_descale", "v_descale")}
    cache = PagedKVCache.empty(PAGES, 4, HEADS, DIM, format="bf16", device=device, **descales)
    x, slots = torch.zeros(4, HEADS, DIM, device=device).bfloat16(), torch.arange(4, device=device)
    inside = {
        "cache.k": {"k_new": cache.k[1]},
        "cache.v": {"v_new": cache.v[0]},
        "cache.v_descale": {"rope": _rope(4, 8)},
    }
    for _ in range(2):
        append(cache, x, x, slots)
        for name, change in inside.items():
            if name == "cache.v_descale":
                table = descales["v_descale"][:, :, 0]
                change = {"rope": Rope(table[:, :1], table[:, 1:2], slots)}
            before = _bytes(cache)
            with pytest.raises(ValueError, match=f"{name} must not share memory with"):
                append(cache, **({"k_new": x, "v_new": x, "slot_mapping": slots} | change))
            assert all(torch.equal(a, b) for a, b in zip(before, _bytes(cache), strict=True))


def test_a_cache_whose_elements_share_memory_is_not_appended_to() -> None:
    k = torch.zeros(1, 4, HEADS, DIM).bfloat16().expand(3, 4, HEADS, DIM)
    cache = PagedKVCache.from_tensors(k, k, format="bf16")
    with pytest.raises(ValueError, match=r"cache.k must not overlap itself"):
        append(cache, torch.zeros(1, HEADS, DIM), torch.zeros(1, HEADS, DIM), torch.zeros(1, dtype=I32))


def test_no_tokens_and_no_pages_change_nothing(device: str) -> None:
    cache = _cache("fp8_e4m3fn", "NHD", 3, device)
    before = _bytes(cache)
    for slots in (torch.zeros(0, dtype=I32, device=device), torch.zeros(0, dtype=torch.int64, device=device)):
        append(cache, *_tokens(0, device), slots)
        append(cache, *_tokens(0, device), slots, validate=True, rope=None)
    assert all(torch.equal(a, b) for a, b in zip(before, _bytes(cache), strict=True))
    none = torch.zeros(0, 4, HEADS, DIM, device=device).bfloat16()
    empty = PagedKVCache.from_tensors(none, none, format="bf16")
    append(empty, *_tokens(2, device), torch.tensor([0, 3], device=device))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_values_of_descale_tensors_are_found_under_validate(bad: float, device: str) -> None:
    for side in ("k_descale", "v_descale"):
        for shape in ((), (1,), (HEADS,)):
            descale = torch.full(shape, 0.5, device=device)
            descale.view(-1)[-1] = bad
            cache = PagedKVCache.empty(
                2, 4, HEADS, DIM, format="fp8_e4m3fn", device=device, **{side: descale}
            )
            before = _bytes(cache)
            arguments = *_tokens(2, device), torch.arange(2, device=device)
            append(cache, *arguments)
            for t, saved in zip((cache.k, cache.v), before, strict=True):
                t.view(torch.uint8).copy_(saved)
            with pytest.raises(ValueError, match=f"{side} must be finite and greater than 0"):
                append(cache, *arguments, validate=True)
            assert all(torch.equal(a, b) for a, b in zip(before, _bytes(cache), strict=True))


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8_e4m3fn"])
def test_static_descales_divide_what_is_stored_in_every_format(fmt: str, device: str) -> None:
    x = torch.full((1, HEADS, DIM), 6.0, device=device)
    for descale in (4.0, torch.tensor(4.0), torch.tensor([4.0]), torch.tensor([4.0, 2.0])):
        given = descale.to(device) if isinstance(descale, torch.Tensor) else descale
        caches = [
            PagedKVCache.empty(1, 1, HEADS, DIM, format=fmt, device=device, k_descale=given, v_descale=given)
            for _ in range(2)
        ]
        _both(*caches, x, x, torch.zeros(1, device=device, dtype=I32))
        assert caches[0].k[0, 0, 0, 0] == 1.5
        for back in caches[0].dequantize():
            assert back.unique().tolist() == [6.0]


def test_a_16_bit_cache_with_descales_per_token_gets_ones(device: str) -> None:
    descales = {name: torch.full((1, 2, HEADS), 9.0, device=device) for name in ("k_descale", "v_descale")}
    cache = PagedKVCache.empty(1, 2, HEADS, DIM, format="bf16", device=device, **descales)
    k, v = _tokens(1, device)
    append(cache, k, v, torch.ones(1, device=device, dtype=I32))
    assert descales["k_descale"].tolist() == [[[9.0, 9.0], [1.0, 1.0]]]
    assert torch.equal(cache.dequantize()[1][0, 1], v[0].float())


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


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn", "fp4_e2m1"])
def test_head_dim_112(fmt: str, device: str) -> None:
    angle = torch.rand(5, 56, device=device) * 6
    rope = Rope(angle.cos(), angle.sin(), torch.tensor([4, 0], device=device))
    k, v = torch.randn(2, 2, HEADS, 112, device=device)
    caches = [PagedKVCache.empty(2, 3, HEADS, 112, format=fmt, device=device) for _ in range(2)]
    _both(*caches, k, v, torch.tensor([5, 1], device=device), rope=rope)
    for got, want in zip(caches[0].dequantize(), caches[1].dequantize(), strict=True):
        assert torch.equal(got, want)


def test_tensors_without_memory_never_reach_the_kernel() -> None:
    cache, real = _cache("fp8_e4m3fn", "NHD", 3, "cpu"), _tokens(2, "cpu")
    slots = torch.arange(2)
    append(cache, *real, slots)
    before = _bytes(cache)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (*real, slots)]
        fake_cache = PagedKVCache.empty(2, 3, HEADS, DIM, format="fp8_e4m3fn")
        append(fake_cache, *fakes)  # goes through torch.ops.narrowkv.append, which runs nothing
    with pytest.raises(TypeError, match="needs tensors that have memory, got a FakeTensor"):
        append(cache, *fakes)
    functional = [torch._to_functional_tensor(x) for x in (*real, slots)]
    with pytest.raises(TypeError, match="needs tensors that have memory, got a FunctionalTensor"):
        append(cache, *functional)
    assert all(torch.equal(a, b) for a, b in zip(before, _bytes(cache), strict=True))


def test_what_append_remembers_of_a_cache_does_not_keep_its_memory() -> None:
    cache = _cache("bf16", "NHD", 3, "cpu")
    append(cache, *_tokens(2, "cpu"), torch.arange(2))
    memory = weakref.ref(cache.k)
    del cache
    gc.collect()
    assert memory() is None


def test_a_later_call_of_a_kind_enters_few_python_functions() -> None:
    caches = [_cache("fp8_e4m3fn", "NHD", 3, "cpu") for _ in range(2)]
    rope = _rope(4, 16)
    with executing(LaunchRecorder("sm90")) as recorder:
        for cache in caches:  # layers of one model
            append(cache, *_tokens(4, "cpu"), torch.arange(4), rope=rope)
        for tokens in (4, 1, 7):
            k, v = _tokens(tokens, "cpu")
            slots, turn = torch.arange(tokens), _rope(tokens, 16)
            assert len(functions_entered(lambda: append(caches[1], k, v, slots, rope=turn))) <= 17  # noqa: B023
    constants = [launch.constexprs for launch in recorder.launches]
    assert all(c is constants[0] for c in constants), "every layer and count launches what was prepared once"


@pytest.mark.gpu
def test_tensors_of_another_device_are_refused_in_every_call() -> None:
    cache, slots = _cache("fp8_e4m3fn", "NHD", 3, "cuda"), torch.arange(2, device="cuda")
    k, v = _tokens(2, "cuda")
    for _ in range(2):
        append(cache, k, v, slots)
        for change in ({"k_new": k.cpu()}, {"v_new": v.cpu()}, {"slot_mapping": slots.cpu()}):
            with pytest.raises(ValueError, match="must be on cuda:0 like k, got cpu"):
                append(cache, **({"k_new": k, "v_new": v, "slot_mapping": slots} | change))


@pytest.mark.gpu
def test_a_captured_append_stores_what_its_inputs_hold_when_it_is_replayed() -> None:
    cache = _cache("fp8_e4m3fn", "NHD", 3, "cuda")
    k, v = _tokens(3, "cuda")
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
