"""Contracts: which combinations of operation, formats and pages a set asks about, at which shape.

Nothing here says what works: `narrowkv probe` asks the operations themselves, and a refusal is a failure. The
sets are in the entries of `narrowkv.testing.operations`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

__all__ = [
    "BOUND_16_BIT_QUERY", "BOUND_FP8_COMPUTE", "BOUND_FP8_P", "BOUND_SPARSE", "FP4", "FP8", "GLM_GQA12",
    "PAGES", "WIDE_HEADS", "Contract", "ContractSet", "Shape", "alike", "contracts",
]  # fmt: skip

# Bounds on the relative L1 error.
BOUND_16_BIT_QUERY = 0.002
"""Of queries that are multiplied in 16 bits, over any cache; FP8 queries are widened exactly."""
BOUND_FP8_COMPUTE = 0.02
"""Where PV runs on FP8 matrix units."""
BOUND_SPARSE = 0.004
"""Of sparse attention, which keeps P in bf16: that costs up to 0.002."""
BOUND_FP8_P = 0.03
"""Of Sage attention: rounding P to E4M3 alone costs 0.022 on values whose average is noise."""

PAGES = (1, 16, 64)
FP8 = ("fp8_e4m3fn", "fp8_e4m3fnuz")
FP4 = (("fp4_e2m1", "fp4_e2m1"), ("fp8_e4m3fn", "fp4_e2m1"))


@dataclass(frozen=True)
class Shape:
    """Sizes of a probe: lengths in tokens."""

    batch: int
    q_len: int
    context: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, q_len {self.q_len}, context {self.context}, "
            f"{self.num_qo_heads} query heads, {self.num_kv_heads} KV heads (ratio {self.gqa_ratio}), "
            f"head_dim {self.head_dim}"
        )


@dataclass(frozen=True)
class Contract:
    """One question: does this operation take these formats at this page size, and how exact is it.

    Attributes:
        operation: name of the function that must answer.
        q: format of the query.
        k, v: storage formats of the cache; for operations without a cache, of K and V.
        page_size: tokens a page; 0 where there are no pages.
        bound: the largest relative L1 kernel error that passes.
        scale_group: channels that share a scale of FP4; 0 for one scale a token and head.
        variant: which way of the operation, where it has several.
    """

    operation: str
    q: str
    k: str
    v: str
    page_size: int
    bound: float
    scale_group: int = 0
    variant: str = ""

    @property
    def function(self) -> str:
        """The operation, and the variant."""
        return f"{self.operation} {self.variant}".rstrip()

    @property
    def cache(self) -> str:
        """Cache format as --format takes it."""
        formats = self.k if self.k == self.v else f"{self.k}/{self.v}"
        return f"{formats}:{self.scale_group}" if self.scale_group else formats


@dataclass(frozen=True)
class ContractSet:
    """A named set of contracts at one shape."""

    name: str
    title: str
    shape: Shape
    contracts: tuple[Contract, ...] = ()

    def asking(self, *contracts: Contract) -> ContractSet:
        """A part of the set, of one operation."""
        return replace(self, contracts=contracts)


def alike(*names: str) -> tuple[tuple[str, str], ...]:
    """Caches whose K and V have the same format."""
    return tuple((name, name) for name in names)


def contracts(
    operation: str,
    queries: Iterable[str],
    caches: Iterable[tuple[str, str]],
    pages: Iterable[int],
    *,
    bound: float = BOUND_16_BIT_QUERY,
    scale_group: int = 0,
) -> tuple[Contract, ...]:
    """A contract of every query, cache and page size."""
    return tuple(
        Contract(operation, q, k, v, page, bound, scale_group)
        for q, (k, v), page in product(queries, caches, pages)
    )


GLM_GQA12 = ContractSet(
    "glm-gqa12",
    "16-bit and FP8 queries over a narrow paged cache at GQA ratio 12",
    Shape(batch=4, q_len=1, context=1024, num_qo_heads=96, num_kv_heads=8, head_dim=128),
)
"""The set that decode and prefill share, without its contracts."""

WIDE_HEADS = ContractSet(
    "wide-heads",
    "a few tokens of heads of 512 channels, as in Gemma 4's global layers",
    Shape(batch=2, q_len=4, context=70, num_qo_heads=32, num_kv_heads=4, head_dim=512),
)
"""Likewise."""
