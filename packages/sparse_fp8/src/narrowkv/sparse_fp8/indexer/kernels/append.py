"""Index keys on their way into the cache: RoPE, Hadamard rotation, FP8 with a scale a key."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.quant.device import narrow_fp8
from narrowkv.quant.device_hadamard import rotate_parts
from narrowkv.sparse_fp8.indexer.kernels.logits import clamped


class AppendSpec(NamedTuple):
    """Constants that a kernel is compiled with.

    HEAD_DIM: channels. ROTARY: leading channels that RoPE rotates; 0 for none. NEOX: whether the halves of
    these are partners, else neighbours are. BUTTERFLIES: log2 of the channels that Hadamard rotates; 0 for
    none.
    POW2: whether scales are powers of two. FORMAT, MAX: of the values. BLOCK: tokens of a program.
    PAGE_SIZE: 0 without pages. SHUFFLED: as in `LogitsSpec`.
    """

    HEAD_DIM: Any
    ROTARY: Any
    NEOX: Any
    BUTTERFLIES: Any
    POW2: Any
    FORMAT: Any
    MAX: Any
    BLOCK: Any
    PAGE_SIZE: Any
    SHUFFLED: Any


@triton.jit
def rotated(k, x, rope, token, exists, SPEC: tl.constexpr):
    """The keys x `[BLOCK, HEAD_DIM]`, which lie at `k`, with RoPE in fp32."""
    HALF: tl.constexpr = SPEC.ROTARY // 2
    d = tl.arange(0, SPEC.HEAD_DIM)
    inside = exists[:, None] & (d < SPEC.ROTARY)[None, :]
    position = tl.load(rope.positions + token * rope.step, mask=exists, other=0)
    position = clamped(position, rope.max_position - 1).to(tl.int64)
    if SPEC.NEOX:
        partner, angle, is_first = tl.where(d < HALF, d + HALF, d - HALF), d % HALF, d < HALF
    else:
        partner, angle, is_first = d ^ 1, d // 2, d % 2 == 0
    at = position[:, None] * rope.row + angle[None, :]
    cos = tl.load(rope.cos + at, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(rope.sin + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(k + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    turned = x * cos + tl.where(is_first[None, :], -other, other) * sin
    return tl.where(inside, turned, x)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def _append_index_keys_kernel(
    k, stride_k, slots, stride_slots, keys, rope, num_tokens, num_slots, SPEC: tl.constexpr
):  # fmt: skip
    """Stores BLOCK tokens in their slots; a slot that is none is skipped. Grid: blocks of tokens.

    rope: `RopePointers` of `narrowkv.paged_cache.kernels.append`.
    """
    token = (tl.program_id(0) * SPEC.BLOCK + tl.arange(0, SPEC.BLOCK)).to(tl.int64)
    d = tl.arange(0, SPEC.HEAD_DIM)
    exists = token < num_tokens
    slot = tl.load(slots + token * stride_slots, mask=exists, other=-1)
    exists = exists & (slot >= 0) & (slot < num_slots)
    rows = k + token[:, None] * stride_k
    x = tl.load(rows + d[None, :], mask=exists[:, None], other=0.0).to(tl.float32)
    if SPEC.ROTARY > 0:
        x = rotated(rows, x, rope, token, exists, SPEC)
    if SPEC.BUTTERFLIES > 0:
        x = rotate_parts((x,), SPEC.BUTTERFLIES, 1)[0]
    magnitude = tl.minimum(tl.where(x == x, tl.abs(x), 0.0), 3.4028234663852886e38)
    amax = tl.maximum(tl.max(magnitude, 1), 1e-4)
    scale = tl.div_rn(amax, tl.full(amax.shape, SPEC.MAX, tl.float32))
    if SPEC.POW2:
        # Up to the next power of two; all scales are normal numbers.
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    stored = narrow_fp8(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), SPEC.FORMAT)
    page = tl.where(exists, slot, 0).to(tl.int64)
    scale_at = page * keys.stride_sp
    place = page * keys.stride_p
    if SPEC.PAGE_SIZE > 0:
        place, within = page // SPEC.PAGE_SIZE * keys.stride_p, page % SPEC.PAGE_SIZE
        scale_at = page // SPEC.PAGE_SIZE * keys.stride_sp + within * keys.stride_sn
        if SPEC.SHUFFLED > 0:
            place += within // SPEC.SHUFFLED * SPEC.SHUFFLED * keys.stride_n
            place += within % SPEC.SHUFFLED * SPEC.SHUFFLED
            d = d // SPEC.SHUFFLED * SPEC.SHUFFLED * SPEC.SHUFFLED + d % SPEC.SHUFFLED
        else:
            place += within * keys.stride_n
    tl.store(keys.data + place[:, None] + d[None, :], stored, mask=exists[:, None])
    tl.store(keys.scale + scale_at, scale, mask=exists)
