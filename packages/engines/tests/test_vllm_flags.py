"""What vLLM is told that narrowkv's backend can do, inherited or not; `make test-engines` runs it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from engine_checks import BF16, capabilities
from vllm.v1.attention.backend import AttentionCGSupport
from vllm_parts import make_builder

from narrowkv.attn_prefill import batch_prefill_reference
from narrowkv.engines.steps import attend
from narrowkv.engines.vllm.backend import (
    NarrowAttention,
    NarrowAttentionBackend,
    NarrowMetadataBuilder,
)
from narrowkv.paged_cache import PagedKVCache
from narrowkv.quant import relative_l1
from narrowkv.runtime.errors import UnsupportedError

# A method with arguments is "asked". Methods of layers, which have their instance as an argument, are too.
BACKEND = {
    "accept_output_buffer": True,
    "forward_includes_kv_cache_update": False,
    "is_mla": False,
    "is_sparse": False,
    "is_ssm": False,
    "supported_dtypes": [torch.float16, torch.bfloat16],
    "supported_kv_cache_layouts": None,  # any: strides are read
    "supports_alibi_sqrt": False,
    "supports_attn_type": "asked",  # a decoder's own
    "supports_batch_invariance": True,
    "supports_block_size": "asked",
    "supports_combination": "asked",
    "supports_compute_capability": "asked",
    "supports_dcp": True,
    "supports_device_cpu_query_lens_mismatch": True,  # the builder knows when to read the device's
    "supports_dtype": "asked",
    "supports_head_size": "asked",
    "supports_kv_cache_dtype": "asked",
    "supports_kv_connector": True,  # pages are vLLM's memory, with the scales inside
    "supports_kv_cache_update_bypass": False,  # of models that store keys by kernels of their own
    "supports_mm_prefix": False,
    "supports_non_causal": False,
    "supports_non_causal_dcp": False,
    "supports_pcp": False,
    "supports_per_head_quant_scales": True,
    "supports_rswa": False,
    "supports_sink": True,
    "supports_sliding_window": True,
}
BUILDER = {
    "_cudagraph_support": AttentionCGSupport.UNIFORM_BATCH,
    "requires_block_table_width": False,
    "supports_draft_decode_metadata_update": False,
    "supports_update_block_table": False,
}
LAYER = {
    "can_return_lse_for_decode": True,
    "fused_output_quant_supported": "asked",  # FP8 with a static scale
    "fused_qk_norm_mrope_kvcache_supported": "asked",  # no
    "fused_qk_norm_rope_kvcache_supported": "asked",  # no
    "fused_rope_kvcache_supported": "asked",
    "is_sparse": False,
    "lse_base_on_e": True,
    "need_to_return_lse_for_decode": False,
    "supports_dcp": True,
    "supports_dense_mha_prefill": True,  # of MLA alone
    "supports_mtp_with_cp_non_trivial_interleave_size": True,
    "supports_pcp": False,
    "supports_quant_query_input": False,
}


@pytest.mark.parametrize(
    ("asked", "table"),
    [(NarrowAttentionBackend, BACKEND), (NarrowMetadataBuilder, BUILDER), (NarrowAttention, LAYER)],
    ids=["backend", "builder", "layer"],
)
def test_every_capability_that_vllm_knows_has_an_answer_of_narrowkvs(asked, table):
    said = capabilities(asked)
    said.pop("supported_kv_cache_dtypes", None)
    assert said == {name: value for name, value in table.items() if name in said}, (
        f"vLLM asks {asked.__name__} what this table does not answer: decide, override, and write it down"
    )


def reasons(**asked):
    """Why vLLM's selector does not take the backend for a layer."""
    return NarrowAttentionBackend.validate_configuration(
        head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False,
        has_sink=False, use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False,
        device_capability=None, attn_type="decoder", **asked,
    )  # fmt: skip


@pytest.mark.parametrize("asked", ["use_batch_invariant", "use_adaptive_verification", "use_dcp"])
def test_the_selector_takes_the_backend_for(asked):
    assert reasons(**{asked: True}) == []


@pytest.mark.parametrize("adaptive", [True, False])
def test_query_lengths_are_the_devices_where_vllm_shortens_requests_there(adaptive):
    # A graph is captured with three tokens a request and replayed with 1, 3 and 2. A decode step, which
    # takes the host's lengths, gives other numbers.
    random = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 6, 16, 1, 64, generator=random).bfloat16()
    cache = PagedKVCache.from_tensors(k, v, format="bf16")
    q = torch.randn(9, 4, 64, generator=random).bfloat16()
    starts = torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    batch = SimpleNamespace(
        causal=True, num_reqs=3, num_actual_tokens=9, max_query_len=3, max_seq_len=32,
        query_start_loc=starts, block_table_tensor=torch.arange(6, dtype=torch.int32).view(3, 2),
        seq_lens=torch.tensor([20, 17, 30], dtype=torch.int32),
    )  # fmt: skip
    step, out = make_builder(adaptive=adaptive).build(0, batch), torch.zeros_like(q)
    attend(step, q, cache, out, max_batch=3)
    exact = batch_prefill_reference(q[:6], cache, step.table, starts, out_dtype=torch.float32)
    error = relative_l1(out[:6], exact)
    assert step.decodes != adaptive
    assert error <= BF16 if adaptive else error > 0.1


def test_what_needs_the_hosts_query_lengths_is_refused_with_adaptive_verification():
    with pytest.raises(UnsupportedError, match="adaptive verification"):
        make_builder(adaptive=True, ranks=2)


@pytest.mark.parametrize(
    ("cache_dtype", "ranks", "what"), [("int4_per_token_head", 1, "int4"), ("fp8", 2, "parallelism")]
)
def test_what_is_not_batch_invariant_is_refused(cache_dtype, ranks, what, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer = object.__new__(NarrowAttention)
    layer.dcp_world_size = ranks
    with pytest.raises(UnsupportedError, match=f"batch-invariant with .*{what}"):
        NarrowAttention.__init__(layer, 4, 64, 0.125, 1, kv_cache_dtype=cache_dtype)
