"""Sparse attention against the fp32 reference, and what must happen on every fault."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

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
from narrowkv.sparse_fp8.layouts import LAYOUTS
from narrowkv.sparse_fp8.operation import SparsePlan
from narrowkv.testing.cases.sparse import BOUND_16_BIT_QUERY, SparseCase
from narrowkv.testing.checking import assert_agrees

pytestmark = pytest.mark.sampled

W = SparseCase.small
V4 = ("split", "packed584", "row512")
I32, U8 = torch.int32, torch.uint8
# The interpreter's rows of a tile; every tile of every target divides it.
TILE = 64
ROW_LENGTHS = (0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1, 256)
BOTH = {"extend_lens": (3, 0, 64, 1)}
WAYS = {
    "16bit": {"mode": "16bit", "layout": "bf16"},
    "prepass": {"mode": "prepass", "layout": "packed584"},
    "fused": {"mode": "fused", "layout": "packed584"},
    "decode wide": {"mode": "decode", "layout": "bf16"},
    "decode fused": {"mode": "decode", "layout": "packed584"},
}
every_way = pytest.mark.parametrize("way", WAYS)
either_mode = pytest.mark.parametrize("mode", ["prepass", "fused"])


def of_way(way, **changes):
    """A small case of a way to attend."""
    return W(**{**WAYS[way], **changes})


def run(case, inputs, **options):
    """`o` of the case's operation."""
    return replace(inputs, case=case).call(return_lse=False, **options)


def _as_attended(source, mode):
    """The source as a prepass leaves it: products with fp32 scales are rounded to bf16."""
    rows = None if source is None else source.rows
    if mode != "prepass" or not isinstance(rows, DSV4Rows) or not rows.places.scales_stay_apart:
        return source
    return replace(source, rows=rows.dequantize().bfloat16())


def agrees(case, device="cpu", inputs=None, q=None, bound=None, lse_bound=None, **options):
    """Runs with a poisoned output, with sink and lse, and compares both; gives o."""
    inputs = case.build(device) if inputs is None else inputs
    if q is None:
        q = inputs.q if case.q != "fp8" else case.inputs(device).q
    out = torch.full((*inputs.q.shape[:2], 512), math.nan, dtype=torch.float32, device=inputs.q.device)
    options = {"attn_sink": inputs.attn_sink, **options}
    o, lse = replace(inputs, case=case, q=q).call(out=out, **options)
    sources = (_as_attended(source, case.mode) for source in (inputs.prefix, inputs.extend))
    options |= {"return_lse": True, "num_qo_heads": case.num_qo_heads}
    expected, expected_lse = sparse_prefill_reference(q, *sources, **options)
    assert o is out
    assert not bool(o[expected_lse == -math.inf].any())
    bound = case.bound if bound is None else bound
    assert_agrees((o, lse), (expected, expected_lse), bound=bound, lse_bound=lse_bound or bound)
    return o


# ------------------------------------------------------------------------------ ways, sizes, layouts, formats

HEADS = (1, 6, 8, 12, 16, 24, 32, 40, 64, 96, 128)
CHANGES = {
    **{f"{n} heads": {"num_qo_heads": n, "prefix_lens": (70, 0)} for n in HEADS},
    "row lengths": {"num_qo_heads": 8, "prefix_lens": ROW_LENGTHS, "skipped": 0.0},
    "extend only": {"num_qo_heads": 8, "prefix_lens": None, "extend_lens": (TILE + 1, 0)},
    "two sources": {"num_qo_heads": 8, "prefix_lens": (70, 0), "extend_lens": (3, 64)},
    "nothing named": {"prefix_lens": (70, 3), "skipped": 1.0},
    "flat logits": {"spread": 0.0, "prefix_lens": (70, 9)},
    "peaky logits": {"spread": 30.0, "prefix_lens": (70, 9)},
}  # fmt: skip


def _slow_if(slow, *values):
    return pytest.param(*values, marks=[pytest.mark.slow] if slow else [])


# The merge of splits runs one program for each head, which the interpreter takes its time over.
@pytest.mark.parametrize(
    ("way", "name"),
    [
        _slow_if("decode" in way and change.get("num_qo_heads", 16) > 16, way, name)
        for way in WAYS
        for name, change in CHANGES.items()
    ],
)
def test_every_way(way, name, device):
    agrees(of_way(way, **CHANGES[name]), device)


@every_way
@pytest.mark.parametrize("sm_scale", [0.1, 0.0])
def test_sm_scale(way, sm_scale, device):
    agrees(of_way(way, prefix_lens=(20,)), device, sm_scale=sm_scale)


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm90"])
@pytest.mark.parametrize("way", ["16bit", "prepass", "fused"])
def test_the_code_paths_of_every_target(way, target):
    with run_as(target):
        agrees(of_way(way, num_qo_heads=64, prefix_lens=(70,), extend_lens=(3,)))


FORMATS = [
    *((layout, fmt) for layout in V4 for fmt in ("fp8_e4m3fn", "fp8_e4m3fnuz")),
    *((layout, "fp8_e4m3fn") for layout in LAYOUTS if layout not in V4),
]


@either_mode
@pytest.mark.parametrize(("layout", "fmt"), FORMATS)
def test_every_layout_and_format(layout, fmt, mode, device):
    agrees(W(mode=mode, layout=layout, format=fmt, **BOTH), device)


@pytest.mark.parametrize(("page_size", "padded"), [(1, True), (3, False), (64, False), (256, True)])
@either_mode
def test_every_page_size_padded_or_not(mode, page_size, padded, device):
    agrees(W(mode=mode, layout="packed584", page_size=page_size, padded=padded), device)


# Prefix and extend, each in a layout and a format of its own, as in vLLM's cache on gfx942.
MIXED = {
    "FNUZ beside OCP": ("packed584", "fp8_e4m3fn", "packed584", "fp8_e4m3fnuz"),
    "OCP beside FNUZ": ("split", "fp8_e4m3fnuz", "row512", "fp8_e4m3fn"),
    "FP8 beside NVFP4": ("packed528", "fp8_e4m3fn", "packed288", ""),
    "FNUZ beside MXFP4": ("record528", "fp8_e4m3fnuz", "packed272", ""),
    "FP4 beside FP8": ("record352", "fp8_e4m3fn", "record656", "fp8_e4m3fn"),
    "fp32 scales beside powers of two": ("split512", "fp8_e4m3fnuz", "packed584", "fp8_e4m3fn"),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("way", ["prepass", "fused", "decode fused"])
def test_each_source_has_a_layout_and_a_format_of_its_own(way, name, device):
    rows = dict(zip(("layout", "format", "extend_layout", "extend_format"), MIXED[name], strict=True))
    sizes = {"prefix_lens": (70, 0, 3), "extend_lens": (3, 64, 0), "num_qo_heads": 8, "page_size": 4}
    agrees(of_way(way, **rows, **sizes, clean=False), device)


@pytest.mark.parametrize(
    "layout", ["packed528", "packed288", "record272", "record656", "record352", "split512"]
)
def test_a_quantised_query_in_any_layout(layout, device):
    case = W(layout=layout, num_qo_heads=8, q="fp8", **BOTH)
    agrees(case, device, bound=BOUND_16_BIT_QUERY, lse_bound=case.bound)


def test_a_query_in_another_format_than_the_rows(device):
    case = W(layout="packed584", num_qo_heads=8, **BOTH)
    inputs = case.build(device)
    agrees(case, inputs=inputs, q=DSV4Rows.quantize(inputs.q, format="fp8_e4m3fnuz"))


@pytest.mark.parametrize(
    ("layout", "target"),
    [
        _slow_if(target != "cpu" and layout != "packed584", layout, target)
        for layout in V4
        for target in ("cpu", "gfx942", "gfx950", "sm90")
    ],
)
def test_a_query_in_fp8(layout, target):
    with run_as(target):
        agrees(W(layout=layout, q="fp8", page_size=8, **BOTH))


def test_an_fp8_query_whose_last_page_is_not_full(device):
    case = W(layout="packed584", prefix_lens=(70, 3, 9), q="fp8")  # 48 rows of 64
    inputs = case.build(device)
    assert agrees(case, inputs=inputs).shape == (3, 16, 512)
    q = case.inputs(device).q
    for query, heads in ((q, None), (q, 32), (inputs.q, 8)):
        with pytest.raises(ValueError, match="num_qo_heads"):
            sparse_prefill_fp8(query, inputs.prefix, mode="fused", num_qo_heads=heads)


def test_16_bit_rows_of_576_columns(device):
    inputs = W(layout="bf16", num_qo_heads=8, pool_rows=40).build(device)
    rows, q = (
        torch.randn(*size, 576, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
        for size in ((40,), (4, 8))
    )
    source = replace(inputs.prefix, rows=rows)
    o = sparse_prefill(q, source)
    assert o.shape == (4, 8, 512)
    assert_agrees(o, sparse_prefill_reference(q, source), bound=BOUND_16_BIT_QUERY)
    with pytest.raises(ValueError, match="as many columns as q"):
        sparse_prefill(q, inputs.prefix)


@either_mode
def test_scales_of_32_columns(mode, device):
    case = W(mode=mode, layout="row512")
    inputs = case.build(device)
    rows = inputs.prefix.rows
    data = rows.data.clone()
    data[:, 449:462:2] += 2  # the second half of each tile counts four times as much
    finer = DSV4Rows.row512(data, rows.rope, scale_group=32, negative_zero_free=True)
    assert not torch.equal(finer.dequantize()[0], rows.dequantize()[0])
    for each in (finer, DSV4Rows.split(*finer.unpack())):
        agrees(case, inputs=replace(inputs, prefix=replace(inputs.prefix, rows=each)))


@pytest.mark.parametrize("mode", ["16bit", "prepass", "fused"])
@pytest.mark.parametrize(("q", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bit_queries(q, dtype, mode, device):
    case = W(mode=mode, layout=q if mode == "16bit" else "split", q=q, **BOTH)
    agrees(case, device)
    assert run(case, case.build(device)).dtype == dtype


def test_one_16_bit_and_one_fp8_source_through_the_prepass(device):
    case = W(mode="prepass", layout="split", extend_layout="bf16", **BOTH)
    inputs = case.build(device)
    agrees(case, inputs=inputs)
    chosen = choose_mode(inputs.q, inputs.prefix, inputs.extend)
    assert chosen.mode == "prepass"
    assert "16-bit" in chosen.why
    with pytest.raises(UnsupportedError, match=r"extend\.rows"):
        run(replace(case, mode="fused"), inputs)


@pytest.mark.parametrize("splits", [1, 2, 64])
@pytest.mark.parametrize("layout", ["bf16", "packed584"])
def test_every_number_of_splits(layout, splits, device):
    sizes = {"num_qo_heads": 8, "prefix_lens": (256, 0), "extend_lens": (40, 0)}
    case = W(mode="decode", layout=layout, splits=splits, **sizes)
    assert torch.equal(agrees(case, device), agrees(case, device))


@pytest.mark.slow
@pytest.mark.parametrize("skipped", [0.0, 0.5, 1.0], ids=["dense", "sparse", "empty"])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("target", ["cpu", "gfx942", "gfx950", "sm90"])
@every_way
def test_every_mixture(way, target, heads, skipped):
    sizes = {"num_qo_heads": heads, "prefix_lens": ROW_LENGTHS, "extend_lens": (0, 2) * 4}
    with run_as(target):
        agrees(of_way(way, **sizes, skipped=skipped, seed=heads))


# ------------------------------------------------------------------------------------------ unusual input


@pytest.mark.parametrize("foreign", [True, False])
def test_bytes_from_elsewhere_may_hold_negative_zero_and_nan(foreign):
    """0x80 is -0 in OCP and NaN in FNUZ, which gfx942 multiplies: read as FNUZ it would poison the row."""
    case = W(layout="split", prefix_lens=(20,), skipped=0.0)
    inputs = case.build()
    rows = inputs.prefix.rows
    data = rows.data.view(U8).clone()
    if foreign:
        data[::2, ::5] = 0x80
    rows = replace(rows, data=data.view(torch.float8_e4m3fn), negative_zero_free=not foreign)
    inputs = replace(inputs, prefix=replace(inputs.prefix, rows=rows))
    for target in ("gfx942", "gfx950"):
        with run_as(target):
            for mode in ("fused", "prepass"):
                agrees(replace(case, mode=mode), inputs=inputs)


@every_way
def test_tokens_may_have_no_index_at_all(way, device):
    """A call without a workspace has scratch of no bytes then, where rows are expanded."""
    agrees(of_way(way, num_qo_heads=8, prefix_lens=(0,)), device)


@every_way
def test_sink_scales_the_output_and_leaves_lse_alone(way, device):
    case = of_way(way, num_qo_heads=8, prefix_lens=(70, 0))
    inputs = case.build(device)

    def attend(sink=None):
        out = torch.empty(inputs.q.shape, device=device)
        return inputs.call(out=out, attn_sink=sink)

    (plain, lse), (sunk, same) = attend(), attend(inputs.attn_sink)
    assert torch.equal(lse, same)
    torch.testing.assert_close(sunk, plain * torch.sigmoid(lse - inputs.attn_sink)[..., None])
    assert torch.equal(attend(torch.full_like(inputs.attn_sink, -math.inf))[0], plain)
    assert not bool(attend(torch.full_like(inputs.attn_sink, math.inf))[0].any())


@every_way
def test_order_does_not_matter_and_a_row_named_twice_counts_twice(way, device):
    case = of_way(way, prefix_lens=(66,), skipped=0.0)
    inputs = case.build(device)
    source = inputs.prefix
    turned = replace(source, indices=source.indices.flip(0).contiguous())
    first, second = (agrees(case, inputs=replace(inputs, prefix=each)) for each in (source, turned))
    assert_agrees(second, first, bound=BOUND_16_BIT_QUERY)
    twice = KVSource(source.rows, source.indptr * 2, source.indices.repeat_interleave(2).contiguous())
    agrees(case, inputs=replace(inputs, prefix=twice))


@every_way
def test_indices_out_of_range_are_skipped(way, device):
    case = of_way(way, prefix_lens=(20,))
    inputs = case.build(device)
    indices = inputs.prefix.indices.clone()
    indices[::3] = torch.tensor([-7, 2**30, inputs.prefix.num_rows], device=device).repeat(7)[:7]
    wild = replace(inputs, prefix=replace(inputs.prefix, indices=indices))
    agrees(case, inputs=wild)
    with pytest.raises(ValueError, match=r"prefix\.indices"):
        run(case, wild, validate=True)


@pytest.mark.parametrize("indptr", [[1, 4], [0, -3], [0, 99]])
def test_an_indptr_that_lies_stays_inside_the_indices(indptr, device):
    case = W(prefix_lens=(4,))
    inputs = case.build(device)
    wrong = replace(inputs.prefix, indptr=torch.tensor(indptr, dtype=I32, device=device))
    lying = replace(inputs, prefix=wrong)
    assert bool(run(case, lying).isfinite().all())
    with pytest.raises(ValueError, match=r"prefix\.indptr"):
        run(case, lying, validate=True)


@every_way
def test_nan_in_a_used_row_stays_with_the_tokens_that_name_it(way, device):
    case = of_way(way, prefix_lens=(3, 2), skipped=0.0)
    inputs = case.build(device)
    indices = torch.tensor([0, 2, 4, 3, 6], dtype=I32, device=device)  # row 3 is NaN
    o = run(case, replace(inputs, prefix=replace(inputs.prefix, indices=indices)))
    assert bool(o[0].isfinite().all())
    assert bool(o[1].isnan().all())


@every_way
def test_strided_queries_and_no_tokens_at_all(way, device):
    case = of_way(way, prefix_lens=(20, 3))
    inputs = case.build(device)
    q = torch.empty(2, 32, 512, dtype=torch.bfloat16, device=device)[:, ::2].copy_(inputs.q)
    agrees(case, inputs=inputs, q=q)
    nothing = replace(case, prefix_lens=())
    assert run(nothing, nothing.build(device)).shape == (0, 16, 512)


def test_strided_rows(device):
    case = W(layout="split", prefix_lens=(20, 3))
    inputs = case.build(device)
    spaced = []
    for part in inputs.prefix.rows.unpack():
        room = torch.zeros(256, 600 * part.element_size(), dtype=U8, device=device).view(part.dtype)
        spaced.append(room[:, 3 : 3 + part.shape[1]])
        spaced[-1].copy_(part)
    rows = DSV4Rows.split(*spaced)
    agrees(case, inputs=replace(inputs, prefix=replace(inputs.prefix, rows=rows)))


@pytest.mark.parametrize("part", ["nope", "rope", "scale"])
def test_any_part_that_lies_far_apart_is_read_by_64_bits(part):
    def rows(name, width, dtype):
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
def test_heads_beyond_31_bits(way, strided, device):
    """Heads lie 640 MiB apart, as in a tensor of many tokens with heads outermost."""
    case = of_way(way, num_qo_heads=8, prefix_lens=(20,))
    inputs = case.build(device)
    far = torch.empty(8, 5 * 2**26, dtype=torch.bfloat16, device=device)[None, :, :512]
    if strided == "q":
        assert torch.equal(run(case, replace(inputs, q=far.copy_(inputs.q))), run(case, inputs))
    else:
        assert torch.equal(run(case, inputs, out=far), run(case, inputs))


@pytest.mark.slow
@pytest.mark.large_memory
@either_mode
def test_offsets_beyond_31_bits(mode, device):
    """Rows two gibibytes into a pool whose pages are far apart."""
    pages, stride = 40, 2**26
    buffer = torch.zeros(pages * stride, dtype=U8, device=device).view(pages, stride)
    small = DSV4Rows.quantize(torch.randn(pages, 512), layout="packed584", page_size=1)
    buffer[:, : small.data.shape[1]] = small.data.to(device)
    case = W(mode=mode, prefix_lens=(40,))
    inputs = case.build(device)
    starts, index = torch.tensor([0, pages], dtype=I32), torch.arange(pages, dtype=I32)
    near, far = (
        replace(inputs, prefix=KVSource(rows, starts.to(device), index.to(device)))
        for rows in (small.to(device), DSV4Rows.packed584(buffer, page_size=1))
    )
    assert torch.equal(run(case, far), run(case, near))


# --------------------------------------------------------------------------- what a call allocates and runs


def test_prepass_expands_what_is_less_the_pool_or_the_named_rows(device, monkeypatch):
    sizes = []
    right = SparsePlan._expanded

    def expanded(plan, values, allocated, side, source):
        layout = right(plan, values, allocated, side, source)
        sizes.append(values["prefix_rows"])
        return layout

    monkeypatch.setattr(SparsePlan, "_expanded", expanded)
    agrees(W(mode="prepass", prefix_lens=(9, 2), pool_rows=256), device)
    agrees(W(mode="prepass", prefix_lens=(9, 2) * 20, pool_rows=64), device)
    assert sizes == [11, 64]


@pytest.mark.parametrize("way", ["fused", "decode fused"])
def test_fused_allocates_nothing_that_grows_with_the_pool(way, monkeypatch):
    seen = {}
    right = torch.empty
    for rows in (64, 4096):
        sizes = seen.setdefault(rows, [])

        def empty(*shape, sizes=sizes, **options):
            made = right(*shape, **options)
            sizes.append(made.numel())
            return made

        case = of_way(way, prefix_lens=(9,), pool_rows=rows)
        inputs = case.build()
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", empty)
            run(case, inputs)
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
def test_the_mode_that_is_chosen_and_why(target, fmt, clean, mode):
    inputs = W(format=fmt, clean=clean).build()
    with run_as(target):
        chosen = choose_mode(inputs.q, inputs.prefix)
    assert chosen.mode == mode
    assert "measured" in chosen.why or "model" in chosen.why
    assert choose_mode(inputs.q, inputs.prefix, mode="prepass").why == "asked for"
    with pytest.raises(ValueError, match="mode"):
        choose_mode(inputs.q, inputs.prefix, mode="fast")


@pytest.mark.parametrize(("target", "often"), [("gfx942", 6), ("gfx950", 3)])
def test_rows_that_are_read_often_are_expanded_first_on_amd(target, often):
    rows = DSV4Rows.quantize(torch.zeros(16, 512))
    for readings, mode in ((often - 1, "fused"), (often, "prepass")):
        starts = torch.arange(readings + 1, dtype=I32) * 16
        source = KVSource(rows, starts, torch.arange(16, dtype=I32).repeat(readings))
        with run_as(target):
            chosen = choose_mode(torch.zeros(readings, 16, 512).bfloat16(), source)
        assert chosen.mode == mode, readings


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("way", ["decode wide", "decode fused"])
def test_one_token_compiles(way, target):
    """Triton compiles a launch argument of 1 as a constant, which the interpreter does not."""
    case = of_way(way, prefix_lens=(1,))
    inputs = case.build()
    with compile_for(target) as artifacts:
        run(case, inputs)
    assert [artifact.name for artifact in artifacts][1:] == ["_merge_sparse_kernel"]


# ---------------------------------------------------------------------------------------------- refusals


def _wide(i, **options):
    return sparse_prefill(i.q, i.prefix, i.extend, **options)


def _fused(i, **options):
    return sparse_prefill_fp8(i.q, i.prefix, i.extend, mode="fused", **options)


def _decode(i, **options):
    return sparse_decode(i.q, i.prefix, i.extend, **options)


BF16 = W(layout="bf16").build()
OTHER = W(prefix_lens=(1,)).build()
REFUSED = {
    "no source": ("prefix or extend", ValueError, lambda i: _fused(replace(i, prefix=None))),
    "a source that is none": ("prefix", TypeError, lambda i: _fused(replace(i, prefix=i.q))),
    "other tokens": ("extend.indptr", ValueError, lambda i: _fused(replace(i, extend=OTHER.prefix))),
    "q in fp32": ("q", TypeError, lambda i: _fused(replace(i, q=i.q.float()))),
    "q of other tokens": ("q", ValueError, lambda i: _fused(replace(i, q=i.q[:1]))),
    "q of another width": ("q", ValueError, lambda i: _fused(replace(i, q=i.q[..., :448]))),
    "129 heads": ("1 to 128", ValueError, lambda i: _fused(replace(i, q=i.q.repeat(1, 9, 1)[:, :129]))),
    "no heads": ("1 to 128", ValueError, lambda i: _fused(replace(i, q=i.q[:, :0]))),
    "q transposed": ("q", ValueError, lambda i: _fused(replace(i, q=i.q.mT.contiguous().mT))),
    "FP8 q of other rows": ("q", ValueError, lambda i: _fused(replace(i, q=DSV4Rows.quantize(i.q[0, :15])))),
    "FP8 q over 16-bit rows": ("q", TypeError, lambda i: _wide(replace(BF16, q=DSV4Rows.quantize(i.q)))),
    "sink of other heads": ("attn_sink", ValueError, lambda i: _fused(i, attn_sink=i.attn_sink[:8])),
    "sink in bf16": ("attn_sink", TypeError, lambda i: _fused(i, attn_sink=i.attn_sink.bfloat16())),
    "sink strided": ("attn_sink", ValueError, lambda i: _fused(i, attn_sink=torch.zeros(32)[::2])),
    "NaN scale": ("sm_scale", ValueError, lambda i: _fused(i, sm_scale=math.nan)),
    "NaN scale of 16-bit rows": ("sm_scale", ValueError, lambda i: _wide(BF16, sm_scale=math.nan)),
    "NaN scale of decode": ("sm_scale", ValueError, lambda i: _decode(i, sm_scale=math.nan)),
    "out of another shape": ("out", ValueError, lambda i: _fused(i, out=i.q[:1].clone())),
    "out is q": ("out", ValueError, lambda i: _fused(i, out=i.q)),
    "gradients": ("q", ValueError, lambda i: _fused(replace(i, q=i.q.clone().requires_grad_()))),
    "unknown mode": ("mode", ValueError, lambda i: sparse_prefill_fp8(i.q, i.prefix, mode="best")),
    "16-bit rows to the FP8 operation": ("prefix", UnsupportedError, lambda i: _fused(BF16)),
    "FP8 rows to the 16-bit operation": ("prefix.rows", UnsupportedError, _wide),
    "bf16 rows under fp16 q": ("prefix.rows", TypeError, lambda i: _wide(replace(BF16, q=i.q.half()))),
    "no splits": ("num_splits", ValueError, lambda i: _decode(i, num_splits=0)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_any_launch(name, monkeypatch):
    def launch(*_):
        raise AssertionError("launched")

    words, error, call = REFUSED[name]
    inputs = W(layout="split").build()
    monkeypatch.setattr(BoundLaunch, "__call__", launch)
    with pytest.raises(error, match=words):
        call(inputs)
