"""The entry of Sage attention."""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.testing import operation, workgroups
from narrowkv.testing.contracts import BOUND_FP8_P, ContractSet, Shape, alike, contracts
from narrowkv.testing.operation import option
from narrowkv.testing.words import SAGE_GRANULARITIES, SAGE_PRECISIONS

FUNCTION = "sage_attention"


@dataclass(frozen=True)
class SageRows:
    """Options of `narrowkv bench sage`: every combination of the lists, unmasked and causal."""

    batch: tuple[int, ...] = option((2,), "Sequences.")
    context: tuple[int, ...] = option((4096, 16384), "Tokens of Q, and of K.")
    heads: int = option(32, "Heads of Q, K and V.")
    head_dim: int = option(128)
    qk: tuple[str, ...] = option(("int8",), words=SAGE_PRECISIONS)
    granularity: tuple[str, ...] = option(
        ("per_thread", "per_warp", "per_block"), words=SAGE_GRANULARITIES
    )  # fmt: skip
    samples: int = option(20, "The most samples of a row.")


@dataclass(frozen=True)
class SageShapeOptions:
    """Options of `narrowkv validate sage` for cases of one shape."""

    shape: str | None = option(None, "One shape, as b=1,h=8,s=1024,d=128.", metavar="SIZES")
    precision: str = option("", "Of --shape: int8, int4 or fp8; default: all.")
    granularity: str = option(
        "", "Of --shape: per_tensor, per_block, per_warp or per_thread; default: all."
    )  # fmt: skip


OPERATION = operation.OperationEntry(
    name="sage",
    functions=(FUNCTION,),
    module="narrowkv.testing.cases.sage",
    hbm_share=0.1,  # query tiles read the same keys, which stay in L2
    contracts=(
        ContractSet(
            "sage",
            "dense attention with multi-granularity quantisation of Q and K",
            Shape(batch=1, q_len=1024, context=1024, num_qo_heads=4, num_kv_heads=4, head_dim=128),
            contracts(FUNCTION, ("int8", "int4", "fp8_e4m3fn"), alike("fp8_e4m3fn"), (0,), bound=BOUND_FP8_P),
        ),
    ),
    samples={"_sage_attention_kernel": workgroups.corners},
    validate=operation.ValidateEntry(
        "Show what Sage attention's granularities cost in accuracy, beside the published figures.",
        seed="Of the inputs.",
        one_shape=SageShapeOptions,
    ),
    inspect=operation.InspectEntry("Show what Sage attention compiles to: every shipped configuration."),
    bench=operation.BenchEntry(
        "Measure Sage attention, quantisation included, beside torch's SDPA in bf16, unmasked and causal.",
        SageRows,
        "narrowkv.testing.bench.sage",
    ),
    report=operation.ReportLines(
        measured="--context 16384 --granularity per_thread",
        quick="--batch 1 --context 128 --heads 2 --granularity per_thread",
    ),
)
