"""Nothing that a caller passes makes sparse attention read or write outside its tensors, or run for long."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.runtime.launch import executing
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    choose_mode,
    plan_sparse,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_fp8,
)
from narrowkv.sparse_fp8.cases import SparseCase, SparseInputs
from narrowkv.testing.calls import LaunchRecorder

pytestmark = pytest.mark.sampled
W = SparseCase.small
I32, I64 = torch.int32, torch.int64
ROWS, GUARDS = 40, 24


def _wide(inputs: SparseInputs, **options: Any) -> Any:
    return sparse_prefill(inputs.q, inputs.prefix, inputs.extend, **options)


def _fused(inputs: SparseInputs, **options: Any) -> Any:
    return sparse_prefill_fp8(inputs.q, inputs.prefix, inputs.extend, mode="fused", **options)


def _prepass(inputs: SparseInputs, **options: Any) -> Any:
    return sparse_prefill_fp8(inputs.q, inputs.prefix, inputs.extend, mode="prepass", **options)


def _decode(inputs: SparseInputs, **options: Any) -> Any:
    return sparse_decode(inputs.q, inputs.prefix, inputs.extend, num_splits=2, **options)


WAYS: dict[str, tuple[str, Callable[..., Any]]] = {
    "16bit": ("bf16", _wide),
    "prepass": ("packed584", _prepass),
    "fused packed584": ("packed584", _fused),
    "fused split": ("split", _fused),
    "fused row512": ("row512", _fused),
    "decode wide": ("bf16", _decode),
    "decode fused": ("packed584", _decode),
}
every_way = pytest.mark.parametrize("way", WAYS)


def _guarded(way: str, device: str) -> SparseInputs:
    """Five tokens over a pool that lies between rows of NaN in one larger pool."""
    layout, _ = WAYS[way]
    inputs = W(
        layout=layout, num_qo_heads=8, prefix_lens=(9, 0, 6, 1, 12), pool_rows=ROWS, page_size=4, skipped=0.2
    ).build(device)
    assert inputs.prefix is not None
    x = torch.randn(ROWS, 512, generator=torch.Generator().manual_seed(3))
    padded = torch.full((ROWS + 2 * GUARDS, 512), math.nan)
    padded[GUARDS : GUARDS + ROWS] = x
    if layout == "bf16":
        rows: torch.Tensor | DSV4Rows = padded.bfloat16().to(device)[GUARDS : GUARDS + ROWS]
    else:
        whole = DSV4Rows.quantize(padded.to(device), layout=layout, page_size=4)
        size = whole.page_size
        inside = slice(GUARDS // size, (GUARDS + ROWS) // size)
        rows = replace(
            whole,
            data=whole.data[inside],
            rope=None if whole.rope is None else whole.rope[inside],
            scale=None if whole.scale is None else whole.scale[inside],
        )
        assert not bool(rows.dequantize().isnan().any())
    return replace(inputs, prefix=replace(inputs.prefix, rows=rows))


# None of these becomes a row of the pool when its offset wraps at 32 bits.
WILD = (-2, -7, -GUARDS, ROWS, ROWS + 1, ROWS + GUARDS - 1, 123_457, 2**30 + 5, 2**31 - 1, -(2**31))
WILD_64 = (2**32 + 3, 2**33 + 8, -(2**40) + 1, 2**31, 2**63 - 1)


@pytest.mark.parametrize("dtype", [I32, I64])
@every_way
def test_an_index_out_of_range_reads_no_row(way: str, dtype: torch.dtype, device: str) -> None:
    _, run = WAYS[way]
    inputs = _guarded(way, device)
    source = inputs.prefix
    assert source is not None
    wild = (*WILD, *WILD_64) if dtype == I64 else WILD
    indices = source.indices.to(dtype)
    right = run(replace(inputs, prefix=replace(source, indices=torch.where(indices % 4 == 0, -1, indices))))
    for shift in range(0, len(wild), 3):
        bad = torch.tensor(wild, dtype=dtype, device=device).roll(shift)
        bad = bad.repeat(-(-indices.numel() // len(wild)))[: indices.numel()]
        mixed = replace(source, indices=torch.where(indices % 4 == 0, bad, indices))
        o = run(replace(inputs, prefix=mixed))
        assert torch.equal(o, right)
        with pytest.raises(ValueError, match=r"prefix\.indices must be -1 or rows below"):
            run(replace(inputs, prefix=mixed), validate=True)


@every_way
def test_indptr_and_indices_may_be_int64(way: str, device: str) -> None:
    _, run = WAYS[way]
    inputs = _guarded(way, device)
    source = inputs.prefix
    assert source is not None
    longer = replace(source, indptr=source.indptr.long(), indices=source.indices.long())
    assert torch.equal(run(replace(inputs, prefix=longer)), run(inputs))


# What the three tokens before and after the wrong element have; token 2 and 3 may change.
INDPTRS = {
    "beyond the indices": 10**6,
    "far beyond the indices": 2**31 - 1,
    "negative": -5,
    "most negative": -(2**31),
    "decreasing": 3,
}


@pytest.mark.parametrize("what", INDPTRS)
@every_way
def test_a_wrong_indptr_changes_only_the_tokens_that_it_bounds(way: str, what: str, device: str) -> None:
    _, run = WAYS[way]
    inputs = _guarded(way, device)
    source = inputs.prefix
    assert source is not None
    indptr = source.indptr.clone()
    indptr[3] = INDPTRS[what]  # the end of token 2 and the beginning of token 3
    wrong = replace(source, indptr=indptr)
    right = run(inputs)
    o = run(replace(inputs, prefix=wrong))
    others = torch.tensor([0, 1, 4], device=device)
    assert torch.equal(o[others], right[others])
    assert bool(o.isfinite().all())
    with pytest.raises(ValueError, match=r"prefix\.indptr must"):
        run(replace(inputs, prefix=wrong), validate=True)


def test_indices_end_before_the_buffer_does(device: str) -> None:
    """Index lists that are views: what lies behind them is never read, whatever indptr says."""
    inputs = _guarded("fused packed584", device)
    source = inputs.prefix
    assert source is not None
    behind = torch.zeros(source.nnz + 64, dtype=I32, device=device)  # row 0 is there
    behind[: source.nnz] = source.indices
    indptr = source.indptr.clone()
    indptr[-1] = source.nnz + 50
    viewed = replace(source, indices=behind[: source.nnz], indptr=indptr)
    assert torch.equal(_fused(replace(inputs, prefix=viewed)), _fused(inputs))


# ------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("indptr", "message"),
    [
        ([1, 3, 4], r"prefix\.indptr must start at 0, got 1"),
        ([0, 3, 2], r"prefix\.indptr must not decrease, got 3 and then 2 at elements 1 and 2"),
        ([0, 3, 9], r"prefix\.indptr must end within the 4 indices, got 9"),
    ],
)
def test_validate_says_what_is_wrong_with_an_indptr(indptr: list[int], message: str, device: str) -> None:
    inputs = W(prefix_lens=(2, 2), num_qo_heads=8).build(device)
    assert inputs.prefix is not None
    wrong = replace(inputs.prefix, indptr=torch.tensor(indptr, dtype=I32, device=device))
    for run in (_fused, _prepass, _decode):
        with pytest.raises(ValueError, match=message):
            run(replace(inputs, prefix=wrong), validate=True)


@pytest.mark.parametrize("index", [-2, -(2**31), 256, 2**30 + 5])
def test_validate_refuses_each_index_that_is_no_row(index: int, device: str) -> None:
    inputs = W(prefix_lens=(2, 2), num_qo_heads=8, pool_rows=256).build(device)
    assert inputs.prefix is not None
    indices = inputs.prefix.indices.clone()
    indices[2] = index
    with pytest.raises(ValueError, match=f"must be -1 or rows below 256, got {index}"):
        _fused(replace(inputs, prefix=replace(inputs.prefix, indices=indices)), validate=True)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 3.0])
@pytest.mark.parametrize("place", ["prefix", "extend", "q"])
def test_validate_refuses_a_scale_that_is_no_power_of_two(place: str, scale: float, device: str) -> None:
    inputs = W(prefix_lens=(2, 2), extend_lens=(1, 1), num_qo_heads=8, skipped=0.0).build(device)
    assert inputs.prefix is not None
    assert inputs.extend is not None
    q = DSV4Rows.quantize(inputs.q, layout="split")
    rows = {"prefix": inputs.prefix.rows, "extend": inputs.extend.rows, "q": q}[place]
    assert isinstance(rows, DSV4Rows)
    assert rows.scale is not None
    index = 0 if place == "q" else int(getattr(inputs, place).indices[0])
    _fused(replace(inputs, q=q), validate=True)
    rows.scale[index, 2] = scale
    with pytest.raises(ValueError, match=rf"{place}\.rows must have scales that are powers of two"):
        _fused(replace(inputs, q=q), validate=True)


def test_validate_passes_over_scales_of_rows_that_nobody_names(device: str) -> None:
    inputs = W(layout="packed584", prefix_lens=(2, 2), num_qo_heads=8).build(device)
    assert inputs.prefix is not None
    rows = inputs.prefix.rows
    assert isinstance(rows, DSV4Rows)
    assert bool(rows.unpack()[2].isnan().any() | rows.dequantize().isnan().any())
    for run in (_fused, _prepass, _decode):
        run(inputs, validate=True)


def test_validate_refuses_a_sink_of_nan(device: str) -> None:
    inputs = W(layout="bf16", prefix_lens=(2,), num_qo_heads=8).build(device)
    with pytest.raises(ValueError, match="attn_sink must not hold NaN"):
        _wide(inputs, attn_sink=torch.full((8,), math.nan, device=device), validate=True)


# ------------------------------------------------------------------------------------------ rows


def _rows(layout: str) -> DSV4Rows:
    return DSV4Rows.quantize(torch.randn(8, 512), layout=layout, page_size=4)


BAD_ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "pages larger than the buffer's": ("packed584", {"page_size": 64}, "buffer must have shape"),
    "an odd stride between pages": (
        "packed584",
        {"data": torch.zeros(2 * 2337, dtype=torch.uint8).as_strided((2, 2336), (2337, 1))},
        "must start at a multiple of 2 bytes and have a stride between pages",
    ),
    "pages of split rows": ("split", {"page_size": 4}, "page_size must be 1"),
    "fewer rows of RoPE": (
        "split", {"rope": torch.zeros(7, 64).bfloat16()},
        r"rope must have shape \[8, 64\]",
    ),
    "RoPE in fp16": ("row512", {"rope": torch.zeros(8, 64).half()}, "rope must have dtype"),
    "no RoPE": ("row512", {"rope": None}, "rope must be a torch.Tensor"),
    "fewer scales": ("split", {"scale": torch.ones(7, 7)}, r"scale must have shape \[8, 7\]"),
    "scales for another group": ("split", {"scale_group": 32}, r"scale must have shape \[8, 14\]"),
    "a group of 16": ("row512", {"scale_group": 16}, "scale_group must be 64 or 32"),
    "scales apart that lie in the rows": ("row512", {"scale": torch.ones(8, 7)}, "scale must be None"),
    "RoPE apart that lies in the pages": (
        "packed584", {"rope": torch.zeros(8, 64).bfloat16()}, "rope must be None",
    ),
    "another format": ("split", {"format": "fp8_e4m3fnuz"}, "nope"),
    "an unknown layout": ("split", {"layout": "rows"}, "layout must be one of"),
    "NoPE that is too narrow": (
        "split", {"data": torch.zeros(8, 440).to(torch.float8_e4m3fn)},
        "nope must have",
    ),
    "scales that require grad": (
        "split", {"scale": torch.ones(8, 7, requires_grad=True)}, "pass scale.detach",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_ROWS)
def test_rows_cannot_claim_what_their_tensors_do_not_hold(what: str) -> None:
    layout, changes, message = BAD_ROWS[what]
    rows = _rows(layout)
    with pytest.raises((TypeError, ValueError), match=message):
        replace(rows, **changes)


def test_a_single_page_of_an_odd_number_of_bytes_is_read(device: str) -> None:
    rows = DSV4Rows.quantize(torch.randn(1, 512), layout="packed584", page_size=1, padded=False)
    odd = torch.zeros(1, 585, dtype=torch.uint8)
    odd[:, :584] = rows.data
    indptr = torch.tensor([0, 1], dtype=I32, device=device)
    q = torch.randn(1, 8, 512, device=device).bfloat16()
    results = [
        sparse_prefill_fp8(q, KVSource(DSV4Rows.packed584(data.to(device), page_size=1), indptr, indptr[:1]))
        for data in (rows.data, odd)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("layout", ["split", "packed584", "row512"])
def test_rows_and_sources_compare_and_copy(layout: str) -> None:
    rows = _rows(layout)
    source = KVSource(rows, torch.tensor([0, 2], dtype=I32), torch.tensor([1, 7], dtype=I32))
    q = torch.randn(1, 8, 512).bfloat16()
    plan = plan_sparse(num_qo_heads=8, prefix=rows.bound.format, device="cpu")
    for x in (rows, source, plan):
        assert x == x
        assert x != copy.copy(x)
        assert len({x, copy.copy(x)}) == 2
    expected = plan.run(q, source)
    for other in (copy.copy(source), copy.deepcopy(source), replace(source)):
        for same in (copy.copy(plan), copy.deepcopy(plan)):
            assert torch.equal(same.run(q, other), expected)


# ------------------------------------------------------------------------------------------ outputs


def test_an_output_that_overlaps_itself_or_an_input_is_refused(device: str) -> None:
    inputs = W(layout="split", prefix_lens=(2, 3), extend_lens=(1, 1), num_qo_heads=8).build(device)
    assert inputs.prefix is not None
    rows = inputs.prefix.rows
    assert isinstance(rows, DSV4Rows)
    assert rows.rope is not None
    assert rows.scale is not None

    def roomy(tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers at the beginning of a storage that has room for an output, too."""
        own = torch.empty(tensor.nbytes + 4 * 2 * 8 * 512, dtype=torch.uint8, device=device)
        placed = own[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        placed.view(torch.uint8).copy_(tensor.contiguous().view(torch.uint8))
        return placed

    def at(tensor: torch.Tensor) -> torch.Tensor:
        """An output that begins where a tensor does."""
        return torch.empty(0, device=device).set_(tensor.untyped_storage(), 0, (2, 8, 512))

    rows = replace(rows, data=roomy(rows.data), rope=roomy(rows.rope), scale=roomy(rows.scale))
    indptr, indices = roomy(inputs.prefix.indptr), roomy(inputs.prefix.indices)
    inputs = replace(
        inputs, q=roomy(inputs.q), attn_sink=roomy(inputs.attn_sink), prefix=KVSource(rows, indptr, indices)
    )
    parts = {
        "prefix.rows.data": rows.data,
        "prefix.rows.rope": rows.rope,
        "prefix.rows.scale": rows.scale,
        "prefix.indptr": indptr,
        "prefix.indices": indices,
        "attn_sink": inputs.attn_sink,
        "q": inputs.q,
    }
    for name, tensor in parts.items():
        with pytest.raises(ValueError, match=f"out must not share memory with {name}"):
            _fused(inputs, out=at(tensor), attn_sink=inputs.attn_sink)
    for expanded in (
        torch.empty(1, 8, 512, device=device).expand(2, 8, 512),
        torch.empty(2, 1, 512, device=device).expand(2, 8, 512),
        torch.empty(2 * 8 * 512, device=device).as_strided((2, 8, 512), (8 * 500, 500, 1)),
    ):
        with pytest.raises(ValueError, match="out must not overlap itself"):
            _fused(inputs, out=expanded)
    out = torch.empty(2, 8, 512, device=device)
    with pytest.raises(ValueError, match="lse must not share memory with"):
        _fused(inputs, out=out, lse=out.view(-1)[:16].view(2, 8))
    with pytest.raises(ValueError, match="lse must not overlap itself"):
        _fused(inputs, lse=torch.empty(2, 1, device=device).expand(2, 8))


def test_an_lse_buffer_of_any_strides_is_written(device: str) -> None:
    for layout, run in (("bf16", _wide), ("split", _fused), ("split", _decode)):
        inputs = W(layout=layout, prefix_lens=(5, 70), num_qo_heads=8).build(device)
        _, expected = run(inputs, return_lse=True)
        buffer = torch.full((8, 3, 2), math.nan, device=device)
        lse = buffer[:, 1].T
        assert isinstance(run(inputs, lse=lse), torch.Tensor)
        assert torch.equal(lse, expected)
        assert bool(buffer[:, ::2].isnan().all())


# ------------------------------------------------------------------------------------------ arguments

GOOD = W(layout="split", prefix_lens=(2, 3), num_qo_heads=8).build()
REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "sm_scale beyond float32": (ValueError, "sm_scale must be finite", lambda: _fused(GOOD, sm_scale=1e39)),
    "sm_scale that is a word": (TypeError, "sm_scale must be a float", lambda: _fused(GOOD, sm_scale="1")),
    "zero heads": (ValueError, "num_qo_heads in", lambda: _fused(replace(GOOD, q=GOOD.q[:, :0]))),
    "q that is None": (
        TypeError, "q must be a torch.Tensor or DSV4Rows",
        lambda: _fused(replace(GOOD, q=None)),
    ),
    "a source that is a dict": (
        TypeError, "prefix must be a KVSource",
        lambda: _fused(replace(GOOD, prefix={})),
    ),
    "a source of 16-bit decode that is a list": (
        TypeError, "prefix must be a KVSource", lambda: sparse_decode(GOOD.q, []),
    ),
    "a sink that is a number": (
        TypeError, "attn_sink must be a torch.Tensor",
        lambda: _fused(GOOD, attn_sink=0.5),
    ),
    "out that is a list": (TypeError, "out must be a torch.Tensor", lambda: _fused(GOOD, out=[])),
    "lse in fp16": (TypeError, "lse must have dtype", lambda: _fused(GOOD, lse=torch.empty(2, 8).half())),
    "lse of other heads": (ValueError, "lse must have shape", lambda: _fused(GOOD, lse=torch.empty(2, 9))),
    "too many splits": (
        ValueError, "num_splits must be at most 65535",
        lambda: sparse_decode(GOOD.q, GOOD.prefix, num_splits=65536),
    ),
    "rows that require grad": (
        ValueError, "must not require grad",
        lambda: sparse_prefill(
            GOOD.q, replace(GOOD.prefix, rows=torch.zeros(8, 512).bfloat16().requires_grad_())
        ),
    ),
    "a plan of another class": (TypeError, "plan must be a SparsePlan", lambda: _fused(GOOD, plan="fast")),
    "q of another class to choose_mode": (TypeError, "q must be", lambda: choose_mode(None, GOOD.prefix)),
    "a source of another class to choose_mode": (TypeError, "prefix must be", lambda: choose_mode(GOOD.q, 3)),
    "strided indptr": (
        ValueError, "indptr must have a contiguous",
        lambda: replace(GOOD.prefix, indptr=torch.zeros(6, dtype=I32)[::2]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_words(what: str) -> None:
    error, message, call = REFUSED[what]
    with pytest.raises(error, match=message):
        call()


# ------------------------------------------------------------------------------------------ batch-invariant


@pytest.mark.parametrize(("layout", "fp8_query"), [("bf16", False), ("packed584", False), ("split", True)])
@pytest.mark.parametrize("tokens", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(
    layout: str, fp8_query: bool, tokens: int, device: str
) -> None:
    lens = tuple((7 * i) % 23 for i in range(tokens))
    inputs = W(layout=layout, prefix_lens=lens, num_qo_heads=8, pool_rows=64).build(device)
    source = inputs.prefix
    assert source is not None

    def attend(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin, end = int(source.indptr[first]), int(source.indptr[last])
        part = replace(
            source, indptr=source.indptr[first : last + 1] - begin, indices=source.indices[begin:end].clone()
        )
        q: torch.Tensor | DSV4Rows = inputs.q[first:last]
        if fp8_query:
            q = DSV4Rows.quantize(inputs.q[first:last], layout=layout)
        return sparse_decode(
            q, part, batch_invariant=True, attn_sink=inputs.attn_sink, return_lse=True, num_qo_heads=8
        )  # type: ignore[return-value]

    whole = attend(0, tokens)
    for first, last in ((0, 1), (3, 4), (tokens - 1, tokens), (5, 8), (tokens - 9, tokens - 1)):
        for alone, together in zip(attend(first, last), whole, strict=True):
            assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90"])
@pytest.mark.parametrize("layout", ["bf16", "packed584"])
def test_a_batch_invariant_launch_is_the_same_for_1_to_300_tokens(layout: str, target: str) -> None:
    largest = W(layout=layout, prefix_lens=(600,) * 300, num_qo_heads=64, pool_rows=4).build()
    assert largest.prefix is not None
    rows = largest.prefix.rows
    seen: list[Any] = []
    plain: list[Any] = []
    for tokens in range(1, 301):
        indptr = largest.prefix.indptr[: tokens + 1]
        # Rows of a token differ from batch to batch, and so does their mean.
        source = KVSource(rows, indptr, largest.prefix.indices[: tokens * (tokens % 7) * 90])
        for options, found in (({"batch_invariant": True}, seen), ({}, plain)):
            recorder = LaunchRecorder(target)
            with executing(recorder):
                sparse_decode(largest.q[:tokens], source, **options)
            kernels = [(seen.kernel, seen.constexprs, seen.options) for seen in recorder.launches]
            grids = [launch.grid for launch in recorder.launches]
            if kernels not in found:
                found.append(kernels)
            assert all(extent <= 65535 for grid in grids for extent in grid[1:])
            if options:
                assert grids == [(tokens, 4, 1), (tokens * 64, 1, 1)]
    assert len(seen) == 1
    assert len(plain) > 1  # which is why there is the mode
