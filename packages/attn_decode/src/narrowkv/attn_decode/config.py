"""Launch configuration: a typed function of target, shape and format, never searched for on the hot path."""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.quant.device import BITS, widen_route
from narrowkv.quant.errors import UnsupportedError, check_choice
from narrowkv.quant.launch import LaunchOptions
from narrowkv.quant.targets import Target

PTX = "ptx"
_FP8_PREFIX = "fp8_"


@dataclass(frozen=True)
class DecodeShape:
    """What a configuration depends on, all of it known without reading the device."""

    batch: int
    q_len: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    capacity: int

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes and how the keys are shared out.

    Attributes:
        block_m: rows of a tile: (query token, head of the group) pairs.
        block_n: keys of a tile.
        split: "none", "even" or "uniform": how a sequence's keys are divided over programs.
        num_units: work units for each KV head and row block.
        tiles_per_split: a fixed split size in key tiles, or 0 for an even share.
        merge_in_launch: the last split to arrive merges, instead of a second kernel.
        kernel: "decode" widens the cache to 16 bits; "native" multiplies FP4 keys as they are stored.
        k_parts, v_parts: elements per word that K and V are read in; see `narrowkv.quant.device.widen_parts`.
        options: compiler options of the attention kernel.
    """

    block_m: int
    block_n: int
    split: str
    num_units: int
    tiles_per_split: int
    merge_in_launch: bool
    kernel: str
    k_parts: int
    v_parts: int
    options: LaunchOptions


def choose_kernel(target: Target, k_format: str, kernel: str | None) -> str:
    """The kernel for a target and a key format, or the one that is forced.

    Raises:
        UnsupportedError: the forced kernel needs what the target or the format lacks.
    """
    check_choice("kernel", kernel or "decode", ("native", "decode"))
    lacks = (
        f"keys in fp4_e2m1, not {k_format}"
        if k_format != "fp4_e2m1"
        else f"scaled matrix instructions, which {target.name} lacks (gfx950 has them)"
        if not target.has_scaled_mfma
        else ""
    )
    if kernel == "native" and lacks:
        raise UnsupportedError(f"kernel='native' needs {lacks}; kernel='decode' works here")
    return kernel or ("decode" if lacks else "native")


def parts_of(target: Target, format_name: str, *, is_key: bool) -> int:
    """Elements per loaded word."""
    if format_name == "fp4_e2m1":
        return 4
    # LDS can transpose 16-bit elements only, and V is transposed on its way to the matrix unit.
    return 2 if format_name.startswith(_FP8_PREFIX) and target.vendor == "nvidia" and not is_key else 1


def block_m_for(rows: int) -> int:
    """16 rows fill the smallest matrix instruction; beyond 64 a second program reads the keys again."""
    return min(64, max(16, 1 << (rows - 1).bit_length()))


def _programs_in_flight(target: Target) -> int:
    """One-warp programs that the chip holds at once at this kernel's register use."""
    # sm90: 255 registers leave 8 warps a multiprocessor. CDNA: 2 waves a SIMD at up to 256 registers, 4
    # SIMDs.
    units = target.figures.units if target.figures is not None else 4
    return units * 8


def choose_config(
    target: Target,
    shape: DecodeShape,
    k_format: str,
    v_format: str,
    *,
    negative_zero_free: bool = False,
    kernel: str | None = None,
    split: str | None = None,
    tokens_per_split: int = 0,
) -> DecodeConfig:
    """The shipped configuration.

    Args:
        target: what the kernel will run on.
        shape: the call's shape.
        k_format: storage format of K; v_format: of V.
        negative_zero_free: the cache's tag, which decides the read of OCP bytes on gfx942.
        kernel: forces "native" or "decode".
        split: forces "none", "even" or "uniform".
        tokens_per_split: a fixed split size in tokens, rounded up to key tiles (batch-invariant mode); 0
            chooses.

    Raises:
        UnsupportedError: for a pair of formats that this kernel does not read, or a kernel that is not there.
    """
    if {k_format, v_format} == {"bf16", "fp16"}:
        raise UnsupportedError(
            "paged_decode computes in one 16-bit type and would round the other: a cache of bf16 and fp16 is "
            f"refused, got k={k_format}, v={v_format}; each with itself or with FP8 or FP4 works"
        )
    chosen = choose_kernel(target, k_format, kernel)
    k_parts, v_parts = (
        1 if chosen == "native" else parts_of(target, k_format, is_key=True),
        parts_of(target, v_format, is_key=False),
    )
    rows = shape.q_len * shape.gqa_ratio
    block_m = block_m_for(rows)
    head_programs = shape.num_kv_heads * -(-rows // block_m)
    slots = max(1, _programs_in_flight(target) // head_programs)

    # Short work is bound by latency: four warps share one large tile. H100, B4 ctx1024, attention kernel
    # alone and with
    # the merge: 128 keys x 1 stage 11.1 and 13.7 us, x 2 stages 12.0 and 14.1 us; one-warp programs 16.4 us.
    latency_bound = shape.batch * shape.capacity < 512 * slots
    if target.is_amd:
        # One wave a program: with more, every wave repeats the QK product and the softmax of a 16-row tile.
        # Static issue time over memory time at ratio 12, head_dim 128 (`narrowkv inspect decode`): gfx942
        # FNUZ and aliased OCP
        # 0.55 at 32 keys; OCP by bit arithmetic 1.14 at 32 keys and 0.93 at 64; gfx950 OCP 0.35 at 64. None
        # spills.
        native = widen_route(target, k_format, negative_zero_free=negative_zero_free) != BITS
        block_n = 32 if k_format == "bf16" or (native and target.name == "gfx942") else 64
        if shape.head_dim > 128 or block_m > 32:
            block_n = 16
        warps = 1 if block_m <= 32 else 4
        if chosen == "native":
            # The compiler lowers a scaled dot of one wave to bf16 multiplications.
            warps = max(warps, 2)
        options = LaunchOptions(num_warps=warps, num_stages=1, matrix_instr_nonkdim=16)
    elif latency_bound and block_m == 16:
        # 128 keys and 4 warps at head_dim 128; wider heads halve the keys to stay within shared memory.
        block_n = 128 if shape.head_dim <= 128 else 64
        slots = max(1, slots // 2)
        short = shape.batch * -(-shape.capacity // block_n) <= slots
        options = LaunchOptions(num_warps=4, num_stages=1 if short else 2)
        # One tile a program leaves nothing to share out, and looking for an even share costs each about 1 us.
        if split is None and short:
            split = "uniform"
    else:
        # H100, B128 ctx8192 page 64: 32 keys x 3 stages 1.08 x the floor, 64 x 2 1.11 x, 16 x 4 1.21 x.
        # The interpreter pays by the tile, not by the key.
        block_n = 128 if target.name == "cpu" else 32
        warps = 1 if block_m == 16 and shape.head_dim <= 128 else 2 if block_m <= 32 else 4
        options = LaunchOptions(num_warps=warps, num_stages=3 if shape.head_dim <= 128 else 2)
        slots = max(1, slots // warps)

    if shape.capacity <= block_n:
        split = split or "none"
    split = split or "even"
    tiles_per_split = -(-tokens_per_split // block_n)
    if tiles_per_split:
        tiles = -(-shape.capacity // block_n)
        num_units = shape.batch * -(-tiles // tiles_per_split)
        split = "even"
    elif split == "none":
        num_units = shape.batch
    elif split == "uniform":
        tiles = max(1, -(-shape.capacity // block_n))
        num_units = shape.batch * min(max(1, slots // max(shape.batch, 1)), tiles)
    else:
        # An even share needs room for each sequence's rounding up: see `_split_counts`.
        num_units = slots if 2 * shape.batch <= slots else 2 * shape.batch
    # Merging serially inside the launch pays while few partial results wait (H100, B64 ctx8192 at two splits:
    # 383 us against
    # 391 us); AMD's chiplets do not share an L2, so the second kernel's boundary is the cheaper fence there.
    merge_in_launch = split != "none" and num_units <= 4 * shape.batch and not target.is_amd
    return DecodeConfig(
        block_m,
        block_n,
        split,
        num_units,
        tiles_per_split,
        merge_in_launch,
        chosen,
        k_parts,
        v_parts,
        options,
    )
