"""Paged KV caches in any layout and format, page tables, a page pool, and the fused append."""

import narrowkv.runtime.toolchain  # noqa: F401  # first: it says how to get Triton
from narrowkv.paged_cache.append import append
from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.layouts import CacheFormat, KVStrides
from narrowkv.paged_cache.page_table import PageTable
from narrowkv.paged_cache.pool import CopiesPending, PageCopy, PagePool, PoolExhausted, apply_copies
from narrowkv.paged_cache.reference import append_reference, apply_rope_reference
from narrowkv.paged_cache.rope import Rope
from narrowkv.paged_cache.torch_ops import traced_append  # noqa: F401  # torch.ops.narrowkv.append
from narrowkv.paged_cache.tree_mask import pack_tree_mask, tree_mask_from_custom_mask

__all__ = [
    "CacheFormat",
    "CopiesPending",
    "KVStrides",
    "PageCopy",
    "PagePool",
    "PageTable",
    "PagedKVCache",
    "PoolExhausted",
    "Rope",
    "append",
    "append_reference",
    "apply_copies",
    "apply_rope_reference",
    "pack_tree_mask",
    "tree_mask_from_custom_mask",
]
