"""Tensors on "cuda" lie on the CPU, and a GPU seems to be there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["CudaOnCpu", "pretend_a_gpu"]

_CPU = torch.device("cpu")


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class CudaOnCpu(TorchFunctionMode):
    """Calls of torch with a CUDA device among their arguments get the CPU instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tuple(map(_on_cpu, args)), dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


def pretend_a_gpu(arch: str) -> None:
    """`torch.cuda` answers as one GPU of that architecture whose work is done at once."""
    properties = SimpleNamespace(gcnArchName=arch, multi_processor_count=4, total_memory=2**36, name=arch)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 5),
        "mem_get_info": lambda *_: (2**36, 2**36),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # A function of its own each: torch's compiler keeps a rule for every function of `torch.cuda`.
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *_: None)
    torch.set_default_device = lambda *_: None
