"""The entry of paged decode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from narrowkv.testing import operation, workgroups
from narrowkv.testing.contracts import (
    FP4,
    FP8,
    GLM_GQA12,
    PAGES,
    ContractSet,
    Shape,
    alike,
    contracts,
)
from narrowkv.testing.operation import option
from narrowkv.testing.words import DECODE_KERNELS, QUERY_DTYPES

FUNCTION = "paged_decode"


@dataclass(frozen=True)
class DecodeRows:
    """Options of `narrowkv bench decode`: every combination of the lists."""

    batch: tuple[int, ...] = option((1, 4, 16, 64, 128), "Sequences.")
    context: tuple[int, ...] = option((1024, 8192, 32768), "Tokens of each sequence.")
    page_size: tuple[int, ...] = option((1, 16, 64))
    num_kv_heads: int = option(8)
    ratio: tuple[int, ...] = option((12,), "Query heads for each KV head.")
    head_dim: int = option(128)
    cache_format: tuple[str, ...] = option(("fp8_e4m3fn", "bf16"), kind="formats")
    q: str = option("bf16", kind="query")
    samples: int = option(50, "The most samples of a row.")
    peers: bool = option(
        False, "Also time torch SDPA, AITER, FlashInfer, vLLM and SGLang.", measured=True
    )  # fmt: skip
    batch_invariant: bool = option(
        False, "Plans whose bits do not depend on the batch.", measured=True
    )  # fmt: skip
    against: Path | None = option(
        None, "Compare; slower rows end with 4.", measured=True, metavar="BASELINE.json"
    )
    threshold: float = option(0.05, "How much slower a row may become.", measured=True)


@dataclass(frozen=True)
class DecodeCall:
    """Options of `narrowkv inspect decode`."""

    batch: int = option(4)
    context: int = option(1024, "Tokens of each sequence.")
    ratio: int = option(12, "Query heads for each KV head.")
    num_kv_heads: int = option(8)
    head_dim: int = option(128)
    page_size: int = option(16)
    cache_format: str = option("fp8_e4m3fn", kind="formats")
    q: str = option("bf16", kind="query")
    kernel: str = option("", "native, decode or fp8; default: the target's.", words=DECODE_KERNELS)


OPERATION = operation.OperationEntry(
    name="decode",
    functions=(FUNCTION,),
    module="narrowkv.testing.cases.decode",
    is_paged=True,
    has_peers=True,
    hbm_share=1.0,  # each sequence has its own keys
    contracts=(
        GLM_GQA12.asking(
            *contracts(FUNCTION, QUERY_DTYPES, (*alike("bf16", *FP8), *FP4), PAGES),
            *contracts(FUNCTION, FP8[:1], alike(*FP8[:1]), PAGES),
        ),
        ContractSet(
            "glm-gqa12-long",
            "the same at long context, one sequence split over many programs",
            Shape(batch=1, q_len=1, context=16384, num_qo_heads=96, num_kv_heads=8, head_dim=128),
            contracts(FUNCTION, ("bf16",), alike("bf16", *FP8), PAGES),
        ),
        ContractSet(
            "fp4-capacity",
            "how many tokens a GiB holds: FP4 and K-FP8/V-FP4 caches against FP8 and bf16",
            GLM_GQA12.shape,
            (
                *contracts(FUNCTION, ("bf16",), (*alike("bf16", *FP8[:1]), *FP4), (16,)),
                *contracts(FUNCTION, ("bf16",), FP4[:1], (16,), scale_group=32),
            ),
        ),
    ),
    samples={
        "_paged_decode_kernel": workgroups.last_head_program,
        "_merge_splits_kernel": workgroups.rows_of_last_head_program,
        "_merge_states_kernel": workgroups.corners,
    },
    validate=operation.ValidateEntry(
        "Sweep decode's axes against the reference: error table, worst cases, commands that repeat them.",
        seed="Of the random mixtures.",
    ),
    inspect=operation.InspectEntry(
        "Show what decode compiles to: registers, LDS, spills, instructions, and a modelled roofline.",
        call=DecodeCall,
        module="narrowkv.testing.bench.decode",
    ),
    bench=operation.BenchEntry(
        "Measure paged decode over batches, contexts, page sizes, ratios and formats.",
        DecodeRows,
        "narrowkv.testing.bench.decode",
    ),
    report=operation.ReportLines(
        cases=("lens=70+5,clean=1", "lens=33,format=bf16", "lens=300+37+1,sinks=1,split=per_sequence"),
        measured="--batch 1,64 --context 8192 --page-size 16",
        rehearsed="--batch 64 --context 8192 --page-size 16 --format fp8_e4m3fn",
        quick="--batch 2 --context 64 --page-size 16 --num-kv-heads 1 --format fp8_e4m3fn",
    ),
)
