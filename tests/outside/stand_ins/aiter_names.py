"""narrowkv under the names that AITER's tests import; their helpers come from AITER's folder as they are."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from stand_ins.modules import add_module

from narrowkv.engines import aiter
from narrowkv.quant import hadamard
from narrowkv.sage import sage_attention

__all__ = ["install"]

_DTYPES = SimpleNamespace(
    fp16=torch.float16, bf16=torch.bfloat16, fp32=torch.float32, fp8=torch.float8_e4m3fn, i8=torch.int8,
    i32=torch.int32, u8=torch.uint8,
)  # fmt: skip

_BLOCKS = {"BLOCK_M": 128, "BLOCK_N": 64}  # queries and keys of a block, which tests of block masks ask for


def fav3_sage_wrapper_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None,
    causal: bool = False, *, return_lse: bool = False, layout: str = "bshd", smooth_k: bool = True,
    q_smooth: bool = False, hadamard_rotation: bool = False, BLOCK_R: int | None = None,
    block_lut: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """AITER's Sage attention: Q and K in int8, V in FP8; lse is `[batch, heads, tokens]`.

    `block_lut` is what `block_attn_mask_to_ragged_lut` returned here: the mask itself.
    """
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if hadamard_rotation:
        q, k = (hadamard(x.float(), BLOCK_R).to(x.dtype) for x in (q, k))
    o, lse = sage_attention(
        q, k, v, causal="bottom_right" if causal else None, sm_scale=softmax_scale, smooth_k=smooth_k,
        smooth_q=q_smooth, return_lse=True, block_mask=block_lut,
        block_sizes=None if block_lut is None else tuple(_BLOCKS.values()),
    )  # fmt: skip
    if layout == "bhsd":
        o = o.transpose(1, 2)
    return (o, lse.transpose(1, 2)) if return_lse else o


def block_attn_mask_to_ragged_lut(mask: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
    """The block mask with heads: narrowkv takes the mask where AITER takes lists of blocks."""
    return mask if mask.dim() == 4 else mask[:, None].expand(-1, num_heads, -1, -1)


def _not_there(name: str) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} is not narrowkv's: the test must be left out")

    return call


def _once(**_: Any) -> Any:
    """In place of `perftest`: one call, and no time."""
    return lambda function: lambda *args, **options: (function(*args, **options), 0.0)


def _strictly(check: Any) -> Any:
    """`checkAllclose` only logs a failure: too many unequal elements fail the test here."""

    def call(
        a: torch.Tensor, b: torch.Tensor, *args: Any, tol_err_ratio: float = 0.05, **options: Any
    ) -> Any:
        share = check(a, b, *args, tol_err_ratio=tol_err_ratio, **options)
        assert share <= tol_err_ratio, f"{share:.1%} of the elements differ"
        return share

    return call


def install(folder: Path, suite: Any) -> None:
    """Adds the modules; `suite.arch` is the architecture that tests are told."""
    home = folder / "aiter" / "aiter"
    add_module("aiter", home, logger=logging.getLogger("aiter"), dtypes=_DTYPES, pertoken_quant=None)
    add_module("aiter.ops")
    add_module(
        "aiter.ops.pa_sparse_prefill_opus",
        pa_sparse_prefill_fp8_opus=aiter.pa_sparse_prefill_fp8_opus,
        pa_sparse_prefill_opus=aiter.pa_sparse_prefill_opus,
    )
    attention = "aiter.ops.triton.attention."
    add_module(attention + "fp8_mqa_logits", fp8_mqa_logits=aiter.fp8_mqa_logits)
    paged = {"deepgemm_fp8_paged_mqa_logits": aiter.deepgemm_fp8_paged_mqa_logits}
    add_module(attention + "pa_mqa_logits", **paged)
    types = {"get_fp8_dtypes": lambda: (torch.float8_e5m2, torch.float8_e4m3fn)}
    add_module("aiter.ops.triton.utils.types", **types)
    add_module(attention + "pa_decode_sparse", pa_decode_sparse=aiter.pa_decode_sparse)
    add_module(attention + "pa_prefill_sparse", pa_prefill_sparse=aiter.pa_prefill_sparse)
    add_module(
        attention + "fav3_sage",
        fav3_sage_wrapper_func=fav3_sage_wrapper_func,
        get_sage_fwd_configs=_BLOCKS.copy,
    )
    names = "fav3_sage_mxfp4_wrapper", "get_sage_fwd_configs_mxfp4"
    add_module(attention + "fav3_sage_attention_mxfp4_wrapper", **{name: _not_there(name) for name in names})
    add_module(attention + "utils", block_attn_mask_to_ragged_lut=block_attn_mask_to_ragged_lut)
    name = "create_hadamard_matrix"
    add_module("aiter.ops.triton.quant.sage_attention_quant_wrappers", **{name: _not_there(name)})
    arch = SimpleNamespace(get_arch=lambda: suite.arch)
    add_module("aiter.ops.triton.utils._triton", arch_info=arch)
    # The packages of the tests, without what their `__init__` imports.
    tests = folder / "aiter" / "op_tests"
    for top, place in (("op_tests", tests), ("op_tests.triton_tests", tests / "triton_tests")):
        add_module(top, place)
    add_module("op_tests.triton_tests.attention", tests / "triton_tests" / "attention")
    add_module("triton_tests", tests / "triton_tests")
    add_module("triton_tests.attention", tests / "triton_tests" / "attention")
    torch.ops.aiter.paged_attention_ragged = aiter.paged_attention_ragged
    if (home / "test_common.py").exists():
        common = importlib.import_module("aiter.test_common")
        common.perftest, common.checkAllclose = _once, _strictly(common.checkAllclose)
