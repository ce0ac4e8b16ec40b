"""Decode over FP4 caches with scales of groups as Hopper's machine code."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.paged_cache import PagedKVCache, PageTable

I32 = torch.int32


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize(("group", "scale"), [(16, "e4m3"), (32, "e8m0"), (16, "e8m0"), (32, "e4m3")])
def test_stored_words_go_from_memory_to_registers(sm90_code: Any, group: int, scale: str) -> None:
    cache = PagedKVCache.empty(4, 16, 8, 128, format="fp4_e2m1", scale_group=group, scale_format=scale)
    lens = torch.full((64,), 8192, dtype=I32)
    table = PageTable.from_block_table(torch.zeros(64, 512, dtype=I32), lens, page_size=16)
    q = torch.zeros(64, 96, 128, dtype=torch.bfloat16)
    paged_decode(q, cache, table, plan=plan_decode(q, cache, table))
    kernel = sm90_code.kernels[0]
    assert kernel.stack_bytes() <= 48  # with Triton 3.9, a scale per 32 channels in 224 registers
    code = kernel.machine_code()
    loop = code[code.index("HMMA") : code.rindex("HMMA")]
    assert not re.search(r"\b(LDGSTS|LDSM|LDS|STS)\b", loop)
    assert len(re.findall(r"\bLDG\.E\.128\b", loop)) == 4  # K of a tile
