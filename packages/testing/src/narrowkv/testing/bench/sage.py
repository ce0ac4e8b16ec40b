"""The bench of Sage attention: quantisation and attention timed together, with torch SDPA in bf16 beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from narrowkv.quant.accuracy import compare
from narrowkv.sage import plan_sage, sage_attention, sage_attention_reference
from narrowkv.testing.bench.measure import Bench, Call, Columns, ModelCall, microseconds, ratio_of
from narrowkv.testing.bench.timing import GraphTimer
from narrowkv.testing.cases.sage import BOUND, SageCase
from narrowkv.testing.model import ModelExecutor, Scale
from narrowkv.testing.operations import SageRows

_CHECKED_ROWS = 512
_ROWS_PER_GROUP = 128  # blocks of so many queries are quantised independently of each other
_TRACED_TOKENS = 1024  # by the model
_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SageSizes:
    """Sizes of one call; `context` is the length of Q and of K."""

    batch: int
    context: int
    heads: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """Multiplications and additions of QK and PV; under a causal mask of half the pairs."""
        pairs = self.context * (self.context + 1) / 2 if self.causal else self.context**2
        return 4.0 * self.batch * self.heads * self.head_dim * pairs

    @property
    def bytes_touched(self) -> float:
        """Q, K, V and O in bf16, each byte once."""
        return 4 * 2.0 * self.batch * self.context * self.heads * self.head_dim

    def inputs(self, device: str) -> QKV:
        """Gaussian q, k and v; k with an offset of each channel."""
        random = torch.Generator(device).manual_seed(0)
        size = (self.batch, self.context, self.heads, self.head_dim)
        q, k, v = (torch.randn(size, generator=random, device=device) for _ in range(3))
        k += 4 * torch.randn(self.heads, self.head_dim, generator=random, device=device)
        return q.bfloat16(), k.bfloat16(), v.bfloat16()


def sage_bench(qk: Sequence[str], granularities: Sequence[str], device: str = "cuda") -> Bench[SageSizes]:
    """Torch SDPA by backend, then Sage attention in every precision and granularity.

    Times include quantisation, and the floor is that of attention in bf16. Further figures: `attend_us`, the
    part of it once K and V are quantised, and `ratio_to_sdpa`, the time over that of the fastest SDPA.

    Args:
        qk: precisions of Q and K.
        granularities: of their descales.
        device: of the tensors.
    """
    ways = tuple(product(qk, granularities))

    def calls(shape: SageSizes) -> Iterator[Call]:
        """SDPA's backends, then narrowkv's calls."""
        qkv = shape.inputs(device)
        for name, backend in _SDPA.items():
            yield Call(
                {"backend": f"sdpa {name}", "qk": "bf16", "granularity": ""},
                partial(_sdpa, qkv, backend, shape.causal), shape.bytes_touched, shape.flops,
                extra={"attend_us": None}, is_peer=True,
            )  # fmt: skip
        for way in ways:
            yield _call(shape, *way, qkv)

    def modelled(shape: SageSizes) -> list[ModelCall]:
        """One head and some tokens."""
        return [
            ModelCall(
                ", ".join(way), shape, shape.flops, 0.1, partial(_trace, shape, *way), shape.bytes_touched
            )
            for way in ways
        ]

    columns = Columns(
        {
            "backend": "backend",
            "Q and K": "qk",
            "granularity": "granularity",
            "mask": lambda row: "causal" if row["causal"] else "none",
        },
        {"context": "context"},
        ("backend", "qk", "granularity"),
        {"K, V ready us": microseconds("attend_us"), "x sdpa": ratio_of("ratio_to_sdpa")},
    )
    return Bench(
        name="sage", columns=columns, calls=calls, modelled=modelled, ratio="ratio_to_sdpa",
        is_baseline=lambda row: row.labels["backend"] != "narrowkv",
    )  # fmt: skip


def _options(shape: SageSizes, qk: str, granularity: str) -> dict[str, Any]:
    causal = "bottom_right" if shape.causal else None
    return {"qk_dtype": qk, "q_granularity": granularity, "k_granularity": granularity, "causal": causal}


def _sdpa(qkv: QKV, backend: SDPBackend, causal: bool) -> Callable[[], torch.Tensor]:
    q, k, v = (x.transpose(1, 2) for x in qkv)

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def _call(shape: SageSizes, qk: str, granularity: str, qkv: QKV) -> Call:
    q, k, v = qkv
    options = _options(shape, qk, granularity)
    plan = plan_sage(q, k, **options)
    out = torch.empty_like(q)
    count = min(_CHECKED_ROWS, shape.context)
    part = q[:1, -count:, :1], k[:1, :, :1], v[:1, :, :1]
    # The last rows keep their descales if they are whole groups; a descale of the whole tensor is not theirs.
    aligned = shape.context % _ROWS_PER_GROUP == 0 and granularity != "per_tensor"
    expected = sage_attention_reference(*part, **options) if aligned else None

    def error(o: torch.Tensor) -> float:
        # Where the reference has other descales, the same call of the part stands in for it.
        right = sage_attention(*part, **options) if expected is None else expected
        assert isinstance(right, torch.Tensor)
        return compare(o[:1, -count:, :1], right).relative_l1

    def attend_us(timer: GraphTimer) -> float:
        kv = plan.quantize_kv(k, v)
        return timer.measure(lambda: plan.attend(q, kv, out=out)).median_us

    def run() -> torch.Tensor:
        plan.attend(q, plan.quantize_kv(k, v), out=out)
        return out

    return Call(
        {"backend": "narrowkv", "qk": qk, "granularity": granularity},
        lambda: run, shape.bytes_touched, shape.flops, error, BOUND if aligned else 4 * BOUND,
        extra={"attend_us": attend_us},
    )  # fmt: skip


def _trace(shape: SageSizes, qk: str, granularity: str, executor: ModelExecutor) -> object:
    """Makes a smaller call."""
    tokens = min(shape.context, _TRACED_TOKENS)
    more = shape.context / tokens
    heads = shape.batch * shape.heads
    executor.scale = Scale(workgroups=heads * more, passes=more, keys=heads * more)
    case = SageCase(
        qk_dtype=qk, granularity=granularity, causal="bottom_right" if shape.causal else "",
        q_lens=(tokens,), k_lens=(tokens,), head_dim=shape.head_dim,
    )  # fmt: skip
    return case.inputs().call()


def make(options: SageRows) -> tuple[Bench[SageSizes], list[SageSizes], dict[str, Any]]:
    """The bench, its rows, and the settings that they depend on."""
    rows = [
        SageSizes(batch, context, options.heads, options.head_dim, causal)
        for batch, context, causal in product(options.batch, options.context, (False, True))
    ]
    settings = {"qk": options.qk, "granularity": options.granularity}
    return sage_bench(options.qk, options.granularity), rows, settings
