"""`narrowkv bench sage`: quantisation and attention timed together, beside torch's SDPA in bf16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from narrowkv.cli.backends import OURS
from narrowkv.cli.bench.ceilings import Ceilings
from narrowkv.cli.bench.reporter import BenchRow, BenchRun, Columns, judged, ratio, time_checked, timed
from narrowkv.cli.bench.timing import GraphTimer
from narrowkv.cli.contracts import BOUND_FP8_P as BOUND
from narrowkv.cli.report import ExitCode, Report, number
from narrowkv.quant.accuracy import compare
from narrowkv.sage import plan_sage, sage_attention, sage_attention_reference

_SDPA_STEP = "torch sdpa"
_CHECKED_ROWS = 512
_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class SageShape:
    """One row's sizes; Q and K have the same length."""

    batch: int
    context: int
    heads: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """Multiplications and additions of QK and PV; of half the pairs under a causal mask."""
        pairs = self.context * (self.context + 1) / 2 if self.causal else self.context**2
        return 4.0 * self.batch * self.heads * self.head_dim * pairs

    @property
    def bytes_touched(self) -> float:
        """Q, K, V and O once, in bf16."""
        return 4 * 2.0 * self.batch * self.context * self.heads * self.head_dim

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gaussian q, k and v; k with an offset of each channel."""
        random = torch.Generator("cuda").manual_seed(0)
        size = (self.batch, self.context, self.heads, self.head_dim)
        q, k, v = (torch.randn(size, generator=random, device="cuda") for _ in range(3))
        k += 4 * torch.randn(self.heads, self.head_dim, generator=random, device="cuda")
        return q.bfloat16(), k.bfloat16(), v.bfloat16()


@dataclass(frozen=True)
class SageRow(BenchRow):
    """One measured call; times include quantisation, and the floor is that of a bf16 attention.

    Attributes:
        backend: "narrowkv", or torch's SDPA by backend.
        qk, granularity: of narrowkv.
        attend_us: of which attention over K, V that are quantised already, Q's quantisation included.
        ratio_to_sdpa: time over the best backend of SDPA's.
    """

    shape: SageShape
    backend: str
    qk: str = "bf16"
    granularity: str = ""
    attend_us: float | None = None
    ratio_to_sdpa: float | None = None


def measure_sdpa(shape: SageShape, ceilings: Ceilings, timer: GraphTimer) -> list[SageRow]:
    """Torch's own attention in bf16, each backend that takes the call."""
    q, k, v = (x.transpose(1, 2) for x in shape.inputs())
    rows = []
    for name, backend in _SDPA.items():

        def call(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)

        row = SageRow(shape, f"sdpa {name}")
        try:
            rows.append(timed(row, timer.measure(call), ceilings, shape.bytes_touched, shape.flops))
        except RuntimeError as error:
            rows.append(replace(row, status="refused", detail=str(error).splitlines()[0]))
    return rows


def measure_ours(
    shape: SageShape, qk: str, granularity: str, ceilings: Ceilings, timer: GraphTimer
) -> SageRow:
    """Checks the last rows of the first head, times the call with all its quantisation, and checks again."""
    q, k, v = shape.inputs()
    causal = "bottom_right" if shape.causal else None
    options: dict[str, Any] = {
        "qk_dtype": qk, "q_granularity": granularity, "k_granularity": granularity, "causal": causal,
    }  # fmt: skip
    plan = plan_sage(q, k, **options)
    out = torch.empty_like(q)

    def run() -> Any:
        return plan.attend(q, plan.quantize_kv(k, v), out=out)

    # Whole blocks of queries keep their groups; one descale for everything would not be that of the part.
    count = min(_CHECKED_ROWS, shape.context)
    part = q[:1, -count:, :1], k[:1, :, :1], v[:1, :, :1]
    aligned = shape.context % 128 == 0 and granularity != "per_tensor"
    expected = sage_attention_reference(*part, **options) if aligned else None

    def error() -> float:
        out.fill_(math.nan)
        run()
        if not bool(out.isfinite().all()):
            return math.nan
        # Without the reference of a part, against the same call of a part.
        checked = sage_attention(*part, **options) if expected is None else expected
        assert isinstance(checked, torch.Tensor)
        return compare(out[:1, -count:, :1], checked).relative_l1

    bound = BOUND if expected is not None else 4 * BOUND
    worse, timing = time_checked(timer.capture(run), error, bound, timer)
    row = judged(SageRow(shape, OURS.name, qk, granularity), worse, timing, bound)
    if timing is None or row.status != "pass":
        return row
    kv = plan.quantize_kv(k, v)
    attend_us = timer.measure(lambda: plan.attend(q, kv, out=out)).median_us
    return replace(timed(row, timing, ceilings, shape.bytes_touched, shape.flops), attend_us=attend_us)


def bench_sage(
    shapes: Sequence[SageShape], qk: Sequence[str], granularities: Sequence[str], report: Report, samples: int
) -> ExitCode:
    """Measures every shape in every precision and granularity; Ctrl-C keeps the rows that were finished."""
    run: BenchRun[SageRow] = BenchRun(
        "sage",
        SageRow,
        report,
        samples=samples,
        without_a_gpu="`narrowkv probe sage`, `validate sage` and `inspect sage`",
    )

    def work(step: tuple[SageShape, str, str], ceilings: Ceilings, timer: GraphTimer) -> Sequence[SageRow]:
        shape, name, granularity = step
        if name == _SDPA_STEP:
            return measure_sdpa(shape, ceilings, timer)
        row = measure_ours(shape, name, granularity, ceilings, timer)
        peers = (r.median_us for r in run.rows if r.shape == shape and r.backend != OURS.name)
        best = min((us for us in peers if us is not None), default=math.nan)
        return [row if row.median_us is None else replace(row, ratio_to_sdpa=row.median_us / best)]

    steps = [(shape, *way) for shape in shapes for way in ((_SDPA_STEP, ""), *product(qk, granularities))]
    run.measure(steps, work)
    run.show(_COLUMNS)
    return run.finish(("backend", "qk", "granularity"))


_COLUMNS: Columns[SageRow] = Columns(
    labels={
        "backend": lambda row: row.backend,
        "Q and K": lambda row: row.qk,
        "granularity": lambda row: row.granularity,
        "mask": lambda row: "causal" if row.shape.causal else "none",
    },
    sizes={"context": lambda row: row.shape.context},
    others={
        "K, V ready us": lambda row: number(row.attend_us, 4),
        "x sdpa": lambda row: ratio(row.ratio_to_sdpa),
    },
)
