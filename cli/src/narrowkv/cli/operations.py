"""How each operation of a contract set is given its tensors and called.

A new operation joins by one entry in `OPERATIONS`; `probe` and its backends do not change.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.cli.cases import DecodeInputs
from narrowkv.cli.contracts import (
    APPEND,
    DECODE,
    PREFILL,
    SAGE,
    SPARSE,
    SPARSE_DECODE,
    SPARSE_FP8,
    Contract,
    Shape,
)
from narrowkv.cli.prefill.calls import (
    append_inputs,
    cu_seqlens_q,
    paged_inputs,
    prepare_append,
    prepare_prefill,
    ragged_inputs,
    tensor,
)
from narrowkv.cli.sage.cases import SageCall, sage_inputs
from narrowkv.cli.sparse.cases import SparseCall, SparseCase
from narrowkv.cli.sparse.cases import build as build_sparse

__all__ = [
    "OPERATIONS",
    "Call",
    "NotBuiltError",
    "Operation",
    "cu_seqlens_q",
    "find_function",
    "find_operation",
    "tensor",
]

Call = Callable[[], torch.Tensor]


class NotBuiltError(Exception):
    """The operation that a contract asks for does not exist yet."""


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        inputs: makes the tensors of a contract at a shape on a device, for a cache that is declared clean
            (written by narrowkv itself) or not: an object with `reference()`, which gives `(o, lse)` in fp32
            on the numbers that the operation reads, and `bytes_per_token()` of the cache, None without one.
            It raises what the operation's own types raise.
        prepare: does the host's work of the operation's entry (the function, the inputs) once; the call that
            comes back gives `o` and can be captured in a graph.
    """

    inputs: Callable[[Contract, Shape, str, bool], Any]
    prepare: Callable[[Any, Any], Call]


def find_function(operation: str) -> Any:
    """The function named "module:function".

    Raises:
        NotBuiltError: the module or the function does not exist.
    """
    module, _, function = operation.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise NotBuiltError(f"{module} is not built: there is no {function}")
    operation_function = getattr(importlib.import_module(module), function, None)
    if operation_function is None:
        raise NotBuiltError(f"{module} has no {function} yet")
    return operation_function


def find_operation(contract: Contract) -> Operation:
    """How the contract's operation is called.

    Raises:
        NotBuiltError: it does not exist, or nobody has said how.
    """
    find_function(contract.operation)
    if contract.operation not in OPERATIONS:
        raise NotBuiltError(f"narrowkv-cli makes no inputs for {contract.function}")
    return OPERATIONS[contract.operation]


def _decode(_: Any, inputs: DecodeInputs) -> Call:
    q, cache, table = inputs.q, inputs.cache, inputs.table
    plan = inputs.plan()
    return lambda: tensor(paged_decode(q, cache, table, **inputs.options, plan=plan))


def sparse_inputs(contract: Contract, shape: Shape, device: str = "cpu", clean: bool = False) -> SparseCall:
    """Queries of `q_len` tokens, each over `context` rows of a pool."""
    fp8 = contract.k.startswith("fp8_")
    return build_sparse(
        SparseCase(
            mode=contract.variant or ("decode" if contract.operation == SPARSE_DECODE else "wide"),
            layout="packed584" if fp8 else contract.k,
            lens="+".join([str(shape.context)] * shape.q_len),
            heads=shape.num_qo_heads,
            q="fp8" if contract.q.startswith("fp8_") else contract.q,
            format=contract.k if fp8 else SparseCase.format,
            page_size=contract.page_size,
            clean=clean,
        ),
        device,
    )


def _sparse(_: Any, inputs: SparseCall) -> Call:
    return lambda: tensor(inputs.call(return_lse=False))


def _sage(_: Any, inputs: SageCall) -> Call:
    return lambda: inputs.call()[0]


_SPARSE = Operation(sparse_inputs, _sparse)

OPERATIONS: dict[str, Operation] = {
    DECODE: Operation(paged_inputs, _decode),
    PREFILL: Operation(ragged_inputs, prepare_prefill),
    APPEND: Operation(append_inputs, prepare_append),
    SAGE: Operation(sage_inputs, _sage),
    SPARSE: _SPARSE,
    SPARSE_FP8: _SPARSE,
    SPARSE_DECODE: _SPARSE,
}
"""By the contract's "module:function"."""
