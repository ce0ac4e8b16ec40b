"""Cases of DeepSeek's indexer: axes, seeded inputs and bounds, for tests, `validate` and `inspect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from narrowkv.quant import encode
from narrowkv.sparse_fp8.indexer import IndexKeys, index_logits, index_logits_reference
from narrowkv.testing.cases import Case, CaseError, Inputs, each_alone, named, sweep_of
from narrowkv.testing.operation import BOUND_16_BIT_QUERY, Cases, Contract, Shape

__all__ = ["AXES", "CASES", "IndexCall", "IndexCase", "shipped", "sweep"]

BOUND = BOUND_16_BIT_QUERY
FORMATS = ("fp8_e4m3fn", "fp8_e4m3fnuz")
KEY_FORMATS = (*FORMATS, "fp4_e2m1")
LAYOUTS = ("rows", "pages", "packed", "shuffled")
_I32 = torch.int32


@dataclass(frozen=True, kw_only=True)
class IndexCase(Case):
    """One call of `index_logits`.

    Attributes:
        layout: "rows" without pages, "pages", "packed" pages that end with their scales, or "shuffled".
        lens: keys of each sequence in pages; without pages, keys of each token.
        q_len: tokens of a sequence; 1 without pages.
        num_heads: index heads.
        head_dim: channels.
        format: of the keys.
        q: of the queries.
        page_size: tokens of a page.
        spare_pages: how many pages more than the longest sequence needs the table has.
        clean: whether logits outside become -inf.
        seed: of all numbers.
    """

    layout: str = named("packed", words=LAYOUTS)
    lens: tuple[int, ...] = (70, 5, 33)
    q_len: int = 1
    num_heads: int = named(64, "heads")
    head_dim: int = 128
    format: str = named("fp8_e4m3fn", words=KEY_FORMATS)
    q: str = named("fp8_e4m3fn", words=FORMATS)
    page_size: int = 64
    spare_pages: int = named(1, "spare")
    clean: bool = True
    seed: int = 0

    bound = BOUND
    lse_bound = 0.0

    def __post_init__(self) -> None:
        """Refuses fields that do not go together."""
        if self.layout == "rows" and self.q_len != 1:
            raise CaseError(f"q_len must be 1 without pages, got {self.q_len}")

    @property
    def kind(self) -> tuple[str, str]:
        """The query's format, and layout and format of the keys, for tables."""
        return self.q, f"{self.layout}, {self.format}"

    @classmethod
    def small(cls, **changes: Any) -> IndexCase:
        """A case that the interpreter runs in a moment, with some fields changed; most tests vary it."""
        return cls(**{"num_heads": 8, "head_dim": 32, "page_size": 16, **changes})

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return len(self.lens) * self.q_len

    def inputs(self, device: torch.device | str = "cpu") -> IndexCall:
        """Tensors on `device`; keys that nothing names have NaN values and scales, so that reading one shows.

        Raises:
            ValueError, TypeError: the keys refuse a format, layout or size.
        """
        generator = torch.Generator().manual_seed(self.seed)
        tokens, heads = self.num_tokens, self.num_heads
        q = encode(torch.randn(tokens, heads, self.head_dim, generator=generator), self.q)
        # As a model's, most weights are positive.
        weights = torch.randn(tokens, heads, generator=generator) + 0.5
        if self.layout == "rows":
            starts = torch.tensor([7 * token % 50 for token in range(tokens)])
            ends = starts + torch.tensor(self.lens)
            keys = self._keys(int(ends.max()) + 9, generator)
            where = {"starts": starts, "ends": ends}
        else:
            wanted = [-(-length // self.page_size) for length in self.lens]
            width = max(*wanted, 1) + self.spare_pages
            ids = torch.randperm(2 * sum(wanted) + 2, generator=generator)
            table, used = torch.full((len(wanted), width), -1), 0
            for seq, count in enumerate(wanted):
                table[seq, :count] = ids[used : used + count]
                used += count
            keys = self._keys(len(ids) * self.page_size, generator)
            # E8M0 255 is NaN, too.
            keys.scale[ids[used:]] = 255 if self.format == "fp4_e2m1" else float("nan")
            where = {"block_table": table, "seq_lens": torch.tensor(self.lens)}
        where = {name: tensor.to(device, _I32) for name, tensor in where.items()}
        return IndexCall(self, q.to(device), weights.to(device), _moved(keys, device), where)

    def _keys(self, count: int, generator: torch.Generator) -> IndexKeys:
        x = torch.randn(count, self.head_dim, generator=generator)
        # Keys of very different size, so that a scale that is left out or mixed up shows.
        x *= torch.exp2(torch.randint(-3, 4, (count, 1), generator=generator))
        page_size = None if self.layout == "rows" else self.page_size
        keys = IndexKeys.quantize(x, format=self.format, page_size=page_size)
        if self.layout in ("pages", "shuffled"):
            keys = IndexKeys(
                keys.values.contiguous(), keys.scale.contiguous(), keys.format, self.layout == "shuffled"
            )
        return keys


def _moved(keys: IndexKeys, device: torch.device | str) -> IndexKeys:
    """The keys on a device; those of packed pages in one buffer again."""
    if keys.buffer is not None:
        return IndexKeys.packed(keys.buffer.to(device), format=keys.format)
    return IndexKeys(keys.values.to(device), keys.scale.to(device), keys.format, keys.shuffled)


@dataclass(frozen=True)
class IndexCall(Inputs):
    """The tensors of a case and how the operation is called with them.

    Attributes:
        case: it.
        q: FP8 `[num_tokens, num_heads, head_dim]`.
        weights: fp32 `[num_tokens, num_heads]`.
        keys: index keys.
        where: the metadata of the call by name.
    """

    case: IndexCase
    q: torch.Tensor
    weights: torch.Tensor
    keys: IndexKeys
    where: dict[str, Any]

    def logits(self, **options: Any) -> torch.Tensor:
        """The operation's result; columns that it leaves as they are hold -inf."""
        options = {"clean": self.case.clean, **options}
        if not options["clean"] and "out" not in options:
            tokens, columns = self._shape()
            options["out"] = torch.full((tokens, columns), -torch.inf, device=self.q.device)
        return index_logits(self.q, self.weights, self.keys, **self.where, **options)

    def _shape(self) -> tuple[int, int]:
        keys, table = self.keys, self.where.get("block_table")
        columns = keys.num_pages if table is None else table.shape[1] * keys.stored.page_size
        return self.q.shape[0], columns

    def call(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits, 0 outside a token's keys; and where they are -inf, as 1.0."""
        return _finite(self.logits())

    def prepare(self) -> Callable[[], torch.Tensor]:
        """The call, which leaves logits outside a token's keys at 0."""
        out = torch.zeros(self._shape(), device=self.q.device)
        return partial(self.logits, clean=False, out=out)

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `call`, from fp64."""
        logits = index_logits_reference(self.q, self.weights, self.keys, **self.where)
        return _finite(logits.float())

    def bytes_per_token(self) -> float | None:
        """Bytes of a key and its scale."""
        keys = self.keys
        return (keys.values.nbytes + keys.scale.nbytes) * keys.values.shape[-1] / keys.values.numel()


def _finite(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outside = logits == -torch.inf
    return logits.masked_fill(outside, 0.0), outside.float()


# Each value alone is one case of the quick sweep; the full one crosses the last five.
AXES: dict[str, tuple[Any, ...]] = {
    "clean": (False,),
    "head_dim": (32, 64, 256),
    "page_size": (16, 32, 128),
    "q": ("fp8_e4m3fnuz",),
    "lens": ((0,), (1, 64, 65), (129, 0, 2), (300,)),
    "layout": ("rows", "pages", "shuffled"),
    "format": ("fp8_e4m3fnuz", "fp4_e2m1"),
    "num_heads": (1, 12, 32, 128),
}
Q_LENS = (1, 2, 3, 8)


def quick() -> Iterator[IndexCase]:
    """The default case, each value of each axis alone, and several tokens a sequence."""
    yield IndexCase()
    yield from each_alone(IndexCase(), AXES)
    for q_len in Q_LENS[1:]:
        yield IndexCase(q_len=q_len)
    yield IndexCase(page_size=1, layout="pages")
    yield IndexCase(q="fp8_e4m3fnuz", format="fp8_e4m3fnuz")


def full() -> Iterator[IndexCase]:
    """Layouts by lengths, formats, heads and tokens of a sequence."""
    crossed = product(("packed", *AXES["layout"]), AXES["lens"], FORMATS, (12, 32, 64), Q_LENS)
    for layout, lens, fmt, heads, q_len in crossed:
        if layout != "rows" or q_len == 1:
            yield IndexCase(layout=layout, lens=lens, format=fmt, q=fmt, num_heads=heads, q_len=q_len)


sweep = sweep_of(quick, full)


def shipped(target: str = "") -> list[IndexCase]:
    """A call for every shipped configuration: layouts, formats, heads, tokens of a sequence."""
    ways = [
        IndexCase(format=fmt, q=fmt, layout=layout, q_len=q_len, lens=(70, 5))
        for fmt in FORMATS
        for layout, q_len in (("rows", 1), ("packed", 1), ("packed", 2), ("packed", 3), ("shuffled", 1))
    ]
    ways += [
        IndexCase(format="fp4_e2m1", q=q, layout=layout, q_len=q_len, lens=(70, 5))
        for q, layout, q_len in zip(
            ("fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e4m3fn"), ("packed", "packed", "rows"), (1, 2, 1), strict=True
        )
    ]
    ways += [IndexCase(q="fp8_e4m3fnuz", lens=(70, 5))]
    ways += [IndexCase(head_dim=256, lens=(70, 5), format=fmt, q=fmt) for fmt in FORMATS]
    ways += [IndexCase(head_dim=256, num_heads=128, lens=(70, 5), format="fp4_e2m1", q="fp8_e4m3fn")]
    return ways + [replace(ways[6], num_heads=heads) for heads in (12, 32, 128)]


def of_contract(contract: Contract, shape: Shape, clean: bool) -> IndexCase:
    """Sequences of `context` keys in whole pages, so that every logit of a token is that of a key."""
    return IndexCase(
        lens=(shape.context,) * shape.batch, q_len=shape.q_len, num_heads=shape.num_qo_heads,
        head_dim=shape.head_dim, format=contract.k, q=contract.q, page_size=contract.page_size, spare_pages=0,
    )  # fmt: skip


CASES = Cases(
    case=IndexCase,
    of_contract=of_contract,
    bounds={"relative_l1": BOUND},
    sweep=sweep,
    shipped=shipped,
    columns={"keys": lambda case: case.kind[1], "heads": lambda case: case.num_heads},
)
