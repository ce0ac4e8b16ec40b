"""Attention over sequences that are spread over ranks, on torch.distributed.

Example:
    >>> from narrowkv.context_parallel import ShardLayout
    >>> [ShardLayout(world=3, rank=r, interleave=16).local_lens(100) for r in range(3)]
    [36, 32, 32]
"""

import narrowkv.runtime.toolchain  # noqa: F401  # first: it says how to get Triton
from narrowkv.context_parallel.api import cp_paged_decode
from narrowkv.context_parallel.chunk import cp_chunk_attention
from narrowkv.context_parallel.exchange import merge_over_ranks
from narrowkv.context_parallel.layout import ShardedTable, ShardLayout
from narrowkv.context_parallel.plan import CPDecodePlan, plan_cp_decode
from narrowkv.context_parallel.prefill import cp_prefill
from narrowkv.context_parallel.reference import cp_paged_decode_reference
from narrowkv.context_parallel.ring import ring_sage_attention
from narrowkv.context_parallel.shares import PrefillShares
from narrowkv.context_parallel.sparse import cp_sparse_attention, localize_source

__all__ = [
    "CPDecodePlan",
    "PrefillShares",
    "ShardLayout",
    "ShardedTable",
    "cp_chunk_attention",
    "cp_paged_decode",
    "cp_paged_decode_reference",
    "cp_prefill",
    "cp_sparse_attention",
    "localize_source",
    "merge_over_ranks",
    "plan_cp_decode",
    "ring_sage_attention",
]
