"""The kernels of a Sage plan with their constants, and their scratch memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowkv.quant.formats import get_format
from narrowkv.quant.sage import TokenGroups
from narrowkv.runtime.launch import BoundLaunch, LaunchOptions, Workspace
from narrowkv.sage.config import SageConfig
from narrowkv.sage.kernels import (
    Call,
    Groups,
    Mask,
    Order,
    _channel_statistics_kernel,
    _finish_statistics_kernel,
    _mean_scores_kernel,
    _quantise_keys_values_kernel,
    _quantise_tokens_kernel,
    _sage_attention_kernel,
    _sequence_bounds_kernel,
)
from narrowkv.sage.shapes import ROW_ALIGNMENT, SageShape

# The kernels round exactly as the host does: a multiplication and an addition must not be fused.
# H200, b2 h32 d128, 16k tokens: Q at 16 warps 173 us, 8 warps 188, 4 warps 264; statistics of K and V at 2
# and 4 warps 138, 8 warps 147. At 4k K and V take 136 in all, 142 if the last part to arrive finishes the
# statistics; with statistics and blocks both at 16 warps 378, in one launch where blocks wait 351 to 410.
_STATISTICS = LaunchOptions(num_warps=4, num_stages=1, enable_fp_fusion=False)
_QUANTISE = LaunchOptions(num_warps=16, num_stages=1, enable_fp_fusion=False)
MEAN_BLOCKS = 16  # blocks of Q whose means meet a tile of keys at once: the least rows of a dot


def _groups(groups: TokenGroups | None) -> Groups:
    return Groups(0, 1, 1) if groups is None else Groups(groups.span, groups.groups, groups.run)


@dataclass(frozen=True, eq=False)
class SageKernels:
    """The kernels of a plan, bound to its constants, and their scratch memory.

    Attributes:
        shape: the largest call.
        qk_format: of Q and K in scratch.
        q_groups, k_groups: which tokens share a descale.
        mask: which keys a row attends to.
        smooth_k, smooth_q: which means are taken out.
        sm_scale: the softmax scale.
        config: the launch configuration.
        device: where it runs.
        workspace: scratch of the queries; None allocates it in each call.
    """

    shape: SageShape
    qk_format: str
    q_groups: TokenGroups | None
    k_groups: TokenGroups | None
    mask: Mask
    smooth_k: bool
    smooth_q: bool
    sm_scale: float
    config: SageConfig
    device: torch.device
    workspace: Workspace | None
    _bound: dict[Any, BoundLaunch] = field(default_factory=dict, init=False, repr=False)
    _scratch: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Divides the workspace up."""
        if self.workspace is not None:
            blocks = self.blocks()
            self._scratch.update(zip(blocks, self.workspace.carve(list(blocks.values())), strict=True))

    # ------------------------------------------------------------------------------------------ memory

    def blocks(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Scratch of the largest call, by name."""
        shape = self.shape
        heads, dim, kv_heads = shape.num_qo_heads, shape.head_dim, shape.num_kv_heads
        rows, k_rows = shape.rows(shape.q_tokens), shape.rows(shape.k_tokens)
        partial = (shape.batch, kv_heads, self.parts, dim)
        q_mean = (heads, rows // ROW_ALIGNMENT, dim)
        return {
            "q": ((heads, rows, get_format(self.qk_format).storage_bytes(dim)), torch.uint8),
            "q_descale": (self.descales(self.q_groups, heads, rows), torch.float32),
            "amax": ((1,), torch.int32),
            "q_bounds": ((shape.batch if shape.ragged else 0, 2), torch.int32),
            "q_mean": (q_mean if self.smooth_q else (0,), torch.float32),
            "mean_scores": ((heads, rows // ROW_ALIGNMENT, k_rows) if self.smooth_q else (0,), torch.float32),
            "shift": ((heads, rows) if self.smooth_k else (0,), torch.float32),
            "v_parts": (partial, torch.float32),
            "k_parts": (partial if self.smooth_k else (0,), torch.float64),
        }

    @property
    def parts(self) -> int:
        """Programs that share a head's statistics: enough to fill a GPU, none that does little."""
        return min(16, 1 << max(-(-self.shape.k_tokens // 256) - 1, 0).bit_length())

    @staticmethod
    def descales(groups: TokenGroups | None, heads: int, rows: int) -> tuple[int, ...]:
        """Shape of the descales of `rows` rows."""
        return (1,) if groups is None else (heads, rows // groups.span * groups.groups)

    def memory(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Undefined memory of a shape: the beginning of the workspace's block, or a new tensor."""
        if self.workspace is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self._scratch[name].view(-1)[: math.prod(shape)].view(shape)

    # ---------------------------------------------------------------------------------------- launches

    def kernels(self) -> list[BoundLaunch]:
        """Every kernel that calls can launch, the log-sum-exp written or not."""
        found = [self.bounds_kernel()] if self.shape.ragged else []
        found += [*self.statistics(), self.quantise_kv()]
        found += [self.measure(key) for key in ("k", "q") if self._group_of(key) is None]
        found += [self.mean_scores()] if self.smooth_q else []
        for lse in (False, True):
            found += [self.quantise_q(self.smooth_k and lse), self.attention(lse)]
        return list({id(launch): launch for launch in found}.values())

    def _bind(self, key: Any, kernel: Any, constexprs: dict[str, Any], options: LaunchOptions) -> BoundLaunch:
        self._bound[key] = BoundLaunch(kernel, constexprs, options)
        return self._bound[key]

    def bounds_kernel(self) -> BoundLaunch:
        """Finds where sequences lie."""
        known = self._bound.get("bounds")
        return known or self._bind(
            "bounds", _sequence_bounds_kernel, {}, LaunchOptions(num_warps=1, num_stages=1)
        )

    def statistics(self) -> tuple[BoundLaunch, BoundLaunch]:
        """Measures the channels of K and V, in two launches."""
        if "statistics" not in self._bound:
            constants = {
                "RAGGED": self.shape.ragged,
                "SMOOTH": self.smooth_k,
                "PARTS": self.parts,
                "HEAD_DIM": self.shape.head_dim,
            }
            v_max = get_format(self.config.fp8).max_value
            self._bind("statistics", _channel_statistics_kernel, {**constants, "BLOCK": 32}, _STATISTICS)
            self._bind("finish", _finish_statistics_kernel, {**constants, "V_FORMAT_MAX": v_max}, _STATISTICS)
        return self._bound["statistics"], self._bound["finish"]

    def _group_of(self, which: str) -> TokenGroups | None:
        return self.q_groups if which == "q" else self.k_groups

    def _tokens(self, which: str, smooth: str, *, shift: bool, measure: bool) -> BoundLaunch:
        key = ("tokens", which, shift, measure)
        return self._bound.get(key) or self._bind(
            key,
            _quantise_tokens_kernel,
            {
                "RAGGED": self.shape.ragged,
                "SMOOTH": smooth,
                "WRITE_SHIFT": shift,
                "GQA_RATIO": self.shape.gqa_ratio if which == "q" else 1,
                "FORMAT": self.qk_format,
                "FORMAT_MAX": get_format(self.qk_format).max_value,
                "MEASURE": measure,
                "GROUPS": _groups(self._group_of(which)),
                "HEAD_DIM": self.shape.head_dim,
            },
            _QUANTISE,
        )

    def measure(self, which: str) -> BoundLaunch:
        """Measures the whole tensor, Q or K."""
        smooth = self._smooth_q if which == "q" else self._smooth_k
        return self._tokens(which, smooth, shift=False, measure=True)

    def quantise_q(self, shift: bool) -> BoundLaunch:
        """Quantises Q; `shift`: and stores what smoothing K takes from the log-sum-exp."""
        return self._tokens("q", self._smooth_q, shift=shift, measure=False)

    @property
    def _smooth_q(self) -> str:
        return "block" if self.smooth_q else "none"

    @property
    def _smooth_k(self) -> str:
        return "sequence" if self.smooth_k else "none"

    def quantise_kv(self) -> BoundLaunch:
        """Quantises K and V."""
        return self._bound.get("kv") or self._bind(
            "kv",
            _quantise_keys_values_kernel,
            {
                "RAGGED": self.shape.ragged,
                "SMOOTH": self.smooth_k,
                "FORMAT": self.qk_format,
                "FORMAT_MAX": get_format(self.qk_format).max_value,
                "GROUPS": _groups(self.k_groups),
                "V_FORMAT": self.config.fp8,
                "ORDER": self._order,
                "HEAD_DIM": self.shape.head_dim,
            },
            _QUANTISE,
        )

    @property
    def _order(self) -> Order:
        order = self.config.key_order
        return Order(order.gather, order.lanes, order.width)

    def mean_scores(self) -> BoundLaunch:
        """Multiplies the means of Q with K."""
        return self._bound.get("mean_scores") or self._bind(
            "mean_scores",
            _mean_scores_kernel,
            {
                "RAGGED": self.shape.ragged,
                "GQA_RATIO": self.shape.gqa_ratio,
                "HEAD_DIM": self.shape.head_dim,
                "BLOCK_Q": MEAN_BLOCKS,
            },
            LaunchOptions(num_warps=4, num_stages=1),
        )

    def attention(self, lse: bool, *, tma: bool | None = None) -> BoundLaunch:
        """Attends."""
        config = self.config
        tma = config.tma if tma is None else tma
        key = ("attention", lse, tma)
        known = self._bound.get(key)
        if known is not None:
            return known
        call = Call(
            self.shape.ragged, self.shape.gqa_ratio, self.shape.head_dim, self.qk_format, self.smooth_q,
            self.smooth_k and lse, lse, math.log2(get_format(config.fp8).max_value), config.two_level, tma,
            config.reread_q, config.ahead, config.block_m, config.block_n,
        )  # fmt: skip
        return self._bind(
            key,
            _sage_attention_kernel,
            {
                "CALL": call,
                "Q_GROUPS": _groups(self.q_groups),
                "K_GROUPS": _groups(self.k_groups),
                "MASK": self.mask,
                "ORDER": self._order,
            },
            config.options,
        )
