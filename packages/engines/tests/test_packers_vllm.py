"""The bytes that narrowkv stores for vLLM beside those of vLLM's own writers (`make test-engines`)."""

from __future__ import annotations

import importlib
import sys
from inspect import signature
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from engine_checks import row_attention
from interpreted import Interpreted, vllm_module_with_triton
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl
from vllm.v1.attention.ops import rocm_aiter_mla_sparse
from vllm.v1.attention.ops.ultraquant.reference import ultraquant_dequant, ultraquant_encode
from vllm.v1.kv_cache_interface import KVQuantMode

from narrowkv.engines.deepseek import page_rows
from narrowkv.engines.vllm import deepseek_v4
from narrowkv.engines.vllm.backend import NarrowAttention
from narrowkv.engines.vllm.slots import layer_cache, slot_bytes
from narrowkv.quant import hadamard, relative_l1

BLOCKS, HEADS, BLOCK, DIM = 2, 2, 16, 64


def inputs(tokens=24, dim=DIM):
    random = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, tokens, HEADS, dim, generator=random) * torch.logspace(-2, 2, tokens)[:, None, None]
    k[3, 1], v[5] = 0.0, 0.0
    return k.bfloat16(), v.bfloat16(), torch.randperm(BLOCKS * BLOCK, generator=random)[:tokens]


OPS = "vllm.v1.attention.ops"
ONE = torch.ones(())


def stored_by_both(cache_dtype, monkeypatch, dim=DIM):
    """Slots that vLLM's own writer fills, rotation included, and those of narrowkv's backend."""
    writer = vllm_module_with_triton(f"{OPS}.triton_reshape_and_cache_flash", monkeypatch)
    packed = vllm_module_with_triton(f"{OPS}.int4_per_token_head", monkeypatch)
    monkeypatch.setitem(sys.modules, f"{OPS}.int4_per_token_head", packed)
    writer._reshape_cache_per_token_head = Interpreted(writer._reshape_cache_per_token_head)
    packed._reshape_cache_int4_kernel = Interpreted(packed._reshape_cache_int4_kernel)
    k, v, slots = inputs(dim=dim)
    kv_cache = torch.zeros(BLOCKS, HEADS, BLOCK, slot_bytes(cache_dtype, dim), dtype=torch.uint8)
    theirs = layer_cache(kv_cache, cache_dtype, dim, ONE, ONE)
    sides = [x.view(torch.float8_e4m3fn) if "fp8" in cache_dtype else x for x in (theirs.k, theirs.v)]
    writer.triton_reshape_and_cache_flash_per_token_head_quant(
        k, v, *sides, theirs.k_descale, theirs.v_descale, slots, KVQuantMode[cache_dtype.upper()]
    )
    mine = torch.zeros_like(kv_cache)
    impl = NarrowAttention(HEADS, dim, 1.0, kv_cache_dtype=cache_dtype)
    impl.do_kv_cache_update(SimpleNamespace(_k_scale=ONE, _v_scale=ONE), k, v, mine, slots)
    assert kv_cache.any()
    return kv_cache, mine


def test_fp8_per_token_head_has_vllms_scales_and_its_codes_but_for_a_rounding(monkeypatch):
    k, v, slots = inputs()
    theirs, mine = (
        layer_cache(slots_of, "fp8_per_token_head", DIM, ONE, ONE)
        for slots_of in stored_by_both("fp8_per_token_head", monkeypatch)
    )
    place = slots // BLOCK, slots % BLOCK
    for x, found, expected, scale, their_scale in (
        (k, mine.k, theirs.k, mine.k_descale, theirs.k_descale),
        (v, mine.v, theirs.v, mine.v_descale, theirs.v_descale),
    ):
        zero = (x == 0).all(-1)
        assert torch.equal(scale[place][~zero], their_scale[place][~zero])
        found, expected = (stored[place].view(torch.float8_e4m3fn).float() for stored in (found, expected))
        assert not found[zero].any()
        assert not expected[zero].any()
        # vLLM multiplies by the reciprocal of the scale: numbers that round otherwise lie between two codes.
        other = found != expected
        assert other.float().mean() < 0.01
        exact = (x.double() / scale[place][..., None].double())[other]
        middle = (found[other].double() + expected[other].double()) / 2
        assert torch.allclose(exact, middle, rtol=1e-6, atol=0)


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("cache_dtype", ["int8_per_token_head", "int4_per_token_head"])
def test_integer_slots_are_vllms_byte_for_byte(cache_dtype, head_dim, monkeypatch):
    assert torch.equal(*stored_by_both(cache_dtype, monkeypatch, head_dim))


def test_ultraquant_slots_are_vllms_byte_for_byte():
    k, v, slots = inputs()
    kv_cache = torch.zeros(BLOCKS, HEADS, BLOCK, slot_bytes("ultraquant_4bit", DIM), dtype=torch.uint8)
    impl = NarrowAttention(HEADS, DIM, 1.0, kv_cache_dtype="ultraquant_4bit")
    impl.do_kv_cache_update(SimpleNamespace(_k_scale=ONE, _v_scale=ONE), k, v, kv_cache, slots)
    stored = kv_cache.transpose(1, 2)[slots // BLOCK, slots % BLOCK]
    sides = [ultraquant_encode(x, rotate=rotate) for x, rotate in ((k, True), (v, False))]
    expected = torch.cat([part for side in sides for part in (side.codes_packed, side.scale_bytes)], -1)
    assert torch.equal(stored, expected)
    # vLLM's own query, rotated, against the keys that it reads back.
    q = torch.randn(3, HEADS, DIM).bfloat16()
    logits = torch.einsum("thd,shd->hts", hadamard(q.float()), ultraquant_dequant(sides[0], DIM))
    exact = torch.einsum("thd,shd->hts", q.float(), k.float())
    assert (logits - exact).norm() / exact.norm() < 0.2


@pytest.mark.parametrize(
    ("cache_dtype", "is_neox", "rotary_dim"),
    [
        ("auto", True, DIM),
        ("fp8", True, DIM // 2),
        ("auto", False, DIM // 2),
        ("fp8", False, DIM),
        ("fp8_per_token_head", True, DIM),
        ("int8_per_token_head", False, DIM),
        ("ultraquant_4bit", True, DIM),
        ("narrowkv_k8v4", True, DIM),
        ("narrowkv_fp4", False, DIM // 2),
    ],
)
def test_the_fused_rope_is_vllms_own_before_its_unfused_cache_update(cache_dtype, is_neox, rotary_dim):
    # vLLM's pass and operator are not imported on a CPU: the operator calls this method, by position.
    hook = NarrowAttention.do_rope_and_kv_cache_update
    assert list(signature(hook).parameters) == list(
        signature(AttentionImpl.do_rope_and_kv_cache_update).parameters
    )
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["none"]))):
        rotary = RotaryEmbedding(DIM, rotary_dim, 64, 10000.0, is_neox, torch.float32)
    tokens, queries = 24, 6
    random = torch.Generator().manual_seed(1)
    qkv = torch.randn(tokens, (queries + 2 * HEADS) * DIM, generator=random).bfloat16()
    q, k, v = (x.view(tokens, -1, DIM) for x in qkv.split([queries * DIM, HEADS * DIM, HEADS * DIM], -1))
    positions = torch.randint(0, 64, (tokens,), generator=random)
    table = rotary.cos_sin_cache.bfloat16()
    # In fp32, rounded once: vLLM's own in 16 bits rounds each product.
    want_q, want_k = RotaryEmbedding.forward_static(
        positions, q.float(), k.float(), DIM, rotary_dim, table.float(), is_neox
    )
    slots = torch.randperm(BLOCKS * BLOCK, generator=random)[:tokens]
    slots[3] = -1
    impl = NarrowAttention(queries, DIM, 1.0, HEADS, kv_cache_dtype=cache_dtype)
    assert impl.fused_rope_kvcache_supported()
    one = torch.tensor(0.5)
    stored = []
    for _ in range(2):
        dtype = torch.bfloat16 if cache_dtype == "auto" else torch.uint8
        size = slot_bytes(cache_dtype, DIM) or 2 * DIM
        stored.append(torch.zeros(BLOCKS, HEADS, BLOCK, size, dtype=dtype))
    layer = SimpleNamespace(_k_scale=one, _v_scale=one)
    key_before = k.clone()
    impl.do_rope_and_kv_cache_update(layer, q, k, v, positions, table, is_neox, stored[0], slots)
    assert torch.equal(q, want_q.bfloat16())
    assert torch.equal(k, key_before)
    unfused = NarrowAttention(queries, DIM, 1.0, HEADS, kv_cache_dtype=cache_dtype)
    unfused.do_kv_cache_update(layer, want_k, v, stored[1], slots)
    assert torch.equal(*stored)


def test_fused_rope_is_not_offered_where_values_are_rotated():
    assert not NarrowAttention(
        HEADS, DIM, 1.0, kv_cache_dtype="int4_per_token_head"
    ).fused_rope_kvcache_supported()


def record_cache(writer, blocks, block_size, x, slots, fnuz):
    """vLLM's pages of DeepSeek-V4, `[blocks, block_size, 584]`, written by vLLM."""
    padded = -(-block_size * 584 // 576) * 576
    pages = torch.zeros(blocks, padded, dtype=torch.uint8)
    writer.quantize_and_insert_k_cache(x, pages, slots, block_size, use_fnuz=fnuz)
    return pages[:, : block_size * 584].view(blocks, block_size, 584)


def test_deepseek_v4s_window_in_fnuz_and_its_compressed_rows_in_ocp_are_attended_to(monkeypatch):
    name = "vllm.models.deepseek_v4.common.ops.cache_utils"
    importlib.import_module(name)  # its package needs vLLM's own names of Triton
    writer = vllm_module_with_triton(name, monkeypatch)
    writer.quantize_and_insert_k_kernel = Interpreted(writer.quantize_and_insert_k_kernel)
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))  # gfx942
    random = torch.Generator().manual_seed(2)
    tokens, heads, rows = 2, 8, 32
    caches, exact = [], []
    for fnuz in (True, False):
        x = torch.randn(rows, 512, generator=random).bfloat16()
        slots = torch.randperm(rows, generator=random)
        caches.append(record_cache(writer, 2, 16, x, slots, fnuz))
        stored = torch.empty(rows, 512)
        stored[slots] = x.float()
        read = page_rows(caches[-1], "fp8_e4m3fnuz" if fnuz else "fp8_e4m3fn").dequantize()
        assert (read - stored).norm() / stored.norm() < 0.03  # E4M3's; half or twice the number is not
        exact.append(read)
    q = torch.randn(tokens, heads, 512, generator=random).bfloat16()
    lists = [torch.randint(0, rows, (tokens, 12), generator=random, dtype=torch.int32) for _ in caches]
    lens = [torch.tensor([12, 7], dtype=torch.int32), torch.tensor([3, 12], dtype=torch.int32)]
    sink = torch.nn.Parameter(torch.linspace(-1, 1, heads + 8))
    want = []
    for t in range(tokens):
        k = torch.cat([rows[ids[t, : n[t]].long()] for rows, ids, n in zip(exact, lists, lens, strict=True)])
        want.append(row_attention(q[t], k, 0.05, sink[:heads].detach()))
    starts = torch.tensor([0, 3, 15], dtype=torch.int32)
    ragged = torch.cat([lists[1][t, : lens[1][t]] for t in range(tokens)])
    # vLLM's modules for ROCm are not imported on a CPU: one that stands in for them calls as they do.
    place = ModuleType("place")
    place.rocm_sparse_attn_decode = rocm_aiter_mla_sparse.rocm_sparse_attn_decode
    for name in deepseek_v4._PLACES:
        monkeypatch.setitem(sys.modules, name, place)
    undo = deepseek_v4.patch()
    found = torch.empty_like(q)
    arguments = {
        "q": q, "kv_cache": caches[1], "swa_k_cache": caches[0], "swa_only": False, "topk_indices": None,
        "topk_lens": lens[1], "swa_indices": lists[0], "swa_lens": lens[0], "swa_ragged_indices": None,
        "swa_ragged_indptr": None, "topk_ragged_indices": ragged, "topk_ragged_indptr": starts,
        "attn_sink": sink, "scale": 0.05, "head_dim": 512, "nope_head_dim": 448, "rope_head_dim": 64,
        "output": found, "inv_rope_positions": None, "extra_cache_nan_free": False, "adaptive_splits": False,
    }  # fmt: skip
    signature(rocm_aiter_mla_sparse.rocm_sparse_attn_decode).bind(**arguments)
    assert place.rocm_sparse_attn_decode(**arguments) == 0  # rows that are rotated back
    undo()
    assert place.rocm_sparse_attn_decode is rocm_aiter_mla_sparse.rocm_sparse_attn_decode
    assert relative_l1(found, torch.stack(want)) < 0.004
