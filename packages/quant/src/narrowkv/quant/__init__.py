"""narrowkv.quant: number formats and quantisation for narrow-precision KV caches.

The names exported here run on any torch device and need no Triton. The device code that kernels call is in
`narrowkv.quant.device`.

Example:
    >>> import torch
    >>> from narrowkv.quant import dequantize_per_tensor, quantize_per_tensor
    >>> stored, descale = quantize_per_tensor(torch.tensor([1.0, -448.0]), "fp8_e4m3fn")
    >>> dequantize_per_tensor(stored, descale)
    tensor([   1., -448.])
"""

from .accuracy import ErrorReport, compare, cosine, max_abs, relative_l1, rmse
from .calibration import Calibration, LayerCalibration, calibrate
from .e8m0 import dsv4_tile_scale, e8m0_decode, e8m0_encode
from .formats import FORMATS, FP8_FORMATS, Format, check_storage, get_format
from .fp4 import FP4_VALUES, pack_fp4, round_fp4, unpack_fp4
from .groups import dequantize_per_group, nvfp4_global_descale, quantize_per_group
from .int_formats import pack_int4, round_int4, round_int8, unpack_int4
from .int_tokens import (
    dequantize_tokens_int4,
    quantize_tokens_int4,
    quantize_tokens_int8,
    split_zero_point,
)
from .quantize import (
    dequantize_per_block,
    dequantize_per_channel,
    dequantize_per_head,
    dequantize_per_page_head,
    dequantize_per_tensor,
    dequantize_per_token_head,
    dequantize_with_descale,
    quantize_per_block,
    quantize_per_channel,
    quantize_per_head,
    quantize_per_page_head,
    quantize_per_tensor,
    quantize_per_token_head,
    quantize_with_descale,
)
from .rounding import cast_fp8, decode, encode
from .transforms import KeyTransform, KOffset, VScale, hadamard, lse_correction

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "FP4_VALUES",
    "FP8_FORMATS",
    "Calibration",
    "ErrorReport",
    "Format",
    "KOffset",
    "KeyTransform",
    "LayerCalibration",
    "VScale",
    "calibrate",
    "cast_fp8",
    "check_storage",
    "compare",
    "cosine",
    "decode",
    "dequantize_per_block",
    "dequantize_per_channel",
    "dequantize_per_group",
    "dequantize_per_head",
    "dequantize_per_page_head",
    "dequantize_per_tensor",
    "dequantize_per_token_head",
    "dequantize_tokens_int4",
    "dequantize_with_descale",
    "dsv4_tile_scale",
    "e8m0_decode",
    "e8m0_encode",
    "encode",
    "get_format",
    "hadamard",
    "lse_correction",
    "max_abs",
    "nvfp4_global_descale",
    "pack_fp4",
    "pack_int4",
    "quantize_per_block",
    "quantize_per_channel",
    "quantize_per_group",
    "quantize_per_head",
    "quantize_per_page_head",
    "quantize_per_tensor",
    "quantize_per_token_head",
    "quantize_tokens_int4",
    "quantize_tokens_int8",
    "quantize_with_descale",
    "relative_l1",
    "rmse",
    "round_fp4",
    "round_int4",
    "round_int8",
    "split_zero_point",
    "unpack_fp4",
    "unpack_int4",
]
