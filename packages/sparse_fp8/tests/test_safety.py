"""Sparse attention: rows that cannot be, rows that compare and copy, and batch-invariant decode."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.runtime.launch import executing
from narrowkv.sparse_fp8 import DSV4Rows, KVSource, plan_sparse, sparse_decode, sparse_prefill_fp8
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.sparse import SparseCase

pytestmark = pytest.mark.sampled
W = SparseCase.small
I32 = torch.int32


def _rows(layout: str) -> DSV4Rows:
    return DSV4Rows.quantize(torch.randn(8, 512), layout=layout, page_size=4)


BAD_ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "pages larger than the buffer's": ("packed584", {"page_size": 64}, "buffer must have shape"),
    "an odd stride between pages": (
        "packed584",
        {"data": torch.zeros(2 * 2337, dtype=torch.uint8).as_strided((2, 2336), (2337, 1))},
        "must start at a multiple of 2 bytes and have a stride between pages",
    ),
    "pages of split rows": ("split", {"page_size": 4}, "page_size must be 1"),
    "fewer rows of RoPE": (
        "split", {"rope": torch.zeros(7, 64).bfloat16()},
        r"rope must have shape \[8, 64\]",
    ),
    "RoPE in fp16": ("row512", {"rope": torch.zeros(8, 64).half()}, "rope must have dtype"),
    "no RoPE": ("row512", {"rope": None}, "rope must be a torch.Tensor"),
    "fewer scales": ("split", {"scale": torch.ones(7, 7)}, r"scale must have shape \[8, 7\]"),
    "scales for another group": ("split", {"scale_group": 32}, r"scale must have shape \[8, 14\]"),
    "a group of 16": ("row512", {"scale_group": 16}, "scale_group must be 64 or 32"),
    "scales apart that lie in the rows": ("row512", {"scale": torch.ones(8, 7)}, "scale must be None"),
    "RoPE apart that lies in the pages": (
        "packed584", {"rope": torch.zeros(8, 64).bfloat16()}, "rope must be None",
    ),
    "another format": ("split", {"format": "fp8_e4m3fnuz"}, "nope"),
    "an unknown layout": ("split", {"layout": "rows"}, "layout must be one of"),
    "NoPE that is too narrow": (
        "split", {"data": torch.zeros(8, 440).to(torch.float8_e4m3fn)},
        "nope must have",
    ),
    "scales that require grad": (
        "split", {"scale": torch.ones(8, 7, requires_grad=True)}, "pass scale.detach",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_ROWS)
def test_rows_cannot_claim_what_their_tensors_do_not_hold(what: str) -> None:
    layout, changes, message = BAD_ROWS[what]
    rows = _rows(layout)
    with pytest.raises((TypeError, ValueError), match=message):
        replace(rows, **changes)


def test_a_single_page_of_an_odd_number_of_bytes_is_read(device: str) -> None:
    rows = DSV4Rows.quantize(torch.randn(1, 512), layout="packed584", page_size=1, padded=False)
    odd = torch.zeros(1, 585, dtype=torch.uint8)
    odd[:, :584] = rows.data
    indptr = torch.tensor([0, 1], dtype=I32, device=device)
    q = torch.randn(1, 8, 512, device=device).bfloat16()
    results = [
        sparse_prefill_fp8(q, KVSource(DSV4Rows.packed584(data.to(device), page_size=1), indptr, indptr[:1]))
        for data in (rows.data, odd)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("layout", ["split", "packed584", "row512"])
def test_rows_and_sources_compare_and_copy(layout: str) -> None:
    rows = _rows(layout)
    source = KVSource(rows, torch.tensor([0, 2], dtype=I32), torch.tensor([1, 7], dtype=I32))
    q = torch.randn(1, 8, 512).bfloat16()
    plan = plan_sparse(num_qo_heads=8, prefix=rows.bound.format, device="cpu")
    for x in (rows, source, plan):
        assert x == x
        assert x != copy.copy(x)
        assert len({x, copy.copy(x)}) == 2
    expected = plan.run(q, source)
    for other in (copy.copy(source), copy.deepcopy(source), replace(source)):
        for same in (copy.copy(plan), copy.deepcopy(plan)):
            assert torch.equal(same.run(q, other), expected)


def test_index_lists_that_are_strided_are_refused() -> None:
    with pytest.raises(ValueError, match="indptr must have a contiguous"):
        KVSource(torch.zeros(8, 512).bfloat16(), torch.zeros(6, dtype=I32)[::2], torch.zeros(4, dtype=I32))


# ------------------------------------------------------------------------------------------ batch-invariant


@pytest.mark.parametrize(("layout", "fp8_query"), [("bf16", False), ("packed584", False), ("split", True)])
@pytest.mark.parametrize("tokens", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(
    layout: str, fp8_query: bool, tokens: int, device: str
) -> None:
    lens = tuple((7 * i) % 23 for i in range(tokens))
    inputs = W(layout=layout, prefix_lens=lens, num_qo_heads=8, pool_rows=64).build(device)
    source = inputs.prefix
    assert source is not None

    def attend(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin, end = int(source.indptr[first]), int(source.indptr[last])
        part = replace(
            source, indptr=source.indptr[first : last + 1] - begin, indices=source.indices[begin:end].clone()
        )
        q: torch.Tensor | DSV4Rows = inputs.q[first:last]
        if fp8_query:
            q = DSV4Rows.quantize(inputs.q[first:last], layout=layout)
        return sparse_decode(
            q, part, batch_invariant=True, attn_sink=inputs.attn_sink, return_lse=True, num_qo_heads=8
        )  # type: ignore[return-value]

    whole = attend(0, tokens)
    for first, last in ((0, 1), (3, 4), (tokens - 1, tokens), (5, 8), (tokens - 9, tokens - 1)):
        for alone, together in zip(attend(first, last), whole, strict=True):
            assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90"])
@pytest.mark.parametrize("layout", ["bf16", "packed584"])
def test_a_batch_invariant_launch_is_the_same_for_1_to_300_tokens(layout: str, target: str) -> None:
    largest = W(layout=layout, prefix_lens=(600,) * 300, num_qo_heads=64, pool_rows=4).build()
    assert largest.prefix is not None
    rows = largest.prefix.rows
    seen: list[Any] = []
    plain: list[Any] = []
    for tokens in range(1, 301):
        indptr = largest.prefix.indptr[: tokens + 1]
        # Rows of a token differ from batch to batch, and so does their mean.
        source = KVSource(rows, indptr, largest.prefix.indices[: tokens * (tokens % 7) * 90])
        for options, found in (({"batch_invariant": True}, seen), ({}, plain)):
            recorder = LaunchRecorder(target)
            with executing(recorder):
                sparse_decode(largest.q[:tokens], source, **options)
            kernels = [(seen.kernel, seen.constexprs, seen.options) for seen in recorder.launches]
            grids = [launch.grid for launch in recorder.launches]
            if kernels not in found:
                found.append(kernels)
            assert all(extent <= 65535 for grid in grids for extent in grid[1:])
            if options:
                assert grids == [(tokens, 4, 1), (tokens * 64, 1, 1)]
    assert len(seen) == 1
    assert len(plain) > 1  # which is why there is the mode
