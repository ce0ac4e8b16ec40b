"""How each operation of a contract set is given its tensors and called.

A new operation joins by one entry in `OPERATIONS`; `probe` and its backends do not change.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.cli.cases import DecodeCase, DecodeInputs, build
from narrowkv.cli.contracts import (
    DECODE,
    PREFILL,
    SAGE,
    SPARSE,
    SPARSE_DECODE,
    SPARSE_FP8,
    Contract,
    Shape,
)
from narrowkv.cli.sage.cases import SageCall, sage_inputs
from narrowkv.cli.sparse.cases import SparseCall, SparseCase
from narrowkv.cli.sparse.cases import build as build_sparse
from narrowkv.quant.quantize import quantize_per_tensor

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


def tensor(value: object) -> torch.Tensor:
    """`value`, which must be the one tensor that an operation gives."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"an operation must give a tensor here, got {type(value).__name__}")
    return value


def paged_inputs(contract: Contract, shape: Shape, device: str = "cpu", clean: bool = False) -> DecodeInputs:
    """Queries over a paged cache; sequences of the full context, pages shuffled."""
    fp8_query = contract.q.startswith("fp8_")
    case = DecodeCase(
        lens="+".join([str(shape.context)] * shape.batch),
        q_len=shape.q_len,
        kv_heads=shape.num_kv_heads,
        ratio=shape.gqa_ratio,
        head_dim=shape.head_dim,
        page_size=contract.page_size,
        q="bf16" if fp8_query else contract.q,
        k=contract.k,
        v=contract.v,
        group=contract.scale_group,
        clean=clean,
    )
    inputs = build(case, device)
    if not fp8_query:
        return inputs
    stored, _ = quantize_per_tensor(inputs.q.float(), contract.q, descale=1.0)
    return replace(inputs, q=stored)


def cu_seqlens_q(inputs: DecodeInputs) -> torch.Tensor:
    """Where each sequence's queries begin, `[batch + 1]` int32."""
    batch = inputs.table.batch_size
    q_len = inputs.q.shape[0] // batch
    return torch.arange(batch + 1, dtype=torch.int32, device=inputs.q.device) * q_len


def _decode(_: Any, inputs: DecodeInputs) -> Call:
    q, cache, table = inputs.q, inputs.cache, inputs.table
    plan = inputs.plan()
    return lambda: tensor(paged_decode(q, cache, table, **inputs.options, plan=plan))


def _prefill(function: Any, inputs: DecodeInputs) -> Call:
    ends = cu_seqlens_q(inputs)
    return lambda: tensor(function(inputs.q, inputs.cache, inputs.table, ends, causal=True))


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
    PREFILL: Operation(paged_inputs, _prefill),
    SAGE: Operation(sage_inputs, _sage),
    SPARSE: _SPARSE,
    SPARSE_FP8: _SPARSE,
    SPARSE_DECODE: _SPARSE,
}
"""By the contract's "module:function"."""
