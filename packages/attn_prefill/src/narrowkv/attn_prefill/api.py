"""Public operations of attn_prefill: check, choose, allocate, launch. No mathematics."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_decode.arguments import (
    OUT_DTYPES,
    descale_pointers,
    output_tensor,
    packed_route,
    side_of,
    table_pointers,
)
from narrowkv.attn_decode.config import parts_of, widen_route
from narrowkv.attn_decode.kernels import Workspace
from narrowkv.attn_prefill.config import SCRATCH_BLOCK, fp8_route, triton_fp8
from narrowkv.attn_prefill.kernels.dense import _dense_prefill_kernel, _widen_kernel
from narrowkv.attn_prefill.kernels.fused import _fused_prefill_kernel
from narrowkv.attn_prefill.kernels.rows import Outputs, Queries
from narrowkv.attn_prefill.plan import PrefillPlan, check_plan, per_key, plan_prefill, prefill_shape
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant.device import widening_exponent
from narrowkv.quant.errors import (
    check_descale_float,
    check_dtype,
    check_finite_float,
    check_last_dim_contiguous,
    check_no_grad,
    check_same_device,
    check_shape,
)
from narrowkv.quant.formats import get_format
from narrowkv.quant.launch import active_target, launch

_LOG2E = math.log2(math.e)
_TRITON_16_BIT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# P is at most one; in FP8 it is brought near the largest number that each format has.
_P_SCALE = {"fp8_e4m3fn": 256.0, "fp8_e4m3fnuz": 128.0}


def batch_prefill(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    q_descale: float | torch.Tensor = 1.0,
    out: torch.Tensor | torch.dtype | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    window_right: int = -1,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    plan: PrefillPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of ragged queries over a paged KV cache, which already holds their own keys and values.

    Args:
        q: `[tokens, num_qo_heads, head_dim]`, all sequences' query tokens one after the other, last dimension
            contiguous. bf16 or fp16 over any cache, with no quantisation of Q; or FP8 over a cache of the same
            FP8 format, which runs on FP8 matrix units.
        cache: keys and values; any layout, page size and format.
        page_table: which pages each sequence occupies, and its length with the new tokens in it.
        cu_seqlens_q: `[batch + 1]` int32, where each sequence's query tokens begin. Row i of a sequence stands
            at position `seq_len - q_len + i`: the mask is aligned bottom-right, and rows before the first key
            attend to nothing.
        causal: a row attends to keys up to its own position.
        sm_scale: softmax scale; default `head_dim ** -0.5`.
        q_descale: FP8 queries: a float or an fp32 tensor `[1]`.
        out: where to write, `[tokens, num_qo_heads, head_dim]`, or the dtype of a new output; default q's, and
            bf16 for FP8 queries.
        logits_soft_cap: `c * tanh(logits / c)` when positive.
        window_left, window_right: how many keys before and after itself a row attends to; -1 for all.
            `causal` is the same as `window_right=0`.
        sinks: `[num_qo_heads]`, a logit per head with value 0: it enters the denominator of `o`.
        return_lse: also return the log-sum-exp.
        plan: from `plan_prefill`, which can also be told bounds that shapes do not show; without one, a plan
            is made for the call. With one there is no allocation but the outputs, and no host synchronisation
            either way, so the call can be captured in a graph.

    Returns:
        `o`, or `(o, lse)`; `lse` is `[tokens, num_qo_heads]` fp32, natural log of the scaled logits' sum
        **without the sink**. A row that attends to nothing has o = 0 and lse = -inf. Rows that no sequence
        owns (past the end of `cu_seqlens_q`) are not written.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, what was expected and what came.
        UnsupportedError: for formats that no kernel serves on this target, and why.

    Source: FlashAttention-2's loop (Dao, 2023) over rows packed from the heads of a group.

    Example:
        >>> o = batch_prefill(q, cache, table, cu_seqlens_q, causal=True)                 # doctest: +SKIP
        >>> o, lse = batch_prefill(q, cache, table, cu_seqlens_q, return_lse=True)        # doctest: +SKIP
    """
    shape = prefill_shape(q, cache, page_table, cu_seqlens_q)
    target = active_target(q.device)
    if plan is None:
        plan = plan_prefill(q, cache, page_table, cu_seqlens_q)
    else:
        check_plan(plan, shape, q, cache, target)
    scale = q.shape[2] ** -0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    soft_cap = check_soft_cap(logits_soft_cap)
    check_window("window_left", window_left)
    check_window("window_right", window_right)
    if causal:
        if window_right > 0:
            raise ValueError(f"window_right must be -1 or 0 with causal=True, got {window_right}")
        window_right = 0
    check_sinks(q, sinks)
    scale, descale = fold_q_descale(q, q_descale, scale)
    check_no_grad(q=q, k=cache.k, v=cache.v, sinks=sinks)
    o = output_for(q, out, cache)
    if plan.decode is not None:
        return paged_decode(
            q,
            cache,
            page_table,
            sm_scale=scale,
            out=o,
            logits_soft_cap=soft_cap,
            window_left=window_left,
            sinks=sinks,
            return_lse=return_lse,
            plan=plan.decode,
        )
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    call = PrefillCall(plan, cache, page_table, scale, soft_cap, window_left, window_right)
    queries = Queries(q, q.stride(0), q.stride(1), cu_seqlens_q, q.shape[0], descale)
    outputs = Outputs(o, o.stride(0), o.stride(1), lse, 0 if lse is None else lse.stride(0), sinks)
    if shape.num_tokens:
        (call.dense if plan.config.kernel == "dense" else call.fused)(queries, outputs)
    return o if lse is None else (o, lse)


def check_soft_cap(value: float) -> float:
    """Refuses a negative or non-finite cap."""
    soft_cap = check_finite_float("logits_soft_cap", value)
    if soft_cap < 0:
        raise ValueError(f"logits_soft_cap must be 0 (off) or positive, got {value}")
    return soft_cap


def check_window(name: str, value: int) -> None:
    """Refuses what is no number of tokens."""
    if not isinstance(value, int) or value < -1:
        raise ValueError(f"{name} must be -1 (no window) or a number of tokens, got {value!r}")


def check_sinks(q: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Refuses sinks of another shape, dtype or device."""
    if sinks is not None:
        check_shape("sinks", sinks, (q.shape[1],))
        check_last_dim_contiguous("sinks", sinks)
        check_dtype("sinks", sinks, OUT_DTYPES)
        check_same_device(q=q, sinks=sinks)


def fold_q_descale(
    q: torch.Tensor, q_descale: float | torch.Tensor, scale: float
) -> tuple[float, torch.Tensor | None]:
    """The softmax scale with a float descale in it, and a descale that is on the device."""
    if isinstance(q_descale, torch.Tensor):
        check_dtype("q_descale", q_descale, (torch.float32,))
        check_shape("q_descale", q_descale, (1,))
        check_same_device(q=q, q_descale=q_descale)
    else:
        check_descale_float("q_descale", q_descale)
    if get_format(q.dtype).kind != "fp8":
        if isinstance(q_descale, torch.Tensor) or q_descale != 1.0:
            raise ValueError(f"q_descale must be 1.0 for a query in {q.dtype}, got {q_descale}")
        return scale, None
    return (scale, q_descale) if isinstance(q_descale, torch.Tensor) else (scale * q_descale, None)


def output_for(
    q: torch.Tensor, out: torch.Tensor | torch.dtype | None, cache: PagedKVCache
) -> torch.Tensor:
    """The output tensor: the caller's, or a new one."""
    if isinstance(out, torch.Tensor):
        return output_tensor(q, out, None, cache)
    default = q.dtype if get_format(q.dtype).kind == "float" else torch.bfloat16
    return output_tensor(q, None, default if out is None else out, cache)


class PrefillCall:
    """The launches of one call: cache, table and options as kernel arguments."""

    def __init__(
        self,
        plan: PrefillPlan,
        cache: PagedKVCache,
        page_table: PageTable,
        scale: float,
        soft_cap: float,
        window_left: int,
        window_right: int,
    ) -> None:
        self.plan = plan
        self.cache = cache
        self.table = table_pointers(page_table, cache)
        self.scale = scale
        self.soft_cap = soft_cap
        self.k_mode, self.k_factor, self.k_descale = descale_pointers(cache.k_descale, cache.k_granularity)
        self.v_mode, self.v_factor, self.v_descale = descale_pointers(cache.v_descale, cache.v_granularity)
        shape = plan.shape
        self.constants: dict[str, Any] = {
            "NUM_KV_HEADS": shape.num_kv_heads,
            "GQA_RATIO": shape.gqa_ratio,
            "HEAD_DIM": shape.head_dim,
            "PAGE_SIZE": shape.page_size,
            "RAGGED": page_table.kind == "ragged",
            "BLOCK_D": 1 << (shape.head_dim - 1).bit_length(),
        }
        self.batch_constants = {"BLOCK_B": max(2, 1 << (shape.batch - 1).bit_length())}
        self.mask = {"WINDOW_LEFT": window_left, "WINDOW_RIGHT": window_right}

    def cache_arguments(self, compute: Any) -> tuple[Any, Any, dict[str, Any], int, int]:
        """K and V pointers, the constants that describe them, and the powers of two that widening leaves out."""
        cache, target = self.cache, self.plan.target
        formats = cache.format.k, cache.format.v
        half = compute == tl.float16
        fp8 = self.plan.config.fp8
        sides = []
        for stored, strides, name, is_key in (
            (cache.k, cache.k_strides, formats[0], True),
            (cache.v, cache.v_strides, formats[1], False),
        ):
            route = (
                widen_route(target, name, negative_zero_free=cache.negative_zero_free)
                if fp8 is None
                else fp8_route(fp8, name)
            )
            parts = 1 if fp8 is not None else parts_of(target, name, is_key=is_key)
            sides.append(side_of(stored, strides, name, route, parts))
        k, v = sides
        constants = {
            "K_VEC": cache.k_strides.vec,
            "V_VEC": cache.v_strides.vec,
            "WIDE_ADDRESS": cache.needs_64_bit_addresses,
            "K_FORMAT": formats[0],
            "V_FORMAT": formats[1],
            "K_ROUTE": packed_route(target, formats[0], k, half),
            "V_ROUTE": packed_route(target, formats[1], v, half),
            "K_PARTS": k.parts,
            "V_PARTS": v.parts,
            "K_DESCALE": self.k_mode,
            "V_DESCALE": self.v_mode,
        }
        # The scales of groups are applied while widening, and take the power of two along.
        powers = [
            0 if mode == "e8m0_group" else widening_exponent(name, side.route)
            for mode, name, side in zip((self.k_mode, self.v_mode), formats, sides, strict=True)
        ]
        return k.pointers, v.pointers, constants, powers[0], powers[1]

    def scales(self, k_power: int, v_power: int) -> tuple[float, float, bool]:
        """Scale of the logits, scale of the output, and whether the first can be folded into the softmax."""
        base = 1.0 if self.soft_cap > 0 else _LOG2E
        qk_scale = self.scale * self.k_factor * 2.0**k_power * base
        folded = qk_scale > 0 and self.soft_cap == 0 and not per_key(self.cache)[0]
        return qk_scale, self.v_factor * 2.0**v_power, folded

    def options(self, queries: Queries, outputs: Outputs, folded: bool) -> dict[str, Any]:
        """Constants that both kernels share."""
        config = self.plan.config
        return {
            **self.constants,
            **self.mask,
            "K_DESCALE": self.k_mode,
            "V_DESCALE": self.v_mode,
            "HAS_SOFT_CAP": self.soft_cap > 0,
            "HAS_SINKS": outputs.sinks is not None,
            "WRITE_LSE": outputs.lse is not None,
            "FOLDED": folded,
            "SPLIT": config.num_splits > 1,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
        }

    def _grid(self) -> tuple[int, int, int]:
        shape, config = self.plan.shape, self.plan.config
        return shape.row_tiles(config.block_m) * shape.num_kv_heads, 1, config.num_splits

    def _workspace(self) -> Workspace:
        return self.plan.workspace if self.plan.workspace is not None else Workspace(None, None, None)

    def fused(self, queries: Queries, outputs: Outputs) -> None:
        """One launch: gather, widen and attend."""
        plan, config = self.plan, self.plan.config
        half = "bf16" not in (plan.k_format, plan.v_format)
        compute = tl.float16 if half else tl.bfloat16
        k, v, cache_constants, k_power, v_power = self.cache_arguments(compute)
        p_scale = 1.0
        if config.fp8 is not None:
            # Q's bytes are read as K's are, and lose the same power of two.
            k_power, p_scale = 2 * k_power, _P_SCALE[config.fp8]
            stored = queries.ptr
            if plan.k_format != config.fp8:
                queries = queries._replace(ptr=stored.view(torch.uint8))
        qk_scale, out_scale, folded = self.scales(k_power, v_power)
        launch(
            _fused_prefill_kernel,
            self._grid(),
            (
                queries, outputs, k, v, self.k_descale, self.v_descale, self.table, self._workspace(),
                qk_scale, out_scale / p_scale, self.soft_cap, plan.shape.batch, config.num_splits,
            ),
            {
                **cache_constants,
                **self.options(queries, outputs, folded),
                **self.batch_constants,
                "COMPUTE": compute,
                "SCALE_Q": half and plan.q_dtype == torch.bfloat16,
                "SPLIT_Q": not half and plan.q_dtype == torch.float16,
                "FP8": None if config.fp8 is None else getattr(tl, triton_fp8(config.fp8)),
                "CLEAN": self.cache.negative_zero_free,
                "P_SCALE": p_scale,
                "HAS_Q_DESCALE": queries.descale is not None,
            },
            config.options,
        )  # fmt: skip

    def dense(self, queries: Queries, outputs: Outputs) -> None:
        """Two launches: widen the cache into scratch, attend to the scratch."""
        plan, config, scratch = self.plan, self.plan.config, self.plan.scratch
        if scratch is None or plan.schedule is None:
            raise ValueError("plan must hold scratch for kernel 'dense', got none")
        k_dtype = scratch.k.dtype
        k, v, cache_constants, k_power, v_power = self.cache_arguments(tl.float16)
        qk_scale, out_scale, folded = self.scales(k_power, v_power)
        num_blocks, num_tiles = scratch.rows // SCRATCH_BLOCK, self._grid()[0] // plan.shape.num_kv_heads
        block_b = self.batch_constants["BLOCK_B"]
        block_i = max(1, min(32, 8192 // block_b))
        options = self.options(queries, outputs, folded)
        widen_constants = {
            name: options[name] for name in ("NUM_KV_HEADS", "GQA_RATIO", "HEAD_DIM", "PAGE_SIZE", "RAGGED")
        }
        launch(
            _widen_kernel,
            (num_blocks * plan.shape.num_kv_heads + -(-num_tiles // block_i),),
            (
                queries, k, v, self.k_descale, self.v_descale, self.table, scratch, plan.schedule,
                plan.shape.batch, num_blocks, num_tiles,
            ),
            {
                **widen_constants,
                **cache_constants,
                "K_TYPE": _TRITON_16_BIT[k_dtype],
                "CAUSAL": self.mask["WINDOW_RIGHT"] >= 0,
                "BLOCK_M": config.block_m,
                "BLOCK_D": options["BLOCK_D"],
                "BLOCK_N": SCRATCH_BLOCK,
                "BLOCK_B": block_b,
                "BLOCK_I": block_i,
            },
            config.widen_options,
        )  # fmt: skip
        launch(
            _dense_prefill_kernel,
            self._grid(),
            (
                queries, outputs, scratch, *self._descriptors(), self.k_descale, self.v_descale, self.table,
                plan.schedule, self._workspace(), qk_scale, out_scale, self.soft_cap, config.num_splits,
            ),
            {
                **options,
                "COMPUTE": _TRITON_16_BIT[k_dtype],
                "SCALE_Q": k_dtype == torch.float16 and plan.q_dtype == torch.bfloat16,
                "SPLIT_Q": k_dtype == torch.bfloat16 and plan.q_dtype == torch.float16,
                "V_IN_UNITS": scratch.v_unit is not None,
                "TMA": config.tma,
                "BLOCK_S": SCRATCH_BLOCK,
            },
            config.options,
        )  # fmt: skip

    def _descriptors(self) -> tuple[Any, Any]:
        """Tensor descriptors of the scratch, for targets that load by them."""
        config, scratch = self.plan.config, self.plan.scratch
        if not config.tma or scratch is None:
            return None, None
        from triton.tools.tensor_descriptor import TensorDescriptor

        head_dim = self.plan.shape.head_dim
        block = [config.block_n, self.constants["BLOCK_D"]]
        flat = (stored.view(-1, head_dim) for stored in (scratch.k, scratch.v))
        k, v = (TensorDescriptor(t, list(t.shape), list(t.stride()), block) for t in flat)
        return k, v
