"""narrowkv as vLLM's attention backend, in `LLM.generate` on a CPU; `make test-engines` runs it.

vLLM on a CPU takes no backend but its own, so narrowkv stands in the CPU's place here.
"""

from __future__ import annotations

import gc
import os
from collections import Counter

import pytest
import torch

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR",
)  # fmt: skip
vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.v1.attention import selector  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

from narrowkv.attn_decode import paged_decode_reference  # noqa: E402
from narrowkv.attn_prefill import batch_prefill_reference  # noqa: E402
from narrowkv.engines import vllm as narrow  # noqa: E402
from narrowkv.engines.tiny import tiny_model  # noqa: E402
from narrowkv.engines.vllm import backend  # noqa: E402

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22]]
LAYERS, NEW = 6, 3  # vLLM keeps the two first and the two last layers of a 4-bit cache in 16 bits


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama-3-tiny", num_layers=LAYERS).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def cpu_slot():
    narrow.register(cpu=True)
    selector._cached_get_attn_backend.cache_clear()  # vLLM remembers what it chose before
    yield
    AttentionBackendEnum.CPU_ATTN.clear_override()
    selector._cached_get_attn_backend.cache_clear()


@pytest.fixture
def checked(monkeypatch):
    """Counts narrowkv's calls by stored format, each compared with its fp32 reference."""
    counts = Counter()
    references = {"paged_decode": paged_decode_reference, "batch_prefill": batch_prefill_reference}

    def watch(name):
        operation = getattr(backend, name)

        def call(*args, out=None, plan=None, **kwargs):
            cache = args[0] if name == "append" else args[1]
            counts[name, cache.format.k] += 1
            counts["memory", cache.k.untyped_storage().data_ptr()] += 1
            if name == "append":
                return operation(*args, **kwargs)
            operation(*args, out=out, plan=plan, **kwargs)
            exact = references[name](*args, **kwargs, out_dtype=torch.float32)
            error = (out.float() - exact).abs().sum() / exact.abs().sum()
            assert error <= 0.003  # bf16 outputs
            return out

        monkeypatch.setattr(backend, name, call)

    for name in ("append", *references):
        watch(name)
    return counts


def generate(model, cache_dtype):
    """Tokens, the log-probabilities of the first step, and the addresses of vLLM's caches."""
    llm = vllm.LLM(
        model=model, skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype=cache_dtype,
        enforce_eager=True,
        max_model_len=64, block_size=32, max_num_seqs=2, max_num_batched_tokens=64, num_gpu_blocks_override=8,
    )  # fmt: skip
    try:
        settings = vllm.SamplingParams(
            max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False, logprobs=5
        )
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], settings, use_tqdm=False)
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        memory = {cache.untyped_storage().data_ptr() for cache in runner.kv_caches}
        firsts = [output.outputs[0].logprobs[0] for output in outputs]
        chances = [{token: entry.logprob for token, entry in first.items()} for first in firsts]
        return [list(output.outputs[0].token_ids) for output in outputs], chances, memory
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def own(model):
    return generate(model, "auto")


@pytest.mark.parametrize(
    ("cache_dtype", "stored", "bound"),
    [
        ("auto", "bf16", 0.05),
        ("fp8", "fp8_e4m3fn", 0.5),
        ("fp8_per_token_head", "fp8_e4m3fn", 0.5),
        ("ultraquant_4bit", "fp4_e2m1", 2.0),
    ],
)
def test_generate_through_narrowkvs_cache(model, own, cpu_slot, checked, cache_dtype, stored, bound):
    tokens, chances, memory = generate(model, cache_dtype)
    narrow_formats = {kind for name, kind in checked if name != "memory"}
    assert stored in narrow_formats
    # Each call of a step appends and attends once in every layer; every cache is vLLM's own memory.
    appends, attends = (
        sum(n for (name, _), n in checked.items() if name in names)
        for names in (("append",), ("paged_decode", "batch_prefill"))
    )
    assert appends == attends == LAYERS * NEW
    assert {address for name, address in checked if name == "memory"} <= memory
    # The same prompt through vLLM's own attention over a 16-bit cache.
    _, own_chances, _ = own
    for found, expected in zip(chances, own_chances, strict=True):
        shared = set(found) & set(expected)
        assert len(shared) >= 2
        assert max(abs(found[token] - expected[token]) for token in shared) < bound
    if cache_dtype == "auto":
        assert [t[0] for t in tokens] == [t[0] for t in own[0]]
