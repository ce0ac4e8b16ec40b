"""A layer of vLLM's backend without a model: what it costs the host, and what it hands to the kernels."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from engine_checks import BF16, watch
from step_costs import LAYER_IN_VIEWS, VIEWS, in_views, least_seconds, operators
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, get_kv_quant_mode
from vllm_parts import make_builder

from narrowkv.attn_decode import paged_decode_reference
from narrowkv.attn_prefill import batch_prefill_reference
from narrowkv.engines import steps
from narrowkv.engines.vllm import BACKEND, backend, register
from narrowkv.engines.vllm.backend import NarrowAttention, NarrowAttentionBackend
from narrowkv.engines.vllm.slots import CACHE_DTYPES, OWN_SLOTS, randomly_rotated, slot_bytes
from narrowkv.quant import relative_l1

BLOCKS, BLOCK, HEADS, KV_HEADS, DIM = 8, 16, 12, 1, 64
LENS = (20, 33)
DTYPES = [*(name for name in CACHE_DTYPES if name != "float16"), *OWN_SLOTS]


def make_step():
    """A decode step of two requests, by vLLM's metadata and narrowkv's builder."""
    builder = make_builder(BLOCK)
    starts = torch.arange(3, dtype=torch.int32)
    blocks = torch.tensor([[3, 1, 0, 0], [5, 2, 7, 0]], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(LENS, dtype=torch.int32),
        num_reqs=2, num_actual_tokens=2, max_query_len=1, max_seq_len=max(LENS), block_table_tensor=blocks,
        slot_mapping=torch.tensor([1 * BLOCK + 3, 7 * BLOCK]), causal=True,
    )  # fmt: skip
    return builder, common


class Layer:
    """vLLM's layer with a cache that has tokens already."""

    def __init__(self, cache_dtype):
        self.impl = NarrowAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, kv_cache_dtype=cache_dtype)
        self._k_scale = self._v_scale = torch.tensor(0.02)
        size = slot_bytes(cache_dtype, DIM) or 2 * DIM
        dtype = torch.bfloat16 if cache_dtype in ("auto", "bfloat16") else torch.uint8
        self.kv_cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, size, dtype=dtype)
        random = torch.Generator().manual_seed(0)
        k, v = torch.randn(2, BLOCKS * BLOCK, KV_HEADS, DIM, generator=random).bfloat16()
        self.impl.do_kv_cache_update(self, k, v, self.kv_cache, torch.arange(BLOCKS * BLOCK))
        self.q = torch.randn(2, HEADS, DIM, generator=random).bfloat16()
        self.k, self.v = torch.randn(2, 2, KV_HEADS, DIM, generator=random).bfloat16()
        self.out = torch.empty_like(self.q)

    def run(self, step, slots):
        """What vLLM calls in a step."""
        self.impl.do_kv_cache_update(self, self.k, self.v, self.kv_cache, slots)
        self.impl.forward(self, self.q, self.k, self.v, self.kv_cache, step, self.out)


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_a_layer_copies_nothing_reads_nothing_and_is_attention(cache_dtype):
    layer = Layer(cache_dtype)
    builder, common = make_step()
    layer.run(builder.build(0, common), common.slot_mapping)  # plans
    with operators((backend, "append"), (steps, "paged_decode")) as seen:
        step = builder.build(0, common)
        assert set(seen) <= VIEWS
        seen.clear()
        layer.run(step, common.slot_mapping)
        rotates = cache_dtype == "int4_per_token_head"  # keys, values, queries and outputs, by matrices
        assert seen == [] or rotates
        assert {"item", "tolist", "_local_scalar_dense", "nonzero"}.isdisjoint(seen)
        assert not rotates or seen.count("mm") == 4
    cache = layer.impl.cache_of(layer, layer.kv_cache)
    assert cache.k.untyped_storage().data_ptr() == layer.kv_cache.untyped_storage().data_ptr()
    assert layer.impl.cache_of(layer, layer.kv_cache) is cache
    q = randomly_rotated(layer.q) if rotates else layer.q
    scale = layer.impl.options["sm_scale"]
    exact = paged_decode_reference(q, cache, step.table, sm_scale=scale, out_dtype=torch.float32)
    if rotates:
        exact = randomly_rotated(exact, inverse=True)
    assert relative_l1(layer.out, exact) < (0.01 if rotates else BF16)


@pytest.mark.parametrize("known", [True, False])  # whether vLLM says how long requests are at most
def test_decodes_and_prefills_of_a_step_are_served_apart(known, monkeypatch):
    calls = watch(monkeypatch, (steps, "paged_decode"), (steps, "batch_prefill"))
    layer = Layer("fp8")
    builder, common = make_step()
    builder.reorder_batch_threshold = 1
    starts, lens = torch.tensor([0, 1, 18], dtype=torch.int32), torch.tensor(LENS, dtype=torch.int32)
    common = replace(
        common, query_start_loc=starts, query_start_loc_cpu=starts, num_actual_tokens=18, max_query_len=17,
        seq_lens_cpu_upper_bound=lens if known else None,
    )  # fmt: skip
    step = builder.build(0, common)
    q = torch.randn(18, HEADS, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.empty_like(q)
    layer.impl.forward(layer, q, q, q, layer.kv_cache, step, out)
    assert calls.counts == {"paged_decode": 1, "batch_prefill": 1}
    assert [part.max_kv_tokens for part in step.parts] == (list(LENS) if known else [0, 0])
    cache = layer.impl.cache_of(layer, layer.kv_cache)
    exact = batch_prefill_reference(q, cache, step.table, starts, out_dtype=torch.float32)
    assert relative_l1(out, exact) < BF16


def test_a_layer_adds_little_time_to_its_planned_calls(monkeypatch):
    layer = Layer("fp8")
    builder, common = make_step()
    step = builder.build(0, common)
    layer.run(step, common.slot_mapping)
    monkeypatch.setattr(backend, "append", lambda *args, **kwargs: None)
    monkeypatch.setattr(steps, "paged_decode", lambda *args, **kwargs: None)
    seconds = least_seconds(lambda: layer.run(step, common.slot_mapping))
    assert in_views(seconds) <= LAYER_IN_VIEWS


def test_a_decode_takes_the_invariant_prefill_where_vllm_asks_for_batch_invariance(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer = Layer("fp8")
    builder, common = make_step()
    calls = watch(monkeypatch, (steps, "paged_decode"), (steps, "batch_prefill"), bound=BF16)
    layer.run(builder.build(0, common), common.slot_mapping)
    (call,) = calls
    assert (call.name, call.options["plan"].batch_invariant) == ("batch_prefill", True)


def test_steps_that_are_not_causal_are_refused():
    builder, common = make_step()
    common.causal = False
    with pytest.raises(backend.UnsupportedError, match="causal=False"):
        builder.build(0, common)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "ultraquant_4bit"])
@pytest.mark.parametrize("shape", [(1,), (), (1, 1)])
def test_outputs_are_fp8_where_vllm_fuses_their_quantisation(cache_dtype, shape, monkeypatch):
    layer = Layer(cache_dtype)
    assert layer.impl.fused_output_quant_supported(kFp8StaticTensorSym)
    scale = torch.full(shape, 0.02)
    builder, common = make_step()
    decodes = builder.build(0, common)
    builder.reorder_batch_threshold = 1
    starts = torch.tensor([0, 1, 18], dtype=torch.int32)
    sizes = {"num_actual_tokens": 18, "max_query_len": 17}
    mixed = builder.build(0, replace(common, query_start_loc=starts, query_start_loc_cpu=starts, **sizes))
    calls = watch(monkeypatch, (steps, "paged_decode"), (steps, "batch_prefill"))
    for step in (decodes, mixed):
        q = torch.randn(
            step.num_tokens + 3, HEADS, DIM, generator=torch.Generator().manual_seed(1)
        ).bfloat16()
        wide, out = torch.empty_like(q), torch.empty_like(q, dtype=current_platform.fp8_dtype())
        layer.impl.forward(layer, q, q, q, layer.kv_cache, step, wide)
        assert layer.impl.forward(layer, q, q, q, layer.kv_cache, step, out, scale) is out
        count = step.num_tokens  # vLLM pads
        exact = (wide[:count].float() / 0.02).to(out.dtype).float()
        assert relative_l1(out[:count].float(), exact) < 2 * BF16
    assert calls.counts == {"paged_decode": 4, "batch_prefill": 2}


def test_other_quantised_outputs_are_refused():
    layer = Layer("fp8")
    scales, outputs = torch.ones(1), (layer.q, layer.k, layer.v, layer.kv_cache, None, layer.out)
    assert not layer.impl.fused_output_quant_supported(kNvfp4Dynamic)
    assert not layer.impl.fused_output_quant_supported(kFp8DynamicTokenSym)
    with pytest.raises(backend.UnsupportedError, match="fuse_attn_quant"):
        layer.impl.forward(layer, *outputs, output_block_scale=scales)
    for rotated_or_divided in (Layer("int4_per_token_head"), layer):
        if rotated_or_divided is layer:
            layer.impl._ranks = object()  # decode context parallelism
        assert not rotated_or_divided.impl.fused_output_quant_supported(kFp8StaticTensorSym)
        with pytest.raises(backend.UnsupportedError, match="fuse_attn_quant"):
            rotated_or_divided.impl.forward(rotated_or_divided, *outputs, output_scale=scales)


def test_a_cache_that_vllm_drops_is_freed_though_the_layer_has_used_it():
    # vLLM profiles with a small cache, drops it and measures the free memory before it makes the real one.
    layer = Layer("fp8")
    builder, common = make_step()
    layer.run(builder.build(0, common), common.slot_mapping)
    small = weakref.ref(layer.kv_cache.untyped_storage())
    size = layer.kv_cache.shape
    layer.kv_cache = torch.tensor([])
    gc.collect()
    assert small() is None
    layer.kv_cache = torch.zeros(2 * size[0], *size[1:], dtype=torch.uint8)
    assert layer.impl.cache_of(layer, layer.kv_cache).k.shape[0] == 2 * BLOCKS


@pytest.mark.parametrize("cache_dtype", sorted(set(DTYPES) - {"auto", "bfloat16"}))
def test_vllm_is_told_the_bytes_of_a_slot(cache_dtype, monkeypatch):
    # By name where vLLM takes new names (0.33), else by what the layer that was made last was asked for.
    register()
    own = cache_dtype in OWN_SLOTS
    mode, viewed_as = KVQuantMode.FP8_PER_TENSOR, torch.uint8
    if own and backend._CUSTOM is not None:
        mode, viewed_as = KVQuantMode.CUSTOM, STR_DTYPE_TO_TORCH_DTYPE[cache_dtype]
    elif own:
        monkeypatch.setattr(backend, "_beside_fp8", [cache_dtype])
    elif cache_dtype not in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        mode = get_kv_quant_mode(cache_dtype)
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=DIM, dtype=viewed_as, kv_quant_mode=mode
    )
    told = NarrowAttentionBackend.customize_spec(spec)
    assert told.state_content_size_bytes == (slot_bytes(cache_dtype, DIM) or 2 * DIM)
    assert NarrowAttentionBackend.customize_spec(told) == told


@pytest.mark.parametrize("asked", ["ROCM_ATTN, TRITON_ATTN", None])
def test_narrowkv_replaces_the_backends_that_are_named(asked, monkeypatch):
    monkeypatch.setenv("NARROWKV_VLLM_INSTEAD_OF", "" if asked is None else asked)
    replaced = (AttentionBackendEnum.ROCM_ATTN, AttentionBackendEnum.TRITON_ATTN)
    try:
        register()
        assert AttentionBackendEnum.CUSTOM.get_class() is NarrowAttentionBackend
        assert {each.is_overridden() for each in replaced} == {asked is not None}
        assert asked is None or {each.get_path() for each in replaced} == {BACKEND}
        with pytest.raises(ValueError, match=r"instead_of must be one of .*ROCM_ATTN.* got 'ROCM'"):
            register(instead_of="ROCM")
    finally:
        for each in replaced:
            each.clear_override()
