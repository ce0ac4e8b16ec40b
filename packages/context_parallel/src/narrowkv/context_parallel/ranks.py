"""Processes that are ranks of a group, on one machine: for checks, measurements and tests."""

from __future__ import annotations

import datetime
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def run_ranks(
    work: Callable[..., Any], world: int, *args: Any, device: str = "cpu", timeout_s: float = 120.0
) -> list[Any]:
    """Runs `work(*args)` in `world` new processes with `torch.distributed` initialised between them.

    Args:
        work: a function of a module, so that a new process can import it.
        world: processes.
        args: what it is called with.
        device: "cpu" for gloo, or "cuda" for NCCL (RCCL), where rank r has GPU r.
        timeout_s: how long a collective may wait for a rank before it is an error.

    Returns:
        The return values of the ranks, in rank order.

    Raises:
        ProcessRaisedException, ProcessExitedException: of `torch.multiprocessing`, when a rank fails; the
            others are then ended.

    Example:
        >>> run_ranks(os.getpid, 2)                                                   # doctest: +SKIP
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(  # type: ignore[no-untyped-call]
            _enter, (world, folder, device, timeout_s, work, args), nprocs=world
        )
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(world)]


def _enter(
    rank: int, world: int, folder: str, device: str, timeout_s: float, work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:  # fmt: skip
    """A rank's process."""
    options: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/meeting", rank=rank,
        world_size=world, timeout=datetime.timedelta(seconds=timeout_s), **options,
    )  # fmt: skip
    try:
        result = work(*args)
        Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
    finally:
        dist.destroy_process_group()
