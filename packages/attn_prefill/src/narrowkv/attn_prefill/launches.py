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
    for_rules,
    fp8_route,
    produce_options,
    triton_fp8,
    units_of,
    widen_options,
)
from narrowkv.attn_prefill.kernels.append import _prefill_append_kernel
from narrowkv.attn_prefill.kernels.arguments import (
    AppendScales,
    AppendWorkspace,
    Blocks,
    Cache,
    Chunk,
    Destination,
    Filling,
    Rules,
    Scratch,
    Sizes,
    Storing,
    Widened,
)
from narrowkv.attn_prefill.kernels.dense import BF16_VALUE_EXPONENT, _dense_prefill_kernel, _widen_kernel
from narrowkv.attn_prefill.kernels.fused import _fused_prefill_kernel
from narrowkv.attn_prefill.kernels.produce import _produce_kernel
from narrowkv.attn_prefill.kernels.rows import Outputs, Queries
from narrowkv.attn_prefill.plan import PrefillPlan, append_blocks, per_key
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope
from narrowkv.paged_cache.append import (
    cache_pointers,
    rope_constants,
    rope_pointers,
    storage_constants,
)
from narrowkv.paged_cache.kernels.pages import Stored
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
        self.sizes = Sizes(shape.num_kv_heads, shape.gqa_ratio, shape.head_dim, shape.page_size, ragged)
        self.block_d = 1 << (shape.head_dim - 1).bit_length()
        self.nvidia = plan.target.vendor == "nvidia"
        self.window_left, self.window_right = window_left, window_right

    def cache_arguments(
        self, compute: Any, *, to_scratch: bool = False
    ) -> tuple[Cache, Stored, Stored, int, int]:
        """K and V, constants that describe them, and the powers of two that widening leaves out.

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
            kept = fp8 if is_key or not to_scratch else None
            route = widen_route(target, name) if kept is None else fp8_route(kept, name)
            parts = parts_of(target, name, is_key=is_key) if kept is None else 1
            sides.append(side_of(stored, strides, name, route, parts))
        k, v = sides
        stored_k, stored_v = (
            Stored(name, packed_route(target, name, side, half), side.parts, strides.vec, mode)
            for name, side, strides, mode in (
                (formats[0], k, cache.k_strides, self.k_mode),
                (formats[1], v, cache.v_strides, self.v_mode),
            )
        )
        # The scales of groups are applied while widening, and take the power of two along.
        powers = [
            0 if mode == "e8m0_group" else widening_exponent(name, side.route)
            for mode, name, side in zip((self.k_mode, self.v_mode), formats, sides, strict=True)
        ]
        if to_scratch and formats[1] == "bf16":
            powers[1] = -BF16_VALUE_EXPONENT.value
        pointers = Cache(*k.pointers, *v.pointers, *self.k_descale, *self.v_descale)
        return pointers, stored_k, stored_v, powers[0], powers[1]

    def acc_parts(self, v_parts: int) -> int:
        """In how many parts V is multiplied.

        On sm90 under Triton 3.6 a product 32 columns wide next to a wider one comes out wrong (relative L1
        0.2 to 0.6).
        """
        narrow = self.block_d < 64 * v_parts
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

    def rules(self, outputs: Outputs, folded: bool, config: PrefillConfig, **values: Any) -> Rules:
        """Constants of the mathematics; those that attention over the scratch does not use have one value."""
        constants: dict[str, Any] = {
            "fp8": None,
            "clean": False,
            "p_scale": 1.0,
            "acc_parts": 1,
            "q_descale": False,
            "soft_cap": self.soft_cap > 0,
            "sinks": outputs.sinks is not None,
            "lse": outputs.lse is not None,
            "window_left": self.window_left,
            "window_right": self.window_right,
            "folded": folded,
            "split": config.num_splits > 1,
            "settle": self.plan.target.is_amd and is_compiled(self.cache.k),
            "wide_address": False,
            "nvidia": self.nvidia,
        }
        return Rules(**constants | values)

    def paged_rules(self, outputs: Outputs, folded: bool, v_parts: int, **values: Any) -> Rules:
        """Constants of kernels that widen the cache in their loop, or give it to FP8 matrix units."""
        plan, fp8 = self.plan, self.plan.config.fp8
        half = "bf16" not in (plan.k_format, plan.v_format)
        constants: dict[str, Any] = {
            "compute": tl.float16 if half else tl.bfloat16,
            "scale_q": half and plan.q_dtype == torch.bfloat16,
            "split_q": not half and plan.q_dtype == torch.float16,
            "fp8": None if fp8 is None else getattr(tl, triton_fp8(fp8)),
            "clean": self.cache.negative_zero_free,
            "p_scale": 1.0 if fp8 is None else _P_SCALE[fp8],
            "acc_parts": self.acc_parts(v_parts),
            "wide_address": self.cache.needs_64_bit_addresses,
        }
        return self.rules(outputs, folded, plan.config, **constants | values)

    def widened(self, config: PrefillConfig, *, in_units: bool, staged: bool) -> Widened:
        """Constants of attention over the scratch."""
        k_per_key, v_per_key = per_key(self.cache)
        scratch = self.plan.scratch
        return Widened(
            k_per_key=k_per_key,
            v_per_key=v_per_key,
            k_in_units=in_units,
            v_in_units=scratch is not None and scratch.v_unit is not None,
            tma=config.tma,
            overlap=config.overlap,
            branch=not self.plan.target.is_amd,
            staged=staged,
        )

    def blocks(self, config: PrefillConfig) -> Blocks:
        """Block sizes of a kernel that attends."""
        return Blocks(config.block_m, config.block_n, self.block_d, config.scratch_block, config.own_n)

    def filling(self, config: PrefillConfig, k_type: Any, causal: bool) -> tuple[Filling, Blocks]:
        """Constants of a launch that fills the scratch."""
        wide_address = self.cache.needs_64_bit_addresses
        return (
            Filling(k_type, causal, config.options.launch_pdl, wide_address, self.nvidia),
            Blocks(0, 0, self.block_d, config.scratch_block, _QUANTISED_TOKENS, _PLACED_TILES),
        )

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

    def _as_fp8(self, queries: Queries, k_power: int) -> tuple[Queries, int]:
        """FP8 queries for the matrix unit, and the power of two of the logits.

        Q's bytes are read as K's are, and lose the same power of two.
        """
        if self.plan.k_format != self.plan.config.fp8:
            queries = queries._replace(ptr=queries.ptr.view(torch.uint8))
        return queries, 2 * k_power

    def fused(self, queries: Queries, outputs: Outputs) -> None:
        """One launch: gather, widen and attend."""
        plan, config = self.plan, self.plan.config
        half = "bf16" not in (plan.k_format, plan.v_format)
        compute = tl.float16 if half else tl.bfloat16
        cache, k, v, k_power, v_power = self.cache_arguments(compute)
        p_scale = 1.0
        if config.fp8 is not None:
            p_scale = _P_SCALE[config.fp8]
            queries, k_power = self._as_fp8(queries, k_power)
        qk_scale, out_scale, folded = self.scales(k_power, v_power)
        queries, sizes = self._queries(queries)
        launch(
            _fused_prefill_kernel,
            self._grid(),
            (
                queries, outputs, cache, self.table, self._workspace(),
                qk_scale, out_scale / p_scale, self.soft_cap, *sizes, *self.table_sizes, config.num_splits,
            ),
            {
                "SIZES": self.sizes,
                "K": k,
                "V": v,
                "RULES": self.paged_rules(outputs, folded, v.parts, q_descale=queries.descale is not None),
                "BLOCKS": self.blocks(config),
            },
            config.options,
        )  # fmt: skip

    def dense(self, queries: Queries, outputs: Outputs) -> None:
        """Two launches: widen the cache into scratch, attend to the scratch."""
        plan, config, scratch = self.plan, self.plan.config, self.plan.scratch
        if scratch is None:
            raise ValueError("plan must hold scratch for kernel 'dense', got none")
        cache, k, v, k_power, v_power = self.cache_arguments(tl.float16, to_scratch=True)
        if config.fp8 is not None:
            queries, k_power = self._as_fp8(queries, k_power)
        qk_scale, out_scale, folded = self.scales(k_power, v_power)
        pipelined = config.otherwise is not None and folded
        if config.otherwise is not None and not folded:
            config = config.otherwise
        pages = self._pages(config) if pipelined else (None, None)
        num_blocks = scratch.rows // config.scratch_block
        num_tiles = plan.shape.row_tiles(config.block_m)
        queries, sizes = self._queries(queries)
        bare_scratch, scratch_sizes = self._scratch()
        k_type = self._key_type(scratch) if pages[0] is None else None
        filling, blocks = self.filling(config, k_type, self.window_right >= 0)
        launch(
            _widen_kernel,
            (num_blocks * plan.shape.num_kv_heads + -(-num_tiles // _PLACED_TILES),),
            (
                queries, cache, self.table, bare_scratch,
                *sizes, config.block_m, *self.table_sizes, *scratch_sizes, num_blocks, num_tiles,
            ),
            {"SIZES": self.sizes, "K": k, "V": v, "FILLING": filling, "BLOCKS": blocks},
            widen_options(plan.target, plan.shape.head_dim, config.scratch_block),
        )  # fmt: skip
        if pipelined:
            self._pipelined(queries, outputs, config, scratch, pages, qk_scale, out_scale)
        else:
            self._plain(queries, outputs, config, scratch, folded, qk_scale, out_scale)

    def _key_type(self, scratch: Scratch) -> Any:
        """What K is in the scratch: a 16-bit type, or the matrix unit's FP8 type."""
        fp8 = self.plan.config.fp8
        return _TRITON_16_BIT[scratch.k.dtype] if fp8 is None else getattr(tl, triton_fp8(fp8))

    def _pages(self, config: PrefillConfig) -> tuple[Any, Any]:
        """How the pipelined kernel copies K out of its pages, or (None, None): K is widened with V."""
        from narrowkv.attn_prefill.kernels.pipelined import page_descriptor

        if not config.k_in_pages:
            return None, None
        return page_descriptor(self.cache, self.table, config.block_n)

    def _plain(
        self, queries: Queries, outputs: Outputs, config: PrefillConfig, scratch: Scratch,
        folded: bool, qk_scale: float, out_scale: float,
    ) -> None:  # fmt: skip
        """Attends to the scratch, in plain Triton."""
        plan, k_dtype = self.plan, scratch.k.dtype
        config = for_rules(plan.target, config, soft_cap=self.soft_cap > 0)
        # The old keys' descale of a head is among their blocks' factors, where these have any.
        in_units = scratch.k_unit is not None
        k_descale = "scalar" if in_units and self.k_mode == "head" else self.k_mode
        launch(
            _dense_prefill_kernel,
            self._grid(config),
            (
                queries, outputs, self._scratch()[0], *self._descriptors(config), self.k_descale,
                self.v_descale, self._workspace(), qk_scale, out_scale, self.soft_cap, config.num_splits,
            ),
            {
                # Pages are behind it.
                "SIZES": self.sizes._replace(page_size=0, ragged=False),
                "K_DESCALE": k_descale,
                "V_DESCALE": self.v_mode,
                "RULES": self.rules(
                    outputs,
                    folded,
                    config,
                    compute=self._key_type(scratch),
                    fp8=None if config.fp8 is None else self._key_type(scratch),
                    q_descale=queries.descale is not None,
                    scale_q=k_dtype == torch.float16 and plan.q_dtype == torch.bfloat16,
                    split_q=k_dtype == torch.bfloat16 and plan.q_dtype == torch.float16,
                ),
                "WIDENED": self.widened(config, in_units=in_units, staged=False),
                "BLOCKS": self.blocks(config),
            },
            config.options,
        )  # fmt: skip

    def _pipelined(
        self, queries: Queries, outputs: Outputs, config: PrefillConfig, scratch: Scratch,
        pages: tuple[Any, Any], qk_scale: float, out_scale: float,
    ) -> None:  # fmt: skip
        """Attends to the scratch, in Hopper's own kernel: as many programs as the device has units.

        pages: from `_pages`, where the launch ahead has left K as they say.
        """
        from narrowkv.attn_prefill.kernels.pipelined import (
            PipelinedRules,
            _pipelined_prefill_kernel,
            key_descriptor,
        )

        shape = self.plan.shape
        appends = self.plan.exponent is not None
        new_scale = self.logit_scale
        tiles = shape.row_tiles(config.block_m)
        items = tiles * shape.num_kv_heads * config.num_splits
        launch(
            _pipelined_prefill_kernel,
            (min(items, units_of(self.plan.target)),),
            (
                queries, outputs, self._scratch()[0], key_descriptor(scratch.k, config.block_n),
                key_descriptor(scratch.v, config.block_n), *pages, self.k_descale, self.v_descale,
                self._workspace(), qk_scale, new_scale, out_scale,
                *self.table_sizes, tiles, config.num_splits,
            ),
            {
                "SIZES": self.sizes,
                "RULES": PipelinedRules(
                    k_descale=self.k_mode,
                    v_descale=self.v_mode,
                    pad=None if not appends else "first" if pages[0] is None else "last",
                    two_scales=appends and (self.k_mode == "head" or qk_scale != new_scale),
                    v_in_units=scratch.v_unit is not None,
                    window_left=self.window_left,
                    window_right=self.window_right,
                    sinks=outputs.sinks is not None,
                    lse=outputs.lse is not None,
                    split=config.num_splits > 1,
                    block_m=config.block_m,
                    block_n=config.block_n,
                    stages=config.options.num_stages,
                ),
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
        block = [config.block_n, self.block_d]
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
        stays = pipelined and self.window_left < 0
        pages = self._pages(config) if stays else (None, None)
        half = "bf16" not in (plan.k_format, plan.v_format)
        compute = tl.float16 if half else tl.bfloat16
        pointers, k, v, k_power, v_power = self.cache_arguments(
            tl.float16 if staged else compute, to_scratch=staged
        )
        p_scale = 1.0 if config.fp8 is None else _P_SCALE[config.fp8]
        num_blocks = append_blocks(plan.shape, config.scratch_block, staged=staged)
        num_tiles = plan.shape.row_tiles(config.block_m)
        queries, sizes = self._queries(queries)
        scratch, scratch_sizes = self._scratch()
        k_strides, v_strides = k_new.stride(), v_new.stride()
        chunk = Chunk(k_new, k_strides[0], k_strides[1], v_new, v_strides[0], v_strides[1])
        rows = chunk, rope_pointers(rope)
        k_to, v_to, k_descale_to, v_descale_to = cache_pointers(cache)
        destination = Destination(*k_to, *v_to, *k_descale_to, *v_descale_to)
        k_scale, v_scale = self.k_factor * 2.0**k_power, self.v_factor * 2.0**v_power / p_scale
        scales = AppendScales(self.logit_scale, k_scale, v_scale, self.soft_cap)
        constants = {"SIZES": self.sizes, "K": k, "V": v, "STORING": self.storing(rope)}
        kind = _TRITON_16_BIT[plan.q_dtype]
        if config.kernel in ("pipelined", "apart"):
            assert plan.scratch is not None
            num_groups = append_blocks(plan.shape, _QUANTISED_TOKENS, staged=False)
            filling, blocks = self.filling(config, kind if pages[0] is None else None, True)
            launch(
                _produce_kernel,
                ((num_groups + num_blocks) * plan.shape.num_kv_heads + -(-num_tiles // _PLACED_TILES),),
                (
                    queries, *rows, destination, pointers, self.table, scratch, scales, *sizes,
                    config.block_m, *self.table_sizes, *scratch_sizes, num_groups, num_blocks, num_tiles,
                ),
                {**constants, "FILLING": filling, "BLOCKS": blocks},
                produce_options(plan.target, plan.shape.head_dim, config.scratch_block),
            )  # fmt: skip
            if pipelined:
                self._pipelined(
                    queries, outputs, config, plan.scratch, pages, self.logit_scale * k_scale, v_scale
                )
                return
            self._plain(queries, outputs, config, plan.scratch, folded, self.logit_scale, v_scale)
            return
        if staged:
            # Q is multiplied as it is; the scratch ends with the newest key.
            rules = self.rules(
                outputs, folded, config, compute=kind, scale_q=False, split_q=False, window_right=0,
                wide_address=cache.needs_64_bit_addresses,
            )  # fmt: skip
        else:
            rules = self.paged_rules(outputs, folded, v.parts, window_right=-1)
            if config.fp8 is not None:
                rules = rules._replace(split_q=True)
        arrivals = (None, None) if plan.arrivals is None else plan.arrivals
        launch(
            _prefill_append_kernel,
            ((num_blocks + num_tiles * config.num_splits) * plan.shape.num_kv_heads,),
            (
                queries, outputs, *rows, destination, pointers, self.table, scratch,
                *self._descriptors(config), AppendWorkspace(*self._workspace(), *arrivals), scales, *sizes,
                *self.table_sizes, *scratch_sizes, num_blocks, num_tiles, config.num_splits,
            ),
            {
                **constants,
                "RULES": rules,
                "WIDENED": self.widened(config, in_units=staged, staged=staged),
                "BLOCKS": self.blocks(config),
            },
            config.options,
        )  # fmt: skip

    def storing(self, rope: Rope | None) -> Storing:
        """Constants of how new tokens are rotated and stored."""
        assert self.plan.exponent is not None
        found = {**storage_constants(self.cache, self.plan.exponent), **rope_constants(rope)}
        return Storing(**{name: found[name.upper()] for name in Storing._fields})
