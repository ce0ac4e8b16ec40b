"""The tensors among a launch's arguments: which there are, whether they have memory, copies on the CPU."""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def tensors_of(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Every tensor of nested tuples of arguments, outer ones first, and those of tensor descriptors.

    Raises:
        TypeError: one has no memory that a kernel can read: a fake, functional, meta or sparse tensor, or one
            that `torch.func` transforms.
    """
    found: list[torch.Tensor] = []
    pending = list(args)
    for arg in pending:  # grows as it goes
        if isinstance(arg, tuple):
            pending += arg
            continue
        tensor = arg.base if hasattr(arg, "block_shape") else arg
        if not isinstance(tensor, torch.Tensor):
            continue
        found.append(tensor)
        dispatch = type(tensor).__torch_dispatch__
        if type(tensor) in _PLAIN or dispatch is torch._C._disabled_torch_dispatch_impl:
            try:
                if tensor.data_ptr() or not tensor.numel():
                    continue
            except RuntimeError:
                pass  # no storage, or none that may be looked at
        kind = "FunctionalTensor" if torch._is_functional_tensor(tensor) else type(tensor).__name__
        raise TypeError(
            f"a kernel needs tensors that have memory, got a {kind} on device {tensor.device}: call the "
            "operation with real tensors, and outside of what torch traces (torch.compiler.disable)"
        )
    return found


class HostCopies:
    """Copies of GPU tensors on the CPU, for kernels that run there; CPU tensors are passed unchanged."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, value: Any) -> Any:
        """The value with every GPU tensor replaced; tensors that share a storage share its copy."""
        if isinstance(value, tuple):
            parts = map(self.of, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return value
        storage = value.untyped_storage()
        _, copy = self._storages.setdefault(storage.data_ptr(), (storage, storage.cpu()))  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=value.dtype).set_(
            copy, value.storage_offset(), value.size(), value.stride()
        )

    def write_back(self) -> None:
        """Copies to the GPU what kernels stored."""
        for storage, copy in self._storages.values():
            storage.copy_(copy)
