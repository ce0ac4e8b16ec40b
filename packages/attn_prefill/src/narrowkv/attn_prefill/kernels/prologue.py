"""How kernels of attn_prefill begin: the structs of their arguments, put together with the sizes of a call.

Sizes that serving changes are arguments of their own, see `RUNTIME_SIZES`; the cache is one flat struct, see
`narrowkv.attn_prefill.kernels.arguments`.
"""

import triton

from narrowkv.attn_prefill.kernels.arguments import NewCache, Queries, Scratch
from narrowkv.paged_cache.kernels.append import DescalePointers
from narrowkv.paged_cache.kernels.pages import Descale, KVPointers, Table


@triton.jit
def cache_to_read(cache):
    """`KVPointers` of K and of V, then `Descale` of K and of V."""
    return (
        KVPointers(cache.k, cache.k_page, cache.k_token, cache.k_head, cache.k_outer),
        KVPointers(cache.v, cache.v_page, cache.v_token, cache.v_head, cache.v_outer),
        Descale(cache.k_descale, cache.k_descale_major, cache.k_descale_token, cache.k_descale_head),
        Descale(cache.v_descale, cache.v_descale_major, cache.v_descale_token, cache.v_descale_head),
    )


@triton.jit
def cache_to_write(to, table):
    """`NewCache` of a `Destination`."""
    return NewCache(
        KVPointers(to.k, to.k_page, to.k_token, to.k_head, to.k_outer),
        KVPointers(to.v, to.v_page, to.v_token, to.v_head, to.v_outer),
        DescalePointers(to.k_number, to.k_descale, to.k_descale_page, to.k_descale_slot, to.k_descale_head),
        DescalePointers(to.v_number, to.v_descale, to.v_descale_page, to.v_descale_slot, to.v_descale_head),
        table.max_pages,
        table.num_pages,
    )


@triton.jit
def queries_of_call(q, num_tokens, max_q_len):
    """`Queries` with their sizes."""
    return Queries(q.ptr, q.token, q.head, q.starts, num_tokens, max_q_len, q.descale)


@triton.jit
def table_of_call(table, table_row, num_ids, max_pages):
    """`Table` with its sizes; a ragged one brings its indptr, a block table has `table_row` for it."""
    if table.row is None:
        row = table_row
    else:
        row = table.row
    return Table(
        table.page_ids, row, table.lens, num_ids, table.num_pages, max_pages,
        table.column, table.row_step, table.lens_step,
    )  # fmt: skip


@triton.jit
def scratch_of_call(scratch, max_keys, key_blocks):
    """`Scratch` with its bounds."""
    return Scratch(
        scratch.k, scratch.v, scratch.k_factor, scratch.v_factor, scratch.k_unit, scratch.v_unit,
        scratch.unusual, scratch.schedule, scratch.rows, max_keys, key_blocks,
    )  # fmt: skip
