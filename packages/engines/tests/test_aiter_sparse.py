"""AITER's sparse functions over every layout of rows that they take, against fp32 attention."""

from __future__ import annotations

import inspect

import pytest
import torch
from engine_checks import BF16, row_attention

from narrowkv.engines import aiter
from narrowkv.quant import relative_l1
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.sparse_fp8 import DSV4Rows

TOKENS, HEADS, POOL, NEW = 3, 16, 40, 8
SCALE = 512**-0.5
SINK = torch.linspace(-1, 1, HEADS)


def _random(*shape: int, seed: int) -> torch.Tensor:
    x = torch.randn(*shape, 512, generator=torch.Generator().manual_seed(seed))
    return x * torch.exp2(torch.arange(512) // 64 % 4 - 2)  # tiles of different size


def _lists(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and where each token's begin; one is -1 and the second token has none."""
    lens = torch.tensor([5, 0, rows])
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, rows, (int(lens.sum()),), generator=generator).to(torch.int32)
    indices[2] = -1
    return indices, torch.tensor([0, *lens.cumsum(0).tolist()], dtype=torch.int32)


PREFIX, EXTEND = _lists(POOL, 1), _lists(NEW, 2)
Q, X, Y = _random(TOKENS, HEADS, seed=3), _random(POOL, seed=4), _random(NEW, seed=5)


def _assert_attends(o: torch.Tensor, q: torch.Tensor, *sources: tuple[torch.Tensor, tuple]) -> None:
    assert o.shape == (TOKENS, HEADS, 512)
    for token in range(TOKENS):
        kv = []
        for rows, (indices, indptr) in sources:
            named = indices[indptr[token] : indptr[token + 1]].long()
            kv.append(rows.float()[named[named >= 0]])
        rows = torch.cat(kv)
        if len(rows):
            assert relative_l1(o[token], row_attention(q[token].float(), rows, SCALE, SINK)) <= BF16
        else:
            assert not bool(o[token].any())


def _packed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of 512 FP8 bytes with fourteen scales that differ, their RoPE columns, and what they are worth."""
    rows = DSV4Rows.quantize(x, layout="row512")
    data = rows.data.clone()
    data[:, 449:462:2] = data[:, 448:462:2] - 1
    finer = DSV4Rows.row512(data, rows.rope, scale_group=32)
    shape = x.shape[:-1]
    return (
        data.view(torch.float8_e4m3fn).view(*shape, 512),
        rows.rope.view(*shape, 64),
        finer.dequantize().view(*shape, 512),
    )


@pytest.mark.parametrize("given", [True, False], ids=["out", "allocated"])
def test_pa_sparse_prefill_fp8_opus_takes_scales_inside_rows(given: bool) -> None:
    (qn, qr, q), (pn, pr, p), (en, er, e) = map(_packed, (Q, X, Y))
    out = torch.full((TOKENS, HEADS, 512), 7.0).bfloat16() if given else None
    o = aiter.pa_sparse_prefill_fp8_opus(
        qn, qr, pn, pr, *PREFIX, en, er, *EXTEND, SINK, SCALE, **({"out": out} if given else {})
    )
    assert o.dtype == torch.bfloat16
    assert not given or o is out
    _assert_attends(o, q, (p, PREFIX), (e, EXTEND))


@pytest.mark.parametrize("name", ["pa_sparse_prefill_opus_fp8", "pa_sparse_prefill_opus_fp8_fused"])
def test_pa_sparse_prefill_opus_fp8_takes_three_tensors(name: str) -> None:
    def split(x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        rows = DSV4Rows.quantize(x)
        parts = [part.view(*x.shape[:-1], -1) for part in rows.unpack()]
        return parts, rows.dequantize().view(x.shape)

    (query, q), (prefix, p), (extend, e) = map(split, (Q, X, Y))
    o = getattr(aiter, name)(*query, *prefix, *extend, *PREFIX, *EXTEND, SINK, SCALE)
    # FP8 by FP8 over NoPE is exact in the products; the portable kernels keep P in bf16 as everywhere.
    _assert_attends(o, q, (p, PREFIX), (e, EXTEND))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.uint8])
@pytest.mark.parametrize("splits", [None, 2])
def test_pa_decode_sparse_takes_fp32_scales(stored: torch.dtype, splits: int | None) -> None:
    rows = DSV4Rows.quantize(X, layout="split512", format="fp8_e4m3fnuz" if "fnuz" in str(stored) else None)
    q = Q.bfloat16()
    o = aiter.pa_decode_sparse(
        q, rows.data.view(stored), *PREFIX, SINK, SCALE, kv_scales=rows.scale, kv_splits=splits
    )
    _assert_attends(o, q, (rows.dequantize(), PREFIX))


def test_pa_decode_sparse_takes_16_bit_rows_and_pages_of_two_caches() -> None:
    q, pool = Q.bfloat16(), X.bfloat16()
    _assert_attends(aiter.pa_decode_sparse(q, pool, *PREFIX, SINK, SCALE), q, (pool, PREFIX))
    pages = DSV4Rows.quantize(X, layout="packed584", page_size=8, padded=False)
    more = DSV4Rows.quantize(Y, layout="packed584", page_size=4, padded=False)
    o = aiter.pa_decode_sparse(
        q, pages.data.view(-1, 8, 584), *PREFIX, SINK, SCALE, extra_cache=more.data.view(-1, 4, 584),
        extra_indices=EXTEND[0], extra_indptr=EXTEND[1],
    )  # fmt: skip
    _assert_attends(o, q, (pages.dequantize(), PREFIX), (more.dequantize(), EXTEND))
    o = aiter.pa_decode_sparse(
        q, pool.view(-1, 8, 512), *PREFIX, SINK, SCALE, extra_cache=Y.bfloat16().view(-1, 4, 512),
        extra_indices=EXTEND[0], extra_indptr=EXTEND[1],
    )  # fmt: skip
    _assert_attends(o, q, (pool, PREFIX), (Y.bfloat16(), EXTEND))


def test_pa_prefill_sparse_with_and_without_rows_of_this_forward() -> None:
    q, pool, rows = Q.bfloat16(), X.bfloat16(), Y.bfloat16()
    o = aiter.pa_prefill_sparse(q, pool, *PREFIX, rows, *EXTEND, SINK, SCALE, has_invalid=True)
    _assert_attends(o, q, (pool, PREFIX), (rows, EXTEND))
    o = aiter.pa_prefill_sparse(q, pool, *PREFIX, None, None, None, SINK, SCALE)
    _assert_attends(o, q, (pool, PREFIX))


def test_what_is_refused_and_why() -> None:
    q, pool = Q.bfloat16(), X.bfloat16()
    with pytest.raises(UnsupportedError, match="skip_reduce"):
        aiter.pa_decode_sparse(q, pool, *PREFIX, SINK, SCALE, skip_reduce=True)
    apart = torch.empty(5, 9, 512).bfloat16()[:, :8]
    with pytest.raises(UnsupportedError, match="adjacent pages"):
        aiter.pa_decode_sparse(q, apart, *PREFIX, SINK, SCALE)
    with pytest.raises(ValueError, match="kv_scales must be None for pages"):
        aiter.pa_decode_sparse(q, pool.view(5, 8, 512), *PREFIX, SINK, SCALE, kv_scales=torch.ones(40, 8))
    with pytest.raises(TypeError, match="too many positional"):
        aiter.pa_decode_sparse(q, pool, *PREFIX, SINK, SCALE, None, None, None, True, False, None, pool)
    names = inspect.signature(aiter.pa_sparse_prefill_fp8_opus).parameters
    assert list(names)[:4] == ["q_nope", "q_rope", "unified_kv_nope", "unified_kv_rope"]
