"""Cases of Sage attention: axes, seeded inputs and bounds, for tests, `validate`, `probe` and `bench`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from narrowkv.quant.sage import SAGE_GRANULARITIES
from narrowkv.runtime.launch import InterpretExecutor, active_target, executing
from narrowkv.runtime.targets import Target
from narrowkv.sage.api import plan_sage, sage_attention
from narrowkv.sage.operation import SagePlan
from narrowkv.sage.reference import sage_attention_reference, short_sum_error
from narrowkv.testing.cases import Case, Inputs, named
from narrowkv.testing.operation import BOUND_FP8_P, Cases, Contract, Shape
from narrowkv.testing.words import SAGE_PRECISIONS

__all__ = ["CASES", "SageCall", "SageCase", "SageInputs", "shipped", "sweep"]

BOUND = BOUND_FP8_P
LSE_BOUND = 1e-3
PRECISIONS = SAGE_PRECISIONS
PUBLISHED: dict[str, tuple[float, float, float]] = {
    "per_thread": (0.9945, 0.062, 0.031),
    "per_block": (0.980, 0.149, 0.074),
    "per_tensor": (0.972, 0.180, 0.087),
}
"""Cosine, relative L1 and RMSE of the published method: INT4 Q and K with both means taken out, on a model's
own activations. RMSE is in units of that model's output, so it is shown and not compared."""

SageInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"]


@dataclass(frozen=True, kw_only=True)
class SageCase(Case):
    """One Sage attention call.

    Attributes:
        qk_dtype: "int8", "int4" or "fp8".
        granularity: of Q's and of K's descales.
        smooth_k, smooth_q: whether K's, or Q's, mean is subtracted before quantisation.
        causal: as `sage_attention` takes it; "" for no mask.
        window_left, window_right: how many keys before and after its own position a query attends to; -1 for
            all.
        blocks: block sizes of the block mask, in queries and in keys; it masks half of the blocks at random.
            () for no block mask.
        layout: layout of a dense batch, as `sage_attention` takes it.
        q_lens, k_lens: tokens of each sequence; those of a dense batch are equal.
        num_kv_heads, gqa_ratio, head_dim: sizes.
        dtype: bf16 or fp16.
        ragged: sequences one after the other with cu_seqlens, instead of a dense batch.
        data: "gaussian" is N(0, 1). "outlier" adds to K an offset on six channels and a component of rank
            four, which Q also has, and scales the channels of V differently. "offset" adds an offset to each
            channel of K, Q and V, in K four times the noise, as in the layers that smoothing was made for,
            and scales the tokens differently.
        seed: of all numbers.
    """

    qk_dtype: str = named("int8", "qk", PRECISIONS)
    granularity: str = named("per_thread", words=SAGE_GRANULARITIES)
    smooth_k: bool = True
    smooth_q: bool = False
    causal: str = named("", words=("", "top_left", "bottom_right"))
    window_left: int = -1
    window_right: int = -1
    blocks: tuple[int, ...] = ()
    layout: str = named("BSHD", words=("BSHD", "BHSD"))
    q_lens: tuple[int, ...] = (1024,)
    k_lens: tuple[int, ...] = (1024,)
    num_kv_heads: int = named(1, "kv_heads")
    gqa_ratio: int = named(1, "ratio")
    head_dim: int = 128
    dtype: torch.dtype = named(torch.bfloat16, words={"bf16": torch.bfloat16, "fp16": torch.float16})
    ragged: bool = False
    data: str = named("offset", words=("gaussian", "outlier", "offset"))
    seed: int = 0

    bound = BOUND
    lse_bound = LSE_BOUND

    @classmethod
    def small(cls, **changes: Any) -> SageCase:
        """A case that the interpreter runs in a moment, with some fields changed; most tests vary it."""
        small = {"q_lens": (150,), "k_lens": (150,), "gqa_ratio": 2, "head_dim": 64, "data": "outlier"}
        return cls(**{**small, **changes})

    @property
    def kind(self) -> tuple[str, str]:
        """What Q and K are quantised to, and their granularity, for tables."""
        return self.qk_dtype, f"{self.qk_dtype} {self.granularity}"

    @property
    def published(self) -> tuple[float, float, float] | None:
        """The published figures; they are a bound for the published method at the default sizes alone."""
        method = replace(self, granularity="per_thread", seed=0) == SageCase(qk_dtype="int4", smooth_q=True)
        return PUBLISHED.get(self.granularity) if method else None

    @property
    def smoothing(self) -> str:
        """Whose means are subtracted, for tables."""
        return {0: "none", 1: "K", 2: "Q", 3: "K and Q"}[self.smooth_k + 2 * self.smooth_q]

    def inputs(self, device: str = "cpu") -> SageCall:
        """The tensors with the options of the call."""
        q, k, v, starts_q, starts_k = self.build(device)
        window = self.window_left, self.window_right
        options = {
            "qk_dtype": self.qk_dtype,
            "q_granularity": self.granularity,
            "k_granularity": self.granularity,
            "smooth_k": self.smooth_k,
            "smooth_q": self.smooth_q,
            "causal": self.causal or None,
            "window": None if window == (-1, -1) else window,
            "layout": self.layout,
        }
        if self.ragged:
            options |= {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
        if self.blocks:
            options |= {"block_sizes": self.blocks, "block_mask": self.block_mask(device)}
        if self.layout == "BHSD":
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return SageCall(self, q, k, v, options)

    def block_mask(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """A random mask of half the blocks, for `blocks`."""
        rows, keys = (
            -(-max(n) // size) for n, size in zip((self.q_lens, self.k_lens), self.blocks, strict=True)
        )
        heads = self.num_kv_heads * self.gqa_ratio
        random = torch.Generator().manual_seed(self.seed)
        return (torch.rand(len(self.q_lens), heads, rows, keys, generator=random) < 0.5).to(device)

    def build(self, device: torch.device | str = "cpu", seed: int | None = None) -> SageInputs:
        """q, k, v, cu_seqlens_q, cu_seqlens_k; the last two None for a dense batch."""
        random = torch.Generator().manual_seed(self.seed if seed is None else seed)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=random)

        heads, dim = self.num_kv_heads * self.gqa_ratio, self.head_dim
        q = normal(sum(self.q_lens), heads, dim)
        k, v = (normal(sum(self.k_lens), self.num_kv_heads, dim) for _ in range(2))
        if self.data == "outlier":
            directions = normal(4, dim)
            k += normal(len(k), self.num_kv_heads, 4) @ directions * 0.5
            k[..., torch.randperm(dim, generator=random)[:6]] += torch.tensor(
                [12.0, -9.0, 7.0, -6.0, 5.0, -4.0]
            )
            q += 0.6 * directions[torch.randint(4, (len(q), heads), generator=random)]
            v *= torch.exp(0.5 * normal(dim))
        elif self.data == "offset":
            for x, size in ((q, 1.0), (k, 4.0), (v, 1.0)):
                x *= torch.exp(0.3 * normal(len(x), x.shape[1], 1))
                x += size * normal(x.shape[1], dim)
        q, k, v = (x.to(device, self.dtype) for x in (q, k, v))
        if self.ragged:
            starts = (
                torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32)
                for lens in (self.q_lens, self.k_lens)
            )
            return q, k, v, *starts  # type: ignore[return-value]
        dense = [
            x.view(len(lens), lens[0], *x.shape[1:])
            for x, lens in zip((q, k, v), (self.q_lens, self.k_lens, self.k_lens), strict=True)
        ]
        return *dense, None, None  # type: ignore[return-value]


@dataclass
class SageCall(Inputs):
    """A case's tensors on a device.

    `options` are keyword arguments of `sage_attention`. `target` is the target of the last call, whose FP8
    format the reference quantises to.
    """

    case: SageCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any]
    target: Target | None = None

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` of the operation."""
        self.target = active_target(self.q.device)
        o, lse = sage_attention(self.q, self.k, self.v, return_lse=True, **self.options)
        return o, lse

    def prepare(self) -> Callable[[], torch.Tensor]:
        """The call, which gives `o`."""
        return lambda: self.call()[0]

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` in fp32 over what the host's quantisers store for the target."""
        with self._on_target():
            o, lse = sage_attention_reference(self.q, self.k, self.v, return_lse=True, **self.options)
        return o, lse

    def exact(self) -> torch.Tensor:
        """`o` in fp32 over q, k and v as they are."""
        o = sage_attention_reference(self.q, self.k, self.v, **{**self.options, "qk_dtype": None})
        assert isinstance(o, torch.Tensor)
        return o

    def lse_slack(self) -> float:
        """The error of the target's own sums of FP8 products."""
        with self._on_target():
            return short_sum_error(self._plan(), self.q, self.k)

    def explain(self) -> str:
        """The configuration, in words."""
        config = self._plan().config
        options = config.options
        return (
            f"{config.block_m} rows x {config.block_n} keys, V and P in {config.fp8}, "
            f"{options.num_warps} warps, {options.num_stages} stages"
        )

    def _plan(self) -> SagePlan:
        planned = {name: value for name, value in self.options.items() if name != "block_mask"}
        return plan_sage(self.q, self.k, **planned)

    def _on_target(self) -> AbstractContextManager[object]:
        return nullcontext() if self.target is None else executing(InterpretExecutor(self.target))


_SMOOTHINGS = ((False, False), (True, False), (True, True))
# The sweep has each of these once for every precision.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": "top_left"},
    {"causal": "bottom_right", "gqa_ratio": 4},
    {"window_left": 100, "window_right": 30, "head_dim": 64},
    {"window_left": 70, "smooth_q": True},
    {"causal": "bottom_right", "window_left": 128, "granularity": "per_block"},
    {"causal": "top_left", "window_left": 7, "window_right": 50},
    {"blocks": (128, 64)},
    {"blocks": (256, 128), "causal": "bottom_right"},
    {"ragged": True, "q_lens": (70, 0, 200), "k_lens": (130, 9, 33)},
    {"ragged": True, "q_lens": (33, 150), "k_lens": (300, 70), "window_left": 40, "window_right": 3},
    {"layout": "BHSD", "smooth_k": False},
    {"dtype": torch.float16, "num_kv_heads": 3},
)


def sweep(*, full: bool = False, seed: int = 0) -> list[SageCase]:
    """Cases of every precision, granularity and smoothing over "offset" data, then cases of `_OPTIONS`.

    `full` adds the other kinds of data, and every granularity for `_OPTIONS`.
    """
    data = ("offset", "outlier", "gaussian") if full else ("offset",)
    accuracy = [
        SageCase(
            qk_dtype=qk, granularity=granularity, smooth_k=smooth_k, smooth_q=smooth_q, data=kind, seed=seed
        )
        for kind, qk, granularity, (smooth_k, smooth_q) in product(
            data, PRECISIONS, SAGE_GRANULARITIES, _SMOOTHINGS
        )
    ]
    groups = [{"granularity": one} for one in SAGE_GRANULARITIES] if full else [{}]
    options = [
        SageCase(**{"qk_dtype": qk, "q_lens": (300,), "k_lens": (333,), "seed": seed, **some, **group})
        for group, some, qk in product(groups, _OPTIONS, PRECISIONS)
    ]
    return list(dict.fromkeys([*accuracy, *options]))


def shipped(target: str = "") -> list[SageCase]:
    """A call for every shipped configuration: precisions, granularities and head_dims."""
    return [
        SageCase(
            qk_dtype=qk, granularity=granularity, causal="bottom_right", q_lens=(256,), k_lens=(256,),
            head_dim=head_dim,
        )
        for head_dim, qk, granularity in product((128, 64), PRECISIONS, SAGE_GRANULARITIES)
    ]  # fmt: skip


def of_contract(contract: Contract, shape: Shape, clean: bool) -> SageCase:
    """Q of a contract is what Q and K are multiplied in; causal, as in prefill."""
    return SageCase(
        qk_dtype="fp8" if contract.q.startswith("fp8_") else contract.q, causal="bottom_right",
        q_lens=(shape.context,), k_lens=(shape.context,), num_kv_heads=shape.num_kv_heads,
        gqa_ratio=shape.gqa_ratio, head_dim=shape.head_dim,
    )  # fmt: skip


def _attend(qk_dtype: str) -> object:
    """A planned call on K and V that are quantised beforehand."""
    q, k, v, *_ = SageCase.small(q_lens=(256,), k_lens=(1024,), head_dim=128, gqa_ratio=1).build()
    plan = plan_sage(q, k, qk_dtype=qk_dtype)
    return plan.attend(q, plan.quantize_kv(k, v))


def accuracy(case: SageCase) -> tuple[str, str, str]:
    """A case's table of accuracy, its row (precision and granularity) and its column (smoothing)."""
    rest = replace(
        case, qk_dtype="int8", granularity="per_thread", smooth_k=True, smooth_q=False, data="offset"
    )
    return f"data {case.data}, {rest}", f"{case.qk_dtype} {case.granularity}", f"mean of {case.smoothing} out"


CASES = Cases(
    case=SageCase,
    bounds={"relative_l1": BOUND},
    sweep=lambda target, full, seed: sweep(full=full, seed=seed),
    of_contract=of_contract,
    families=lambda target: {"Sage, int8": partial(_attend, "int8"), "Sage, FP8": partial(_attend, "fp8")},
    shipped=shipped,
    columns={
        "Q and K": lambda case: case.qk_dtype,
        "granularity": lambda case: case.granularity,
        "head_dim": lambda case: case.head_dim,
    },
    accuracy=accuracy,
)
