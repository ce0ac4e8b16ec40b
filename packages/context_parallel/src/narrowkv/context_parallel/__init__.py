"""Attention over sequences that are spread over ranks, on torch.distributed.

Example:
    >>> from narrowkv.context_parallel import ShardLayout
    >>> [ShardLayout(world=3, rank=r, interleave=16).local_lens(100) for r in range(3)]
    [36, 32, 32]
"""

import narrowkv.runtime.toolchain  # noqa: F401  # first: it says how to get Triton
from narrowkv.context_parallel.api import cp_paged_decode
from narrowkv.context_parallel.layout import ShardedTable, ShardLayout
from narrowkv.context_parallel.plan import CPDecodePlan, plan_cp_decode
from narrowkv.context_parallel.reference import cp_paged_decode_reference

__all__ = [
    "CPDecodePlan",
    "ShardLayout",
    "ShardedTable",
    "cp_paged_decode",
    "cp_paged_decode_reference",
    "plan_cp_decode",
]
