"""Compiler options of a launch."""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.quant.targets import Target


@dataclass(frozen=True)
class LaunchOptions:
    """Compiler options of one launch; the second group exists on AMD only, the last on NVIDIA only."""

    num_warps: int = 4
    num_stages: int = 2
    # False keeps a * b + c two roundings, for results that must equal the host's bit for bit.
    enable_fp_fusion: bool = True

    waves_per_eu: int | None = None
    matrix_instr_nonkdim: int | None = None

    # A bound on a thread's registers, so that more warps fit.
    maxnreg: int | None = None
    # May begin before the launch ahead has ended: the kernel itself waits for what that one leaves.
    launch_pdl: bool = False

    def for_target(self, target: Target) -> dict[str, int]:
        """The keyword options that Triton's backend for `target` accepts."""
        options: dict[str, int] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if not self.enable_fp_fusion:
            options["enable_fp_fusion"] = False
        vendor: dict[str, int | None] = {}
        if target.vendor == "amd":
            vendor = {"waves_per_eu": self.waves_per_eu, "matrix_instr_nonkdim": self.matrix_instr_nonkdim}
        elif target.vendor == "nvidia":
            vendor = {"maxnreg": self.maxnreg, "launch_pdl": self.launch_pdl or None}
        options |= {name: value for name, value in vendor.items() if value is not None}
        return options
