"""A compiled engine: runs a program's instructions as pre-decoded operations of 64 lanes, written in C.

`launch.run` chooses it by ``engine="compiled"`` or ``"auto"``. It computes what the numpy engine computes,
bit for bit except for the payload of a NaN that two NaNs make, 6 to 15 times as fast on each core. It
checks bounds, alignment, LDS limits and endless loops; races, hazards and uninitialised values are found
by the numpy engine only.

The library is built at first use by the C compiler that is found; `building.build_library` is also for other
packages that need a library of their own.
"""

from __future__ import annotations

from narrowkv.cdna_emulator.program import Program

from .building import BuildError, build_library
from .library import library
from .operations import UntranslatableError
from .translation import translated

__all__ = ["BuildError", "build_library", "engine_of", "engine_refusal"]


def engine_refusal(program: Program) -> str | None:
    """Why the compiled engine cannot run a program: an instruction, or no compiler. None if it can."""
    try:
        library()
        translated(program)
    except (BuildError, UntranslatableError) as error:
        return str(error)
    return None


def engine_of(program: Program) -> str:
    """The engine that ``run(..., engine="auto")`` takes without further checks: "compiled" or "numpy"."""
    return "numpy" if engine_refusal(program) else "compiled"
