"""The sparse attention of DeepSeek V4 over vLLM's pages on ROCm, by narrowkv's kernels.

vLLM selects the rows of each token, and calls one function for a decode step's attention. On gfx942 its rows
of the window are FNUZ and its compressed rows OCP. `patch` puts `rocm_sparse_attn_decode` into its place.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from narrowkv.engines.deepseek import LAYOUTS, attend_to_rows, listed_rows, page_rows
from narrowkv.engines.versions import adapting
from narrowkv.sparse_fp8 import DSV4Rows, KVSource

__all__ = ["patch", "rocm_sparse_attn_decode"]

# Modules of vLLM that have imported the function.
_PLACES = ("vllm.models.deepseek_v4.amd.rocm", "vllm.models.deepseek_v41.amd.rocm")


def _source(
    rows: DSV4Rows,
    ragged: tuple[torch.Tensor | None, torch.Tensor | None],
    indices: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> KVSource:
    """The rows with vLLM's ragged lists, or with its lists of one width."""
    named, starts = ragged
    if named is not None and starts is not None:
        return KVSource(rows, starts, named)
    assert indices is not None
    return listed_rows(rows, indices, lengths)


def rocm_sparse_attn_decode(
    q: torch.Tensor, kv_cache: torch.Tensor | None, swa_k_cache: torch.Tensor, swa_only: bool, *,
    output: torch.Tensor, scale: float, attn_sink: torch.Tensor | None = None, **lists: Any,
) -> int:  # fmt: skip
    """A decode step's attention, by vLLM's names of arguments.

    Args:
        q: `[tokens, num_qo_heads, 512]`; 1 to 128 heads.
        kv_cache: compressed rows, OCP: `[blocks, block_size, bytes]`, 584 bytes a token (V4), 528 (V4.1) or
            288 (V4.1 in NVFP4); not read with `swa_only`.
        swa_k_cache: rows of the window, in the FP8 format of the device; pages like those of `kv_cache`.
        swa_only: whether the layer has a window alone.
        output: like q, written.
        scale: of the logits.
        attn_sink: `[num_qo_heads or more]` fp32, a logit whose value is 0.
        **lists: vLLM's lists of rows: `swa_ragged_indices` with `swa_ragged_indptr`, or `swa_indices` with
            `swa_lens`; the same with `topk`. Everything else is not read.

    Returns:
        0: no row of the output is rotated back. vLLM then rotates all of them.

    Raises:
        TypeError, ValueError: for shapes and formats that narrowkv does not read.
    """
    from vllm.platforms import current_platform

    fnuz = current_platform.is_fp8_fnuz()

    def source(side: str, cache: torch.Tensor, fp8: str) -> KVSource:
        ragged = lists.get(f"{side}_ragged_indices"), lists.get(f"{side}_ragged_indptr")
        return _source(page_rows(cache, fp8), ragged, lists.get(f"{side}_indices"), lists.get(f"{side}_lens"))

    window = source("swa", swa_k_cache, "fp8_e4m3fnuz" if fnuz else "fp8_e4m3fn")
    extra = None if swa_only or kv_cache is None else source("topk", kv_cache, "fp8_e4m3fn")
    sink = None if attn_sink is None else attn_sink.detach()[: q.shape[1]].contiguous()
    attend_to_rows(q, window, extra, attn_sink=sink, sm_scale=scale, out=output)
    return 0


def patch() -> Callable[[], None]:
    """Lets narrowkv's kernel stand in for vLLM's in decode steps of DeepSeek V4 and V4.1 on ROCm.

    Leave `VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA` off: with it vLLM does not call the function. Calls whose
    output is to be MXFP8, and pages that narrowkv does not read, stay with vLLM. So do prefills, which widen
    the rows of a chunk first, each in its own FP8 kind.

    Returns:
        A function that puts vLLM's back.

    Raises:
        ImportError: vLLM is not installed, or is a version that this does not fit.
    """
    put_back: list[tuple[Any, Any]] = []
    with adapting("vllm"):
        places: list[Any] = [importlib.import_module(path) for path in _PLACES]
    for module in places:
        put_back.append((module, module.rocm_sparse_attn_decode))
        module.rocm_sparse_attn_decode = _standing_in(module.rocm_sparse_attn_decode)

    def undo() -> None:
        for module, theirs in reversed(put_back):
            module.rocm_sparse_attn_decode = theirs

    return undo


def _standing_in(theirs: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(theirs)
    def call(**kwargs: Any) -> int:
        caches = [kwargs["swa_k_cache"]] + ([] if kwargs["swa_only"] else [kwargs["kv_cache"]])
        if kwargs.get("output_mxfp8") is None and all(cache.shape[-1] in LAYOUTS for cache in caches):
            return rocm_sparse_attn_decode(**kwargs)
        return theirs(**kwargs)

    return call
