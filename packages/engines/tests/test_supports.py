"""What the adapters answer about models, whose configurations have more forms than a decoder's."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from narrowkv.engines import aiter, sglang, vllm  # noqa: E402  # imports no engine
from narrowkv.engines.vllm.slots import CACHE_DTYPES, OWN_SLOTS  # noqa: E402

ANSWERS = {
    "llama": None,
    "cohere_compass_text": None,
    "gemma4": None,  # its layers have head_dims of their own
    "deepseek_v3": "compressed together",
    "dots3_note": "compressed together",
    "embedding_gemma2_text": None,
    "swin": "names no number of attention heads",  # one for each stage
    "segformer": "names no number of attention heads",
    "uvdoc": "names no number of attention heads",  # not even of layers
    "whisper": "has an encoder",
    "bloom": "head_dim",
}
# The adapters with latent attention.
LATENT = {"deepseek_v3": None, "dots3_note": "have 1024 columns"}
ANSWERS_OF = {"narrowkv.engines.vllm": LATENT, "narrowkv.engines.sglang": LATENT}


@pytest.mark.parametrize("engine", [aiter, sglang, vllm], ids=lambda engine: engine.__name__)
@pytest.mark.parametrize("model_type", ANSWERS)
def test_any_configuration_is_answered(model_type, engine):
    if model_type == "dots3_note" and model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no dots3_note")
    reasons = engine.supports(transformers.AutoConfig.for_model(model_type))
    wanted = ANSWERS_OF.get(engine.__name__, {}).get(model_type, ANSWERS[model_type])
    assert (reasons == []) if wanted is None else any(wanted in reason for reason in reasons)


LLAMA = transformers.LlamaConfig
# An engine, a configuration, the cache's dtype, and a part of the first reason, or None.
QUESTIONS = [
    *((vllm, LLAMA(head_dim=128), cache_dtype, None) for cache_dtype in (*CACHE_DTYPES, *OWN_SLOTS)),
    (vllm, transformers.MiMoV2FlashConfig(), "fp8", "with a backend of its own"),
    (vllm, LLAMA(head_dim=72), "auto", "head_dim is 72"),
    (vllm, LLAMA(head_dim=96), "ultraquant_4bit",
     "rotates heads of 64, 128 or 256 channels, and they have 96"),
    (vllm, LLAMA(head_dim=128), "turboquant_4bit_nc", "kv_cache_dtype is turboquant_4bit_nc"),
    (sglang, LLAMA(head_dim=128), "fp8_e4m3", None),
    (sglang, LLAMA(head_dim=64), "fp4_mx_block16", None),
    (sglang, LLAMA(head_dim=72), "auto", "head_dim is 72"),
    (sglang, transformers.MiMoV2FlashConfig(), "fp8_e4m3", None),
    (sglang, transformers.MiMoV2FlashConfig(), "fp4_mx_block16", "values are narrower"),
    (sglang, transformers.DeepseekV3Config(), "fp8_e4m3", None),
    (sglang, transformers.DeepseekV3Config(), "fp8_e5m2", "kv_cache_dtype is fp8_e5m2"),
    (sglang, transformers.GlmMoeDsaConfig(), "auto", "backend for it is dsa"),
    (sglang, LLAMA(), "nvfp4", "kv_cache_dtype is nvfp4"),
    (sglang, transformers.DeepseekV4Config(), "auto", "deepseek_v4.patch()"),
    (sglang, transformers.GptOssConfig(), "auto", 'register(instead_of="triton")'),
    (sglang, transformers.Llama4TextConfig(head_dim=128), "auto", "within chunks"),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "config", "cache_dtype", "reason"), QUESTIONS)
def test_models_and_caches_are_answered(engine, config, cache_dtype, reason):
    reasons = engine.supports(config, kv_cache_dtype=cache_dtype)
    assert reasons == [] if reason is None else reason in reasons[0]
