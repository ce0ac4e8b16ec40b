"""The cost rule: which kernel serves each class of sequences of a prefill, estimated from shapes.

A class is the sequences whose numbers of query tokens lie in a range. The time of a kernel for a class is
estimated from the bytes that it streams, matrix products, and launches; the constants of each target are in
`RATES`, beside their source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from narrowkv.attn_prefill.tiles import ANY_LEN, PrefillConfig, PrefillShape, tuned_as
from narrowkv.quant.formats import BITS, get_format, widen_route
from narrowkv.runtime.targets import Target


@dataclass(frozen=True)
class Rates:
    """Rates of a target, per microsecond.

    Attributes:
        stream_bytes: bytes that kernels read or write.
        split_flops: flops of the products of kernels "split" and "fused" in tiles of 64 rows, by how the
            cache is widened in their loop. Rows that fill a tile count as those that are there; tiles of 16
            rows take no longer than their bytes.
        dense_flops, pipelined_flops: the same of attention over widened keys, in tiles of 64 rows.
        launch_us: a launch; pipelined_us: besides, the start of the pipelined kernel's programs.
        pipelined_keys: with fewer keys the pipelined kernel does not pay for its start.
        wide_split: the share of `split_flops` that heads wider than 128 channels reach.
    """

    stream_bytes: float
    split_flops: Mapping[str, float]
    dense_flops: float
    pipelined_flops: float
    launch_us: float
    pipelined_us: float
    pipelined_keys: int = 0
    wide_split: float = 1.0


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a kernel for the sequences of a class.

    Attributes:
        kernel: its name.
        us: estimated microseconds; bytes_us, products_us: of them for bytes and for products, launch_us for
            launches.
    """

    kernel: str
    us: float
    bytes_us: float
    products_us: float
    launch_us: float

    def __str__(self) -> str:
        return (
            f"{self.kernel} {self.us:.0f} us (bytes {self.bytes_us:.0f}, products {self.products_us:.0f}, "
            f"launches {self.launch_us:.0f})"
        )


def _by_widening(half: float, fp8: float, bits: float, fp4: float) -> Mapping[str, float]:
    """Rates by how a cache is widened: 16 bits as they are, FP8 by instruction or bit arithmetic, FP4."""
    return MappingProxyType({"16-bit": half, "fp8": fp8, "bits": bits, "fp4": fp4})


# Four fifths of the HBM's peak; TFLOP/s of loops by the timing model: `narrowkv inspect model --case
# prefill:kernel=fused,format=...,q_lens=16,lens=4096,kv_heads=8,ratio=12,head_dim=128,clean=1,splits=8`, and
# dense in tiles of 64 rows, see `tiles._amd_dense_config`.
_GFX942 = Rates(4.2e6, _by_widening(232e6, 159e6, 160e6, 126e6), 396e6, 396e6, 4.0, 0.0)
_GFX950 = Rates(6.4e6, _by_widening(337e6, 248e6, 170e6, 130e6), 786e6, 786e6, 4.0, 0.0)
# H100, decode in tiles of 64 rows, 96/8 heads: q_len 4, batch 64 over 8k 472 us, q_len 16, batch 16 328 us,
# which is 290 and 315 TFLOP/s; a tenth less where programs find their share. Dense prefill of the former
# 1887 us. In bf16, q_len 8, batch 32: 452 us, 304 TFLOP/s.
# H100, pipelined: 4096 over none, 96/8 heads, 596 us, 691 TFLOP/s; 128 over 32k, 32/8 heads, bf16, 207 us.
# H200, 96/8 heads: 128 new over none 21 us by the pipelined kernel, by the plain one 14; 1024 over none 75
# and 78.
# H200, FP8, 16/8 heads of 256 channels, 128 over 4k: split 75.5 us, pipelined 73.9, of an append 119 and 89.
_SM90 = Rates(2.9e6, _by_widening(300e6, 260e6, 260e6, 260e6), 450e6, 690e6, 2.2, 7.0, 512, 0.6)
# An interpreter makes every class that there can be.
_CPU = replace(_GFX942, launch_us=0.0)
RATES: Mapping[str, Rates] = MappingProxyType(
    {"gfx942": _GFX942, "gfx950": _GFX950, "sm90": _SM90, "cpu": _CPU}
)


def _widening(target: Target, format_name: str) -> str:
    """How a format is widened in a loop: a key of `Rates.split_flops`."""
    stored = get_format(format_name)
    if stored.kind == "float":
        return "16-bit"
    if stored.is_packed:
        return "fp4"
    return "bits" if widen_route(target, format_name) == BITS else "fp8"


def rates_of(target: Target) -> Rates:
    """The rates of a target; of NVIDIA's untuned ones those of sm90."""
    return RATES.get(target.name, _SM90)


def estimate(
    target: Target, shape: PrefillShape, formats: tuple[str, str], kernel: str,
    work: tuple[int, int, int], block_m: int = 64,
) -> Estimate:  # fmt: skip
    """Estimated microseconds of `kernel` for some sequences; `shape` gives heads and head_dim.

    work: the number of sequences, query tokens of each, and keys of each.
    """
    sequences, q_len, num_keys = work
    rates = rates_of(target)
    heads = shape.num_kv_heads
    tiles = -(-q_len * shape.gqa_ratio // block_m)
    keys = float(sequences * heads * num_keys)
    # Bytes of K and V of a key and head, without scales.
    k_bits, v_bits = (get_format(name).bits for name in formats)
    stored = k_bits / 8 * shape.head_dim + v_bits / 8 * shape.v_dim
    flops = keys * tiles * block_m * 2 * (shape.head_dim + shape.v_dim)
    if kernel in ("split", "fused"):
        rate = min(rates.split_flops[_widening(target, name)] for name in formats)
        rate *= rates.wide_split if shape.head_dim > 128 else 1.0
        moved, launches, start = stored, 1, 0.0
    else:
        # Widened keys are written and read again, in 16 bits; the pipelined kernel can take K in 16 bits from
        # its pages.
        rate = rates.pipelined_flops if kernel == "pipelined" else rates.dense_flops
        k_stays = kernel == "pipelined" and formats[0] in ("bf16", "fp16")
        widened = shape.v_dim + (0 if k_stays else shape.head_dim)
        moved, launches = stored + 4 * widened, 2
        start = rates.pipelined_us if kernel == "pipelined" else 0.0
    bytes_us = keys * moved / rates.stream_bytes
    products_us = flops / rate if block_m > 16 else 0.0
    launch_us = launches * rates.launch_us + start
    # A kernel that reads pages loads during its products; widening comes before them.
    working = max(bytes_us, products_us) if launches == 1 else bytes_us + products_us
    return Estimate(kernel, working + launch_us, bytes_us, products_us, launch_us)


def few_tokens(target: Target, shape: PrefillShape, formats: tuple[str, str], widened: str | None) -> int:
    """The most query tokens of a sequence for which reading its pages is not slower than widening them.

    Launches do not count, since the call has those of other sequences anyway.

    Args:
        widened: the kernel over widened keys, or None where there is none.
    """
    if widened is None:
        return 64 // shape.gqa_ratio or 1
    most = 0
    for tiles in range(1, 17):
        q_len = tiles * 64 // shape.gqa_ratio
        work = (1, q_len, 1 << 16)
        split = estimate(target, shape, formats, "split", work)
        other = estimate(target, shape, formats, widened, work)
        if split.us - split.launch_us > other.us - other.launch_us:
            break
        most = q_len
    return max(most, 1)


def few_bounds(
    target: Target, shape: PrefillShape, formats: tuple[str, str], widened: str | None
) -> list[tuple[int, int]]:
    """The most query tokens of sequences that tiles of 16, 32 and 64 rows serve; by the model alone.

    Returns:
        Pairs of the most query tokens and the rows of a tile, ascending. A tile that serves no more tokens
        than a smaller one is left out.
    """
    most = few_tokens(target, shape, formats, widened)
    found = {most: 64}
    if not tuned_as(target).is_amd:
        found |= {min(rows // shape.gqa_ratio, most): rows for rows in (32, 16)}
    return sorted((bound, rows) for bound, rows in found.items() if bound > 0)


def _bounds_of_several(bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of `few_bounds` those of a call with several classes: with the smallest and with the largest tiles."""
    return bounds[:1] + bounds[1:][-1:]


def few_classes(
    target: Target, shape: PrefillShape, formats: tuple[str, str], widened: str | None
) -> tuple[list[tuple[tuple[int, int], int]], int]:
    """The classes of few query tokens that a call of this shape can have, and the fewest of all others.

    A class has a launch only if its sequences could take longer than that launch without it. The number
    of query tokens of a single sequence is known.

    Returns:
        The classes, in the order of query tokens: the fewest and most of a sequence, and rows of a tile; and
        the fewest query tokens of sequences that are in none of them, or `ANY_LEN` where there can be no such
        sequences.
    """
    bounds = few_bounds(target, shape, formats, widened)
    longest = min(shape.max_q_len, shape.num_tokens)
    fitting = [((0, bound), rows) for bound, rows in bounds if bound >= max(longest, shape.min_q_len)]
    if fitting and (shape.batch == 1 or fitting[0][1] < 64):
        return fitting[:1], ANY_LEN
    if shape.batch == 1:
        return [], 0
    classes: list[tuple[tuple[int, int], int]] = []
    least = 0
    for bound, rows in _bounds_of_several(bounds):
        if bound < shape.min_q_len:
            continue
        classes.append(((least, bound), rows))
        least = bound + 1
        if longest <= bound:
            return classes, ANY_LEN
    if shape.batch <= _most_together(target, shape, formats, widened or "dense"):
        return [], 0
    return classes, least


def _most_together(target: Target, shape: PrefillShape, formats: tuple[str, str], widened: str) -> int:
    """The most sequences of a call that one kernel serves together, because launches would take longer."""
    one = estimate(target, shape, formats, widened, (1, 1, shape.max_seq_len))
    launches = (
        len(_bounds_of_several(few_bounds(target, shape, formats, widened))) * rates_of(target).launch_us
    )
    return 1 + int(launches / max(one.us - one.launch_us, 1e-9))


@lru_cache(1024)
def most_widened(target: Target, shape: PrefillShape, formats: tuple[str, str], widened: str) -> int:
    """The most sequences whose keys are widened in calls of up to this shape."""
    least = few_tokens(target, shape, formats, widened) + 1
    if shape.min_q_len >= least:  # there is no other class
        return shape.batch
    together = _most_together(target, shape, formats, widened)
    return min(shape.batch, max(shape.sequences_with(least), together, 1))


def explain_class(
    target: Target, shape: PrefillShape, formats: tuple[str, str], config: PrefillConfig, widened: str | None
) -> str:
    """Which sequences a configuration serves, and what each kernel would take for all of them, for people."""
    least, most = config.q_lens
    longest = min(shape.max_q_len, shape.num_tokens)
    mean = -(-shape.num_tokens // max(shape.batch, 1))
    q_len = max(least, min(mean, most, longest), 1)
    work = (max(min(shape.batch, shape.num_tokens // q_len), 1), q_len, shape.max_seq_len)
    kernels = ("split", "fused") if widened is None else ("split", widened)
    found = sorted(
        (
            estimate(target, shape, formats, kernel, work, config.block_m if kernel == "split" else 64)
            for kernel in kernels
        ),
        key=lambda each: each.us,
    )
    serves = (
        "all sequences"
        if (least, most) == (0, ANY_LEN) or (least == 0 and longest <= most)
        else f"sequences of {least} query tokens or more"
        if most >= longest
        else f"sequences of {max(least, 1)} to {most} query tokens"
    )
    return (
        f"{serves}; estimates for {work[0]} with {q_len} query tokens over {shape.max_seq_len} keys: "
        f"{', '.join(map(str, found))}"
    )
