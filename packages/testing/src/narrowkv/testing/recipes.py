"""Ways to store K and V: formats, and what is done to K and V first; those that `accuracy` compares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowkv.paged_cache import CacheFormat
from narrowkv.paged_cache.convert import quantise_tokens
from narrowkv.paged_cache.descales import CacheSide
from narrowkv.quant import (
    Calibration,
    calibrate,
    decode,
    dequantize_per_group,
    dequantize_per_tensor,
    get_format,
    nvfp4_global_descale,
    quantize_per_group,
    quantize_per_tensor,
)
from narrowkv.runtime.errors import check_choice

__all__ = ["RECIPES", "REFERENCE", "Recipe", "StoredSide", "find_recipes"]

_SCALE_BITS = {"fp32": 32, "e8m0": 8, "e4m3": 8, "none": 0}


@dataclass(frozen=True)
class StoredSide:
    """How K or V is stored.

    Attributes:
        format: "bf16", an FP8 format, or "fp4_e2m1".
        scale: how a scale is stored: "none", "fp32", "e8m0" or "e4m3".
        group: channels per scale; 0 for one per position and head, -1 for one per tensor.
        exponent: of E8M0 scales: "mse" or "floor".
    """

    format: str = "bf16"
    scale: str = "none"
    group: int = 0
    exponent: str = "mse"

    @property
    def in_cache(self) -> bool:
        """Whether `NarrowCache` and the kernels have it."""
        per_32 = (self.scale, self.group, self.exponent) == ("e8m0", 32, "mse")
        return self.format == "bf16" or self.group == 0 or per_32

    def bits(self, head_dim: int) -> float:
        """Bits of an element, with its share of the scale."""
        per_scale = head_dim if self.group == 0 else self.group
        return get_format(self.format).bits + (_SCALE_BITS[self.scale] / per_scale if self.group >= 0 else 0)

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """What the cache gives back for keys or values.

        Args:
            x: fp32 `[tokens, num_kv_heads, head_dim]`.

        Returns:
            fp32 of that shape, from the bytes that `append` writes but for a scale per tensor and for E4M3
            scales per group.
        """
        if self.format == "bf16":
            return x.bfloat16().float()
        if self.group < 0:
            return dequantize_per_tensor(*quantize_per_tensor(x, self.format), format=self.format)
        if self.scale == "e4m3" and self.group:
            overall = nvfp4_global_descale(x)
            packed = quantize_per_group(x, self.group, scale="e4m3", global_descale=overall)
            return dequantize_per_group(*packed, self.group, global_descale=overall)
        dtypes = {"fp32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}
        dim, kind = x.shape[-1], "token_head_group" if self.group else "token_head"
        like = torch.empty(dim // (self.group or dim), dtype=dtypes[self.scale])
        stored, scales = quantise_tokens(x, CacheSide("k", like, self.format, like, kind, dim), self.exponent)
        assert scales is not None
        if get_format(self.format).kind == "fp4":
            groups = scales if self.group else scales[..., None]
            return dequantize_per_group(stored, groups, self.group or x.shape[-1])
        return decode(stored, self.format) * scales[..., None]


@dataclass(frozen=True)
class Recipe:
    """A way to store K and V.

    Attributes:
        name: what it is called on the command line and in tables.
        k, v: how each side is stored.
        offset: K's mean per channel is removed first.
        balance_k, balance_v: K and V are divided by a scale per channel first.
        rotated: Q and K are rotated first.
        first, recent: tokens at the beginning of the sequence, and newest tokens at each query, that are seen
            in FP8 with a scale per position and head, whatever `k` and `v` say.
        note: what a table says beside it.
    """

    name: str
    k: StoredSide
    v: StoredSide
    offset: bool = False
    balance_k: bool = False
    balance_v: bool = False
    rotated: bool = False
    first: int = 0
    recent: int = 0
    note: str = ""

    @property
    def in_cache(self) -> bool:
        """Whether `NarrowCache` and the kernels have it; others are simulated in torch."""
        scales = {side.scale for side in (self.k, self.v) if side.format == "fp4_e2m1"}
        return self.k.in_cache and self.v.in_cache and len(scales) < 2

    @property
    def keeps_some(self) -> bool:
        """Whether some tokens are seen in FP8."""
        return self.first > 0 or self.recent > 0

    def store(self, k: torch.Tensor, v: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the cache gives back.

        Args:
            k, v: fp32 `[tokens, num_kv_heads, head_dim]`.

        Returns:
            K and V of most tokens; if `keeps_some`, also K and V as the first and the newest are seen.
        """
        stored = [(self.k.store(k), self.v.store(v))]
        return [*stored, (_FP8.store(k), _FP8.store(v))] if self.keeps_some else stored

    @property
    def calibrated(self) -> bool:
        """Whether a calibration is needed."""
        return self.offset or self.balance_k or self.balance_v or self.rotated

    def bits(self, head_dim: int) -> float:
        """Bits of an element in a long context, the mean of K and V."""
        return (self.k.bits(head_dim) + self.v.bits(head_dim)) / 2

    def calibration(self, samples: Iterable[tuple[torch.Tensor, ...]]) -> Calibration | None:
        """The calibration that it needs, from Q, K and V of each layer; None for none."""
        if not self.calibrated:
            return None
        return calibrate(
            ((q, k, v) for q, k, v in samples), offset=self.offset, balance_k=self.balance_k,
            balance_v=self.balance_v, rotate=self.rotated,
        )  # fmt: skip

    def cache_options(self) -> dict[str, Any]:
        """Arguments of `NarrowCache` that store K and V like this."""
        packed = [side for side in (self.k, self.v) if side.format == "fp4_e2m1"]
        return {
            "format": CacheFormat(self.k.format, self.v.format),
            "scale_group": packed[0].group or None if packed else None,
            "scale_format": packed[0].scale if packed else "e8m0",
        }


_FP8 = StoredSide("fp8_e4m3fn", "fp32")
_FP8_TENSOR = StoredSide("fp8_e4m3fn", "fp32", -1)
_E8M0 = StoredSide("fp4_e2m1", "e8m0")
_E4M3 = StoredSide("fp4_e2m1", "e4m3")
_PER_32 = StoredSide("fp4_e2m1", "e8m0", 32)
_MX = replace(_PER_32, exponent="floor")
_NVFP4 = StoredSide("fp4_e2m1", "e4m3", 16)
REFERENCE = Recipe("bf16", StoredSide(), StoredSide(), note="the reference")
RECIPES = (
    REFERENCE,
    Recipe("fp8-tensor", _FP8_TENSOR, _FP8_TENSOR, note="FP8, one scale for a tensor"),
    Recipe("fp8", _FP8, _FP8, note="FP8, a scale per position and head"),
    Recipe("fp8-offset", _FP8, _FP8, offset=True, note="the same, K offset"),
    Recipe("k8v4", _FP8, _E8M0, note="K FP8, V FP4 with E8M0"),
    Recipe("k8v4-e4m3", _FP8, _E4M3, offset=True, balance_v=True, note="V with E4M3, K offset, V balance"),
    Recipe("fp4", _E8M0, _E8M0, note="FP4, E8M0 per position and head"),
    Recipe("fp4-offset", _E8M0, _E8M0, offset=True, balance_v=True, note="K offset, V balance"),
    Recipe("fp4-e4m3-plain", _E4M3, _E4M3, note="FP4, E4M3 per position and head"),
    Recipe("fp4-e4m3-offset", _E4M3, _E4M3, offset=True, balance_v=True, note="K offset, V balance"),
    Recipe(
        "fp4-e4m3", _E4M3, _E4M3, offset=True, balance_k=True, balance_v=True, rotated=True,
        note="the same, K balance, Q and K rotated",
    ),
    Recipe(
        "fp4-e4m3-recent", _E4M3, _E4M3, offset=True, balance_k=True, balance_v=True, rotated=True, first=4,
        recent=32, note="the same, the first 4 and the newest 32 tokens in FP8",
    ),
    Recipe("fp4-mx", _MX, _MX, note="OCP MX: FP4, E8M0 per 32, floor"),
    Recipe("fp4-32", _PER_32, _PER_32, offset=True, balance_v=True, note="E8M0 per 32, K offset, V balance"),
    Recipe("nvfp4", _NVFP4, _NVFP4, note="FP4, E4M3 per 16 and one scale for a tensor"),
    Recipe("nvfp4-offset", _NVFP4, _NVFP4, offset=True, note="the same, K offset"),
)  # fmt: skip


def find_recipes(names: Iterable[str] = ()) -> tuple[Recipe, ...]:
    """The recipes of these names, the reference first; all for no names.

    Raises:
        ValueError: for an unknown name.
    """
    by_name = {recipe.name: recipe for recipe in RECIPES}
    wanted = [by_name[check_choice("recipe", name, tuple(by_name))] for name in names]
    return tuple(dict.fromkeys((REFERENCE, *wanted))) if wanted else RECIPES
