"""From tensors to launches: scratch, pointers and constants of the pre-pass and of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from narrowkv.attn_prefill.sage.config import KeyOrder, SageConfig
from narrowkv.attn_prefill.sage.kernels import (
    ALIGN,
    Narrow,
    NarrowKeys,
    NarrowQuery,
    Outputs,
    Sequences,
    Smoothing,
    Statistics,
    Strided,
    _channel_statistics_kernel,
    _finish_statistics_kernel,
    _mean_scores_kernel,
    _quantise_keys_values_kernel,
    _quantise_tokens_kernel,
    _sage_attention_kernel,
)
from narrowkv.quant.formats import get_format
from narrowkv.quant.launch import LaunchOptions, launch
from narrowkv.quant.sage import TokenGroups

_ALIGN: int = ALIGN.value
_LOG2E = math.log2(math.e)
# The host's roundings are repeated one by one: no multiplication may melt into an addition.
# H200, b2 h32 d128, 16k tokens: Q at 16 warps 173 us, 8 warps 188, 4 warps 264; statistics of K and V at 2
# and 4 warps 138, 8 warps 147. At 4k K and V take 136 in all, 142 if the last part to arrive finishes the
# statistics; with statistics and blocks both at 16 warps 378, in one launch where blocks wait 351 to 410.
_STATISTICS = LaunchOptions(num_warps=4, num_stages=1, enable_fp_fusion=False)
_QUANTISE = LaunchOptions(num_warps=16, num_stages=1, enable_fp_fusion=False)
_MEAN_BLOCKS = 16  # blocks of Q whose means meet a tile of keys at once: the least rows of a dot


@dataclass(frozen=True)
class SageShape:
    """Sizes of a call.

    Attributes:
        batch: sequences.
        q_tokens, k_tokens: tokens of each sequence, or of all together when `ragged`.
        num_qo_heads, num_kv_heads, head_dim: heads.
        ragged: sequences differ in length.
    """

    batch: int
    q_tokens: int
    k_tokens: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    ragged: bool

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def q_sizes(self) -> tuple[int, ...]:
        """Shape of Q."""
        return self._sizes(self.q_tokens, self.num_qo_heads)

    @property
    def kv_sizes(self) -> tuple[int, ...]:
        """Shape of K and of V."""
        return self._sizes(self.k_tokens, self.num_kv_heads)

    def _sizes(self, tokens: int, heads: int) -> tuple[int, ...]:
        dense = () if self.ragged else (self.batch,)
        return (*dense, tokens, heads, self.head_dim)

    def rows(self, tokens: int) -> int:
        """Scratch rows of one head: every sequence in whole blocks."""
        if self.ragged:
            return (tokens // _ALIGN + self.batch) * _ALIGN
        return self.batch * -(-tokens // _ALIGN) * _ALIGN

    @property
    def block_b(self) -> int:
        """A power of two that holds the batch."""
        return max(2, 1 << (self.batch - 1).bit_length())


@dataclass(frozen=True, eq=False)
class QuantizedKV:
    """K and V as attention reads them, quantised once; made by `SagePlan.quantize_kv`.

    Sequences lie one after the other, each from a multiple of 128 rows on.

    Attributes:
        k: `[num_kv_heads, rows, head_dim]`, int4 `[..., head_dim / 2]`.
        k_descale: fp32 `[num_kv_heads, groups]`, or `[1]`.
        k_mean: fp32 `[batch, num_kv_heads, head_dim]` that was subtracted, or None.
        v: `[num_kv_heads, head_dim, rows]`, keys in `key_order`.
        v_descale: fp32 `[batch, num_kv_heads, head_dim]`.
        shape: sizes it was made for.
        qk_format, fp8: stored formats of K and of V.
        k_groups: which tokens share a descale.
        key_order: of V.
        cu_seqlens: where sequences begin, or None.
        k_source: K as it came, where Q's smoothing needs it.
    """

    k: torch.Tensor
    k_descale: torch.Tensor
    k_mean: torch.Tensor | None
    v: torch.Tensor
    v_descale: torch.Tensor
    shape: SageShape
    qk_format: str
    fp8: str
    k_groups: TokenGroups | None
    key_order: KeyOrder
    cu_seqlens: torch.Tensor | None
    k_source: torch.Tensor | None


def _sequences(starts: torch.Tensor | None, shape: SageShape, tokens: int) -> Sequences:
    return Sequences(starts, shape.batch, 0 if shape.ragged else tokens, tokens)


def _strided(x: torch.Tensor) -> Strided:
    return Strided(x, x.stride(0) if x.dim() == 4 else 0, x.stride(-3), x.stride(-2))


def _group_constants(prefix: str, groups: TokenGroups | None) -> dict[str, int]:
    span, count, run = (0, 1, 1) if groups is None else (groups.span, groups.groups, groups.run)
    return {f"{prefix}SPAN": span, f"{prefix}GROUPS": count, f"{prefix}RUN": run}


def _narrow(
    heads: int, rows: int, head_dim: int, format_name: str, groups: TokenGroups | None, device: torch.device
) -> tuple[Narrow, torch.Tensor]:
    """Empty scratch of Q or K as the pre-pass writes it, and as attention reads it."""
    fmt = get_format(format_name)
    stored = torch.empty(heads, rows, fmt.storage_bytes(head_dim), dtype=torch.uint8, device=device)
    sizes = (1,) if groups is None else (heads, rows // groups.span * groups.groups)
    descale = torch.empty(sizes, dtype=torch.float32, device=device)
    amax = torch.zeros(1, dtype=torch.int32, device=device) if groups is None else None
    if fmt.kind == "fp8":
        return Narrow(stored, descale, amax, rows), stored.view(fmt.storage_dtype)
    codes = stored.view(torch.int8)
    return Narrow(codes, descale, amax, rows), codes


def _launch_tokens(
    x: torch.Tensor, seqs: Sequences, smoothing: Smoothing, shape: SageShape, out: Narrow, format_name: str,
    groups: TokenGroups | None, smooth: str, sm_scale: float, *, measure: bool,
) -> None:  # fmt: skip
    launch(
        _quantise_tokens_kernel,
        (out.rows // _ALIGN, x.shape[-2]),
        (_strided(x), seqs, smoothing, out, sm_scale),
        {
            "RAGGED": shape.ragged,
            "SMOOTH": smooth,
            "WRITE_SHIFT": smoothing.shift is not None and not measure,
            "GQA_RATIO": shape.gqa_ratio,
            "FORMAT": format_name,
            "FORMAT_MAX": get_format(format_name).max_value,
            "MEASURE": measure,
            **_group_constants("", groups),
            "HEAD_DIM": shape.head_dim,
            "BLOCK_B": shape.block_b,
        },
        _QUANTISE,
    )


def _statistics(
    k: torch.Tensor, v: torch.Tensor, seqs: Sequences, shape: SageShape, v_format_max: float, *, smooth: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """K's means, if asked for, and V's descales of each channel, fp32 `[batch, heads, head_dim]`."""
    heads = shape.num_kv_heads
    # Enough parts to fill a GPU, none of them so short that its program does little.
    parts = min(16, 1 << max(-(-seqs.tokens // 256) - 1, 0).bit_length())

    def statistics(dtype: torch.dtype) -> Statistics:
        partial = torch.empty(shape.batch, heads, parts, shape.head_dim, dtype=dtype, device=k.device)
        result = torch.empty(shape.batch, heads, shape.head_dim, dtype=torch.float32, device=k.device)
        return Statistics(partial, result)

    v_stats = statistics(torch.float32)
    k_stats = statistics(torch.float64) if smooth else Statistics(None, None)
    items = shape.batch * (2 if smooth else 1)
    constants = {"RAGGED": shape.ragged, "SMOOTH": smooth, "PARTS": parts, "HEAD_DIM": shape.head_dim}
    launch(
        _channel_statistics_kernel,
        (parts, heads, items),
        (_strided(k), _strided(v), seqs, k_stats, v_stats),
        {**constants, "BLOCK": 32},
        _STATISTICS,
    )
    launch(
        _finish_statistics_kernel,
        (heads, items),
        (seqs, k_stats, v_stats),
        {**constants, "V_FORMAT_MAX": v_format_max},
        _STATISTICS,
    )
    return k_stats.result, v_stats.result


def quantise_keys_values(
    k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None, shape: SageShape, format_name: str,
    groups: TokenGroups | None, config: SageConfig, *, smooth: bool, keep_k: bool,
) -> QuantizedKV:  # fmt: skip
    """K and V in scratch: the channels' statistics, then the blocks, of both at once."""
    seqs = _sequences(starts, shape, shape.k_tokens)
    v_fmt = get_format(config.fp8)
    heads, head_dim, rows = shape.num_kv_heads, shape.head_dim, shape.rows(shape.k_tokens)
    k_mean, v_descale = _statistics(k, v, seqs, shape, v_fmt.max_value, smooth=smooth)
    smoothing = Smoothing(None, k_mean, None)
    k_out, k_stored = _narrow(heads, rows, head_dim, format_name, groups, k.device)
    v_stored = torch.empty(heads, head_dim, rows, dtype=torch.uint8, device=v.device)
    if groups is None:
        smoothed = "sequence" if smooth else "none"
        _launch_tokens(k, seqs, smoothing, shape, k_out, format_name, None, smoothed, 0.0, measure=True)
    launch(
        _quantise_keys_values_kernel,
        (rows // _ALIGN, heads, 2),
        (_strided(k), _strided(v), seqs, smoothing, v_descale, k_out, v_stored),
        {
            "RAGGED": shape.ragged,
            "SMOOTH": smooth,
            "FORMAT": format_name,
            "FORMAT_MAX": get_format(format_name).max_value,
            **_group_constants("", groups),
            "V_FORMAT": v_fmt.name,
            **_order_constants(config.key_order),
            "HEAD_DIM": head_dim,
            "BLOCK_B": shape.block_b,
        },
        _QUANTISE,
    )
    return QuantizedKV(
        k_stored, k_out.descale, k_mean, v_stored.view(v_fmt.storage_dtype), v_descale, shape, format_name,
        config.fp8, groups, config.key_order, starts, k if keep_k else None,
    )  # fmt: skip


def quantise_queries(
    q: torch.Tensor, starts: torch.Tensor | None, shape: SageShape, format_name: str,
    groups: TokenGroups | None, kv: QuantizedKV, *, smooth: bool, write_shift: bool, sm_scale: float,
) -> NarrowQuery:  # fmt: skip
    """Q in scratch, its descales, the scores of its means, and what smoothing took from lse."""
    seqs = _sequences(starts, shape, shape.q_tokens)
    heads, rows = shape.num_qo_heads, shape.rows(shape.q_tokens)
    empty = partial(torch.empty, dtype=torch.float32, device=q.device)
    mean = empty(heads, rows // _ALIGN, shape.head_dim) if smooth else None
    shift = empty(heads, rows) if write_shift else None
    smoothing = Smoothing(mean, kv.k_mean if write_shift else None, shift)
    out, stored = _narrow(heads, rows, shape.head_dim, format_name, groups, q.device)
    for measure in (True, False) if groups is None else (False,):
        _launch_tokens(
            q, seqs, smoothing, shape, out, format_name, groups, "block" if smooth else "none", sm_scale,
            measure=measure,
        )  # fmt: skip
    mean_scores = None
    if mean is not None and kv.k_source is not None:
        mean_scores = _mean_scores(mean, kv, seqs, shape, sm_scale)
    return NarrowQuery(stored, out.descale, mean_scores, shift, rows)


def _mean_scores(
    mean: torch.Tensor, kv: QuantizedKV, q_seqs: Sequences, shape: SageShape, sm_scale: float
) -> torch.Tensor:
    assert kv.k_source is not None
    q_blocks, k_rows = mean.shape[1], kv.k.shape[1]
    out = torch.empty(shape.num_qo_heads, q_blocks, k_rows, dtype=torch.float32, device=mean.device)
    blocks_of_one = -(-shape.q_tokens // _ALIGN)
    launch(
        _mean_scores_kernel,
        (k_rows // _ALIGN, -(-blocks_of_one // _MEAN_BLOCKS), shape.num_qo_heads),
        (
            _strided(kv.k_source), q_seqs, _sequences(kv.cu_seqlens, shape, shape.k_tokens),
            mean, out, q_blocks, k_rows, sm_scale * _LOG2E,
        ),
        {
            "RAGGED": shape.ragged,
            "GQA_RATIO": shape.gqa_ratio,
            "HEAD_DIM": shape.head_dim,
            "BLOCK_Q": _MEAN_BLOCKS,
            "BLOCK_B": shape.block_b,
        },
        LaunchOptions(num_warps=4, num_stages=1),
    )  # fmt: skip
    return out


def _order_constants(order: KeyOrder) -> dict[str, int]:
    return {"GATHER": order.gather, "LANES": order.lanes, "WIDTH": order.width}


def _descriptors(kv: QuantizedKV, config: SageConfig) -> tuple[Any, Any]:
    """Tensor descriptors of K and V, for targets that load by them; none where there are no keys."""
    if not config.tma or not kv.k.numel():
        return None, None
    from triton.tools.tensor_descriptor import TensorDescriptor

    blocks = [config.block_n, kv.k.shape[2]], [kv.v.shape[1], config.block_n]
    flat = (stored.view(-1, stored.shape[2]) for stored in (kv.k, kv.v))
    k, v = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), block)
        for x, block in zip(flat, blocks, strict=True)
    )
    return k, v


def launch_attention(
    query: NarrowQuery, kv: QuantizedKV, out: torch.Tensor, lse: torch.Tensor | None,
    starts: torch.Tensor | None, shape: SageShape, config: SageConfig,
    *, q_groups: TokenGroups | None, bottom_right: bool, window: tuple[int, int], sm_scale: float,
) -> None:  # fmt: skip
    """Attention over what the pre-pass stored."""
    tokens = query.rows if shape.ragged else shape.q_tokens
    tiles = -(-tokens // config.block_m)
    items = shape.num_qo_heads * (1 if shape.ragged else shape.batch)
    together = 1
    # Without a limit to the right tiles are of one length; where a head has many, its last are few of all.
    if window[1] >= 0 and 4 * tiles <= config.programs_together:
        together = min(-(-config.programs_together // max(tiles, 1)), max(items, 1))
    # Codes of int4 are read times 16 on both sides.
    codes = 1 / 256 if kv.qk_format == "int4" else 1.0
    strided = _strided(out)
    constants: dict[str, Any] = {
        "RAGGED": shape.ragged,
        "GQA_RATIO": shape.gqa_ratio,
        "HEAD_DIM": shape.head_dim,
        "FORMAT": kv.qk_format,
        **_group_constants("Q_", q_groups),
        **_group_constants("K_", kv.k_groups),
        "BOTTOM_RIGHT": bottom_right,
        "WINDOW_LEFT": window[0],
        "WINDOW_RIGHT": window[1],
        "SMOOTH_Q": query.mean_scores is not None,
        "SHIFT_LSE": query.shift is not None,
        "WRITE_LSE": lse is not None,
        **_order_constants(config.key_order),
        "LOG2_P": math.log2(get_format(config.fp8).max_value),
        "TWO_LEVEL": config.two_level,
        "TMA": config.tma and kv.k.numel() > 0,
        "REREAD_Q": config.reread_q,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_B": shape.block_b,
    }
    launch(
        _sage_attention_kernel,
        (items * tiles,),
        (
            query, NarrowKeys(kv.k, kv.v, kv.k_descale, kv.v_descale, kv.k.shape[1]), *_descriptors(kv,
            config), Outputs(out, strided.batch, strided.token, strided.head, lse),
            _sequences(starts, shape, shape.q_tokens), _sequences(kv.cu_seqlens, shape, shape.k_tokens),
            sm_scale * _LOG2E * codes, shape.num_qo_heads, items, tiles, together,
        ),
        constants,
        config.options,
    )  # fmt: skip
