"""Every tile that a configuration chooses: compiled for AMD, run on a GPU, a few interpreted."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from tool_modules import load_tool

from narrowkv.runtime.launch import compile_for
from narrowkv.testing.codegen import compile_call

TOOL = load_tool("tile_sweep")


def _print(rows: list[Any]) -> None:
    for row in rows:
        print(f"{row.operation} {row.tiles}, {row.format}, head_dim {row.head_dim}: {row.error:.2g}")


@pytest.mark.sampled(most=3)
@pytest.mark.parametrize(("operation", "of"), list(product(TOOL.OPERATIONS, ("bf16", "FP4 by 16, E4M3"))))
def test_a_few_tiles_are_right(operation: str, of: str) -> None:
    rows = TOOL.measured_rows((operation, of, 64, "cpu", True))
    assert rows
    assert not [row for row in rows if not row.passed]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", TOOL.HEAD_DIMS)
@pytest.mark.parametrize(("operation", "of"), list(product(TOOL.OPERATIONS, TOOL.FORMATS)))
def test_every_tile_is_right(operation: str, of: str, head_dim: int) -> None:
    rows = TOOL.measured_rows((operation, of, head_dim, "cuda", False))
    _print(rows)
    group = TOOL.FORMATS[of].get("scale_group") or 1
    refused = (operation, of) == ("append", "FP8 queries") or (operation != "decode" and head_dim > 256)
    assert rows or head_dim % group or refused
    assert not [row for row in rows if not row.passed]


@pytest.mark.codegen_all
@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("of", ["bf16", "fp8_e4m3fn", "fp4_e2m1"])
@pytest.mark.parametrize("operation", TOOL.OPERATIONS)
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_every_tile_compiles(target: str, operation: str, of: str, head_dim: int) -> None:
    """Triton 3.8.0 once had no code for kernel "split"."""
    with compile_for(target):
        tiles = TOOL.chosen_tiles((operation, of, head_dim, "cpu", False))
    assert tiles
    for tile in tiles:
        with compile_for(target):
            inputs = tile.case.inputs()
        assert compile_call(target, lambda inputs=inputs: inputs.prepare()()), tile
