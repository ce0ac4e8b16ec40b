"""Host and device time of attention in an engine's steps, by every way to serve them.

    python benchmarks/engines_steps.py
    python benchmarks/engines_steps.py --vllm FOLDER --out benchmarks/results/steps-h200.json

Traces of steps are replayed as the adapters of vLLM and SGLang serve them: the step is prepared, then each
layer attends. No step has the query lengths and contexts of another, so plans have to serve sizes that they
were not made for. The ways:

- "parts": decodes and prefills apart, as the adapters do;
- "one call": the same step as one call, with kept plans;
- "planned anew": one call whose plan is made in each step and knows only the longest request;
- "4 tokens each": of guesses, a decode step in which every request has as many tokens as the longest;
- "vllm triton": the kernel of vLLM's Triton backend and its wrapper, without what the backend does around it,
  if vLLM is installed or `--vllm` names a folder with the two files that `vllm_kernel.FILES` lists.

Host times are medians of the calling thread's CPU time. Device times are those of one layer in a graph, with
a cold L2. Beside them stand the matrix products of one layer, by torch in bf16, with tokens spread evenly
over experts: attention's share is its time in that of both. It leaves out norms, routing, sampling and
communication. Without a GPU launches do nothing, and there are no device times.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from vllm_kernel import UnifiedAttention

from narrowkv.engines import steps
from narrowkv.engines.steps import Step, attend, divide
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant import relative_l1
from narrowkv.runtime.launch import executing
from narrowkv.runtime.targets import get_target
from narrowkv.testing.bench.host import NullExecutor
from narrowkv.testing.bench.timing import GraphTimer
from narrowkv.testing.bench.traffic import LayerStep, step_tensors
from narrowkv.testing.machine import versions
from narrowkv.testing.records import SCHEMA_VERSION

GUESSES, CONTEXT, CHUNK, PAGE = 4, 8192, 512, 16
CAPACITY = 65_536  # tokens of a row of the block table
VLLM = "vllm triton"
AGREE, PEER = 0.004, 0.02  # relative L1 error between two of our ways, and of another project's
TRACES = ("decode", "mixed", "guesses", "guesses, mixed")
MODELS = {"96/8": "glm-4.5", "32/8": "llama-8b", "8/1": "llama-70b-tp8"}
# Hidden channels, those of a multilayer perceptron on this GPU, its experts and how many a token goes to:
# GLM-4.5-Air with its shared expert, Llama 3 8B, Llama 3 70B on eight GPUs.
LAYERS = {"96/8": (4096, 1408, 129, 9), "32/8": (4096, 14336, 1, 1), "8/1": (8192, 3584, 1, 1)}


@dataclass(frozen=True)
class Sizes:
    """Query tokens and keys of the requests of a step."""

    q_lens: tuple[int, ...]
    lens: tuple[int, ...]


def traces(count: int, seed: int) -> dict[str, list[Sizes]]:
    """Steps by the name of their trace; device time is measured of the first one, which no seed changes."""
    draw = random.Random(seed)
    found: dict[str, list[Sizes]] = {name: [] for name in TRACES}
    for index in range(count):
        old = CONTEXT + index * (1 + seed)
        chunks = [CHUNK - (draw.randrange(CHUNK // 2) if index else 0) for _ in range(4)]
        keys = [new + CHUNK * (2 * place + index % 3) for place, new in enumerate(chunks)]
        guesses = [1 + place % GUESSES for place in range(64)]
        if index:
            draw.shuffle(guesses)
        found["decode"].append(Sizes((1,) * 64, (old,) * 64))
        found["mixed"].append(Sizes((1,) * 60 + tuple(chunks), (old,) * 60 + tuple(keys)))
        found["guesses"].append(Sizes(tuple(guesses), (old,) * 64))
        found["guesses, mixed"].append(Sizes((*guesses[:60], *chunks), (old,) * 60 + tuple(keys)))
    return found


class Model:
    """Tensors of a layer's attention, for steps of up to the largest."""

    def __init__(self, heads: str, largest: Sizes, device: str, vllm: str | None) -> None:
        made = LayerStep(MODELS[heads], "", largest.q_lens, largest.lens, capacity=CAPACITY)
        self.heads, self.device = heads, device
        if device == "cuda":
            inputs = step_tensors(device)(made)
            self.q, self.cache, self.ids = inputs.q, inputs.cache, inputs.table.page_ids
        else:  # nothing is computed
            sizes = made.heads
            self.q = torch.empty(sum(largest.q_lens), sizes.num_qo_heads, sizes.head_dim).bfloat16()
            self.cache = PagedKVCache.empty(
                1, PAGE, sizes.num_kv_heads, sizes.head_dim, format="fp8_e4m3fn", k_descale=1.0, v_descale=1.0
            )
            self.ids = torch.zeros(len(largest.lens), CAPACITY // PAGE, dtype=torch.int32)
        self.out = torch.empty_like(self.q)
        self.peer = None
        if device == "cuda" and (vllm is not None or importlib.util.find_spec("vllm") is not None):
            self.peer = UnifiedAttention(vllm, self.q, self.cache)

    def products(self, tokens: int) -> Callable[[], None]:
        """The matrix products of a layer but attention's: of Q, K and V, of its output, and of experts."""
        hidden, wide, experts, chosen = LAYERS[self.heads]
        width = self.q.shape[1] * self.q.shape[2]
        qkv = width + 2 * self.cache.num_kv_heads * self.q.shape[2]
        each = -(-tokens * chosen // experts)
        made = []
        for count, rows, inner, outer in (
            (1, tokens, hidden, qkv), (1, tokens, width, hidden), (experts, each, hidden, 2 * wide),
            (experts, each, wide, hidden),
        ):  # fmt: skip
            sizes = (count, rows, inner), (count, inner, outer), (count, rows, outer)
            x, weights, y = (torch.empty(size, device=self.device, dtype=torch.bfloat16) for size in sizes)
            made.append((x.normal_(), weights.normal_(), y))

        def multiply() -> None:
            for x, weights, y in made:
                torch.bmm(x, weights, out=y)

        return multiply

    def tensors(self, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        """What an engine has made of a step before attention is prepared: starts and lengths."""
        starts = torch.tensor([0, *accumulate(sizes.q_lens)], dtype=torch.int32, device=self.device)
        return starts, torch.tensor(sizes.lens, dtype=torch.int32, device=self.device)

    def prepare(self, sizes: Sizes, starts: torch.Tensor, lens: torch.Tensor, way: str) -> Step:
        """The step as an adapter makes it."""
        table = PageTable.from_block_table(self.ids[: len(lens)], lens, page_size=PAGE)
        step = Step(sum(sizes.q_lens), max(sizes.q_lens), max(sizes.lens), starts, table)
        if way == "planned anew":
            steps._prefill_plans.clear()
        elif way == "one call":
            step.max_kv_tokens = sum(sizes.lens)
        elif way == "parts":
            few = GUESSES if max(sizes.q_lens[:60]) > 1 else 1
            step = divide(step, [0, *accumulate(sizes.q_lens)], sizes.lens, decode_tokens=few)
        return step

    def attend(self, step: Step, way: str) -> torch.Tensor:
        """A layer."""
        q, out = self.q[: step.num_tokens], self.out[: step.num_tokens]
        if way == VLLM:
            assert self.peer is not None
            assert step.query_start_loc is not None
            self.peer(q, out, step.table, step.query_start_loc, step.max_query_len, step.max_seq_len)
        else:
            attend(step, q, self.cache, out, max_batch=256)
        return out


def ways_of(trace: str, model: Model) -> list[str]:
    """The ways to serve the steps of a trace."""
    ways = ["parts", "one call", "planned anew"]
    if trace == "decode":
        ways = ["parts"]
    elif trace == "guesses":
        ways = ["parts", "planned anew", "4 tokens each"]
    return ways if model.peer is None else [*ways, VLLM]


def replay(
    model: Model, before: Sequence[Sizes], trace: Sequence[Sizes], way: str, layers: int,
    wait: Callable[[], None],
) -> dict[str, float]:  # fmt: skip
    """Median host microseconds of a step of a trace, and of what it consists of.

    before: another trace, whose steps compile kernels and make plans.
    """
    laps: dict[str, list[float]] = {"prepare": [], "first": [], "other": [], "step": []}
    for counted, sizes_of_steps in ((False, before), (True, trace)):
        for sizes in sizes_of_steps:
            starts, lens = model.tensors(sizes)
            wait()
            begun = time.thread_time()
            step = model.prepare(sizes, starts, lens, way)
            prepared = time.thread_time()
            model.attend(step, way)
            first = time.thread_time()
            more = layers - 1 if counted else 0
            for _ in range(more):
                model.attend(step, way)
            end = time.thread_time()
            wait()
            if counted:
                laps["prepare"].append(prepared - begun)
                laps["first"].append(first - prepared)
                laps["other"].append((end - first) / max(layers - 1, 1))
                laps["step"].append(end - begun)
    return {name: statistics.median(times) * 1e6 for name, times in laps.items()}


def device_us(model: Model, sizes: Sizes, way: str, timer: GraphTimer) -> tuple[float, torch.Tensor]:
    """Device microseconds of a layer, and its result."""
    step = model.prepare(sizes, *model.tensors(sizes), way)
    median = timer.measure(lambda: model.attend(step, way)).median_us
    return median, model.attend(step, way).clone()


def measure(
    heads: str, names: Sequence[str], count: int, layers: int, device: str, vllm: str | None
) -> Iterator[list[dict[str, Any]]]:
    """For each trace, a row for each way, once their results are known to agree."""
    earlier, made = traces(count, 1), traces(count, 0)
    # Every sequence has pages for the longest: vLLM's kernel reads pages past a table's end without a check.
    longest = max(max(sizes.lens) for found in (*earlier.values(), *made.values()) for sizes in found)
    largest = Sizes((GUESSES,) * 60 + (CHUNK,) * 4, (longest,) * 64)
    model = Model(heads, largest, device, vllm)
    timer = GraphTimer(samples=20, seconds=0.1) if device == "cuda" else None
    for name in names:
        trace, results, rows = made[name], {}, []
        products_us = None
        if timer is not None:
            products_us = timer.measure(model.products(sum(trace[0].q_lens))).median_us
        for way in ways_of(name, model):
            both = earlier[name], trace
            if way == "4 tokens each":
                both = tuple([Sizes((GUESSES,) * 64, each.lens) for each in given] for given in both)
            row: dict[str, Any] = {"heads": heads, "trace": name, "way": way, "layers": layers}
            row |= replay(model, *both, way, layers, torch.cuda.synchronize if timer else lambda: None)
            row |= {"device_us": None, "products_us": products_us, "share": None}
            if timer is not None:
                row["device_us"], result = device_us(model, both[1][0], way, timer)
                row["share"] = row["device_us"] / (row["device_us"] + products_us)
                if way != "4 tokens each":
                    results[way] = result
            rows.append(row)
        for way, result in results.items():
            error, bound = relative_l1(result, results["parts"].float()), PEER if way == VLLM else AGREE
            if not error <= bound:
                raise SystemExit(f"{heads} {name}: {way!r} differs from 'parts' by {error:.3g}, not {bound}")
        yield rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", nargs="+", choices=MODELS, default=["96/8", "8/1"])
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES)
    parser.add_argument("--vllm", metavar="FOLDER")
    parser.add_argument("--layers", type=int, default=46)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, help="also write JSON to this file")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "no GPU, nothing launched"
    about = f"FP8 cache, pages of {PAGE}, {options.layers} layers of attention alone"
    print(f"{name}; {about}")
    print(
        "host us: a step of all layers, its preparation, its first layer, another one; device us: attention,"
    )
    print("the products of a layer, and the share of attention in both")
    columns = ("step", "prepare", "first", "other", "device_us", "products_us", "share")
    print(f"{'heads':6}{'trace':16}{'way':15}{'layers':>7}" + "".join(f"{name:>12}" for name in columns))
    found: list[dict[str, Any]] = []
    with nullcontext() if device == "cuda" else executing(NullExecutor(get_target("gfx942"))):
        for rows in chain.from_iterable(
            measure(heads, options.traces, options.steps, options.layers, device, options.vllm)
            for heads in options.heads
        ):
            for row in rows:
                cells = ("-" if row[name] is None else f"{row[name]:.4g}" for name in columns)
                print(
                    f"{row['heads']:6}{row['trace']:16}{row['way']:15}{row['layers']:7}"
                    + "".join(f"{cell:>12}" for cell in cells),
                    flush=True,
                )
            found += rows
            if options.out:
                document = {
                    "schema_version": SCHEMA_VERSION, "title": "Steps of an engine", "device": name,
                    "versions": {key: versions()[key] for key in ("torch", "triton")},
                    "commands": [shlex.join(["python", *sys.argv])], "shape": about, "rows": found,
                }  # fmt: skip
                options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
