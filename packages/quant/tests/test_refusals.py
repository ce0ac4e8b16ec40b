"""What the package does not take, and what it says then."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from narrowkv import quant
from narrowkv.quant import KOffset, VScale
from narrowkv.quant.sage import quantize_per_token_group, token_groups

X = torch.zeros(2, 48)
BYTES = torch.zeros(2, dtype=torch.uint8)
INT8 = torch.zeros(5, 7, 3, 16, dtype=torch.int8)
FP8 = quant.quantize_per_head(torch.ones(2, 3, 16), "fp8_e4m3fn")
Q, K, V = torch.ones(5, 4, 8), torch.ones(7, 2, 8), torch.ones(7, 2, 8)
OFFSET, SCALE = KOffset(torch.zeros(2, 8)), VScale(torch.ones(2, 8))
BROKEN = K.masked_fill(torch.arange(8) == 2, math.nan)


def _change_formats() -> None:
    quant.FORMATS["fp8"] = quant.FORMATS["bf16"]  # type: ignore[index]


def _change_a_format() -> None:
    quant.FORMATS["bf16"].bits = 8  # type: ignore[misc]


Refusal = tuple[Callable[[], object], type[Exception], str]
# Rows: what is called, the class of the error, and a pattern of its message.
REFUSALS: dict[str, Refusal] = {
    # Formats and their storage.
    "unknown format": (lambda: quant.get_format("fp8"), ValueError, r"one of bf16, .*int4; got 'fp8'"),
    "format of bytes": (lambda: quant.get_format(torch.uint8), ValueError,
        "uint8 bytes do not tell their format"),
    "format of a number": (lambda: quant.get_format(8), TypeError,
        "a torch.dtype or a Format, got int"),  # type: ignore[arg-type]
    "formats are constant": (_change_formats, TypeError, "item assignment"),
    "a format is constant": (_change_a_format, AttributeError, "bits"),
    "bytes of an odd row": (lambda: quant.get_format("fp4_e2m1").storage_bytes(5), ValueError,
        "elements must be even for fp4_e2m1, got 5"),
    "bytes without a format": (lambda: quant.check_storage("k", BYTES, None), ValueError,
        "k has dtype torch.uint8, which does not tell its format: pass one of"),
    # Rounding and packing.
    "cast of fp64": (lambda: quant.cast_fp8(X.double(), "fp8_e4m3fn"), TypeError,
        "one of .*, got torch.float64"),
    "cast to int8": (lambda: quant.cast_fp8(X, "int8"), ValueError,
        "format must be one of fp8_e4m3fn, fp8_e4m3fnuz, fp8_e5m2; got int8"),
    "cast that requires grad": (lambda: quant.cast_fp8(torch.zeros(2, requires_grad=True), "fp8_e4m3fn"),
        ValueError, "x must not require grad"),
    "encoding in 16 bits": (lambda: quant.encode(X, "bf16"), ValueError,
        "format must be FP8, FP4, INT8 or INT4 to be quantised to, got bf16"),
    "packing an odd row": (lambda: quant.encode(torch.zeros(2, 3), "fp4_e2m1"), ValueError,
        r"code must have an even last dimension to be packed, got shape \[2, 3\]"),
    "packing of fp32": (lambda: quant.pack_int4(X), TypeError, "x must have dtype torch.int8"),
    "unpacking of fp32": (lambda: quant.unpack_fp4(X), TypeError, "packed must have dtype torch.uint8"),
    "unpacking a number": (lambda: quant.unpack_fp4(BYTES[0]), ValueError,
        "packed must have at least one dimension"),
    # Scales.
    "E8M0 of int32": (lambda: quant.e8m0_decode(BYTES.int()), TypeError, "torch.uint8, got torch.int32"),
    "E8M0 of fp64": (lambda: quant.e8m0_encode(X.double()), TypeError, "torch.float32, got torch.float64"),
    **{f"a given descale of {bad}": (lambda bad=bad: quant.quantize_per_tensor(X, "int8", descale=bad),
        ValueError, "descale must be") for bad in (0.0, -1.0, math.nan, math.inf)},
    **{f"a descale of {bad} to go back": (lambda bad=bad: quant.dequantize_per_tensor(INT8, bad),
        ValueError, "descale must be") for bad in (0.0, -1.0, math.nan, math.inf)},
    "two descales of a tensor": (lambda: quant.quantize_per_tensor(X, "int8", descale=torch.ones(2)),
        ValueError, r"descale must have one element, got shape \[2\]"),
    "a descale in fp64": (lambda: quant.quantize_per_tensor(X, "int8", descale=torch.ones(1).double()),
        TypeError, "descale must have dtype torch.float32"),
    "descales of more rows": (lambda: quant.quantize_with_descale(X, "int8", torch.ones(3, 1)), ValueError,
        r"descale must broadcast to the shape of x \[2, 48\], got \[3, 1\]"),
    "descales of more dimensions": (lambda: quant.quantize_with_descale(X[0], "int8", torch.ones(3, 48)),
        ValueError, r"descale must broadcast to the shape of x \[48\], got \[3, 48\]"),
    # Going back.
    "back from bytes": (lambda: quant.dequantize_per_head(FP8[0].view(torch.uint8), FP8[1]), ValueError,
        "does not tell its format"),
    "back from another format": (lambda: quant.dequantize_per_head(*FP8, "fp8_e5m2"), TypeError,
        "stored in format fp8_e5m2"),
    "heads' descales of pages": (lambda: quant.dequantize_per_head(INT8, torch.ones(5, 3)), ValueError,
        r"descale must have shape \[heads\], got \[5, 3\]"),
    "pages' descales of heads": (lambda: quant.dequantize_per_page_head(INT8, torch.ones(3)), ValueError,
        r"descale must have shape \[pages, heads\], got \[3\]"),
    "descales of more blocks": (lambda: quant.dequantize_per_block(INT8, torch.ones(5, 3, 3), 4), ValueError,
        "descale must have 2 blocks for 7 tokens, got 3"),
    "descales of more groups": (
        lambda: quant.dequantize_per_group(INT8, torch.ones(5, 7, 3, 4), 8, format="int8"), ValueError,
        r"descale must have shape \[5, 7, 3, 2\], got \[5, 7, 3, 4\]"),
    "groups' descales in int32": (
        lambda: quant.dequantize_per_group(BYTES.expand(2, 2), torch.ones(2, 3, dtype=torch.int32), 16),
        TypeError, "descale must have dtype one of"),
    # Blocks, groups and tokens.
    "no block": (lambda: quant.quantize_per_block(INT8.float(), 0), ValueError, "block must be at least 1"),
    "a block of -4": (lambda: quant.quantize_per_block(INT8.float(), -4), ValueError,
        "block must be at least 1"),
    "no group": (lambda: quant.quantize_per_group(X, 0), ValueError, "group must be at least 1"),
    "a group of -4": (lambda: quant.quantize_per_group(X, -4), ValueError, "group must be at least 1"),
    "a group that does not divide": (lambda: quant.quantize_per_group(X, 32), ValueError,
        r"group must divide the last dimension of x \(48\), got 32"),
    "an unknown scale": (lambda: quant.quantize_per_group(X, 16, scale="e5m2"), ValueError,
        "scale must be one of e8m0, e4m3, fp32; got 'e5m2'"),
    "E4M3's rule with E8M0": (lambda: quant.quantize_per_group(X, 16, exponent="amax"), ValueError,
        "exponent must be one of mse, floor, ceil, ultraquant, sglang; got 'amax'"),
    "a search with E8M0": (lambda: quant.quantize_per_group(X, 16, exponent="search"), ValueError,
        "exponent"),
    "E8M0's rule with E4M3": (lambda: quant.quantize_per_group(X, 16, scale="e4m3", exponent="floor"),
        ValueError, "exponent must be one of mse, amax, search; got 'floor'"),
    "a global descale with E8M0": (lambda: quant.quantize_per_group(X, 16, global_descale=2.0), ValueError,
        'global_descale is for scale="e4m3" only'),
    "a global tensor with E8M0": (lambda: quant.quantize_per_group(X, 16, global_descale=torch.ones(1)),
        ValueError, 'global_descale is for scale="e4m3" only'),
    "odd tokens of INT4": (lambda: quant.quantize_tokens_int4(X[:, :3]), ValueError, "even last dimension"),
    "tokens in fp64": (lambda: quant.quantize_tokens_int8(X.double()), TypeError, "float64"),
    "scale words in fp16": (lambda: quant.split_zero_point(X.half()), TypeError, "scale"),
    "an unknown granularity": (lambda: token_groups("k", "per_row"), ValueError, "one of per_tensor"),
    "a side without groups": (lambda: token_groups("v", "per_block"), ValueError, "side must be one of q, k"),
    "tokens without heads": (lambda: quantize_per_token_group(X, token_groups("q", "per_warp"), "int8"),
        ValueError, "tokens, heads, dim"),
    # Transforms.
    "an offset in fp64": (lambda: KOffset(OFFSET.offset.double()), TypeError,
        "offset must have dtype torch.float32"),
    "an offset of one head": (lambda: KOffset(OFFSET.offset[0]), ValueError,
        r"offset must have shape \[num_kv_heads, head_dim\], got \[8\]"),
    "an offset of no keys": (lambda: KOffset.from_keys(K[:0]), ValueError,
        r"k must have shape .* with tokens, got \[0, 2, 8\]"),
    "keys of fewer heads": (lambda: OFFSET.subtract(K[:, :1]), ValueError,
        r"k must have shape \[\.\.\., 2, 8\] like the offset, got \[7, 1, 8\]"),
    "queries of a broken ratio": (lambda: quant.lse_correction(Q[:, :3], OFFSET, 1.0), ValueError,
        r"q must have a multiple of 2 heads \(num_kv_heads\), got 3"),
    "narrower queries": (lambda: quant.lse_correction(Q[..., :4], OFFSET, 1.0), ValueError,
        r"q must have shape \[num_tokens, num_qo_heads, 8\]"),
    "sm_scale NaN": (lambda: quant.lse_correction(Q, OFFSET, math.nan), ValueError,
        "sm_scale must be finite"),
    **{f"Hadamard blocks of {block}": (lambda block=block: quant.hadamard(X, block), ValueError,
        f"block must be a power of two that divides head_dim 48, got {block}") for block in (3, 32, 12)},
    "Hadamard of int8": (lambda: quant.hadamard(INT8), TypeError, "x must have dtype one of"),
    "Hadamard of nothing": (lambda: quant.hadamard(X[:, :0]), ValueError, "with head_dim at least 1"),
    "values of more heads": (lambda: SCALE.divide(torch.ones(3, 3, 8)), ValueError, "like the scale"),
    "outputs of a broken ratio": (lambda: SCALE.multiply(torch.ones(3, 3, 8)), ValueError,
        "multiple of 2 heads"),
    "values in int32": (lambda: VScale.from_values(V.int()), TypeError, "v must"),
    "scales of no values": (lambda: VScale.from_values(V[:0]), ValueError, "with tokens"),
    "a transform's strided offset": (lambda: quant.KeyTransform(torch.zeros(2, 8)[:, ::2]), ValueError,
        "offset must be contiguous"),
    "a sample of a broken ratio": (lambda: quant.calibrate([(Q[:, :3], K, V)]), ValueError,
        "q must have a multiple of 2 heads"),
    "a sample of fewer values": (lambda: quant.calibrate([(Q, K, V[:, :1])]), ValueError,
        "v must have shape"),
    "a sample that is not finite": (lambda: quant.calibrate([(Q, K, V), (Q, BROKEN, V)]), ValueError,
        "sample of layer 1 must be finite"),
    # Figures.
    "figures of other shapes": (lambda: quant.compare(X.flatten(), X), ValueError,
        r"o must have shape \[2, 48\], got \[96\]"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "match"), REFUSALS.values(), ids=REFUSALS)
def test_refused_with_the_reason(call: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize(
    ("dtype", "tag"),
    [
        (torch.float8_e4m3fn, "fp8_e4m3fnuz"),
        (torch.float8_e4m3fnuz, "fp8_e4m3fn"),
        (torch.bfloat16, "fp16"),
        (torch.int8, "fp4_e2m1"),
        (torch.uint8, "int8"),
    ],
)
def test_a_tag_that_the_dtype_contradicts_is_refused(dtype: torch.dtype, tag: str) -> None:
    with pytest.raises(TypeError, match=rf"k in format {tag} must have dtype .*, got {dtype}"):
        quant.check_storage("k", torch.zeros(2, dtype=dtype), tag)
