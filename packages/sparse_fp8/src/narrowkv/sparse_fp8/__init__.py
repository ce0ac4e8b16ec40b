"""DeepSeek-V4 sparse attention over FP8 rows: prefill (fused, or prepass and a 16-bit kernel) and decode.

Example:
    >>> import torch
    >>> from narrowkv.sparse_fp8 import DSV4Rows, KVSource, sparse_prefill_fp8
    >>> pool = DSV4Rows.quantize(torch.randn(64, 512), layout="packed584")
    >>> indptr = torch.tensor([0, 3, 4], dtype=torch.int32)
    >>> indices = torch.tensor([5, 9, -1, 63], dtype=torch.int32)
    >>> sparse_prefill_fp8(torch.randn(2, 16, 512).bfloat16(), KVSource(pool, indptr, indices)).shape
    torch.Size([2, 16, 512])
"""

import narrowkv.runtime.toolchain  # first: it says how to get Triton
import narrowkv.sparse_fp8.indexer.torch_ops  # torch.ops.narrowkv.index_*
import narrowkv.sparse_fp8.torch_ops  # noqa: F401  # torch.ops.narrowkv.sparse_*
from narrowkv.sparse_fp8.api import sparse_decode, sparse_prefill, sparse_prefill_fp8
from narrowkv.sparse_fp8.binding import RowsFormat
from narrowkv.sparse_fp8.indexer import (
    IndexKeys,
    IndexKeysFormat,
    IndexLogitsPlan,
    IndexTopkPlan,
    append_index_keys,
    append_index_keys_reference,
    index_logits,
    index_logits_reference,
    index_topk,
    index_topk_reference,
    plan_index_logits,
    plan_index_topk,
)
from narrowkv.sparse_fp8.indices import compressed_topk, concat_csr, csr_from_topk, sliding_window
from narrowkv.sparse_fp8.latent import latent_decode, latent_decode_reference, plan_latent
from narrowkv.sparse_fp8.layouts import packed_page_stride
from narrowkv.sparse_fp8.operation import SparsePlan
from narrowkv.sparse_fp8.planner import ModeChoice, choose_mode, plan_sparse
from narrowkv.sparse_fp8.reference import (
    sparse_decode_reference,
    sparse_prefill_fp8_reference,
    sparse_prefill_reference,
)
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource

__all__ = [
    "DSV4Rows",
    "IndexKeys",
    "IndexKeysFormat",
    "IndexLogitsPlan",
    "IndexTopkPlan",
    "KVSource",
    "ModeChoice",
    "RowsFormat",
    "SparsePlan",
    "append_index_keys",
    "append_index_keys_reference",
    "choose_mode",
    "compressed_topk",
    "concat_csr",
    "csr_from_topk",
    "index_logits",
    "index_logits_reference",
    "index_topk",
    "index_topk_reference",
    "latent_decode",
    "latent_decode_reference",
    "packed_page_stride",
    "plan_index_logits",
    "plan_index_topk",
    "plan_latent",
    "plan_sparse",
    "sliding_window",
    "sparse_decode",
    "sparse_decode_reference",
    "sparse_prefill",
    "sparse_prefill_fp8",
    "sparse_prefill_fp8_reference",
    "sparse_prefill_reference",
]
