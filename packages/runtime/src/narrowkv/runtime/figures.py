"""Hardware figures of one chip of each target, and where each figure comes from.

This is the only file with hardware figures. They feed static models and are never measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["H100", "MI300X", "MI355X", "Figures"]


@dataclass(frozen=True)
class Figures:
    """Hardware figures of one chip, for static models.

    A compute unit is a CU (AMD) or an SM (NVIDIA); each has four SIMDs.

    Attributes:
        compute_units: compute units of the chip.
        clock_hz: the clock that the peak rates are quoted at.
        hbm_bytes_per_s: peak HBM bandwidth.
        lds_bytes: LDS or shared memory of one compute unit.
        lds_bytes_per_clk: LDS bandwidth of one compute unit.
        lds_granule_bytes: LDS is allocated to workgroups in multiples of this.
        bf16_flops_per_clk: dense bf16 and fp16 matrix flops per clock of one compute unit.
        fp8_flops_per_clk: dense FP8 matrix flops per clock of one compute unit.
        fp4_flops_per_clk: dense FP4 matrix flops per clock of one compute unit; 0 if there is no such
            instruction.
        valu_clk: clocks that one SIMD spends on an ordinary vector instruction of one wave.
        transcendental_clk: the same for exp2, log2, rcp, rsq.
        int_mul_clk: the same for a 32-bit integer multiply.
        simds_per_unit: SIMDs of one compute unit.
        registers_per_simd: 32-bit vector registers per lane that the waves of one SIMD share (AGPRs
            included).
        register_granule: registers are allocated to waves in multiples of this.
        max_registers_per_wave: the most that one wave can have.
        max_waves_per_simd: the most waves that one SIMD holds.
        xcd_units: compute units of an XCD (a die with an L2 of its own) of the chips of this architecture;
            empty where the chip has one L2.
        sources: where the figures come from.
    """

    compute_units: int
    clock_hz: float
    hbm_bytes_per_s: float
    lds_bytes: int
    lds_bytes_per_clk: int
    lds_granule_bytes: int
    bf16_flops_per_clk: int
    fp8_flops_per_clk: int
    fp4_flops_per_clk: int
    valu_clk: int
    transcendental_clk: int
    int_mul_clk: int
    simds_per_unit: int
    registers_per_simd: int
    register_granule: int
    max_registers_per_wave: int
    max_waves_per_simd: int
    xcd_units: tuple[int, ...]
    sources: tuple[str, ...]

    @property
    def xcds(self) -> int:
        """XCDs that the compute units are spread over, of whole chips and of partitions."""
        return next((self.compute_units // units for units in self.xcd_units
                     if self.compute_units % units == 0), 1)  # fmt: skip

    @property
    def peak_bf16_flops_per_s(self) -> float:
        """Dense bf16 matrix flops per second of the chip."""
        return self.compute_units * self.clock_hz * self.bf16_flops_per_clk

    @property
    def peak_fp8_flops_per_s(self) -> float:
        """Dense FP8 matrix flops per second of the chip."""
        return self.compute_units * self.clock_hz * self.fp8_flops_per_clk


MI300X = Figures(
    compute_units=304,
    clock_hz=2.1e9,
    hbm_bytes_per_s=5.3e12,
    lds_bytes=64 * 1024,
    lds_bytes_per_clk=128,
    lds_granule_bytes=512,
    bf16_flops_per_clk=2048,
    fp8_flops_per_clk=4096,
    fp4_flops_per_clk=0,
    valu_clk=4,
    transcendental_clk=16,
    int_mul_clk=16,
    simds_per_unit=4,
    registers_per_simd=512,
    register_granule=8,
    max_registers_per_wave=512,
    max_waves_per_simd=8,
    xcd_units=(38, 20),  # MI300X, MI300A, MI325X: 38; MI308X: 20
    sources=(
        "AMD Instinct MI300X data sheet: CUs, peak clock, HBM bandwidth, peak matrix rates",
        "AMD CDNA 3 architecture white paper: matrix flops per clock per CU, LDS size and bandwidth, XCDs",
        "AMD CDNA 3 instruction set architecture guide: registers, waves per SIMD, instruction issue",
        "LLVM AMDGPU usage guide: LDS and VGPR allocation granules",
    ),
)

MI355X = Figures(
    compute_units=256,
    clock_hz=2.4e9,
    hbm_bytes_per_s=8.0e12,
    lds_bytes=160 * 1024,
    lds_bytes_per_clk=256,
    lds_granule_bytes=1280,
    bf16_flops_per_clk=4096,
    fp8_flops_per_clk=8192,
    fp4_flops_per_clk=16384,
    valu_clk=4,
    transcendental_clk=8,
    int_mul_clk=16,
    simds_per_unit=4,
    registers_per_simd=512,
    register_granule=8,
    max_registers_per_wave=512,
    max_waves_per_simd=8,
    xcd_units=(32,),
    sources=(
        "AMD Instinct MI355X data sheet: CUs, peak clock, HBM bandwidth, peak matrix rates",
        "AMD CDNA 4 architecture white paper: matrix, transcendental and LDS rates per CU, LDS size, XCDs",
        "AMD CDNA 4 instruction set architecture guide: registers, waves per SIMD, instruction issue",
        "LLVM AMDGPU usage guide: LDS and VGPR allocation granules",
    ),
)

H100 = Figures(
    compute_units=132,
    clock_hz=1.83e9,  # boost clock for bf16 and FP8 tensor work, which the 989 TFLOP/s are quoted at
    hbm_bytes_per_s=3.35e12,  # H200: 4.8e12, all else alike
    lds_bytes=228 * 1024,
    lds_bytes_per_clk=128,
    lds_granule_bytes=128,
    bf16_flops_per_clk=4096,
    fp8_flops_per_clk=8192,
    fp4_flops_per_clk=0,
    valu_clk=1,
    transcendental_clk=8,
    int_mul_clk=2,
    simds_per_unit=4,
    registers_per_simd=512,
    register_granule=8,
    max_registers_per_wave=255,
    max_waves_per_simd=16,
    xcd_units=(),
    sources=(
        "NVIDIA H100 architecture white paper: SMs, clocks, HBM bandwidth, tensor rates, shared memory",
        "CUDA C++ Programming Guide, arithmetic throughput of compute capability 9.0: issue rates",
        "CUDA C++ Programming Guide, technical specifications of compute capability 9.0: registers, warps",
    ),
)
