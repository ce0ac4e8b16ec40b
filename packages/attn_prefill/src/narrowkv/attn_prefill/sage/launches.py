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
    Strided,
    _channel_statistics_kernel,
    _finish_statistics_kernel,
    _mean_scores_kernel,
    _quantise_tokens_kernel,
    _quantise_values_kernel,
    _sage_attention_kernel,
)
from narrowkv.quant.formats import get_format
from narrowkv.quant.launch import LaunchOptions, launch
from narrowkv.quant.sage import TokenGroups

_ALIGN: int = ALIGN.value
_LOG2E = math.log2(math.e)
# The host's roundings are repeated one by one: no multiplication may melt into an addition.
# H100, b2 h32 d128 16k: rows at 16 warps 174 us, 8 warps 192 us, where a copy of as many bytes takes 166 us;
# statistics at 4 warps 110 us, 8 warps 113 us, 16 warps 128 us.
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


def _statistics(
    x: torch.Tensor, seqs: Sequences, shape: SageShape, statistic: str, format_max: float = 1.0
) -> torch.Tensor:
    """Means ("sum") or descales ("amax") of each channel over a sequence, fp32 `[batch, heads, head_dim]`."""
    heads = x.shape[-2]
    dtype = torch.float64 if statistic == "sum" else torch.float32
    # Enough parts to fill a GPU, none of them so short that its program does little.
    chunks = min(16, 1 << max(-(-seqs.tokens // 256) - 1, 0).bit_length())
    parts = torch.empty(shape.batch, chunks, heads, shape.head_dim, dtype=dtype, device=x.device)
    result = torch.empty(shape.batch, heads, shape.head_dim, dtype=torch.float32, device=x.device)
    constants = {
        "STATISTIC": statistic,
        "RAGGED": shape.ragged,
        "CHUNKS": chunks,
        "HEAD_DIM": shape.head_dim,
    }
    launch(
        _channel_statistics_kernel,
        (chunks, heads, shape.batch),
        (_strided(x), seqs, parts),
        {**constants, "BLOCK": 32},
        _STATISTICS,
    )
    launch(
        _finish_statistics_kernel,
        (heads, shape.batch),
        (seqs, parts, result),
        {**constants, "FORMAT_MAX": format_max},
        _STATISTICS,
    )
    return result


def _quantise_tokens(
    x: torch.Tensor, seqs: Sequences, smoothing: Smoothing, shape: SageShape, format_name: str,
    groups: TokenGroups | None, smooth: str, sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    fmt = get_format(format_name)
    heads, rows = x.shape[-2], shape.rows(seqs.tokens)
    width = fmt.storage_bytes(shape.head_dim)
    stored = torch.empty(heads, rows, width, dtype=torch.uint8, device=x.device)
    sizes = (1,) if groups is None else (heads, rows // groups.span * groups.groups)
    descale = torch.empty(sizes, dtype=torch.float32, device=x.device)
    amax = torch.zeros(1, dtype=torch.int32, device=x.device) if groups is None else None
    codes = stored if fmt.kind == "fp8" else stored.view(torch.int8)
    for step in ("measure", "quantise") if groups is None else ("quantise",):
        launch(
            _quantise_tokens_kernel,
            (rows // _ALIGN, heads),
            (_strided(x), seqs, smoothing, Narrow(codes, descale, amax, rows), sm_scale),
            {
                "RAGGED": shape.ragged,
                "SMOOTH": smooth,
                "WRITE_SHIFT": smoothing.shift is not None,
                "GQA_RATIO": shape.gqa_ratio,
                "FORMAT": format_name,
                "FORMAT_MAX": fmt.max_value,
                "STEP": step,
                **_group_constants("", groups),
                "HEAD_DIM": shape.head_dim,
                "BLOCK_B": shape.block_b,
            },
            _QUANTISE,
        )
    return stored.view(fmt.storage_dtype) if fmt.kind == "fp8" else codes, descale


def quantise_keys(
    k: torch.Tensor, starts: torch.Tensor | None, shape: SageShape, format_name: str,
    groups: TokenGroups | None, *, smooth: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """K in scratch, its descales, and the mean that was subtracted from it."""
    seqs = _sequences(starts, shape, shape.k_tokens)
    mean = _statistics(k, seqs, shape, "sum") if smooth else None
    stored, descale = _quantise_tokens(
        k,
        seqs,
        Smoothing(None, mean, None),
        shape,
        format_name,
        groups,
        "sequence" if smooth else "none",
        0.0,
    )
    return stored, descale, mean


def quantise_values(
    v: torch.Tensor, starts: torch.Tensor | None, shape: SageShape, config: SageConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """V in scratch and its descales."""
    seqs = _sequences(starts, shape, shape.k_tokens)
    fmt = get_format(config.fp8)
    heads, rows = v.shape[-2], shape.rows(shape.k_tokens)
    stored = torch.empty(heads, shape.head_dim, rows, dtype=torch.uint8, device=v.device)
    descale = _statistics(v, seqs, shape, "amax", fmt.max_value)
    launch(
        _quantise_values_kernel,
        (rows // _ALIGN, heads),
        (_strided(v), seqs, descale, stored, rows),
        {
            "RAGGED": shape.ragged,
            "FORMAT": fmt.name,
            **_order_constants(config.key_order),
            "HEAD_DIM": shape.head_dim,
            "BLOCK_B": shape.block_b,
        },
        _QUANTISE,
    )
    return stored.view(fmt.storage_dtype), descale


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
    stored, descale = _quantise_tokens(
        q, seqs, smoothing, shape, format_name, groups, "block" if smooth else "none", sm_scale
    )
    mean_scores = None
    if mean is not None and kv.k_source is not None:
        mean_scores = _mean_scores(mean, kv, seqs, shape, sm_scale)
    return NarrowQuery(stored, descale, mean_scores, shift, rows)


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
    grid = (-(-tokens // config.block_m), shape.num_qo_heads, 1 if shape.ragged else shape.batch)
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
        grid,
        (
            query, NarrowKeys(kv.k, kv.v, kv.k_descale, kv.v_descale, kv.k.shape[1]), *_descriptors(kv,
            config), Outputs(out, strided.batch, strided.token, strided.head, lse),
            _sequences(starts, shape, shape.q_tokens), _sequences(kv.cu_seqlens, shape, shape.k_tokens),
            sm_scale * _LOG2E * codes,
        ),
        constants,
        config.options,
    )  # fmt: skip
