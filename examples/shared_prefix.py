"""Two sequences share the pages of one prompt; a page is copied when a sequence writes into it."""

import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference
from narrowkv.paged_cache import PagedKVCache, PagePool, append
from narrowkv.quant import relative_l1

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
cache = PagedKVCache.empty(8, 16, 2, 128, format="fp8_e4m3fn", k_descale=0.02, v_descale=0.02, device=device)
pool = PagePool(num_pages=8, page_size=16, caches=[cache])  # every layer's cache
prompt = pool.allocate(37)
k, v = torch.randn(2, 37, 2, 128, device=device, dtype=torch.bfloat16)
append(cache, k, v, pool.slot_mapping(prompt, 0, 37))

seqs = [prompt, pool.fork(prompt)]  # no page is copied yet
for seq in seqs:
    pool.extend(seq, 1)  # room for a token; a shared page that it lies in is copied first
    k, v = torch.randn(2, 1, 2, 128, device=device, dtype=torch.bfloat16)
    append(cache, k, v, pool.slot_mapping(seq, 37, 1))
table = pool.page_table(seqs)
q = torch.randn(2, 24, 128, device=device, dtype=torch.bfloat16)
error = relative_l1(paged_decode(q, cache, table), paged_decode_reference(q, cache, table))
print(f"pages {pool.pages(seqs[0])} and {pool.pages(seqs[1])}, relative L1 error {error:.1e}")
