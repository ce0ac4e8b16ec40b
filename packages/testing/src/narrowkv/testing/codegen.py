"""What a call compiles to for gfx942 and gfx950, in figures that fit in a table and in JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from narrowkv.runtime.launch import compile_for
from narrowkv.testing.cases import Case
from narrowkv.testing.roofline import matrix_share

if TYPE_CHECKING:
    from narrowkv.runtime.launch.artifact import CompiledArtifact


@dataclass(frozen=True)
class KernelCode:
    """One compiled kernel.

    Attributes:
        name: its name.
        vgprs, agprs, sgprs: registers of a wave.
        spills: vector registers spilled to memory.
        sgpr_spills: scalar registers kept in lanes of vector registers; outside loops that costs nothing.
        scratch_bytes: scratch of a lane.
        lds_bytes: LDS of a workgroup.
        num_warps: waves of a workgroup.
        waves_per_simd: waves that fit on a SIMD.
        spills_in_loops: instructions inside loops that move spilled registers (`artifact.spills_in_loops`).
        mfma: matrix instructions of the hot loop by name.
        loop: other counts of the hot loop: valu, transcendental, converts, lds, vector_loads,
            loaded_bytes_per_lane.
        matrix_share: share of matrix instructions in the loop's issue clocks, a model; 0 where there are no
            figures of the target.
    """

    name: str
    vgprs: int
    agprs: int
    sgprs: int
    spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    num_warps: int
    waves_per_simd: int
    spills_in_loops: int = 0
    mfma: dict[str, int] = field(default_factory=dict)
    loop: dict[str, int] = field(default_factory=dict)
    matrix_share: float = 0.0

    @classmethod
    def of(cls, artifact: CompiledArtifact) -> KernelCode:
        """Reads an artifact."""
        registers, loop, figures = artifact.registers, artifact.loop, artifact.target.figures
        return cls(
            name=artifact.name,
            vgprs=registers.vgprs,
            agprs=registers.agprs,
            sgprs=registers.sgprs,
            spills=registers.vgpr_spills,
            sgpr_spills=registers.sgpr_spills,
            scratch_bytes=registers.scratch_bytes,
            lds_bytes=artifact.lds_bytes,
            num_warps=artifact.num_warps,
            waves_per_simd=artifact.waves_per_simd,
            spills_in_loops=artifact.spills_in_loops,
            mfma={name: n for name, n in loop.mnemonics.items() if name.startswith(("v_mfma", "v_smfmac"))},
            loop={
                "valu": loop.valu,
                "transcendental": loop.transcendental,
                "converts": loop.converts,
                "lds": loop.lds,
                "vector_loads": loop.vector_loads,
                "loaded_bytes_per_lane": loop.loaded_bytes_per_lane,
            },
            matrix_share=0.0 if figures is None else matrix_share(loop, figures),
        )

    @property
    def faulty(self) -> bool:
        """Whether it spills vector registers, uses scratch, or moves spilled scalars in the hot loop."""
        return bool(self.spills or self.scratch_bytes or self.spills_in_loops)


def amd_backend_missing() -> str | None:
    """Why nothing can be compiled for AMD here, or None."""
    from triton.backends import backends

    if "amd" not in backends:
        return f"this triton has no AMD backend, only {', '.join(backends) or 'none'}"
    return None


def compile_call(target: str, call: Callable[[], Any]) -> list[CompiledArtifact]:
    """Compiles every launch of `call` for `target`; nothing is run."""
    with compile_for(target) as artifacts:
        call()
    return list(artifacts)


def main_kernel(kernels: Sequence[KernelCode]) -> KernelCode:
    """The kernel with the matrix instructions, or the first."""
    return max(kernels, key=lambda kernel: sum(kernel.mfma.values()))


@dataclass(frozen=True)
class CallCode:
    """One call compiled for one target; `plan` is its configuration in words, where the operation says it."""

    target: str
    kernels: tuple[KernelCode, ...]
    plan: str = ""

    def as_dict(self, case: Case) -> dict[str, Any]:
        """The call of a case for a document."""
        plan = {"plan": self.plan} if self.plan else {}
        kernels = [asdict(kernel) for kernel in self.kernels]
        return {"target": self.target, "case": str(case), **plan, "kernels": kernels}

    @property
    def faulty(self) -> bool:
        """Whether one of its kernels is."""
        return any(kernel.faulty for kernel in self.kernels)


def compile_case(case: Case, target: str) -> CallCode:
    """Compiles every kernel of a case for a target.

    Raises:
        ValueError, TypeError: the operation refuses the case.
    """
    inputs = case.inputs()
    artifacts = compile_call(target, inputs.call)
    plan = ""
    if explain := getattr(inputs, "explain", None):
        with compile_for(target):
            plan = explain()
    return CallCode(target, tuple(map(KernelCode.of, artifacts)), plan)
