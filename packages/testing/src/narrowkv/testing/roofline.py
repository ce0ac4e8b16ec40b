"""A roofline of a hot loop from counted instructions: a model, never a measurement.

One pass of the loop keeps each of a compute unit's resources busy for some clocks: its share of HBM
bandwidth, the vector ALUs, the matrix units, the LDS. Whichever is busy longest bounds the loop. Latency, and
how well the resources overlap, are outside the model: it says what a loop can at best reach, and which
resource it leans on.

The counts are of a run in the emulator where there is one, else of the compiled text.

The figures are those of `narrowkv.runtime.targets`, with their sources.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace

from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch.artifact import InstructionMix
from narrowkv.runtime.targets import Figures, Target

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
