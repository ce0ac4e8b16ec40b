"""vLLM for ROCm on a virtual GPU: Model Runner V2, its graphs, its profiling; `make test-engines` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from narrowkv.engines.tiny import tiny_model

SCRIPT = Path(__file__).with_name("vllm_virtual_worker.py")
PROMPTS, NEW = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22]], 6
SETTINGS = {
    "TRITON_VIRTUAL_GPU": "gfx942", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "NARROWKV_VLLM_INSTEAD_OF": "ROCM_ATTN",  # the first run leaves the choice to vLLM
    "VLLM_ROCM_USE_SKINNY_GEMM": "0",  # compiled products of few rows
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama-3-tiny")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def run(what, folder, **settings):
    """What the worker says of vLLM in a process of its own."""
    path = os.pathsep.join([str(SCRIPT.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, SCRIPT, what, folder, json.dumps(PROMPTS), str(NEW)],
        env={**os.environ, **SETTINGS, **settings, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=590, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("FOUND "))


@pytest.fixture(scope="module")
def found(folder):
    """What vLLM generated, and how."""
    return run("each way", folder)


def test_each_token_is_the_one_that_transformers_takes_or_as_likely(model, found):
    # The prompt of nine tokens comes in two chunks, the second beside the other's prompt or first decode.
    for prompt, tokens in zip(PROMPTS, found["16 bits"]["tokens"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        behind = logits.max(-1).values - logits[torch.arange(NEW), tokens]
        assert behind.max() < 0.1
        assert logits.std(-1).min() > 0.5  # so others are behind by more


def test_it_is_the_default_runner_of_gpus_on_a_gpu(found):
    assert "MI300X" in found["device"]
    runs = [found[name] for name in ("16 bits", "FP8", "guesses", "eager")]
    assert {run["runner"] for run in runs} == {"vllm.v1.worker.gpu.model_runner.GPUModelRunner"}
    assert [run["caches"] for run in runs] == [["bf16"], *[["fp8_e4m3fnuz"]] * 3]


def test_graphs_that_vllm_captures_of_decode_steps_give_the_tokens_of_eager_steps(found):
    # In eager steps every call of narrowkv's was compared with its reference.
    assert found["calls"] == [[name, True] for name in ("append", "batch_prefill", "paged_decode")]
    assert found["FP8"]["graphs"] == [[1, 1], [2, 1]]
    assert found["FP8"]["replays"].count(1) >= NEW - 2
    assert found["guesses"]["graphs"] == [[1, 4], [2, 4]]
    assert 4 in found["guesses"]["replays"]  # a token and three guesses
    assert not found["eager"]["graphs"]
    assert found["FP8"]["tokens"] == found["guesses"]["tokens"] == found["eager"]["tokens"]


def test_a_prompt_has_the_same_chances_alone_and_beside_another_where_vllm_asks_for_batch_invariance(folder):
    made = run("together and alone", folder, VLLM_BATCH_INVARIANT="1")
    both, alone = len(PROMPTS), slice(len(PROMPTS), None)
    assert made["tokens"][:both] == made["tokens"][alone]
    assert made["chances"][:both] == made["chances"][alone]


def test_latent_attention_has_the_same_tokens_in_graphs_and_in_eager_steps(tmp_path):
    # 12 heads; one layer, without experts, which are compiled operations.
    tiny_model("deepseek-v3-tiny", num_layers=1).save_pretrained(tmp_path)
    made = run("latent", tmp_path, NARROWKV_VLLM_INSTEAD_OF="TRITON_MLA")
    graphs, eager = made["graphs"], made["eager"]
    assert graphs["graphs"] == [[1, 1], [2, 1]]
    assert graphs["replays"].count(1) >= NEW - 2
    assert not eager["graphs"]
    assert graphs["caches"] == eager["caches"] == ["tensor576 fp8_e4m3fnuz"]
    assert graphs["tokens"] == eager["tokens"]
    assert graphs["chances"] == eager["chances"]
    assert len(made["errors"]) >= NEW - 1
    assert max(made["errors"]) <= 0.004  # of decodes in eager steps; what docs/latent.md promises
