"""Launch configurations of the sparse kernels, as functions of target and shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from narrowkv.runtime.choices import ConfigRow, choice_for
from narrowkv.runtime.errors import check_positive_int
from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.targets import Target
from narrowkv.runtime.toolchain import TRITON
from narrowkv.sparse_fp8.layouts import HEAD_DIM, RowLayout

__all__ = [
    "MOST_HEADS",
    "SparseConfig",
    "check_heads",
    "check_splits",
    "choose_config",
    "choose_splits",
    "specialised_config",
    "specialised_pays",
]

MOST_HEADS = 128
# Splits are the second dimension of the grid, which is limited to 16 bits on some targets.
MOST_SPLITS = 65535
MOST_CHOSEN_SPLITS = 64
# Bytes that a buffer instruction of CDNA reaches from its base.
MOST_BUFFER_BYTES = 2**31 - 1
# Splits of every token in batch-invariant mode. With 2048 rows a token, each split has 8 tiles of 64 rows,
# and the partial results of 64 heads (2 KiB a head and split) take half as many bytes as the token's rows.
INVARIANT_SPLITS = 4


def check_heads(num_qo_heads: int) -> int:
    """Refuses a number of heads that no kernel takes.

    Raises:
        TypeError, ValueError: naming what was expected and what was given.
    """
    if check_positive_int("num_qo_heads", num_qo_heads) > MOST_HEADS:
        raise ValueError(f"num_qo_heads must be at most {MOST_HEADS}, got {num_qo_heads}")
    return num_qo_heads


def check_splits(num_splits: int | None) -> int | None:
    """Refuses a number of splits that no grid has; None leaves the choice to the call.

    Raises:
        TypeError, ValueError: naming what was expected and what was given.
    """
    if num_splits is not None and check_positive_int("num_splits", num_splits) > MOST_SPLITS:
        raise ValueError(f"num_splits must be at most {MOST_SPLITS}, got {num_splits}")
    return num_splits


@dataclass(frozen=True)
class SparseConfig:
    """The launch configuration of one attention kernel.

    Attributes:
        kernel: "16bit" reads 16-bit rows, "fused" FP8 rows.
        block_h: heads of a program.
        block_k: rows of a tile.
        width: columns of a fused kernel's tile: 64, 128, 256 or 512.
        guard: pipeline stages of a loop whose body is inside branches that are always taken (see
            `kernels.sixteen_bit`); 0 for a loop without such branches, whose stages are in the options.
        stages: tiles that a specialised kernel keeps in shared memory; 0 for the portable kernels.
        family: "portable", or the family of targets that the kernel is for: "hopper" or "cdna".
        xcd_tokens: tokens whose programs run on one XCD, see `xcd_order`; 0 for the order of the launch.
        fp8_qk: whether QK over NoPE multiplies FP8 by FP8.
        options: compiler options.
        fill: programs a compute unit that splits are to fill the target with; 0 for `programs_at_once`'s.
        tuned: where the configuration is from, and what it gains, if it is not the shipped one.
    """

    kernel: str
    block_h: int
    block_k: int
    width: int
    guard: int
    stages: int
    fp8_qk: bool
    options: LaunchOptions
    family: str = "portable"
    xcd_tokens: int = 0
    fill: int = 0
    tuned: str = ""

    def head_blocks(self, num_heads: int) -> int:
        """Number of programs that share the heads of a token."""
        return -(-num_heads // self.block_h)

    def explain(self) -> str:
        """One line that describes the configuration."""
        qk = "" if self.kernel == "16bit" else ", QK in FP8" if self.fp8_qk else ", QK in 16 bits"
        where = {"hopper": " for Hopper", "cdna": " for CDNA"}.get(self.family, "")
        return (
            f"{self.kernel}{where}: {self.block_h} heads x {self.block_k} rows a tile, "
            f"{self.options.num_warps} warps{qk}{f'; {self.tuned}' if self.tuned else ''}"
        )


def head_block(num_heads: int) -> int:
    """Heads of a program's tile, of which the last ones may be none of the call's.

    A matrix instruction takes 16 of them. Above 16, one tile for all heads is faster than several that each
    load and widen the rows: by the model (see `_AMD_ROWS`) 40 heads over 16-bit rows take 143 clocks of a
    compute unit for a row on gfx942 in a tile of 64, 264 in two of 32 and 564 in three of 16.
    """
    return 16 if num_heads <= 16 else 32 if num_heads <= 32 else 64


def programs_at_once(target: Target, config: SparseConfig, paged: bool) -> int:
    """Programs that splits are to fill the target with.

    One a compute unit; on AMD two of up to 32 rows of Q over a page table, since each waits for rows that no
    other program reads, and two fit: by the model of `_AMD_ROWS`, 64 sequences of 8k bf16 rows, gfx950
    139 us instead of 251. So do two on NVIDIA over FP8 rows, up to 16: H100, 16 heads, 64 sequences of 8k
    rows with one scale 542 us instead of 682, V4's 548 instead of 875; bf16 rows 562 and 565.
    """
    most = 32 if target.is_amd else 16 if target.is_nvidia and config.kernel == "fused" else 0
    if config.family == "hopper":
        most = 0  # its programs fill a multiprocessor
    shipped = 2 if paged and config.block_h <= most else 1
    return target.compute_units * (config.fill or shipped)


def choose_splits(
    target: Target, config: SparseConfig, programs: int, tiles: int, partial_bytes: int, paged: bool = False
) -> int:
    """The number of programs that share a token's rows.

    Args:
        target: what the kernel runs on.
        config: of the kernel.
        programs: (token, head block) pairs of the call.
        tiles: tiles that a token has on average.
        partial_bytes: bytes of the partial results of all programs without splits.
        paged: whether a page table names the rows.
    """
    compute_units = programs_at_once(target, config, paged)
    if programs * 2 > compute_units or tiles < 2:
        return 1
    most = min(compute_units // max(programs, 1), MOST_CHOSEN_SPLITS)
    if config.fill:
        return min(most, tiles)
    if not target.is_nvidia:
        # As many programs as run at once, and at least two tiles each, so that the merge takes less time.
        return max(1, min(most, tiles // 2))
    tile_time = 5.0 if config.kernel == "fused" and config.family == "portable" else 2.0
    return _splits_of_least_time(min(most, tiles), tiles, tile_time, partial_bytes)


@lru_cache(maxsize=4096)
def _splits_of_least_time(most: int, tiles: int, tile_time: float, partial_bytes: int) -> int:
    """The number of splits, of 1 to `most`, at which a program's tiles and the merge take least time.

    H100, microseconds, 1 to 128 tokens, 16 to 128 heads, top-k 512 and 2048: a tile of 64 rows takes 1.5 to
    2.2, and 5.4 in the portable kernel over FP8 rows. The merge takes 3 for every 8 splits, which it reads at
    once, and 0.4 for a megabyte of partials.
    """

    def microseconds(splits: int) -> float:
        merge = 3.0 * -(-splits // 8) + 0.4e-6 * partial_bytes * splits
        return tile_time * -(-tiles // splits) + (merge if splits > 1 else 0.0)

    return min(range(1, most + 1), key=microseconds)


@dataclass(frozen=True)
class SparseTile:
    """Tile sizes and options, see `SparseConfig`; where `heads` is None, they are those of `head_block`."""

    block_k: int
    options: LaunchOptions
    width: int = 64
    guard: int = 0
    stages: int = 0
    heads: int | None = None


_ITERATIVE_ILP = "amdgpu-sched-strategy=iterative-ilp"
_TRITON_39 = TRITON >= (3, 9)
_FP8_ROWS_OF_A_TILE = 32 if _TRITON_39 else 16
_OF_FP8_ROWS = "amdgpu-sched-strategy=max-ilp" if _TRITON_39 else _ITERATIVE_ILP


def _options(num_warps: int, num_stages: int, **others: Any) -> LaunchOptions:
    return LaunchOptions(num_warps=num_warps, num_stages=num_stages, **others)


def _amd(num_stages: int = 1, num_warps: int = 4, **others: Any) -> LaunchOptions:
    return _options(num_warps, num_stages, matrix_instr_nonkdim=16, **others)


# The kernels for Hopper. Facts: kernel, heads of a tile, scale (as in `RowLayout`, "" for 16-bit rows),
# fine_scales (for fewer than 64 columns), head_dim. Latent decode: H200, 64 sequences of 8k, microseconds.
_HOPPER_ROWS = (
    ConfigRow({"heads": 16, "head_dim": HEAD_DIM}, SparseTile(64, _options(4, 1), stages=3),
        "Q of 16 heads and three tiles take 218 of 227 KB. A task has warps in groups of 4. H200, 1024 "
        "tokens, top-k 2048, microseconds. 16-bit rows, 16 heads: the kernel for few heads 350, the plain "
        "one 457, the one for 64 heads 529; 32 heads 446. FP8 rows, 16 heads: 451 and, plain, 1266"),
    ConfigRow({"heads": 16, "head_dim": HEAD_DIM + 64}, SparseTile(64, _options(4, 1), stages=2),
        "Three tiles of 576 columns do not fit. Latent decode, V3.2's rows, 16 heads: 169, portable 321"),
    ConfigRow({"heads": 32, "head_dim": HEAD_DIM + 64, "scale": ("", "tensor")},
        SparseTile(64, _options(4, 1), stages=2),
        "Q of 32 heads and two tiles of 576 columns take 193 of 227 KB. Latent decode, 24 heads, and in the "
        "kernels for 64: one scale 178 and 190, bf16 152 and 203"),
    ConfigRow({"head_dim": HEAD_DIM + 64, "scale": "fp32"},
        SparseTile(32, _options(4, 1), stages=2, heads=64),
        "Numerators of four groups beside tiles of 64 rows do not fit. Latent decode, 128, 40 and 24 heads: "
        "513, 252 and 250; the kernel for few heads 863, 458 and 260; portable 968, 503 and -"),
    ConfigRow({"heads": 32, "head_dim": HEAD_DIM, "scale": "tensor"},
        SparseTile(64, _options(4, 1), stages=2, heads=64),
        "Latent decode, 24 heads: 140, the kernel for few heads 177. 128 and 64 heads: 265 and 154, portable "
        "593 and 312"),
    ConfigRow({"heads": 32, "fine_scales": False}, SparseTile(64, _options(4, 1), stages=2),
        "H100, 32 heads over FP8 rows: with 512, 128, 32 and 8 tokens 304, 85, 43 and 30, the kernel for 64 "
        "heads 296, 85, 47 and 35. With scales for 32 columns, 128 tokens, 32 heads: 108, and 93 in the "
        "kernel for 64"),
    ConfigRow({"kernel": "16bit"}, SparseTile(64, _options(8, 1), stages=2, heads=64),
        "64 heads. Q, two tiles and numerators of one take 202 of 227 KB, with 576 columns and with FP8 rows "
        "as stored 226; the accumulators need two warpgroups. Latent decode, 576 columns, 128 and 40 heads: "
        "283 and 160, tiles of 32 rows 372 and 211, the kernel for few heads 453 and 227"),
    ConfigRow({"kernel": "fused"}, SparseTile(64, _options(4, 1), stages=2, heads=64)),
)  # fmt: skip

# The kernels of `kernels/cdna`, by the timing model: the loop's useful TFLOP/s with 8 waves. Names are
# scheduling strategies of LLVM. 32 heads: gfx942 370 and 312, gfx950 510 and 488. With 16 heads the portable
# kernel is as fast. Facts: target, kernel, two_sources, wide (more than 64 heads).
_CDNA_ROWS = (
    ConfigRow({"target": "gfx950", "kernel": "fused"},
        SparseTile(64, _options(8, 1, llvm_fn_attrs=_OF_FP8_ROWS), stages=2),
        "gfx950, 64 heads: FP8 rows 735 with max-ilp (without 553, iterative-ilp spills, 32 rows 595; "
        "portable 264)"),
    ConfigRow({"target": "gfx950", "wide": True, "two_sources": True},
        SparseTile(32, _options(8, 1, llvm_fn_attrs=_ITERATIVE_ILP), stages=3),
        "gfx950, more than 64 heads over two sources of 16-bit rows: tiles of 64 rows spill up to 13 "
        "registers, those of 32, whose loop takes 1.16 times as long, none"),
    ConfigRow({"target": "gfx950"}, SparseTile(64, _options(8, 1, llvm_fn_attrs=_ITERATIVE_ILP), stages=2),
        "gfx950, 64 heads: 16-bit rows 694 with iterative-ilp (max-ilp 660; portable 265)"),
    ConfigRow({"kernel": "fused"},
        SparseTile(_FP8_ROWS_OF_A_TILE, _options(8, 1, llvm_fn_attrs=_OF_FP8_ROWS), stages=1),
        "gfx942, 64 heads: FP8 rows 360 with max-ilp (without 362, but two sources spill; iterative-ilp "
        "338; 4 waves 310; portable 173). Two tiles of 32 rows do not fit in LDS. Under Triton 3.8 FP8 rows "
        "take iterative-ilp: 32 rows 347, 16 rows 365, two stages of 16 357 (16 without it 322, with 4 waves "
        "258); with max-ilp up to 32 registers spill. Under Triton 3.9 16 rows reach 323, 32 389"),
    ConfigRow({"kernel": "16bit"}, SparseTile(32, _options(8, 1, llvm_fn_attrs=_ITERATIVE_ILP), stages=1),
        "gfx942, 64 heads: 16-bit rows 435 with iterative-ilp (396 without, max-ilp 419, 4 waves 367; the "
        "portable kernel 210)"),
)  # fmt: skip

# The portable kernels on CDNA: no vector register spills, with two sources and with splits.
#
# By `narrowkv inspect model --case sparse:...`, the loop's useful TFLOP/s (products that several waves repeat
# count once), 4 waves and 16 rows unless stated. Over a page table (paged) each program waits for its own
# rows, which no other one reads; model (`narrowkv inspect model --case latent:...`), 64 sequences of 8k rows,
# 12 or 16 heads, 8 splits, microseconds. A row holds for a target, a kernel, the heads
# of a tile, `paged`, fp16 (queries in fp16), v4_rows (rows of DeepSeek-V4, with 448 columns in FP8) and
# fp32_group (the number of columns that share one scale in fp32).
_AMD_ROWS = (
    ConfigRow({"kernel": "16bit", "target": "gfx950", "heads": 16, "paged": True},
        SparseTile(16, _amd(2, waves_per_eu=2, llvm_fn_attrs=_ITERATIVE_ILP)),
        "gfx950: bf16 rows, one program a compute unit 251; two 139, which iterative-ilp takes without "
        "spills"),
    ConfigRow({"kernel": "16bit", "target": "gfx950"}, SparseTile(16, _amd(2)),
        "gfx950, 64 heads: one stage 209, two 265, three 259; 32 rows and 8 waves spill. 16 heads: one "
        "stage 306, two 415"),
    ConfigRow({"kernel": "16bit", "heads": 64, "paged": True}, SparseTile(16, _amd(1)),
        "gfx942: bf16 329, two stages 405; 40 heads, four splits, one stage 721, two 931, three 1032"),
    ConfigRow({"kernel": "16bit", "heads": 64}, SparseTile(16, _amd(3)),
        "gfx942, 64 heads: one stage 185, two 195, three 210; 32 rows and 8 waves 187"),
    ConfigRow({"kernel": "16bit"}, SparseTile(16, _amd(1)), "gfx942, 16 heads: one stage 234, three 179"),
    # FP8 rows from here on. All columns in one tile: widened once, as loaded. Tiles of 64 pass through LDS as
    # bytes, and every warp widens them itself, twice: 64 heads take 3800 vector instructions of all warps on
    # gfx942 and 5060 on gfx950, not 1700 and 1350. Without waves_per_eu=1 Triton 3.8 spills up to 4 scalar
    # registers. An FP8 query that is multiplied in FP8: 122 and 100 at 64 heads, 110 and 57 at 16: every wave
    # scales the scores of seven tiles. Widened once per program, it takes what a bf16 query takes.
    ConfigRow({"target": "gfx950", "heads": 64, "fp16": False, "v4_rows": True},
        SparseTile(32, _amd(1, llvm_fn_attrs=_ITERATIVE_ILP if _TRITON_39 else None), width=512),
        "gfx950, 64 heads: one stage 160, two 152; 32 rows 264, which spill with an fp16 query; 32 rows and "
        "8 waves 228. FNUZ rows 219, and 226 with iterative-ilp (from Triton 3.9 on these are FNUZ rows); "
        "without it an FP8 query spills a register. Rows in FP4 and those with scales for 32 columns spill "
        "with 32 rows a tile: 16 for all but V4's"),
    ConfigRow({"target": "gfx950", "fp16": True, "v4_rows": False, "heads": 16, "paged": True},
        SparseTile(16, _amd(2, waves_per_eu=1), width=256),
        "With an fp16 query, rows in FP4 spill a register in tiles of 512 columns. FP8 rows with one scale "
        "over a page table, 16 heads: one stage 214, two 155"),
    ConfigRow({"target": "gfx950", "fp16": True, "v4_rows": False},
        SparseTile(16, _amd(1, waves_per_eu=1), width=256)),
    ConfigRow({"target": "gfx950", "heads": (16, 32), "paged": True},
        SparseTile(16, _amd(2, waves_per_eu=1), width=512),
        "Over a page table, 24 heads, two sequences of 1024: rows with one scale, one stage 193, two 128; "
        "V3.2's 361 and 325"),
    ConfigRow({"target": "gfx950"}, SparseTile(16, _amd(1, waves_per_eu=1), width=512),
        "gfx950, 16 heads: 277; 32 rows 215"),
    ConfigRow({"fp32_group": 64, "heads": 64},
        SparseTile(16, _amd(1, 2, waves_per_eu=1), width=512, heads=32),
        "gfx942: 64 heads and 4 waves spill 140 vector registers, 32 heads and 4 waves 21 scalar ones"),
    ConfigRow({"fp32_group": 64}, SparseTile(16, _amd(1, 2, waves_per_eu=1), width=512)),
    ConfigRow({"heads": 64, "paged": True, "fp16": True}, SparseTile(16, _amd(1, waves_per_eu=1), width=512),
        "gfx942, 64 rows of Q over a page table, an fp16 query: two stages spill"),
    ConfigRow({"heads": 64}, SparseTile(16, _amd(2, waves_per_eu=1), width=512),
        "gfx942, 64 heads: one stage 138, two 171, three 173; 32 rows and 8 waves 155"),
    ConfigRow({}, SparseTile(16, _amd(1, waves_per_eu=1), width=512),
        "gfx942, 16 heads: 199; two stages 215, but four scalars spill. Over a page table 341, two stages "
        "351"),
)  # fmt: skip

# The portable kernels on other GPUs: H100, 1024 tokens, top-k 2048, times over the floor. Facts: kernel,
# heads of a tile, fp8_qk, head_dim.
_GPU_ROWS = (
    ConfigRow({"kernel": "16bit", "heads": 64, "head_dim": HEAD_DIM}, SparseTile(64, _options(8, 2), guard=2),
        "64 heads, 16-bit rows: guarded 2.4, plain 3.1, the product alone in a branch does not fit in "
        "shared memory. Q and two tiles of 64 rows of 576 columns take 233 of 227 KB"),
    ConfigRow({"kernel": "16bit", "heads": 64}, SparseTile(32, _options(8, 2), guard=2)),
    ConfigRow({"heads": 64, "fp8_qk": True}, SparseTile(32, _options(8, 2), guard=1),
        "FP8 Q: 32 rows a tile, guarded and not pipelined, 5.5, pipelined 6.7, 64 rows 7.4"),
    ConfigRow({"heads": 64}, SparseTile(64, _options(8, 2), width=128),
        "FP8 rows, 16-bit Q: tiles of 128 columns 4.2, of 256 4.4, one of 512 4.9, of 64 plain 10.4"),
    ConfigRow({"kernel": "16bit", "fp8_qk": True}, SparseTile(64, _options(4, 2)),
        "16 heads, 16-bit rows: 64 rows a tile 5.7, 32 rows at 3 stages 6.2"),
    ConfigRow({"kernel": "16bit"}, SparseTile(64, _options(4, 2), width=256)),
    ConfigRow({"fp8_qk": True}, SparseTile(32, _options(4, 2)),
        "16 heads, FP8 rows, 16-bit Q: tiles of 256 columns 14.7, of 128 16.4, of 64 20; FP8 Q 18.7"),
    ConfigRow({}, SparseTile(32, _options(4, 2), width=256)),
)  # fmt: skip
_CPU_ROWS = (ConfigRow({}, SparseTile(64, LaunchOptions())),)

# Registers of a thread that computes scores, and of one that gathers, in Hopper's kernel for few heads, by
# heads of a tile and by scales of the rows, "" for 16-bit rows: with 128 those that gather 576 columns would
# spill.
_FEW_HEADS_REGISTERS = {
    (16, "tensor"): (96, 152), (32, "tensor"): (80, 136), (16, "fp32"): (112, 128),
    (16, ""): (168, 168), (32, ""): (168, 168),
}  # fmt: skip


def few_heads_registers(block_h: int, scale: str) -> tuple[int, int]:
    """Registers of a thread that computes scores, and of one that gathers, in the kernel for few heads.

    `scale`: as in `RowLayout`, "" for 16-bit rows.
    """
    return _FEW_HEADS_REGISTERS.get((block_h, scale), (128, 128) if block_h == 16 else (104, 112))


# Tiles of a program from which on a kernel for Hopper is faster than the portable one, by kernel and by
# whether a tile has less than 64 heads.
#
# On Hopper it takes longer to begin than the portable kernel, and less time for a tile. H100, microseconds
# with it and with the portable kernel, 1 and 8 tokens. One tile a program: FP8 rows, 64 heads, 27.3 and 21.6;
# 16 heads, 18.1 and 21.9; 16-bit rows, 16 heads, 18.4 and 16.4; 64 heads, 18.0 and 19.3. Two tiles: FP8 rows,
# 64 heads, 30.7 and 29.9. Four tiles: 128 heads, 38.3 and 42.6.
_LEAST_TILES = {
    ("16bit", True): 2, ("16bit", False): 1, ("fused", True): 1, ("fused", False): 3,
}  # fmt: skip


def specialised_pays(config: SparseConfig, tiles: int) -> bool:
    """Whether a specialised kernel is faster than the portable one for programs of so many tiles."""
    return config.family != "hopper" or tiles >= _LEAST_TILES[config.kernel, config.block_h < 64]


def specialised_config(
    target: Target, *, kernel: str, num_heads: int, head_dim: int = HEAD_DIM,
    layouts: Sequence[RowLayout] = (), two_sources: bool = False,
) -> SparseConfig | None:  # fmt: skip
    """The configuration of the kernel for the target's family, for calls that it can read; else None.

    `layouts`: those of quantised rows that it reads. `two_sources`: whether calls have both sources.
    """
    heads = head_block(num_heads)
    if target.name in ("gfx942", "gfx950") and heads >= 32:
        if target.name == "gfx950" and kernel == "fused" and not _TRITON_39:
            return None  # Triton 3.8 spills vector registers beside the barrier that its code needs
        facts = {
            "target": target.name, "kernel": kernel, "two_sources": two_sources, "wide": num_heads > 64,
        }  # fmt: skip
        tile = choice_for(_CDNA_ROWS, facts)
        return _on_xcds(_config(kernel, tile, heads, family="cdna"), target, num_heads)
    if target.name != "sm90" or target.figures is None:
        return None
    # The kernels for Hopper take a query in bf16.
    facts = {
        "kernel": kernel, "heads": heads, "head_dim": head_dim, "scale": layouts[0].scale if layouts else "",
        "fine_scales": any(layout.group < 64 for layout in layouts),
    }  # fmt: skip
    return _config(kernel, choice_for(_HOPPER_ROWS, facts), heads, family="hopper")


def choose_config(
    target: Target, *, kernel: str, num_heads: int, head_dim: int = HEAD_DIM, fp8_qk: bool = False,
    fp16_query: bool = False, layouts: Sequence[RowLayout] = (), paged: bool = False,
) -> SparseConfig:  # fmt: skip
    """The configuration of the portable kernels.

    Args:
        target: what the kernel runs on.
        kernel: "16bit" or "fused".
        num_heads: query heads.
        head_dim: columns of a query and of a tile.
        fp8_qk: whether QK over NoPE may multiply FP8 by FP8; it does where that is faster.
        fp16_query: whether the query is in fp16.
        layouts: those of a fused kernel's quantised rows.
        paged: whether a page table names the rows, and not index lists.
    """
    heads = head_block(num_heads)
    # A tile has one scale in fp32: it multiplies scores.
    groups = [layout.group for layout in layouts if layout.scale == "fp32"]
    rows = _AMD_ROWS if target.is_amd else _CPU_ROWS if target.name == "cpu" else _GPU_ROWS
    tile = choice_for(rows, {
        "target": target.name, "kernel": kernel, "heads": heads, "head_dim": head_dim, "fp8_qk": fp8_qk,
        "fp16": fp16_query, "v4_rows": all(layout.quantized < HEAD_DIM for layout in layouts), "paged": paged,
        "fp32_group": 64 if 64 in groups else 0,
    })  # fmt: skip
    tile = replace(tile, width=min(tile.width, *groups, HEAD_DIM))
    return _on_xcds(_config(kernel, tile, heads, fp8_qk=fp8_qk and not target.is_amd), target, num_heads)


def _on_xcds(config: SparseConfig, target: Target, num_heads: int) -> SparseConfig:
    """The configuration that runs the programs of a token on one XCD, where there are several of both.

    Model (`python tools/xcd_figures.py`), 128 heads, 16-bit rows: 1.03 times as fast on gfx942, 1.01 on
    gfx950.
    """
    shares = target.xcds > 1 and config.head_blocks(num_heads) > 1
    return replace(config, xcd_tokens=1) if shares else config


def _config(
    kernel: str, tile: SparseTile, heads: int, *, fp8_qk: bool = False, family: str = "portable"
) -> SparseConfig:
    """The configuration with a row's tile."""
    return SparseConfig(
        kernel, tile.heads or heads, tile.block_k, tile.width, tile.guard, tile.stages, fp8_qk,
        tile.options, family,
    )  # fmt: skip
