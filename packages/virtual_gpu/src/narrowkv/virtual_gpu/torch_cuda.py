"""torch.cuda of a CPU build of torch: the functions that a GPU build has in C.

torch's own Python part stays as it is wherever it calls a function of `torch._C`, which is given here.
Replaced are the classes and functions that torch.cuda made at import from what `torch._C` then had.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda

from .errors import VirtualGpuError
from .graphs import Graph, new_pool
from .runtime import Runtime

__all__ = ["install_torch_cuda"]

ROCM = "7.0.0"


# What a GPU build has besides and the virtual GPU has not.
_ABSENT = {
    "_cuda_memorySnapshot": "snapshots of memory",
    "_cuda_record_memory_history": "a history of memory",
    "_cuda_setMemoryFraction": "a limit on memory below the chip's",
    "_cuda_getMemoryFraction": "a limit on memory below the chip's",
    "_cuda_hostMemoryStats": "statistics of pinned memory",
    "_cuda_cudaCachingAllocator_raw_alloc": "allocations without a tensor",
    "_cuda_customAllocator": "other allocators",
    "_cuda_getAllocator": "other allocators",
    "_cuda_changeCurrentAllocator": "other allocators",
    "_cuda_getCurrentBlasHandle": "hipBLAS",
    "_cuda_getCurrentSolverHandle": "hipSOLVER",
    "_cuda_jiterator_compile_and_launch_kernel": "kernels of C++ source (jiterator)",
}


def install_torch_cuda(device_library: Path, runtime: Runtime) -> None:
    """Makes the devices of `runtime` torch's devices "cuda".

    Raises:
        VirtualGpuError: torch is a GPU build.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        raise VirtualGpuError(
            f"the virtual GPU needs a CPU build of torch, this is torch {torch.__version__} for {build}"
        )
    native = ctypes.CDLL(str(device_library), mode=ctypes.RTLD_GLOBAL)
    native.virtual_gpu_get_stream.restype = ctypes.c_int64
    native.virtual_gpu_set_stream.argtypes = (ctypes.c_int, ctypes.c_int64)
    native.virtual_gpu_torch_setup(str(runtime.path).encode(), runtime.devices)
    for name, function in _functions(native, runtime).items():
        setattr(torch._C, name, function)
    for name, what in _ABSENT.items():
        setattr(torch._C, name, _refusal(what))
    _replace_what_torch_made_at_import(runtime)


def _refusal(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the virtual GPU does not have {what}")

    return refuse


def _functions(native: Any, runtime: Runtime) -> dict[str, Callable[..., Any]]:
    """The functions of `torch._C` that a GPU build has, by name."""

    def get_device() -> int:
        return int(native.virtual_gpu_get_device())

    def exchange_device(device: int) -> int:
        old = int(native.virtual_gpu_exchange_device(device))
        if old == -2:
            count = runtime.devices
            raise RuntimeError(
                f"HIP error: invalid device ordinal: cuda:{device} was asked for and the virtual GPU has "
                f"{count} device{'s' * (count != 1)}; TRITON_VIRTUAL_GPU_COUNT sets how many there are"
            )
        return old

    def current_stream(device: int) -> tuple[int, int, int]:
        index = get_device() if device < 0 else device
        return native.virtual_gpu_get_stream(index), index, torch._C._autograd.DeviceType.CUDA.value

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        exchange_device(device_index)
        native.virtual_gpu_set_stream(device_index, stream_id)

    def is_capturing() -> bool:
        return runtime.capture is not None

    def nothing(*args: Any) -> None: ...

    return {
        "_cuda_init": nothing,
        "_cuda_getDeviceCount": lambda: runtime.devices,
        "_cuda_getDevice": get_device,
        "_cuda_setDevice": lambda device: exchange_device(device) and None,
        "_cuda_exchangeDevice": exchange_device,
        "_cuda_maybeExchangeDevice": exchange_device,
        "_cuda_getCurrentRawStream": lambda device: current_stream(device)[0],
        "_cuda_getCurrentStream": current_stream,
        "_cuda_getDefaultStream": lambda device: (0, *current_stream(device)[1:]),
        "_cuda_getStreamFromExternal": lambda pointer, device: (pointer, *current_stream(device)[1:]),
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": nothing,
        "_cuda_sleep": nothing,
        "_cuda_isCurrentStreamCapturing": is_capturing,
        "_cuda_getArchFlags": lambda: runtime.chip.arch,
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_cuda_ipc_collect": nothing,
        "_cuda_emptyCache": nothing,
        "_host_emptyCache": nothing,
        "_cuda_memoryStats": lambda device: _memory_stats(runtime, device),
        "_cuda_resetPeakMemoryStats": lambda device: runtime.library.virtual_gpu_reset_usage(device, 0),
        "_cuda_resetAccumulatedMemoryStats": lambda device: runtime.library.virtual_gpu_reset_usage(
            device, 1
        ),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_set_sync_debug_mode": nothing,
        "_cuda_get_sync_debug_mode": lambda: 0,
    }


def _memory_stats(runtime: Runtime, device: int) -> dict[str, Any]:
    """Statistics in the form of torch's caching allocator; nothing is cached: reserved memory is in use."""
    usage = runtime.usage(device)

    def stat(current: int, peak: int, total: int) -> dict[str, dict[str, int]]:
        numbers = {"current": current, "peak": peak, "allocated": total, "freed": total - current}
        none = dict.fromkeys(numbers, 0)
        return {"all": numbers, "small_pool": numbers, "large_pool": none}

    in_bytes = stat(usage.allocated, usage.peak, max(usage.all_bytes, usage.allocated))
    in_blocks = stat(usage.blocks, usage.peak_blocks, max(usage.all_blocks, usage.blocks))
    return {
        "allocation": in_blocks, "segment": in_blocks, "active": in_blocks, "inactive_split": stat(0, 0, 0),
        "allocated_bytes": in_bytes, "reserved_bytes": in_bytes, "active_bytes": in_bytes,
        "requested_bytes": in_bytes, "inactive_split_bytes": stat(0, 0, 0),
        "oversize_allocations": stat(0, 0, 0)["all"], "oversize_segments": stat(0, 0, 0)["all"],
        "num_alloc_retries": 0, "num_ooms": usage.out_of_memory, "max_split_size": -1,
        "num_sync_all_streams": 0,
        "num_device_alloc": usage.all_blocks, "num_device_free": usage.all_blocks - usage.blocks,
    }  # fmt: skip


class Stream(torch.Stream):
    """A stream. Work is done when it is given, so streams need no waiting."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: int) -> Stream:
        """As `torch.cuda.Stream`; `given` are the id, device index and device type of an existing stream."""
        if "stream_id" in given:
            return super().__new__(cls, **given)
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def cuda_stream(self) -> int:
        """The handle that a HIP function takes."""
        return self.stream_id

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.stream_id)

    def wait_event(self, event: Any) -> None:
        """Waits for an event, which is complete."""

    def record_event(self, event: Any = None) -> Any:
        """Records an event, a new one by default."""
        event = event or Event()
        event.record(self)
        return event

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class ExternalStream(Stream):
    """A stream that another library made."""

    def __new__(cls, stream_ptr: int, device: Any = None, **given: Any) -> Any:
        """As `torch.cuda.ExternalStream`."""
        index = torch.cuda._utils._get_device_index(device, optional=True)
        device_type = torch._C._autograd.DeviceType.CUDA.value
        return super().__new__(cls, stream_id=stream_ptr, device_index=index, device_type=device_type)


class Event(torch.Event):
    """An event. The times between events are those of the emulation and say nothing about a GPU."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Event:
        """As `torch.cuda.Event`."""
        if interprocess:
            raise NotImplementedError("the virtual GPU has no events that processes share")
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        """Records the event; work is done when it is given, so on any stream it is complete."""
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Makes a stream wait for the event, which is complete."""

    def synchronize(self) -> None:
        """Waits for the event, which is complete."""

    def query(self) -> bool:
        """Whether the event is complete."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds of the emulation between two events.

        Raises:
            RuntimeError: one of them was not recorded.
        """
        if not (hasattr(self, "_time") and hasattr(end_event, "_time")):
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return float(end_event._time - self._time) * 1e3

    @property
    def cuda_event(self) -> int:
        """The handle that a HIP function takes."""
        return self.event_id


def _properties(runtime: Runtime) -> SimpleNamespace:
    chip = runtime.chip
    major, minor = (9, 5) if chip.arch == "gfx950" else (9, 4)
    return SimpleNamespace(
        name=chip.full_name, major=major, minor=minor, total_memory=chip.memory_bytes,
        multi_processor_count=chip.compute_units, warp_size=64, gcnArchName=f"{chip.arch}:sramecc+:xnack-",
        shared_memory_per_block=chip.lds_bytes, shared_memory_per_block_optin=chip.lds_bytes,
        shared_memory_per_multiprocessor=chip.lds_bytes, max_threads_per_block=1024,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=chip.l2_bytes,
        is_integrated=0, is_multi_gpu_board=0, uuid="00000000-0000-0000-0000-000000000000", pci_bus_id=0,
        pci_device_id=0, pci_domain_id=0, clock_rate=chip.clock_khz, memory_clock_rate=chip.memory_clock_khz,
        memory_bus_width=chip.memory_bus_bits,
    )  # fmt: skip


class _Cudart:
    """The functions of the runtime library that torch.cuda calls by name."""

    class cudaError:  # noqa: N801
        success = 0

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:  # noqa: N802
        total = self._runtime.chip.memory_bytes
        return total - self._runtime.usage(device).allocated, total

    def cudaProfilerStart(self) -> int:  # noqa: N802
        return 0

    cudaProfilerStop = cudaProfilerStart  # noqa: N815


def _replace_what_torch_made_at_import(runtime: Runtime) -> None:
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    functions = torch._C
    properties = _properties(runtime)
    cuda._initialized = True
    cuda._cudart = _Cudart(runtime)
    cuda._get_device_properties = lambda device: properties
    cuda._exchange_device = functions._cuda_exchangeDevice
    cuda._maybe_exchange_device = functions._cuda_maybeExchangeDevice
    cuda.default_generators = (torch.default_generator,) * runtime.devices
    for module in (cuda, cuda.streams):
        module.Stream, module.ExternalStream, module.Event = Stream, ExternalStream, Event

    class CUDAGraph(Graph):
        __doc__ = Graph.__doc__
        _runtime = runtime

    for module in (cuda, cuda.graphs):
        module.CUDAGraph = CUDAGraph
    cuda.graphs._graph_pool_handle = new_pool
    cuda.graphs._cuda_isCurrentStreamCapturing = functions._cuda_isCurrentStreamCapturing
    torch.version.hip = f"{ROCM}-virtual"
    torch.backends.cuda.is_built = lambda: True
    tensor.record_stream = lambda self, stream: None
    _give_accelerator_memory()
    _give_storages_a_device()


def _give_accelerator_memory() -> None:
    """What `torch.accelerator` says of memory: torch asks an allocator that the virtual GPU lacks."""
    accelerator: Any = torch.accelerator
    cuda: Any = torch.cuda
    for name in accelerator.memory.__all__:
        if hasattr(cuda, name):
            setattr(accelerator, name, getattr(cuda, name))
    accelerator.get_memory_info = cuda.mem_get_info
    accelerator.empty_host_cache = lambda: None


def _give_storages_a_device() -> None:
    """`torch.UntypedStorage(size, device="cuda")`, with which torch.load makes tensors."""
    storage: Any = torch.UntypedStorage
    original = storage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None:
            kwargs["device"] = device
        if device is None or torch.device(device).type != "cuda":
            return original(cls, *args, **kwargs)
        (size,) = args or (0,)
        if not isinstance(size, int):
            raise NotImplementedError("a storage on the virtual GPU is made from its size in bytes")
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    storage.__new__ = new
