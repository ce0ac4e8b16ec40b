"""narrowkv as vLLM's backend of latent attention (MLA) on a CPU; `make test-engines` runs it.

vLLM on a CPU takes no backend but its own, so narrowkv stands in the place of CPU_MLA and AMX_MLA here.
"""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest
import torch

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR",
)  # fmt: skip
vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from engine_checks import BF16, capabilities  # noqa: E402
from transformers import DeepseekV3Config, GlmMoeDsaConfig, MiniCPM3Config  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport  # noqa: E402
from vllm.v1.attention import selector  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport  # noqa: E402
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend  # noqa: E402
from vllm.v1.attention.backends.mla.prefill.registry import (  # noqa: E402
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)
from vllm.v1.attention.backends.mla.prefill.selector import _auto_select_mla_prefill_backend  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from narrowkv.engines import vllm as narrow  # noqa: E402
from narrowkv.engines.tiny import tiny_model  # noqa: E402
from narrowkv.engines.vllm import latent  # noqa: E402
from narrowkv.paged_cache import PageTable  # noqa: E402
from narrowkv.quant import cast_fp8, relative_l1  # noqa: E402
from narrowkv.runtime.errors import UnsupportedError  # noqa: E402
from narrowkv.sparse_fp8 import DSV4Rows, latent_decode_reference  # noqa: E402

PROMPTS, NEW = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22]], 4
LATENT = 0.004  # what docs/latent.md promises


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("deepseek-v3-tiny").save_pretrained(path)  # 12 heads
    return str(path)


def forget_choices():
    """vLLM remembers which backends it chose."""
    selector._cached_get_attn_backend.cache_clear()
    _auto_select_mla_prefill_backend.cache_clear()


@pytest.fixture
def cpu_slots():
    narrow.register(instead_of="CPU_MLA, AMX_MLA")
    forget_choices()
    yield
    for name in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA, MLAPrefillBackendEnum.CPU):
        name.clear_override()
    forget_choices()


@pytest.fixture
def calls(monkeypatch):
    """Query tokens and the kind of rows of each decode, which is compared with its reference."""
    seen, operation = [], latent.latent_decode

    def compared(q, rows, table, *, plan, return_lse):
        o, lse = operation(q, rows, table, plan=plan, return_lse=return_lse)
        exact, sums = latent_decode_reference(q, rows, table, sm_scale=plan.sm_scale, return_lse=True)
        assert relative_l1(o, exact) <= LATENT
        assert torch.equal(lse.isinf(), sums.isinf())
        kind = rows.layout if isinstance(rows, DSV4Rows) else str(rows.dtype)
        seen.append((q.shape[0] // table.batch_size, q.shape[1], kind))
        return o, lse

    monkeypatch.setattr(latent, "latent_decode", compared)
    return seen


def generate(folder, cache_dtype, new=NEW, **options):
    """Greedy tokens, log-probabilities at each of them, and the classes of layers and of prefills."""
    llm = vllm.LLM(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_num_seqs=2,
        max_model_len=64, num_gpu_blocks_override=8, kv_cache_dtype=cache_dtype, **options,
    )  # fmt: skip
    try:
        settings = vllm.SamplingParams(
            max_tokens=new, temperature=0, ignore_eos=True, detokenize=False, logprobs=5
        )
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], settings, use_tqdm=False)
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        own = [each for each in layers if hasattr(each, "prefill_backend")]
        classes = {type(part).__name__ for each in own for part in (each.impl, each.prefill_backend)}
        chances = [
            [{token: entry.logprob for token, entry in step.items()} for step in each.outputs[0].logprobs]
            for each in outputs
        ]
        return [list(each.outputs[0].token_ids) for each in outputs], chances, classes
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def largest_difference(found, expected):
    """Of log-probabilities of the second token, the first that a decode made."""
    pairs = [(mine[1], own[1]) for mine, own in zip(found, expected, strict=True)]
    shared = [(mine[t], own[t]) for mine, own in pairs for t in mine.keys() & own]
    assert len(shared) >= 2 * len(found)
    return max(abs(mine - own) for mine, own in shared)


def test_decodes_are_those_of_vllms_own_backend(folder, cpu_slots, calls):
    for name in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA):
        name.clear_override()
    tokens, chances, classes = generate(folder, "auto")
    assert not {name for name in classes if name.startswith("Narrow")}
    assert not calls
    narrow.register(instead_of="CPU_MLA,AMX_MLA")
    register_mla_prefill_backend(MLAPrefillBackendEnum.CPU, narrow.LATENT_PREFILL)
    for cache_dtype, kind, bound in (("auto", "torch.bfloat16", 0.05), ("fp8", "tensor576", 0.3)):
        forget_choices()
        found = generate(folder, cache_dtype)
        assert found[2] == {"NarrowLatentAttention", "NarrowLatentPrefill"}
        assert set(calls) == {(1, 12, kind)}
        assert len(calls) >= 2 * (NEW - 1)  # in each of two layers
        calls.clear()
        assert found[0][0][0] == tokens[0][0]
        assert largest_difference(found[1], chances) < bound
        if cache_dtype == "auto":
            assert found[0] == tokens


def test_guesses_are_verified_in_one_call(folder, cpu_slots, calls):
    # Each call is compared with its reference. Tokens are not: by vLLM's own backend, too, this model takes
    # others where a step has other numbers of rows.
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    tokens, _, _ = generate(folder, "auto", new=12, speculative_config=guess)
    assert [len(each) for each in tokens] == [12, 12]
    assert {q_len for q_len, *_ in calls} > {1}


def stand_in(heads=12, cache_dtype="fp8", scale=0.03, **made):
    """A layer without a model."""
    impl = object.__new__(latent.NarrowLatentAttention)
    values = {
        "kv_cache_dtype": cache_dtype, "scale": 192**-0.5, "num_heads": heads, "head_size": 576,
        "batch_invariant": False, "_rows": None, "_max_batch": 3, "_max_seq_len": 64, **made,
    }  # fmt: skip
    vars(impl).update(values)
    return impl, SimpleNamespace(_k_scale=torch.tensor(scale))


@pytest.mark.parametrize(
    ("heads", "q_len", "cache_dtype"),
    [(12, 1, "fp8"), (12, 8, "fp8"), (12, 3, "auto"), (6, 2, "fp8"), (1, 5, "auto"), (128, 1, "fp8"),
     (40, 4, "fp8")],
)  # fmt: skip
def test_tokens_are_stored_and_decoded_over_vllms_pages(heads, q_len, cache_dtype, calls):
    random = torch.Generator().manual_seed(0)
    impl, layer = stand_in(heads, cache_dtype)
    narrow_dtype = torch.uint8 if cache_dtype == "fp8" else torch.bfloat16
    # vLLM's view of a layer: [pages, page_size, columns], its pages apart where it likes them so.
    cache = torch.zeros(9, 16, 576, dtype=narrow_dtype)
    layer.kv_cache = cache
    block_table = torch.tensor([[3, 1], [5, 7], [2, 8]], dtype=torch.int32)
    lens = torch.tensor([30, 17, 9], dtype=torch.int32)
    rows = torch.randn(9 * 16, 576, generator=random).bfloat16()
    slots = torch.cat(
        [torch.arange(16, 9 * 16), torch.tensor([-1])]
    )  # all but vLLM's empty page, and padding
    new = rows[slots.clamp(min=0)]
    arguments = cache, slots, cache_dtype, layer._k_scale
    impl.do_kv_cache_update(new[:, :512], new[:, None, 512:], *arguments)
    q = torch.randn(3 * q_len, heads, 576, generator=random).bfloat16()
    step = SimpleNamespace(causal=True, decode=SimpleNamespace(block_table=block_table, seq_lens=lens))
    stored = cache.view(torch.float8_e4m3fn) if cache_dtype == "fp8" else cache
    o, lse = impl.forward_mqa((q[..., :512], q[..., 512:]), stored, step, layer)
    table = PageTable.from_block_table(block_table, lens, page_size=16)
    if cache_dtype == "fp8":
        rows = (cast_fp8(rows.float() / 0.03, "fp8_e4m3fn").float() * 0.03).bfloat16()
    exact, sums = latent_decode_reference(q, rows, table, sm_scale=192**-0.5, return_lse=True)
    assert relative_l1(o, exact) <= LATENT
    assert (lse - sums).abs().max() <= 0.01
    assert calls[0][:2] == (q_len, heads)
    assert impl.rows_of(layer, cache) is impl.rows_of(layer, cache)  # made once
    del layer.kv_cache, cache, stored, arguments
    assert impl._rows is None  # and dropped with vLLM's tensor
    with pytest.raises(UnsupportedError, match="is causal, got causal=False"):
        impl.forward_mqa(q, rows, SimpleNamespace(causal=False), layer)


def test_prompts_are_those_of_vllms_own_backend():
    random = torch.Generator().manual_seed(0)
    sizes = {
        "num_heads": 4, "scale": 192**-0.5, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "vllm_config": None,
    }  # fmt: skip
    backends = [made(**sizes) for made in (latent.NarrowLatentPrefill, CPUSDPAMLAPrefillBackend)]
    starts = torch.tensor([0, 7, 12], dtype=torch.int32)
    for backend in backends:
        backend.prepare_metadata(SimpleNamespace(query_start_loc=starts, max_query_len=7))
    q = torch.randn(12, 4, 192, generator=random).bfloat16()
    k, v = (torch.randn(12, 4, dim, generator=random).bfloat16() for dim in (192, 128))
    (o, lse), (own, own_lse) = (each.run_prefill_new_tokens(q, k, v, True) for each in backends)
    assert relative_l1(o, own.float()) <= BF16
    assert (lse - own_lse).abs().max() < 0.01
    assert torch.equal(backends[0].run_prefill_new_tokens(q, k, v, False), o)
    # Of what was stored before: 20 tokens of the first request and 3 of the second.
    k, v = (torch.randn(23, 4, dim, generator=random).bfloat16() for dim in (192, 128))
    chunk = SimpleNamespace(
        query_start_loc=starts, max_query_len=7, max_seq_len=20,
        cu_seq_lens=torch.tensor([0, 20, 23], dtype=torch.int32),
    )  # fmt: skip
    (o, lse), (own, own_lse) = (each.run_prefill_context_chunk(chunk, q, k, v) for each in backends)
    assert relative_l1(o, own.float()) <= BF16
    assert (lse - own_lse).abs().max() < 0.01


def test_what_vllm_is_told_of_the_backend():
    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.LHBNC)
    said = capabilities(latent.NarrowLatentBackend)
    wanted = {
        "is_mla": True, "is_sparse": False, "supported_dtypes": [torch.float16, torch.bfloat16],
        "supported_kv_cache_dtypes": ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"],
        "supports_batch_invariance": True, "supports_non_causal": False, "supports_sink": False,
        "supports_sliding_window": False,
    }  # fmt: skip
    assert {name: said[name] for name in wanted} == wanted
    assert latent.NarrowLatentBackend.supported_kv_cache_layouts() == layouts
    assert latent.NarrowLatentBuilder._cudagraph_support == AttentionCGSupport.UNIFORM_BATCH
    assert latent.NarrowLatentBuilder.query_len_support == QueryLenSupport.UNIFORM
    assert not latent.NarrowLatentBuilder.supports_non_causal_multi_token_decode
    layer = latent.NarrowLatentAttention
    assert (layer.can_return_lse_for_decode, layer.lse_base_on_e, layer.supports_dcp) == (True, True, False)


def config(**changed):
    made = {
        "num_speculative_tokens": 0, "scheduler_config": SimpleNamespace(max_num_seqs=2),
        "model_config": SimpleNamespace(max_model_len=64, dtype=torch.bfloat16),
        "cache_config": SimpleNamespace(block_size=16), **changed,
    }  # fmt: skip
    return SimpleNamespace(**made)


def test_what_is_not_served_is_told():
    impl, _ = stand_in()
    impl._reserve(config(num_speculative_tokens=7))
    with pytest.raises(UnsupportedError, match="num_speculative_tokens=8: use 7"):
        impl._reserve(config(num_speculative_tokens=8))
    assert narrow.supports(DeepseekV3Config(), kv_cache_dtype="fp8") == []
    assert (
        "fp8_e5m2, and narrowkv reads auto"
        in narrow.supports(DeepseekV3Config(), kv_cache_dtype="fp8_e5m2")[0]
    )
    assert "256 columns" in narrow.supports(MiniCPM3Config())[0]
    assert "an indexer chooses" in narrow.supports(GlmMoeDsaConfig())[0]


@pytest.mark.parametrize("use_mla", [False, True])
def test_the_name_custom_is_the_backend_for_the_model(use_mla):
    narrow.register()
    assert AttentionBackendEnum.CUSTOM.get_class().is_mla() is False  # no model is started
    with set_current_vllm_config(vllm.config.VllmConfig()) as _:
        current = vllm.config.get_current_vllm_config()
        current.model_config = SimpleNamespace(use_mla=use_mla)
        assert AttentionBackendEnum.CUSTOM.get_class().is_mla() is use_mla
    assert MLAPrefillBackendEnum.CUSTOM.get_class() is latent.NarrowLatentPrefill
