"""One call of every family of kernels: small enough to trace, with a loop of many passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from narrowkv.paged_cache import append
from narrowkv.sage import plan_sage
from narrowkv.testing.cases import Case
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import QUERIES, PrefillCase
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.cases.sparse import SparseCase

__all__ = ["HBM_SHARES", "Family", "call_of", "families"]

_DECODE: dict[str, Any] = {"lens": (1024,), "num_kv_heads": 1, "split": "none"}
_PREFILL: dict[str, Any] = {
    "q_lens": (256,), "lens": (1024,), "num_kv_heads": 1, "gqa_ratio": 4, "clean": True,
}  # fmt: skip
_SPARSE: dict[str, Any] = {
    "num_qo_heads": 64,
    "prefix_lens": (512,) * 320,
}  # none is split
# Share of the loaded bytes that HBM serves. Each sequence of a decode has its own keys; query tiles of a
# prefill read the same keys, which stay in L2; tokens of a sparse call read many of the same rows.
HBM_SHARES = {"decode": 1.0, "prefill": 0.1, "sparse": 0.5, "sage": 0.1}
_EVERY_BYTE, _FEW, _HALF = HBM_SHARES["decode"], HBM_SHARES["prefill"], HBM_SHARES["sparse"]


@dataclass(frozen=True)
class Family:
    """A call that represents a family of kernels.

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
    decodes = {
        "decode, E4M3FN": DecodeCase(clean=True, **_DECODE),
        "decode, E4M3FNUZ": DecodeCase(format="fp8_e4m3fnuz", **_DECODE),
        "decode, bf16": DecodeCase(format="bf16", **_DECODE),
    }
    prefills = {
        "dense prefill": PrefillCase(kernel="dense", **_PREFILL),
        "fused prefill": PrefillCase(kernel="fused", **_PREFILL),
        "prefill, FP8 queries": PrefillCase(kernel="fused", q_dtype=QUERIES[fp8], format=fp8, **_PREFILL),
        "append, then attend": PrefillCase(operation="append", kernel="append_then_attend", **_PREFILL),
        "append, fused": PrefillCase(operation="append", kernel="fused", **_PREFILL),
    }
    sparse = {
        "sparse, fused": SparseCase(**_SPARSE),
        "sparse, 16-bit rows": SparseCase(mode="16bit", layout="bf16", **_SPARSE),
        "sparse, FP8 query": SparseCase(q="fp8", **_SPARSE),
        "sparse decode": SparseCase(mode="decode", num_qo_heads=64, prefix_lens=(512, 512)),
    }
    return {
        **{name: Family(call_of(case), _EVERY_BYTE, "decode") for name, case in decodes.items()},
        **{name: Family(call_of(case), _FEW, "prefill") for name, case in prefills.items()},
        "append to the cache": Family(_append, _EVERY_BYTE, "prefill"),
        **{name: Family(call_of(case), _HALF, "sparse") for name, case in sparse.items()},
        "Sage, int8": Family(partial(_sage, "int8"), _FEW, "sage"),
        "Sage, FP8": Family(partial(_sage, "fp8"), _FEW, "sage"),
    }


def call_of(case: Case) -> Callable[[], object]:
    """A function that makes the case's tensors and calls its operation."""
    return lambda: case.inputs().call()


def _append() -> None:
    inputs = PrefillCase(operation="append", **_PREFILL).inputs()
    k_new, v_new = inputs.new
    append(inputs.cache, k_new, v_new, torch.arange(k_new.shape[0], dtype=torch.int32))


def _sage(qk_dtype: str) -> object:
    q, k, v, *_ = SageCase.small(q_lens=(256,), k_lens=(1024,), head_dim=128, gqa_ratio=1).build()
    plan = plan_sage(q, k, qk_dtype=qk_dtype)
    return plan.attend(q, plan.quantize_kv(k, v))
