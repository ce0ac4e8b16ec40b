"""What the kernels for Hopper compile to, on a machine without a GPU: asynchronous products and no spills."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from narrowkv.sparse_fp8 import DSV4Rows, choose_mode, sparse_prefill, sparse_prefill_fp8
from narrowkv.testing.cases.latent import LatentCase
from narrowkv.testing.cases.sparse import WAYS_OF_SPECIALISED, SparseCase

pytestmark = pytest.mark.sampled(most=1)


def _compile(layout: str, heads: int, sm90_code: Any) -> Any:
    inputs = SparseCase.small(layout=layout, num_qo_heads=heads, prefix_lens=(256,) * 132).build()
    if layout == "bf16":
        sparse_prefill(inputs.q, inputs.prefix)
    else:
        sparse_prefill_fp8(inputs.q, inputs.prefix, mode="fused")
    (kernel,) = sm90_code.kernels
    assert kernel.shared_bytes <= 227 * 1024
    return kernel


@pytest.mark.parametrize("layout", ["bf16", "packed584", "split", "row512"])
def test_products_run_beside_the_other_work(layout: str, sm90_code: Any) -> None:
    """ptxas waits for each product by itself where it cannot follow the registers of a sum."""
    kernel = _compile(layout, 64, sm90_code)
    assert kernel.name == ("_sparse_hopper_kernel" if layout == "bf16" else "_sparse_hopper_fp8_kernel")
    loops = ["\n".join(loop) for loop in kernel.product_loops()]
    scores = [loop for loop in loops if re.search(r"HGMMA\.64x64x16", loop)]
    columns = 256 if layout == "bf16" else 128
    sums = [loop for loop in loops if re.search(rf"HGMMA\.64x{columns}x16", loop)]
    # Over FP8 rows each half of the columns has a loop of its own.
    assert (len(scores), len(sums)) == (1, 1 if layout == "bf16" else 2)
    # QK over 512 columns, and PV over 64 rows, by instructions of 16: each once.
    assert len(re.findall("HGMMA", scores[0])) == 512 // 16
    for loop in sums:
        assert len(re.findall("HGMMA", loop)) == 256 // columns * 64 // 16
        # Parts of a tile are widened without waiting for each other, but for once.
        assert len(re.findall(r"BAR\.SYNC", loop)) <= 7
    # Results leave a thread by 16 bytes, whatever pairs of columns a product has left it.
    assert set(re.findall(r"\bSTG\S*", kernel.machine_code())) == {"STG.E.128"}
    for loop in loops:
        assert len(re.findall(r"WARPGROUP\.DEPBAR", loop)) == 1
        # Triton 3.6 and 3.7 spill nothing in a loop, 3.8 and 3.9 a number or two; nobody sums or scores.
        assert len(re.findall(r"\b(?:STL|LDL)\b", loop)) <= 2


@pytest.mark.parametrize("heads", [24, 40])
@pytest.mark.parametrize("layout", ["bf16", "packed584"])
def test_a_tile_may_have_more_heads_than_the_call(layout: str, heads: int, sm90_code: Any) -> None:
    kernel = _compile(layout, heads, sm90_code)
    many = "_sparse_hopper_kernel" if layout == "bf16" else "_sparse_hopper_fp8_kernel"
    assert kernel.name == ("_sparse_few_heads_kernel" if heads <= 32 else many)
    for loop in kernel.product_loops():
        assert len(re.findall(r"\b(?:STL|LDL)\b", "\n".join(loop))) <= 2  # as with 32 and 64


@pytest.mark.parametrize("heads", [6, 12, 16])
@pytest.mark.parametrize("layout", ["bf16", "packed584", "row512", "split"])
def test_few_heads_are_not_padded(layout: str, heads: int, sm90_code: Any) -> None:
    kernel = _compile(layout, heads, sm90_code)
    assert kernel.name == "_sparse_few_heads_kernel"
    code = kernel.machine_code()
    # QK: 64 rows over 512 columns. PV: 8 times 64 columns over 64 rows. Both of 16 heads, and nothing else.
    assert re.findall(r"HGMMA\.(\w+)", code) == ["64x16x16"] * (512 // 16 + 512 // 64 * 64 // 16)
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) == 2
    # row512's scales are four words of a row and not two: Triton 3.6 and 3.7 spill two and four registers.
    assert layout == "row512" or kernel.stack_bytes() == 0


def test_a_query_in_fp8_is_widened_first(sm90_code: Any) -> None:
    inputs = SparseCase.small(num_qo_heads=64, prefix_lens=(256,) * 132, pool_rows=2048).build()
    q = DSV4Rows.quantize(inputs.q, layout="split")
    assert choose_mode(q, inputs.prefix).mode == "fused"
    sparse_prefill_fp8(q, inputs.prefix, mode="fused")
    assert [kernel.name for kernel in sm90_code.kernels] == ["_expand_kernel", "_sparse_hopper_fp8_kernel"]


def test_rows_that_are_read_often_are_expanded_first(sm90_code: Any) -> None:
    def mode(tokens: int, pool_rows: int = 1024, **changes: Any) -> str:
        inputs = SparseCase.small(prefix_lens=(64,) * tokens, pool_rows=pool_rows, **changes).build()
        chosen = choose_mode(inputs.q, inputs.prefix)
        assert "measured" in chosen.why
        return chosen.mode

    # One block of heads widens a row once, for many.
    assert mode(132, num_qo_heads=64) == "fused"  # 8.25 readings of a row
    assert mode(511, num_qo_heads=64) == "fused"  # 31.9
    assert mode(512, num_qo_heads=64) == "prepass"  # 32
    # Two blocks widen it twice; few heads wait for it.
    assert mode(132, 768, num_qo_heads=128) == "fused"  # 11
    assert mode(132, 640, num_qo_heads=128) == "prepass"  # 13.2
    for heads in (16, 32):
        assert mode(132, 1024, num_qo_heads=heads) == "fused"  # 8.25
        assert mode(132, 768, num_qo_heads=heads) == "prepass"  # 11
    assert mode(4, num_qo_heads=64) == "fused"
    # A query in fp16: the plain kernel would widen.
    assert mode(132, num_qo_heads=64, q="fp16") == "prepass"


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("way", WAYS_OF_SPECIALISED)
def test_the_calls_of_the_gpu_tests_copy_16_bytes_at_once(
    way: str, heads: int, sm90_code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two sources Triton 3.8 and later would copy 4 bytes, and refuses 2."""
    monkeypatch.setattr("narrowkv.sparse_fp8.operation.specialised_pays", lambda *_: True)
    case = SparseCase.for_specialised(way, heads)
    inputs = case.build()
    q = DSV4Rows.quantize(inputs.q, layout="split") if way == "fp8_q" else inputs.q
    replace(inputs, q=q).call(attn_sink=inputs.attn_sink, out=inputs.q.float())
    (kernel,) = [each for each in sm90_code.kernels if re.search("hopper|few_heads", each.name)]
    ptx = kernel.compiled.asm["ptx"]
    assert set(re.findall(r"cp\.async\.c\S+ \[[^;]*?, (0x\w+)", ptx)) == {"0x10"}
    if kernel.name == "_sparse_few_heads_kernel" and way not in ("bf16", "fp16", "splits"):
        assert len(re.findall(r"ld\.global\.v4", ptx)) >= 20


@pytest.mark.parametrize(
    ("layout", "heads", "q_len", "page_size", "name"),
    [
        ("bf16", 12, 1, 64, "few_heads"), ("bf16", 128, 1, 16, "hopper"),
        ("tensor576", 6, 2, 64, "few_heads"), ("tensor576", 12, 1, 1, "few_heads"),
        ("tensor576", 40, 1, 64, "hopper_fp8"), ("tensor576", 12, 4, 16, "hopper_fp8"),
        ("tensor512", 16, 1, 64, "few_heads"), ("tensor512", 128, 1, 64, "hopper_fp8"),
        ("packed584", 12, 1, 64, "few_heads"), ("packed584", 12, 4, 16, "hopper_fp8"),
        ("record656", 12, 1, 64, "few_heads"), ("record656", 40, 1, 16, "hopper_fp8"),
    ],
)  # fmt: skip
def test_latent_decode_takes_the_kernels_of_sparse_decode(
    layout: str, heads: int, q_len: int, page_size: int, name: str, sm90_code: Any
) -> None:
    case = LatentCase(
        layout=layout, num_qo_heads=heads, q_len=q_len, page_size=page_size, lens=(300, 5), splits=1
    )
    case.inputs().call()
    (kernel,) = sm90_code.kernels
    assert kernel.name == f"_sparse_{name}_kernel"
    # As over index lists; what looks up four scales of a row beside 128 sums keeps a few numbers elsewhere.
    most = 6 if (layout, name) == ("record656", "hopper_fp8") else 2
    for loop in kernel.product_loops():
        assert len(re.findall(r"\b(?:STL|LDL)\b", "\n".join(loop))) <= most


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("heads", [12, 24, 40, 128])
@pytest.mark.parametrize("layout", ["bf16", "tensor576", "record656", "packed584"])
def test_tiles_of_latent_rows_fit_in_shared_memory(
    layout: str, heads: int, splits: int, sm90_code: Any
) -> None:
    LatentCase(layout=layout, num_qo_heads=heads, lens=(300, 5), splits=splits).inputs().call()
    assert sm90_code.kernels
    assert max(kernel.shared_bytes for kernel in sm90_code.kernels) <= 227 * 1024
