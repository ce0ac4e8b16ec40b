"""The order of workgroups on GPUs of several XCDs (dies with an L2 each), for programs that share keys.

The hardware gives workgroup n to XCD n % XCDS. Programs of a launch run fastest over `columns` (KV heads,
query heads) and read the same keys in a column. `program_on_its_xcd` permutes them so that an XCD takes
neighbouring columns, and a run of rows of each before the next one. See "Optimizing Attention on GPUs by
Exploiting GPU Architectural NUMA Effects" (arXiv 2511.02132), whose order takes whole heads one after the
other; here the launch's order of rows, longest first, is kept from one period to the next, and XCDs that
share a column take its rows in turns.
"""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import math
from typing import NamedTuple

import triton
import triton.language as tl

__all__ = ["XcdOrder", "order_of_programs", "program_on_its_xcd", "xcd_order"]


class XcdOrder(NamedTuple):
    """Constants of `program_on_its_xcd`.

    Attributes:
        xcds: XCDs of the GPU.
        columns: programs of a row.
        rows: rows of a period, within which programs are permuted.
        step: an XCD takes every `step`-th row of a column; `rows` is a multiple of it.
    """

    xcds: int
    columns: int
    rows: int
    step: int


def xcd_order(xcds: int, columns: int, rows: int) -> XcdOrder | None:
    """The order of a launch, or None if it is that of the launch already.

    Args:
        xcds: of the target.
        columns: programs of a row, see `XcdOrder`.
        rows: of a period; 0 for the launch's own order. Rounded up so that all XCDs get as many programs.
    """
    if xcds == 1 or rows == 0 or columns == 0:
        return None
    step = xcds // math.gcd(xcds, columns)
    order = XcdOrder(xcds, columns, -(-rows // step) * step, step)
    moves = any(_moved(number, order) != number for number in range(order.rows * columns))
    return order if moves else None


def order_of_programs(programs: int, order: XcdOrder | None) -> list[int]:
    """What `program_on_its_xcd` gives each of `programs` workgroups."""
    if order is None:
        return list(range(programs))
    whole = programs - programs % (order.rows * order.columns)
    return [_moved(number, order) if number < whole else number for number in range(programs)]


def _moved(number: int, order: XcdOrder) -> int:
    """The program of a workgroup of a whole period."""
    period, run = order.rows * order.columns, order.rows // order.step
    within = number % period
    place = within % order.xcds * (period // order.xcds) + within // order.xcds
    row = place % order.rows % run * order.step + place % order.rows // run
    return number - within + row * order.columns + place // order.rows


@triton.jit
def program_on_its_xcd(number, programs, ORDER: tl.constexpr):
    """The program that workgroup `number` of `programs` runs as; ORDER: `XcdOrder` or None for itself.

    Every program is given to exactly one workgroup. The last ones, fewer than a period, keep their number.
    """
    program = number
    if ORDER is not None:
        PERIOD: tl.constexpr = ORDER.rows * ORDER.columns
        RUN: tl.constexpr = ORDER.rows // ORDER.step
        within = number % PERIOD
        place = within % ORDER.xcds * (PERIOD // ORDER.xcds) + within // ORDER.xcds
        row = place % ORDER.rows % RUN * ORDER.step + place % ORDER.rows // RUN
        moved = number - within + row * ORDER.columns + place // ORDER.rows
        program = tl.where(number < programs // PERIOD * PERIOD, moved, number)
    return program
