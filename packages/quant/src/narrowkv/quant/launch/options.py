"""Compiler options of a launch."""

from __future__ import annotations

from dataclasses import dataclass

from narrowkv.quant.targets import Target


@dataclass(frozen=True)
class LaunchOptions:
    """Compiler options of one launch; the second group exists on AMD only, the third on NVIDIA only."""

    num_warps: int = 4
    num_stages: int = 2
    # False keeps a * b + c two roundings, for results that must equal the host's bit for bit.
    enable_fp_fusion: bool = True

    waves_per_eu: int | None = None
    matrix_instr_nonkdim: int | None = None

    maxnreg: int | None = None

    def for_target(self, target: Target) -> dict[str, int]:
        """The keyword options that Triton's backend for `target` accepts."""
        options: dict[str, int] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if not self.enable_fp_fusion:
            options["enable_fp_fusion"] = False
        if target.vendor == "amd":
            amd = {"waves_per_eu": self.waves_per_eu, "matrix_instr_nonkdim": self.matrix_instr_nonkdim}
            options |= {name: value for name, value in amd.items() if value is not None}
        elif target.vendor == "nvidia" and self.maxnreg is not None:
            options["maxnreg"] = self.maxnreg
        return options
