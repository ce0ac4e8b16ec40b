"""vLLM with decode context parallelism over two processes on a CPU; `make test-engines` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

SCRIPT = Path(__file__).with_name("vllm_ranks_worker.py")
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with one KV head, which both ranks of tensor parallelism hold."""
    import torch
    from transformers import AutoModelForCausalLM

    from narrowkv.engines.tiny import tiny_config

    config = tiny_config("llama-3-tiny")
    config.num_key_value_heads = 1
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    folder = tmp_path_factory.mktemp("model")
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder


def tokens(model: Path, shared_by: int, interleave: int) -> list[list[int]]:
    """What vLLM generates where this many ranks share each sequence."""
    path = os.pathsep.join([str(SCRIPT.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, SCRIPT, str(model), str(shared_by), str(interleave)],
        env={**os.environ, **SETTINGS, "PYTHONPATH": path}, capture_output=True, text=True, timeout=290,
        check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, done.stderr[-3000:]
    found: list[list[int]] = json.loads(lines[-1].removeprefix("TOKENS "))
    return found


def test_two_ranks_that_share_sequences_generate_the_same_tokens(model):
    expected = tokens(model, 1, 1)
    assert [len(each) for each in expected] == [6, 6]
    assert tokens(model, 2, 4) == expected
