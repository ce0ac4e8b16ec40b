"""`narrowkv bench sage`: quantisation and attention timed together, beside torch's SDPA in bf16."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from narrowkv.attn_prefill import plan_sage, sage_attention, sage_attention_reference
from narrowkv.cli.bench.ceilings import Ceilings, measure_ceilings
from narrowkv.cli.bench.timing import FLUSH_BYTES, GraphTimer
from narrowkv.cli.contracts import BOUND_FP8_P as BOUND
from narrowkv.cli.environment import gpus, versions
from narrowkv.cli.places import find_place
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError, UsageError, number
from narrowkv.quant.accuracy import compare
from narrowkv.quant.sage import SAGE_GRANULARITIES

OURS = "narrowkv"
_QK = ("int8", "int4", "fp8")
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
class SageRow:
    """One measured call.

    Attributes:
        shape: its sizes.
        backend: "narrowkv", or torch's SDPA by backend.
        qk, granularity: of narrowkv.
        relative_l1: the worse kernel error of some rows before and after timing.
        median_us, p10_us, p90_us: device time, quantisation included.
        attend_us: of which attention over K, V that are quantised already, Q's quantisation included.
        floor_us: the least time of a bf16 attention by the ceilings of this run; ratio_to_floor: time over
            it.
        ratio_to_sdpa: time over the best backend of SDPA's.
        flops_per_s: flops over the median.
        status: "pass", "fail" or "refused"; detail: why.
    """

    shape: SageShape
    backend: str
    qk: str = "bf16"
    granularity: str = ""
    relative_l1: float | None = None
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    attend_us: float | None = None
    floor_us: float | None = None
    ratio_to_floor: float | None = None
    ratio_to_sdpa: float | None = None
    flops_per_s: float | None = None
    status: str = "pass"
    detail: str = field(default="")

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        figures = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "shape"}
        return {**{name: getattr(self.shape, name) for name in self.shape.__dataclass_fields__}, **figures}


def _timed(row: SageRow, call: Callable[[], Any], ceilings: Ceilings, timer: GraphTimer) -> SageRow:
    timing = timer.measure(call)
    floor = ceilings.floor_us(row.shape.bytes_touched, row.shape.flops)
    return replace(
        row, median_us=timing.median_us, p10_us=timing.p10_us, p90_us=timing.p90_us, floor_us=floor,
        ratio_to_floor=timing.median_us / floor, flops_per_s=row.shape.flops / (timing.median_us * 1e-6),
    )  # fmt: skip


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
            rows.append(_timed(row, call, ceilings, timer))
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

    row = SageRow(shape, OURS, qk, granularity, error())
    bound = BOUND if expected is not None else 4 * BOUND
    if not row.relative_l1 <= bound:  # type: ignore[operator]
        return replace(row, status="fail", detail=f"relative L1 {row.relative_l1:.3g}, bound {bound:g}")
    row = _timed(row, run, ceilings, timer)
    kv = plan.quantize_kv(k, v)
    attend_us = timer.measure(lambda: plan.attend(q, kv, out=out)).median_us
    again = error()
    worse = max(row.relative_l1 or 0.0, again) if again == again else math.nan
    status = "pass" if worse <= bound else "fail"
    return replace(row, relative_l1=worse, attend_us=attend_us, status=status)


def bench_sage(
    shapes: Sequence[SageShape], qk: Sequence[str], granularities: Sequence[str], report: Report, samples: int
) -> ExitCode:
    """Measures every shape in every precision and granularity; Ctrl-C keeps the rows that were finished."""
    for option, names, known in (("--qk", qk, _QK), ("--granularity", granularities, SAGE_GRANULARITIES)):
        if unknown := [name for name in names if name not in known]:
            raise UsageError(f"{option} must be of {', '.join(known)}; got {unknown[0]!r}")
    if not torch.cuda.is_available():
        raise UnsupportedHereError(
            f"bench measures device time and needs a GPU; torch {torch.__version__} sees none. "
            "`narrowkv probe sage`, `validate sage` and `inspect sage` work without one"
        )
    timer = GraphTimer(samples=samples)
    rows: list[SageRow] = []
    ceilings: Ceilings | None = None
    interrupted = False
    with report.progress(len(shapes) * (1 + len(qk) * len(granularities)) + 1, "measuring") as line:
        try:
            ceilings = measure_ceilings(timer)
            line.advance("ceilings")
            for shape in shapes:
                peers = measure_sdpa(shape, ceilings, timer)
                rows += peers
                line.advance(f"{shape} sdpa")
                best = min((row.median_us for row in peers if row.median_us is not None), default=math.nan)
                for name, granularity in product(qk, granularities):
                    row = measure_ours(shape, name, granularity, ceilings, timer)
                    if row.median_us is not None:
                        row = replace(row, ratio_to_sdpa=row.median_us / best)
                    rows.append(row)
                    line.advance(f"{shape} {name} {granularity}")
        except KeyboardInterrupt:
            interrupted = True
    if ceilings is not None:
        report.say(f"{find_place('gpu').description}; bf16 {ceilings.bf16_flops_per_s / 1e12:.0f} TFLOP/s")
    report.show(_table(rows))
    body = {
        "bench": "sage",
        "device": gpus()[torch.cuda.current_device()],
        "versions": versions(),
        "method": {"flush_bytes": FLUSH_BYTES, "flush": "read", "samples": samples, "graph": True},
        "ceilings": ceilings,
        "rows": [row.as_dict() for row in rows],
    }
    failed = any(row.status == "fail" for row in rows)
    return report.finish(body, ExitCode.NUMERICAL if failed else ExitCode.OK, interrupted=interrupted)


def _table(rows: Sequence[SageRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in ("backend", "Q and K", "granularity", "mask"):
        table.add_column(column)
    for column in (
        "context", "us", "p10", "p90", "K, V ready us", "floor us", "x floor", "x sdpa", "TFLOP/s", "rel. L1",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    table.add_column("")
    for row in rows:
        times = [number(x, 5) for x in (row.median_us, row.p10_us, row.p90_us, row.attend_us, row.floor_us)]
        ratios = [f"{x:.3f}" if x is not None else "-" for x in (row.ratio_to_floor, row.ratio_to_sdpa)]
        table.add_row(
            row.backend, row.qk, row.granularity, "causal" if row.shape.causal else "none",
            str(row.shape.context), *times, *ratios,
            number(row.flops_per_s / 1e12) if row.flops_per_s else "-",
            f"{row.relative_l1:.2e}" if row.relative_l1 is not None else "-", row.detail,
            style={"pass": "", "fail": "bold red"}.get(row.status, "yellow"),
        )  # fmt: skip
    return table
