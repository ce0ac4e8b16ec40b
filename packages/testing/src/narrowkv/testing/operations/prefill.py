"""The entry of batch prefill, and of prefill that appends."""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.testing import operation, workgroups
from narrowkv.testing.contracts import (
    BOUND_FP8_COMPUTE,
    FP4,
    FP8,
    GLM_GQA12,
    PAGES,
    WIDE_HEADS,
    ContractSet,
    Shape,
    alike,
    contracts,
)
from narrowkv.testing.operation import option
from narrowkv.testing.words import QUERY_DTYPES

PREFILL = "batch_prefill"
APPEND = "prefill_append"


@dataclass(frozen=True)
class PrefillRows:
    """Options of `narrowkv bench prefill`: every combination of the lists."""

    new: tuple[int, ...] = option((128, 1024, 4096), "New tokens.")
    prefix: tuple[int, ...] = option((0, 4096, 32768), "Older tokens.", least=0)
    heads: tuple[tuple[int, int], ...] = option(((96, 8), (32, 8)), "Query heads / KV heads.", kind="heads")
    head_dim: int = option(128)
    page_size: int = option(16)
    cache_format: tuple[str, ...] = option(("fp8_e4m3fn", "bf16"), kind="formats")
    samples: int = option(50, "The most samples of a row.")


OPERATION = operation.OperationEntry(
    name="prefill",
    functions=(PREFILL, APPEND),
    module="narrowkv.testing.cases.prefill",
    is_paged=True,
    hbm_share=0.1,  # query tiles read the same keys, which stay in L2
    contracts=(
        # One new token of each sequence, by the metadata of a prefill.
        GLM_GQA12.asking(
            *contracts(PREFILL, QUERY_DTYPES, alike(*FP8[:1]), PAGES),
            *contracts(PREFILL, FP8[:1], alike(*FP8[:1]), PAGES, bound=BOUND_FP8_COMPUTE),
        ),
        WIDE_HEADS.asking(
            *contracts(PREFILL, ("bf16",), (*alike(*FP8[:1]), *FP4), (16,)),
            *contracts(APPEND, ("bf16",), (*alike(*FP8[:1]), *FP4), (16,)),
        ),
        ContractSet(
            "batch-prefill",
            "16-bit queries of many tokens over a narrow paged cache at GQA ratio 12",
            Shape(batch=2, q_len=24, context=64, num_qo_heads=24, num_kv_heads=2, head_dim=128),
            (
                *contracts(PREFILL, QUERY_DTYPES, alike(*FP8[:1]), (1, 16)),
                *contracts(PREFILL, ("bf16",), FP4[1:], (16,)),
                *contracts(PREFILL, FP8[:1], alike(*FP8[:1]), (16,), bound=BOUND_FP8_COMPUTE),
            ),
        ),
        ContractSet(
            "prefill-append",
            "a chunk attends to an FP8 cache and is appended to it in one launch",
            Shape(batch=2, q_len=16, context=250, num_qo_heads=96, num_kv_heads=8, head_dim=128),
            contracts(APPEND, QUERY_DTYPES, alike(*FP8), PAGES),
        ),
    ),
    samples={
        "_append_kernel": workgroups.corners,
        "_fused_prefill_kernel": workgroups.prefill_programs,
        "_prefill_append_kernel": workgroups.last_head_of_an_append,
        "_dense_prefill_kernel": workgroups.splits_of_some_tiles,  # after all of _widen_kernel
        "_cdna_prefill_kernel": workgroups.splits_of_some_tiles,  # likewise
    },
    validate=operation.ValidateEntry(
        "Sweep prefill, and prefill that appends, whose cache must be right to the byte."
    ),
    inspect=operation.InspectEntry(
        "Show what prefill compiles to: every shipped configuration, or one case."
    ),
    bench=operation.BenchEntry(
        "Measure prefill of one sequence over prefixes, beside torch SDPA, and prefill that appends.",
        PrefillRows,
        "narrowkv.testing.bench.prefill",
    ),
    report=operation.ReportLines(
        cases=("kernel=dense", "format=bf16,kernel=fused", "operation=append"),
        measured="--new 1024,4096 --prefix 0,4096 --heads 96/8 --format fp8_e4m3fn",
        rehearsed="--new 1024 --prefix 4096 --heads 96/8 --format fp8_e4m3fn",
        quick="--new 32 --prefix 32 --heads 12/1 --format fp8_e4m3fn",
    ),
)
