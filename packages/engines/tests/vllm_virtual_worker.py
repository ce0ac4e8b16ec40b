"""`LLM.generate` of vLLM for ROCm on a virtual GPU, by Model Runner V2.

Arguments: WHAT, MODEL, PROMPTS, NEW; it prints what it saw as JSON.

vLLM's wheel for CPUs has everything of it but compiled operations, which torch replaces here.
"""

from __future__ import annotations

import gc
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from triton.backends import backends

# vLLM's wheel for CPUs keeps Triton only with this backend, and asks once.
never = SimpleNamespace(is_active=lambda: False)
backends["cpu"] = SimpleNamespace(driver=never)

import torch  # noqa: E402
import vllm.platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

# The wheel has builds for several instruction sets, and this loads the one for this CPU. vLLM for ROCm would
# import `vllm._C`, which needs AVX512-BF16.
CpuPlatform.import_kernels()
sys.modules.setdefault("vllm._C", ModuleType("vllm._C"))

from vllm.platforms.rocm import RocmPlatform  # noqa: E402

vllm.platforms._current_platform = RocmPlatform()  # the wheel's version says that the platform is a CPU

from vllm.triton_utils import HAS_TRITON  # noqa: E402

del backends["cpu"]

import vllm.utils.platform_utils  # noqa: E402

# A view of pinned memory is a compiled operation; vLLM copies where there is none.
vllm.utils.platform_utils.is_uva_available = lambda: False

import vllm._custom_ops  # noqa: E402
import vllm.v1.worker.gpu_worker  # noqa: E402
from engine_checks import BF16, watch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

from narrowkv.engines import steps  # noqa: E402
from narrowkv.engines.vllm import backend  # noqa: E402
from narrowkv.engines.vllm.slots import cache_options  # noqa: E402

# How much LDS a workgroup has, as batch-invariant products ask.
vllm._custom_ops.get_max_shared_memory_per_block_device_attribute = lambda device: 65536

# Kernels that narrowkv does not run; the module imports torchvision.
vllm.v1.worker.gpu_worker.kernel_warmup = lambda worker: None

WHAT, MODEL = sys.argv[1:3]
PROMPTS, NEW = json.loads(sys.argv[3]), int(sys.argv[4])


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


def generate(
    cache_dtype: str, *, graphs: bool, guesses: int = 0, chosen: str | None = "CUSTOM",
    rounds: Any = (PROMPTS,), **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Tokens and their log-probabilities, and by what vLLM's runner made them.

    Args:
        cache_dtype: vLLM's.
        graphs: whether decode steps are full graphs.
        guesses: speculative tokens.
        chosen: the backend; None for vLLM's automatic choice.
        rounds: prompts that are generated together.
        **options: others of vLLM's.
    """
    guess = {"method": "ngram", "num_speculative_tokens": guesses, "prompt_lookup_max": 2}
    guess |= {"prompt_lookup_min": 1}
    replays: list[int] = []
    llm = LLM(
        MODEL, skip_tokenizer_init=True, dtype="bfloat16", attention_backend=chosen, max_num_seqs=2,
        max_model_len=64, block_size=32, num_gpu_blocks_override=8,
        gpu_memory_utilization=0.01, speculative_config=guess if guesses else None,
        compilation_config={
            "mode": 0, "custom_ops": ["none"], "cudagraph_capture_sizes": [1 + guesses, 2 + 2 * guesses],
            "cudagraph_mode": "FULL_DECODE_ONLY" if graphs else "NONE",
        },
        **{"max_num_batched_tokens": 8, **cache_options(cache_dtype), **options},
    )  # fmt: skip
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    manager = runner.cudagraph_manager
    for desc, graph in manager.graphs.items():
        count_replays(graph, desc.uniform_token_count, replays)
    settings = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
    made = [
        each.outputs[0]
        for prompts in rounds
        for each in llm.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)
    ]
    layers = runner.compilation_config.static_forward_context.values()
    found = {
        "tokens": [list(each.token_ids) for each in made],
        "chances": [
            [step[token].logprob for token, step in zip(each.token_ids, each.logprobs, strict=True)]
            for each in made
        ],
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "graphs": sorted((desc.num_reqs, desc.uniform_token_count) for desc in manager.graphs),
        "replays": replays, "caches": sorted({stored_in(layer.impl) for layer in layers}),
    }  # fmt: skip
    del llm, runner, manager, layers
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def stored_in(attention: Any) -> str:
    """How a layer stores its tokens."""
    if hasattr(attention, "_rows"):
        rows = attention._rows[1]
        return f"{rows.layout} {rows.format}"
    return str(attention._cache[1].format)


def each_way() -> dict[str, Any]:
    """With and without graphs, in 16 bits and FP8, with and without guesses."""
    places = (backend, "append"), (steps, "paged_decode"), (steps, "batch_prefill")
    found = {
        "16 bits": generate("auto", graphs=True, chosen=None),
        "FP8": generate("fp8", graphs=True),
        "guesses": generate("fp8", graphs=True, guesses=3),
    }
    calls = watch(Replaces(), *places, bound=BF16)  # type: ignore[arg-type]
    found["eager"] = generate("fp8", graphs=False)
    kinds = {(call.name, call.cache.k.is_cuda) for call in calls}
    return {**found, "calls": sorted(kinds), "device": torch.cuda.get_device_name()}


def latent() -> dict[str, Any]:
    """A model with latent attention, in graphs of decode steps and in eager steps, which are compared."""
    from narrowkv.engines.vllm import latent as adapter
    from narrowkv.quant import relative_l1
    from narrowkv.sparse_fp8 import latent_decode_reference

    options = {
        "max_num_batched_tokens": 64,
        "attention_config": {"backend": "CUSTOM", "mla_prefill_backend": "CUSTOM"},
    }  # fmt: skip
    graphs = generate("fp8", graphs=True, chosen=None, **options)
    errors, operation = [], adapter.latent_decode

    def compared(q: Any, rows: Any, table: Any, *, plan: Any, return_lse: bool) -> Any:
        o, lse = operation(q, rows, table, plan=plan, return_lse=return_lse)
        errors.append(relative_l1(o, latent_decode_reference(q, rows, table, sm_scale=plan.sm_scale)))
        return o, lse

    adapter.latent_decode = compared
    eager = generate("fp8", graphs=False, chosen=None, **options)
    return {"graphs": graphs, "eager": eager, "errors": errors}


def together_and_alone() -> dict[str, Any]:
    """All prompts in one batch, and then each by itself."""
    return generate("fp8", graphs=True, rounds=(PROMPTS, *([prompt] for prompt in PROMPTS)))


if __name__ == "__main__":
    assert HAS_TRITON
    print(
        "FOUND",
        json.dumps(
            {"each way": each_way, "latent": latent, "together and alone": together_and_alone}[WHAT]()
        ),
    )
