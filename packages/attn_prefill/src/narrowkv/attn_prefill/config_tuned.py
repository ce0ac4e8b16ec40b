"""The configurations of prefill that `narrowkv tune` tries, for a chunk of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from narrowkv.attn_prefill.tiles import (
    WIDE_HEAD,
    PrefillConfig,
    PrefillShape,
    partial_programs,
    scratch_block,
)
from narrowkv.quant.formats import get_format
from narrowkv.runtime.targets import Target, least_columns
from narrowkv.runtime.tuned import check_fields, size_class

KERNELS = ("dense", "fused")


@dataclass(frozen=True)
class PrefillChoice:
    """What a row of a tune file chooses; rows of a tile and what else there is stay as they are shipped.

    Attributes:
        kernel: "dense" or "fused"; see `PrefillConfig`.
        block_n: keys of a tile.
        num_warps, num_stages: of the attention kernel.
        matrix_rows: rows and columns of a matrix instruction on AMD; 0 elsewhere.
        num_splits: programs that share a tile's keys, or fewer where their partial results have no room.
    """

    kernel: str
    block_n: int
    num_warps: int
    num_stages: int
    matrix_rows: int
    num_splits: int

    def __post_init__(self) -> None:
        known = {
            "kernel": KERNELS, "block_n": (16, 32, 64), "num_warps": (4, 8), "num_stages": (1, 2, 3),
            "matrix_rows": (0, 16, 32), "num_splits": (1, 2, 3, 4, 6, 8, 12, 16, 32),
        }  # fmt: skip
        check_fields(self, known)


def shape_class(shape: PrefillShape, formats: tuple[str, str], plain_keys: bool) -> str:
    """The class of a call: calls of one class share a row.

    plain_keys: whether no key has a descale of its own, and Q is one matrix operand.
    """
    of = f"{shape.head_dim} and {shape.v_head_dim}" if shape.v_head_dim else f"{shape.head_dim}"
    return (
        f"{shape.num_qo_heads}/{shape.num_kv_heads} heads of {of}, "
        f"{get_format(shape.q_dtype).name} over {formats[0]}/{formats[1]}"
        f"{'' if plain_keys else ' with factors of keys'}, one sequence, tokens to "
        f"{size_class(shape.num_tokens)}, keys to {size_class(shape.max_seq_len)}"
    )


def is_tuned(shape: PrefillShape, shipped: PrefillConfig) -> bool:
    """Whether `narrowkv tune` tries configurations in the place of this one."""
    return shape.batch == 1 and shape.num_tokens > 1 and shipped.kernel != "decode" and shipped.fp8 is None


def choices(target: Target, head_dim: int) -> list[PrefillChoice]:
    """Kernels and tiles to try, with one program for each tile's keys; splits are tried after that."""
    keys: tuple[int, ...] = (16, 32) if target.is_amd and head_dim > 128 else (32, 64)
    if head_dim > WIDE_HEAD:
        keys = (scratch_block(head_dim),)
    stages, matrices = ((1, 2), (16, 32)) if target.is_amd else ((2, 3), (0,))
    # The interpreter knows neither warps nor stages.
    ways = [(4, 2, 0)] if target.name == "cpu" else product((4, 8), stages, matrices)
    tried = [(kernel, block_n, *way) for kernel, block_n, way in product(KERNELS, keys, ways)]
    # Tiles of rows have 64 rows or fewer, of wide heads 32; those of 64 are multiplied by warpgroups.
    rows = 64 if head_dim <= WIDE_HEAD else 32
    return [PrefillChoice(*tile, 1) for tile in tried if tile[1] >= least_columns(target, rows)]


def splits(choice: PrefillChoice) -> list[PrefillChoice]:
    """The same kernel and tile with more programs for each tile's keys."""
    return [replace(choice, num_splits=number) for number in (2, 3, 4, 6, 8, 12, 16, 32)]


def with_choice(
    target: Target, shape: PrefillShape, base: PrefillConfig, choice: PrefillChoice
) -> PrefillConfig:
    """The shipped configuration of the chosen kernel with the tile and the splits of a row."""
    programs = shape.row_tiles(base.block_m) * shape.num_kv_heads
    # As many as `choose_splits` gives at most: a plan has memory for their partial results.
    tiles = -(-shape.max_seq_len // choice.block_n)
    most = max(1, min(tiles // 4, partial_programs(target, 2) // max(programs, 1)))
    options = replace(
        base.options,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        matrix_instr_nonkdim=choice.matrix_rows or base.options.matrix_instr_nonkdim,
    )
    if (options, choice.block_n) != (base.options, base.block_n):
        # LLVM's scheduling strategies were chosen for the shipped tile, and crash the compiler beside others.
        options = replace(options, waves_per_eu=None, maxnreg=None, llvm_fn_attrs=None)
    return replace(
        base,
        block_n=choice.block_n,
        num_splits=min(choice.num_splits, most),
        scratch_block=scratch_block(shape.head_dim),
        ping_pong=None,
        options=options,
    )
