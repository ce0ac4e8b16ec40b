"""`narrowkv warmup`: compiles what a model's decode, append and prefill can reach, before a server starts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from narrowkv.attn_prefill.warmup import model_kernels
from narrowkv.cli.report import ExitCode, Report
from narrowkv.paged_cache import PagedKVCache
from narrowkv.runtime.launch import warmup

_SPAN_32_BITS = 2**31


def model_cache(
    formats: str, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, device: str
) -> PagedKVCache:
    """A cache whose kernels are those of one with `num_pages` pages, in little more than 2 GiB.

    Kernels know of the pages whether offsets fit 32 bits and whether their number is a multiple of 16.
    """
    for_one = PagedKVCache.empty(1, page_size, num_kv_heads, head_dim, format=formats, device=device)
    per_page = max(for_one.k.nbytes, for_one.v.nbytes, 1)
    least = min(for_one.k.nbytes, for_one.v.nbytes)
    enough = -(-_SPAN_32_BITS // max(least, 1)) + 1
    if num_pages * per_page > _SPAN_32_BITS:
        num_pages = min(num_pages, enough + (num_pages - enough) % 16)
    made = PagedKVCache.empty(num_pages, page_size, num_kv_heads, head_dim, format=formats, device=device)
    # An engine's cache holds what others wrote, too.
    return replace(made, negative_zero_free=False)


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
