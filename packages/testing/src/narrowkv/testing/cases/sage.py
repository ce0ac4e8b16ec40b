"""Cases of Sage attention: axes, seeded inputs and bounds, for tests, `validate`, `probe` and `bench`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from narrowkv.quant.accuracy import ErrorReport, compare, max_abs
from narrowkv.quant.sage import SAGE_GRANULARITIES
from narrowkv.runtime.errors import check_choice
from narrowkv.runtime.launch import InterpretExecutor, active_target, executing
from narrowkv.runtime.targets import Target
from narrowkv.sage.api import plan_sage, sage_attention
from narrowkv.sage.reference import sage_attention_reference, short_sum_error
from narrowkv.testing.cases import Case, Inputs, named
from narrowkv.testing.operation import BOUND_FP8_P, Cases, Contract, Shape
from narrowkv.testing.words import SAGE_PRECISIONS

__all__ = [
    "CASES", "SageCall", "SageCase", "SageInputs", "SageResult", "check_sage", "one_shape", "shipped",
    "sweep",
]  # fmt: skip

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
        """What Q and K are multiplied in, and their granularity, for tables."""
        return self.qk_dtype, self.granularity

    @property
    def published(self) -> tuple[float, float, float] | None:
        """The published figures that the case must reach, if any."""
        method = self.qk_dtype == "int4" and self.smooth_k and self.smooth_q and self.data == "offset"
        return PUBLISHED.get(self.granularity) if method else None

    @property
    def smoothing(self) -> str:
        """Whose means are subtracted, for tables."""
        return {0: "none", 1: "K", 2: "Q", 3: "K and Q"}[self.smooth_k + 2 * self.smooth_q]

    def inputs(self, device: str = "cpu") -> SageCall:
        """The tensors with the options of the call."""
        return SageCall(self, *self.build(device)[:3])

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
            "qk_dtype": case.qk_dtype,
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

    def prepare(self) -> Callable[[], torch.Tensor]:
        """The call, which gives `o`."""
        return lambda: self.call()[0]

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` in fp32 over what the host's quantisers store for the target."""
        with nullcontext() if self.target is None else executing(InterpretExecutor(self.target)):
            o, lse = sage_attention_reference(self.q, self.k, self.v, return_lse=True, **self.options)
        return o, lse

    def exact(self) -> torch.Tensor:
        """`o` in fp32 over q, k and v as they are."""
        o = sage_attention_reference(self.q, self.k, self.v, **{**self.options, "qk_dtype": None})
        assert isinstance(o, torch.Tensor)
        return o

    def lse_bound(self) -> float:
        """How far lse may be off on the target: more where the hardware sums in fewer bits."""
        with nullcontext() if self.target is None else executing(InterpretExecutor(self.target)):
            return LSE_BOUND + short_sum_error(plan_sage(self.q, self.k, **self.options), self.q, self.k)

    def explain(self) -> str:
        """The configuration, in words."""
        config = plan_sage(self.q, self.k, **self.options).config
        options = config.options
        return (
            f"{config.block_m} rows x {config.block_n} keys, V and P in {config.fp8}, "
            f"{options.num_warps} warps, {options.num_stages} stages"
        )


_SMOOTHINGS = ((False, False), (True, False), (True, True))


def sweep(*, full: bool = False, seed: int = 0) -> list[SageCase]:
    """Every precision, granularity and smoothing where channels have offsets; all data when `full`."""
    data = ("offset", "outlier", "gaussian") if full else ("offset",)
    return [
        SageCase(
            qk_dtype=qk, granularity=granularity, smooth_k=smooth_k, smooth_q=smooth_q, data=kind, seed=seed
        )
        for kind, qk, granularity, (smooth_k, smooth_q) in product(
            data, PRECISIONS, SAGE_GRANULARITIES, _SMOOTHINGS
        )
    ]


_SIZES = {"b": "sequences", "h": "query heads", "s": "tokens of a sequence", "d": "head_dim"}


def one_shape(shape: str, *, precision: str = "", granularity: str = "", seed: int = 0) -> list[SageCase]:
    """Cases of one shape: every smoothing, with every precision and granularity that is not given.

    Args:
        shape: `b=1,h=8,s=1024,d=128`: sequences, query heads, tokens of a sequence, head_dim; `kv=2` beside
            them for fewer KV heads.
        precision: "int8", "int4", "fp8", or "" for all.
        granularity: one of `SAGE_GRANULARITIES`, or "" for all.
        seed: of the inputs.

    Raises:
        ValueError: naming what is wrong, and how a shape is written.

    Example:
        >>> cases = one_shape("b=1,h=2,s=64,d=64", precision="fp8", granularity="per_thread")
        >>> [case.smoothing for case in cases]
        ['none', 'K', 'K and Q']
    """
    sizes: dict[str, int] = {}
    for part in shape.split(","):
        name, _, value = part.partition("=")
        known = name in (*_SIZES, "kv") and name not in sizes
        if not (known and value.isascii() and value.isdigit() and int(value) > 0):
            raise ValueError(
                f"shape must be written like b=1,h=8,s=1024,d=128 or b=1,h=8,kv=2,s=1024,d=128, got {part!r}"
            )
        sizes[name] = int(value)
    missing = [f"{name} ({what})" for name, what in _SIZES.items() if name not in sizes]
    if missing:
        raise ValueError(
            f"shape must name {', '.join(missing)} too, as in b=1,h=8,s=1024,d=128; got {shape!r}"
        )
    heads, lens = sizes.get("kv", sizes["h"]), (sizes["s"],) * sizes["b"]
    if sizes["h"] % heads:
        raise ValueError(f"shape must have a multiple of its {heads} KV heads, got {sizes['h']} query heads")
    precisions = [check_choice("precision", precision, PRECISIONS)] if precision else PRECISIONS
    granularities = (
        [check_choice("granularity", granularity, SAGE_GRANULARITIES)] if granularity else SAGE_GRANULARITIES
    )
    return [
        SageCase(
            qk_dtype=qk, granularity=tokens, smooth_k=smooth_k, smooth_q=smooth_q, q_lens=lens, k_lens=lens,
            num_kv_heads=heads, gqa_ratio=sizes["h"] // heads, head_dim=sizes["d"], seed=seed,
        )
        for qk, tokens, (smooth_k, smooth_q) in product(precisions, granularities, _SMOOTHINGS)
    ]  # fmt: skip


def shipped(target: str = "") -> list[SageCase]:
    """A call for every shipped configuration: precisions, granularities and head_dims."""
    return [
        SageCase(
            qk_dtype=qk, granularity=granularity, causal="bottom_right", q_lens=(256,), k_lens=(256,),
            head_dim=head_dim,
        )
        for head_dim, qk, granularity in product((128, 64), PRECISIONS, SAGE_GRANULARITIES)
    ]  # fmt: skip


@dataclass(frozen=True)
class SageResult:
    """How a case went.

    Attributes:
        place: where it ran.
        total: of `o` against attention that quantises nothing; None if the call broke.
        kernel_l1: relative L1 of `o` against fp32 over the stored numbers.
        lse_error: largest difference of `lse` from that.
        passed: kernel error and lse within their bounds and, where there are published figures, no worse.
        detail: why not.
    """

    place: str = ""
    total: ErrorReport | None = None
    kernel_l1: float = float("nan")
    lse_error: float = float("nan")
    passed: bool = False
    detail: str = ""


def check_sage(
    case: SageCase, device: str = "cpu", context: Callable[[], AbstractContextManager[object]] = nullcontext
) -> SageResult:
    """Runs a case of Sage attention, and compares it with both references and with the published figures."""
    call = case.inputs(device)
    with context():
        o, lse = call.call()
        expected, expected_lse = call.reference()
    kernel, total, lse_error = compare(o, expected), compare(o, call.exact()), max_abs(lse, expected_lse)
    problems = []
    if not kernel.passes(relative_l1=case.bound):
        problems.append(f"kernel error {kernel} (bound {case.bound:g})")
    if not lse_error <= (bound := call.lse_bound()):
        problems.append(f"lse differs by {lse_error:.3g} (bound {bound:.3g})")
    goal = case.published
    if goal is not None and not total.passes(cosine=goal[0], relative_l1=goal[1]):
        problems.append(f"{total} is worse than published (cosine {goal[0]}, relative L1 {goal[1]})")
    return SageResult("", total, kernel.relative_l1, lse_error, not problems, "; ".join(problems))


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


CASES = Cases(
    case=SageCase,
    bounds={"kernel_relative_l1": BOUND, "lse": LSE_BOUND},
    sweep=lambda target, full, seed: sweep(full=full, seed=seed),
    of_contract=of_contract,
    families=lambda target: {"Sage, int8": partial(_attend, "int8"), "Sage, FP8": partial(_attend, "fp8")},
    shipped=shipped,
    columns={
        "Q and K": lambda case: case.qk_dtype,
        "granularity": lambda case: case.granularity,
        "head_dim": lambda case: case.head_dim,
    },
    check=check_sage,
    failed=lambda place, why: SageResult(place, detail=why),
    one_shape=one_shape,
)
