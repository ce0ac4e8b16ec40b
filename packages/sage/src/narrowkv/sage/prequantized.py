"""Sage attention over Q, K and V that are already quantised."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowkv.quant.formats import get_format
from narrowkv.quant.sage import TokenGroups
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_no_grad,
    check_positive_int,
    check_same_device,
    check_shape,
)
from narrowkv.runtime.launch.tracing import traceable
from narrowkv.runtime.scales import check_scales
from narrowkv.sage.api import block_sizes_of, plan_sage
from narrowkv.sage.checks import LAYOUTS
from narrowkv.sage.config import KeyOrder
from narrowkv.sage.shapes import ROW_ALIGNMENT, QuantizedKV, SageShape

__all__ = ["SageOperands", "key_positions", "sage_attention_quantized"]


@dataclass(frozen=True, eq=False)
class SageOperands:
    """Quantised tensors of a dense batch, with `x ~ stored * descale`.

    Attributes:
        q: `[batch, q_len, num_qo_heads, head_dim]` (or "BHSD"), int8 or FP8; or int4 `[..., head_dim / 2]`
            uint8, two codes a byte, the even channel in the low bits; head_dim 64 or 128.
        k: `[batch, k_len, num_kv_heads, head_dim]`, like q.
        v: FP8 `[batch, k_len, num_kv_heads, v_head_dim]`, v_head_dim at most head_dim; or column-major.
        q_descale, k_descale: fp32 `[batch, groups, heads]` as `narrowkv.quant.sage.quantize_per_token_group`
            gives them, `[1]` for "per_tensor".
        v_descale: fp32 `[batch, num_kv_heads, v_head_dim]`.
        q_len, k_len: tokens that count where tensors are padded to a physical length; None for all.
        layout: "BSHD" or "BHSD", of q, k and v and of the output.
        column_major_v: v is `[batch, num_kv_heads, v_head_dim, k_len]`, keys contiguous, in either layout.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    q_len: int | None = None
    k_len: int | None = None
    layout: str = "BSHD"
    column_major_v: bool = False


@traceable
def sage_attention_quantized(
    operands: SageOperands,
    *,
    qk_dtype: str = "int8",
    q_granularity: str = "per_thread",
    k_granularity: str = "per_thread",
    causal: str | None = None,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    return_lse: bool = False,
    block_mask: torch.Tensor | None = None,
    block_sizes: tuple[int, int] | None = None,
    validate: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`sage_attention` without its quantisation. Codes are copied once, into the order that the kernel reads.

    Means that the caller subtracted are not added back. The mean of K only changes lse; the mean of Q must
    not be subtracted.

    Args:
        operands: the tensors and how they lie.
        qk_dtype: "int8", "int4" or "fp8": what q and k hold.
        q_granularity, k_granularity, causal, window, sm_scale: as for `sage_attention`.
        out_dtype: bf16 or fp16.
        return_lse: also return the log-sum-exp.
        block_mask, block_sizes: as for `sage_attention`.
        validate: None reads the values of the descales, which waits for the device, unless these tensors were
            read before and have not changed since; True reads them in any case; False does not.

    Returns:
        `o` `[batch, q_len, num_qo_heads, v_head_dim]` (or "BHSD"), or `(o, lse)`.

    Raises:
        TypeError, ValueError: naming the tensor, what was expected and what came.

    Example:
        >>> from narrowkv.quant.quantize import quantize_per_channel
        >>> from narrowkv.quant.sage import quantize_per_token_group, token_groups
        >>> x = torch.randn(1, 130, 2, 64)
        >>> q, q_descale = quantize_per_token_group(x, token_groups("q", "per_thread"), "int8")
        >>> k, k_descale = quantize_per_token_group(x, token_groups("k", "per_thread"), "int8")
        >>> v, v_descale = quantize_per_channel(x[0], "fp8_e4m3fn")
        >>> operands = SageOperands(q, k, v[None], q_descale, k_descale, v_descale[None])
        >>> sage_attention_quantized(operands, causal="bottom_right").shape
        torch.Size([1, 130, 2, 64])
    """
    check_dtype("out_dtype", torch.empty(0, dtype=out_dtype), (torch.bfloat16, torch.float16))
    q, k, v, head_dim = _operands(operands, qk_dtype)
    batch, q_len, heads, kv_heads, k_len = q.shape[0], q.shape[1], q.shape[2], k.shape[2], k.shape[1]
    v_head_dim = v.shape[3]
    plan = plan_sage(
        SageShape(batch, q_len, k_len, heads, kv_heads, head_dim, ragged=False), qk_dtype=qk_dtype,
        q_granularity=q_granularity, k_granularity=k_granularity, causal=causal, window=window,
        smooth_k=False, sm_scale=sm_scale, block_sizes=block_sizes_of(block_mask, block_sizes),
        device=q.device,
    )  # fmt: skip
    block_mask = plan.check_blocks(block_mask, plan.shape)
    for name, x, wanted in (("q", q, plan.qk_format), ("k", k, plan.qk_format), ("v", v, plan.config.fp8)):
        check_dtype(name, x, (torch.uint8 if wanted == "int4" else get_format(wanted).storage_dtype,))
    k_descale = _of_groups("k_descale", operands.k_descale, plan.k_groups, k)
    q_descale = _of_groups("q_descale", operands.q_descale, plan.q_groups, q)
    v_descale = _float32("v_descale", operands.v_descale, (batch, kv_heads, v_head_dim))
    check_scales({"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}, validate)
    keys = QuantizedKV(
        _rows(k), _descales(k_descale, plan.k_groups, k), None,
        _columns(v, plan.config.key_order, head_dim), _padded(v_descale, head_dim, 1.0),
        plan.shape, plan.qk_format, plan.config.fp8, plan.k_groups, plan.config.key_order, None, None,
    )  # fmt: skip
    codes = {"q_codes": _rows(q), "q_descale": _descales(q_descale, plan.q_groups, q)}
    o = torch.empty(batch, q_len, heads, head_dim, dtype=out_dtype, device=q.device)
    lse = torch.empty(o.shape[:-1], dtype=torch.float32, device=q.device) if return_lse else None
    if o.numel():
        plan.attend_codes(codes, keys, o, lse, block_mask)
    o = o[..., :v_head_dim]
    if operands.layout == "BHSD":
        o, lse = o.transpose(1, 2), None if lse is None else lse.transpose(1, 2)
    return o if lse is None else (o, lse)


def _operands(given: SageOperands, qk_dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """q, k and v as BSHD without padding, and head_dim; the kernel's checks come later."""
    check_choice("layout", given.layout, LAYOUTS)
    tensors = {"q": given.q, "k": given.k, "v": given.v}
    descales = {name: getattr(given, f"{name}_descale") for name in tensors}
    check_no_grad(**tensors)
    check_same_device(**tensors, **{f"{name}_descale": x for name, x in descales.items()})
    for name, x in tensors.items():
        check_shape(name, x, ("batch", "tokens", "heads", "channels"))
    q, k, v = (x if given.layout == "BSHD" else x.transpose(1, 2) for x in tensors.values())
    if given.column_major_v:
        v = given.v.permute(0, 3, 1, 2)
    q = q[:, : _length("q_len", given.q_len, q.shape[1])]
    k_len = _length("k_len", given.k_len, k.shape[1])
    k, v = k[:, :k_len], v[:, :k_len]
    head_dim = q.shape[3] * (2 if qk_dtype == "int4" else 1)
    check_shape("k", k, (q.shape[0], k_len, "heads", q.shape[3]))
    if v.shape[:3] != k.shape[:3] or not 0 < v.shape[3] <= head_dim:
        raise ValueError(
            f"v must have k's batch, tokens and heads {list(k.shape[:3])} and at most {head_dim} channels, "
            f"got {list(v.shape)}"
        )
    return q, k, v, head_dim


def _length(name: str, length: int | None, physical: int) -> int:
    if length is None:
        return physical
    if check_positive_int(name, length) > physical:
        raise ValueError(f"{name} must be at most the {physical} tokens that there are, got {length}")
    return length


def _float32(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A float32 tensor of this shape.

    Raises:
        TypeError, ValueError: it is not.
    """
    check_dtype(name, x, torch.float32)
    check_shape(name, x, shape)
    return x


def _whole(tokens: int) -> int:
    return -(-tokens // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[heads, rows, width]`: every sequence in whole blocks."""
    batch, tokens, heads, width = x.shape
    stored = torch.zeros(heads, batch, _whole(tokens), width, dtype=x.dtype, device=x.device)
    _bytes(stored)[:, :, :tokens] = _bytes(x).permute(2, 0, 1, 3)
    stored = stored.view(torch.int8) if x.dtype == torch.uint8 else stored
    return stored.flatten(1, 2)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory in uint8, which every device copies."""
    return x.view(torch.uint8)


def key_positions(order: KeyOrder, tokens: int) -> torch.Tensor:
    """Scratch rows of V's first `tokens` keys, int64 `[tokens]`."""
    key = torch.arange(tokens)
    span = order.lanes * order.width
    within = key % (order.gather * span)
    part, lane, column = within // span, within % span // order.width, within % order.width
    return key - within + (lane * order.gather + part) * order.width + column


def _columns(v: torch.Tensor, order: KeyOrder, head_dim: int) -> torch.Tensor:
    """`[heads, head_dim, rows]`, keys in `order`, channels that V lacks 0."""
    batch, tokens, heads, channels = v.shape
    stored = torch.zeros(heads, head_dim, batch, _whole(tokens), dtype=v.dtype, device=v.device)
    at = key_positions(order, tokens).to(v.device)
    _bytes(stored)[:, :channels].index_copy_(3, at, _bytes(v).permute(2, 3, 0, 1))
    return stored.flatten(2, 3)


def _padded(x: torch.Tensor, channels: int, value: float) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, channels - x.shape[-1]), value=value).contiguous()


def _of_groups(name: str, descale: torch.Tensor, groups: TokenGroups | None, x: torch.Tensor) -> torch.Tensor:
    """The descales of groups that have tokens, `[batch, groups, heads]`; `[1]` for a whole tensor."""
    batch, tokens, heads = x.shape[:3]
    if groups is None:
        return _float32(name, descale, (1,))
    given = -(-tokens // groups.span) * groups.groups
    if isinstance(descale, torch.Tensor) and descale.dim() == 3 and descale.shape[1] > given:
        descale = descale[:, :given]  # those of a padded length
    return _float32(name, descale, (batch, given, heads))


def _descales(descale: torch.Tensor, groups: TokenGroups | None, x: torch.Tensor) -> torch.Tensor:
    """`[heads, groups of all sequences]`, those of rows without tokens 1."""
    if groups is None:
        return descale
    kept = _whole(x.shape[1]) // groups.span * groups.groups
    return (
        torch.nn.functional.pad(descale.permute(2, 0, 1), (0, kept - descale.shape[1]), value=1.0)
        .flatten(1)
        .contiguous()
    )
