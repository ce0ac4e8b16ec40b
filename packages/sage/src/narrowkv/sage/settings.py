"""What a Sage plan is made for: the keywords, the sizes, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from narrowkv.quant.sage import TokenGroups, token_groups
from narrowkv.runtime.operation import Plan
from narrowkv.sage.checks import windows_of
from narrowkv.sage.config import SageConfig
from narrowkv.sage.kernels import Mask
from narrowkv.sage.shapes import SageShape


@dataclass(frozen=True)
class SageOptions:
    """The keywords that a plan of Sage attention is made for, as `sage_attention` has them.

    `block_sizes` is None where calls have no block mask.
    """

    qk_dtype: str = "int8"
    q_granularity: str = "per_thread"
    k_granularity: str = "per_thread"
    causal: str | bool | None = None
    window: tuple[int, int] | None = None
    layout: str = "BSHD"
    smooth_k: bool = True
    smooth_q: bool = False
    sm_scale: float | None = None
    block_sizes: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class SageSettings(Plan):
    """The part of a `SagePlan` that its launches are made from.

    Attributes:
        shape: the sizes of the largest call.
        options: the keywords of `plan_sage`.
        config: the launch configuration.
        cu_seqlens_q, cu_seqlens_k: where sequences begin, unless a call says so; None for a dense batch.
    """

    shape: SageShape
    options: SageOptions
    config: SageConfig
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None

    @cached_property
    def qk_format(self) -> str:
        """Format of Q and K in scratch: "int8", "int4" or the target's FP8."""
        return self.config.fp8 if self.options.qk_dtype == "fp8" else self.options.qk_dtype

    @cached_property
    def q_groups(self) -> TokenGroups | None:
        """Tokens of Q that share a descale; None for the whole tensor."""
        return token_groups("q", self.options.q_granularity)

    @cached_property
    def k_groups(self) -> TokenGroups | None:
        """Tokens of K that share a descale; None for the whole tensor."""
        return token_groups("k", self.options.k_granularity)

    @cached_property
    def mask(self) -> Mask:
        """Which keys a query attends to."""
        return Mask(*windows_of(self.options.causal, self.options.window))

    @property
    def bottom_right(self) -> bool:
        """Whether the last query stands at the last key; else the first at the first."""
        return bool(self.mask.BOTTOM_RIGHT)

    @property
    def window_left(self) -> int:
        """Keys before a query's position that it attends to; -1 for all."""
        return int(self.mask.LEFT)

    @property
    def window_right(self) -> int:
        """Keys after a query's position that it attends to; -1 for all."""
        return int(self.mask.RIGHT)

    @property
    def smooth_k(self) -> bool:
        """Whether the means of K are taken out."""
        return self.options.smooth_k

    @property
    def smooth_q(self) -> bool:
        """Whether the means of Q are taken out."""
        return self.options.smooth_q

    @cached_property
    def sm_scale(self) -> float:
        """The softmax scale."""
        scale = self.options.sm_scale
        return float(self.shape.head_dim**-0.5 if scale is None else scale)

    @property
    def block_sizes(self) -> tuple[int, int] | None:
        """Queries and keys of a block of the block mask; None for a plan without one."""
        return self.options.block_sizes

    @property
    def layout(self) -> str:
        """How a dense batch lies: "BSHD" or "BHSD"."""
        return self.options.layout
