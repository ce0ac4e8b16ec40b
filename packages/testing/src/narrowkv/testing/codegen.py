"""What a call compiles to for gfx942 and gfx950, in figures that fit in a table and in JSON.

Where `Cases.tile_bytes` is known there is a roofline of the hot loop, too: a model, never a measurement. It
counts what a few workgroups of the very artifact execute in the emulator; where that cannot be, it counts the
text of the loop and says why.

One pass of the loop keeps each of a compute unit's resources busy for some clocks: its share of HBM
bandwidth, the vector ALUs, the matrix units, the LDS. Whichever is busy longest bounds the loop. Latency, and
how well the resources overlap, are outside the model: it says what a loop can at best reach, and which
resource it leans on. The figures are those of `narrowkv.runtime.targets`, with their sources.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from narrowkv.cdna_emulator import EmulatorError, Loop
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import compile_for, executing
from narrowkv.runtime.launch.artifact import CompiledArtifact, InstructionMix
from narrowkv.runtime.targets import Figures, Target, get_target
from narrowkv.testing.cases import Case
from narrowkv.testing.emulation import EmulatedLaunch, EmulateExecutor
from narrowkv.testing.operations import a_few, cases_of
from narrowkv.testing.records import number

_WORKGROUPS = 8  # emulated for the counts
_LOOP_COUNTS = ("valu", "transcendental", "converts", "lds", "vector_loads", "loaded_bytes_per_lane")


_LANES = 64
_TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
_INT_MULTIPLY = (
    "v_mul_lo_u32", "v_mul_hi_u32", "v_mul_lo_i32", "v_mul_hi_i32", "v_mad_u64_u32", "v_mad_i64_i32",
)  # fmt: skip
_MATRIX = ("v_mfma", "v_smfmac")
_MFMA_SHAPE = re.compile(r"v_mfma(?:_scale)?_[a-z0-9]+_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_?(\w*)")
_LDS_WIDTH = re.compile(r"_(?:b|u|i)(\d+)")
# fp32 and xf32 matrix rates are an eighth of bf16's or better; none of our loops leans on them.
_FP32_MFMA_SHARE = 8


@dataclass(frozen=True)
class Roofline:
    """Clocks that one pass of a loop by one workgroup keeps a compute unit's resources busy.

    Attributes:
        memory_clk: at the unit's even share of HBM bandwidth.
        valu_clk: vector ALUs of the four SIMDs, without matrix instructions.
        mfma_clk: matrix units.
        lds_clk: LDS.
        bound_by: "memory" or "issue".
        resource: the busiest: "hbm", "valu", "mfma" or "lds".
        issue_over_memory: the busiest resource but HBM over HBM; below 1 the loop is bound by memory.
        hbm_bytes: bytes of HBM that the pass reads.
        mfma_flops: matrix flops of the pass.
        label: always "model".
    """

    memory_clk: float
    valu_clk: float
    mfma_clk: float
    lds_clk: float
    hbm_bytes: float
    mfma_flops: float
    label: str = "model"

    def divided(self, passes: float) -> Roofline:
        """The model of one pass from that of several."""
        names = ("memory_clk", "valu_clk", "mfma_clk", "lds_clk", "hbm_bytes", "mfma_flops")
        return replace(self, **{name: getattr(self, name) / passes for name in names})

    @property
    def issue_clk(self) -> float:
        """The busiest resource but HBM."""
        return max(self.valu_clk, self.mfma_clk, self.lds_clk)

    @property
    def issue_over_memory(self) -> float:
        """Below 1 the loop is bound by memory."""
        return self.issue_clk / self.memory_clk

    @property
    def bound_by(self) -> str:
        """Either "memory" or "issue"."""
        return "memory" if self.issue_over_memory <= 1.0 else "issue"

    @property
    def resource(self) -> str:
        """The busiest resource."""
        busy = {"hbm": self.memory_clk, "valu": self.valu_clk, "mfma": self.mfma_clk, "lds": self.lds_clk}
        return max(busy, key=lambda name: busy[name])

    def as_dict(self) -> dict[str, float | str]:
        """Fields and what follows from them, for JSON."""
        derived = {name: getattr(self, name) for name in ("bound_by", "resource", "issue_over_memory")}
        return {**derived, **asdict(self)}


def valu_clocks(loop: InstructionMix, figures: Figures) -> float:
    """Clocks that one wave's pass keeps its SIMD's vector ALU busy."""
    slow = loop.total(*_TRANSCENDENTAL)
    multiplies = loop.total(*_INT_MULTIPLY)
    rest = loop.valu - slow - multiplies
    return rest * figures.valu_clk + slow * figures.transcendental_clk + multiplies * figures.int_mul_clk


def _mfma(mnemonic: str) -> tuple[int, str]:
    """Flops of one matrix instruction, and its operand type."""
    match = _MFMA_SHAPE.match(mnemonic)
    if match is None:
        raise UnsupportedError(f"the model does not know the matrix instruction {mnemonic}")
    m, n, k = (int(match.group(i)) for i in (1, 2, 3))
    return 2 * m * n * k * int(match.group(4) or 1), match.group(5)


def _mfma_rate(operands: str, figures: Figures) -> float:
    if "f8" in operands or "fp8" in operands or "i8" in operands:
        return figures.fp8_flops_per_clk
    if "f16" in operands:
        return figures.bf16_flops_per_clk
    return figures.bf16_flops_per_clk / _FP32_MFMA_SHARE


def mfma_flops(loop: InstructionMix) -> float:
    """Matrix flops of one wave's pass."""
    return float(sum(n * _mfma(name)[0] for name, n in loop.mnemonics.items() if name.startswith(_MATRIX)))


def mfma_clocks(loop: InstructionMix, figures: Figures) -> float:
    """Clocks that one wave's pass keeps a whole unit's matrix cores busy."""
    clocks = 0.0
    for name, n in loop.mnemonics.items():
        if name.startswith(_MATRIX):
            flops, operands = _mfma(name)
            clocks += n * flops / _mfma_rate(operands, figures)
    return clocks


def matrix_share(loop: InstructionMix, figures: Figures) -> float:
    """Share of matrix instructions in the clocks that one wave's pass takes to issue; 0 without any.

    Example:
        >>> from collections import Counter
        >>> from narrowkv.runtime.targets import get_target
        >>> figures = get_target("gfx942").figures
        >>> matrix_share(InstructionMix(Counter({"v_fma_f32": 4, "v_mfma_f32_16x16x16_bf16": 1})), figures)
        0.5
    """
    # A unit's rate is that of all its SIMDs together.
    matrix = mfma_clocks(loop, figures) * figures.simds_per_unit
    return matrix / (matrix + valu_clocks(loop, figures)) if matrix else 0.0


def lds_bytes(loop: InstructionMix) -> float:
    """Bytes that one wave's pass moves through the LDS."""
    total = 0
    for name, n in loop.mnemonics.items():
        if not name.startswith("ds_") or name.startswith(("ds_nop", "ds_gws")):
            continue
        # "b64_tr_b8" loads 64 bits a lane: the first width counts. A two-address form moves twice its width.
        width = _LDS_WIDTH.search(name)
        bits = max(int(width.group(1)), 32) if width else 32  # a narrower access takes a whole bank's turn
        total += n * bits // 8 * (2 if re.match(r"ds_(?:read|write)2", name) else 1) * _LANES
    return float(total)


def roofline(loop: InstructionMix, target: Target, *, num_warps: int, hbm_bytes: float) -> Roofline:
    """The model for one workgroup's pass through a loop.

    Args:
        loop: instruction mix of the loop, one wave's.
        target: whose figures to use.
        num_warps: waves of the workgroup; each executes the loop.
        hbm_bytes: bytes that the workgroup's pass needs from HBM, each counted once.

    Raises:
        UnsupportedError: the target has no figures, or the loop has an unknown matrix instruction.
        ValueError: an empty loop, or no bytes.

    Example:
        >>> from collections import Counter
        >>> from narrowkv.runtime.targets import get_target
        >>> loop = InstructionMix(Counter({"v_fma_f32": 64, "v_exp_f32": 8, "v_mfma_f32_16x16x16_bf16": 8}))
        >>> model = roofline(loop, get_target("gfx942"), num_warps=1, hbm_bytes=8192)
        >>> model.valu_clk, model.bound_by
        (96.0, 'memory')
    """
    figures = target.figures
    if figures is None:
        raise UnsupportedError(f"the model needs hardware figures, and target {target.name} has none")
    if not loop.mnemonics:
        raise ValueError("loop must have instructions, got an empty one")
    if hbm_bytes <= 0 or num_warps < 1:
        raise ValueError(f"hbm_bytes and num_warps must be positive, got {hbm_bytes} and {num_warps}")
    bytes_per_clk = figures.hbm_bytes_per_s / figures.clock_hz / figures.compute_units
    return Roofline(
        memory_clk=hbm_bytes / bytes_per_clk,
        # Waves of all resident workgroups spread over the SIMDs.
        valu_clk=valu_clocks(loop, figures) * num_warps / figures.simds_per_unit,
        mfma_clk=mfma_clocks(loop, figures) * num_warps,
        lds_clk=lds_bytes(loop) * num_warps / figures.lds_bytes_per_clk,
        hbm_bytes=hbm_bytes,
        mfma_flops=mfma_flops(loop) * num_warps,
    )


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
            loop={name: getattr(loop, name) for name in _LOOP_COUNTS},
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


@dataclass(frozen=True)
class Emulated:
    """What the emulated workgroups of the attention kernel executed: means over workgroups.

    Attributes:
        workgroups: how many ran.
        passes: passes through the hot loop.
        wave_instructions: all instructions, of all waves.
        loop_wave_instructions: those inside the hot loop.
        loaded_bytes, stored_bytes: what lanes asked of vector memory, each lane counted.
        lds_bytes: read and written.
        loop: executed in one pass by one wave, by mnemonic.
    """

    workgroups: int
    passes: float
    wave_instructions: float
    loop_wave_instructions: float
    loaded_bytes: float
    stored_bytes: float
    lds_bytes: float
    loop: dict[str, float]

    def parts(self) -> list[str]:
        """The counts in words."""
        share = self.loop_wave_instructions / self.wave_instructions
        return [
            f"wave instructions {number(self.wave_instructions, 5)} ({share:.0%} in the loop)",
            f"passes {number(self.passes)}",
            f"bytes asked for {number(self.loaded_bytes, 6)}",
            f"stored {number(self.stored_bytes, 6)}",
            f"through LDS {number(self.lds_bytes, 6)}",
        ]


@dataclass(frozen=True)
class Inspection:
    """One call compiled for one target.

    Attributes:
        target: the target.
        case: the call.
        plan: the configuration, in words.
        kernels: every kernel of the call.
        model: roofline of a pass through the attention kernel's hot loop; None if it has no loop.
        model_refusal: why there is none.
        whole_model: roofline of a whole workgroup, from its prologue to its stores; None without emulation.
        counts: what the models count: "dynamic", executed instructions, or "static", the loop's text.
        static_reason: why the counts are static.
        emulated: the dynamic counts; None if they are static.
        mnemonics: static counts of the hot loop.
        assembly: of every kernel by name; only when asked for.
    """

    target: str
    case: str
    plan: str
    kernels: tuple[KernelCode, ...]
    model: Roofline | None
    model_refusal: str
    whole_model: Roofline | None
    counts: str
    static_reason: str
    emulated: Emulated | None
    mnemonics: dict[str, int]
    assembly: dict[str, str] | None

    def as_dict(self) -> dict[str, Any]:
        """The fields for a document; the assembly only if it was asked for."""
        body = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.assembly is None:
            del body["assembly"]
        for name in ("model", "whole_model"):
            body[name] = None if body[name] is None else body[name].as_dict()
        return body


def _run_a_few(
    target: str, call: Callable[[], object]
) -> tuple[list[CompiledArtifact], list[EmulatedLaunch], str]:
    """Compiles every launch and emulates a few workgroups of each, or says why they could not be."""
    executor = EmulateExecutor(target, workgroups=a_few(_WORKGROUPS))
    try:
        with executing(executor):
            call()
    except EmulatorError as error:
        return compile_call(target, call), [], f"{type(error).__name__}: {error}"
    return [run.artifact for run in executor.runs], executor.runs, ""


def models(
    run: EmulatedLaunch, loop: Loop, target: Target, bytes_per_pass: float
) -> tuple[Roofline, Roofline, Emulated]:
    """Models of one pass and of one workgroup, from what all waves of all emulated workgroups executed."""
    counts, groups = run.result.counts, run.result.workgroups
    passes = loop.passes / run.artifact.num_warps
    kv_bytes = bytes_per_pass * passes
    executed = {"loop": loop.mnemonics, "whole": run.result.profile.mnemonics}
    # The counts are of all waves, so the model gets one wave here.
    totals = {
        name: InstructionMix(Counter({m: round(n) for m, n in mix.items()})) for name, mix in executed.items()
    }
    whole_bytes = kv_bytes + counts.vmem_bytes_stored
    return (
        roofline(totals["loop"], target, num_warps=1, hbm_bytes=kv_bytes).divided(passes),
        roofline(totals["whole"], target, num_warps=1, hbm_bytes=whole_bytes).divided(groups),
        Emulated(
            workgroups=groups,
            passes=passes / groups,
            wave_instructions=counts.wave_instructions / groups,
            loop_wave_instructions=sum(loop.mnemonics.values()) / groups,
            loaded_bytes=counts.vmem_bytes_loaded / groups,
            stored_bytes=counts.vmem_bytes_stored / groups,
            lds_bytes=(counts.lds_bytes_read + counts.lds_bytes_written) / groups,
            loop={name: n / loop.passes for name, n in loop.mnemonics.items()},
        ),
    )


def loop_model(runs: Sequence[EmulatedLaunch], bytes_per_pass: float, target: str) -> dict[str, Any] | None:
    """A roofline of the hot loop from what emulated workgroups executed; None if they passed none."""
    main = max(runs, key=lambda run: run.artifact.loop.mfma)
    if main.result.profile.hot_loop is None:
        return None
    model, _, _ = models(main, main.result.profile.hot_loop, get_target(target), bytes_per_pass)
    return model.as_dict()


def inspect_case(
    case: Case, target: str, *, with_assembly: bool = False
) -> tuple[Inspection, list[CompiledArtifact]]:
    """Compiles a call for a target, emulates a few of its workgroups, and models its hot loop.

    Raises:
        ValueError, TypeError: what the operation says to a call that it does not take.
    """
    inputs, tile_bytes = case.inputs(), cases_of(case).tile_bytes
    assert tile_bytes is not None
    artifacts, runs, static_reason = _run_a_few(target, inputs.call)
    main = max(artifacts, key=lambda a: a.loop.mfma)
    bytes_per_pass, words = tile_bytes(inputs, target)
    hardware = get_target(target)
    model = whole = emulated = None
    refusal = ""
    try:
        loop = next((run.result.profile.hot_loop for run in runs if run.artifact is main), None)
        if loop is not None:
            (run,) = (run for run in runs if run.artifact is main)
            model, whole, emulated = models(run, loop, hardware, bytes_per_pass)
        else:
            static_reason = static_reason or "none of the emulated workgroups went through the loop"
            model = roofline(main.loop, hardware, num_warps=main.num_warps, hbm_bytes=bytes_per_pass)
    except ValueError as error:
        refusal = str(error)
    return (
        Inspection(
            target=target,
            case=str(case),
            plan=words,
            kernels=tuple(KernelCode.of(a) for a in artifacts),
            model=model,
            model_refusal=refusal,
            whole_model=whole,
            counts="static" if emulated is None else "dynamic",
            static_reason=static_reason,
            emulated=emulated,
            mnemonics=dict(main.loop.mnemonics.most_common()),
            assembly={a.name: a.assembly for a in artifacts} if with_assembly else None,
        ),
        artifacts,
    )
