"""Tries narrowkv inside SGLang, whose model runs in another process."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from narrowkv.engines.tiny import tiny_model
from narrowkv.engines.trial import OWN, PROMPT, Trial, Watch, compared, generate

__all__ = ["import_torchvision", "trials"]


def import_torchvision() -> None:
    """Imports torchvision, which SGLang needs, beside a torch for CPUs, too.

    torchvision's wheels for CUDA load no operators there, and its import fails for two of them, which no
    text model calls; so they are declared.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # declared already
                torch.library.define(
                    f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou) -> Tensor"
                )
    import torchvision  # noqa: F401


import_torchvision()  # in SGLang's processes this module is the first that is imported


def _schedule(counts: Path, instead_of: str | None, *args: Any, **kwargs: Any) -> Any:
    """SGLang's scheduler, which writes what narrowkv's operations did to a file."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from narrowkv.engines import steps
    from narrowkv.engines.sglang import backend, register

    register(instead_of=instead_of)
    with Watch(steps, backend, path=counts).watching():
        return run_scheduler_process(*args, **kwargs)


def _detokenize(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    return run_detokenizer_process(*args, **kwargs)


def trials(name: str, caches: list[str], count: int) -> Iterator[Trial]:
    """Generates with SGLang's own attention, then with narrowkv's over each cache.

    A model that SGLang starts only with backends of a fixed list (gpt-oss) runs with narrowkv in the
    place of "triton". On a CPU no backend of the list runs, and transformers' own attention is the first.

    Args:
        name: one of `narrowkv.engines.tiny.TINY_MODELS`.
        caches: SGLang's names of cache dtypes.
        count: new tokens.
    """
    from sglang.srt.entrypoints.engine import Engine

    from narrowkv.engines import sglang as narrow

    narrow.register()
    model = tiny_model(name)
    listed = model.config.model_type in narrow.LISTED
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompts = {"input_ids": [list(PROMPT)], "return_logprob": True, "top_logprobs_num": 5}
    settings = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}

    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"

        class Counted(Engine):
            run_scheduler_process_func = staticmethod(_schedule)
            run_detokenizer_process_func = staticmethod(_detokenize)

        def serve(
            cache: str, attention: str | None, instead_of: str | None = None
        ) -> tuple[list[int], dict[int, float], float]:
            Counted.run_scheduler_process_func = staticmethod(
                functools.partial(_schedule, counts, instead_of)
            )
            engine = Counted(
                model_path=folder, device=device, attention_backend=attention, kv_cache_dtype=cache,
                skip_tokenizer_init=True, dtype="bfloat16", page_size=16, context_length=128,
                max_total_tokens=512, max_running_requests=4, chunked_prefill_size=64,
                mem_fraction_static=0.1, disable_cuda_graph=True, sampling_backend="pytorch",
                log_level="error",
            )  # fmt: skip
            try:
                begun = time.perf_counter()
                (output,) = engine.generate(sampling_params=settings, **prompts)
                seconds = time.perf_counter() - begun
            finally:
                engine.shutdown()
            first = output["meta_info"]["output_top_logprobs"][0]
            return output["output_ids"], {token: value for value, token, _ in first}, seconds

        model.save_pretrained(folder)
        if device == "cuda":
            own = serve("auto", None)
        else:
            own = generate(model, count) if listed else serve("auto", "torch_native")
        yield compared(OWN, own[:2], *own)
        for cache in caches:
            found = serve(cache, "triton", "triton") if listed else serve(cache, narrow.NAME)
            calls, spent = json.loads(counts.read_text())
            counts.unlink()
            yield compared(cache, own[:2], *found, calls=calls, spent=spent)
