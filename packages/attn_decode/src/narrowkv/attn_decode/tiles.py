"""Tiles, splits and merges of decode as rows of data, each with its measurement; see `ConfigRow`.

The facts of a call that rows name: target, vendor, kernel; block_m, the rows of a tile, and row_blocks, how
many tiles the rows of a KV head take; k, v, formats (both, with a slash), group (FP4's channels per scale, or
0), half (K or V has 16 bits), packed (K or V has 4), mixed (the formats differ); q_len, q_dtype, head_dim,
padded (head_dim is no power of two), narrow (at most 128 channels); and cache, the kinds of caches that
kernels on narrow heads are tuned for, see `config._cache_kind`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from narrowkv.runtime.choices import ConfigRow
from narrowkv.runtime.launch import LaunchOptions

# Programs of one warp that a compute unit or multiprocessor holds at once: sm90 at 255 registers, CDNA with
# two waves on each of four SIMDs.
RESIDENT = 8
MOST_SPLITS = 128  # of a sequence with a tile or two a split
_MANY = 1 << 30
_SEVERAL = range(2, _MANY)


@dataclass(frozen=True)
class MergeTile:
    """How the second kernel merges a row's splits.

    Attributes:
        splits: merged at once.
        warps: of a program.
    """

    splits: int = 16
    warps: int = 1


@dataclass(frozen=True)
class DecodeTile:
    """The tile of a call, and how its keys are shared out unless the caller says so.

    Attributes:
        block_n: keys of a tile.
        options: compiler options.
        resident: programs that a compute unit is to get.
        prefetch: see `DecodeConfig`.
        split: see `DecodeConfig`; None leaves it to the lengths.
        most_splits: of a sequence; 0 without a bound.
        least_tiles: of a split; 0 without a bound.
    """

    block_n: int
    options: LaunchOptions
    resident: int = RESIDENT
    prefetch: str = ""
    split: str | None = None
    most_splits: int = 0
    least_tiles: int = 0


def _options(num_warps: int, num_stages: int, maxnreg: int | None = None) -> LaunchOptions:
    return LaunchOptions(num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg)


def _amd(num_warps: int, matrix_instr_nonkdim: int = 16) -> LaunchOptions:
    return LaunchOptions(num_warps=num_warps, num_stages=1, matrix_instr_nonkdim=matrix_instr_nonkdim)


_OCP_FP8 = ("fp8_e4m3fn", "fp8_e5m2")
_NOT_GFX942 = ("gfx90a", "gfx950")
_SM90_FP4 = {
    "target": "sm90", "formats": ("fp4_e2m1/fp4_e2m1", "fp8_e4m3fn/fp4_e2m1", "fp4_e2m1/fp8_e4m3fn"),
    "group": 0, "narrow": True, "row_blocks": 1,
}  # fmt: skip
_LARGE_TILE = (
    "Tiles of 128 keys in all registers; under Triton 3.8 less than 255 spill. H200, 64 sequences of 8192 "
    "keys at ratio 12: "
)

_MORE_WARPS = (
    "192 channels, not timed: 32 rows by two warps spill 56 bytes of a thread, over FP8 304; 64 rows by four "
    "warps over FP8 224; none with twice the warps"
)

# Tiles of 64 rows and more on NVIDIA.
TALL_ROWS = (
    ConfigRow({"target": "sm90", "cache": "fp8", "row_blocks": 1, "block_m": 64},
        DecodeTile(128, _options(4, 3), 2),
        _LARGE_TILE + "4 tokens FP8 439 us, with 64 keys and 168 registers 576 us"),
    ConfigRow({"target": "sm90", "cache": "fp8", "row_blocks": 1}, DecodeTile(128, _options(8, 3), 1),
        _LARGE_TILE + "8 tokens FP8 815 us, with two programs of 64 keys and 128 registers 926 us"),
    ConfigRow({**_SM90_FP4, "block_m": 64}, DecodeTile(128, _options(4, 3), 2),
        _LARGE_TILE + "4 tokens FP8 keys with FP4 values 489 us and, of 64 keys, 628 us; FP4 563 and 756 us"),
    ConfigRow(_SM90_FP4, DecodeTile(128, _options(8, 3), 1),
        "H100, 8 tokens of 64 sequences of 8192 keys at ratio 12, in three stages, two, and three of 64 "
        "keys: FP8 keys with FP4 values 924, 932 and 948 us; FP4 851, 1001 and 1059 us"),
    ConfigRow({"cache": "fp8", "block_m": 64, "row_blocks": 1}, DecodeTile(64, _options(4, 4, 168), 2),
        "H100, 4 tokens of 64 sequences: 4 stages 459 us, 3 stages 474 us, 3 programs of 3 stages 559 us, "
        "of which the last wave is a quarter full"),
    ConfigRow({"cache": "fp8", "block_m": 64}, DecodeTile(64, _options(4, 3, 168), 3),
        "H100, three tiles of 16 sequences: 328 us, two programs 465 and 467 us"),
    ConfigRow({"cache": "fp8"}, DecodeTile(64, _options(8, 3, 128), 2),
        "With 128 registers two programs run, and one multiplies while the other is in its softmax: H100 "
        "687 us instead of 805 us"),
    ConfigRow({"narrow": True, "block_m": 64}, DecodeTile(64, _options(4, 3), 2)),
    ConfigRow({"block_m": 64, "head_dim": 192, "k": _OCP_FP8}, DecodeTile(64, _options(8, 2), 1),
        _MORE_WARPS),
    ConfigRow({"block_m": 64}, DecodeTile(64, _options(4, 2), 2)),
    ConfigRow({"narrow": True}, DecodeTile(64, _options(8, 3), 1)),
    ConfigRow({}, DecodeTile(64, _options(8, 2), 1)),
)  # fmt: skip

# Of `kernels/tall.py` by its rows. Its warpgroups, of which one widens, share 65,536 registers. H200, FP8,
# sequences of 8192 keys at ratio 12, with it and without: 64 of 4 tokens, which are 48 rows, 377 and 433 us,
# of 8 tokens 515 and 823; 16 of 16 tokens 214 and 384, of 24 tokens in three tiles of 128 rows 426 and 739.
TALL_TILES = {
    64: DecodeTile(64, _options(4, 1, 128), 2),
    128: DecodeTile(128, _options(4, 1, 168), 1),
    192: DecodeTile(64, _options(4, 1, 128), 1),
}


def tall_tile(rows: float) -> int:
    """Which of `TALL_TILES` serves so many rows of a KV head fastest."""
    return 64 if rows <= 64 else 192 if 128 < rows <= 192 else 128


_SEVERAL_IN_FLIGHT = (
    "Each program has several tiles in flight. H100, two programs a multiprocessor, against 128 keys, "
    "4 warps and 2 stages: "
)
_ONE_TILE = (
    "One tile a program leaves nothing to share out, and looking for an even share costs about 1 us. More "
    "splits of a sequence than 128 take longer to merge than they save: H200, 8/1 heads, B1 ctx32768, 128 "
    "splits 21.1 us, 256 splits 26.9 us"
)

# Calls on NVIDIA and on a CPU that latency bounds, in tiles of 16 rows. Facts besides: tiles, how many tiles
# of 128 keys (64 of wide heads) each of four programs a compute unit has, "half", "one" or "several"; long: a
# sequence has more than 128 of them; single: one sequence; few: at most one sequence for four compute units;
# full: sequences fill the chip without a split; short: they have at most 1024 keys.
SHORT_ROWS = (
    ConfigRow({"cache": ("fp4", "values"), "tiles": ("half", "one")},
        DecodeTile(128, _options(4, 2), 2, "pages", "per_sequence"),
        "H100, against one tile a program: B1 ctx8192 FP4 17.5 us and 18.9, FP8 keys with FP4 values 18.2 "
        "and 23.6; B4 ctx2048 15.2 and 16.7, 15.9 and 20.4"),
    ConfigRow({"cache": "groups", "tiles": ("half", "one")},
        DecodeTile(128, _options(4, 1), 4, "", "per_sequence", least_tiles=2),
        "H200, NVFP4, two tiles a program and one: B1 ctx8192 18.1 and 22.6 us, B16 ctx512 17.1 and 21.1 us"),
    ConfigRow({"cache": "fp8", "tiles": "half", "long": True},
        DecodeTile(256, _options(8, 1), 4, "", "per_sequence", MOST_SPLITS),
        "H200, 8/1 heads, B1 ctx32768, 13.4 us and, with tiles of 128 keys, 14.8"),
    ConfigRow({"narrow": True, "tiles": "half"},
        DecodeTile(128, _options(4, 1), 4, "", "per_sequence", MOST_SPLITS), _ONE_TILE),
    ConfigRow({"cache": ("", "packed", "int8"), "narrow": True, "tiles": "one"},
        DecodeTile(128, _options(4, 1), 4, "", "per_sequence", MOST_SPLITS), _ONE_TILE),
    ConfigRow({"narrow": False, "tiles": ("half", "one")},
        DecodeTile(64, _options(4, 1), 4, "", "per_sequence", MOST_SPLITS),
        f"Half as many keys fit in shared memory. {_ONE_TILE}"),
    ConfigRow({"cache": "groups"}, DecodeTile(32, _options(1, 3), 4),
        "`attend_in_registers`. H100, NVFP4, B1 ctx32768: 38.8 us, with 128 keys and 4 warps 43.4 us"),
    ConfigRow({"cache": ("fp8", "16-bit"), "tiles": "one"},
        DecodeTile(64, _options(2, 3), 2, "pages", "per_sequence"),
        "H100, against one tile a program: B1 ctx8192 bf16 22.1 and 26.7 us, FP8 17.0 and 19.6"),
    ConfigRow({"cache": "fp8", "single": True}, DecodeTile(64, _options(2, 3), 3, "pages", "per_sequence"),
        _SEVERAL_IN_FLIGHT + "B1 ctx32768 34.3 us and 38.1. H200, with two and with three programs a "
        "multiprocessor 28.0 and 27.4"),
    ConfigRow({"cache": "16-bit", "single": True, "few": True},
        DecodeTile(64, _options(2, 3), 2, "pages", "per_sequence"),
        _SEVERAL_IN_FLIGHT + "B1 ctx32768 55.0 us and 63.0"),
    ConfigRow({"cache": ("fp8", "16-bit"), "few": True}, DecodeTile(64, _options(2, 3), 2, "pages"),
        _SEVERAL_IN_FLIGHT + "B4 ctx8192 FP8 32.8 us and 34.1, bf16 55.8 and 57.9"),
    ConfigRow({"cache": "fp8"}, DecodeTile(64, _options(2, 3), 3, "pages")),
    ConfigRow({"cache": "16-bit"}, DecodeTile(32, _options(1, 3), 4), "H100, B8 ctx2048: 31.6 us, not 34.0"),
    ConfigRow({"cache": "fp4", "full": True}, DecodeTile(128, _options(4, 3, 128), 4, "pages", "none"),
        "The sequences fill the chip without a split. H100, B64 ctx1024: 40.0 us instead of 57.6 in two "
        "splits"),
    ConfigRow({"cache": "values", "full": True}, DecodeTile(128, _options(4, 2, 128), 4, "pages", "none"),
        "The sequences fill the chip without a split. H100, B64 ctx1024: 45.3 us instead of 55.6 in two "
        "splits"),
    # FP4 or INT4 in V alone: at 128 registers four programs share a multiprocessor; without the limit the
    # compiler takes 149, and three do.
    *(
        ConfigRow({"cache": "values", "single": True, **when},
            DecodeTile(128, _options(4, 2, 128), 3, "pages", split),
            "H100, with and without prefetched page ids: B1 ctx32768 37.0 and 39.8 us")
        for when, split in (({"few": True}, "per_sequence"), ({"short": True}, "per_sequence"), ({}, None))
    ),
    ConfigRow({"cache": "values", "few": True},
        DecodeTile(128, _options(4, 2, 128), 4, "pages", "per_sequence"),
        "H100, with and without prefetched page ids: B4 ctx8192 30.9 and 36.9 us"),
    ConfigRow({"cache": "values", "short": True},
        DecodeTile(128, _options(4, 2, 128), 4, "pages", "per_sequence"),
        "H200, B16 ctx1024: 19.9 us instead of 22.0 with even shares"),
    ConfigRow({"cache": "values"}, DecodeTile(128, _options(4, 2, 128), 4, "pages")),
    *(
        ConfigRow({"cache": "fp4", **when}, DecodeTile(128, _options(4, 3), 3, "pages", split),
            "H100, instead of two programs a multiprocessor: B4 ctx8192 29.7 us, not 31.5. Instead of four "
            "with 2 stages and without prefetched page ids: B1 ctx32768 32.4 us, not 44.1, B8 ctx4096 33.0, "
            "not 40.5")
        for when, split in (({"few": True}, "per_sequence"), ({}, None))
    ),
    ConfigRow({"narrow": True}, DecodeTile(128, _options(4, 2), 4)),
    ConfigRow({}, DecodeTile(64, _options(4, 2), 4)),
)  # fmt: skip

# Other calls on NVIDIA in tiles of 16 and 32 rows, with heads of at most 256 channels. Facts besides:
# second_wave, kv_heads.
_ONE_TOKEN_OF_FP8 = {"target": "sm90", "cache": "fp8", "block_m": 16, "q_len": 1}
_BY_REGISTERS = (
    "Each quarter of a multiprocessor has 16,384 registers for its programs of one warp, which take 128 with "
    "64 channels, and 168 with at most 12 rows"
)
LARGE_ROWS = (
    ConfigRow({"block_m": 32, "cache": "fp8"}, DecodeTile(64, _options(2, 3), 4),
        "H100, B64 ctx8192 page 16: 64 keys 380 us, 32 keys 389 us"),
    ConfigRow({"target": "sm90", "block_m": 32, "v": "fp4_e2m1", "narrow": True},
        DecodeTile(32, _options(1, 3)),
        "H200, 2 tokens of 64 sequences of 8192 keys, by one warp and by two: FP8 keys with FP4 values 388 "
        "and 485 us, FP4 374 and 541 us"),
    ConfigRow({"block_m": 32, "narrow": True}, DecodeTile(32, _options(2, 3), 4)),
    ConfigRow({**_ONE_TOKEN_OF_FP8, "head_dim": range(65)}, DecodeTile(32, _options(1, 3), 16),
        _BY_REGISTERS),
    ConfigRow({**_ONE_TOKEN_OF_FP8, "second_wave": True}, DecodeTile(64, _options(2, 3)),
        "The sequences fill the chip one and a half to two times without a split. H200, 64 keys of two warps "
        "and 32 of one: 96/8 heads, B256 ctx512 81.0 and 89.0 us, ctx1024 147 and 165, 32/8 heads 79.4 and "
        "87.5, 146 and 159; but 96/8 heads, ctx512, B192 60.5 and 57.2, B320 102 and 96.9"),
    ConfigRow({**_ONE_TOKEN_OF_FP8, "ratio": range(7)}, DecodeTile(32, _options(1, 3), 12), _BY_REGISTERS),
    ConfigRow({**_ONE_TOKEN_OF_FP8, "ratio": range(13), "kv_heads": range(3, _MANY)},
        DecodeTile(32, _options(1, 3, 168), 12),
        f"{_BY_REGISTERS}. H200, 96/8 heads, with 8 programs a multiprocessor and with 12: B64 ctx8192 279 "
        "and 264 us, page 1 281 and 268; B128 ctx8192 540 and 525; B16 ctx32768 279 and 263; 64 lognormal "
        "lengths 232 and 211, 128 of them 480 and 435; 127 short sequences and one of 131072 keys 188 and "
        "170; with shares for 8 and for 12 B200 ctx2048 279 and 257, B256 303 and 300, ctx4096 586 and 547, "
        "ctx8192 1141 and 1048, 256 lognormal lengths 294 and 283, but B256 ctx1500 229 and 234, and 8/1 "
        "heads 45.0 and 47.4"),
    ConfigRow({"head_dim": 192, "block_m": 32}, DecodeTile(32, _options(4, 2, 224), 2),
        f"{_MORE_WARPS}. Without the limit the compiler stops at 128 registers for bf16, and spills 8 bytes"),
    ConfigRow({"narrow": False}, DecodeTile(32, _options(2, 2), 4)),
    ConfigRow({"cache": "groups"}, DecodeTile(32, _options(1, 3)),
        "`attend_in_registers`. H100, B64 ctx8192, with it and with tiles in shared memory: NVFP4 251 and "
        "300 us; MX (a scale per 32 channels) 249 and 312 us. Twelve programs of 168 registers spill: 366 "
        "and 348 us. FP8 takes 371 us"),
    ConfigRow({"cache": ("fp4", "packed")}, DecodeTile(32, _options(1, 5, 168), 12),
        "FP4 is bound by the instructions that unpack it, and more warps hide their latency. H100, B64 "
        "ctx8192 page 16, least time over 32 and 64 keys and 2 to 5 stages: 244 us with 8 warps, 226 us "
        "with 12 (FP8: 371 us). A scale per 32 channels takes registers that this does not leave: 598 us "
        "against 378 us"),
    ConfigRow({"cache": "values", "formats": "int8/int4"}, DecodeTile(32, _options(1, 3)),
        "H100, B64 ctx8192: 32 keys 329 us, 64 keys 346 us"),
    ConfigRow({"cache": "values"}, DecodeTile(64, _options(1, 3)),
        "H100, B64 ctx32768 page 16: 64 keys x 3 stages 1126 us, 32 x 3 1166 us, 64 x 2 1222 us (FP8: 1449)"),
    ConfigRow({"cache": "int8"}, DecodeTile(64, _options(1, 3)),
        "H100, B64 ctx8192 page 16: 64 keys 386 us, 32 keys 407 us"),
    ConfigRow({}, DecodeTile(32, _options(1, 3)),
        "H100, B128 ctx8192 page 64: 32 keys x 3 stages 1.08 x the floor, 64 x 2 1.11 x, 16 x 4 1.21 x"),
)  # fmt: skip

_WIDE_HEADS = (
    "Four warps share 512 channels of 16 rows, and two programs a multiprocessor of sm90. Without the limit "
    "the compiler stops at 168 registers for FP8 keys with FP4 values, and spills 16 bytes of a thread, and "
    "for FP4 at 255, and spills 40; with two warps 416 are spilled"
)
_WIDE_MASKS = (
    "Beside the masks of several query tokens four warps spill 568 bytes (bf16, 320 channels), and eight "
    "take 220 registers; without the limit the compiler stops at 128 for FP8 and spills 8 bytes"
)
# Heads wider than 256 on NVIDIA.
WIDE_ROWS = (
    ConfigRow({"q_len": 1, "half": True}, DecodeTile(32, _options(4, 2, 240), 2), _WIDE_HEADS),
    ConfigRow({"q_len": 1}, DecodeTile(32, _options(4, 3, 240), 2), _WIDE_HEADS),
    ConfigRow({"half": True}, DecodeTile(32, _options(8, 2, 224), 1), _WIDE_MASKS),
    ConfigRow({}, DecodeTile(32, _options(8, 3, 224), 1), _WIDE_MASKS),
)  # fmt: skip

# A CPU. The interpreter pays by the tile, not by the key.
CPU_ROWS = (
    ConfigRow({"block_m": 16, "narrow": True}, DecodeTile(128, _options(1, 3))),
    ConfigRow({"narrow": True}, DecodeTile(128, _options(2, 3), 4)),
    ConfigRow({}, DecodeTile(128, _options(2, 2), 4)),
)  # fmt: skip

# AMD's waves of 32 lanes. One wave holds 16 rows of 128 channels; more rows or channels are shared by more
# waves. Compiled for gfx1201 and gfx1250 (`tests/test_codegen_untried.py`): no spills. Nothing was timed.
WAVE32_ROWS = (
    ConfigRow({"block_m": range(33, _MANY), "half": True}, DecodeTile(16, _options(8, 1))),
    ConfigRow({"block_m": range(33, _MANY)}, DecodeTile(16, _options(4, 1))),
    ConfigRow({"narrow": False}, DecodeTile(16, _options(4, 1))),
    ConfigRow({"block_m": 32}, DecodeTile(16, _options(2, 1))),
    ConfigRow({"half": True}, DecodeTile(16, _options(1, 1))),
    ConfigRow({}, DecodeTile(32, _options(1, 1))),
)  # fmt: skip

# Tiles of 64 rows and more on CDNA. Model, 8 tokens at ratio 12, TFLOP/s of a full chip.
CDNA_TALL_ROWS = (
    ConfigRow({"target": "gfx942", "cache": "fp8", "block_m": 128}, DecodeTile(32, _amd(4, 32), 2),
        "gfx942, 128 x 32 339, 64 x 64 284, 64 x 16 228; with 16 x 16 instructions 264"),
    ConfigRow({"target": "gfx950", "cache": "fp8", "block_m": 64}, DecodeTile(64, _amd(2, 32), 2)),
    ConfigRow({"cache": "fp8"}, DecodeTile(64, _amd(4, 32), 2),
        "gfx950, 128 x 64 412, 128 x 32 398, 64 x 16 284; with 16 x 16 instructions 349"),
    ConfigRow({}, DecodeTile(16, _amd(4), 2)),
)  # fmt: skip

_WIDE_AHEAD = (
    "A wave that has 16 rows of 512 channels has no room for a second one beside it, so loads a tile ahead "
    "hide the latency instead. Model, 8 rows over 2k keys of 512 channels, TB/s of a full chip, gfx942 and "
    "gfx950: "
)

_WIDE_MASKED = {"target": "gfx942", "head_dim": range(257, _MANY), "q_len": _SEVERAL}

# Tiles of 16 and 32 rows on CDNA, and the scaled matrix instructions of kernel "native" with any.
CDNA_ROWS = (
    ConfigRow({"head_dim": range(257, _MANY), "block_m": 32}, DecodeTile(16, _amd(4)),
        "32 rows of bf16 spill with two waves on gfx942"),
    ConfigRow({"head_dim": range(513, _MANY), "q_len": _SEVERAL}, DecodeTile(16, _amd(4)),
        "16 rows of 576 channels beside masks spill with two waves on gfx942"),
    ConfigRow({"head_dim": range(513, _MANY)},
        DecodeTile(16, replace(_amd(2), waves_per_eu=1), prefetch="tile"),
        "A register of FP8 spills on gfx942, unless the compiler knows that one wave fits"),
    ConfigRow({"head_dim": 512, "k": _OCP_FP8, "v": _OCP_FP8, "q_len": 1},
        DecodeTile(16, _amd(1), prefetch="tile"),
        _WIDE_AHEAD + "FP8 with one wave 2.4 and 3.6, a tile ahead 4.6 and 5.5, two waves a tile ahead 3.6 "
        "and 5.2, four waves of 32 keys 1.4 and 3.6"),
    ConfigRow({"head_dim": range(257, _MANY), "q_len": 1}, DecodeTile(16, _amd(2), prefetch="tile"),
        _WIDE_AHEAD + "bf16 with two waves a tile ahead 5.1 and 7.2, with one it spills, as do FP8 beside "
        "the masks of 320 channels and FNUZ on gfx950"),
    ConfigRow({**_WIDE_MASKED, "k": ("bf16", "fp16"), "v": ("bf16", "fp16")},
        DecodeTile(16, replace(_amd(2), waves_per_eu=1)),
        "A scalar of bf16 spills under Triton 3.8.0, unless the compiler knows that no second wave will "
        "share the SIMD. Four waves spill none, but by the model 4 sequences of 2k keys take 125 us instead "
        "of 95"),
    ConfigRow({**_WIDE_MASKED, "k": _OCP_FP8, "v": _OCP_FP8}, DecodeTile(16, _amd(2), prefetch="tile"),
        "A vector register of FP8 spills under Triton 3.9.0, unless a tile is loaded ahead. Four waves "
        "spill none, but by the model 4 sequences of 2k keys take 128 us instead of 99"),
    ConfigRow({"head_dim": range(257, _MANY)}, DecodeTile(16, _amd(2))),
    # The compiler lowers a scaled dot of one wave to bf16 multiplications, so that these take two waves.
    ConfigRow({"kernel": "native", "narrow": True, "block_m": 16}, DecodeTile(128, _amd(2))),
    ConfigRow({"kernel": "native", "block_m": (16, 32)}, DecodeTile(64, _amd(2))),
    ConfigRow({"kernel": "native"}, DecodeTile(32, _amd(4))),
    # One wave a program: with more, every wave repeats the QK product and the softmax of a 16-row tile.
    ConfigRow({"narrow": False}, DecodeTile(16, _amd(1))),
    ConfigRow({"k": ("bf16", "fp16")}, DecodeTile(32, _amd(1))),
    ConfigRow({}, DecodeTile(64, _amd(1)),
        "Modelled issue time over memory time at ratio 12, head_dim 128 (`narrowkv inspect`): FP8 0.44 "
        "(FNUZ) and 0.45 (OCP) on gfx942 and 0.34 on gfx950 at 64 keys, 0.59 at 32. None spills"),
)  # fmt: skip

_AHEAD = {
    "target": ("gfx942", "gfx950"), "formats": tuple(f"{name}/{name}" for name in _OCP_FP8), "block_m": 16,
    "q_len": 1, "head_dim": 128,
}  # fmt: skip
_TIGHT = "A tile more in registers spills"

# `DecodeConfig.prefetch` of these tiles on CDNA, heads wider than 256 apart; gfx942 takes no page ids alone.
CDNA_PREFETCH_ROWS = (
    ConfigRow(_AHEAD, "tile",
        "Model, whole calls in microseconds, even shares, without it and with it, gfx942 and gfx950: B64 8k "
        "280 and 270, 213 and 181; B4 8k 34.8 and 32.2, 25.0 and 22.4. FNUZ would spill 64 registers on "
        "gfx942, 28 on gfx950"),
    ConfigRow({"block_m": range(33, _MANY)}, ""),
    ConfigRow({"unpacks": False}, ""),
    ConfigRow({"target": "gfx942", "v_packed": False}, "", _TIGHT),
    # The masks of several query tokens, beside scales of channels.
    ConfigRow({"q_len": _SEVERAL, "group": (16, 32), "kernel": "native"}, "", _TIGHT),
    ConfigRow({"q_len": _SEVERAL, "group": (16, 32), "padded": True, "target": _NOT_GFX942}, "pages",
        "Under Triton 3.9.0 a tile beside the masks of 192 channels spills a register on gfx950 in every "
        "other compilation"),
    ConfigRow({"q_len": _SEVERAL, "group": (16, 32)}, "tile",
        "Under Triton 3.9.0 page ids alone spill a scalar in gfx942's loop"),
    ConfigRow({"group": 16, "target": "gfx942"}, "", _TIGHT),
    ConfigRow({"group": 32, "mixed": True, "target": "gfx942"}, "", _TIGHT),
    ConfigRow({"group": 16, "mixed": True}, "pages", _TIGHT),
    ConfigRow({"kernel": "native", "head_dim": range(128)}, "pages", _TIGHT),
    ConfigRow({"kernel": "native", "head_dim": range(129, _MANY)}, "pages", _TIGHT),
    ConfigRow({"padded": True}, "pages", _TIGHT),
    ConfigRow({"head_dim": range(129, _MANY), "q_len": _SEVERAL}, "pages", _TIGHT),
    ConfigRow({"k": "bf16"}, "pages", _TIGHT),
    ConfigRow({"v": "bf16"}, "pages", _TIGHT),
    ConfigRow({}, "tile",
        "Model, share of the time that HBM is busy, 96/8 heads, head_dim 128, gfx942 and gfx950, without "
        "and with it: FP4 78 and 66%, 100 and 100%; FP8 keys with FP4 values 80 and 66%, 100 and 100%; INT4 "
        "77 and 67%, 100 and 93%"),
)  # fmt: skip

_TWO_FIT = "Two waves a SIMD fit at these registers; told so, the compiler spills no scalars"
_MORE = "More registers are needed than two waves a SIMD leave"

# Waves a SIMD that the compiler is told of for these tiles; None leaves it free. Facts besides: prefetch.
CDNA_WAVES_ROWS: tuple[ConfigRow[int | None], ...] = (
    ConfigRow(_AHEAD, 2, _TWO_FIT),
    ConfigRow({"kernel": ("decode", "fp8"), "q_len": _SEVERAL, "group": (16, 32), "block_m": (16, 32)}, 1,
        "One wave fits beside the masks and the scales. The compiler, not told so, spills a scalar in the "
        "loop under Triton 3.9.0: of groups of 16 on gfx942, of 192 channels in fp16 on gfx950"),
    ConfigRow({"packed": False}, None),
    ConfigRow({"kernel": "native", "q_len": _SEVERAL}, None, _MORE),
    ConfigRow({"kernel": "native", "narrow": False, "block_m": range(17, _MANY)}, None, _MORE),
    ConfigRow({"kernel": "native", "narrow": False, "q_dtype": torch.float16}, None,
        f"{_MORE}: Q is three terms"),
    ConfigRow({"kernel": ("decode", "fp8"), "block_m": range(17, _MANY)}, None, _MORE),
    ConfigRow({"kernel": ("decode", "fp8"), "k": "fp4_e2m1", "group": 16, "mixed": True}, None,
        "27 registers would spill"),
    ConfigRow({"target": "gfx950"}, 2, _TWO_FIT),
    ConfigRow({"head_dim": range(65)}, 2, _TWO_FIT),
    ConfigRow({"prefetch": "tile", "mixed": True, "q_len": 1}, 2, f"{_TWO_FIT}: with FP8 keys on gfx942"),
    ConfigRow({}, None, _MORE),
)  # fmt: skip

# The second kernel. Facts: vendor, split, splits (of a sequence), kv_heads, head_dim, invariant. AMD by the
# model, microseconds, 96/8 heads, head_dim 128, gfx942 and gfx950; in parentheses splits at once and waves.
MERGE_ROWS = (
    ConfigRow(
        {
            "vendor": "amd", "split": "per_sequence", "splits": range(49, _MANY + 1),
            "head_dim": range(257, 577),
        },
        MergeTile(128, 8),
        "B1 8k, 512 channels: 25.8 and 21.1; (128, 4) 29.4 and 24.5, and spills 4 and 8 registers",
    ),
    *(
        ConfigRow({"vendor": "amd", "split": "per_sequence", "splits": range(most + 1)}, tile, evidence)
        for most, tile, evidence in (
            (4, MergeTile(4, 1), "B64: 2.6 and 2.5; (16, 1) 4.2 and 3.4"),
            (8, MergeTile(8, 1), "B64: 3.1 and 2.5; (16, 1) 4.2 and 3.4; (16, 2) 9.2 and 7.2"),
            (16, MergeTile(16, 2), "B4: 1.9 and 1.6; (16, 1) 2.2 and 1.8; (32, 2) 2.5 and 1.7"),
            (32, MergeTile(32, 2), "B4: 2.6 and 2.1; (16, 1) 3.6 and 2.9; (64, 4) 3.0 and 2.8"),
            (48, MergeTile(64, 4), "B4 of 37: 3.1 and 2.6; (32, 2) 3.7 and 3.1; (128, 4) 3.4 and 2.9"),
            (_MANY, MergeTile(128, 4), "B1 of 128: 3.4 and 2.9; (16, 1) 11.7 and 9.7; (64, 4) 5.3 and 4.5; "
                "(128, 8) 4.2 and 3.6. Of 256: 6.0 and 5.1; (64, 4) 9.8 and 8.3"),
        )
    ),
    *(
        ConfigRow({"vendor": "nvidia", "kv_heads": (1, 2), "head_dim": head_dims, "invariant": False},
            MergeTile(64, warps),
            "Few heads leave many splits of a sequence. One tile serves all calls, so that a model does not "
            "need twice as many merge kernels. H200, FP8, 8/1 heads, with 16 splits at once in one warp, 64 "
            "and 128 in four: B1 ctx32768 19.6, 12.7 and 12.1 us, B4 ctx8192 15.2, 11.3 and 11.5, B64 "
            "ctx1024 13.6, 14.2 and 15.3, B64 ctx8192 43.0, 43.4 and 45.6; with 96/8 heads B1 ctx32768 "
            "27.3, 25.8 and 25.9, B16 ctx8192 77.6, 82.3 and 84.0")
        for head_dims, warps in ((range(129), 4), (range(129, 257), 8))
    ),
    ConfigRow({"vendor": "nvidia", "split": "per_sequence", "splits": range(17, _MANY),
            "head_dim": range(129), "invariant": False},
        MergeTile(64, 4),
        "H200, FP8, 96/8 heads, with 16 splits at once in one warp and 64 in four: B1 ctx8192 16.7 and 15.0 "
        "us, B1 ctx32768 29.9 and 28.0"),
    ConfigRow({}, MergeTile()),
)  # fmt: skip


@dataclass(frozen=True)
class _Split:
    """Equal splits of every sequence, for calls whose longest sequence gives a program few key tiles.

    An even share of all keys would serve sequences of unequal lengths better, but is searched for by two
    loops over the batch, in the merge, too.

    Attributes:
        programs: of a compute unit.
        most_tiles, least_tiles: of a program. One sequence may have more than the most.
        block_n: keys of a tile; 0 for those of the call's row.
    """

    programs: int
    most_tiles: int
    least_tiles: int = 1
    block_n: int = 0


# The first that fits is taken. Model, microseconds, FP8, page 16, 96/8 heads, head_dim 128, gfx942 and
# gfx950, in parentheses splits of a sequence.
_SPLITS = (
    # B4 8k: (32) 26.3 and 15.1, (37) 27.0 and 19.3. B1 8k: (128) 12.1 and 7.7.
    _Split(programs=4, most_tiles=4),
    # B64 1k: (4) 42.5 and 26.6, before keys were loaded sooner 45.3 and 28.5, even 50.2 and 36.8.
    _Split(programs=8, most_tiles=8),
)
# gfx942 with FP8 tiles loaded ahead: widening by bit arithmetic takes long, and smaller shares divide it more
# evenly over SIMDs. Tiles of 32 keys and, in parentheses, of 64: B4 8k 24.1 (26.3), B8 4k 23.4 (25.8), B4 4k
# 15.9 (16.6), B1 8k 11.6 (12.1), B16 1k 15.1 (15.7). One tile a program: B4 1k 8.3 (8.2). gfx950, B4 8k: 17.7
# (15.1).
_SMALL_TILES = _Split(programs=4, most_tiles=8, least_tiles=2, block_n=32)


def amd_splits(
    batch: int, capacity: int, block_n: int, compute_units: float, small_tiles: bool
) -> tuple[int, int]:
    """Keys of a tile, and the number of equal splits of every sequence; 0: an even share of all keys.

    Args:
        batch: sequences; capacity: tokens of the longest.
        block_n: keys of a tile, of the call's row.
        compute_units: of the GPU, divided by the programs that one sequence has without splits.
        small_tiles: whether a short call may have smaller tiles.
    """
    for row in (_SMALL_TILES, *_SPLITS) if small_tiles else _SPLITS:
        tiles = -(-capacity // (row.block_n or block_n))
        each = -(-tiles // max(int(compute_units * row.programs) // max(batch, 1), 1))
        if row.least_tiles <= each and (each <= row.most_tiles or (batch == 1 and not row.block_n)):
            return row.block_n or block_n, -(-tiles // max(each, 1))
    return block_n, 0
