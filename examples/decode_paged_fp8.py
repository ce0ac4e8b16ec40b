"""Sequences generate tokens over an FP8 paged cache: allocate pages, append K and V, fork, decode.

Runs on a GPU where there is one, else on the CPU through Triton's interpreter.
"""

from __future__ import annotations

import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.paged_cache import PagedKVCache, PagePool, append

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 24, 2, 128  # GQA ratio 12
NUM_PAGES, PAGE_SIZE = 32, 16
PROMPTS = (37, 5)  # tokens
STEPS = 3
DESCALE = 0.02  # static, from calibration: x is stored as the FP8 number nearest to x / DESCALE


def main() -> float:
    """Generates, and returns the largest relative L1 error of a step against fp32 on the same cache."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    def new_tokens(count: int) -> torch.Tensor:
        return torch.randn(count, NUM_KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)

    cache = PagedKVCache.empty(
        NUM_PAGES,
        PAGE_SIZE,
        NUM_KV_HEADS,
        HEAD_DIM,
        format="fp8_e4m3fn",
        k_descale=DESCALE,
        v_descale=DESCALE,
        device=device,
    )
    pool = PagePool(NUM_PAGES, PAGE_SIZE, caches=[cache])
    seqs = [pool.allocate(length) for length in PROMPTS]
    for seq, length in zip(seqs, PROMPTS, strict=True):
        append(cache, new_tokens(length), new_tokens(length), pool.slot_mapping(seq, 0, length))
    seqs.append(pool.fork(seqs[0]))  # a third sequence shares the first one's pages until it writes

    worst = 0.0
    for step in range(STEPS):
        for seq in seqs:
            pool.extend(seq, 1)  # a shared page that will be written is copied first
        slots = torch.cat([pool.slot_mapping(s, pool.length(s) - 1, 1) for s in seqs])
        append(cache, new_tokens(len(seqs)), new_tokens(len(seqs)), slots)

        q = torch.randn(len(seqs), NUM_QO_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        table = pool.page_table(seqs)
        plan = plan_decode(q, cache, table)  # once for all layers of a step
        o = paged_decode(q, cache, table, plan=plan)

        expected = paged_decode_reference(q, cache, table)
        assert isinstance(o, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        error = float((o.float() - expected).abs().sum() / expected.abs().sum())
        worst = max(worst, error)
        print(f"step {step}: lengths {table.seq_lens_tensor().tolist()}, relative L1 error {error:.1e}")
    print(f"{pool.free_pages} of {NUM_PAGES} pages free, {cache.tokens_per_gib():,} tokens a GiB")
    return worst


if __name__ == "__main__":
    main()
