"""The order of programs on several XCDs: each program runs once, and what shares keys shares an XCD."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from narrowkv.runtime.attention.xcds import XcdOrder, order_of_programs, program_on_its_xcd, xcd_order
from narrowkv.runtime.launch import LaunchOptions, launch
from narrowkv.runtime.targets import TARGETS

ORDERS = [(8, 12, 1), (8, 12, 64), (8, 6, 3), (8, 32, 64), (8, 128, 5), (6, 8, 3), (4, 6, 1), (2, 3, 7)]


@triton.jit
def _order_kernel(out, ORDER: tl.constexpr):
    program = program_on_its_xcd(tl.program_id(0), tl.num_programs(0), ORDER)
    tl.store(out + tl.program_id(0), program)


def _order(xcds: int, columns: int, rows: int) -> XcdOrder:
    order = xcd_order(xcds, columns, rows)
    assert order is not None
    return order


@pytest.mark.parametrize(("xcds", "columns", "rows"), ORDERS)
@pytest.mark.parametrize("programs", [1, 7, 96, 1000, 3 * 1024])
def test_every_program_runs_once(xcds: int, columns: int, rows: int, programs: int) -> None:
    order = np.array(order_of_programs(programs, _order(xcds, columns, rows)))
    assert sorted(order) == list(range(programs))


@pytest.mark.parametrize(("xcds", "columns", "rows"), [(8, 12, 1), (6, 8, 3), (8, 12, 16)])
def test_kernels_compute_the_same_order(xcds: int, columns: int, rows: int) -> None:
    order, programs = _order(xcds, columns, rows), 250
    out = torch.full((programs,), -1, dtype=torch.int32)
    launch(_order_kernel, (programs,), (out,), {"ORDER": order}, LaunchOptions(num_warps=1, num_stages=1))
    assert out.tolist() == order_of_programs(programs, order)


@pytest.mark.parametrize(
    ("columns", "rows", "most"), [(12, 1, 2), (32, 64, 4), (128, 64, 16), (6, 4, 2), (12, 64, 2)]
)
def test_an_xcd_takes_neighbouring_columns(columns: int, rows: int, most: int) -> None:
    """Twelve heads on eight XCDs: two heads each, where the launch's own order gives each three."""
    order = _order(8, columns, rows)
    programs = 4 * order.rows * columns
    column = np.array(order_of_programs(programs, order)) % columns
    for xcd in range(8):
        own = column[xcd::8]
        assert len(own) == programs // 8
        assert len(set(own)) <= most
        assert np.ptp(own) == len(set(own)) - 1


def test_an_xcd_takes_a_run_of_rows_of_a_column() -> None:
    own = np.array(order_of_programs(64 * 32, _order(8, 32, 64)))[::8]
    assert (own[:64] % 32).tolist() == [0] * 64
    assert (own[:64] // 32).tolist() == list(range(64))


def test_xcds_that_share_a_column_take_its_rows_in_turns() -> None:
    """Under a causal mask the first rows have the most keys: no XCD may get more of them than another."""
    order = _order(8, 12, 64)
    row = np.array(order_of_programs(order.rows * 12, order)) // 12
    work = [int((order.rows - row[xcd::8]).sum()) for xcd in range(8)]
    assert max(work) < 1.02 * min(work)


def test_orders_that_change_nothing_are_none() -> None:
    assert xcd_order(1, 12, 64) is None
    assert xcd_order(8, 12, 0) is None
    assert xcd_order(8, 8, 1) is None
    assert xcd_order(8, 1, 64) is None
    assert order_of_programs(5, None) == [0, 1, 2, 3, 4]


def test_no_order_for_gpus_of_one_die() -> None:
    assert all(xcd_order(TARGETS[name].xcds, 12, 64) is None for name in ("sm90", "cuda", "gfx90a"))
