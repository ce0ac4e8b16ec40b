"""Models, the calls that their attention makes on each rank, and whether they are exact: `probe models`.

A row says what is public of a model's configuration. Nothing in it says what works: the operations are asked,
on one rank and at a small context, and one that narrowkv has not, or a size, is refused when it is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.testing.cases import CaseError, parse_case
from narrowkv.testing.checking import run_case
from narrowkv.testing.operations import OPERATIONS
from narrowkv.testing.places import find_place
from narrowkv.testing.probing import REFUSED

__all__ = [
    "EXACT", "MODELS", "RANKS", "REFUSED", "WRONG", "Model", "ModelAnswer", "ModelTask", "Need",
    "all_tasks", "answer", "tasks_of",
]  # fmt: skip


RANKS = (1, 2, 4, 8)
"""Ranks of tensor parallelism that heads are divided by."""


@dataclass(frozen=True)
class Need:
    """A call that some layers of a model make.

    Attributes:
        operation: name of the entry of `narrowkv.testing.operations`.
        what: in words.
        case: its case as text; `{q}` and `{kv}` are the query heads and the KV heads of a rank, `{ratio}` the
            query heads of a KV head.
        heads, kv_heads: of the whole model; 0 heads where every rank makes the same call.
    """

    operation: str
    what: str
    case: str
    heads: int = 0
    kv_heads: int = 1

    def line(self, ranks: int) -> str | None:
        """The case on one of so many ranks; None where they do not divide the heads.

        KV heads that are fewer than the ranks are held by several of them.

        Example:
            >>> Need("decode", "", "kv_heads={kv},ratio={ratio}", heads=24, kv_heads=4).line(8)
            'kv_heads=1,ratio=3'
        """
        if self.heads % ranks:
            return None
        q, kv = self.heads // ranks, max(self.kv_heads // ranks, 1)
        return self.case.format(q=q, kv=kv, ratio=q // kv)


@dataclass(frozen=True)
class Model:
    """A model's attention.

    Attributes:
        name: of the model.
        heads: its heads in words.
        source: where the sizes are public.
        needs: the calls.
        unsure: sizes that were not checked against the model's configuration; empty if there are none.
        beside: layers that are no attention over a cache, which narrowkv has no part in.
    """

    name: str
    heads: str
    source: str
    needs: tuple[Need, ...]
    unsure: str = ""
    beside: str = ""


_CHUNKS = "q_lens=5+3,lens=20+{longest}"  # new tokens, and all tokens, of two sequences


def _grouped(heads: int, kv_heads: int, head_dim: int, what: str = "", more: str = "") -> tuple[Need, ...]:
    """Decode and prefill over FP8 pages; `more` are further fields of both cases."""
    sizes = f"head_dim={head_dim},kv_heads={{kv}},ratio={{ratio}}{more}"
    return tuple(
        Need(operation, f"{operation}{what}", f"{sizes},{lens}", heads, kv_heads)
        for operation, lens in (("decode", "lens=200+33"), ("prefill", _CHUNKS.format(longest=170)))
    )


def _latent(heads: int) -> tuple[Need, ...]:
    """Dense decode over latent rows of 512 + 64 columns."""
    return (
        Need("latent", "dense decode, bf16 rows", "layout=bf16,heads={q},lens=70+33", heads),
        Need("latent", "dense decode, FP8 rows", "layout=tensor576,heads={q},lens=70+33", heads),
    )


def _expanded(heads: int, head_dim: int, v_head_dim: int) -> Need:
    """Prefill over K and V that were computed from latents: as many KV heads as query heads."""
    narrower = f",v_head_dim={v_head_dim}" if v_head_dim != head_dim else ""
    return Need(
        "prefill", f"prefill, K {head_dim} and V {v_head_dim} wide",
        f"head_dim={head_dim}{narrower},kv_heads={{kv}},ratio=1,format=bf16,{_CHUNKS.format(longest=33)}",
        heads, heads,
    )  # fmt: skip


def _sparse(heads: int, layout: str, more: str = "") -> tuple[Need, ...]:
    """Prefill and decode of the rows that a list names."""
    return tuple(
        Need("sparse", f"sparse {what}, {layout}", f"mode={mode},layout={layout},heads={{q}}{more}", heads)
        for what, mode in (("prefill", "fused"), ("decode", "decode"))
    )


def _indexer(heads: int, topk: int, key_format: str = "fp8_e4m3fn") -> tuple[Need, ...]:
    """Logits and top-k of the indexer, which every rank has whole."""
    return (
        Need("indexer", f"index logits, {heads} heads", f"heads={heads},format={key_format},lens=70+33"),
        Need("topk", f"top {topk}", f"topk={topk},columns=3000,tokens=2"),
    )


_WINDOWED = ",sink=1,extend=9+4+0"  # the rows of a window are a second source

MODELS: tuple[Model, ...] = (
    Model(
        "GLM-4.5-Air", "96/8, head_dim 128", "config.json of zai-org/GLM-4.5-Air", _grouped(96, 8, 128)
    ),
    Model(
        "GLM-5", "64, latent 512 + 64, indexer 32", "GlmMoeDsaConfig of transformers 5.24",
        (*_sparse(64, "record656"), *_indexer(32, 2048), *_latent(64), _expanded(64, 256, 256)),
    ),
    Model(
        "DeepSeek-V3.2", "128, latent 512 + 64, indexer 64", "DeepseekV32Config of transformers 5.24",
        (*_sparse(128, "record656"), *_indexer(64, 2048), *_latent(128), _expanded(128, 192, 128)),
    ),
    Model(
        "DeepSeek-V4-Flash", "64, latent 448 + 64, window 128, sinks, indexer 64",
        "DeepseekV4Config of transformers 5.24",
        (*_sparse(64, "packed584", _WINDOWED), *_indexer(64, 512)),
    ),
    Model(
        "DeepSeek-V4-Pro", "128, latent 448 + 64, window 128, sinks, indexer 64",
        "V4-Pro in three public programs (AIConfigurator, Primus, Ascend's torchtitan), which agree",
        (*_sparse(128, "packed584", _WINDOWED), *_indexer(64, 1024)),
    ),
    Model(
        "DeepSeek-V4.1-Flash", "64, latent 512, window 128, sinks, indexer 32",
        "DeepseekV41TextConfig of TensorRT-LLM, whose defaults are the released sizes",
        (
            *_sparse(64, "packed528", _WINDOWED), *_sparse(64, "packed288", _WINDOWED),
            *_indexer(32, 512, "fp4_e2m1"),
            Need("topk", "top 2048 blocks of 8", "topk=2048,block_size=8,columns=20000,tokens=2,bounds=ends"),
            Need(
                "topk", "top 512 in these blocks",
                "topk=512,block_size=8,num_blocks=2048,columns=20000,tokens=2,bounds=ends",
            ),
        ),
    ),
    Model(
        "Kimi-K3", "96, latent 512 + 64, no RoPE",
        "Kimi-K3 in torchtitan, llama.cpp and vLLM 0.32, which agree: K 128 + 64 and V 128 wide",
        (*_latent(96), _expanded(96, 192, 128)),
        beside="69 of 93 layers: Kimi Delta Attention",
    ),
    Model(
        "Qwen3.8-27B", "24/4, head_dim 256", "descriptions of the configuration", _grouped(24, 4, 256),
        unsure="heads and head_dim", beside="48 of 64 layers: Gated DeltaNet",
    ),
    Model(
        "Llama-4", "40/8, head_dim 128, chunks of 8,192", "Llama4TextConfig of transformers 5.24",
        # A chunk's keys begin at its first page: a page table without the pages before it.
        _grouped(40, 8, 128),
    ),
    Model(
        "gpt-oss", "64/8, head_dim 64, window 128, sinks", "GptOssConfig of transformers 5.24",
        (
            *_grouped(64, 8, 64, ", sinks", ",sinks=1"),
            Need(
                "decode", "decode, sinks, window",
                "head_dim=64,kv_heads={kv},ratio={ratio},sinks=1,window=127,lens=200+33", 64, 8,
            ),
            Need(
                "prefill", "prefill, sinks, window",
                "head_dim=64,kv_heads={kv},ratio={ratio},sinks=1,window_left=127,q_lens=5+3,lens=20+170",
                64, 8,
            ),
        ),
    ),
    Model(
        "Gemma-4-31B", "32/16, head_dim 256, window 1,024; 32/4, head_dim 512",
        "Gemma4TextConfig of transformers 5.24, the 31B's config.json in tests of three public programs",
        (
            *_grouped(32, 4, 512, ", 512 wide"),
            Need(
                "decode", "decode, window",
                "head_dim=256,kv_heads={kv},ratio={ratio},window=1023,lens=1100", 32, 16,
            ),
            Need(
                "prefill", "prefill, window",
                "head_dim=256,kv_heads={kv},ratio={ratio},window_left=1023,q_lens=3,lens=1100", 32, 16,
            ),
        ),
    ),
)  # fmt: skip
"""A row each."""


EXACT, WRONG = "exact", "wrong"


@dataclass(frozen=True)
class ModelTask:
    """One call: the case of an operation, at a place. Calls that models have in common are one task."""

    operation: str
    line: str
    place: str


@dataclass(frozen=True)
class ModelAnswer:
    """What came of a call.

    Attributes:
        status: "exact", within the operation's bound of its reference; "refused"; or "wrong".
        detail: why not exact.
        relative_l1: the error; None where there is no result.
    """

    status: str
    detail: str = ""
    relative_l1: float | None = None


def tasks_of(need: Need, place: str) -> dict[int, ModelTask]:
    """The calls of a need by number of ranks, without those that do not divide its heads."""
    lines = {ranks: need.line(ranks) for ranks in RANKS}
    return {
        ranks: ModelTask(need.operation, line, place) for ranks, line in lines.items() if line is not None
    }


def all_tasks(models: tuple[Model, ...] = MODELS, place: str = "cpu") -> list[ModelTask]:
    """Every call of some models, each once."""
    found = [task for model in models for need in model.needs for task in tasks_of(need, place).values()]
    return list(dict.fromkeys(found))


def answer(task: ModelTask) -> ModelAnswer:
    """Makes the call. What goes wrong is an answer: refusals are those that name an argument."""
    entry = OPERATIONS.get(task.operation)
    if entry is None:
        return ModelAnswer(REFUSED, f"narrowkv has no operation {task.operation}")
    try:
        case = parse_case(entry.cases.case, task.line)
        place = find_place(task.place)
        result = run_case(case, place.device, place.context)
    except CaseError as error:
        wrong = str(error).partition(" must be one of ")[0].removeprefix("a name ").strip("()")
        return ModelAnswer(REFUSED, f"{entry.name} has no {wrong}")
    except (TypeError, ValueError, NotImplementedError) as error:
        lines = str(error).strip().splitlines()
        return ModelAnswer(REFUSED, lines[0] if lines else type(error).__name__)
    except Exception as error:
        return ModelAnswer(WRONG, f"{type(error).__name__}: {error}")
    error_l1 = None if result.error is None else result.error.relative_l1
    return ModelAnswer(EXACT if result.passed else WRONG, result.detail, error_l1)
