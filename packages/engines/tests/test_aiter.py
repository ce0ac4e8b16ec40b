"""AITER's names and signatures over its own layouts, against fp32 attention over the same numbers.

AITER itself needs an AMD GPU: the tests of `patch` stand modules of its names in for it.
"""

from __future__ import annotations

import inspect
import sys
import types
import warnings

import pytest
import torch
from engine_checks import BF16, attention, row_attention
from step_costs import VIEWS, operators

from narrowkv.engines import aiter
from narrowkv.engines.aiter import functions, patching, tensors
from narrowkv.engines.versions import EngineVersionError
from narrowkv.paged_cache.layouts import from_logical
from narrowkv.quant import relative_l1
from narrowkv.runtime.errors import UnsupportedError

HEADS, KV_HEADS, DIM, PAGE, PAGES = 12, 1, 64, 16, 6
Q_LENS, SEQ_LENS = (3, 1), (20, 33)
SCALES = {torch.bfloat16: (1.0, 1.0), torch.float8_e4m3fn: (0.03, 0.02)}


def numbers(dtype, page=PAGE, kv_heads=KV_HEADS, seed=0):
    """Stored K and V `[pages, page, kv_heads, dim]`, and the same times their descales in fp32."""
    generator = torch.Generator().manual_seed(seed)
    shape = (PAGES * PAGE // page, page, kv_heads, DIM)
    stored = [
        (torch.randn(shape, generator=generator) / scale).clamp(-400, 400).to(dtype)
        for scale in SCALES[dtype]
    ]
    return stored, [x.float() * scale for x, scale in zip(stored, SCALES[dtype], strict=True)]


def batch(page=PAGE, q_lens=Q_LENS):
    """Shuffled pages of two sequences as a block table and as ragged lists, and where queries begin."""
    order = torch.randperm(PAGES * PAGE // page, generator=torch.Generator().manual_seed(3))
    counts = [-(-length // page) for length in SEQ_LENS]
    rows = order.split([*counts, len(order) - sum(counts)])[:2]
    table = torch.full((2, max(counts)), -1, dtype=torch.int32)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = ids
    last = [length - (n - 1) * page for length, n in zip(SEQ_LENS, counts, strict=True)]
    lists = [0, counts[0], sum(counts)], last, [0, q_lens[0], sum(q_lens)], SEQ_LENS
    indptr, last, starts, lens = (torch.tensor(x, dtype=torch.int32) for x in lists)
    return table, torch.cat(rows).to(torch.int32), indptr, last, starts, lens


def queries(tokens):
    return torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(5)).bfloat16()


def exact(q, k, v, table, starts, *, causal=True, **options):
    """Attention in fp32 of each sequence over its pages, and the log-sum-exp without the sinks."""
    parts = []
    for seq, length in enumerate(SEQ_LENS):
        pages = table[seq, : -(-length // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        hidden = None if causal else torch.tensor(False)
        rows = q[starts[seq] : starts[seq + 1]]
        parts.append(attention(rows, keys, values, DIM**-0.5, hidden=hidden, **options))
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(sums, 1)


def close(o, reference):
    assert relative_l1(o, reference) <= BF16


@pytest.mark.parametrize("dtype", SCALES, ids=str)
@pytest.mark.parametrize("layout", ["vectorised", "NHD", "tokens"])
@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "block_table"])
def test_mha_batch_prefill_takes_every_layout(layout, dtype, ragged):
    page = 1 if layout == "tokens" else PAGE
    (k, v), real = numbers(dtype, page)
    table, ids, indptr, last, starts, lens = batch(page)
    q = queries(sum(Q_LENS))
    lists = {} if ragged else {"block_table": table, "seqlen_k": lens}
    descales = {}
    if dtype != torch.bfloat16:
        descales = {f"{s}_descale": torch.tensor([x]) for s, x in zip("kv", SCALES[dtype], strict=True)}
    o, lse = aiter.mha_batch_prefill_func(
        q, from_logical(k, layout, is_key=True), from_logical(v, layout, is_key=False), starts, indptr, ids,
        max(Q_LENS), max(SEQ_LENS), causal=True, return_lse=True,
        kv_last_page_lens=None if page == 1 else last, **lists, **descales,
    )  # fmt: skip
    expected, sums = exact(q, *real, table, starts)
    close(o, expected)
    assert torch.allclose(lse, sums, atol=2e-3)


def test_mha_batch_prefill_takes_descales_of_pages_windows_sinks_and_soft_caps():
    (k, v), _ = numbers(torch.float8_e4m3fn, kv_heads=2)
    table, ids, indptr, last, starts, _ = batch()
    factors = 0.01 + 0.02 * torch.rand(PAGES, 2, 2, generator=torch.Generator().manual_seed(7))
    real = [x.float() * factors[..., side][:, None, :, None] for side, x in enumerate((k, v))]
    q, sinks = queries(sum(Q_LENS)), torch.linspace(-1, 1, HEADS)
    out = torch.empty_like(q)
    o = aiter.mha_batch_prefill_func(
        q, k, v, starts, indptr, ids, max(Q_LENS), max(SEQ_LENS), causal=True, window_size=(7, -1),
        logits_soft_cap=5.0, sink_ptr=sinks, kv_block_descale=factors, kv_last_page_lens=last, out=out,
    )  # fmt: skip
    assert o is out
    close(o, exact(q, *real, table, starts, window=7, soft_cap=5.0, sinks=sinks)[0])
    o = aiter.mha_batch_prefill_func(
        q, k, v, starts, indptr, ids, max(Q_LENS), max(SEQ_LENS), kv_block_descale=factors,
        kv_last_page_lens=last,
    )  # fmt: skip
    close(o, exact(q, *real, table, starts, causal=False)[0])


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("expanded", [True, False])
def test_unified_attention_takes_vllms_arguments(shuffled, expanded):
    (k, v), real = numbers(torch.float8_e4m3fn)
    table, _, _, _, starts, lens = batch()
    factors = torch.tensor([[1.0], [1.0 if expanded else 1.5]])
    descales = [torch.tensor([[x]]).expand(2, KV_HEADS) for x in SCALES[torch.float8_e4m3fn]]
    if not expanded:
        descales = [x * factors for x in descales]
    q, sinks = queries(sum(Q_LENS)), torch.linspace(-1, 1, HEADS).bfloat16()
    out = torch.empty_like(q)
    if shuffled:
        k, v = from_logical(k, "vectorised", is_key=True), from_logical(v, "vectorised", is_key=False)
    o = aiter.unified_attention(
        q, k, v, out, starts, max(Q_LENS), lens, max(SEQ_LENS), DIM**-0.5, True, (9, 0), table, 0.0, None,
        *descales, sinks=sinks, shuffled_kv_cache=shuffled,
    )  # fmt: skip
    assert o is out
    for seq in (0, 1):  # each sequence with its own descale
        scaled = [x * factors[seq] for x in real]
        rows = slice(int(starts[seq]), int(starts[seq + 1]))
        close(o[rows], exact(q, *scaled, table, starts, window=9, sinks=sinks)[0][rows])


@pytest.mark.parametrize("dtype", SCALES, ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page", [1, PAGE])
def test_paged_attention_ragged_and_v1(layout, dtype, page):
    (k, v), real = numbers(dtype, page)
    table, ids, indptr, last, starts, lens = batch(page, q_lens=(1, 1))
    k, v = (x.transpose(1, 2).contiguous() if layout == "HND" else x for x in (k, v))
    scales = [torch.tensor([x]) for x in SCALES[dtype]]
    kind = "auto" if dtype == torch.bfloat16 else "fp8"
    q, workspace = queries(2), torch.empty(0)
    expected, _ = exact(q, *real, table, starts)
    out = torch.empty_like(q)
    o = aiter.paged_attention_ragged(
        out, workspace, q, k, v, DIM**-0.5, indptr, ids, last, page, 1, None, kind, layout, 0.0, *scales
    )
    assert o is out
    close(o, expected)
    for cu_query_lens in (None, starts):
        out = torch.empty_like(q)
        aiter.paged_attention_v1(
            out, workspace, q, k, v, DIM**-0.5, table, cu_query_lens, lens, max(SEQ_LENS), None, kind,
            layout, 0.0, *scales, sliding_window=8,
        )  # fmt: skip
        close(out, exact(q, *real, table, starts, window=7)[0])


def test_pa_sparse_prefill_opus():
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 16, 512, generator=generator).bfloat16()
    pool, rows = (torch.randn(n, 512, generator=generator).bfloat16() for n in (9, 4))
    int32 = {"dtype": torch.int32}
    prefix, extend = torch.tensor([3, 0, 8, 5], **int32), torch.tensor([1, 0, 3], **int32)
    at_prefix, at_extend = torch.tensor([0, 3, 4], **int32), torch.tensor([0, 1, 3], **int32)
    sink = torch.linspace(-1, 1, 16)
    o = aiter.pa_sparse_prefill_opus(q, pool, prefix, at_prefix, rows, extend, at_extend, sink, 512**-0.5)
    for token in (0, 1):
        kv = torch.cat([
            pool[prefix[at_prefix[token] : at_prefix[token + 1]].long()],
            rows[extend[at_extend[token] : at_extend[token + 1]].long()],
        ])  # fmt: skip
        close(o[token], row_attention(q[token], kv, 512**-0.5, sink))


def test_what_narrowkv_has_not_is_refused_with_its_name():
    (k, v), _ = numbers(torch.bfloat16)
    _, ids, indptr, last, starts, _ = batch()
    arguments = (queries(4), k, v, starts, indptr, ids, 3, 33)
    for option in ({"alibi_slopes": torch.ones(HEADS)}, {"sink_size": 4}, {"dropout_p": 0.1}):
        with pytest.raises(UnsupportedError, match=next(iter(option))):
            aiter.mha_batch_prefill_func(*arguments, kv_last_page_lens=last, **option)
    with pytest.raises(TypeError, match="unexpected keyword argument 'quant'"):
        aiter.mha_batch_prefill_func(*arguments, quant=1)
    assert list(inspect.signature(aiter.paged_attention_v1).parameters)[-1] == "sliding_window"


@pytest.mark.parametrize("dtype", SCALES, ids=str)
def test_no_call_copies_a_cache_or_reads_from_the_device(dtype):
    (k, v), _ = numbers(dtype)
    table, ids, indptr, last, starts, lens = batch()
    k_scale, v_scale = (torch.tensor([scale]) for scale in SCALES[dtype])
    q, single = queries(4), queries(2)
    out, single_out = torch.empty_like(q), torch.empty_like(single)
    kind = "auto" if dtype == torch.bfloat16 else "fp8"
    paged = (single_out, None, single, k, v, DIM**-0.5)
    common = (None, kind, "NHD", 0.0, k_scale, v_scale)

    def calls():
        yield aiter.mha_batch_prefill_func(
            q, k, v, starts, indptr, ids, 3, 33, causal=True, kv_last_page_lens=last, k_descale=k_scale,
            v_descale=v_scale, out=out,
        )  # fmt: skip
        yield aiter.unified_attention(
            q, k, v, out, starts, 3, lens, 33, DIM**-0.5, True, (-1, -1), table, 0.0, None, k_scale, v_scale
        )
        yield aiter.paged_attention_ragged(*paged, indptr, ids, last, PAGE, 1, *common)
        yield aiter.paged_attention_v1(*paged, table, None, lens, 33, *common)

    kernels = (functions, "batch_prefill"), (functions, "prefill_plan"), (tensors, "paged_decode")
    with operators(*kernels) as seen:
        results = [result.data_ptr() for result in calls()]
    assert set(seen) <= VIEWS
    assert results == [out.data_ptr()] * 2 + [single_out.data_ptr()] * 2


@pytest.fixture
def fake_aiter(monkeypatch):
    """Modules of AITER's names, whose functions only say that they ran."""
    names = ("aiter", "aiter.ops", "aiter.ops.mha", "aiter.ops.attention", "aiter.ops.triton")
    names += ("aiter.ops.triton.attention", "aiter.ops.triton.attention.unified_attention")
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for path, function in (("aiter.ops.mha", "mha_batch_prefill_func"), ("aiter", "mha_batch_prefill_func")):
        setattr(modules[path], function, lambda *args, **kwargs: "theirs")
    return modules


def test_patch_stands_in_where_aiter_fails_and_says_so_once(fake_aiter):
    (k, v), real = numbers(torch.bfloat16)
    table, ids, indptr, last, starts, _ = batch()
    q = queries(sum(Q_LENS))
    arguments = (starts, indptr, ids, max(Q_LENS), max(SEQ_LENS))
    patching._announced.clear()
    undo = aiter.patch()
    prefill = fake_aiter["aiter.ops.mha"].mha_batch_prefill_func
    with pytest.warns(UserWarning, match="stands in for aiter's mha_batch_prefill_func: a GQA ratio of 12"):
        o = prefill(q, k, v, *arguments, causal=True, kv_last_page_lens=last)
    close(o, exact(q, *real, table, starts)[0])
    with warnings.catch_warnings():  # not again
        warnings.simplefilter("error")
        prefill(q, k, v, *arguments, causal=True, kv_last_page_lens=last)
    assert prefill(q[:, :8], k, v, *arguments, causal=True, kv_last_page_lens=last) == "theirs"
    undo()
    assert fake_aiter["aiter"].mha_batch_prefill_func(q, k, v, *arguments) == "theirs"


def test_an_aiter_that_moved_its_functions_is_told_by_a_sentence(fake_aiter, monkeypatch):
    theirs = fake_aiter["aiter"].mha_batch_prefill_func
    for name in [name for name in sys.modules if name.startswith("aiter.ops.triton")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(EngineVersionError, match=r"this aiter, which has no aiter\.ops\.triton"):
        aiter.patch()
    assert fake_aiter["aiter"].mha_batch_prefill_func is theirs


def test_parameters_that_aiter_has_added_are_its_own(fake_aiter):
    (k, v), _ = numbers(torch.bfloat16)
    _, ids, indptr, last, starts, _ = batch()
    q = queries(sum(Q_LENS))
    seen = []

    def newer(*args, **kwargs):
        seen.append((len(args), set(kwargs)))
        return "theirs"

    fake_aiter["aiter.ops.mha"].mha_batch_prefill_func = newer
    undo = aiter.patch()
    prefill = fake_aiter["aiter.ops.mha"].mha_batch_prefill_func
    known = len(inspect.signature(aiter.mha_batch_prefill_func).parameters)
    arguments = (k, v, starts, indptr, ids, max(Q_LENS), max(SEQ_LENS))
    assert prefill(q[:, :8], *arguments, kv_last_page_lens=last, new_option=1) == "theirs"
    more = [None] * (known - len(arguments))
    assert prefill(q[:, :8], *arguments, *more) == "theirs"
    assert seen == [(8, {"kv_last_page_lens", "new_option"}), (known + 1, set())]
    with pytest.raises(UnsupportedError, match=r"a GQA ratio of 12.* got others too \(new_option\)"):
        prefill(q, *arguments, kv_last_page_lens=last, new_option=1)
    with pytest.raises(UnsupportedError, match=r"got others too \(by position\)"):
        prefill(q, *arguments, *more)
    undo()
