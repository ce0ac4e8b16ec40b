"""What each cache recipe costs in accuracy, against the tensors that it stores.

This is the format error, which a format owns whatever kernel reads it: attention in fp32 on what the cache
gives back, against attention on the bf16 tensors that went in. The kernel error is `narrowkv validate`'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from narrowkv.quant.accuracy import relative_l1, rmse
from narrowkv.quant.transforms import KOffset, VScale, hadamard
from narrowkv.testing.recipes import Recipe, StoredSide

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


Kept = dict[tuple[Any, ...], torch.Tensor]


def attend(recipe: Recipe, x: AttentionInputs, kept: Kept) -> torch.Tensor:
    """Attention on what the cache gives back; `kept` has the sides that other recipes store alike.

    Before they are stored, K loses its mean of each sequence if `offset`, K and q are rotated if `rotated`,
    and V is divided by a scale per channel if `balance_v`.
    """
    k_key, v_key = (recipe.k, recipe.offset, recipe.rotated), (recipe.v, recipe.balance_v)
    if k_key not in kept:
        k = (hadamard(x.k) if recipe.rotated else x.k)[:, :, None]  # [batch, tokens, 1 head, dim]
        kept[k_key] = _stored(recipe.k, KOffset.from_keys(k).subtract(k) if recipe.offset else k)
    if v_key not in kept:
        v = x.v[:, :, None]
        scale = VScale.from_values(v) if recipe.balance_v else None
        stored = _stored(recipe.v, v if scale is None else scale.divide(v))
        kept[v_key] = stored if scale is None else stored * scale.scale[0]
    return attention(AttentionInputs(hadamard(x.q) if recipe.rotated else x.q, kept[k_key], kept[v_key]))


def _stored(side: StoredSide, x: torch.Tensor) -> torch.Tensor:
    return side.store(x.flatten(0, 1)).view_as(x)[:, :, 0]


MX_FLOOR = "FP4, a scale per 32, floor (OCP MX)"
FP4_BEST = "FP4, a scale per 32, least squares, K offset, V balanced"
K8V4_BEST = "K FP8, V FP4, a scale per head, K offset, V balanced"
FP8_PLAIN, FP8_BEST = "FP8 per tensor", "FP8, K offset"
_HEAD, _GROUP = StoredSide("fp4_e2m1", "e8m0"), StoredSide("fp4_e2m1", "e8m0", 32)
_NVFP4 = StoredSide("fp4_e2m1", "e4m3", 16)
_BITS_HEAD_DIM = 128  # channels of a head, for the bits that an element takes with its share of the scales


def _same(name: str, side: StoredSide, **changes: Any) -> Recipe:
    """A recipe that stores K and V alike."""
    return Recipe(name, side, side, **changes)


_FP8 = _same("FP8", StoredSide("fp8_e4m3fn", "fp32"))
_FP4_HEAD = _same("FP4, a scale per head, least squares", _HEAD)
_FP4_GROUP = _same("FP4, a scale per 32, least squares", _GROUP)
_K8V4 = Recipe("K FP8, V FP4, a scale per head", _FP8.k, _HEAD)
RECIPES = (
    _same("bf16", StoredSide()),
    _same(FP8_PLAIN, StoredSide("fp8_e4m3fn", "fp32", -1)),
    _FP8,
    replace(_FP8, name=FP8_BEST, offset=True),
    _K8V4,
    replace(_K8V4, name="K FP8, V FP4, a scale per head, K offset", offset=True),
    replace(_K8V4, name=K8V4_BEST, offset=True, balance_v=True),
    _same("FP4, a scale per head, floor", replace(_HEAD, exponent="floor")),
    _same("FP4, a scale per head, ceil", replace(_HEAD, exponent="ceil")),
    _FP4_HEAD,
    replace(_FP4_HEAD, name=f"{_FP4_HEAD.name}, q and K rotated", rotated=True),
    replace(_FP4_HEAD, name=f"{_FP4_HEAD.name}, K offset", offset=True),
    replace(_FP4_HEAD, name=f"{_FP4_HEAD.name}, K offset, V balanced", offset=True, balance_v=True),
    _same(MX_FLOOR, replace(_GROUP, exponent="floor")),
    _same("FP4, a scale per 32, ceil", replace(_GROUP, exponent="ceil")),
    _FP4_GROUP,
    replace(_FP4_GROUP, name=f"{_FP4_GROUP.name}, K offset", offset=True),
    replace(_FP4_GROUP, name=FP4_BEST, offset=True, balance_v=True),
    _same("NVFP4, an E4M3 scale per 16, 4 or 6", _NVFP4),
)


@dataclass(frozen=True)
class FormatError:
    """A recipe's mean errors over seeds, by input set; `kernel`: whether `paged_decode` reads its cache."""

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
    outputs = ((recipe.name, attend(recipe, x, kept)) for recipe in RECIPES)
    return {name: (relative_l1(o, expected), rmse(o, expected)) for name, o in outputs}


def mean_errors(found: dict[ErrorTask, Errors]) -> list[FormatError]:
    """Every recipe's means over the seeds that were measured, by input set."""

    def means(recipe: str, figure: int) -> dict[str, float]:
        measured = {name: [found[t][recipe][figure] for t in found if t.inputs == name] for name in SETS}
        return {name: statistics.mean(values) for name, values in measured.items() if values}

    return [
        FormatError(r.name, r.bits(_BITS_HEAD_DIM), r.k != _NVFP4, means(r.name, 0), means(r.name, 1))
        for r in RECIPES
    ]


def measure(seeds: Sequence[int], sizes: InputSizes, device: str) -> list[FormatError]:
    """Every recipe's mean errors over both input sets and some seeds."""
    return mean_errors({task: run_task(task) for task in tasks(seeds, sizes, device)})


def tasks(seeds: Sequence[int], sizes: InputSizes, device: str) -> list[ErrorTask]:
    """Every input set with every seed."""
    return [ErrorTask(name, seed, sizes, device) for seed in seeds for name in SETS]
