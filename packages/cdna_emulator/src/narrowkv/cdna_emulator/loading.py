"""Parses a kernel's assembly and binds each instruction to the code that runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .convert import bind_convert
from .errors import EmulatorError, MalformedProgramError, UnknownInstructionError
from .lanes import CROSS_LANE
from .lds import bind_lds
from .matrix import bind_matrix
from .packed import bind_packed
from .parser import Assembly, Instruction, parse_assembly
from .program import Block, Program, Step
from .scalar import bind_scalar
from .ternary import bind_bitop3
from .valu import bind_valu
from .vmem import bind_vmem

TARGETS = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}  # LDS bytes of a compute unit

BRANCHES = {
    "s_branch": "always", "s_cbranch_scc0": "scc0", "s_cbranch_scc1": "scc1", "s_cbranch_vccz": "vccz",
    "s_cbranch_vccnz": "vccnz", "s_cbranch_execz": "execz", "s_cbranch_execnz": "execnz",
}  # fmt: skip


# Steps of ALU instructions by text and by what of a program they depend on: kernels share many lines.
_steps: dict[tuple[str, str, int, int, bool], Step] = {}
_MOST_STEPS = 1 << 16


def bind(inst: Instruction, program: Program) -> Step:
    """The step of an instruction that is not a branch.

    Raises:
        UnknownInstructionError: naming the instruction and its line.
    """
    if not inst.name.startswith(("v_", "s_")) or inst.name.startswith(("s_load", "v_mfma")):
        return _bind(inst, program)  # errors name the line of an access; matrix products are few
    key = inst.text, program.target, program.accum_offset, program.vgprs, program.hardware_sums
    step = _steps.get(key)
    if step is None:
        if len(_steps) >= _MOST_STEPS:
            _steps.clear()
        step = _steps[key] = _bind(inst, program)
    return step


def _bind(inst: Instruction, program: Program) -> Step:
    name, step = inst.name, None
    try:
        if name.startswith("v_mfma_"):
            step = bind_matrix(inst, program)
        elif name in CROSS_LANE:
            step = CROSS_LANE[name](inst, program)
        elif name == "v_bitop3_b32" or name == "v_bitop3_b16":
            step = bind_bitop3(inst, program)
        elif name.startswith("v_"):
            step = bind_convert(inst, program) or bind_packed(inst, program) or bind_valu(inst, program)
        if step is None and name.startswith(("s_", "buffer_", "v_nop")):
            step = bind_scalar(inst, program)
        if step is None and name.startswith("ds_"):
            step = bind_lds(inst, program)
        if step is None and name.startswith(("buffer_", "global_", "flat_", "scratch_")):
            step = bind_vmem(inst, program)
    except (IndexError, KeyError, ValueError) as error:
        raise UnknownInstructionError(
            f"operands of {name} are not of a known form: {error}",
            kernel=program.kernel_name, line=inst.line, source=inst.text,
        ) from error  # fmt: skip
    if step is None:
        raise UnknownInstructionError(
            f"instruction {name} is not implemented for {program.target}",
            kernel=program.kernel_name, line=inst.line, source=inst.text,
        )  # fmt: skip
    return step


def _entry(assembly: Assembly) -> int:
    """Index of the first instruction.

    With arguments preloaded into scalar registers the code starts with a prologue that loads the same
    registers for firmware that cannot preload. Firmware that can starts after the prologue, at the target of
    its branch.
    """
    start = assembly.labels.get(assembly.kernel_name, 0)
    if assembly.descriptor.get("user_sgpr_kernarg_preload_length", 0) == 0:
        return start
    for inst in assembly.instructions[start:]:
        if inst.name == "s_branch":
            return assembly.labels[inst.operands[0]]
        if not inst.name.startswith(("s_load_dword", "s_waitcnt", "s_nop")):
            break
    return start


def load_program(
    asm_text: str, *, lds_bytes: int | None = None, hardware_sums: bool = False, lazy: bool = False
) -> Program:
    """Parse a kernel's assembly and bind each instruction once.

    Args:
        asm_text: what ``compiled.asm["amdgcn"]`` holds.
        lds_bytes: LDS of a workgroup, which Triton keeps in ``compiled.metadata.shared`` and not in the text.
            Default: the size in the text, or all of the target's LDS if that is 0.
        hardware_sums: form the sums of matrix instructions as CDNA3 does (see `matrix_sums`), which is slow;
            otherwise in fp64, rounded once. Instructions of gfx950 with the same formats are assumed to add
            in the same way; f8f6f4, integer and fp64 instructions are not changed.
        lazy: leave binding to the first run in the numpy engine, which then raises the errors of binding; the
            compiled engine needs none.

    Returns:
        The program. It holds no state and can be run many times.

    Raises:
        TypeError: if ``asm_text`` is not a string.
        ValueError: if ``lds_bytes`` is negative or more than the target has.
        MalformedProgramError: if the text is not a kernel's.
        EmulatorError: if the kernel is not for a known target.
        UnknownInstructionError: if it has an instruction that is not implemented.

    Example:
        >>> from narrowkv.cdna_emulator.sample import DOUBLE  # the text of a kernel
        >>> program = load_program(DOUBLE, lds_bytes=0)
        >>> program.kernel_name, program.target
        ('double', 'gfx942')
    """
    if not isinstance(asm_text, str):
        raise TypeError(f"asm_text must be a str, got {type(asm_text).__name__}")
    if lds_bytes is not None and not 0 <= lds_bytes <= max(TARGETS.values()):
        raise ValueError(f"lds_bytes must be within 0..{max(TARGETS.values())}, got {lds_bytes}")
    with _malformed():
        program = _load(asm_text, lds_bytes, hardware_sums)
        if not lazy:
            program.bind()
        return program


@contextmanager
def _malformed() -> Iterator[None]:
    """Says of an error of Python that the text caused it."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise MalformedProgramError(
            f"the text is not one that LLVM prints for a kernel: {type(error).__name__}: {error}"
        ) from error


def _load(asm_text: str, lds_bytes: int | None, hardware_sums: bool) -> Program:
    assembly = parse_assembly(asm_text)
    if assembly.target not in TARGETS:
        raise EmulatorError(f"target {assembly.target} is not known: expected one of {', '.join(TARGETS)}")
    limit = TARGETS[assembly.target]
    if lds_bytes is None:
        lds_bytes = assembly.descriptor.get("group_segment_fixed_size", 0) or limit
    if not 0 <= lds_bytes <= limit:
        raise MalformedProgramError(
            f"LDS must be within 0..{limit} bytes for {assembly.target}, got {lds_bytes}",
            kernel=assembly.kernel_name,
        )
    descriptor, metadata = assembly.descriptor, assembly.metadata
    wave = int(metadata.get(".wavefront_size", 64))
    if wave != 64:
        raise EmulatorError(f"waves must have 64 lanes, got {wave}", kernel=assembly.kernel_name)
    vgprs = max(descriptor.get("next_free_vgpr", 512), 4)
    program = Program(
        target=assembly.target, kernel_name=assembly.kernel_name, kernarg=assembly.arguments,
        kernarg_bytes=int(metadata.get(".kernarg_segment_size", descriptor.get("kernarg_size", 0))),
        num_warps=int(metadata.get(".max_flat_workgroup_size", 64)) // 64, lds_bytes=lds_bytes, vgprs=vgprs,
        accum_offset=descriptor.get("accum_offset", vgprs),
        scratch_bytes=descriptor.get("private_segment_fixed_size", 0), descriptor=descriptor,
        hardware_sums=hardware_sums,
    )  # fmt: skip
    _check_sizes(program)
    _build_blocks(assembly, program)
    return program


# Limits of the hardware: registers of a lane and waves of a workgroup. And, beyond any use, bytes of private
# memory of a lane and of the argument block.
_LIMITS = {
    "vgprs": 512,
    "accum_offset": 512,
    "num_warps": 16,
    "scratch_bytes": 1 << 20,
    "kernarg_bytes": 1 << 16,
}


def _check_sizes(program: Program) -> None:
    """Checks the resources that the descriptor and the metadata ask for."""
    wrong = [
        f"{name} must be within 0..{limit}, got {getattr(program, name)}"
        for name, limit in _LIMITS.items()
        if not 0 <= getattr(program, name) <= limit
    ]
    if program.num_warps == 0:
        wrong.append("num_warps must be at least 1, got 0")
    for k, argument in enumerate(program.kernarg):
        hidden = argument.kind.startswith("hidden_")
        end = argument.offset + argument.size
        sizes = (8,) if argument.kind == "global_buffer" else (1, 2, 4, 8)
        inside = argument.offset >= 0 and (hidden or end <= program.kernarg_bytes)
        if argument.size not in sizes or not inside:
            wrong.append(
                f"argument {k} must have {' or '.join(map(str, sizes))} bytes within the "
                f"{program.kernarg_bytes} of the argument block, got {argument.size} at {argument.offset}"
            )
    for name, number in program.descriptor.items():
        limit = 64 if name.startswith(("user_sgpr_", "system_sgpr_")) else 1 << 31
        if not 0 <= number <= limit:
            wrong.append(f".amdhsa_{name} must be within 0..{limit}, got {number}")
    if wrong:
        raise MalformedProgramError("; ".join(wrong), kernel=program.kernel_name)


def _build_blocks(assembly: Assembly, program: Program) -> None:
    code, first = assembly.instructions, _entry(assembly)
    starts = {first, 0}
    for at, inst in enumerate(code):
        if inst.name in BRANCHES:
            if inst.operands[0] not in assembly.labels:
                raise UnknownInstructionError(
                    f"branch target {inst.operands[0]} is not known",
                    kernel=program.kernel_name, line=inst.line, source=inst.text,
                )  # fmt: skip
            starts |= {at + 1, assembly.labels[inst.operands[0]]}
        elif inst.name in ("s_barrier", "s_endpgm"):
            starts.add(at + 1)
    order = sorted(start for start in starts if start < len(code))
    index = {start: k for k, start in enumerate(order)}
    bodies: list[list[Instruction]] = []
    for start, stop in zip(order, [*order[1:], len(code)], strict=True):
        block = Block(instructions=code[start:stop])
        last = block.last
        body = block.instructions
        if last.name in BRANCHES:
            block.end, block.target = BRANCHES[last.name], index[assembly.labels[last.operands[0]]]
            body = body[:-1]
        elif last.name in ("s_barrier", "s_endpgm"):
            block.end = {"s_barrier": "barrier", "s_endpgm": "exit"}[last.name]
            body = body[:-1]
        bodies.append(body)
        program.blocks.append(block)
    program.entry = index[first]

    @_malformed()
    def fill() -> None:
        for block, body in zip(program.blocks, bodies, strict=True):
            block.steps = [bind(inst, program) for inst in body]

    program.unbound = fill
