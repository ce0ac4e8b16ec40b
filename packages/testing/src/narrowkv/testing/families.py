"""One call of every family of kernels: small enough to trace, with a loop of many passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_decode.workloads import DecodeWorkload
from narrowkv.attn_prefill import batch_prefill, plan_append, plan_prefill, prefill_append
from narrowkv.attn_prefill.workloads import AppendWorkload, PrefillWorkload
from narrowkv.paged_cache import CacheFormat, append
from narrowkv.quant.formats import get_format
from narrowkv.sage import plan_sage
from narrowkv.sage.workloads import SageWorkload
from narrowkv.sparse_fp8 import DSV4Rows, sparse_decode, sparse_prefill, sparse_prefill_fp8
from narrowkv.sparse_fp8.workloads import SparseWorkload

__all__ = ["Family", "families"]

_SIZES: dict[str, Any] = {"q_lens": (256,), "num_kv_heads": 1, "gqa_ratio": 4, "clean": True}
_KEYS = 1024
# Share of the loaded bytes that HBM serves. Each sequence of a decode has its own keys; query tiles of a
# prefill read the same keys, which stay in L2; tokens of a sparse call read many of the same rows.
_EVERY_BYTE, _FEW, _HALF = 1.0, 0.1, 0.5


@dataclass(frozen=True)
class Family:
    """A call that stands for a family of kernels.

    Attributes:
        call: makes it.
        hbm_share: see `narrowkv.testing.model.ModelExecutor`.
        operation: "decode", "prefill", "sparse" or "sage".
    """

    call: Callable[[], object]
    hbm_share: float | None
    operation: str = ""


def families(target: str) -> dict[str, Family]:
    """The families of a target, by name.

    Example:
        >>> list(families("gfx942"))[:2]
        ['decode, E4M3FN', 'decode, E4M3FNUZ']
    """
    fp8 = "fp8_e4m3fnuz" if target == "gfx942" else "fp8_e4m3fn"
    fp8_queries = {"q_dtype": get_format(fp8).torch_dtype, "format": fp8}
    return {
        "decode, E4M3FN": Family(partial(_decode, "fp8_e4m3fn", clean=True), _EVERY_BYTE, "decode"),
        "decode, E4M3FNUZ": Family(partial(_decode, "fp8_e4m3fnuz"), _EVERY_BYTE, "decode"),
        "decode, bf16": Family(partial(_decode, "bf16"), _EVERY_BYTE, "decode"),
        "dense prefill": Family(partial(_prefill, "dense"), _FEW, "prefill"),
        "fused prefill": Family(partial(_prefill, "fused"), _FEW, "prefill"),
        "prefill, FP8 queries": Family(partial(_prefill, "fused", **fp8_queries), _FEW, "prefill"),
        "append, then attend": Family(partial(_prefill_append, "append_then_attend"), _FEW, "prefill"),
        "append, fused": Family(partial(_prefill_append, "fused"), _FEW, "prefill"),
        "append to the cache": Family(_append, _EVERY_BYTE, "prefill"),
        "sparse, fused": Family(partial(_sparse, "packed584"), _HALF, "sparse"),
        "sparse, 16-bit rows": Family(partial(_sparse, "bf16"), _HALF, "sparse"),
        "sparse, FP8 query": Family(partial(_sparse, "packed584", fp8_query=True), _HALF, "sparse"),
        "sparse decode": Family(_sparse_decode, _HALF, "sparse"),
        "Sage, int8": Family(partial(_sage, "int8"), _FEW, "sage"),
        "Sage, FP8": Family(partial(_sage, "fp8"), _FEW, "sage"),
    }


def _decode(name: str, clean: bool = False) -> object:
    paged = DecodeWorkload(
        lens=(_KEYS,), num_kv_heads=1, gqa_ratio=12, head_dim=128, format=CacheFormat(name, name), clean=clean
    ).build()
    return paged_decode(*paged, plan=plan_decode(*paged, split="none"))


def _prefill(kernel: str, **options: Any) -> object:
    paged = PrefillWorkload(lens=(_KEYS,), **_SIZES, **options).build()
    return batch_prefill(*paged, plan=plan_prefill(*paged, kernel=kernel))


def _chunk() -> tuple[Any, ...]:
    """q, k_new, v_new, cache, page table and cu_seqlens_q."""
    return AppendWorkload(lens=(_KEYS - 256,), **_SIZES).build_append()[:6]


def _prefill_append(kernel: str) -> object:
    chunk = _chunk()
    return prefill_append(*chunk, plan=plan_append(chunk[0], *chunk[3:], kernel=kernel))


def _append() -> None:
    _, k_new, v_new, cache, *_ = _chunk()
    append(cache, k_new, v_new, torch.arange(k_new.shape[0], dtype=torch.int32))


def _sparse(layout: str, fp8_query: bool = False) -> object:
    tokens = 320  # so many that none is split
    inputs = SparseWorkload(prefix_lens=(512,) * tokens, num_qo_heads=64, layout=layout).build()
    if layout == "bf16":
        return sparse_prefill(inputs.q, inputs.prefix)
    q = DSV4Rows.quantize(inputs.q, layout=layout) if fp8_query else inputs.q
    return sparse_prefill_fp8(q, inputs.prefix, mode="fused", num_qo_heads=64)


def _sparse_decode() -> object:
    inputs = SparseWorkload(prefix_lens=(512, 512), num_qo_heads=64, layout="packed584").build()
    return sparse_decode(inputs.q, inputs.prefix, num_splits=3, num_qo_heads=64)


def _sage(qk_dtype: str) -> object:
    q, k, v, *_ = SageWorkload(q_lens=(256,), k_lens=(_KEYS,), head_dim=128, gqa_ratio=1).build()
    plan = plan_sage(q, k, qk_dtype=qk_dtype)
    return plan.attend(q, plan.quantize_kv(k, v))
