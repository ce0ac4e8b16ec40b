"""Run single instructions on a bare wave, without a compiler."""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowkv.cdna_emulator import Memory, Result, load_program, run
from narrowkv.cdna_emulator.execution import Execution
from narrowkv.cdna_emulator.state import Waves

_TEXT = """
	.amdgcn_target "amdgcn-amd-amdhsa--{target}"
	.text
kernel:
{body}
	s_endpgm
	.section .rodata
	.amdhsa_kernel kernel
		.amdhsa_next_free_vgpr {vgprs}
		.amdhsa_accum_offset {accum}
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_user_sgpr_count 2
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .args: []
    .max_flat_workgroup_size: {threads}
    .wavefront_size: 64
...
	.end_amdgpu_metadata
"""


def assembly(target: str, lines: str, *, warps: int = 1, vgprs: int = 128, accum: int = 96) -> str:
    """The text of a kernel without arguments."""
    body = "\n".join(
        "\t" + line.strip() if not line.strip().endswith(":") else line for line in lines.splitlines()
    )
    return _TEXT.format(target=target, body=body, vgprs=vgprs, accum=accum, threads=64 * warps)


def execute(target: str, lines: str, v: dict[int, Any] | None = None, s: dict[int, int] | None = None, *,
            exec_mask: int | None = None, memory: Memory | None = None, waves: int = 1,
            hardware_sums: bool = False) -> Waves:  # fmt: skip
    """Run straight-line instructions; ``v`` and ``s`` give initial registers, any 32-bit dtype."""
    program = load_program(assembly(target, lines), lds_bytes=4096, hardware_sums=hardware_sums)
    execution = Execution(
        program, memory or Memory(), 0, 0, (waves, 1, 1), [(k, 0, 0) for k in range(waves)], copies=1,
        detect_races=False, turns=False, limit=1000,
    )  # fmt: skip
    w = execution.ready[0].waves
    for register, value in (v or {}).items():
        w.u[register][...] = np.asarray(value).view(np.uint32)
    for register, word in (s or {}).items():
        w.su[register][...] = np.uint32(word & 0xFFFFFFFF)
        w.scalar_written(register)
    if exec_mask is not None:
        w.sq[63][...] = np.uint64(exec_mask)
        w.refresh_exec()
    with np.errstate(all="ignore"):
        for block in program.blocks:
            for step in block.steps:
                step(w)
    return w


def launch(
    lines: str, host: Any, *, target: str = "gfx942", at: int = 2, warps: int = 1, lds_bytes: int = 1024,
    grid: tuple[int, int, int] = (1, 1, 1), readonly: bool = False, written: Any = None, **options: Any,
) -> Result:  # fmt: skip
    """Run a kernel of these lines, which find the address of the array ``host`` in ``s[at:at+1]``."""
    memory = Memory()
    pointer = memory.map(host.view(np.uint8), name="host", readonly=readonly, written=written)
    setup = f"s_mov_b32 s{at}, {pointer & 0xFFFFFFFF:#x}\ns_mov_b32 s{at + 1}, {pointer >> 32:#x}\n"
    program = load_program(assembly(target, setup + lines, warps=warps), lds_bytes=lds_bytes)
    return run(program, grid=grid, args=[], memory=memory, **options)
