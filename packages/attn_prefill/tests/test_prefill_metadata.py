"""What metadata that is wrong may do: nothing outside the call's own memory, nothing to other sequences.

Every buffer that a call writes lies between guard zones, which are compared after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import AppendPlan, batch_prefill, plan_append, plan_prefill, prefill_append
from narrowkv.attn_prefill.cases import PrefillCase
from narrowkv.attn_prefill.planning import can_pipeline
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.cases import copy_cache, differing_bytes
from narrowkv.runtime.launch import Workspace, block_bytes
from narrowkv.runtime.targets import device_target
from narrowkv.testing.memory_guards import GuardZones

pytestmark = pytest.mark.sampled
P, A = PrefillCase.small, PrefillCase.append
INT32_MAX = 2**31 - 1
# "": the automatic choice, by which sequences with few query tokens have a launch of their own.
KERNELS = ["dense", "fused", "split", ""]
APPEND_KERNELS = [
    "append_then_attend",
    "fused",
    "split",
    "",
    pytest.param("pipelined", marks=pytest.mark.gpu),
]


def _forced(kernel: str, splits: int) -> dict[str, Any]:
    """What a plan is told; kernel "split" and the automatic choice divide keys by themselves."""
    return {"kernel": kernel or None, "num_splits": None if kernel in ("split", "") else splits}


class Guards(GuardZones):
    """Tensors, plans and caches between guard zones."""

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor between two guard zones."""
        return self.place(f"tensor {len(self._buffers)}", tensor)

    def plan(self, plan: Any) -> Any:
        """The plan with all its memory between guard zones."""
        guards, size = self, plan.workspace_bytes()

        class Guarded(Workspace):
            def carve(self, blocks: Any) -> tuple[torch.Tensor, ...]:
                assert block_bytes(blocks) <= size
                return tuple(
                    guards.like(torch.empty(shape, dtype=dtype, device=self.device))
                    for shape, dtype in blocks
                )

            def counters(self, count: int) -> torch.Tensor:
                return guards.like(super().counters(count))

        return plan.with_workspace(Guarded(size, plan.device))

    def cache(self, cache: PagedKVCache) -> PagedKVCache:
        """The cache with all its memory between guard zones."""
        names = ("k", "v", "k_descale", "v_descale")
        tensors = {name: getattr(cache, name) for name in names}
        return replace(cache, **{n: self.like(t) for n, t in tensors.items() if isinstance(t, torch.Tensor)})

    def check(self) -> None:
        """Fails if a guard byte has changed."""
        assert self.damaged() == []


# ---- batch_prefill

Q_LENS, LENS = (9, 5, 30, 3), (40, 5, 70, 33)
TOKENS = sum(Q_LENS)


def _prefill(
    kernel: str,
    device: str,
    change: Callable[[PageTable, torch.Tensor], None] = lambda table, starts: None,
    ragged: bool = False,
    bounds: dict[str, int] | None = None,
    fmt: str = "fp8_e4m3fn",
    splits: int = 1,
    lens: tuple[int, ...] = LENS,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and lse with metadata that was changed, over guarded memory; rows that are not written are NaN."""
    q, cache, table, starts = P(
        q_lens=Q_LENS, lens=lens, num_kv_heads=1, gqa_ratio=7, ragged=ragged, format=fmt
    ).build(device)
    guards = Guards()
    plan = plan_prefill(q, cache, table, starts, **_forced(kernel, splits), **(bounds or {}))
    plan = guards.plan(plan)
    out, lse = (
        guards.like(torch.full_like(q, math.nan)),
        guards.like(q.new_full(q.shape[:2], math.nan, dtype=torch.float32)),
    )
    change(table, starts)
    batch_prefill(q, cache, table, starts, out=out, lse=lse, plan=plan, **options)
    guards.check()
    return out, lse


@cache
def _right(kernel: str, device: str, bounds: tuple[tuple[str, int], ...] = (), **options: Any) -> Any:
    """O and lse with metadata as it should be."""
    return _prefill(kernel, device, bounds=dict(bounds), **options)


def _rows(*sequences: int) -> torch.Tensor:
    """The rows of these sequences."""
    starts = torch.tensor([0, *Q_LENS]).cumsum(0)
    return torch.cat([torch.arange(int(starts[i]), int(starts[i + 1])) for i in sequences])


def _same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], rows: torch.Tensor) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a[rows], b[rows])


# Each with the sequences that it says nothing of.
STARTS: dict[str, tuple[list[int], tuple[int, ...]]] = {
    "huge": ([0, 9, INT32_MAX, 44, 47], (0, 3)),
    "smallest": ([0, -INT32_MAX - 1, 14, 44, 47], (2, 3)),
    "negative first": ([-3, 9, 14, 44, 47], (1, 2, 3)),
    "decreasing": ([0, 9, 4, 44, 47], (0, 3)),
    "twice all": ([0, 47, 0, 47, 47], ()),
    "all and all": ([0, 47, 0, 47, 0], ()),
    "beyond the tokens": ([0, 9, 14, 44, 48], (0, 1, 2)),
    "fewer than the tokens": ([0, 9, 14, 44, 45], (0, 1, 2)),
    "all beyond": ([100, 200, 300, 400, 500], ()),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", STARTS)
def test_wrong_starts_leave_the_rows_of_other_sequences(name: str, kernel: str, device: str) -> None:
    wrong, others = STARTS[name]

    def change(table: PageTable, starts: torch.Tensor) -> None:
        starts.copy_(torch.tensor(wrong))

    expected = _right(kernel, device)
    found = _prefill(kernel, device, change)
    if others:
        _same(found, expected, _rows(*others))
    _prefill(kernel, device, change, splits=3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("wrong", [10**6, INT32_MAX, -1, -INT32_MAX - 1])
@pytest.mark.parametrize("seq", [0, 2])
def test_a_wrong_length_changes_its_own_sequence_only(seq: int, wrong: int, kernel: str, device: str) -> None:
    def change(table: PageTable, starts: torch.Tensor) -> None:
        assert table.seq_lens is not None
        table.seq_lens[seq] = wrong

    others = _rows(*(i for i in range(4) if i != seq))
    _same(_prefill(kernel, device, change), _right(kernel, device), others)
    bounds = {"max_seq_len": 70, "max_kv_tokens": sum(LENS)}
    expected = _right(kernel, device, tuple(bounds.items()))
    _same(_prefill(kernel, device, change, bounds=bounds), expected, others)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "indptr", [[0, 3, 10**8, 9, 12], [0, -7, 4, 9, 12], [5, 3, 4, -INT32_MAX, INT32_MAX]]
)
def test_a_wrong_indptr_reads_and_writes_nothing_else(indptr: list[int], kernel: str, device: str) -> None:
    def change(table: PageTable, starts: torch.Tensor) -> None:
        assert table.kv_indptr is not None
        table.kv_indptr.copy_(torch.tensor(indptr))

    _prefill(kernel, device, change, ragged=True)


# Ids whose offset in bytes stays beyond the cache when it wraps at 32 bits, and those that are negative.
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("wrong", [2**27 + 12345, INT32_MAX, -1, -(2**27) - 12345])
def test_a_wrong_page_id_changes_its_own_sequence_only(wrong: int, kernel: str, device: str) -> None:
    def change(table: PageTable, starts: torch.Tensor) -> None:
        table.page_ids[2] = wrong

    _same(_prefill(kernel, device, change), _right(kernel, device), _rows(0, 1, 3))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"causal": False, "window_left": 9}], ids=str)
def test_rows_inside_a_bound_on_query_tokens_that_is_too_low(
    options: dict[str, Any], kernel: str, device: str
) -> None:
    expected = _right(kernel, device, **options)
    found = _prefill(kernel, device, bounds={"max_q_len": 8}, **options)
    inside = torch.cat([_rows(i)[:8] for i in range(4)])
    if kernel:
        _same(found, expected, inside)
    for a, b in zip(found, expected, strict=True):
        # The automatic choice serves sequence 2 by another kernel.
        torch.testing.assert_close(a[inside], b[inside], rtol=1e-2, atol=1e-3)
    outside = torch.ones(TOKENS, dtype=torch.bool)
    outside[inside] = False
    assert bool(found[0][outside].isnan().all())


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_inside_a_bound_on_keys_that_is_too_low(kernel: str, splits: int, device: str) -> None:
    expected = _right(kernel, device, splits=splits)
    found = _prefill(kernel, device, bounds={"max_seq_len": 50}, splits=splits)
    # The rows of sequence 2 stand at positions 40 to 69: the first ten see no key beyond the bound.
    inside = torch.cat([_rows(0, 1, 3), _rows(2)[:10]])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a[inside], b[inside], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("longest", [70, 260])
def test_the_longest_sequences_are_left_out_of_scratch_that_is_too_small(longest: int, device: str) -> None:
    lens = (40, 5, longest, 33)
    expected = _right("dense", device, lens=lens)
    # Blocks of 64 keys: one for each sequence, and one more.
    found = _prefill("dense", device, bounds={"max_kv_tokens": 64, "max_seq_len": longest}, lens=lens)
    _same(found, expected, _rows(0, 1, 3))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_window_that_reaches_every_key_is_none(kernel: str, device: str) -> None:
    every = torch.arange(TOKENS)
    for open_window in (INT32_MAX, 2**30):
        options = {"causal": False, "window_left": open_window, "window_right": open_window}
        _same(_prefill(kernel, device, **options), _right(kernel, device, causal=False), every)


def test_a_schedule_of_few_tiles_ends_with_its_last_tile(device: str) -> None:
    """A program places eight tiles: here one, and seven that there are not."""
    q, cache, table, starts = P(q_lens=(8,), lens=(8,), num_kv_heads=1, gqa_ratio=1).build(device)
    guards = Guards()
    guards.plan(plan_prefill(q, cache, table, starts, kernel="dense")).run(q, cache, table, starts)
    guards.check()


# ---- prefill_append

OLD, NEW = (20, 0, 70, 5), (9, 5, 40, 3)


def _append(
    kernel: str,
    device: str,
    change: Callable[[PageTable, torch.Tensor], None] = lambda table, starts: None,
    bounds: dict[str, int] | None = None,
    granularity: str = "float",
    splits: int = 1,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, PagedKVCache, PageTable]:
    """O, lse, the cache and the table as it was, with metadata that was changed, over guarded memory."""
    q, k_new, v_new, cache, table, starts, _ = A(
        q_lens=NEW, lens=OLD, num_kv_heads=1, gqa_ratio=7, granularity=granularity
    ).build_append(device)
    if kernel == "pipelined" and not can_pipeline(device_target(q.device), q.dtype, cache):
        pytest.skip("not for this GPU")
    guards = Guards()
    plan = plan_append(q, cache, table, starts, **_forced(kernel, splits), **(bounds or {}))
    plan, cache = guards.plan(plan), guards.cache(cache)
    out, lse = (
        guards.like(torch.full_like(q, math.nan)),
        guards.like(q.new_full(q.shape[:2], math.nan, dtype=torch.float32)),
    )
    before = replace(table, page_ids=table.page_ids.clone())
    change(table, starts)
    prefill_append(q, k_new, v_new, cache, table, starts, out=out, lse=lse, plan=plan, **options)
    guards.check()
    return out, lse, cache, before


@cache
def _right_append(kernel: str, device: str, bounds: tuple[tuple[str, int], ...] = (), splits: int = 1) -> Any:
    """O, lse, the cache and the table with metadata as it should be."""
    return _append(kernel, device, bounds=dict(bounds), splits=splits)


def _new_rows(*sequences: int) -> torch.Tensor:
    starts = torch.tensor([0, *NEW]).cumsum(0)
    return torch.cat([torch.arange(int(starts[i]), int(starts[i + 1])) for i in sequences])


def _same_sequences(found: Any, expected: Any, *sequences: int) -> None:
    """The same rows, and the same bytes in the pages of these sequences."""
    _same(found[:2], expected[:2], _new_rows(*sequences))
    table = expected[3]
    for seq in sequences:
        pages = table.page_ids[seq, : -(-(OLD[seq] + NEW[seq]) // 16)].long()
        for stored, wanted in ((found[2].k, expected[2].k), (found[2].v, expected[2].v)):
            assert torch.equal(stored[pages].view(torch.uint8), wanted[pages].view(torch.uint8))


APPEND_STARTS: dict[str, tuple[list[int], tuple[int, ...]]] = {
    "huge": ([0, 9, INT32_MAX, 54, 57], (0, 3)),
    "smallest": ([0, -INT32_MAX - 1, 14, 54, 57], (2, 3)),
    "decreasing": ([0, 9, 4, 54, 57], (0, 3)),
    "twice all": ([0, 57, 0, 57, 57], ()),
    "beyond the tokens": ([0, 9, 14, 54, 58], (0, 1, 2)),
}


@pytest.mark.parametrize("kernel", APPEND_KERNELS)
@pytest.mark.parametrize("name", APPEND_STARTS)
def test_wrong_starts_of_an_append(name: str, kernel: str, device: str) -> None:
    wrong, others = APPEND_STARTS[name]

    def change(table: PageTable, starts: torch.Tensor) -> None:
        starts.copy_(torch.tensor(wrong))

    found = _append(kernel, device, change)
    if others:
        _same_sequences(found, _right_append(kernel, device), *others)


@pytest.mark.parametrize("kernel", APPEND_KERNELS)
@pytest.mark.parametrize("wrong", [10**6, INT32_MAX, -1, -INT32_MAX - 1])
def test_a_wrong_length_of_an_append(wrong: int, kernel: str, device: str) -> None:
    def change(table: PageTable, starts: torch.Tensor) -> None:
        assert table.seq_lens is not None
        table.seq_lens[2] = wrong

    _same_sequences(_append(kernel, device, change), _right_append(kernel, device), 0, 1, 3)
    bounds = {"max_seq_len": 110, "max_kv_tokens": sum(OLD) + sum(NEW)}
    expected = _right_append(kernel, device, tuple(bounds.items()))
    _same_sequences(_append(kernel, device, change, bounds=bounds), expected, 0, 1, 3)


@pytest.mark.parametrize("kernel", APPEND_KERNELS)
@pytest.mark.parametrize("wrong", [2**27 + 12345, INT32_MAX, -1, -(2**27) - 12345])
def test_a_wrong_page_id_of_an_append(wrong: int, kernel: str, device: str) -> None:
    def change(table: PageTable, starts: torch.Tensor) -> None:
        table.page_ids[2] = wrong

    found, expected = _append(kernel, device, change), _right_append(kernel, device)
    _same_sequences(found, expected, 0, 1, 3)
    # No page of the wrong id exists, so nothing of sequence 2 is stored.
    workload = A(q_lens=NEW, lens=OLD, num_kv_heads=1, gqa_ratio=7)
    before = workload.build_append(device)[3]
    pages = expected[3].page_ids[2].long()
    assert torch.equal(found[2].k[pages].view(torch.uint8), before.k[pages].view(torch.uint8))


@pytest.mark.parametrize("kernel", APPEND_KERNELS)
@pytest.mark.parametrize("splits", [1, 3])
def test_bounds_of_an_append_that_are_too_low(splits: int, kernel: str, device: str) -> None:
    expected = _right_append(kernel, device, splits=splits)
    found = _append(kernel, device, bounds={"max_q_len": 9}, splits=splits)
    _same_sequences(found, expected, 0, 1, 3)
    rows = _new_rows(2)[:9]
    if kernel:
        _same(found[:2], expected[:2], rows)
    for a, b in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(a[rows], b[rows], rtol=1e-2, atol=1e-3)
    # Sequence 2 has 70 old keys.
    for low in ({"max_seq_len": 64}, {"max_kv_tokens": 64}):
        _same_sequences(_append(kernel, device, bounds=low, splits=splits), expected, 0, 1, 3)


# ---- what `validate` finds


def _wrong(table: PageTable, **fields: Any) -> PageTable:
    return replace(table, **fields)


def test_validate_finds_every_wrong_value_of_a_prefill(device: str) -> None:
    q, cache, table, starts = P().build(device)
    assert table.seq_lens is not None

    def refused(message: str, **changed: Any) -> None:
        call = {"cache": cache, "page_table": table, "cu_seqlens_q": starts, **changed}
        plan = call.pop("plan", None)
        before = copy_cache(cache)
        with pytest.raises(ValueError, match=message):
            batch_prefill(
                q, call["cache"], call["page_table"], call["cu_seqlens_q"], plan=plan, validate=True
            )
        if plan is None:
            with pytest.raises(ValueError, match=message):
                plan_prefill(q, call["cache"], call["page_table"], call["cu_seqlens_q"], validate=True)
        assert not differing_bytes(cache, before)

    for wrong in ([1, 5, 6, 31], [0, 6, 5, 31], [0, 5, 6, 32], [0, 5, 6, 30]):
        refused(
            "cu_seqlens_q must rise from 0", cu_seqlens_q=torch.tensor(wrong, dtype=torch.int32).to(device)
        )
    refused("must not be negative", page_table=replace(table, seq_lens=table.seq_lens * 0 - 1))
    refused("must not exceed the table's capacity", page_table=replace(table, seq_lens=table.seq_lens + 900))
    for wrong_id, message in ((-1, "must not be negative"), (cache.num_pages, "must be below num_pages")):
        refused(message, page_table=replace(table, page_ids=torch.full_like(table.page_ids, wrong_id)))
    for name, bound in (("max_q_len", 24), ("max_seq_len", 69), ("max_kv_tokens", 94)):
        plan = plan_prefill(q, cache, table, starts, **{name: bound})
        refused(f"{name} must be at least {bound + 1} for these lengths, got {bound}", plan=plan)
        with pytest.raises(ValueError, match=f"{name} must be at least"):
            plan_prefill(q, cache, table, starts, **{name: bound}, validate=True)
    for granularity in ("tensor", "head", "sequence_head", "page_head", "token_head"):
        _, scaled, _, _ = P(granularity=granularity).build(device)
        for name in ("k_descale", "v_descale"):
            for bad in (0.0, -1.0, math.nan, math.inf):
                values = getattr(scaled, name).clone()
                if granularity == "page_head":
                    values[table.page_ids[2, 4].long()] = bad
                elif granularity == "token_head":
                    values[table.page_ids[2, 4].long(), 5] = bad
                else:
                    values[-1] = bad
                refused(f"{name} must be finite and greater than 0", cache=replace(scaled, **{name: values}))
    batch_prefill(q, cache, table, starts, validate=True)


def test_descales_of_slots_without_a_token_are_not_looked_at(device: str) -> None:
    q, cache, table, starts = P(granularity="token_head").build(device)
    assert isinstance(cache.k_descale, torch.Tensor)
    cache.k_descale[table.page_ids[2, 4].long(), 6:] = math.nan  # behind the last of 70 tokens
    batch_prefill(q, cache, table, starts, validate=True)


@pytest.mark.parametrize("q_descale", [0.0, -1.0, math.nan, math.inf])
def test_validate_looks_at_the_descale_of_queries(q_descale: float, device: str) -> None:
    q, cache, table, starts = P(q_dtype=torch.float8_e4m3fn).build(device)
    given = torch.tensor([q_descale], device=device)
    with pytest.raises(ValueError, match="q_descale must be finite and greater than 0"):
        batch_prefill(q, cache, table, starts, q_descale=given, validate=True)


def test_validate_finds_every_wrong_value_of_an_append_and_changes_nothing(device: str) -> None:
    q, k_new, v_new, cache, table, starts, rope = A(rope="neox").build_append(device)
    assert table.seq_lens is not None
    assert rope is not None
    before = copy_cache(cache)

    def refused(message: str, plan: AppendPlan | None = None, **changed: Any) -> None:
        call = {"cache": cache, "table": table, "starts": starts, "rope": rope, **changed}
        held = copy_cache(call["cache"])
        with pytest.raises(ValueError, match=message):
            prefill_append(
                q, k_new, v_new, call["cache"], call["table"], call["starts"], rope=call["rope"], plan=plan,
                validate=True,
            )  # fmt: skip
        assert not differing_bytes(call["cache"], held)
        if plan is None and "rope" not in changed:
            with pytest.raises(ValueError, match=message):
                plan_append(q, call["cache"], call["table"], call["starts"], validate=True)

    refused("cu_seqlens_q must rise from 0", starts=starts + 1)
    refused("must not be negative", table=replace(table, seq_lens=table.seq_lens * 0 - 1))
    longer = torch.tensor([20, 5, 75], dtype=torch.int32, device=device)
    refused("page_table must have pages for the new tokens", table=replace(table, seq_lens=longer))
    wild = table.page_ids.clone()
    wild[2, 5] = -1  # of new tokens only
    refused("page ids must not be negative", table=replace(table, page_ids=wild))
    for name, bound in (("max_q_len", 24), ("max_seq_len", 94), ("max_kv_tokens", 125)):
        plan = plan_append(q, cache, table, starts, **{name: bound})
        refused(f"{name} must be at least {bound + 1} for these lengths, got {bound}", plan=plan)
    positions = rope.positions.clone()
    positions[3] = rope.cos.shape[0]
    refused("rope.positions must lie in", rope=replace(rope, positions=positions))
    for granularity in ("tensor", "head", "token_head"):
        scaled = A(granularity=granularity).build_append(device)[3]
        for name in ("k_descale", "v_descale"):
            for bad in (0.0, -1.0, math.nan, math.inf):
                values = getattr(scaled, name).clone()
                if granularity == "token_head":
                    values[table.page_ids[2, 4].long(), 5] = bad  # an old token's
                else:
                    values[-1] = bad
                refused(f"{name} must be finite and greater than 0", cache=replace(scaled, **{name: values}))
    assert not differing_bytes(cache, before)
    prefill_append(q, k_new, v_new, cache, table, starts, rope=rope, validate=True)


def test_descales_of_another_batch_are_refused() -> None:
    q, cache, table, starts = P(granularity="sequence_head").build()
    assert isinstance(cache.k_descale, torch.Tensor)
    short = replace(cache, k_descale=cache.k_descale[:1])
    with pytest.raises(ValueError, match=r"k_descale must have shape \[3, 2\], got \[1, 2\]"):
        batch_prefill(q, short, table, starts)


# ---- objects and outputs


def test_objects_of_a_wrong_class_are_refused() -> None:
    q, k_new, v_new, cache, table, starts, rope = A(rope="neox").build_append()
    after = replace(table, before_append=False)
    for wrong, call in {
        "cache must be a PagedKVCache": lambda: batch_prefill(q, {}, after, starts),  # type: ignore[arg-type]
        "page_table must be a PageTable": lambda: batch_prefill(q, cache, [], starts),  # type: ignore[arg-type]
        "plan must be a PrefillPlan": lambda: batch_prefill(q, cache, after, starts, plan=1),  # type: ignore[arg-type]
        "cu_seqlens_q must be a torch.Tensor": lambda: batch_prefill(q, cache, after, [0]),  # type: ignore[arg-type]
        "q must be a torch.Tensor": lambda: batch_prefill([], cache, after, starts),  # type: ignore[arg-type]
        "window_left must be an int": lambda: batch_prefill(q, cache, after, starts, window_left=True),
        "out_dtype must be a torch.dtype": lambda: batch_prefill(q, cache, after, starts, out_dtype="bf16"),  # type: ignore[arg-type]
        "rope must be a Rope": lambda: prefill_append(q, k_new, v_new, cache, table, starts, rope=()),  # type: ignore[arg-type]
        "k_new must be a torch.Tensor": lambda: prefill_append(q, None, v_new, cache, table, starts),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(TypeError, match=wrong):
            call()
    assert rope is not None


def test_outputs_that_overlap_themselves_or_an_input_are_refused() -> None:
    q, k_new, v_new, cache, table, starts, _ = A(format="bf16").build_append()
    after = replace(table, before_append=False)
    heads = q.shape[1]
    sinks = torch.zeros(q.numel(), dtype=torch.bfloat16)
    logs = torch.zeros(q.shape[0], heads)
    with pytest.raises(ValueError, match="out must not overlap itself"):
        batch_prefill(q, cache, after, starts, out=torch.zeros(1, *q.shape[1:]).bfloat16().expand(q.shape))
    with pytest.raises(ValueError, match="lse must not overlap itself"):
        batch_prefill(q, cache, after, starts, lse=logs[:1].expand(logs.shape))
    for name, out in (("q", q), ("cache.k", cache.k.flatten()[: q.numel()].view(q.shape))):
        with pytest.raises(ValueError, match=f"out must not share memory with {name}"):
            batch_prefill(q, cache, after, starts, out=out)
        with pytest.raises(ValueError, match=f"out must not share memory with {name}"):
            prefill_append(q, k_new, v_new, cache, table, starts, out=out)
    with pytest.raises(ValueError, match="out must not share memory with sinks"):
        batch_prefill(q, cache, after, starts, out=sinks.view(q.shape), sinks=sinks[:heads])
    wide = torch.zeros(q.shape[0], heads, 64).bfloat16()
    with pytest.raises(ValueError, match="out must not share memory with k_new"):
        prefill_append(q, wide[:, :2], v_new, cache, table, starts, out=wide)
    both = torch.zeros(q.shape[0], heads, 64)
    with pytest.raises(ValueError, match="out must not share memory with lse"):
        batch_prefill(q, cache, after, starts, out=both, lse=both.flatten()[: logs.numel()].view(logs.shape))
    memory = torch.zeros(logs.numel(), dtype=torch.int32)
    memory[: starts.numel()] = starts
    own = memory.view(torch.float32).view(logs.shape)
    with pytest.raises(ValueError, match="lse must not share memory with cu_seqlens_q"):
        batch_prefill(q, cache, after, memory[: starts.numel()], lse=own)
    inside = cache.k.flatten()[: k_new.numel()].view(k_new.shape)
    with pytest.raises(ValueError, match=r"cache.k must not share memory with k_new"):
        prefill_append(q, inside, v_new, cache, table, starts)
    with pytest.raises(ValueError, match=r"cache.k must not share memory with sinks"):
        prefill_append(q, k_new, v_new, cache, table, starts, sinks=cache.k.flatten()[:heads])


@pytest.mark.parametrize("appends", [False, True])
def test_outputs_that_the_caller_gives(appends: bool, device: str) -> None:
    q, k_new, v_new, cache, table, starts, _ = A().build_append(device)

    def run(**options: Any) -> Any:
        own = copy_cache(cache)
        if appends:
            return prefill_append(q, k_new, v_new, own, table, starts, **options)
        return batch_prefill(q, own, replace(table, before_append=False), starts, **options)

    o, lse = run(return_lse=True, out_dtype=torch.float32)
    assert o.dtype == torch.float32
    wide = torch.full((*q.shape[:2], 80), math.nan, device=device)
    log_sums = torch.full((q.shape[0], q.shape[1] + 3), math.nan, device=device)
    found = run(out=wide[..., :64], lse=log_sums[:, : q.shape[1]])
    assert isinstance(found, torch.Tensor)
    assert found.data_ptr() == wide.data_ptr()
    assert torch.equal(wide[..., :64], o)
    assert torch.equal(log_sums[:, : q.shape[1]], lse)
    assert bool(wide[..., 64:].isnan().all())
    assert bool(log_sums[:, q.shape[1] :].isnan().all())
    with pytest.raises(TypeError, match="out must have dtype"):
        run(out=wide[..., :64], out_dtype=torch.bfloat16)
