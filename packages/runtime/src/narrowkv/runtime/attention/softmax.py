"""Device helpers (`@triton.jit`) of a base-2 online softmax: one step, and what the rows end with.

Online softmax after Milakov and Gimelshein (2018). Logits are in base 2 (natural ones times log2 e).
"""

from typing import Any, NamedTuple  # noqa: I001

import narrowkv.runtime.toolchain  # noqa: F401  # first: it says how to get Triton
import triton
import triton.language as tl


class SoftCap(NamedTuple):
    """A soft cap of logits.

    Attributes:
        cap: the largest magnitude of a logit.
        shift: natural logits [M] that are added to those of each row before the cap, or None.
    """

    cap: Any
    shift: Any


@triton.constexpr_function
def headroom(dtype):
    """By how many powers of two numerators of this 16-bit type stay below 1.

    bfloat16 holds values of float32's range, and their weighted sum must not pass that range where their mean
    does not. With numerators of at most 2**-24 it does not, up to 2**24 keys. Float16 has no such room.
    """
    return 24 if dtype.is_bf16() else 0


@triton.jit
def softmax_step(s, m, l, scale=None, HEADROOM: tl.constexpr = 0):
    """Takes one tile of logits `[M, N]` into the running maximum and the running sum `[M]`.

    The state of a row is (m, l), a reference and the sum of 2**(logit - m). The reference is the largest
    logit so far plus HEADROOM, so that numerators are at most 2**-HEADROOM. Merges take any reference.

    Args:
        s: the logits.
        m, l: the running maximum and the running sum.
        scale: what the logits are still to be multiplied by, `[M]` and positive; None for 1. A multiply-add
            applies it together with the maximum.
        HEADROOM: of `headroom`.

    Returns:
        `(p, m, l, correction)`: the tile's numerators, the new state, and the correction factor of all that
        was summed before. A row that has only seen logits of -inf has p = 0, l = 0, m = -inf.
    """
    top = tl.max(s, 1)
    if scale is not None:
        top *= scale
    if HEADROOM > 0:
        top += HEADROOM
    m_new = tl.maximum(m, top)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    if scale is None:
        p = tl.exp2(s - m_safe[:, None])
    else:
        p = tl.exp2(s * scale[:, None] - m_safe[:, None])
    correction = tl.exp2(m - m_safe)
    return p, m_new, l * correction + tl.sum(p, 1), correction


@triton.jit
def multiply_values(acc, m, l, factor):
    """The state `(acc, m, l)` of rows `[M]` with the sums of values `[M, D]` multiplied by positive numbers.

    Where a sum could leave float32's range, the running sum is divided instead: a power of two moves from
    `acc` to `l` and `m`, which changes neither acc / l nor the log-sum-exp.

    Args:
        factor: a number, or one for each row `[M]`.
    """
    factor = tl.zeros_like(l) + factor
    exponent = (factor.to(tl.int32, bitcast=True) >> 23) - 127
    moved = tl.maximum(exponent - 64, 0)
    down = ((127 - moved) << 23).to(tl.float32, bitcast=True)
    return acc * (factor * down)[:, None], m + moved.to(tl.float32), l * down


@triton.jit
def output_factor(m, l, sink):
    """The factor of the accumulators of rows `[M]`: 1 / (l + sink), and 0 for a row without keys.

    Args:
        m, l: the state after the last tile; l is 0 where there were no keys, whatever m is.
        sink: a natural logit with value 0, in the denominator only; -inf for none.
    """
    sink = sink * 1.4426950408889634
    # The larger of the two is taken out of both, so that neither overflows.
    top = tl.maximum(m, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    empty = l == 0.0
    kept = tl.where(empty, 0.0, tl.exp2(m - top))
    total = l * kept + tl.where(sink == float("-inf"), 0.0, tl.exp2(sink - top))
    return tl.where(empty | (sink == float("inf")), 0.0, kept / tl.where(empty, 1.0, total))


@triton.jit
def natural_lse(m, l):
    """The natural-log lse of rows `[M]`, sinks left out; -inf for a row without keys."""
    empty = l == 0.0
    return tl.where(empty, float("-inf"), m * 0.6931471805599453 + tl.log(tl.where(empty, 1.0, l)))


@triton.jit
def merge_step(acc, m, l, parts, part_m, part_l):
    """Merges the partial results of N splits into one row.

    Args:
        acc, m, l: the row's state, `[1, D]`, `[1]` and `[1]`.
        parts, part_m, part_l: the splits' states, `[N, D]`, `[N]` and `[N]`. A split without keys has
            part_m = -inf and finite parts.

    Returns:
        The new `(acc, m, l)`.
    """
    m_new = tl.maximum(m, tl.max(part_m, 0))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    weight = tl.exp2(part_m - m_safe)
    ours = tl.exp2(m - m_safe)
    l = l * ours + tl.sum(part_l * weight, 0)
    acc = acc * ours[:, None] + tl.sum(parts * weight[:, None], 0)[None, :]
    return acc, m_new, l


@triton.jit
def capped_logits(s, soft_cap):
    """Cap * tanh(s / cap) by a `SoftCap`, natural logits [M, N] in and base-2 logits out."""
    cap = soft_cap.cap
    if soft_cap.shift is not None:
        s += soft_cap.shift[:, None]
    # tanh by exp2, saturating: exp2 of a large negative number is 0 and of a large positive one never occurs.
    x = s / cap
    e = tl.exp2(-2.885390081777927 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    t = tl.where(x < 0, -t, t)
    # Near zero the difference 1 - e cancels; there the series is exact to float32.
    t = tl.where(tl.abs(x) < 0.02, x - x * x * x * 0.3333333333333333, t)
    return t * (cap * 1.4426950408889634)
