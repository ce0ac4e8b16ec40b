"""`narrowkv bench ... --on gfx942,gfx950`: times by the emulator's timing model. Nothing is measured.

Each row is planned at its full size. A smaller call with the same kernels and the same split of the keys is
traced, and its workgroups and passes are multiplied up (`Scale`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_prefill import plan_append, plan_prefill
from narrowkv.attn_prefill.cases import PrefillCase
from narrowkv.cdna_emulator import EmulatorError
from narrowkv.cli.bench.workload import DecodeShape, Storage
from narrowkv.cli.environment import versions
from narrowkv.cli.modelled import ModelExecutor, Scale, main_kernel, waits
from narrowkv.cli.prefill.bench import PrefillShape
from narrowkv.cli.report import ExitCode, Report, UnsupportedHereError, number
from narrowkv.cli.sage.bench import SageShape
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.cli.sparse.bench import SparseShape
from narrowkv.cli.workers import run_all
from narrowkv.paged_cache import PageTable
from narrowkv.runtime.launch import executing
from narrowkv.sage.cases import SageCase
from narrowkv.sparse_fp8.cases import SparseCase
from narrowkv.testing.codegen import amd_backend_missing

Trace = Callable[[ModelExecutor], object]
_KEYS = 512  # traced of each split
_TOKENS = 512  # traced of a chunk
_SPARSE_TOKENS = 320  # so many that none is split


@dataclass(frozen=True)
class Call:
    """One call that a row stands for.

    Attributes:
        name: which of a shape's calls.
        shape: a bench's row.
        hbm_share: see `narrowkv.cdna_emulator.timing.predict`.
        trace: runs a smaller one, and sets the executor's scale.
    """

    name: str
    shape: Any
    hbm_share: float
    trace: Trace


@dataclass(frozen=True)
class ModelRow:
    """One call on one target under the timing model; every figure is a model's.

    Attributes:
        target, name, shape: what.
        model_us: of all launches.
        model_bytes_per_s: bytes touched once over it; model_flops_per_s: flops over it.
        model_bound: what bounds the kernel with the matrix instructions.
        model_waits: what its waves wait for.
        model_kernels_us: of each launch.
        refused: why there is nothing.
    """

    target: str
    name: str
    shape: dict[str, Any]
    model_us: float | None = None
    model_bytes_per_s: float | None = None
    model_flops_per_s: float | None = None
    model_bound: str = ""
    model_waits: str = ""
    model_kernels_us: dict[str, float] | None = None
    refused: str = ""


def decode_calls(shape: DecodeShape) -> list[Call]:
    """Paged decode: as planned at full size, over sequences whose lengths are a part of it."""

    def trace(executor: ModelExecutor) -> object:
        one = replace(shape, batch=1)
        q, cache, table = Storage(one, device="cpu").inputs(one)
        ids = table.page_ids.expand(shape.batch, -1).contiguous()  # sequences share pages: one is traced
        lens = torch.full((shape.batch,), shape.context, dtype=torch.int32)
        q = q.expand(shape.batch, -1, -1).contiguous()
        table = PageTable.from_block_table(ids, lens, page_size=shape.page_size)
        plan = plan_decode(q, cache, table)
        splits = max(plan.config.num_units // shape.batch, 1) if plan.config.split != "none" else 1
        shorter = max(shape.context // (splits * _KEYS), 1)
        lens.fill_(max(shape.context // shorter, 1))
        executor.scale = Scale(passes=shape.context / int(lens[0]))
        return paged_decode(q, cache, table, plan=plan)

    return [Call("decode", shape, 1.0, trace)]


def prefill_calls(shape: PrefillShape) -> list[Call]:
    """`batch_prefill` and `prefill_append`: some tokens of one KV head, keys as the middle token has them."""

    def trace(operation: str, executor: ModelExecutor) -> object:
        size = shape.storage
        _, cache, table = Storage(size, device="cpu").inputs(size)
        q = torch.empty(shape.new, shape.num_kv_heads * shape.ratio, shape.head_dim, dtype=torch.bfloat16)
        starts = torch.tensor([0, shape.new], dtype=torch.int32)
        if operation == "prefill":
            plan = plan_prefill(q, cache, table, starts, max_q_len=shape.new)
        else:
            assert table.seq_lens is not None
            before = PageTable.from_block_table(
                table.page_ids, cached_lens=table.seq_lens - shape.new, page_size=table.page_size
            )
            plan = plan_append(q, cache, before, starts)
        splits = plan.config.num_splits
        new = min(shape.new, _TOKENS)
        middle = shape.length - shape.new / 2
        prefix = max(int(min(middle, _KEYS * splits)) - new // 2, 0)
        case = PrefillCase(
            operation=operation, q_lens=(new,), lens=(prefix + new,), num_kv_heads=1, gqa_ratio=shape.ratio,
            head_dim=shape.head_dim, page_size=shape.page_size, format=size.cache_format,
            scale_group=size.scale_group or None, num_splits=splits, clean=True,
        )  # fmt: skip
        executor.scale = Scale(
            workgroups=shape.num_kv_heads * shape.new / new, passes=middle / (prefix + new / 2),
            keys=shape.num_kv_heads * shape.length / (prefix + new),
        )  # fmt: skip
        return case.inputs().call()

    names = {"prefill": "batch_prefill", "append": "prefill_append"}
    return [
        Call(name, shape, 0.1, partial(trace, operation))
        for operation, name in names.items()
        if shape.new > 1 or operation == "prefill"
    ]


def sparse_calls(shape: SparseShape, mode: str) -> list[Call]:
    """Sparse prefill over some tokens and rows."""
    ways: dict[str, dict[str, Any]] = {
        "bf16": {"mode": "wide", "layout": "bf16"}, "prepass": {"mode": "prepass"}, "fused": {},
        "fused-fp8q": {"q": "fp8"},
    }  # fmt: skip
    tokens, rows = min(shape.tokens, _SPARSE_TOKENS), min(shape.topk, _KEYS)

    def trace(executor: ModelExecutor) -> object:
        case = SparseCase(num_qo_heads=shape.heads, prefix_lens=(rows,) * tokens, **ways[mode])
        more = shape.tokens / tokens
        executor.scale = Scale(workgroups=more, passes=shape.topk / rows, keys=more * shape.topk / rows)
        return case.inputs().call()

    return [Call(mode, shape, 0.5, trace)]


def sage_calls(shape: SageShape, qk: str, granularity: str) -> list[Call]:
    """Sage attention, quantisation included: one head and some tokens."""
    tokens = min(shape.context, 2 * _KEYS)

    def trace(executor: ModelExecutor) -> object:
        more = shape.context / tokens
        heads = shape.batch * shape.heads
        executor.scale = Scale(workgroups=heads * more, passes=more, keys=heads * more)
        causal = "bottom_right" if shape.causal else ""
        case = SageCase(
            qk_dtype=qk, granularity=granularity, causal=causal, q_lens=(tokens,), k_lens=(tokens,),
            head_dim=shape.head_dim,
        )  # fmt: skip
        return case.inputs().call()

    return [Call(f"{qk}, {granularity}", shape, 0.1, trace)]


def model_row(call: Call, target: str) -> ModelRow:
    """The row of a call on a target."""
    row = ModelRow(target, call.name, asdict(call.shape))
    executor = ModelExecutor(target, call.hbm_share)
    try:
        with executing(executor):
            call.trace(executor)
    except (ValueError, TypeError, EmulatorError) as error:
        return replace(row, refused=f"{type(error).__name__}: {error}")
    seconds = sum(launch.prediction.seconds for launch in executor.modelled)
    main = main_kernel(executor.modelled).prediction
    return replace(
        row, model_us=1e6 * seconds, model_bytes_per_s=call.shape.bytes_touched / seconds
        if not isinstance(call.shape, SparseShape) else None,
        model_flops_per_s=call.shape.flops / seconds, model_bound=main.bound.split(" (")[0],
        model_waits=waits(main),
        model_kernels_us={launch.name: 1e6 * launch.prediction.seconds for launch in executor.modelled},
    )  # fmt: skip


def sheet(rows: Sequence[ModelRow]) -> Sheet:
    """A table of rows; the sizes in which they differ, and the model's figures."""
    sizes = list(rows[0].shape) if rows else []
    table = Sheet([
        *keys("target", "call", *sizes), *numbers("model us", "model GB/s", "model TFLOP/s"),
        Column("model: bound by"), Column("model: waves wait for"),
    ])  # fmt: skip
    for row in rows:
        rates = (
            number(rate / scale) if rate else "-"
            for rate, scale in ((row.model_bytes_per_s, 1e9), (row.model_flops_per_s, 1e12))
        )
        table.add(
            row.target, row.name, *row.shape.values(), number(row.model_us, 4), *rates,
            row.model_bound or row.refused, row.model_waits, style="yellow" if row.refused else "",
        )  # fmt: skip
    return table


def bench_modelled(bench: str, calls: Sequence[Call], targets: Sequence[str], report: Report) -> ExitCode:
    """Models every call on every target and shows the rows.

    Raises:
        UnsupportedHereError: this Triton cannot compile for AMD.
    """
    if (missing := amd_backend_missing()) is not None:
        raise UnsupportedHereError(missing)
    rows: list[ModelRow] = []

    def work(step: tuple[str, Call]) -> ModelRow:
        return model_row(step[1], step[0])

    def take(step: tuple[str, Call], row: ModelRow) -> str:
        rows.append(row)
        return f"{row.target} {row.name}"

    steps = [(target, call) for target in targets for call in calls]
    report.refuse_files("to modelled times", "plot", "resume")
    interrupted = run_all(report, steps, work, ModelRow, take, what="modelling")
    report.line("timing model, not a measurement")
    report.show(sheet(rows))
    records = [asdict(row) for row in rows]
    body = {"bench": bench, "versions": versions(), "model_rows": records}
    return report.finish(body, ExitCode.OK, interrupted=interrupted, rows=records)
