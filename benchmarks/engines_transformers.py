"""Generation inside transformers: narrowkv's caches beside transformers' own caches and attention.

    python benchmarks/engines_transformers.py --fill --context 2048,32768 --batch 1,64 --out times.json
    python benchmarks/engines_transformers.py --shape llama-3-8b --context 4096,32768 --batch 1,8
    python benchmarks/engines_transformers.py --fill --longest --context 131072 --batch 1

Weights are random: times and memory do not depend on them. Before it is timed, a cache's logits are compared
with those over a DynamicCache with SDPA. Each row is one call of `generate`, whose median step is shown, with
the bytes of the cache and the peak of the memory that torch allocated in the steps, weights not counted. With
--fill the keys and values of the prompt are random numbers that are stored in the cache, and `generate`
continues from there; without, `generate` runs the prompt in chunks. A cell that does not fit is not run, and
its row says why. Static caches are compiled by `generate`, as it does by itself on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
)

import narrowkv.engines.transformers as narrow
from narrowkv.engines.tiny import tiny_model
from narrowkv.paged_cache import CacheFormat
from narrowkv.quant import relative_l1
from narrowkv.testing.machine import versions
from narrowkv.testing.records import SCHEMA_VERSION

GIB = 2**30
CHECKED = 96  # tokens of the prompt over which logits are compared
FILLED = 2**18  # tokens of all rows that are stored at once
SHAPES = {
    # transformers' defaults of glm4_moe are GLM-4.5-Air's but for these.
    "glm-4.5-air": ("glm4_moe", {"num_hidden_layers": 4, "head_dim": 128, "attention_bias": True,
                                 "num_mtp_layers": 0}),
    "llama-3-8b": ("llama", {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
                             "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                             "vocab_size": 32768}),
}  # fmt: skip
K8V4 = CacheFormat(k="fp8_e4m3fn", v="fp4_e2m1")
Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A cache and the attention over it.

    Attributes:
        attention: transformers' name of it.
        make: of a configuration and the tokens of a row: a cache.
        error: largest relative L1 error of logits against a DynamicCache with SDPA.
        kernels: those of torch's SDPA that may run; empty for torch's own choice.
    """

    attention: str
    make: Callable[[Any, int], Any]
    error: float
    kernels: tuple[SDPBackend, ...] = ()

    def chosen(self) -> AbstractContextManager[None]:
        """Where this is entered, SDPA takes these kernels."""
        return sdpa_kernel(list(self.kernels)) if self.kernels else nullcontext()


def narrow_kind(error: float, **options: Any) -> Kind:
    return Kind(
        narrow.NAME, lambda config, length: narrow.NarrowCache(config, max_length=length, **options), error
    )


def quantized_kind(backend: str, **options: Any) -> Kind:
    return Kind("sdpa", lambda config, length: QuantizedCache(backend, config, **options), 0.3)


KINDS = {
    "dynamic-sdpa": Kind("sdpa", lambda config, length: DynamicCache(config=config), 0.0),
    # torch may choose cuDNN's kernel, which prepares every new length of the keys.
    "dynamic-sdpa-flash": Kind(
        "sdpa", lambda config, length: DynamicCache(config=config), 0.05, (SDPBackend.FLASH_ATTENTION,)
    ),
    "dynamic-flash": Kind("flash_attention_2", lambda config, length: DynamicCache(config=config), 0.05),
    "static-sdpa": Kind("sdpa", lambda config, length: StaticCache(config, max_cache_len=length), 0.05),
    "static-narrowkv": Kind(
        narrow.NAME, lambda config, length: StaticCache(config, max_cache_len=length), 0.05
    ),
    "bf16": narrow_kind(0.05, format="bf16"),
    "fp8": narrow_kind(0.25, format="fp8_e4m3fn"),
    "fp8-static": narrow_kind(0.25, format="fp8_e4m3fn", k_descale=0.05, v_descale=0.05),
    "k8v4": narrow_kind(0.4, format=K8V4, scale_format="e4m3"),
    "fp4": narrow_kind(0.6, format="fp4_e2m1", scale_format="e4m3"),
    # transformers' own, which need packages of their own (hqq), or transformers 5.23 (fp8)
    "quantized-hqq": quantized_kind("hqq", nbits=4),
    "quantized-fp8": quantized_kind("fp8"),
}
DEFAULT_KINDS = ("dynamic-sdpa", "dynamic-sdpa-flash", "dynamic-flash", "static-sdpa", "fp8", "k8v4", "fp4")


def make_model(shape: str, layers: int | None, device: str) -> Any:
    if shape == "tiny":
        return tiny_model("glm-4.5-air-tiny", num_layers=layers or 2, attn_implementation="sdpa").to(device)
    kind, sizes = SHAPES[shape]
    options = dict(sizes)
    if layers is not None:
        options["num_hidden_layers"] = layers
    if kind == "glm4_moe":  # a dense MLP in every layer, as the model has in its first
        options["first_k_dense_replace"] = options["num_hidden_layers"]
    config = AutoConfig.for_model(kind, max_position_embeddings=2**20, **options)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def say_shape(model: Any) -> str:
    """One line about the model."""
    config = model.config
    mlp = (
        "a dense MLP"
        if getattr(config, "first_k_dense_replace", 0) >= config.num_hidden_layers
        else "its MLP"
    )
    return (
        f"{config.model_type}, {config.num_hidden_layers} layers with {mlp} of {config.intermediate_size}, "
        f"{config.num_attention_heads} query heads over {config.num_key_value_heads} KV heads, head_dim "
        f"{config.head_dim}, hidden size {config.hidden_size}, vocabulary {config.vocab_size}, random "
        "weights in bf16"
    )


class StepClock(StoppingCriteria):
    """Notes when each step of `generate` ends, by events of a GPU's stream, which nothing waits for."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.marks: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        if self.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def step_ms(self) -> list[float]:
        """Milliseconds of each step but the first, which makes plans and compiles."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.device == "cuda":
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in pairs]
        return [(end - begin) * 1e3 for begin, end in pairs]


def bytes_of(cache: Any) -> int | None:
    """Bytes that a cache holds; None of one whose tensors are not known here."""
    if isinstance(cache, narrow.NarrowCache):
        return cache.bytes()
    if isinstance(cache, QuantizedCache):
        return None
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def bytes_wanted(kind: Kind, model: Any, batch: int, length: int) -> int:
    """Bytes of a cache of so many rows and tokens, from one of a page; 0 if they are not known."""
    page, config = 64, model.config
    cache = kind.make(config, page)
    if isinstance(cache, QuantizedCache):
        return 0
    new = torch.zeros(1, config.num_key_value_heads, page, config.head_dim, dtype=torch.bfloat16)
    for index in range(config.num_hidden_layers):
        cache.update(new, new, index)
    if isinstance(cache, DynamicCache | StaticCache):
        return (bytes_of(cache) or 0) // page * batch * length
    return (bytes_of(cache) or 0) * batch * -(-length // page)


def fill(cache: Any, model: Any, batch: int, context: int, device: str) -> None:
    """Stores random keys and values as those of a prompt."""
    config = model.config
    heads, dim, layers = config.num_key_value_heads, config.head_dim, range(config.num_hidden_layers)
    random = functools.partial(torch.randn, dtype=torch.bfloat16, device=device)
    if type(cache) is DynamicCache:  # what `update` leaves, without a second copy
        for layer in cache.layers:
            layer.lazy_initialization(*(random(batch, heads, 1, dim) for _ in "kv"))
            layer.keys, layer.values = (random(batch, heads, context, dim) for _ in "kv")
        return
    chunk = context if isinstance(cache, QuantizedCache) else max(FILLED // batch, 1)
    for start in range(0, context, chunk):
        for index in layers:
            k, v = (random(batch, heads, min(chunk, context - start), dim) for _ in "kv")
            cache.update(k, v, index)
            if isinstance(layer := cache.layers[index], narrow.NarrowLayer):
                layer.store(None)


@torch.no_grad()
def logits_error(kind: Kind, model: Any, device: str) -> float:
    """Relative L1 error of the logits of a prompt and of a step, against a DynamicCache with SDPA."""
    random = torch.Generator(device).manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (2, CHECKED + 1), device=device, generator=random)
    found = []
    for each in (kind, KINDS["dynamic-sdpa"]):
        model.set_attn_implementation(each.attention)
        cache = each.make(model.config, CHECKED + 1)
        with each.chosen():
            parts = [
                model(part, past_key_values=cache).logits[:, -1].float()
                for part in ids.split([CHECKED, 1], 1)
            ]
        found.append(torch.cat(parts))
    return relative_l1(*found)


def measure(kind: Kind, model: Any, batch: int, context: int, options: argparse.Namespace) -> Row:
    """The times and the memory of a call of `generate`."""
    device, steps = options.device, options.steps
    model.set_attn_implementation(kind.attention)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    cache = kind.make(model.config, context + steps + 1)
    if options.fill:
        fill(cache, model, batch, context, device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(model.config.vocab_size, (batch, context + options.fill), device=device)
    clock = StepClock(device)
    begun = time.perf_counter()
    how: Row = {} if options.fill else {"prefill_chunk_size": options.chunk}
    with kind.chosen():
        model.generate(
            ids, past_key_values=cache, max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
            stopping_criteria=[clock], **how,
        )  # fmt: skip
    times = clock.step_ms()
    step = statistics.median(times[len(times) // 4 :])
    row: Row = {"step_ms": round(step, 3), "tokens_per_s": round(batch / step * 1e3, 1)}
    if not options.fill:
        row["prefill_s"] = round(time.perf_counter() - begun - sum(times) / 1e3, 3)
    if (held := bytes_of(cache)) is not None:
        row["cache_gib"] = round(held / GIB, 3)
    if device == "cuda":
        row["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / GIB, 3)
    return row


def cell(kind: Kind, model: Any, batch: int, context: int, options: argparse.Namespace) -> Row:
    """A measured cell, or why there is none."""
    gc.collect()
    torch._dynamo.reset()  # a static cache of another size would be compiled with symbolic sizes
    if options.device == "cuda":
        torch.cuda.empty_cache()
        wanted, free = (
            bytes_wanted(kind, model, batch, context + options.steps + 1),
            torch.cuda.mem_get_info()[0],
        )
        if wanted > free:
            return {"skipped": f"its cache of {wanted / GIB:.1f} GiB does not fit in {free / GIB:.1f} GiB"}
    try:
        return measure(kind, model, batch, context, options)
    except torch.OutOfMemoryError:
        return {"skipped": "the GPU's memory does not suffice for its steps"}


def rows_of(options: argparse.Namespace, model: Any) -> Iterator[Row]:
    for name in options.cache.split(","):
        kind = KINDS[name]
        try:
            error = logits_error(kind, model, options.device)
        except (ImportError, ValueError) as reason:  # what it needs is not installed
            yield {"cache": name, "skipped": str(reason).splitlines()[0]}
            continue
        if not error <= kind.error:
            raise SystemExit(f"{name}: logits differ by {error:.3g}, and at most {kind.error} is right")
        for batch in map(int, options.batch.split(",")):
            for context in map(int, options.context.split(",")):
                while True:
                    row = {"cache": name, "batch": batch, "context": context, "logits_error": round(error, 4)}
                    row |= cell(kind, model, batch, context, options)
                    yield row
                    if not options.longest or "skipped" in row:
                        break
                    context *= 2


def show(rows: list[Row]) -> None:
    """Prints the rows as a table."""
    names = ("batch", "context", "step_ms", "tokens_per_s", "cache_gib", "peak_gib", "prefill_s")
    print(f"{'cache':16}", *(f"{name:>12}" for name in names))
    for row in rows:
        cells = (f"{row.get(name, '-'):>12}" for name in names)
        print(f"{row['cache']:16}", *cells, row.get("skipped", "")[:70])


def document(options: argparse.Namespace, model: Any) -> Row:
    """A file of results, like those of `narrowkv bench`, without its rows."""
    own = versions()
    found = {name: own[name] for name in ("torch", "triton")}
    for name in ("transformers", "flash-attn"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    how = "random keys and values for the prompt" if options.fill else "the prompt in chunks"
    return {
        "schema_version": SCHEMA_VERSION, "title": "Generation inside transformers",
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "versions": found, "commands": [shlex.join(["python", *sys.argv])],
        "shape": f"{say_shape(model)}; {how}, median of {options.steps - 1} steps of `generate`",
    }  # fmt: skip


def earlier(path: Path | None, made: Row) -> Row:
    """What a file of results holds already, nothing if it is not there.

    Raises:
        ValueError: the file is of another device, of other versions or of another shape.
    """
    if path is None or not path.exists():
        return {"commands": [], "rows": []}
    old: Row = json.loads(path.read_text())
    for name in ("device", "versions", "shape"):
        if old[name] != made[name]:
            raise ValueError(f"{path} must have {name} {made[name]!r}, got {old[name]!r}: use another --out")
    return old


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="glm-4.5-air", choices=[*SHAPES, "tiny"])
    parser.add_argument("--layers", type=int, help="layers of the model, where not all")
    parser.add_argument("--cache", default=",".join(DEFAULT_KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--context", default="2048,32768,131072")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--steps", type=int, default=16, help="new tokens of a row")
    parser.add_argument("--chunk", type=int, default=4096, help="prompt tokens of one forward pass")
    parser.add_argument("--fill", action="store_true", help="random keys and values for the prompt")
    parser.add_argument("--longest", action="store_true", help="double the context until memory runs out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="also write JSON to this file, or add the rows to it")
    options = parser.parse_args()
    narrow.register()
    model = make_model(options.shape, options.layers, options.device)
    made = document(options, model)
    old = earlier(options.out, made)
    made["commands"] = old["commands"] + made["commands"]
    found: list[Row] = []
    for row in rows_of(options, model):
        found.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if options.out:
            options.out.write_text(json.dumps({**made, "rows": old["rows"] + found}, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()
