"""No change of code changes by accident which configuration a call gets."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from narrowkv.runtime.toolchain import TRITON

ROOT = Path(__file__).resolve().parent.parent


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("choices", ROOT / "tools" / "choices.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = _tool()


@pytest.mark.parametrize("operation", TOOL.TABLES)
def test_every_shape_gets_the_stored_choice(operation: str) -> None:
    """`python tools/choices.py` writes the tables again; their diff belongs to the change that made it."""
    if TRITON[:2] != (3, 8):
        pytest.skip("the tables are those of Triton 3.8, on which a few choices depend")
    assert TOOL.text_of(operation) == (TOOL.CHOICES / f"{operation}.txt").read_text()
