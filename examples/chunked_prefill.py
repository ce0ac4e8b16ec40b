"""A prompt is prefilled in chunks, each attending and appending in one launch, then decoded: by a page pool.

Runs on a GPU where there is one, else on the CPU through Triton's interpreter.
"""

from __future__ import annotations

import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import prefill_append
from narrowkv.attn_prefill.reference import attention_reference
from narrowkv.paged_cache import PagedKVCache, PagePool, append

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 12, 2, 64
NUM_PAGES, PAGE_SIZE = 16, 16
CHUNKS = (40, 25, 33)  # tokens; the second chunk begins in the middle of a page
STEPS = 2
DESCALE = 0.02  # static, from calibration: x is stored as the FP8 number nearest to x / DESCALE


def main(cache_format: str = "fp8_e4m3fn") -> tuple[float, float]:
    """Prefills and decodes; relative L1 of the prompt and of the decoded tokens against one-shot attention.

    One-shot attention is fp32 over the original keys and values, so the figures are the format's error: each
    chunk reads its own tokens unquantised and older ones from the cache.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    total = sum(CHUNKS) + STEPS
    q = torch.randn(total, NUM_QO_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(total, NUM_KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    descale = DESCALE if cache_format.startswith("fp8") else 1.0
    cache = PagedKVCache.empty(
        NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM,
        format=cache_format, k_descale=descale, v_descale=descale, device=device,
    )  # fmt: skip
    pool = PagePool(NUM_PAGES, PAGE_SIZE, caches=[cache])
    seq = pool.allocate()

    outputs = []
    for tokens in CHUNKS:
        rows = slice(pool.length(seq), pool.length(seq) + tokens)
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        pool.extend(seq, tokens)  # pages for the new tokens
        table = pool.table_before([seq], tokens)  # the lengths before them
        outputs.append(prefill_append(q[rows], k[rows], v[rows], cache, table, starts))
    for _ in range(STEPS):
        at = pool.length(seq)
        pool.extend(seq, 1)
        append(cache, k[at : at + 1], v[at : at + 1], pool.slot_mapping(seq, at, 1))
        outputs.append(paged_decode(q[at : at + 1], cache, pool.page_table([seq])))

    o = torch.cat(outputs).float()
    expected, _ = attention_reference(
        q, k.float(), v.float(), torch.arange(total, device=device),
        sm_scale=HEAD_DIM**-0.5, logits_soft_cap=0.0, window_left=-1, window_right=0, sinks=None,
    )  # fmt: skip
    prompt = slice(0, sum(CHUNKS))
    errors = [
        float((o[part] - expected[part]).abs().sum() / expected[part].abs().sum())
        for part in (prompt, slice(sum(CHUNKS), total))
    ]
    return errors[0], errors[1]


if __name__ == "__main__":
    for name in ("bf16", "fp8_e4m3fn"):
        prompt, decoded = main(name)
        print(f"{name}: relative L1 against one-shot attention: prompt {prompt:.1e}, decoded {decoded:.1e}")
