"""What each cache recipe costs in accuracy, against the tensors that it stores.

This is the format error, which a format owns whatever kernel reads it: attention in fp32 on what the cache
gives back, against attention on the bf16 tensors that went in. The kernel error is `narrowkv validate`'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from narrowkv.quant.accuracy import relative_l1, rmse
from narrowkv.quant.quantize import (
    Quantized,
    dequantize_per_group,
    dequantize_per_tensor,
    dequantize_per_token_head,
    nvfp4_global_descale,
    quantize_per_group,
    quantize_per_tensor,
    quantize_per_token_head,
)
from narrowkv.quant.transforms import KOffset, VScale, hadamard

_E4M3 = "fp8_e4m3fn"
_OUTLIERS = (12.0, -9.0, 7.0, -6.0, 5.0, -4.0)
SETS = ("gaussian", "outlier")


class AttentionInputs(NamedTuple):
    """One query token a sequence: q `[batch, ratio, head_dim]`; k, v `[batch, tokens, head_dim]`; fp32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class InputSizes:
    """Sizes of the inputs, which have one KV head."""

    batch: int = 8
    ratio: int = 12
    context: int = 4096
    head_dim: int = 128

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context}, ratio {self.ratio}, head_dim {self.head_dim}"


def make_inputs(name: str, sizes: InputSizes, seed: int, device: str = "cpu") -> AttentionInputs:
    """Seeded inputs of a set, made on the CPU so that every device gets the same numbers.

    "gaussian": q, k, v ~ N(0, 1). "outlier": K has an offset on six channels and a component of rank 4, each
    head of q leans towards one of four directions, V's channels differ in size: what makes a softmax peaky
    and a shared scale coarse.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    batch, dim = sizes.batch, sizes.head_dim
    q, k, v = (normal(batch, tokens, dim) for tokens in (sizes.ratio, sizes.context, sizes.context))
    if name == "outlier":
        k[..., :: dim // len(_OUTLIERS)][..., : len(_OUTLIERS)] += torch.tensor(_OUTLIERS)
        k += normal(batch, sizes.context, 4) @ normal(4, dim) * 0.5
        q += 0.6 * normal(4, dim)[torch.randint(4, (batch, sizes.ratio), generator=random)]
        v *= torch.exp(0.5 * normal(dim))
    return AttentionInputs(*(x.bfloat16().float().to(device) for x in (q, k, v)))


def attention(x: AttentionInputs) -> torch.Tensor:
    """Softmax attention in fp32, `[batch, ratio, head_dim]`."""
    logits = x.q @ x.k.transpose(1, 2) * x.q.shape[-1] ** -0.5
    return torch.softmax(logits, -1) @ x.v


Store = Callable[[torch.Tensor], torch.Tensor]
Kept = dict[tuple[Any, ...], torch.Tensor]


def _per_tensor(x: torch.Tensor) -> torch.Tensor:
    return dequantize_per_tensor(*quantize_per_tensor(x, _E4M3), format=_E4M3)


def _per_token(x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(0, 1)[:, None]  # [tokens, 1 head, dim]
    return dequantize_per_token_head(*quantize_per_token_head(rows, _E4M3), format=_E4M3)[:, 0].view_as(x)


@cache
def _e8m0(group: int, exponent: str) -> Store:
    def store(x: torch.Tensor) -> torch.Tensor:
        size = group or x.shape[-1]
        return dequantize_per_group(*quantize_per_group(x, size, exponent=exponent), size)

    return store


def _nvfp4(x: torch.Tensor) -> torch.Tensor:
    overall = nvfp4_global_descale(x)
    stored: Quantized = quantize_per_group(x, 16, scale="e4m3", global_descale=overall)
    return dequantize_per_group(*stored, 16, global_descale=overall)


def _as_is(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class StoredFormat:
    """A way to store K and V.

    Attributes:
        name: what it is called in the table.
        k, v: what the cache gives back for a side.
        bits: of an element of K and V on average, scales included, at head_dim 128.
        offset: K's mean is removed first; softmax does not see it.
        balanced: V is divided by a scale per channel first, and the output multiplied by it.
        rotated: q and K go through a Hadamard rotation first.
        kernel: whether `paged_decode` reads it.
    """

    name: str
    k: Store
    v: Store
    bits: float
    offset: bool = False
    balanced: bool = False
    rotated: bool = False
    kernel: bool = True

    def attend(self, x: AttentionInputs, kept: Kept) -> torch.Tensor:
        """Attention on what the cache gives back; `kept` has the sides that other recipes store alike."""
        k_key, v_key = (self.k, self.offset, self.rotated), (self.v, self.balanced)
        if k_key not in kept:
            kept[k_key] = self._stored_k(x.k)
        if v_key not in kept:
            kept[v_key] = self._stored_v(x.v)
        return attention(AttentionInputs(hadamard(x.q) if self.rotated else x.q, kept[k_key], kept[v_key]))

    def _stored_k(self, k: torch.Tensor) -> torch.Tensor:
        if self.rotated:
            k = hadamard(k)
        if self.offset:
            k = KOffset.from_keys(k[:, :, None]).subtract(k[:, :, None])[:, :, 0]
        return self.k(k)

    def _stored_v(self, v: torch.Tensor) -> torch.Tensor:
        if not self.balanced:
            return self.v(v)
        scale = VScale.from_values(v[:, :, None])
        return self.v(scale.divide(v[:, :, None])[:, :, 0]) * scale.scale[0]


def _same(name: str, store: Store, bits: float, *, kernel: bool = True) -> StoredFormat:
    return StoredFormat(name, store, store, bits, kernel=kernel)


MX_FLOOR = "FP4, a scale per 32, floor (OCP MX)"
FP4_BEST = "FP4, a scale per 32, least squares, K offset, V balanced"
K8V4_BEST = "K FP8, V FP4, a scale per head, K offset, V balanced"
FP8_PLAIN, FP8_BEST = "FP8 per tensor", "FP8, K offset"
_HEAD, _GROUP, _TOKEN = 4 + 8 / 128, 4 + 8 / 32, 8 + 32 / 128  # one byte a head, one per 32, one fp32 a head
_FP8 = _same("FP8", _per_token, _TOKEN)
_FP4_HEAD = _same("FP4, a scale per head, least squares", _e8m0(0, "mse"), _HEAD)
_FP4_GROUP = _same("FP4, a scale per 32, least squares", _e8m0(32, "mse"), _GROUP)
_K8V4 = StoredFormat("K FP8, V FP4, a scale per head", _per_token, _e8m0(0, "mse"), (_TOKEN + _HEAD) / 2)
RECIPES = (
    _same("bf16", _as_is, 16),
    _same(FP8_PLAIN, _per_tensor, 8),
    _FP8,
    replace(_FP8, name=FP8_BEST, offset=True),
    _K8V4,
    replace(_K8V4, name="K FP8, V FP4, a scale per head, K offset", offset=True),
    replace(_K8V4, name=K8V4_BEST, offset=True, balanced=True),
    _same("FP4, a scale per head, floor", _e8m0(0, "floor"), _HEAD),
    _same("FP4, a scale per head, ceil", _e8m0(0, "ceil"), _HEAD),
    _FP4_HEAD,
    replace(_FP4_HEAD, name="FP4, a scale per head, least squares, q and K rotated", rotated=True),
    replace(_FP4_HEAD, name="FP4, a scale per head, least squares, K offset", offset=True),
    replace(
        _FP4_HEAD,
        name="FP4, a scale per head, least squares, K offset, V balanced",
        offset=True,
        balanced=True,
    ),
    _same(MX_FLOOR, _e8m0(32, "floor"), _GROUP),
    _same("FP4, a scale per 32, ceil", _e8m0(32, "ceil"), _GROUP),
    _FP4_GROUP,
    replace(_FP4_GROUP, name="FP4, a scale per 32, least squares, K offset", offset=True),
    replace(_FP4_GROUP, name=FP4_BEST, offset=True, balanced=True),
    _same("NVFP4, an E4M3 scale per 16, 4 or 6", _nvfp4, 4.5, kernel=False),
)


@dataclass(frozen=True)
class FormatError:
    """A recipe's mean errors over seeds, by input set."""

    recipe: str
    bits: float
    kernel: bool
    relative_l1: dict[str, float]
    rmse: dict[str, float]


@dataclass(frozen=True)
class Goal:
    """How much better a recipe must be than another on the outlier set."""

    recipe: str
    than: str
    figure: str
    less_by: float

    def reached(self, errors: dict[str, FormatError]) -> float:
        """By how much it is better."""
        ours, theirs = (getattr(errors[name], self.figure)["outlier"] for name in (self.recipe, self.than))
        return float(1 - ours / theirs)


GOALS = (
    Goal(FP4_BEST, MX_FLOOR, "rmse", 0.25),
    Goal(K8V4_BEST, MX_FLOOR, "rmse", 0.60),
    Goal(FP8_BEST, FP8_PLAIN, "relative_l1", 0.15),
)
GOAL_SEEDS = 3


@dataclass(frozen=True)
class ErrorTask:
    """One set of inputs, on which every recipe is measured."""

    inputs: str
    seed: int
    sizes: InputSizes
    device: str


# A recipe's relative L1 and RMSE.
Errors = dict[str, tuple[float, float]]


def run_task(task: ErrorTask) -> Errors:
    """Every recipe's errors on one set of inputs."""
    x = make_inputs(task.inputs, task.sizes, task.seed, task.device)
    expected = attention(x)
    kept: Kept = {}
    outputs = ((recipe.name, recipe.attend(x, kept)) for recipe in RECIPES)
    return {name: (relative_l1(o, expected), rmse(o, expected)) for name, o in outputs}


def mean_errors(found: dict[ErrorTask, Errors]) -> list[FormatError]:
    """Every recipe's means over the seeds that were measured, by input set."""

    def means(recipe: str, figure: int) -> dict[str, float]:
        measured = {name: [found[t][recipe][figure] for t in found if t.inputs == name] for name in SETS}
        return {name: statistics.mean(values) for name, values in measured.items() if values}

    return [FormatError(r.name, r.bits, r.kernel, means(r.name, 0), means(r.name, 1)) for r in RECIPES]


def measure(seeds: Sequence[int], sizes: InputSizes, device: str) -> list[FormatError]:
    """Every recipe's mean errors over both input sets and some seeds."""
    return mean_errors({task: run_task(task) for task in tasks(seeds, sizes, device)})


def tasks(seeds: Sequence[int], sizes: InputSizes, device: str) -> list[ErrorTask]:
    """Every input set with every seed."""
    return [ErrorTask(name, seed, sizes, device) for seed in seeds for name in SETS]
