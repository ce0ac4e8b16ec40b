"""Calibration: attention stays what it was, FP4 errors fall, and files come back or are refused."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from narrowkv.quant import Calibration, KeyTransform, calibrate, dequantize_per_group, quantize_per_group
from narrowkv.runtime.attention.reference import attention_reference

TOKENS, HEADS, RATIO, DIM = 96, 2, 3, 64


def _sample(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K with a bias and channels of many sizes, Q large where K is small, V of uneven channels."""
    random = torch.Generator().manual_seed(seed)
    shape = torch.Generator().manual_seed(99)
    sizes = torch.exp(1.2 * torch.randn(HEADS, DIM, generator=shape))
    bias = 20 * torch.randn(HEADS, DIM, generator=shape) * (torch.rand(HEADS, DIM, generator=shape) < 0.1)
    q, k, v = (torch.randn(TOKENS, heads, DIM, generator=random) for heads in (HEADS * RATIO, HEADS, HEADS))
    return q / sizes.repeat_interleave(RATIO, 0).sqrt(), k * sizes + bias, v * sizes * 0.02


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    o, _ = attention_reference(
        q, k, v, torch.arange(TOKENS), sm_scale=DIM**-0.5, logits_soft_cap=0.0, window_left=-1,
        window_right=0, sinks=None,
    )  # fmt: skip
    return o


def _fp4(x: torch.Tensor) -> torch.Tensor:
    return dequantize_per_group(*quantize_per_group(x, DIM, scale="e4m3", exponent="search"), DIM)


@pytest.mark.parametrize("rotate", [False, True])
def test_calibrated_attention_is_the_same_attention(rotate: bool) -> None:
    (layer,) = calibrate([_sample(0)], rotate=rotate).layers
    q, k, v = _sample(1)
    o = layer.output(_attend(layer.queries(q), layer.keys(k), layer.values(v)))
    torch.testing.assert_close(o, _attend(q, k, v), rtol=0, atol=1e-4)
    assert layer.queries(q.bfloat16()).dtype == torch.bfloat16
    assert layer.shifts_logits


def test_a_key_transform_is_the_calibration_without_what_changes_nothing() -> None:
    q, k, v = _sample(1)
    (layer,) = calibrate([_sample(0)]).layers
    transform = layer.key_transform()
    assert torch.equal(transform.keys(k), layer.keys(k))
    assert torch.equal(transform.queries(q), layer.queries(q))
    assert (transform.butterflies(96), transform.butterflies(128)) == (5, 7)
    assert KeyTransform(rotated=False).butterflies(128) == 0
    (plain,) = calibrate([(q, k, v)], offset=False, balance_k=False, rotate=False).layers
    assert vars(plain.key_transform()) == {"offset": None, "balance": None, "rotated": False}


def test_stored_keys_and_values_have_size_one_in_every_head() -> None:
    (layer,) = calibrate([_sample(0)]).layers
    _, k, v = _sample(0)
    for x in (layer.keys(k), layer.values(v)):
        torch.testing.assert_close(x.square().mean((0, 2)), torch.ones(HEADS), rtol=0.01, atol=0)


def test_what_calibration_is_for() -> None:
    """Each step lowers the error of FP4 attention on tokens that it was not calibrated on."""
    q, k, v = _sample(1)
    exact = _attend(q, k, v)

    def error(**steps: bool) -> float:
        chosen = {"offset": False, "balance_k": False, "balance_v": False, "rotate": False} | steps
        (layer,) = calibrate([_sample(0)], **chosen).layers
        o = _attend(layer.queries(q), _fp4(layer.keys(k)), _fp4(layer.values(v)))
        return float((layer.output(o) - exact).abs().sum() / exact.abs().sum())

    nothing = error()
    offset = error(offset=True)
    values = error(offset=True, balance_v=True)
    keys = error(offset=True, balance_v=True, balance_k=True)
    everything = error(offset=True, balance_v=True, balance_k=True, rotate=True)
    assert 1.05 * offset < nothing
    assert 1.05 * values < offset
    assert 1.05 * keys < values
    assert everything < 0.5 * nothing


def test_channels_that_the_sample_does_not_use_are_left_alone() -> None:
    q, k, v = _sample(0)
    k[..., 3], q[..., 5], v[..., 7] = 0.0, 0.0, 0.0
    (layer,) = calibrate([(q, k, v)]).layers
    for balance in (layer.k_balance, layer.v_balance):
        assert bool(balance.isfinite().all())
        assert bool((balance > 0).all())
    ratio = float(layer.k_balance.max() / layer.k_balance.min())
    assert ratio < 1e4
    zeros = calibrate([tuple(torch.zeros_like(x) for x in (q, k, v))]).layers[0]
    assert not bool(zeros.keys(torch.zeros_like(k)).any())


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    made = calibrate([_sample(0), _sample(2)], rotate=False)
    made.save(tmp_path / "c.npz")
    back = Calibration.load(tmp_path / "c.npz")
    assert len(back.layers) == 2
    for a, b in zip(made.layers, back.layers, strict=True):
        assert torch.equal(a.offset, b.offset)
        assert torch.equal(a.k_balance, b.k_balance)
        assert torch.equal(a.v_balance, b.v_balance)
        assert a.rotated is b.rotated is False


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("not an archive")
    with (tmp_path / "old.npz").open("wb") as file:
        numpy.savez(file, version=numpy.array(0))
    with (tmp_path / "lacks.npz").open("wb") as file:
        numpy.savez(file, version=numpy.array(1))
    for name in ("text", "old", "lacks"):
        with pytest.raises(ValueError, match=r"must be a calibration that Calibration\.save wrote.*again"):
            Calibration.load(tmp_path / f"{name}.npz")
    with pytest.raises(OSError, match="missing"):
        Calibration.load(tmp_path / "missing.npz")
