"""Decode over an FP8 cache as vLLM keeps it: uint8 [2, num_blocks, block_size, num_kv_heads, head_size]."""

import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant import relative_l1

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
kv = torch.randn(2, 8, 16, 2, 128, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
block_table = torch.tensor([[3, 1, 6], [5, -1, -1]], dtype=torch.int32, device=device)
seq_lens = torch.tensor([37, 9], dtype=torch.int32, device=device)

k, v = kv.unbind(0)  # views: nothing is copied
cache = PagedKVCache.from_tensors(k, v, format="fp8_e4m3fn", k_descale=0.5, v_descale=0.5)
table = PageTable.from_block_table(block_table, seq_lens, page_size=16)
q = torch.randn(2, 24, 128, device=device, dtype=torch.bfloat16)  # 24 query heads over 2 KV heads
plan = plan_decode(q, cache, table)  # once for all layers and steps of these shapes
o = paged_decode(q, cache, table, plan=plan)  # bf16 [2, 24, 128]

error = relative_l1(o, paged_decode_reference(q, cache, table))
print(f"o {tuple(o.shape)}, relative L1 error {error:.1e} against fp32 attention over the same cache")
