"""Ten-line scripts, with narrowkv installed from its wheel: FP8 and FP4 caches inside transformers and vLLM.

The environment has the engines of this one and nothing of the checkout: packages installed as editable are
found by `.pth` files, which a folder that is itself named in a `.pth` file does not get.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

TRANSFORMERS = """
import sys
import torch
from narrowkv.engines import transformers as narrow
from narrowkv.engines.tiny import tiny_model
narrow.register()
model = tiny_model("llama-3-tiny", attn_implementation="narrowkv")
cache = narrow.NarrowCache(model.config, max_length=16, format=sys.argv[1])
prompt = torch.tensor([[5, 6, 7, 8]])
tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=3, min_new_tokens=3)
print("tokens", tokens[0, 4:].tolist())
"""

VLLM = """
import sys
from narrowkv.engines import vllm as narrow
from narrowkv.engines.tiny import tiny_model
from vllm import LLM, SamplingParams
tiny_model("llama-3-tiny", num_layers=5).save_pretrained("model")
narrow.register(instead_of="CPU_ATTN")  # on a GPU: LLM(..., attention_backend="CUSTOM")
sizes = {"max_model_len": 64, "block_size": 32, "num_gpu_blocks_override": 8, "max_num_seqs": 1}
llm = LLM("model", kv_cache_dtype=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, **sizes)
settings = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, detokenize=False)
(output,) = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, settings, use_tqdm=False)
print("tokens", list(output.outputs[0].token_ids))
"""

ATTENTION, STEPS = "narrowkv.engines.transformers.attention", "narrowkv.engines.steps"
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-engines"
)
# Runs a script and counts narrowkv's calls by the formats of their caches.
COUNTED = """
import importlib, json, runpy, sys
import narrowkv.engines
assert all(path.startswith(sys.prefix) for path in narrowkv.engines.__path__), narrowkv.engines.__path__
module = importlib.import_module(sys.argv.pop(2))
counts, operation = {}, module.paged_decode
def counted(q, cache, *args, **kwargs):
    counts[cache.format.k] = counts.get(cache.format.k, 0) + 1
    return operation(q, cache, *args, **kwargs)
module.paged_decode = counted
script = sys.argv.pop(1)
runpy.run_path(script)
print("\\ncounts", json.dumps(counts))
"""


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The Python of an environment with the engines, and with narrowkv from its wheel."""
    folder = tmp_path_factory.mktemp("clean")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    subprocess.run([*wheel, folder / "wheels", ROOT], check=True)
    venv.create(folder / "env", symlinks=True, with_pip=False)
    python = folder / "env" / "bin" / "python"
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    outer = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "engines.pth").write_text("".join(f"{path}\n" for path in outer))
    (built,) = (folder / "wheels").glob("narrowkv-*.whl")
    subprocess.run(
        [*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", built], check=True
    )
    return python


@pytest.mark.parametrize(
    ("script", "module", "format", "stored"),
    [
        pytest.param(TRANSFORMERS, ATTENTION, "fp8_e4m3fn", "fp8_e4m3fn", marks=pytest.mark.slow),
        pytest.param(TRANSFORMERS, ATTENTION, "fp4_e2m1", "fp4_e2m1", marks=pytest.mark.slow),
        pytest.param(VLLM, STEPS, "fp8", "fp8_e4m3fn", marks=needs_vllm),
        pytest.param(VLLM, STEPS, "ultraquant_4bit", "fp4_e2m1", marks=needs_vllm),
    ],
    ids=["transformers-fp8", "transformers-fp4", "vllm-fp8", "vllm-fp4"],
)
def test_ten_lines_generate_from_the_wheel(script, module, format, stored, clean, tmp_path):
    (tmp_path / "script.py").write_text(script)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [clean, "-c", COUNTED, "script.py", module, format], cwd=tmp_path, capture_output=True, text=True,
        env={**kept, **quiet, **one_process, "VLLM_CPU_KVCACHE_SPACE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    shown = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    tokens, counts = (json.loads(shown[name]) for name in ("tokens", "counts"))
    assert len(tokens) == 3
    assert all(0 <= token < 96 for token in tokens)
    assert counts[stored] >= 2  # at least a layer's two steps after the prompt
