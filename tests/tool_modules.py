"""Modules by their paths, and the scripts of `tools/`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def load_module(path: Path, name: str) -> Any:
    """A file as the module `name`, held by `sys.modules`: dataclasses, pickles, relative imports need it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_tool(name: str) -> Any:
    """The module of `tools/<name>.py`."""
    return load_module(TOOLS / f"{name}.py", name)
