"""Launch configuration of Sage attention: rows of data with their evidence, never searched for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from narrowkv.runtime.choices import ConfigRow, choice_for
from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.targets import Target
from narrowkv.runtime.toolchain import TRITON

_OCP = "fp8_e4m3fn"
_ITERATIVE_ILP = "amdgpu-sched-strategy=iterative-ilp"
_NO_ACCUMULATION_REGISTERS = "amdgpu-agpr-alloc=0"


@dataclass(frozen=True)
class KeyOrder:
    """The order of V's keys in scratch, by the matrix unit's lanes; see `interleave_keys`.

    Attributes:
        gather: runs that a lane's share of an FP8 operand is made of.
        lanes: lanes that share a row of a matrix result.
        width: neighbouring columns of a result that a lane holds.
    """

    gather: int = 1
    lanes: int = 1
    width: int = 1


@dataclass(frozen=True)
class SageConfig:
    """How the attention kernel runs.

    Attributes:
        block_m, block_n: rows and keys of a tile, at most 128: what scratch is aligned to.
        fp8: the FP8 format of V, of P, and of Q and K where they are FP8.
        key_order: of V in scratch.
        two_level: P @ V of a tile is summed separately and then added in fp32.
        tma: K and V come by tensor descriptor.
        programs_together: attention programs among which the longest go first, of as many heads as it takes.
        ahead: tiles of keys are loaded to registers while the one before is multiplied.
        xcd_rows: tiles of rows that an XCD takes of a query head before the next one, see `xcd_order`; all
            heads of a sequence go together then, whatever `programs_together` is. 0 for the launch's order.
        quantises_q: programs of attention quantise their rows of Q, where no other kernel reads the codes.
        reread_q: Q is read a second time for the tiles that need the mask.
        options: compiler options.
        tuned: where the configuration is from, and what it gains, if it is not the shipped one.
    """

    block_m: int
    block_n: int
    fp8: str
    key_order: KeyOrder
    two_level: bool
    options: LaunchOptions
    tma: bool = False
    programs_together: int = 800
    xcd_rows: int = 0
    reread_q: bool = False
    quantises_q: bool = False
    ahead: bool = False
    tuned: str = ""


_CDNA = SageConfig(
    128, 64, _OCP, KeyOrder(gather=2, lanes=2, width=4), two_level=False,
    options=LaunchOptions(num_warps=4, num_stages=1, waves_per_eu=2, matrix_instr_nonkdim=32), ahead=True,
)  # fmt: skip
_GFX942 = replace(_CDNA, xcd_rows=8)
_GFX950 = replace(_GFX942, key_order=KeyOrder(gather=4, lanes=2, width=4), reread_q=True)
# Hopper sums FP8 products with fewer bits than fp32 has: a tile of keys at a time keeps that harmless, and
# costs nothing, as the rescaling of what was summed before is then one multiply-add.
_NVIDIA = SageConfig(
    64, 128, _OCP, KeyOrder(gather=2, lanes=4, width=2), two_level=True,
    options=LaunchOptions(num_warps=4, num_stages=2, maxnreg=168),
)  # fmt: skip
_HOPPER = replace(_NVIDIA, tma=True)


def _two_stages(config: SageConfig, attributes: str | None = None) -> SageConfig:
    return replace(config, options=replace(config.options, num_stages=2, llvm_fn_attrs=attributes))


# Facts: target, amd, native_fp8 (it multiplies FP8), scaled (it multiplies scaled operands, as gfx950 does),
# pipelines (Triton 3.9), qk_dtype, smooth_q, window.
# On CDNA one wave has 32 rows of a tile. Compiled (`narrowkv inspect sage`): 128 keys a tile spill at two
# waves a SIMD; 64 rows a tile read four times as much LDS for each row.
# Model (`narrowkv inspect model --family "Sage, int8"`), the loop's TOP/s plain, with keys loaded a tile
# ahead, and with two stages as well: the figures of "ahead" in rows of gfx942 and gfx950.
_ROWS = (
    ConfigRow({"amd": True, "native_fp8": False},
        replace(_CDNA, options=replace(_CDNA.options, waves_per_eu=1), ahead=False),
        "int8 products, and FP8 widened. With keys loaded ahead, or at two waves a SIMD, FP8 spills 69 "
        "vector and 645 scalar registers"),
    ConfigRow({"target": "gfx942", "pipelines": True, "smooth_q": False},
        _two_stages(_GFX942, _ITERATIVE_ILP),
        "gfx942, ahead: int8 783, 916, 960 (iterative-ilp 987), FP8 703, 974, 1018 (1027); two stages "
        "spill with smoothed queries, and under Triton 3.8 put 45 to 77 scalars of causal calls into "
        "lanes, outside the hot loop; without keys ahead they halve the rate by LDS bank conflicts"),
    ConfigRow({"target": "gfx942"}, _GFX942,
        "The keys' order saves 14 of 207 vector instructions of a tile. Model (`python "
        "tools/xcd_figures.py`): all heads together, in runs of 8 tiles, give XCDs equal work; in groups "
        "of `programs_together` causal calls over 8k tokens take 1.2 to 1.4 times as long"),
    ConfigRow(
        {"scaled": True, "pipelines": True, "smooth_q": False, "qk_dtype": "int8", "window": False},
        _two_stages(_GFX950, _NO_ACCUMULATION_REGISTERS),
        "gfx950, ahead: int8 1356, 1419, 1518 (iterative-ilp 1480), FP8 1024, 1587, 1470; two stages spill"
        " with smoothed queries, beside windows and with int4; under Triton 3.8 some calls. If the "
        "compiler may use accumulation registers, int8 reaches 1556, but ragged calls with a scale for each "
        "thread spill one vector register"),
    ConfigRow({"scaled": True}, _GFX950,
        "The keys' order saves 4 of 203 vector instructions of a tile: the f8f6f4 operand has 16 "
        "neighbours a lane. The compiler takes Q apart into bytes for the second loop's 32-byte operand "
        "and holds them through the first one: 64 registers of a lane, and spills with smoothed FP8 "
        "queries"),
    ConfigRow({"target": "cpu"}, replace(_NVIDIA, block_m=128),
        "In the interpreter the time depends on the number of tiles, not of rows"),
    ConfigRow({"target": "sm90", "qk_dtype": ("int8", "fp8"), "window": False},
        replace(_HOPPER, quantises_q=True),
        "H200, b2 h32 d128, with Q quantised by attention and by a launch of its own: 2k 266 and 272 us, "
        "causal 189 and 197, 4k causal 503 and 511, 8k causal 1653 and 1686. Beside windows and int4 it "
        "spills 8 to 56 bytes"),
    ConfigRow({"target": "sm90"}, _HOPPER,
        "H100, b2 h32 d128 16k, attention alone over the bf16 floor, no mask and causal: 64 x 128 tiles by"
        " descriptor at 168 registers, which lets three programs share a multiprocessor, 0.88 and 0.91; "
        "two programs and 3 stages 0.97 and 1.02; 64 x 64 tiles 1.02 and 1.04; by pointer 64 x 128 1.03 "
        "and 1.02, 128 x 128 with 8 warps 1.24 and 1.26. 4k causal on an H200: head by head 383 us, 800 "
        "programs together 362"),
    ConfigRow({}, _NVIDIA),
)  # fmt: skip


def choose_config(
    target: Target, qk_dtype: str = "int8", *, smooth_q: bool = False, window: bool = False, k_block: int = 0
) -> SageConfig:
    """The shipped configuration, which serves every granularity.

    A tile of keys lies in one block of a block mask.

    Args:
        target: what the kernels run on.
        qk_dtype: "int8", "int4" or "fp8".
        smooth_q: whether queries are smoothed.
        window: whether keys far before a query are masked.
        k_block: keys of a block of the block mask, 0 without one.
    """
    chosen = choice_for(_ROWS, {
        "target": target.name, "amd": target.is_amd, "native_fp8": target.native_fp8 is not None,
        "scaled": target.has_scaled_mfma, "pipelines": TRITON >= (3, 9), "qk_dtype": qk_dtype,
        "smooth_q": smooth_q, "window": window,
    })  # fmt: skip
    xcd_rows = chosen.xcd_rows if target.xcds > 1 else 0
    config = replace(chosen, fp8=target.native_fp8 or _OCP, xcd_rows=xcd_rows)
    # Beside smoothed queries, lists of 128-key tiles spill 8 to 40 bytes on Hopper, those of 64 keys none.
    narrow = k_block > 0 and smooth_q and target.name == "sm90"
    return replace(config, block_n=64) if k_block % config.block_n or narrow else config
