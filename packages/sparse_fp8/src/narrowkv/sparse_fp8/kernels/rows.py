"""Where a row's parts lie in each layout, and how a tile of them is read and widened."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowkv.quant.device import e8m0_to_fp32, widen

# 1.0 in float32, as the word that layout split's scales are read as.
ONE_AS_WORD = tl.constexpr(0x3F800000)


class RowPointers(NamedTuple):
    """Rows of one source, or of a query. Strides are in elements of each pointer.

    nope: FP8 NoPE columns, or all 512 columns of 16-bit rows, which have neither `rope` nor `scale`.
    stride_n, stride_r, stride_s: between rows or, packed584, pages; between tokens of a 16-bit query.
    stride_h: between heads of a 16-bit query.
    num_rows: rows that an index may name; 0 at the launch, set by the kernel.
    """

    nope: Any
    rope: Any
    scale: Any
    stride_n: Any
    stride_r: Any
    stride_s: Any
    stride_h: Any
    num_rows: Any


class Csr(NamedTuple):
    """Which rows each token attends to; `nnz` bounds what `indptr` may claim, set by the kernel."""

    indptr: Any
    indices: Any
    nnz: Any


class Stored(NamedTuple):
    """How rows are stored: what a kernel is compiled for. LAYOUT "": 16-bit rows.

    GROUP: columns that a scale is for. WIDE_ADDRESS: offsets take 64 bits.
    """

    LAYOUT: Any
    PAGE_SIZE: Any
    GROUP: Any
    WIDE_ADDRESS: Any


class Widening(NamedTuple):
    """How FP8 becomes bf16: the format, the target's route, and the power of two that it leaves out."""

    FORMAT: Any
    ROUTE: Any
    EXPONENT: Any


# Sizes are arguments of their own, so that no kernel is compiled for them; kernels put them into the structs.
# Not by a function: Triton 3.6 cannot return a struct that holds None.


@triton.jit
def load_span(csr, token):
    """What indptr says of a token's indices, int32 or int64."""
    return tl.load(csr.indptr + token), tl.load(csr.indptr + token + 1)


@triton.jit
def clamp_span(csr, begin, end):
    """First and one past the last place of a token's indices, inside the buffer whatever indptr says."""
    begin = tl.minimum(tl.maximum(begin, 0), csr.nnz)
    end = tl.minimum(tl.maximum(end, begin), csr.nnz)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def as_row_number(index):
    """Indices as int32; an int64 one that is no int32 becomes -1 instead of wrapping to another row."""
    if index.dtype == tl.int64:
        index = tl.where((index >= 0) & (index < 2147483647), index, -1).to(tl.int32)
    return index


@triton.jit
def token_span(csr, token):
    """`clamp_span` of what `load_span` reads."""
    begin, end = load_span(csr, token)
    return clamp_span(csr, begin, end)


@triton.jit
def load_indices(csr, begin, places, end):
    """Row numbers at `places` after `begin`, -1 from the end on."""
    # What is the same for all lanes stays scalar: places of their own would take registers of every layout.
    return as_row_number(tl.load(csr.indices + begin + places, mask=places < end - begin, other=-1))


@triton.jit
def named(index, num_rows):
    """Which indices name a row: not -1, and nothing out of range."""
    return (index >= 0) & (index < num_rows)


@triton.jit
def locate(rows, index, LAYOUT: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Offsets `[N]` of the NoPE bytes, the RoPE elements and the scales of rows `index`."""
    if WIDE:
        index = index.to(tl.int64)
    if LAYOUT == "packed584":
        page, slot = index // PAGE_SIZE, index % PAGE_SIZE
        nope = page * rows.stride_n + slot * 576
        rope = page * rows.stride_r + slot * 288 + 224
        # Bytes of the same rows: one product serves both.
        scale = page * rows.stride_n + (PAGE_SIZE * 576) + slot * 8
    else:
        nope = index * rows.stride_n
        rope = index * rows.stride_r
        scale = nope + 448 if LAYOUT == "row512" else index * rows.stride_s
    return nope, rope, scale


@triton.jit
def load_rope(rows, offsets, mask):
    """RoPE columns, bf16 `[N, 64]`; rows that are not named are zero."""
    c = tl.arange(0, 64)
    return tl.load(rows.rope + offsets[:, None] + c[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def load_columns(
    rows, nope_at, scale_at, mask,
    TILE: tl.constexpr, WIDTH: tl.constexpr, LAYOUT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Bytes `[N, WIDTH]` of the columns from TILE * WIDTH on, and their scales, fp32.

    Scales are `[N]` where one is for the whole tile, else `[N, WIDTH // GROUP]`. Rows that are not named and
    columns past NoPE are zeros with scale one.
    """
    c = TILE * WIDTH + tl.arange(0, WIDTH)
    inside = mask[:, None]
    if (TILE + 1) * WIDTH > 448:
        inside = inside & (c < 448)[None, :]
    x = tl.load(rows.nope + nope_at[:, None] + c[None, :], mask=inside, other=0)
    # row512 has a byte for every 32 columns, whatever the group.
    STEP: tl.constexpr = GROUP // 32 if LAYOUT == "row512" else 1
    if WIDTH == GROUP:
        places = rows.scale + scale_at + TILE * STEP
        scaled = mask
    else:
        g = TILE * (WIDTH // GROUP) + tl.arange(0, WIDTH // GROUP)
        places = rows.scale + scale_at[:, None] + (g * STEP)[None, :]
        scaled = mask[:, None] & (g < 448 // GROUP)[None, :]
    if LAYOUT == "split":
        # As words: Triton 3.6 branches around each load of float32 in a kernel with products.
        scale = tl.load(places, mask=scaled, other=ONE_AS_WORD).to(tl.float32, bitcast=True)
    else:
        scale = e8m0_to_fp32(tl.load(places, mask=scaled, other=127))
    return x, scale


@triton.jit
def as_fp8(x, FORMAT: tl.constexpr, ROUTE: tl.constexpr):
    """Bytes seen as the FP8 type that the route multiplies or converts; other routes take the bytes."""
    if ROUTE == "fnuz_alias":
        x = x.to(tl.float8e4b8, bitcast=True)
    elif ROUTE == "native":
        if FORMAT == "fp8_e4m3fnuz":
            x = x.to(tl.float8e4b8, bitcast=True)
        else:
            x = x.to(tl.float8e4nv, bitcast=True)
    return x


@triton.jit
def widen_columns(
    x, scale, rope,
    TILE: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, ROUTE: tl.constexpr,
    EXPONENT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """What `load_columns` gave as bf16 `[N, WIDTH]`, RoPE in its place; exact: four bits times one."""
    if ROUTE == "bits":
        wide = widen(x, FORMAT, ROUTE, tl.float16, False).to(tl.float32)
    else:
        wide = as_fp8(x, FORMAT, ROUTE).to(tl.float32)
    scale = scale * (2.0**EXPONENT)
    N: tl.constexpr = x.shape[0]
    if WIDTH == GROUP:
        wide = wide * scale[:, None]
    else:
        wide = tl.reshape(tl.reshape(wide, [N, WIDTH // GROUP, GROUP]) * scale[:, :, None], [N, WIDTH])
    # The low half of the float32 is zero: dropping it rounds nothing and costs no rounding instructions.
    wide = (wide.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if (TILE + 1) * WIDTH > 448:
        first = TILE * WIDTH + tl.arange(0, WIDTH // 64) * 64
        tiles = tl.reshape(wide, [N, WIDTH // 64, 64])
        wide = tl.reshape(tl.where((first == 448)[None, :, None], rope[:, None, :], tiles), [N, WIDTH])
    return wide
