"""Instructions of the vector ALU: one entry each, ``mnemonic: (result, sources, function)``.

Source: "Vector ALU Operations" and the pseudo-code of VOP1, VOP2, VOP3 and VOPC in the CDNA3 and CDNA4 ISA
documents. The functions see numpy arrays that broadcast over ``[waves, 64]`` and have the types named.
numpy's own functions appear where they are exactly the operation: those are written straight into the
register.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import arithmetic as a
from . import transcendental as t
from .state import Array

U32 = np.uint32
Function = Callable[..., Any]


class ValuOp(NamedTuple):
    """Type of the result, types of the sources, and the function."""

    result: str
    sources: tuple[str, ...]
    function: Function


def _family(result: str, sources: str, table: dict[str, Function]) -> dict[str, ValuOp]:
    return {name: ValuOp(result, tuple(sources.split()), function) for name, function in table.items()}


def _reversed(function: Function) -> Function:
    return lambda x, y: function(y, x)


def _shift_left(amount: Array, value: Array) -> Array:
    result: Array = value << (amount & amount.dtype.type(8 * value.dtype.itemsize - 1)).astype(value.dtype)
    return result


def _shift_right(amount: Array, value: Array) -> Array:
    result: Array = value >> (amount & amount.dtype.type(8 * value.dtype.itemsize - 1)).astype(value.dtype)
    return result


VALU: dict[str, ValuOp] = {
    **_family("u32", "u32", {
        "v_mov_b32": np.positive, "v_not_b32": np.invert, "v_bfrev_b32": a.reverse_bits,
        "v_ffbh_u32": a.leading_zeros, "v_ffbl_b32": a.trailing_zeros, "v_accvgpr_read_b32": np.positive,
        "v_accvgpr_write_b32": np.positive, "v_accvgpr_mov_b32": np.positive, "v_prng_b32": a.prng,
    }),
    "v_ffbh_i32": ValuOp("u32", ("i32",), a.leading_sign_bits),
    "v_mov_b64": ValuOp("u64", ("u64",), np.positive),
    **_family("u32", "u32 u32", {
        "v_add_u32": np.add, "v_sub_u32": np.subtract, "v_subrev_u32": _reversed(np.subtract),
        "v_and_b32": np.bitwise_and, "v_or_b32": np.bitwise_or, "v_xor_b32": np.bitwise_xor,
        "v_xnor_b32": lambda x, y: ~(x ^ y),
        "v_min_u32": np.minimum, "v_max_u32": np.maximum, "v_mul_lo_u32": np.multiply,
        "v_lshlrev_b32": _shift_left, "v_lshrrev_b32": _shift_right,
        "v_mul_u32_u24": lambda x, y: (x & U32(0xFFFFFF)) * (y & U32(0xFFFFFF)),
        "v_mul_hi_u32_u24": lambda x, y: a.multiply_high(x & U32(0xFFFFFF), y & U32(0xFFFFFF)),
        "v_mul_hi_u32": a.multiply_high,
        "v_bfm_b32": lambda n, at: ((U32(1) << (n & U32(31))) - U32(1)) << (at & U32(31)),
        "v_bcnt_u32_b32": lambda x, y: a.count_bits(x) + y,
    }),
    **_family("i32", "i32 i32", {
        "v_add_i32": np.add, "v_sub_i32": np.subtract, "v_min_i32": np.minimum, "v_max_i32": np.maximum,
        "v_mul_hi_i32": a.multiply_high,
        "v_mul_i32_i24": lambda x, y: a.low24(x) * a.low24(y),
    }),
    "v_ashrrev_i32": ValuOp("i32", ("u32", "i32"), _shift_right),
    **_family("u64", "u32 u64", {"v_lshlrev_b64": _shift_left, "v_lshrrev_b64": _shift_right}),
    "v_ashrrev_i64": ValuOp("i64", ("u32", "i64"), _shift_right),
    **_family("u32", "u32 u32 u32", {
        "v_add3_u32": lambda x, y, z: x + y + z, "v_or3_b32": lambda x, y, z: x | y | z,
        "v_and_or_b32": lambda x, y, z: (x & y) | z, "v_xad_u32": lambda x, y, z: (x ^ y) + z,
        "v_lshl_add_u32": lambda x, y, z: (x << (y & U32(31))) + z,
        "v_add_lshl_u32": lambda x, y, z: (x + y) << (z & U32(31)),
        "v_lshl_or_b32": lambda x, y, z: (x << (y & U32(31))) | z,
        "v_bfi_b32": lambda m, x, y: (m & x) | (~m & y), "v_bfe_u32": a.bit_field,
        "v_alignbit_b32": lambda x, y, z: a.align(x, y, z & U32(31)),
        "v_alignbyte_b32": lambda x, y, z: a.align(x, y, (z & U32(3)) << U32(3)),
        "v_perm_b32": a.permute_bytes,
        "v_min3_u32": lambda x, y, z: np.minimum(np.minimum(x, y), z),
        "v_max3_u32": lambda x, y, z: np.maximum(np.maximum(x, y), z), "v_med3_u32": a.median,
        "v_mad_u32_u24": lambda x, y, z: (x & U32(0xFFFFFF)) * (y & U32(0xFFFFFF)) + z,
    }),
    **_family("i32", "i32 i32 i32", {
        "v_min3_i32": lambda x, y, z: np.minimum(np.minimum(x, y), z),
        "v_max3_i32": lambda x, y, z: np.maximum(np.maximum(x, y), z), "v_med3_i32": a.median,
        "v_mad_i32_i24": lambda x, y, z: a.low24(x) * a.low24(y) + z,
    }),
    "v_bfe_i32": ValuOp("i32", ("i32", "u32", "u32"), a.bit_field),
    "v_lshl_add_u64": ValuOp("u64", ("u64", "u32",
    "u64"), a.shift_add_64),
    # 16-bit integers
    **_family("u16", "u16 u16", {
        "v_add_u16": np.add, "v_sub_u16": np.subtract, "v_subrev_u16": _reversed(np.subtract),
        "v_mul_lo_u16": np.multiply, "v_min_u16": np.minimum, "v_max_u16": np.maximum,
        "v_lshlrev_b16": _shift_left, "v_lshrrev_b16": _shift_right,
    }),
    **_family("i16", "i16 i16", {
        "v_min_i16": np.minimum, "v_max_i16": np.maximum, "v_add_i16": np.add, "v_sub_i16": np.subtract,
    }),
    "v_ashrrev_i16": ValuOp("i16", ("u16", "i16"), _shift_right),
    **_family("u16", "u16 u16 u16", {
        "v_mad_u16": lambda x, y, z: x * y + z, "v_med3_u16": a.median,
        "v_min3_u16": lambda x, y, z: np.minimum(np.minimum(x, y), z),
        "v_max3_u16": lambda x, y, z: np.maximum(np.maximum(x, y), z),
    }),
    **_family("i16", "i16 i16 i16", {
        "v_mad_i16": lambda x, y, z: x * y + z, "v_med3_i16": a.median,
        "v_min3_i16": lambda x, y, z: np.minimum(np.minimum(x, y), z),
        "v_max3_i16": lambda x, y, z: np.maximum(np.maximum(x, y), z),
    }),
    "v_mad_u32_u16": ValuOp("u32", ("u16", "u16", "u32"), a.multiply_add_wide),
    "v_mad_i32_i16": ValuOp("i32", ("i16", "i16",
    "i32"), a.multiply_add_wide),
    # fp32
    **_family("f32", "f32 f32", {
        "v_add_f32": np.add, "v_sub_f32": np.subtract, "v_subrev_f32": _reversed(np.subtract),
        "v_mul_f32": np.multiply, "v_min_f32": a.smallest, "v_max_f32": a.largest,
        "v_mul_legacy_f32": lambda x, y: np.where((x == 0) | (y == 0), np.float32(0), x * y),
    }),
    "v_ldexp_f32": ValuOp("f32", ("f32", "i32"), np.ldexp),
    **_family("f32", "f32", {
        "v_exp_f32": t.exp2, "v_log_f32": t.log2, "v_rcp_f32": t.reciprocal, "v_rcp_iflag_f32": t.reciprocal,
        "v_rsq_f32": t.reciprocal_root, "v_sqrt_f32": t.root, "v_sin_f32": t.sine, "v_cos_f32": t.cosine,
        "v_trunc_f32": np.trunc, "v_ceil_f32": np.ceil, "v_floor_f32": np.floor, "v_rndne_f32": np.rint,
        "v_fract_f32": a.fraction, "v_frexp_mant_f32": lambda x: np.frexp(x)[0],
    }),
    "v_frexp_exp_i32_f32": ValuOp("i32", ("f32",), a.exponent_of),
    **_family("f32", "f32 f32 f32", {
        "v_fma_f32": a.fma, "v_min3_f32": lambda x, y, z: a.smallest(a.smallest(x, y), z),
        "v_max3_f32": lambda x, y, z: a.largest(a.largest(x, y), z), "v_med3_f32": a.median_float,
        "v_minimum3_f32": lambda x, y, z: a.minimum(a.minimum(x, y), z),
        "v_maximum3_f32": lambda x, y, z: a.maximum(a.maximum(x, y), z),
        "v_div_fixup_f32": a.div_fixup,
    }),
    "v_mad_legacy_f32": ValuOp("f32", ("f32", "f32", "f32"),
                           lambda x, y, z: np.where((x == 0) | (y == 0), np.float32(0), x * y) + z),
    # fp16
    **_family("f16", "f16 f16", {
        "v_add_f16": np.add, "v_sub_f16": np.subtract, "v_subrev_f16": _reversed(np.subtract),
        "v_mul_f16": np.multiply, "v_min_f16": a.smallest, "v_max_f16": a.largest,
    }),
    "v_ldexp_f16": ValuOp("f16", ("f16",
    "i16"), a.scale_f16),
    **_family("f16", "f16", {
        "v_exp_f16": t.exp2, "v_log_f16": t.log2, "v_rcp_f16": t.reciprocal, "v_rsq_f16": t.reciprocal_root,
        "v_sqrt_f16": t.root, "v_trunc_f16": np.trunc, "v_ceil_f16": np.ceil, "v_floor_f16": np.floor,
        "v_rndne_f16": np.rint, "v_fract_f16": a.fraction, "v_sin_f16": t.sine, "v_cos_f16": t.cosine,
    }),
    **_family("f16", "f16 f16 f16", {
        "v_fma_f16": a.fma16, "v_min3_f16": lambda x, y, z: a.smallest(a.smallest(x, y), z),
        "v_max3_f16": lambda x, y, z: a.largest(a.largest(x, y), z), "v_med3_f16": a.median_float,
        "v_div_fixup_f16": a.div_fixup,
    }),
    # fp64
    **_family("f64", "f64 f64", {
        "v_add_f64": np.add, "v_mul_f64": np.multiply, "v_min_f64": a.smallest, "v_max_f64": a.largest,
    }),
    "v_ldexp_f64": ValuOp("f64", ("f64", "i32"), np.ldexp),
    **_family("f64", "f64", {
        "v_rcp_f64": lambda x: 1.0 / x, "v_rsq_f64": lambda x: 1.0 / np.sqrt(x), "v_sqrt_f64": np.sqrt,
        "v_trunc_f64": np.trunc, "v_ceil_f64": np.ceil, "v_floor_f64": np.floor, "v_rndne_f64": np.rint,
        "v_fract_f64": a.fraction, "v_frexp_mant_f64": lambda x: np.frexp(x)[0],
    }),
    "v_frexp_exp_i32_f64": ValuOp("i32", ("f64",), a.exponent_of),
    **_family("f64", "f64 f64 f64", {"v_fma_f64": a.fma64, "v_div_fixup_f64": a.div_fixup}),
    "v_trig_preop_f64": ValuOp("f64", ("f64", "u32"), a.two_over_pi),
    # conversions between the wide types; narrow formats are in convert.py
    "v_cvt_f32_i32": ValuOp("f32", ("i32",), lambda x: x.astype(np.float32)),
    "v_cvt_f32_u32": ValuOp("f32", ("u32",), lambda x: x.astype(np.float32)),
    "v_cvt_i32_f32": ValuOp("i32", ("f32",), lambda x: a.to_integer(np.trunc(x), np.int32)),
    "v_cvt_u32_f32": ValuOp("u32", ("f32",), lambda x: a.to_integer(np.trunc(x), np.uint32)),
    "v_cvt_flr_i32_f32": ValuOp("i32", ("f32",), lambda x: a.to_integer(np.floor(x), np.int32)),
    "v_cvt_rpi_i32_f32": ValuOp("i32",
    ("f32",), lambda x: a.to_integer(np.floor(x + 0.5), np.int32)),
    "v_cvt_f32_f16": ValuOp("f32", ("f16",), lambda x: x.astype(np.float32)),
    "v_cvt_f16_u16": ValuOp("f16", ("u16",), lambda x: x.astype(np.float16)),
    "v_cvt_f16_i16": ValuOp("f16", ("i16",), lambda x: x.astype(np.float16)),
    "v_cvt_u16_f16": ValuOp("u16", ("f16",), lambda x: a.to_integer(np.trunc(x), np.uint16)),
    "v_cvt_i16_f16": ValuOp("i16", ("f16",), lambda x: a.to_integer(np.trunc(x), np.int16)),
    "v_cvt_f64_f32": ValuOp("f64", ("f32",), lambda x: x.astype(np.float64)),
    "v_cvt_f32_f64": ValuOp("f32", ("f64",), lambda x: x.astype(np.float32)),
    "v_cvt_f64_i32": ValuOp("f64", ("i32",), lambda x: x.astype(np.float64)),
    "v_cvt_f64_u32": ValuOp("f64", ("u32",), lambda x: x.astype(np.float64)),
    "v_cvt_i32_f64": ValuOp("i32", ("f64",), lambda x: a.to_integer(np.trunc(x), np.int32)),
    "v_cvt_u32_f64": ValuOp("u32", ("f64",), lambda x: a.to_integer(np.trunc(x), np.uint32)),
    **{f"v_cvt_f32_ubyte{k}": ValuOp("f32",
    ("u32",), partial(a.byte_to_f32, byte=k))
       for k in range(4)},
}  # fmt: skip

# The destination is also the last source: v_fmac_f32 D, A, B is D = A * B + D.
ACCUMULATING: dict[str, str] = {
    "v_fmac_f32": "v_fma_f32", "v_fmac_f16": "v_fma_f16", "v_fmac_f64": "v_fma_f64",
}  # fmt: skip
# D = A * K + B and D = A * B + K with a literal K in the operand list are plain fused multiply-adds.
LITERAL_FMA = {
    "v_fmaak_f32": "v_fma_f32", "v_fmamk_f32": "v_fma_f32", "v_fmaak_f16": "v_fma_f16",
    "v_fmamk_f16": "v_fma_f16",
}  # fmt: skip

# Integer results that saturate under the modifier `clamp`: how to widen, and the function.
SATURATING: dict[str, Function] = {
    "v_add_u32": np.add, "v_sub_u32": np.subtract, "v_subrev_u32": _reversed(np.subtract),
    "v_add_i32": np.add,
    "v_sub_i32": np.subtract, "v_add_u16": np.add, "v_sub_u16": np.subtract, "v_add_i16": np.add,
    "v_sub_i16": np.subtract, "v_subrev_u16": _reversed(np.subtract),
    "v_mad_u32_u24": lambda x, y, z: (x & 0xFFFFFF) * (y & 0xFFFFFF) + z,
}  # fmt: skip

_COMPARE: dict[str, Function] = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": np.not_equal, "lg": lambda x, y: (x < y) | (x > y), "o": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
    "u": lambda x, y: np.isnan(x) | np.isnan(y), "nge": lambda x, y: ~(x >= y),
    "nlg": lambda x, y: ~((x < y) | (x > y)), "ngt": lambda x, y: ~(x > y), "nle": lambda x, y: ~(x <= y),
    "neq": np.not_equal, "nlt": lambda x, y: ~(x < y),
}  # fmt: skip
_INTEGER_COMPARES = ("lt", "eq", "le", "gt", "ge", "ne")

COMPARES: dict[str, ValuOp] = {
    f"v_cmp_{name}_{kind}": ValuOp("mask", (kind, kind), function)
    for name, function in _COMPARE.items()
    for kind in ("f16", "f32", "f64", "i16", "i32", "i64", "u16", "u32", "u64")
    if (name in _INTEGER_COMPARES) == (kind[0] in "iu") or (kind[0] == "f" and name not in ("ne",))
}
COMPARES |= {
    f"v_cmp_class_{kind}": ValuOp("mask", (kind, "u32"), a.classify) for kind in ("f16", "f32", "f64")
}
