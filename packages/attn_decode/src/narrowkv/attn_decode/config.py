"""Launch configuration: a typed function of target, shape and format, never searched for on the hot path."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowkv.attn_decode import tiles
from narrowkv.attn_decode.config_tuned import MERGE_IN_LAUNCH, DecodeChoice
from narrowkv.attn_decode.tiles import MOST_SPLITS, RESIDENT, DecodeTile, MergeTile, amd_splits
from narrowkv.paged_cache.binding import parts_of
from narrowkv.paged_cache.layouts import HeadShape
from narrowkv.quant.formats import get_format
from narrowkv.runtime.choices import choice_for
from narrowkv.runtime.errors import UnsupportedError, check_choice
from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.launch.workspace import MOST_COUNTERS
from narrowkv.runtime.targets import CACHE_LINE, WARPGROUP_ROWS, Target
from narrowkv.runtime.tuned import size_class, tuned_choice

SCALED_DOT_DEPTH = 128  # v_mfma_scale_f32_16x16x128_f8f6f4; a shorter dot is lowered to bf16
_FP8_PREFIX = "fp8_"


@dataclass(frozen=True)
class DecodeShape(HeadShape):
    """The shapes of decode calls, or of all calls that a plan is to serve.

    Attributes:
        batch: sequences, at most.
        q_len: query tokens of each sequence.
        num_qo_heads, num_kv_heads, head_dim: of the model.
        page_size: tokens a page.
        capacity: tokens of a sequence, at most. For a plan only speed depends on it, and which lengths
            `validate` accepts.
        q_dtype: bf16, fp16, or FP8 (E4M3).
        v_head_dim: channels of V where they are fewer than those of Q and K, else 0; `v_dim` says how many.
    """

    batch: int
    q_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    capacity: int
    q_dtype: torch.dtype = torch.bfloat16
    v_head_dim: int = 0


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes and how the keys are shared out.

    Attributes:
        block_m: rows of a tile: (query token, head of the group) pairs.
        block_n: keys of a tile.
        split: how a sequence's keys are divided over programs: "none"; "even" (programs have equal shares of
            the whole batch's keys); "per_sequence" (every sequence has the same number of splits: as many as
            run at once, at most one a tile); "fixed" (`tiles_per_split` tiles a split, or more if there are
            too many splits).
        num_items: the most splits of all sequences together, for each KV head and row block.
        tiles_per_split: key tiles of a split; 0 for an even share.
        slots: of an even share, programs of a KV head and row block that run at once; else 0.
        merge_in_launch: the last split to arrive merges, instead of a second kernel.
        kernel: "decode" widens the cache to 16 bits; "native" multiplies FP4 keys as they are stored; "fp8"
            makes FP4 keys and values FP8, by a table, and multiplies both so, with FP8 queries.
        k_parts, v_parts: elements per word that K and V are read in; see `narrowkv.quant.device.widen_parts`.
        options: compiler options of the attention kernel.
        merge: of the second kernel.
        xcd_items: splits whose programs run on one XCD, see `xcd_order`; 0 for the order of the launch.
        prefetch: what is loaded a tile before it is needed: "pages", page ids; "tile", where all rows attend
            to the same keys, keys, values and scales, too; "", nothing.
        tuned: where the configuration is from, and what it gains, if it is not the shipped one.
    """

    block_m: int
    block_n: int
    split: str
    num_items: int
    tiles_per_split: int
    merge_in_launch: bool
    kernel: str
    k_parts: int
    v_parts: int
    options: LaunchOptions
    prefetch: str = ""
    merge: MergeTile = field(default_factory=MergeTile)
    xcd_items: int = 0
    slots: int = 0
    tuned: str = ""

    def explain(self, shape: DecodeShape) -> str:
        """The tile, how often the keys are read and how they are divided, for a person."""
        rows = shape.q_len * shape.gqa_ratio
        row_blocks = -(-rows // self.block_m)
        times = "once" if row_blocks == 1 else f"{row_blocks} times"
        each = self.num_items // max(shape.batch, 1)
        how = {
            "none": "one program per sequence and head block",
            "per_sequence": f"up to {each} equal splits of every sequence",
            "even": f"{self.num_items} equal splits of all keys together",
            "fixed": f"splits of {self.tiles_per_split * self.block_n} keys, at most {each} a sequence",
        }[self.split]
        merge = "merged in the launch" if self.merge_in_launch else "merged by a second kernel"
        return (
            f"{self.kernel}: tiles of {self.block_m} rows x {self.block_n} keys, "
            f"{self.options.num_warps} warps, {self.options.num_stages} stages; a KV head has {rows} rows, "
            f"so keys are read {times}; {how}{'' if self.split == 'none' else f', {merge}'}"
            f"{f'; {self.tuned}' if self.tuned else ''}"
        )


def choose_kernel(target: Target, k_format: str, kernel: str | None, *, head_dim: int = 128) -> str:
    """The kernel for a target, a key format and a head_dim, or the one that is forced.

    "native" is used only when forced. Model, gfx950, the share of the time that HBM is busy, by `narrowkv
    inspect model --case decode:format=fp4_e2m1,kernel=...,lens=2048,kv_heads=1,ratio=12,head_dim=128,
    split=none,clean=1`: with one scale a head and with `group=32` 100% with "decode", 92% and 76% with
    "native". A float16 Q is split into three terms for it, which makes it slower.

    Raises:
        UnsupportedError: the forced kernel needs what the target, the format or the heads lack.
    """
    check_choice("kernel", kernel or "decode", ("native", "decode", "fp8"))
    lacks = (
        f"keys in fp4_e2m1, not {k_format}"
        if k_format != "fp4_e2m1"
        else f"scaled matrix instructions, which {target.name} lacks (gfx950 has them)"
        if not target.has_scaled_mfma
        else f"heads of at most 256 channels, not {head_dim}"
        if head_dim > 256
        else ""
    )
    if kernel == "native" and lacks:
        raise UnsupportedError(f"kernel='native' needs {lacks}; kernel='decode' works here")
    return kernel or "decode"


def _check_fp8_kernel(
    target: Target, shape: DecodeShape, formats: tuple[str, str], scale_group: int, kernel: str
) -> None:
    """Raises UnsupportedError, with what is lacking, where kernel="fp8" does not serve a call.

    It is used only when forced: docs/amd-timing.md compares the ways to multiply FP4. No other kernel takes
    FP8 queries over FP4.
    """
    query = get_format(shape.q_dtype).name
    if kernel != "fp8" and query.startswith(_FP8_PREFIX) and formats[0] == "fp4_e2m1":
        raise UnsupportedError(
            "an FP8 query over a cache in FP4 needs kernel='fp8' (gfx942 and gfx950); a 16-bit query reads "
            "any cache"
        )
    if kernel != "fp8":
        return
    lacks = (
        f"gfx942 or gfx950, not {target.name}"
        if target.name not in ("gfx942", "gfx950")
        else f"keys and values in fp4_e2m1 with one scale a head, not {formats}, scale_group {scale_group}"
        if formats != ("fp4_e2m1", "fp4_e2m1") or scale_group
        else f"queries in {target.native_fp8} or E4M3FN, not {query}"
        if query not in ("fp8_e4m3fn", target.native_fp8)
        else "one query token, at most 16 query heads a KV head and heads of 128 channels"
        if shape.q_len > 1 or shape.gqa_ratio > 16 or (shape.head_dim, shape.v_dim) != (128, 128)
        else ""
    )
    if lacks:
        raise UnsupportedError(f"kernel='fp8' needs {lacks}; kernel='decode' works here")


# Time of a key by the rows of its tile, relative to one another. H100, ratio 12, FP8, 8k keys: 8 tokens of
# 64 sequences: one tile of 128 687 us, two of 64 931 us; 16 tokens of 16 sequences: three tiles of 64 328 us,
# two of 128 358 us, one of 256 354 us.
_CLOCKS_OF_ROWS = {64: 23, 128: 36}


def rows_of_tile(target: Target, rows: int, *, fast: bool, head_dim: int) -> int:
    """Rows of a tile; each tile reads all keys.

    Tiles of heads wider than 256 have few rows: of more rows Q and the sums take more registers than a wave
    or warp has (sm90 spills at 32 rows, gfx942 at 64).

    Args:
        target: what the kernel will run on.
        rows: query tokens times query heads of a KV head.
        fast: the cache is FP8 and heads have at most 128 channels: more rows leave enough registers on AMD.
        head_dim: channels of a head.
    """
    if head_dim > 256 and target.name != "cpu":
        return 16 if rows <= 16 or not target.is_amd or head_dim > 512 else 32
    if rows <= 64:
        return max(16, 1 << (rows - 1).bit_length())
    if target.is_amd:
        return 128 if fast and not target.is_wave32 else 64
    return min(_CLOCKS_OF_ROWS, key=lambda most: -(-rows // most) * _CLOCKS_OF_ROWS[most])


# Keys of sequences that may be of any lengths without a program's share being far from even.
_SHORT = 1024
# Batch-invariant splits: small enough that one long sequence occupies a device, and few enough that the
# partial results of a large batch fit in memory.
_INVARIANT_TOKENS, _INVARIANT_SPLITS = 512, 32


def choose_config(
    target: Target,
    shape: DecodeShape,
    k_format: str,
    v_format: str,
    *,
    scale_group: int = 0,
    kernel: str | None = None,
    split: str | None = None,
    tokens_per_split: int = 0,
    batch_invariant: bool = False,
) -> DecodeConfig:
    """The shipped configuration, or a row of the tune file that NARROWKV_TUNED names.

    Args:
        target: what the kernel will run on.
        shape: the call's shape.
        k_format: storage format of K; v_format: of V.
        scale_group: FP4's channels per scale, 0 for one scale per position and head.
        kernel: forces "native", "decode" or "fp8".
        split: forces "none", "even" or "per_sequence".
        tokens_per_split: a fixed split size in tokens, rounded up to key tiles; 0 chooses.
        batch_invariant: nothing that the result of a sequence depends on is chosen by batch or capacity.

    A row of a tune file is for calls that leave all of these to choose.

    Raises:
        UnsupportedError: for a pair of formats that this kernel does not read, or a kernel that is not there.
        ValueError: the tune file is not of this GPU and this Triton.
    """
    if {k_format, v_format} == {"bf16", "fp16"}:
        raise UnsupportedError(
            "paged_decode computes in one 16-bit type and would round the other: a cache of bf16 and fp16 is "
            f"refused, got k={k_format}, v={v_format}; each with itself or with FP8 or FP4 works"
        )
    shipped = _shipped_config(
        target, shape, k_format, v_format, scale_group=scale_group, kernel=kernel, split=split,
        tokens_per_split=tokens_per_split, batch_invariant=batch_invariant,
    )  # fmt: skip
    if kernel or split or tokens_per_split or batch_invariant or not is_tuned(shipped):
        return shipped
    name = shape_class(shape, k_format, v_format, scale_group)
    choice, why = tuned_choice(target, "decode", name, DecodeChoice)
    return shipped if choice is None else replace(with_choice(target, shape, shipped, choice), tuned=why)


def shape_class(shape: DecodeShape, k_format: str, v_format: str, scale_group: int) -> str:
    """The class of a call: calls of one class share a row."""
    query = get_format(shape.q_dtype).name
    of = f"{shape.head_dim} and {shape.v_head_dim}" if shape.v_head_dim else f"{shape.head_dim}"
    return (
        f"{shape.num_qo_heads}/{shape.num_kv_heads} heads of {of}, q_len {shape.q_len}, "
        f"{query} over {k_format}/{v_format}:{scale_group}, batch to {size_class(shape.batch)}, "
        f"keys to {size_class(shape.capacity)}"
    )


def is_tuned(shipped: DecodeConfig) -> bool:
    """Whether `narrowkv tune` tries configurations in the place of this one: those with tiles of few rows."""
    return shipped.kernel == "decode" and shipped.block_m < WARPGROUP_ROWS


def with_choice(
    target: Target, shape: DecodeShape, shipped: DecodeConfig, choice: DecodeChoice
) -> DecodeConfig:
    """The shipped configuration with what a row of a tune file chooses."""
    rows = shape.q_len * shape.gqa_ratio
    head_programs = shape.num_kv_heads * -(-rows // shipped.block_m)
    slots = max(1, target.compute_units * choice.items_per_unit // head_programs)
    split = "none" if shape.capacity <= choice.block_n else choice.split
    num_items, tiles_per_split, _ = _items_of(shape, split, slots, choice.block_n)
    in_launch = (choice.merge_splits, choice.merge_warps) == MERGE_IN_LAUNCH and split != "none"
    return replace(
        shipped,
        block_n=choice.block_n,
        split=split,
        num_items=num_items,
        tiles_per_split=tiles_per_split,
        slots=0,
        merge_in_launch=in_launch and num_items * head_programs <= MOST_COUNTERS,
        options=choice.options(shipped.options, shipped.block_n),
        merge=MergeTile(choice.merge_splits, choice.merge_warps) if choice.merge_splits else MergeTile(),
    )


def _items_of(
    shape: DecodeShape, split: str, slots: int, block_n: int, *, waves: bool = False
) -> tuple[int, int, int]:
    """`DecodeConfig.num_items`, `tiles_per_split` and `slots` of a split that is not "fixed".

    slots: programs of a KV head and row block that run at once; waves: an even share fills whole waves.

    FP8, times of the floor, with whole waves (H100) and without (H200): 64 lognormal lengths, 96/8 heads,
    1.16 and 1.70, 32/8 heads 1.13 and 1.63; 128, 96/8 heads, 1.14 and 1.58; 32/8 heads, B128 ctx8192 1.08 and
    1.20, B256 ctx4096 1.10 and 1.22; 96/8 heads, B64 ctx8192 1.08 and 1.17, B256 ctx8192 1.04 and 1.12.
    """
    if split == "none":
        return shape.batch, 0, 0
    if split == "per_sequence":
        key_tiles = max(1, -(-shape.capacity // block_n))
        return shape.batch * min(max(1, slots // max(shape.batch, 1)), key_tiles), 1, 0
    least = 2 * shape.batch
    if waves:  # up to six with two and a half splits of each sequence; more would take a large workspace
        least = min(5 * shape.batch // 2, max(least, 6 * slots))
        return max(1, -(-least // slots)) * slots, 0, slots
    return max(slots, least), 0, 0


def _unsplit(target: Target, shape: DecodeShape, k_format: str, slots: int) -> str | None:
    """The split "none" where short sequences fill an NVIDIA GPU, else None.

    H200, B128 ctx1024 with even shares and without a split: FP8 85.0 and 77.3 us, FP4 71.8 and 61.8, NVFP4
    74.7 and 64.9, FP8 keys with FP4 values 63.3 and 61.6, bf16 128.9 and 125.8; B256: 166 and 147, 131 and
    113, 146 and 124, 122 and 116, 251 and 248. B256 of 16 to 1024 keys: FP4 88.6 and 86.5, FP8 keys with FP4
    values 94.4 and 95.0. FP8, ctx512: B64 27.6 and 25.3, B192 93.4 and 57.2, B256 103 and 81.3.

    Args:
        slots: programs of a KV head that run at once.
    """
    short = target.is_nvidia and shape.capacity <= _SHORT and k_format != "int8"
    return "none" if short and 8 * shape.batch >= 7 * slots else None


def _cache_kind(target: Target, shape: DecodeShape, formats: tuple[str, str], scale_group: int) -> str:
    """The kind of cache that tiles are tuned for, or "" for other caches, wider heads and a CPU.

    "fp8" is in FP8; on NVIDIA "16-bit"; "int8"; "fp4" with one scale a head; "groups", FP4 with a scale per
    16 or 32 channels in calls that `attend_in_registers` serves; "packed", 4-bit keys and values of other
    formats; "values", FP4 or INT4 in V alone.
    """
    k, v = formats
    if shape.head_dim > 128 or target.name == "cpu":
        return ""
    if k.startswith(_FP8_PREFIX) and v.startswith(_FP8_PREFIX):
        return "fp8"
    if not target.is_nvidia:
        return ""
    if scale_group:
        in_registers = target.name == "sm90" and shape.q_len == 1 and shape.head_dim == 128
        return "groups" if in_registers and k == v == "fp4_e2m1" else ""
    if get_format(v).is_packed:
        return "fp4" if k == v == "fp4_e2m1" else "packed" if get_format(k).is_packed else "values"
    return {"int8": "int8", "bf16": "16-bit", "fp16": "16-bit"}.get(k, "") if k == v else ""


def _facts(
    target: Target, shape: DecodeShape, formats: tuple[str, str], scale_group: int, kernel: str, block_m: int,
    cache: str,
) -> dict[str, Any]:  # fmt: skip
    """What the rows of `tiles` name of a call."""
    k, v = (get_format(name) for name in formats)
    return {
        "target": target.name, "vendor": target.vendor, "kernel": kernel, "block_m": block_m,
        "row_blocks": -(-shape.q_len * shape.gqa_ratio // block_m), "k": formats[0], "v": formats[1],
        "formats": "/".join(formats), "group": scale_group, "half": 16 in (k.bits, v.bits),
        "packed": k.is_packed or v.is_packed, "v_packed": v.is_packed, "mixed": formats[0] != formats[1],
        "unpacks": "fp4_e2m1" in formats or formats == ("int4", "int4"), "q_len": shape.q_len,
        "q_dtype": shape.q_dtype, "ratio": shape.gqa_ratio, "head_dim": shape.head_dim,
        "narrow": shape.head_dim <= 128,
        "padded": shape.head_dim & (shape.head_dim - 1) != 0, "cache": cache,
    }  # fmt: skip


def _length_facts(shape: DecodeShape, units: float) -> dict[str, Any]:
    """What `SHORT_ROWS` name of a call's lengths; `units`: compute units of one KV head and row block."""
    slots, keys = max(1, int(units * 4)), 128 if shape.head_dim <= 128 else 64
    each = -(-shape.capacity // keys)
    total = shape.batch * each
    return {
        "tiles": "half" if 2 * total <= slots else "one" if total <= slots else "several",
        "long": each > MOST_SPLITS, "single": shape.batch == 1, "few": 4 * shape.batch <= units,
        "full": 8 * shape.batch >= 7 * slots, "short": shape.capacity <= _SHORT,
    }  # fmt: skip


def _is_latency_bound(shape: DecodeShape, units: float, batch_invariant: bool) -> bool:
    """Whether the programs that run at once have less than 512 keys each; `units` as in `_length_facts`."""
    return shape.batch * shape.capacity < 512 * max(1, int(units * RESIDENT)) and not batch_invariant


def _tile_of(
    target: Target, shape: DecodeShape, facts: dict[str, Any], units: float, batch_invariant: bool
) -> DecodeTile:
    """The tile of a call, of the rows for its target, its rows of Q and its lengths.

    units: compute units of one KV head and row block.
    """
    block_m = facts["block_m"]
    if target.is_wave32:
        return choice_for(tiles.WAVE32_ROWS, facts)
    if block_m >= 64 and facts["kernel"] == "decode" and target.name != "cpu":
        return choice_for(tiles.CDNA_TALL_ROWS if target.is_amd else tiles.TALL_ROWS, facts)
    if target.is_amd:
        tile = choice_for(tiles.CDNA_ROWS, facts)
        if shape.head_dim > 256:
            return tile
        prefetch = choice_for(tiles.CDNA_PREFETCH_ROWS, facts)
        prefetch = "" if (target.name, prefetch) == ("gfx942", "pages") else prefetch
        waves = choice_for(tiles.CDNA_WAVES_ROWS, {**facts, "prefetch": prefetch})
        return replace(tile, prefetch=prefetch, options=replace(tile.options, waves_per_eu=waves))
    if shape.head_dim > 256 and target.is_nvidia:
        return choice_for(tiles.WIDE_ROWS, facts)
    if block_m == 16 and _is_latency_bound(shape, units, batch_invariant):
        return choice_for(tiles.SHORT_ROWS, {**facts, **_length_facts(shape, units)})
    return choice_for(tiles.CPU_ROWS if target.name == "cpu" else tiles.LARGE_ROWS, facts)


def _xcd_items(target: Target, shape: DecodeShape, row_blocks: int, formats: tuple[str, str]) -> int:
    """Splits whose programs run on one XCD, where several of them read the same lines of the cache.

    Several blocks of rows read the same keys, which pays for 16-bit ones. Model (`python
    tools/xcd_figures.py`), two blocks: bf16 1.06 and 1.07 times as fast (gfx942, gfx950), FP8 0.97 and 0.99.
    Blocks of multiples of `xcds` KV heads are on one XCD in any order.

    Heads share the cache lines of rows that do not fill one, as of FP4: 4 sequences of 1024 keys in pages of
    one token, gfx942 9.4 and 7.0 us, gfx950 6.0 and 5.1.
    """
    wide = any(get_format(name).bits == 16 for name in formats)
    blocks = wide and row_blocks > 1 and shape.num_kv_heads % target.xcds > 0
    bits = min(
        get_format(name).bits * dim for name, dim in zip(formats, (shape.head_dim, shape.v_dim), strict=True)
    )
    return int(target.xcds > 1 and (blocks or bits < 8 * CACHE_LINE))


def _merging(
    target: Target, shape: DecodeShape, split: str, at_once: int, programs: int, batch_invariant: bool
) -> tuple[bool, MergeTile]:
    """Whether partial results are merged in the launch, and the tile of the kernel that merges them if not.

    at_once: splits of a KV head and row block that run at once, eight a unit; programs: of the launch.
    """
    # Merging in the launch pays while few partial results wait (H100, B64 ctx8192 at two splits:
    # 383 us against 391). AMD's chiplets share no L2, so a second kernel is the cheaper fence there.
    merge_in_launch = split != "none" and at_once <= 4 * shape.batch and not target.is_amd
    # The two ways of merging round differently, and `at_once` depends on the capacity.
    merge_in_launch = merge_in_launch and not batch_invariant and programs <= MOST_COUNTERS
    merge = choice_for(tiles.MERGE_ROWS, {
        "vendor": target.vendor, "split": split, "splits": at_once // max(shape.batch, 1),
        "kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "invariant": batch_invariant,
    })  # fmt: skip
    return merge_in_launch, merge


def _shipped_config(
    target: Target,
    shape: DecodeShape,
    k_format: str,
    v_format: str,
    *,
    scale_group: int,
    kernel: str | None,
    split: str | None,
    tokens_per_split: int,
    batch_invariant: bool,
) -> DecodeConfig:
    """The shipped configuration; see `choose_config`."""
    chosen = choose_kernel(target, k_format, kernel, head_dim=shape.head_dim)
    _check_fp8_kernel(target, shape, (k_format, v_format), scale_group, chosen)
    k_parts = {"native": 1, "fp8": 2}.get(chosen) or parts_of(target, k_format, is_key=True)
    rows = shape.q_len * shape.gqa_ratio
    formats = (k_format, v_format)
    cache = _cache_kind(target, shape, formats, scale_group)
    fast = cache == "fp8"
    block_m = rows_of_tile(target, rows, fast=fast, head_dim=shape.head_dim)
    # 64 rows are the matrix instruction that takes V from shared memory as it lies there.
    v_parts = k_parts if chosen == "fp8" else parts_of(target, v_format, is_key=block_m >= 64)
    row_blocks = -(-rows // block_m)
    head_programs = shape.num_kv_heads * row_blocks
    units = target.compute_units / head_programs  # of one KV head and row block
    facts = _facts(target, shape, formats, scale_group, chosen, block_m, cache)
    unsplit = None
    if not (split or tokens_per_split or batch_invariant) and block_m == 16:
        unsplit = _unsplit(target, shape, k_format, target.compute_units * RESIDENT // head_programs)
    facts["second_wave"] = unsplit is not None and 1.5 < shape.batch / (units * RESIDENT) <= 2
    facts["kv_heads"] = shape.num_kv_heads
    tile = _tile_of(target, shape, facts, units, batch_invariant)
    block_n, slots = tile.block_n, max(1, int(units * tile.resident))
    if tile.most_splits:
        slots = min(slots, tile.most_splits * shape.batch)
    if tile.least_tiles:
        slots = min(slots, -(-shape.capacity // (block_n * tile.least_tiles)) * shape.batch)
    split = split or tile.split
    small_rows = target.is_amd and not target.is_wave32 and (block_m < 64 or chosen != "decode")
    if small_rows and not (split or tokens_per_split or batch_invariant):
        small_tiles = fast and tile.prefetch == "tile" and target.name == "gfx942"
        block_n, splits = amd_splits(shape.batch, shape.capacity, block_n, units, small_tiles)
        if splits:
            split, slots = "per_sequence" if splits > 1 else "none", shape.batch * splits
    split = split or unsplit or ("none" if shape.capacity <= block_n else "even")
    if tokens_per_split or batch_invariant:
        key_tiles = max(1, -(-shape.capacity // block_n))
        split, slots, tiles_per_split = "fixed", 0, -(-(tokens_per_split or _INVARIANT_TOKENS) // block_n)
        most = key_tiles if tokens_per_split else _INVARIANT_SPLITS
        num_items = shape.batch * min(-(-key_tiles // tiles_per_split), most)
    else:
        waves = not (target.is_amd or _is_latency_bound(shape, units, batch_invariant))
        num_items, tiles_per_split, slots = _items_of(shape, split, slots, block_n, waves=waves)
    programs = num_items * head_programs
    at_once = min(slots, int(units * RESIDENT)) or num_items
    in_launch, merge = _merging(target, shape, split, at_once, programs, batch_invariant)
    return DecodeConfig(
        block_m, block_n, split, num_items, tiles_per_split, in_launch, chosen, k_parts, v_parts,
        tile.options, tile.prefetch, merge, _xcd_items(target, shape, row_blocks, formats), slots,
    )  # fmt: skip
