"""One byte budget as FP8 and as FP4: twice the tokens; and what a K offset and a V scale give back.

Runs on a GPU where there is one, else on the CPU through Triton's interpreter.
"""

from __future__ import annotations

import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.paged_cache import PagedKVCache, PagePool, append
from narrowkv.quant import KOffset, VScale, relative_l1

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 24, 2, 128, 16
BUDGET = 1 << 16  # bytes for K, V and scales
TOKENS = 20


def filled(format: str, device: str) -> tuple[PagedKVCache, PagePool]:
    """A cache that takes BUDGET bytes, and its pool."""
    one = PagedKVCache.empty(1, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, format=format)
    pages = int(BUDGET / (one.bytes_per_token() * PAGE_SIZE))
    descale = {"k_descale": 0.05, "v_descale": 0.05} if format.startswith("fp8") else {}
    cache = PagedKVCache.empty(
        pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, format=format, device=device, **descale
    )
    return cache, PagePool(pages, PAGE_SIZE)


def main() -> dict[str, float]:
    """Returns, by recipe, relative L1 of the output against attention on the bf16 tensors."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    k, v = (torch.randn(TOKENS, NUM_KV_HEADS, HEAD_DIM, device=device) for _ in range(2))
    k[..., ::21] += 6.0  # channels that stand off, as in real keys
    v *= torch.exp(0.5 * torch.randn(HEAD_DIM, device=device))
    q = torch.randn(1, NUM_QO_HEADS, HEAD_DIM, device=device).bfloat16()
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(0, 1)[None],
        k.transpose(0, 1)[None].repeat_interleave(12, 1),
        v.transpose(0, 1)[None].repeat_interleave(12, 1),
    )[0].transpose(0, 1)

    # Static, from calibration: softmax does not see the one, the output is multiplied by the other.
    offset, scale = KOffset.from_keys(k), VScale.from_values(v)
    errors: dict[str, float] = {}
    for format in ("fp8_e4m3fn", "fp4_e2m1"):
        cache, pool = filled(format, device)
        print(
            f"{format}: {cache.bytes_per_token():.0f} bytes a token, room for {cache.num_pages * PAGE_SIZE}"
        )
        seq = pool.allocate(TOKENS)
        slots = pool.slot_mapping(seq, 0, TOKENS, device=device)
        table = pool.page_table([seq], device=device)
        append(cache, k, v, slots)
        o = paged_decode(q, cache, table, out_dtype=torch.float32)
        assert isinstance(o, torch.Tensor)
        errors[format] = relative_l1(o, expected)
        append(cache, k, scale.divide(v), slots, k_offset=offset.offset)
        o = paged_decode(q, cache, table, out_dtype=torch.float32)
        assert isinstance(o, torch.Tensor)
        errors[f"{format}, K offset and V scale"] = relative_l1(scale.multiply(o), expected)
    for name, error in errors.items():
        print(f"{name}: relative L1 {error:.3f} against attention on the original tensors")
    return errors


if __name__ == "__main__":
    main()
