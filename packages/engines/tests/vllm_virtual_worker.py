"""`LLM.generate` of vLLM for ROCm on a virtual GPU, by Model Runner V2: MODEL, PROMPTS, NEW; prints as JSON.

vLLM's wheel for CPUs has everything of it but compiled operations, which torch replaces here.
"""

from __future__ import annotations

import gc
import json
import sys
from types import SimpleNamespace
from typing import Any

from triton.backends import backends

# vLLM's wheel for CPUs keeps Triton only with this backend, and asks once.
never = SimpleNamespace(is_active=lambda: False)
backends["cpu"] = SimpleNamespace(driver=never)

import torch  # noqa: E402
import vllm.platforms  # noqa: E402
from vllm.platforms.rocm import RocmPlatform  # noqa: E402

vllm.platforms._current_platform = RocmPlatform()  # the wheel's version says that the platform is a CPU

from vllm.triton_utils import HAS_TRITON  # noqa: E402

del backends["cpu"]

import vllm.utils.platform_utils  # noqa: E402

# A view of pinned memory is a compiled operation; vLLM copies where there is none.
vllm.utils.platform_utils.is_uva_available = lambda: False

import vllm.v1.worker.gpu_worker  # noqa: E402
from engine_checks import BF16, watch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

from narrowkv.engines import steps  # noqa: E402
from narrowkv.engines import vllm as narrow  # noqa: E402
from narrowkv.engines.vllm import backend  # noqa: E402
from narrowkv.engines.vllm.slots import cache_options  # noqa: E402

# Kernels that narrowkv does not run; the module imports torchvision.
vllm.v1.worker.gpu_worker.kernel_warmup = lambda worker: None

PROMPTS, NEW = json.loads(sys.argv[2]), int(sys.argv[3])


class Replaces:
    """Puts values in the place of others, as pytest's fixture of that name does."""

    def setattr(self, module: Any, name: str, value: Any) -> None:
        """Keeps it for the rest of the process."""
        setattr(module, name, value)


def count_replays(graph: Any, tokens: int, replays: list[int]) -> None:
    """Lets each replay of a graph note how many tokens a request has in it."""
    replay = graph.replay

    def noted() -> None:
        replays.append(tokens)
        replay()

    graph.replay = noted


def generate(model: str, cache_dtype: str, *, graphs: bool, guesses: int = 0) -> dict[str, Any]:
    """Tokens, and by what vLLM's runner made them."""
    guess = {"method": "ngram", "num_speculative_tokens": guesses, "prompt_lookup_max": 2}
    guess |= {"prompt_lookup_min": 1}
    replays: list[int] = []
    llm = LLM(
        model, skip_tokenizer_init=True, dtype="bfloat16", attention_backend="CUSTOM", max_num_seqs=2,
        max_model_len=64, block_size=32, max_num_batched_tokens=8, num_gpu_blocks_override=8,
        gpu_memory_utilization=0.01, speculative_config=guess if guesses else None,
        compilation_config={
            "mode": 0, "custom_ops": ["none"], "cudagraph_capture_sizes": [1 + guesses, 2 + 2 * guesses],
            "cudagraph_mode": "FULL_DECODE_ONLY" if graphs else "NONE",
        },
        **cache_options(cache_dtype),
    )  # fmt: skip
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    manager = runner.cudagraph_manager
    for desc, graph in manager.graphs.items():
        count_replays(graph, desc.uniform_token_count, replays)
    settings = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], settings, use_tqdm=False)
    layers = runner.compilation_config.static_forward_context.values()
    found = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "graphs": sorted((desc.num_reqs, desc.uniform_token_count) for desc in manager.graphs),
        "replays": replays, "caches": sorted({str(layer.impl._cache[1].format) for layer in layers}),
    }  # fmt: skip
    del llm, runner, manager, layers
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def main(model: str) -> None:
    """Generates with and without graphs, in 16 bits and FP8, with and without guesses."""
    assert HAS_TRITON
    narrow.register()
    places = (backend, "append"), (steps, "paged_decode"), (steps, "batch_prefill")
    found = {
        "16 bits": generate(model, "auto", graphs=True),
        "FP8": generate(model, "fp8", graphs=True),
        "guesses": generate(model, "fp8", graphs=True, guesses=3),
    }
    calls = watch(Replaces(), *places, bound=BF16)  # type: ignore[arg-type]
    found["eager"] = generate(model, "fp8", graphs=False)
    kinds = {(call.name, call.cache.k.is_cuda) for call in calls}
    print("FOUND", json.dumps({**found, "calls": sorted(kinds), "device": torch.cuda.get_device_name()}))


if __name__ == "__main__":
    main(sys.argv[1])
