"""What the registry says of an operation: `OperationEntry`, and `Cases` of its cases file.

Commands are made from an entry before torch is imported, so an entry names the modules that need torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowkv.testing.contracts import Contract, ContractSet, Shape
from narrowkv.testing.workgroups import SampledLaunch, Workgroup

if TYPE_CHECKING:
    from narrowkv.runtime.targets import Target
    from narrowkv.testing.cases import Case

__all__ = ["Cases", "Family", "OperationEntry", "option"]


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
        check: runs a case on a device inside a context, and compares it with the reference; without it, as
            `narrowkv.testing.checking.run_case` does.
        failed: the result of a case that raised, from its place and message; goes with `check`.
        tile_bytes: of a case's inputs and a target: HBM bytes of a pass of the hot loop by one workgroup, and
            the plan in words.
        one_shape: the cases of the options of `OperationEntry.one_shape`, and a seed.
    """

    case: Any
    bounds: Mapping[str, float] = field(hash=False)
    sweep: Callable[[Target, bool, int], Sequence[Case]]
    of_contract: Callable[[Contract, Shape, bool], Case] | None = None
    families: Callable[[str], Mapping[str, Any]] = lambda target: {}
    hbm_shares: Mapping[str, float] = field(default_factory=dict, hash=False)
    shipped: Callable[[str], Sequence[Case]] = lambda target: ()
    columns: Mapping[str, Callable[[Any], object]] = field(default_factory=dict, hash=False)
    check: Callable[..., Any] | None = None
    failed: Callable[[str, str], Any] | None = None
    tile_bytes: Callable[[Any, str], tuple[float, str]] | None = None
    one_shape: Callable[..., Sequence[Case]] | None = None

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
        one_shape: a dataclass whose fields are options of `validate` that make the cases, instead of --case;
            the first of them must be given for the others.
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
    one_shape: Any = None
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
