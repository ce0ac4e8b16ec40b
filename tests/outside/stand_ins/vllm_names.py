"""narrowkv under the names that vLLM's kernel tests import."""

from __future__ import annotations

import enum
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from stand_ins.modules import add_module

from narrowkv.attn_decode import paged_decode
from narrowkv.engines.aiter import unified_attention as aiter_unified_attention
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.sparse_fp8 import latent_decode

__all__ = ["install"]


class KVQuantMode(enum.IntEnum):
    """vLLM's; narrowkv reads the dtypes of the tensors."""

    NONE = 0
    FP8_PER_TENSOR = 1


def _one_number(descale: Any) -> Any:
    """A descale `[batch, heads]` whose numbers are all equal, as one number of the tensor."""
    if not isinstance(descale, torch.Tensor):
        return descale
    assert bool((descale == descale.view(-1)[0]).all())
    return descale.reshape(-1)[:1]


def unified_attention(**call: Any) -> None:
    """vLLM's unified attention: buffers of its kernel's segments are not used."""
    names = (
        "q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale",
        "causal", "window_size", "block_table", "softcap",
    )  # fmt: skip
    for name in ("alibi_slopes", "output_scale", "qq_bias"):
        assert call.get(name) is None, name
    descales = [_one_number(call[name]) for name in ("q_descale", "k_descale", "v_descale")]
    aiter_unified_attention(*(call[name] for name in names), *descales, sinks=call.get("sinks"))


def decode_attention_fwd(
    q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    req_to_token: torch.Tensor, b_seq_len: torch.Tensor, attn_logits: torch.Tensor, num_kv_splits: int,
    sm_scale: float, page_size: int = 1, logit_cap: float = 0.0, k_scale: Any = None, v_scale: Any = None,
    **options: Any,
) -> None:  # fmt: skip
    """vLLM's decode over one token a page, or pages of tokens.

    A V wider than K is attended to in parts as wide as K, or of 512 channels.
    """
    is_mla = options.pop("is_mla", False)
    assert not any(options.values()), options
    if is_mla:
        _latent_decode(q, k_buffer, o, lse, req_to_token, b_seq_len, sm_scale, page_size)
        return
    fp8 = k_buffer.element_size() == 1
    width = min(k_buffer.shape[-1], 512)
    if v_buffer.shape[-1] > width:
        for part, out in zip(v_buffer.split(width, -1), o.split(width, -1), strict=True):
            decode_attention_fwd(
                q, k_buffer, part, out, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale,
                page_size, logit_cap, k_scale, v_scale,
            )  # fmt: skip
        return
    descales = {"k_descale": k_scale.view(1), "v_descale": v_scale.view(1)} if fp8 else {}
    cache = PagedKVCache.from_tensors(
        k_buffer, v_buffer, layout="tokens" if k_buffer.dim() == 3 else "NHD",
        format="fp8_e4m3fn" if fp8 else "bf16", **descales,
    )  # fmt: skip
    pages = req_to_token.reshape(q.shape[0], -1).to(torch.int32)
    table = PageTable.from_block_table(pages, b_seq_len.to(torch.int32), page_size=cache.page_size)
    assert cache.page_size == page_size
    _, sums = paged_decode(
        q, cache, table, sm_scale=sm_scale, logits_soft_cap=logit_cap, out=o, return_lse=True
    )
    lse.copy_(sums)


def _latent_decode(
    q: torch.Tensor, rows: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, req_to_page: torch.Tensor,
    b_seq_len: torch.Tensor, sm_scale: float, page_size: int,
) -> None:  # fmt: skip
    """Decode where V is the first 512 columns of K; between two pages of rows may lie other layers' pages."""
    pages = rows.shape[0]
    step, rest = divmod(rows.stride(0), page_size * rows.shape[-1])
    assert rest == 0
    between = rows.as_strided((step * (pages - 1) + 1, page_size, rows.shape[-1]), (
        rows.stride(0) // step, rows.stride(1), 1
    ))  # fmt: skip
    ids = req_to_page.reshape(q.shape[0], -1).to(torch.int32) * step
    table = PageTable.from_block_table(ids, b_seq_len.to(torch.int32), page_size=page_size)
    _, sums = latent_decode(q, between, table, sm_scale=sm_scale, out=o, return_lse=True)
    lse.copy_(sums)


def set_random_seed(seed: int) -> None:
    """vLLM's."""
    random.seed(seed)
    torch.manual_seed(seed)


def install(folder: Path, suite: Any) -> None:
    """Adds the modules."""
    platform = SimpleNamespace(
        device_type="cpu", fp8_dtype=lambda: torch.float8_e4m3fn, is_cuda=lambda: False, is_rocm=lambda: False
    )
    add_module("vllm.platforms", current_platform=platform)
    add_module("vllm.triton_utils", tl=tl, triton=triton)
    add_module("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2, cdiv=triton.cdiv)
    add_module("vllm.utils.torch_utils", set_random_seed=set_random_seed)
    ops = "vllm.v1.attention.ops."
    # Tests of these two helpers of vLLM's kernel are left out.
    add_module(ops + "triton_attention_helpers", apply_softcap=None, compute_tile_loop_bounds=None)
    add_module(ops + "triton_unified_attention", unified_attention=unified_attention)
    add_module(ops + "triton_decode_attention", decode_attention_fwd=decode_attention_fwd)
    add_module("vllm.v1.kv_cache_interface", KVQuantMode=KVQuantMode)
