"""Every granularity and format by property: the definition bit for bit, zeros, NaN, Inf, tiny numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from narrowkv import quant
from narrowkv.quant import FORMATS, FP8_FORMATS
from narrowkv.quant.rounding import round_to_format
from narrowkv.runtime import UnsupportedError

NARROW = [name for name, f in FORMATS.items() if f.kind != "float"]
SHAPE = (5, 7, 3, 16)
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Granularity:
    """One granularity over x `[5 pages, 7 tokens, 3 heads, 16]`.

    Attributes:
        name: for reports.
        quantize, dequantize: its calls.
        descale_shape: of x's descales.
        keys: what tells the groups of a descale apart: axes, or (axis, run length).
    """

    name: str
    quantize: Callable[[torch.Tensor, str], Pair]
    dequantize: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
    descale_shape: tuple[int, ...]
    keys: tuple[int | tuple[int, int], ...]

    def __str__(self) -> str:
        return self.name

    def group_of(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers of the elements' groups."""
        ids = torch.zeros(x.shape, dtype=torch.int64)
        for key in self.keys:
            axis, run = key if isinstance(key, tuple) else (key, 1)
            size = x.shape[axis]
            along = torch.arange(size).view([-1 if i == axis else 1 for i in range(x.dim())])
            ids = ids * (size + 1) + along // run
        return ids

    def round_trip(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """What a format gives back of x."""
        return self.dequantize(*self.quantize(x, name), name)


def _named(name: str, descale_shape: tuple[int, ...], *keys: int) -> Granularity:
    calls = getattr(quant, f"quantize_per_{name}"), getattr(quant, f"dequantize_per_{name}")
    return Granularity(name, *calls, descale_shape, keys)


def _block(block: int) -> Granularity:
    return Granularity(
        f"block{block}",
        lambda x, f: quant.quantize_per_block(x, block, f),
        lambda s, d, f: quant.dequantize_per_block(s, d, block, f),
        (5, -(-7 // block), 3),
        (0, (1, block), 2),
    )


GROUPS = Granularity(
    "group_fp32",
    lambda x, f: quant.quantize_per_group(x, 8, scale="fp32", format=f),
    lambda s, d, f: quant.dequantize_per_group(s, d, 8, format=f),
    (5, 7, 3, 2),
    (0, 1, 2, (3, 8)),
)
GRANULARITIES = [
    _named("tensor", (1,)),
    _named("head", (3,), 2),
    _named("token_head", (5, 7, 3), 0, 1, 2),
    _named("page_head", (5, 3), 0, 2),
    _named("channel", (5, 3, 16), 0, 2, 3),
    *(_block(block) for block in (1, 4, 7, 128)),
    GROUPS,
]
each_granularity = pytest.mark.parametrize("g", GRANULARITIES, ids=str)
each_format = pytest.mark.parametrize("name", NARROW)


def sample(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 7, (5, 1, 3, 1), generator=generator).float())
    return torch.randn(SHAPE, generator=generator) * spread


@each_format
@each_granularity
def test_values_and_descales_are_exactly_the_definition(g: Granularity, name: str) -> None:
    x, fmt = sample(), FORMATS[name]
    stored, descale = g.quantize(x, name)
    ids = g.group_of(x).flatten()
    amax = torch.zeros(int(ids.max()) + 1).scatter_reduce(0, ids, x.abs().flatten(), "amax")
    spread = (amax / fmt.max_value)[ids].view(x.shape)
    assert descale.shape == g.descale_shape
    assert descale.dtype == torch.float32
    assert stored.dtype == fmt.storage_dtype
    assert stored.shape == (*SHAPE[:-1], fmt.storage_bytes(SHAPE[-1]) if fmt.is_packed else SHAPE[-1])
    assert torch.equal(g.dequantize(stored, descale, name), round_to_format(x / spread, name) * spread)


@each_format
@each_granularity
def test_zeros_infinities_and_tiny_numbers(g: Granularity, name: str) -> None:
    for zero in (0.0, -0.0):
        stored, descale = g.quantize(torch.full(SHAPE, zero), name)
        assert int(stored.view(torch.uint8).count_nonzero()) == 0
        assert torch.equal(descale, torch.ones_like(descale))
    x = sample(4)
    x[1, 2, 0, 3] = -math.inf
    stored, descale = g.quantize(x, name)
    assert bool(torch.isfinite(descale).all())
    codes = g.dequantize(stored, torch.ones_like(descale), name)
    assert float(codes[1, 2, 0, 3]) == -FORMATS[name].max_value
    tiny = torch.full(SHAPE, 2.0**-130)
    stored, descale = g.quantize(tiny, name)
    assert bool((descale >= torch.finfo(torch.float32).tiny).all())
    back = g.dequantize(stored, descale, name)
    assert bool((back >= 0).all())
    if name.startswith("fp8"):
        assert torch.equal(back, tiny)


@each_format
@each_granularity
def test_nan_stays_in_its_group(g: Granularity, name: str) -> None:
    x = sample(3)
    clean = g.round_trip(x, name)
    hit = x.clone()
    hit[2, 3, 1, 5] = math.nan
    stored, descale = g.quantize(hit, name)
    back = g.dequantize(stored, descale, name)
    ids = g.group_of(x)
    outside = ids != ids[2, 3, 1, 5]
    assert back[2, 3, 1, 5].isnan()
    assert torch.equal(back[outside], clean[outside])
    if FORMATS[name].has_nan:
        assert int(back.isnan().sum()) == 1
        assert bool(torch.isfinite(descale).all())
    else:
        assert bool(back[~outside].isnan().all())


@pytest.mark.parametrize("name", FP8_FORMATS)
@each_granularity
def test_fp8_storage_has_no_negative_zero(g: Granularity, name: str) -> None:
    x = sample(5) * torch.exp2(torch.linspace(0, -40, SHAPE[-1]))
    x[0, 0, 0, 0] = -0.0
    stored, _ = g.quantize(x, name)
    assert int((stored.view(torch.uint8) == 0x80).sum()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_granularity
def test_16_bit_and_strided_inputs(g: Granularity, dtype: torch.dtype) -> None:
    x = sample(6).to(dtype)
    want = g.quantize(x.float(), "fp8_e4m3fn")
    strided = torch.empty(5, 3, 7, 32, dtype=dtype)[..., ::2].transpose(1, 2)
    strided.copy_(x)
    for given in (x, strided):
        stored, descale = g.quantize(given, "fp8_e4m3fn")
        assert torch.equal(stored.view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(descale, want[1])


@each_format
@each_granularity
def test_no_tokens(g: Granularity, name: str) -> None:
    stored, descale = g.quantize(torch.zeros(5, 0, 3, 16), name)
    assert stored.shape[1] == 0
    assert bool((descale == 1).all())
    assert g.dequantize(stored, descale, name).shape == (5, 0, 3, 16)


@pytest.mark.parametrize(
    ("x", "name", "error", "match"),
    [
        (sample().double(), "int8", TypeError, r"must have dtype one of .*, got torch.float64"),
        (sample(), "fp16", UnsupportedError, "to be quantised to, got fp16"),
        (sample()[..., :15], "fp4_e2m1", ValueError, "must have an even last dimension|group must divide"),
        (sample().requires_grad_(), "int8", ValueError, "must not require grad"),
    ],
    ids=["fp64", "to fp16", "odd", "grad"],
)
@each_granularity
def test_refusals(g: Granularity, x: torch.Tensor, name: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        g.quantize(x, name)


@pytest.mark.parametrize("g", [g for g in GRANULARITIES if g.name not in ("tensor", "group_fp32")], ids=str)
def test_too_few_dimensions_are_refused(g: Granularity) -> None:
    with pytest.raises(ValueError, match=r"must have shape \[.*dim\], got \[4\]"):
        g.quantize(torch.zeros(4), "fp8_e4m3fn")


def test_leading_dimensions_are_free() -> None:
    x = sample(7)
    for rows in (x.flatten(0, 1), x[None]):
        assert (
            quant.quantize_per_head(rows, "int8")[1].tolist()
            == quant.quantize_per_head(x, "int8")[1].tolist()
        )
    assert quant.quantize_per_block(x[0], 4, "int8")[1].shape == (2, 3)
    assert quant.quantize_per_block(x[None], 4, "int8")[1].shape == (1, 5, 2, 3)
    assert quant.quantize_per_channel(x[0])[1].shape == (3, 16)


def test_given_descale() -> None:
    x = torch.tensor([1.0, -0.26, 1000.0])
    for given in (0.5, torch.tensor(0.5), torch.tensor([[0.5]])):
        stored, descale = quant.quantize_per_tensor(x, "int8", descale=given)
        assert stored.tolist() == [2, -1, 127]
        assert descale.tolist() == [0.5]
        assert quant.dequantize_per_tensor(stored, given).tolist() == [1.0, -0.5, 63.5]
    scalar, descale = quant.quantize_per_tensor(torch.tensor(3.0), "int8", descale=1.5)
    assert scalar.shape == ()
    assert float(quant.dequantize_per_tensor(scalar, descale)) == 3.0


@each_format
def test_static_descale_keeps_subnormal_results_and_saturates(name: str) -> None:
    fmt = FORMATS[name]
    descale = torch.tensor(0.25)
    want = torch.tensor([fmt.smallest_subnormal, -fmt.smallest_subnormal, fmt.max_value, -fmt.max_value])
    x = descale * want * torch.tensor([1, 1, 2, 1e25])
    stored = quant.quantize_with_descale(x, name, descale)
    assert torch.equal(quant.dequantize_with_descale(stored, descale, name), 0.25 * want)


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_dequantise_accepts_tagged_bytes(name: str) -> None:
    stored, descale = quant.quantize_per_head(sample(9), name)
    want = quant.dequantize_per_head(stored, descale)
    assert torch.equal(quant.dequantize_per_head(stored.view(torch.uint8), descale, name), want)
