"""The registry of operations: what tests and the command `narrowkv` know of each.

A new operation is one entry here and one file of cases in `narrowkv.testing.cases`. `probe`, `validate`,
`bench`, `inspect`, `report` and their options are made from the entries. Importing this needs no torch.

The samples of an entry choose workgroups of a launch: enough to finish some output rows, few enough for a
laptop. A kernel that no operation lists is run whole. Which rows its workgroups own is found by watching what
they store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowkv.testing.operation import (
    BOUND_16_BIT_QUERY,
    BOUND_FP8_COMPUTE,
    BOUND_FP8_P,
    BOUND_SPARSE,
    FP4,
    FP8,
    GLM_GQA12,
    PAGES,
    WIDE_HEADS,
    Cases,
    Contract,
    ContractSet,
    Family,
    OperationEntry,
    SampledLaunch,
    Shape,
    Workgroup,
    alike,
    contracts,
    option,
)
from narrowkv.testing.words import (
    DECODE_KERNELS,
    INDEX_KEYS,
    QUERY_DTYPES,
    SAGE_GRANULARITIES,
    SAGE_PRECISIONS,
    SPARSE_WAYS,
)

if TYPE_CHECKING:
    from narrowkv.testing.cases import Case

__all__ = [
    "OPERATIONS", "a_few", "cases_of", "contract_case", "contract_sets", "families", "family_of",
    "listed", "operation_of", "sample",
]  # fmt: skip


def corners(launch: SampledLaunch) -> Iterable[Workgroup]:
    """First, middle and last along each axis: for kernels whose workgroups need nothing of each other."""
    x, y, z = ({0, extent // 2, extent - 1} for extent in launch.grid)
    return sorted((i, j, k) for i in x for j in y for k in z)


def whole_rows(launch: SampledLaunch) -> Iterable[Workgroup]:
    """Everything along the second and third axis for the first and the last along x, whose rows these are."""
    x, y, z = launch.grid
    return sorted((i, j, k) for i in {0, x - 1} for j in range(y) for k in range(z))


def _decode_rows(launch: SampledLaunch) -> tuple[int, int, int]:
    """KV heads, rows of each and rows of a tile, of a decode kernel."""
    sizes, blocks = launch.constexprs["SIZES"], launch.constexprs["BLOCKS"]
    return sizes.num_kv_heads, sizes.q_len * sizes.gqa_ratio, blocks.m


def last_head_program(launch: SampledLaunch) -> Iterable[Workgroup]:
    """Every split of every sequence for the last KV head's last rows, which are the ragged ones."""
    from narrowkv.runtime.attention.xcds import order_of_programs  # imports Triton; the CLI starts without it

    heads, rows, block = _decode_rows(launch)
    programs = heads * -(-rows // block)
    runs_as = order_of_programs(launch.grid[0], launch.constexprs["RULES"].order)
    return ((i, 0, 0) for i, program in enumerate(runs_as) if program % programs == programs - 1)


def rows_of_last_head_program(launch: SampledLaunch) -> Iterable[Workgroup]:
    """The rows whose partial results `last_head_program` leaves."""
    heads, rows, block = _decode_rows(launch)
    left = rows - (rows - 1) // block * block
    last = range(heads * rows - left, heads * rows)
    return ((seq + row, 0, 0) for seq in range(0, launch.grid[0], heads * rows) for row in last)


def sparse_programs(launch: SampledLaunch) -> Iterable[Workgroup]:
    """First, middle and last heads and tokens; where rows are split, all splits of the last."""
    if launch.grid[1] == 1:
        return corners(launch)
    return ((launch.grid[0] - 1, split, 0) for split in range(launch.grid[1]))


def rows_of_last_sparse_program(launch: SampledLaunch) -> Iterable[Workgroup]:
    """Heads whose partial results `sparse_programs` leaves: some of the last token's."""
    return ((row, 0, 0) for row in range(max(0, launch.grid[0] - 8), launch.grid[0]))


def splits_of_some_tiles(launch: SampledLaunch) -> Iterable[Workgroup]:
    """All splits of the first and last tile of two heads; places past the last tile hold none."""
    x, _, splits = launch.grid
    return ((i, 0, k) for i in (0, x - 1) for k in range(splits))


def prefill_programs(launch: SampledLaunch) -> Iterable[Workgroup]:
    """All splits of some tiles; with even shares of keys, all programs of the last KV head.

    Which programs share a tile follows from the lengths, which only the device knows. Programs without a
    share return at once, so running all of them costs little.
    """
    if not launch.constexprs["RULES"].shares:
        return splits_of_some_tiles(launch)
    return last_kv_head(launch)


def last_kv_head(launch: SampledLaunch) -> Iterable[Workgroup]:
    """All programs of the last KV head; an append's are of both kinds, and wait for one another at most."""
    heads = launch.constexprs["SIZES"].num_kv_heads
    return ((i, 0, 0) for i in range(heads - 1, launch.grid[0], heads))


PAGED_DECODE = "paged_decode"


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


DECODE = OperationEntry(
    name="decode",
    functions=(PAGED_DECODE,),
    module="narrowkv.testing.cases.decode",
    is_paged=True,
    has_peers=True,
    hbm_share=1.0,  # each sequence has its own keys
    contracts=(
        GLM_GQA12.asking(
            *contracts(PAGED_DECODE, QUERY_DTYPES, (*alike("bf16", *FP8), *FP4), PAGES),
            *contracts(PAGED_DECODE, FP8[:1], alike(*FP8[:1]), PAGES),
        ),
        ContractSet(
            "glm-gqa12-long",
            "the same at long context, one sequence split over many programs",
            Shape(batch=1, q_len=1, context=16384, num_qo_heads=96, num_kv_heads=8, head_dim=128),
            contracts(PAGED_DECODE, ("bf16",), alike("bf16", *FP8), PAGES),
        ),
        WIDE_HEADS.asking(*contracts(PAGED_DECODE, ("bf16",), (*alike("bf16", *FP8[:1]), *FP4), (16,))),
        ContractSet(
            "fp4-capacity",
            "how many tokens a GiB holds: FP4 and K-FP8/V-FP4 caches against FP8 and bf16",
            GLM_GQA12.shape,
            (
                *contracts(PAGED_DECODE, ("bf16",), (*alike("bf16", *FP8[:1]), *FP4), (16,)),
                *contracts(PAGED_DECODE, ("bf16",), FP4[:1], (16,), scale_group=32),
            ),
        ),
    ),
    samples={
        "_paged_decode_kernel": last_head_program,
        "_merge_splits_kernel": rows_of_last_head_program,
        "_merge_states_kernel": corners,
    },
    validate="Sweep decode's axes against the reference: error table, worst cases, commands that repeat "
    "them.",
    seed="Of the random mixtures.",
    inspect="Show what decode compiles to: registers, LDS, spills, instructions, and a modelled roofline.",
    inspect_call=DecodeCall,
    bench="Measure paged decode over batches, contexts, page sizes, ratios and formats.",
    bench_rows=DecodeRows,
    bench_module="narrowkv.testing.bench.decode",
    report_cases=("lens=70+5,clean=1", "lens=33,format=bf16", "lens=300+37+1,sinks=1,split=per_sequence"),
    report_measured="--batch 1,64 --context 8192 --page-size 16",
    report_rehearsed="--batch 64 --context 8192 --page-size 16 --format fp8_e4m3fn",
    report_quick="--batch 2 --context 64 --page-size 16 --num-kv-heads 1 --format fp8_e4m3fn",
)


BATCH_PREFILL = "batch_prefill"
PREFILL_APPEND = "prefill_append"


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


PREFILL = OperationEntry(
    name="prefill",
    functions=(BATCH_PREFILL, PREFILL_APPEND),
    module="narrowkv.testing.cases.prefill",
    is_paged=True,
    hbm_share=0.1,  # query tiles read the same keys, which stay in L2
    contracts=(
        # One new token of each sequence, by the metadata of a prefill.
        GLM_GQA12.asking(
            *contracts(BATCH_PREFILL, QUERY_DTYPES, alike(*FP8[:1]), PAGES),
            *contracts(BATCH_PREFILL, FP8[:1], alike(*FP8[:1]), PAGES, bound=BOUND_FP8_COMPUTE),
        ),
        WIDE_HEADS.asking(
            *contracts(BATCH_PREFILL, ("bf16",), (*alike(*FP8[:1]), *FP4), (16,)),
            *contracts(PREFILL_APPEND, ("bf16",), (*alike(*FP8[:1]), *FP4), (16,)),
        ),
        ContractSet(
            "batch-prefill",
            "16-bit queries of many tokens over a narrow paged cache at GQA ratio 12",
            Shape(batch=2, q_len=24, context=64, num_qo_heads=24, num_kv_heads=2, head_dim=128),
            (
                *contracts(BATCH_PREFILL, QUERY_DTYPES, alike(*FP8[:1]), (1, 16)),
                *contracts(BATCH_PREFILL, ("bf16",), FP4[1:], (16,)),
                *contracts(BATCH_PREFILL, FP8[:1], alike(*FP8[:1]), (16,), bound=BOUND_FP8_COMPUTE),
            ),
        ),
        ContractSet(
            "prefill-append",
            "a chunk attends to an FP8 cache and is appended to it in one launch",
            Shape(batch=2, q_len=16, context=250, num_qo_heads=96, num_kv_heads=8, head_dim=128),
            contracts(PREFILL_APPEND, QUERY_DTYPES, alike(*FP8), PAGES),
        ),
    ),
    samples={
        "_append_kernel": corners,
        "_fused_prefill_kernel": prefill_programs,
        "_prefill_append_kernel": last_kv_head,
        "_dense_prefill_kernel": splits_of_some_tiles,  # after all of _widen_kernel
        "_cdna_prefill_kernel": splits_of_some_tiles,  # likewise
    },
    validate="Sweep prefill, and prefill that appends, whose cache must be right to the byte.",
    inspect="Show what prefill compiles to: every shipped configuration, or one case.",
    bench="Measure prefill of one sequence over prefixes, beside torch SDPA, and prefill that appends.",
    bench_rows=PrefillRows,
    bench_module="narrowkv.testing.bench.prefill",
    report_cases=("kernel=dense", "format=bf16,kernel=fused", "operation=append"),
    report_measured="--new 1024,4096 --prefix 0,4096 --heads 96/8 --format fp8_e4m3fn",
    report_rehearsed="--new 1024 --prefix 4096 --heads 96/8 --format fp8_e4m3fn",
    report_quick="--new 32 --prefix 32 --heads 12/1 --format fp8_e4m3fn",
)


SPARSE_PREFILL = "sparse_prefill"
SPARSE_PREFILL_FP8 = "sparse_prefill_fp8"
SPARSE_DECODE = "sparse_decode"


@dataclass(frozen=True)
class SparseRows:
    """Options of `narrowkv bench sparse`: every combination of the lists."""

    tokens: tuple[int, ...] = option((1024, 4096), "Query tokens.")
    heads: tuple[int, ...] = option((16, 64, 128), "Query heads.")
    topk: tuple[int, ...] = option((512, 2048), "Rows that each token attends to.")
    pool: int = option(65536, "Rows of the pool.")
    mode: tuple[str, ...] = option(("bf16", "prepass", "fused"), words=SPARSE_WAYS)
    samples: int = option(50, "The most samples of a row.")


SPARSE = OperationEntry(
    name="sparse",
    functions=(SPARSE_PREFILL, SPARSE_PREFILL_FP8, SPARSE_DECODE),
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
                    (SPARSE_PREFILL, "", "bf16", "bf16", 1, BOUND_SPARSE),
                    (SPARSE_PREFILL_FP8, "prepass", "bf16", "fp8_e4m3fn", 64, BOUND_SPARSE),
                    (SPARSE_PREFILL_FP8, "fused", "bf16", "fp8_e4m3fn", 64, BOUND_SPARSE),
                    (SPARSE_PREFILL_FP8, "fused", "fp8_e4m3fn", "fp8_e4m3fn", 64, BOUND_FP8_COMPUTE),
                    (SPARSE_DECODE, "", "bf16", "fp8_e4m3fn", 64, BOUND_SPARSE),
                )
            ),
        ),
    ),
    samples={
        "_sparse_16bit_kernel": sparse_programs,
        "_sparse_fused_kernel": sparse_programs,
        "_sparse_cdna_kernel": sparse_programs,
        "_merge_sparse_kernel": rows_of_last_sparse_program,
    },
    validate="Sweep DeepSeek-V4 sparse attention: ways to attend, layouts, row lengths, heads, options.",
    inspect="Show what sparse attention compiles to: every shipped configuration, or one case.",
    every_kernel=True,
    bench="Measure DeepSeek-V4 sparse prefill over tokens, heads and top-k, in each mode.",
    bench_rows=SparseRows,
    bench_module="narrowkv.testing.bench.sparse",
    report_cases=("lens=37+0,sink=1", "mode=decode,lens=37"),
    report_measured="--tokens 4096 --heads 64,128 --topk 2048 --mode bf16,fused",
    report_quick="--tokens 4 --heads 64 --topk 64 --pool 256 --mode bf16,fused",
)


LATENT_DECODE = "latent_decode"

LATENT = OperationEntry(
    name="latent",
    functions=(LATENT_DECODE,),
    module="narrowkv.testing.cases.latent",
    hbm_share=1.0,  # each sequence has its own rows
    contracts=(
        ContractSet(
            "mla-decode",
            "dense MLA decode over paged latent rows, 12 heads a rank: 512 + 64 columns, V is the first 512",
            Shape(batch=4, q_len=1, context=512, num_qo_heads=12, num_kv_heads=1, head_dim=576),
            tuple(
                Contract(LATENT_DECODE, "bf16", rows, rows, page, BOUND_SPARSE, variant=variant)
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
    validate="Sweep dense decode over latent rows: layouts, lengths, heads, query tokens, pages, splits.",
    inspect="Show what latent decode compiles to: every shipped configuration, or one case.",
    report_cases=("layout=tensor576,lens=70+5", "lens=300+37,q_len=2,sinks=1"),
)


SAGE_ATTENTION = "sage_attention"


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


SAGE = OperationEntry(
    name="sage",
    functions=(SAGE_ATTENTION,),
    module="narrowkv.testing.cases.sage",
    hbm_share=0.1,  # query tiles read the same keys, which stay in L2
    contracts=(
        ContractSet(
            "sage",
            "dense attention with multi-granularity quantisation of Q and K",
            Shape(batch=1, q_len=1024, context=1024, num_qo_heads=4, num_kv_heads=4, head_dim=128),
            contracts(
                SAGE_ATTENTION, ("int8", "int4", "fp8_e4m3fn"), alike("fp8_e4m3fn"), (0,), bound=BOUND_FP8_P
            ),
        ),
    ),
    samples={"_sage_attention_kernel": corners},
    validate="Sweep Sage attention's precisions, granularities and masks; show what quantising costs.",
    seed="Of the inputs.",
    inspect="Show what Sage attention compiles to: every shipped configuration, or one case.",
    bench="Measure Sage attention, quantisation included, beside torch's SDPA in bf16, unmasked and causal.",
    bench_rows=SageRows,
    bench_module="narrowkv.testing.bench.sage",
    report_cases=(
        "q_lens=130,k_lens=150,causal=bottom_right",
        "qk=fp8,q_lens=130,k_lens=200,window_left=100,window_right=30",
        "qk=int4,smooth_q=1,ragged=1,q_lens=70+130,k_lens=130+33",
    ),
    report_measured="--context 16384 --granularity per_thread",
    report_quick="--batch 1 --context 128 --heads 2 --granularity per_thread",
)


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


INDEXER = OperationEntry(
    name="indexer",
    functions=("index_logits",),
    module="narrowkv.testing.cases.indexer",
    contracts=(
        DSA_INDEXER.asking(
            *(
                Contract("index_logits", q, keys, keys, 64, BOUND_16_BIT_QUERY)
                for q, keys in (*alike(*FP8), ("fp8_e4m3fn", "fp4_e2m1"))
            )
        ),
    ),
    samples={"_index_logits_kernel": whole_rows},
    validate="Sweep the indexer's logits: layouts of keys, formats, lengths, heads, tokens of a sequence.",
    inspect="Show what the indexer's kernels compile to: every shipped configuration, or one case.",
    every_kernel=True,
    bench="Measure the indexer in decode: logits over paged keys in each format, and the top-k.",
    bench_rows=IndexerRows,
    bench_module="narrowkv.testing.bench.indexer",
    report_cases=("lens=130+5", "layout=rows,lens=70+5"),
    report_quick="--batch 2 --context 128 --heads 8 --topk 64",
)


TOPK = OperationEntry(
    name="topk",
    functions=("index_topk",),
    module="narrowkv.testing.cases.topk",
    contracts=(DSA_INDEXER.asking(Contract("index_topk", "fp32", "fp32", "fp32", 64, 0.0)),),
    validate="Sweep the indexer's top-k: widths, ties, special values, bounds, tables of pages.",
    inspect="Show what the indexer's top-k compiles to: every shipped configuration, or one case.",
    every_kernel=True,
    report_cases=("tokens=2,columns=20000,values=ties",),
)


OPERATIONS = {entry.name: entry for entry in (DECODE, PREFILL, SPARSE, LATENT, SAGE, INDEXER, TOPK)}
"""By name."""


def contract_sets() -> dict[str, ContractSet]:
    """The contract sets of all operations by name; contracts of a set that several have are joined."""
    found: dict[str, ContractSet] = {}
    for operation in OPERATIONS.values():
        for one in operation.contracts:
            known = found.get(one.name)
            joined = one.contracts if known is None else (*known.contracts, *one.contracts)
            found[one.name] = replace(one, contracts=joined)
    return found


def operation_of(function: str) -> OperationEntry:
    """The operation that has a function which answers contracts."""
    return next(entry for entry in OPERATIONS.values() if function in entry.functions)


def contract_case(contract: Contract, shape: Shape, *, clean: bool = False) -> Case:
    """The call that a contract asks for at a shape, over a cache that is declared clean or not."""
    make = operation_of(contract.operation).cases.of_contract
    assert make is not None
    return make(contract, shape, clean)


def cases_of(case: Case) -> Cases:
    """What is known of the class of a case."""
    return next(entry.cases for entry in OPERATIONS.values() if isinstance(case, entry.cases.case))


def family_of(operation: OperationEntry, case: Any) -> Family:
    """The family of a case of an operation: a call that makes the tensors and runs them."""
    return Family(lambda: case.inputs().call(), operation.hbm_share, operation.name)


def families(target: str) -> dict[str, Family]:
    """The families of kernels of a target, by name: calls small enough to trace, with a loop of many passes.

    Example:
        >>> list(families("gfx942"))[:2]
        ['decode, E4M3FN', 'decode, E4M3FNUZ']
    """
    found = {}
    for operation in OPERATIONS.values():
        cases = operation.cases
        for name, one in cases.families(target).items():
            family = Family(one, None) if callable(one) else family_of(operation, one)
            share = cases.hbm_shares.get(name, operation.hbm_share)
            found[name] = replace(family, hbm_share=share, operation=operation.name)
    return found


def listed() -> dict[str, Callable[[SampledLaunch], Iterable[Workgroup]]]:
    """The samples of all operations, by the name of the kernel."""
    return {kernel: choose for entry in OPERATIONS.values() for kernel, choose in entry.samples.items()}


def sample(launch: SampledLaunch) -> Iterable[Workgroup]:
    """The sampled workgroups of a launch; all of them for a kernel that no operation lists."""
    choose = listed().get(launch.kernel)
    return launch.everything() if choose is None else choose(launch)


def a_few(count: int) -> Callable[[SampledLaunch], list[Workgroup]]:
    """The first `count` workgroups of the sample: for counting instructions, when results are not read."""

    def choose(launch: SampledLaunch) -> list[Workgroup]:
        return [workgroup for _, workgroup in zip(range(count), sample(launch), strict=False)]

    return choose
