"""The keywords of the operations: one list for the call, the plan, the reference and the operator."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import torch

from narrowkv.paged_cache import PageTable, Rope
from narrowkv.runtime.operation import Operation
from narrowkv.sparse_fp8.rows import DSV4Rows


class SparseRunOptions(TypedDict, total=False):
    """Keywords of `SparsePlan.run`, and of all operations of sparse attention.

    Attributes:
        attn_sink: `[num_qo_heads]` fp32, a logit with value 0 in the denominator; -inf for none.
        out: where to write, `[num_tokens, num_qo_heads, 512]`, bf16, fp16 or fp32.
        lse: where to write the log-sum-exp, fp32 `[num_tokens, num_qo_heads]`. An operation returns it only
            with `return_lse`.
        validate: also read index lists and scales on the host and refuse wrong values, which waits for the
            device. Otherwise an index out of range is skipped, and an `indptr` that is no CSR names other
            indices, at most all of them for each token; nothing is read or written outside the tensors.
    """

    attn_sink: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    validate: bool


class SparseOptions(SparseRunOptions, total=False):
    """Keywords of `sparse_prefill` and `sparse_prefill_reference`.

    Attributes:
        sm_scale: softmax scale, default `512 ** -0.5`.
        return_lse: also return the log-sum-exp.

    The other attributes are those of `SparseRunOptions`.
    """

    sm_scale: float | None
    return_lse: bool


class SparseRowsOptions(SparseOptions, total=False):
    """Keywords of operations whose query may be `DSV4Rows`.

    Attributes:
        num_qo_heads: heads of a `DSV4Rows` query. None takes its rows over the tokens; it must be given where
            the last packed584 page of the query is not full.

    The other attributes are those of `SparseOptions`.
    """

    num_qo_heads: int | None


class SparseFp8Options(SparseRowsOptions, total=False):
    """Keywords of `sparse_prefill_fp8` and `sparse_prefill_fp8_reference`.

    Attributes:
        mode: "fused" widens rows on the chip and allocates only the results; QK over NoPE multiplies
            FP8 by FP8 when q is `DSV4Rows` and the target can, else 16-bit q by widened rows; a call that
            fills a Hopper GPU expands such a q to bf16 first, which is exact and faster. "prepass" expands
            FP8 rows once to 16-bit scratch (all rows of a source, or only the named ones when those are
            fewer) and runs `sparse_prefill`. "auto" picks; `choose_mode` says what and why.

    The other attributes are those of `SparseRowsOptions`.
    """

    mode: str


class SparseDecodeOptions(SparseRowsOptions, total=False):
    """Keywords of `sparse_decode` and `sparse_decode_reference`.

    Attributes:
        num_splits: programs that share a token's rows, up to 65535; None chooses as many as fill the chip, or
            4 with `batch_invariant`. Splits take whole tiles in order.
        batch_invariant: a token's result has the same bits alone and in a batch of any size. Every call then
            uses the portable kernel with one number of splits: few tokens fill less of the chip, and every
            call writes and reads partial results of 2 KiB a head and split.

    The other attributes are those of `SparseRowsOptions`.
    """

    num_splits: int | None
    batch_invariant: bool


class SparseArguments(NamedTuple):
    """The arguments of a call, with the values of options that are left out or that it does not have."""

    q: torch.Tensor | DSV4Rows
    prefix: Any  # a `KVSource` or None; of a plan over a page table a `PagedSource`
    extend: Any = None
    attn_sink: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    validate: bool = False
    return_lse: bool = False
    # From here on: what a plan is made for.
    sm_scale: float | None = None
    num_qo_heads: int | None = None
    mode: str = "auto"
    num_splits: int | None = None
    batch_invariant: bool = False


PLAIN_VALUES = slice(SparseArguments._fields.index("sm_scale"), None)
OPERATIONS = {
    name: Operation(name, options, SparseArguments)
    for name, options in (
        ("run", SparseRunOptions), ("sparse_prefill", SparseOptions),
        ("sparse_prefill_fp8", SparseFp8Options), ("sparse_decode", SparseDecodeOptions),
    )
}  # fmt: skip


class LatentOptions(TypedDict, total=False):
    """Keywords of `latent_decode` and `latent_decode_reference`.

    Attributes:
        sm_scale: softmax scale; default `head_dim ** -0.5`. Models give that of the heads before absorption.
        sinks: fp32 `[num_qo_heads]`, a logit a head with value 0 in the denominator; -inf for none.
        num_splits: programs that share a sequence's rows; None chooses as many as fill the chip, or 4 with
            `batch_invariant`.
        batch_invariant: a sequence's result has the same bits alone and in a batch of any size.
        out: where to write, `[batch * q_len, num_qo_heads, 512]`, bf16, fp16 or fp32.
        lse: where to write the log-sum-exp, fp32 `[batch * q_len, num_qo_heads]`; returned only with
            `return_lse`.
        return_lse: also return the log-sum-exp.
        validate: also read the page table and scales on the host and refuse wrong values, which waits for the
            device. Otherwise lengths are brought into what the table holds and page ids into the rows: wrong
            values make wrong results of their sequences, and nothing outside a tensor is read or written.
    """

    sm_scale: float | None
    sinks: torch.Tensor | None
    num_splits: int | None
    batch_invariant: bool
    out: torch.Tensor | None
    lse: torch.Tensor | None
    return_lse: bool
    validate: bool


class LatentArguments(NamedTuple):
    """The arguments of a `latent_decode`, with the values of those of `LatentOptions` that are left out."""

    q: torch.Tensor
    rows: torch.Tensor | DSV4Rows
    page_table: PageTable
    sinks: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    return_lse: bool = False
    validate: bool = False
    # From here on: what a plan is made for.
    sm_scale: float | None = None
    num_splits: int | None = None
    batch_invariant: bool = False


LATENT_PLAIN_VALUES = slice(LatentArguments._fields.index("sm_scale"), None)


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
        block_size: columns of a block, a power of two up to 64. Without `blocks` the result has blocks, not
            columns: those with the largest logits; that of the token's last column counts as infinite.
        blocks: int32 or int64 `[num_tokens, num_blocks]`, the blocks that columns are chosen from, ascending
            and each once, as chosen with `block_size` before; a number that no block has is skipped.
        out: where to write, int32 `[num_tokens, topk]`, last dimension contiguous.
    """

    starts: torch.Tensor | None
    ends: torch.Tensor | None
    seq_lens: torch.Tensor | None
    block_table: torch.Tensor | None
    page_size: int | None
    slots: torch.Tensor | None
    block_size: int | None
    blocks: torch.Tensor | None
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


LOGITS_DEFAULTS = dict.fromkeys(IndexLogitsOptions.__annotations__)
TOPK_DEFAULTS = dict.fromkeys(IndexTopkOptions.__annotations__)
APPEND_DEFAULTS: IndexAppendOptions = {"rope": None, "hadamard": False, "pow2_scales": False}
