"""A prompt is prefilled in chunks; each call attends and appends the chunk to the FP8 cache."""

import torch

from narrowkv.attn_prefill import prefill_append
from narrowkv.paged_cache import PagedKVCache, PagePool
from narrowkv.quant import relative_l1

torch.manual_seed(0)
i32 = {"dtype": torch.int32, "device": "cuda" if torch.cuda.is_available() else "cpu"}
q, k, v = (torch.randn(98, heads, 64, device=i32["device"]).bfloat16() for heads in (12, 2, 2))
fp8 = {"format": "fp8_e4m3fn", "k_descale": 0.02, "v_descale": 0.02}
cache, pool = PagedKVCache.empty(16, 16, 2, 64, device=q.device, **fp8), PagePool(16, 16)
seq, outputs = pool.allocate(), []
for begin, end in ((0, 40), (40, 65), (65, 98)):  # the second chunk begins in the middle of a page
    pool.extend(seq, end - begin)
    table = pool.table_before([seq], end - begin, device=q.device)  # pages with the chunk, lengths without
    starts = torch.tensor([0, end - begin], **i32)
    outputs.append(prefill_append(q[begin:end], k[begin:end], v[begin:end], cache, table, starts))
exact = torch.nn.functional.scaled_dot_product_attention(
    *(x.float().transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
)
error = relative_l1(torch.cat(outputs), exact.transpose(0, 1))
print(f"relative L1 error {error:.1e} against attention over the original bf16 tensors")
