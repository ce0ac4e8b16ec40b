"""No change of code changes by accident which configuration a call gets."""

from __future__ import annotations

import pytest
from tool_modules import load_tool

from narrowkv.runtime.toolchain import TRITON

TOOL = load_tool("choices")


@pytest.mark.parametrize("operation", TOOL.TABLES)
def test_every_shape_gets_the_stored_choice(operation: str) -> None:
    """`python tools/choices.py` writes the tables again; their diff belongs to the change that made it."""
    if TRITON[:2] != (3, 8):
        pytest.skip("the tables are those of Triton 3.8, on which a few choices depend")
    assert TOOL.text_of(operation) == (TOOL.CHOICES / f"{operation}.txt").read_text()
