"""Bytes of FP4 pages as engines store them: packers written out from the layouts and rules they document."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from narrowkv.paged_cache import PagedKVCache, append, append_reference

PAGES, PAGE, HEADS = 3, 4, 2
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SLOTS = (4, 0, 11, 2)


def _rows(dim: int) -> torch.Tensor:
    """Tokens `[4, heads, dim]` in bf16: random, zeros, numbers halfway between codes, far apart."""
    x = torch.randn(4, HEADS, dim, generator=torch.manual_seed(dim))
    x[1, 0] = 0
    x[2] = torch.randint(-24, 25, (HEADS, dim), generator=torch.manual_seed(1)) * 0.25
    x[3] *= torch.logspace(-3, 3, dim)
    return x.bfloat16().float()


def _nibble(x: float, away: bool, keep_sign: bool) -> int:
    """E2M1 of a scaled number: `away` moves ties from zero, otherwise they go towards minus infinity."""
    middles = [(a + b) / 2 for a, b in pairwise(VALUES)]
    up = away or x < 0
    code = sum(abs(x) > middle or (up and abs(x) == middle) for middle in middles)
    return code | (8 if x < 0 and (code or keep_sign) else 0)


def _ultraquant_exponent(amax: float) -> int:
    return math.floor(math.log2(amax * 0.156) + 0.5) if amax else -127


def _sglang_exponent(amax: float) -> int:
    return math.ceil(math.log2(max(amax / 6, 1e-10)))


def _pack(row: torch.Tensor, group: int, rule: str) -> tuple[list[int], list[int]]:
    """The bytes and the scales of one head of one token."""
    codes, scales = [], []
    for run in row.view(-1, group):
        amax = float(run.abs().max())
        exponent = _ultraquant_exponent(amax) if rule == "ultraquant" else _sglang_exponent(amax)
        scales.append(exponent + 127)
        codes += [_nibble(float(x) / 2.0**exponent, rule == "sglang", rule == "sglang") for x in run]
    return [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)], scales


@pytest.mark.parametrize("write", [append, append_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("dim", [64, 128])
def test_an_ultraquant_slot_holds_codes_and_scales_of_k_then_of_v(write: object, dim: int) -> None:
    """vLLM's `ultraquant_4bit` without its rotation: a slot of `dim + dim / 16` bytes per token and head."""
    codes, groups = dim // 2, dim // 32
    slots = torch.zeros(PAGES, PAGE, HEADS, 2 * (codes + groups), dtype=torch.uint8)
    k, k_scales, v, v_scales = slots.split([codes, groups, codes, groups], -1)
    cache = PagedKVCache.from_tensors(k, v, format="fp4_e2m1", k_descale=k_scales, v_descale=v_scales)
    assert cache.k_granularity == "token_head_group"
    assert [side.group for side in cache.sides()] == [32, 32]
    new = _rows(dim)
    write(cache, new, new.flip(0), torch.tensor(SLOTS), exponent="ultraquant")  # type: ignore[operator]
    want = torch.zeros_like(slots)
    for token, slot in enumerate(SLOTS):
        for head in range(HEADS):
            k_bytes, k_own = _pack(new[token, head], 32, "ultraquant")
            v_bytes, v_own = _pack(new.flip(0)[token, head], 32, "ultraquant")
            want[slot // PAGE, slot % PAGE, head] = torch.tensor([*k_bytes, *k_own, *v_bytes, *v_own])
    assert torch.equal(slots, want)


@pytest.mark.parametrize("write", [append, append_reference], ids=["kernel", "reference"])
def test_sglangs_pool_holds_a_scale_for_each_sixteen_in_a_buffer_beside_it(write: object) -> None:
    """`[slots, heads, dim / 2]` bytes and `[slots, heads * dim / 16]` scales for each of K and V."""
    dim, slots = 64, 12
    data = [torch.zeros(slots, HEADS, dim // 2, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(slots, HEADS * dim // 16, dtype=torch.uint8) for _ in range(2)]
    views = [x.view(slots, 1, HEADS, dim // 16) for x in scales]
    cache = PagedKVCache.from_tensors(
        *data, format="fp4_e2m1", layout="tokens", k_descale=views[0], v_descale=views[1]
    )
    assert [side.group for side in cache.sides()] == [16, 16]
    new = _rows(dim)
    write(cache, new, new.flip(0), torch.tensor(SLOTS), exponent="sglang")  # type: ignore[operator]
    for x, stored, own in zip((new, new.flip(0)), data, scales, strict=True):
        for token, slot in enumerate(SLOTS):
            packed = [_pack(x[token, head], 16, "sglang") for head in range(HEADS)]
            assert stored[slot].tolist() == [code for code, _ in packed]
            assert own[slot].tolist() == [byte for _, scale in packed for byte in scale]
