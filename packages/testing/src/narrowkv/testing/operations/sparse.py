"""The entry of DeepSeek-V4's sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.testing import operation, workgroups
from narrowkv.testing.contracts import BOUND_FP8_COMPUTE, BOUND_SPARSE, Contract, ContractSet, Shape
from narrowkv.testing.operation import option
from narrowkv.testing.words import SPARSE_WAYS

PREFILL = "sparse_prefill"
PREFILL_FP8 = "sparse_prefill_fp8"
DECODE = "sparse_decode"


@dataclass(frozen=True)
class SparseRows:
    """Options of `narrowkv bench sparse`: every combination of the lists."""

    tokens: tuple[int, ...] = option((1024, 4096), "Query tokens.")
    heads: tuple[int, ...] = option((16, 64, 128), "Query heads.")
    topk: tuple[int, ...] = option((512, 2048), "Rows that each token attends to.")
    pool: int = option(65536, "Rows of the pool.")
    mode: tuple[str, ...] = option(("bf16", "prepass", "fused"), words=SPARSE_WAYS)
    samples: int = option(50, "The most samples of a row.")


OPERATION = operation.OperationEntry(
    name="sparse",
    functions=(PREFILL, PREFILL_FP8, DECODE),
    module="narrowkv.testing.cases.sparse",
    hbm_share=0.5,  # tokens read many of the same rows
    contracts=(
        ContractSet(
            "dsv4-sparse",
            "DeepSeek-V4 sparse paged prefill and decode: 448 + 64 columns, one KV head, top-k as context",
            Shape(batch=1, q_len=8, context=512, num_qo_heads=64, num_kv_heads=1, head_dim=512),
            tuple(
                Contract(function, q, rows, rows, page, bound, variant=variant)
                for function, variant, q, rows, page, bound in (
                    (PREFILL, "", "bf16", "bf16", 1, BOUND_SPARSE),
                    (PREFILL_FP8, "prepass", "bf16", "fp8_e4m3fn", 64, BOUND_SPARSE),
                    (PREFILL_FP8, "fused", "bf16", "fp8_e4m3fn", 64, BOUND_SPARSE),
                    (PREFILL_FP8, "fused", "fp8_e4m3fn", "fp8_e4m3fn", 64, BOUND_FP8_COMPUTE),
                    (DECODE, "", "bf16", "fp8_e4m3fn", 64, BOUND_SPARSE),
                )
            ),
        ),
    ),
    samples={
        "_sparse_16bit_kernel": workgroups.sparse_programs,
        "_sparse_fused_kernel": workgroups.sparse_programs,
        "_sparse_cdna_kernel": workgroups.sparse_programs,
        "_merge_sparse_kernel": workgroups.rows_of_last_sparse_program,
    },
    validate=operation.ValidateEntry(
        "Sweep DeepSeek-V4 sparse attention: ways to attend, layouts, row lengths, heads, options."
    ),
    inspect=operation.InspectEntry(
        "Show what sparse attention compiles to: every shipped configuration, or one case.", every_kernel=True
    ),
    bench=operation.BenchEntry(
        "Measure DeepSeek-V4 sparse prefill over tokens, heads and top-k, in each mode.",
        SparseRows,
        "narrowkv.testing.bench.sparse",
    ),
    report=operation.ReportLines(
        cases=("lens=37+0,sink=1", "mode=decode,lens=37"),
        measured="--tokens 4096 --heads 64,128 --topk 2048 --mode bf16,fused",
        quick="--tokens 4 --heads 64 --topk 64 --pool 256 --mode bf16,fused",
    ),
)
