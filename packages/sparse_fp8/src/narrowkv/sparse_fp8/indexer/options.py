"""The keywords of the indexer's operations: one list for call, plan, reference and operator."""

from __future__ import annotations

from typing import TypedDict

import torch

from narrowkv.paged_cache import Rope


class IndexLogitsOptions(TypedDict, total=False):
    """Keywords of `index_logits`, `IndexLogitsPlan.run` and `index_logits_reference`.

    Attributes:
        starts, ends: int32 or int64 `[num_tokens]`, for keys without pages: token t scores the keys from
            `starts[t]` up to, and without, `ends[t]`.
        block_table: int32 or int64 `[batch, max_pages]`, for keys in pages: the page ids of each sequence.
        seq_lens: int32 or int64 `[batch]`: keys of each sequence, those of its q_len tokens included. Token
            j of a sequence scores its first `seq_lens - q_len + 1 + j` keys.
        num_columns: columns of the result over pages; default `max_pages * page_size`.
        out: where to write, fp32 `[num_tokens, num_columns]`, last dimension contiguous.
    """

    starts: torch.Tensor | None
    ends: torch.Tensor | None
    block_table: torch.Tensor | None
    seq_lens: torch.Tensor | None
    num_columns: int | None
    out: torch.Tensor | None


class IndexTopkOptions(TypedDict, total=False):
    """Keywords of `index_topk` and `IndexTopkPlan.run`.

    Attributes:
        starts, ends: int32 or int64 `[num_tokens]`: only columns from `starts[t]` (0 without it) up to, and
            without, `ends[t]` are read.
        seq_lens: int32 or int64 `[batch]`, instead of `starts` and `ends`: token j of q_len = `num_tokens /
            batch` of a sequence has its first `seq_lens - q_len + 1 + j` columns.
        block_table: int32 or int64 `[batch, max_pages]`: the result has rows of a pool instead of columns:
            column c is row `block_table[sequence, c // page_size] * page_size + c % page_size`.
        page_size: tokens of a page of `block_table`.
        slots: int32 or int64 `[num_columns]`, instead of `block_table`: column c is row `slots[c]`.
        out: where to write, int32 `[num_tokens, topk]`, last dimension contiguous.
    """

    starts: torch.Tensor | None
    ends: torch.Tensor | None
    seq_lens: torch.Tensor | None
    block_table: torch.Tensor | None
    page_size: int | None
    slots: torch.Tensor | None
    out: torch.Tensor | None


class IndexAppendOptions(TypedDict, total=False):
    """Keywords of `append_index_keys` and `append_index_keys_reference`.

    Attributes:
        rope: rotates the first channels by each token's position; a position out of range stands for the
            nearest inside. None for no RoPE.
        hadamard: also rotates all channels by the orthonormal Hadamard matrix, as DeepSeek-V3.2 does; its
            queries must be rotated, too (`narrowkv.quant.hadamard`).
        pow2_scales: rounds scales up to powers of two.
    """

    rope: Rope | None
    hadamard: bool
    pow2_scales: bool


LOGITS_DEFAULTS: IndexLogitsOptions = {
    "starts": None, "ends": None, "block_table": None, "seq_lens": None, "num_columns": None, "out": None
}  # fmt: skip
TOPK_DEFAULTS: IndexTopkOptions = {
    "starts": None, "ends": None, "seq_lens": None, "block_table": None, "page_size": None, "slots": None,
    "out": None,
}  # fmt: skip
APPEND_DEFAULTS: IndexAppendOptions = {"rope": None, "hadamard": False, "pow2_scales": False}
