"""Dense decode over latent rows: against the reference, in memory of any kind, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.paged_cache import PageTable
from narrowkv.runtime.launch import executing, run_as
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    RowsFormat,
    latent_decode,
    latent_decode_reference,
    plan_latent,
    plan_sparse,
)
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.latent import LatentCase, sweep
from narrowkv.testing.checking import assert_agrees

pytestmark = pytest.mark.sampled
W = LatentCase
I32 = torch.int32


@pytest.mark.parametrize("case", sweep(), ids=str)
def test_every_value_of_every_axis(case: LatentCase, device: str) -> None:
    call = case.inputs(device)
    q = call.q
    out = torch.full((*q.shape[:2], 512), math.nan, device=device)
    o, lse = call.call(out=out)
    assert o is out
    expected, expected_lse = call.reference()
    assert not bool(o[expected_lse == -math.inf].any())
    assert_agrees((o, lse), (expected, expected_lse), bound=case.bound, lse_bound=case.lse_bound)


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90"])
@pytest.mark.parametrize("layout", ["bf16", "tensor576", "record656", "packed584"])
def test_the_code_paths_of_every_target(layout: str, target: str) -> None:
    case = W(layout=layout, lens=(70, 3), num_qo_heads=40, q_len=2, sinks=True, splits=2)
    with run_as(target):
        results = case.inputs().call()
    assert_agrees(results, case.inputs().reference(), bound=case.bound, lse_bound=case.lse_bound)


def test_a_query_token_attends_to_rows_up_to_its_own(device: str) -> None:
    """The last token's results are those of a call with it alone, the first one's of a shorter sequence."""
    case = W(lens=(70, 33), q_len=3)
    q, rows, table = case.build(device)
    assert table.seq_lens is not None
    together = latent_decode(q, rows, table).view(2, 3, 12, 512)
    for i in range(3):
        shorter = replace(table, seq_lens=table.seq_lens - 2 + i)
        alone = latent_decode(q.view(2, 3, 12, 576)[:, i].contiguous(), rows, shorter)
        torch.testing.assert_close(together[:, i], alone, rtol=0, atol=2e-2)


def test_pages_of_one_row_over_larger_pages_of_rows(device: str) -> None:
    """Page ids are then row numbers, as in an engine's list of slots."""
    case = W(layout="record656", page_size=16, lens=(37, 5))
    q, rows, table = case.build(device)
    ids = [(table.pages_of(i)[0][:, None] * 16 + torch.arange(16, device=device)).flatten() for i in (0, 1)]
    slots = torch.stack([torch.nn.functional.pad(one, (0, 48 - len(one))) for one in ids]).to(I32)
    assert table.seq_lens is not None
    listed = PageTable.from_block_table(slots, table.seq_lens, page_size=1)
    assert torch.equal(latent_decode(q, rows, listed), latent_decode(q, rows, table))


def test_results_and_queries_that_are_views(device: str) -> None:
    case = W(lens=(40, 3), q_len=2, num_qo_heads=6)
    q, rows, table = case.build(device)
    expected, sums = latent_decode(q, rows, table, return_lse=True)
    wide_q, wide = torch.zeros(4, 6, 640, dtype=q.dtype, device=device), torch.zeros(4, 6, 520, device=device)
    wide_q[..., :576] = q
    lse = torch.zeros(4, 6, 2, device=device)[..., 0]
    o, found = latent_decode(wide_q[..., :576], rows, table, out=wide[..., :512], lse=lse, return_lse=True)
    assert (o.data_ptr(), found.data_ptr()) == (wide.data_ptr(), lse.data_ptr())
    torch.testing.assert_close(o, expected.float(), rtol=0, atol=2e-2)
    assert torch.equal(found, sums)
    assert not bool(wide[..., 512:].any())


def test_one_scale_is_a_number_or_a_tensor_that_may_change(device: str) -> None:
    q, rows, table = W(layout="tensor576").build(device)
    assert isinstance(rows, DSV4Rows)
    assert rows.scale is not None
    pages = rows.data.view(torch.float8_e4m3fn).view(-1, 16, 576)
    number = DSV4Rows.paged(pages, "tensor576", page_size=16, scale=float(rows.scale))
    before = latent_decode(q, rows, table)
    assert torch.equal(latent_decode(q, number, table), before)
    rows.scale.mul_(2)
    after = latent_decode(q, rows, table)
    assert not torch.equal(after, before)
    assert_agrees(after, latent_decode_reference(q, rows, table), bound=W.bound)


@pytest.mark.parametrize("layout", ["bf16", "tensor576"])
@pytest.mark.parametrize("q_len", [1, 2])
def test_a_plan_serves_any_batch_up_to_its_maximum(layout: str, q_len: int, device: str) -> None:
    case = W(layout=layout, q_len=q_len, sinks=True, lens=(70, 0, 33, 5))
    q, rows, table = case.build(device)
    stored = rows.bound.format if isinstance(rows, DSV4Rows) else RowsFormat("bf16", columns=576)
    plan = plan_latent(
        num_qo_heads=12, rows=stored, page_size=16, q_len=q_len, device=device, has_sinks=True,
        return_lse=True, num_splits=2, max_batch=4, max_seq_len=128,
    )  # fmt: skip
    assert plan.workspace is not None
    assert "2 splits" in plan.explain()
    assert plan.kernels()
    call = case.inputs(device)
    for batch in (4, 2):
        assert table.seq_lens is not None
        part = replace(table, page_ids=table.page_ids[:batch], seq_lens=table.seq_lens[:batch])
        given = q[: batch * q_len], rows, part
        results = latent_decode(*given, plan=plan, sinks=call.sinks, return_lse=True)
        expected = latent_decode_reference(*given, sinks=call.sinks, return_lse=True)
        assert_agrees(results, expected, bound=case.bound, lse_bound=case.lse_bound)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["bf16", "packed584"])
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(layout: str, device: str) -> None:
    q, rows, table = W(layout=layout, lens=(70, 0, 200, 5)).build(device)
    assert table.seq_lens is not None
    whole = latent_decode(q, rows, table, batch_invariant=True)
    for first, last in ((0, 1), (2, 4)):
        part = replace(table, page_ids=table.page_ids[first:last], seq_lens=table.seq_lens[first:last])
        assert torch.equal(latent_decode(q[first:last], rows, part, batch_invariant=True), whole[first:last])


def test_no_sequences_and_no_rows(device: str) -> None:
    q, rows, table = W().build(device)
    assert table.seq_lens is not None
    empty = replace(table, page_ids=table.page_ids[:0], seq_lens=table.seq_lens[:0])
    assert latent_decode(q[:0], rows, empty).shape == (0, 12, 512)
    no_pages = replace(table, page_ids=table.page_ids[:, :0], seq_lens=table.seq_lens)
    o, lse = latent_decode(q, rows, no_pages, return_lse=True)
    assert not bool(o.any())
    assert bool((lse == -math.inf).all())


def _table(table: PageTable, **changes: Any) -> PageTable:
    return replace(table, **changes)


REFUSED: dict[str, tuple[str, type[Exception], Any]] = {
    "no heads": ("q must have 1 to 128 heads, got 0", ValueError, lambda q, r, t: (q[:, :0], r, t)),
    "129 heads": ("1 to 128 heads, got 129", ValueError, lambda q, r, t: (q.repeat(1, 11, 1)[:, :129], r, t)),
    "9 query tokens": (
        "at most 8 query tokens a sequence, got 9", ValueError, lambda q, r, t: (q.repeat(9, 1, 1), r, t),
    ),
    "tokens of half a sequence": (
        "batch . q_len rows for batch 3, got 4", ValueError, lambda q, r, t: (torch.cat([q, q[:1]]), r, t),
    ),
    "other columns": (
        r"q must have shape .*576\]", ValueError, lambda q, r, t: (q[..., :512].contiguous(), r, t),
    ),
    "rows of a width that no layout has": (
        "rows must have shape", ValueError, lambda q, r, t: (q, r[..., :320].contiguous(), t),
    ),
    "fp16 over bf16": ("q must have the dtype of rows", TypeError, lambda q, r, t: (q.half(), r, t)),
    "FP8 bytes without a layout": (
        "rows must have dtype", TypeError, lambda q, r, t: (q, r.to(torch.float8_e4m3fn), t),
    ),
    "pages of another size": (
        "rows must have shape", ValueError, lambda q, r, t: (q, r, _table(t, page_size=8)),
    ),
    "pages apart": (
        "pages that follow each other", ValueError,
        lambda q, r, t: (q, torch.cat([r, r], 1)[:, :16], t),
    ),
    "lengths before an append": (
        "lengths that include the tokens", ValueError, lambda q, r, t: (q, r, _table(t, before_append=True)),
    ),
    "a list for a table": ("page_table must be a PageTable", TypeError, lambda q, r, t: (q, r, [])),
    "a tree": (
        "page_table must have no tree_mask", ValueError,
        lambda q, r, t: (q, r, t.with_tree_mask(torch.ones(3, 1, dtype=I32))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what: str) -> None:
    message, error, change = REFUSED[what]
    with pytest.raises(error, match=message):
        latent_decode(*change(*W().build()))


OPTIONS: dict[str, tuple[str, type[Exception], dict[str, Any]]] = {
    "splits": ("num_splits must be at most 65535", ValueError, {"num_splits": 65536}),
    "NaN scale": ("sm_scale must be finite", ValueError, {"sm_scale": math.nan}),
    "sinks of other heads": (r"attn_sink must have shape \[12\]", ValueError, {"sinks": torch.zeros(6)}),
    "out of another shape": ("out must have shape", ValueError, {"out": torch.zeros(3, 12, 576)}),
    "lse in bf16": ("lse must have dtype", TypeError, {"lse": torch.zeros(3, 12).bfloat16()}),
    "another plan": (
        "plan must be one of plan_latent", ValueError,
        {"plan": plan_sparse(num_qo_heads=12, prefix=RowsFormat("bf16", columns=576), device="cpu")},
    ),
    "a plan for other tokens": (
        "plan must be for this call, q_len=1", ValueError,
        {"plan": plan_latent(
            num_qo_heads=12, rows=RowsFormat("bf16", columns=576), page_size=16, q_len=2, device="cpu"
        )},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", OPTIONS)
def test_options_that_do_not_fit_are_refused(what: str) -> None:
    message, error, options = OPTIONS[what]
    with pytest.raises(error, match=message):
        latent_decode(*W().build(), **options)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("page ids must be below", {"page_ids": 10_000}), ("page ids must not be negative", {"page_ids": -5}),
        ("seq_lens must not exceed", {"seq_lens": 10_000}),
        ("seq_lens must not be negative", {"seq_lens": -1}),
    ],
)  # fmt: skip
def test_validate_names_a_wrong_value(what: str, change: dict[str, int]) -> None:
    q, rows, table = W().build()
    for name, value in change.items():
        getattr(table, name).view(-1)[0] = value
    with pytest.raises(ValueError, match=what):
        latent_decode(q, rows, table, validate=True)


def test_a_pool_with_a_scale_of_its_own_says_what_it_takes() -> None:
    pages = torch.zeros(2, 16, 576, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scale must be finite"):
        DSV4Rows.paged(pages, "tensor576", page_size=16, scale=math.inf)
    with pytest.raises(ValueError, match=r"scale must have shape \[1\]"):
        DSV4Rows.paged(pages, "tensor576", page_size=16, scale=torch.ones(2))
    with pytest.raises(ValueError, match="scale must be None for layout record656"):
        DSV4Rows.paged(torch.zeros(2, 16, 656, dtype=torch.uint8), "record656", page_size=16, scale=1.0)
    with pytest.raises(ValueError, match="layout must have scales in its rows"):
        DSV4Rows.pack(torch.zeros(4, 512).to(torch.float8_e4m3fn), None, torch.ones(4, 1), "tensor512")


def test_a_table_for_pages_of_other_rows_is_refused() -> None:
    q, rows, table = W(layout="record656").build()
    with pytest.raises(ValueError, match="page_table must have the page_size of rows, 16, or 1"):
        latent_decode(q, rows, replace(table, page_size=8))


@pytest.mark.parametrize("name", ["q", "out", "lse"])
def test_tokens_that_lie_apart_are_refused_where_there_are_several(name: str) -> None:
    q, rows, table = W(q_len=2).build()
    apart = {
        "q": torch.zeros(6, 24, 576).bfloat16()[:, :12], "out": torch.zeros(6, 24, 512)[:, :12],
        "lse": torch.zeros(6, 24)[:, :12],
    }  # fmt: skip
    given: dict[str, Any] = {"q": q, "rows": rows, "page_table": table, name: apart[name]}
    with pytest.raises(ValueError, match=f"{name} must have a stride between tokens of heads times"):
        latent_decode(**given)


@pytest.mark.parametrize(
    ("target", "grid"),
    [
        ("gfx942", (64, 9)),
        ("gfx950", (64, 8)),
        ("sm90", (128, 1)),  # persistent programs, for two splits of each token
    ],
)
def test_splits_fill_the_chip_and_fit_in_the_workspace(target: str, grid: tuple[int, int]) -> None:
    with executing(LaunchRecorder(target)) as recorder:
        plan = plan_latent(
            num_qo_heads=12, rows=RowsFormat("bf16", columns=576), page_size=16, device="cpu", max_batch=64,
            max_seq_len=8192,
        )  # fmt: skip
        table = PageTable.from_block_table(
            torch.zeros(64, 4096, dtype=I32), torch.zeros(64, dtype=I32), page_size=16
        )
        q, rows = torch.zeros(64, 12, 576).bfloat16(), torch.zeros(2, 16, 576).bfloat16()
        latent_decode(q, rows, table, plan=plan)
        assert recorder.launches[0].grid[:2] == grid
