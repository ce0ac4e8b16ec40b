"""Machine code for Hopper on a machine without a GPU: Triton brings NVIDIA's assembler and disassembler."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from narrowkv.runtime.launch import LaunchOptions, executing
from narrowkv.runtime.targets import get_target

sys.path.insert(0, str(Path(__file__).parent))  # the repository's pytest runs with --import-mode=importlib


class _Sm90Driver:
    """Answers Triton's questions about the device as an H100 would."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 90

    def get_current_stream(self, device: int) -> int:
        return 0


@cache
def _dump(cubin: bytes, option: str) -> str:
    """What NVIDIA's disassembler says of a code object; a large one takes seconds."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as code:
        code.write(cubin)
        code.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        return subprocess.run([tool, option, code.name], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Sm90Kernel:
    """One compiled kernel."""

    compiled: Any

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.compiled.metadata.name)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, of which Hopper has 227 KB."""
        return int(self.compiled.metadata.shared)

    def machine_code(self) -> str:
        """The disassembly."""
        return self._dump("-sass")

    def stack_bytes(self) -> int:
        """What spilled registers take."""
        found = re.search(r"STACK:(\d+)", self._dump("-res-usage"))
        assert found is not None
        return int(found[1])

    def registers(self) -> int:
        """Registers of a thread."""
        found = re.search(r"REG:(\d+)", self._dump("-res-usage"))
        assert found is not None
        return int(found[1])

    def instructions(self) -> list[tuple[int, str]]:
        """Address and text of each instruction."""
        found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", self.machine_code())
        return [(int(address, 16), text) for address, text in found]

    def product_loops(self) -> list[list[str]]:
        """The innermost loops of the machine code that multiply matrices, each as its instructions."""
        instructions = self.instructions()
        addresses = [address for address, _ in instructions]
        bodies = []
        for number, (_, text) in enumerate(instructions):
            branch = re.search(r"BRA.*?0x([0-9a-f]+)", text)
            if branch and int(branch[1], 16) < addresses[number]:
                begin = addresses.index(int(branch[1], 16))
                bodies.append((begin, number))
        inner = [
            (begin, end)
            for begin, end in bodies
            if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in bodies)
        ]
        loops = [[text for _, text in instructions[begin : end + 1]] for begin, end in inner]
        return [loop for loop in loops if any(re.search(r"\bHG?MMA\b", text) for text in loop)]

    def _dump(self, option: str) -> str:
        return _dump(self.compiled.asm["cubin"], option)


@dataclass
class CompileForSm90:
    """Compiles every launch and keeps what came out."""

    kernels: list[Sm90Kernel] = field(default_factory=list)
    target = get_target("sm90")

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:
        """Compiles what a launch would run."""
        result = kernel.warmup(*args, **constexprs, grid=grid, **options.for_target(self.target))
        compiled = result.result() if hasattr(result, "result") else result
        self.kernels.append(Sm90Kernel(compiled))


@pytest.fixture
def sm90_code() -> Iterator[CompileForSm90]:
    """Calls on CPU tensors inside the test are compiled for Hopper and not run."""
    executor = CompileForSm90()
    previous = driver._active
    driver.set_active(_Sm90Driver())
    try:
        with executing(executor):
            yield executor
    finally:
        driver._active = previous
