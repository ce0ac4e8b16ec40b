"""Index helpers against lists made by plain loops."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from narrowkv.sparse_fp8 import compressed_topk, concat_csr, csr_from_topk, sliding_window

I32 = torch.int32


def _ints(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(list(rows), dtype=I32)


def _random_table(tokens: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens * 100 + width)
    table = torch.randint(0, 1000, (tokens, width), generator=generator).to(I32)
    table[torch.rand(tokens, width, generator=generator) < 0.3] = -1
    return table


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(0, 4), (3, 0), (1, 1), (5, 7)])
def test_csr_from_topk(tokens: int, width: int, with_lengths: bool) -> None:
    table = _random_table(tokens, width)
    lengths = torch.arange(tokens, dtype=I32) if with_lengths else None
    kept = [
        [v for i, v in enumerate(row) if v >= 0 and (not with_lengths or i < t)]
        for t, row in enumerate(table.tolist())
    ]
    indptr, indices = csr_from_topk(table, lengths, compact=True)
    assert [indices[a:b].tolist() for a, b in pairwise(indptr.tolist())] == kept
    indptr, indices = csr_from_topk(table, lengths)
    assert indptr.tolist() == [t * width for t in range(tokens + 1)]
    rows = [indices[a:b].tolist() for a, b in pairwise(indptr.tolist())]
    assert [[v for v in row if v >= 0] for row in rows] == kept
    assert indptr.dtype == indices.dtype == I32


@pytest.mark.parametrize("shared", [True, False])
def test_sliding_window(shared: bool) -> None:
    positions = torch.tensor([0, 2, 127, 128, 300], dtype=I32)
    slots = torch.randperm(400, generator=torch.Generator().manual_seed(0)).to(I32)
    table = slots if shared else torch.stack([slots.roll(i) for i in range(5)])
    window = sliding_window(positions, table)
    assert window.shape == (5, 128)
    for i, p in enumerate(positions.tolist()):
        row = table if shared else table[i]
        want = [int(row[j]) for j in range(max(0, p - 127), p + 1)]
        assert [v for v in window[i].tolist() if v >= 0] == want


@pytest.mark.parametrize("ratio", [4, 128])
def test_compressed_topk_takes_the_best_of_what_is_complete(ratio: int) -> None:
    positions = torch.tensor([0, ratio - 2, ratio - 1, 3 * ratio, 20 * ratio], dtype=I32)
    scores = torch.rand(5, 12, generator=torch.Generator().manual_seed(ratio))
    slots = torch.arange(100, 112, dtype=I32)
    best = compressed_topk(scores, positions, slots, ratio=ratio, topk=5)
    for i, p in enumerate(positions.tolist()):
        complete = min((p + 1) // ratio, 12)
        order = sorted(range(complete), key=lambda j: -float(scores[i, j]))[:5]
        assert best[i].tolist() == [100 + j for j in order] + [-1] * (5 - len(order))


def test_more_asked_for_than_there_is_is_padded() -> None:
    best = compressed_topk(torch.ones(1, 2), _ints([9])[0], _ints([4, 5])[0], ratio=1, topk=512)
    assert best.shape == (1, 512)
    assert sorted(best[0].tolist())[-2:] == [4, 5]
    assert (best[0] == -1).sum() == 510


def test_window_and_topk_together() -> None:
    window, best = _random_table(4, 3), _random_table(4, 6)
    indptr, indices = concat_csr(window, best, compact=True)
    for t in range(4):
        want = [v for v in (*window[t].tolist(), *best[t].tolist()) if v >= 0]
        assert indices[indptr[t] : indptr[t + 1]].tolist() == want


POSITION, TWO_SLOTS = _ints([1])[0], _ints([1, 2])[0]
BAD = {
    "table of int64": lambda: csr_from_topk(torch.zeros(2, 2, dtype=torch.int64)),
    "table of one dimension": lambda: csr_from_topk(torch.zeros(2, dtype=I32)),
    "lengths of another count": lambda: csr_from_topk(_ints([1], [2]), _ints([1, 1, 1])[0]),
    "window of none": lambda: sliding_window(_ints([1])[0], _ints([1])[0], window=0),
    "slots of other tokens": lambda: sliding_window(_ints([1])[0], _ints([1], [2])),
    "scores of other tokens": lambda: compressed_topk(torch.ones(2, 2), POSITION, TWO_SLOTS, ratio=4, topk=1),
    "ratio of none": lambda: compressed_topk(torch.ones(1, 2), POSITION, TWO_SLOTS, ratio=0, topk=1),
    "no table": concat_csr,
    "tables of other tokens": lambda: concat_csr(_ints([1]), _ints([1], [2])),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_tables_are_refused_in_words(name: str) -> None:
    with pytest.raises((TypeError, ValueError), match="must"):
        BAD[name]()
