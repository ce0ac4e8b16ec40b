"""Process groups: which ranks take part, what they must agree on, and torch's names of the collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Torch 2.13 renames these two, and the old names warn.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

Group = dist.ProcessGroup | DeviceMesh | None


def group_of(group: Group) -> dist.ProcessGroup:
    """The process group of a group, of a mesh with one dimension, or by default of all ranks.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        TypeError: neither a group nor a mesh.
        ValueError: a mesh of several dimensions.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed must be initialised: call torch.distributed.init_process_group(backend, "
            "timeout=...) on every rank, or start the program with torchrun"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a mesh with one dimension, got {group.ndim}: pass mesh['name'], the one that "
                "shares sequences"
            )
        return group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
    found = group or dist.group.WORLD
    assert found is not None
    return found


@contextmanager
def agreement(group: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """Compares values between ranks; an error on one rank is an error on all.

    The block fills the dictionary with the values that must be equal on every rank. An exception in it is
    reported to the other ranks and raised here. It waits for all ranks.

    Raises:
        ValueError: ranks differ, or another rank's block failed; the message says which and how.
    """
    mine: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        yield mine
    except Exception as error:
        failure = error
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (mine, None if failure is None else str(failure)), group=group)
    if failure is not None:
        raise failure
    for rank, (_, refused) in enumerate(everyone):
        if refused is not None:
            raise ValueError(f"rank {rank} of the group refused the call: {refused}")
    for name, value in everyone[0][0].items():
        values = [theirs.get(name) for theirs, _ in everyone]
        if any(other != value for other in values):
            told = ", ".join(f"rank {rank} has {other!r}" for rank, other in enumerate(values))
            raise ValueError(f"{name} must be the same on every rank of the group: {told}")


def check_layout(world: int, rank: int, group: dist.ProcessGroup) -> None:
    """Checks that a layout is for this group and this rank of it.

    Raises:
        ValueError: it is not.
    """
    size, own = dist.get_world_size(group), dist.get_rank(group)
    if (world, rank) != (size, own):
        raise ValueError(
            f"layout must be for rank {own} of {size}, which this process is in the group, got rank {rank} "
            f"of {world}"
        )


def padded(count: int, dtype: torch.dtype) -> int:
    """Elements, rounded up to 32 bytes."""
    unit = 32 // dtype.itemsize
    return -(-count // unit) * unit
