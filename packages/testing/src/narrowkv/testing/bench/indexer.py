"""The bench of DeepSeek's indexer: logits over paged keys, and the top-k of as many logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from narrowkv.quant import encode
from narrowkv.quant.accuracy import compare
from narrowkv.sparse_fp8 import (
    IndexKeys,
    index_logits,
    index_logits_reference,
    index_topk,
    index_topk_reference,
)
from narrowkv.testing.bench.measure import Bench, Call, Columns, ModelCall
from narrowkv.testing.cases.indexer import BOUND
from narrowkv.testing.cases.topk import TopkCase
from narrowkv.testing.model import ModelExecutor, Scale
from narrowkv.testing.operations import IndexerRows

HEAD_DIM = 128
_PAGE_SIZE = 64
_TRACED_PAGES = 16  # by the model
_KEYS_AT_ONCE = 1 << 20  # that are made as float32
TOP_K = "top-k"


@dataclass(frozen=True)
class IndexerSizes:
    """One decode token for each of `batch` sequences of `context` keys, with `heads` index heads.

    Raises:
        ValueError: `context` is no multiple of a page.
    """

    batch: int
    context: int
    heads: int
    topk: int

    def __post_init__(self) -> None:
        """Refuses pages that are not full, whose other logits would have no value."""
        if self.context % _PAGE_SIZE:
            raise ValueError(f"context must be a multiple of {_PAGE_SIZE}, got {self.context}")

    @property
    def logits_flops(self) -> float:
        """Multiplications and additions of the products with the keys."""
        return 2.0 * self.batch * self.context * self.heads * HEAD_DIM

    def logits_bytes(self, key_bytes: float) -> float:
        """Keys, queries, weights and logits, each byte once."""
        rows = self.batch * self.heads * (HEAD_DIM + 4)
        return self.batch * self.context * (key_bytes + 4) + rows

    @property
    def topk_bytes(self) -> float:
        """Logits and chosen columns, each byte once."""
        return 4.0 * self.batch * (self.context + self.topk)


def indexer_bench(formats: Sequence[str], device: str = "cuda") -> Bench[IndexerSizes]:
    """`index_logits` over keys in each format, then `index_topk` of random logits, for decode.

    Args:
        formats: of the keys; queries are FP8 of the same kind.
        device: of the tensors.
    """

    def calls(shape: IndexerSizes) -> Iterator[Call]:
        """Logits over each format, then top-k."""
        for name in formats:
            yield _logits(shape, name, device)
        yield _topk(shape, device)

    def modelled(shape: IndexerSizes) -> list[ModelCall]:
        """Logits of all sequences over the same few pages; of top-k one row of logits."""
        flops = shape.logits_flops
        found = [
            ModelCall(f"logits, {name}", shape, flops, 1.0, partial(_trace_logits, shape, name))
            for name in formats
        ]
        return [*found, ModelCall(TOP_K, shape, 0.0, 1.0, partial(_trace_topk, shape), shape.topk_bytes)]

    columns = Columns(
        {"step": "step", "keys": "keys"}, {"batch": "batch", "context": "context"}, ("step", "keys")
    )
    return Bench(name="indexer", columns=columns, calls=calls, modelled=modelled)


def _query(keys: str) -> str:
    """The format of queries over keys of a format."""
    return keys if keys.startswith("fp8_") else "fp8_e4m3fn"


def _keys(count: int, name: str, random: torch.Generator, device: str) -> IndexKeys:
    """Keys in packed pages: one buffer that pieces are quantised into."""
    pieces = []
    for first in range(0, count, _KEYS_AT_ONCE):
        size = (min(_KEYS_AT_ONCE, count - first), HEAD_DIM)
        x = torch.randn(size, generator=random, device=device)
        buffer = IndexKeys.quantize(x, format=name, page_size=_PAGE_SIZE).buffer
        assert buffer is not None
        pieces.append(buffer)
    return IndexKeys.packed(torch.cat(pieces), format=name)


def _tensors(
    shape: IndexerSizes, name: str, device: str, *, pages: int
) -> tuple[torch.Tensor, torch.Tensor, IndexKeys, dict[str, Any]]:
    """Queries, weights, so many pages of keys, and the metadata of the call."""
    random = torch.Generator(device).manual_seed(0)
    size = (shape.batch, shape.heads)
    q = encode(torch.randn(*size, HEAD_DIM, generator=random, device=device), _query(name))
    weights = torch.randn(size, generator=random, device=device) + 0.5
    return q, weights, _keys(pages * _PAGE_SIZE, name, random, device), _pages(shape, random, device)


def _logits(shape: IndexerSizes, name: str, device: str) -> Call:
    pages = shape.batch * shape.context // _PAGE_SIZE
    q, weights, keys, where = _tensors(shape, name, device, pages=pages)
    out = torch.empty(shape.batch, shape.context, device=device)

    def run() -> torch.Tensor:
        return index_logits(q, weights, keys, **where, clean=False, out=out)

    last = {key: tensor[-1:] for key, tensor in where.items()}
    expected = index_logits_reference(q[-1:], weights[-1:], keys, **last).float()
    key_bytes = (keys.values.nbytes + keys.scale.nbytes) / (shape.batch * shape.context)
    return Call(
        {"step": "logits", "keys": name},
        lambda: run,
        shape.logits_bytes(key_bytes),
        shape.logits_flops,
        lambda o: compare(o[-1:], expected).relative_l1,
        BOUND,
    )


def _pages(shape: IndexerSizes, random: torch.Generator, device: str) -> dict[str, Any]:
    """Pages in random order, all of them full."""
    pages = torch.randperm(shape.batch * shape.context // _PAGE_SIZE, generator=random, device=device)
    lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
    return {"block_table": pages.view(shape.batch, -1).int(), "seq_lens": lens}


def _topk(shape: IndexerSizes, device: str) -> Call:
    random = torch.Generator(device).manual_seed(0)
    logits = torch.randn(shape.batch, shape.context, generator=random, device=device)
    where = _pages(shape, random, device)
    out = torch.empty(shape.batch, shape.topk, dtype=torch.int32, device=device)

    def run() -> torch.Tensor:
        index_topk(logits, shape.topk, page_size=_PAGE_SIZE, **where, out=out)
        return out.view(torch.float32)  # numbers of rows are tiny floats, and NaN stands for no row

    columns = index_topk_reference(logits, shape.topk).long()
    rows = where["block_table"].gather(1, columns // _PAGE_SIZE) * _PAGE_SIZE + columns % _PAGE_SIZE
    return Call(
        {"step": TOP_K, "keys": ""},
        lambda: run,
        shape.topk_bytes,
        0.0,
        lambda o: float(not torch.equal(o.view(torch.int32), rows.int())),
        0.0,
    )


def _trace_logits(shape: IndexerSizes, name: str, executor: ModelExecutor) -> object:
    """Makes the call, whose sequences have the same few pages: times are those of any others."""
    executor.scale = Scale()
    q, weights, keys, where = _tensors(shape, name, "cpu", pages=_TRACED_PAGES)
    where["block_table"] = where["block_table"] % _TRACED_PAGES
    return index_logits(q, weights, keys, **where, clean=False)


def _trace_topk(shape: IndexerSizes, executor: ModelExecutor) -> object:
    """Makes the call for one token."""
    executor.scale = Scale(workgroups=shape.batch, keys=shape.batch)
    case = TopkCase(tokens=1, columns=shape.context, topk=shape.topk, bounds="seq_lens", page_size=_PAGE_SIZE)
    return case.inputs().prepare()()


def make(options: IndexerRows) -> tuple[Bench[IndexerSizes], list[IndexerSizes], dict[str, Any]]:
    """The bench, its rows, and the settings that they depend on."""
    rows = [
        IndexerSizes(batch, context, options.heads, options.topk)
        for batch, context in product(options.batch, options.context)
    ]
    return indexer_bench(options.keys), rows, {"keys": options.keys}
