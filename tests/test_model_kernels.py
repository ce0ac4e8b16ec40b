"""The kernels that the timing model is compared with: right results, no races, no spills."""

from __future__ import annotations

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
from model_validation import Product, products

FAST = ("8 waves in two groups, K 8192", "A and B in halves")  # one with and one without phase-shifted waves
POINTS = {point.what if point.target == "gfx950" else f"gfx942, {point.what}": point for point in products()}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in POINTS]
)
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
