"""Runs the gfx942 and gfx950 assembly that Triton emits, on any CPU, with numpy alone.

Example:
    >>> program = load_program(compiled.asm["amdgcn"], lds_bytes=compiled.metadata.shared)
    >>> memory = Memory()
    >>> out = np.zeros(256, np.float32)
    >>> pointer = memory.map(out.view(np.uint8), name="out")
    >>> run(program, grid=(1, 1, 1), args=[pointer, 256], memory=memory).counts
"""

from .counts import DynamicCounts
from .errors import (
    DeadlockError,
    EmulatorError,
    HazardError,
    MalformedProgramError,
    MisalignedError,
    OutOfRangeError,
    RaceError,
    UninitialisedError,
    UnknownInstructionError,
)
from .launch import Result, run
from .loading import load_program
from .memory import Memory
from .parser import KernelArgument
from .profile import Loop, Profile
from .program import Program

__version__ = "0.1.0"

__all__ = [
    "DeadlockError", "DynamicCounts", "EmulatorError", "HazardError", "KernelArgument", "Loop",
    "MalformedProgramError", "Memory", "MisalignedError", "OutOfRangeError", "Profile", "Program",
    "RaceError", "Result", "UninitialisedError", "UnknownInstructionError", "load_program", "run",
]  # fmt: skip
