"""What tests and the command `narrowkv` share: kernels run, compiled and modelled for AMD on any machine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowkv.testing.codegen import KernelCode, compile_call
    from narrowkv.testing.emulation import EmulateExecutor, emulating

__all__ = ["EmulateExecutor", "KernelCode", "compile_call", "emulating"]


def __getattr__(name: str) -> Any:
    """Imports what is asked for: the command reads the registry of operations before torch is imported."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "codegen" if name in ("KernelCode", "compile_call") else "emulation"
    return getattr(import_module(f"{__name__}.{module}"), name)
