"""What a call launches: kernels with constants, grids, sizes, memory, and arguments by name."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton.language as tl

from narrowkv.attn_decode.launch import is_read_by_tall
from narrowkv.attn_prefill.arguments import Arguments
from narrowkv.attn_prefill.config import triton_fp8
from narrowkv.attn_prefill.kernels.append import _prefill_append_kernel
from narrowkv.attn_prefill.kernels.append_store import _produce_kernel
from narrowkv.attn_prefill.kernels.arguments import (
    AppendScales,
    Blocks,
    Cache,
    Chunk,
    Destination,
    Filling,
    Outputs,
    Queries,
    Rules,
    Sizes,
    Storing,
    Widened,
)
from narrowkv.attn_prefill.kernels.dense import _dense_prefill_kernel
from narrowkv.attn_prefill.kernels.fused import _fused_prefill_kernel
from narrowkv.attn_prefill.kernels.rows import RUNTIME_SIZES
from narrowkv.attn_prefill.kernels.widen import VALUE_EXPONENT, _widen_kernel
from narrowkv.attn_prefill.memory import (
    FACTORS_OF_BLOCKS,
    LaunchMemory,
    MemorySizes,
    allocated,
    append_blocks,
    has_v_factors,
    key_type,
    power_of_two,
)
from narrowkv.attn_prefill.settings import PrefillSettings, per_key
from narrowkv.attn_prefill.tiles import (
    IN_PAGES,
    WIDE_HEAD,
    PrefillConfig,
    PrefillShape,
    compute_units_of,
    config_of_call,
    most_work_items,
    tuned_as,
    widen_options,
)
from narrowkv.paged_cache import PagedKVCache
from narrowkv.paged_cache.binding import (
    BoundCache,
    BoundTable,
    multiplied_parts,
    repeats_loads,
    widening_power,
)
from narrowkv.paged_cache.kernels.pages import Table
from narrowkv.paged_cache.rope import BoundRope
from narrowkv.paged_cache.storing import Store
from narrowkv.runtime.attention.xcds import xcd_order
from narrowkv.runtime.launch import Arg, BoundLaunch, KernelLaunch, launch_of, named
from narrowkv.runtime.operation import ByIdentity

# New tokens of a head that one program of a pipelined append quantises. H200, 1k over 0, 32/8 heads, with 32
# and 16: 39.1 and 35.4 us.
_QUANTISED_TOKENS = 16
_WIDE_TOKENS = 8  # the same on NVIDIA of heads wider than 256: with 16, FP4 spills 16 bytes
# Of an append in one launch: with 64 tokens programs of one warp spill 2.6 KB of a thread.
_TOKENS_OF_A_WARP = 16
_ROTATED_TOKENS = 16  # the same of an append in one launch whose cache rotates keys: with 64, FP4 spills
# For each compute unit: where most sequences are decodes, few blocks are filled, and other programs end at
# once. H100, 60 decodes and 4 x 512, 8/1 heads, with 16 and 4: the launch 21.9 and 13.2 us, the call 147 and
# 140; 1k over 4k, 96/8 heads, 345 both; 128 over 32k, 32/8 heads, 194 both.
_FILLING_PROGRAMS, _APPENDING_PROGRAMS = 4, 16
_PLACED_TILES = 8  # tiles that one program puts in their order
# P is at most one; in FP8 it is brought near the largest number that each format has.
_P_SCALE = {"fp8_e4m3fn": 256.0, "fp8_e4m3fnuz": 128.0}
TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


_matrices: ByIdentity[dict[int, Any]] = ByIdentity()


def matrix_of(cache: PagedKVCache, block_n: int) -> Any:
    """How tiles of `block_n` keys are copied out of the pages, a `PageMatrix`, or None; found once."""
    known = _matrices.get(id(cache))
    if known is None:
        known = _matrices.keep(cache, {})
    if block_n not in known:
        from narrowkv.attn_prefill.kernels.pipelined_copies import page_matrix

        known[block_n] = page_matrix(cache, block_n)
    return known[block_n]


def storing_constants(store: Store, exponent: str, turn: BoundRope) -> Storing:
    """Constants of how new tokens are rotated and stored in a cache."""
    found = {**store.plan.constants, **turn.constants, "RULE": exponent}
    return Storing(**{name: found[name.upper()] for name in Storing._fields})


class CallTraits(NamedTuple):
    """The values that a call's kernels depend on, except its sizes, the plan and the cache.

    Attributes:
        ragged: whether the table is ragged.
        soft_cap, sinks, lse: whether there are any; q_descale: whether there is a tensor of it.
        window_left, window_right: keys before and after itself that a row sees, or -1.
        shifts: keys lost an offset, which a cap, sinks or an lse would see.
        positive: whether the scale of the logits is above zero.
        storing: of an append: how new tokens are stored, else None.
        settle: `Target.store_wait`; empty in the interpreter.
        clean: no stored FP8 byte is OCP's negative zero or NaN.
        o_scale: whether the output is FP8 with a scale.
    """

    ragged: bool
    soft_cap: bool
    sinks: bool
    lse: bool
    q_descale: bool
    window_left: int
    window_right: int
    shifts: bool
    positive: bool
    storing: Storing | None
    settle: str
    clean: bool
    o_scale: bool = False


class Route(NamedTuple):
    """The kernels of calls of one kind with the same sizes.

    Attributes:
        config: the configuration; its `kernel` says which kernels there are.
        fill: the kernel that widens K and V into scratch memory before attention; None if there is none.
        attend: the kernel that attends.
        pipelined: whether `kernels/pipelined.py` attends; in_pages: K is copied out of its pages.
        divides: whether the grid of `attend` has a program for each split.
        sizes: grids and sizes of the call, by the names that kernels give them: `programs` and
            `fill_programs` of a launch; `max_keys` of a sequence in the scratch and `key_blocks` of all
            sequences, at most; `num_blocks` programs of a head that fill the scratch, and `num_groups` that
            store new tokens (of an append in pages `num_blocks` store new tokens); `num_tiles` tiles of rows
            of a head at most; `num_splits` programs that share a tile's keys (of "split" those of a KV head
            that run at once); `least_len` and `most_len` query tokens of the sequences that are served.
        p_scale: what the output is still to be divided by.
        memory: the plan's, or what each call allocates.
        reading: how the kernels read the cache, a key of `BoundCache.readings`.
        launches: a `PreparedCall` of them, once there is one; `sizes` then has all values that it takes.
    """

    config: PrefillConfig
    fill: BoundLaunch | None
    attend: BoundLaunch
    pipelined: bool
    in_pages: bool
    divides: bool
    sizes: dict[str, int]
    p_scale: float
    memory: LaunchMemory | MemorySizes
    reading: str
    launches: Any = None

    @property
    def kernels(self) -> list[BoundLaunch]:
        """Its kernels, in the order of their launches."""
        return [self.attend] if self.fill is None else [self.fill, self.attend]


def make_routes(
    plan: PrefillSettings, shape: PrefillShape, config: PrefillConfig, cache: PagedKVCache, bound: BoundCache,
    traits: CallTraits,
) -> tuple[Route, ...]:  # fmt: skip
    """The kernels of a call of this shape, configuration and traits, for one class of sequences each.

    The last one stores the new tokens of an append, of all sequences.
    """
    parts = (*config.short_queries, config)
    return tuple(_make_route(plan, shape, part, cache, bound, traits) for part in parts)


def _serves_tall(config: PrefillConfig, bound: BoundCache, traits: CallTraits) -> bool:
    """Whether `kernels/tall.py` attends: it is causal, and has no options but sinks, lse and scales."""
    plain = (traits.window_left, traits.window_right, traits.soft_cap, traits.storing) == (-1, 0, False, None)
    return plain and not bound.transforms and is_read_by_tall(bound.readings[config.reading])


def _make_route(
    plan: PrefillSettings, shape: PrefillShape, config: PrefillConfig, cache: PagedKVCache, bound: BoundCache,
    traits: CallTraits,
) -> Route:  # fmt: skip
    in_pages = config.kernel in IN_PAGES
    own = per_key(plan.k_granularity, plan.v_granularity) if in_pages else plan.widened_per_key()
    folded = traits.positive and not traits.soft_cap and not own[0]
    # With a transform, queries are rotated in the launch that transforms them.
    rotates = traits.storing is not None and traits.storing.rotary_dim > 0 and not bound.transforms
    # That kernel's loop has no registers for a number of each row.
    capped = traits.soft_cap and not traits.shifts
    pipelined = config.fallback is not None and (folded or capped) and not rotates
    if config.fallback is not None and not pipelined:
        config = config.fallback
    fused = config.kernel in IN_PAGES
    ping_pong = config.ping_pong is not None and folded and config.num_splits == 1 and not rotates
    # That kernel does not convert queries to another type.
    ping_pong = ping_pong and key_type(plan.shape.q_dtype, plan.k_format) in (plan.shape.q_dtype, torch.uint8)
    if config.tall is not None and _serves_tall(config.tall, bound, traits):
        config = config.tall
    if ping_pong:
        assert config.ping_pong is not None
        config = replace(config.ping_pong, q_lens=config.q_lens)
    elif not fused and not pipelined:
        config = config_of_call(plan.target, config, soft_cap=traits.soft_cap)
    maker = _Maker(plan, shape, config, bound, traits, folded, rotates)
    if fused:
        return maker.one_launch()
    if ping_pong:
        return maker.two_launches(False, False, ping_pong=True)
    # Rows that are no keys between old and new ones would count in a window.
    stays = pipelined and config.k_in_pages and not (traits.storing is not None and traits.window_left >= 0)
    in_pages = stays and matrix_of(cache, config.block_n) is not None
    return maker.two_launches(pipelined, in_pages)


class _Maker:
    """Makes the route of one configuration."""

    def __init__(
        self, plan: PrefillSettings, shape: PrefillShape, config: PrefillConfig, bound: BoundCache,
        traits: CallTraits, folded: bool, rotates: bool,
    ) -> None:  # fmt: skip
        self.plan, self.shape, self.config, self.bound, self.traits = plan, shape, config, bound, traits
        self.folded, self.rotates = folded, rotates
        self.appends = traits.storing is not None
        self.nvidia = plan.target.vendor == "nvidia"
        self.sizes = Sizes(
            shape.num_kv_heads,
            shape.gqa_ratio,
            shape.head_dim,
            shape.page_size,
            traits.ragged,
            shape.v_dim,
        )
        self.block_d, self.block_dk = power_of_two(shape.v_dim), power_of_two(shape.head_dim)
        self.blocks = Blocks(
            config.block_m, config.block_n, self.block_d, self.block_dk, config.scratch_block, config.own_n
        )
        self.num_tiles = shape.row_tiles(config.block_m)
        self.sequences = shape.sequences_with(config.q_lens[0])
        self.key_blocks = shape.scratch_rows(config.scratch_block, self.sequences) // config.scratch_block
        self.key_type = key_type(plan.shape.q_dtype, plan.k_format)

    @cached_property
    def matrix_type(self) -> Any:
        """Dtype of K in the workspace: a 16-bit type, or the FP8 type of the matrix unit."""
        fp8 = self.config.fp8
        return TRITON_TYPES[self.key_type] if fp8 is None else getattr(tl, triton_fp8(fp8))

    @cached_property
    def k_descale(self) -> str:
        """How attention over the scratch takes K's descale; an append's block factors include a head's."""
        kind: str = self.bound.readings["to_scratch"].k_stored.descale
        return "scalar" if self.appends and kind == "head" else kind

    @cached_property
    def v_block_factors(self) -> bool:
        """Whether blocks of widened V have factors."""
        return has_v_factors(self.plan.v_format, appends=self.appends, k_in_pages=self.config.k_in_pages)

    def one_launch(self) -> Route:
        """The cache is read in its pages."""
        shape, config = self.shape, self.config
        reading = self.bound.readings[config.reading]
        rules = self._paged_rules(reading.v_stored.parts)
        constants: dict[str, Any] = {"SIZES": self.sizes, "K": reading.k_stored, "V": reading.v_stored}
        kernel: Any = _fused_prefill_kernel
        if config.is_tall:
            from narrowkv.attn_prefill.kernels.tall import _tall_prefill_kernel

            kernel = _tall_prefill_kernel
        programs, divides = self.num_tiles * shape.num_kv_heads, config.kernel != "split"
        if not divides:
            programs = most_work_items(shape, config) * shape.num_kv_heads
        num_blocks, blocks = 0, self.blocks
        if self.appends:
            kernel = _prefill_append_kernel
            constants["STORING"] = storing = self.traits.storing
            size = min(config.scratch_block, _TOKENS_OF_A_WARP * config.options.num_warps)
            size = _ROTATED_TOKENS if storing is not None and storing.butterflies else size
            size = min(size, _WIDE_TOKENS) if self.nvidia and shape.head_dim > WIDE_HEAD else size
            blocks = blocks._replace(s=size)
            num_blocks = append_blocks(shape, size) if config.stores else 0
            programs *= config.num_splits if divides else 1
            programs, divides = programs + num_blocks * shape.num_kv_heads, False
        attend = self.plan.bind(kernel, config.options, **constants, RULES=rules, BLOCKS=blocks)
        sizes = {"programs": programs, "num_blocks": num_blocks}
        if config.is_tall and self.num_tiles < config.num_splits:
            # `find_share` subtracts one split for each tile of rows, since rounding up can add one to each.
            # If there are fewer tiles than programs that run at once, that would leave multiprocessors idle,
            # so these splits are added here.
            sizes["num_splits"] = most_work_items(shape, config)
        return self._route(None, attend, sizes, divides=divides, p_scale=rules.p_scale)

    def two_launches(self, pipelined: bool, in_pages: bool, *, ping_pong: bool = False) -> Route:
        """One launch widens keys into the scratch, and stores new tokens; the next attends."""
        shape, config, traits, target = self.shape, self.config, self.traits, self.plan.target
        if config.block_n > config.scratch_block:  # a tile has the factor of one block, and ends with it
            raise ValueError(
                f"tiles of {config.block_n} keys leave their blocks of {config.scratch_block} widened keys"
            )
        reading = self.bound.readings["to_scratch"]
        quantised = min(_QUANTISED_TOKENS, config.scratch_block)
        constants: dict[str, Any] = {"SIZES": self.sizes, "K": reading.k_stored, "V": reading.v_stored}
        constants["BLOCKS"] = Blocks(
            0, 0, self.block_d, self.block_dk, config.scratch_block, quantised, _PLACED_TILES
        )
        kernel: Any = _widen_kernel
        options = widen_options(target, shape.head_dim, config.scratch_block)
        num_blocks, num_groups = self.key_blocks, 0
        each = _APPENDING_PROGRAMS if self.appends else _FILLING_PROGRAMS
        most = -(-each * compute_units_of(target) // shape.num_kv_heads)
        if self.appends:
            kernel = _produce_kernel
            constants["STORING"] = traits.storing
            num_blocks = self.key_blocks + append_blocks(shape, config.scratch_block)
            num_groups = append_blocks(shape, quantised)
        # In a loop an append's programs spill registers, so it is used only where a batch of long decodes
        # bounds the blocks at very many. H100, 64 sequences, 211k keys: a program for each block took 143 us.
        loops = self.nvidia and (not self.appends or num_blocks > 4 * most)
        if loops:
            num_blocks = min(num_blocks, most)
        k_per_key, v_per_key = self.plan.widened_per_key()
        stored = reading.v_stored
        power = widening_power(stored.format, stored.route, stored.descale)
        constants["FILLING"] = Filling(
            k_type=None if in_pages else self.matrix_type,
            causal=traits.window_right >= 0,
            early=config.options.launch_pdl,
            loops=loops,
            int64_offsets=self.bound.int64_offsets,
            nvidia=self.nvidia,
            k_per_key=k_per_key,
            v_per_key=v_per_key,
            v_exponent=VALUE_EXPONENT.value + power if stored.format in FACTORS_OF_BLOCKS else None,
        )
        fill = self.plan.bind(kernel, options, **constants)
        filling = (num_groups + num_blocks) * shape.num_kv_heads + -(-self.num_tiles // _PLACED_TILES)
        if ping_pong:
            attend = self._in_turns()
        else:
            attend = self._pipelined(in_pages) if pipelined else self._dense()
        programs = self.num_tiles * shape.num_kv_heads
        if pipelined:  # one a multiprocessor
            programs = min(programs * config.num_splits, compute_units_of(target))
        sizes = {
            "programs": programs, "fill_programs": filling, "num_blocks": num_blocks,
            "num_groups": num_groups,
        }  # fmt: skip
        return self._route(
            fill, attend, sizes, pipelined=pipelined, in_pages=in_pages, divides=not (pipelined or ping_pong)
        )

    def _route(
        self, fill: BoundLaunch | None, attend: BoundLaunch, sizes: dict[str, int], *, divides: bool,
        pipelined: bool = False, in_pages: bool = False, p_scale: float = 1.0,
    ) -> Route:  # fmt: skip
        plan, config, shape = self.plan, self.config, self.shape
        memory = plan.memory(config) or plan.memory_sizes(shape, config, exact=True)
        least_len, most_len = config.q_lens
        sizes.setdefault("num_splits", config.num_splits)
        sizes |= {
            "batch": shape.batch, "num_tokens": shape.num_tokens, "max_q_len": shape.max_q_len,
            "max_keys": shape.max_seq_len, "key_blocks": self.key_blocks, "num_tiles": self.num_tiles,
            "least_len": least_len, "most_len": most_len,
        }  # fmt: skip
        route = Route(
            config, fill, attend, pipelined, in_pages, divides, sizes, p_scale, memory, config.reading
        )
        taken = {name for bound in route.kernels for name in bound.kernel.arg_names}
        taken |= {"programs", "fill_programs"} | ({"num_splits"} if divides else set())
        return route._replace(sizes={name: size for name, size in sizes.items() if name in taken})

    def _dense(self) -> BoundLaunch:
        """Attention over the scratch in plain Triton."""
        config, plan, traits, reading = self.config, self.plan, self.traits, self.bound.readings["to_scratch"]
        k_per_key, v_per_key = plan.widened_per_key()
        constants = {
            # Pages are behind it.
            "SIZES": self.sizes._replace(page_size=0, ragged=False),
            "K_DESCALE": self.k_descale,
            "V_DESCALE": reading.v_stored.descale,
            "ROTARY_DIM": traits.storing.rotary_dim if traits.storing is not None and self.rotates else 0,
            "INTERLEAVED": traits.storing is not None and traits.storing.interleaved,
            "RULES": self._rules(
                compute=self.matrix_type,
                fp8=None if config.fp8 is None else self.matrix_type,
                q_descale=traits.q_descale,
                scale_q=self.key_type == torch.float16 and plan.shape.q_dtype == torch.bfloat16,
                split_q=self.key_type == torch.bfloat16 and plan.shape.q_dtype == torch.float16,
            ),
            "WIDENED": Widened(
                k_per_key=k_per_key,
                v_per_key=v_per_key,
                k_block_factors=self.appends,
                v_block_factors=self.v_block_factors,
                tma=config.tma,
                overlap=config.overlap,
                # Overlapping rounds need one loop over all tiles.
                branch=config.overlap or not tuned_as(plan.target).is_amd,
                ahead=config.ahead,
            ),
            "BLOCKS": self.blocks,
        }
        return plan.bind(_dense_prefill_kernel, config.options, **constants)

    def _in_turns(self) -> BoundLaunch:
        """Attention over the scratch in CDNA4's own kernel."""
        from narrowkv.attn_prefill.kernels.cdna import _cdna_prefill_kernel, cdna_call

        config, reading = self.config, self.bound.readings["to_scratch"]
        fp8 = config.fp8 is not None
        constants = {
            "SIZES": self.sizes._replace(page_size=0, ragged=False),
            "K_DESCALE": self.k_descale,
            "V_DESCALE": reading.v_stored.descale,
            "RULES": self._rules(
                compute=self.matrix_type, fp8=self.matrix_type if fp8 else None, scale_q=False,
                split_q=False, q_descale=self.traits.q_descale,
            ),
            "CALL": cdna_call(
                config.block_m, config.block_n, self.shape.head_dim, config.options.num_warps, fp8,
                self.appends, self.v_block_factors,
            ),
        }  # fmt: skip
        return self.plan.bind(_cdna_prefill_kernel, config.options, **constants)

    def _pipelined(self, in_pages: bool) -> BoundLaunch:
        """Attention over the scratch in Hopper's own kernel, with one program a multiprocessor."""
        from narrowkv.attn_prefill.kernels.pipelined import _pipelined_prefill_kernel
        from narrowkv.attn_prefill.kernels.pipelined_items import PipelinedRules

        config, traits, reading = self.config, self.traits, self.bound.readings["to_scratch"]
        rules = PipelinedRules(
            k_descale=reading.k_stored.descale,
            v_descale=reading.v_stored.descale,
            pad=None if not self.appends else "last" if in_pages else "first",
            two_scales=self.appends and (reading.k_stored.descale == "head" or reading.k_factor != 1.0),
            v_block_factors=self.v_block_factors,
            window_left=traits.window_left,
            window_right=traits.window_right,
            sinks=traits.sinks,
            lse=traits.lse,
            split=config.num_splits > 1,
            block_m=config.block_m,
            block_n=config.block_n,
            stages=config.options.num_stages,
        )
        return self.plan.bind(_pipelined_prefill_kernel, config.options, SIZES=self.sizes, RULES=rules)

    def _rules(self, **values: Any) -> Rules:
        """Constants of the mathematics; those that attention over the scratch does not use have one value."""
        traits = self.traits
        constants: dict[str, Any] = {
            "fp8": None,
            "clean": False,
            "p_scale": 1.0,
            "acc_parts": 1,
            "q_descale": False,
            "soft_cap": traits.soft_cap,
            "sinks": traits.sinks,
            "lse": traits.lse,
            "window_left": traits.window_left,
            "window_right": traits.window_right,
            "folded": self.folded,
            "split": self.config.num_splits > 1 or self.config.kernel == "split",
            "shares": self.config.kernel == "split",
            "as_decode": self.config.as_decode,
            "settle": traits.settle,
            "int64_offsets": False,
            "nvidia": self.nvidia,
            "order": xcd_order(
                tuned_as(self.plan.target).xcds, self.shape.num_kv_heads, self.config.xcd_rows
            ),
        }
        return Rules(**constants | values)

    def _paged_rules(self, v_parts: int) -> Rules:
        """Constants of kernels that widen the cache in their loop, or give it to FP8 matrix units."""
        plan, fp8 = self.plan, self.config.fp8
        half = "bf16" not in (plan.k_format, plan.v_format)
        values: dict[str, Any] = {"window_right": -1} if self.appends else {}
        return self._rules(
            compute=tl.float16 if half else tl.bfloat16,
            scale_q=half and plan.shape.q_dtype == torch.bfloat16,
            split_q=(not half and plan.shape.q_dtype == torch.float16) or (fp8 is not None and self.appends),
            fp8=None if fp8 is None else getattr(tl, triton_fp8(fp8)),
            clean=self.traits.clean,
            p_scale=1.0 if fp8 is None else _P_SCALE[fp8],
            acc_parts=multiplied_parts(plan.target, self.block_d, v_parts),
            q_descale=self.traits.q_descale,
            once=repeats_loads(plan.target, self.config.options.num_warps, self.config.block_n),
            int64_offsets=self.bound.int64_offsets,
            **values,
        )


def launches_of(
    route: Route, given: Arguments, traits: CallTraits, bound: BoundCache, table: BoundTable,
    turn: BoundRope, logit_scale: float, soft_cap: float,
) -> list[KernelLaunch]:  # fmt: skip
    """The launches of a route, with an `Arg` for what differs from call to call.

    Args:
        route: the kernels.
        given, traits, bound, table, turn: the call, of which strides are taken.
        logit_scale: of logits in base 2, or natural for a soft cap, without the cache's descales.
        soft_cap: the cap, or 0.
    """
    memory = allocated(route.memory) if isinstance(route.memory, MemorySizes) else route.memory
    reading, (k_desc, v_desc) = bound.readings[route.reading], memory.descriptors
    read = reading.named()
    num_pages = bound.num_pages if table.max_pages else 0
    row = Arg("row") if traits.ragged else None
    arguments: dict[str, Any] = {
        **{name: Arg(name) for name in (*RUNTIME_SIZES, "qk_scale", "out_scale")},
        "block_m": route.config.block_m, "table_row": 0 if traits.ragged else Arg("row"),
        "q": _queries(given, traits, bound), "out": _outputs(given, traits), "soft_cap": soft_cap,
        "cache": Cache(**read), "scratch": memory.scratch,
        "workspace": memory.partials,
        "table": Table(Arg("ids"), row, Arg("lens"), None, num_pages, None, *table.steps), "rope": None,
        "k_desc": k_desc, "v_desc": v_desc, "k_descale": read["k_descale"], "v_descale": read["v_descale"],
    }  # fmt: skip
    if given.k_new is not None and given.v_new is not None:
        arguments |= {
            "chunk": _chunk(given.q, given.k_new, given.v_new, bound),
            "rope": named("rope", turn.pointers),
            "to": None if bound.store is None else Destination(**bound.store.named()),
            "scales": AppendScales(logit_scale, Arg("k_scale"), Arg("out_scale"), soft_cap),
        }  # fmt: skip
        if not route.pipelined:
            # Appended keys are in the scratch unquantised, and the factors of old ones beside them.
            arguments["qk_scale"] = logit_scale
    if route.pipelined:
        pages = None
        if route.in_pages:
            pages = matrix_of(given.cache, route.config.block_n).pages(arguments["table"])
        arguments |= {
            "page_desc": Arg("page_desc") if route.in_pages else None, "pages": pages,
            "new_scale": logit_scale, "soft_cap": soft_cap or None,
        }  # fmt: skip
    grid = (Arg("programs"), 1, Arg("num_splits") if route.divides else 1)
    steps = [] if route.fill is None else [launch_of(route.fill, (Arg("fill_programs"),), arguments)]
    return [*steps, launch_of(route.attend, grid, arguments)]


def _queries(given: Arguments, traits: CallTraits, bound: BoundCache) -> Queries:
    _, heads, head_dim = given.q.shape
    token, head = heads * head_dim, head_dim
    if not bound.transforms:  # else they were written by another launch
        token, head = given.q.stride()[:2]
    return Queries(
        Arg("q"), token, head, Arg("starts"), None, None, Arg("q_descale") if traits.q_descale else None,
        shift=Arg("shift") if traits.shifts else None,
    )  # fmt: skip


def _outputs(given: Arguments, traits: CallTraits) -> Outputs:
    heads, head_dim = given.q.shape[1], given.cache.v_head_dim
    token, head = (heads * head_dim, head_dim) if given.out is None else given.out.stride()[:2]
    lse_token = 0 if not traits.lse else heads if given.lse is None else given.lse.stride(0)
    return Outputs(
        Arg("out"), token, head, Arg("lse") if traits.lse else None, lse_token,
        Arg("sinks") if traits.sinks else None, Arg("o_scale") if traits.o_scale else None,
    )  # fmt: skip


def _chunk(q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, bound: BoundCache) -> Chunk:
    """New keys and values, and the queries that they see, if others are given for old ones."""
    k_token, k_head, v_token, v_head = *k_new.stride()[:2], *v_new.stride()[:2]
    chunk = Chunk(Arg("k_new"), k_token, k_head, Arg("v_new"), v_token, v_head)
    if not bound.transforms:
        return chunk
    transform = bound.transform
    offset = None if transform.offset is None else Arg("k_offset")
    balance = None if transform.balance is None else Arg("k_balance")
    token, head = q.stride()[:2]
    return chunk._replace(k_offset=offset, k_balance=balance, q=Arg("given_q"), q_token=token, q_head=head)
