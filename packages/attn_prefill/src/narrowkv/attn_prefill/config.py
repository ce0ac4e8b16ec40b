"""Launch configuration: a typed function of target, shape and formats, never searched for on the hot path."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from narrowkv.quant.device import BITS, FNUZ_ALIAS, NATIVE, widen_route
from narrowkv.runtime.errors import UnsupportedError, check_choice
from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.targets import Target

KERNELS = ("dense", "fused", "decode")
APPEND_KERNELS = ("pipelined", "apart", "staged", "paged")
SCRATCH_BLOCK = 64  # of widened keys: sequences begin at multiples of it
# Under it the pipelined kernel does not pay for its start. H200, 96/8 heads: 128 new over none 21 us, by the
# plain kernel 14; 1024 over none 75 and 78.
_PIPELINED_KEYS = 512
# Keys of a 16-bit cache stay in their pages where this many tiles of rows read them at most, and from so many
# keys on: copies of 16 rows cost attention 5 %, and widening takes 40 % less. H100, bf16 cache, pages of 16:
# 128 over 32k 182 us instead of 212 (32/8 heads), 1k over 4k 142 and 137, 128 over 4k 47 both.
_TILES_OF_PAGES = 16
_KEYS_IN_PAGES = 8192
# Attention of an append begins early up to as many scores, which take 90 us. H100, 32/8 heads: 128 over 4k
# (FP8) 47 us instead of 49, 1k over 0 34 and 36, but 1k over 4k (bf16) 152 and 141; perhaps since programs
# come to lie on other units where those ahead end one by one.
_SCORES_OF_EARLY_APPENDS = 2**27
_ITERATIVE_ILP = "amdgpu-sched-strategy=iterative-ilp"
_TRITON_FP8 = {"fp8_e4m3fn": "float8e4nv", "fp8_e4m3fnuz": "float8e4b8"}


@dataclass(frozen=True)
class PrefillShape:
    """What a configuration depends on, all of it known without reading the device.

    Attributes:
        batch, num_tokens: sequences, and query tokens of all of them.
        max_q_len: a bound of a sequence's query tokens.
        num_qo_heads, num_kv_heads, head_dim, page_size: sizes.
        max_seq_len: a bound of a sequence's keys.
        kv_tokens: a bound of all sequences' keys together.
        q_dtype: of the query.
    """

    batch: int
    num_tokens: int
    max_q_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_seq_len: int
    kv_tokens: int
    q_dtype: torch.dtype = torch.bfloat16

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def of_any_sequence(self) -> PrefillShape:
        """The same heads, with a batch and bounds that do not depend on the call."""
        return replace(self, batch=1, num_tokens=64, max_q_len=64, max_seq_len=1, kv_tokens=1)

    def row_tiles(self, block_m: int) -> int:
        """A bound of the tiles of packed rows of one KV head, over all sequences."""
        if self.batch == 0:
            return 0
        ragged = (self.num_tokens * self.gqa_ratio + self.batch * (block_m - 1)) // block_m
        return min(ragged, self.batch * -(-self.max_q_len * self.gqa_ratio // block_m))

    def scratch_rows(self, block: int) -> int:
        """Rows of scratch for every sequence's keys in whole blocks."""
        blocks = min(self.kv_tokens // block + self.batch, self.batch * -(-self.max_seq_len // block))
        return max(blocks, 1) * block


@dataclass(frozen=True)
class PrefillConfig:
    """How a prefill runs.

    Attributes:
        kernel: "dense" (widen once, then attend), "fused" (widen in the loop) or "decode"; of an append
            "pipelined" or "apart" (as dense), "staged" (the same in one launch) or "paged" (as fused).
        why: the reason, for people.
        block_m, block_n: rows and keys of a tile.
        own_n: of an append that is not staged: keys of the chunk itself that are taken at a time.
        num_splits: programs that share a tile's keys.
        fp8: the FP8 format of the matrix unit when Q is FP8, else None.
        tma: keys of the scratch come by tensor descriptor.
        overlap: P @ V of a key tile runs during the softmax of the next one.
        scratch_block: widened keys of a sequence begin at multiples of it.
        k_in_pages: K is copied out of its pages, where that can be done, and only V is widened.
        otherwise: where `kernels/pipelined.py` attends, what does when the softmax is capped, the scale not
            positive or queries to be rotated; None where a plain kernel attends anyway.
        options: compiler options of the attention kernel.
    """

    kernel: str
    why: str
    block_m: int = 16
    block_n: int = 16
    own_n: int = 16
    num_splits: int = 1
    fp8: str | None = None
    tma: bool = False
    overlap: bool = False
    scratch_block: int = SCRATCH_BLOCK
    k_in_pages: bool = False
    otherwise: PrefillConfig | None = None
    options: LaunchOptions = field(default_factory=LaunchOptions)


def fp8_unit(target: Target, format_name: str) -> str:
    """The FP8 format that the target's matrix unit takes these bytes as.

    gfx942 multiplies FNUZ only; OCP bytes are the same numbers halved there.

    Raises:
        UnsupportedError: the target's matrix unit does not take the format, and why.
    """
    if format_name not in _TRITON_FP8:
        raise UnsupportedError(
            f"FP8 matrix units are used with {' and '.join(_TRITON_FP8)}, got {format_name}; "
            "16-bit queries read any cache"
        )
    if target.native_fp8 in (format_name, None):
        return format_name
    if target.name == "gfx942" and format_name == "fp8_e4m3fn":
        return "fp8_e4m3fnuz"
    raise UnsupportedError(
        f"{target.name} multiplies {target.native_fp8}, not {format_name}; 16-bit queries read such a cache"
    )


def fp8_route(unit: str, format_name: str) -> str:
    """How stored bytes reach the FP8 matrix unit: as they are, or read as FNUZ."""
    return NATIVE if unit == format_name else FNUZ_ALIAS


def triton_fp8(unit: str) -> str:
    """Triton's name of an FP8 format."""
    return _TRITON_FP8[unit]


def block_m_for(shape: PrefillShape) -> int:
    """Rows of a tile: 64, or fewer where an average sequence has fewer rows."""
    rows = -(-shape.num_tokens * shape.gqa_ratio // max(shape.batch, 1))
    return min(64, max(16, 1 << (rows - 1).bit_length()))


def choose_config(
    target: Target,
    shape: PrefillShape,
    formats: tuple[str, str],
    *,
    q_fp8: str | None,
    scratch_fits: bool,
    can_decode: bool,
    can_pipeline: bool = False,
    plain_keys: bool = True,
    kernel: str | None = None,
) -> PrefillConfig:
    """The shipped configuration.

    Args:
        target: what the kernel will run on.
        shape: the call's shape.
        formats: storage formats of K and V.
        q_fp8: the format of an FP8 query, or None for a 16-bit one.
        scratch_fits: whether widened keys fit the allowed memory.
        can_decode: whether every sequence is known to have one query token.
        can_pipeline: whether `kernels/pipelined.py` takes the formats and runs here.
        plain_keys: whether no key has a descale of its own, and Q is one matrix operand, not a sum of two.
        kernel: forces "dense", "fused" or "decode".

    Raises:
        UnsupportedError: for formats or a forced kernel that cannot serve the call, and why.
    """
    if kernel is not None:
        check_choice("kernel", kernel, KERNELS)
    if set(formats) == {"bf16", "fp16"}:
        raise UnsupportedError(
            "a cache of bf16 and fp16 is refused, as by paged_decode: "
            f"got k={formats[0]}, v={formats[1]}; each with itself or with FP8 or FP4 works"
        )
    if q_fp8 is not None:
        return _fp8_config(target, shape, formats, q_fp8, kernel, scratch_fits, plain_keys)
    block_m = block_m_for(shape)
    tiles = -(-shape.num_tokens * shape.gqa_ratio // (block_m * max(shape.batch, 1)))
    chosen, why = _choose_kernel(target, formats, tiles, scratch_fits, can_decode)
    if kernel is not None:
        if kernel == "decode" and not can_decode:
            raise UnsupportedError(
                "kernel='decode' needs one query token in every sequence: plan with max_q_len=1"
            )
        if kernel == "dense":
            check_scratch(shape, scratch_fits)
        chosen, why = kernel, "as asked"
    if chosen == "decode":
        return PrefillConfig("decode", why)
    wide = shape.head_dim > 128
    if chosen == "dense":
        plain = _dense_config(target, shape, block_m, why, wide, plain_keys)
        pays = block_m == 64 and shape.max_seq_len >= _PIPELINED_KEYS
        return _pipelined_config(target, shape, plain, formats[0]) if can_pipeline and pays else plain
    return _fused_config(target, shape, block_m, why, wide)


def check_scratch(shape: PrefillShape, fits: bool) -> None:
    """Refuses `kernel="dense"` for more widened keys than the allowed memory holds."""
    if not fits:
        raise UnsupportedError(
            f"kernel='dense' needs scratch for {shape.kv_tokens} keys, more than is allowed: "
            "plan with max_kv_tokens or a larger scratch_limit_bytes"
        )


def _choose_kernel(
    target: Target,
    formats: tuple[str, str],
    tiles: int,
    scratch_fits: bool,
    can_decode: bool,
) -> tuple[str, str]:
    """The kernel and why: how often a key tile would be widened in the loop decides."""
    if can_decode:
        return "decode", "every sequence has one query token"
    if target.is_nvidia and scratch_fits:
        return "dense", "keys are widened beforehand"
    if not scratch_fits:
        return "fused", "scratch for widened keys would exceed the limit; max_kv_tokens tightens the bound"
    routes = [widen_route(target, name) for name in formats]
    # H200, 16 new over 4k, 3 tiles: dense 31 us, fused 37 us; over 32k 126 and 125 us.
    least = 4 if target.is_amd and BITS not in routes else 2
    if tiles >= least:
        return "dense", f"each key tile serves {tiles} tiles of rows, so it is widened once beforehand"
    return "fused", f"each key tile serves {tiles} tiles of rows only, so it is widened in the loop"


def units_of(target: Target) -> int:
    """Compute units of the target; two where they are not known."""
    return target.figures.units if target.figures is not None else 2


def widen_options(target: Target, head_dim: int, block: int) -> LaunchOptions:
    """Of programs that widen a block of keys each: a warp has sixteen of its rows, on NVIDIA eight.

    With sixteen a thread of sm90 takes up to 235 registers, so that one program fills a unit. CDNA keeps the
    masks of a wave's rows, and of columns that pad a row, in scalar registers: other head_dims take twice the
    waves there (Triton 3.6 to 3.8 put up to 46 scalars into vector lanes otherwise).
    """
    masks = target.is_amd and head_dim not in (64, 128)
    return LaunchOptions(num_warps=block // (8 if masks or target.is_nvidia else 16), num_stages=1)


def produce_options(target: Target, head_dim: int, block: int) -> LaunchOptions:
    """Of programs that widen a block of keys, or quantise new tokens, before a pipelined append.

    Of those of blocks of 128 two share a unit of sm90 at 64 registers instead of one, which is worth a few
    spills. H200, FP8 cache, 8 KV heads, 16 tokens a program: 1k over 4k 22.3 and 18.2 us, 128 over 32k 89
    and 70.
    """
    options = widen_options(target, head_dim, block)
    return replace(options, maxnreg=64) if block == 128 and head_dim <= 128 else options


def partial_programs(target: Target, resident: int) -> int:
    """Programs with partial results that a launch has at most, which bounds their memory."""
    return 8 * resident * units_of(target)


def _splits(target: Target, programs: int, key_tiles: int, resident: int = 2) -> int:
    """Programs that share a tile's keys: how many finish first.

    In units of a key tile's time, a program's start and its partial result cost 8, and whoever merges 1.5 for
    each. `resident` programs share a unit: two by shared memory on sm90, by registers on CDNA. H200, 96/8
    heads: 16 new over 4k at 1, 5, 11 splits 59, 31, 36 us; 128 over 32k at 1, 4, 11 splits 540, 469, 501 us;
    128 over 4k at 1 and 4 splits 82 and 85 us.
    """
    slots = resident * units_of(target)
    most = min(key_tiles // 4, 32, partial_programs(target, resident) // max(programs, 1))

    def cost(splits: int) -> float:
        waves = -(-programs * splits // slots)
        if splits == 1:
            return waves * (key_tiles + 2.0)
        return waves * (key_tiles / splits + 8) + 1.5 * splits

    return min(range(1, max(1, most) + 1), key=cost)


def _dense_config(
    target: Target, shape: PrefillShape, block_m: int, why: str, wide: bool, plain: bool = True
) -> PrefillConfig:
    if target.is_amd:
        return _amd_dense_config(target, shape, block_m, why, plain)
    # H200, 1k new over 4k, 96/8 heads: 64 x 64 at 4 warps and 3 stages 462 us, 2 stages 510, 64 x 32 509,
    # 128 x 64 at 8 warps 529, 64 x 128 632; by pointers and not descriptors 481.
    block_n = 32 if wide else 64
    options = LaunchOptions(num_warps=8 if wide else 4, num_stages=3)
    splits = _splits(target, shape.row_tiles(block_m) * shape.num_kv_heads, -(-shape.max_seq_len // block_n))
    # The extra round costs a tile. H200, base and overlapped: 1k over 0 78 and 86 us, 1k over 4k 444 and 443,
    # 128 over 32k in 4 splits 469 and 439.
    # Tiles of few rows always have it, so that tables of any width compile the same kernels.
    overlap = target.is_nvidia and not wide and (shape.max_seq_len >= 4096 or block_m < 64)
    return PrefillConfig(
        "dense", why, block_m, block_n, num_splits=splits, tma=target.name == "sm90", overlap=overlap,
        options=options,
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
    867 -> 932; under Triton 3.8 it crashes the compiler beside factors of keys, where it gains 2%. Tiles of
    64 rows: gfx942 375 -> 396 by `kpack` and the strategy, gfx950 482 -> 786 by the second stage.

    plain: no factors of single keys, and Q is one term.
    """
    gfx950 = target.name == "gfx950"
    head_dim = shape.head_dim
    rows = -(-shape.num_tokens * shape.gqa_ratio // max(shape.batch, 1))
    large = head_dim in (64, 128) and rows >= 128
    # Fewer tiles than compute units would leave some idle.
    large = large and shape.row_tiles(128) * shape.num_kv_heads >= units_of(target)
    block_m = 128 if large else block_m
    programs = shape.row_tiles(block_m) * shape.num_kv_heads
    block_n = 16 if head_dim > 128 else 32
    splits = _splits(target, programs, -(-shape.max_seq_len // block_n))
    if large and plain and (splits == 1 or programs >= 2 * units_of(target)):
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
    return PrefillConfig("dense", why, block_m, block_n, num_splits=splits, options=options)


def for_rules(target: Target, config: PrefillConfig, *, soft_cap: bool) -> PrefillConfig:
    """The configuration of attention over widened keys for what is known at the call only.

    CDNA lacks registers for tiles of 128 x 64 beside a soft cap (model TFLOP/s with 64 and 32 keys: gfx942
    220 and 263, gfx950 307 and 348) and beside splits that the caller asks for, see `_amd_dense_config`.
    """
    if target.is_amd and (soft_cap or config.num_splits > 1):
        return replace(config, block_n=min(config.block_n, 32))
    return config


def _pipelined_config(
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
    programs = shape.row_tiles(block_m) * shape.num_kv_heads
    seldom = shape.num_tokens * shape.gqa_ratio <= _TILES_OF_PAGES * block_m * shape.batch
    # In the tiles of 128 keys of which its costs were measured.
    splits = _splits(target, programs, -(-shape.max_seq_len // 128), resident=1)
    return replace(
        plain,
        block_m=block_m,
        block_n=block_n,
        num_splits=splits,
        overlap=True,
        scratch_block=block_n,
        k_in_pages=k_format in ("bf16", "fp16") and seldom and shape.max_seq_len >= _KEYS_IN_PAGES,
        otherwise=replace(plain, scratch_block=block_n),
        options=LaunchOptions(num_warps=4, num_stages=stages, launch_pdl=True),
    )


def _fused_config(target: Target, shape: PrefillShape, block_m: int, why: str, wide: bool) -> PrefillConfig:
    if target.is_amd:
        # Smaller tiles of rows spill scalar registers, as do 32 keys a tile next to the merge of splits.
        block_m = 64
        programs = shape.row_tiles(block_m) * shape.num_kv_heads
        block_n = 16 if wide or _splits(target, programs, -(-shape.max_seq_len // 16)) > 1 else 32
        options = LaunchOptions(
            num_warps=8 if wide else 4,
            num_stages=1,
            waves_per_eu=None if wide else 2,
            matrix_instr_nonkdim=16,
        )
    else:
        block_n = 32 if wide else 64
        options = LaunchOptions(num_warps=8 if wide and block_m == 64 else 4, num_stages=2)
    programs = shape.row_tiles(block_m) * shape.num_kv_heads
    splits = _splits(target, programs, -(-shape.max_seq_len // block_n))
    return PrefillConfig("fused", why, block_m, block_n, num_splits=splits, options=options)


def _fp8_config(
    target: Target,
    shape: PrefillShape,
    formats: tuple[str, str],
    q_fp8: str,
    kernel: str | None,
    scratch_fits: bool,
    plain_keys: bool,
) -> PrefillConfig:
    """Dense where a key tile serves enough tiles of rows, but not on NVIDIA.

    K's bytes are multiplied as they are stored, and P by V in float16: P as one E4M3 number would be off by
    2%, as two it takes the matrix unit as long and the vector ALU longer. Model TFLOP/s of the loop, 96/8
    heads, in brackets from pages with P as two terms: gfx942 652 (210) in tiles of 128 x 64; gfx950 1161
    (293) in tiles of 128 x 32, 1010 in tiles of 128 x 64, whose registers leave room for one wave a SIMD.
    """
    if set(formats) != {q_fp8}:
        raise UnsupportedError(
            f"an FP8 query needs K and V in its own format {q_fp8}, got k={formats[0]}, v={formats[1]}; "
            "a 16-bit query reads any cache"
        )
    if kernel == "decode" or (kernel == "dense" and target.is_nvidia):
        raise UnsupportedError(
            f"an FP8 query has kernel='fused'{'' if target.is_nvidia else ' and kernel=' + repr('dense')} "
            f"on {target.name}, got {kernel!r}"
        )
    if kernel == "dense":
        check_scratch(shape, scratch_fits)
    unit = fp8_unit(target, q_fp8)
    wide = shape.head_dim > 128
    block_m = block_m_for(shape)
    tiles = -(-shape.num_tokens * shape.gqa_ratio // (block_m * max(shape.batch, 1)))
    if kernel == "dense" or (kernel is None and not target.is_nvidia and scratch_fits and tiles >= 2):
        why = f"each key tile serves {tiles} tiles of rows, so it is gathered once beforehand"
        plain = plain_keys and target.name != "gfx950"
        return replace(_dense_config(target, shape, block_m, why, wide, plain), fp8=unit)
    base = _fused_config(target, shape, block_m, "FP8 matrix units take the cache as it is", wide)
    options = replace(base.options, num_warps=8) if target.is_amd else base.options  # 4 spill scalars
    return replace(base, block_n=_fp8_block_n(target), fp8=unit, options=options)


def _fp8_block_n(target: Target) -> int:
    """Keys of a tile for FP8 matrix instructions, which sum over 32 keys and more; 64 spill on CDNA.

    On sm90 under Triton 3.6 a product 32 columns wide next to a wider one comes out wrong (relative L1 0.9).
    """
    return 64 if target.is_nvidia else 32


def choose_append_config(
    target: Target,
    shape: PrefillShape,
    formats: tuple[str, str],
    q_format: str,
    *,
    fp8_compute: bool,
    scratch_fits: bool,
    can_pipeline: bool = False,
    kernel: str | None = None,
) -> PrefillConfig:
    """The shipped configuration of `prefill_append`.

    Args:
        target, shape, formats, scratch_fits, can_pipeline: as for `choose_config`.
        q_format: of the query and of the new tokens.
        fp8_compute: old tokens go to the FP8 matrix unit as they are stored.
        kernel: forces "pipelined", "apart", "staged" or "paged".

    Raises:
        UnsupportedError: for formats or a forced kernel that cannot serve the call, and why.
    """
    if kernel is not None:
        check_choice("kernel", kernel, APPEND_KERNELS)
    if set(formats) == {"bf16", "fp16"}:
        raise UnsupportedError(
            f"a cache of bf16 and fp16 is refused, as by paged_decode: got k={formats[0]}, v={formats[1]}"
        )
    wide = shape.head_dim > 128
    if fp8_compute:
        if len(set(formats)) > 1 or not formats[0].startswith("fp8_"):
            raise UnsupportedError(
                "fp8_compute needs K and V in one FP8 format, "
                f"got k={formats[0]}, v={formats[1]}; without it any cache works"
            )
        if kernel not in (None, "paged"):
            raise UnsupportedError(f"fp8_compute has kernel='paged' only, got {kernel!r}")
        unit = fp8_unit(target, formats[0])
        block_m = block_m_for(shape)
        base = _fused_config(target, shape, block_m, "FP8 matrix units take the old tokens as they are", wide)
        options = replace(base.options, num_warps=8) if target.is_amd else base.options  # 4 spill
        return replace(base, kernel="paged", block_n=_fp8_block_n(target), fp8=unit, options=options)
    block_m = block_m_for(shape)
    tiles = -(-shape.num_tokens * shape.gqa_ratio // (block_m * max(shape.batch, 1)))
    exact = formats[0] not in ("bf16", "fp16") or formats[0] == q_format
    # Blocks of keys are waited for within the launch. AMD's chiplets share no L2, so what one publishes
    # another sees only through memory: nothing waits there.
    lacks = (
        f"keys in {formats[0]} and new ones in {q_format} in one scratch"
        if not exact
        else f"scratch for {shape.kv_tokens} keys, more than is allowed"
        if not scratch_fits
        else f"one L2 for all programs, which {target.name} lacks"
        if target.is_amd
        else ""
    )
    if kernel == "pipelined" and not can_pipeline:
        lacks = lacks or f"Hopper, head_dim 64 or 128 and one descale for many keys, got {target.name}"
    if kernel not in (None, "paged") and lacks:
        raise UnsupportedError(f"kernel={kernel!r} needs {lacks}; kernel='paged' works")
    if kernel not in (None, "paged") or (
        kernel is None and not lacks and (target.is_nvidia or tiles >= (2 if target.name == "cpu" else 8))
    ):
        why = f"each key tile serves {tiles} tiles of rows, so it is widened once beforehand"
        staged = replace(_dense_config(target, shape, block_m, why, wide), kernel="staged")
        # H200: two launches that each suit their work beat the one that must suit both.
        two = kernel is None and can_pipeline and block_m == 64
        if kernel == "apart" or (two and shape.max_seq_len < _PIPELINED_KEYS):
            return replace(staged, kernel="apart")
        if kernel == "pipelined" or two:
            pipelined = _pipelined_config(target, shape, staged, formats[0])
            scores = shape.num_tokens * shape.num_qo_heads * shape.max_seq_len
            options = replace(pipelined.options, launch_pdl=scores <= _SCORES_OF_EARLY_APPENDS)
            return replace(pipelined, kernel="pipelined", otherwise=staged, options=options)
        return staged
    base = _fused_config(target, shape, block_m, "old tokens are widened in the loop", wide)
    # Two loops share the registers: 32 keys spill on gfx942.
    return replace(base, kernel="paged", block_n=16 if target.is_amd else base.block_n)
