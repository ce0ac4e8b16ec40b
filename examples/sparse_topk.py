"""DeepSeek-V4 sparse prefill over FP8 rows: each query attends to a window and to its top-k rows."""

import torch

import narrowkv.sparse_fp8 as sparse
from narrowkv.quant import relative_l1

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
rows = sparse.DSV4Rows.quantize(torch.randn(300, 512, device=device), layout="packed584")  # one row a token
slots = torch.arange(300, dtype=torch.int32, device=device)  # the row of each position
positions = torch.tensor([297, 298, 299], dtype=torch.int32, device=device)  # three query tokens
scores = torch.randn(3, 150, device=device)  # an indexer's scores of the first 150 rows
topk = scores.topk(32).indices.to(torch.int32)  # [3, 32], -1 would be padding
window = sparse.sliding_window(positions, slots, window=128)
prefix = sparse.KVSource(rows, *sparse.concat_csr(window, topk))

q = torch.randn(3, 16, 512, device=device, dtype=torch.bfloat16)
o = sparse.sparse_prefill_fp8(q, prefix)  # bf16 [3, 16, 512]

error = relative_l1(o, sparse.sparse_prefill_fp8_reference(q, prefix))
print(f"o {tuple(o.shape)}, relative L1 error {error:.1e} against fp32 attention over the same rows")
