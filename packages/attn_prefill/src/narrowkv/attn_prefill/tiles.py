"""Tiles, splits and compiler options of each kernel, by target and shape, each beside its measurement."""

from __future__ import annotations

from dataclasses import replace

from narrowkv.attn_prefill.shapes import WIDE_HEAD, PrefillConfig, PrefillShape, scratch_block
from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.targets import TARGETS, Target, least_columns

# Keys of a 16-bit cache stay in their pages where this many tiles of rows read them at most, and from so many
# keys on: copies of 16 rows cost attention 5 %, and widening takes 40 % less. H100, bf16 cache, pages of 16:
# 128 over 32k 182 us instead of 212 (32/8 heads), 1k over 4k 142 and 137, 128 over 4k 47 both.
_TILES_OF_PAGES = 16
_KEYS_IN_PAGES = 8192
# Warps of a kernel that reads pages which a compute unit holds at once: sm90 at 255 registers, CDNA two waves
# on each of four SIMDs.
_RESIDENT_WARPS = 8
# Heads wider than 256 on NVIDIA, in tiles of 16 rows by 16 keys; 32 keys spill 16 to 40 bytes over bf16 and
# over FP8 keys with FP4 values. Without the limit the compiler stops at 128 registers for some, and spills.
_WIDE_IN_PAGES = LaunchOptions(num_warps=8, num_stages=2, maxnreg=224)
# gfx950 issues packed float32 arithmetic only while the matrix unit is idle.
_NO_PACKED_FP32 = "target-features=-packed-fp32-ops"
_ITERATIVE_ILP = "amdgpu-sched-strategy=iterative-ilp"


def tuned_as(target: Target) -> Target:
    """The target whose kernels and tiles are chosen; on a CPU gfx942, so that those are interpreted."""
    return TARGETS["gfx942"] if target.name == "cpu" else target


def block_m_for(shape: PrefillShape) -> int:
    """Rows of a tile: 64, or fewer where an average sequence has fewer rows."""
    rows = -(-shape.num_tokens * shape.gqa_ratio // max(shape.batch, 1))
    return min(64, max(16, 1 << (rows - 1).bit_length()))


def compute_units_of(target: Target) -> int:
    """Compute units of the target, on a CPU those of gfx942."""
    return tuned_as(target).compute_units


def xcd_rows(target: Target, shape: PrefillShape, block_m: int) -> int:
    """Tiles of rows that an XCD takes of a KV head at a time; 0 for the launch's order. See `xcd_order`.

    Model (`python tools/xcd_figures.py`): with 12 KV heads an XCD reads two heads, not three, at no cost.
    Where an XCD takes many tiles of a head in a row, L2 serves 97% of its loads, not 5% (128 heads, gfx942).
    In short launches the XCDs that end first then wait for the others: with 32 heads and four programs a
    compute unit a call is 0.93 times as fast on gfx950, so such launches keep their order.
    """
    xcds, heads = tuned_as(target).xcds, shape.num_kv_heads
    if heads == 0 or xcds % heads == 0:
        return 0  # the launch's order gives an XCD one head, or all XCDs the same ones
    tiles = shape.row_tiles(block_m)
    if tiles * heads < 16 * compute_units_of(target):
        return 1 if heads % xcds else 0
    return 64 if tiles >= 64 else 8


def widen_options(target: Target, head_dim: int, block: int) -> LaunchOptions:
    """Options of programs that widen a block of keys each: a warp has 16 of its rows, on NVIDIA 8.

    With sixteen a thread of sm90 takes up to 235 registers, so that one program fills a multiprocessor. CDNA
    keeps the masks of a wave's rows, and of columns that pad a row, in scalar registers: other head_dims take
    twice the waves there (Triton 3.8 puts up to 46 scalars into vector lanes otherwise).

    Before the pipelined kernel blocks have 128 keys. At 64 registers two programs share a multiprocessor of
    sm90 instead of one, which is worth a few spills. H200, an append to an FP8 cache, 8 KV heads,
    16 tokens a program: 1k over 4k 22.3 and 18.2 us, 128 over 32k 89 and 70.
    """
    masks = target.is_amd and head_dim not in (64, 128)
    warps = block // (4 if head_dim > WIDE_HEAD else 8 if masks or target.is_nvidia else 16)
    return LaunchOptions(
        num_warps=warps, num_stages=1, maxnreg=64 if block == 128 and head_dim <= 128 else None
    )


def partial_programs(target: Target, resident: int) -> int:
    """Programs with partial results that a launch has at most, which bounds their memory."""
    return 8 * resident * compute_units_of(target)


def most_work_items(shape: PrefillShape, config: PrefillConfig) -> int:
    """The most programs of a KV head that kernel "split" needs; see `find_share`.

    As many as run at once, or for many tiles of rows up to twice as many as those.
    """
    tiles = shape.row_tiles(config.block_m, config.q_lens[1])
    return max(config.num_splits, tiles + max(1, min(tiles, config.num_splits)))


def choose_splits(target: Target, programs: int, key_tiles: int, resident: int = 2) -> int:
    """Programs that share a tile's keys: how many finish first.

    As multiples of a key tile's time, a program's start and its partial result cost 8, and merging costs 1.5
    for each split. `resident` programs share a compute unit: two by shared memory on sm90, by registers on
    CDNA. H200, 96/8 heads: 16 new over 4k at 1, 5, 11 splits 59, 31, 36 us; 128 over 32k at 1, 4, 11 splits
    540, 469, 501 us; 128 over 4k at 1 and 4 splits 82 and 85 us.
    """
    slots = resident * compute_units_of(target)
    most = min(key_tiles // 4, 32, partial_programs(target, resident) // max(programs, 1))

    def cost(splits: int) -> float:
        waves = -(-programs * splits // slots)
        if splits == 1:
            return waves * (key_tiles + 2.0)
        return waves * (key_tiles / splits + 8) + 1.5 * splits

    return min(range(1, max(1, most) + 1), key=cost)


def dense_config(
    target: Target, shape: PrefillShape, block_m: int, why: str, large_head: bool, plain: bool
) -> PrefillConfig:
    """Tiles and options of attention over widened keys.

    plain: no factors of single keys, and Q is one term.
    """
    if target.is_wave32:
        return replace(fused_config(target, shape, block_m, why, large_head), kernel="dense")
    if tuned_as(target).is_amd:
        return _amd_dense_config(tuned_as(target), shape, block_m, why, plain)
    # H200, 1k new over 4k, 96/8 heads: 64 x 64 at 4 warps and 3 stages 462 us, 2 stages 510, 64 x 32 509,
    # 128 x 64 at 8 warps 529, 64 x 128 632; by pointers and not descriptors 481.
    block_n = max(32, least_columns(target, block_m)) if large_head else 64
    # Two stages of 64 keys of 256 channels take 160 of 227 KB. H200, FP4, 16/8 heads, 1k over 4k: 322 us, one
    # stage 417, three of 32 keys 380.
    options = LaunchOptions(
        num_warps=8 if large_head else 4, num_stages=2 if large_head and block_n == 64 else 3
    )
    if shape.head_dim > WIDE_HEAD:
        block_m, block_n, options = min(block_m, 32), 32, LaunchOptions(num_warps=8, num_stages=2)
    resident = 2
    if target.name == "sm90" and block_m == 64 and 128 < shape.head_dim <= WIDE_HEAD and shape.v_dim <= 128:
        # H200, 192 and 128 channels, 16/16 heads, 2k over 4k, bf16 and FP8: 128 rows 434 and 420 us, 64 rows
        # of 4 warps with one stage 484 and 458, with two 577 and 560, of 8 warps 795 and 769.
        options = LaunchOptions(num_warps=4, num_stages=1)
        if shape.row_tiles(128) * shape.num_kv_heads >= compute_units_of(target):
            block_m, options, resident = 128, LaunchOptions(num_warps=8, num_stages=2), 1
    splits = choose_splits(
        target, shape.row_tiles(block_m) * shape.num_kv_heads, -(-shape.max_seq_len // block_n), resident
    )
    # The extra round costs a tile. H200, base and overlapped: 1k over 0 78 and 86 us, 1k over 4k 444 and 443,
    # 128 over 32k in 4 splits 469 and 439.
    # Tiles of few rows always have it, so that tables of any width compile the same kernels.
    overlap = target.is_nvidia and not large_head and (shape.max_seq_len >= 4096 or block_m < 64)
    return PrefillConfig(
        "dense", why, block_m, block_n, num_splits=splits, overlap=overlap, options=options,
        tma=target.name == "sm90" and shape.head_dim <= WIDE_HEAD,
        scratch_block=scratch_block(shape.head_dim),
    )  # fmt: skip


def _amd_dense_config(
    target: Target, shape: PrefillShape, block_m: int, why: str, plain: bool
) -> PrefillConfig:
    """Tiles and options on CDNA, by `narrowkv inspect model --case`, hot loop, model TFLOP/s at 96/8 heads.

    128 rows, 32 x 32 matrix instructions, 64 keys a tile; in brackets 64 x 32 with 16 x 16 instructions, one
    stage and registers for two waves a SIMD. gfx942: plain 521 (375), head_dim 64 422 (289), soft cap 220
    (254), window 529 (363). gfx950: plain 1087 (482), head_dim 64 932 (482), soft cap 307 (300).
    32 keys a tile where more numbers are held for each row or key: gfx942, descale of each key 293 (with 64
    keys 319, but spills beside a cap and a window; before 246), three splits 458 (371, 366), fp16 queries
    over bf16 501 (437, 475); gfx950, descale of each key 453 (346, 328), three splits 905 (827, 492).

    On gfx942 a second stage adds LDS bank conflicts: 128 x 32 with one stage 460, with two 355. Storing V
    transposed changes nothing there (521). On gfx950 the second stage is worth 706 -> 1087, a third stage and
    256 rows nothing. LLVM's strategy iterative-ilp: gfx942 334 -> 521, gfx950 1087 -> 1043, at head_dim 64
    867 -> 932; under Triton 3.8 it crashes the compiler beside factors of keys, where it gains 2%. On gfx942
    the tiles take 272 registers and one wave a SIMD under Triton 3.8, 248 and two under 3.9; see
    docs/amd-timing.md for what was tried. Tiles of 64 rows: gfx942 375 -> 396 by `kpack` and the strategy,
    gfx950 482 -> 786 by the second stage.

    plain: no factors of single keys, and Q is one term.
    """
    gfx950 = target.name == "gfx950"
    head_dim = shape.head_dim
    rows = -(-shape.num_tokens * shape.gqa_ratio // max(shape.batch, 1))
    large = head_dim in (64, 128) and rows >= 128
    # Fewer tiles than compute units would leave some idle.
    large = large and shape.row_tiles(128) * shape.num_kv_heads >= compute_units_of(target)
    block_m = 128 if large else block_m
    programs = shape.row_tiles(block_m) * shape.num_kv_heads
    block_n = 16 if head_dim > 128 else 32
    splits = choose_splits(target, programs, -(-shape.max_seq_len // block_n))
    if large and plain and (splits == 1 or programs >= 2 * compute_units_of(target)):
        # Splits would fill the last round of programs better, but cost as much as that saves.
        block_n, splits = 64, 1
    scheduled = plain and head_dim <= 128 and (not gfx950 or (large and head_dim == 64))
    options = LaunchOptions(
        num_warps=4,
        num_stages=2 if gfx950 and head_dim <= 128 else 1,
        waves_per_eu=2 if head_dim <= 128 and not large and not gfx950 else None,
        matrix_instr_nonkdim=32 if large else 16,
        kpack=2 if head_dim <= 128 else None,
        llvm_fn_attrs=_ITERATIVE_ILP if scheduled else None,
    )
    ahead = not gfx950 and head_dim <= 128
    config = PrefillConfig(
        "dense", why, block_m, block_n, num_splits=splits, ahead=ahead, options=options,
        xcd_rows=xcd_rows(target, shape, block_m), scratch_block=scratch_block(head_dim),
    )  # fmt: skip
    turns = gfx950 and shape.v_dim == head_dim == 128 and plain and splits == 1 and rows >= 256
    if not turns or shape.row_tiles(256) * shape.num_kv_heads < compute_units_of(target):
        return config
    own = LaunchOptions(num_warps=8, num_stages=1, llvm_fn_attrs=f"{_NO_PACKED_FP32},{_ITERATIVE_ILP}")
    return replace(config, ping_pong=replace(config, block_m=256, block_n=64, options=own))


def config_of_call(target: Target, config: PrefillConfig, *, soft_cap: bool) -> PrefillConfig:
    """The configuration of attention over widened keys with what only the call knows.

    CDNA lacks registers for tiles of 128 x 64 beside a soft cap (model TFLOP/s with 64 and 32 keys: gfx942
    220 and 263, gfx950 307 and 348) and beside splits that the caller asks for, see `_amd_dense_config`.
    Beside a soft cap LLVM's strategy crashes the compiler of Triton 3.8 on gfx942.
    """
    if not tuned_as(target).is_amd or not (soft_cap or config.num_splits > 1):
        return config
    options = replace(config.options, llvm_fn_attrs=None) if soft_cap else config.options
    return replace(config, block_n=min(config.block_n, 32), options=options)


def pipelined_config(
    target: Target, shape: PrefillShape, plain: PrefillConfig, k_format: str
) -> PrefillConfig:
    """Two warpgroups of 64 rows, and one that copies tiles of 128 keys in two stages, or of 64 in three.

    Its programs begin where those that widen have left (`launch_pdl`; those of long appends do not). H100,
    32/8 heads: 1k over 0 29.8 us instead of 30.8 (FP8 cache), 128 over 4k 43.8 and 45.4 (FP8), 1k over 4k 136
    and 138 (bf16).

    H100, 1k over 0, tiles of 128 and 64: 96/8 heads 65.3 and 64.1 us (FP8 cache), 65.8 and 64.0 (bf16),
    32/8 heads 33.0 and 30.6 (FP8): less of a tile is masked, and less code is cold. 512 over 1536, 32/8
    heads, 39.3 and 40.9, 1k over 4k, 96/8 heads, 340 and 378.
    """
    block_m = 128
    block_n, stages = (64, 3) if shape.max_seq_len <= 1024 else (128, 2)
    if shape.head_dim > 128:  # 192 of 227 KB of shared memory
        block_n, stages = 64, 2
    if shape.head_dim == 64 and block_n == 128:
        stages = 4  # H200, 64/8 heads, 8k over none: 1213 us, two stages 1311
    # Sequences fill their tiles but for a part of the last one. H200, 8/1 heads, 60 decodes and 4 x 512: 143
    # us for the call; with two splits, by the most tiles that there could be, 188.
    tiles = min(shape.row_tiles(block_m), -(-shape.num_tokens * shape.gqa_ratio // block_m))
    programs = tiles * shape.num_kv_heads
    seldom = shape.num_tokens * shape.gqa_ratio <= _TILES_OF_PAGES * block_m * shape.batch
    # In the tiles of 128 keys of which its costs were measured.
    splits = choose_splits(target, programs, -(-shape.max_seq_len // 128), resident=1)
    return replace(
        plain,
        block_m=block_m,
        block_n=block_n,
        num_splits=splits,
        overlap=True,
        scratch_block=block_n,
        k_in_pages=k_format in ("bf16", "fp16") and seldom and shape.max_seq_len >= _KEYS_IN_PAGES,
        fallback=replace(plain, scratch_block=block_n),
        options=LaunchOptions(num_warps=4, num_stages=stages, launch_pdl=True),
    )


def split_config(
    target: Target, shape: PrefillShape, q_lens: tuple[int, int], block_m: int, why: str
) -> PrefillConfig:
    """Tiles and options of kernel "split", for sequences of `q_lens` query tokens."""
    large_head = shape.head_dim > 128
    if target.is_nvidia:
        block_n, options = 64, LaunchOptions(num_warps=4, num_stages=3)
        if block_m == 16:
            block_n, options = 32, LaunchOptions(num_warps=1, num_stages=3)
        if large_head:
            # H200, 16/8 heads, FP8, 128 over 4k: 64 keys and one stage 88 us, 32 keys and two 121.
            block_n, options = 64, LaunchOptions(num_warps=8 if block_m == 64 else 2, num_stages=1)
        if shape.v_head_dim and block_m == 64:
            # 192 and 128 channels: these spill 8 bytes at most, 64 rows over bf16 304, and 144 in 4 warps; 32
            # rows of 4 warps spill 128 in an append to FP8.
            block_m, options = 32, LaunchOptions(num_warps=8, num_stages=2)
        if shape.head_dim > WIDE_HEAD:
            block_m, block_n, options = 16, 16, _WIDE_IN_PAGES
    else:
        # A CPU takes no target's tiles: the interpreter pays by the tile, not by the key.
        plain = fused_config(target, shape, block_m, why, large_head)
        block_m, block_n, options = plain.block_m, 16 if target.is_amd else 64, plain.options
    config = PrefillConfig(
        "split", why, block_m, block_n, q_lens=q_lens, as_decode=target.is_nvidia, options=options,
        scratch_block=_stored_block(target, shape),
    )  # fmt: skip
    # The interpreter runs programs one after the other.
    compute_units = 1 if target.name == "cpu" else compute_units_of(target)
    slots = -(-_RESIDENT_WARPS * compute_units // (options.num_warps * shape.num_kv_heads))
    return replace(config, num_splits=slots)


def _stored_block(target: Target, shape: PrefillShape) -> int:
    """New tokens that a program of a fused append stores: 32 of wide heads spill 200 bytes on sm90 (FP4)."""
    return 16 if target.is_nvidia and shape.head_dim > WIDE_HEAD else scratch_block(shape.head_dim)


def fused_config(
    target: Target, shape: PrefillShape, block_m: int, why: str, large_head: bool
) -> PrefillConfig:
    """Tiles and options of attention that widens keys in its loop.

    A CPU takes no target's tiles: the interpreter pays by the tile, not by the key.
    """
    if target.is_amd:
        # Smaller tiles of rows spill scalar registers, as do 32 keys a tile beside the merge of splits.
        # 64 rows of 512 channels spill 95 vector registers on gfx942, 32 rows over bf16 27.
        block_m = 64 if shape.head_dim <= WIDE_HEAD else 16
        programs = shape.row_tiles(block_m) * shape.num_kv_heads
        few_keys = large_head or target.is_wave32
        block_n = 16 if few_keys or choose_splits(target, programs, -(-shape.max_seq_len // 16)) > 1 else 32
        # On gfx1250 four waves of 32 lanes spill scalars in appends.
        options = LaunchOptions(
            num_warps=8 if few_keys else 4,
            num_stages=1,
            waves_per_eu=None if few_keys else 2,
            matrix_instr_nonkdim=16,
        )
    else:
        # H200, FP4, 16/8 heads of 256, 128 over 4k: 64 keys 129 us, 32 keys 148.
        block_n = max(32, least_columns(target, block_m)) if large_head else 64
        options = LaunchOptions(num_warps=8 if large_head and block_m == 64 else 4, num_stages=2)
        if shape.head_dim > WIDE_HEAD and target.is_nvidia:  # 32 rows spill
            block_m, block_n, options = 16, 16, _WIDE_IN_PAGES
    programs = shape.row_tiles(block_m) * shape.num_kv_heads
    splits = choose_splits(target, programs, -(-shape.max_seq_len // block_n))
    return PrefillConfig(
        "fused", why, block_m, block_n, num_splits=splits, options=options,
        xcd_rows=xcd_rows(target, shape, block_m) if target.is_amd else 0,
        scratch_block=_stored_block(target, shape),
    )  # fmt: skip
