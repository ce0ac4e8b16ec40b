"""Every granularity: shapes, exactness against a plain recomputation, error bounds, and the hard inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from narrowkv.quant import (
    FORMATS,
    FP8_FORMATS,
    dequantize_per_block,
    dequantize_per_channel,
    dequantize_per_group,
    dequantize_per_head,
    dequantize_per_page_head,
    dequantize_per_tensor,
    dequantize_per_token_head,
    dequantize_with_descale,
    e8m0_decode,
    nvfp4_global_descale,
    quantize_per_block,
    quantize_per_channel,
    quantize_per_group,
    quantize_per_head,
    quantize_per_page_head,
    quantize_per_tensor,
    quantize_per_token_head,
    quantize_with_descale,
)
from narrowkv.quant.rounding import round_to_format
from narrowkv.runtime import UnsupportedError

NARROW = [name for name, f in FORMATS.items() if f.kind != "float"]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Granularity:
    """One granularity over x `[5 pages, 7 tokens, 3 heads, 16]`: its calls, and who shares a descale."""

    name: str
    quantize: Callable[[torch.Tensor, str], Pair]
    dequantize: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
    descale_shape: tuple[int, ...]
    group_of: Callable[[torch.Tensor], torch.Tensor]

    def __str__(self) -> str:
        return self.name


SHAPE = (5, 7, 3, 16)


def group_ids(*keys: int | tuple[int, int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Numbers the groups from the coordinates that tell them apart: an axis, or (axis, run length)."""

    def number(x: torch.Tensor) -> torch.Tensor:
        ids = torch.zeros(x.shape, dtype=torch.int64)
        for key in keys:
            axis, run = key if isinstance(key, tuple) else (key, 1)
            size = x.shape[axis]
            view = [1] * x.dim()
            view[axis] = size
            ids = ids * (size + 1) + (torch.arange(size) // run).view(view)
        return ids

    return number


GRANULARITIES = [
    Granularity("tensor", quantize_per_tensor, dequantize_per_tensor, (1,), group_ids()),
    Granularity("head", quantize_per_head, dequantize_per_head, (3,), group_ids(2)),
    Granularity(
        "token_head", quantize_per_token_head, dequantize_per_token_head, (5, 7, 3), group_ids(0, 1, 2)
    ),
    Granularity("page_head", quantize_per_page_head, dequantize_per_page_head, (5, 3), group_ids(0, 2)),
    Granularity("channel", quantize_per_channel, dequantize_per_channel, (5, 3, 16), group_ids(0, 2, 3)),
    *(
        Granularity(
            f"block{block}",
            lambda x, f, block=block: quantize_per_block(x, block, f),
            lambda s, d, f, block=block: dequantize_per_block(s, d, block, f),
            (5, -(-7 // block), 3),
            group_ids(0, (1, block), 2),
        )
        for block in (1, 4, 7, 128)
    ),
    Granularity(
        "group_fp32",
        lambda x, f: quantize_per_group(x, 8, scale="fp32", format=f),
        lambda s, d, f: dequantize_per_group(s, d, 8, format=f),
        (5, 7, 3, 2),
        group_ids(0, 1, 2, (3, 8)),
    ),
]
each_granularity = pytest.mark.parametrize("g", GRANULARITIES, ids=str)
each_format = pytest.mark.parametrize("name", NARROW)


def sample(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 7, (5, 1, 3, 1), generator=generator).float())
    return torch.randn(SHAPE, generator=generator) * spread


def expected(x: torch.Tensor, g: Granularity, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded values (descale removed) and the descale of each element, by a scatter over group numbers."""
    ids = g.group_of(x).flatten()
    amax = torch.zeros(int(ids.max()) + 1).scatter_reduce(0, ids, x.abs().flatten(), "amax")
    descale = (amax / FORMATS[name].max_value)[ids].view(x.shape)
    return round_to_format(x / descale, name), descale


@each_format
@each_granularity
def test_values_and_descales_are_exactly_the_definition(g: Granularity, name: str) -> None:
    x = sample()
    stored, descale = g.quantize(x, name)
    values, spread = expected(x, g, name)
    fmt = FORMATS[name]
    assert descale.shape == g.descale_shape
    assert descale.dtype == torch.float32
    assert stored.dtype == fmt.storage_dtype
    assert stored.shape == (*SHAPE[:-1], fmt.storage_bytes(SHAPE[-1]) if fmt.is_packed else SHAPE[-1])
    assert torch.equal(g.dequantize(stored, descale, name), values * spread)


@each_format
@each_granularity
def test_error_is_within_half_a_step(g: Granularity, name: str) -> None:
    x = sample(1)
    back = g.dequantize(*g.quantize(x, name), name)
    _, spread = expected(x, g, name)
    fmt = FORMATS[name]
    relative = 2.0 ** -(fmt.mantissa_bits + 1) if fmt.kind != "int" else 0.0
    # half a unit in the last place, or half the smallest step; a hair for x / descale and the product being
    # rounded
    bound = (
        torch.maximum(x.abs() * relative, spread * fmt.smallest_subnormal / 2) * (1 + 1e-5) + x.abs() * 3e-7
    )
    assert bool(((back - x).abs() <= bound).all())


@each_format
@each_granularity
def test_largest_element_is_kept(g: Granularity, name: str) -> None:
    x = sample(2)
    back = g.dequantize(*g.quantize(x, name), name)
    at = int(x.abs().argmax())
    assert float(back.flatten()[at]) == pytest.approx(float(x.flatten()[at]), rel=1e-6)


@each_format
@each_granularity
def test_zeros_give_zeros_and_descale_one(g: Granularity, name: str) -> None:
    for zero in (0.0, -0.0):
        stored, descale = g.quantize(torch.full(SHAPE, zero), name)
        assert int(stored.view(torch.uint8).count_nonzero()) == 0
        assert torch.equal(descale, torch.ones_like(descale))


@each_format
@each_granularity
def test_nan_stays_in_its_group(g: Granularity, name: str) -> None:
    x = sample(3)
    clean = g.dequantize(*g.quantize(x, name), name)
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


@each_format
@each_granularity
def test_infinity_saturates(g: Granularity, name: str) -> None:
    x = sample(4)
    x[1, 2, 0, 3] = -math.inf
    stored, descale = g.quantize(x, name)
    assert bool(torch.isfinite(descale).all())
    ones = torch.ones_like(descale)
    assert float(g.dequantize(stored, ones, name)[1, 2, 0, 3]) == -FORMATS[name].max_value


@each_format
@each_granularity
def test_tiny_values_keep_a_normal_descale(g: Granularity, name: str) -> None:
    tiny = torch.full(SHAPE, 2.0**-130)
    stored, descale = g.quantize(tiny, name)
    assert bool((descale >= torch.finfo(torch.float32).tiny).all())
    back = g.dequantize(stored, descale, name)
    assert bool((back >= 0).all())
    if name.startswith("fp8"):
        assert torch.equal(back, tiny)


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


@each_granularity
def test_refusals(g: Granularity) -> None:
    x = sample()
    with pytest.raises(TypeError, match=r"must have dtype one of .*, got torch.float64"):
        g.quantize(x.double(), "int8")
    with pytest.raises(UnsupportedError, match="to be quantised to, got fp16"):
        g.quantize(x, "fp16")
    with pytest.raises(ValueError, match=r"must have an even last dimension|group must divide"):
        g.quantize(x[..., :15], "fp4_e2m1")
    with pytest.raises(ValueError, match="must not require grad"):
        g.quantize(x.requires_grad_(), "int8")


@pytest.mark.parametrize(
    "granularity", [g for g in GRANULARITIES if g.name not in ("tensor", "group_fp32")], ids=str
)
def test_too_few_dimensions_are_refused(granularity: Granularity) -> None:
    with pytest.raises(ValueError, match=r"must have shape \[.*dim\], got \[4\]"):
        granularity.quantize(torch.zeros(4), "fp8_e4m3fn")


def test_leading_dimensions_are_free() -> None:
    x = sample(7)
    for rows in (x.flatten(0, 1), x[None]):
        assert quantize_per_head(rows, "int8")[1].tolist() == quantize_per_head(x, "int8")[1].tolist()
    assert quantize_per_block(x[0], 4, "int8")[1].shape == (2, 3)
    assert quantize_per_block(x[None], 4, "int8")[1].shape == (1, 5, 2, 3)
    assert quantize_per_channel(x[0])[1].shape == (3, 16)


@pytest.mark.parametrize(("block", "blocks"), [(4, 32), (16, 8), (32, 4), (64, 2), (128, 1)])
def test_sage_block_sizes(block: int, blocks: int) -> None:
    x = torch.randn(2, 128, 2, 64, generator=torch.Generator().manual_seed(8))
    stored, descale = quantize_per_block(x, block, "int8")
    assert descale.shape == (2, blocks, 2)
    assert torch.equal(descale, x.view(2, blocks, block, 2, 64).abs().amax((2, 4)) / 127)
    assert int(stored.view(2, blocks, block, 2, 64).abs().amax((2, 4)).min()) == 127


def test_given_descale() -> None:
    x = torch.tensor([1.0, -0.26, 1000.0])
    for given in (0.5, torch.tensor(0.5), torch.tensor([[0.5]])):
        stored, descale = quantize_per_tensor(x, "int8", descale=given)
        assert stored.tolist() == [2, -1, 127]
        assert descale.tolist() == [0.5]
        assert dequantize_per_tensor(stored, given).tolist() == [1.0, -0.5, 63.5]
    scalar, descale = quantize_per_tensor(torch.tensor(3.0), "int8", descale=1.5)
    assert scalar.shape == ()
    assert float(dequantize_per_tensor(scalar, descale)) == 3.0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_given_descale_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="descale must be"):
        quantize_per_tensor(torch.zeros(2), "int8", descale=bad)
    with pytest.raises(ValueError, match="descale must be"):
        dequantize_per_tensor(torch.zeros(2, dtype=torch.int8), bad)


def test_given_descale_shape_and_dtype_are_checked() -> None:
    with pytest.raises(ValueError, match=r"descale must have one element, got shape \[2\]"):
        quantize_per_tensor(torch.zeros(2), "int8", descale=torch.ones(2))
    with pytest.raises(TypeError, match=r"descale must have dtype torch.float32"):
        quantize_per_tensor(torch.zeros(2), "int8", descale=torch.ones(1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"descale must broadcast to the shape of x \[2, 4\], got \[3, 1\]"):
        quantize_with_descale(torch.zeros(2, 4), "int8", torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"descale must broadcast to the shape of x \[4\], got \[3, 4\]"):
        quantize_with_descale(torch.zeros(4), "int8", torch.ones(3, 4))


@each_format
def test_static_descale_keeps_subnormal_results_and_saturates(name: str) -> None:
    fmt = FORMATS[name]
    descale = torch.tensor(0.25)
    x = descale * torch.tensor([fmt.smallest_subnormal, -fmt.smallest_subnormal, 2 * fmt.max_value, -1e30])
    stored = quantize_with_descale(x, name, descale)
    want = [fmt.smallest_subnormal, -fmt.smallest_subnormal, fmt.max_value, -fmt.max_value]
    assert dequantize_with_descale(stored, descale, name).tolist() == [0.25 * v for v in want]


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_dequantise_accepts_tagged_bytes(name: str) -> None:
    stored, descale = quantize_per_head(sample(9), name)
    want = dequantize_per_head(stored, descale)
    assert torch.equal(dequantize_per_head(stored.view(torch.uint8), descale, name), want)
    with pytest.raises(ValueError, match="does not tell its format"):
        dequantize_per_head(stored.view(torch.uint8), descale)
    other = next(n for n in FP8_FORMATS if n != name)
    with pytest.raises(TypeError, match=f"stored in format {other}"):
        dequantize_per_head(stored, descale, other)


def test_dequantise_checks_descale_shapes() -> None:
    stored = torch.zeros(5, 7, 3, 16, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"descale must have shape \[heads\], got \[5, 3\]"):
        dequantize_per_head(stored, torch.ones(5, 3))
    with pytest.raises(ValueError, match=r"descale must have shape \[pages, heads\], got \[3\]"):
        dequantize_per_page_head(stored, torch.ones(3))
    with pytest.raises(ValueError, match="descale must have 2 blocks for 7 tokens, got 3"):
        dequantize_per_block(stored, torch.ones(5, 3, 3), 4)
    with pytest.raises(ValueError, match=r"descale must have shape \[5, 7, 3, 2\], got \[5, 7, 3, 4\]"):
        dequantize_per_group(stored, torch.ones(5, 7, 3, 4), 8, format="int8")


@pytest.mark.parametrize("bad", [0, -4])
def test_block_and_group_must_be_positive(bad: int) -> None:
    with pytest.raises(ValueError, match="block must be at least 1"):
        quantize_per_block(sample(), bad)
    with pytest.raises(ValueError, match="group must be at least 1"):
        quantize_per_group(sample(), bad)


# Groups with E8M0 and E4M3 scales.


def e8m0_bytes(x: torch.Tensor, group: int, name: str, exponent: str) -> list[int]:
    return quantize_per_group(x, group, format=name, exponent=exponent)[1].flatten().tolist()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("exponent", ["floor", "ceil", "mse"])
@each_format
def test_e8m0_groups_are_exactly_the_definition(name: str, exponent: str, group: int) -> None:
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(10)) * 3
    stored, descale = quantize_per_group(x, group, exponent=exponent, format=name)
    assert descale.dtype == torch.uint8
    assert descale.shape == (6, 256 // group)
    groups, scale = x.view(6, -1, group), e8m0_decode(descale).unsqueeze(-1)
    want = (round_to_format(groups / scale, name) * scale).view(6, 256)
    assert torch.equal(dequantize_per_group(stored, descale, group, format=name), want)
    scaled_max = (groups / scale).abs().amax(-1)
    top = FORMATS[name].max_value
    if exponent == "ceil":
        assert bool((scaled_max <= top).all())
        assert bool((scaled_max > top / 2).all())
    if exponent == "floor":
        power = 2.0 ** math.floor(math.log2(top))
        assert bool((scaled_max >= power).all())
        assert bool((scaled_max < 2 * power).all())


def test_e8m0_rules_on_a_worked_group() -> None:
    x = torch.tensor([[7.0, 1.0] + [0.0] * 30])
    assert [e8m0_bytes(x, 32, "fp4_e2m1", rule) for rule in ("floor", "ceil")] == [[127], [128]]
    # 7 saturates at 6 (error 1), or ties between 6 and 8 one step up and goes to 8 (error 1): the floor
    # rule's wins
    assert e8m0_bytes(x, 32, "fp4_e2m1", "mse") == [127]
    assert quantize_per_group(x, 32)[1].tolist() == [[127]]


@pytest.mark.parametrize("exponent", ["floor", "ceil", "mse"])
@each_format
def test_e8m0_hard_groups(name: str, exponent: str) -> None:
    x = torch.ones(5, 32)
    x[0] = 0.0
    x[1, 3] = math.nan
    x[2, 3] = math.inf
    x[3] = 2.0**-149
    stored, descale = quantize_per_group(x, 32, exponent=exponent, format=name)
    back = dequantize_per_group(stored, descale, 32, format=name)
    byte = descale.flatten().tolist()
    assert byte[0] == 127
    assert torch.equal(back[0], torch.zeros(32))
    assert back[1, 3].isnan()
    if FORMATS[name].has_nan:
        assert int(back[1].isnan().sum()) == 1
    else:
        assert byte[1] == 0xFF
    assert byte[2] < 0xFF
    assert float(back[2, 3]) >= torch.finfo(torch.float32).max / 2
    assert byte[3] == 0
    assert not back[[0, 2, 3, 4]].isnan().any()
    assert torch.equal(back[4], x[4])


def test_nvfp4_is_exactly_the_definition() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(11)) * 2
    tensor_descale = nvfp4_global_descale(x)
    assert float(tensor_descale) == float(x.abs().amax() / (448 * 6))
    stored, descale = quantize_per_group(x, 16, scale="e4m3", exponent="amax", global_descale=tensor_descale)
    assert descale.dtype == torch.float8_e4m3fn
    groups = (x / tensor_descale).view(64, 8, 16)
    scale = (groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    assert torch.equal(descale.view(torch.uint8), scale.view(torch.uint8))
    want = round_to_format(groups / scale.float().unsqueeze(-1), "fp4_e2m1")
    want = (want * (scale.float() * tensor_descale).unsqueeze(-1)).view(64, 128)
    assert torch.equal(dequantize_per_group(stored, descale, 16, global_descale=tensor_descale), want)


def test_nvfp4_choice_of_4_or_6_never_loses_and_often_wins() -> None:
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(12))

    def error(exponent: str | None) -> torch.Tensor:
        back = dequantize_per_group(*quantize_per_group(x, 16, scale="e4m3", exponent=exponent), 16)
        return (back - x).double().view(512, 8, 16).square().sum(-1)

    plain, best = error("amax"), error(None)
    assert bool((best <= plain * (1 + 1e-5)).all())
    assert float((best < plain * 0.999).double().mean()) > 0.2
    worked = torch.tensor([[8.0] + [6.0] * 15])  # at scale 2 both are codes (4, 3); at 8/6 a six is not
    stored, descale = quantize_per_group(worked, 16, scale="e4m3")
    assert descale.float().tolist() == [[2.0]]
    assert torch.equal(dequantize_per_group(stored, descale, 16), worked)


def test_nvfp4_hard_groups() -> None:
    x = torch.ones(5, 16)
    x[0] = 0.0
    x[1, 2] = math.nan
    x[2, 2] = math.inf
    x[3] = 1e-30
    stored, descale = quantize_per_group(x, 16, scale="e4m3")
    back = dequantize_per_group(stored, descale, 16)
    assert float(descale.float()[0]) == 1.0
    assert torch.equal(back[0], torch.zeros(16))
    assert back[1].isnan().all()
    assert float(descale.float()[2]) == 448.0
    assert float(back[2, 2]) == 6 * 448.0
    assert torch.equal(back[3], torch.zeros(16))
    assert not back[[0, 2, 3, 4]].isnan().any()
    assert torch.equal(back[4], x[4])


def test_group_refusals() -> None:
    x = torch.zeros(2, 48)
    with pytest.raises(ValueError, match=r"group must divide the last dimension of x \(48\), got 32"):
        quantize_per_group(x, 32)
    with pytest.raises(ValueError, match="scale must be one of e8m0, e4m3, fp32; got 'e5m2'"):
        quantize_per_group(x, 16, scale="e5m2")
    with pytest.raises(
        ValueError, match="exponent must be one of mse, floor, ceil, ultraquant, sglang; got 'amax'"
    ):
        quantize_per_group(x, 16, exponent="amax")
    with pytest.raises(ValueError, match="exponent must be one of mse, amax, search; got 'floor'"):
        quantize_per_group(x, 16, scale="e4m3", exponent="floor")
    for given in (2.0, torch.ones(1)):
        with pytest.raises(ValueError, match='global_descale is for scale="e4m3" only'):
            quantize_per_group(x, 16, global_descale=given)
    with pytest.raises(TypeError, match="descale must have dtype one of"):
        dequantize_per_group(torch.zeros(2, 24, dtype=torch.uint8), torch.ones(2, 3, dtype=torch.int32), 16)


def test_nvfp4_global_descale_edges() -> None:
    assert nvfp4_global_descale(torch.zeros(4)).tolist() == [1.0]
    assert nvfp4_global_descale(torch.zeros(0, 4)).tolist() == [1.0]
    assert nvfp4_global_descale(torch.tensor([math.nan, 2688.0])).tolist() == [1.0]
    assert bool(torch.isfinite(nvfp4_global_descale(torch.tensor([math.inf]))).all())
