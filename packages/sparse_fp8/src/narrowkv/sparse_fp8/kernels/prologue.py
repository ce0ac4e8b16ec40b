"""The prologue of a program: which heads of which token it attends, and which rows of both sources."""

import triton
import triton.language as tl

from narrowkv.runtime.attention.xcds import program_on_its_xcd
from narrowkv.sparse_fp8.kernels.rows import bounded, first_unseen, rows_of_token


@triton.jit
def heads_of_program(CALL: tl.constexpr, BLOCK_H: tl.constexpr):
    """A program's token and its first head; programs run fastest over the heads of a token."""
    HEAD_BLOCKS: tl.constexpr = (CALL.NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    number = program_on_its_xcd(tl.program_id(0), tl.num_programs(0), CALL.ORDER)
    return number // HEAD_BLOCKS, (number % HEAD_BLOCKS) * BLOCK_H


@triton.jit
def places_of_split(
    prefix_begin, prefix_end, extend_begin, extend_end, split, num_splits, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The places in each of two lists that one split attends to: its share of the tiles of both."""
    prefix_count, extend_count = prefix_end - prefix_begin, extend_end - extend_begin
    prefix_tiles = tl.cdiv(prefix_count, BLOCK_K)
    tiles = prefix_tiles + tl.cdiv(extend_count, BLOCK_K)
    begin = (split * tiles) // num_splits
    end = ((split + 1) * tiles) // num_splits
    return (
        prefix_begin + tl.minimum(begin, prefix_tiles) * BLOCK_K,
        prefix_begin + tl.minimum(tl.minimum(end, prefix_tiles) * BLOCK_K, prefix_count),
        extend_begin + tl.maximum(begin - prefix_tiles, 0) * BLOCK_K,
        extend_begin + tl.minimum(tl.maximum(end - prefix_tiles, 0) * BLOCK_K, extend_count),
    )


@triton.jit
def rows_of_program(
    prefix, prefix_lists, extend, extend_lists, token, heads, split, num_tokens, num_splits,
    prefix_rows, prefix_nnz, extend_rows, extend_nnz,
    PREFIX: tl.constexpr, EXTEND: tl.constexpr, SPLIT: tl.constexpr, PAGES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What a program attends to: a tuple for each source, and what `first_unseen` says of its `heads`.

    A tuple holds the rows, the lists that name them and the places [begin, end) in these, which are a part of
    the token's where its rows are split. A source that is absent (PREFIX or EXTEND None) has no places.
    PAGES: see `rows_of_token`.
    """
    prefix_begin, prefix_end, extend_begin, extend_end = 0, 0, 0, 0
    if PREFIX is not None:
        prefix = bounded(prefix, prefix_rows)
        prefix_lists, prefix_begin, prefix_end = rows_of_token(
            prefix_lists, prefix_nnz, prefix_rows, token, num_tokens, PAGES
        )
    if EXTEND is not None:
        extend = bounded(extend, extend_rows)
        extend_lists, extend_begin, extend_end = rows_of_token(
            extend_lists, extend_nnz, extend_rows, token, num_tokens, None
        )
    unseen = first_unseen(heads, prefix_end, PAGES)
    if SPLIT:
        prefix_begin, prefix_end, extend_begin, extend_end = places_of_split(
            prefix_begin, prefix_end, extend_begin, extend_end, split, num_splits, BLOCK_K
        )
    return (
        (prefix, prefix_lists, prefix_begin, prefix_end),
        (extend, extend_lists, extend_begin, extend_end),
        unseen,
    )
