"""Generation inside transformers: narrowkv's caches beside transformers' own attention and caches.

    python benchmarks/engines_transformers.py --context 4096,32768 --batch 1,8 --out times.json
    python benchmarks/engines_transformers.py --fill --longest --context 131072 --batch 1

Weights are random: times and memory do not depend on them. Each row is a run of its own: a prompt in chunks,
then decode steps, of which the median is shown. With --fill the prompt's keys and values are random numbers,
which takes no time, and prefill_s is that of storing them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, QuantizedCache

import narrowkv.engines.transformers as narrow
from narrowkv.engines.tiny import tiny_model

SHAPES = {
    "llama-3-8b": ("llama", {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
                             "num_attention_heads": 32, "num_key_value_heads": 8,
                             "head_dim": 128}),
    # GLM-4.5-Air's attention (GQA 12) in fewer layers and with a dense MLP, so that it fits in one GPU.
    "glm-4.5-air-attention": ("llama", {"num_hidden_layers": 16, "hidden_size": 4096,
                                        "intermediate_size": 10944, "num_attention_heads": 96,
                                        "num_key_value_heads": 8, "head_dim": 128}),
}  # fmt: skip
QUANTIZED = ("quantized-hqq", "quantized-fp8")  # transformers' own; fp8 since 5.23
CACHES = ("sdpa", *QUANTIZED, "bf16", "fp8_e4m3fn", "fp8-static", "fp4_e2m1")


def make_model(shape: str, device: str) -> Any:
    if shape == "tiny":
        return tiny_model("llama-3-tiny").to(device)
    kind, sizes = SHAPES[shape]
    config = AutoConfig.for_model(kind, max_position_embeddings=2**20, vocab_size=32768, **sizes)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def make_cache(name: str, model: Any, max_length: int) -> Any:
    """The cache of a row, with the model's attention set to go with it."""
    model.set_attn_implementation("sdpa" if name == "sdpa" or name in QUANTIZED else narrow.NAME)
    if name == "sdpa":
        return DynamicCache(config=model.config)
    if name in QUANTIZED:
        options = {"nbits": 4} if name == "quantized-hqq" else {}
        return QuantizedCache(name.removeprefix("quantized-"), model.config, **options)
    if name == "fp8-static":
        return narrow.NarrowCache(model.config, max_length=max_length, k_descale=0.05, v_descale=0.05)
    return narrow.NarrowCache(model.config, max_length=max_length, format=name)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def fill(cache: Any, model: Any, batch: int, context: int, chunk: int, device: str) -> None:
    """Stores random keys and values as those of a prompt."""
    text = model.config
    heads, dim = text.num_key_value_heads, text.head_dim
    for start in range(0, context, chunk):
        shape = (batch, heads, min(chunk, context - start), dim)
        new = torch.randn(shape, dtype=torch.bfloat16, device=device)
        for index, layer in enumerate(cache.layers):
            cache.update(new, new, index)
            if isinstance(layer, narrow.NarrowLayer):
                layer.store(None)


@torch.no_grad()
def measure(
    model: Any, name: str, batch: int, context: int, steps: int, chunk: int, device: str, *, filled: bool
) -> dict[str, Any]:
    """One row: seconds of the prompt, milliseconds of a step, and the memory beside the weights."""
    gc.collect()
    before = 0
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    cache = make_cache(name, model, context + steps + 1)
    ids = torch.randint(0, model.config.vocab_size, (batch, context), device=device)
    begun = time.perf_counter()
    if filled:
        fill(cache, model, batch, context, context if name == "sdpa" else chunk, device)
    for start in range(0, 0 if filled else context, chunk):
        model(ids[:, start : start + chunk], past_key_values=cache, use_cache=True, logits_to_keep=1)
    wait(device)
    prefill = time.perf_counter() - begun
    token, times = ids[:, -1:], []
    for _ in range(steps):
        begun = time.perf_counter()
        token = (
            model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        )
        wait(device)
        times.append(time.perf_counter() - begun)
    step = statistics.median(times[steps // 4 :])
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    return {
        "cache": name, "batch": batch, "context": context, "prefill_s": round(prefill, 3),
        "step_ms": round(step * 1e3, 3), "tokens_per_s": round(batch / step, 1),
        "peak_gib": round(peak / 2**30, 2),
    }  # fmt: skip


def rows_of(options: argparse.Namespace, model: Any) -> Any:
    for name in options.cache.split(","):
        contexts = [int(context) for context in options.context.split(",")]
        for batch in map(int, options.batch.split(",")):
            while contexts:
                context = contexts.pop(0) if not options.longest else contexts[0]
                try:
                    sizes = batch, context, options.steps, options.chunk
                    yield measure(model, name, *sizes, options.device, filled=options.fill)
                except torch.OutOfMemoryError:
                    yield {"cache": name, "batch": batch, "context": context, "error": "out of memory"}
                    break
                except (ImportError, ValueError) as error:
                    yield {"cache": name, "batch": batch, "context": context, "error": str(error)}
                    break
                if options.longest:
                    contexts[0] = 2 * context
            contexts = [int(context) for context in options.context.split(",")]


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as a table."""
    names = ("cache", "batch", "context", "prefill_s", "step_ms", "tokens_per_s", "peak_gib")
    print("".join(f"{name:>14}" for name in names))
    for row in rows:
        cells = [str(row[name]) for name in names if name in row]
        print("".join(f"{cell:>14}" for cell in cells), row.get("error", "")[:60], sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3-8b", choices=[*SHAPES, "tiny"])
    parser.add_argument("--cache", default=",".join(CACHES))
    parser.add_argument("--context", default="4096,32768")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=4096, help="prompt tokens of one forward pass")
    parser.add_argument("--fill", action="store_true", help="random keys and values for a prompt")
    parser.add_argument("--longest", action="store_true", help="double the context until memory runs out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="also write JSON to this file")
    options = parser.parse_args()
    narrow.register()
    model = make_model(options.shape, options.device)
    found = []
    for row in rows_of(options, model):
        found.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    show(found)
    if options.out:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        about = {"device": gpu, "torch": torch.__version__, "transformers": transformers.__version__}
        text = json.dumps({**about, "shape": options.shape, "rows": found}, indent=2)
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
