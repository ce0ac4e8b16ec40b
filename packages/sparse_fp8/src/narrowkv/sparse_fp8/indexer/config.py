"""Tile sizes and compiler options of the indexer's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.quant.formats import BITS, NATIVE, widen_route
from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.targets import Target, least_columns
from narrowkv.sparse_fp8.indexer.keys import FP4, IndexKeysFormat

__all__ = ["BF16", "TABLE", "LogitsConfig", "choose_logits_config", "columns_of_program"]

BF16 = "bf16"
TABLE = "table"
_PROGRAMS_PER_UNIT = 16
_MOST_COLUMNS = 2048  # of a program


@dataclass(frozen=True)
class LogitsConfig:
    """How `index_logits` divides its work.

    Attributes:
        block_n: keys of a tile.
        block_h: heads of a product, padded.
        block_t: tokens of a program.
        route: "native" or "bits" (see `narrowkv.quant.device`), or for FP4 keys "bf16", to which they are
            widened, or "table", by which they become E4M3.
        options: compiler options.
    """

    block_n: int
    block_h: int
    block_t: int
    route: str
    options: LaunchOptions

    def explain(self) -> str:
        """The configuration in words."""
        products = {
            NATIVE: "FP8 products", BITS: "products of float16", BF16: "products of bfloat16",
            TABLE: "FP8 products of FP4 keys by a table",
        }[self.route]  # fmt: skip
        return (
            f"{products}, tiles of {self.block_n} keys, {self.block_t} tokens a program, "
            f"{self.options.num_warps} warps, {self.options.num_stages} stages"
        )


def choose_logits_config(
    target: Target, *, num_heads: int, query: str, keys: IndexKeysFormat, q_len: int
) -> LogitsConfig:
    """The configuration for a target, heads and formats.

    Args:
        target: what it is for.
        num_heads: index heads.
        query: format of the queries.
        keys: how the keys are stored.
        q_len: tokens of a sequence over pages; of keys without pages, tokens that may share a program.
    """
    native = query == keys.format and widen_route(target, query) == NATIVE
    route = NATIVE if native else BF16 if keys.format == FP4 else BITS
    # Each of the two products sums over half the channels, and one of FP8 over 32 or more.
    fp8 = target.name == "sm90" and widen_route(target, query) == NATIVE
    if route == BF16 and fp8 and keys.head_dim >= 64:
        route = TABLE
    # The product of a tile of keys with one token's heads is in registers, and the queries of all tokens.
    most = 2 if num_heads <= 64 and keys.head_dim <= 128 and keys.format != FP4 else 1
    block_t = max(each for each in range(1, most + 1) if q_len % each == 0)
    block_n, options = 64, LaunchOptions()
    if target.is_amd:
        # 128 keys of 256 channels spill scalars in gfx950's loop.
        block_n = 128 if native and block_t == 1 and keys.head_dim <= 128 else 64
        if route == BF16 and keys.head_dim > 128 and num_heads > 64 and target.name != "gfx950":
            block_n = 32  # gfx942, model, 2 tokens over 2k keys: 41 us, 64 keys 43 us with 2 scalars spilled
        options = LaunchOptions(num_warps=4, num_stages=2, matrix_instr_nonkdim=16)
    elif target.is_nvidia:
        # Widened keys take twice the registers. H200, B64 over 65,536 keys, FP8 products of 64 heads: 64 keys
        # 168 us, 128 keys 190 us, 256 keys 215 us. FP4 keys, beside 300 us for
        # FP8 ones that day: by the table with 128 keys and 4 warps 397 us, 8 warps 463 us, 64 keys 447 us; in
        # bfloat16 with 64 keys and 4 warps 551 us, 128 and 8 728 us.
        block_t = block_t if native else 1
        block_n = 64 if block_t == 1 and route in (NATIVE, BF16) else 128
        options = LaunchOptions(num_warps=8 if route == BITS else 4, num_stages=3)
    block_h = max(16, least_columns(target, block_n), 1 << (num_heads - 1).bit_length())
    return LogitsConfig(block_n, block_h, block_t, route, options)


def columns_of_program(target: Target, block_n: int, token_blocks: int, num_columns: int) -> int:
    """Columns of a program: enough programs to fill the chip several times, and a power of two of tiles."""
    units = target.compute_units
    wanted = token_blocks * num_columns // (units * _PROGRAMS_PER_UNIT)
    columns = block_n
    while columns * 2 <= min(wanted, _MOST_COLUMNS):
        columns *= 2
    return columns
