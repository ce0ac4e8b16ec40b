"""DeepSeek's indexer: index keys, logits of tokens over them, and the rows that each token attends to."""

from narrowkv.sparse_fp8.indexer.keys import IndexKeys, IndexKeysFormat
from narrowkv.sparse_fp8.indexer.logits import IndexLogitsPlan, index_logits, plan_index_logits
from narrowkv.sparse_fp8.indexer.reference import index_logits_reference, index_topk_reference

__all__ = [
    "IndexKeys",
    "IndexKeysFormat",
    "IndexLogitsPlan",
    "index_logits",
    "index_logits_reference",
    "index_topk_reference",
    "plan_index_logits",
]
