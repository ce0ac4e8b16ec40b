"""Where an operation runs: a CPU through the interpreter, a GPU, or an emulated AMD target."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from narrowkv.runtime.errors import UnsupportedError, check_choice
from narrowkv.runtime.launch import active_target
from narrowkv.runtime.targets import Target, device_target
from narrowkv.testing.words import AMD_TARGETS, PLACES

__all__ = ["AMD_TARGETS", "PLACES", "Place", "find_place"]


@dataclass(frozen=True)
class Place:
    """One place to run.

    Attributes:
        name: "cpu", "gpu", or a target's name.
        device: where its tensors are.
        description: for tables.
        context: entered around every call of an operation; it decides how launches are executed.
        is_emulated: whether a target's machine code runs there in the emulator.
    """

    name: str
    device: str
    description: str
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    is_emulated: bool = False

    @property
    def target(self) -> Target:
        """The target whose configuration launches take here."""
        with self.context():
            return active_target(torch.device(self.device))

    @property
    def is_gpu(self) -> bool:
        """Whether launches take the GPU's path."""
        return self.device != "cpu"

    @property
    def has_times(self) -> bool:
        """Whether times measured here mean anything: on a GPU that is not `narrowkv.virtual_gpu`'s."""
        return self.is_gpu and not (torch.version.hip or "").endswith("-virtual")


def _gpu() -> Place:
    if not torch.cuda.is_available():
        raise UnsupportedError(f"gpu needs a GPU; torch {torch.__version__} sees none")
    try:
        target = device_target("cuda")
    except ValueError as error:
        raise UnsupportedError(f"gpu: {error}") from None
    return Place("gpu", "cuda", f"{torch.cuda.get_device_name()} ({target.name})")


def _emulated(name: str, detect_races: bool, detect_hazards: bool) -> Place:
    from narrowkv.testing.emulation import CHECKED, emulating

    checked = None if detect_races or detect_hazards else CHECKED  # who asks for a check gets all of it
    context = partial(
        emulating, name, detect_races=detect_races, detect_hazards=detect_hazards, checked=checked
    )
    return Place(name, "cpu", f"{name} machine code, emulated on the CPU", context, is_emulated=True)


def find_place(name: str | None, *, detect_races: bool = False, detect_hazards: bool = False) -> Place:
    """The place of that name; without one, the GPU if it can be used and the CPU otherwise.

    Args:
        name: one of `PLACES`.
        detect_races: watch LDS for races, which only an emulated target can.
        detect_hazards: watch waits for memory and wait states, too, likewise.

    Raises:
        ValueError: the name is unknown, or what only an emulated target can is asked of another place.
        UnsupportedError: this machine does not have it.
    """
    if name is None:
        name = "gpu" if torch.cuda.is_available() else "cpu"
    check_choice("place", name, PLACES)
    if name in AMD_TARGETS:
        return _emulated(name, detect_races, detect_hazards)
    if detect_races or detect_hazards:
        option = "detect_hazards" if detect_hazards else "detect_races"
        raise ValueError(f"{option} must be with place {' or '.join(AMD_TARGETS)}, got {name}")
    return _gpu() if name == "gpu" else Place("cpu", "cpu", "interpreter on the CPU")
