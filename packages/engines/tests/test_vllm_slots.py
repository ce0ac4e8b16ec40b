"""vLLM's slots as narrowkv caches: what is appended through the views is what the bytes say."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from narrowkv.engines.vllm.slots import (
    CACHE_DTYPES,
    OWN_SLOTS,
    cache_options,
    chosen_slots,
    format_of,
    layer_cache,
    own_slots_of,
    register_own_slots,
    slot_bytes,
    slot_reasons,
)
from narrowkv.paged_cache import append
from narrowkv.paged_cache.layouts import HEAD_DIMS
from narrowkv.quant import hadamard
from narrowkv.quant.fp4 import decode_fp4, unpack_fp4

BLOCKS, HEADS, BLOCK, DIM = 3, 2, 16, 64


def memory(cache_dtype, order):
    """vLLM's logical cache `[blocks, heads, block, slot]` with a physical order of its axes."""
    content = slot_bytes(cache_dtype, DIM) or 2 * DIM
    sixteen = cache_dtype in ("auto", "bfloat16", "float16")
    dtype = {"float16": torch.float16}.get(cache_dtype, torch.bfloat16) if sixteen else torch.uint8
    sizes = [BLOCKS, HEADS, BLOCK]
    physical = torch.zeros([*(sizes[axis] for axis in order), content], dtype=dtype)
    inverse = [order.index(axis) for axis in range(3)]
    return physical.permute(*inverse, 3)


@pytest.mark.parametrize("cache_dtype", [*CACHE_DTYPES, *OWN_SLOTS])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2)], ids=["BHN", "BNH", "HBN"])
def test_appended_tokens_come_back_through_the_views_and_nothing_else_changes(cache_dtype, order):
    kv_cache = memory(cache_dtype, order)
    scale = torch.tensor(0.02)
    cache = layer_cache(kv_cache, cache_dtype, DIM, scale, scale)
    k, v = torch.randn(2, 3, HEADS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots = torch.tensor([BLOCK + 1, -1, 2 * BLOCK + 5])
    append(cache, k, v, slots)
    assert cache.k.untyped_storage().data_ptr() == kv_cache.untyped_storage().data_ptr()
    stored = cache.dequantize()
    assert (cache.key_transform is not None) == (cache_dtype == "ultraquant_4bit")
    if cache.key_transform is not None:
        k = hadamard(k)
    bounds = {"fp8_e5m2": (0.15, 0.15), "ultraquant_4bit": (0.3, 0.3), "narrowkv_fp4": (0.3, 0.3)}
    bounds |= {"narrowkv_k8v4": (0.07, 0.3), "int4_per_token_head": (0.15, 0.15)}
    for new, side, bound in zip((k, v), stored, bounds.get(cache_dtype, (0.07, 0.07)), strict=True):
        for token, slot in ((0, BLOCK + 1), (2, 2 * BLOCK + 5)):
            found = side[slot // BLOCK, slot % BLOCK]
            error = (found - new[token].float()).norm() / new[token].float().norm()
            assert error < bound  # the format's own relative error
    touched = kv_cache.transpose(1, 2).flatten(0, 1).float().abs().sum((1, 2)) > 0
    assert touched.nonzero().flatten().tolist() == [BLOCK + 1, 2 * BLOCK + 5]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_dim_that_is_answered_yes_has_slots(head_dim):
    one = torch.tensor(0.02)
    for cache_dtype in [*CACHE_DTYPES[3:], *OWN_SLOTS]:
        if slot_reasons(cache_dtype, head_dim):
            assert cache_dtype == "ultraquant_4bit"
            continue
        size = slot_bytes(cache_dtype, head_dim) or 2 * head_dim
        kv_cache = torch.zeros(1, 1, BLOCK, size, dtype=torch.uint8)
        cache = layer_cache(kv_cache, cache_dtype, head_dim, one, one)
        k, v = torch.randn(2, 1, 1, head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
        append(cache, k, v, torch.tensor([3]))
        found = cache.dequantize()[1][0, 3, 0]
        assert (found - v[0, 0].float()).norm() / v.float().norm() < 0.3


def slot_of(cache_dtype, k, v):
    """The bytes of head 1 of a token that is stored, and what the cache gives back of its value."""
    kv_cache = memory(cache_dtype, (0, 1, 2))
    cache = layer_cache(kv_cache, cache_dtype, DIM, torch.ones(()), torch.ones(()))
    append(cache, k, v, torch.tensor([BLOCK + 3]))
    return kv_cache[1, 1, 3], cache.dequantize()[1][1, 3, 1]


def test_scales_lie_beside_their_numbers():
    k, v = torch.randn(2, 1, HEADS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    slot, value = slot_of("fp8_per_token_head", k, v)
    codes, scale = slot[DIM + 4 : 2 * DIM + 4].view(torch.float8_e4m3fn), slot[-4:].view(torch.float32)
    assert slot.shape[0] == 2 * (DIM + 4)
    assert torch.equal(codes.float() * scale, value)
    codes, scale = slot[:DIM].view(torch.float8_e4m3fn), slot[DIM : DIM + 4].view(torch.float32)
    assert torch.allclose(codes.float() * scale, k[0, 1].float(), rtol=0.07, atol=scale.item() / 100)

    slot, value = slot_of("narrowkv_k8v4", k, v)
    codes, scale = slot[DIM + 4 : DIM + 4 + DIM // 2], slot[-4:-3].view(torch.float8_e4m3fn).float()
    assert slot.shape[0] == 104
    assert torch.equal(decode_fp4(unpack_fp4(codes)) * scale, value)
    assert not slot[-3:].any()

    slot, value = slot_of("ultraquant_4bit", k, v)
    assert slot.shape[0] == 2 * (DIM // 2 + DIM // 32)
    groups = torch.exp2(slot[DIM + 2 :].float() - 127).repeat_interleave(32)
    assert torch.equal(decode_fp4(unpack_fp4(slot[DIM // 2 + 2 : DIM + 2])) * groups, value)


def test_integer_slots_by_hand():
    """Bytes of one head: numbers, a scale of four bytes, the same of V; INT4's zero point in the scale."""
    k = torch.tensor([127.0, -64.0, 0.6, *[0.0] * (DIM - 3)]).expand(1, HEADS, DIM)
    v = torch.tensor([-4.0, 11.0, 1.6, *[0.0] * (DIM - 3)]).expand(1, HEADS, DIM)
    slot, _ = slot_of("int8_per_token_head", k, v * 127 / 11)
    assert slot.shape[0] == 2 * (DIM + 4)
    assert slot[:3].tolist() == [0x7F, 0xC0, 0x01]
    assert slot[DIM : DIM + 4].tolist() == slot[2 * DIM + 4 :].tolist() == [0x00, 0x00, 0x80, 0x3F]
    assert slot[DIM + 4 : DIM + 7].tolist() == [0xD2, 0x7F, 0x12]  # -46, 127, 18

    slot, value = slot_of("int4_per_token_head", k / 127 * 15, v)
    half = DIM // 2
    assert slot.shape[0] == 2 * (half + 4)
    # V: scale 1, zero point 4: codes 0, 15, 6 and then 4 for zeros; 1.0 is 0x3F800000, of which the lowest
    # nibble is the zero point.
    assert slot[half + 4 : half + 7].tolist() == [0xF0, 0x46, 0x44]
    assert slot[-4:].tolist() == [0x04, 0x00, 0x80, 0x3F]
    assert torch.equal(value[:4], torch.tensor([-4.0, 11.0, 2.0, 0.0]))


def test_formats_and_refusals():
    cpu = torch.device("cpu")
    assert str(format_of("auto", torch.float16, cpu)) == "fp16"
    assert str(format_of("fp8_e5m2", torch.float16, cpu)) == "fp8_e5m2"
    assert chosen_slots("ultraquant_4bit", {}) == "ultraquant_4bit"
    with pytest.raises(ValueError, match="kv_cache_dtype must be fp8 with narrowkv_fp4, got 'auto'"):
        chosen_slots("auto", {"kv_cache": "narrowkv_fp4"})
    with pytest.raises(ValueError, match=r"additional_config.*must be one of"):
        chosen_slots("fp8", {"kv_cache": "k4v2"})
    with pytest.raises(ValueError, match="kv_cache_dtype must be narrowkv_fp4 in this vLLM"):
        chosen_slots("fp8", {"kv_cache": "narrowkv_fp4"}, has_names=True)
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of"):
        format_of("nvfp4", torch.float16, cpu)


@pytest.fixture
def registered(monkeypatch):
    """The handlers of cache dtypes by name, in a vLLM of which only what takes them is there."""
    handlers = {}
    cache, interface = ModuleType("vllm.config.cache"), ModuleType("vllm.v1.kv_cache_interface")

    def register_kv_cache_dtype(name):
        def keep(make):
            assert name not in handlers, "vLLM warns of a name that it knows"
            handlers[name] = make()
            return make

        return keep

    vars(cache).update(
        register_kv_cache_dtype=register_kv_cache_dtype, is_known_kv_cache_dtype=handlers.__contains__
    )
    vars(interface).update(KVQuantMode=SimpleNamespace(CUSTOM="custom"))
    for module in (cache, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return handlers


def test_cache_dtypes_of_narrowkvs_own_are_registered_once_and_told_apart_by_their_dtype(registered):
    for _ in range(2):  # vLLM loads plugins more than once
        assert register_own_slots()
    assert set(registered) == set(OWN_SLOTS)
    for name, handler in registered.items():
        assert (handler.name, handler.quant_mode()) == (name, "custom")
        assert handler.torch_dtype().itemsize == 1
        assert own_slots_of(handler.torch_dtype()) == name
        assert cache_options(name) == {"kv_cache_dtype": name}


def test_a_vllm_that_takes_no_names_is_asked_for_own_slots_beside_fp8(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.config.cache", ModuleType("vllm.config.cache"))
    assert not register_own_slots()
    asked = cache_options("narrowkv_k8v4")
    assert chosen_slots(asked["kv_cache_dtype"], asked["additional_config"]) == "narrowkv_k8v4"
    assert cache_options("ultraquant_4bit") == {"kv_cache_dtype": "ultraquant_4bit"}
