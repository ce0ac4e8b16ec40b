"""The entry of the indexer's top-k."""

from __future__ import annotations

from dataclasses import replace

from narrowkv.testing import operation
from narrowkv.testing.contracts import Contract
from narrowkv.testing.operations.indexer import DSA_INDEXER

OPERATION = operation.OperationEntry(
    name="topk",
    functions=("index_topk",),
    module="narrowkv.testing.cases.topk",
    contracts=(replace(DSA_INDEXER, contracts=(Contract("index_topk", "fp32", "fp32", "fp32", 64, 0.0),)),),
    validate=operation.ValidateEntry(
        "Sweep the indexer's top-k: widths, ties, special values, bounds, tables of pages."
    ),
    inspect=operation.InspectEntry(
        "Show what the indexer's top-k compiles to: every shipped configuration, or one case.",
        every_kernel=True,
    ),
    report=operation.ReportLines(cases=("tokens=2,columns=20000,values=ties",)),
)
