"""Compiler options of a launch."""

from __future__ import annotations

from dataclasses import dataclass

from triton import knobs

from narrowkv.runtime.targets import Target


@dataclass(frozen=True)
class LaunchOptions:
    """Compiler options of one launch; the second group exists on AMD only, the last on NVIDIA only.

    Attributes:
        num_warps: warps (waves) of a program.
        num_stages: stages of the software pipeline.
        enable_fp_fusion: False keeps a * b + c two roundings, for results that must equal the host's bit for
            bit.
        waves_per_eu: waves that the compiler leaves registers for on one SIMD.
        matrix_instr_nonkdim: rows and columns of a matrix instruction, 16 or 32.
        kpack: elements along K, in multiples of an instruction's, that one LDS load fetches; gfx950 has wider
            instructions instead, and is not given it.
        llvm_fn_attrs: comma-separated attributes of LLVM's function.
        maxnreg: a bound on a thread's registers, so that more warps fit.
        launch_pdl: the launch may begin before the one ahead has ended: the kernel itself waits for what that
            one leaves.
    """

    num_warps: int = 4
    num_stages: int = 2
    enable_fp_fusion: bool = True

    waves_per_eu: int | None = None
    matrix_instr_nonkdim: int | None = None
    kpack: int | None = None
    llvm_fn_attrs: str | None = None

    maxnreg: int | None = None
    launch_pdl: bool = False

    def for_target(self, target: Target) -> dict[str, int | str]:
        """The keyword options that Triton's backend for `target` accepts."""
        options: dict[str, int | str] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            # What Triton itself takes where nothing is said; but Triton 3.9 then warns.
            "enable_fp_fusion": self.enable_fp_fusion and knobs.language.default_fp_fusion,
        }
        vendor: dict[str, int | str | None] = {}
        if target.vendor == "amd":
            vendor = {
                "waves_per_eu": self.waves_per_eu,
                "matrix_instr_nonkdim": self.matrix_instr_nonkdim,
                "kpack": None if target.name == "gfx950" else self.kpack,
                "llvm_fn_attrs": self.llvm_fn_attrs,
            }
        elif target.vendor == "nvidia":
            vendor = {"maxnreg": self.maxnreg, "launch_pdl": self.launch_pdl or None}
        options |= {name: value for name, value in vendor.items() if value is not None}
        return options
