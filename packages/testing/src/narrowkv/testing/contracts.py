"""Contract sets as data: which combinations of operation, formats and pages a set asks about, at which shape.

Nothing here says what works: `narrowkv probe` asks the operations themselves, and a refusal is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from narrowkv.paged_cache import CacheFormat
from narrowkv.testing.cases import Case
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import QUERIES, PrefillCase
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.cases.sparse import SparseCase

__all__ = ["CONTRACT_SETS", "OPERATIONS", "Contract", "ContractSet", "Shape", "contract_case"]

# Kernel error of a query that is multiplied in 16 bits, over any cache; where PV runs on FP8 matrix units the
# bound is wider.
BOUND_16_BIT_QUERY = 0.002
BOUND_FP8_COMPUTE = 0.02
# Sparse attention keeps P in bf16, which costs it up to 0.002.
BOUND_SPARSE = 0.004
# Sage attention: rounding P to E4M3 alone, in torch, costs 0.022 on values whose average is noise.
BOUND_FP8_P = 0.03

_PAGES = (1, 16, 64)


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
        operation: name of the function that must answer, one of `OPERATIONS`.
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
    contracts: tuple[Contract, ...]


DECODE = "paged_decode"
PREFILL = "batch_prefill"
APPEND = "prefill_append"
SAGE = "sage_attention"
SPARSE = "sparse_prefill"
SPARSE_FP8 = "sparse_prefill_fp8"
SPARSE_DECODE = "sparse_decode"

_16_BIT = ("bf16", "fp16")
_FP8 = ("fp8_e4m3fn", "fp8_e4m3fnuz")
_FP4 = (("fp4_e2m1", "fp4_e2m1"), ("fp8_e4m3fn", "fp4_e2m1"))


def _same(names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, name) for name in names)


def _contracts(
    operation: str,
    queries: Iterable[str],
    caches: Iterable[tuple[str, str]],
    pages: Iterable[int],
    *,
    bound: float = BOUND_16_BIT_QUERY,
    scale_group: int = 0,
) -> tuple[Contract, ...]:
    return tuple(
        Contract(operation, q, k, v, page, bound, scale_group)
        for q, (k, v), page in product(queries, caches, pages)
    )


_GLM = Shape(batch=4, q_len=1, context=1024, num_qo_heads=96, num_kv_heads=8, head_dim=128)

CONTRACT_SETS: dict[str, ContractSet] = {
    s.name: s
    for s in (
        ContractSet(
            "glm-gqa12",
            "16-bit and FP8 queries over a narrow paged cache at GQA ratio 12",
            _GLM,
            (
                *_contracts(DECODE, _16_BIT, (*_same(("bf16", *_FP8)), *_FP4), _PAGES),
                *_contracts(DECODE, _FP8[:1], _same(_FP8[:1]), _PAGES),
                # One new token of each sequence, by the metadata of a prefill.
                *_contracts(PREFILL, _16_BIT, _same(_FP8[:1]), _PAGES),
                *_contracts(PREFILL, _FP8[:1], _same(_FP8[:1]), _PAGES, bound=BOUND_FP8_COMPUTE),
            ),
        ),
        ContractSet(
            "batch-prefill",
            "16-bit queries of many tokens over a narrow paged cache at GQA ratio 12",
            Shape(batch=2, q_len=24, context=64, num_qo_heads=24, num_kv_heads=2, head_dim=128),
            (
                *_contracts(PREFILL, _16_BIT, _same(_FP8[:1]), (1, 16)),
                *_contracts(PREFILL, ("bf16",), _FP4[1:], (16,)),
                *_contracts(PREFILL, _FP8[:1], _same(_FP8[:1]), (16,), bound=BOUND_FP8_COMPUTE),
            ),
        ),
        ContractSet(
            "glm-gqa12-long",
            "the same at long context, one sequence split over many programs",
            Shape(batch=1, q_len=1, context=16384, num_qo_heads=96, num_kv_heads=8, head_dim=128),
            _contracts(DECODE, ("bf16",), _same(("bf16", *_FP8)), _PAGES),
        ),
        ContractSet(
            "fp4-capacity",
            "how many tokens a GiB holds: FP4 and K-FP8/V-FP4 caches against FP8 and bf16",
            _GLM,
            (
                *_contracts(DECODE, ("bf16",), (*_same(("bf16", *_FP8[:1])), *_FP4), (16,)),
                *_contracts(DECODE, ("bf16",), _FP4[:1], (16,), scale_group=32),
            ),
        ),
        ContractSet(
            "prefill-append",
            "a chunk attends to an FP8 cache and is appended to it in one launch",
            Shape(batch=2, q_len=16, context=250, num_qo_heads=96, num_kv_heads=8, head_dim=128),
            _contracts(APPEND, _16_BIT, _same(_FP8), _PAGES),
        ),
        ContractSet(
            "dsv4-sparse",
            "DeepSeek-V4 sparse paged prefill and decode: 448 + 64 columns, one KV head, top-k as context",
            Shape(batch=1, q_len=8, context=512, num_qo_heads=64, num_kv_heads=1, head_dim=512),
            tuple(
                Contract(operation, q, rows, rows, page, bound, variant=variant)
                for operation, variant, q, rows, page, bound in (
                    (SPARSE, "", "bf16", "bf16", 1, BOUND_SPARSE),
                    (SPARSE_FP8, "prepass", "bf16", "fp8_e4m3fn", 64, BOUND_SPARSE),
                    (SPARSE_FP8, "fused", "bf16", "fp8_e4m3fn", 64, BOUND_SPARSE),
                    (SPARSE_FP8, "fused", "fp8_e4m3fn", "fp8_e4m3fn", 64, BOUND_FP8_COMPUTE),
                    (SPARSE_DECODE, "", "bf16", "fp8_e4m3fn", 64, BOUND_SPARSE),
                )
            ),
        ),
        ContractSet(
            "sage",
            "dense attention with multi-granularity quantisation of Q and K",
            Shape(batch=1, q_len=1024, context=1024, num_qo_heads=4, num_kv_heads=4, head_dim=128),
            _contracts(
                SAGE,
                ("int8", "int4", "fp8_e4m3fn"),
                _same(("fp8_e4m3fn",)),
                (0,),
                bound=BOUND_FP8_P,
            ),
        ),
    )
}


def _cache(contract: Contract, shape: Shape, clean: bool) -> dict[str, Any]:
    """Fields of a paged cache, of the query, and of the heads."""
    return {
        "num_kv_heads": shape.num_kv_heads,
        "gqa_ratio": shape.gqa_ratio,
        "head_dim": shape.head_dim,
        "page_size": contract.page_size,
        "format": contract.k if contract.k == contract.v else CacheFormat(contract.k, contract.v),
        "scale_group": contract.scale_group or None,
        "q_dtype": QUERIES[contract.q],
        "clean": clean,
        "spread": 1.0,
    }


def _decode(contract: Contract, shape: Shape, clean: bool) -> DecodeCase:
    lens = (shape.context,) * shape.batch
    return DecodeCase(lens=lens, q_len=shape.q_len, **_cache(contract, shape, clean))


def _prefill(contract: Contract, shape: Shape, clean: bool) -> PrefillCase:
    return PrefillCase(
        q_lens=(shape.q_len,) * shape.batch, lens=(shape.context,) * shape.batch, ragged=True,
        **_cache(contract, shape, clean),
    )  # fmt: skip


def _append(contract: Contract, shape: Shape, clean: bool) -> PrefillCase:
    """A chunk of `q_len` new tokens of each sequence over `context` older ones."""
    return PrefillCase(
        operation="append", q_lens=(shape.q_len,) * shape.batch,
        lens=(shape.context + shape.q_len,) * shape.batch, **_cache(contract, shape, clean),
    )  # fmt: skip


def _sparse(contract: Contract, shape: Shape, clean: bool) -> SparseCase:
    """Queries of `q_len` tokens, each over `context` rows of a pool."""
    fp8 = contract.k.startswith("fp8_")
    return SparseCase(
        mode=contract.variant or ("decode" if contract.operation == SPARSE_DECODE else "16bit"),
        layout="packed584" if fp8 else contract.k,
        prefix_lens=(shape.context,) * shape.q_len,
        num_qo_heads=shape.num_qo_heads,
        q="fp8" if contract.q.startswith("fp8_") else contract.q,
        format=contract.k if fp8 else SparseCase.format,
        page_size=contract.page_size,
        clean=clean,
    )


def _sage(contract: Contract, shape: Shape, clean: bool) -> SageCase:
    """Q of a contract is what Q and K are multiplied in; causal, as in prefill."""
    return SageCase(
        qk_dtype="fp8" if contract.q.startswith("fp8_") else contract.q, causal="bottom_right",
        q_lens=(shape.context,), k_lens=(shape.context,), num_kv_heads=shape.num_kv_heads,
        gqa_ratio=shape.gqa_ratio, head_dim=shape.head_dim,
    )  # fmt: skip


OPERATIONS: dict[str, Callable[[Contract, Shape, bool], Case]] = {
    DECODE: _decode,
    PREFILL: _prefill,
    APPEND: _append,
    SAGE: _sage,
    SPARSE: _sparse,
    SPARSE_FP8: _sparse,
    SPARSE_DECODE: _sparse,
}
"""By the contract's operation: its case, for a cache that is declared clean or not."""


def contract_case(contract: Contract, shape: Shape, *, clean: bool = False) -> Case:
    """The call that a contract asks for at a shape."""
    return OPERATIONS[contract.operation](contract, shape, clean)
