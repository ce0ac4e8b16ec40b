"""Shapes of prefills, and the tiles, splits and compiler options for them, each beside its measurement."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowkv.attn_decode.launch import TALL_FORMATS
from narrowkv.attn_decode.tiles import TALL_TILES, tall_tile
from narrowkv.paged_cache.layouts import HeadShape
from narrowkv.runtime.choices import ConfigRow, choice_for
from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.targets import TARGETS, Target

ANY_LEN = 2**31 - 1  # a bound of query tokens that no sequence exceeds
IN_PAGES = ("fused", "split")  # kernels that read the cache in its pages
SCRATCH_BLOCK = 64  # keys; each sequence's widened keys begin at a multiple of it
WIDE_HEAD = 256  # channels; wider heads have tiles of their own
# Keys of a 16-bit cache stay in their pages where at most so many tiles of a sequence's rows read them, and
# from so many keys on: copies of 16 rows cost attention 5 %, and widening takes 40 % less. H100, bf16 cache,
# pages of 16: 128 over 32k 182 us instead of 212 (32/8 heads), 1k over 4k 142 and 137, 128 over 4k 47 both.
# H200, 128 over 4k 46.9 instead of 50.3.
_TILES_OF_PAGES = 16
_KEYS_IN_PAGES = 4096
# Warps of a kernel that reads pages which a compute unit holds at once: sm90 at 255 registers, CDNA two waves
# on each of four SIMDs.
_RESIDENT_WARPS = 8
# gfx950 issues packed float32 arithmetic only while the matrix unit is idle.
_NO_PACKED_FP32 = "target-features=-packed-fp32-ops"
_ITERATIVE_ILP = "amdgpu-sched-strategy=iterative-ilp"
_FEWEST_REGISTERS = "amdgpu-sched-strategy=iterative-minreg"
_LARGE_HEAD, _WIDER = range(129, 1 << 30), range(WIDE_HEAD + 1, 1 << 30)


def scratch_block(head_dim: int) -> int:
    """`SCRATCH_BLOCK`, or 16 keys of wide heads.

    A program that widens or stores 32 keys of 512 channels over FP4 spills: on sm90 200 bytes, on gfx942 19
    vector registers and 56 scalars.
    """
    return SCRATCH_BLOCK if head_dim <= WIDE_HEAD else 16


@dataclass(frozen=True)
class PrefillShape(HeadShape):
    """The sizes that a configuration depends on; all are known without reading the device.

    Attributes:
        batch, num_tokens: sequences, and query tokens of all of them.
        max_q_len: a bound of a sequence's query tokens.
        num_qo_heads, num_kv_heads, head_dim, page_size: sizes.
        max_seq_len: a bound of a sequence's keys.
        kv_tokens: a bound of all sequences' keys together.
        q_dtype: of the query.
        min_q_len: the fewest query tokens that sequences are expected to have: classes of fewer have no
            launches. Sequences that have fewer are served by those of the next class.
        v_head_dim: channels of V where they are fewer than those of Q and K, else 0; `v_dim` says how many.
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
    min_q_len: int = 0
    v_head_dim: int = 0

    def of_any_sequence(self) -> PrefillShape:
        """The same heads, with a batch and bounds that do not depend on the call."""
        return replace(self, batch=1, num_tokens=64, max_q_len=64, max_seq_len=1, kv_tokens=1, min_q_len=0)

    def sequences_with(self, q_len: int) -> int:
        """The most sequences that can have at least `q_len` query tokens each."""
        return min(self.batch, self.num_tokens // max(q_len, 1)) if q_len > 1 else self.batch

    def row_tiles(self, block_m: int, most_len: int = ANY_LEN) -> int:
        """The most tiles of packed rows of one KV head, over sequences of at most `most_len` tokens."""
        if self.batch == 0:
            return 0
        ragged = (self.num_tokens * self.gqa_ratio + self.batch * (block_m - 1)) // block_m
        longest = min(self.max_q_len, most_len)
        return min(ragged, self.batch * -(-longest * self.gqa_ratio // block_m))

    def scratch_rows(self, block: int, sequences: int) -> int:
        """Rows of scratch for the keys of `sequences` sequences, in whole blocks."""
        tokens = min(self.kv_tokens, sequences * self.max_seq_len)
        blocks = min(tokens // block + sequences, sequences * -(-self.max_seq_len // block))
        return max(blocks, 1) * block


@dataclass(frozen=True)
class PrefillConfig:
    """How a prefill runs.

    Attributes:
        kernel: "dense" (widen once, then attend), "fused" (widen in the loop), "split" (the same in equal
            shares of all keys) or "decode"; of an append "append_then_attend" (as dense), "pipelined" (the
            same by Hopper's kernel), "fused" or "split".
        why: the reason, for people.
        block_m, block_n: rows and keys of a tile.
        own_n: of a fused append: keys of the chunk itself that a program attends to at once.
        num_splits: programs that share a tile's keys; of "split" those of a KV head that run at once.
        q_lens: the fewest and the most query tokens of the sequences that it serves.
        stores: whether its launches store the new tokens of an append.
        short_queries: configurations of launches before it, for sequences with fewer query tokens.
        fp8: the FP8 format of the matrix unit when Q is FP8, else None.
        tma: keys of the scratch come by tensor descriptor.
        overlap: P @ V of a key tile runs during the softmax of the next one.
        ahead: keys and values of a tile are loaded to registers while the tile before is multiplied.
        scratch_block: widened keys of a sequence begin at multiples of it.
        k_in_pages: K is copied out of its pages, where that can be done, and only V is widened.
        fallback: where `kernels/pipelined.py` attends, what does when the scale is not positive or queries
            are to be rotated; None where a plain kernel attends anyway.
        ping_pong: on gfx950 the configuration of `kernels/cdna.py`, for calls that it serves; else None.
        tall: the configuration of Hopper's `kernels/tall.py`, for causal calls without a window, a soft cap
            or a key transform; None if that kernel does not support the shape or the formats.
        is_tall: whether this is a configuration of that kernel.
        as_decode: the loop over pages is that of decode, whose loads the compiler pipelines.
        xcd_rows: tiles of rows that an XCD takes of a KV head before the next one, see `xcd_order`; 0 for the
            order of the launch.
        options: compiler options of the attention kernel.
    """

    kernel: str
    why: str
    block_m: int = 16
    block_n: int = 16
    own_n: int = 16
    num_splits: int = 1
    q_lens: tuple[int, int] = (0, ANY_LEN)
    stores: bool = True
    short_queries: tuple[PrefillConfig, ...] = ()
    fp8: str | None = None
    tma: bool = False
    overlap: bool = False
    ahead: bool = False
    scratch_block: int = SCRATCH_BLOCK
    k_in_pages: bool = False
    fallback: PrefillConfig | None = None
    ping_pong: PrefillConfig | None = None
    tall: PrefillConfig | None = None
    is_tall: bool = False
    as_decode: bool = False
    xcd_rows: int = 0
    options: LaunchOptions = field(default_factory=LaunchOptions)

    @property
    def reading(self) -> str:
        """How its kernels read the cache: a key of `BoundCache.readings`."""
        if self.kernel not in IN_PAGES:
            return "to_scratch"
        if self.is_tall:
            return "in_tall_tiles"
        return "in_large_tiles" if self.as_decode and self.block_m >= 64 else "in_loop"

    def kind(self) -> PrefillConfig:
        """The parts that kernels and memory depend on."""
        split = self.kernel == "split"
        return replace(
            self,
            why="",
            num_splits=self.num_splits if split else min(self.num_splits, 2),
            q_lens=self.q_lens if split else (0, ANY_LEN),
            short_queries=tuple(part.kind() for part in self.short_queries),
            fallback=None if self.fallback is None else self.fallback.kind(),
            ping_pong=None if self.ping_pong is None else self.ping_pong.kind(),
            tall=None if self.tall is None else self.tall.kind(),
        )

    def explain(self) -> str:
        """The kernel, its reason, the tile and the splits, for a person."""
        warps = f"{self.options.num_warps} warps"
        if self.fallback is not None:
            warps = "two warpgroups that attend and a warp that copies"
        splits = "" if self.num_splits == 1 else f", the keys of each shared by {self.num_splits} programs"
        if self.kernel == "split":
            splits = f", all keys of a head shared by {self.num_splits} programs or more"
        pages = ", K from its pages where they allow it" if self.k_in_pages else ""
        plain = ""
        if self.tall is not None:
            plain = f"; in plain calls tiles of {self.tall.block_m} rows x {self.tall.block_n} keys"
        return (
            f"{self.kernel}, because {self.why}; tiles of {self.block_m} rows x {self.block_n} keys, "
            f"{warps}, {self.options.num_stages} stages{splits}{pages}{plain}"
        )


@dataclass(frozen=True)
class PrefillTile:
    """Keys of a tile, compiler options, and rows where the hardware takes no others than these.

    resident: of attention over widened keys, how many programs run on a compute unit at once.
    """

    block_n: int
    options: LaunchOptions
    block_m: int = 0
    resident: int = 2


def _options(num_warps: int, num_stages: int, maxnreg: int | None = None, **others: Any) -> LaunchOptions:
    return LaunchOptions(num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg, **others)


def _cdna(nonkdim: int, num_stages: int = 1, **others: Any) -> LaunchOptions:
    return _options(4, num_stages, matrix_instr_nonkdim=nonkdim, kpack=2, **others)


_WIDE_IN_PAGES = (
    "32 keys spill 16 to 40 bytes over bf16 and over FP8 keys with FP4 values, 32 rows spill. Without the "
    "limit the compiler stops at 128 registers for some, and spills"
)

_K192_V128 = {
    "target": "sm90", "head_dim": range(129, WIDE_HEAD + 1), "v_dim": range(129), "block_m": 64,
}  # fmt: skip
_OF_K192_V128 = (
    "H200, 192 and 128 channels, 16/16 heads, 2k over 4k, bf16 and FP8: 128 rows 434 and 420 us, 64 rows of "
    "4 warps with one stage 484 and 458, with two 577 and 560, of 8 warps 795 and 769"
)

# Attention over widened keys on NVIDIA. Facts of this table and the next two: target, vendor, block_m,
# head_dim, v_dim, v_narrow (V has fewer channels than K), fills (tiles of 128 rows fill the GPU).
DENSE_ROWS = (
    ConfigRow({**_K192_V128, "fills": True}, PrefillTile(64, _options(8, 2), block_m=128, resident=1),
        _OF_K192_V128),
    ConfigRow(_K192_V128, PrefillTile(64, _options(4, 1)), _OF_K192_V128),
    ConfigRow({"head_dim": _WIDER, "block_m": 16}, PrefillTile(16, _options(8, 2))),
    ConfigRow({"head_dim": _WIDER}, PrefillTile(16, _options(8, 2), block_m=32),
        "A tile's keys have one factor, that of their block in the scratch, which has 16 keys"),
    ConfigRow({"head_dim": _LARGE_HEAD, "block_m": (64, 128)}, PrefillTile(64, _options(8, 2)),
        "Two stages of 64 keys of 256 channels take 160 of 227 KB. H200, FP4, 16/8 heads, 1k over 4k: 322 "
        "us, one stage 417, three of 32 keys 380"),
    ConfigRow({"head_dim": _LARGE_HEAD}, PrefillTile(32, _options(8, 3))),
    ConfigRow({}, PrefillTile(64, _options(4, 3)),
        "H200, 1k new over 4k, 96/8 heads: 64 x 64 at 4 warps and 3 stages 462 us, 2 stages 510, 64 x 32 "
        "509, 128 x 64 at 8 warps 529, 64 x 128 632; by pointers and not descriptors 481"),
)  # fmt: skip

_ONE_KV_HEAD = {"target": "sm90", "head_dim": 128, "block_m": 16, "kv_heads": 1}
_OF_ONE_KV_HEAD = (
    "A sequence has so many splits that two warps, which merge them sooner, gain. H200, 60 decodes and 4 x "
    "512, 8/1 heads: "
)

# Kernel "split" on NVIDIA. Facts besides those of `DENSE_ROWS`: formats, of K and V with a slash; kv_heads.
SPLIT_ROWS = (
    ConfigRow({"head_dim": _WIDER}, PrefillTile(16, _options(8, 2, 255), block_m=16), _WIDE_IN_PAGES),
    ConfigRow({"v_narrow": True, "block_m": 64}, PrefillTile(64, _options(8, 2), block_m=32),
        "192 and 128 channels: these spill 8 bytes at most, 64 rows over bf16 304, and 144 in 4 warps; 32 "
        "rows of 4 warps spill 128 in an append to FP8"),
    ConfigRow({"head_dim": _LARGE_HEAD, "block_m": 64}, PrefillTile(64, _options(8, 1)),
        "H200, 16/8 heads, FP8, 128 over 4k: 64 keys and one stage 88 us, 32 keys and two 121"),
    ConfigRow({"head_dim": _LARGE_HEAD}, PrefillTile(64, _options(2, 1))),
    ConfigRow({**_ONE_KV_HEAD, "formats": "fp8_e4m3fn/fp8_e4m3fn"}, PrefillTile(64, _options(2, 3)),
        _OF_ONE_KV_HEAD + "FP8 108 us, 32 keys and one warp 112"),
    ConfigRow({**_ONE_KV_HEAD, "formats": "bf16/bf16"}, PrefillTile(32, _options(2, 3)),
        _OF_ONE_KV_HEAD + "bf16 128 us, one warp 137, 64 keys 137"),
    ConfigRow({"block_m": 16}, PrefillTile(32, _options(1, 3))),
    ConfigRow({"block_m": 32, "formats": "fp8_e4m3fn/fp8_e4m3fn"}, PrefillTile(64, _options(2, 3)),
        "H200, FP8, 2 tokens of 64 sequences of 8192 keys at ratio 12, 286 us, in tiles of 64 rows 445"),
    ConfigRow({"block_m": 32, "formats": "fp8_e4m3fn/fp4_e2m1"}, PrefillTile(64, _options(2, 3)),
        "The same: 406 us, 32 keys and one warp 698, 64 rows 581"),
    ConfigRow({"block_m": 32, "formats": "fp4_e2m1/fp4_e2m1"}, PrefillTile(32, _options(1, 3)),
        "The same: 451 us, two warps 479, 64 rows 529"),
    ConfigRow({"block_m": 32}, PrefillTile(32, _options(2, 3)), "The same, bf16: 496 us, 64 rows 573"),
    ConfigRow({"target": "sm90", "head_dim": 128, "block_m": 64, "formats": "fp8_e4m3fn/fp8_e4m3fn"},
        PrefillTile(128, _options(4, 3)),
        "H100, FP8, 4 tokens of 64 sequences of 8192 keys at ratio 12, 448 us and, with 64 keys, 502 us; 8 "
        "tokens 851 and 976 us"),
    ConfigRow({}, PrefillTile(64, _options(4, 3))),
)  # fmt: skip

# Attention that widens keys in its loop, on NVIDIA and on a CPU, where the interpreter pays by the tile, not
# by the key. Tiles of warpgroups have 64 keys: see `least_columns`.
FUSED_ROWS = (
    ConfigRow({"vendor": "nvidia", "head_dim": _WIDER}, PrefillTile(16, _options(8, 2, 255), block_m=16),
        _WIDE_IN_PAGES),
    ConfigRow({"vendor": "nvidia", "v_narrow": True, "block_m": 64}, PrefillTile(64, _options(8, 2, 255)),
        "192 and 128 channels: without the limit Triton 3.9.0 spills 80 bytes in an append to bf16; 3.8.0 "
        "takes as many registers with it"),
    ConfigRow({"vendor": "nvidia", "head_dim": _LARGE_HEAD, "block_m": 64}, PrefillTile(64, _options(8, 2)),
        "H200, FP4, 16/8 heads of 256, 128 over 4k: 64 keys 129 us, 32 keys 148"),
    ConfigRow({"head_dim": _LARGE_HEAD, "block_m": 64}, PrefillTile(32, _options(8, 2))),
    ConfigRow({"head_dim": _LARGE_HEAD}, PrefillTile(32, _options(4, 2))),
    ConfigRow({}, PrefillTile(64, _options(4, 2))),
)  # fmt: skip

# Kernel "pipelined": two warpgroups of 64 rows. Facts: head_dim, short (at most 1024 keys).
PIPELINED_ROWS = (
    ConfigRow({"head_dim": _LARGE_HEAD}, PrefillTile(64, _options(4, 2)), "192 of 227 KB of shared memory"),
    ConfigRow({"short": True}, PrefillTile(64, _options(4, 3)),
        "Less of a tile is masked, and less code is cold. H100, 1k over 0, tiles of 128 and 64: 96/8 heads "
        "65.3 and 64.1 us (FP8 cache), 65.8 and 64.0 (bf16), 32/8 heads 33.0 and 30.6 (FP8)"),
    ConfigRow({"head_dim": 64}, PrefillTile(128, _options(4, 4)),
        "H200, 64/8 heads, 8k over none: 1213 us, two stages 1311"),
    ConfigRow({}, PrefillTile(128, _options(4, 2)),
        "H100, 512 over 1536, 32/8 heads, 39.3 us and, with tiles of 64, 40.9; 1k over 4k, 96/8 heads, 340 "
        "and 378"),
)  # fmt: skip

# Attention over widened keys on CDNA, by `narrowkv inspect model --case`, hot loop, model TFLOP/s at 96/8
# heads. Tiles of 128 rows have 64 keys where `plain` and splits allow it (`_amd_dense_config`); figures that
# name no keys are of those. In brackets 64 x 32 with 16 x 16 instructions, one stage and registers for two
# waves a SIMD. Facts: target, head_dim, tall (128 rows), plain (no factors of single keys; Q is one term).
CDNA_DENSE_ROWS = (
    ConfigRow({"head_dim": _WIDER, "target": ("gfx90a", "gfx942"), "plain": False},
        PrefillTile(16, _options(8, 1, matrix_instr_nonkdim=16)),
        "With factors of keys four waves of 512 channels spill a register under Triton 3.9.0"),
    ConfigRow({"head_dim": _LARGE_HEAD}, PrefillTile(16, _options(4, 1, matrix_instr_nonkdim=16))),
    ConfigRow({"target": "gfx950", "tall": True, "plain": True, "head_dim": 64},
        PrefillTile(32, _cdna(32, num_stages=2, llvm_fn_attrs=_ITERATIVE_ILP)),
        "head_dim 64 932 (482), without iterative-ilp 867"),
    ConfigRow({"target": "gfx950", "tall": True}, PrefillTile(32, _cdna(32, num_stages=2)),
        "Plain 1087 (482), soft cap 307 (300); one stage 706, a third stage and 256 rows nothing; "
        "iterative-ilp 1043. 32 keys: descale of each key 453 (346, 328), three splits 905 (827, 492)"),
    ConfigRow({"target": "gfx950"}, PrefillTile(32, _cdna(16, num_stages=2)),
        "Tiles of 64 rows 482 -> 786 by the second stage"),
    ConfigRow({"tall": True, "plain": True}, PrefillTile(32, _cdna(32, llvm_fn_attrs=_ITERATIVE_ILP)),
        "gfx942: plain 521 (375), head_dim 64 422 (289), soft cap 220 (254), window 529 (363); without "
        "iterative-ilp 334. A second stage adds LDS bank conflicts: 128 x 32 with one stage 460, with two "
        "355. Storing V transposed changes nothing (521). Three splits, 32 keys 458 (371, 366). The tiles "
        "take 272 registers and one wave a SIMD under Triton 3.8, 248 and two under 3.9; see "
        "docs/amd-timing.md for what was tried"),
    ConfigRow({"tall": True}, PrefillTile(32, _cdna(32)),
        "gfx942: descale of each key 293 (with 64 keys 319, but spills beside a cap and a window; before "
        "246), fp16 queries over bf16 501 (437, 475). Beside factors of keys iterative-ilp gains 2%, and "
        "crashes the compiler of Triton 3.8"),
    ConfigRow({"plain": True}, PrefillTile(32, _cdna(16, waves_per_eu=2, llvm_fn_attrs=_ITERATIVE_ILP)),
        "gfx942: tiles of 64 rows 375 -> 396 by `kpack` and iterative-ilp"),
    ConfigRow({}, PrefillTile(32, _cdna(16, waves_per_eu=2))),
)  # fmt: skip


def _tile_facts(target: Target, shape: PrefillShape, block_m: int) -> dict[str, Any]:
    """What the tables for NVIDIA and a CPU name of a call."""
    return {
        "target": target.name, "vendor": target.vendor, "block_m": block_m, "head_dim": shape.head_dim,
        "v_dim": shape.v_dim, "v_narrow": shape.v_head_dim > 0,
        "fills": shape.row_tiles(128) * shape.num_kv_heads >= compute_units_of(target),
    }  # fmt: skip


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
    """Options of programs that widen a block of keys each: a warp has 16 of its rows, NVIDIA has 16 warps.

    With eight a thread of sm90 takes up to 235 registers, so that one program fills a multiprocessor. H200,
    appends in blocks of 64 keys by 8 warps and by 16: 1k over 0, 32/8 heads, 39.1 and 35.7 us, 128 over 4k,
    16/8 heads of 256, 86.7 and 81.2. CDNA
    keeps the masks of a wave's rows, and of columns that pad a row, in scalar registers: other head_dims take
    twice the waves there (Triton 3.8 puts up to 46 scalars into vector lanes otherwise).

    Before the pipelined kernel blocks have 128 keys. At 64 registers two programs share a multiprocessor of
    sm90 instead of one, which is worth a few spills. H200, an append to an FP8 cache, 8 KV heads,
    16 tokens a program: 1k over 4k 22.3 and 18.2 us, 128 over 32k 89 and 70.
    """
    masks = target.is_amd and head_dim not in (64, 128)
    warps = block // (2 if head_dim > WIDE_HEAD else 8 if masks else 16)
    if target.is_nvidia and head_dim <= WIDE_HEAD:
        warps = 16
    most = 64 if block == 128 and head_dim <= 128 else None
    if target.is_nvidia and head_dim > WIDE_HEAD:
        most = 255  # the compiler stops at 128 registers, and spills up to 16 bytes
    return LaunchOptions(num_warps=warps, num_stages=1, maxnreg=most)


def partial_programs(target: Target, resident: int) -> int:
    """Programs with partial results that a launch has at most, which bounds their memory."""
    return 8 * resident * compute_units_of(target)


def most_work_items(shape: PrefillShape, config: PrefillConfig) -> int:
    """The most splits of a KV head that kernel "split" makes; see `find_share`.

    As many as run at once, or for many tiles of rows up to twice as many as those. In tall tiles, of which a
    program fills a multiprocessor, as many and one more for each tile of rows.
    """
    tiles = shape.row_tiles(config.block_m, config.q_lens[1])
    if config.is_tall:
        return config.num_splits + tiles
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


def dense_config(target: Target, shape: PrefillShape, block_m: int, why: str, plain: bool) -> PrefillConfig:
    """Tiles and options of attention over widened keys.

    plain: no factors of single keys, and Q is one term.
    """
    if target.is_wave32:
        return replace(fused_config(target, shape, block_m, why), kernel="dense")
    if tuned_as(target).is_amd:
        return _amd_dense_config(tuned_as(target), shape, block_m, why, plain)
    tile = choice_for(DENSE_ROWS, _tile_facts(target, shape, block_m))
    block_m, block_n = tile.block_m or block_m, tile.block_n
    splits = choose_splits(
        target, shape.row_tiles(block_m) * shape.num_kv_heads, -(-shape.max_seq_len // block_n), tile.resident
    )
    # The extra round costs a tile. H200, base and overlapped: 1k over 0 78 and 86 us, 1k over 4k 444 and 443,
    # 128 over 32k in 4 splits 469 and 439.
    # Tiles of few rows always have it, so that tables of any width compile the same kernels.
    overlap = target.is_nvidia and shape.head_dim <= 128 and (shape.max_seq_len >= 4096 or block_m < 64)
    return PrefillConfig(
        "dense", why, block_m, block_n, num_splits=splits, overlap=overlap, options=tile.options,
        tma=target.name == "sm90" and shape.head_dim <= WIDE_HEAD,
        scratch_block=scratch_block(shape.head_dim),
    )  # fmt: skip


def _amd_dense_config(
    target: Target, shape: PrefillShape, block_m: int, why: str, plain: bool
) -> PrefillConfig:
    """Tiles and options on CDNA.

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
    tile = choice_for(
        CDNA_DENSE_ROWS, {"target": target.name, "head_dim": head_dim, "tall": large, "plain": plain}
    )
    block_n = tile.block_n
    splits = choose_splits(target, programs, -(-shape.max_seq_len // block_n))
    if large and plain and (splits == 1 or programs >= 2 * compute_units_of(target)):
        # Splits would fill the last round of programs better, but cost as much as that saves.
        block_n, splits = 64, 1
    ahead = not gfx950 and head_dim <= 128
    config = PrefillConfig(
        "dense", why, block_m, block_n, num_splits=splits, ahead=ahead, options=tile.options,
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
    """
    block_m = 128
    facts = {"head_dim": shape.head_dim, "short": shape.max_seq_len <= 1024}
    tile = choice_for(PIPELINED_ROWS, facts)
    # Sequences fill their tiles but for a part of the last one. H200, 8/1 heads, 60 decodes and 4 x 512: 143
    # us for the call; with two splits, by the most tiles that there could be, 188.
    tiles = min(shape.row_tiles(block_m), -(-shape.num_tokens * shape.gqa_ratio // block_m))
    programs = tiles * shape.num_kv_heads
    longest = min(shape.max_q_len, shape.num_tokens)
    seldom = longest * shape.gqa_ratio <= _TILES_OF_PAGES * block_m
    # In the tiles of 128 keys of which its costs were measured.
    splits = choose_splits(target, programs, -(-shape.max_seq_len // 128), resident=1)
    return replace(
        plain,
        block_m=block_m,
        block_n=tile.block_n,
        num_splits=splits,
        overlap=True,
        scratch_block=tile.block_n,
        k_in_pages=k_format in ("bf16", "fp16") and seldom and shape.max_seq_len >= _KEYS_IN_PAGES,
        fallback=replace(plain, scratch_block=tile.block_n),
        options=replace(tile.options, launch_pdl=True),
    )


def split_config(
    target: Target, shape: PrefillShape, formats: tuple[str, str], q_lens: tuple[int, int], block_m: int,
    why: str,
) -> PrefillConfig:  # fmt: skip
    """Tiles and options of kernel "split", for sequences of `q_lens` query tokens."""
    if target.is_nvidia:
        facts = {
            **_tile_facts(target, shape, block_m), "formats": "/".join(formats),
            "kv_heads": shape.num_kv_heads,
        }  # fmt: skip
        tile = choice_for(SPLIT_ROWS, facts)
        block_m, block_n, options = tile.block_m or block_m, tile.block_n, tile.options
    else:
        # A CPU takes no target's tiles: the interpreter pays by the tile, not by the key.
        plain = fused_config(target, shape, block_m, why)
        block_m, block_n, options = plain.block_m, 16 if target.is_amd else 64, plain.options
    config = PrefillConfig(
        "split", why, block_m, block_n, q_lens=q_lens, as_decode=target.is_nvidia, options=options,
        scratch_block=scratch_block(shape.head_dim),
    )  # fmt: skip
    # The interpreter runs programs one after the other.
    compute_units = 1 if target.name == "cpu" else compute_units_of(target)
    slots = -(-_RESIDENT_WARPS * compute_units // (options.num_warps * shape.num_kv_heads))
    return replace(config, num_splits=slots)


def tall_configs(
    target: Target, shape: PrefillShape, config: PrefillConfig, formats: tuple[str, str]
) -> dict[int, PrefillConfig]:
    """Configurations of `kernels/tall.py` that can take the place of one of kernel "split", by their rows.

    None where that kernel lacks the target, the heads or the formats.
    """
    served = target.name == "sm90" and (shape.head_dim, shape.v_dim) == (128, 128)
    splits = (config.kernel, config.block_m, config.is_tall) == ("split", 64, False)
    if not (served and splits and set(formats) <= TALL_FORMATS):
        return {}
    return {
        rows: replace(
            config, block_m=rows, block_n=tile.block_n, options=tile.options, is_tall=True, short_queries=(),
            num_splits=max(1, tile.resident * target.compute_units // shape.num_kv_heads),
        )
        for rows, tile in TALL_TILES.items()
    }  # fmt: skip


def tall_config(
    target: Target, shape: PrefillShape, config: PrefillConfig, formats: tuple[str, str]
) -> PrefillConfig | None:
    """The one of `tall_configs` for sequences of the mean number of rows, or None.

    A program merges few splits, so few sequences are served by smaller tiles. H200, 8 tokens over 8192, 96/8
    heads: 64 sequences 517 us, without it 850; one 43 and 39.
    """
    rows = shape.num_tokens * shape.gqa_ratio / max(shape.batch, 1)
    found = tall_configs(target, shape, config, formats).get(tall_tile(rows))
    return None if found is None or 4 * shape.batch < found.num_splits else found


def fused_config(target: Target, shape: PrefillShape, block_m: int, why: str) -> PrefillConfig:
    """Tiles and options of attention that widens keys in its loop; a CPU takes no target's tiles."""
    if target.is_amd:
        # Smaller tiles of rows spill scalar registers, as do 32 keys a tile beside the merge of splits.
        # 64 rows of 512 channels spill 95 vector registers on gfx942, 32 rows over bf16 27.
        block_m = 64 if shape.head_dim <= WIDE_HEAD else 16
        programs = shape.row_tiles(block_m) * shape.num_kv_heads
        few_keys = shape.head_dim > 128 or target.is_wave32
        block_n = 16 if few_keys or choose_splits(target, programs, -(-shape.max_seq_len // 16)) > 1 else 32
        # On gfx1250 four waves of 32 lanes spill scalars in appends. Of heads wider than 256 up to 20 vector
        # registers spill over 4-bit and bf16 caches without LLVM's strategy, with which 182 to 245 are used.
        options = LaunchOptions(
            num_warps=8 if few_keys else 4,
            num_stages=1,
            waves_per_eu=None if few_keys else 2,
            matrix_instr_nonkdim=16,
            llvm_fn_attrs=_FEWEST_REGISTERS if shape.head_dim > WIDE_HEAD else None,
        )
    else:
        tile = choice_for(FUSED_ROWS, _tile_facts(target, shape, block_m))
        block_m, block_n, options = tile.block_m or block_m, tile.block_n, tile.options
    programs = shape.row_tiles(block_m) * shape.num_kv_heads
    splits = choose_splits(target, programs, -(-shape.max_seq_len // block_n))
    return PrefillConfig(
        "fused", why, block_m, block_n, num_splits=splits, options=options,
        xcd_rows=xcd_rows(target, shape, block_m) if target.is_amd else 0,
        scratch_block=scratch_block(shape.head_dim),
    )  # fmt: skip
