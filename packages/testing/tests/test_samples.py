"""Samples: which workgroups stand for a launch, and how it is known what they wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import merge_states
from narrowkv.paged_cache import PagedKVCache, append, append_reference
from narrowkv.runtime.launch import LaunchOptions, executing
from narrowkv.runtime.targets import get_target
from narrowkv.testing import model, operations
from narrowkv.testing.cases import parse_case, prefill
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.indexer import IndexCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sparse import SparseCase
from narrowkv.testing.checking import check_sample
from narrowkv.testing.emulation import EmulateExecutor
from narrowkv.testing.operation import SampledLaunch
from narrowkv.testing.operations import OPERATIONS, a_few, corners, families, sample


def test_a_kernel_that_is_not_listed_runs_whole() -> None:
    launch = SampledLaunch("_no_such_kernel", (2, 3, 2), {})
    assert sorted(sample(launch)) == [(x, y, z) for x in range(2) for y in range(3) for z in range(2)]
    assert launch.size == 12


@pytest.mark.parametrize(
    ("grid", "chosen"),
    [((1, 1, 1), [(0, 0, 0)]), ((2, 1, 1), [(0, 0, 0), (1, 0, 0)]),
     ((9, 1, 5), [(x, 0, z) for x in (0, 4, 8) for z in (0, 2, 4)])],
)  # fmt: skip
def test_corners_are_first_middle_and_last_of_each_axis(
    grid: tuple[int, int, int], chosen: list[tuple[int, int, int]]
) -> None:
    assert corners(SampledLaunch("any", grid, {})) == chosen


def test_a_few_are_the_first_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"listed": lambda launch: [(3, 0, 0), (1, 0, 0), (2, 0, 0)]}
    monkeypatch.setitem(OPERATIONS, "sage", replace(OPERATIONS["sage"], samples=chosen))
    assert a_few(2)(SampledLaunch("listed", (4, 1, 1), {})) == [(3, 0, 0), (1, 0, 0)]
    assert len(a_few(8)(SampledLaunch("listed", (4, 1, 1), {}))) == 3


def rows_of_a_sample(case: DecodeCase | PrefillCase) -> tuple[torch.Tensor, EmulateExecutor]:
    """The rows `[rows, heads]` that a sample of a call on gfx942 stores, which are whole and right."""
    inputs = case.inputs()
    executor = EmulateExecutor("gfx942", workgroups=sample)
    with executing(executor):
        o, lse = inputs.call()
    expected, expected_lse = inputs.reference()
    stored = executor.written(o)
    rows = stored.all(-1)
    assert torch.equal(rows, stored.any(-1)), "rows are whole"
    assert torch.equal(rows, executor.written(lse))
    torch.testing.assert_close(o[rows].float(), expected[rows], rtol=0, atol=0.01)
    torch.testing.assert_close(lse[rows], expected_lse[rows], rtol=0, atol=1e-3)
    return rows, executor


@pytest.mark.parametrize(
    ("shape", "split"),
    [
        ("ratio=3,kv_heads=2", "none"),
        ("ratio=3,kv_heads=2", "even"),
        ("ratio=135,kv_heads=1", "even"),
        ("ratio=5,q_len=4,kv_heads=2", "per_sequence"),
    ],
)
def test_a_sample_of_decode_finishes_the_rows_of_its_last_block_and_no_others(shape: str, split: str) -> None:
    case = parse_case(DecodeCase, f"{shape},split={split},lens=70+5,head_dim=64,clean=1")
    rows, _ = rows_of_a_sample(case)
    # Rows of a KV head are (query token, head of the group); the last block of the last head is owned.
    block = {3: 3, 135: 135 - 128, 20: 20}[case.gqa_ratio * case.q_len]
    assert int(rows.sum()) == len(case.lens) * block
    assert bool(rows.view(len(case.lens), case.q_len, -1)[:, -1, -1].all()), "the last row is among them"


def test_a_sample_of_even_shares_finishes_the_last_head_and_no_other() -> None:
    case = parse_case(PrefillCase, "kernel=split,q_lens=1+1,lens=700+20,kv_heads=2,ratio=3,clean=1")
    rows, executor = rows_of_a_sample(case)
    (run,) = executor.runs
    assert run.artifact.name == "_fused_prefill_kernel"
    assert rows.tolist() == [[False] * 3 + [True] * 3] * 2, "of the last KV head, in both sequences"
    assert run.result.workgroups == run.launched // case.num_kv_heads


class SampleExecutor:
    """Takes the sample of every launch, and runs nothing."""

    def __init__(self, target: str) -> None:
        self.target = get_target(target)
        self.kernels: set[str] = set()

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:
        """Takes the sample, which must be a part of the grid."""
        launch = SampledLaunch(kernel.__name__, (*grid, 1, 1)[:3], constexprs)
        first = a_few(3)(launch)
        assert first, launch
        for workgroup in first:
            assert all(0 <= at < extent for at, extent in zip(workgroup, launch.grid, strict=True)), launch
        self.kernels.add(launch.kernel)


SOURCES = Path(__file__).resolve().parents[2]


def kernels_of_the_sources() -> set[str]:
    """Names of all kernels in the packages."""
    found = re.findall(
        r"^def (_\w+_kernel)\(", "\n".join(path.read_text() for path in SOURCES.glob("*/src/**/*.py")), re.M
    )
    return set(found)


# Calls beside those of `families` that launch every kernel.
OTHERS: tuple[Any, ...] = (
    DecodeCase.small(split="even"),
    DecodeCase.small(split="per_sequence"),
    PrefillCase.small(kernel="split"),
    SparseCase.small(),
    SparseCase.small(mode="prepass"),
    SparseCase.small(mode="decode", num_qo_heads=64),
    SparseCase.small(mode="16bit", layout="bf16"),
    IndexCase.small(),
)


def launched(target: str, calls: Iterable[Callable[[], object]]) -> set[str]:
    """The kernels that calls launch for a target, each with a sample that is a part of its grid."""
    executor = SampleExecutor(target)
    with executing(executor):
        for call in calls:
            call()
    return executor.kernels


def test_every_kernel_has_a_sample() -> None:
    reached: set[str] = set()
    for target in ("gfx942", "gfx950"):
        calls = [family.call for family in families(target).values()]
        calls += [lambda case=case: case.inputs().call() for case in OTHERS]
        calls.append(next(case for case in prefill.shipped(target) if case.kernel == "dense").inputs().call)
        reached |= launched(target, calls)
    assert reached >= set(operations.listed()) - {"_merge_states_kernel"}
    assert kernels_of_the_sources() >= {*operations.listed(), *model._RUN_WHOLE}


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_every_shipped_plan_has_samples(operation: str, target: str) -> None:
    cases = OPERATIONS[operation].cases.shipped(target)
    assert launched(target, [lambda case=case: case.inputs().call() for case in cases])


@pytest.mark.sampled
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("line", [
    "operation=append,kernel=fused,q_lens=3+2,lens=70+9,kv_heads=2",
    "operation=append,kernel=append_then_attend,q_lens=3+2,lens=70+9,kv_heads=2",
    "kernel=dense,q_lens=20+3,lens=70+9,kv_heads=2",
])  # fmt: skip
def test_a_sample_of_prefill_finishes_whole_rows(line: str, target: str) -> None:
    inputs = parse_case(PrefillCase, line).inputs()
    found = check_sample(target, inputs, lambda: inputs.prepare()(), inputs.case.bound)
    assert found.detail == ""


def test_a_sample_of_append_writes_its_tokens_alone() -> None:
    caches = [PagedKVCache.empty(4, 4, 5, 64, format="fp8_e4m3fn") for _ in range(2)]
    new = torch.randn(7, 5, 64, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(7, dtype=torch.int32)
    executor = EmulateExecutor("gfx950", workgroups=sample)
    with executing(executor):
        append(caches[0], new, new, slots)
    append_reference(caches[1], new, new, slots)
    stored = executor.written(caches[0].k.view(torch.uint8))
    tokens = stored.flatten(0, 1).all(-1)  # [slots, heads]
    want = torch.zeros(16, 5, dtype=torch.bool)
    want[torch.tensor([0, 3, 6])[:, None], torch.tensor([0, 2, 4])] = True
    assert torch.equal(tokens, want)
    k, expected = (cache.k.view(torch.uint8) for cache in caches)
    assert torch.equal(k[stored], expected[stored])


def test_what_is_stored_is_known_for_views_and_refused_for_strangers() -> None:
    executor = EmulateExecutor("gfx942")
    with executing(executor):
        merged, _ = merge_states(torch.randn(2, 3, 2, 64), torch.randn(2, 3, 2))
    assert bool(executor.written(merged).all())
    assert executor.written(merged[1:, ::2].transpose(0, 1)).shape == (1, 2, 64)
    with pytest.raises(ValueError, match="tensor must be one that an emulated launch was given"):
        executor.written(torch.zeros(4))
