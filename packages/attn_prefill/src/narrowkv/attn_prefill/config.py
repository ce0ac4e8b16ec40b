"""Launch configuration: a typed function of target, shape and formats, never searched for on the hot path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from narrowkv.attn_prefill.config_tuned import PrefillChoice, is_tuned, shape_class, with_choice
from narrowkv.attn_prefill.cost import few_classes, rates_of
from narrowkv.attn_prefill.tiles import (
    ANY_LEN,
    IN_PAGES,
    WIDE_HEAD,
    PrefillConfig,
    PrefillShape,
    block_m_for,
    dense_config,
    fused_config,
    pipelined_config,
    split_config,
    tall_config,
)
from narrowkv.quant.formats import FNUZ_ALIAS, NATIVE
from narrowkv.runtime.errors import UnsupportedError, check_choice
from narrowkv.runtime.targets import WARPGROUP_ROWS, Target, least_columns
from narrowkv.runtime.toolchain import TRITON
from narrowkv.runtime.tuned import tuned_choice

KERNELS = ("dense", "fused", "split", "decode")
APPEND_KERNELS = ("append_then_attend", "pipelined", "fused", "split")
# Attention of an append begins early up to as many scores, which take 90 us. H100, 32/8 heads: 128 over 4k
# (FP8) 47 us instead of 49, 1k over 0 34 and 36, but 1k over 4k (bf16) 152 and 141; perhaps since programs
# come to lie on other units where those ahead end one by one.
_SCORES_OF_EARLY_APPENDS = 2**27
_TRITON_FP8 = {"fp8_e4m3fn": "float8e4nv", "fp8_e4m3fnuz": "float8e4b8"}


def fp8_operand(target: Target, format_name: str) -> str:
    """The FP8 format that the target's matrix unit takes these bytes as.

    gfx942 multiplies FNUZ only; OCP bytes are the same numbers halved there.

    Raises:
        UnsupportedError: the target's matrix unit does not take the format, and why.
    """
    if format_name not in _TRITON_FP8:
        raise UnsupportedError(
            f"FP8 matrix units are used with {' and '.join(_TRITON_FP8)}, got {format_name}; "
            "16-bit queries read any cache"
        )
    if target.native_fp8 in (format_name, None):
        return format_name
    if target.name == "gfx942" and format_name == "fp8_e4m3fn":
        return "fp8_e4m3fnuz"
    raise UnsupportedError(
        f"{target.name} multiplies {target.native_fp8}, not {format_name}; 16-bit queries read such a cache"
    )


def fp8_route(operand: str, format_name: str) -> str:
    """How stored bytes reach the FP8 matrix unit: as they are, or read as FNUZ."""
    return NATIVE if operand == format_name else FNUZ_ALIAS


def triton_fp8(operand: str) -> str:
    """Triton's name of an FP8 format."""
    return _TRITON_FP8[operand]


def choose_config(
    target: Target,
    shape: PrefillShape,
    formats: tuple[str, str],
    *,
    q_fp8: str | None,
    scratch_fits: bool,
    can_decode: bool,
    can_pipeline: bool = False,
    plain_keys: bool = True,
    kernel: str | None = None,
    classes: bool = True,
) -> PrefillConfig:
    """The shipped configuration, or that of a row of the tune file that NARROWKV_TUNED names.

    A row is for chunks of one sequence, by calls that force neither the kernel nor the splits.

    Args:
        target: what the kernel will run on.
        shape: the call's shape.
        formats: storage formats of K and V.
        q_fp8: the format of an FP8 query, or None for a 16-bit one.
        scratch_fits: whether widened keys fit the allowed memory.
        can_decode: whether every sequence is known to have one query token.
        can_pipeline: whether `kernels/pipelined.py` takes the formats and runs here.
        plain_keys: whether no key has a descale of its own, and Q is one matrix operand, not a sum of two.
        kernel: forces "dense", "fused", "split" or "decode".
        classes: whether sequences with few query tokens can have a launch of their own.

    Raises:
        UnsupportedError: for formats or a forced kernel that cannot serve the call, and why.
        ValueError: the tune file is not of this GPU and this Triton.
    """
    asked: dict[str, Any] = {
        "q_fp8": q_fp8, "scratch_fits": scratch_fits, "can_decode": can_decode, "plain_keys": plain_keys,
    }  # fmt: skip
    shipped = _shipped_config(
        target, shape, formats, **asked, can_pipeline=can_pipeline, kernel=kernel, classes=classes
    )
    if kernel is not None or not classes or not is_tuned(shape, shipped):
        return shipped
    choice, why = tuned_choice(target, "prefill", shape_class(shape, formats, plain_keys), PrefillChoice)
    if choice is None or (choice.kernel == "dense" and not scratch_fits):
        return shipped
    base = _shipped_config(target, shape, formats, **asked, kernel=choice.kernel)
    return replace(with_choice(target, shape, base, choice), why=why)


def _shipped_config(
    target: Target,
    shape: PrefillShape,
    formats: tuple[str, str],
    *,
    q_fp8: str | None,
    scratch_fits: bool,
    can_decode: bool,
    can_pipeline: bool = False,
    plain_keys: bool = True,
    kernel: str | None = None,
    classes: bool = True,
) -> PrefillConfig:
    """The shipped configuration; see `choose_config`."""
    if kernel is not None:
        check_choice("kernel", kernel, KERNELS)
    _check_formats(formats)
    if kernel == "decode" and not can_decode:
        raise UnsupportedError(
            "kernel='decode' needs one query token in every sequence: plan with max_q_len=1"
        )
    if q_fp8 is not None:
        return _fp8_config(target, shape, formats, q_fp8, kernel, scratch_fits, plain_keys, can_decode)
    if kernel == "dense":
        check_scratch(shape, scratch_fits)
    if can_decode and kernel in (None, "decode"):
        return PrefillConfig("decode", "every sequence has one query token")

    def widened(block_m: int, why: str) -> PrefillConfig:
        plain = dense_config(target, shape, block_m, why, plain_keys)
        pays = can_pipeline and _pipeline_pays(target, shape, block_m)
        return pipelined_config(target, shape, plain, formats[0]) if pays else plain

    if kernel is not None:
        block_m = block_m_for(shape)
        if kernel == "dense":
            return widened(block_m, "as asked")
        if kernel == "split":
            return split_config(target, shape, formats, (0, ANY_LEN), block_m, "as asked")
        return fused_config(target, shape, block_m, "as asked")
    if scratch_fits:
        name = "pipelined" if can_pipeline else "dense"
        why = "its sequences have so many rows that keys are widened beforehand"
        found = _with_few(target, shape, formats, name, classes, lambda block_m: widened(block_m, why))
    else:
        why = "scratch for widened keys would exceed the limit; max_kv_tokens tightens the bound"
        found = _with_few(target, shape, formats, None, classes, lambda block_m: fused_config(
            target, shape, block_m, why
        ))  # fmt: skip
    return replace(found, tall=tall_config(target, shape, found, formats))


def _with_few(
    target: Target,
    shape: PrefillShape,
    formats: tuple[str, str],
    widened: str | None,
    classes: bool,
    choose: Callable[[int], PrefillConfig],
) -> PrefillConfig:
    """The configuration of each class of sequences that a call can have, see `few_classes`.

    choose: gives the configuration of sequences with many query tokens, from the rows of a tile.
    """
    few, least = few_classes(target, shape, formats, widened) if classes else ([], 0)
    why = "few rows share each key"
    parts = [split_config(target, shape, formats, q_lens, rows, why) for q_lens, rows in few]
    if least < ANY_LEN:
        # Among several sequences, some have too many tokens for the class of short ones.
        block_m = 64 if shape.batch > 1 else block_m_for(shape)
        parts.append(replace(choose(block_m), q_lens=(least, ANY_LEN)))
    *before, last = parts
    return replace(last, short_queries=tuple(replace(part, stores=False) for part in before))


def _pipeline_pays(target: Target, shape: PrefillShape, block_m: int) -> bool:
    """Whether a call has so many rows and keys that the pipelined kernel pays for its start."""
    return block_m == 64 and shape.max_seq_len >= rates_of(target).pipelined_keys


def _check_formats(formats: tuple[str, str]) -> None:
    if set(formats) == {"bf16", "fp16"}:
        raise UnsupportedError(
            "a cache of bf16 and fp16 is refused, as by paged_decode: "
            f"got k={formats[0]}, v={formats[1]}; each with itself or with FP8 or FP4 works"
        )


def check_scratch(shape: PrefillShape, fits: bool) -> None:
    """Refuses `kernel="dense"` for more widened keys than the allowed memory holds."""
    if not fits:
        raise UnsupportedError(
            f"kernel='dense' needs scratch for {shape.kv_tokens} keys, more than is allowed: "
            "plan with max_kv_tokens or a larger scratch_limit_bytes"
        )


def _fp8_config(
    target: Target,
    shape: PrefillShape,
    formats: tuple[str, str],
    q_fp8: str,
    kernel: str | None,
    scratch_fits: bool,
    plain_keys: bool,
    can_decode: bool,
) -> PrefillConfig:
    """Dense where a key tile serves enough tiles of rows, but not on NVIDIA.

    K's bytes are multiplied as they are stored, and P by V in float16: P as one E4M3 number would be off by
    2%, as two it takes the matrix unit as long and the vector ALU longer. Model TFLOP/s of the loop, 96/8
    heads, in brackets from pages with P as two terms: gfx942 652 (210) in tiles of 128 x 64; gfx950 1161
    (293) in tiles of 128 x 32, 1010 in tiles of 128 x 64, whose registers leave room for one wave a SIMD.
    """
    if set(formats) != {q_fp8}:
        raise UnsupportedError(
            f"an FP8 query needs K and V in its own format {q_fp8}, got k={formats[0]}, v={formats[1]}; "
            "a 16-bit query reads any cache"
        )
    if kernel == "split" or (kernel == "dense" and target.is_nvidia):
        raise UnsupportedError(
            f"an FP8 query has kernel='fused'{'' if target.is_nvidia else ' and kernel=' + repr('dense')} "
            f"on {target.name}, got {kernel!r}"
        )
    if kernel == "dense":
        check_scratch(shape, scratch_fits)
    operand = fp8_operand(target, q_fp8)
    if can_decode and kernel in (None, "decode"):
        # Model, 12 rows over 2k keys: HBM is busy for 100% of the time, beside the kernel "fused" 17%.
        return PrefillConfig("decode", "every sequence has one query token", fp8=operand)
    _check_fp8_width(shape)
    block_m = _fp8_block_m(target, shape)
    tiles = -(-shape.num_tokens * shape.gqa_ratio // (block_m * max(shape.batch, 1)))
    if kernel == "dense" or (kernel is None and not target.is_nvidia and scratch_fits and tiles >= 2):
        why = f"each key tile serves {tiles} tiles of rows, so it is gathered once beforehand"
        config = replace(dense_config(target, shape, block_m, why, plain_keys), fp8=operand)
        if target.name == "gfx950" and config.block_n == 64:
            if TRITON >= (3, 9):
                # Without the option the compiler takes so many registers that a SIMD holds one wave.
                config = replace(config, options=replace(config.options, waves_per_eu=2))
            else:
                config = replace(config, block_n=32)  # 64 keys spill
        if config.ping_pong is not None:
            config = replace(config, ping_pong=replace(config.ping_pong, fp8=operand))
        return config
    base = fused_config(target, shape, block_m, "FP8 matrix units take the cache as it is")
    options = replace(base.options, num_warps=8) if target.is_amd else base.options  # 4 spill scalars
    return replace(base, block_n=_fp8_block_n(target), fp8=operand, options=options)


def _check_fp8_width(shape: PrefillShape) -> None:
    """Refuses FP8 products of wide heads: 16 rows by 32 keys of 512 channels spill 22 registers on gfx942."""
    if shape.head_dim > WIDE_HEAD:
        raise UnsupportedError(
            f"FP8 products are for heads of {WIDE_HEAD} channels or fewer, got {shape.head_dim}; "
            "a 16-bit query reads any cache"
        )


def _fp8_block_m(target: Target, shape: PrefillShape) -> int:
    """Rows of a tile for FP8 matrix instructions.

    Tiles of 64 rows by 64 keys gave wrong rows on Hopper: the first 8 of every 16, from the second tile of
    keys on. Only these multiply FP8 on the matrix unit (wgmma m64n64k32); Triton widens smaller ones to
    float16 (mma.sync). ptxas 12.9, of Triton 3.8 and 3.9, widens codes of the tile before where it computes
    P's second term; ptxas 13.3 does not: see `stale_codes` in `tests/generated_code.py`. With P rounded in
    float32 first they are right, whose time is not known. In 8 warps they end in an illegal access, which
    this does not explain.
    """
    rows = block_m_for(shape)
    return min(rows, 32) if target.is_nvidia else rows


def _fp8_block_n(target: Target) -> int:
    """Keys of a tile for FP8 matrix instructions, which sum over 32 keys and more; 64 spill on CDNA."""
    return max(32, least_columns(target, WARPGROUP_ROWS))


def choose_append_config(
    target: Target,
    shape: PrefillShape,
    formats: tuple[str, str],
    q_format: str,
    *,
    fp8_compute: bool,
    scratch_fits: bool,
    can_pipeline: bool = False,
    plain_keys: bool = True,
    kernel: str | None = None,
    classes: bool = True,
) -> PrefillConfig:
    """The shipped configuration of `prefill_append`.

    Args:
        target, shape, formats, scratch_fits, can_pipeline, plain_keys, classes: as for `choose_config`.
        q_format: of the query and of the new tokens.
        fp8_compute: old tokens go to the FP8 matrix unit as they are stored.
        kernel: forces "append_then_attend", "pipelined", "fused" or "split".

    Raises:
        UnsupportedError: for formats or a forced kernel that cannot serve the call, and why.
    """
    if kernel is not None:
        check_choice("kernel", kernel, APPEND_KERNELS)
    _check_formats(formats)
    if fp8_compute:
        if len(set(formats)) > 1 or not formats[0].startswith("fp8_"):
            raise UnsupportedError(
                "fp8_compute needs K and V in one FP8 format, "
                f"got k={formats[0]}, v={formats[1]}; without it any cache works"
            )
        if kernel not in (None, "fused"):
            raise UnsupportedError(f"fp8_compute has kernel='fused' only, got {kernel!r}")
        operand = fp8_operand(target, formats[0])
        _check_fp8_width(shape)
        block_m = _fp8_block_m(target, shape)
        base = fused_config(target, shape, block_m, "FP8 matrix units take the old tokens as they are")
        options = replace(base.options, num_warps=8) if target.is_amd else base.options  # 4 spill
        return replace(base, block_n=_fp8_block_n(target), fp8=operand, options=options)
    exact = formats[0] not in ("bf16", "fp16") or formats[0] == q_format
    lacks = (
        f"keys in {formats[0]} and new ones in {q_format} in one scratch"
        if not exact
        else f"scratch for {shape.kv_tokens} keys, more than is allowed"
        if not scratch_fits
        else ""
    )
    if kernel == "pipelined" and not can_pipeline:
        lacks = lacks or f"Hopper, head_dim 64, 128 or 256 and keys without factors, got {target.name}"
    if kernel not in (None, *IN_PAGES) and lacks:
        raise UnsupportedError(f"kernel={kernel!r} needs {lacks}; kernel='fused' works")

    def fused(block_m: int) -> PrefillConfig:
        why = "as asked" if kernel else f"the alternative needs {lacks}"
        base = fused_config(target, shape, block_m, why)
        # Two loops share the registers: 32 keys spill on gfx942.
        return replace(base, block_n=16 if target.is_amd else base.block_n)

    def widened(block_m: int) -> PrefillConfig:
        why = "as asked" if kernel else "its sequences have so many rows that keys are widened beforehand"
        plain = dense_config(target, shape, block_m, why, plain_keys)
        plain = replace(plain, kernel="append_then_attend")
        if plain.ping_pong is not None:
            plain = replace(plain, ping_pong=replace(plain.ping_pong, kernel="append_then_attend"))
        pays = can_pipeline and _pipeline_pays(target, shape, block_m)
        if kernel == "append_then_attend" or (kernel is None and not pays):
            return plain
        pipelined = pipelined_config(target, shape, plain, formats[0])
        scores = shape.num_tokens * shape.num_qo_heads * shape.max_seq_len
        options = replace(pipelined.options, launch_pdl=scores <= _SCORES_OF_EARLY_APPENDS)
        return replace(pipelined, kernel="pipelined", options=options)

    if kernel == "split":
        return split_config(target, shape, formats, (0, ANY_LEN), block_m_for(shape), "as asked")
    if kernel is not None:
        return fused(block_m_for(shape)) if kernel == "fused" else widened(block_m_for(shape))
    name = None if lacks else "pipelined" if can_pipeline else "dense"
    return _with_few(target, shape, formats, name, classes, fused if lacks else widened)
