"""Figures of a compiled AMD kernel: registers, LDS, occupancy, the instructions of its hot loop."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.targets import Target

_METADATA = re.compile(r"^\s*-?\s*\.(\w+):\s*(.+?)\s*$", re.MULTILINE)
_LABEL = re.compile(r"^([.\w$]+):")
_BRANCH = re.compile(r"^s_c?branch\w*\s+([.\w$]+)")
# A comment of LLVM's: this vector register keeps spilled scalars in its lanes.
_LANES_OF_SCALARS = re.compile(r"implicit-def: \$vgpr(\d+) : SGPR spill to VGPR lane")
_LANE_MOVE = re.compile(r"^v_(?:readlane|writelane)_b32\s.*\bv(\d+)\b")
_INSTRUCTION = re.compile(r"^[a-z_][a-z0-9_]*$")

_TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
_VECTOR_MEMORY = ("buffer_", "global_", "flat_")


@dataclass(frozen=True)
class Registers:
    """Registers of a wave, as the code object says; `vgprs` counts accumulation registers (`agprs`), too."""

    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int


@dataclass(frozen=True)
class InstructionMix:
    """Static instruction counts of a piece of code, by mnemonic."""

    mnemonics: Counter[str] = field(default_factory=Counter)

    def total(self, *prefixes: str) -> int:
        """Instructions whose mnemonic starts with one of `prefixes`; all of them when none is given."""
        return sum(n for name, n in self.mnemonics.items() if not prefixes or name.startswith(prefixes))

    @property
    def mfma(self) -> int:
        """Matrix instructions."""
        return self.total("v_mfma", "v_smfmac", "v_wmma", "v_swmmac")

    @property
    def transcendental(self) -> int:
        """Quarter- or eighth-rate vector instructions."""
        return self.total(*_TRANSCENDENTAL)

    @property
    def converts(self) -> int:
        """Native format conversions."""
        return self.total("v_cvt_")

    @property
    def valu(self) -> int:
        """Vector ALU instructions without matrix instructions."""
        return self.total("v_") - self.mfma

    @property
    def lds(self) -> int:
        """LDS instructions."""
        return self.total("ds_")

    @property
    def vector_loads(self) -> int:
        """Loads from memory by vector units."""
        return sum(n for m, n in self.mnemonics.items() if m.startswith(_VECTOR_MEMORY) and "load" in m)

    @property
    def loaded_bytes_per_lane(self) -> int:
        """Bytes that one lane loads from memory."""
        return sum(
            n * _load_width(m)
            for m, n in self.mnemonics.items()
            if m.startswith(_VECTOR_MEMORY) and "load" in m
        )


def _load_width(mnemonic: str) -> int:
    match = re.search(r"dwordx(\d)|(dword)|([su]?byte)|([su]?short)", mnemonic)
    if match is None:
        return 0
    if match.group(1):
        return 4 * int(match.group(1))
    return 4 if match.group(2) else 1 if match.group(3) else 2


def _instructions(lines: Iterable[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in lines:
        word = line.split(None, 1)[0] if line.strip() else ""
        if _INSTRUCTION.match(word):
            counts[word] += 1
    return counts


def _strip(assembly: str) -> list[str]:
    return [re.split(r";|//", line, maxsplit=1)[0].strip() for line in assembly.splitlines()]


def _code_lines(assembly: str) -> list[str]:
    lines = _strip(assembly)
    end = next(
        (i for i, line in enumerate(lines) if line.startswith(".section") and "rodata" in line), len(lines)
    )
    return lines[:end]


def _loops(lines: list[str]) -> list[tuple[int, int]]:
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := _LABEL.match(line))}
    loops = []
    for i, line in enumerate(lines):
        match = _BRANCH.match(line)
        if match and labels.get(match.group(1), i) < i:
            loops.append((labels[match.group(1)], i))
    return loops


def _hot_loop(lines: list[str]) -> range:
    """Lines of the loop with the most matrix instructions, of several the shortest; empty if none has any.

    A loop that holds another one with matrix instructions is not it. The compiler may also place blocks so
    that a jump back spans two loops, which follow each other.
    """
    loops = [
        (begin, end, mfma)
        for begin, end in _loops(lines)
        if (mfma := InstructionMix(_instructions(lines[begin : end + 1])).mfma)
    ]
    inner = [
        (mfma, begin - end, range(begin, end + 1))
        for begin, end, mfma in loops
        if not any(begin < other and last < end for other, last, _ in loops)
    ]
    return max(inner, key=lambda found: found[:2])[2] if inner else range(0)


def hot_loop(assembly: str) -> InstructionMix:
    """The loop that holds the most matrix instructions, innermost first; empty when no loop has any."""
    lines = _code_lines(assembly)
    return InstructionMix(_instructions(lines[i] for i in _hot_loop(lines)))


def spills_in_loops(assembly: str) -> int:
    """Instructions that move spilled vector registers in any loop, or spilled scalars in the hot loop.

    Vector registers are spilled to memory or AGPRs, scalars to lanes of a vector register.
    """
    lines = _code_lines(assembly)
    texts = assembly.splitlines()
    lanes = set(_LANES_OF_SCALARS.findall(assembly))
    inside = {i for begin, end in _loops(lines) for i in range(begin, end + 1)}
    vectors = sum(lines[i].startswith("scratch_") or "Reload Reuse" in texts[i] for i in inside)
    moves = (_LANE_MOVE.match(lines[i]) for i in _hot_loop(lines))
    return vectors + sum(move is not None and move[1] in lanes for move in moves)


@dataclass(frozen=True)
class CompiledArtifact:
    """One kernel compiled for one target, with the launch it was compiled for.

    Attributes:
        name: the kernel's name.
        target: what it was compiled for.
        grid: the launch grid.
        args: the launch's runtime arguments, nested tuples flattened, those that the compiler folded into the
            code left
            out: exactly the explicit arguments of the code object, in order.
        assembly: AMDGPU assembly text.
        code_object: the linked ELF.
        num_warps: waves in a workgroup.
        lds_bytes: LDS of a workgroup.
        registers: register use of a wave.
    """

    name: str
    target: Target
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    assembly: str
    code_object: bytes
    num_warps: int
    lds_bytes: int
    registers: Registers

    @classmethod
    def from_triton(
        cls, compiled: Any, *, target: Target, grid: tuple[int, ...], args: tuple[Any, ...]
    ) -> CompiledArtifact:
        """Reads the artifact that Triton's compiler returned."""
        assembly = compiled.asm["amdgcn"]
        meta: dict[str, str] = dict(_METADATA.findall(assembly))
        registers = Registers(
            vgprs=int(meta["vgpr_count"]),
            agprs=int(meta.get("agpr_count", 0)),
            sgprs=int(meta["sgpr_count"]),
            vgpr_spills=int(meta["vgpr_spill_count"]),
            sgpr_spills=int(meta["sgpr_spill_count"]),
            scratch_bytes=int(meta["private_segment_fixed_size"]),
        )
        return cls(
            name=compiled.metadata.name,
            target=target,
            grid=grid,
            args=_explicit_args(compiled.src.signature, compiled.src.constants, args),
            assembly=assembly,
            code_object=compiled.asm["hsaco"],
            num_warps=compiled.metadata.num_warps,
            lds_bytes=compiled.metadata.shared,
            registers=registers,
        )

    @property
    def loop(self) -> InstructionMix:
        """Static instruction mix of the hot loop, without the prologue of a software-pipelined one."""
        return hot_loop(self.assembly)

    @property
    def spills_in_loops(self) -> int:
        """Instructions inside loops that move spilled registers."""
        return spills_in_loops(self.assembly)

    @property
    def whole(self) -> InstructionMix:
        """Static instruction mix of the whole kernel."""
        return InstructionMix(_instructions(_code_lines(self.assembly)))

    @property
    def waves_per_simd(self) -> int:
        """Waves that fit on one SIMD by registers and LDS, the hardware's own limit of 8 included.

        Raises:
            UnsupportedError: there are no hardware figures of the target.
        """
        figures = self.target.figures
        if figures is None:
            raise UnsupportedError(f"target {self.target.name} has no hardware figures")
        granule = figures.register_granule
        granted = -(-max(self.registers.vgprs, 1) // granule) * granule
        by_registers = min(figures.max_waves_per_simd, figures.registers_per_simd // granted)
        if self.lds_bytes == 0:
            return by_registers
        workgroups = figures.lds_bytes // self.lds_bytes
        return min(by_registers, max(workgroups * self.num_warps // figures.simds_per_unit, 1))


def _explicit_args(
    signature: dict[str, Any], constants: dict[Any, Any], args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The launch arguments that survive specialisation, nested tuples flattened in order."""
    kinds = list(signature.values())[: len(args)]
    flat: list[Any] = []

    def walk(kind: Any, value: Any) -> None:
        if isinstance(kind, tuple | list):
            for inner_kind, inner in zip(kind, value, strict=True):
                walk(inner_kind, inner)
        elif kind != "constexpr":
            flat.append(value)

    for kind, value in zip(kinds, args, strict=True):
        walk(kind, value)
    return tuple(flat)
