"""What an adapter does on the host beside narrowkv's own operations: torch operators, reads, and time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Methods of a tensor that wait for its device.
READS = (
    "item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"
)  # fmt: skip
# Operators that move no data.
VIEWS = {
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "_reshape_alias",
}  # fmt: skip
LAYER_IN_VIEWS = 20  # a layer, beyond its planned calls, takes no longer than so many views of a tensor


class Operators(TorchDispatchMode):
    """Collects the names of torch's operators, and of the reads of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.watches = True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        """Keeps a name, unless one of narrowkv's operations runs."""
        if self.watches:
            self.names.append(name)

    def unwatched(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """An operation whose own operators are not collected."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.watches = False
            try:
                return operation(*args, **kwargs)
            finally:
                self.watches = True

        return call


@contextlib.contextmanager
def operators(*operations: tuple[Any, str]) -> Iterator[list[str]]:
    """Names of what runs inside the block, other than inside narrowkv's operations.

    Args:
        *operations: modules and the names of narrowkv's operations that they call.
    """
    seen = Operators()
    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            method = getattr(torch.Tensor, name)

            def call(self: Any, *args: Any, name: str = name, method: Any = method, **kwargs: Any) -> Any:
                seen.note(name)
                return method(self, *args, **kwargs)

            patch.setattr(torch.Tensor, name, call)
        for module, name in operations:
            patch.setattr(module, name, seen.unwatched(getattr(module, name)))
        with seen:
            yield seen.names


def least_seconds(call: Callable[[], Any], laps: int = 300) -> float:
    """The shortest lap of a call, which other processes disturb least."""
    times = []
    for _ in range(laps):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


def in_views(seconds: float) -> float:
    """How many views of a tensor take as long on this machine, whose speed thus does not matter."""
    tensor = torch.zeros(2, 8)
    return seconds / least_seconds(lambda: tensor.view(-1))
