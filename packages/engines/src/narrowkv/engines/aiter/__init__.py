"""AITER's attention functions, by their names and signatures, over narrowkv's kernels.

They take AITER's tensors as they are: linear caches of one or many tokens a page, vectorised ones with
transposed V, ragged tables and block tables, descales per tensor, per sequence and per page, FP4 with scales
for each token and head, DeepSeek-V4's rows, and index keys of DeepSeek-V3.2. AITER itself is imported by
`patch` alone. Signatures are those of AITER at e4048607 (August 2026); two of its pull request 3583 are named
as such.

Example:
    >>> import narrowkv.engines.aiter as aiter
    >>> o = aiter.mha_batch_prefill_func(
    ...     q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_q, max_k, causal=True
    ... )  # doctest: +SKIP
"""

from narrowkv.engines.aiter.functions import (
    mha_batch_prefill_func,
    paged_attention_ragged,
    paged_attention_v1,
    unified_attention,
)
from narrowkv.engines.aiter.indexer import deepgemm_fp8_paged_mqa_logits, fp8_mqa_logits
from narrowkv.engines.aiter.patching import AITER_GQA_RATIOS, patch
from narrowkv.engines.aiter.sparse import (
    pa_decode_sparse,
    pa_prefill_sparse,
    pa_sparse_prefill_fp8_opus,
    pa_sparse_prefill_opus,
    pa_sparse_prefill_opus_fp8,
    pa_sparse_prefill_opus_fp8_fused,
)
from narrowkv.engines.geometry import decoder_reasons as supports

__all__ = [
    "AITER_GQA_RATIOS",
    "deepgemm_fp8_paged_mqa_logits",
    "fp8_mqa_logits",
    "mha_batch_prefill_func",
    "pa_decode_sparse",
    "pa_prefill_sparse",
    "pa_sparse_prefill_fp8_opus",
    "pa_sparse_prefill_opus",
    "pa_sparse_prefill_opus_fp8",
    "pa_sparse_prefill_opus_fp8_fused",
    "paged_attention_ragged",
    "paged_attention_v1",
    "patch",
    "supports",
    "unified_attention",
]
