"""Measures goals on a GPU: decode, speculation, prefill, mixed steps, sparse attention, Sage and host time.

Each line has the shipped choice, what else can be chosen without new kernels (splits, kernels, a mixed step
in two calls), and the other implementations that are installed. Every call is checked against the reference
before it is timed by the replay of a graph; the floor is its bytes at the read bandwidth of this run, or its
flops at the bf16 rate. All kernels are compiled first, in parallel processes.

A run on several GPUs has a process for each, which measures its share of the lines. A line is written as soon
as it is measured, and is not measured again if the run is repeated.

    CUDA_VISIBLE_DEVICES=1 python tools/measured_goals.py --shard 1/4 --json shard1.json
    python tools/measured_goals.py --merge shard0.json,shard1.json --json benchmarks/results/goals.json
    python tools/measured_goals.py --rehearse --lines "batch 4 over 1024" --choices shipped
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.paged_cache import PageTable
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import KernelSpec, recording, warmup
from narrowkv.testing.backends import PEER_BOUND, PEERS
from narrowkv.testing.bench.host import measure_calls
from narrowkv.testing.bench.measure import Call, check, time_checked
from narrowkv.testing.bench.sage import SageSizes, sage_bench
from narrowkv.testing.bench.sparse import SparseSizes, sparse_bench
from narrowkv.testing.bench.timing import Ceilings, GraphTimer, measure_ceilings
from narrowkv.testing.bench.traffic import LayerStep, Run, StepInputs, step_tensors
from narrowkv.testing.cases.decode import BOUND
from narrowkv.testing.machine import versions

SHIPPED = "shipped"
GLM, LLAMA, TP8, QWEN, D64, D256 = (
    "glm-4.5", "llama-8b", "llama-70b-tp8", "qwen3-moe", "gpt-oss-120b", "gemma-3-12b"
)  # fmt: skip
FP8, FP4, K8V4, NVFP4, FP4_E4M3 = (
    "fp8_e4m3fn", "fp4_e2m1", "fp8_e4m3fn/fp4_e2m1", "fp4_e2m1:16+e4m3", "fp4_e2m1:e4m3"
)  # fmt: skip
NAMES = {FP8: "FP8", FP4: "FP4", K8V4: "K8V4", NVFP4: "NVFP4", FP4_E4M3: "FP4, E4M3 scales", "bf16": "bf16"}
_SAMPLES, _SECONDS, _CHECKED_REPLAYS, _HOST_SAMPLES = 15, 0.02, 2, 20
NEW_TABLE = "paged_decode, new PageTable"

Choice = tuple[str, str, dict[str, Any]]
"""A label, a method of `StepInputs`, and what its plan is told."""


@dataclass(frozen=True)
class Goal:
    """What a line is to reach.

    Attributes:
        most: at most so many microseconds, or times of something else.
        of: "us"; "the floor"; "the fastest peer"; "torch.add_"; another choice of the line; or another line.
    """

    most: float
    of: str = "the floor"

    def __str__(self) -> str:
        return f"{self.most:g} us" if self.of == "us" else f"{self.most:.4g} of {self.of}"


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        name: it.
        goal: of the call `own`; None for a line that others are compared with.
        work: a step of an engine, sizes of sparse attention or Sage, or a row of the host bench: an operation
            and whether it is planned.
        choices: what is measured of a step.
        own: the label of the choice that has the goal.
    """

    name: str
    goal: Goal | None
    work: LayerStep | SparseSizes | SageSizes | tuple[str, bool]
    choices: tuple[Choice, ...] = ()
    own: str = ""


def _shipped(method: str) -> Choice:
    return f"{method}, {SHIPPED}", method, {}


DECODE = (_shipped("paged_decode"),)
SPLITS: tuple[Choice, ...] = (
    *DECODE,
    *((f"split={split}", "paged_decode", {"split": split}) for split in ("none", "even", "per_sequence")),
    *((f"tokens_per_split={n}", "paged_decode", {"tokens_per_split": n})
      for n in (256, 512, 1024, 2048, 4096)),
)  # fmt: skip
PREFILL = (_shipped("batch_prefill"),)
APPEND = (_shipped("prefill_append"), *PREFILL)
MIXED: tuple[Choice, ...] = (*PREFILL, ("two calls", "two_calls", {}))
KERNELS: tuple[Choice, ...] = (
    *PREFILL,
    *((f"kernel={kernel}", "batch_prefill", {"kernel": kernel}) for kernel in ("dense", "fused", "split")),
    *((f"kernel=dense, num_splits={n}", "batch_prefill", {"kernel": "dense", "num_splits": n})
      for n in (2, 4, 8)),
)  # fmt: skip


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


_ONE_LONG = (*(500 + 10 * i for i in range(127)), 131072)


def _decode_lines() -> Iterator[Line]:
    for name, goal, step in (
        ("batch 64 over 8192, FP8", Goal(1.08), _decode(GLM, 64, 8192)),
        ("batch 64 over 8192, HND", Goal(1.06), _decode(GLM, 64, 8192, layout="HND")),
        ("batch 64 over 8192, page 1", Goal(1.12), _decode(GLM, 64, 8192, page_size=1)),
        ("batch 1 over 32768", Goal(1.6), _decode(GLM, 1, 32768)),
        ("batch 1 over 32768, 8/1 heads", Goal(14, "us"), _decode(TP8, 1, 32768)),
        ("batch 4 over 1024", Goal(9.5, "us"), _decode(GLM, 4, 1024)),
        ("batch 256 over 8192, 32/8 heads", Goal(1.04), _decode(LLAMA, 256, 8192)),
        ("64 lognormal lengths", Goal(1.35), _ragged(GLM, _lognormal(64))),
        ("127 short and one of 131072", Goal(1.4), _ragged(GLM, _ONE_LONG)),
        ("127 short and one of 131072, 8/1 heads", Goal(35, "us"), _ragged(TP8, _ONE_LONG)),
    ):
        yield Line(name, goal, step, SPLITS)
    for model, heads in ((GLM, "96/8"), (LLAMA, "32/8"), (TP8, "8/1")):
        yield Line(f"batch 64 over 8192, bf16, {heads}", Goal(1.03), _decode(model, 64, 8192, "bf16"), DECODE)
    for fmt, most in ((FP4, 0.62), (FP4_E4M3, 0.65), (NVFP4, 0.66), (K8V4, 0.78)):
        goal = Goal(most, "batch 64 over 8192, FP8")
        yield Line(f"batch 64 over 8192, {NAMES[fmt]}", goal, _decode(GLM, 64, 8192, fmt), DECODE)
    for batch, keys, fmt in ((1, 8192, NVFP4), (16, 512, NVFP4), (256, 512, FP4), (16, 1024, K8V4)):
        base = f"batch {batch} over {keys}, FP8"
        yield Line(base, Goal(14, "us") if batch == 1 else None, _decode(GLM, batch, keys), SPLITS)
        step = _decode(GLM, batch, keys, fmt)
        yield Line(f"batch {batch} over {keys}, {NAMES[fmt]}", Goal(1.02, base), step, SPLITS)


def _speculative_lines() -> Iterator[Line]:
    for q_len, most in ((2, 1.15), (4, 1.3), (8, 1.8)):
        base = f"{q_len} tokens of 64 over 8192, FP8"
        yield Line(base, Goal(most), _decode(GLM, 64, 8192, FP8, q_len), DECODE)
        step = _decode(GLM, 64, 8192, FP8, q_len)
        goal = Goal(1.05, _shipped("paged_decode")[0])
        yield Line(f"{base}, batch_prefill", goal, step, (*PREFILL, *DECODE))
        for fmt in (K8V4, FP4):
            step = _decode(GLM, 64, 8192, fmt, q_len)
            yield Line(f"{q_len} tokens of 64 over 8192, {NAMES[fmt]}", Goal(1, base), step, DECODE)
    step = _decode(QWEN, 64, 8192, FP8, 8)
    yield Line("8 tokens of 64 over 8192, 64/4 heads", Goal(250, "us"), step, DECODE)
    yield Line("16 tokens of 16 over 8192", Goal(240, "us"), _decode(GLM, 16, 8192, FP8, 16), DECODE)


def _prefill_lines() -> Iterator[Line]:
    for new in (2048, 8192):
        yield Line(f"{new} new, D 64, 64/8 heads", Goal(1.5), _chunk(D64, new, 0), KERNELS[:4])
    for model, heads, new, old, goal in (
        (GLM, "96/8", 1024, 0, Goal(2.0)), (LLAMA, "32/8", 1024, 0, Goal(2.0)),
        (GLM, "96/8", 1024, 4096, Goal(1.4)), (LLAMA, "32/8", 1024, 4096, Goal(1.4)),
        (LLAMA, "32/8", 128, 4096, Goal(38, "us")), (LLAMA, "32/8", 128, 32768, Goal(135, "us")),
        (D256, "16/8, D 256", 128, 4096, Goal(64, "us")),
    ):  # fmt: skip
        choices = KERNELS if new == 128 else PREFILL
        yield Line(f"{new} new over {old}, FP8, {heads}", goal, _chunk(model, new, old), choices)
    yield Line("128 new over 4096, bf16, 32/8", Goal(34, "us"), _chunk(LLAMA, 128, 4096, "bf16"), KERNELS)
    yield Line("2048 new over 4096, FP8, 96/8", Goal(1.4), _chunk(GLM, 2048, 4096), KERNELS[:3])
    for fmt, most in ((FP4, 1.1), (K8V4, 1.07)):
        goal = Goal(most, "2048 new over 4096, FP8, 96/8")
        step = _chunk(GLM, 2048, 4096, fmt)
        yield Line(f"2048 new over 4096, {NAMES[fmt]}, 96/8", goal, step, KERNELS[:3])
    for model, heads, formats in (
        (TP8, "8/1", (FP8, "bf16", K8V4)), (GLM, "96/8", (FP8, "bf16")), (LLAMA, "32/8", (FP8, "bf16"))
    ):  # fmt: skip
        for fmt in formats:
            name = f"60 decodes and 4 x 512 over 4096, {heads}, {NAMES[fmt]}"
            yield Line(name, Goal(1.03, "two calls"), _mixed(model, fmt), MIXED)
    for model, heads, new, old, most in (
        (GLM, "96/8", 512, 4096, 1.03), (LLAMA, "32/8", 1024, 0, 1.15),
        (D256, "16/8, D 256", 1024, 4096, 1.15), (D256, "16/8, D 256", 128, 4096, 1.15),
    ):  # fmt: skip
        step = replace(_chunk(model, new, old), appends=True)
        goal = Goal(most, _shipped("batch_prefill")[0])
        yield Line(f"append of {new} over {old}, FP8, {heads}", goal, step, APPEND)


def _other_lines() -> Iterator[Line]:
    for tokens in (64, 1024):
        for heads in (16, 64, 128):
            sizes = SparseSizes(tokens, heads, 2048, 65536)
            name = f"sparse over FP8 rows, {tokens} tokens, {heads} heads"
            # What mode="auto" chooses: 1024 tokens read each row 32 times.
            yield Line(name, Goal(1.0, "bf16"), sizes, own="prepass" if tokens == 1024 else "fused")
    for context, causal, most in (
        (2048, False, 1.05), (2048, True, 1.05), (4096, True, 1.0), (8192, True, 1.0)
    ):  # fmt: skip
        name = f"Sage, {context} tokens, {'causal' if causal else 'full'}"
        work = SageSizes(2, context, 32, 128, causal)
        yield Line(name, Goal(most, "the fastest peer"), work, own="narrowkv int8 per_thread")
    for operation, most in (
        ("paged_decode", 2), ("append", 2), ("batch_prefill", 3), ("prefill_append", 3),
        ("sparse_prefill_fp8 prepass", 3), ("sage_attention", 3), (NEW_TABLE, 3),
    ):  # fmt: skip
        yield Line(f"host, {operation}, planned", Goal(most, "torch.add_"), (operation, True), own=operation)


def lines() -> list[Line]:
    """The whole table."""
    found = [*_decode_lines(), *_speculative_lines(), *_prefill_lines(), *_other_lines()]
    return [line if line.own else replace(line, own=line.choices[0][0]) for line in found]


def shard(chosen: Sequence[Line], index: int, count: int) -> list[Line]:
    """The lines of one of `count` GPUs, each of about as many choices; those that are compared are of one."""
    names, groups = {line.name for line in chosen}, dict[str, list[Line]]()
    for line in chosen:
        base = line.goal.of if line.goal is not None and line.goal.of in names else line.name
        groups.setdefault("host" if isinstance(line.work, tuple) else base, []).append(line)
    shares: list[list[Line]] = [[] for _ in range(count)]

    def work(of: Sequence[Line]) -> int:
        return sum(3 + len(line.choices) for line in of)

    for group in sorted(groups.values(), key=work, reverse=True):
        min(shares, key=work).extend(group)
    return shares[index]


class Calls:
    """The calls of lines, on a device."""

    def __init__(self, device: str, wanted: str) -> None:
        on_gpu = device == "cuda"
        self._peers = [peer for peer in PEERS if peer.absent(on_gpu) is None] if wanted == "all" else []
        self._steps = step_tensors(device=device)
        self._sparse = sparse_bench(("bf16", "prepass", "fused"), device)
        self._sage = sage_bench(("int8",), ("per_thread", "per_block"), device)
        self._wanted = wanted

    def of(self, line: Line) -> Iterator[tuple[str, Call]]:
        """A label and a call for each choice and each peer; what is refused is left out."""
        work = line.work
        if isinstance(work, SparseSizes):
            for call in self._sparse.calls(work):
                yield call.labels["mode"], replace(call, extra={})
        elif isinstance(work, SageSizes):
            for call in self._sage.calls(work):
                yield " ".join(filter(None, call.labels.values())), call
        elif isinstance(work, LayerStep):
            yield from self._of_step(work, line.choices)

    def _of_step(self, step: LayerStep, choices: Sequence[Choice]) -> Iterator[tuple[str, Call]]:
        by_kind: dict[bool, _Checked] = {}

        def checked_inputs(appends: bool) -> _Checked:
            if appends not in by_kind:
                by_kind[appends] = _Checked(self._steps(replace(step, appends=appends)))
            return by_kind[appends]

        for label, method, forced in choices:
            if self._wanted == SHIPPED and SHIPPED not in label and method != "two_calls":
                continue
            checked = checked_inputs(method == "prefill_append")
            kind, out = checked.inputs.step, torch.empty_like(checked.inputs.q)
            with suppress(UnsupportedError, ValueError):  # a split or kernel that the call cannot have
                run = getattr(checked.inputs, method)(out, **forced)
                yield (
                    label,
                    Call({}, partial(_made, run), kind.bytes_touched, kind.flops, checked.error, BOUND),
                )
        if step.appends:
            return
        checked = checked_inputs(False)
        for peer in self._peers:
            prepare = partial(peer.prepare, checked.inputs)
            yield (
                peer.name,
                Call({}, prepare, step.bytes_touched, step.flops, checked.error, PEER_BOUND, is_peer=True),
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
    warmup(specs.values(), processes=processes)
    return len(specs)


def measure_line(calls: Calls, line: Line, ceilings: Ceilings, timer: GraphTimer) -> Iterator[dict[str, Any]]:
    """A row for each choice of a line."""
    for label, call in calls.of(line):
        row: dict[str, Any] = {"line": line.name, "choice": label, "is_peer": call.is_peer}
        floor = ceilings.floor_us(call.bytes_touched, call.flops)
        try:
            error, differing, timing = time_checked(call, timer)
            row |= {"relative_l1": error, "differing_replays": differing, "floor_us": floor}
            if timing is not None:
                times = {name: round(value, 2) for name, value in asdict(timing).items()}
                row |= {**times, "ratio_to_floor": round(timing.median_us / floor, 4)}
            for name, figure in call.extra.items():
                row[name] = None if figure is None else figure(timer)
        except Exception as problem:
            if "illegal" in str(problem) or "misaligned" in str(problem):
                raise  # the device is lost
            row["refused"] = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"[:120]
        yield row


def host_rows(chosen: Sequence[Line], device: str) -> Iterator[dict[str, Any]]:
    """A row for each line of the host bench: microseconds of a call and of `torch.add_`."""
    inputs = step_tensors(device)(_decode(LLAMA, 8, 64))
    ids, lens, out = inputs.table.page_ids, inputs.table.seq_lens, torch.empty_like(inputs.q)
    plan = plan_decode(inputs.q, inputs.cache, inputs.table)

    def decode_with_a_new_table() -> object:
        table = PageTable.from_block_table(ids, lens, page_size=inputs.step.page_size)
        return paged_decode(inputs.q, inputs.cache, table, out=out, plan=plan)

    more = [(NEW_TABLE, True, decode_with_a_new_table)]
    measured = measure_calls(device, _HOST_SAMPLES, nullcontext, more)
    found = {(row.operation, row.planned): row.host_us for row in measured}
    add = found["torch.add_", False]
    for line in chosen:
        if isinstance(line.work, tuple):
            for choice, us in ((line.own, found[line.work]), ("torch.add_", add)):
                is_peer = choice == "torch.add_"
                yield {"line": line.name, "choice": choice, "is_peer": is_peer, "median_us": round(us, 2)}


def judged(chosen: Sequence[Line], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each line with a goal reached, from the rows of all of them."""
    by_line: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if "median_us" in row:
            by_line.setdefault(row["line"], {})[row["choice"]] = row
    own = {line.name: by_line.get(line.name, {}).get(line.own) for line in chosen}

    def base_us(line: Line, goal: Goal) -> float | None:
        found = by_line[line.name]
        if goal.of == "us":
            return 1.0
        if goal.of == "the floor":
            return float(found[line.own]["median_us"]) / float(found[line.own]["ratio_to_floor"])
        if goal.of == "the fastest peer":
            return min((row["median_us"] for row in found.values() if row["is_peer"]), default=None)
        base = found.get(goal.of) or own.get(goal.of)
        return None if base is None else base["median_us"]

    verdicts = []
    for line in chosen:
        goal = line.goal
        if (mine := own[line.name]) is None or goal is None or (base := base_us(line, goal)) is None:
            continue
        others = [each for label, each in by_line[line.name].items() if label != line.own]
        verdict = {"line": line.name, "goal": str(goal), "call": line.own, "median_us": mine["median_us"]}
        verdict |= {
            "ratio_to_floor": mine.get("ratio_to_floor"),
            "reached": round(mine["median_us"] / base, 3),
        }
        verdict["met"] = mine["median_us"] / base <= goal.most
        for name, is_peer in (("best_choice", False), ("best_peer", True)):
            best = min((each for each in others if each["is_peer"] is is_peer),
                       key=lambda each: each["median_us"], default=None)  # fmt: skip
            verdict[name] = None if best is None else [best["choice"], best["median_us"]]
        verdicts.append(verdict)
    return verdicts


def _said(row: dict[str, Any]) -> str:
    if "median_us" not in row:
        return f"{row['choice']} {row.get('refused', 'WRONG %.2g' % (row.get('relative_l1') or math.nan))}"
    ratio = f" ({row['ratio_to_floor']:.2f})" if "ratio_to_floor" in row else ""
    more = f", attend {row['attend_us']:.1f}" if row.get("attend_us") else ""
    return f"{row['choice'].replace(', shipped', '')} {row['median_us']:.1f}{ratio}{more}"


def rehearse(calls: Calls, chosen: Sequence[Line]) -> int:
    """Checks smaller steps on a CPU; 1 if one is wrong."""
    wrong = 0
    for line in chosen:
        if isinstance(line.work, LayerStep):
            for label, call in calls.of(replace(line, work=line.work.rehearsal())):
                row = check(call, {})
                print(f"{line.name}: {label}: {row.status} {row.relative_l1 or math.nan:.2g}")
                wrong += row.status == "fail"
    return min(wrong, 1)


def measure_all(given: argparse.Namespace, chosen: Sequence[Line]) -> int:
    """Measures lines that the JSON file does not hold; 1 if a call is wrong or a line is left."""
    begun = time.monotonic()
    document = json.loads(given.json.read_text()) if given.json and given.json.exists() else {"rows": []}
    rows: list[dict[str, Any]] = document["rows"]
    done = {row["line"] for row in rows}
    chosen = [line for line in chosen if line.name not in done]
    calls = partial(Calls, "cuda", given.choices)
    count = compile_all(calls(), chosen, given.processes)
    print(f"{count} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)
    timer = GraphTimer(samples=_SAMPLES, seconds=_SECONDS)
    timer.checked_replays = _CHECKED_REPLAYS
    ceilings = measure_ceilings(timer)
    left, measured = [], calls()

    def keep(found: list[dict[str, Any]]) -> None:
        rows.extend(found)
        if given.json is not None:
            given.json.write_text(json.dumps(_document(rows, ceilings, given.commit), indent=1))

    for line in chosen:
        if isinstance(line.work, tuple):
            continue
        if time.monotonic() - begun > given.seconds:
            left.append(line.name)
            continue
        found = list(measure_line(measured, line, ceilings, timer))
        keep(found)
        print(f"{line.name} [{line.goal or '-'}]: {'; '.join(map(_said, found))}", flush=True)
    host = list(host_rows(chosen, "cuda")) if any(isinstance(line.work, tuple) for line in chosen) else []
    keep(host)
    print("; ".join(f"{row['line']}: {row['median_us']}" for row in host))
    print(f"{ceilings}; {time.monotonic() - begun:.0f} s; not measured: {', '.join(left) or 'none'}")
    wrong = [row for row in rows if "relative_l1" in row and "median_us" not in row and not row["is_peer"]]
    return 1 if wrong or left else 0


def commit() -> str:
    """The commit of the working tree, or "" where there is no repository."""
    asked = ["git", "rev-parse", "--short=8", "HEAD"]
    with suppress(OSError):  # git is not installed
        found = subprocess.run(asked, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        return found.stdout.strip()
    return ""


def _document(rows: list[dict[str, Any]], ceilings: Ceilings, of_commit: str) -> dict[str, Any]:
    known = {name: version for name, version in versions().items() if name in ("torch", "triton", "cuda")}
    return {
        "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "commit": of_commit,
        "versions": known, "commands": [_COMMAND, _MERGE],
        "shape": "page 16 and 96 query heads over 8 KV heads of 128 channels unless stated, bf16 queries",
        "ceilings": {
            "read_gb_per_s": round(ceilings.read_bytes_per_s / 1e9),
            "copy_gb_per_s": round(ceilings.copy_bytes_per_s / 1e9),
            "bf16_tflop_per_s": round(ceilings.bf16_flops_per_s / 1e12),
        },
        "rows": rows,
    }  # fmt: skip


_COMMAND = "python tools/measured_goals.py --shard 0/4 --json shard0.json"
_MERGE = "python tools/measured_goals.py --merge shard0.json,shard1.json --json benchmarks/results/goals.json"


def merged(documents: Sequence[dict[str, Any]], of_commit: str) -> dict[str, Any]:
    """One document of several shards' documents, which are of GPUs of one kind."""
    devices = {document["device"] for document in documents}
    if len(devices) > 1:
        raise ValueError(f"shards must be of one kind of GPU, got {', '.join(sorted(devices))}")
    first, rows = documents[0], [row for document in documents for row in document["rows"]]
    ceilings = {key: round(median(each["ceilings"][key] for each in documents)) for key in first["ceilings"]}
    order = {line.name: i for i, line in enumerate(lines())}
    rows.sort(key=lambda row: order.get(row["line"], len(order)))
    return {
        **first, "commit": of_commit or first["commit"], "ceilings": ceilings,
        "lines": judged(lines(), rows), "rows": rows,
    }  # fmt: skip


def main() -> int:
    """Prints the table and writes the rows; 1 if a call is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", default="", help="only lines whose name contains this")
    parser.add_argument("--choices", default="all", choices=("all", SHIPPED), help="shipped: no peers either")
    parser.add_argument("--processes", type=int, default=15, help="that compile")
    parser.add_argument("--seconds", type=float, default=180.0, help="when to begin no further line")
    parser.add_argument("--shard", default="0/1", help="which of how many processes this is, as 0/4")
    parser.add_argument("--commit", default=commit(), help="what is measured, for the JSON file")
    parser.add_argument("--json", type=Path, help="where the rows go; lines that it holds are not measured")
    parser.add_argument("--merge", help="JSON files of all shards, which become the file of --json")
    parser.add_argument(
        "--rehearse", action="store_true", help="check smaller steps on a CPU; nothing is timed"
    )
    given = parser.parse_args()
    if given.merge:
        documents = [json.loads(Path(name).read_text()) for name in given.merge.split(",")]
        given.json.write_text(json.dumps(merged(documents, given.commit), indent=1) + "\n")
        return 0
    index, count = (int(part) for part in given.shard.split("/"))
    chosen = shard([line for line in lines() if given.lines in line.name], index, count)
    if given.rehearse:
        return rehearse(Calls("cpu", given.choices), chosen)
    return measure_all(given, chosen)


if __name__ == "__main__":
    sys.exit(main())
