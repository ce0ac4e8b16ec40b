"""How kernels of attn_prefill read a cache and store new tokens in it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton.language as tl

from narrowkv.attn_decode.config import parts_of
from narrowkv.attn_prefill.config import fp8_route
from narrowkv.attn_prefill.kernels.arguments import Storing
from narrowkv.attn_prefill.kernels.widen import VALUE_EXPONENT
from narrowkv.attn_prefill.memory import FACTORS_OF_BLOCKS
from narrowkv.paged_cache import PagedKVCache, Rope
from narrowkv.paged_cache.binding import ReadOptions
from narrowkv.paged_cache.rope import rope_constants
from narrowkv.paged_cache.storing import storage_constants
from narrowkv.quant import KeyTransform
from narrowkv.runtime.identity import ByIdentity
from narrowkv.runtime.targets import Target

# Names of the 16-bit formats of caches and queries.
TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def per_key(k_granularity: str, v_granularity: str) -> tuple[bool, bool]:
    """Whether K and V have descales that differ from key to key."""
    shared = ("tensor", "head", "sequence_head")
    return k_granularity not in shared, v_granularity not in shared


def widened_per_key(
    q_dtype: torch.dtype, formats: tuple[str, str], granularities: tuple[str, str]
) -> tuple[bool, bool]:
    """Whether widened K and V have factors of each key beside them.

    FP4 takes its scales along when it is widened: K in bfloat16, exactly, since a scale has at most four bits
    and an element two; V as that of a bf16 cache, see `to_fp16_with_exponent`. K in float16 would leave its
    range.
    """
    k_own, v_own = per_key(*granularities)
    k_takes_along = formats[0] == "fp4_e2m1" and q_dtype == torch.bfloat16
    return k_own and not k_takes_along, v_own and formats[1] != "fp4_e2m1"


@lru_cache
def read_options(
    target: Target, k_format: str, v_format: str, fp8: str | None
) -> tuple[tuple[str, ReadOptions], ...]:
    """How each kind of kernel reads a cache, by the names of `PrefillConfig.reading`.

    "in_loop": kernels attend to its pages; "in_large_tiles": the same for tiles of 64 rows by the loop of
    decode, whose matrix instruction takes V from shared memory as it lies there; "to_scratch": they widen its
    keys into the scratch, ahead of attention, which keeps the bytes of K for FP8 matrix units and has V in
    float16.

    Args:
        target: what the kernels run on.
        k_format, v_format: of the cache.
        fp8: the FP8 format in which the matrix unit multiplies the cache without widening, or None.
    """
    half = "bf16" not in (k_format, v_format)
    k_parts, v_parts, large = (
        parts_of(target, name, is_key=is_key) if fp8 is None else 1
        for name, is_key in ((k_format, True), (v_format, False), (v_format, True))
    )
    k_route, v_route = (None if fp8 is None else fp8_route(fp8, name) for name in (k_format, v_format))
    return (
        ("in_loop", ReadOptions(k_parts, v_parts, k_route, v_route, half)),
        ("in_large_tiles", ReadOptions(k_parts, large, k_route, v_route, half)),
        (
            "to_scratch",
            ReadOptions(
                k_parts, parts_of(target, v_format, is_key=False), k_route,
                v_exponent=-VALUE_EXPONENT.value if v_format in FACTORS_OF_BLOCKS else None,
            ),
        ),
    )  # fmt: skip


_matrices: ByIdentity[dict[int, Any]] = ByIdentity()


def matrix_of(cache: PagedKVCache, block_n: int) -> Any:
    """How tiles of `block_n` keys are copied out of the pages, a `PageMatrix`, or None; found once."""
    known = _matrices.get(id(cache))
    if known is None:
        known = _matrices.keep(cache, {})
    if block_n not in known:
        from narrowkv.attn_prefill.kernels.pipelined_copies import page_matrix

        known[block_n] = page_matrix(cache, block_n)
    return known[block_n]


def storing_constants(cache: PagedKVCache, exponent: str, rope: Rope | None) -> Storing:
    """Constants of how new tokens are rotated and stored in this cache."""
    transform = cache.key_transform or KeyTransform(rotated=False)
    found = {**storage_constants(cache), **rope_constants(rope), "RULE": exponent}
    found["BUTTERFLIES"] = transform.butterflies(cache.head_dim)
    return Storing(**{name: found[name.upper()] for name in Storing._fields})
