"""Measures goals on a GPU: decode, speculation, prefill, mixed steps, sparse attention and Sage.

Each line has the shipped choice and what else can be chosen without new kernels: splits, tiles, kernels, and
a mixed step in two calls. Every call is checked against the reference before it is timed by the replay of a
graph; the floor is its bytes at the read bandwidth of this run, or its flops at the bf16 rate. All kernels
are compiled first, in parallel processes.

    python tools/measured_goals.py --processes 15 --json goals.json
    python tools/measured_goals.py --rehearse --lines "batch 4 over 1024" --choices shipped
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_decode.config import _items_of, parts_of
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import KernelSpec, recording, warmup
from narrowkv.testing.bench.ceilings import Ceilings, measure_ceilings
from narrowkv.testing.bench.measure import Call, check, time_checked
from narrowkv.testing.bench.sage import SageBench, SageSizes
from narrowkv.testing.bench.sparse import SparseBench, SparseSizes
from narrowkv.testing.bench.timing import GraphTimer
from narrowkv.testing.bench.traffic import Run, StepInputs, TrafficBench
from narrowkv.testing.cases.decode import BOUND
from narrowkv.testing.machine import versions
from narrowkv.testing.traffic import LayerStep

SHIPPED = "shipped"
GLM, LLAMA, TP8, QWEN, D64, D256 = (
    "glm-4.5", "llama-8b", "llama-70b-tp8", "qwen3-moe", "gpt-oss-120b", "gemma-3-12b"
)  # fmt: skip
FP8, FP4, K8V4, NVFP4, FP4_E4M3 = (
    "fp8_e4m3fn", "fp4_e2m1", "fp8_e4m3fn/fp4_e2m1", "fp4_e2m1:16+e4m3", "fp4_e2m1:e4m3"
)  # fmt: skip
NAMES = {FP8: "FP8", FP4: "FP4", K8V4: "K8V4", NVFP4: "NVFP4", FP4_E4M3: "FP4, E4M3 scales", "bf16": "bf16"}
_SAMPLES, _SECONDS, _CHECKED_REPLAYS = 15, 0.02, 2


@dataclass(frozen=True)
class Tile:
    """A configuration of decode to try.

    Attributes:
        rows, keys: of a tile; warps, stages, registers: compiler options, 0 registers for no limit.
        programs: that a multiprocessor gets; split: how they share keys.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int
    programs: int
    split: str = "even"

    def __str__(self) -> str:
        limit = f", {self.registers} registers" if self.registers else ""
        return (
            f"{self.rows}x{self.keys}, {self.warps} warps, {self.stages} stages{limit}, "
            f"{self.programs} programs, {self.split}"
        )


Choice = tuple[str, str, dict[str, Any], Tile | None]
"""A label, a method of `StepInputs`, what its plan is told, and a tile of decode."""


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        name: it; goal: at most so many times the floor, microseconds, or of another line, as words.
        step: its call, or sizes of sparse attention or Sage.
        choices: what is measured.
    """

    name: str
    goal: str
    step: LayerStep | SparseSizes | SageSizes
    choices: tuple[Choice, ...] = ()


def _shipped(method: str) -> Choice:
    return SHIPPED if method == "paged_decode" else f"{method}, {SHIPPED}", method, {}, None


DECODE = (_shipped("paged_decode"),)
SPLITS: tuple[Choice, ...] = (
    *DECODE,
    *((f"split={split}", "paged_decode", {"split": split}, None)
      for split in ("none", "even", "per_sequence")),
    *((f"tokens_per_split={n}", "paged_decode", {"tokens_per_split": n}, None)
      for n in (256, 512, 1024, 2048, 4096)),
)  # fmt: skip
PREFILL = (_shipped("batch_prefill"),)
APPEND = (_shipped("batch_prefill"), _shipped("prefill_append"))
MIXED: tuple[Choice, ...] = (*PREFILL, ("two calls", "two_calls", {}, None))
KERNELS: tuple[Choice, ...] = (
    *PREFILL,
    *((f"kernel={kernel}", "batch_prefill", {"kernel": kernel}, None)
      for kernel in ("dense", "fused", "split")),
    *((f"kernel=split, num_splits={n}", "batch_prefill", {"kernel": "split", "num_splits": n}, None)
      for n in (2, 4, 8, 16, 32)),
)  # fmt: skip


def _tiles(*tiles: Tile) -> tuple[Choice, ...]:
    return tuple((str(tile), "paged_decode", {}, tile) for tile in tiles)


_SHORT = _tiles(
    *(Tile(16, 32, 1, 3, 0, 8, split) for split in ("even", "per_sequence")),
    *(Tile(16, 64, warps, 3, 0, programs, split)
      for warps, programs in ((1, 4), (2, 2), (2, 3), (2, 4)) for split in ("even", "per_sequence")),
    *(Tile(16, 128, 4, 2, 0, programs, split)
      for programs in (1, 2) for split in ("even", "per_sequence")),
)  # fmt: skip
_SPECULATIVE: dict[int, tuple[Choice, ...]] = {
    2: _tiles(
        *(Tile(32, keys, warps, stages, 0, programs)
          for keys, warps, stages, programs in (
              (32, 1, 3, 8), (32, 2, 3, 4), (64, 1, 3, 6), (64, 2, 2, 4), (64, 2, 3, 3), (64, 4, 2, 3),
              (128, 4, 2, 2))),
        Tile(32, 32, 1, 4, 255, 8), Tile(32, 64, 2, 3, 168, 6), Tile(32, 64, 4, 3, 128, 4),
    ),
    4: _tiles(
        *(Tile(64, keys, 4, stages, registers, programs)
          for keys, stages, registers, programs in (
              (32, 3, 168, 3), (64, 2, 0, 2), (64, 3, 168, 3), (64, 4, 168, 2), (64, 2, 128, 4),
              (64, 3, 128, 4), (128, 2, 0, 2), (128, 3, 255, 2))),
        Tile(64, 64, 8, 3, 128, 2), Tile(64, 128, 8, 2, 128, 2),
    ),
    8: _tiles(
        *(Tile(128, keys, 8, stages, registers, programs)
          for keys, stages, registers, programs in (
              (32, 3, 128, 2), (64, 2, 128, 2), (64, 3, 128, 2), (64, 4, 0, 1), (128, 2, 0, 1),
              (128, 3, 0, 1), (128, 2, 128, 2))),
        Tile(128, 64, 4, 3, 255, 2), Tile(64, 64, 4, 3, 168, 3),
    ),
}  # fmt: skip


def _decode(model: str, batch: int, keys: int, fmt: str = FP8, q_len: int = 1, **more: Any) -> LayerStep:
    return LayerStep(model, "decode", (q_len,) * batch, (keys,) * batch, fmt, **more)


def _chunk(model: str, new: int, old: int, fmt: str = FP8, batch: int = 1) -> LayerStep:
    return LayerStep(model, "prefill", (new,) * batch, (new + old,) * batch, fmt)


def _mixed(model: str, fmt: str = FP8) -> LayerStep:
    draw = random.Random("60 decodes")
    olds = [min(max(round(draw.lognormvariate(math.log(2000), 1.2)), 100), 60_000) for _ in range(60)]
    return LayerStep(model, "mixed", (1,) * 60 + (512,) * 4, (*(n + 1 for n in olds), *(4608,) * 4), fmt)


def _ragged(model: str, lens: Sequence[int]) -> LayerStep:
    return LayerStep(model, "ragged", (1,) * len(lens), tuple(lens), FP8)


def _lognormal(batch: int) -> list[int]:
    draw = random.Random("ragged")
    return [min(max(round(draw.lognormvariate(math.log(4000), 1.0)), 100), 60_000) for _ in range(batch)]


def _decode_lines() -> Iterator[Line]:
    yield Line(
        "batch 64 over 8192, NHD",
        "1.08 x",
        _decode(GLM, 64, 8192),
        (
            *SPLITS,
            *_tiles(
                Tile(16, 32, 1, 4, 0, 8),
                Tile(16, 64, 1, 2, 0, 8),
                Tile(16, 64, 1, 3, 0, 6),
                Tile(16, 64, 2, 3, 0, 4),
            ),
        ),
    )
    yield Line("batch 64 over 8192, HND", "1.06 x", _decode(GLM, 64, 8192, layout="HND"), DECODE)
    yield Line("batch 64 over 8192, page 1", "1.12 x", _decode(GLM, 64, 8192, page_size=1), SPLITS)
    yield Line("batch 1 over 32768", "1.6 x", _decode(GLM, 1, 32768), (*SPLITS, *_SHORT))
    yield Line("batch 1 over 32768, 8/1 heads", "14 us", _decode(TP8, 1, 32768), (*SPLITS, *_SHORT))
    yield Line("batch 4 over 1024", "9.5 us", _decode(GLM, 4, 1024), (*SPLITS, *_SHORT))
    yield Line("batch 256 over 8192, 32/8 heads", "1.04 x", _decode(LLAMA, 256, 8192), SPLITS)
    yield Line("64 lognormal lengths", "1.35 x", _ragged(GLM, _lognormal(64)), SPLITS)
    one_long = (*(500 + 10 * i for i in range(127)), 131072)
    yield Line("127 short and one of 131072", "1.4 x", _ragged(GLM, one_long), SPLITS)
    yield Line("127 short and one of 131072, 8/1", "35 us", _ragged(TP8, one_long), SPLITS)
    for model, heads in ((GLM, "96/8"), (LLAMA, "32/8"), (TP8, "8/1")):
        yield Line(f"batch 64 over 8192, bf16, {heads}", "1.03 x", _decode(model, 64, 8192, "bf16"), DECODE)
    for fmt in (FP4, FP4_E4M3, NVFP4, K8V4):
        yield Line(f"batch 64 over 8192, {NAMES[fmt]}", "below FP8", _decode(GLM, 64, 8192, fmt), DECODE)
    for batch, keys, fmt in ((16, 512, NVFP4), (1, 8192, NVFP4), (256, 512, FP4), (16, 1024, K8V4)):
        for one in (fmt, FP8):
            goal = "1.02 of FP8" if one == fmt else ""
            name = f"batch {batch} over {keys}, {NAMES[one]}"
            yield Line(name, goal, _decode(GLM, batch, keys, one), SPLITS if goal else DECODE)


def _speculative_lines() -> Iterator[Line]:
    for fmt in (FP8, K8V4, FP4):
        for q_len, goal in ((2, "1.15 x"), (4, "1.3 x"), (8, "1.8 x")):
            step = _decode(GLM, 64, 8192, fmt, q_len)
            own = (*DECODE, *PREFILL) if fmt == FP8 else DECODE
            name = f"{q_len} tokens of 64 over 8192, {NAMES[fmt]}"
            yield Line(name, goal if fmt == FP8 else "at or below FP8", step, (*own, *_SPECULATIVE[q_len]))
    yield Line("8 tokens of 64 over 8192, 64/4 heads", "250 us", _decode(QWEN, 64, 8192, FP8, 8),
               (*DECODE, *_SPECULATIVE[8]))  # fmt: skip
    tiles = _tiles(Tile(64, 64, 4, 3, 168, 3), Tile(128, 64, 8, 3, 128, 2))
    step = _decode(GLM, 16, 8192, FP8, 16)
    yield Line("16 tokens of 16 over 8192", "240 us", step, (*DECODE, *PREFILL, *tiles))


def _prefill_lines() -> Iterator[Line]:
    for new in (2048, 8192):
        yield Line(f"{new} new, D 64, 64/8", "1.5 x", _chunk(D64, new, 0), (*KERNELS[:4],))
    for model, fmt, old, goal in (
        (LLAMA, FP8, 4096, "38 us"), (LLAMA, FP8, 32768, "135 us"), (LLAMA, "bf16", 4096, "34 us"),
        (D256, FP8, 4096, "64 us"),
    ):  # fmt: skip
        name = f"128 over {old}, {NAMES[fmt]}, {'D 256, 16/8' if model == D256 else '32/8'}"
        yield Line(name, goal, _chunk(model, 128, old, fmt), KERNELS)
    for fmt, goal in ((FP8, ""), (FP4, "800 us"), (K8V4, "780 us")):
        yield Line(f"2048 over 4096, {NAMES[fmt]}", goal, _chunk(GLM, 2048, 4096, fmt), KERNELS[:3])
    for model, heads, formats in (
        (TP8, "8/1", (FP8, "bf16", K8V4)), (GLM, "96/8", (FP8, "bf16")), (LLAMA, "32/8", (FP8, "bf16"))
    ):  # fmt: skip
        for fmt in formats:
            yield Line(f"60 decodes and 4 x 512, {heads}, {NAMES[fmt]}", "1.03 of two calls",
                       _mixed(model, fmt), MIXED)  # fmt: skip
    for model, new, old in ((GLM, 512, 4096), (LLAMA, 1024, 0), (D256, 1024, 4096), (D256, 128, 4096)):
        step = replace(_chunk(model, new, old), appends=True)
        yield Line(f"append {new} over {old}, {model}", "1.03 of prefill", step, APPEND)


def _other_lines() -> Iterator[Line]:
    for tokens in (64, 1024):
        for heads in (16, 64, 128):
            sizes = SparseSizes(tokens, heads, 2048, 65536)
            yield Line(f"sparse, {tokens} tokens, {heads} heads", "1.0 of bf16", sizes)
    for context, causal in ((2048, False), (2048, True), (4096, True), (8192, True)):
        mask = "causal" if causal else "full"
        yield Line(f"Sage, {context}, {mask}", "1.05 of SDPA", SageSizes(2, context, 32, 128, causal))


def lines() -> list[Line]:
    """The whole table."""
    return [*_decode_lines(), *_speculative_lines(), *_prefill_lines(), *_other_lines()]


def decode_with(inputs: StepInputs, tile: Tile, out: torch.Tensor) -> Run:
    """A call of `paged_decode` with a tile that the shipped configuration need not choose."""
    plan = plan_decode(inputs.q, inputs.cache, inputs.table)
    shape, config = plan.shape, plan.config
    row_blocks = -(-shape.q_len * shape.gqa_ratio // tile.rows)
    slots = max(1, plan.target.compute_units * tile.programs // (shape.num_kv_heads * row_blocks))
    items, _ = _items_of(shape, tile.split, slots, tile.keys)
    options = replace(
        config.options, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers or None
    )
    config = replace(
        config, block_m=tile.rows, block_n=tile.keys, split=tile.split, num_items=items,
        tiles_per_split=0 if tile.split == "even" else 1, options=options,
        merge_in_launch=items <= 4 * shape.batch,
        v_parts=parts_of(plan.target, plan.v_format, is_key=tile.rows >= 64),
    )  # fmt: skip
    plan = replace(plan, config=config, workspace=None).with_workspace()
    run: Any = partial(paged_decode, inputs.q, inputs.cache, inputs.table, out=out, plan=plan)
    return run  # type: ignore[no-any-return]


class Calls:
    """The calls of lines, on a device."""

    def __init__(self, device: str, wanted: str) -> None:
        self._steps = TrafficBench(device=device)
        self._sparse = SparseBench(("bf16", "prepass", "fused"), device)
        self._sage = SageBench(("int8",), ("per_thread", "per_block"), device)
        self._wanted = wanted

    def of(self, line: Line) -> Iterator[tuple[str, Call]]:
        """A label and a call for each choice; what is refused is left out."""
        step = line.step
        if isinstance(step, SparseSizes):
            for call in self._sparse.calls(step):
                yield call.labels["mode"], replace(call, extra={})
        elif isinstance(step, SageSizes):
            for call in self._sage.calls(step):
                yield " ".join(filter(None, call.labels.values())), call
        else:
            yield from self._of_step(step, line.choices)

    def _of_step(self, step: LayerStep, choices: Sequence[Choice]) -> Iterator[tuple[str, Call]]:
        by_kind: dict[bool, _Checked] = {}
        for label, method, forced, tile in choices:
            if self._wanted == SHIPPED and SHIPPED not in label and method != "two_calls":
                continue
            kind = replace(step, appends=method == "prefill_append")
            if kind.appends not in by_kind:
                by_kind[kind.appends] = _Checked(self._steps.inputs(kind))
            checked = by_kind[kind.appends]
            inputs = checked.inputs
            out = torch.empty_like(inputs.q)
            with suppress(UnsupportedError, ValueError):  # a split or kernel that the call cannot have
                prepare = (
                    getattr(inputs, method)(out, **forced) if tile is None else decode_with(inputs, tile, out)
                )
                yield (
                    label,
                    Call({}, partial(_made, prepare), kind.bytes_touched, kind.flops, checked.error, BOUND),
                )


class _Checked:
    """The tensors of a step; the reference is computed when an output is checked."""

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        self._error: Callable[[torch.Tensor], float] | None = None

    def error(self, o: torch.Tensor) -> float:
        """The relative L1 error of an output."""
        if self._error is None:
            self._error = self.inputs.error()
        return self._error(o)


def _made(run: Run) -> Run:
    return run


def compile_all(calls: Calls, chosen: Sequence[Line], processes: int) -> int:
    """Compiles the kernels of all calls in parallel processes; how many there are.

    Launches are noted and not run, so `calls` must not be used again.
    """
    specs: dict[bytes, KernelSpec] = {}
    for line in chosen:
        with recording() as recorder:
            for _, call in calls.of(line):
                if not call.is_peer:
                    call.prepare()()
        specs |= {pickle.dumps(spec): spec for spec in recorder.specs()}
    try:
        warmup(specs.values(), processes=processes)
    except RuntimeError as error:  # a tile that does not fit: its own row says so
        print(str(error).strip().splitlines()[-1], file=sys.stderr)
    return len(specs)


def measure_line(calls: Calls, line: Line, ceilings: Ceilings, timer: GraphTimer) -> Iterator[dict[str, Any]]:
    """A row for each choice of a line."""
    for label, call in calls.of(line):
        row: dict[str, Any] = {"line": line.name, "choice": label, "goal": line.goal}
        floor = ceilings.floor_us(call.bytes_touched, call.flops)
        try:
            error, differing, timing = time_checked(call, timer)
            row |= {"relative_l1": error, "differing_replays": differing, "floor_us": floor}
            if timing is not None:
                times = {name: round(value, 2) for name, value in asdict(timing).items()}
                row |= {**times, "ratio_to_floor": timing.median_us / floor}
            for name, figure in call.extra.items():
                row[name] = None if figure is None else figure(timer)
        except Exception as problem:
            if "illegal" in str(problem) or "misaligned" in str(problem):
                raise  # the device is lost
            row["refused"] = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"[:120]
        yield row


def _said(row: dict[str, Any]) -> str:
    if "median_us" not in row:
        return (
            f"   {row['choice']}: {row.get('refused', 'WRONG %.2g' % (row.get('relative_l1') or math.nan))}"
        )
    more = f", attend {row['attend_us']:.1f}" if row.get("attend_us") else ""
    return f"   {row['median_us']:8.1f} us  {row['ratio_to_floor']:5.2f} x  {row['choice']}{more}"


def rehearse(calls: Calls, chosen: Sequence[Line]) -> int:
    """Checks smaller steps on a CPU; 1 if one is wrong."""
    wrong = 0
    for line in chosen:
        if isinstance(line.step, LayerStep):
            for label, call in calls.of(replace(line, step=line.step.rehearsal())):
                row = check(call, {})
                print(f"{line.name}: {label}: {row.status} {row.relative_l1:.2g}")
                wrong += row.status != "pass"
    return min(wrong, 1)


def main() -> int:
    """Prints the table and writes the rows; 1 if a call is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", default="", help="only lines whose name contains this")
    parser.add_argument("--choices", default="all", choices=("all", SHIPPED))
    parser.add_argument("--processes", type=int, default=15, help="that compile")
    parser.add_argument("--seconds", type=float, default=140.0, help="when to stop measuring")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument(
        "--rehearse", action="store_true", help="check smaller steps on a CPU; nothing is timed"
    )
    given = parser.parse_args()
    chosen = [line for line in lines() if given.lines in line.name]
    if given.rehearse:
        return rehearse(Calls("cpu", given.choices), chosen)
    calls = partial(Calls, "cuda", given.choices)
    begun = time.monotonic()
    count = compile_all(calls(), chosen, given.processes)
    print(f"{count} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)
    timer = GraphTimer(samples=_SAMPLES, seconds=_SECONDS)
    timer.checked_replays = _CHECKED_REPLAYS
    ceilings = measure_ceilings(timer)
    rows: list[dict[str, Any]] = []
    begun, left, measured = time.monotonic(), [], calls()
    for line in chosen:
        if time.monotonic() - begun > given.seconds:
            left.append(line.name)
            continue
        print(f"{line.name} (goal {line.goal or '-'})", flush=True)
        for row in measure_line(measured, line, ceilings, timer):
            rows.append(row)
            print(_said(row), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(_document(rows, ceilings), indent=1))
    print(f"{ceilings}; {time.monotonic() - begun:.0f} s; not measured: {', '.join(left) or 'none'}")
    wrong = [row for row in rows if "relative_l1" in row and "median_us" not in row]
    return 1 if wrong or left else 0


def _document(rows: list[dict[str, Any]], ceilings: Ceilings) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "versions": versions(),
        "commands": ["python tools/measured_goals.py --json benchmarks/results/goals.json"],
        "ceilings": asdict(ceilings), "rows": rows,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
