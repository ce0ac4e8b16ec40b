"""What the kernel for Hopper compiles to, on a machine without a GPU: asynchronous products and no spills."""

from __future__ import annotations

import re
from typing import Any

import pytest

from narrowkv.quant.launch.gluon import has_gluon
from narrowkv.sparse_fp8 import sparse_prefill, sparse_prefill_fp8
from narrowkv.sparse_fp8.workloads import SparseWorkload

pytestmark = pytest.mark.skipif(not has_gluon(), reason="this Triton has no Gluon for Hopper")


@pytest.mark.parametrize("layout", ["bf16", "packed584"])
def test_products_run_beside_the_other_work(layout: str, sm90_code: Any) -> None:
    """ptxas waits for each product by itself where it cannot follow the registers of a sum."""
    inputs = SparseWorkload(layout=layout, num_qo_heads=64, prefix_lens=(64,) * 132).build()
    if layout == "bf16":
        sparse_prefill(inputs.q, inputs.prefix)
    else:
        sparse_prefill_fp8(inputs.q, inputs.prefix, mode="fused")
    (kernel,) = sm90_code.kernels
    assert kernel.name == "_sparse_hopper_kernel"
    assert kernel.shared_bytes <= 227 * 1024
    code = kernel.machine_code()
    # QK over 512 columns, and PV over 64 rows, by instructions of 16: not more than once each.
    assert len(re.findall(r"HGMMA\.64x64x16", code)) == 512 // 16
    assert len(re.findall(r"HGMMA\.64x256x16", code)) == 64 // 16
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) == 2
    if layout == "bf16":
        assert kernel.stack_bytes() == 0
