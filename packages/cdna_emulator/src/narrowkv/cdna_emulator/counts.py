"""Dynamic counts: what the waves that ran have executed and moved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from .matrix import mfma_shape
from .parser import Instruction

_TRANSCENDENTAL = re.compile(r"^v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_f(16|32|64)$")


@dataclass(frozen=True)
class DynamicCounts:
    """Counts of executed wave instructions and of bytes.

    Attributes:
        wave_instructions: all instructions, each counted once for each wave that executed it.
        valu: vector ALU instructions; includes the next two, not MFMA.
        transcendental: exp, log, rcp, rsq, sqrt, sin, cos.
        convert: v_cvt_*.
        mfma: executed MFMA instructions by mnemonic.
        mfma_flops: 2 * M * N * K * blocks of each.
        lds_instructions: ds_* instructions, permutes included.
        lds_bytes_read, lds_bytes_written: of active lanes; permutes move no LDS bytes.
        vmem: vector memory instructions (loads, stores, atomics).
        vmem_bytes_loaded, vmem_bytes_stored: of lanes that are active and in range; lanes that read the same
            address count each.
        salu: scalar instructions, branches and s_load included; s_waitcnt and s_nop are not.
        barriers: s_barrier, once for each wave.
        workgroups: workgroups that ran.
    """

    wave_instructions: float = 0
    valu: float = 0
    transcendental: float = 0
    convert: float = 0
    mfma: Mapping[str, float] = field(default_factory=dict)
    mfma_flops: float = 0
    lds_instructions: float = 0
    lds_bytes_read: float = 0
    lds_bytes_written: float = 0
    vmem: float = 0
    vmem_bytes_loaded: float = 0
    vmem_bytes_stored: float = 0
    salu: float = 0
    barriers: float = 0
    workgroups: int = 0

    def __add__(self, other: DynamicCounts) -> DynamicCounts:
        """Counts of two runs together."""
        if not isinstance(other, DynamicCounts):
            return NotImplemented
        names = [f.name for f in fields(self) if f.name != "mfma"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        mnemonics = sorted({*self.mfma, *other.mfma})
        mfma = {name: self.mfma.get(name, 0) + other.mfma.get(name, 0) for name in mnemonics}
        return DynamicCounts(mfma=mfma, **sums)

    def per_workgroup(self) -> DynamicCounts:
        """The mean over the workgroups; ``workgroups`` becomes 1."""
        n = max(self.workgroups, 1)
        names = [f.name for f in fields(self) if f.name not in ("mfma", "workgroups")]
        means = {name: getattr(self, name) / n for name in names}
        return DynamicCounts(mfma={k: v / n for k, v in self.mfma.items()}, workgroups=1, **means)


def classify(inst: Instruction) -> dict[str, int]:
    """What one execution of an instruction adds to the integer fields; the caller counts ``mfma``."""
    name = inst.name
    shape = mfma_shape(inst)
    if shape is not None:
        return {"mfma_flops": shape.flops}
    if name.startswith("v_"):
        kinds = {"valu": 1}
        if _TRANSCENDENTAL.match(name):
            kinds["transcendental"] = 1
        if name.startswith("v_cvt_"):
            kinds["convert"] = 1
        return kinds
    if name.startswith("ds_"):
        return {"lds_instructions": 1}
    if name.startswith(("buffer_load", "buffer_store", "buffer_atomic", "global_", "flat_", "scratch_")):
        return {"vmem": 1}
    if name == "s_barrier":
        return {"barriers": 1}
    if name.startswith("s_") and name not in ("s_waitcnt", "s_nop"):
        return {"salu": 1}
    return {}
