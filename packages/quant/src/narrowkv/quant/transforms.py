"""Transformations that make K and V easier to quantise and do not change attention in exact arithmetic.

- A static offset per (head, channel) is subtracted from K. Every logit of a query then moves by the same
  amount, `sm_scale * q.offset`, which softmax ignores. `lse` moves by it too: `lse_correction` is what to add
  back.
- An orthonormal block-Hadamard rotation of Q and K along head_dim spreads outlier channels, and keeps q.k.
- V is divided by a static scale per (head, channel), and the output multiplied by it: channels of one size
  share a narrow scale better. In a model both factors can be folded into the projections, at no cost.

The offset belongs to K after RoPE, as it is stored. It is static, so pages can still be shared between
sequences. A soft cap is not invariant to the shift, and a sink is compared with the shifted logits: with an
offset, the correction has to be added to the logits before a soft cap, or subtracted from the sinks.

Example:
    >>> import torch
    >>> k = torch.tensor([[[12.0, 1.0]], [[12.0, -1.0]]])  # [tokens 2, kv heads 1, dim 2]
    >>> offset = KOffset.from_keys(k)
    >>> offset.subtract(k)[:, 0]
    tensor([[ 0.,  1.],
            [ 0., -1.]])
    >>> lse_correction(torch.tensor([[[2.0, 5.0]]]), offset, sm_scale=0.5)
    tensor([[12.]])
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from narrowkv.runtime.errors import check_dtype, check_finite_float, check_positive_int, check_shape

__all__ = ["KOffset", "KeyTransform", "VScale", "hadamard", "lse_correction"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _as_fp32_or_fp64(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _sample(name: str, x: torch.Tensor) -> torch.Tensor:
    """Sample keys or values as `[tokens, num_kv_heads, head_dim]`, at least one token."""
    check_dtype(name, x, _FLOATS)
    if x.dim() < 3 or math.prod(x.shape[:-2]) == 0:
        raise ValueError(
            f"{name} must have shape [..., tokens, num_kv_heads, head_dim] with tokens, got {list(x.shape)}"
        )
    return x.reshape(-1, *x.shape[-2:])


def _like(name: str, x: torch.Tensor, whose: str, static: torch.Tensor) -> torch.Tensor:
    """`x` widened, which must have the heads and channels of the static offset or scale."""
    check_dtype(name, x, _FLOATS)
    if x.dim() < 2 or x.shape[-2:] != static.shape:
        wanted = ", ".join(str(size) for size in static.shape)
        raise ValueError(f"{name} must have shape [..., {wanted}] like the {whose}, got {list(x.shape)}")
    return _as_fp32_or_fp64(x)


def _heads_per_kv_head(name: str, x: torch.Tensor, static: torch.Tensor) -> int:
    """Query heads of `x` for each KV head of the static offset or scale."""
    num_kv_heads, head_dim = static.shape
    check_dtype(name, x, _FLOATS)
    check_shape(name, x, ("num_tokens", "num_qo_heads", head_dim))
    if num_kv_heads == 0 or x.shape[1] % num_kv_heads:
        raise ValueError(
            f"{name} must have a multiple of {num_kv_heads} heads (num_kv_heads), got {x.shape[1]}"
        )
    return x.shape[1] // num_kv_heads


@dataclass(frozen=True, eq=False)
class KOffset:
    """A static offset of K per KV head and channel.

    Attributes:
        offset: fp32 `[num_kv_heads, head_dim]`.
    """

    offset: torch.Tensor

    def __post_init__(self) -> None:
        check_dtype("offset", self.offset, torch.float32)
        check_shape("offset", self.offset, ("num_kv_heads", "head_dim"))

    @classmethod
    def from_keys(cls, k: torch.Tensor) -> KOffset:
        """The mean over tokens of sample keys.

        Args:
            k: floating point `[..., num_kv_heads, head_dim]` with at least one token.

        Raises:
            TypeError: `k` is not a floating-point tensor.
            ValueError: `k` has fewer than three dimensions, or no tokens.
        """
        return cls(_sample("k", k).mean(0, dtype=torch.float64).float())

    def subtract(self, k: torch.Tensor) -> torch.Tensor:
        """K minus the offset, ready to be quantised.

        Args:
            k: floating point `[..., num_kv_heads, head_dim]`.

        Returns:
            fp32 (fp64 for an fp64 `k`) of that shape.

        Raises:
            TypeError: `k` is not a floating-point tensor.
            ValueError: heads or head_dim are not the offset's.
        """
        return _like("k", k, "offset", self.offset) - self.offset

    def add(self, k: torch.Tensor) -> torch.Tensor:
        """Undoes `subtract`: K with the offset put back. Shapes, dtypes and errors as there."""
        return _like("k", k, "offset", self.offset) + self.offset


@dataclass(frozen=True, eq=False)
class VScale:
    """A static scale of V per KV head and channel.

    Attributes:
        scale: fp32 `[num_kv_heads, head_dim]`, positive.
    """

    scale: torch.Tensor

    def __post_init__(self) -> None:
        check_dtype("scale", self.scale, torch.float32)
        check_shape("scale", self.scale, ("num_kv_heads", "head_dim"))

    @classmethod
    def from_values(cls, v: torch.Tensor) -> VScale:
        """The root mean square over tokens of sample values; 1 for a channel that is all zero.

        Args:
            v: floating point `[..., num_kv_heads, head_dim]` with at least one token.

        Raises:
            TypeError: `v` is not a floating-point tensor.
            ValueError: `v` has fewer than three dimensions, or no tokens.
        """
        rms = _sample("v", v).double().square().mean(0).sqrt().float()
        return cls(torch.where(rms > 0, rms, torch.ones_like(rms)))

    def divide(self, v: torch.Tensor) -> torch.Tensor:
        """V over the scale, ready to be quantised.

        Args:
            v: floating point `[..., num_kv_heads, head_dim]`.

        Returns:
            fp32 (fp64 for an fp64 `v`) of that shape.

        Raises:
            TypeError: `v` is not a floating-point tensor.
            ValueError: heads or head_dim are not the scale's.
        """
        return _like("v", v, "scale", self.scale) / self.scale

    def multiply(self, o: torch.Tensor) -> torch.Tensor:
        """The output of an attention over divided values, as it would have been over V itself.

        Args:
            o: floating point `[num_tokens, num_qo_heads, head_dim]`; num_qo_heads is a multiple of
                num_kv_heads.

        Returns:
            fp32 (fp64 for an fp64 `o`) of that shape.

        Raises:
            TypeError: `o` is not a floating-point tensor.
            ValueError: the shapes do not fit.
        """
        ratio = _heads_per_kv_head("o", o, self.scale)
        return _as_fp32_or_fp64(o) * self.scale.repeat_interleave(ratio, 0)


@dataclass(frozen=True, eq=False)
class KeyTransform:
    """What keys go through on their way into a cache, and queries on their way to stored keys.

    A stored key is `hadamard((k - offset) / balance)` and a query becomes `hadamard(q * balance)`, so that in
    exact arithmetic logits differ from those of the keys by `sm_scale * q.offset`, the same for all keys.
    `PagedKVCache.key_transform` makes `append` and attention do this inside their kernels.

    Attributes:
        offset: fp32 `[num_kv_heads, head_dim]`, contiguous; None for none.
        balance: fp32, of the same shape, contiguous, positive; None for none.
        rotated: whether keys and queries are rotated by `hadamard`, with its largest block.
    """

    offset: torch.Tensor | None = None
    balance: torch.Tensor | None = None
    rotated: bool = True

    def __post_init__(self) -> None:
        for name, value in (("offset", self.offset), ("balance", self.balance)):
            if value is not None:
                check_dtype(name, value, torch.float32)
                check_shape(name, value, ("num_kv_heads", "head_dim"))
                if not value.is_contiguous():
                    raise ValueError(f"{name} must be contiguous, got strides {value.stride()}")
        if self.offset is not None and self.balance is not None:
            check_shape("balance", self.balance, tuple(self.offset.shape))

    def butterflies(self, head_dim: int) -> int:
        """Log2 of the channels that are rotated together, 0 for no rotation."""
        return (head_dim & -head_dim).bit_length() - 1 if self.rotated else 0

    def keys(self, k: torch.Tensor) -> torch.Tensor:
        """Keys as they are stored.

        Args:
            k: floating point `[..., num_kv_heads, head_dim]`, after RoPE.

        Returns:
            fp32 (fp64 for an fp64 `k`) of that shape.

        Raises:
            TypeError: not a floating-point tensor.
            ValueError: heads or head_dim are not the transformation's.
        """
        check_dtype("k", k, _FLOATS)
        moved = _as_fp32_or_fp64(k) if self.offset is None else KOffset(self.offset).subtract(k)
        if self.balance is not None:
            moved = VScale(self.balance).divide(moved)
        return hadamard(moved) if self.rotated else moved

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Queries for stored keys.

        Args:
            q: floating point `[num_tokens, num_qo_heads, head_dim]`, after RoPE; num_qo_heads is a multiple
                of num_kv_heads.

        Returns:
            fp32 (fp64 for an fp64 `q`) of that shape.

        Raises:
            TypeError: not a floating-point tensor.
            ValueError: the shapes do not fit.
        """
        check_dtype("q", q, _FLOATS)
        balanced = _as_fp32_or_fp64(q) if self.balance is None else VScale(self.balance).multiply(q)
        return hadamard(balanced) if self.rotated else balanced


def lse_correction(q: torch.Tensor, offset: KOffset | torch.Tensor, sm_scale: float) -> torch.Tensor:
    """The number to add to an `lse` that was computed on keys minus their offset: `sm_scale * q.offset`.

    Args:
        q: floating point `[num_tokens, num_qo_heads, head_dim]`, as the attention saw it.
        offset: a `KOffset`, or fp32 `[num_kv_heads, head_dim]`; num_qo_heads is a multiple of num_kv_heads.
        sm_scale: the softmax scale of that attention.

    Returns:
        fp32 (fp64 for an fp64 `q`) `[num_tokens, num_qo_heads]`.

    Raises:
        TypeError: `q` is not a floating-point tensor, `offset` is not fp32, or `sm_scale` is not a number.
        ValueError: the shapes do not fit, or `sm_scale` is not finite.
    """
    mu = offset.offset if isinstance(offset, KOffset) else KOffset(offset).offset
    ratio = _heads_per_kv_head("q", q, mu)
    widened = _as_fp32_or_fp64(q)
    grouped = widened.reshape(q.shape[0], mu.shape[0], ratio, q.shape[2])  # [tokens, kv heads, ratio, dim]
    dots = torch.einsum("thrd,hd->thr", grouped, mu.to(widened.dtype))
    return dots.flatten(1) * check_finite_float("sm_scale", sm_scale)


def hadamard(x: torch.Tensor, block: int | None = None) -> torch.Tensor:
    """Rotates each run of `block` channels by the orthonormal Hadamard matrix; its own inverse.

    The matrix is in Sylvester order. Applying it to both q and k leaves q.k unchanged. It is computed by the
    fast Walsh-Hadamard transform in fp32.

    Args:
        x: floating point `[..., head_dim]`, any strides.
        block: channels per rotation: a power of two that divides head_dim. None takes the largest.

    Returns:
        The shape and dtype of `x` (rounded once, at the end); computed in fp64 for an fp64 `x`.

    Raises:
        TypeError: `x` is not a floating-point tensor, or `block` is not an int.
        ValueError: `block` is not a power of two, or does not divide head_dim.

    Example:
        >>> hadamard(torch.tensor([4.0, 0.0, 0.0, 0.0]))
        tensor([2., 2., 2., 2.])
    """
    check_dtype("x", x, _FLOATS)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have shape [..., head_dim] with head_dim at least 1, got {list(x.shape)}")
    head_dim = x.shape[-1]
    size = head_dim & -head_dim if block is None else check_positive_int("block", block)
    if size & (size - 1) or head_dim % size:
        raise ValueError(f"block must be a power of two that divides head_dim {head_dim}, got {size}")
    y = _as_fp32_or_fp64(x).reshape(*x.shape[:-1], head_dim // size, size)
    width = 1
    while width < size:
        pairs = y.reshape(*y.shape[:-1], size // (2 * width), 2, width)
        low, high = pairs.unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        width *= 2
    # A product, which every device rounds alike; kernels multiply by the same number.
    return (y * (1.0 / math.sqrt(size))).flatten(-2).to(x.dtype)
