"""Cases of dense decode over latent rows: axes, seeded inputs, bounds, for tests, `validate` and `probe`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from narrowkv.paged_cache import PageTable
from narrowkv.sparse_fp8.latent import latent_decode, latent_decode_reference
from narrowkv.sparse_fp8.layouts import LAYOUTS as ROW_LAYOUTS
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.testing.cases import Case, Inputs, each_alone, named, sweep_of
from narrowkv.testing.cases.cache import SPARE_PAGES, shuffled_pages, table_of
from narrowkv.testing.operation import BOUND_SPARSE, Cases, Contract, Shape

__all__ = ["AXES", "CASES", "LatentCall", "LatentCase", "sweep"]

BOUND = BOUND_SPARSE
LSE_BOUND = 1e-3
_16_BIT = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = (*_16_BIT, *ROW_LAYOUTS)


@dataclass(frozen=True, kw_only=True)
class LatentCase(Case):
    """One call of `latent_decode`.

    Attributes:
        layout: "bf16" or "fp16" rows, or a layout of quantised ones.
        columns: of 16-bit rows: 576, or 512 without RoPE columns.
        format: of FP8 rows.
        clean: whether FP8 rows are known to hold no negative zero.
        q: "bf16" or "fp16"; over 16-bit rows it is theirs.
        lens: rows of each sequence.
        q_len: query tokens of each sequence.
        num_qo_heads: query heads.
        page_size: tokens of a page.
        ragged: whether the page table is ragged.
        sinks: whether there are some.
        splits: programs that share the rows of a sequence; 0 leaves it to the plan.
        batch_invariant: option of the call.
        spread: standard deviation of the logits, about: above 3 the softmax is peaky.
        seed: of all numbers.
    """

    layout: str = named("bf16", words=LAYOUTS)
    columns: int = 576
    format: str = "fp8_e4m3fn"
    clean: bool = True
    q: str = named("bf16", words=tuple(_16_BIT))
    lens: tuple[int, ...] = (70, 0, 33)
    q_len: int = 1
    num_qo_heads: int = named(12, "heads")
    page_size: int = 16
    ragged: bool = False
    sinks: bool = False
    splits: int = 0
    batch_invariant: bool = False
    spread: float = 1.0
    seed: int = 0

    bound = BOUND
    lse_bound = LSE_BOUND

    @property
    def head_dim(self) -> int:
        """Columns of q and of rows."""
        return ROW_LAYOUTS[self.layout].head_dim if self.layout in ROW_LAYOUTS else self.columns

    @property
    def query(self) -> str:
        """The format of the query."""
        return self.layout if self.layout in _16_BIT else self.q

    @property
    def kind(self) -> tuple[str, str]:
        """The query's format, and that of the rows, for tables."""
        return self.query, f"{self.layout}, {self.head_dim} columns"

    def build(
        self, device: torch.device | str = "cpu", unread: float = math.nan
    ) -> tuple[torch.Tensor, torch.Tensor | DSV4Rows, PageTable]:
        """Query, rows and page table; rows that no sequence has hold `unread`: NaN shows that one was read.

        Raises:
            ValueError, TypeError: the rows refuse a format, layout or size.
        """
        generator = torch.Generator().manual_seed(self.seed)
        batch, size = len(self.lens), self.page_size
        pages = shuffled_pages(self.lens, size, generator)
        x = torch.full((sum(map(len, pages)) + SPARE_PAGES, size, self.head_dim), unread)
        for length, ids in zip(self.lens, pages, strict=True):
            flat = torch.full((len(ids) * size, self.head_dim), unread)
            flat[:length] = torch.randn(length, self.head_dim, generator=generator)
            x[ids] = flat.view(-1, size, self.head_dim)
        q = torch.randn(batch * self.q_len, self.num_qo_heads, self.head_dim, generator=generator)
        q = (q * self.spread).to(device, _16_BIT[self.query])
        table = table_of(pages, self.lens, size, device, self.ragged, stale_columns=1)
        return q, self._rows(x.to(device)), table

    def _rows(self, x: torch.Tensor) -> torch.Tensor | DSV4Rows:
        if self.layout in _16_BIT:
            return x.to(_16_BIT[self.layout])
        places = ROW_LAYOUTS[self.layout]
        format = "fp4_e2m1" if places.values == "fp4" else self.format
        rows = DSV4Rows.quantize(x, layout=self.layout, page_size=self.page_size, format=format)
        return rows if self.clean else replace(rows, negative_zero_free=False)

    def inputs(self, device: str = "cpu") -> LatentCall:
        """The same with the options of the call. Raises what `build` raises."""
        sinks = torch.linspace(-2.0, 3.0, self.num_qo_heads, device=device) if self.sinks else None
        return LatentCall(self, *self.build(device), sinks)


@dataclass(frozen=True)
class LatentCall(Inputs):
    """The tensors of a case and how the operation is called with them."""

    case: LatentCase
    q: torch.Tensor
    rows: torch.Tensor | DSV4Rows
    table: PageTable
    sinks: torch.Tensor | None

    def call(self, **options: Any) -> Any:
        """`(o, lse)` unless `return_lse=False` is given."""
        given = {
            "return_lse": True,
            "num_splits": self.case.splits or None,
            "batch_invariant": self.case.batch_invariant,
            "sinks": self.sinks,
        }
        return latent_decode(self.q, self.rows, self.table, **given | options)

    def prepare(self) -> Callable[[], torch.Tensor]:
        """The call, which gives `o`."""
        return partial(self.call, return_lse=False)

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` in fp32 on the dequantised rows."""
        o, lse = latent_decode_reference(self.q, self.rows, self.table, sinks=self.sinks, return_lse=True)
        return o, lse

    def bytes_per_token(self) -> float | None:
        """Bytes of a row."""
        if isinstance(self.rows, DSV4Rows):
            return float(self.rows.bytes_per_row())
        return float(self.case.head_dim * self.rows.element_size())


# Each value alone is one case of the quick sweep; the full one crosses some.
AXES: dict[str, tuple[Any, ...]] = {
    "layout": ("fp16", *ROW_LAYOUTS),
    "columns": (512,),
    "lens": ((0,), (1, 63), (64, 65, 5), (127, 128, 129), (300, 2)),
    "q_len": (2, 3, 4, 8),
    "num_qo_heads": (1, 6, 16, 24, 40, 64, 128),
    "page_size": (1, 3, 64),
    "ragged": (True,),
    "sinks": (True,),
    "splits": (1, 3, 16),
    "batch_invariant": (True,),
    "spread": (0.0, 20.0),
}


def quick() -> Iterator[LatentCase]:
    """The default case, each value of each axis alone, and FP8 rows of both kinds and of other writers."""
    yield from each_alone(LatentCase(), AXES)
    yield LatentCase()
    for layout in ("tensor576", "tensor512", "packed584", "record656"):
        yield LatentCase(layout=layout, format="fp8_e4m3fnuz", sinks=True)
        yield LatentCase(layout=layout, q="fp16", splits=2)
    yield LatentCase(layout="tensor576", clean=False, q_len=2, splits=2)


def full() -> Iterator[LatentCase]:
    """Rows by lengths, heads and query tokens."""
    layouts = ("bf16", "tensor576", "record656", "packed584")
    for layout, lens, heads, q_len in product(layouts, AXES["lens"], (6, 12, 40, 128), (1, 2, 8)):
        yield LatentCase(
            layout=layout, lens=lens, num_qo_heads=heads, q_len=q_len, sinks=True, page_size=64, splits=2
        )


sweep = sweep_of(quick, full)


def shipped(target: str = "") -> list[LatentCase]:
    """A call for every shipped configuration: rows by rows of Q in a program, alike or not."""
    ways = [
        LatentCase(),
        LatentCase(layout="fp16"),
        LatentCase(columns=512),
        LatentCase(ragged=True),
        *(LatentCase(layout=name) for name in ("tensor576", "tensor512", "record656", "packed584")),
        LatentCase(layout="tensor576", q="fp16"),
        LatentCase(layout="tensor576", clean=False),
        LatentCase(layout="tensor576", format="fp8_e4m3fnuz"),
    ]
    sizes = [(12, 1), (24, 1), (128, 1), (12, 2), (40, 4)]
    return [
        replace(way, num_qo_heads=heads, q_len=q_len, lens=(40, 40), splits=splits)
        for way in ways
        for heads, q_len in sizes
        for splits in (1, 2)
    ]


def of_contract(contract: Contract, shape: Shape, clean: bool) -> LatentCase:
    """Sequences of `context` rows."""
    fp8 = contract.k.startswith("fp8_")
    return LatentCase(
        layout=contract.variant or ("tensor576" if fp8 else contract.k),
        format=contract.k if fp8 else LatentCase.format,
        q=contract.q,
        lens=(shape.context,) * shape.batch,
        q_len=shape.q_len,
        num_qo_heads=shape.num_qo_heads,
        page_size=contract.page_size,
        clean=clean,
    )


def families(target: str) -> dict[str, LatentCase]:
    """A case of each family of kernels."""
    return {
        "latent decode, bf16": LatentCase(lens=(1024,) * 64, num_qo_heads=16, page_size=64, splits=1),
        "latent decode, FP8": LatentCase(
            layout="tensor576", lens=(1024,) * 64, num_qo_heads=16, page_size=64, splits=1
        ),
    }


CASES = Cases(
    case=LatentCase,
    bounds={"relative_l1": BOUND},
    sweep=sweep,
    of_contract=of_contract,
    families=families,
    shipped=shipped,
    columns={
        "Q": lambda case: case.query,
        "rows": lambda case: case.kind[1] + ("" if case.clean else ", foreign"),
        "heads": lambda case: case.num_qo_heads,
        "q_len": lambda case: case.q_len,
        "splits": lambda case: case.splits,
    },
)
