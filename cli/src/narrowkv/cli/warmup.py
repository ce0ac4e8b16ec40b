"""`narrowkv warmup`: compiles what a model's decode, append and prefill can reach, before a server starts."""

from __future__ import annotations

from collections import Counter

import torch

from narrowkv.attn_prefill.warmup import model_kernels
from narrowkv.cli.report import ExitCode, Report
from narrowkv.paged_cache import PagedKVCache
from narrowkv.runtime.launch import warmup


def run_warmup(
    report: Report,
    cache: PagedKVCache,
    *,
    num_qo_heads: int,
    max_batch: int,
    max_seq_len: int,
    max_num_tokens: int,
    q_dtype: torch.dtype,
    targets: tuple[str, ...],
    jobs: int | None,
) -> ExitCode:
    """Compiles for each target, or for the GPU where none is named, and shows what was compiled."""
    body = {}
    for target in targets or (None,):
        kernels = model_kernels(
            cache, num_qo_heads=num_qo_heads, max_batch=max_batch, max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens, q_dtype=q_dtype, target=target,
        )  # fmt: skip
        where = target or "the GPU"
        with report.progress(len(kernels), f"compiling for {where}") as line:
            found = warmup(
                kernels, target, processes=jobs, progress=lambda done, total: line.advance() if done else None
            )  # fmt: skip
        names = Counter(kernel.name for kernel in kernels)
        report.line(
            f"{where}: {len(found.compiled)} kernels compiled, {len(found.cached)} were in Triton's cache ("
            + ", ".join(f"{name} {count}" for name, count in sorted(names.items()))
            + ")"
        )
        body[where] = {"compiled": list(found.compiled), "cached": list(found.cached)}
    return report.finish({"kernels": body}, ExitCode.OK)
