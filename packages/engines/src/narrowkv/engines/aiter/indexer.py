"""AITER's logits of DeepSeek's indexer, which vLLM and SGLang call on ROCm, by `index_logits`."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.engines.aiter.signatures import as_aiter
from narrowkv.quant.formats import get_format
from narrowkv.sparse_fp8 import IndexKeys, index_logits

__all__ = ["deepgemm_fp8_paged_mqa_logits", "fp8_mqa_logits"]


@as_aiter("Q KV kv_scales weights cu_starts cu_ends", clean_logits=True)
def fp8_mqa_logits(call: Any) -> torch.Tensor:
    """Logits of tokens over keys that lie one after another.

    Args:
        call: AITER's arguments. `Q` is FP8 `[tokens, heads, head_dim]`, `KV` FP8 `[keys, head_dim]` with fp32
            `kv_scales` of any shape of `keys` elements, `weights` fp32 `[tokens, heads]`; token t scores keys
            `cu_starts[t]` to `cu_ends[t] - 1`. `clean_logits` makes the others -inf.

    Returns:
        fp32 `[tokens, keys]`.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
    """
    keys = IndexKeys(call.KV, call.kv_scales.reshape(-1), get_format(call.KV.dtype).name)
    return index_logits(
        call.Q, call.weights, keys, starts=call.cu_starts, ends=call.cu_ends, clean=call.clean_logits
    )


@as_aiter(
    "q_fp8 kv_cache weights out_logits context_lens kv_indices max_model_len",
    Preshuffle=False, KVBlockSize=1, ChunkK=256, TotalCuCount=None, WavePerEU=2, VarCtxSchedule=None,
)  # fmt: skip
def deepgemm_fp8_paged_mqa_logits(call: Any) -> torch.Tensor:
    """Logits of decodes over keys in pages.

    Args:
        call: AITER's arguments. `q_fp8` is `[batch, next_n, heads, head_dim]`, `kv_cache` `[pages,
            page_size, 1, head_dim + 4]` in bytes or FP8 of the queries' format, values of a page before its
            scales, in tiles of 16 tokens if `Preshuffle`; `context_lens` `[batch]` counts the next_n tokens,
            `kv_indices` is the block table. The last four say how AITER divides its work, and are not used.

    Returns:
        `out_logits`, fp32 `[batch * next_n, max_model_len]`; columns outside a token's keys are -inf.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
    """
    if call.KVBlockSize != call.kv_cache.shape[1]:
        raise ValueError(
            f"KVBlockSize must be the tokens of a page of kv_cache, {call.kv_cache.shape[1]}, got "
            f"{call.KVBlockSize}"
        )
    format = get_format(call.q_fp8.dtype).name
    keys = IndexKeys.packed(call.kv_cache.view(torch.uint8), format=format, shuffled=bool(call.Preshuffle))
    return index_logits(
        call.q_fp8.flatten(0, 1), call.weights, keys, block_table=call.kv_indices,
        seq_lens=call.context_lens, num_columns=call.max_model_len, out=call.out_logits,
    )  # fmt: skip
