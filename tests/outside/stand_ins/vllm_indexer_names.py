"""narrowkv under the names that vLLM's tests of the indexer import: DeepGEMM's logits, vLLM's top-k."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from stand_ins.modules import add_module
from stand_ins.vllm_names import set_random_seed

from narrowkv.sparse_fp8 import IndexKeys, index_logits, index_topk

__all__ = ["install"]


def fp8_fp4_mqa_logits(
    q: tuple[torch.Tensor, None], kv: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor,
    starts: torch.Tensor, ends: torch.Tensor, clean_logits: bool,
) -> torch.Tensor:  # fmt: skip
    """DeepGEMM's logits over keys that lie one after another; q and keys are FP8."""
    return index_logits(q[0], weights, IndexKeys(*kv), starts=starts, ends=ends, clean=clean_logits)


def fp8_fp4_paged_mqa_logits(
    q: tuple[torch.Tensor, None], kv_cache: torch.Tensor, weights: torch.Tensor, context_lens: torch.Tensor,
    block_tables: torch.Tensor, schedule: Any, max_model_len: int, clean_logits: bool,
) -> torch.Tensor:  # fmt: skip
    """DeepGEMM's logits over pages; lengths are those of each token, the last one's counts all."""
    return index_logits(
        q[0].flatten(0, 1), weights, IndexKeys.packed(kv_cache), block_table=block_tables,
        seq_lens=context_lens[:, -1], num_columns=max_model_len, clean=clean_logits,
    )  # fmt: skip


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """DeepGEMM's measure: one minus twice the product of two tensors over the sum of their squares."""
    x, y = x.double(), y.double()
    return 1 - 2 * (x * y).sum() / (x * x + y * y).sum()


def top_k_per_row_prefill(
    logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, indices: torch.Tensor, num_rows: int,
    stride0: int, stride1: int, top_k: int,
) -> None:  # fmt: skip
    """vLLM's top-k by bounds; its columns count from a row's start, which these tests have at 0."""
    assert not bool(starts.any())
    index_topk(logits, top_k, ends=ends, out=indices)


def top_k_per_row_decode(
    logits: torch.Tensor, next_n: int, seq_lens: torch.Tensor, indices: torch.Tensor, num_rows: int,
    stride0: int, stride1: int, top_k: int,
) -> None:  # fmt: skip
    """vLLM's top-k by lengths of sequences."""
    index_topk(logits, top_k, seq_lens=seq_lens, out=indices)


def workspace_topk(
    logits: torch.Tensor, lengths: torch.Tensor, indices: torch.Tensor, workspace: torch.Tensor, top_k: int,
    max_seq_len: int,
) -> None:  # fmt: skip
    """vLLM's top-k by lengths of rows, with a workspace that is not used."""
    index_topk(logits, top_k, ends=lengths.flatten(), out=indices)


def install(folder: Path, suite: Any) -> None:
    """Adds the modules; the platform is CUDA, on which the tests run."""
    platform = SimpleNamespace(
        is_cuda=lambda: True, is_rocm=lambda: False, has_device_capability=lambda *_: True,
        is_device_capability_family=lambda _: False,
    )  # fmt: skip
    add_module("vllm.platforms", current_platform=platform)
    add_module("vllm.utils.math_utils", cdiv=triton.cdiv)
    add_module("vllm.utils.torch_utils", set_random_seed=set_random_seed)
    add_module("vllm.utils.import_utils", has_deep_gemm=lambda: True)
    add_module(
        "vllm.utils.deep_gemm", _ceil_to_ue8m0=None, calc_diff=calc_diff, get_num_sms=lambda: 4,
        fp8_fp4_mqa_logits=fp8_fp4_mqa_logits, fp8_fp4_paged_mqa_logits=fp8_fp4_paged_mqa_logits,
        get_paged_mqa_logits_metadata=lambda *_: None, native_next_n_supported=lambda _: True,
    )  # fmt: skip
    torch.ops._C.top_k_per_row_prefill = top_k_per_row_prefill
    torch.ops._C.top_k_per_row_decode = top_k_per_row_decode
    torch.ops._C.persistent_topk = torch.ops._C.cooperative_topk = workspace_topk
    torch.accelerator.synchronize = lambda *_: None
