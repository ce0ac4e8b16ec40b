"""Tries narrowkv inside an engine: a tiny random model, by narrowkv and by the engine's own attention.

The model runs on a GPU if the engine finds one, else on the CPU through Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowkv.engines.tiny import DEEPSEEK_V4, LATENT, LATENT_SPARSE, tiny_model
from narrowkv.runtime.errors import UnsupportedError, check_choice

__all__ = [
    "CACHES",
    "ENGINES",
    "OWN",
    "PROMPT",
    "Trial",
    "Watch",
    "compared",
    "generate",
    "try_engine",
]

ENGINES = ("transformers", "vllm", "sglang")
# Each engine's names of the caches that are tried, the 16-bit one first.
CACHES = {
    "transformers": ("bf16", "fp8_e4m3fn", "k8v4", "fp4_e2m1", "int8", "int4"),
    "vllm": (
        "auto", "fp8", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "ultraquant_4bit",
        "narrowkv_k8v4", "narrowkv_fp4",
    ),
    "sglang": ("auto", "fp8_e4m3"),
}  # fmt: skip
_PAIRS = {"k8v4": ("fp8_e4m3fn", "fp4_e2m1")}
# Layouts of DeepSeek's rows by the names of transformers' caches: V4's own, and V4.1's in NVFP4.
_ROWS = {"bf16": None, "fp8_e4m3fn": "packed584", "fp4_e2m1": "packed288"}
OWN = "engine's own"
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13)


@dataclass(frozen=True)
class Trial:
    """One generation.

    Attributes:
        cache: the cache's dtype, or "engine's own".
        tokens: the greedy tokens.
        same: how many of them the engine's own attention gives too, from the first on.
        difference: the largest difference of a log-probability of the first new token, among those that the
            engine reports for both; 0 for the engine's own.
        seconds: of the whole generation.
        spent: seconds in each of narrowkv's operations.
        calls: how often each of them ran.
    """

    cache: str
    tokens: list[int]
    same: int
    difference: float
    seconds: float
    spent: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


def try_engine(
    engine: str, model: str = "glm-4.5-air-tiny", caches: Sequence[str] = (), *, tokens: int = 4
) -> list[Trial]:
    """Generates with the engine's own attention, then with narrowkv over each cache.

    Args:
        engine: one of `ENGINES`.
        model: one of `narrowkv.engines.tiny.TINY_MODELS`; DeepSeek-V4 and models with latent attention run in
            transformers alone.
        caches: dtypes of caches, by the engine's names; default all of `CACHES[engine]` that the model has.
        tokens: new tokens.

    Returns:
        The engine's own generation, and one for each cache.

    Raises:
        ValueError: for other names.
        UnsupportedError: for a model that the engine does not run without its own GPU kernels.
        ImportError: the engine is not installed.

    Example:
        >>> own, narrow = try_engine("transformers", "llama-3-tiny", ["fp8_e4m3fn"], tokens=2)
        >>> narrow.calls["paged_decode"] > 0
        True
    """
    check_choice("engine", engine, ENGINES)
    for cache in caches:
        check_choice("caches", cache, CACHES[engine])
    has_rows = model == DEEPSEEK_V4 or model in LATENT
    if has_rows and engine != "transformers":
        raise UnsupportedError(
            f"{engine} runs {model} with kernels of its own, which need a GPU and the real shape: "
            "try it in transformers"
        )
    known = tuple(_ROWS) if has_rows else CACHES[engine]
    unknown = [cache for cache in caches if cache not in known]
    if unknown:
        raise UnsupportedError(f"{model} has no rows of {unknown[0]}: try it with {', '.join(known)}")
    if engine == "sglang":
        from narrowkv.engines.trial_sglang import trials as run
    else:
        run = _with_transformers if engine == "transformers" else _with_vllm
    return list(run(model, list(caches or known), tokens))


class Watch:
    """Counts and times narrowkv's operations where an adapter looks them up.

    Args:
        *modules: those that call the operations.
        path: a file for the counts and seconds, as JSON, written after each call: an engine may end the
            process at any time.
    """

    def __init__(self, *modules: Any, path: Path | None = None) -> None:
        self.modules, self.path = modules, path
        self.calls: dict[str, int] = {}
        self.spent: dict[str, float] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Counts while the block runs."""
        found = [
            (module, name, getattr(module, name))
            for module in self.modules
            for name in ("append", "paged_decode", "batch_prefill", "sparse_decode", "latent_decode")
            if hasattr(module, name)
        ]
        for module, name, operation in found:
            setattr(module, name, self._timed(name, operation))
        try:
            yield
        finally:
            for module, name, operation in found:
                setattr(module, name, operation)

    def _timed(self, name: str, operation: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            result = operation(*args, **kwargs)
            _wait()
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begun
            self.calls[name] = self.calls.get(name, 0) + 1
            if self.path is not None:
                self.path.write_text(json.dumps([self.calls, self.spent]))
            return result

        return call


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compared(
    cache: str, own: tuple[list[int], dict[int, float]], tokens: list[int], chances: dict[int, float],
    seconds: float, *, calls: dict[str, int] | None = None, spent: dict[str, float] | None = None,
) -> Trial:  # fmt: skip
    """A generation beside the engine's own.

    Args:
        cache: the cache's dtype, or `OWN`.
        own: tokens and log-probabilities by the engine's own attention.
        tokens: the greedy tokens.
        chances: log-probabilities of the first new token.
        seconds: of the whole generation.
        calls, spent: of a `Watch`.
    """
    expected, own_chances = own
    same = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), len(tokens))
    shared = chances.keys() & own_chances.keys()
    difference = max((abs(chances[t] - own_chances[t]) for t in shared), default=float("nan"))
    return Trial(cache, tokens, same, difference, seconds, spent or {}, calls or {})


def generate(model: Any, count: int, cache: Any = None) -> tuple[list[int], dict[int, float], float]:
    """Greedy tokens of a model of transformers, log-probabilities of the first, and seconds.

    Args:
        model: any causal language model.
        count: new tokens.
        cache: transformers' `past_key_values`; None for its own.
    """
    import torch

    prompt = torch.tensor([PROMPT], device=model.device)
    begun = time.perf_counter()
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, past_key_values=cache, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    _wait()
    seconds = time.perf_counter() - begun
    chances = dict(enumerate(out.logits[0][0].float().log_softmax(-1).tolist()))
    return out.sequences[0, len(PROMPT) :].tolist(), chances, seconds


def _with_transformers(name: str, caches: list[str], count: int) -> Iterator[Trial]:
    import torch

    import narrowkv.engines.transformers as narrow
    from narrowkv.engines import deepseek
    from narrowkv.engines.transformers import attention, deepseek_v4, dense, latent, layers
    from narrowkv.paged_cache import CacheFormat

    model = tiny_model(name).to("cuda" if torch.cuda.is_available() else "cpu")
    own = generate(model, count)
    yield compared(OWN, own[:2], *own)
    narrow.register()
    in_rows = name == DEEPSEEK_V4
    for kind in caches:
        deepseek_v4.register(_ROWS[kind] if in_rows else None)
        model.set_attn_implementation(deepseek_v4.NAME if in_rows or name in LATENT_SPARSE else narrow.NAME)
        watch = Watch(attention, layers, *((dense, deepseek, latent) if in_rows or name in LATENT else ()))
        stored, pages = CacheFormat(*_PAIRS[kind]) if kind in _PAIRS else kind, None
        if not in_rows:
            pages = narrow.NarrowCache(model.config, max_length=len(PROMPT) + count, format=stored)
        with watch.watching():
            found = generate(model, count, pages)
        yield compared(kind, own[:2], *found, calls=watch.calls, spent=watch.spent)


def _with_vllm(name: str, caches: list[str], count: int) -> Iterator[Trial]:
    # One process, so that what is registered and timed here is what runs. vLLM reads it when imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector

    import narrowkv.engines.vllm as narrow
    from narrowkv.engines import steps
    from narrowkv.engines.vllm import backend
    from narrowkv.engines.vllm.slots import ULTRAQUANT, cache_options

    on_cpu = current_platform.is_cpu()

    def serve(folder: str, cache: str, **chosen: Any) -> tuple[list[int], dict[int, float], float]:
        selector._cached_get_attn_backend.cache_clear()
        llm = LLM(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
            max_model_len=64, block_size=32, max_num_seqs=2, max_num_batched_tokens=64,
            num_gpu_blocks_override=32, **cache_options(cache), **chosen,
        )  # fmt: skip
        settings = SamplingParams(
            max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, logprobs=5
        )
        begun = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": list(PROMPT)}], settings, use_tqdm=False)
        seconds = time.perf_counter() - begun
        first = output.outputs[0]
        del llm
        cleanup_dist_env_and_memory()
        return list(first.token_ids), {t: e.logprob for t, e in first.logprobs[0].items()}, seconds

    # Of 4-bit caches of its own vLLM keeps the two first and the two last layers in 16 bits.
    layers = {cache: 6 if cache == ULTRAQUANT else 2 for cache in caches}
    with tempfile.TemporaryDirectory() as parent:
        owns = {}
        for num_layers in sorted(set(layers.values())):
            folder = f"{parent}/{num_layers}"
            tiny_model(name, num_layers=num_layers).save_pretrained(folder)
            owns[num_layers] = folder, serve(folder, "auto")
        first = owns[min(owns)][1]
        yield compared(OWN, first[:2], *first)
        narrow.register(instead_of="CPU_ATTN" if on_cpu else None)
        chosen = {} if on_cpu else {"attention_backend": "CUSTOM"}
        for kind in caches:
            folder, own = owns[layers[kind]]
            watch = Watch(backend, steps)
            with watch.watching():
                found = serve(folder, kind, **chosen)
            yield compared(kind, own[:2], *found, calls=watch.calls, spent=watch.spent)
