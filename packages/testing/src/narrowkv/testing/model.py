"""Modelled times of calls on gfx942 and gfx950, by the emulator's timing model. Nothing here is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowkv.cdna_emulator import load_program
from narrowkv.cdna_emulator.timing import (
    CacheShares,
    Prediction,
    Survey,
    Trace,
    predict,
    predict_launch,
    survey,
    trace_text,
)
from narrowkv.runtime.launch import LaunchOptions, executing
from narrowkv.runtime.launch.artifact import CompiledArtifact
from narrowkv.runtime.launch.compiler import compile_launch
from narrowkv.testing.emulation import EmulateExecutor

__all__ = ["ModelExecutor", "Modelled", "Scale", "main_launch", "model_call", "model_peer", "waits"]

# Kernels whose results later launches of the call use as addresses.
_RUN_WHOLE = ("_widen_kernel", "_produce_kernel")
# Kernels that read what an earlier launch of the call has just stored, and caches still hold.
_READS_PARTIAL_RESULTS = ("_merge_splits_kernel", "_merge_sparse_kernel")


@dataclass(frozen=True)
class Scale:
    """How much larger the launches of the modelled call are than those of the call that is traced.

    Attributes:
        workgroups: factor of the number of workgroups.
        passes: factor of the passes of the loop that has the matrix instructions.
        keys: factor of the workgroups of kernels that process each key once, such as those that widen keys.
    """

    workgroups: float = 1.0
    passes: float = 1.0
    keys: float = 1.0


@dataclass(frozen=True)
class Modelled:
    """One kernel under the timing model.

    Attributes:
        name: its name.
        prediction: of its launch.
        full: of as many workgroups as the chip holds at a time: the loop as a large call runs it.
        loaded_bytes: bytes that the loads of all workgroups ask for, counted lane by lane.
        trace: of the workgroup with the most instructions. registers, lds_bytes: of the kernel.
    """

    name: str
    prediction: Prediction
    full: Prediction
    loaded_bytes: float
    trace: Trace
    registers: int
    lds_bytes: int

    def full_with(self, caches: CacheShares) -> Prediction:
        """`full`, where caches serve these shares of its loads."""
        return predict(
            self.trace, registers=self.registers, lds_bytes=self.lds_bytes, hbm_share=caches.hbm,
            l2_misses=caches.l2_misses,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """A record for JSON; every key that holds a time says that it is a model's."""
        return {
            "name": self.name,
            "model": {**asdict(self.prediction), "flops_per_second": self.prediction.flops_per_second},
            "model_full": {
                **asdict(self.full),
                "loop_flops_per_second": self.full.loop_flops_per_second,
                "loop_flops_at_peak_clock": self.full.loop_flops_at_peak_clock,
            },
        }


class ModelExecutor(EmulateExecutor):
    """Compiles every launch, surveys its workgroups in the emulator, and predicts its time.

    Buffers keep what they held, so outputs stay incomplete. A kernel whose results later launches use as
    addresses runs whole.

    Args:
        target: "gfx942" or "gfx950".
        hbm_share: see `narrowkv.cdna_emulator.timing.predict`; None takes the ratio of the buffers' sizes to
            the bytes that are loaded.

    Attributes:
        modelled: the predictions, launch by launch.
        scale: applies to the launches that follow. When set, `Modelled.full` is the launch itself.

    Example:
        >>> import torch
        >>> from narrowkv.attn_decode import merge_states
        >>> executor = ModelExecutor("gfx942")
        >>> with executing(executor):
        ...     merged = merge_states(torch.randn(2, 3, 2, 64), torch.randn(2, 3, 2))
        >>> executor.modelled[0].prediction.seconds > 0
        True
    """

    def __init__(self, target: str, hbm_share: float | None = None) -> None:
        super().__init__(target)
        self._hbm_share = hbm_share
        self.scale: Scale | None = None
        self.modelled: list[Modelled] = []

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:  # fmt: skip
        """Models the launch."""
        artifact = compile_launch(self.target, kernel, grid, args, constexprs, options)
        x, y, z = (*grid, 1, 1)[:3]
        memory, values = self._device_pointers(artifact.args)
        surveyed = survey(
            load_program(artifact.assembly, lds_bytes=artifact.lds_bytes),
            grid=(x, y, z), args=values, memory=memory,
        )  # fmt: skip
        held = float(sum(buffer.data.size for buffer in memory.buffers))
        self.modelled.append(_modelled(artifact, surveyed, held, self._hbm_share, self.scale))
        if artifact.name in _RUN_WHOLE:
            super().launch(kernel, grid, args, constexprs, options)


def _modelled(
    artifact: CompiledArtifact, surveyed: Survey, held_bytes: float, hbm_share: float | None,
    scale: Scale | None,
) -> Modelled:  # fmt: skip
    ops = [[op for wave in share.trace.waves for op in wave] for share in surveyed.shares]
    loads = np.array([sum(op.bytes for op in share if op.kind == "load") for share in ops])
    loaded = float(loads[surveyed.classes].sum())
    share = min(1.0, held_bytes / max(loaded, 1.0)) if hbm_share is None else hbm_share
    if artifact.name in _READS_PARTIAL_RESULTS:
        share = 0.0
    registers = artifact.registers.vgprs  # AGPRs included
    figures: dict[str, Any] = {
        "registers": registers, "lds_bytes": artifact.lds_bytes, "hbm_share": share
    }  # fmt: skip
    factor = passes = 1.0
    if scale is not None:
        multiplies = any(op.kind == "mfma" for share in ops for op in share)
        factor = scale.workgroups if multiplies else scale.keys
        passes = scale.passes if multiplies else 1.0
    launch = predict_launch(surveyed, workgroup_factor=factor, pass_factor=passes, **figures)
    longest = max((share.trace for share in surveyed.shares), key=lambda trace: sum(map(len, trace.waves)))
    full = launch if scale is not None else predict(longest, **figures)
    return Modelled(artifact.name, launch, full, loaded * factor, longest, registers, artifact.lds_bytes)


def model_call(target: str, call: Callable[[], object], *, hbm_share: float | None = None) -> list[Modelled]:
    """Models every launch of a call on CPU tensors.

    Args:
        target: "gfx942" or "gfx950".
        call: makes the launches.
        hbm_share: see `ModelExecutor`.

    Raises:
        EmulatorError: the emulator cannot run one of them.
    """
    executor = ModelExecutor(target, hbm_share)
    with executing(executor):
        call()
    return executor.modelled


def model_peer(path: Path) -> Modelled:
    """Models the hot loop of a file of AMD assembly.

    The text has no arguments, so LDS accesses are taken as free of bank conflicts and loads as coalesced. It
    does not say how much LDS a workgroup has either, so registers alone limit the occupancy.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read.
        ValueError, EmulatorError: it holds no kernel with a loop.
    """
    trace = trace_text(load_program(path.read_text()))
    prediction = predict(trace, lds_bytes=0)
    name = f"{path.name}: {prediction.kernel}"
    return Modelled(name, prediction, prediction, 0.0, trace, trace.program.vgprs, 0)


def main_launch(modelled: Sequence[Modelled]) -> Modelled:
    """The launch with the most matrix flops."""
    return max(modelled, key=lambda m: m.full.flops)


def waits(prediction: Prediction) -> str:
    """The three main reasons for which the waves of the loop wait, with their shares."""
    stalls = prediction.loop.stalls if prediction.loop is not None else {}
    return ", ".join([f"{why} {share:.0%}" for why, share in stalls.items() if why != "issue"][:3])
