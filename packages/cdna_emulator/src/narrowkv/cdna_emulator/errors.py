"""Errors of emulated code.

Every error that a running kernel can cause is an :class:`EmulatorError`. It knows the kernel, the line of
the assembly, and, where there are any, the workgroup, wave, lane and address.
"""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """A kernel did something it must not do, or something this emulator cannot do.

    Attributes:
        message: what went wrong, without the place.
        kernel: name of the kernel.
        line: line of the assembly text, counted from 1; 0 when the error belongs to no line.
        source: the text of that line.
        workgroup: ``(x, y, z)``, or None.
        wave: index of the wave in its workgroup, or None.
        lane: 0..63, or None.
        address: a device address, an offset in LDS for LDS errors, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str = "",
        line: int = 0,
        source: str = "",
        workgroup: tuple[int, int, int] | None = None,
        wave: int | None = None,
        lane: int | None = None,
        address: int | None = None,
    ) -> None:
        self.message, self.kernel, self.line, self.source = message, kernel, line, source
        self.workgroup, self.wave, self.lane, self.address = workgroup, wave, lane, address
        where = [f"kernel {kernel}" if kernel else "", f"line {line}: {source}" if line else ""]
        who = [
            f"workgroup {workgroup}" if workgroup is not None else "",
            f"wave {wave}" if wave is not None else "",
            f"lane {lane}" if lane is not None else "",
            f"address {address:#x}" if address is not None else "",
        ]
        context = "; ".join(filter(None, [*where, ", ".join(filter(None, who))]))
        super().__init__(f"{message} ({context})" if context else message)


class MalformedProgramError(EmulatorError):
    """The text or its metadata is not what LLVM prints for a kernel."""


class UnknownInstructionError(EmulatorError):
    """The instruction, or one of its modifiers or operands, is not implemented for this target."""


class OutOfRangeError(EmulatorError):
    """An access outside every mapped buffer, outside LDS, or a write to a read-only buffer."""


class MisalignedError(EmulatorError):
    """An atomic that is not aligned to its size, or an LDS access aligned neither to it nor to four bytes."""


class UninitialisedError(EmulatorError):
    """A stored value, a store's address or a branch depends on a value that was never written."""


class RaceError(EmulatorError):
    """Two waves touch one LDS byte between two barriers and at least one of them writes."""


class HazardError(EmulatorError):
    """A result is used before the wait that orders it, or without the wait states that it needs."""


class ReleaseError(HazardError):
    """A release publishes a store that may still be in flight, or does not finish before its atomic."""


class AcquireError(HazardError):
    """A load may return an old value: another workgroup stored there since its cache was invalidated."""


class DeadlockError(EmulatorError):
    """The instruction limit was reached: waves wait for each other, or a loop does not end."""


class EngineUnavailableError(EmulatorError):
    """The compiled engine was asked for and lacks an instruction, a compiler or a check."""
