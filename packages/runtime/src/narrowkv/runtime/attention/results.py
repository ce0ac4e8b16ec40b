"""Device helpers (`@triton.jit`) for rows of the output, of lse, and partial results of splits."""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl

from narrowkv.runtime.attention.softmax import natural_lse, output_factor


@triton.jit
def settle_stores(number, SETTLE: tl.constexpr):
    """Returns the int32 `number` once this wave's stores have reached memory.

    SETTLE: the instructions that wait for them and copy it, `Target.store_wait`; empty in the interpreter.

    A barrier does not wait for stores there, and the wave that counts the program waits only for its own.
    """
    if SETTLE != "":
        number = tl.inline_asm_elementwise(
            SETTLE, "=v,v,~{memory}", [number], dtype=tl.int32, is_pure=False, pack=1
        )
    return number


@triton.jit
def store_partial_result(workspace, slot, acc, m, l, row_mask, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Stores a split's state: acc [slot, BLOCK_M, BLOCK_D] and ml [slot, 2, BLOCK_M] of a workspace."""
    store_parts_of_result(workspace, slot, (acc,), m, l, row_mask, BLOCK_M, BLOCK_D, 1)


@triton.jit
def store_parts_of_result(
    workspace, slot, acc, m, l, row_mask, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """`store_partial_result` with acc in parts, whose columns are stored one part after the other."""
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D // PARTS)
    part = slot * (BLOCK_M * BLOCK_D) + r[:, None] * BLOCK_D + d[None, :]
    for i in tl.static_range(PARTS):
        tl.store(workspace.acc + part + i * (BLOCK_D // PARTS), acc[i], mask=row_mask[:, None])
    tl.store(workspace.ml + slot * (2 * BLOCK_M) + r, m)
    tl.store(workspace.ml + slot * (2 * BLOCK_M) + BLOCK_M + r, l)


@triton.jit
def is_last_program(workspace, counter, num_splits, SETTLE: tl.constexpr):
    """Counts this program; True for the last of `num_splits` programs, which resets the counter.

    Call it after `store_partial_result`. SETTLE: see `settle_stores`.
    """
    counter = settle_stores(counter, SETTLE)
    # The barrier orders the stores of all threads before the count, which one thread makes.
    tl.debug_barrier()
    last = tl.atomic_add(workspace.arrived + counter, 1, sem="acq_rel") == num_splits - 1
    if last:
        tl.store(workspace.arrived + counter, 0)  # counters are zero between launches
    return last


@triton.jit
def merge_partial_results(workspace, acc, m, l, first_slot, step, num_splits, row_mask, BLOCK_M: tl.constexpr,
                          BLOCK_D: tl.constexpr):  # fmt: skip
    """The state of a tile's rows, merged from the slots first_slot, first_slot + step, ... of a workspace.

    Args:
        acc, m, l: any state; only shapes and layouts are taken from it.
    """
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    m = tl.zeros_like(m) + float("-inf")
    for i in range(num_splits):
        slot = (first_slot + i * step).to(tl.int64)
        m = tl.maximum(m, tl.load(workspace.ml + slot * (2 * BLOCK_M) + r, cache_modifier=".cg"))
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    l = tl.zeros_like(l)
    acc = tl.zeros_like(acc)
    # The maximum is known, so that the terms are independent and their loads overlap.
    for i in tl.range(0, num_splits, loop_unroll_factor=1):
        slot = (first_slot + i * step).to(tl.int64)
        weight = tl.exp2(tl.load(workspace.ml + slot * (2 * BLOCK_M) + r, cache_modifier=".cg") - m_safe)
        l += tl.load(workspace.ml + slot * (2 * BLOCK_M) + BLOCK_M + r, cache_modifier=".cg") * weight
        part = slot * (BLOCK_M * BLOCK_D) + r[:, None] * BLOCK_D + d[None, :]
        acc_i = tl.load(workspace.acc + part, mask=row_mask[:, None], other=0.0, cache_modifier=".cg")
        acc += acc_i * weight[:, None]
    return acc, m, l


@triton.jit
def merge_splits(workspace, acc, m, l, counter, split, num_splits, step, row_mask,
                 SETTLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Stores a split's partial result; for the last program of a tile, returns True and all splits merged.

    The splits of a tile use the slots `counter + i * step`, and its arrival counter is number `counter`.
    """
    slot = (counter + split * step).to(tl.int64)
    store_partial_result(workspace, slot, acc, m, l, row_mask, BLOCK_M, BLOCK_D)
    last = is_last_program(workspace, counter, num_splits, SETTLE)
    if last:
        acc, m, l = merge_partial_results(
            workspace, acc, m, l, counter, step, num_splits, row_mask, BLOCK_M, BLOCK_D
        )
    return last, acc, m, l


@triton.jit
def splits_of_group(num_splits):
    """Splits of a group that is merged first, near the square root of their number; 1: no groups.

    A tile is merged in the time of `size + num_splits / size` loads, one after the other.
    """
    size = tl.where(num_splits <= 128, 8, tl.where(num_splits <= 512, 16, 32))
    return tl.where(num_splits <= 8, 1, size)


@triton.jit
def splits_to_merge(workspace, acc, m, l, first_slot, step, split, num_splits, merge, row_mask,
                    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, GROUPS: tl.constexpr,
                    SETTLE: tl.constexpr = ""):  # fmt: skip
    """Counts a program that has stored its split's state; for the last one of a tile, what is left to merge.

    With GROUPS the last program of each group of many splits merges the group into the slot of its first
    split: one program that merged all splits of a long sequence would end long after all others.

    Args:
        acc, m, l: any state, as for `merge_partial_results`.
        first_slot, step: the splits have the slots first_slot, first_slot + step, ... and the arrival
            counters of the same numbers: a group that of its first split, the tile that of the second split.
        merge: 0 if another launch merges.
        GROUPS: whether there are groups. Decode's tiles of 64 rows and more have few splits, and no registers
            for them.
        SETTLE: see `settle_stores`; empty with GROUPS.

    Returns:
        For the last program how many splits, and slots, each state to merge stands for; else 0.
    """
    size = num_splits * 0 + 1
    if GROUPS:
        size = splits_of_group(num_splits)
    if merge == 0:
        size = 0
    if GROUPS:
        if size > 1:
            begin = split // size * size
            slot, parts = first_slot + begin * step, tl.minimum(num_splits - begin, size)
            if is_last_program(workspace, slot, parts, ""):
                acc, m, l = merge_partial_results(
                    workspace, acc, m, l, slot, step, parts, row_mask, BLOCK_M, BLOCK_D
                )
                tl.debug_barrier()  # all threads have read what the slot held
                store_partial_result(workspace, slot.to(tl.int64), acc, m, l, row_mask, BLOCK_M, BLOCK_D)
            else:
                size = 0
    if size > 0:
        if not is_last_program(workspace, first_slot + step, tl.cdiv(num_splits, size), SETTLE):
            size = 0
    return size


@triton.jit
def output_rows(sinks_ptr, acc, m, l, out_scale, heads, row_mask, HAS_SINKS: tl.constexpr):
    """Rows of O: acc / (l + sink), times `out_scale`."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads, mask=row_mask, other=float("-inf")).to(tl.float32)
        factor = output_factor(m, l, sink)
    else:
        factor = tl.where(l == 0.0, 0.0, 1.0 / l)
    return acc * (factor * out_scale)[:, None]


@triton.jit
def write_lse(lse_ptr, m, l, heads, tokens, row_mask, stride_lse):
    """The natural-log lse of rows, which leaves the sink out."""
    tl.store(lse_ptr + tokens * stride_lse + heads, natural_lse(m, l), mask=row_mask)
