"""Launch configuration of Sage attention: a typed function of target and shape, never searched for."""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.quant.launch import LaunchOptions
from narrowkv.quant.targets import Target

_OCP = "fp8_e4m3fn"


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
        two_level: each tile's P @ V is summed apart and added in fp32.
        options: compiler options.
    """

    block_m: int
    block_n: int
    fp8: str
    key_order: KeyOrder
    two_level: bool
    options: LaunchOptions


def choose_config(target: Target, qk_dtype: str, head_dim: int) -> SageConfig:
    """The shipped configuration.

    Args:
        target: what the kernel will run on.
        qk_dtype: "int8", "int4" or "fp8".
        head_dim: 64 or 128.
    """
    fp8 = target.native_fp8 or _OCP
    if target.is_amd:
        return SageConfig(
            128, 64, fp8, KeyOrder(), two_level=False,
            options=LaunchOptions(num_warps=4, num_stages=1, waves_per_eu=2),
        )  # fmt: skip
    # Hopper's FP8 products are summed with 14 bits or so; a tile of keys at a time keeps that harmless.
    return SageConfig(
        128, 64, fp8, KeyOrder(gather=2, lanes=4, width=2), two_level=True,
        options=LaunchOptions(num_warps=8 if head_dim == 128 else 4, num_stages=3),
    )  # fmt: skip
