"""Where an operation runs: a CPU through the interpreter, a GPU, or an emulated AMD target."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from narrowkv.cli.report import UnsupportedHereError, UsageError
from narrowkv.quant.targets import device_target


@dataclass(frozen=True)
class Place:
    """One place to run.

    Attributes:
        name: "cpu", "gpu", or a target's name.
        device: where its tensors are.
        description: for tables.
        context: entered around every call of an operation; it decides how launches are executed.
    """

    name: str
    device: str
    description: str
    context: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def is_gpu(self) -> bool:
        """Whether times measured here mean anything."""
        return self.device != "cpu"


def _gpu() -> Place:
    if not torch.cuda.is_available():
        raise UnsupportedHereError(f"--on gpu needs a GPU; torch {torch.__version__} sees none")
    try:
        target = device_target("cuda")
    except ValueError as error:
        raise UnsupportedHereError(f"--on gpu: {error}") from None
    return Place("gpu", "cuda", f"{torch.cuda.get_device_name()} ({target.name})")


def _cpu() -> Place:
    return Place("cpu", "cpu", "interpreter on the CPU")


def _emulated(name: str) -> Place:
    from narrowkv.cli.emulation import emulating

    return Place(name, "cpu", f"{name} machine code, emulated on the CPU", partial(emulating, name))


PLACES: dict[str, Callable[[], Place]] = {
    "cpu": _cpu,
    "gpu": _gpu,
    **{name: partial(_emulated, name) for name in ("gfx942", "gfx950")},
}
"""How each place is found."""


def find_place(name: str | None) -> Place:
    """The place of that name; without one, the GPU if it can be used and the CPU otherwise.

    Raises:
        UsageError: the name is unknown.
        UnsupportedHereError: this machine does not have it.
    """
    if name is None:
        name = "gpu" if torch.cuda.is_available() else "cpu"
    if name not in PLACES:
        raise UsageError(f"--on must be one of {', '.join(PLACES)}; got {name!r}")
    return PLACES[name]()
