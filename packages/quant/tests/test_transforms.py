"""The K offset and the Hadamard rotation leave attention as it was (fp64); the lse correction is right."""

import math
from collections.abc import Callable

import pytest
import torch

from narrowkv.quant import KOffset, VScale, hadamard, lse_correction

TOKENS, QUERIES, KV_HEADS, RATIO, DIM = 37, 5, 3, 4, 32
SM_SCALE = 0.37


def keys_and_queries(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    bias = 3 * torch.randn(KV_HEADS, DIM, generator=g)
    k = torch.randn(TOKENS, KV_HEADS, DIM, generator=g, dtype=torch.float64) + bias
    q = torch.randn(QUERIES, KV_HEADS * RATIO, DIM, generator=g, dtype=torch.float64)
    return q.to(dtype), k.to(dtype)


def logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`[queries, q heads, tokens]`."""
    return torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(RATIO, 1)) * SM_SCALE


Transform = Callable[[torch.Tensor], torch.Tensor]
OFFSET = KOffset.from_keys(keys_and_queries()[1])
# Names, what happens to Q and K, and whether lse is to be corrected.
TRANSFORMS: dict[str, tuple[Transform, Transform, bool]] = {
    "offset": (lambda q: q, OFFSET.subtract, True),
    "Hadamard": (hadamard, hadamard, False),
    "offset and Hadamard": (hadamard, lambda k: hadamard(OFFSET.subtract(k)), True),
}


@pytest.mark.parametrize(("queries", "keys", "corrected"), TRANSFORMS.values(), ids=TRANSFORMS)
def test_softmax_and_lse_stay_what_they_were(queries: Transform, keys: Transform, corrected: bool) -> None:
    q, k = keys_and_queries()
    before, after = logits(q, k), logits(queries(q), keys(k))
    torch.testing.assert_close(after.softmax(-1), before.softmax(-1), rtol=0, atol=1e-13)
    correction = lse_correction(q, OFFSET, SM_SCALE)
    assert correction.shape == (QUERIES, KV_HEADS * RATIO)
    assert float(correction.abs().amin()) > 1e-3
    lse = after.logsumexp(-1) + (correction if corrected else 0)
    torch.testing.assert_close(lse, before.logsumexp(-1), rtol=0, atol=1e-12)


def test_correction_accepts_the_bare_tensor_and_is_linear_in_sm_scale() -> None:
    q, k = keys_and_queries(torch.float32)
    offset = KOffset.from_keys(k)
    assert torch.equal(lse_correction(q, offset.offset, 0.5), lse_correction(q, offset, 0.5))
    assert torch.equal(lse_correction(q, offset, 0.0), torch.zeros(QUERIES, KV_HEADS * RATIO))
    of_bf16 = lse_correction(q.bfloat16(), offset, 2.0)
    assert of_bf16.dtype == torch.float32
    torch.testing.assert_close(of_bf16, lse_correction(q.bfloat16().float(), offset, 1.0) * 2)


def test_offset_is_the_mean_and_round_trips() -> None:
    _, k = keys_and_queries()
    torch.testing.assert_close(OFFSET.offset.double(), k.mean(0), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(OFFSET.add(OFFSET.subtract(k)), k, rtol=0, atol=1e-14)
    paged = KOffset.from_keys(k[:36].view(6, 6, KV_HEADS, DIM))
    torch.testing.assert_close(paged.offset, KOffset.from_keys(k[:36]).offset)
    low = k.bfloat16()
    moved = KOffset.from_keys(low).subtract(low)
    assert moved.dtype == torch.float32
    assert torch.equal(moved, low.float() - KOffset.from_keys(low).offset)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hadamard_rounds_once_and_takes_strides(dtype: torch.dtype) -> None:
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = hadamard(x.t())
    assert got.dtype == dtype
    exact = x.t().double() @ sylvester(128)
    unit = 2.0 ** (torch.frexp(exact)[1] - 1) * torch.finfo(dtype).eps
    assert bool(((got.double() - exact).abs() <= 0.51 * unit + 1e-5).all())


def test_a_v_scale_leaves_attention_as_it_was() -> None:
    g = torch.Generator().manual_seed(0)
    v = torch.randn(TOKENS, KV_HEADS, DIM, generator=g, dtype=torch.float64) * torch.logspace(-3, 3, DIM)
    v[:, 1, 5] = 0  # a channel of nothing has scale 1
    scale = VScale.from_values(v)
    assert float(scale.scale[1, 5]) == 1.0
    divided = scale.divide(v)
    torch.testing.assert_close(divided[:, 0].square().mean(0), torch.ones(DIM).double(), rtol=1e-4, atol=0)
    p = torch.rand(QUERIES, KV_HEADS * RATIO, TOKENS, generator=g, dtype=torch.float64)
    o, expected = (torch.einsum("qht,thd->qhd", p, x.repeat_interleave(RATIO, 1)) for x in (divided, v))
    torch.testing.assert_close(scale.multiply(o), expected, rtol=1e-6, atol=1e-12)
    assert scale.multiply(o.bfloat16()).dtype == torch.float32
