"""narrowkv as vLLM's attention backend, in `LLM.generate` on a CPU; `make test-engines` runs it.

vLLM on a CPU takes no backend but its own, so narrowkv stands in the CPU's place here. It runs the first of
its model runners there; with TRITON_INTERPRET=1 the second, which is the default on GPUs.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil

import pytest
import torch

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR",
)  # fmt: skip
from interpreted import let_vllm_interpret

V2 = let_vllm_interpret()
vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from engine_checks import BF16, watch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.v1.attention import selector  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

from narrowkv.engines import steps  # noqa: E402
from narrowkv.engines import vllm as narrow  # noqa: E402
from narrowkv.engines.tiny import tiny_model  # noqa: E402
from narrowkv.engines.vllm import backend  # noqa: E402
from narrowkv.engines.vllm.slots import OWN_SLOTS, cache_options  # noqa: E402

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22]]
LAYERS, NEW = 6, 3  # vLLM keeps the two first and the two last layers of a 4-bit cache in 16 bits


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama-3-tiny", num_layers=LAYERS).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def cpu_slot():
    narrow.register(instead_of="CPU_ATTN")
    selector._cached_get_attn_backend.cache_clear()  # vLLM remembers what it chose before
    yield
    AttentionBackendEnum.CPU_ATTN.clear_override()
    selector._cached_get_attn_backend.cache_clear()


PLACES = (backend, "append"), (steps, "paged_decode"), (steps, "batch_prefill")


@pytest.fixture
def calls(monkeypatch):
    """narrowkv's calls, each compared with its reference."""
    return watch(monkeypatch, *PLACES, bound=BF16)


def generate(model, cache_dtype, prompts=PROMPTS, rounds=1, new=NEW, **options):
    """Outputs of the last round, the log-probabilities of its first step, and the addresses of the caches."""
    sizes = {
        "max_model_len": 64, "block_size": 32, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 8,
        "dtype": "bfloat16",
    }  # fmt: skip
    llm = vllm.LLM(
        model=model, skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=2,
        **{**sizes, **cache_options(cache_dtype), **options},
    )  # fmt: skip
    try:
        settings = vllm.SamplingParams(
            max_tokens=new, temperature=0, ignore_eos=True, detokenize=False, logprobs=5
        )
        for _ in range(rounds):
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        assert (type(runner).__module__ == "vllm.v1.worker.cpu.model_runner") == V2
        memory = {cache.untyped_storage().data_ptr() for cache in runner.kv_caches}
        firsts = [output.outputs[0].logprobs[0] for output in outputs]
        chances = [{token: entry.logprob for token, entry in first.items()} for first in firsts]
        return outputs, chances, memory
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_chances_within(found, expected, bound):
    """Log-probabilities that both report differ by less than a bound."""
    for mine, theirs in zip(found, expected, strict=True):
        shared = set(mine) & set(theirs)
        assert len(shared) >= 2
        assert max(abs(mine[token] - theirs[token]) for token in shared) < bound


@pytest.fixture(scope="module")
def exact(model):
    """By vLLM's own attention in float32; in bfloat16 it differs from that by 0.067 on a CPU without BF16."""
    return generate(model, "auto", dtype="float32")


@pytest.mark.parametrize(
    ("cache_dtype", "stored", "bound"),
    [
        ("auto", "bf16", 0.05),
        ("fp8", "fp8_e4m3fn", 0.5),
        ("fp8_per_token_head", "fp8_e4m3fn", 0.5),
        ("int8_per_token_head", "int8", 0.1),
        ("int4_per_token_head", "int4", 1.0),
        ("ultraquant_4bit", "fp4_e2m1", 2.0),
        ("narrowkv_k8v4", "fp8_e4m3fn", 1.0),
        ("narrowkv_fp4", "fp4_e2m1", 2.0),
    ],
)
def test_generate_through_narrowkvs_cache(model, exact, cpu_slot, calls, cache_dtype, stored, bound):
    outputs, chances, memory = generate(model, cache_dtype)
    assert cache_dtype not in OWN_SLOTS or "fp4_e2m1" in {call.cache.format.v for call in calls}
    assert stored in {call.cache.format.k for call in calls if call.name == "append"}
    # Each call of a step appends and attends once in every layer; every cache is vLLM's own memory.
    counts = calls.counts
    assert counts["append"] == counts["paged_decode"] + counts["batch_prefill"] == LAYERS * NEW
    assert {call.cache.k.untyped_storage().data_ptr() for call in calls} <= memory
    exact_outputs, exact_chances, _ = exact
    assert_chances_within(chances, exact_chances, bound)
    if cache_dtype == "auto":
        assert [t[0] for t in tokens_of(outputs)] == [t[0] for t in tokens_of(exact_outputs)]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("gpt-oss-tiny", {(5, 0.0, True), (-1, 0.0, True)}),
        ("gemma-2-tiny", {(5, 5.0, False), (-1, 5.0, False)}),
    ],
)
def test_windows_sinks_and_soft_caps_reach_the_kernels_while_pages_are_recycled(
    name, asked, tmp_path, request, monkeypatch
):
    # A window of six tokens: vLLM gives pages that have left it to others, and few pages are there.
    prompts = [[3 + 7 * i % 90 for i in range(count)] for count in (75, 50)]
    sizes = {
        "max_model_len": 96, "block_size": 16, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 14,
    }  # fmt: skip
    tiny_model(name).save_pretrained(tmp_path)
    own, own_chances, _ = generate(str(tmp_path), "auto", prompts, **sizes)
    request.getfixturevalue("cpu_slot")
    places = set()

    def look(call):
        """Notes where the last page of each sequence stands, and which one it is."""
        if call.options.get("window_left", -1) >= 0:
            table = call.args[2]
            for row, length in zip(table.page_ids, table.seq_lens.tolist(), strict=True):
                last = (length - 1) // call.cache.page_size
                places.add((last, int(row[last])))

    calls = watch(monkeypatch, *PLACES, bound=BF16, look=look)
    found, chances, _ = generate(str(tmp_path), "auto", prompts, **sizes)
    options = [call.options for call in calls if call.name != "append"]
    assert asked == {(o["window_left"], o["logits_soft_cap"], o["sinks"] is not None) for o in options}
    assert len(places) > len({page for _, page in places})  # a page at two places of sequences
    assert_chances_within(chances, own_chances, 0.1)
    assert tokens_of(found) == tokens_of(own)


def test_scales_of_the_checkpoint_are_the_caches_descales(model, cpu_slot, calls, tmp_path):
    folder = tmp_path / "scaled"
    shutil.copytree(model, folder)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": ["lm_head"],
        "kv_cache_scheme": scheme, "quantization_status": "compressed",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for index in range(LAYERS):
        for side, scale in (("k", 0.05), ("v", 0.02)):
            weights[f"model.layers.{index}.self_attn.{side}_scale"] = torch.tensor([scale])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    generate(str(folder), "fp8")
    descales = {(call.cache.k_descale, call.cache.v_descale) for call in calls}
    assert {(round(float(k), 4), round(float(v), 4)) for k, v in descales} == {(0.05, 0.02)}


def test_cached_prefixes_and_speculative_tokens(model, cpu_slot, calls):
    # The last test: vLLM cannot be started again in a process that has loaded llvmlite, which guesses do.
    # Half of the vocabulary, so that the model is likely to generate a token of the prompt; its best tokens
    # stand clear of the second best, which rounding may exchange.
    prompt = random.Random(0).sample(range(3, 90), 50)
    plain, _, _ = generate(model, "auto", [prompt], new=8, enable_prefix_caching=False)

    def query_lens():
        decodes = [call.args for call in calls if call.name == "paged_decode"]
        return [q.shape[0] // table.batch_size for q, _, table in decodes]

    assert set(query_lens()) == {1}
    guess = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    found, _, _ = generate(
        model, "auto", [prompt], rounds=2, new=8, enable_prefix_caching=True, speculative_config=guess
    )
    assert found[0].num_cached_tokens == 32  # one block
    assert query_lens().count(3) >= LAYERS  # a token and two guesses
    assert tokens_of(found) == tokens_of(plain)
