"""Calibration: static offsets and scales of a model's K and V per channel, found from a sample.

For each attention layer:

- K loses its mean per head and channel (`KOffset`): softmax does not see a shift of all logits of a query.
- K is divided by `sqrt(rms K / rms Q)` per head and channel, and Q multiplied by it, so that an error of one
  size in K costs the logits alike in every channel. The balance is scaled so that K has a root mean square of
  1, which puts E4M3 scales in the middle of their range.
- Q and K are rotated by a Hadamard matrix, which spreads what is left of outliers over the channels.
- V is divided by its root mean square per head and channel (`VScale`), and the output multiplied by it.

The logits and the output stay what they were, in exact arithmetic. Nothing depends on the position or the
sequence, so pages can be shared. K, Q and V are those that attention sees, so after RoPE.

Example:
    >>> import torch
    >>> q, k, v = torch.randn(64, 4, 8), torch.randn(64, 2, 8) + 3.0, torch.randn(64, 2, 8)
    >>> calibration = calibrate([(q, k, v)])
    >>> layer = calibration.layers[0]
    >>> wide = k.repeat_interleave(2, 1)
    >>> before = torch.einsum("qhd,khd->hqk", q, wide - layer.offset.repeat_interleave(2, 0))
    >>> after = torch.einsum("qhd,khd->hqk", layer.queries(q), layer.keys(k).repeat_interleave(2, 1))
    >>> torch.allclose(before, after, atol=1e-3)
    True
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy
import torch

from narrowkv.runtime.errors import check_dtype, check_shape

from .transforms import KeyTransform, KOffset, VScale

__all__ = ["Calibration", "LayerCalibration", "calibrate"]

_VERSION = 1
_TENSORS = ("offset", "k_balance", "v_balance")


@dataclass(frozen=True, eq=False)
class LayerCalibration:
    """What one attention layer's Q, K, V and output go through around a narrow cache.

    Attributes:
        offset: fp32 `[num_kv_heads, head_dim]`, subtracted from K; zeros for none.
        k_balance: fp32, of the same shape, positive: K is divided by it and Q multiplied.
        v_balance: fp32, of the same shape, positive: V is divided by it and the output multiplied.
        rotated: whether Q and K are then rotated by `hadamard`.
    """

    offset: torch.Tensor
    k_balance: torch.Tensor
    v_balance: torch.Tensor
    rotated: bool = True

    def __post_init__(self) -> None:
        check_shape("offset", self.offset, ("num_kv_heads", "head_dim"))
        for name in _TENSORS:
            check_dtype(name, getattr(self, name), (torch.float32,))
            check_shape(name, getattr(self, name), tuple(self.offset.shape))

    @property
    def shifts_logits(self) -> bool:
        """Whether logits differ by an amount for each query, which soft caps, sinks and an lse would see."""
        return bool(self.offset.any())

    def to(self, device: torch.device | str) -> LayerCalibration:
        """The same on another device."""
        offset, k_balance, v_balance = (getattr(self, name).to(device) for name in _TENSORS)
        return LayerCalibration(offset, k_balance, v_balance, self.rotated)

    def key_transform(self) -> KeyTransform:
        """What `PagedKVCache.key_transform` takes, so that kernels do what `keys` and `queries` do.

        Looks at the values, which waits for the device: zeros as offset and ones as balance are left out.
        """
        return KeyTransform(
            self.offset.contiguous() if self.shifts_logits else None,
            None if bool((self.k_balance == 1).all()) else self.k_balance.contiguous(),
            self.rotated,
        )

    def keys(self, k: torch.Tensor) -> torch.Tensor:
        """K in the form in which it is stored.

        Args:
            k: floating point `[..., num_kv_heads, head_dim]`, after RoPE.

        Returns:
            fp32 of that shape; `append` takes it.

        Raises:
            TypeError: not a floating-point tensor.
            ValueError: heads or head_dim are not the calibration's.
        """
        return KeyTransform(self.offset, self.k_balance, self.rotated).keys(k)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Q for attention over stored keys.

        Args:
            q: floating point `[num_tokens, num_qo_heads, head_dim]`, after RoPE; num_qo_heads is a multiple
                of num_kv_heads.

        Returns:
            The shape and dtype of `q`, rounded once.

        Raises:
            TypeError: not a floating-point tensor.
            ValueError: the shapes do not fit.
        """
        return KeyTransform(None, self.k_balance, self.rotated).queries(q).to(q.dtype)

    def values(self, v: torch.Tensor) -> torch.Tensor:
        """V in the form in which it is stored: fp32; shapes and errors as for `keys`."""
        return VScale(self.v_balance).divide(v)

    def output(self, o: torch.Tensor) -> torch.Tensor:
        """The output of attention over stored values, as over V; shapes and errors as for `queries`."""
        return VScale(self.v_balance).multiply(o).to(o.dtype)


@dataclass(frozen=True, eq=False)
class Calibration:
    """The calibration of a model, a `LayerCalibration` for each layer that has keys and values, in order."""

    layers: tuple[LayerCalibration, ...]

    def to(self, device: torch.device | str) -> Calibration:
        """The same on another device."""
        return Calibration(tuple(layer.to(device) for layer in self.layers))

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a NumPy archive (.npz); `12 * num_kv_heads * head_dim` bytes a layer.

        Args:
            path: the file, which should end with .npz.

        Raises:
            OSError: it cannot be written.
        """
        arrays: dict[str, Any] = {
            "version": numpy.array(_VERSION),
            "num_layers": numpy.array(len(self.layers)),
        }
        for index, layer in enumerate(self.layers):
            for name in _TENSORS:
                arrays[f"{index}.{name}"] = getattr(layer, name).cpu().numpy()
            arrays[f"{index}.rotated"] = numpy.array(layer.rotated)
        with open(path, "wb") as file:  # noqa: PTH123  # savez would add a suffix to a path
            numpy.savez(file, **arrays)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Calibration:
        """Reads what `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not a calibration, or of another version.
        """
        try:
            with numpy.load(path, allow_pickle=False) as file:
                version = int(file["version"])
                if version != _VERSION:
                    raise ValueError(f"version {version} where {_VERSION} is known")
                return cls(tuple(_read_layer(file, index) for index in range(int(file["num_layers"]))))
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(
                f"{path} must be a calibration that Calibration.save wrote, got {error}: calibrate again"
            ) from None


def _read_layer(file: Any, index: int) -> LayerCalibration:
    offset, k_balance, v_balance = (torch.from_numpy(file[f"{index}.{name}"]) for name in _TENSORS)
    return LayerCalibration(offset, k_balance, v_balance, bool(file[f"{index}.rotated"]))


def calibrate(
    samples: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    *,
    offset: bool = True,
    balance_k: bool = True,
    balance_v: bool = True,
    rotate: bool = True,
) -> Calibration:
    """Finds the offsets and balances of a model's layers from a sample of their Q, K and V.

    A thousand tokens of ordinary text are enough. They should not be the text that accuracy is measured on.

    Args:
        samples: for each layer `(q, k, v)`, floating point `[tokens, num_qo_heads, head_dim]` and twice
            `[tokens, num_kv_heads, head_dim]`, as attention sees them, so after RoPE.
        offset: whether K loses its mean.
        balance_k: whether K is divided by `sqrt(rms K / rms Q)`, Q multiplied.
        balance_v: whether V is divided by its root mean square, the output multiplied.
        rotate: whether Q and K are rotated.

    Returns:
        The calibration, on the device of the samples.

    Raises:
        TypeError: not floating-point tensors.
        ValueError: the shapes do not fit, or a sample has no tokens or holds NaN or Inf.
    """
    layers = []
    for index, (q, k, v) in enumerate(samples):
        check_shape("q", q, ("tokens", "num_qo_heads", "head_dim"))
        mean = KOffset.from_keys(k).offset  # checks k
        check_shape("v", v, tuple(k.shape))
        if not all(bool(x.isfinite().all()) for x in (q, k, v)):
            raise ValueError(f"the sample of layer {index} must be finite, got NaN or Inf")
        mu = mean if offset else torch.zeros_like(mean)
        k_balance = _key_balance(q, k.float() - mu) if balance_k else torch.ones_like(mu)
        v_balance = VScale.from_values(v).scale if balance_v else torch.ones_like(mu)
        layers.append(LayerCalibration(mu, k_balance, v_balance, rotate))
    return Calibration(tuple(layers))


def _key_balance(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`sqrt(rms K / rms Q)` `[num_kv_heads, head_dim]`, scaled so that each head of K / balance has rms 1."""
    heads, head_dim = k.shape[1:]
    if q.shape[1] % heads or q.shape[2] != head_dim:
        raise ValueError(
            f"q must have a multiple of {heads} heads and head_dim {head_dim} as k has, got {list(q.shape)}"
        )
    q_rms = _channel_rms(q.reshape(q.shape[0], heads, -1, head_dim).transpose(1, 2).flatten(0, 1))
    k_rms = _channel_rms(k)
    balance = (k_rms / q_rms).sqrt()
    return (balance * (k_rms / balance).square().mean(1, keepdim=True).sqrt()).float()


def _channel_rms(x: torch.Tensor) -> torch.Tensor:
    """The root mean square of each head and channel, at least a thousandth of the head's, and above zero.

    So a channel that the sample hardly uses makes no balance huge or zero.
    """
    rms = x.double().square().mean(0).sqrt()
    return rms.clamp(min=1e-3 * rms.square().mean(1, keepdim=True).sqrt() + 1e-30)
