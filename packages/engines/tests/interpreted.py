"""Runs the Triton kernels of engines on a CPU, through narrowkv's interpreter."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton.backends import backends

from narrowkv.runtime.launch.interpreter import interpret

OPTIONS = ("num_warps", "num_stages")


def let_vllm_interpret() -> bool:
    """Lets vLLM keep Triton on a CPU if its kernels are interpreted, which TRITON_INTERPRET says.

    vLLM asks there for a backend "cpu" of Triton, which a package of another project brings. It must be asked
    for before vLLM is imported. With Triton vLLM runs its Model Runner V2.
    """
    interprets = bool(triton.knobs.runtime.interpret)
    if interprets:
        never = SimpleNamespace(is_active=lambda: False)
        backends.setdefault("cpu", SimpleNamespace(driver=never))
    return interprets


class Interpreted:
    """Stands in for a kernel: `kernel[grid](...)` is interpreted."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **named: Any) -> None:
            given = {name: value for name, value in named.items() if name not in OPTIONS}
            bound = inspect.signature(self.kernel.fn).bind(*args, **given)
            bound.apply_defaults()
            interpret(self.kernel, grid, (), bound.arguments)  # by name: constants may stand between others

        return run


def vllm_module_with_triton(name: str, monkeypatch: Any) -> ModuleType:
    """A module of vLLM's, loaded again with the Triton that vLLM turns off on a CPU, and its helpers too."""
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", SimpleNamespace(triton=triton, tl=tl))
    for loaded in [each for each in sys.modules if each.startswith("vllm.v1.attention.ops.triton_")]:
        monkeypatch.delitem(sys.modules, loaded)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
