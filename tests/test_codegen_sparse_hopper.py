"""What the kernel for Hopper compiles to, on a machine without a GPU: asynchronous products and no spills."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from narrowkv.quant.launch import LaunchOptions, executing
from narrowkv.quant.targets import get_target
from narrowkv.sparse_fp8 import attend, sparse_prefill, sparse_prefill_fp8
from narrowkv.sparse_fp8.config import has_gluon
from narrowkv.sparse_fp8.workloads import SparseWorkload

SHARED_MEMORY = 227 * 1024
pytestmark = pytest.mark.skipif(not has_gluon(), reason="this Triton has no Gluon for Hopper")


class _Sm90Driver:
    """Answers Triton's questions about the device as an H100 would."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 90

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class _CompileForSm90:
    """Compiles every launch and keeps what came out."""

    compiled: list[Any] = field(default_factory=list)
    target = get_target("sm90")

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constexprs: dict[str, Any],
        options: LaunchOptions,
    ) -> None:
        result = kernel.warmup(*args, **constexprs, grid=grid, **options.for_target(self.target))
        self.compiled.append(result.result() if hasattr(result, "result") else result)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[_CompileForSm90]:
    monkeypatch.setattr(attend, "is_compiled", lambda q: True)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # its default; 3.9 warns where it is unset
    previous = driver._active
    driver.set_active(_Sm90Driver())
    try:
        with executing(_CompileForSm90()) as executor:
            assert isinstance(executor, _CompileForSm90)
            yield executor
    finally:
        driver._active = previous


def _dump(compiled: Any, option: str, place: Path) -> str:
    """What cuobjdump, which comes with Triton, says of the machine code."""
    place.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, place], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("layout", ["bf16", "packed584"])
def test_products_run_beside_the_other_work(layout: str, compiling: _CompileForSm90, tmp_path: Path) -> None:
    """ptxas waits for each product by itself where it cannot follow the registers of a sum."""
    inputs = SparseWorkload(layout=layout, num_qo_heads=64, prefix_lens=(64,) * 132).build()
    if layout == "bf16":
        sparse_prefill(inputs.q, inputs.prefix)
    else:
        sparse_prefill_fp8(inputs.q, inputs.prefix, mode="fused")
    (compiled,) = compiling.compiled
    assert compiled.metadata.name == "_sparse_hopper_kernel"
    assert compiled.metadata.shared <= SHARED_MEMORY
    code = _dump(compiled, "-sass", tmp_path / "code")
    # QK over 512 columns, and PV over 64 rows, by instructions of 16: not more than once each.
    assert len(re.findall(r"HGMMA\.64x64x16", code)) == 512 // 16
    assert len(re.findall(r"HGMMA\.64x256x16", code)) == 64 // 16
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) == 2
    if layout == "bf16":
        assert re.search(r"STACK:0\b", _dump(compiled, "-res-usage", tmp_path / "code"))
