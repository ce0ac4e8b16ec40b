"""An operation's entry in the registry: `OperationEntry`, its contracts, and its `Cases`.

Contracts say which combinations of operation, formats and pages a set asks about, at which shape. They do not
say what works: `narrowkv probe` asks the operations themselves, and a refusal is a failure.

Commands are made from an entry before torch is imported, so an entry names the modules that need torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowkv.runtime.targets import Target
    from narrowkv.testing.cases import Case

__all__ = [
    "BOUND_16_BIT_QUERY", "BOUND_FP8_COMPUTE", "BOUND_FP8_P", "BOUND_SPARSE", "FP4", "FP8", "GLM_GQA12",
    "PAGES", "WIDE_HEADS", "Cases", "Contract", "ContractSet", "Family", "OperationEntry", "SampledLaunch",
    "Shape", "Workgroup", "alike", "contracts", "option",
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


def option(
    default: Any, help: str = "", *, words: Sequence[str] = (), kind: str = "", least: int = 1,
    measured: bool = False, metavar: str = "",
) -> Any:  # fmt: skip
    """A field of a dataclass whose fields become the options of a command.

    Args:
        default: of the option; a tuple is a list joined by commas.
        help: of the option.
        words: what it takes.
        kind: "formats" (of caches), "heads" (query and KV heads) or "query" (a 16-bit dtype).
        least: of an integer.
        measured: does not apply to modelled times.
        metavar: stands for its value in the help.
    """
    said = {"help": help, "words": words, "kind": kind, "least": least, "measured": measured}
    return field(default=default, metadata={**said, "metavar": metavar})


Workgroup = tuple[int, int, int]


@dataclass(frozen=True)
class SampledLaunch:
    """One launch as a sample sees it.

    Attributes:
        kernel: name of the kernel.
        grid: its workgroups.
        constexprs: its compile-time arguments.
    """

    kernel: str
    grid: Workgroup
    constexprs: dict[str, Any]

    @property
    def size(self) -> int:
        """Workgroups of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def everything(self) -> Iterable[Workgroup]:
        """All workgroups, x fastest."""
        x, y, z = self.grid
        return ((i, j, k) for k in range(z) for j in range(y) for i in range(x))


@dataclass(frozen=True)
class Family:
    """A call that represents a family of kernels.

    Attributes:
        call: makes it.
        hbm_share: see `narrowkv.testing.model.ModelExecutor`.
        operation: name of the operation.
    """

    call: Callable[[], object]
    hbm_share: float | None
    operation: str = ""


@dataclass(frozen=True, kw_only=True)
class Cases:
    """The cases of an operation: what its module in `narrowkv.testing.cases` names `CASES`.

    Attributes:
        case: the class of its cases.
        bounds: relative L1 errors that pass, by what they hold for.
        sweep: the cases that a target serves, all or fewer, with a seed for random ones.
        of_contract: the case that a contract asks for at a shape, over a cache that is declared clean or not.
        families: for a target, by name, a case of each family of kernels, or a function that makes a call.
        hbm_shares: by name of a family, its share where it is not the operation's.
        shipped: for a target, a case of every configuration that is shipped.
        columns: functions of a case whose values name a shipped configuration in a table, by header.
        accuracy: for an operation that quantises, where a case's error against attention without
            quantisation is shown: the name of the table, its row and its column. Tables of one column are
            left out.
        tile_bytes: of a case's inputs and a target: HBM bytes of a pass of the hot loop by one workgroup, and
            the plan in words.
    """

    case: Any
    bounds: Mapping[str, float] = field(hash=False)
    sweep: Callable[[Target, bool, int], Sequence[Case]]
    of_contract: Callable[[Contract, Shape, bool], Case] | None = None
    families: Callable[[str], Mapping[str, Any]] = lambda target: {}
    hbm_shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    shipped: Callable[[str], Sequence[Case]] = lambda target: ()
    columns: Mapping[str, Callable[[Any], object]] = field(default_factory=dict, hash=False)
    accuracy: Callable[[Any], tuple[str, str, str]] | None = None
    tile_bytes: Callable[[Any, str], tuple[float, str]] | None = None

    @property
    def bound(self) -> str:
        """The bounds for people."""
        return ", ".join(
            f"{bound:g}" if name == "relative_l1" else f"{bound:g} {name}"
            for name, bound in self.bounds.items()
        )


@dataclass(frozen=True, kw_only=True)
class OperationEntry:
    """An entry of the registry: one operation, or several functions that share their cases.

    Attributes:
        name: on the command line.
        functions: that answer contracts.
        module: in which `CASES` is its `Cases`.
        contracts: sets of contracts; those with the same name, of several operations, are one set.
        samples: by kernel, which workgroups finish some output rows; samples of kernels that one call
            launches must fit together. A kernel that is not listed is run whole, which is right and slow.
        hbm_share: share of the loaded bytes that HBM serves; see `narrowkv.testing.model.ModelExecutor`.
        is_paged: whether it reads a paged cache of K and V.
        has_peers: whether other implementations are asked its contracts.
        validate: help of `narrowkv validate OPERATION`.
        seed: help of the option --seed of `validate`; without one there is no such option.
        inspect: help of `narrowkv inspect OPERATION`; empty where it has none.
        inspect_call: a dataclass whose fields are the options of one call to compile; without it, every
            shipped configuration is compiled.
        every_kernel: whether a table of shipped configurations shows all kernels of a call; otherwise the
            attention kernel, and others with a fault.
        bench: help of `narrowkv bench OPERATION`; empty where it has none.
        bench_rows: a dataclass whose fields are the options of the rows; one of them is `samples`.
        bench_module: whose function `make` gives, for `bench_rows`, the bench, its rows, and settings that
            rows depend on; and `case_of` a case of `inspect_call`.
        report_cases: cases that `narrowkv report` validates; a rehearsal without a GPU has the first.
        report_measured, report_rehearsed, report_quick: options of the rows of `bench` that `narrowkv report`
            measures, that it models without a GPU, and that only show whether everything runs.
    """

    name: str
    functions: tuple[str, ...]
    module: str
    validate: str
    contracts: tuple[ContractSet, ...] = ()
    samples: Mapping[str, Callable[[SampledLaunch], Iterable[Workgroup]]] = field(
        default_factory=dict, hash=False
    )
    hbm_share: float = 1.0
    is_paged: bool = False
    has_peers: bool = False
    seed: str = ""
    inspect: str = ""
    inspect_call: Any = None
    every_kernel: bool = False
    bench: str = ""
    bench_rows: Any = None
    bench_module: str = ""
    report_cases: tuple[str, ...] = ()
    report_measured: str = ""
    report_rehearsed: str = ""
    report_quick: str = ""

    @property
    def cases(self) -> Cases:
        """Its cases; imports torch."""
        found: Cases = import_module(self.module).CASES
        return found

    @property
    def title(self) -> str:
        """Its functions, for people."""
        *others, last = self.functions
        return f"{', '.join(others)} and {last}" if others else last
