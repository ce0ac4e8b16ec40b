"""Which registers an instruction reads and writes, and which counter it increments.

Source: operand tables of the CDNA3 and CDNA4 ISA documents. Registers are bits of an integer: vector and
accumulation registers first, scalar registers from `SCALAR_BASE` on, so that overlap is one ``&``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .operands import parse_operand
from .parser import Instruction
from .program import Program
from .state import EXEC, M0, VCC
from .valu import CARRY
from .valu_ops import ACCUMULATING

SCALAR_BASE = 512
"""Bit of s0; v0 is bit 0."""

_NO_RESULT = re.compile(
    r"^(s_(cmp|cmpk|bitcmp|setreg|waitcnt|nop|barrier|endpgm|branch|cbranch|setprio|sleep|sched|icache|dcache|"
    r"ttracedata|sethalt|setkill|set_gpr)|v_nop|buffer_(wbl2|inv|wbinvl1))"
)
_READS_RESULT = re.compile(
    r"^(v_(fmac|mac|pk_fmac|dot\dc|writelane|swap|permlane\d+_swap)|s_(bitset|addk|mulk|cmov))"
)
_TWO_RESULTS = re.compile(r"^v_(swap_b32|permlane\d+_swap_b32|mad_[ui]64_[ui]32|div_scale_f\d+)$")
_MEMORY = re.compile(r"^(buffer|global|flat|scratch)_(load|store|atomic)_")
_TRANS = re.compile(r"^v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_(f16|f32|f64|legacy_f32)$")


@dataclass(frozen=True)
class Usage:
    """The effects of an instruction on registers and counters.

    Attributes:
        kind: ``valu``, ``mfma``, ``salu``, ``smem``, ``ds``, ``load``, ``store``, ``atomic``, ``to_lds`` (a
            load that writes LDS), ``writeback`` and ``invalidate`` (of caches), ``wait``, ``nop``,
            ``barrier``, ``branch`` or ``end``.
        reads, writes: register bits.
        is_flat: whether it counts in vmcnt and lgkmcnt.
        is_transcendental: whether the transcendental unit executes it.
    """

    kind: str
    reads: int
    writes: int
    is_flat: bool = False
    is_transcendental: bool = False

    @property
    def is_vector_memory(self) -> bool:
        """Whether it increments vmcnt."""
        return self.kind in ("load", "store", "atomic", "to_lds", "writeback")


def scalar_bits(register: int, count: int = 1) -> int:
    """Bits of scalar registers."""
    return ((1 << count) - 1) << (SCALAR_BASE + register)


VCC_BITS, EXEC_BITS, M0_BITS = scalar_bits(VCC, 2), scalar_bits(EXEC, 2), scalar_bits(M0)
SCALAR_BITS = scalar_bits(0, 128)
VECTOR_BITS = (1 << SCALAR_BASE) - 1


def operand_bits(text: str, inst: Instruction, program: Program) -> int:
    """Bits of the registers that an operand's text names; 0 for constants."""
    if text.startswith(("hwreg", "vmcnt", "lgkmcnt", "expcnt", "&", ".", "0x")):
        return 0
    operand = parse_operand(text, inst, program)
    if operand.kind == "v":
        return ((1 << operand.count) - 1) << operand.index
    return scalar_bits(operand.index, operand.count) if operand.kind == "s" else 0


def register_name(bits: int, program: Program) -> str:
    """The lowest register of some bits, as assembly text spells it."""
    lowest = (bits & -bits).bit_length() - 1
    if lowest >= SCALAR_BASE:
        number = lowest - SCALAR_BASE
        named = {VCC: "vcc_lo", VCC + 1: "vcc_hi", EXEC: "exec_lo", EXEC + 1: "exec_hi", M0: "m0"}
        return named.get(number, f"s{number}")
    return f"a{lowest - program.accum_offset}" if lowest >= program.accum_offset else f"v{lowest}"


def _kind(inst: Instruction) -> str:
    name = inst.name
    if name.startswith("v_"):
        return "mfma" if name.startswith("v_mfma_") else "valu"
    if name.startswith("ds_"):
        return "ds"
    memory = _MEMORY.match(name)
    if memory:
        if memory.group(2) == "load" and ("lds" in inst.modifiers or "_load_lds_" in name):
            return "to_lds"
        return memory.group(2)
    if name == "buffer_wbl2":
        return "writeback"
    if name.startswith("buffer_"):
        return "invalidate"
    if name.startswith("s_load_"):
        return "smem"
    if name.startswith(("s_branch", "s_cbranch")):
        return "branch"
    named = {"s_waitcnt": "wait", "s_nop": "nop", "s_barrier": "barrier", "s_endpgm": "end"}
    return named.get(name, "salu")


def returns_old_value(inst: Instruction) -> bool:
    """Whether an atomic writes what memory held to a register."""
    if inst.name.startswith("ds_"):
        return "_rtn_" in inst.name or inst.name.startswith("ds_wrxchg")
    return "sc0" in inst.modifiers or "glc" in inst.modifiers


def keeps_half(inst: Instruction) -> bool:
    """Whether the instruction writes a part of its result register and keeps the rest."""
    if inst.encoding == "sdwa":
        return inst.modifiers.get("dst_unused") == "UNUSED_PRESERVE"
    return "_d16" in inst.name or writes_high_half(inst)


def writes_high_half(inst: Instruction) -> bool:
    """Whether op_sel or SDWA moves the result to another position in its register."""
    if inst.encoding == "sdwa":
        return inst.modifiers.get("dst_sel", "DWORD") != "DWORD"
    selected = inst.modifiers.get("op_sel")
    if selected is None or inst.name.startswith(("v_pk_", "v_mfma_", "v_dot", "v_fma_mix")):
        return False
    bits = [int(item, 0) for item in selected.strip("[]").split(",")]
    return len(bits) == len(inst.operands) and bits[-1] == 1


def _result_positions(inst: Instruction, kind: str) -> tuple[int, ...]:
    name = inst.name
    if kind in ("store", "to_lds", "branch", "wait", "nop", "barrier", "end") or _NO_RESULT.match(name):
        return ()
    if kind == "ds":
        reads = name.startswith(("ds_read", "ds_bpermute", "ds_permute", "ds_swizzle"))
        return (0,) if reads or returns_old_value(inst) else ()
    if kind == "atomic":
        return (0,) if returns_old_value(inst) else ()
    return (0, 1) if name in CARRY or _TWO_RESULTS.match(name) else (0,)


def usage(inst: Instruction, program: Program) -> Usage:
    """The usage of one instruction."""
    kind, name = _kind(inst), inst.name
    if kind in ("wait", "nop", "barrier", "end", "writeback", "invalidate"):
        return Usage(kind, 0, 0)
    if kind == "branch":
        implicit = VCC_BITS if "vcc" in name else EXEC_BITS if "exec" in name else 0
        return Usage(kind, implicit, 0)
    bits = [operand_bits(text, inst, program) for text in inst.operands]
    results = _result_positions(inst, kind)
    reads = writes = 0
    keeps = bool(_READS_RESULT.match(name)) or name in ACCUMULATING or keeps_half(inst)
    for position, registers in enumerate(bits):
        if position in results:
            writes |= registers
            if keeps or (kind == "atomic" and name.startswith("buffer")):
                reads |= registers
        else:
            reads |= registers
    if name.startswith("v_div_fmas") or (name == "v_cndmask_b32" and len(bits) == 3):
        reads |= VCC_BITS
    if name.startswith("v_cmpx_") or name.endswith("_saveexec_b64"):
        writes |= EXEC_BITS
    if name.endswith("_saveexec_b64"):
        reads |= EXEC_BITS
    if kind == "to_lds":
        reads |= M0_BITS
    return Usage(kind, reads, writes, name.startswith("flat_"), bool(_TRANS.match(name)))
