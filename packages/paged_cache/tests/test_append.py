"""append: byte-exact against the host reference, in every layout and format, touching nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache, Rope, append, append_reference

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


# FAULTS 17, 18
def test_padding_and_slots_beyond_the_cache_write_nothing(device: str) -> None:
    cache = _cache("fp8_e4m3fn", "NHD", 3, device)
    before = _bytes(cache)
    slots = torch.tensor([-1, 15, -7, 2**31 - 1], device=device, dtype=I32)
    append(cache, *_tokens(4, device), slots)
    assert all(torch.equal(a, b) for a, b in zip(before, _bytes(cache), strict=True))


@pytest.mark.parametrize("slots", [[0, 15], [-2, 1], [4, 4]], ids=["out of range", "negative", "twice"])
def test_bad_slots_are_found_under_validate_and_the_cache_is_unchanged(slots: list[int], device: str) -> None:
    cache = _cache("fp8_e4m3fn", "NHD", 3, device)
    before = _bytes(cache)
    with pytest.raises(ValueError, match="slot_mapping must"):
        append(cache, *_tokens(2, device), torch.tensor(slots, device=device, dtype=I32), validate=True)
    assert all(torch.equal(a, b) for a, b in zip(before, _bytes(cache), strict=True))


# FAULTS 21: tiny values are kept, large ones saturate, zeros never become 0x80.
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


REFUSED = [
    ("dtype", {"k_new": torch.zeros(2, HEADS, DIM, dtype=torch.int8)}, TypeError, "k_new"),
    ("heads", {"k_new": torch.zeros(2, 3, DIM)}, ValueError, "k_new must have shape"),
    ("lengths", {"v_new": torch.zeros(3, HEADS, DIM)}, ValueError, "v_new must have shape"),
    ("slots' dtype", {"slot_mapping": torch.zeros(2, dtype=torch.int64)}, TypeError, "slot_mapping"),
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
        {"rope": Rope(torch.ones(4, DIM), torch.ones(4, DIM), torch.zeros(2, dtype=I32))},
        ValueError,
        "rope.cos must have at most",
    ),
    (
        "rope style",
        {"rope": Rope(torch.ones(4, 8), torch.ones(4, 8), torch.zeros(2, dtype=I32), "llama")},
        ValueError,
        "rope.style",
    ),
]


@pytest.mark.parametrize(("change", "error", "match"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_a_refused_append_leaves_the_cache_as_it_was(
    change: dict, error: type[Exception], match: str
) -> None:  # type: ignore[type-arg]
    cache = _cache("fp8_e4m3fn", "NHD", 3, "cpu")
    before = _bytes(cache)
    arguments = {"k_new": torch.zeros(2, HEADS, DIM), "v_new": torch.zeros(2, HEADS, DIM)}
    arguments |= {"slot_mapping": torch.zeros(2, dtype=I32)} | change
    with pytest.raises(error, match=match):
        append(cache, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(before, _bytes(cache), strict=True))


def test_a_descale_of_a_page_cannot_be_appended_under() -> None:
    k = torch.zeros(4, 2, HEADS, DIM, dtype=torch.float8_e4m3fn)
    cache = PagedKVCache.from_tensors(
        k, k.clone(), format="fp8_e4m3fn", k_descale=torch.ones(4, HEADS), k_granularity="page_head"
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
