"""Matrix products in Gluon with the configurations of published kernels, for model_validation.py.

They were written for this comparison and follow what the publishers state: tiles, waves, matrix instruction,
layout in LDS, number of buffers, what is loaded ahead. C = A B^T; A is [M, K], B is [N, K], both row-major.
"""

# mypy: ignore-errors
# Triton's decorators and the kernels under them have no types.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

cdna3 = gl.amd.cdna3
cdna4 = gl.amd.cdna4
copies = gl.amd.cdna4.async_copy


@gluon.jit
def _offsets(rows: gl.constexpr, columns: gl.constexpr, stride, L: gl.constexpr):
    """Element offsets of a tile [rows, columns] of a row-major matrix."""
    row = gl.arange(0, rows, gl.SliceLayout(1, L))
    column = gl.arange(0, columns, gl.SliceLayout(0, L))
    return gl.expand_dims(row, 1) * stride + gl.expand_dims(column, 0)


@gluon.jit
def _transposed_offsets(rows: gl.constexpr, columns: gl.constexpr, stride, L: gl.constexpr):
    """Element offsets of a tile [rows, columns] of a column-major matrix."""
    row = gl.arange(0, rows, gl.SliceLayout(1, L))
    column = gl.arange(0, columns, gl.SliceLayout(0, L))
    return gl.expand_dims(row, 1) + gl.expand_dims(column, 0) * stride


@gluon.jit
def _tile(a, b, K, BM: gl.constexpr, BN: gl.constexpr):
    """The program's tile of C, and where its rows of A and B begin."""
    tile_m, tile_n = gl.program_id(0) * BM, gl.program_id(1) * BN
    return tile_m, tile_n, a + tile_m * K, b + tile_n * K


@gluon.jit
def _store(c, acc, tile_m, tile_n, N, BM: gl.constexpr, BN: gl.constexpr):
    offsets = _offsets(BM, BN, N, acc.type.layout)
    cdna3.buffer_store(acc.to(c.dtype.element_ty), c + tile_m.to(gl.int64) * N + tile_n, offsets)


@gluon.jit
def _store_row(c, left, right, tile_m, tile_n, N, BM: gl.constexpr, BN: gl.constexpr):
    """Stores two tiles that lie beside each other."""
    _store(c, left, tile_m, tile_n, N, BM, BN)
    _store(c, right, tile_m, tile_n + BN, N, BM, BN)


@gluon.jit
def _product(x, y, acc, FORMAT: gl.constexpr):
    """Adds x y to acc: fp16, or FP8 on gfx950's scaled matrix unit without scales."""
    if FORMAT == "fp16":
        result = cdna3.mfma(x, y, acc)
    else:
        result = cdna4.mfma_scaled(x, None, FORMAT, y, None, FORMAT, acc)
    return result


@gluon.jit
def registers_kernel(
    a, b, c, K, N,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, MMA: gl.constexpr,
    LA: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """No load ahead: tiles come to registers, and the compiler changes their layout through LDS (row 1)."""
    tile_m, tile_n, a, b = _tile(a, b, K, BM, BN)
    at_a, at_b = _offsets(BM, BK, K, LA), _transposed_offsets(BK, BN, K, LB)
    acc = gl.full([BM, BN], 0.0, gl.float32, MMA)
    for _ in range(0, K, BK):
        x = gl.convert_layout(cdna3.buffer_load(a, at_a), gl.DotOperandLayout(0, MMA, 8))
        y = gl.convert_layout(cdna3.buffer_load(b, at_b), gl.DotOperandLayout(1, MMA, 8))
        acc = cdna3.mfma(x, y, acc)
        at_a += BK
        at_b += BK
    _store(c, acc, tile_m, tile_n, N, BM, BN)


@gluon.jit
def _copy(shared, pointer, offsets):
    """Begins to copy a tile, or a half of one, to LDS; one group."""
    copies.buffer_load_to_shared(shared, pointer, offsets)
    copies.commit_group()


@gluon.jit
def _copy_both(sa, sb, a, b, at_a, at_b):
    """The same of a tile of A and one of B, in one group."""
    copies.buffer_load_to_shared(sa, a, at_a)
    _copy(sb, b, at_b)


@gluon.jit
def async_kernel(
    a, b, c, K, N,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, MMA: gl.constexpr,
    LA: gl.constexpr, LB: gl.constexpr,
    SA: gl.constexpr, SB: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Copies from memory to LDS.

    AHEAD 0: one buffer, and the copy is waited for (rows 2, 3). 1: two buffers, the next tile is copied
    during the products (row 4). 2: it is also read from LDS to registers during them (row 5).
    """
    A_OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    B_OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    BUFFERS: gl.constexpr = 2 if AHEAD else 1
    tile_m, tile_n, a, b = _tile(a, b, K, BM, BN)
    at_a, at_b = _offsets(BM, BK, K, LA), _transposed_offsets(BK, BN, K, LB)
    sa = gl.allocate_shared_memory(a.dtype.element_ty, [BUFFERS, BM, BK], SA)
    sb = gl.allocate_shared_memory(b.dtype.element_ty, [BUFFERS, BK, BN], SB)
    acc = gl.full([BM, BN], 0.0, gl.float32, MMA)
    tiles = K // BK
    if AHEAD == 0:
        for _ in range(tiles):
            _copy_both(sa.index(0), sb.index(0), a, b, at_a, at_b)
            copies.wait_group(0)
            x, y = sa.index(0).load(A_OPERAND), sb.index(0).load(B_OPERAND)
            acc = cdna3.mfma(x, y, acc)
            a += BK
            b += BK
    elif AHEAD == 1:
        _copy_both(sa.index(0), sb.index(0), a, b, at_a, at_b)
        for i in range(tiles - 1):
            a += BK
            b += BK
            _copy_both(sa.index((i + 1) % 2), sb.index((i + 1) % 2), a, b, at_a, at_b)
            copies.wait_group(1)
            x = copies.load_shared_relaxed(sa.index(i % 2), A_OPERAND)
            y = copies.load_shared_relaxed(sb.index(i % 2), B_OPERAND)
            acc = cdna3.mfma(x, y, acc)
        copies.wait_group(0)
        last = (tiles - 1) % 2
        acc = cdna3.mfma(sa.index(last).load(A_OPERAND), sb.index(last).load(B_OPERAND), acc)
    else:
        _copy_both(sa.index(0), sb.index(0), a, b, at_a, at_b)
        a += BK
        b += BK
        _copy_both(sa.index(1), sb.index(1), a, b, at_a, at_b)
        copies.wait_group(1)
        x = copies.load_shared_relaxed(sa.index(0), A_OPERAND)
        y = copies.load_shared_relaxed(sb.index(0), B_OPERAND)
        for i in range(tiles - 2):
            a += BK
            b += BK
            _copy_both(sa.index(i % 2), sb.index(i % 2), a, b, at_a, at_b)
            copies.wait_group(1)
            next_x = copies.load_shared_relaxed(sa.index((i + 1) % 2), A_OPERAND)
            next_y = copies.load_shared_relaxed(sb.index((i + 1) % 2), B_OPERAND)
            acc = cdna3.mfma(x, y, acc)
            x, y = next_x, next_y
        copies.wait_group(0)
        acc = cdna3.mfma(x, y, acc)
        last = (tiles - 1) % 2
        acc = cdna3.mfma(sa.index(last).load(A_OPERAND), sb.index(last).load(B_OPERAND), acc)
    _store(c, acc, tile_m, tile_n, N, BM, BN)


@gluon.jit
def sliced_kernel(
    a, b, c, K, N,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, MMA: gl.constexpr,
    LA: gl.constexpr, LB: gl.constexpr,
    SA: gl.constexpr, SB: gl.constexpr, WIDTH: gl.constexpr, FORMAT: gl.constexpr, HALVES_OF_A: gl.constexpr,
):  # fmt: skip
    """As `async_kernel` with AHEAD 2, but with B, or A and B, in halves (rows 6, 7, 8).

    Each half is read from LDS during the products of others, and its place is filled again once it was read.
    """
    A_OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, WIDTH)
    B_OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, WIDTH)
    HM: gl.constexpr = BM // HALVES_OF_A
    HN: gl.constexpr = BN // 2
    tile_m, tile_n, a, b = _tile(a, b, K, BM, BN)
    at_a, at_b = _offsets(HM, BK, K, LA), _transposed_offsets(BK, HN, K, LB)
    # Each half has its own buffer, so that the compiler sees which copies overwrite which reads.
    top = gl.allocate_shared_memory(a.dtype.element_ty, [2, HM, BK], SA)
    left = gl.allocate_shared_memory(b.dtype.element_ty, [2, BK, HN], SB)
    right = gl.allocate_shared_memory(b.dtype.element_ty, [2, BK, HN], SB)
    bottom = gl.allocate_shared_memory(a.dtype.element_ty, [2, HM, BK], SA) if HALVES_OF_A == 2 else top
    zero = gl.full([HM, HN], 0.0, gl.float32, MMA)
    tiles = K // BK
    for i in gl.static_range(2):
        copies.buffer_load_to_shared(top.index(i), a + i * BK, at_a)
        copies.buffer_load_to_shared(left.index(i), b + i * BK, at_b)
        copies.buffer_load_to_shared(right.index(i), b + HN * K + i * BK, at_b)
        if HALVES_OF_A == 2:
            _copy(bottom.index(i), a + HM * K + i * BK, at_a)
    copies.wait_group(0)
    x0, y0 = top.index(0).load(A_OPERAND), left.index(0).load(B_OPERAND)
    acc00, acc01, acc10, acc11 = zero, zero, zero, zero
    for i in range(0, tiles, 2):
        for now in gl.static_range(2):  # constant places in LDS
            next_a = a + gl.minimum(i + now + 2, tiles - 2 + now) * BK
            next_b = b + gl.minimum(i + now + 2, tiles - 2 + now) * BK
            acc00 = _product(x0, y0, acc00, FORMAT)
            if HALVES_OF_A == 1:
                y1 = copies.load_shared_relaxed(right.index(now), B_OPERAND)
                _copy_both(top.index(now), left.index(now), next_a, next_b, at_a, at_b)
                copies.wait_group(2)
                acc01 = _product(x0, y1, acc01, FORMAT)
                x0 = copies.load_shared_relaxed(top.index(1 - now), A_OPERAND)
                y0 = copies.load_shared_relaxed(left.index(1 - now), B_OPERAND)
                _copy(right.index(now), next_b + HN * K, at_b)
                copies.wait_group(2)
            else:
                x1 = copies.load_shared_relaxed(bottom.index(now), A_OPERAND)
                _copy(left.index(now), next_b, at_b)
                copies.wait_group(4)
                acc10 = _product(x1, y0, acc10, FORMAT)
                y1 = copies.load_shared_relaxed(right.index(now), B_OPERAND)
                _copy(top.index(now), next_a, at_a)
                copies.wait_group(4)
                acc01 = _product(x0, y1, acc01, FORMAT)
                y0 = copies.load_shared_relaxed(left.index(1 - now), B_OPERAND)
                _copy(bottom.index(now), next_a + HM * K, at_a)
                copies.wait_group(4)
                acc11 = _product(x1, y1, acc11, FORMAT)
                x0 = copies.load_shared_relaxed(top.index(1 - now), A_OPERAND)
                _copy(right.index(now), next_b + HN * K, at_b)
                copies.wait_group(4)
    copies.wait_group(0)
    _store_row(c, acc00, acc01, tile_m, tile_n, N, HM, HN)
    if HALVES_OF_A == 2:
        _store_row(c, acc10, acc11, tile_m + HM, tile_n, N, HM, HN)


@gluon.jit
def two_groups_kernel(
    a, b, c, K, N,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, MMA: gl.constexpr,
    LA: gl.constexpr, LB: gl.constexpr,
    SA: gl.constexpr, SB: gl.constexpr, WIDTH: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """Eight waves in two groups: one multiplies while the other reads LDS and copies (row 10).

    A and B are in halves. In each of four stages for memory one half is read, and the place of the half that
    was read two such stages earlier is filled with the tile after next. One group is a stage behind the
    other, so a stage waits for the copies that the next one reads.
    """
    A_OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, WIDTH)
    B_OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, WIDTH)
    HM: gl.constexpr = BM // 2
    HN: gl.constexpr = BN // 2
    tile_m, tile_n, a, b = _tile(a, b, K, BM, BN)
    at_a, at_b = _offsets(HM, BK, K, LA), _transposed_offsets(BK, HN, K, LB)
    sa = gl.allocate_shared_memory(a.dtype.element_ty, [4, HM, BK], SA)
    sb = gl.allocate_shared_memory(b.dtype.element_ty, [4, BK, HN], SB)
    for i in gl.static_range(2):
        for half in gl.static_range(2):
            copies.buffer_load_to_shared(sa.index(i * 2 + half), a + half * HM * K + i * BK, at_a)
            _copy(sb.index(i * 2 + half), b + half * HN * K + i * BK, at_b)
    copies.wait_group(0)
    zero = gl.full([HM, HN], 0.0, gl.float32, MMA)
    acc00, acc01, acc10, acc11 = zero, zero, zero, zero
    x0, y0 = sa.index(0).load(A_OPERAND), sb.index(0).load(B_OPERAND)
    tiles = K // BK
    for i in range(tiles):
        with gl.amd.warp_pipeline_stage("memory 1", priority=0):
            now, soon = (i % 2) * 2, ((i + 1) % 2) * 2
            next_a, next_b = a + gl.minimum(i + 2, tiles - 1) * BK, b + gl.minimum(i + 2, tiles - 1) * BK
            y1 = copies.load_shared_relaxed(sb.index(now + 1), B_OPERAND)
            _copy(sa.index(now), next_a, at_a)
        copies.wait_group(5)
        with gl.amd.warp_pipeline_stage("products 1", priority=1):
            acc00 = _product(x0, y0, acc00, FORMAT)
        with gl.amd.warp_pipeline_stage("memory 2", priority=0):
            x1 = copies.load_shared_relaxed(sa.index(now + 1), A_OPERAND)
            _copy(sb.index(now), next_b, at_b)
        copies.wait_group(5)
        with gl.amd.warp_pipeline_stage("products 2", priority=1):
            acc01 = _product(x0, y1, acc01, FORMAT)
        with gl.amd.warp_pipeline_stage("memory 3", priority=0):
            x0 = copies.load_shared_relaxed(sa.index(soon), A_OPERAND)
            _copy(sb.index(now + 1), next_b + HN * K, at_b)
        copies.wait_group(5)
        with gl.amd.warp_pipeline_stage("products 3", priority=1):
            acc10 = _product(x1, y0, acc10, FORMAT)
        with gl.amd.warp_pipeline_stage("memory 4", priority=0):
            y0 = copies.load_shared_relaxed(sb.index(soon), B_OPERAND)
            _copy(sa.index(now + 1), next_a + HM * K, at_a)
        copies.wait_group(5)
        with gl.amd.warp_pipeline_stage("products 4", priority=1):
            acc11 = _product(x1, y1, acc11, FORMAT)
    copies.wait_group(0)
    _store_row(c, acc00, acc01, tile_m, tile_n, N, HM, HN)
    _store_row(c, acc10, acc11, tile_m + HM, tile_n, N, HM, HN)


@gluon.jit
def stored_kernel(
    a, b, c, K, N,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, MMA: gl.constexpr,
    LA: gl.constexpr, LB: gl.constexpr,
    SA: gl.constexpr, SB: gl.constexpr,
):  # fmt: skip
    """For gfx942: the next tile comes to registers during the products and is then stored to LDS (row 16)."""
    HK: gl.constexpr = BK // 2
    tile_m, tile_n, a, b = _tile(a, b, K, BM, BN)
    at_a, at_b = _offsets(BM, BK, K, LA), _transposed_offsets(BK, BN, K, LB)
    sa = gl.allocate_shared_memory(a.dtype.element_ty, [BM, BK], SA)
    sb = gl.allocate_shared_memory(b.dtype.element_ty, [BK, BN], SB)
    acc = gl.full([BM, BN], 0.0, gl.float32, MMA)
    sa.store(cdna3.buffer_load(a, at_a))
    sb.store(cdna3.buffer_load(b, at_b))
    for first in range(0, K, BK):
        following = gl.minimum(first + BK, K - BK)
        next_x = cdna3.buffer_load(a + following, at_a)
        next_y = cdna3.buffer_load(b + following, at_b)
        for half in gl.static_range(2):
            x = sa.slice(half * HK, HK, 1).load(gl.DotOperandLayout(0, MMA, 8))
            y = sb.slice(half * HK, HK, 0).load(gl.DotOperandLayout(1, MMA, 8))
            acc = cdna3.mfma(x, y, acc)
        sa.store(next_x)
        sb.store(next_y)
    _store(c, acc, tile_m, tile_n, N, BM, BN)


@gluon.jit
def stored_two_groups_kernel(
    a, b, c, K, N,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, MMA: gl.constexpr,
    LA: gl.constexpr, LB: gl.constexpr,
    SA: gl.constexpr, SB: gl.constexpr,
):  # fmt: skip
    """Row 19, gfx942: eight waves in two groups; one tile is in LDS, the next one in registers.

    A is in halves of its rows, A and B in halves of K. Three stages read equally much of a tile from LDS; the
    fourth stores the next tile there.
    """
    A_OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    B_OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    HM: gl.constexpr = BM // 2
    HK: gl.constexpr = BK // 2
    tile_m, tile_n, a, b = _tile(a, b, K, BM, BN)
    at_a, at_b = _offsets(BM, BK, K, LA), _transposed_offsets(BK, BN, K, LB)
    sa = gl.allocate_shared_memory(a.dtype.element_ty, [BM, BK], SA)
    sb = gl.allocate_shared_memory(b.dtype.element_ty, [BK, BN], SB)
    top = gl.full([HM, BN], 0.0, gl.float32, MMA)
    bottom = top
    sa.store(cdna3.buffer_load(a, at_a))
    sb.store(cdna3.buffer_load(b, at_b))
    for first in range(0, K, BK):
        with gl.amd.warp_pipeline_stage("memory 1", priority=0):
            y0 = sb.slice(0, HK, 0).load(B_OPERAND)
            x0 = sa.slice(0, HM, 0).slice(0, HK, 1).load(A_OPERAND)
            following = gl.minimum(first + BK, K - BK)
            next_x = cdna3.buffer_load(a + following, at_a)
        with gl.amd.warp_pipeline_stage("products 1", priority=1):
            top = cdna3.mfma(x0, y0, top)
        with gl.amd.warp_pipeline_stage("memory 2", priority=0):
            x0 = sa.slice(HM, HM, 0).slice(0, HK, 1).load(A_OPERAND)
            y1 = sb.slice(HK, HK, 0).load(B_OPERAND)
            next_y = cdna3.buffer_load(b + following, at_b)
        with gl.amd.warp_pipeline_stage("products 2", priority=1):
            bottom = cdna3.mfma(x0, y0, bottom)
        with gl.amd.warp_pipeline_stage("memory 3", priority=0):
            x0 = sa.slice(0, HM, 0).slice(HK, HK, 1).load(A_OPERAND)
            x1 = sa.slice(HM, HM, 0).slice(HK, HK, 1).load(A_OPERAND)
        with gl.amd.warp_pipeline_stage("products 3", priority=1):
            top = cdna3.mfma(x0, y1, top)
        with gl.amd.warp_pipeline_stage("memory 4", priority=0):
            sa.store(next_x)
            sb.store(next_y)
        with gl.amd.warp_pipeline_stage("products 4", priority=1):
            bottom = cdna3.mfma(x1, y1, bottom)
    _store(c, top, tile_m, tile_n, N, HM, BN)
    _store(c, bottom, tile_m + HM, tile_n, N, HM, BN)
