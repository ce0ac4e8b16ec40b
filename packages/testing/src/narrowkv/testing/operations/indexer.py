"""The entry of DeepSeek's indexer."""

from __future__ import annotations

from narrowkv.testing import operation, workgroups

OPERATION = operation.OperationEntry(
    name="indexer",
    functions=("index_logits",),
    module="narrowkv.testing.cases.indexer",
    samples={"_index_logits_kernel": workgroups.corners},
    validate=operation.ValidateEntry(
        "Sweep the indexer's logits: layouts of keys, formats, lengths, heads, tokens of a sequence."
    ),
    inspect=operation.InspectEntry(
        "Show what the indexer's kernels compile to: every shipped configuration, or one case.",
        every_kernel=True,
    ),
    report=operation.ReportLines(cases=("lens=130+5", "layout=rows,lens=70+5")),
)
