"""Below the HIP functions: code objects are loaded, arguments read, launches run or recorded."""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from narrowkv.cdna_emulator import EmulatorError, Memory

from .assembly import AssemblyError, assembly_of
from .chips import Chip
from .code_object import CodeObject, CodeObjectError, Kernel, read_code_object
from .engine import Engine

__all__ = ["Launch", "Runtime", "Totals"]

# hipError_t
_OUT_OF_MEMORY, _INVALID_IMAGE, _NO_BINARY_FOR_GPU, _NOT_FOUND, _LAUNCH_FAILURE = 2, 200, 209, 500, 719
_LAUNCHES_KEPT = 10_000


class _Description(ctypes.Structure):
    """`Description` of hip_runtime.c."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("arch", ctypes.c_char_p), ("devices", ctypes.c_int),
        ("compute_units", ctypes.c_int), ("clock_khz", ctypes.c_int), ("memory_clock_khz", ctypes.c_int),
        ("memory_bus_bits", ctypes.c_int), ("lds_bytes", ctypes.c_uint64), ("memory_bytes", ctypes.c_uint64),
        ("l2_bytes", ctypes.c_uint64),
    )  # fmt: skip


class _Attributes(ctypes.Structure):
    """`FunctionAttributes` of hip_runtime.c."""

    _fields_ = (
        ("module", ctypes.c_uint64), ("number_of_registers", ctypes.c_int), ("private_bytes", ctypes.c_int),
        ("max_threads", ctypes.c_int), ("shared_bytes", ctypes.c_int),
    )  # fmt: skip


class DeviceMemoryUsage(ctypes.Structure):
    """`Usage` of hip_runtime.c: memory of one device."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("allocated", "peak", "blocks", "peak_blocks", "all_bytes", "all_blocks", "out_of_memory")
    )


_Load = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64)
_GetFunction = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64, ctypes.POINTER(_Attributes)
)
_LaunchKernel = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
)  # fmt: skip


class _Callbacks(ctypes.Structure):
    """`Callbacks` of hip_runtime.c."""

    _fields_ = (("load", _Load), ("function", _GetFunction), ("launch", _LaunchKernel))


class _HipError(Exception):
    """A HIP function fails with this code and message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Launch:
    """One launch that ran.

    Attributes:
        kernel: its symbol.
        grid: workgroups, (x, y, z).
        threads: of a workgroup.
        lds_bytes: of a workgroup.
        wave_instructions: executed, over all waves.
    """

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    lds_bytes: int
    wave_instructions: float = 0.0


@dataclass
class Totals:
    """Sums over all launches of the process."""

    launches: int = 0
    wave_instructions: float = 0.0


@dataclass(frozen=True)
class _Function:
    kernel: Kernel
    assembly: str


class Runtime:
    """The HIP runtime of one process.

    Attributes:
        library: hip_runtime.c.
        chip: the chip of each device.
        launches: the last ones that ran.
        totals: of all of them.
        capture: what a graph that is being captured holds so far; None if none is.
        before_launch: functions that are called before each launch, with the launch, the kernel's assembly,
            its arguments and the device's memory.
    """

    def __init__(self, path: Path, chip: Chip, devices: int, engine: Engine) -> None:
        self.library, self.chip, self.devices, self.engine = ctypes.CDLL(str(path)), chip, devices, engine
        self.path = path
        self.launches: deque[Launch] = deque(maxlen=_LAUNCHES_KEPT)
        self.totals = Totals()
        self.capture: list[Callable[[], Any]] | None = None
        self.before_launch: list[Callable[[Launch, str, list[int], Memory], None]] = []
        self._modules: dict[int, tuple[bytes, CodeObject]] = {}
        self._functions: dict[int, _Function] = {}
        self._programs: dict[tuple[str, int], Any] = {}
        self._memory, self._generation = Memory(), -1
        self._lock = threading.RLock()  # one launch runs at a time
        self.library.virtual_gpu_memory_generation.restype = ctypes.c_uint64
        self.library.virtual_gpu_allocations.restype = ctypes.c_size_t
        self._callbacks = _Callbacks(  # the library calls them as long as the process lives
            _Load(self._answer(self._load)),
            _GetFunction(self._answer(self._get_function)),
            _LaunchKernel(self._answer(self._launch)),
        )
        description = _Description(
            chip.full_name.encode(), chip.arch.encode(), devices, chip.compute_units, chip.clock_khz,
            chip.memory_clock_khz, chip.memory_bus_bits, chip.lds_bytes, chip.memory_bytes, chip.l2_bytes,
        )  # fmt: skip
        self.library.virtual_gpu_setup(ctypes.byref(description), ctypes.byref(self._callbacks))

    def usage(self, device: int) -> DeviceMemoryUsage:
        """Memory statistics of a device."""
        usage = DeviceMemoryUsage()
        self.library.virtual_gpu_usage(device, ctypes.byref(usage))
        return usage

    def _answer(self, method: Callable[..., None]) -> Callable[..., int]:
        """A callback that turns exceptions into a HIP error code with a message."""

        def call(*args: Any) -> int:
            try:
                method(*args)
                return 0
            except _HipError as error:
                code, message = error.code, str(error)
            except EmulatorError as error:
                code, message = _LAUNCH_FAILURE, f"{type(error).__name__}: {error}"
            except MemoryError:
                code, message = _OUT_OF_MEMORY, "the machine has no memory left for this launch"
            except Exception as error:
                traceback.print_exc()
                code, message = _LAUNCH_FAILURE, f"the virtual GPU failed: {type(error).__name__}: {error}"
            self.library.virtual_gpu_set_message(message.encode())
            return code

        return call

    def _load(self, image: int, size: int, module: int) -> None:
        elf = ctypes.string_at(image, size)
        try:
            code_object = read_code_object(elf)
        except CodeObjectError as error:
            raise _HipError(_INVALID_IMAGE, str(error)) from error
        if code_object.arch != self.chip.arch:
            raise _HipError(
                _NO_BINARY_FOR_GPU,
                f"the code object is for {code_object.arch}, the {self.chip.name} is a {self.chip.arch}",
            )
        self._modules[module] = elf, code_object

    def _get_function(self, module: int, name: bytes, function: int, attributes: Any) -> None:
        elf, code_object = self._modules[module]
        kernel = code_object.kernels.get(name.decode())
        if kernel is None:
            raise _HipError(_NOT_FOUND, f"the code object has no kernel {name.decode()}")
        if kernel.lds_bytes > self.chip.lds_bytes:
            raise _HipError(
                _INVALID_IMAGE,
                f"{kernel.name} has {kernel.lds_bytes} bytes of LDS, {self.chip.lds_bytes} exist",
            )
        try:
            text = assembly_of(elf, self.chip.arch)
        except AssemblyError as error:
            raise _HipError(_INVALID_IMAGE, str(error)) from error
        out = attributes.contents
        out.module, out.number_of_registers, out.private_bytes = (
            module,
            kernel.registers,
            kernel.private_bytes,
        )
        out.max_threads, out.shared_bytes = kernel.max_threads, kernel.lds_bytes
        self._functions[function] = _Function(kernel, text)

    def _launch(
        self, function: int, grid: Any, block: Any, shared: int, stream: int | None, params: Any
    ) -> None:
        found = self._functions[function]
        kernel = found.kernel
        # The caller's arguments are read now: their memory is gone when a captured graph is replayed.
        args = [
            int.from_bytes(ctypes.string_at(params[k], argument.size), "little")
            for k, argument in enumerate(kernel.arguments)
        ]
        launch = Launch(
            kernel.name,
            (grid[0], grid[1], grid[2]),
            block[0] * block[1] * block[2],
            kernel.lds_bytes + shared,
        )
        if self.capture is not None:
            self.capture.append(lambda: self._run(launch, found.assembly, args))
        else:
            self._run(launch, found.assembly, args)

    def _run(self, launch: Launch, assembly: str, args: list[int]) -> None:
        with self._lock:
            key = assembly, launch.lds_bytes
            if key not in self._programs:
                self._programs[key] = self.engine.load(*key)
            memory = self._mapped()
            for call in self.before_launch:
                call(launch, assembly, args, memory)
            count = self.engine.run(self._programs[key], launch.grid, args, memory)
            self.launches.append(replace(launch, wave_instructions=count))
            self.totals.launches += 1
            self.totals.wave_instructions += count

    def _mapped(self) -> Memory:
        """All device memory, each allocation with its own bounds."""
        generation = self.library.virtual_gpu_memory_generation()
        if generation != self._generation:
            room = self.library.virtual_gpu_allocations(None, 0)
            entries = (ctypes.c_uint64 * (2 * room))()
            count = min(room, self.library.virtual_gpu_allocations(entries, room))
            self._memory, self._generation = Memory(), generation
            for base, size in zip(entries[: 2 * count : 2], entries[1 : 2 * count : 2], strict=True):
                view = np.frombuffer((ctypes.c_uint8 * size).from_address(base), np.uint8)
                self._memory.map(view, name=f"allocation {base:#x}")
        return self._memory
