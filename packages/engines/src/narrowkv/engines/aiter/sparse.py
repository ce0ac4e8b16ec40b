"""AITER's sparse attention of DeepSeek-V4: its names, parameters and results over `narrowkv.sparse_fp8`."""

from __future__ import annotations

from typing import Any

import torch

from narrowkv.engines.aiter.signatures import as_aiter
from narrowkv.engines.aiter.tensors import fp8_format_of, refuse
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.sparse_fp8 import DSV4Rows, KVSource, sparse_decode, sparse_prefill, sparse_prefill_fp8

__all__ = [
    "pa_decode_sparse",
    "pa_prefill_sparse",
    "pa_sparse_prefill_fp8_opus",
    "pa_sparse_prefill_opus",
    "pa_sparse_prefill_opus_fp8",
    "pa_sparse_prefill_opus_fp8_fused",
]

_SPLIT = (
    "q_nope q_rope q_scale unified_kv_nope unified_kv_rope unified_kv_scale kv_nope kv_rope kv_scale "
    "kv_indices_prefix kv_indptr_prefix kv_indices_extend kv_indptr_extend attn_sink softmax_scale"
)


def _sources(call: Any, prefix: Any, extend: Any) -> tuple[KVSource, KVSource | None]:
    """Both sources of a prefill; without rows of this forward there is one."""
    first = KVSource(prefix, call.kv_indptr_prefix, call.kv_indices_prefix)
    if extend is None:
        return first, None
    return first, KVSource(extend, call.kv_indptr_extend, call.kv_indices_extend)


@as_aiter(
    "q unified_kv kv_indices_prefix kv_indptr_prefix kv kv_indices_extend kv_indptr_extend attn_sink "
    "softmax_scale",
    out=None, inv_rope_positions=None, inv_rope_freqs=None, out_scale=None,
)  # fmt: skip
def pa_sparse_prefill_opus(call: Any) -> Any:
    """DeepSeek-V4's sparse attention over 16-bit rows of a pool and of this forward.

    Args:
        call: AITER's arguments: `q` `[tokens, num_qo_heads, 512]`, rows `[rows, 512]` in its dtype, a CSR for
            each source, and `attn_sink` `[num_qo_heads]` fp32.

    Returns:
        `[tokens, num_qo_heads, 512]`.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
        UnsupportedError: for a fused inverse rotation and a quantised output.
    """
    refuse("pa_sparse_prefill_opus", call, "inv_rope_positions", "inv_rope_freqs", "out_scale")
    return sparse_prefill(
        call.q, *_sources(call, call.unified_kv, call.kv), attn_sink=call.attn_sink,
        sm_scale=call.softmax_scale, out=call.out,
    )  # fmt: skip


@as_aiter(
    "q unified_kv kv_indices_prefix kv_indptr_prefix kv kv_indices_extend kv_indptr_extend attn_sink "
    "softmax_scale",
    has_invalid=None,
)
def pa_prefill_sparse(call: Any) -> Any:
    """`pa_sparse_prefill_opus` with AITER's Triton signature.

    Args:
        call: AITER's arguments; `kv` and its lists may be None. An index of -1 is skipped whatever
            `has_invalid` says.

    Returns:
        `[tokens, num_qo_heads, 512]`.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
    """
    return sparse_prefill(
        call.q, *_sources(call, call.unified_kv, call.kv), attn_sink=call.attn_sink,
        sm_scale=call.softmax_scale,
    )  # fmt: skip


def _packed_rows(nope: torch.Tensor, rope: torch.Tensor) -> DSV4Rows:
    """Rows of 512 bytes with a scale for each 32 columns; leading dimensions are rows."""
    name = fp8_format_of(nope)
    bytes_of_rows = nope.view(torch.uint8).flatten(0, -2)
    return DSV4Rows.row512(bytes_of_rows, rope.flatten(0, -2), scale_group=32, format=name)


@as_aiter(
    "q_nope q_rope unified_kv_nope unified_kv_rope kv_indices_prefix kv_indptr_prefix kv_nope kv_rope "
    "kv_indices_extend kv_indptr_extend attn_sink softmax_scale",
    out=None,
)
def pa_sparse_prefill_fp8_opus(call: Any) -> Any:
    """DeepSeek-V4's sparse attention over FP8 rows with their scales inside, as in AITER's main branch.

    Args:
        call: AITER's arguments. `*_nope` are FP8 `[..., 512]`: 448 columns, 14 E8M0 bytes, one for each 32
            columns, and padding; `*_rope` bf16 `[..., 64]`.

    Returns:
        bf16 `[tokens, num_qo_heads, 512]`.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
    """
    rows = _packed_rows(call.unified_kv_nope, call.unified_kv_rope)
    return sparse_prefill_fp8(
        _packed_rows(call.q_nope, call.q_rope),
        *_sources(call, rows, _packed_rows(call.kv_nope, call.kv_rope)),
        attn_sink=call.attn_sink, sm_scale=call.softmax_scale, out=call.out,
        num_qo_heads=call.q_nope.shape[1],
    )  # fmt: skip


def _split_prefill(call: Any, mode: str) -> Any:
    query = (x.flatten(0, -2) for x in (call.q_nope, call.q_rope, call.q_scale))
    prefix = DSV4Rows.split(call.unified_kv_nope, call.unified_kv_rope, call.unified_kv_scale)
    extend = DSV4Rows.split(call.kv_nope, call.kv_rope, call.kv_scale)
    return sparse_prefill_fp8(
        DSV4Rows.split(*query), *_sources(call, prefix, extend), attn_sink=call.attn_sink,
        sm_scale=call.softmax_scale, mode=mode, out=call.out, num_qo_heads=call.q_nope.shape[1],
    )  # fmt: skip


@as_aiter(_SPLIT, out=None)
def pa_sparse_prefill_opus_fp8(call: Any) -> Any:
    """DeepSeek-V4's sparse attention over split FP8 rows, expanded to bf16 first (AITER's pull request 3583).

    Args:
        call: AITER's arguments. `*_nope` are FP8 `[..., 448]`, `*_rope` bf16 `[..., 64]`, `*_scale` fp32
            powers of two `[..., 7]`.

    Returns:
        bf16 `[tokens, num_qo_heads, 512]`.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
    """
    return _split_prefill(call, "prepass")


@as_aiter(_SPLIT, out=None)
def pa_sparse_prefill_opus_fp8_fused(call: Any) -> Any:
    """`pa_sparse_prefill_opus_fp8` in one kernel without a bf16 copy of the rows.

    Args:
        call: as for `pa_sparse_prefill_opus_fp8`.

    Returns:
        bf16 `[tokens, num_qo_heads, 512]`.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
    """
    return _split_prefill(call, "fused")


def _pool(pool: torch.Tensor, scales: torch.Tensor | None, name: str) -> torch.Tensor | DSV4Rows:
    """The rows of `pa_decode_sparse`: a pool of rows, or pages of `packed584` or of 16-bit rows."""
    if pool.dim() == 3:
        if scales is not None:
            raise ValueError(f"kv_scales must be None for pages, got a tensor beside {name} of 3 dimensions")
        if pool.dtype == torch.uint8:
            return DSV4Rows.packed584(pool, page_size=pool.shape[1])
        if pool.stride(0) != pool.shape[1] * pool.stride(1):
            raise UnsupportedError(
                f"{name} of 16-bit rows must have adjacent pages, got strides {tuple(pool.stride())}"
            )
        return pool.view(-1, pool.shape[2])
    if scales is None:
        return pool
    return DSV4Rows.split(pool, None, scales, format=fp8_format_of(pool))


@as_aiter(
    "q unified_kv kv_indices kv_indptr attn_sink softmax_scale",
    keywords={"extra_cache": None, "extra_indices": None, "extra_indptr": None},
    kv_scales=None, block_h=None, kv_splits=None, has_invalid=True, skip_reduce=False, USE_EXP2=None,
)  # fmt: skip
def pa_decode_sparse(call: Any) -> Any:
    """Sparse decode: few tokens, each over its own list of rows, shared by several programs.

    Args:
        call: AITER's arguments. `unified_kv` is `[rows, 512]` in the dtype of q; with `kv_scales` (fp32
            `[rows, 8]`) FP8, uint8 standing for the device's E4M3; or pages `[pages, page_size, 584]` uint8
            (`packed584`) or `[pages, page_size, 512]` in 16 bits. `extra_cache` is a second source of either
            kind. `kv_splits` is the number of splits; `block_h`, `has_invalid` and `USE_EXP2` tune AITER's
            kernels and change nothing here.

    Returns:
        `[tokens, num_qo_heads, 512]` in the dtype of q.

    Raises:
        TypeError, ValueError: for tensors that do not belong together.
        UnsupportedError: for partial results that are not merged.
    """
    refuse("pa_decode_sparse", call, "skip_reduce")
    prefix = KVSource(_pool(call.unified_kv, call.kv_scales, "unified_kv"), call.kv_indptr, call.kv_indices)
    extend = None
    if call.extra_cache is not None:
        rows = _pool(call.extra_cache, None, "extra_cache")
        extend = KVSource(rows, call.extra_indptr, call.extra_indices)
    return sparse_decode(
        call.q, prefix, extend, attn_sink=call.attn_sink, sm_scale=call.softmax_scale,
        num_splits=call.kv_splits,
    )  # fmt: skip
