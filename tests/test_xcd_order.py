"""Kernels whose programs are ordered for several XCDs give the bits of the launch's own order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.runtime.attention import xcds
from narrowkv.runtime.launch import run_as
from narrowkv.runtime.targets import TARGETS, Target
from narrowkv.sage import config as sage_config
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.cases.sparse import SparseCase


def _quarter(name: str) -> Target:
    """A partition of two XCDs: a quarter of the chip."""
    whole = TARGETS[name]
    assert whole.figures is not None
    units = whole.compute_units // 4
    return replace(whole, compute_units=units, figures=replace(whole.figures, compute_units=units))


QUARTER = _quarter("gfx942")
assert QUARTER.xcds == 2


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> list[xcds.XcdOrder | None]:
    """The orders that kernels are compiled with."""
    found: list[xcds.XcdOrder | None] = []
    real = xcds.xcd_order

    def recorded(*sizes: int) -> xcds.XcdOrder | None:
        found.append(real(*sizes))
        return found[-1]

    for module in ("attn_decode.launch", "attn_prefill.launch", "sage.launches", "sparse_fp8.launches"):
        monkeypatch.setattr(f"narrowkv.{module}.xcd_order", recorded)
    return found


def _bits(call: Callable[[], Any], target: Target) -> list[torch.Tensor]:
    with run_as(target):
        result = call()
    tensors = result if isinstance(result, tuple) else (result,)
    return [each.contiguous().view(torch.uint8).clone() for each in tensors]


def _moves(order: xcds.XcdOrder | None, programs: int) -> bool:
    return xcds.order_of_programs(programs, order) != list(range(programs))


@pytest.mark.parametrize("kernel", ["dense", "fused"])
def test_prefill(kernel: str, orders: list[xcds.XcdOrder | None], monkeypatch: pytest.MonkeyPatch) -> None:
    case = PrefillCase(q_lens=(40, 9), lens=(90, 30), num_kv_heads=3, gqa_ratio=4, kernel=kernel)
    results = []
    for rows in (2, 0):
        monkeypatch.setattr("narrowkv.attn_prefill.tiles.xcd_rows", lambda *_, rows=rows: rows)
        results.append(_bits(case.inputs().call, QUARTER))
    assert [order is not None for order in orders] == [True, False]
    assert _moves(orders[0], 4 * 3)
    for ordered, plain in zip(*results, strict=True):
        assert torch.equal(ordered, plain)


@pytest.mark.parametrize("causal", ["", "bottom_right"])
def test_sage(causal: str, orders: list[xcds.XcdOrder | None], monkeypatch: pytest.MonkeyPatch) -> None:
    case = SageCase.small(q_lens=(300,), k_lens=(300,), num_kv_heads=3, causal=causal)
    results = []
    for rows in (2, 0):

        def choose(*args: Any, rows: int = rows, **options: Any) -> sage_config.SageConfig:
            return replace(sage_config.choose_config(*args, **options), xcd_rows=rows)

        monkeypatch.setattr("narrowkv.sage.operation.choose_config", choose)
        results.append(_bits(case.inputs().call, QUARTER))
    assert orders[0] is not None
    assert _moves(orders[0], 6 * 3)
    for ordered, plain in zip(*results, strict=True):
        assert torch.equal(ordered, plain)


@pytest.mark.parametrize("mode", ["16bit", "fused"])
def test_sparse(mode: str, orders: list[xcds.XcdOrder | None], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = "bf16" if mode == "16bit" else "packed584"
    case = SparseCase(prefix_lens=(70, 40, 9, 80), num_qo_heads=128, pool_rows=128, mode=mode, layout=layout)
    results = [_bits(case.inputs().call, QUARTER)]
    assert orders[0] is not None
    assert _moves(orders[0], 4 * 2)
    monkeypatch.setattr("narrowkv.sparse_fp8.launches.xcd_order", lambda *_: None)
    results.append(_bits(case.inputs().call, QUARTER))
    for ordered, plain in zip(*results, strict=True):
        assert torch.equal(ordered, plain)


@pytest.mark.parametrize("split", ["even", "per_sequence", "none"])
def test_decode(split: str, orders: list[xcds.XcdOrder | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of rows of one KV head read the same keys."""
    case = DecodeCase(
        lens=(130, 60, 17, 200), q_len=17, num_kv_heads=1, gqa_ratio=8, head_dim=64, split=split
    )
    results = [_bits(case.inputs().call, QUARTER)]
    assert orders[0] is not None
    assert _moves(orders[0], 4 * 2)
    monkeypatch.setattr("narrowkv.attn_decode.launch.xcd_order", lambda *_: None)
    results.append(_bits(case.inputs().call, QUARTER))
    for ordered, plain in zip(*results, strict=True):
        assert torch.equal(ordered, plain)


def test_configurations_order_programs_for_several_xcds_only() -> None:
    die = replace(TARGETS["gfx942"].figures, compute_units=38)  # type: ignore[type-var]
    one = replace(TARGETS["gfx942"], compute_units=38, figures=die)
    assert sage_config.choose_config(TARGETS["gfx942"]).xcd_rows > 0
    for target in (one, TARGETS["sm90"], TARGETS["cuda"], TARGETS["gfx90a"]):
        assert sage_config.choose_config(target).xcd_rows == 0
