"""DeepSeek's indexer: index keys, logits of tokens over them, and the rows that each token attends to."""

from narrowkv.sparse_fp8.indexer.append import append_index_keys
from narrowkv.sparse_fp8.indexer.keys import IndexKeys, IndexKeysFormat
from narrowkv.sparse_fp8.indexer.logits import IndexLogitsPlan, index_logits, plan_index_logits
from narrowkv.sparse_fp8.indexer.reference import (
    append_index_keys_reference,
    index_logits_reference,
    index_topk_reference,
)
from narrowkv.sparse_fp8.indexer.topk import IndexTopkPlan, index_topk, plan_index_topk

__all__ = [
    "IndexKeys",
    "IndexKeysFormat",
    "IndexLogitsPlan",
    "IndexTopkPlan",
    "append_index_keys",
    "append_index_keys_reference",
    "index_logits",
    "index_logits_reference",
    "index_topk",
    "index_topk_reference",
    "plan_index_logits",
    "plan_index_topk",
]
