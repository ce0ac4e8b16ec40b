"""Decode over FP4 caches with scales of groups as Hopper's machine code."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import narrowkv.attn_decode.launch as decode_launch
from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.paged_cache import PagedKVCache, PageTable

I32 = torch.int32


@pytest.mark.parametrize(("group", "scale"), [(16, "e4m3"), (32, "e8m0"), (16, "e8m0"), (32, "e4m3")])
def test_stored_words_go_from_memory_to_registers(
    sm90_code: Any, monkeypatch: pytest.MonkeyPatch, group: int, scale: str
) -> None:
    monkeypatch.setattr(decode_launch, "READ_TO_REGISTERS", True)
    cache = PagedKVCache.empty(4, 16, 8, 128, format="fp4_e2m1", scale_group=group, scale_format=scale)
    lens = torch.full((64,), 8192, dtype=I32)
    table = PageTable.from_block_table(torch.zeros(64, 512, dtype=I32), lens, page_size=16)
    q = torch.zeros(64, 96, 128, dtype=torch.bfloat16)
    paged_decode(q, cache, table, plan=plan_decode(q, cache, table))
    kernel = sm90_code.kernels[0]
    assert kernel.stack_bytes() <= 40
    code = kernel.machine_code()
    loop = code[code.index("HMMA") : code.rindex("HMMA")]
    assert not re.search(r"\b(LDGSTS|LDSM|LDS|STS)\b", loop)
    assert len(re.findall(r"\bLDG\.E\.128\b", loop)) == 4  # K of a tile


@pytest.mark.parametrize(("group", "scale"), [(16, "e4m3"), (32, "e8m0")])
def test_widened_tiles_do_not_go_through_shared_memory(sm90_code: Any, group: int, scale: str) -> None:
    cache = PagedKVCache.empty(4, 16, 8, 128, format="fp4_e2m1", scale_group=group, scale_format=scale)
    lens = torch.full((64,), 8192, dtype=I32)
    table = PageTable.from_block_table(torch.zeros(64, 512, dtype=I32), lens, page_size=16)
    q = torch.zeros(64, 96, 128, dtype=torch.bfloat16)
    paged_decode(q, cache, table, plan=plan_decode(q, cache, table))
    kernel = sm90_code.kernels[0]
    assert kernel.stack_bytes() <= 40  # none with Triton 3.6, ten registers with 3.9
    # A tile of 32 keys, K and V widened, would take 16 KB more than the ring of stored words.
    assert kernel.shared_bytes < 12 * 1024
