"""The K offset and the Hadamard rotation leave attention as it was (fp64); the lse correction is right."""

import math

import pytest
import torch

from narrowkv.quant import KOffset, VScale, hadamard, lse_correction

TOKENS, QUERIES, KV_HEADS, RATIO, DIM = 37, 5, 3, 4, 96


def keys_and_queries(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    k = torch.randn(TOKENS, KV_HEADS, DIM, generator=g, dtype=torch.float64) + 3 * torch.randn(
        KV_HEADS, DIM, generator=g
    )
    q = torch.randn(QUERIES, KV_HEADS * RATIO, DIM, generator=g, dtype=torch.float64)
    return q.to(dtype), k.to(dtype)


def logits(q: torch.Tensor, k: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """`[queries, q heads, tokens]`, one head at a time."""
    rows = [q[:, h] @ k[:, h // RATIO].t() * sm_scale for h in range(q.shape[1])]
    return torch.stack(rows, dim=1)


def test_offset_keeps_the_softmax_and_moves_lse_by_the_correction() -> None:
    q, k = keys_and_queries()
    offset = KOffset.from_keys(k)
    sm_scale = 0.37
    before, after = logits(q, k, sm_scale), logits(q, offset.subtract(k), sm_scale)
    torch.testing.assert_close(after.softmax(-1), before.softmax(-1), rtol=0, atol=1e-13)
    correction = lse_correction(q, offset, sm_scale)
    assert correction.shape == (QUERIES, KV_HEADS * RATIO)
    assert float(correction.abs().amin()) > 1e-3
    torch.testing.assert_close(after.logsumexp(-1) + correction, before.logsumexp(-1), rtol=0, atol=1e-12)


def test_correction_accepts_the_bare_tensor_and_is_linear_in_sm_scale() -> None:
    q, k = keys_and_queries(torch.float32)
    offset = KOffset.from_keys(k)
    assert torch.equal(lse_correction(q, offset.offset, 0.5), lse_correction(q, offset, 0.5))
    assert torch.equal(lse_correction(q, offset, 0.0), torch.zeros(QUERIES, KV_HEADS * RATIO))
    wide = lse_correction(q.bfloat16(), offset, 2.0)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, lse_correction(q.bfloat16().float(), offset, 1.0) * 2)


def test_offset_is_the_mean_and_round_trips() -> None:
    _, k = keys_and_queries()
    offset = KOffset.from_keys(k)
    torch.testing.assert_close(offset.offset.double(), k.mean(0), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        offset.subtract(k).mean(0), torch.zeros(KV_HEADS, DIM, dtype=k.dtype), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(offset.add(offset.subtract(k)), k, rtol=0, atol=1e-14)
    paged = KOffset.from_keys(k[:36].view(6, 6, KV_HEADS, DIM))
    torch.testing.assert_close(paged.offset, KOffset.from_keys(k[:36]).offset)


def test_offset_widens_16_bit_keys() -> None:
    _, k = keys_and_queries()
    low = k.bfloat16()
    moved = KOffset.from_keys(low).subtract(low)
    assert moved.dtype == torch.float32
    assert torch.equal(moved, low.float() - KOffset.from_keys(low).offset)


def test_offset_refusals() -> None:
    q, k = keys_and_queries(torch.float32)
    offset = KOffset.from_keys(k)
    with pytest.raises(TypeError, match=r"offset must have dtype torch.float32"):
        KOffset(offset.offset.double())
    with pytest.raises(ValueError, match=r"offset must have shape \[num_kv_heads, head_dim\], got \[96\]"):
        KOffset(offset.offset[0])
    with pytest.raises(ValueError, match=r"k must have shape .* with tokens, got \[0, 3, 96\]"):
        KOffset.from_keys(k[:0])
    with pytest.raises(
        ValueError, match=r"k must have shape \[\.\.\., 3, 96\] like the offset, got \[37, 2, 96\]"
    ):
        offset.subtract(k[:, :2])
    with pytest.raises(ValueError, match=r"q must have a multiple of 3 heads \(num_kv_heads\), got 11"):
        lse_correction(q[:, :11], offset, 1.0)
    with pytest.raises(ValueError, match=r"q must have shape \[num_tokens, num_qo_heads, 96\]"):
        lse_correction(q[..., :64], offset, 1.0)
    with pytest.raises(ValueError, match="sm_scale must be finite"):
        lse_correction(q, offset, math.nan)


def sylvester(size: int) -> torch.Tensor:
    """Entry (i, j) is (-1)^(number of common one bits) / sqrt(size)."""
    rows = [[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
    return torch.tensor(rows, dtype=torch.float64) / math.sqrt(size)


@pytest.mark.parametrize(
    ("dim", "block", "size"), [(96, None, 32), (96, 16, 16), (128, None, 128), (80, 2, 2), (7, None, 1)]
)
def test_hadamard_is_the_block_diagonal_sylvester_matrix(dim: int, block: int | None, size: int) -> None:
    x = torch.randn(3, 4, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    matrix = torch.block_diag(*[sylvester(size)] * (dim // size))
    torch.testing.assert_close(hadamard(x, block), x @ matrix, rtol=0, atol=1e-13)
    torch.testing.assert_close(hadamard(hadamard(x, block), block), x, rtol=0, atol=1e-13)


def test_hadamard_of_q_and_k_keeps_logits_softmax_and_lse() -> None:
    q, k = keys_and_queries()
    before, after = logits(q, k, 0.1), logits(hadamard(q), hadamard(k), 0.1)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
    torch.testing.assert_close(after.softmax(-1), before.softmax(-1), rtol=0, atol=1e-13)
    torch.testing.assert_close(after.logsumexp(-1), before.logsumexp(-1), rtol=0, atol=1e-12)


def test_offset_and_hadamard_together() -> None:
    q, k = keys_and_queries()
    offset = KOffset.from_keys(k)
    moved = logits(hadamard(q), hadamard(offset.subtract(k)), 0.1)
    before = logits(q, k, 0.1)
    torch.testing.assert_close(moved.softmax(-1), before.softmax(-1), rtol=0, atol=1e-13)
    torch.testing.assert_close(
        moved.logsumexp(-1) + lse_correction(q, offset, 0.1), before.logsumexp(-1), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hadamard_rounds_once_and_takes_strides(dtype: torch.dtype) -> None:
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = hadamard(x.t())
    assert got.dtype == dtype
    exact = x.t().double() @ sylvester(128)
    unit = 2.0 ** (torch.frexp(exact)[1] - 1) * torch.finfo(dtype).eps
    assert bool(((got.double() - exact).abs() <= 0.51 * unit + 1e-5).all())


def test_hadamard_spreads_an_outlier() -> None:
    x = torch.zeros(1, 64)
    x[0, 5] = 8.0
    assert torch.equal(hadamard(x).abs(), torch.ones(1, 64))


@pytest.mark.parametrize("block", [3, 64, 12])
def test_hadamard_refuses_blocks_that_do_not_fit(block: int) -> None:
    with pytest.raises(
        ValueError, match=f"block must be a power of two that divides head_dim 96, got {block}"
    ):
        hadamard(torch.zeros(2, 96), block)


def test_hadamard_refuses_other_inputs() -> None:
    with pytest.raises(TypeError, match="x must have dtype one of"):
        hadamard(torch.zeros(2, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match="with head_dim at least 1"):
        hadamard(torch.zeros(2, 0))


def test_a_v_scale_leaves_attention_as_it_was() -> None:
    g = torch.Generator().manual_seed(0)
    v = torch.randn(TOKENS, KV_HEADS, DIM, generator=g, dtype=torch.float64) * torch.logspace(-3, 3, DIM)
    v[:, 1, 5] = 0  # a channel of nothing has scale 1
    scale = VScale.from_values(v)
    assert float(scale.scale[1, 5]) == 1.0
    divided = scale.divide(v)
    torch.testing.assert_close(
        divided.square().mean(0)[0], torch.ones(DIM, dtype=torch.float64), rtol=1e-4, atol=0
    )
    p = torch.rand(QUERIES, KV_HEADS * RATIO, TOKENS, generator=g, dtype=torch.float64)
    heads = torch.arange(KV_HEADS * RATIO) // RATIO
    o, expected = (torch.einsum("qht,thd->qhd", p, x[:, heads]) for x in (divided, v))
    torch.testing.assert_close(scale.multiply(o), expected, rtol=1e-6, atol=1e-12)
    assert scale.multiply(o.bfloat16()).dtype == torch.float32


def test_a_v_scale_refuses_what_does_not_fit() -> None:
    scale = VScale(torch.ones(KV_HEADS, DIM))
    with pytest.raises(ValueError, match="like the scale"):
        scale.divide(torch.ones(3, KV_HEADS + 1, DIM))
    with pytest.raises(ValueError, match="multiple of 3 heads"):
        scale.multiply(torch.ones(3, KV_HEADS + 1, DIM))
    with pytest.raises(TypeError, match="v must"):
        VScale.from_values(torch.ones(3, KV_HEADS, DIM, dtype=torch.int32))
    with pytest.raises(ValueError, match="with tokens"):
        VScale.from_values(torch.ones(0, KV_HEADS, DIM))
