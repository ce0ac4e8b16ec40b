"""A bf16 cache becomes an FP4 cache: a quarter of the bytes, the same page table."""

import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant import relative_l1

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
k, v = torch.randn(2, 8, 16, 2, 128, device=device, dtype=torch.bfloat16)
bf16 = PagedKVCache.from_tensors(k, v, format="bf16")
fp4 = bf16.convert("fp4_e2m1", layout="HND")  # the same tokens in the same pages, as append would store them

pages = torch.tensor([[3, 1, 6]], dtype=torch.int32, device=device)
table = PageTable.from_block_table(pages, torch.tensor([41], dtype=torch.int32, device=device), page_size=16)
q = torch.randn(1, 24, 128, device=device, dtype=torch.bfloat16)
error = relative_l1(paged_decode(q, fp4, table), paged_decode(q, bf16, table))
print(f"{bf16.bytes_per_token():.0f} bytes a token become {fp4.bytes_per_token():.0f}")
print(
    f"relative L1 error {error:.1e} against attention over the bf16 cache, for normally distributed K and V"
)
