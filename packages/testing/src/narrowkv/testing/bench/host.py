"""Host time of each operation's call beside torch's own calls, and how many kernels random shapes need.

On a GPU the launches happen, and the time until a call returns counts. Without one, launches do nothing, and
what is measured is the Python code before the launch.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_prefill import batch_prefill, plan_append, plan_prefill, prefill_append
from narrowkv.paged_cache import append
from narrowkv.runtime.launch import RecordExecutor, executing
from narrowkv.runtime.targets import Target, device_target, get_target
from narrowkv.sage import plan_sage, sage_attention
from narrowkv.sparse_fp8 import plan_sparse, sparse_decode, sparse_prefill_fp8
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sparse import SparseCase

_CALLS = 50  # between two waits for the device; a stream's queue holds more


class NullExecutor:
    """Launches nothing."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def launch(self, *launch: Any) -> None:
        """Does nothing on the device."""


@dataclass(frozen=True)
class HostRow:
    """One measured call.

    Attributes:
        operation: its name.
        planned: whether a plan was given.
        host_us: median microseconds of the calling thread's CPU time until the call returns.
        ratio_to_add: `host_us` over that of `torch.add_`.
    """

    operation: str
    planned: bool
    host_us: float
    ratio_to_add: float


def measure_host(samples: int, shapes: int, captures: Sequence[int], context: int) -> dict[str, Any]:
    """Times every operation, counts the kernels of random calls and sizes workspaces of captured batches.

    Args:
        samples: of each call.
        shapes: random calls of each operation; 0 for none.
        captures: batches of captured graphs.
        context: tokens that a captured batch may hold.

    Returns:
        launches: "on the GPU", or "none" on a machine without one. target: the target whose code path the
        calls took. rows: a `HostRow` for each call. kernels: number of kernels of random calls, by operation.
        workspace_bytes: of a decode plan, by batch.
    """
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    target = device_target(device) if has_gpu else get_target("gfx942")
    rows = measure_calls(device, samples, nullcontext if has_gpu else lambda: executing(NullExecutor(target)))
    kernels = kernels_of_random_calls(target, device, shapes) if shapes else {}
    sizes = workspaces(target, device, captures, context)
    return {
        "launches": "on the GPU" if has_gpu else "none", "target": target.name, "rows": rows,
        "kernels": kernels, "workspace_bytes": sizes,
    }  # fmt: skip


def host_us(timed: Sequence[Callable[[], object]], samples: int, wait: Callable[[], None]) -> list[float]:
    """Median microseconds of the calling thread's CPU time until a call returns, for each call.

    A sample of every call is taken before the next one of any: what else the machine does moves all alike.

    Args:
        timed: the calls.
        samples: of each call.
        wait: waits for the device between samples.
    """
    for call in timed:
        for _ in range(3):
            call()
    times: list[list[float]] = [[] for _ in timed]
    for _ in range(samples):
        for call, found in zip(timed, times, strict=True):
            wait()
            begin = time.thread_time()
            for _ in range(_CALLS):
                call()
            found.append((time.thread_time() - begin) / _CALLS * 1e6)
    wait()
    return [statistics.median(found) for found in times]


Named = tuple[str, bool, Callable[[], object]]
"""A call: its name, whether a plan is given, and what makes it."""


def _with_and_without(
    plan: object, name: str, operation: Callable[..., object], *tensors: Any, **told: Any
) -> Iterator[Named]:
    """An operation by a plan, and without one but with what that was told, into one output."""
    out = torch.empty_like(tensors[0])
    yield name, True, partial(operation, *tensors, out=out, plan=plan)
    yield name, False, partial(operation, *tensors, out=out, **told)


def calls(device: str) -> Iterator[Named]:
    """Every operation on small tensors."""
    sizes: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 128, "clean": True}
    decode = DecodeCase.small(lens=(70, 5, 130), gqa_ratio=12, **sizes).build(device)
    yield from _with_and_without(plan_decode(*decode), "paged_decode", paged_decode, *decode)

    k_new, v_new = (torch.randn(3, 2, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    slots = torch.arange(3, dtype=torch.int32, device=device)
    yield "append", True, partial(append, decode[1], k_new, v_new, slots)

    prefill = PrefillCase.small(gqa_ratio=12, **sizes).build(device)
    yield from _with_and_without(plan_prefill(*prefill), "batch_prefill", batch_prefill, *prefill)

    chunk = PrefillCase.append(gqa_ratio=12, **sizes).build_append(device)[:6]
    plan_of_chunk = plan_append(chunk[0], *chunk[3:])
    yield from _with_and_without(plan_of_chunk, "prefill_append", prefill_append, *chunk)

    rows = SparseCase.small().build(device)
    assert rows.prefix is not None
    most: dict[str, Any] = {"max_num_tokens": rows.q.shape[0], "max_indices": rows.prefix.nnz}
    most |= {"num_qo_heads": rows.q.shape[1], "prefix": rows.prefix.format, "device": rows.q.device}
    for mode in ("fused", "prepass"):
        plan, name = plan_sparse(mode=mode, **most), f"sparse_prefill_fp8 {mode}"
        yield from _with_and_without(plan, name, sparse_prefill_fp8, rows.q, rows.prefix, mode=mode)
    plan = plan_sparse(mode="fused", **most)
    yield from _with_and_without(plan, "sparse_decode", sparse_decode, rows.q, rows.prefix)

    x = torch.randn(1, 256, 4, 128, dtype=torch.bfloat16, device=device)
    sage_out = torch.empty_like(x)
    sage_plan = plan_sage(x, x).with_workspace()
    kv = sage_plan.quantize_kv(x, x)
    yield "sage attend", True, partial(sage_plan.attend, x, kv, out=sage_out)

    # The same work, planned and not: K and V are quantised in every call.
    yield "sage_attention", True, partial(sage_plan.run, x, x, x, out=sage_out)
    yield "sage_attention", False, partial(sage_attention, x, x, x, out=sage_out)


def torch_calls(device: str) -> Iterator[Named]:
    """Calls of torch to compare with."""
    x = torch.zeros(1024, device=device)
    yield "torch.add_", False, lambda: x.add_(1.0)
    q = torch.zeros(1, 8, 1, 64, device=device, dtype=torch.bfloat16)
    yield "torch sdpa", False, lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)


def measure_calls(
    device: str,
    samples: int,
    context: Callable[[], AbstractContextManager[Any]],
    more: Sequence[Named] = (),
) -> list[HostRow]:
    """Times every call of `torch_calls` and `calls`, and `more`."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    with context():
        timed = [*torch_calls(device), *calls(device), *more]
        times = host_us([call for _, _, call in timed], samples, wait)
    return [
        HostRow(name, planned, us, us / times[0]) for (name, planned, _), us in zip(timed, times, strict=True)
    ]


def kernels_of_random_calls(target: Target, device: str, count: int, seed: int = 0) -> dict[str, int]:
    """How many kernels calls of one model with lognormal lengths need, by operation; none is compiled."""
    choose = random.Random(seed)
    heads: dict[str, Any] = {"num_kv_heads": 1, "gqa_ratio": 12, "head_dim": 64, "clean": True}
    found: dict[str, int] = {}

    def lengths(most: int) -> tuple[int, ...]:
        batch = min(int(choose.lognormvariate(1.0, 1.0)) + 1, most)
        return tuple(min(int(choose.lognormvariate(4.0, 1.0)) + 1, 2000) for _ in range(batch))

    def decode(lens: tuple[int, ...]) -> None:
        q, cache, table = DecodeCase.small(lens=lens, **heads).build(device)
        paged_decode(q, cache, table)

    def prefill(lens: tuple[int, ...]) -> None:
        q_lens = tuple(choose.randint(1, length) for length in lens)
        batch_prefill(*PrefillCase.small(q_lens=q_lens, lens=lens, **heads).build(device))

    def fill(lens: tuple[int, ...]) -> None:
        q_lens = tuple(choose.randint(1, 64) for _ in lens)
        prefill_append(*PrefillCase.append(q_lens=q_lens, lens=lens, **heads).build_append(device)[:6])

    operations: dict[str, Callable[[tuple[int, ...]], None]] = {
        "paged_decode": decode,
        "batch_prefill": prefill,
        "prefill_append": fill,
    }
    for name, operation in operations.items():
        executor = RecordExecutor(target)
        with executing(executor):
            for _ in range(count):
                operation(lengths(16))
        found[name] = len(executor.found)
    executor = RecordExecutor(target)
    _, cache, _ = DecodeCase.small(lens=(2000,), **heads).build(device)
    with executing(executor):
        for _ in range(count):
            tokens = min(int(choose.lognormvariate(3.0, 1.5)) + 1, 2000)
            k = torch.zeros(tokens, 1, 64, dtype=torch.bfloat16, device=device)
            append(cache, k, k.clone(), torch.arange(tokens, dtype=torch.int32, device=device))
    found["append"] = len(executor.found)
    return found


def workspaces(target: Target, device: str, sizes: Sequence[int], context: int) -> dict[str, int]:
    """Workspace bytes of a decode plan at 96/8 heads for each batch, with `context` tokens a sequence."""
    found = {}
    with executing(NullExecutor(target)):
        # Tables and queries are made; the cache has one page, because a plan reads no contents.
        _, cache, table = DecodeCase.small(lens=(1,), num_kv_heads=8, head_dim=128, clean=True).build(device)
        for batch in sizes:
            q = torch.empty(batch, 96, 128, dtype=torch.bfloat16, device=device)
            ids = torch.zeros(batch, context // table.page_size, dtype=torch.int32, device=device)
            lens = torch.ones(batch, dtype=torch.int32, device=device)
            long = type(table).from_block_table(ids, lens, page_size=table.page_size)
            found[str(batch)] = plan_decode(q, cache, long).workspace_bytes()
    return found
