"""The stored number formats: names, widths, ranges, and the torch dtype that holds them.

FP8 is stored in torch's float8 dtypes, or in uint8 together with the format's name. FP4 and INT4 are packed
two to a byte in uint8, element 2i in the low nibble. A format is part of a tensor's type: it is never guessed
from a device.

Example:
    >>> get_format("fp8_e4m3fn").max_value
    448.0
    >>> get_format(torch.float8_e4m3fnuz).name
    'fp8_e4m3fnuz'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from narrowkv.runtime.errors import check_dtype, check_tensor
from narrowkv.runtime.targets import Target

__all__ = ["FORMATS", "FP8_FORMATS", "Format", "check_storage", "get_format"]

# Routes from a stored format to 16 bits.
NATIVE = "native"
BITS = "bits"
# Bytes of an OCP cache reinterpreted as FNUZ: half the value. Wrong for 0x80 and NaN, so only for caches free
# of both.
FNUZ_ALIAS = "fnuz_alias"
# An INT8 code is widened by placing it in the mantissa of a subnormal float16, where it counts multiples of
# 2**-24; an INT4 code stands four bits higher. No exponent bits are set, and arithmetic on either is exact.
INT8_EXPONENT = 24
INT4_EXPONENT = 20
_INTEGER_EXPONENTS = {"int8": INT8_EXPONENT, "int4": INT4_EXPONENT}


@dataclass(frozen=True)
class Format:
    """One stored number format.

    Attributes:
        name: the name used in every narrowkv signature.
        kind: "float" (16 bits), "fp8", "fp4" or "int".
        bits: bits per element.
        torch_dtype: the torch dtype of one element; None for the packed formats (FP4, INT4), which are uint8.
        max_value: the largest finite magnitude that a quantiser writes (symmetric: INT8 stops at 127, INT4 at
            7).
        smallest_normal: the smallest normal magnitude; 1.0 for integers.
        smallest_subnormal: the smallest magnitude above zero; 1.0 for integers.
        mantissa_bits: stored mantissa bits; 0 for integers.
        nan_codes: the byte or word codes that are NaN; empty where the format has none (FP4, integers), and
            for the 16-bit formats, which have many.
    """

    name: str
    kind: str
    bits: int
    torch_dtype: torch.dtype | None
    max_value: float
    smallest_normal: float
    smallest_subnormal: float
    mantissa_bits: int
    nan_codes: tuple[int, ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether two elements share a byte."""
        return self.bits == 4

    @property
    def has_nan(self) -> bool:
        """Whether an element can be NaN."""
        return self.kind in ("float", "fp8")

    @property
    def storage_dtype(self) -> torch.dtype:
        """The torch dtype of the storage tensor: `torch_dtype`, or uint8 for the packed formats."""
        return torch.uint8 if self.torch_dtype is None else self.torch_dtype

    def storage_bytes(self, elements: int) -> int:
        """Bytes that `elements` neighbours along the last dimension occupy.

        Raises:
            ValueError: an odd count in a packed format.
        """
        if elements * self.bits % 8:
            raise ValueError(f"elements must be even for {self.name}, got {elements}")
        return elements * self.bits // 8

    def __str__(self) -> str:
        return self.name


_E5M2_NAN = (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)

# A dict, not a read-only view of one: torch.compile cannot look up keys in a view while it traces a function
# that writes to a dict.
_BY_NAME = {
    f.name: f
    for f in (
        Format("bf16", "float", 16, torch.bfloat16, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133, 7),
        Format("fp16", "float", 16, torch.float16, 65504.0, 2.0**-14, 2.0**-24, 10),
        Format("fp8_e4m3fn", "fp8", 8, torch.float8_e4m3fn, 448.0, 2.0**-6, 2.0**-9, 3, (0x7F, 0xFF)),
        Format("fp8_e4m3fnuz", "fp8", 8, torch.float8_e4m3fnuz, 240.0, 2.0**-7, 2.0**-10, 3, (0x80,)),
        Format("fp8_e5m2", "fp8", 8, torch.float8_e5m2, 57344.0, 2.0**-14, 2.0**-16, 2, _E5M2_NAN),
        Format("fp4_e2m1", "fp4", 4, None, 6.0, 1.0, 0.5, 1),
        Format("int8", "int", 8, torch.int8, 127.0, 1.0, 1.0, 0),
        Format("int4", "int", 4, None, 7.0, 1.0, 1.0, 0),
    )
}
FORMATS: Mapping[str, Format] = MappingProxyType(_BY_NAME)
"""Every known format by name."""

FP8_FORMATS: tuple[str, ...] = tuple(f.name for f in FORMATS.values() if f.kind == "fp8")
"""Names of the FP8 formats."""

_BY_DTYPE = {f.torch_dtype: f for f in FORMATS.values() if f.torch_dtype is not None}


def get_format(value: str | torch.dtype | Format) -> Format:
    """The format that a name, a torch dtype or a `Format` denotes.

    Raises:
        TypeError: `value` is something else.
        ValueError: the name is unknown, or the dtype does not tell a format (uint8 needs a name).
    """
    if isinstance(value, Format):
        return value
    known = ", ".join(_BY_NAME)
    if isinstance(value, torch.dtype):
        if value in _BY_DTYPE:
            return _BY_DTYPE[value]
        why = " (uint8 bytes do not tell their format: pass its name)" if value == torch.uint8 else ""
        raise ValueError(f"format must be one of {known}; got {value}{why}")
    if not isinstance(value, str):
        raise TypeError(f"format must be a name, a torch.dtype or a Format, got {type(value).__name__}")
    if value not in _BY_NAME:
        raise ValueError(f"format must be one of {known}; got {value!r}")
    return _BY_NAME[value]


def check_storage(name: str, tensor: torch.Tensor, format: str | torch.dtype | Format | None) -> torch.Tensor:
    """Checks that `tensor` can hold `format`, and returns it viewed as the format's storage dtype (no copy).

    Args:
        name: the argument's name, for the message.
        tensor: storage: the format's torch dtype, or uint8 for an FP8 format that is named.
        format: the format; None takes it from the dtype, which uint8 does not tell.

    Returns:
        `tensor`, or its view in the FP8 dtype when it came as uint8.

    Raises:
        TypeError: the dtype is not the format's storage dtype (an E4M3FN tag on FNUZ bytes is a mismatch).
        ValueError: `format` is None and the dtype is uint8 or unknown.

    Example:
        >>> check_storage("k", torch.zeros(2, 4, dtype=torch.uint8), "fp8_e4m3fnuz").dtype
        torch.float8_e4m3fnuz
    """
    check_tensor(name, tensor)
    if format is None:
        if tensor.dtype not in _BY_DTYPE:
            known = ", ".join(FORMATS)
            raise ValueError(
                f"{name} has dtype {tensor.dtype}, which does not tell its format: pass one of {known}"
            )
        return tensor
    fmt = get_format(format)
    if fmt.kind == "fp8" and tensor.dtype == torch.uint8:
        return tensor.view(fmt.storage_dtype)
    if tensor.dtype != fmt.storage_dtype:
        allowed = (fmt.storage_dtype, torch.uint8) if fmt.kind == "fp8" else (fmt.storage_dtype,)
        check_dtype(f"{name} in format {fmt.name}", tensor, allowed)
    return tensor


def widening_exponent(format_name: str, route: str) -> int:
    """The exponent of the factor that `widen` does not apply: value = widened * 2**exponent."""
    if format_name == "fp4_e2m1":
        return {"ptx8": 6, "cdna4": 13}.get(route, 14)
    if format_name in _INTEGER_EXPONENTS:
        return _INTEGER_EXPONENTS[format_name]
    if route == FNUZ_ALIAS:
        return 1
    if route == BITS:
        return {"fp8_e4m3fn": 8, "fp8_e4m3fnuz": 7, "fp8_e5m2": 0}[format_name]
    return 0


def widen_route(target: Target, format_name: str, *, negative_zero_free: bool = False) -> str:
    """The fastest way to convert a stored format to 16 bits on a target: "native", "bits" or "fnuz_alias".

    gfx942 converts and multiplies FNUZ only. OCP bytes without negative zeros and NaN can be read there as
    FNUZ numbers of half the value, which a product of FP8 by FP8 needs. For conversion alone, bit arithmetic
    on 16-bit words is as fast and reads any byte: by either route decode's instructions take 0.44 to 0.45 of
    its memory time to issue.

    Args:
        target: what the kernel runs on.
        format_name: the stored format.
        negative_zero_free: whether no byte is 0x80 (-0) or a NaN, so that all may be read as FNUZ.
    """
    if format_name == "fp4_e2m1" or format_name in _INTEGER_EXPONENTS:
        return BITS
    if not format_name.startswith("fp8_"):
        return NATIVE
    if format_name in target.fp8_formats and (format_name == target.native_fp8 or not target.is_amd):
        return NATIVE
    if target.name == "gfx942" and format_name == "fp8_e4m3fn" and negative_zero_free:
        return FNUZ_ALIAS
    return BITS
