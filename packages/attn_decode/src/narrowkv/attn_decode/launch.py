"""Launches, grids and sizes that decode calls share if their tensors have the same metadata."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton.language as tl

from narrowkv.attn_decode.config import SCALED_DOT_DEPTH, DecodeConfig, DecodeShape
from narrowkv.attn_decode.kernels import Blocks, PartialResults, Rows, Rules, Sizes
from narrowkv.attn_decode.tiles import tall_tile
from narrowkv.paged_cache.binding import (
    PTX8,
    BoundCache,
    BoundTable,
    Reading,
    ReadOptions,
    multiplied_parts,
    repeats_loads,
)
from narrowkv.paged_cache.kernels.pages import TableSteps
from narrowkv.quant.formats import get_format
from narrowkv.runtime.attention.xcds import XcdOrder, xcd_order
from narrowkv.runtime.launch import (
    Arg,
    BoundLaunch,
    KernelLaunch,
    Part,
    is_compiled,
    launch_by_name,
)
from narrowkv.runtime.launch.workspace import MOST_COUNTERS
from narrowkv.runtime.operation import Prepared
from narrowkv.runtime.targets import WARPGROUP_ROWS, Target

READING = "decode"  # the name by which `bind_cache` knows how decode's kernels read a cache


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PreparedDecode(Prepared):
    """What `DecodePlan.run` prepared; there are no launches if there is no sequence.

    Attributes:
        empty: no sequence has keys, because the cache or the page table has no pages.
        counters: how many arrival counters a call that allocates partial results needs.
        logit_scale: scale of the logits without the cache's descale and that of Q that is a tensor.
        q_as_bytes: Q is FP8, which not every target has as a type.

    The other attributes are those of `Prepared`.
    """

    empty: bool
    counters: int
    logit_scale: float
    q_as_bytes: bool


class _Fp8(NamedTuple):
    """How kernel="fp8" multiplies on a target.

    Attributes:
        type: of the matrix unit.
        p_scale: of the weights, so that few of them are subnormal.
        exponent: of the power of two that scores and outputs lack: of an E2M1 number over its byte
            (`device_fp4_e4m3`), over that of `p_scale`. Scores lack as much: of a query's byte over its
            number in the type, over `widening_exponent`.
    """

    type: Any
    p_scale: float
    exponent: int


_FP8 = {"gfx942": _Fp8(tl.float8e4b8, 128.0, 0), "gfx950": _Fp8(tl.float8e4nv, 256.0, -2)}


def read_options(target: Target, config: DecodeConfig, computes_in_fp16: bool) -> ReadOptions:
    """How the kernels of a configuration read a cache."""
    native = config.kernel == "native"
    if config.kernel == "fp8":
        exponent = _FP8[target.name].exponent
        return ReadOptions(config.k_parts, config.v_parts, k_exponent=exponent, v_exponent=exponent)
    # gfx950's own FP4 conversion takes registers that tiles without prefetch do not leave. Its inline
    # assembly waits too short a time for the matrix instructions of the native kernel.
    return ReadOptions(
        config.k_parts, config.v_parts, computes_in_fp16=computes_in_fp16, fp4_as_bytes=True,
        fp4_by_cdna4=config.prefetch != "" and not native, k_exponent=0 if native else None,
    )  # fmt: skip


def power_of_two(head_dim: int) -> int:
    """The least power of two that is at least `head_dim`."""
    return 1 << (head_dim - 1).bit_length()


def reads_to_registers(target: Target, shape: DecodeShape, config: DecodeConfig, reading: Reading) -> bool:
    """Whether the kernel reads FP4 with scales of groups as `attend_in_registers` does."""
    tile = (config.block_m, config.block_n, config.options.num_warps, shape.q_len, shape.head_dim)
    if target.name != "sm90" or tile != (16, 32, 1, 1, 128) or shape.page_size % 8:
        return False
    for stored, words in ((reading.k_stored, reading.k), (reading.v_stored, reading.v)):
        grouped = stored.route == PTX8 and "_" in stored.descale and stored.aligned
        places = (words.ptr.data_ptr(), 2 * words.page, 2 * words.token, 2 * words.head)
        if not grouped or any(place % 16 for place in places):
            return False
    return True


def reads_to_lanes(target: Target, shape: DecodeShape, config: DecodeConfig, reading: Reading) -> bool:
    """Whether decode of FP4 with one scale a head is `attend_in_lanes`.

    Batch-invariant plans keep their sums.
    """
    if target.name not in ("gfx942", "gfx950") or config.kernel != "decode" or config.split == "fixed":
        return False
    return fits_lanes(shape, config, reading)


def fits_lanes(shape: DecodeShape, config: DecodeConfig, reading: Reading) -> bool:
    """Whether `attend_in_lanes` serves a call over this cache."""
    tile = (config.block_m, config.block_n, config.options.num_warps, shape.q_len, shape.head_dim)
    if tile != (16, 64, 1, 1, 128) or shape.v_dim != 128:
        return False
    if config.kernel == "fp8" and shape.page_size % 4:  # `load_lanes_as_bytes`
        return False
    for stored, words in ((reading.k_stored, reading.k), (reading.v_stored, reading.v)):
        one_scale = stored.format == "fp4_e2m1" and stored.descale in ("e8m0", "e4m3")
        places = (words.ptr.data_ptr(), 2 * words.page, 2 * words.token, 2 * words.head)
        is_words = words.ptr.dtype == torch.int16 and not stored.vec
        if not (one_scale and is_words) or any(place % 16 for place in places):
            return False
    return True


TALL_FORMATS = {"fp8_e4m3fn", "fp4_e2m1"}  # of caches that `kernels/tall.py` reads


def tall_rows(target: Target, shape: DecodeShape, config: DecodeConfig, formats: tuple[str, str]) -> int:
    """Rows of a program of `_tall_decode_kernel`, one of `TALL_TILES`, in calls that it serves; 0 if none.

    It is Gluon for Hopper.
    """
    if target.name != "sm90" or config.block_m < WARPGROUP_ROWS:
        return 0
    rows = shape.q_len * shape.gqa_ratio
    block_m = tall_tile(rows)
    programs = -(-rows // block_m) * config.num_items * shape.num_kv_heads
    serves = (
        (config.kernel, shape.head_dim, shape.v_dim) == ("decode", 128, 128)
        and set(formats) <= TALL_FORMATS
        and (config.split == "none" or config.merge_in_launch)
        and block_m // WARPGROUP_ROWS * programs <= MOST_COUNTERS
    )
    return block_m if serves else 0


def serves_tall(bound: BoundCache, rules: Rules, masks: bool) -> bool:
    """Whether `_tall_decode_kernel` takes the cache and the options of a call.

    masks: the page table has ranges of keys or a tree.
    """
    plain = not (masks or rules.soft_cap or rules.window_left >= 0 or rules.q_format or bound.transforms)
    return plain and is_read_by_tall(bound.readings[READING])


def is_read_by_tall(reading: Reading) -> bool:
    """Whether `kernels/tall.py`, which cannot be interpreted, reads a cache of heads of 128 channels."""
    for stored, words in ((reading.k_stored, reading.k), (reading.v_stored, reading.v)):
        size = words.ptr.element_size()
        places = (words.ptr.data_ptr(), words.page * size, words.token * size, words.head * size)
        fp8 = stored.format == "fp8_e4m3fn" and stored.descale in ("scalar", "head")
        fp4 = (stored.route, stored.parts, stored.descale) == (PTX8, 4, "e8m0")
        if not (fp8 or fp4) or stored.vec or any(place % 16 for place in places):
            return False
    return is_compiled(reading.k.ptr)


def fitting(target: Target, config: DecodeConfig, bound: BoundCache, soft_cap: bool) -> DecodeConfig:
    """The configuration without an FP8 tile ahead on AMD, where the call leaves no registers for it.

    That is with a scale of each key (gfx950: 261 with a soft cap) and with the vectorised layout (429); on
    gfx942 also with a soft cap (262). Two waves have 256.
    """
    reading = bound.readings[READING]
    stored = (reading.k_stored, reading.v_stored)
    if not config.prefetch or not target.is_amd or not all(x.format.startswith("fp8_") for x in stored):
        return config
    crowded = target.name == "gfx942" and soft_cap
    if not crowded and not any(x.vec or x.descale == "token" for x in stored):
        return config
    return replace(config, prefetch="", options=replace(config.options, waves_per_eu=None))


def constants_of(
    target: Target,
    shape: DecodeShape,
    config: DecodeConfig,
    bound: BoundCache,
    *,
    ragged: bool,
    window_left: int,
    soft_cap: bool,
    sinks: bool,
    lse: bool,
) -> dict[str, Any]:
    """Constants of the attention kernel."""
    native = config.kernel == "native"
    reading, transform = bound.readings[READING], bound.transform
    half = "bf16" not in (reading.k_stored.format, reading.v_stored.format)
    block_d, block_dk = power_of_two(shape.v_dim), power_of_two(shape.head_dim)
    transforms = transform.rotated or transform.balance is not None
    # That loop loads Q's channels in the order of its lanes; a transform needs them in order.
    registers = not transforms and reads_to_registers(target, shape, config, reading)
    k_stored, v_stored = reading.k_stored, reading.v_stored
    fp8 = _FP8[target.name] if config.kernel == "fp8" else None
    lanes = fp8 is not None or reads_to_lanes(target, shape, config, reading)
    if registers or lanes:
        k_stored = k_stored._replace(token=reading.k.token, scale_token=reading.k_descale.token)
        v_stored = v_stored._replace(token=reading.v.token, scale_token=reading.v_descale.token)
    # Tiles of fewer rows have matrix instructions of another kind, which are right in any width.
    tall = config.block_m >= 64
    merged_later = config.split != "none" and not config.merge_in_launch
    return {
        "SIZES": Sizes(
            shape.num_kv_heads,
            shape.gqa_ratio,
            shape.q_len,
            shape.head_dim,
            shape.page_size,
            ragged,
            shape.v_dim,
        ),
        "K": k_stored,
        "V": v_stored,
        "RULES": Rules(
            compute=tl.float16 if half else tl.bfloat16,
            # FP8 is in range as it is. Model, gfx942, FNUZ, 12 rows, 2k keys: 145 us with the scale, 242 us
            # without, where the compiler waits for loads earlier in the loop.
            scale_q=half and (shape.q_dtype != torch.float16 or transforms) and not native,
            split_q=not half and shape.q_dtype == torch.float16,
            native=native,
            soft_cap=soft_cap,
            sinks=sinks,
            lse=lse,
            window_left=window_left,
            int64_offsets=bound.int64_offsets,
            butterflies=transform.butterflies(shape.head_dim),
            # H100, B64 ctx8192, with and without: two tokens at ratio 4, MX 264 and 316 us; four tokens at
            # ratio 12, which are tiles of 64 rows, NVFP4 651 and 505 us.
            lazy=config.block_m < 64
            and any(x.route == PTX8 and "_" in x.descale for x in (k_stored, v_stored)),
            once=repeats_loads(target, config.options.num_warps, config.block_n),
            prefetch=config.prefetch,
            even=config.split == "even",
            partial=config.split != "none",
            can_merge=config.merge_in_launch or not (config.split == "none" or target.is_amd),
            early=target.name == "sm90" and merged_later,
            registers=registers,
            lanes=lanes,
            # In order they would pass through LDS.
            kept_parts=v_stored.parts if target.is_amd and merged_later and not tall else 1,
            fp8=None if fp8 is None else fp8.type,
            p_scale=1.0 if fp8 is None else fp8.p_scale,
            q_format=get_format(shape.q_dtype).name if shape.q_dtype.itemsize == 1 else "",
            acc_parts=multiplied_parts(target, block_d, v_stored.parts) if tall else v_stored.parts,
            q_in_shared=target.vendor == "nvidia" and config.block_m >= 64 and not native,
            order=_order(target, shape, config),
        ),
        "BLOCKS": Blocks(
            config.block_m, config.block_n, block_d, max(block_dk, SCALED_DOT_DEPTH) if native else block_dk
        ),
    }


def _order(target: Target, shape: DecodeShape, config: DecodeConfig) -> XcdOrder | None:
    """The order of programs; a split has one for each block of rows of each KV head."""
    programs = shape.num_kv_heads * -(-shape.q_len * shape.gqa_ratio // config.block_m)
    return xcd_order(target.xcds, target.xcds * config.xcd_items * programs, 1)


def allocated(ml_offset: int, counters: bool) -> PartialResults:
    """Partial results that each call allocates in one block, `ml` `ml_offset` bytes behind its beginning."""
    acc, ml = (Part(Arg("block"), offset, torch.float32) for offset in (0, ml_offset))
    return PartialResults(acc, ml, Arg("counters") if counters else None)


def launches_of(
    attend: BoundLaunch,
    merge: BoundLaunch | None,
    bound: BoundCache,
    table: BoundTable,
    partial: PartialResults,
    config: DecodeConfig,
    strides: tuple[int, int, int, int, int],
    grids: tuple[int, int],
    *,
    num_pages: int,
    soft_cap: float,
    logit_scale: float,
    optional: Collection[str],
) -> list[KernelLaunch]:
    """The launches of a call, with an `Arg` for what differs from call to call.

    Args:
        attend, merge: the kernels; `merge` is None where no second one is needed.
        bound, table: the cache and the page table, of which strides are taken.
        partial: memory of partial results, or placeholders for it.
        config: the configuration.
        strides: of a token and a head of q and of o, and of a token of lse.
        grids: programs of each kernel.
        num_pages: pages of the cache.
        soft_cap: the cap of logits, or 0.
        logit_scale: scale of the logits without the cache's descale.
        optional: which of the tensors "lse", "sinks", "q_descale" and "o_scale" there are.
    """
    transform = bound.transform
    lse, sinks, q_descale, o_scale = (
        Arg(name) if name in optional else None for name in ("lse", "sinks", "q_descale", "o_scale")
    )
    shifts = transform.offset is not None and bool(lse or sinks or soft_cap > 0)
    rows = Rows(
        Arg("q"), *strides[:2], Arg("out"), lse, sinks, *strides[2:],
        None if table.ranges is None else Arg("ranges"), None if table.tree is None else Arg("tree"),
        None if transform.balance is None else Arg("k_balance"), Arg("k_offset") if shifts else None,
        logit_scale if shifts else None, q_descale, o_scale,
    )  # fmt: skip
    read = bound.readings[READING].named()
    shared = {
        "io": rows, "v_descale": read["v_descale"], "workspace": partial, "page_ids": Arg("ids"),
        "row": Arg("row"), "lens": Arg("lens"), "num_ids": Arg("num_ids"), "max_pages": Arg("max_pages"),
        "steps": TableSteps(num_pages, *table.steps), "out_scale": Arg("out_scale"), "batch": table.batch,
        "most_splits": config.num_items // (1 if config.split == "even" else max(table.batch, 1)),
        "tiles_per_split": config.tiles_per_split if config.tiles_per_split > 1 else None,
        "slots": config.slots or None,
    }  # fmt: skip
    attending = launch_by_name(
        attend, (grids[0],), **shared, k=read["k"], v=read["v"], k_descale=read["k_descale"],
        qk_scale=Arg("qk_scale"), soft_cap=soft_cap, merge=int(config.merge_in_launch),
    )  # fmt: skip
    return [attending] if merge is None else [attending, launch_by_name(merge, (grids[1],), **shared)]
