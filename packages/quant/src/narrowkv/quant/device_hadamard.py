"""Device code that rotates rows by the orthonormal Hadamard matrix, as `narrowkv.quant.hadamard` does."""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl


@triton.jit
def _butterflies(x, BUTTERFLIES: tl.constexpr):
    """Sums and differences of each run of `2**BUTTERFLIES` columns of [M, D], not yet orthonormal.

    Each butterfly takes neighbours and puts sums before differences, so that the next bit of the column's
    number becomes the lowest; after all of them the columns are in their own order.
    """
    M: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    SIZE: tl.constexpr = 2**BUTTERFLIES
    ROWS: tl.constexpr = M * (D // SIZE)
    x = tl.reshape(x, [ROWS, SIZE])
    for _ in tl.static_range(BUTTERFLIES):
        low, high = tl.split(tl.reshape(x, [ROWS, SIZE // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 2, 1]), [ROWS, SIZE])
    return tl.reshape(x, [M, D])


@triton.jit
def rotate_parts(x, BUTTERFLIES: tl.constexpr, PARTS: tl.constexpr):
    """Rotates each run of `2**BUTTERFLIES` channels; the bits are those of `narrowkv.quant.hadamard`.

    Args:
        x: float32 rows in 1, 2 or 4 parts: part i holds channels i, i + PARTS, ... [M, D / PARTS].
        BUTTERFLIES: log2 of the channels that are rotated together, at least log2 of PARTS; 0 for no
            rotation.

    Returns:
        The rotated parts.
    """
    if BUTTERFLIES > 0:
        REST: tl.constexpr = BUTTERFLIES - PARTS // 2  # log2 of 1, 2, 4 is 0, 1, 2
        SCALE: tl.constexpr = (2**BUTTERFLIES) ** -0.5
        if PARTS == 2:
            x = (x[0] + x[1], x[0] - x[1])
        elif PARTS == 4:
            even, odd = (x[0] + x[1], x[0] - x[1]), (x[2] + x[3], x[2] - x[3])
            x = (even[0] + odd[0], even[1] + odd[1], even[0] - odd[0], even[1] - odd[1])
        rotated = ()
        for i in tl.static_range(PARTS):
            # Triton's language does not unpack tuples.
            rotated = rotated + (_butterflies(x[i], REST) * SCALE,)  # noqa: RUF005
        x = rotated
    return x
