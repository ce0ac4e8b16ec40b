"""Sparse attention against the fp32 reference, and what must happen on every fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.quant.accuracy import compare
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import BoundLaunch, compile_for, run_as
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    KVSource,
    choose_mode,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_fp8,
    sparse_prefill_reference,
)
from narrowkv.sparse_fp8.cases import BOUND_16_BIT_QUERY, BOUND_FP8_QK, SparseCase, SparseInputs
from narrowkv.sparse_fp8.config import NUM_HEADS
from narrowkv.sparse_fp8.launch import SparseLaunches

pytestmark = pytest.mark.sampled

W = SparseCase.small
LAYOUTS = ("split", "packed584", "row512")  # of V4
I32 = torch.int32
# The interpreter's rows of a tile; every tile of every target divides it.
TILE = 64
BOTH = {"extend_lens": (3, 0, 64, 1)}


def _fp8_query(inputs: SparseInputs, workload: SparseCase) -> DSV4Rows:
    return DSV4Rows.quantize(inputs.q, layout=workload.layout, page_size=8, format=workload.format)


def _wide(inputs: SparseInputs, **options: Any) -> Any:
    return sparse_prefill(inputs.q, inputs.prefix, inputs.extend, **options)


def _prepass(inputs: SparseInputs, **options: Any) -> Any:
    return sparse_prefill_fp8(inputs.q, inputs.prefix, inputs.extend, mode="prepass", **options)


def _fused(inputs: SparseInputs, **options: Any) -> Any:
    return sparse_prefill_fp8(inputs.q, inputs.prefix, inputs.extend, mode="fused", **options)


def _decode(inputs: SparseInputs, **options: Any) -> Any:
    return sparse_decode(inputs.q, inputs.prefix, inputs.extend, num_splits=3, **options)


WAYS: dict[str, tuple[str, Callable[..., Any]]] = {
    "16bit": ("bf16", _wide),
    "prepass": ("packed584", _prepass),
    "fused": ("packed584", _fused),
    "decode wide": ("bf16", _decode),
    "decode fused": ("packed584", _decode),
}
every_way = pytest.mark.parametrize("way", WAYS)


def _as_attended(source: KVSource | None, run: Callable[..., Any]) -> KVSource | None:
    """The source as a prepass leaves it: products with fp32 scales are rounded to bf16."""
    rows = None if source is None else source.rows
    if run is not _prepass or not isinstance(rows, DSV4Rows) or rows.places.scale != "fp32":
        return source
    assert source is not None
    return replace(source, rows=rows.dequantize().bfloat16())


def _agrees(
    inputs: SparseInputs,
    run: Callable[..., Any],
    bound: float = BOUND_16_BIT_QUERY,
    q: torch.Tensor | DSV4Rows | None = None,
    **options: Any,
) -> torch.Tensor:
    """Runs with a poisoned output, with sink and lse, and compares both; gives o."""
    out = torch.full((*inputs.q.shape[:2], 512), math.nan, dtype=torch.float32, device=inputs.q.device)
    options = {"attn_sink": inputs.attn_sink, **options}
    o, lse = run(inputs if q is None else replace(inputs, q=q), out=out, return_lse=True, **options)
    expected, expected_lse = sparse_prefill_reference(
        inputs.q if q is None else q,
        *(_as_attended(source, run) for source in (inputs.prefix, inputs.extend)),
        return_lse=True,
        **options,
    )
    assert o is out
    assert not bool(o.isnan().any())
    empty = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert not bool(o[empty].any())
    if not bool(empty.all()):
        assert compare(o, expected).relative_l1 <= bound
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=bound)
    return o


def _slow_if(slow: bool, *values: Any) -> Any:
    return pytest.param(*values, marks=[pytest.mark.slow] if slow else [])


# The merge of splits runs one program for each head, which the interpreter takes its time over.
@pytest.mark.parametrize(
    ("way", "heads"), [_slow_if("decode" in way and n > 16, way, n) for way in WAYS for n in NUM_HEADS]
)
def test_every_number_of_heads(way: str, heads: int, device: str) -> None:
    layout, run = WAYS[way]
    _agrees(W(num_qo_heads=heads, layout=layout, prefix_lens=(70, 0)).build(device), run)


ROW_LENGTHS = (0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1, 256)


@every_way
def test_every_row_length(way: str, device: str) -> None:
    layout, run = WAYS[way]
    heads = 8  # the merge of splits is interpreted head by head
    _agrees(W(layout=layout, num_qo_heads=heads, prefix_lens=ROW_LENGTHS, skipped=0.0).build(device), run)
    only = W(layout=layout, num_qo_heads=heads, prefix_lens=None, extend_lens=(TILE + 1, 0))
    _agrees(only.build(device), run)


@every_way
def test_two_sources_share_one_softmax(way: str, device: str) -> None:
    layout, run = WAYS[way]
    inputs = W(layout=layout, num_qo_heads=8, prefix_lens=(70, 0), extend_lens=(3, 64)).build(device)
    both = _agrees(inputs, run)
    assert not torch.allclose(both, _agrees(replace(inputs, extend=None), run))


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90"])
@pytest.mark.parametrize("way", ["16bit", "prepass", "fused"])
def test_the_code_paths_of_every_target(way: str, target: str) -> None:
    layout, run = WAYS[way]
    with run_as(target):
        _agrees(W(layout=layout, num_qo_heads=64, prefix_lens=(70,), extend_lens=(3,)).build(), run)


NEWER = (
    "packed528",
    "packed288",
    "packed272",
    "record528",
    "record288",
    "record272",
    "record656",
    "record352",
)


@pytest.mark.parametrize("mode", [_prepass, _fused])
@pytest.mark.parametrize(
    ("layout", "fmt"),
    [
        *((layout, fmt) for layout in LAYOUTS for fmt in ("fp8_e4m3fn", "fp8_e4m3fnuz")),
        *((layout, "fp8_e4m3fn") for layout in NEWER),
    ],
)
def test_every_layout_and_format(layout: str, fmt: str, mode: Callable[..., Any], device: str) -> None:
    _agrees(W(layout=layout, format=fmt, **BOTH).build(device), mode)


# Prefix and extend, each in a layout and a format of its own, as in vLLM's cache on gfx942.
MIXED = {
    "FNUZ beside OCP": ("packed584", "fp8_e4m3fn", "packed584", "fp8_e4m3fnuz"),
    "OCP beside FNUZ": ("split", "fp8_e4m3fnuz", "row512", "fp8_e4m3fn"),
    "FP8 beside NVFP4": ("packed528", "fp8_e4m3fn", "packed288", ""),
    "FNUZ beside MXFP4": ("record528", "fp8_e4m3fnuz", "packed272", ""),
    "FP4 beside FP8": ("record352", "", "record656", "fp8_e4m3fn"),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("way", ["prepass", "fused", "decode fused"])
def test_each_source_has_a_layout_and_a_format_of_its_own(way: str, name: str, device: str) -> None:
    layout, fmt, extend_layout, extend_format = MIXED[name]
    case = W(
        layout=layout, format=fmt or "fp8_e4m3fn", extend_layout=extend_layout, extend_format=extend_format,
        num_qo_heads=8, clean=False, prefix_lens=(70, 0, 3), extend_lens=(3, 64, 0), page_size=4,
    )  # fmt: skip
    inputs = case.build(device)
    both = _agrees(inputs, WAYS[way][1])
    assert not torch.allclose(both, _agrees(replace(inputs, extend=None), WAYS[way][1]))


@pytest.mark.parametrize("layout", ["packed528", "packed288", "record272", "record656", "record352"])
def test_a_quantised_query_in_any_layout(layout: str, device: str) -> None:
    inputs = W(layout=layout, num_qo_heads=8, **BOTH).build(device)
    heads = inputs.q.shape[1]
    q = DSV4Rows.quantize(inputs.q, layout=layout, page_size=heads)
    o = sparse_prefill_fp8(q, inputs.prefix, inputs.extend, mode="fused", num_qo_heads=heads)
    expected = sparse_prefill_reference(q, inputs.prefix, inputs.extend, num_qo_heads=heads)
    assert isinstance(o, torch.Tensor)
    assert compare(o, expected).relative_l1 <= BOUND_16_BIT_QUERY  # type: ignore[arg-type]


def test_a_query_in_another_format_than_the_rows(device: str) -> None:
    inputs = W(layout="packed584", num_qo_heads=8, **BOTH).build(device)
    q = DSV4Rows.quantize(inputs.q, format="fp8_e4m3fnuz")
    o = sparse_prefill_fp8(q, inputs.prefix, inputs.extend, mode="fused")
    expected = sparse_prefill_reference(q, inputs.prefix, inputs.extend)
    assert isinstance(o, torch.Tensor)
    assert compare(o, expected).relative_l1 <= BOUND_16_BIT_QUERY  # type: ignore[arg-type]


def test_16_bit_rows_of_576_columns(device: str) -> None:
    x = torch.randn(40, 576, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    inputs = W(layout="bf16", num_qo_heads=8, pool_rows=40).build(device)
    assert inputs.prefix is not None
    q = torch.randn(4, 8, 576, generator=torch.Generator().manual_seed(4)).bfloat16().to(device)
    source = replace(inputs.prefix, rows=x)
    o = sparse_prefill(q, source)
    expected = sparse_prefill_reference(q, source)
    assert isinstance(o, torch.Tensor)
    assert o.shape == (4, 8, 512)
    assert compare(o, expected).relative_l1 <= BOUND_16_BIT_QUERY  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as many columns as q"):
        sparse_prefill(q, inputs.prefix)


@pytest.mark.parametrize(("page_size", "padded"), [(1, True), (3, False), (64, False), (256, True)])
@pytest.mark.parametrize("mode", [_prepass, _fused])
def test_every_page_size_padded_or_not(
    mode: Callable[..., Any], page_size: int, padded: bool, device: str
) -> None:
    _agrees(W(layout="packed584", page_size=page_size, padded=padded).build(device), mode)


@pytest.mark.parametrize("mode", [_prepass, _fused])
def test_scales_of_32_columns(mode: Callable[..., Any], device: str) -> None:
    inputs = W(layout="row512").build(device)
    assert inputs.prefix is not None
    rows = inputs.prefix.rows
    assert isinstance(rows, DSV4Rows)
    data = rows.data.clone()
    data[:, 449:462:2] += 2  # the second half of each tile counts four times as much
    finer = DSV4Rows.row512(data, rows.rope, scale_group=32, negative_zero_free=True)  # type: ignore[arg-type]
    assert not torch.equal(finer.dequantize()[0], rows.dequantize()[0])
    _agrees(replace(inputs, prefix=replace(inputs.prefix, rows=finer)), mode)
    split = DSV4Rows.split(*finer.unpack())
    _agrees(replace(inputs, prefix=replace(inputs.prefix, rows=split)), mode)


@pytest.mark.parametrize(
    ("layout", "target"),
    [
        _slow_if(target != "cpu" and layout != "packed584", layout, target)
        for layout in LAYOUTS
        for target in ("cpu", "gfx942", "gfx950", "sm90")
    ],
)
def test_a_query_in_fp8(layout: str, target: str) -> None:
    workload = W(layout=layout, **BOTH)
    inputs = workload.build()
    with run_as(target):
        _agrees(inputs, _fused, BOUND_FP8_QK, q=_fp8_query(inputs, workload))


def test_an_fp8_query_whose_last_page_is_not_full(device: str) -> None:
    inputs = W(layout="packed584", prefix_lens=(70, 3, 9)).build(device)
    q = DSV4Rows.quantize(inputs.q, layout="packed584", page_size=64)  # 48 rows of 64
    o = _agrees(inputs, _fused, BOUND_FP8_QK, q=q, num_qo_heads=16)
    assert o.shape == (3, 16, 512)
    for heads in (None, 32):
        with pytest.raises(ValueError, match="num_qo_heads"):
            _fused(replace(inputs, q=q), num_qo_heads=heads)
    with pytest.raises(ValueError, match="num_qo_heads"):
        _fused(inputs, num_qo_heads=8)


@pytest.mark.parametrize("foreign", [True, False])
def test_bytes_from_elsewhere_may_hold_negative_zero_and_nan(foreign: bool) -> None:
    """0x80 is -0 in OCP and NaN in FNUZ, which gfx942 multiplies: read as FNUZ it would poison the row."""
    inputs = W(layout="split", prefix_lens=(20,), skipped=0.0).build()
    assert inputs.prefix is not None
    rows = inputs.prefix.rows
    assert isinstance(rows, DSV4Rows)
    data = rows.data.view(torch.uint8).clone()
    if foreign:
        data[::2, ::5] = 0x80
    rows = replace(rows, data=data.view(torch.float8_e4m3fn), negative_zero_free=not foreign)
    inputs = replace(inputs, prefix=replace(inputs.prefix, rows=rows))
    for target in ("gfx942", "gfx950"):
        with run_as(target):
            _agrees(inputs, _fused)
            _agrees(inputs, _prepass)


@every_way
def test_sink_scales_the_output_and_leaves_lse_alone(way: str, device: str) -> None:
    layout, run = WAYS[way]
    inputs = W(layout=layout, num_qo_heads=8, prefix_lens=(70, 0)).build(device)
    out = torch.empty(inputs.q.shape, device=device)
    plain, lse = run(inputs, out=out, return_lse=True)
    sunk, same = run(inputs, out=torch.empty_like(out), return_lse=True, attn_sink=inputs.attn_sink)
    assert torch.equal(lse, same)
    torch.testing.assert_close(sunk, plain * torch.sigmoid(lse - inputs.attn_sink)[..., None])
    nothing = torch.full_like(inputs.attn_sink, -math.inf)
    assert torch.equal(run(inputs, out=torch.empty_like(out), attn_sink=nothing), plain)
    everything = torch.full_like(inputs.attn_sink, math.inf)
    assert not bool(run(inputs, out=torch.empty_like(out), attn_sink=everything).any())


@every_way
def test_rows_that_name_nothing_are_zero(way: str, device: str) -> None:
    layout, run = WAYS[way]
    inputs = W(layout=layout, prefix_lens=(70, 3), skipped=1.0).build(device)
    assert not bool(_agrees(inputs, run).any())


def test_no_tokens_at_all(device: str) -> None:
    for layout, run in WAYS.values():
        inputs = W(layout=layout, prefix_lens=()).build(device)
        assert run(inputs).shape == (0, 16, 512)


@every_way
def test_order_does_not_matter_and_a_row_named_twice_counts_twice(way: str, device: str) -> None:
    layout, run = WAYS[way]
    inputs = W(layout=layout, prefix_lens=(66,), skipped=0.0).build(device)
    assert inputs.prefix is not None
    source = inputs.prefix
    turned = replace(source, indices=source.indices.flip(0).contiguous())
    out = _agrees(inputs, run)
    assert compare(_agrees(replace(inputs, prefix=turned), run), out).relative_l1 <= BOUND_16_BIT_QUERY
    twice = KVSource(source.rows, source.indptr * 2, source.indices.repeat_interleave(2).contiguous())
    _agrees(replace(inputs, prefix=twice), run)


@every_way
def test_indices_out_of_range_are_skipped(way: str, device: str) -> None:
    layout, run = WAYS[way]
    inputs = W(layout=layout, prefix_lens=(20,)).build(device)
    assert inputs.prefix is not None
    indices = inputs.prefix.indices.clone()
    indices[::3] = torch.tensor([-7, 2**30, inputs.prefix.num_rows], device=device).repeat(7)[:7]
    wild = replace(inputs, prefix=replace(inputs.prefix, indices=indices))
    _agrees(wild, run)
    with pytest.raises(ValueError, match=r"prefix\.indices"):
        run(wild, validate=True)


@pytest.mark.parametrize("indptr", [[1, 4], [0, -3], [0, 99]])
def test_an_indptr_that_lies_stays_inside_the_indices(indptr: list[int], device: str) -> None:
    inputs = W(prefix_lens=(4,)).build(device)
    assert inputs.prefix is not None
    lying = replace(
        inputs, prefix=replace(inputs.prefix, indptr=torch.tensor(indptr, dtype=I32, device=device))
    )
    assert bool(_fused(lying).isfinite().all())
    with pytest.raises(ValueError, match=r"prefix\.indptr"):
        _fused(lying, validate=True)


@every_way
def test_nan_in_a_used_row_stays_with_the_tokens_that_name_it(way: str, device: str) -> None:
    layout, run = WAYS[way]
    inputs = W(layout=layout, prefix_lens=(3, 2), skipped=0.0).build(device)
    assert inputs.prefix is not None
    indices = torch.tensor([0, 2, 4, 3, 6], dtype=I32, device=device)  # row 3 is NaN
    o = run(replace(inputs, prefix=replace(inputs.prefix, indices=indices)))
    assert bool(o[0].isfinite().all())
    assert bool(o[1].isnan().all())


@pytest.mark.parametrize("spread", [0.0, 30.0])
@every_way
def test_flat_and_peaky_logits(way: str, spread: float, device: str) -> None:
    layout, run = WAYS[way]
    _agrees(W(layout=layout, spread=spread, prefix_lens=(70, 9)).build(device), run)


@every_way
def test_sm_scale(way: str, device: str) -> None:
    layout, run = WAYS[way]
    inputs = W(layout=layout, prefix_lens=(20,)).build(device)
    _agrees(inputs, run, sm_scale=0.1)
    _agrees(inputs, run, sm_scale=0.0)
    with pytest.raises(ValueError, match="sm_scale"):
        run(inputs, sm_scale=math.nan)


@pytest.mark.parametrize(("q", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bit_dtypes(q: str, dtype: torch.dtype, device: str) -> None:
    _agrees(W(layout=q, q=q, **BOTH).build(device), _wide)
    for mode in (_prepass, _fused):
        _agrees(W(layout="split", q=q, **BOTH).build(device), mode)
        assert mode(W(layout="split", q=q).build(device)).dtype == dtype


def test_one_16_bit_and_one_fp8_source_through_the_prepass(device: str) -> None:
    inputs = replace(W(layout="split").build(device), extend=W(layout="bf16", **BOTH).build(device).extend)
    _agrees(inputs, _prepass)
    chosen = choose_mode(inputs.q, inputs.prefix, inputs.extend)
    assert chosen.mode == "prepass"
    assert "16-bit" in chosen.why
    with pytest.raises(UnsupportedError, match=r"extend\.rows"):
        _fused(inputs)


def test_prepass_expands_what_is_less_the_pool_or_the_named_rows(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    right = SparseLaunches.expand

    def expand(
        launches: SparseLaunches, rows: DSV4Rows, named_by: KVSource | None, count: int, *rest: Any
    ) -> None:
        sizes.append(count)
        right(launches, rows, named_by, count, *rest)

    monkeypatch.setattr(SparseLaunches, "expand", expand)
    few = W(prefix_lens=(9, 2), pool_rows=256).build(device)
    many = W(prefix_lens=(9, 2) * 40, pool_rows=64).build(device)
    _agrees(few, _prepass)
    _agrees(many, _prepass)
    assert sizes == [11, 64]


@pytest.mark.parametrize("way", ["fused", "decode fused"])
def test_fused_allocates_nothing_that_grows_with_the_pool(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = WAYS[way]
    seen: dict[int, list[int]] = {}
    right = torch.empty
    for rows in (64, 4096):
        sizes = seen.setdefault(rows, [])

        def empty(*shape: Any, sizes: list[int] = sizes, **options: Any) -> torch.Tensor:
            made = right(*shape, **options)
            sizes.append(made.numel())
            return made

        inputs = W(prefix_lens=(9,), pool_rows=rows).build()
        monkeypatch.setattr(torch, "empty", empty)
        run(inputs)
        monkeypatch.setattr(torch, "empty", right)
    assert seen[64] == seen[4096]


@pytest.mark.parametrize(
    ("target", "fmt", "clean", "mode"),
    [
        ("cpu", "fp8_e4m3fn", True, "fused"),
        ("sm90", "fp8_e4m3fn", True, "prepass"),
        ("gfx942", "fp8_e4m3fn", True, "fused"),
        ("gfx942", "fp8_e4m3fn", False, "prepass"),
        ("gfx942", "fp8_e4m3fnuz", False, "fused"),
        ("gfx950", "fp8_e4m3fn", False, "fused"),
        ("gfx950", "fp8_e4m3fnuz", True, "prepass"),
    ],
)
def test_the_mode_that_is_chosen_and_why(target: str, fmt: str, clean: bool, mode: str) -> None:
    inputs = W(format=fmt).build()
    assert inputs.prefix is not None
    source = replace(inputs.prefix, rows=replace(inputs.prefix.rows, negative_zero_free=clean))  # type: ignore[type-var]
    with run_as(target):
        chosen = choose_mode(inputs.q, source)
    assert chosen.mode == mode
    assert "measured" in chosen.why or "model" in chosen.why


@pytest.mark.parametrize(("target", "often"), [("gfx942", 6), ("gfx950", 3)])
def test_rows_that_are_read_often_are_expanded_first_on_amd(target: str, often: int) -> None:
    rows = DSV4Rows.quantize(torch.zeros(16, 512))
    for readings, mode in ((often - 1, "fused"), (often, "prepass")):
        starts = torch.arange(readings + 1, dtype=torch.int32) * 16
        source = KVSource(rows, starts, torch.arange(16, dtype=torch.int32).repeat(readings))
        with run_as(target):
            chosen = choose_mode(torch.zeros(readings, 16, 512).bfloat16(), source)
        assert chosen.mode == mode, readings


def test_a_mode_that_is_asked_for() -> None:
    inputs = W().build()
    assert choose_mode(inputs.q, inputs.prefix, mode="prepass").why == "asked for"
    with pytest.raises(ValueError, match="mode"):
        choose_mode(inputs.q, inputs.prefix, mode="fast")


@pytest.mark.parametrize("splits", [1, 2, 64])
@pytest.mark.parametrize("layout", ["bf16", "packed584"])
def test_every_number_of_splits(layout: str, splits: int, device: str) -> None:
    inputs = W(layout=layout, num_qo_heads=8, prefix_lens=(256, 0), extend_lens=(40, 0)).build(device)

    def run(inputs: SparseInputs, **options: Any) -> Any:
        return sparse_decode(inputs.q, inputs.prefix, inputs.extend, num_splits=splits, **options)

    assert torch.equal(_agrees(inputs, run), _agrees(inputs, run))


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("layout", ["bf16", "packed584"])
def test_one_token_compiles(layout: str, target: str) -> None:
    """Triton compiles a launch argument of 1 as a constant, which the interpreter does not."""
    inputs = W(layout=layout, prefix_lens=(1,)).build()
    with compile_for(target) as artifacts:
        _decode(inputs)
    assert [artifact.name for artifact in artifacts][1:] == ["_merge_sparse_kernel"]


def test_strided_tensors(device: str) -> None:
    for layout, run in WAYS.values():
        inputs = W(layout=layout, prefix_lens=(20, 3)).build(device)
        q = torch.empty(2, 32, 512, dtype=torch.bfloat16, device=device)[:, ::2]
        q.copy_(inputs.q)
        _agrees(inputs, run, q=q)
    inputs = W(layout="split", prefix_lens=(20, 3)).build(device)
    assert inputs.prefix is not None
    rows = inputs.prefix.rows
    assert isinstance(rows, DSV4Rows)
    spaced = [
        torch.zeros(256, 600, dtype=t.dtype, device=device)[:, 3 : 3 + t.shape[1]] for t in rows.unpack()
    ]
    for there, here in zip(spaced, rows.unpack(), strict=True):
        there.view(torch.uint8).copy_(
            here.contiguous().view(torch.uint8)
        ) if here.element_size() == 1 else there.copy_(here)
    _agrees(replace(inputs, prefix=replace(inputs.prefix, rows=DSV4Rows.split(*spaced))), _fused)


# ------------------------------------------------------------------------------------------- refusals


def _fp8_query_to_the_16_bit_operation(inputs: SparseInputs) -> Any:
    return _wide(replace(BF16, q=DSV4Rows.quantize(inputs.q)))


BF16 = W(layout="bf16").build()
OTHER = W(prefix_lens=(1,)).build()
REFUSED: dict[str, tuple[str, type[Exception], Callable[[SparseInputs], Any]]] = {
    "no source": ("prefix or extend", ValueError, lambda i: _fused(replace(i, prefix=None))),
    "a source that is none": ("prefix", TypeError, lambda i: _fused(replace(i, prefix=i.q))),
    "other tokens": ("extend.indptr", ValueError, lambda i: _fused(replace(i, extend=OTHER.prefix))),
    "q in fp32": ("q", TypeError, lambda i: _fused(replace(i, q=i.q.float()))),
    "q of other tokens": ("q", ValueError, lambda i: _fused(replace(i, q=i.q[:1]))),
    "q of another width": ("q", ValueError, lambda i: _fused(replace(i, q=i.q[..., :448]))),
    "24 heads": ("num_qo_heads", ValueError, lambda i: _fused(replace(i, q=i.q.repeat(1, 2, 1)[:, :24]))),
    "q transposed": ("q", ValueError, lambda i: _fused(replace(i, q=i.q.mT.contiguous().mT))),
    "FP8 q of other rows": ("q", ValueError, lambda i: _fused(replace(i, q=DSV4Rows.quantize(i.q[:, :15])))),
    "FP8 q over 16-bit rows": ("q", TypeError, _fp8_query_to_the_16_bit_operation),
    "sink of other heads": ("attn_sink", ValueError, lambda i: _fused(i, attn_sink=i.attn_sink[:8])),
    "sink in bf16": ("attn_sink", TypeError, lambda i: _fused(i, attn_sink=i.attn_sink.bfloat16())),
    "sink strided": ("attn_sink", ValueError, lambda i: _fused(i, attn_sink=torch.zeros(32)[::2])),
    "out of another shape": ("out", ValueError, lambda i: _fused(i, out=i.q[:1].clone())),
    "out is q": ("out", ValueError, lambda i: _fused(i, out=i.q)),
    "gradients": ("q", ValueError, lambda i: _fused(replace(i, q=i.q.clone().requires_grad_()))),
    "unknown mode": ("mode", ValueError, lambda i: sparse_prefill_fp8(i.q, i.prefix, mode="best")),
    "16-bit rows to the FP8 operation": ("prefix", UnsupportedError, lambda i: _fused(BF16)),
    "FP8 rows to the 16-bit operation": ("prefix.rows", UnsupportedError, _wide),
    "bf16 rows under fp16 q": ("prefix.rows", TypeError, lambda i: _wide(replace(BF16, q=i.q.half()))),
    "no splits": ("num_splits", ValueError, lambda i: sparse_decode(i.q, i.prefix, num_splits=0)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_any_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:

    def launch(*_: Any) -> None:
        raise AssertionError("launched")

    words, error, call = REFUSED[name]
    inputs = W(layout="split").build()
    monkeypatch.setattr(BoundLaunch, "__call__", launch)
    with pytest.raises(error, match=words):
        call(inputs)


# ------------------------------------------------------------------------------------------------- slow


@pytest.mark.slow
@pytest.mark.parametrize("skipped", [0.0, 0.5, 1.0], ids=["dense", "sparse", "empty"])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("target", ["cpu", "gfx942", "gfx950", "sm90"])
@every_way
def test_every_mixture(way: str, target: str, heads: int, skipped: float) -> None:
    layout, run = WAYS[way]
    with run_as(target):
        workload = W(
            layout=layout,
            num_qo_heads=heads,
            skipped=skipped,
            prefix_lens=ROW_LENGTHS,
            extend_lens=(0, 2) * 4,
        )
        _agrees(workload.build(seed=heads), run)


@pytest.mark.parametrize("part", ["nope", "rope", "scale"])
def test_any_part_that_lies_far_apart_is_read_by_64_bits(part: str) -> None:
    def rows(name: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(40, 2**26 if name == part else width, dtype=dtype, device="meta")[:, :width]

    far = DSV4Rows.split(
        rows("nope", 448, torch.float8_e4m3fn),
        rows("rope", 64, torch.bfloat16),
        rows("scale", 7, torch.float32),
    )
    assert far.bound.format.offsets_64_bit


@pytest.mark.slow
@pytest.mark.large_memory
@pytest.mark.parametrize("way", ["16bit", "fused"])
@pytest.mark.parametrize("strided", ["q", "out"])
def test_heads_beyond_31_bits(way: str, strided: str, device: str) -> None:
    """FAULTS 22: heads lie 640 MiB apart, as in a tensor of many tokens with heads outermost."""
    layout, run = WAYS[way]
    inputs = W(layout=layout, num_qo_heads=8, prefix_lens=(20,)).build(device)
    far = torch.empty(8, 5 * 2**26, dtype=torch.bfloat16, device=device)[None, :, :512]
    if strided == "q":
        assert torch.equal(run(replace(inputs, q=far.copy_(inputs.q))), run(inputs))
    else:
        assert torch.equal(run(inputs, out=far), run(inputs))


@pytest.mark.slow
@pytest.mark.large_memory
def test_offsets_beyond_31_bits(device: str) -> None:
    """FAULTS 22: rows two gibibytes into a pool whose pages are far apart."""
    pages, stride = 40, 2**26
    buffer = torch.zeros(pages * stride, dtype=torch.uint8, device=device).view(pages, stride)
    small = DSV4Rows.quantize(torch.randn(pages, 512), layout="packed584", page_size=1)
    buffer[:, : small.data.shape[1]] = small.data.to(device)
    rows = DSV4Rows.packed584(buffer, page_size=1)
    inputs = W(prefix_lens=(40,)).build(device)
    index = torch.arange(pages, dtype=I32, device=device)
    source = KVSource(rows, torch.tensor([0, pages], dtype=I32, device=device), index)
    near = replace(inputs, prefix=replace(source, rows=small.to(device)))
    far = replace(inputs, prefix=source)
    for mode in (_fused, _prepass):
        assert torch.equal(mode(far), mode(near))
