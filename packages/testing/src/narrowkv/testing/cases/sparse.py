"""Cases of sparse attention: axes, seeded inputs and bounds, for tests, `validate`, `probe` and `bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from narrowkv.sparse_fp8.api import sparse_decode, sparse_prefill, sparse_prefill_fp8
from narrowkv.sparse_fp8.layouts import LAYOUTS as ROW_LAYOUTS
from narrowkv.sparse_fp8.reference import sparse_prefill_reference
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource
from narrowkv.testing.cases import Case, Inputs, each_alone, named, sweep_of
from narrowkv.testing.operation import BOUND_FP8_COMPUTE, BOUND_SPARSE, Cases, Contract, Shape

__all__ = ["AXES", "CASES", "SparseCase", "SparseInputs", "sweep"]

BOUND_16_BIT_QUERY = BOUND_SPARSE
BOUND_FP8_QK = BOUND_FP8_COMPUTE
LSE_BOUND = 1e-3

MODES = ("16bit", "prepass", "fused", "decode")
LAYOUTS = ("bf16", "fp16", *ROW_LAYOUTS)
QUERIES = ("bf16", "fp16", "fp8")
_I32 = torch.int32


WAYS_OF_SPECIALISED = ("bf16", "fp16", "split", "packed584", "row512", "packed528", "fp8_q", "splits")
"""Rows and queries that `SparseCase.for_specialised` takes."""


@dataclass(frozen=True, kw_only=True)
class SparseCase(Case):
    """One sparse attention call.

    Attributes:
        mode: "16bit" (16-bit rows), "prepass" or "fused" (FP8 rows), or "decode" (either).
        layout: "bf16" or "fp16" rows, or a layout of FP8 rows.
        prefix_lens: indices of each token into the pool; None for no prefix source.
        extend_lens: indices of each token into this forward's rows; None for no extend source.
        num_qo_heads: query heads.
        q: "bf16", "fp16", or "fp8": in the layout of the rows.
        format: of FP8 rows; FP4 layouts have one format.
        extend_layout, extend_format: of this forward's rows; "" for those of the pool.
        page_size, padded: of layouts of pages.
        clean: whether rows are known to hold no negative zero.
        skipped: share of the indices that are -1.
        spread: standard deviation of the logits, about: above 3 the softmax is peaky.
        sink: whether there is one.
        splits: of decode; 0 leaves it to the plan.
        batch_invariant: option of decode.
        pool_rows, extend_rows: rows of the pool and of this forward.
        seed: of all numbers.
    """

    mode: str = named("fused", words=MODES)
    layout: str = named("packed584", words=LAYOUTS)
    prefix_lens: tuple[int, ...] | None = named((70, 0, 33), "lens")
    extend_lens: tuple[int, ...] | None = named(None, "extend", kind=tuple)
    num_qo_heads: int = named(16, "heads")
    q: str = named("bf16", words=QUERIES)
    format: str = "fp8_e4m3fn"
    extend_layout: str = named("", words=("", *LAYOUTS))
    extend_format: str = ""
    page_size: int = 64
    padded: bool = True
    clean: bool = True
    skipped: float = 0.1
    spread: float = 1.0
    sink: bool = False
    splits: int = 3
    batch_invariant: bool = False
    pool_rows: int = 256
    extend_rows: int = 64
    seed: int = 0

    lse_bound = LSE_BOUND

    @property
    def bound(self) -> float:
        """The largest relative L1 error that passes."""
        return BOUND_FP8_QK if self.q == "fp8" else BOUND_16_BIT_QUERY

    @property
    def rows(self) -> str:
        """Layout and format of the rows."""
        if self.layout in QUERIES:
            return self.layout
        return f"{self.layout} {self._format(self.layout)}"

    @property
    def head_dim(self) -> int:
        """Columns of q and of rows."""
        return ROW_LAYOUTS[self.layout].head_dim if self.layout in ROW_LAYOUTS else 512

    def _format(self, layout: str, of_extend: bool = False) -> str:
        if ROW_LAYOUTS[layout].values == "fp4":
            return "fp4_e2m1"
        return (self.extend_format if of_extend else "") or self.format

    @classmethod
    def for_specialised(cls, way: str, heads: int) -> SparseCase:
        """Two sources whose lists end at and beside tiles, for a kernel of a family of targets."""
        layout = {"splits": "bf16", "fp8_q": "packed584"}.get(way, way)
        mode = {"splits": "decode", "bf16": "16bit", "fp16": "16bit"}.get(way, "fused")
        return cls.small(
            mode=mode, layout=layout, num_qo_heads=heads, q="fp16" if way == "fp16" else "bf16",
            prefix_lens=(70, 0, 1, 63, 64, 65, 128, 256, 0, 129) * 20, extend_lens=(3, 0, 64, 1, 0) * 40,
        )  # fmt: skip

    @classmethod
    def small(cls, **changes: Any) -> SparseCase:
        """A case that the interpreter runs in a moment, with some fields changed; most tests vary it."""
        return cls(**{"prefix_lens": (70, 0, 33, 64), "layout": "split", **changes})

    @property
    def kind(self) -> tuple[str, str]:
        """The query's format, and mode and rows, for tables."""
        return self.q, f"{self.mode}, {self.rows}"

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        lens = self.prefix_lens if self.prefix_lens is not None else self.extend_lens
        return len(lens or ())

    def build(self, device: torch.device | str = "cpu", seed: int | None = None) -> SparseInputs:
        """A 16-bit query and sources on `device`; rows that no index names are NaN: reading one shows.

        Raises:
            ValueError, TypeError: the rows refuse a format, layout or size.
        """
        generator = torch.Generator().manual_seed(self.seed if seed is None else seed)
        tokens, heads = self.num_tokens, self.num_qo_heads
        q = torch.randn(tokens, heads, self.head_dim, generator=generator) * self.spread
        sink = torch.linspace(-2.0, 3.0, heads)
        return SparseInputs(
            self,
            q.to(device, torch.float16 if self.q == "fp16" else torch.bfloat16),
            self._source(self.prefix_lens, self.pool_rows, generator, device),
            self._source(self.extend_lens, self.extend_rows, generator, device, of_extend=True),
            sink.to(device),
        )

    def inputs(self, device: str = "cpu") -> SparseInputs:
        """The same with the query as the case has it. Raises what `build` raises."""
        inputs = self.build(device)
        if self.q != "fp8":
            return inputs
        options: dict[str, Any] = {"layout": self.layout, "page_size": self.page_size}
        q = DSV4Rows.quantize(inputs.q, **options, format=self._format(self.layout))
        return replace(inputs, q=q)

    def _source(
        self, lens: tuple[int, ...] | None, rows: int, generator: torch.Generator,
        device: torch.device | str, *, of_extend: bool = False,
    ) -> KVSource | None:  # fmt: skip
        if lens is None:
            return None
        layout = (self.extend_layout if of_extend else "") or self.layout
        indptr = torch.tensor([0, *lens]).cumsum(0).to(_I32)
        nnz = int(indptr[-1])
        # Odd rows are never named.
        indices = torch.randint(0, max(rows // 2, 1), (nnz,), generator=generator) * 2
        indices[torch.rand(nnz, generator=generator) < self.skipped] = -1
        x = torch.randn(rows, self.head_dim, generator=generator)
        # Tiles of very different size, so that a scale that is left out or mixed up shows.
        x[:, :448] *= torch.exp2(torch.randint(-3, 4, (rows, 7), generator=generator)).repeat_interleave(
            64, -1
        )
        x[1::2] = float("nan")
        x = x.to(device)
        if layout in ("bf16", "fp16"):
            pool: torch.Tensor | DSV4Rows = x.to(torch.bfloat16 if layout == "bf16" else torch.float16)
        else:
            pool = DSV4Rows.quantize(
                x, layout=layout, page_size=self.page_size, padded=self.padded,
                format=self._format(layout, of_extend),
            )  # fmt: skip
            if not self.clean:
                pool = replace(pool, negative_zero_free=False)
        return KVSource(pool, indptr.to(device), indices.to(device, _I32))


@dataclass(frozen=True)
class SparseInputs(Inputs):
    """The tensors of a case and how the operation is called with them.

    Attributes:
        case: it.
        q: bf16 or fp16 `[num_tokens, num_qo_heads, head_dim]`, or rows.
        prefix, extend: sources, or None.
        attn_sink: fp32 `[num_qo_heads]`.
    """

    case: SparseCase
    q: Any
    prefix: KVSource | None
    extend: KVSource | None
    attn_sink: torch.Tensor

    def _options(self) -> dict[str, Any]:
        return {"attn_sink": self.attn_sink if self.case.sink else None}

    def call(self, **options: Any) -> Any:
        """The case's operation; `(o, lse)` unless `return_lse=False` is given."""
        arguments = (self.q, self.prefix, self.extend)
        options = {"return_lse": True, **self._options(), **options}
        if self.case.mode != "16bit":
            options["num_qo_heads"] = self.case.num_qo_heads
        if self.case.mode == "decode":
            splits, invariant = self.case.splits or None, self.case.batch_invariant
            return sparse_decode(*arguments, num_splits=splits, batch_invariant=invariant, **options)
        if self.case.mode == "16bit":
            if isinstance(self.q, DSV4Rows):
                raise TypeError("q must be bf16 or fp16 in mode wide, got fp8")
            return sparse_prefill(self.q, *arguments[1:], **options)
        return sparse_prefill_fp8(*arguments, mode=self.case.mode, **options)

    def prepare(self) -> Callable[[], torch.Tensor]:
        """The call, which gives `o`."""
        return partial(self.call, return_lse=False)

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` in fp32 on the dequantised rows."""
        o, lse = sparse_prefill_reference(
            self.q, self.prefix, self.extend, return_lse=True,
            num_qo_heads=self.case.num_qo_heads, **self._options(),
        )  # fmt: skip
        return o, lse

    def bytes_per_token(self) -> float | None:
        """Bytes of a row of the pool."""
        source = self.prefix or self.extend
        if source is None:
            return None
        return float(source.rows.bytes_per_row()) if isinstance(source.rows, DSV4Rows) else 1024.0


# Each value alone is one case of the quick sweep; the full one crosses the last three.
AXES: dict[str, tuple[Any, ...]] = {
    "mode": ("prepass", "decode"),
    "layout": tuple(name for name in ROW_LAYOUTS if name != "packed584"),
    "extend_lens": ((3, 64, 0),),
    "q": ("fp16", "fp8"),
    "format": ("fp8_e4m3fnuz",),
    "page_size": (1, 3, 256),
    "padded": (False,),
    "clean": (False,),
    "spread": (0.0, 20.0),
    "sink": (True,),
    "prefix_lens": ((0,), (1, 63), (64, 65), (127, 128, 129), (256,)),
    "num_qo_heads": (1, 6, 8, 12, 24, 32, 40, 64, 96, 128),
    "skipped": (0.0, 0.5, 1.0),
}


def quick() -> Iterator[SparseCase]:
    """The default case of each mode, and each value of each axis alone."""
    yield SparseCase()
    yield SparseCase(mode="16bit", layout="bf16")
    yield SparseCase(mode="16bit", layout="fp16", q="fp16")
    yield from each_alone(SparseCase(), AXES)
    yield from (SparseCase(mode="decode", splits=0, batch_invariant=invariant) for invariant in (False, True))


def full() -> Iterator[SparseCase]:
    """Ways to attend by row lengths, heads and shares of skipped indices."""
    ways = [
        SparseCase(mode="16bit", layout="bf16"),
        SparseCase(mode="prepass"),
        SparseCase(),
        SparseCase(q="fp8"),
        SparseCase(mode="decode"),
    ]
    many = (12, 16, 24, 32, 40, 64, 128)
    for way, lens, heads, skipped in product(ways, AXES["prefix_lens"], many, AXES["skipped"]):
        yield replace(way, prefix_lens=lens, num_qo_heads=heads, skipped=skipped, sink=True)


sweep = sweep_of(quick, full)


def shipped(target: str = "", *, two_sources: bool = True) -> list[SparseCase]:
    """A call for every shipped configuration: ways to attend, layouts, formats, numbers of heads."""
    rows = (16, 16)  # so few that nothing is split
    ways = [
        SparseCase(mode="16bit", layout="bf16"),
        SparseCase(),
        SparseCase(q="fp16"),
        SparseCase(q="fp8"),
        SparseCase(layout="split"),
        SparseCase(layout="split", q="fp8"),
        SparseCase(layout="row512"),
        SparseCase(layout="row512", q="fp8"),
        *(SparseCase(layout=name) for name in ("packed528", "packed288", "record656", "record352")),
        SparseCase(layout="record352", q="fp16"),
        SparseCase(layout="split512"),
        SparseCase(layout="split512", q="fp16"),
        SparseCase(layout="split512", format="fp8_e4m3fnuz"),
        SparseCase(clean=False),
        SparseCase(format="fp8_e4m3fnuz"),
        SparseCase(format="fp8_e4m3fnuz", q="fp8"),
        SparseCase(mode="decode", layout="bf16"),
        SparseCase(mode="decode"),
        SparseCase(mode="decode", q="fp8"),
        SparseCase(mode="decode", layout="split512"),
    ]
    # 12 heads are padded to 16 and 40 to 64; 128 are two programs of 64.
    cases = [replace(way, num_qo_heads=heads) for way in ways for heads in (16, 32, 64)]
    # The kernel that widens rows does not depend on the number of heads.
    cases += [replace(way, mode="prepass", num_qo_heads=64) for way in ways if way.mode == "fused"]
    return [replace(case, prefix_lens=rows, extend_lens=rows if two_sources else None) for case in cases]


def of_contract(contract: Contract, shape: Shape, clean: bool) -> SparseCase:
    """Queries of `q_len` tokens, each over `context` rows of a pool."""
    fp8 = contract.k.startswith("fp8_")
    return SparseCase(
        mode=contract.variant or ("decode" if contract.operation == "sparse_decode" else "16bit"),
        layout="packed584" if fp8 else contract.k,
        prefix_lens=(shape.context,) * shape.q_len,
        num_qo_heads=shape.num_qo_heads,
        q="fp8" if contract.q.startswith("fp8_") else contract.q,
        format=contract.k if fp8 else SparseCase.format,
        page_size=contract.page_size,
        clean=clean,
    )


def families(target: str) -> dict[str, SparseCase]:
    """A case of each family of kernels; only the rows of decode are split."""
    traced: dict[str, Any] = {"num_qo_heads": 64, "prefix_lens": (512,) * 320}
    return {
        "sparse, fused": SparseCase(**traced),
        "sparse, 16-bit rows": SparseCase(mode="16bit", layout="bf16", **traced),
        "sparse, FP8 query": SparseCase(q="fp8", **traced),
        "sparse decode": SparseCase(mode="decode", num_qo_heads=64, prefix_lens=(512, 512)),
    }


CASES = Cases(
    case=SparseCase,
    bounds={"relative_l1": BOUND_16_BIT_QUERY, "with Q in FP8": BOUND_FP8_QK},
    sweep=sweep,
    of_contract=of_contract,
    families=families,
    shipped=shipped,
    columns={
        "mode": lambda case: case.mode,
        "Q": lambda case: case.q,
        "rows": lambda case: case.rows + ("" if case.clean else ", foreign"),
        "heads": lambda case: case.num_qo_heads,
    },
)
