"""Attention of vLLM's Triton backend, from two of vLLM's files where vLLM itself is not installed."""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from narrowkv.paged_cache import PagedKVCache, PageTable

__all__ = ["FILES", "UnifiedAttention"]

FILES = ("triton_attention_helpers", "triton_unified_attention")  # of vllm/v1/attention/ops
_OPS = "vllm.v1.attention.ops"
_SEGMENTS, _PROGRAMS = 16, 128  # of vLLM's backend: parts of a sequence, and programs below which it has them


class KVQuantMode(enum.IntEnum):
    """What vLLM's files ask of its enumeration."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def _load(folder: Path) -> Callable[..., None]:
    """`unified_attention` of vLLM's files, beside stand-ins for the modules that they import."""
    platform = SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda family: False
    )
    values: dict[str, dict[str, Any]] = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KVQuantMode},
        _OPS: {},
    }
    for name, own in values.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            module = sys.modules.setdefault(package, ModuleType(package))
            module.__path__ = []
        vars(sys.modules[name]).update(own)
    for file in FILES:
        spec = importlib.util.spec_from_file_location(f"{_OPS}.{file}", folder / f"{file}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.unified_attention  # type: ignore[no-any-return]


class UnifiedAttention:
    """vLLM's `unified_attention` over a paged cache, called as `TritonAttentionImpl.forward` calls it.

    Args:
        folder: with `FILES`; None if vLLM is installed.
        q: `[tokens, num_qo_heads, head_dim]`, of the largest step.
        cache: FP8 E4M3, pages of NHD.
    """

    def __init__(self, folder: str | None, q: torch.Tensor, cache: PagedKVCache) -> None:
        if folder is None:
            from vllm.v1.attention.ops.triton_unified_attention import unified_attention

            self._attend = unified_attention
        else:
            self._attend = _load(Path(folder))
        device, heads = q.device, q.shape[1]
        self.cache, self.scale = cache, q.shape[2] ** -0.5
        self.k, self.v = (x.view(torch.float8_e4m3fn) for x in (cache.k, cache.v))
        self.k_scale, self.v_scale = (
            x if isinstance(x, torch.Tensor) else torch.tensor([x], device=device)
            for x in (cache.k_descale, cache.v_descale)
        )
        self.most_in_segments = _PROGRAMS // cache.num_kv_heads
        shape = (self.most_in_segments, heads, _SEGMENTS)
        self.segments = {
            "softmax_segm_output": torch.empty(*shape, q.shape[2], device=device),
            "softmax_segm_max": torch.empty(shape, device=device),
            "softmax_segm_expsum": torch.empty(shape, device=device),
        }

    def __call__(
        self, q: torch.Tensor, out: torch.Tensor, table: PageTable, starts: torch.Tensor, max_q_len: int,
        max_seq_len: int,
    ) -> None:  # fmt: skip
        """Causal attention of a step, into `out`."""
        shape = (table.batch_size, self.cache.num_kv_heads)
        self._attend(
            q=q, k=self.k, v=self.v, out=out, cu_seqlens_q=starts, max_seqlen_q=max_q_len,
            seqused_k=table.seq_lens, max_seqlen_k=max_seq_len, softmax_scale=self.scale, causal=True,
            window_size=(-1, -1), block_table=table.page_ids, softcap=0.0, q_descale=None,
            k_descale=self.k_scale.expand(shape), v_descale=self.v_scale.expand(shape),
            seq_threshold_3D=self.most_in_segments, num_par_softmax_segments=_SEGMENTS,
            kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, **self.segments,
        )  # fmt: skip
