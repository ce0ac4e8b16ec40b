"""One Sage attention call as data and as tensors."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from narrowkv.cli.cases import LSE_BOUND
from narrowkv.cli.contracts import Contract, Shape
from narrowkv.runtime.launch import InterpretExecutor, active_target, executing
from narrowkv.runtime.targets import Target
from narrowkv.sage import plan_sage, sage_attention, sage_attention_reference
from narrowkv.sage.reference import short_sum_error
from narrowkv.sage.workloads import SageWorkload


@dataclass(frozen=True)
class SageCase:
    """Options and inputs of one call.

    Attributes:
        qk: "int8", "int4" or "fp8".
        granularity: of Q and of K.
        smooth_k, smooth_q: which means are taken out.
        causal: as `sage_attention` takes it, "" for no mask.
        tokens, kv_heads, ratio, head_dim: sizes.
        data: see `SageWorkload`.
        seed: of the inputs.
    """

    qk: str = "int8"
    granularity: str = "per_thread"
    smooth_k: bool = True
    smooth_q: bool = False
    causal: str = ""
    tokens: int = 1024
    kv_heads: int = 1
    ratio: int = 1
    head_dim: int = 128
    data: str = "offset"
    seed: int = 0

    @property
    def smoothing(self) -> str:
        """The means, for people."""
        return {0: "none", 1: "K", 2: "Q", 3: "K and Q"}[self.smooth_k + 2 * self.smooth_q]

    def as_dict(self) -> dict[str, Any]:
        """For the JSON document."""
        return asdict(self)


@dataclass
class SageCall:
    """A case's tensors on a device.

    `target` is what the last call was made for: its FP8 format is what the reference quantises to.
    """

    case: SageCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    target: Target | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `sage_attention`."""
        case = self.case
        return {
            "qk_dtype": case.qk,
            "q_granularity": case.granularity,
            "k_granularity": case.granularity,
            "smooth_k": case.smooth_k,
            "smooth_q": case.smooth_q,
            "causal": case.causal or None,
        }

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` of the operation."""
        self.target = active_target(self.q.device)
        o, lse = sage_attention(self.q, self.k, self.v, return_lse=True, **self.options)
        return o, lse

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` in fp32 over what the host's quantisers store for the target."""
        with nullcontext() if self.target is None else executing(InterpretExecutor(self.target)):
            o, lse = sage_attention_reference(self.q, self.k, self.v, return_lse=True, **self.options)
        return o, lse

    def exact(self) -> torch.Tensor:
        """`o` in fp32 over what was never quantised."""
        o = sage_attention_reference(self.q, self.k, self.v, **{**self.options, "qk_dtype": None})
        assert isinstance(o, torch.Tensor)
        return o

    def lse_bound(self) -> float:
        """How far lse may be off where the last call ran: more where the hardware's sums are short."""
        with nullcontext() if self.target is None else executing(InterpretExecutor(self.target)):
            return LSE_BOUND + short_sum_error(plan_sage(self.q, self.k, **self.options), self.q, self.k)

    def bytes_per_token(self) -> None:
        """There is no cache."""

    def explain(self) -> str:
        """The configuration, in words."""
        config = plan_sage(self.q, self.k, **self.options).config
        options = config.options
        return (
            f"{config.block_m} rows x {config.block_n} keys, V and P in {config.fp8}, "
            f"{options.num_warps} warps, {options.num_stages} stages"
        )


def build(case: SageCase, device: str = "cpu") -> SageCall:
    """The tensors of a case."""
    workload = SageWorkload(
        q_lens=(case.tokens,), k_lens=(case.tokens,), num_kv_heads=case.kv_heads, gqa_ratio=case.ratio,
        head_dim=case.head_dim, data=case.data,
    )  # fmt: skip
    q, k, v, *_ = workload.build(device, case.seed)
    return SageCall(case, q, k, v)


def sage_inputs(contract: Contract, shape: Shape, device: str = "cpu", clean: bool = False) -> SageCall:
    """A contract's call: `q` is what Q and K are multiplied in; causal, as in prefill."""
    qk = "fp8" if contract.q.startswith("fp8_") else contract.q
    case = SageCase(
        qk, causal="bottom_right", tokens=shape.context, kv_heads=shape.num_kv_heads, ratio=shape.gqa_ratio,
        head_dim=shape.head_dim,
    )  # fmt: skip
    return build(case, device)
