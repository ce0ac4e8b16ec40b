"""The entry of DeepSeek's indexer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from narrowkv.testing import operation, workgroups
from narrowkv.testing.contracts import BOUND_16_BIT_QUERY, FP8, Contract, ContractSet, Shape
from narrowkv.testing.operation import option
from narrowkv.testing.words import INDEX_KEYS

DSA_INDEXER = ContractSet(
    "dsa-indexer",
    "DeepSeek-V3.2's indexer: logits of 64 heads over FP8 and FP4 keys in pages, and the exact top 2,048",
    Shape(batch=4, q_len=1, context=512, num_qo_heads=64, num_kv_heads=1, head_dim=128),
)
"""The set that logits and top-k share, without its contracts."""


@dataclass(frozen=True)
class IndexerRows:
    """Options of `narrowkv bench indexer`: every combination of the lists."""

    batch: tuple[int, ...] = option((64,), "Sequences, of one new token each.")
    context: tuple[int, ...] = option((8192, 65536), "Keys of a sequence, whole pages of 64.", least=64)
    heads: int = option(64, "Index heads.")
    topk: int = option(2048, "Keys that are chosen.")
    keys: tuple[str, ...] = option(("fp8_e4m3fn", "fp4_e2m1"), words=INDEX_KEYS)
    samples: int = option(50, "The most samples of a row.")


OPERATION = operation.OperationEntry(
    name="indexer",
    functions=("index_logits",),
    module="narrowkv.testing.cases.indexer",
    contracts=(
        replace(
            DSA_INDEXER,
            contracts=tuple(
                Contract("index_logits", q, keys, keys, 64, BOUND_16_BIT_QUERY)
                for q, keys in (*((name, name) for name in FP8), ("fp8_e4m3fn", "fp4_e2m1"))
            ),
        ),
    ),
    samples={"_index_logits_kernel": workgroups.whole_rows},
    validate=operation.ValidateEntry(
        "Sweep the indexer's logits: layouts of keys, formats, lengths, heads, tokens of a sequence."
    ),
    inspect=operation.InspectEntry(
        "Show what the indexer's kernels compile to: every shipped configuration, or one case.",
        every_kernel=True,
    ),
    bench=operation.BenchEntry(
        "Measure the indexer in decode: logits over paged keys in each format, and the top-k.",
        IndexerRows,
        "narrowkv.testing.bench.indexer",
    ),
    report=operation.ReportLines(
        cases=("lens=130+5", "layout=rows,lens=70+5"),
        quick="--batch 2 --context 128 --heads 8 --topk 64",
    ),
)
