"""The entry of dense decode over latent rows."""

from __future__ import annotations

from narrowkv.testing import operation
from narrowkv.testing.contracts import BOUND_SPARSE, PAGES, Contract, ContractSet, Shape

FUNCTION = "latent_decode"

OPERATION = operation.OperationEntry(
    name="latent",
    functions=(FUNCTION,),
    module="narrowkv.testing.cases.latent",
    hbm_share=1.0,  # each sequence has its own rows
    contracts=(
        ContractSet(
            "mla-decode",
            "dense MLA decode over paged latent rows, 12 heads a rank: 512 + 64 columns, V is the first 512",
            Shape(batch=4, q_len=1, context=512, num_qo_heads=12, num_kv_heads=1, head_dim=576),
            tuple(
                Contract(FUNCTION, "bf16", rows, rows, page, BOUND_SPARSE, variant=variant)
                for rows, variant in (
                    ("bf16", ""),
                    ("fp8_e4m3fn", ""),
                    ("fp8_e4m3fnuz", ""),
                    ("fp8_e4m3fn", "record656"),
                )
                for page in PAGES
            ),
        ),
    ),
    validate=operation.ValidateEntry(
        "Sweep dense decode over latent rows: layouts, lengths, heads, query tokens, pages, splits."
    ),
    inspect=operation.InspectEntry(
        "Show what latent decode compiles to: every shipped configuration, or one case."
    ),
    report=operation.ReportLines(cases=("layout=tensor576,lens=70+5", "lens=300+37,q_len=2,sinks=1")),
)
