"""The scripts of `tools/` as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def load_tool(name: str) -> Any:
    """The module of `tools/<name>.py`, which `sys.modules` holds for its dataclasses and for pickles."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
