"""The storage formats that a cache can have."""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.runtime.errors import check_choice

__all__ = ["CacheFormat"]

_CACHE_FORMATS = ("bf16", "fp16", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp4_e2m1", "int8", "int4")


@dataclass(frozen=True)
class CacheFormat:
    """Storage formats of K and V, which may differ.

    Example:
        >>> str(CacheFormat.parse("fp8_e4m3fn"))
        'fp8_e4m3fn'
        >>> str(CacheFormat(k="fp8_e4m3fn", v="fp4_e2m1"))
        'k=fp8_e4m3fn,v=fp4_e2m1'
    """

    k: str
    v: str

    @classmethod
    def parse(cls, value: str | CacheFormat) -> CacheFormat:
        """One name for both, or a pair.

        Raises:
            ValueError: for a format that a cache cannot have.
        """
        parsed = value if isinstance(value, CacheFormat) else cls(value, value)
        check_choice("format.k", parsed.k, _CACHE_FORMATS)
        check_choice("format.v", parsed.v, _CACHE_FORMATS)
        return parsed

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"k={self.k},v={self.v}"
