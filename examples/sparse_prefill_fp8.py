"""DeepSeek-V4 sparse prefill: a window of 128 tokens and the best compressed tokens, over FP8 pages.

Runs on a GPU where there is one, else on the CPU through Triton's interpreter.
"""

from __future__ import annotations

import torch

from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    choose_mode,
    compressed_topk,
    concat_csr,
    sliding_window,
    sparse_prefill_fp8,
    sparse_prefill_fp8_reference,
)

CONTEXT, NEW_TOKENS, NUM_HEADS = 300, 3, 16
WINDOW, RATIO, TOPK = 128, 4, 32


def main() -> float:
    """Attends, and returns the relative L1 error against fp32 on the same rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    compressed = CONTEXT // RATIO
    # One pool: a row for each token of the window cache, then one for each compressed token.
    pool = DSV4Rows.quantize(torch.randn(CONTEXT + compressed, 512, device=device), layout="packed584")
    slots = torch.arange(CONTEXT + compressed, dtype=torch.int32, device=device)
    positions = torch.arange(CONTEXT - NEW_TOKENS, CONTEXT, dtype=torch.int32, device=device)

    window = sliding_window(positions, slots[:CONTEXT], window=WINDOW)
    scores = torch.randn(NEW_TOKENS, compressed, device=device)  # an indexer's
    best = compressed_topk(scores, positions, slots[CONTEXT:], ratio=RATIO, topk=TOPK)
    prefix = KVSource(pool, *concat_csr(window, best))

    q = torch.randn(NEW_TOKENS, NUM_HEADS, 512, device=device, dtype=torch.bfloat16)
    sink = torch.zeros(NUM_HEADS, device=device)
    chosen = choose_mode(q, prefix)
    print(f"{chosen.mode}: {chosen.why}")
    o = sparse_prefill_fp8(q, prefix, attn_sink=sink)
    expected = sparse_prefill_fp8_reference(q, prefix, attn_sink=sink)
    assert isinstance(o, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    error = float((o.float() - expected).abs().sum() / expected.abs().sum())
    print(f"{NEW_TOKENS} tokens over {WINDOW} + {TOPK} rows each: relative L1 error {error:.1e}")
    return error


if __name__ == "__main__":
    main()
