"""Device helpers (`@triton.jit`) that turn FP4 into bytes of E4M3 by a table of `v_perm_b32`, for CDNA.

A table has the magnitudes of E2M1 as E4M3: exponent and mantissa one place further than the code, with bit 7
set unless the magnitude is zero. The sign of a code keeps that bit or clears it, so minus zero becomes zero,
which FNUZ reads as zero, too. E2M1 numbers are 2**6 times the OCP number of a byte, 2**7 times the FNUZ one.
"""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl


@tl.core.extern
def _v_perm(high, low, selectors, _semantic=None):
    symbols = {(tl.int32, tl.int32, tl.int32): ("llvm.amdgcn.perm", tl.int32)}
    return tl.core.extern_elementwise(
        "", "", [high, low, selectors], symbols, is_pure=True, _semantic=_semantic
    )


@triton.jit
def permute(high, low, selectors):
    """`v_perm_b32`: words of those bytes that the bytes of `selectors` name, see `select_bytes`."""
    return _v_perm(high, low, selectors)


@triton.jit
def select_bytes(high, low, SELECTORS: tl.constexpr):
    """Words whose byte i is byte `SELECTORS >> 8 * i & 7` of eight: those of `low`, then those of `high`."""
    return permute(high, low, tl.full(low.shape, SELECTORS, tl.int32))


@triton.jit
def _looked_up(selectors):
    low = tl.full(selectors.shape, _signed(0x8C888400), tl.int32)
    high = tl.full(selectors.shape, _signed(0x9C989490), tl.int32)
    return permute(high, low, selectors)


@triton.constexpr_function
def _signed(number):
    return number - (1 << 32) if number >= 1 << 31 else number


@triton.jit
def fp4_to_e4m3(words):
    """Bytes of E4M3 as int32: of the low nibbles of int32 `words`, and of the high nibbles."""
    low = _looked_up(words & 0x07070707) & ((words << 4) | 0x7F7F7F7F)
    return low, _looked_up((words >> 4) & 0x07070707) & (words | 0x7F7F7F7F)


@triton.jit
def as_bytes(words):
    """The bytes [N, 4 * W] of int32 words [N, W], as uint8."""
    low = tl.join((words & 255).to(tl.uint8), ((words >> 8) & 255).to(tl.uint8))
    high = tl.join(((words >> 16) & 255).to(tl.uint8), ((words >> 24) & 255).to(tl.uint8))
    pairs = tl.permute(tl.join(low, high), (0, 1, 3, 2))
    return tl.reshape(pairs, [words.shape[0], 4 * words.shape[1]])
