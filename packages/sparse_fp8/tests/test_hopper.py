"""Which calls go to the kernels for Hopper, and on a GPU what they compute."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.quant.accuracy import compare
from narrowkv.quant.launch.gluon import has_gluon
from narrowkv.quant.targets import device_target, get_target
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    attend,
    config,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_fp8,
    sparse_prefill_reference,
)
from narrowkv.sparse_fp8.arguments import suits_hopper
from narrowkv.sparse_fp8.config import choose_config
from narrowkv.sparse_fp8.workloads import SparseWorkload

W = SparseWorkload


def _config(target: str = "sm90", **changes: Any) -> config.SparseConfig:
    call = {"kernel": "wide", "num_tokens": 132, "num_heads": 64, "mean_rows": 512, "hopper": True}
    return choose_config(get_target(target), **{**call, **changes})


def _stages(target: str = "sm90", **changes: Any) -> int:
    return _config(target, **changes).stages


@pytest.mark.skipif(not has_gluon(), reason="this Triton has no Gluon for Hopper")
def test_it_is_taken_where_it_was_measured_to_be_faster() -> None:
    assert _stages()
    assert _stages(num_heads=128, num_tokens=66)
    assert _stages(kernel="fused")
    assert not _stages(num_tokens=131)
    assert not _stages(hopper=False)
    for target in ("gfx942", "gfx950", "cuda", "cpu"):
        assert not _stages(target)


@pytest.mark.skipif(not has_gluon(), reason="this Triton has no Gluon for Hopper")
@pytest.mark.parametrize(
    ("kernel", "heads", "block"),
    [("wide", 8, 16), ("wide", 16, 16), ("wide", 32, 32), ("fused", 16, 16), ("fused", 32, 64)],
)
def test_few_heads_have_a_kernel_that_pads_none(kernel: str, heads: int, block: int) -> None:
    few = _config(kernel=kernel, num_heads=heads)
    assert few.block_h == block
    assert few.stages
    assert not _stages(kernel=kernel, num_heads=heads, num_tokens=131)


def test_a_triton_without_gluon_runs_the_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "has_gluon", lambda: False)
    assert not _stages()


def _suits(inputs: Any, **changes: Any) -> bool:
    inputs = replace(inputs, **changes)
    return suits_hopper(inputs.q, inputs.prefix, inputs.extend)


def test_what_it_can_read() -> None:
    for layout in ("bf16", "split", "packed584", "row512"):
        assert _suits(W(layout=layout, extend_lens=(3, 1, 0, 2)).build())
    wide = W(layout="bf16").build()
    shifted = torch.zeros(wide.q.numel() + 1, dtype=wide.q.dtype)[1:].view(wide.q.shape)
    assert not _suits(wide, q=shifted)
    far_apart = torch.empty_strided(wide.q.shape, (512, 2**28, 1), dtype=wide.q.dtype, device="meta")
    assert not _suits(wide, q=far_apart)
    strided = torch.zeros(8, 520, dtype=torch.bfloat16)[:, :512]
    assert not _suits(wide, prefix=KVSource(strided, wide.prefix.indptr, wide.prefix.indices))
    narrow = W().build()
    assert not _suits(narrow, q=narrow.q.half())
    assert _suits(narrow, q=DSV4Rows.quantize(narrow.q, layout="row512"))
    assert not _suits(narrow, extend=wide.prefix)
    bytes_and_scales = torch.zeros(8, 512, dtype=torch.uint8)
    rope = torch.zeros(8, 64, dtype=torch.bfloat16)
    for rows in (
        DSV4Rows.row512(bytes_and_scales, rope, scale_group=32),
        DSV4Rows.quantize(torch.zeros(8, 512), layout="packed584", page_size=1, padded=False),
    ):
        assert not _suits(narrow, prefix=KVSource(rows, narrow.prefix.indptr, narrow.prefix.indices))


@pytest.mark.gpu
@pytest.mark.skipif(not has_gluon(), reason="this Triton has no Gluon for Hopper")
@pytest.mark.parametrize("way", ["bf16", "fp16", "split", "packed584", "row512", "fp8_q", "splits"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_it_agrees_with_the_reference(way: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_target("cuda").name != "sm90":
        pytest.skip("needs a Hopper GPU")
    layout = {"splits": "bf16", "fp8_q": "packed584"}.get(way, way)
    wide = layout in ("bf16", "fp16")
    lens = (70, 0, 1, 63, 64, 65, 128, 256, 0, 129)
    inputs = W(
        layout=layout,
        num_qo_heads=heads,
        prefix_lens=lens * 20,
        extend_lens=(3, 0, 64, 1, 0) * 40,
        q_dtype=torch.float16 if way == "fp16" else torch.bfloat16,
    ).build("cuda")
    launches = 0
    original = attend._run_hopper

    def counted(*arguments: Any) -> None:
        nonlocal launches
        launches += 1
        original(*arguments)

    monkeypatch.setattr(attend, "_run_hopper", counted)
    out = torch.full(inputs.q.shape, math.nan, dtype=torch.float32, device="cuda")
    q = DSV4Rows.quantize(inputs.q, layout="split") if way == "fp8_q" else inputs.q
    given = (q, inputs.prefix, inputs.extend)
    options: dict[str, Any] = {"attn_sink": inputs.attn_sink, "out": out, "return_lse": True}
    if way == "splits":
        o, lse = sparse_decode(*given, num_splits=3, **options)
    elif wide:
        o, lse = sparse_prefill(*given, **options)
    else:
        o, lse = sparse_prefill_fp8(*given, mode="fused", **options)
    assert launches == 1
    expected, expected_lse = sparse_prefill_reference(*given, attn_sink=inputs.attn_sink, return_lse=True)
    empty = expected_lse == -math.inf
    assert bool(empty.any())
    assert not bool(o[empty].any())
    assert compare(o, expected).relative_l1 <= 0.004
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0.004)
