"""How checked arguments become launches: which kernels, with which pointers and constants."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl

from narrowkv.attn_decode.config import parts_of
from narrowkv.attn_decode.kernels import Workspace
from narrowkv.attn_prefill.config import (
    PrefillConfig,
    fp8_route,
    produce_options,
    triton_fp8,
    units_of,
    widen_options,
)
from narrowkv.attn_prefill.kernels.append import _prefill_append_kernel
from narrowkv.attn_prefill.kernels.dense import (
    BF16_VALUE_EXPONENT,
    Scratch,
    _dense_prefill_kernel,
    _widen_kernel,
)
from narrowkv.attn_prefill.kernels.fused import _fused_prefill_kernel
from narrowkv.attn_prefill.kernels.produce import _produce_kernel
from narrowkv.attn_prefill.kernels.rows import Outputs, Queries
from narrowkv.attn_prefill.plan import PrefillPlan, append_blocks, per_key
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
from narrowkv.paged_cache.append import (
    cache_pointers,
    new_tokens,
    rope_constants,
    rope_pointers,
    storage_constants,
)
from narrowkv.paged_cache.pointers import descale_pointers, packed_route, side_of, table_pointers
from narrowkv.quant.device import widen_route, widening_exponent
from narrowkv.runtime.launch import is_compiled, launch

_LOG2E = math.log2(math.e)
_TRITON_16_BIT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_QUANTISED_TOKENS = 32  # new tokens of a head that one program of a pipelined append quantises
_PLACED_TILES = 8  # tiles that one program puts in their order
# P is at most one; in FP8 it is brought near the largest number that each format has.
_P_SCALE = {"fp8_e4m3fn": 256.0, "fp8_e4m3fnuz": 128.0}


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
        table = table_pointers(page_table, cache)
        ragged = page_table.kind == "ragged"
        self.table_sizes = 0 if ragged else table.row, table.num_ids, table.max_pages
        self.table = table._replace(row=table.row if ragged else None, num_ids=None, max_pages=None)
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
            "RAGGED": ragged,
            "BLOCK_D": 1 << (shape.head_dim - 1).bit_length(),
        }
        self.vendor = {"NVIDIA": plan.target.vendor == "nvidia"}
        self.mask = {"WINDOW_LEFT": window_left, "WINDOW_RIGHT": window_right}

    def cache_arguments(
        self, compute: Any, *, to_scratch: bool = False
    ) -> tuple[Any, Any, dict[str, Any], int, int]:
        """K and V pointers, constants that describe them, and the powers of two that widening leaves out.

        to_scratch: they are widened by `widen_block`.
        """
        cache, target = self.cache, self.plan.target
        formats = cache.format.k, cache.format.v
        half = compute == tl.float16
        fp8 = self.plan.config.fp8
        sides = []
        for stored, strides, name, is_key in (
            (cache.k, cache.k_strides, formats[0], True),
            (cache.v, cache.v_strides, formats[1], False),
        ):
            route = widen_route(target, name) if fp8 is None else fp8_route(fp8, name)
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
        if to_scratch and formats[1] == "bf16":
            powers[1] = -BF16_VALUE_EXPONENT.value
        return k.pointers, v.pointers, constants, powers[0], powers[1]

    def acc_parts(self, v_parts: int) -> int:
        """In how many parts V is multiplied.

        On sm90 under Triton 3.6 a product 32 columns wide next to a wider one comes out wrong (relative L1
        0.2 to 0.6).
        """
        narrow = self.constants["BLOCK_D"] < 64 * v_parts
        return 1 if narrow and self.plan.target.is_nvidia else v_parts

    @property
    def logit_scale(self) -> float:
        """Of a logit of unquantised keys, in base 2, or natural for a soft cap."""
        return self.scale * (1.0 if self.soft_cap > 0 else _LOG2E)

    def scales(self, k_power: int, v_power: int) -> tuple[float, float, bool]:
        """Scale of the logits, scale of the output, and whether the first can be folded into the softmax."""
        qk_scale = self.logit_scale * self.k_factor * 2.0**k_power
        folded = qk_scale > 0 and self.soft_cap == 0 and not per_key(self.cache)[0]
        return qk_scale, self.v_factor * 2.0**v_power, folded

    def options(self, outputs: Outputs, folded: bool, config: PrefillConfig | None = None) -> dict[str, Any]:
        """Constants that all kernels share."""
        config = config or self.plan.config
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
            "SETTLE": self.plan.target.is_amd and is_compiled(self.cache.k),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
        }

    def _queries(self, queries: Queries) -> tuple[Queries, tuple[int, int, int]]:
        """Q as a kernel argument, and the numbers of sequences, tokens, and tokens of a sequence at most."""
        sizes = self.plan.shape.batch, queries.num_tokens, queries.max_len
        return queries._replace(num_tokens=None, max_len=None), sizes

    def _scratch(self) -> tuple[Scratch | None, tuple[int, int]]:
        """The scratch as a kernel argument, and its bounds of keys and blocks."""
        scratch = self.plan.scratch
        if scratch is None:
            return None, (0, 0)
        return scratch._replace(max_keys=None, key_blocks=None), (scratch.max_keys, scratch.key_blocks)

    def _grid(self, config: PrefillConfig | None = None) -> tuple[int, int, int]:
        shape, config = self.plan.shape, config or self.plan.config
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
        queries, sizes = self._queries(queries)
        launch(
            _fused_prefill_kernel,
            self._grid(),
            (
                queries, outputs, k, v, self.k_descale, self.v_descale, self.table, self._workspace(),
                qk_scale, out_scale / p_scale, self.soft_cap, *sizes, *self.table_sizes, config.num_splits,
            ),
            {
                **cache_constants,
                **self.options(outputs, folded),
                **self.vendor,
                "COMPUTE": compute,
                "SCALE_Q": half and plan.q_dtype == torch.bfloat16,
                "SPLIT_Q": not half and plan.q_dtype == torch.float16,
                "FP8": None if config.fp8 is None else getattr(tl, triton_fp8(config.fp8)),
                "CLEAN": self.cache.negative_zero_free,
                "P_SCALE": p_scale,
                "ACC_PARTS": self.acc_parts(cache_constants["V_PARTS"]),
                "HAS_Q_DESCALE": queries.descale is not None,
            },
            config.options,
        )  # fmt: skip

    def dense(self, queries: Queries, outputs: Outputs) -> None:
        """Two launches: widen the cache into scratch, attend to the scratch."""
        plan, config, scratch = self.plan, self.plan.config, self.plan.scratch
        if scratch is None or plan.schedule is None:
            raise ValueError("plan must hold scratch for kernel 'dense', got none")
        k, v, cache_constants, k_power, v_power = self.cache_arguments(tl.float16, to_scratch=True)
        qk_scale, out_scale, folded = self.scales(k_power, v_power)
        pipelined = config.otherwise is not None and folded
        if config.otherwise is not None and not folded:
            config = config.otherwise
        pages = self._pages(config) if pipelined else (None, None)
        num_blocks = scratch.rows // config.scratch_block
        num_tiles = plan.shape.row_tiles(config.block_m)
        options = self.options(outputs, folded, config)
        widen_constants = {
            name: options[name] for name in ("NUM_KV_HEADS", "GQA_RATIO", "HEAD_DIM", "PAGE_SIZE", "RAGGED")
        }
        queries, sizes = self._queries(queries)
        bare_scratch, scratch_sizes = self._scratch()
        launch(
            _widen_kernel,
            (num_blocks * plan.shape.num_kv_heads + -(-num_tiles // _PLACED_TILES),),
            (
                queries, k, v, self.k_descale, self.v_descale, self.table, bare_scratch, plan.schedule,
                *sizes, config.block_m, *self.table_sizes, *scratch_sizes, num_blocks, num_tiles,
            ),
            {
                **widen_constants,
                **cache_constants,
                "K_TYPE": _TRITON_16_BIT[scratch.k.dtype] if pages[0] is None else None,
                "CAUSAL": self.mask["WINDOW_RIGHT"] >= 0,
                "BLOCK_D": options["BLOCK_D"],
                "BLOCK_N": config.scratch_block,
                "PDL": config.options.launch_pdl,
                "BLOCK_I": _PLACED_TILES,
                **self.vendor,
            },
            widen_options(plan.target, plan.shape.head_dim, config.scratch_block),
        )  # fmt: skip
        if pipelined:
            self._pipelined(queries, outputs, config, scratch, pages, options, qk_scale, out_scale)
        else:
            self._plain(queries, outputs, config, scratch, options, qk_scale, out_scale)

    def _pages(self, config: PrefillConfig) -> tuple[Any, Any]:
        """How the pipelined kernel copies K out of its pages, or (None, None): K is widened with V."""
        from narrowkv.attn_prefill.kernels.pipelined import page_descriptor

        if not config.k_in_pages:
            return None, None
        return page_descriptor(self.cache, self.table, config.block_n)

    def _plain(
        self, queries: Queries, outputs: Outputs, config: PrefillConfig, scratch: Scratch,
        options: dict[str, Any], qk_scale: float, out_scale: float,
    ) -> None:  # fmt: skip
        """Attends to the scratch, in plain Triton."""
        plan, k_dtype = self.plan, scratch.k.dtype
        for name in ("PAGE_SIZE", "RAGGED"):
            del options[name]
        launch(
            _dense_prefill_kernel,
            self._grid(config),
            (
                queries, outputs, self._scratch()[0], *self._descriptors(config), self.k_descale,
                self.v_descale, plan.schedule, self._workspace(), qk_scale, out_scale, self.soft_cap,
                config.num_splits,
            ),
            {
                **options,
                "COMPUTE": _TRITON_16_BIT[k_dtype],
                "SCALE_Q": k_dtype == torch.float16 and plan.q_dtype == torch.bfloat16,
                "SPLIT_Q": k_dtype == torch.bfloat16 and plan.q_dtype == torch.float16,
                "K_IN_UNITS": scratch.k_unit is not None,
                "V_IN_UNITS": scratch.v_unit is not None,
                "TMA": config.tma,
                "OVERLAP": config.overlap,
                "BRANCH": not plan.target.is_amd,
                "BLOCK_S": config.scratch_block,
            },
            config.options,
        )  # fmt: skip

    def _pipelined(
        self, queries: Queries, outputs: Outputs, config: PrefillConfig, scratch: Scratch,
        pages: tuple[Any, Any], options: dict[str, Any], qk_scale: float, out_scale: float,
    ) -> None:  # fmt: skip
        """Attends to the scratch, in Hopper's own kernel: as many programs as the device has units.

        pages: from `_pages`, where the launch ahead has left K as they say.
        """
        from narrowkv.attn_prefill.kernels.pipelined import _pipelined_prefill_kernel, key_descriptor

        shape = self.plan.shape
        appends = self.plan.exponent is not None
        new_scale = self.logit_scale
        tiles = shape.row_tiles(config.block_m)
        items = tiles * shape.num_kv_heads * config.num_splits
        for name in ("BLOCK_D", "HAS_SOFT_CAP", "FOLDED", "SETTLE"):
            del options[name]
        launch(
            _pipelined_prefill_kernel,
            (min(items, units_of(self.plan.target)),),
            (
                queries, outputs, self._scratch()[0], key_descriptor(scratch.k, config.block_n),
                key_descriptor(scratch.v, config.block_n), *pages, self.k_descale, self.v_descale,
                self.plan.schedule, self._workspace(), qk_scale, new_scale, out_scale,
                *self.table_sizes, tiles, config.num_splits,
            ),
            {
                **options,
                "PAD": None if not appends else "first" if pages[0] is None else "last",
                "TWO_SCALES": appends and (self.k_mode == "head" or qk_scale != new_scale),
                "V_IN_UNITS": scratch.v_unit is not None,
                "STAGES": config.options.num_stages,
            },
            config.options,
        )  # fmt: skip

    def _descriptors(self, config: PrefillConfig) -> tuple[Any, Any]:
        """Tensor descriptors of the scratch, for targets that load by them."""
        scratch = self.plan.scratch
        if not config.tma or scratch is None:
            return None, None
        from triton.tools.tensor_descriptor import TensorDescriptor

        head_dim = self.plan.shape.head_dim
        block = [config.block_n, self.constants["BLOCK_D"]]
        flat = (stored.view(-1, head_dim) for stored in (scratch.k, scratch.v))
        k, v = (TensorDescriptor(t, list(t.shape), list(t.stride()), block) for t in flat)
        return k, v

    def append(
        self,
        queries: Queries,
        outputs: Outputs,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        rope: Rope | None,
    ) -> None:
        """One launch: some programs quantise and store the new tokens, the others attend; or two."""
        plan, config, cache = self.plan, self.plan.config, self.cache
        assert plan.exponent is not None  # of a plan that appends
        folded = self.soft_cap == 0 and self.scale > 0 and not per_key(cache)[0]
        pipelined = config.otherwise is not None and folded and rope is None
        if config.otherwise is not None and not pipelined:
            config = config.otherwise
        if config.kernel == "apart" and rope is not None:
            # Whoever attends rotates the queries.
            config = replace(config, kernel="staged")
        staged = config.kernel != "paged"
        # Rows that are no keys between old and new ones would count in a window.
        stays = pipelined and self.mask["WINDOW_LEFT"] < 0
        pages = self._pages(config) if stays else (None, None)
        half = "bf16" not in (plan.k_format, plan.v_format)
        compute = tl.float16 if half else tl.bfloat16
        k, v, cache_constants, k_power, v_power = self.cache_arguments(
            tl.float16 if staged else compute, to_scratch=staged
        )
        p_scale = 1.0 if config.fp8 is None else _P_SCALE[config.fp8]
        num_blocks = append_blocks(plan.shape, config.scratch_block, staged=staged)
        num_tiles = plan.shape.row_tiles(config.block_m)
        options = self.options(outputs, folded, config)
        queries, sizes = self._queries(queries)
        scratch, scratch_sizes = self._scratch()
        new = (
            queries, new_tokens(k_new), new_tokens(v_new), rope_pointers(rope), *cache_pointers(cache),
            cache.num_pages,
        )  # fmt: skip
        old = k, v, self.k_descale, self.v_descale, self.table, scratch
        logit_scale = self.logit_scale
        k_scale, v_scale = self.k_factor * 2.0**k_power, self.v_factor * 2.0**v_power / p_scale
        storage = {
            **cache_constants,
            **storage_constants(cache, plan.exponent),
            **rope_constants(rope),
        }
        if config.kernel in ("pipelined", "apart"):
            assert plan.scratch is not None
            assert plan.schedule is not None
            num_groups = append_blocks(plan.shape, _QUANTISED_TOKENS, staged=False)
            names = ("NUM_KV_HEADS", "GQA_RATIO", "HEAD_DIM", "PAGE_SIZE", "BLOCK_D")
            launch(
                _produce_kernel,
                ((num_groups + num_blocks) * plan.shape.num_kv_heads + -(-num_tiles // _PLACED_TILES),),
                (
                    *new, *old, plan.schedule, k_scale, v_scale, *sizes, config.block_m, *self.table_sizes,
                    *scratch_sizes, num_groups, num_blocks, num_tiles,
                ),
                {
                    **{name: options[name] for name in names},
                    **storage,
                    "BLOCK_I": _PLACED_TILES,
                    **self.vendor,
                    "K_IN_PAGES": pages[0] is not None,
                    "BLOCK_S": config.scratch_block,
                    "BLOCK_T": _QUANTISED_TOKENS,
                    "PDL": config.options.launch_pdl,
                },
                produce_options(plan.target, plan.shape.head_dim, config.scratch_block),
            )  # fmt: skip
            if pipelined:
                qk_scale = logit_scale * k_scale
                self._pipelined(queries, outputs, config, plan.scratch, pages, options, qk_scale, v_scale)
                return
            if self.k_mode == "head":
                # What a head's old keys are short of is among their blocks' factors.
                options["K_DESCALE"] = "scalar"
            self._plain(queries, outputs, config, plan.scratch, options, logit_scale, v_scale)
            return
        for name in ("RAGGED", "WINDOW_RIGHT"):
            del options[name]
        launch(
            _prefill_append_kernel,
            ((num_blocks + num_tiles * config.num_splits) * plan.shape.num_kv_heads,),
            (
                new[0], outputs, *new[1:], *old, *self._descriptors(config), plan.arrivals,
                self._workspace(), logit_scale, k_scale, v_scale, self.soft_cap, *sizes, *self.table_sizes,
                *scratch_sizes, num_blocks, num_tiles, config.num_splits,
            ),
            {
                **options,
                **storage,
                **self.vendor,
                "COMPUTE": compute,
                "SCALE_Q": half and plan.q_dtype == torch.bfloat16,
                "SPLIT_Q": config.fp8 is not None or (not half and plan.q_dtype == torch.float16),
                "FP8": None if config.fp8 is None else getattr(tl, triton_fp8(config.fp8)),
                "CLEAN": cache.negative_zero_free,
                "P_SCALE": p_scale,
                "ACC_PARTS": self.acc_parts(cache_constants["V_PARTS"]),
                "STAGED": staged,
                "TMA": config.tma,
                "OVERLAP": config.overlap,
                "BLOCK_S": config.scratch_block,
                "OWN_N": config.own_n,
            },
            config.options,
        )  # fmt: skip
