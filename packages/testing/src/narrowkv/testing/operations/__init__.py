"""The registry of operations: what tests and the command `narrowkv` know of each.

A new operation is one entry here and one file of cases in `narrowkv.testing.cases`. `probe`, `validate`,
`bench`, `inspect`, `report` and their options are made from the entries. Importing this needs no torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from narrowkv.testing.contracts import Contract, ContractSet, Shape
from narrowkv.testing.operation import Cases, Family, OperationEntry
from narrowkv.testing.operations import decode, indexer, latent, prefill, sage, sparse, topk

if TYPE_CHECKING:
    from narrowkv.testing.cases import Case

__all__ = [
    "OPERATIONS",
    "cases_of",
    "contract_case",
    "contract_sets",
    "families",
    "family_of",
    "operation_of",
]

OPERATIONS: dict[str, OperationEntry] = {
    entry.name: entry
    for entry in (
        decode.OPERATION,
        prefill.OPERATION,
        sparse.OPERATION,
        latent.OPERATION,
        sage.OPERATION,
        indexer.OPERATION,
        topk.OPERATION,
    )
}
"""By name."""


def contract_sets() -> dict[str, ContractSet]:
    """The contract sets of all operations by name; contracts of a set that several have are joined."""
    found: dict[str, ContractSet] = {}
    for operation in OPERATIONS.values():
        for one in operation.contracts:
            known = found.get(one.name)
            joined = one.contracts if known is None else (*known.contracts, *one.contracts)
            found[one.name] = replace(one, contracts=joined)
    return found


def operation_of(function: str) -> OperationEntry:
    """The operation that has a function which answers contracts."""
    return next(entry for entry in OPERATIONS.values() if function in entry.functions)


def contract_case(contract: Contract, shape: Shape, *, clean: bool = False) -> Case:
    """The call that a contract asks for at a shape, over a cache that is declared clean or not."""
    make = operation_of(contract.operation).cases.of_contract
    assert make is not None
    return make(contract, shape, clean)


def cases_of(case: Case) -> Cases:
    """What is known of the class of a case."""
    return next(entry.cases for entry in OPERATIONS.values() if isinstance(case, entry.cases.case))


def family_of(operation: OperationEntry, case: Any) -> Family:
    """The family of a case of an operation: a call that makes the tensors and runs them."""
    return Family(lambda: case.inputs().call(), operation.hbm_share, operation.name)


def families(target: str) -> dict[str, Family]:
    """The families of kernels of a target, by name: calls small enough to trace, with a loop of many passes.

    Example:
        >>> list(families("gfx942"))[:2]
        ['decode, E4M3FN', 'decode, E4M3FNUZ']
    """
    found = {}
    for operation in OPERATIONS.values():
        cases = operation.cases
        for name, one in cases.families(target).items():
            family = Family(one, None) if callable(one) else family_of(operation, one)
            share = cases.hbm_shares.get(name, operation.hbm_share)
            found[name] = replace(family, hbm_share=share, operation=operation.name)
    return found
