"""What the adapters answer about models, whose configurations have more forms than a decoder's."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from narrowkv.engines import aiter, sglang, vllm  # noqa: E402  # imports no engine
from narrowkv.engines.vllm.slots import CACHE_DTYPES, OWN_SLOTS  # noqa: E402

ANSWERS = {
    "llama": None,
    "cohere_compass_text": None,
    "gemma4": "head_dim is 512",  # its layers have head_dims of their own
    "dots3_note": "compressed together",
    "embedding_gemma2_text": "head_dim is 512",
    "swin": "names no number of attention heads",  # one for each stage
    "segformer": "names no number of attention heads",
    "uvdoc": "names no number of attention heads",  # not even of layers
    "whisper": "has an encoder",
    "bloom": "head_dim",
}


@pytest.mark.parametrize("engine", [aiter, sglang, vllm], ids=lambda engine: engine.__name__)
@pytest.mark.parametrize("model_type", ANSWERS)
def test_any_configuration_is_answered(model_type, engine):
    reasons = engine.supports(transformers.AutoConfig.for_model(model_type))
    wanted = ANSWERS[model_type]
    assert (reasons == []) if wanted is None else any(wanted in reason for reason in reasons)


def test_vllms_cache_dtypes_are_answered():
    config = transformers.LlamaConfig(head_dim=128)
    for cache_dtype in (*CACHE_DTYPES, *OWN_SLOTS):
        assert vllm.supports(config, kv_cache_dtype=cache_dtype) == []
    (reason,) = vllm.supports(transformers.LlamaConfig(head_dim=96), kv_cache_dtype="ultraquant_4bit")
    assert "rotates heads of 64, 128 or 256 channels, and they have 96" in reason
    (reason,) = vllm.supports(config, kv_cache_dtype="turboquant_4bit_nc")
    assert "kv_cache_dtype is turboquant_4bit_nc" in reason
