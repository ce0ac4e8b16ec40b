"""Runs the gfx942 and gfx950 assembly that Triton emits, on any CPU, with numpy alone.

Example:
    >>> import numpy as np
    >>> from narrowkv.cdna_emulator.sample import DOUBLE  # the text of a kernel, as in compiled.asm["amdgcn"]
    >>> program = load_program(DOUBLE)
    >>> memory = Memory()
    >>> x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    >>> args = [memory.map(x.view(np.uint8), name="x"), memory.map(out.view(np.uint8), name="out")]
    >>> result = run(program, grid=(1, 1, 1), args=args, memory=memory)
    >>> result.counts.wave_instructions, out[3].item()
    (8.0, 6.0)
"""

from .compiled import engine_of, engine_refusal
from .counts import DynamicCounts
from .errors import (
    AcquireError,
    DeadlockError,
    EmulatorError,
    EngineUnavailableError,
    HazardError,
    MalformedProgramError,
    MisalignedError,
    OutOfRangeError,
    RaceError,
    ReleaseError,
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
    "AcquireError", "DeadlockError", "DynamicCounts", "EmulatorError", "EngineUnavailableError",
    "HazardError",
    "KernelArgument", "Loop", "MalformedProgramError", "Memory", "MisalignedError", "OutOfRangeError",
    "Profile", "Program", "RaceError", "ReleaseError", "Result", "UninitialisedError",
    "UnknownInstructionError", "engine_of", "engine_refusal", "load_program", "run",
]  # fmt: skip
