"""The writer of index keys, byte for byte: layouts, RoPE, Hadamard, scales, slots that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowkv.paged_cache import Rope
from narrowkv.quant import hadamard
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.sparse_fp8 import IndexKeys, append_index_keys, append_index_keys_reference
from narrowkv.testing.cases.indexer import FORMATS, LAYOUTS

pytestmark = pytest.mark.sampled

I32 = torch.int32
ROTATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "neox": {"style": "neox"},
    "gptj": {"style": "gptj"},
    "Hadamard": {"hadamard": True},
    "neox, Hadamard": {"style": "neox", "hadamard": True},
}


def empty(layout: str, format: str, device: str, dim: int = 64) -> IndexKeys:
    """Four pages of 16 tokens, or 64 rows, of bytes 0x55."""
    if layout == "packed":
        buffer = torch.full((4, 16, 1, dim + 4), 0x55, dtype=torch.uint8, device=device)
        return IndexKeys.packed(buffer, format=format)
    shape = (64,) if layout == "rows" else (4, 16)
    values = torch.full((*shape, dim), 0x55, dtype=torch.uint8, device=device)
    return IndexKeys(values, torch.full(shape, 0.25, device=device), format, layout == "shuffled")


def tokens(device: str, dtype: torch.dtype, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of very different size, and their slots, two of which are none."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(20, dim, generator=generator) * torch.exp2(torch.arange(20.0)[:, None] - 16)
    k[3] = 0.0
    slots = torch.randperm(64, generator=generator)[:20]
    slots[5], slots[9] = -1, 64
    return k.to(device, dtype), slots.to(device)


def options(rotation: str, device: str) -> dict[str, Any]:
    given = dict(ROTATIONS[rotation])
    if style := given.pop("style", None):
        angle = torch.rand(30, 16, generator=torch.Generator().manual_seed(1)) * 6
        positions = torch.arange(20)
        positions[4], positions[6] = -3, 99
        given["rope"] = Rope(*(x.to(device) for x in (angle.cos(), angle.sin(), positions)), style=style)
    return given


def assert_same_bytes(found: IndexKeys, expected: IndexKeys) -> None:
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scale, expected.scale)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_bytes_are_those_of_the_reference(layout: str, format: str, rotation: str, device: str) -> None:
    for dtype, pow2 in ((torch.bfloat16, False), (torch.float32, True)):
        k, slots = tokens(device, dtype)
        found, expected = (empty(layout, format, device) for _ in range(2))
        given = options(rotation, device)
        append_index_keys(k, found, slots, pow2_scales=pow2, **given)
        append_index_keys_reference(k, expected, slots, pow2_scales=pow2, **given)
        assert_same_bytes(found, expected)


def test_what_is_written_is_what_quantize_stores() -> None:
    k, _ = tokens("cpu", torch.float32)
    keys = empty("packed", "fp8_e4m3fn", "cpu")
    append_index_keys(k, keys, torch.arange(7, 27))
    plain = IndexKeys.quantize(k)
    assert torch.equal(keys.dequantize().view(64, 64)[7:27], plain.dequantize())
    pages = IndexKeys.quantize(k, page_size=16)
    assert torch.equal(pages.dequantize().view(32, 64)[:20], plain.dequantize())


def test_scales_follow_the_rule_that_engines_have() -> None:
    x = torch.zeros(4, 32)
    x[1, 3], x[2, 3], x[3, 3] = 448.0, 3.0, -1e-6
    expected = torch.tensor([1e-4 / 448, 1.0, 3.0 / 448, 1e-4 / 448])
    assert torch.equal(IndexKeys.quantize(x).scale, expected)
    powers = IndexKeys.quantize(x, pow2_scales=True).scale
    assert torch.equal(powers, torch.exp2(expected.log2().ceil()))


def test_nan_stays_in_its_channel_and_inf_saturates(device: str) -> None:
    k = torch.ones(2, 32, device=device)
    k[0, 3], k[1, 4] = torch.nan, -torch.inf
    keys = empty("rows", "fp8_e4m3fn", device, 32)
    append_index_keys(k, keys, torch.arange(2, device=device))
    found = keys.dequantize()[:2]
    assert torch.isnan(found[0]).nonzero().tolist() == [[3]]
    assert torch.isfinite(found[1]).all()
    assert found[1, 4] < -3e38


def test_a_rotation_of_queries_and_keys_leaves_their_products() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 20, 128, generator=generator)
    keys = empty("rows", "fp8_e4m3fn", "cpu", 128)
    append_index_keys(k, keys, torch.arange(20), hadamard=True)
    products = hadamard(q) @ keys.dequantize()[:20].T
    assert torch.allclose(products, q @ k.T, atol=2.0)
    assert (products - q @ k.T).abs().mean() < 0.03 * (q @ k.T).abs().mean()


def _append(**changes: Any) -> None:
    angle = torch.rand(30, 16)
    given: dict[str, Any] = {
        "k": torch.ones(3, 64), "keys": empty("packed", "fp8_e4m3fn", "cpu"), "slot_mapping": torch.arange(3),
        "cos": angle, "sin": angle, "positions": torch.arange(3), "style": "neox", **changes,
    }  # fmt: skip
    rope = Rope(*(given.pop(name) for name in ("cos", "sin", "positions", "style")))
    append_index_keys(**given, rope=rope)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "keys of another width": ({"k": torch.ones(3, 32)}, r"k must have shape \[num_tokens, 64\]"),
    "keys in FP8": ({"k": torch.ones(3, 64).to(torch.float8_e4m3fn)}, "k must have dtype one of"),
    "fewer slots": ({"slot_mapping": torch.arange(2)}, r"slot_mapping must have shape \[3\]"),
    "no sines": ({"sin": None}, "rope.sin must be a torch.Tensor"),
    "sines of another dtype": ({"sin": torch.rand(30, 16).int()}, "rope.sin must have dtype"),
    "sines of other positions": ({"sin": torch.rand(29, 16)}, "rope.sin must have shape"),
    "sines apart": ({"sin": torch.rand(30, 32)[:, :16]}, "rope.sin must have the strides of rope.cos"),
    "more angles than channels": (
        {"cos": torch.rand(30, 33), "sin": torch.rand(30, 33)}, "at most head_dim / 2 = 32 columns",
    ),
    "no positions": ({"cos": torch.rand(0, 16), "sin": torch.rand(0, 16)}, "at least one position"),
    "an unknown style": ({"style": "llama"}, "rope.style must be one of neox, gptj"),
    "keys that require grad": ({"k": torch.ones(3, 64, requires_grad=True)}, "k must not require grad"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused(what: str) -> None:
    changes, message = WRONG[what]
    with pytest.raises((TypeError, ValueError), match=message):
        _append(**changes)


def test_fp4_keys_are_not_written() -> None:
    keys = IndexKeys.packed(torch.zeros(2, 16, 68, dtype=torch.uint8), format="fp4_e2m1")
    with pytest.raises(UnsupportedError, match="keys must be in FP8 to be appended to"):
        append_index_keys(torch.ones(1, 128), keys, torch.zeros(1, dtype=I32))


def test_no_tokens(device: str) -> None:
    keys = empty("rows", "fp8_e4m3fn", device)
    append_index_keys(torch.zeros(0, 64, device=device), keys, torch.zeros(0, dtype=I32, device=device))
    assert bool((keys.values == 0x55).all())
