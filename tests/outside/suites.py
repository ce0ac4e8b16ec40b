"""The outside suites: where they lie in the folder, how shapes are cut, what is left out and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FETCH", "SUITES", "LeftOut", "Suite"]

FETCH = """\
Nothing was run: OUTSIDE must be a folder with some of these, as their repositories have them:
  aiter/     op_tests/ and aiter/ of github.com/ROCm/aiter at e4048607 (August 2026), and from 01077fcc
             op_tests/triton_tests/attention/test_fp8_paged_mqa_logits.py
  FlashMLA/  tests/ of github.com/deepseek-ai/FlashMLA at 9241ae3e (April 2026)
  vllm/      tests/kernels/ of vLLM 0.32.0 (its source distribution has it)
  triton/    python/tutorials/ and python/test/ of github.com/triton-lang/triton, as installed
  python/    what the suites import: pip install --target python einops pandas
Then: make test-outside OUTSIDE=folder
"""


@dataclass(frozen=True)
class LeftOut:
    """Tests that are not run.

    Attributes:
        tests: their names, or how they begin with a `*` at the end.
        reason: what narrowkv does not do.
        when: values of parameters; without any, every case of the tests is left out.
    """

    tests: tuple[str, ...]
    reason: str
    when: Callable[[dict[str, Any]], bool] = lambda values: True

    def holds(self, test: str, values: dict[str, Any]) -> bool:
        """Whether a case is left out."""
        named = any(test == name or (name[-1] == "*" and test.startswith(name[:-1])) for name in self.tests)
        return named and self.when(values)


@dataclass(frozen=True)
class Suite:
    """One test file of an outside project.

    Attributes:
        name: in tables.
        file: its path in the folder; a driver of ours runs what is no pytest file.
        stand_in: the module of `stand_ins` that presents narrowkv under the imported names.
        cuts: for a parameter, what takes the place of its value; equal cases then run once.
        every: of the cases that are left, each so-manieth runs.
        sample: of the cases of one test so many run, evenly spaced; 0 runs all.
        left_out: what narrowkv does not do.
        arch: the architecture that the suite is told.
        driver: a file of this folder that runs the suite's own functions, instead of pytest's collection.
        chip: the virtual GPU that the suite's own kernels run on, in place of a stand-in.
    """

    name: str
    file: str
    stand_in: str = ""
    cuts: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    every: int = 1
    sample: int = 0
    left_out: tuple[LeftOut, ...] = ()
    arch: str = "gfx950"
    driver: str = ""
    chip: str = ""


def most(limit: int) -> Callable[[int], int]:
    """Cuts a number to a limit."""
    return lambda value: min(value, limit)


def _few_rows(config: dict[str, Any]) -> dict[str, Any]:
    """Cuts a configuration of vLLM's top-k to three rows."""
    cut = {"batch_size": most(2), "seq_lens": lambda lens: lens[:3]}
    return {name: cut[name](value) if name in cut else value for name, value in config.items()}


def short(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cuts (query length, sequence length) pairs, at most three of them."""
    return [(min(q, 9), min(q, 9) + min(kv - q, 60)) for q, kv in pairs[:3]]


_SAGE_HEADS = {24: 4, 48: 12, 16: 8}
_OWN_KERNEL = "tests a helper or a loading path of the suite's own kernel, which narrowkv has not"

SUITES: tuple[Suite, ...] = (
    Suite(
        "AITER sparse prefill (opus), bf16, fp16, fp8",
        "aiter/op_tests/test_pa_sparse_prefill_opus.py",
        "aiter_names",
        {"n": most(9), "total_pages": most(70), "total_tokens": most(40)},
    ),
    Suite(
        "AITER ragged paged attention",
        "aiter/op_tests/test_pa_ragged.py",
        "aiter_names",
        {"num_seqs": most(2), "ctx_lens": most(130)},
        every=11,
        left_out=(
            LeftOut(("test_paged_attention",), "ALiBi", lambda values: values["use_alibi"]),
            LeftOut(
                ("test_paged_attention",), "the suite skips quantised caches in this variant",
                lambda values: values["quant_cache_dtype"] is not None,
            ),
        ),
    ),
    Suite(
        "AITER sparse decode",
        "aiter/op_tests/triton_tests/attention/test_pa_decode_sparse.py",
        "aiter_names",
        {"T": most(2), "kv_len": most(140), "extra_len": most(40)},
    ),
    Suite(
        "AITER sparse prefill (Triton), two sources",
        "aiter/op_tests/triton_tests/attention/test_pa_prefill_sparse.py",
        "aiter_names",
        {"T": most(4)},
        arch="gfx1250",
    ),
    Suite(
        "AITER sparse prefill (Triton), one source",
        "aiter/op_tests/triton_tests/attention/test_pa_prefill_sparse.py",
        "aiter_names",
        {"T": most(4)},
    ),
    Suite(
        "AITER Sage attention v3",
        "aiter/op_tests/triton_tests/attention/test_fav3_sage.py",
        "aiter_names",
        {
            "BATCH": most(2), "SEQLEN": most(256), "SEQLEN_Q": most(256), "SEQLEN_K": most(256),
            "NUM_Q_HEADS": lambda heads: _SAGE_HEADS.get(heads, heads),
            "NUM_K_HEADS": lambda heads: {24: 4, 8: 2, 16: 8}.get(heads, heads),
        },
        every=5,
        left_out=(
            LeftOut(("test_sage_mxfp4*",), "Q and K in MXFP4"),
            LeftOut(("test_sage_int8_hadamard_preserves_float_logits", "test_block_attn_mask*"), _OWN_KERNEL),
        ),
    ),
    Suite(
        "AITER indexer logits",
        "aiter/op_tests/triton_tests/attention/test_fp8_mqa_logits.py",
        "aiter_names",
        {"s_q": most(61), "s_k": most(122)},
    ),
    Suite(
        "AITER indexer logits over pages",
        "aiter/op_tests/triton_tests/attention/test_fp8_paged_mqa_logits.py",
        "aiter_names",
        {"batch_size": most(3), "avg_kv_length": most(128), "context_len": most(16)},
    ),
    Suite(
        "FlashMLA sparse decode",
        "FlashMLA/tests/test_flash_mla_sparse_decoding.py",
        "flash_mla_names",
        driver="flashmla_cases.py",
    ),
    Suite(
        "FlashMLA sparse prefill",
        "FlashMLA/tests/test_flash_mla_sparse_prefill.py",
        "flash_mla_names",
        driver="flashmla_cases.py",
    ),
    Suite(
        "vLLM unified attention",
        "vllm/tests/kernels/attention/test_triton_unified_attention.py",
        "vllm_names",
        {"num_blocks": most(64), "seq_lens": short, "seq_threshold_3D": lambda value: 8},
        every=3,
        left_out=(
            LeftOut(
                ("test_clamped*", "test_fp8_softmax*", "test_softcap*", "test_triton_unified_attn_use_td*"),
                _OWN_KERNEL,
            ),
            LeftOut(("test_triton_unified_attn_clamped_mm*",), "image prefixes"),
            LeftOut(("test_triton_unified_attn_fp16_input_fp8_output",), "an FP8 output"),
        ),
    ),
    Suite(
        "vLLM decode attention",
        "vllm/tests/kernels/attention/test_triton_decode_attention.py",
        "vllm_names",
        {"B": most(2), "L": lambda length: length - 960, "CACHE_SIZE": most(1024)},
    ),
    Suite(
        "vLLM indexer logits",
        "vllm/tests/kernels/attention/test_deepgemm_attention.py",
        "vllm_indexer_names",
    ),
    Suite(
        "vLLM top-k",
        "vllm/tests/kernels/test_top_k_per_row.py",
        "vllm_indexer_names",
        {"num_rows": most(32), "batch_size": most(2), "test_config": _few_rows},
        every=3,
        left_out=(
            LeftOut(("test_sparse_indexer*", "test_dsv4*"), "tests of vLLM's choice of a kernel"),
            LeftOut(("test_persistent_topk_sampled_graph",), "a CUDA graph"),
        ),
    ),
    *(
        Suite(
            f"Triton tutorial {tutorial[:2]}", f"triton/python/tutorials/{tutorial}.py",
            driver="tutorial.py", chip="gfx942",
        )
        for tutorial in ("01-vector-add", "02-fused-softmax", "03-matrix-multiplication")
    ),
    Suite("Triton test_core", "triton/python/test/unit/language/test_core.py", sample=3, chip="gfx942"),
)  # fmt: skip
