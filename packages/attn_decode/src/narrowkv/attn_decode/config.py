"""Launch configuration: a typed function of target, shape and format, never searched for on the hot path."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from narrowkv.attn_decode.config_amd import MergeTile, amd_merge_tile, amd_splits, amd_tile, wave32_tile
from narrowkv.attn_decode.config_tuned import MERGE_IN_LAUNCH, DecodeChoice
from narrowkv.paged_cache.layouts import HeadShape
from narrowkv.quant.device import BITS, widen_route
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import UnsupportedError, check_choice
from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.targets import WARPGROUP_ROWS, Target
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


def parts_of(target: Target, format_name: str, *, is_key: bool) -> int:
    """Elements per loaded word."""
    if get_format(format_name).is_packed:
        return 4
    if format_name == "int8":
        return 2
    if not format_name.startswith(_FP8_PREFIX):
        return 1
    # Bit arithmetic on words takes no bytes out of them: 7.6 instructions an element on gfx942 become 3.2.
    # NVIDIA's LDS can transpose 16-bit elements only, and V is transposed on its way to the matrix unit.
    if target.is_amd:
        return 2 if widen_route(target, format_name) == BITS else 1
    return 2 if target.vendor == "nvidia" and not is_key else 1


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


def _tall_tile(
    target: Target, block_m: int, row_blocks: int, *, fast: bool, narrow_head: bool, has_fp4: bool
) -> tuple[int, LaunchOptions, int]:
    """Keys and compiler options of a tile of 64 rows or more, and such programs that a compute unit runs.

    has_fp4: K, V or both are in FP4 with a scale a head, and the other is in FP8.
    """
    if target.is_amd and fast:
        # Model, 8 tokens at ratio 12, TFLOP/s of a full chip: gfx942 128 x 32 339, 64 x 64 284, 64 x 16 228;
        # gfx950 128 x 64 412, 128 x 32 398, 64 x 16 284. 16 x 16 instructions: 264 and 349.
        block_n = 32 if block_m == 128 and target.name == "gfx942" else 64
        warps = 2 if block_m == 64 and target.name == "gfx950" else 4
        return block_n, LaunchOptions(num_warps=warps, num_stages=1, matrix_instr_nonkdim=32), 2
    if target.is_amd:
        return 16, LaunchOptions(num_warps=4, num_stages=1, matrix_instr_nonkdim=16), 2
    if target.name == "sm90" and (fast or has_fp4) and narrow_head and row_blocks == 1:
        # Tiles of 128 keys in all registers; under Triton 3.8 less than 255 spill. H200, 64 sequences of 8192
        # keys at ratio 12: 4 tokens FP8 439 us, with 64 keys and 168 registers 576 us; FP8 keys with FP4
        # values 489 and 628 us; FP4 563 and 756 us. 8 tokens: FP8 815 us, with two programs of 64 keys and
        # 128 registers 926 us; FP8 keys with FP4 values 1145 and 1266 us; FP4 1433 and 1495 us.
        stages = 2 if has_fp4 and block_m == 128 else 3
        return 128, LaunchOptions(num_warps=block_m // 16, num_stages=stages), 2 if block_m == 64 else 1
    if block_m == 64 and fast:
        # H100, 4 tokens of 64 sequences: 4 stages 459 us, 3 stages 474 us, 3 programs of 3 stages 559 us, of
        # which the last wave is a quarter full. Three tiles of 16 sequences: 465, 467 and 328 us.
        programs = 2 if row_blocks == 1 else 3
        return 64, LaunchOptions(num_warps=4, num_stages=6 - programs, maxnreg=168), programs
    if block_m == 64:
        return 64, LaunchOptions(num_warps=4, num_stages=3 if narrow_head else 2), 2
    if fast:
        # With 128 registers two programs run, and one multiplies while the other is in its softmax: 687 us
        # instead of 805 us.
        return 64, LaunchOptions(num_warps=8, num_stages=3, maxnreg=128), 2
    return 64, LaunchOptions(num_warps=8, num_stages=3 if narrow_head else 2), 1


def _short_call(
    shape: DecodeShape, compute_units: float, kind: str, narrow_head: bool
) -> tuple[int, LaunchOptions, int, str, str | None]:
    """A latency-bound call: keys of a tile, options, programs of a KV head, `prefetch` and the split.

    Args:
        shape: the call's shape.
        compute_units: of the GPU, divided by the programs that one sequence has without splits.
        kind: what the cache holds, on NVIDIA with heads of at most 128 channels: "16-bit"; "fp8"; "fp4", with
            one scale a head; "groups", FP4 with a scale per 16 or 32 channels; "values", FP4 or INT4 in V
            alone. Empty for other caches, heads and targets.
        narrow_head: whether heads have at most 128 channels. Wider heads take tiles of half as many keys,
            which then fit in shared memory.
    """
    block_n = 128 if narrow_head else 64
    slots = max(1, int(compute_units * 4))
    two, three = max(1, int(compute_units * 2)), max(1, int(compute_units * 3))
    tiles = shape.batch * -(-shape.capacity // block_n)
    if tiles <= slots and kind in ("fp4", "values"):
        # H100, against one tile a program: B1 ctx8192 FP4 17.5 us and 18.9, FP8 keys with FP4 values 18.2 and
        # 23.6; B4 ctx2048 15.2 and 16.7, 15.9 and 20.4.
        return block_n, LaunchOptions(num_warps=4, num_stages=2), two, "pages", "per_sequence"
    if 2 * tiles <= slots or (tiles <= slots and kind in ("", "groups")):
        # One tile a program leaves nothing to share out, and looking for an even share costs about 1 us. More
        # splits of a sequence than 128 take longer to merge than they save: H200, 8/1 heads, B1 ctx32768, 128
        # splits 21.1 us, 256 splits 26.9 us. H200, NVFP4, two tiles a program and one: B1 ctx8192 18.1 and
        # 22.6 us, B16 ctx512 17.1 and 21.1 us.
        # More than that have tiles of 256 keys instead: H200, 8/1 heads, B1 ctx32768, 13.4 us and 14.8.
        per_sequence = -(-shape.capacity // block_n)
        most = -(-per_sequence // 2) if kind == "groups" else _MOST_SPLITS
        slots, warps = min(slots, most * shape.batch), 4
        if kind == "fp8" and per_sequence > _MOST_SPLITS:
            block_n, warps = 256, 8
        return block_n, LaunchOptions(num_warps=warps, num_stages=1), slots, "", "per_sequence"
    if kind == "groups":
        # See `attend_in_registers`. H100, NVFP4, B1 ctx32768: 38.8 us, with 128 keys and 4 warps 43.4 us.
        return 32, LaunchOptions(num_warps=1, num_stages=3), slots, "", None
    few = 4 * shape.batch <= compute_units
    split = "per_sequence" if shape.batch == 1 or tiles <= slots else None
    if kind == "fp8" or (kind == "16-bit" and (few or tiles <= slots)):
        # Each program has several tiles in flight. H100, two programs a multiprocessor, against 128 keys, 4
        # warps and 2 stages: bf16 B1 ctx32768 55.0 us and 63.0, B4 ctx8192 55.8 and 57.9; FP8 34.3 and 38.1,
        # 32.8 and 34.1. Against one tile a program: B1 ctx8192 bf16 22.1 and 26.7, FP8 17.0 and 19.6.
        slots = two if split or few else three
        return 64, LaunchOptions(num_warps=2, num_stages=3), slots, "pages", split
    if kind == "16-bit":
        return 32, LaunchOptions(num_warps=1, num_stages=3), slots, "", None  # B8 ctx2048: 31.6 us, not 34.0
    # The sequences fill the chip without a split. H100, B64 ctx1024: FP4 40.0 us instead of 57.6 in two
    # splits, FP8 keys with FP4 values 45.3 us instead of 55.6.
    full = kind in ("fp4", "values") and 8 * shape.batch >= 7 * slots
    split = "none" if full else "per_sequence" if few and kind else None
    if kind == "values":
        # Four programs share a multiprocessor at 128 registers; without the limit the compiler takes 149, and
        # three do. H100, with and without prefetched page ids: B1 ctx32768 37.0 and 39.8 us, B4 ctx8192 30.9
        # and 36.9 us.
        slots = three if shape.batch == 1 else slots
        if shape.capacity <= _SHORT:  # H200, B16 ctx1024: 19.9 us instead of 22.0
            split = split or "per_sequence"
        return block_n, LaunchOptions(num_warps=4, num_stages=2, maxnreg=128), slots, "pages", split
    if full:
        return block_n, LaunchOptions(num_warps=4, num_stages=3, maxnreg=128), slots, "pages", split
    if kind == "fp4":
        # H100, instead of two programs a multiprocessor: B4 ctx8192 29.7 us, not 31.5. Instead of four with 2
        # stages and without prefetched page ids: B1 ctx32768 32.4 us, not 44.1, B8 ctx4096 33.0, not 40.5.
        return block_n, LaunchOptions(num_warps=4, num_stages=3), three, "pages", split
    return block_n, LaunchOptions(num_warps=4, num_stages=2), slots, "", None


# Keys of sequences that may be of any lengths without a program's share being far from even.
_SHORT = 1024
_MOST_SPLITS = 128  # of a sequence with a tile or two a split
# Programs of one warp that a compute unit or multiprocessor holds at once: sm90 at 255 registers, CDNA with
# two waves on each of four SIMDs.
_RESIDENT = 8
# FP4 is bound by the instructions that unpack it, and more warps hide their latency. H100, B64 ctx8192 page
# 16, least time over 32 and 64 keys and 2 to 5 stages: 244 us with 8 warps, 226 us with 12 (FP8: 371 us).
_FP4_RESIDENT, _FP4_REGISTERS = 12, 168
# Batch-invariant splits: small enough that one long sequence occupies a device, and few enough that the
# partial results of a large batch fit in memory.
_INVARIANT_TOKENS, _INVARIANT_SPLITS = 512, 32
# Arrival counters of a workspace; see `narrowkv.runtime.launch.Workspace`.
_MAX_COUNTERS = 1 << 16


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
    num_items, tiles_per_split = _items_of(shape, split, slots, choice.block_n)
    in_launch = (choice.merge_splits, choice.merge_warps) == MERGE_IN_LAUNCH and split != "none"
    return replace(
        shipped,
        block_n=choice.block_n,
        split=split,
        num_items=num_items,
        tiles_per_split=tiles_per_split,
        merge_in_launch=in_launch and shape.batch * head_programs <= _MAX_COUNTERS,
        options=choice.options(shipped.options, shipped.block_n),
        merge=MergeTile(choice.merge_splits, choice.merge_warps) if choice.merge_splits else MergeTile(),
    )


def _items_of(
    shape: DecodeShape, split: str, slots: int, block_n: int, *, whole_waves: bool = False
) -> tuple[int, int]:
    """`DecodeConfig.num_items` and `tiles_per_split` of a split that is not "fixed".

    slots: programs of a KV head and row block that run at once; whole_waves: items are a multiple of that.
    """
    if split == "none":
        return shape.batch, 0
    if split == "per_sequence":
        tiles = max(1, -(-shape.capacity // block_n))
        return shape.batch * min(max(1, slots // max(shape.batch, 1)), tiles), 1
    # An even share needs room for each sequence's rounding up: see `even_split`. Where that is more than fits
    # at once, FP4 wants whole waves. H100, B128 ctx32768 page 64, FP4: 396 items 1811 us, 384 items 1943 us;
    # FP8 2897 us with 264, 2863 us with 256.
    least = 2 * shape.batch
    return -(-least // slots) * slots if whole_waves else max(slots, least), 0


def _items_of_many(shape: DecodeShape, least: int) -> int:
    """`DecodeConfig.num_items` of more sequences than run at once, with few rows a KV head.

    Three splits a sequence, not one: at the end fewer units wait for the others. H200, FP8, 32/8 heads, B256
    ctx8192 998 us instead of 1195, 256 lognormal lengths 810 instead of 846. With 96/8 heads partial results
    cost more than that: B256 ctx2048 313 us instead of 276.
    """
    return 4 * shape.batch if shape.capacity > 4 * _SHORT else least


def _unsplit(target: Target, shape: DecodeShape, k_format: str, slots: int) -> str | None:
    """The split "none" where short sequences fill an NVIDIA GPU, else None; not for FP8.

    H200, B128 ctx1024 with even shares and without a split: FP4 71.8 and 61.8 us, NVFP4 74.7 and 64.9, FP8
    keys with FP4 values 63.3 and 61.6, bf16 128.9 and 125.8; B256: 131 and 113, 146 and 124, 122 and 116, 251
    and 248, but FP8 148 and 158. B256 of 16 to 1024 keys: FP4 88.6 and 86.5, FP8 keys with FP4 values 94.4
    and 95.0.

    Args:
        slots: programs of a KV head that run at once.
    """
    short = target.is_nvidia and shape.capacity <= _SHORT and k_format != "int8"
    return "none" if short and 8 * shape.batch >= 7 * slots else None


def _kind_of(
    target: Target, formats: tuple[str, str], narrow_head: bool, *, groups: bool, unpacks: bool, fast: bool
) -> str:
    """What a latency-bound call's cache holds: the argument `kind` of `_short_call`."""
    if unpacks and not get_format(formats[0]).is_packed:
        return "values"
    if groups:
        return "groups"
    if unpacks and formats == ("fp4_e2m1", "fp4_e2m1"):
        return "fp4"
    if target.is_nvidia and narrow_head and formats in (("bf16", "bf16"), ("fp16", "fp16")):
        return "16-bit"
    return "fp8" if fast and target.is_nvidia else ""


def _wide_head_tile(
    formats: tuple[str, str], q_len: int, compute_units: float
) -> tuple[int, LaunchOptions, int]:
    """Keys of a tile, options and programs of a KV head, on NVIDIA with heads wider than 256.

    Four warps share 512 channels of 16 rows at 254 registers, so that two programs share a multiprocessor of
    sm90; with two warps 416 bytes of a thread are spilled. Beside the masks of several query tokens four
    spill 568 bytes (bf16, 320 channels), and eight take 220 registers. Without the limit the compiler stops
    at 128 for FP8 and spills 8 bytes. Beside keys in FP4 four warps spill 40 bytes at 255 registers and none
    at 240; beside keys in FP8 it is the other way round.
    """
    half = any(get_format(name).bits == 16 for name in formats)
    warps = 4 if q_len == 1 else 8
    limit = 224 if warps == 8 else 240 if formats[0] == "fp4_e2m1" else None
    options = LaunchOptions(num_warps=warps, num_stages=2 if half else 3, maxnreg=limit)
    return 32, options, max(1, int(compute_units * _RESIDENT / warps))


def _large_call(
    target: Target, shape: DecodeShape, formats: tuple[str, str], block_m: int, slots: int, *, groups: bool,
    unpacks: bool, fast: bool,
) -> tuple[int, LaunchOptions, int, bool]:  # fmt: skip
    """A call that fills an NVIDIA GPU, or runs on a CPU: keys of a tile, options, programs, whole waves.

    slots: programs of one warp that run at once; groups, unpacks, fast: see `_shipped_config`.
    """
    narrow_head = shape.head_dim <= 128
    if groups:
        # `attend_in_registers`. H100, B64 ctx8192, with it and with tiles in shared memory: NVFP4 251 and
        # 300 us; MX (a scale per 32 channels) 249 and 312 us. Twelve programs of 168 registers spill: 366 and
        # 348 us. FP8 takes 371 us.
        return 32, LaunchOptions(num_warps=1, num_stages=3), slots, True
    if unpacks and get_format(formats[0]).is_packed:
        head_programs = shape.num_kv_heads * -(-shape.q_len * shape.gqa_ratio // block_m)
        slots = max(1, target.compute_units * _FP4_RESIDENT // head_programs)
        return 32, LaunchOptions(num_warps=1, num_stages=5, maxnreg=_FP4_REGISTERS), slots, True
    if unpacks:
        # H100, B64 ctx32768 page 16: 64 keys x 3 stages 1126 us, 32 x 3 1166 us, 64 x 2 1222 us (FP8: 1449).
        # Keys in INT8, values in INT4: 32 x 3 329 us, 64 x 3 346 us at B64 ctx8192.
        block_n = 32 if formats == ("int8", "int4") else 64
        return block_n, LaunchOptions(num_warps=1, num_stages=3), slots, False
    # H100, B128 ctx8192 page 64: 32 keys x 3 stages 1.08 x the floor, 64 x 2 1.11 x, 16 x 4 1.21 x.
    # 32 rows, B64 ctx8192 page 16: 64 keys 380 us, 32 keys 389 us.
    # INT8, 16 rows, B64 ctx8192 page 16: 64 keys 386 us, 32 keys 407 us.
    # The interpreter pays by the tile, not by the key.
    large = (block_m == 32 and fast) or (block_m == 16 and narrow_head and formats == ("int8", "int8"))
    block_n = 128 if target.name == "cpu" else 64 if large else 32
    # 32 rows, H200, 2 tokens of 64 sequences of 8192 keys, by one warp and by two: FP8 keys with FP4 values
    # 388 and 485 us, FP4 374 and 541 us.
    packed = narrow_head and block_m == 32 and formats[1] == "fp4_e2m1" and target.name == "sm90"
    warps = 1 if (block_m == 16 and narrow_head) or packed else 2
    options = LaunchOptions(num_warps=warps, num_stages=3 if narrow_head else 2)
    return block_n, options, max(1, slots // warps), False


def _xcd_items(target: Target, shape: DecodeShape, row_blocks: int) -> int:
    """Splits whose programs run on one XCD, where several blocks of rows read the same keys.

    Model (`python tools/xcd_figures.py`), two blocks: bf16 1.06 and 1.07 times as fast (gfx942, gfx950), FP8
    1.04. Blocks of multiples of `xcds` KV heads are on one XCD in any order.
    """
    return int(target.xcds > 1 and row_blocks > 1 and shape.num_kv_heads % target.xcds > 0)


def _merging(
    target: Target, shape: DecodeShape, split: str, num_items: int, head_programs: int, batch_invariant: bool
) -> tuple[bool, MergeTile]:
    """Whether partial results are merged in the launch, and the tile of the kernel that merges them if not.

    head_programs: of a split of a sequence, over KV heads and row blocks.
    """
    # Merging in the launch, serially, pays while few partial results wait (H100, B64 ctx8192 at two splits:
    # 383 us against 391). AMD's chiplets share no L2, so a second kernel is the cheaper fence there.
    merge_in_launch = split != "none" and num_items <= 4 * shape.batch and not target.is_amd
    # The two ways of merging round differently, and `num_items` depends on the capacity.
    merge_in_launch = merge_in_launch and not batch_invariant and shape.batch * head_programs <= _MAX_COUNTERS
    merge = MergeTile()
    if target.is_amd and split == "per_sequence":
        merge = amd_merge_tile(num_items // max(shape.batch, 1))
    elif target.is_nvidia and shape.num_kv_heads <= 2 and not batch_invariant and shape.head_dim <= 256:
        # Few heads leave many splits of a sequence. One tile serves all calls, so that a model does not need
        # twice as many merge kernels. H200, FP8, 8/1 heads, with 16 splits at once in one warp, 64 and 128 in
        # four: B1 ctx32768 19.6, 12.7 and 12.1 us, B4 ctx8192 15.2, 11.3 and 11.5, B64 ctx1024 13.6, 14.2 and
        # 15.3, B64 ctx8192 43.0, 43.4 and 45.6; with 96/8 heads B1 ctx32768 27.3, 25.8 and 25.9, B16 ctx8192
        # 77.6, 82.3 and 84.0.
        merge = MergeTile(64, 4 if shape.head_dim <= 128 else 8)
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
    narrow_head = shape.head_dim <= 128
    fast = narrow_head and k_format.startswith(_FP8_PREFIX) and v_format.startswith(_FP8_PREFIX)
    block_m = rows_of_tile(target, rows, fast=fast, head_dim=shape.head_dim)
    # 64 rows are the matrix instruction that takes V from shared memory as it lies there.
    v_parts = k_parts if chosen == "fp8" else parts_of(target, v_format, is_key=block_m >= 64)
    row_blocks = -(-rows // block_m)
    head_programs = shape.num_kv_heads * row_blocks
    compute_units = target.compute_units
    units = compute_units / head_programs  # of one KV head and row block
    slots = max(1, compute_units * _RESIDENT // head_programs)
    # A scale per 32 channels takes registers that FP4's configurations do not leave: 598 us against 378 us.
    unpacks = get_format(v_format).is_packed and not scale_group and target.vendor == "nvidia"
    unpacks = unpacks and block_m == 16 and narrow_head
    fp4 = k_format == v_format == "fp4_e2m1"
    groups = fp4 and block_m == 16 and scale_group > 0 and target.name == "sm90" and shape.q_len == 1
    groups = groups and shape.head_dim == 128
    whole_waves, prefetch = False, ""
    latency_bound = shape.batch * shape.capacity < 512 * slots and not batch_invariant
    if target.is_wave32:
        block_n, options = wave32_tile(block_m, k_format, v_format, shape.head_dim)
    elif block_m >= 64 and chosen == "decode" and target.name != "cpu":
        has_fp4 = not scale_group and {k_format, v_format} <= {"fp4_e2m1", "fp8_e4m3fn"} and not fast
        block_n, options, resident = _tall_tile(
            target, block_m, row_blocks, fast=fast, narrow_head=narrow_head, has_fp4=has_fp4
        )
        slots = max(1, compute_units * resident // head_programs)
    elif target.is_amd:
        block_n, options, prefetch = amd_tile(
            target, block_m, k_format, v_format, q_len=shape.q_len, q_dtype=shape.q_dtype,
            head_dim=shape.head_dim, scale_group=scale_group, kernel=chosen,
        )  # fmt: skip
        if not (split or tokens_per_split or batch_invariant):
            small = fast and prefetch == "tile" and target.name == "gfx942"
            block_n, splits = amd_splits(shape.batch, shape.capacity, block_n, units, small)
            if splits:
                split, slots = "per_sequence" if splits > 1 else "none", shape.batch * splits
    elif shape.head_dim > 256 and target.name != "cpu":
        block_n, options, slots = _wide_head_tile((k_format, v_format), shape.q_len, units)
    elif latency_bound and block_m == 16:
        kind = _kind_of(target, (k_format, v_format), narrow_head, groups=groups, unpacks=unpacks, fast=fast)
        block_n, options, slots, prefetch, short_split = _short_call(shape, units, kind, narrow_head)
        split = split or short_split
    else:
        block_n, options, slots, whole_waves = _large_call(
            target, shape, (k_format, v_format), block_m, slots, groups=groups, unpacks=unpacks, fast=fast
        )

    if not (batch_invariant or fast) and block_m == 16:
        split = split or _unsplit(target, shape, k_format, compute_units * _RESIDENT // head_programs)
    split = split or ("none" if shape.capacity <= block_n else "even")
    if tokens_per_split or batch_invariant:
        tiles = max(1, -(-shape.capacity // block_n))
        split, tiles_per_split = "fixed", -(-(tokens_per_split or _INVARIANT_TOKENS) // block_n)
        most = tiles if tokens_per_split else _INVARIANT_SPLITS
        num_items = shape.batch * min(-(-tiles // tiles_per_split), most)
    else:
        num_items, tiles_per_split = _items_of(shape, split, slots, block_n, whole_waves=whole_waves)
        if split == "even" and fast and target.is_nvidia and rows <= 4 and shape.batch > slots:
            num_items = _items_of_many(shape, num_items)
    merge_in_launch, merge = _merging(target, shape, split, num_items, head_programs, batch_invariant)
    return DecodeConfig(
        block_m, block_n, split, num_items, tiles_per_split, merge_in_launch, chosen, k_parts, v_parts,
        options, prefetch, merge, _xcd_items(target, shape, row_blocks),
    )  # fmt: skip
