"""Figures of the timing model: one entry for each, with its source.

Sources, by their letter in `SOURCES`: see `SOURCE_NAMES`. A figure without a measurement behind it has the
letter ``A`` (assumed). The clock under load is a fit to published efficiencies and rates of matrix
multiplications.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Machine:
    """One chip. Times are clocks of a compute unit; rates are bytes a clock of one compute unit.

    Attributes:
        name: the target.
        chip: the chip.
        compute_units: compute units of the chip.
        simds: SIMDs of a compute unit.
        waves_per_simd: waves that a SIMD holds at most.
        registers: vector registers of a SIMD lane, shared by its waves.
        register_granule: registers are allocated to waves in multiples of this.
        lds_bytes: LDS of a compute unit.
        lds_granule: LDS is allocated to workgroups in multiples of this.
        issue: clocks between two issues of one wave, and between two of one kind on a SIMD.
        valu: clocks of a vector ALU instruction.
        transcendental: the same for exp, log, rcp, rsq, sqrt, sin and cos.
        multiply: the same for 32-bit integer multiplications.
        matrix_shadow: clocks after a matrix instruction without another vector instruction on its SIMD.
        packed_waits: whether packed fp32 arithmetic waits for the matrix unit to be idle.
        branch: clocks of a branch that is taken.
        barrier: clocks from the last wave's arrival to the next instruction.
        scalar_load: clocks until the result of a scalar load arrives.
        lds_read: bytes a clock that LDS reads without bank conflicts.
        lds_write: the same for writes.
        lds_return: bytes a clock that LDS returns to a pair of SIMDs.
        lds_latency: clocks from service to result.
        lds_queue: LDS instructions of a pair of SIMDs that wait for service before issue stops.
        l1: bytes a clock of the vector cache.
        l1_bytes: its size.
        l1_line: bytes of its lines.
        in_flight: bytes that a compute unit can have in flight beyond the vector cache.
        memory_latency: clocks of a load that misses the vector cache and that L2 serves, under load.
        hbm_latency: the same where HBM serves it.
        l2: bytes a clock from L2 to one compute unit.
        xcds: dies that the compute units are spread over; workgroup n of a launch runs on die n % xcds.
        l2_bytes: size of L2, of which each die has one.
        mall_bytes: size of the Infinity Cache between L2 and HBM, which all dies share.
        mall_bytes_per_s: its bandwidth.
        mall_latency: as `memory_latency`, of a load that the Infinity Cache serves.
        hbm_bytes_per_s: the HBM bandwidth that streaming kernels reach.
        clock_idle: GHz with idle matrix units.
        clock_slope: GHz that the clock loses when all matrix units are busy; it falls in proportion.
        clock_peak: GHz of the data sheet's peak rates.
    """

    name: str
    chip: str
    compute_units: int
    simds: int
    waves_per_simd: int
    registers: int
    register_granule: int
    lds_bytes: int
    lds_granule: int
    issue: int
    valu: int
    transcendental: int
    multiply: int
    matrix_shadow: int
    packed_waits: bool
    branch: int
    barrier: int
    scalar_load: int
    lds_read: int
    lds_write: int
    lds_return: int
    lds_latency: int
    lds_queue: int
    l1: int
    l1_bytes: int
    l1_line: int
    in_flight: int
    memory_latency: int
    hbm_latency: int
    l2: int
    xcds: int
    l2_bytes: int
    mall_bytes: int
    mall_bytes_per_s: float
    mall_latency: int
    hbm_bytes_per_s: float
    clock_idle: float
    clock_slope: float
    clock_peak: float

    def clock(self, matrix_share: float) -> float:
        """The clock in Hz at a share of busy matrix units."""
        return (self.clock_idle - self.clock_slope * matrix_share) * 1e9

    def workgroups_per_unit(self, warps: int, registers: int, lds_bytes: int) -> int:
        """Workgroups that one compute unit holds at a time; at least 1."""
        granted = -(-max(registers, 1) // self.register_granule) * self.register_granule
        waves = min(self.registers // granted, self.waves_per_simd) if granted <= self.registers else 1
        count = waves * self.simds // warps
        if lds_bytes:
            count = min(count, self.lds_bytes // (-(-lds_bytes // self.lds_granule) * self.lds_granule))
        return max(count, 1)


_COMMON = {
    "simds": 4, "waves_per_simd": 8, "registers": 512, "register_granule": 8, "issue": 4, "valu": 4,
    "multiply": 16, "branch": 16, "barrier": 16, "scalar_load": 200, "lds_latency": 64, "lds_queue": 8,
    "l1": 64, "l1_bytes": 32 * 1024, "l1_line": 128, "in_flight": 44 * 1024,
    "memory_latency": 1000, "hbm_latency": 1500,
    "l2": 64, "xcds": 8, "l2_bytes": 4 * 2**20,
    "mall_bytes": 256 * 2**20, "mall_bytes_per_s": 11_900_000_000_000, "mall_latency": 1330,
}  # fmt: skip

MACHINES: Mapping[str, Machine] = MappingProxyType({
    "gfx942": Machine(
        name="gfx942", chip="MI300X", compute_units=304, lds_bytes=64 * 1024, lds_granule=512,
        transcendental=16, matrix_shadow=4, packed_waits=False, lds_read=128, lds_write=128, lds_return=128,
        hbm_bytes_per_s=4.13e12, clock_idle=1.95, clock_slope=0.87,
        clock_peak=2.1, **_COMMON,
    ),
    "gfx950": Machine(
        name="gfx950", chip="MI355X", compute_units=256, lds_bytes=160 * 1024, lds_granule=1280,
        transcendental=8, matrix_shadow=8, packed_waits=True, lds_read=256, lds_write=128, lds_return=128,
        hbm_bytes_per_s=6.44e12, clock_idle=2.25, clock_slope=0.87,
        clock_peak=2.4, **_COMMON,
    ),
})  # fmt: skip
"""The machines that the model knows, by target."""

SOURCE_NAMES = {
    "I": "AMD CDNA3 and CDNA4 ISA documents and architecture white papers",
    "L": "LLVM AMDGPU usage guide",
    "G": "ROCm/gfx950-gluon-tutorials, documents and thread traces",
    "S": "nod-ai/shark-ai, LDS and occupancy guides",
    "P": "tingqli/pyhip, docs/mem_latency.md",
    "C": "chips and cheese, MI300X measurements",
    "F": "fitted to the matrix multiplications of G",
    "A": "assumed",
}

SOURCES = {
    "compute_units": "I", "simds": "I", "waves_per_simd": "I", "registers": "I", "register_granule": "L",
    "lds_bytes": "I", "lds_granule": "L", "issue": "I", "valu": "I, C", "transcendental": "C, G",
    "multiply": "I",
    "matrix_shadow": "G, AMD's matrix instruction calculator", "packed_waits": "G", "branch": "A",
    "barrier": "F (rows 10 and 19)", "scalar_load": "A", "lds_read": "S, G",
    "lds_write": "S, G", "lds_return": "G (one wave alone: 8 clocks for 1024 bytes)", "lds_latency": "P, G",
    "lds_queue": "G", "l1": "G", "l1_bytes": "I", "l1_line": "I", "in_flight": "G", "memory_latency": "G",
    "hbm_latency": "F (row 14)",
    "l2": "I", "xcds": "I", "l2_bytes": "I", "mall_bytes": "I",
    "mall_bytes_per_s": "C (MI300X; assumed for MI355X)",
    "mall_latency": "C (idle latencies of L2, Infinity Cache and HBM, in proportion)",
    "hbm_bytes_per_s": "G (best streams)", "clock_idle": "F", "clock_slope": "F",
    "clock_peak": "I",
}  # fmt: skip
"""Source of each figure, by the letters of `SOURCE_NAMES`."""
