"""Cases of the indexer's top-k: axes, seeded inputs and an exact comparison, for tests and `validate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from narrowkv.sparse_fp8.indexer import index_topk, index_topk_reference
from narrowkv.testing.cases import Case, Inputs, each_alone, named, sweep_of
from narrowkv.testing.operation import Cases, Contract, Shape

__all__ = ["AXES", "CASES", "TopkCall", "TopkCase", "shipped", "sweep"]

VALUES = ("normal", "ties", "equal", "special")
BOUNDS = ("none", "ends", "starts", "seq_lens")
_I32 = torch.int32


@dataclass(frozen=True, kw_only=True)
class TopkCase(Case):
    """One call of `index_topk`.

    Attributes:
        tokens: rows of logits.
        columns: logits of a row.
        topk: columns that are chosen.
        values: "normal" numbers; "ties" of few values; all "equal"; or "special": zeros of both signs, NaN,
            infinities and subnormals among them.
        bounds: which bounds there are.
        page_size: of a table that turns columns into rows; 0 for columns.
        block_size: columns of a block; 0 without blocks.
        num_blocks: numbers of blocks that columns are chosen from, a quarter of them -1; 0 to choose blocks.
        seed: of all numbers.
    """

    tokens: int = 4
    columns: int = 70000
    topk: int = 2048
    values: str = named("normal", words=VALUES)
    bounds: str = named("none", words=BOUNDS)
    page_size: int = 0
    block_size: int = 0
    num_blocks: int = 0
    seed: int = 0

    bound = 0.0
    lse_bound = 0.0

    @property
    def kind(self) -> tuple[str, str]:
        """The logits and the bounds, for tables."""
        return self.values, self.bounds

    def inputs(self, device: str = "cpu") -> TopkCall:
        """The tensors; logits outside a token's bounds are the largest, so that reading one shows."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.tokens, self.columns, generator=generator)
        if self.values == "ties":
            x = (2 * x).round().clamp(min=-1.0)
        elif self.values == "equal":
            x = torch.full_like(x, -0.5)
        elif self.values == "special":
            odd = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-40, -1e-40, -torch.nan, 3e38])
            chosen = torch.randint(0, 3 * len(odd), x.shape, generator=generator)
            x = torch.where(chosen < len(odd), odd[chosen.clamp(max=len(odd) - 1)], x)
        where: dict[str, Any] = {}
        if self.bounds == "seq_lens":
            batch = 2 if self.tokens % 2 == 0 else 1
            where["seq_lens"] = torch.randint(
                self.columns // 2, self.columns + 1, (batch,), generator=generator
            )
        elif self.bounds != "none":
            where["ends"] = torch.randint(0, self.columns + 1, (self.tokens,), generator=generator)
        if self.bounds == "starts":
            where["starts"] = where["ends"] // 3
        if self.page_size:
            pages = -(-self.columns // self.page_size)
            where["block_table"] = torch.randperm(2 * pages, generator=generator).view(2, pages)
            where["block_table"] = where["block_table"][: 2 if self.tokens % 2 == 0 else 1]
        if self.num_blocks:
            most = -(-self.columns // self.block_size)
            chosen = torch.rand(self.tokens, most, generator=generator).argsort(1)[:, : self.num_blocks]
            chosen[:, ::4] = most  # no such block
            missing = (0, self.num_blocks - chosen.shape[1])
            chosen = torch.nn.functional.pad(chosen.sort(1).values, missing, value=most)
            where["blocks"] = torch.where(chosen < most, chosen, -1)
        where = {name: tensor.to(device, _I32) for name, tensor in where.items()}
        begin, end = _spans(where, self.tokens, self.columns, device)
        at = torch.arange(self.columns, device=device)
        inside = (at >= begin[:, None]) & (at < end[:, None])
        logits = torch.where(inside, x.to(device), torch.inf)
        return TopkCall(self, logits, where)


def _spans(
    where: dict[str, torch.Tensor], tokens: int, columns: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """First and one past the last column of each token."""
    zeros = torch.zeros(tokens, dtype=_I32, device=device)
    if (lens := where.get("seq_lens")) is not None:
        q_len = tokens // lens.shape[0]
        end = lens[:, None] - q_len + 1 + torch.arange(q_len, device=device)
        return zeros, end.flatten().clamp(0, columns)
    return where.get("starts", zeros), where.get("ends", zeros + columns)


@dataclass(frozen=True)
class TopkCall(Inputs):
    """The tensors of a case and how the operation is called with them.

    Attributes:
        case: it.
        logits: fp32 `[tokens, columns]`.
        where: bounds and the table, by name.
    """

    case: TopkCase
    logits: torch.Tensor
    where: dict[str, torch.Tensor]

    def topk(self, **options: Any) -> torch.Tensor:
        """The operation's result."""
        sizes = {"page_size": self.case.page_size or None, "block_size": self.case.block_size or None}
        given: dict[str, Any] = {**self.where, **sizes, **options}
        return index_topk(self.logits, self.case.topk, **given)

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns or rows, and where there are none."""
        return _as_numbers(self.topk())

    def prepare(self) -> Callable[[], torch.Tensor]:
        """The call."""
        return partial(self.topk)

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `call`, from a stable sort."""
        starts, ends = _spans(self.where, self.case.tokens, self.case.columns, str(self.logits.device))
        chosen = index_topk_reference(
            self.logits, self.case.topk, starts=starts, ends=ends, block_size=self.case.block_size or None,
            blocks=self.where.get("blocks"),
        )  # fmt: skip
        if (table := self.where.get("block_table")) is not None:
            size, batch = self.case.page_size, table.shape[0]
            ids = table.repeat_interleave(self.case.tokens // batch, 0).gather(
                1, chosen.clamp(min=0).long() // size
            )
            chosen = torch.where(chosen >= 0, ids * size + chosen % size, -1).to(_I32)
        return _as_numbers(chosen)


def _as_numbers(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return chosen.double(), (chosen < 0).float()


# Each value alone is one case of the quick sweep; the full one crosses all.
AXES: dict[str, tuple[Any, ...]] = {
    "columns": (1, 100, 1024, 16384, 16385, 140000),
    "topk": (1, 33, 512, 4096),
    "values": VALUES[1:],
    "bounds": BOUNDS[1:],
    "page_size": (64, 7),
}


# Blocks, and columns inside of them: DeepSeek-V4.1's, then others.
BLOCKS = (
    TopkCase(block_size=8, bounds="ends"),
    TopkCase(topk=512, block_size=8, num_blocks=2048, bounds="ends"),
    TopkCase(tokens=2, topk=100, columns=300000, block_size=8, bounds="seq_lens", values="special"),
    TopkCase(topk=33, columns=999, block_size=64, num_blocks=9, bounds="starts", values="ties", page_size=7),
    TopkCase(topk=33, columns=100, block_size=1, num_blocks=200, values="equal"),
)


def quick() -> Iterator[TopkCase]:
    """The default case and each value of each axis alone."""
    yield TopkCase()
    yield from each_alone(TopkCase(), AXES)
    yield from BLOCKS


def full() -> Iterator[TopkCase]:
    """Widths by numbers of columns, values and bounds."""
    for columns, topk, values, bounds in product(AXES["columns"], AXES["topk"], VALUES, BOUNDS):
        yield TopkCase(columns=columns, topk=topk, values=values, bounds=bounds)


sweep = sweep_of(quick, full)


def shipped(target: str = "") -> list[TopkCase]:
    """A call for every shipped configuration: chunks of each size, the last launch of each."""
    widths = ((1000, 512), (4096, 512), (16384, 2048), (65536, 2048), (131072, 2048))
    return [
        TopkCase(tokens=2, columns=columns, topk=topk, bounds=bounds, page_size=page_size)
        for columns, topk in widths
        for bounds, page_size in (("seq_lens", 64), ("starts", 0))
    ] + [
        TopkCase(tokens=2, columns=65536, topk=2048, bounds="seq_lens", block_size=8),
        TopkCase(
            tokens=2, columns=65536, topk=512, bounds="seq_lens", block_size=8, num_blocks=2048, page_size=64
        ),
    ]


def of_contract(contract: Contract, shape: Shape, clean: bool) -> TopkCase:
    """Rows of eight times as many logits as `context` has keys, chosen as rows of a cache with pages."""
    return TopkCase(
        tokens=shape.batch * shape.q_len, columns=8 * shape.context, bounds="seq_lens",
        page_size=contract.page_size,
    )  # fmt: skip


CASES = Cases(
    case=TopkCase,
    of_contract=of_contract,
    bounds={"wrong columns": 0.0},
    sweep=sweep,
    shipped=shipped,
    columns={"columns": lambda case: case.columns, "topk": lambda case: case.topk},
)
