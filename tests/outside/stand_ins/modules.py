"""Modules that are made of values."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["add_module"]


def add_module(name: str, *folders: Path, **values: Any) -> ModuleType:
    """Puts a module into `sys.modules`, and packages above it that are not there yet.

    Args:
        name: dotted.
        folders: where modules of it are looked for that are not added here.
        values: its attributes.
    """
    parent, _, last = name.rpartition(".")
    above = (sys.modules.get(parent) or add_module(parent)) if parent else None
    module = sys.modules.get(name) or ModuleType(name)
    module.__path__ = [*getattr(module, "__path__", []), *map(str, folders)]
    vars(module).update(values)
    sys.modules[name] = module
    if above is not None:
        setattr(above, last, module)
    return module
