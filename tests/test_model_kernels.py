"""The kernels that the timing model is compared with: right results, no races, no spills, and the figures of
docs/amd-timing.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from narrowkv.runtime.launch import LaunchOptions
from narrowkv.runtime.launch.compiler import compile_launch
from narrowkv.runtime.targets import get_target
from narrowkv.runtime.toolchain import TRITON
from narrowkv.testing.emulation import EmulateExecutor

if TRITON < (3, 9):
    pytest.skip("the kernels are written for Gluon of Triton 3.9", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from model_validation import Product, points, products, show_streams

FAST = ("8 waves in two groups, K 8192", "A and B in halves")  # one with and one without phase-shifted waves
POINTS = {point.what if point.target == "gfx950" else f"gfx942, {point.what}": point for point in products()}


NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in POINTS]
PATH = Path(__file__).resolve().parent.parent / "docs" / "amd-timing.md"
PAGE = [
    [cell.strip() for cell in line.strip("| \n").split(" | ")]
    for line in PATH.read_text().splitlines()
    if re.match(r"\| \d+ \| ", line)
]


def numbers(*cells: str) -> list[float | None]:
    """What cells say, without units and notes; None for a dash."""
    return [None if cell == "-" else float(re.sub(r"%| clocks", "", cell)) for cell in cells]


def row_of(point: Product) -> list[str]:
    """The page's row of a product."""
    (row,) = [cells for cells in PAGE if cells[:3] == [point.row, point.target, point.what]]
    return row


def test_the_page_shows_every_published_product() -> None:
    for point in POINTS.values():
        _, _, _, vgprs, share, _, error, rate, *_ = row_of(point)
        assert numbers(vgprs.split(", ")[0], rate) == [point.vgprs, point.rate]
        assert numbers(share) == [point.clocks or pytest.approx(100 * point.share, abs=0.06)]
        assert point.fitted == error.endswith("(fitted)")
    assert len([row for row in PAGE if len(row) == 10]) == len(POINTS)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_what_the_model_says_of_a_product(name: str) -> None:
    point = POINTS[name]
    _, _, _, vgprs, _, share, _, _, rate, _ = row_of(point)
    registers, predicted = point.predict()
    assert numbers(vgprs.split(", ")[1]) == [registers]
    assert predicted.loop is not None
    said = predicted.loop.clocks if point.clocks else 100 * predicted.matrix_share
    assert numbers(share) == [pytest.approx(said, rel=0.01)]
    if point.rate:
        assert numbers(rate) == [pytest.approx(predicted.flops_per_second / 1e12, rel=0.01)]


@pytest.mark.slow
def test_the_page_shows_attention_and_plain_products() -> None:
    made = [
        (p.row, p.what, p.block, f"{p.measured:g}", pytest.approx(p.modelled, rel=0.01, abs=1))
        for p in points()
    ]
    shown = [(*row[:4], *numbers(row[4])) for row in PAGE if len(row) == 6]
    assert shown == made


@pytest.mark.slow
def test_the_page_shows_streams(capsys: pytest.CaptureFixture[str]) -> None:
    show_streams()
    made = [
        row.split(" | ") for row in re.findall(r"^\| (\d+ \| .*) \|$", capsys.readouterr().out, re.MULTILINE)
    ]
    page = PATH.read_text()
    for column, name in ((0, "row 14: .*, workgroups"), (1, "GB/s measured"), (2, "GB/s model")):
        (row,) = re.findall(rf"^\| {name} \| (.*) \|$", page, re.MULTILINE)
        assert row.split(" | ") == [cells[column] for cells in made]


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_multiplies_without_races(name: str) -> None:
    point: Product = POINTS[name]
    m, n, k = point.constants["BM"], point.constants["BN"], 4 * point.constants["BK"]
    a, b = (torch.randn(rows, k).to(point.dtype) for rows in (m, n))
    c = torch.full((m, n), torch.nan, dtype=torch.float16)
    options = LaunchOptions(num_warps=point.warps, num_stages=1)
    launch = (point.kernel, (1, 1), (a, b, c, k, n), point.constants, options)
    registers = compile_launch(get_target(point.target), *launch).registers
    assert registers.vgpr_spills == registers.scratch_bytes == 0
    EmulateExecutor(point.target, detect_hazards=True).launch(*launch)
    expected = a.float() @ b.float().T
    torch.testing.assert_close(c.float(), expected, rtol=2e-3, atol=2e-2)
