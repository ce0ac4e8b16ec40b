"""What a model's calls compile does not depend on batches, tokens and table widths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import batch_prefill, prefill_append
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.runtime.launch import LaunchOptions, executing
from narrowkv.runtime.launch.gpu import key_function
from narrowkv.runtime.targets import Target, get_target

I32 = torch.int32
PAGE = 16


class CountKernels:
    """Runs nothing; notes what Triton would compile."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.kernels: set[Any] = set()

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: Any, constexprs: Any, options: LaunchOptions
    ) -> None:
        """Notes the specialisation of a launch."""
        key = key_function(kernel.params, args, storage_sizes=self.target.is_amd)
        constants = tuple(sorted((name, str(value)) for name, value in constexprs.items()))
        self.kernels.add((kernel.fn.__name__, constants, options, key(args)))


def _calls(count: int, appends: bool) -> Iterator[tuple[torch.Tensor, PagedKVCache, PageTable, torch.Tensor]]:
    """Batches of a server: any number of sequences, lengths, table widths; one model."""
    draw = random.Random(0)
    cache = PagedKVCache.empty(64, PAGE, 8, 128, format="fp8_e4m3fn", k_descale=0.5, v_descale=0.5)
    for _ in range(count):
        batch = draw.choice((1, 1, 2, 3, 16, 17, draw.randint(1, 60)))
        longest = draw.choice((1, 2, 7, 64, 500))
        q_lens = torch.tensor([draw.randint(1, longest) for _ in range(batch)])
        width = draw.choice((1, 16, 17, 100, 400))
        lens = torch.full((batch,), width * PAGE, dtype=I32)
        table = PageTable.from_block_table(
            torch.zeros(batch, width, dtype=I32),
            **{"cached_lens" if appends else "seq_lens": lens},
            page_size=PAGE,
        )
        starts = torch.cat([torch.zeros(1, dtype=torch.long), q_lens.cumsum(0)]).to(I32)
        q = torch.empty(1, 1, 1, dtype=torch.bfloat16).expand(int(starts[-1]), 96, 128)
        yield torch.empty(q.shape, dtype=q.dtype), cache, table, starts


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90"])
@pytest.mark.parametrize("appends", [False, True])
def test_no_kernel_is_compiled_for_a_batch_its_tokens_or_a_table_width(appends: bool, target: str) -> None:
    executor = CountKernels(get_target(target))
    with executing(executor):
        for q, cache, table, starts in _calls(60, appends):
            if appends:
                new = torch.empty(q.shape[0], 8, 128, dtype=q.dtype)
                prefill_append(q, new, new, cache, table, starts)
            else:
                batch_prefill(q, cache, table, starts)
    # Of batches, tokens, table widths and lengths of schedules no number is compiled for.
    own = {kernel for kernel in executor.kernels if "decode" not in kernel[0] and "merge" not in kernel[0]}
    kinds = {kernel[:3] for kernel in own}
    assert len(own) == len(kinds)
    assert len(executor.kernels) <= 12
