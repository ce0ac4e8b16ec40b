"""PagedKVCache and PageTable: every layout addresses the same logical cache; bad input is refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.paged_cache.checks import check_table
from narrowkv.runtime.errors import UnsupportedError

I32 = torch.int32
ONES = {"k_descale": 1.0, "v_descale": 1.0}


def _vectorised(dense: torch.Tensor, *, is_key: bool) -> torch.Tensor:
    """AITER's 5-D layout written out from [pages, tokens, heads, dim], element by element."""
    pages, tokens, heads, dim = dense.shape
    x = 16 // dense.element_size()
    raw = dense.view(torch.uint8) if dense.element_size() == 1 else dense
    shape = (pages, heads, dim // x, tokens, x) if is_key else (pages, heads, tokens // x, dim, x)
    out = torch.zeros(shape, dtype=raw.dtype)
    for t in range(tokens):
        for d in range(dim):
            if is_key:
                out[:, :, d // x, t, d % x] = raw[:, t, :, d]
            else:
                out[:, :, t // x, d, t % x] = raw[:, t, :, d]
    return out.view(dense.dtype)


def _stored(dense: torch.Tensor, layout: str, *, is_key: bool) -> torch.Tensor:
    if layout == "HND":
        return dense.transpose(1, 2).contiguous()
    if layout == "tokens":
        return dense[:, 0].contiguous()
    if layout == "vectorised":
        return _vectorised(dense, is_key=is_key)
    return dense.clone()


@pytest.mark.parametrize("layout", ["NHD", "HND", "tokens", "concat", "vectorised"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_every_layout_dequantises_to_the_same_logical_cache(layout: str, dtype: torch.dtype) -> None:
    page_size = 1 if layout == "tokens" else 16
    dense = [torch.randn(3, page_size, 2, 64).to(dtype) for _ in range(2)]
    if layout == "concat":
        raw = [t.view(torch.uint8) if t.element_size() == 1 else t for t in dense]
        both = torch.cat(raw, -1).view(dtype)
        k, v = both[..., :64], both[..., 64:]
    else:
        k, v = _stored(dense[0], layout, is_key=True), _stored(dense[1], layout, is_key=False)
    name = "bf16" if dtype == torch.bfloat16 else "fp8_e4m3fn"
    cache = PagedKVCache.from_tensors(k, v, format=name, layout=layout, k_descale=0.5, v_descale=2.0)
    got_k, got_v = cache.dequantize()
    assert (cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim) == (3, page_size, 2, 64)
    torch.testing.assert_close(got_k, dense[0].float() * 0.5, rtol=0, atol=0)
    torch.testing.assert_close(got_v, dense[1].float() * 2.0, rtol=0, atol=0)
    assert cache.k.data_ptr() == k.data_ptr()


def test_strided_heads_and_tokens_are_taken_as_they_are() -> None:
    big = torch.randn(4, 8, 6, 96).to(torch.float8_e4m3fn)
    view = big[:, ::2, 1::2, :64]
    cache = PagedKVCache.from_tensors(view, view, format="fp8_e4m3fn", **ONES)
    torch.testing.assert_close(cache.dequantize()[0], view.float())
    assert cache.k.data_ptr() == view.data_ptr()


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((), "tensor"), ((1,), "tensor"), ((3,), "head"), ((5, 3), "sequence_head"), ((4, 2, 3), "token_head")],
)
def test_a_descale_tensor_tells_its_granularity_by_its_shape(shape: tuple[int, ...], kind: str) -> None:
    k = torch.zeros(4, 2, 3, 64, dtype=torch.float8_e4m3fn)
    cache = PagedKVCache.from_tensors(k, k, format="fp8_e4m3fn", k_descale=torch.ones(shape), v_descale=1.0)
    assert cache.k_granularity == kind
    assert cache.v_granularity == "tensor"


def test_a_descale_that_could_be_per_page_or_per_sequence_must_be_named() -> None:
    k = torch.zeros(4, 2, 3, 64, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="per sequence or per page: pass k_granularity"):
        PagedKVCache.from_tensors(k, k, format="fp8_e4m3fn", k_descale=torch.ones(4, 3), v_descale=1.0)
    named = PagedKVCache.from_tensors(
        k, k, format="fp8_e4m3fn", k_descale=torch.ones(4, 3), v_descale=1.0, k_granularity="page_head"
    )
    assert named.k_granularity == "page_head"


def test_dequantise_applies_each_granularity() -> None:
    k = torch.ones(4, 2, 3, 64).to(torch.float8_e4m3fn)
    by_head, by_token = torch.tensor([1.0, 2.0, 3.0]), torch.rand(4, 2, 3) + 0.5
    cache = PagedKVCache.from_tensors(k, k, format="fp8_e4m3fn", k_descale=by_head, v_descale=by_token)
    got_k, got_v = cache.dequantize()
    torch.testing.assert_close(got_k, by_head.view(1, 1, 3, 1).expand_as(got_k))
    torch.testing.assert_close(got_v, by_token[..., None].expand_as(got_v))


def _fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


def _made(**changes: Any) -> Callable[[], PagedKVCache]:
    """Makes an FP8 cache of tensors [2, 4, 1, 64], but for what is changed."""
    k = changes.pop("k", _fp8(2, 4, 1, 64))
    options = {"format": "fp8_e4m3fn", **ONES, **changes}
    return lambda: PagedKVCache.from_tensors(k, options.pop("v", k), **options)


def _empty(head_dim: int = 64, *, page_size: int = 4, **options: Any) -> Callable[[], PagedKVCache]:
    return lambda: PagedKVCache.empty(2, page_size, 1, head_dim, **{"format": "bf16", **options})


F4 = "fp4_e2m1"
E8M0, E4M3 = torch.full((2, 4, 2), 127, dtype=torch.uint8), torch.ones(2, 4, 2).to(torch.float8_e4m3fn)


def _fp4(scale: Any, **changes: Any) -> Callable[[], PagedKVCache]:
    """Makes an FP4 cache of tensors [2, 4, 2, 32] with these scales of K."""
    stored = torch.zeros(2, 4, 2, 32, dtype=torch.uint8)
    v_descale = scale if changes.pop("both", False) else E8M0
    options = {"format": F4, "k_descale": scale, "v_descale": v_descale, **changes}
    return lambda: PagedKVCache.from_tensors(options.pop("k", stored), stored, **options)


def _e4m3(scale: torch.Tensor = E4M3, **changes: Any) -> Callable[[], PagedKVCache]:
    return _fp4(scale, both=True, **changes)


INT8, INT4 = torch.zeros(2, 16, 1, 64, dtype=torch.int8), torch.zeros(2, 16, 1, 32, dtype=torch.uint8)
# Typed, named, before any launch.
REFUSALS: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    ("no format", _made(format=None), TypeError, "format"),
    ("FNUZ tag on FN storage", _made(format="fp8_e4m3fnuz"), TypeError, "fp8_e4m3fnuz"),
    ("float32 storage", _made(k=torch.zeros(2, 4, 1, 64), format="bf16"), TypeError, "bf16"),
    ("page size 0", _made(k=_fp8(2, 0, 1, 64)), ValueError, "page_size must be at least 1"),
    ("page size 0 of an own cache", _empty(page_size=0), ValueError, "page_size"),
    ("strided last dimension", _made(k=_fp8(2, 4, 1, 128)[..., ::2]), ValueError,
     "k must have a contiguous last dimension"),
    ("V of another shape", _made(v=_fp8(2, 4, 2, 64)), ValueError, "v must hold the same"),
    ("descale of a wrong shape", _made(k_descale=torch.ones(2, 4, 9)), ValueError,
     "k_descale must be a float or have shape"),
    ("descale of a wrong dtype", _made(k_descale=torch.ones(1).double()), TypeError, "k_descale"),
    ("no descale of K", _made(k_descale=None), ValueError, "k_descale must be given for fp8_e4m3fn"),
    ("no descale of V", _made(v_descale=None), ValueError, "v_descale must be given for fp8_e4m3fn"),
    ("HND as NHD, with a descale a head", _made(k=_fp8(2, 4, 16, 64), k_descale=torch.ones(4)), ValueError,
     r"k_descale must be a float or have shape.*got \[4\]; it fits 4 heads: are k and v in layout 'HND'"),
    ("a descale that requires grad", _empty(k_descale=torch.ones(1, requires_grad=True)), ValueError,
     "k_descale must not require grad"),
    ("a head_dim of an own cache", _empty(100), UnsupportedError,
     "head_dim must be one of 64, .* 576, which attention kernels serve, got 100"),
    ("a head_dim of storage", _made(k=_fp8(2, 4, 1, 72)), UnsupportedError, "got 72"),
    ("no heads", _made(k=_fp8(2, 4, 0, 64)), ValueError, "num_kv_heads must be at least 1, got 0"),
    ("unknown layout", _empty(layout="DHN"), ValueError, "layout"),
    ("unknown format", _empty(format="fp9"), ValueError, "format"),
    ("token pool with pages", _empty(layout="tokens"), ValueError, "page_size must be 1"),
    ("FP4 without scales", _fp4(1.0), TypeError, "k_descale"),
    ("FP4 scales in fp32", _fp4(torch.ones(2, 4, 2)), TypeError, "k_descale.*uint8"),
    ("FP4 scales per head", _fp4(E8M0[0, 0]), ValueError, "k_descale"),
    ("FP4 in int8", _fp4(E8M0, k=torch.zeros(2, 4, 2, 32, dtype=torch.int8)), TypeError, "k .*uint8"),
    ("FP4, odd head", _empty(65, format=F4), ValueError, "head_dim"),
    ("FP4, a part of a group", _empty(80, format=F4, scale_group=32), ValueError, "80.*32|32.*80"),
    ("FP4, another group", _empty(format=F4, scale_group=8), ValueError, "scale_group"),
    ("a group without FP4", _empty(format="fp8_e4m3fn", scale_group=32), ValueError, "scale_group"),
    ("FP4, vectorised", _empty(format=F4, page_size=16, layout="vectorised"), UnsupportedError, "vectorised"),
    ("a number for E8M0", lambda: replace(_empty(format=F4)(), k_tensor_scale=0.5), ValueError,
     "k_tensor_scale must be 1.0 without E4M3 scales, got 0.5"),
    ("a negative number", lambda: replace(_e4m3()(), v_tensor_scale=-1.0), ValueError, "v_tensor_scale"),
    ("E4M3 without FP4", _empty(format="fp8_e4m3fn", scale_format="e4m3"), ValueError,
     "scale_format 'e4m3' is for an fp4_e2m1 cache"),
    ("unknown scales", _empty(format=F4, scale_format="e5m2"), ValueError, "scale_format"),
    ("E4M3, groups of 8", _e4m3(torch.ones(2, 4, 2, 8).to(E4M3.dtype)), ValueError, "must have shape"),
    ("an E4M3 scale of zero", _e4m3(torch.zeros(2, 4, 2).to(E4M3.dtype), validate=True), ValueError,
     "k_descale must hold E4M3 scales above zero, got 16"),
    ("INT4, vectorised", _empty(format="int4", page_size=16, layout="vectorised"), UnsupportedError,
     "'vectorised' is not defined for int4"),
    ("INT4, one descale", _empty(format="int4", k_descale=0.5), ValueError,
     r"zero point in their four lowest bits, got 0\.5"),
    ("INT4, descale of a wrong shape", _made(k=INT4, format="int4", k_descale=torch.ones(1)), ValueError,
     r"k_descale must be fp32 \[2, 16, 1\] for int4"),
    ("INT8 without a descale", _made(k=INT8, format="int8", k_descale=None), ValueError,
     "k_descale must be given for int8"),
    ("INT8 in fp16", _made(k=INT8.half(), v=INT8, format="int8"), TypeError, "int8"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "match"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_a_cache_that_cannot_be_is_refused(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_e4m3_scales_above_zero_are_one_per_token_and_head() -> None:
    assert _e4m3(validate=True)().k_granularity == "token_head"


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_descale_is_refused(bad: float) -> None:
    k = _fp8(2, 4, 1, 64)
    with pytest.raises(ValueError, match="v_descale"):
        PagedKVCache.from_tensors(k, k, format="fp8_e4m3fn", k_descale=1.0, v_descale=bad)
    tensor = torch.tensor([bad])
    PagedKVCache.from_tensors(k, k, format="fp8_e4m3fn", k_descale=1.0, v_descale=tensor, validate=False)
    for validate in (None, True):
        with pytest.raises(ValueError, match="v_descale"):
            PagedKVCache.from_tensors(
                k, k, format="fp8_e4m3fn", k_descale=1.0, v_descale=tensor, validate=validate
            )


def test_capacity_is_counted_in_bytes_per_token() -> None:
    fp8 = PagedKVCache.empty(2, 16, 8, 128, format="fp8_e4m3fn")
    bf16 = PagedKVCache.empty(2, 16, 8, 128, format="bf16")
    assert fp8.bytes_per_token() == 2048
    assert bf16.tokens_per_gib() * 2 == fp8.tokens_per_gib() == 2**30 // 2048
    mixed = PagedKVCache.empty(2, 16, 8, 128, format=CacheFormat(k="bf16", v="fp8_e4m3fn"))
    assert mixed.bytes_per_token() == 3072


def test_ragged_and_block_tables_say_the_same() -> None:
    indptr, indices = torch.tensor([0, 3, 3, 4], dtype=I32), torch.tensor([5, 2, 7, 1], dtype=I32)
    ragged = PageTable.from_ragged(indptr, indices, torch.tensor([4, 0, 16], dtype=I32), page_size=16)
    assert ragged.seq_lens_tensor().tolist() == [36, 0, 16]
    assert ragged.batch_size == 3
    block = ragged.to_block_table(4)
    assert block.page_ids.tolist() == [[5, 2, 7, -1], [-1, -1, -1, -1], [1, -1, -1, -1]]
    assert block.capacity == 64
    for seq in range(3):
        (a, n), (b, m) = ragged.pages_of(seq), block.pages_of(seq)
        assert n == m
        assert a.tolist() == b.tolist()


def test_a_narrower_block_table_than_a_sequence_needs_is_found_under_validate() -> None:
    indptr, indices = torch.tensor([0, 3], dtype=I32), torch.tensor([5, 2, 7], dtype=I32)
    ragged = PageTable.from_ragged(indptr, indices, torch.tensor([4], dtype=I32), page_size=16)
    with pytest.raises(ValueError, match="seq_lens must not exceed the table's capacity 32, got 36"):
        ragged.to_block_table(2).check_values()


def test_lengths_before_an_append_are_named_and_are_not_taken_for_the_others() -> None:
    ids, lens = torch.tensor([[1, 2]], dtype=I32), torch.tensor([5], dtype=I32)
    table = PageTable.from_block_table(ids, cached_lens=lens, page_size=4, num_pages=3, validate=True)
    assert table.before_append
    assert not PageTable.from_block_table(ids, lens, page_size=4).before_append
    for given, what in (({}, "neither"), ({"seq_lens": lens, "cached_lens": lens}, "both")):
        with pytest.raises(ValueError, match=f"either seq_lens .* or cached_lens .*, got {what}"):
            PageTable.from_block_table(ids, page_size=4, **given)
    with pytest.raises(ValueError, match="cached_lens must not exceed the table's capacity 8, got 9"):
        PageTable.from_block_table(ids, cached_lens=lens + 4, page_size=4, validate=True)
    cache = PagedKVCache.empty(3, 4, 2, 64, format="bf16")
    check_table(table, cache, before_append=True)
    with pytest.raises(ValueError, match=r"include the tokens of this call: .*PagePool.page_table\(seqs\)"):
        check_table(table, cache)
    with pytest.raises(ValueError, match=r"lengths before the append.*PagePool.table_before"):
        check_table(PageTable.from_block_table(ids, lens, page_size=4), cache, before_append=True)


def test_a_table_and_a_cache_that_do_not_belong_together_are_refused() -> None:
    ids, lens = torch.tensor([[1, 2]], dtype=I32), torch.tensor([5], dtype=I32)
    table = PageTable.from_block_table(ids, lens, page_size=4)
    cache = PagedKVCache.empty(3, 4, 2, 64, format="fp8_e4m3fn")
    check_table(table, cache)
    with pytest.raises(TypeError, match="page_table must be a PageTable, got Tensor"):
        check_table(ids, cache)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cache must be a PagedKVCache, got tuple"):
        check_table(table, (cache.k, cache.v))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cache's page_size 8, got 4$"):
        check_table(table, PagedKVCache.empty(3, 8, 2, 64, format="bf16"))
    swapped = PagedKVCache.from_tensors(*(torch.zeros(3, 8, 4, 64).bfloat16() for _ in "kv"), format="bf16")
    with pytest.raises(ValueError, match=r"page_size 8, got 4; .*are its tensors in layout 'HND'\?"):
        check_table(table, swapped)
    for batch in (2, 3):
        per_sequence = replace(cache, v_descale=torch.ones(batch, 2), v_granularity="sequence_head")
        with pytest.raises(ValueError, match=rf"v_descale must have shape \[1, 2\], got \[{batch}, 2\]"):
            check_table(table, per_sequence)
    check_table(table, replace(cache, v_descale=torch.ones(1, 2), v_granularity="sequence_head"))


def test_caches_and_tables_can_be_compared_and_copied() -> None:
    cache = PagedKVCache.empty(3, 4, 2, 64, format="fp8_e4m3fn", layout="concat", k_descale=torch.ones(2))
    table = PageTable.from_block_table(torch.ones(1, 2, dtype=I32), torch.ones(1, dtype=I32), page_size=4)
    for made in (cache, table):
        assert made == made
        assert made != copy.copy(made)
        assert len({made, made}) == 1
    assert copy.copy(cache).k is cache.k
    own = copy.deepcopy(cache)
    own.v.view(torch.uint8).fill_(3)
    assert not bool(cache.v.view(torch.uint8).any())
    assert own.k_strides == cache.k_strides
    assert not bool(own.k.view(torch.uint8).any()), "K lies beside V, and is not V"
    assert copy.deepcopy(table).page_ids.tolist() == [[1, 1]]


def test_a_table_follows_its_tensors() -> None:
    lens = torch.tensor([3], dtype=I32)
    table = PageTable.from_block_table(torch.zeros(1, 2, dtype=I32), lens, page_size=4)
    lens.fill_(7)
    assert table.seq_lens_tensor().tolist() == [7]


def _ints(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=I32)


BLOCK: list[tuple[torch.Tensor, torch.Tensor, int, type[Exception], str]] = [
    (torch.zeros(1, 2), _ints(1), 4, TypeError, "block_table"),
    (_ints(3), _ints(1), 4, ValueError, r"block_table must have shape \[batch, max_pages\], got \(3,\)"),
    (_ints(2, 2), _ints(1), 4, ValueError, "seq_lens"),
    (_ints(1, 2), _ints(1), 0, ValueError, "page_size"),
]


@pytest.mark.parametrize(("ids", "lens", "page_size", "error", "match"), BLOCK)
def test_a_block_table_that_cannot_be_is_refused(
    ids: torch.Tensor, lens: torch.Tensor, page_size: int, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        PageTable.from_block_table(ids, lens, page_size=page_size)


def test_a_ragged_table_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_indptr must have batch"):
        PageTable.from_ragged(_ints(2), _ints(2), _ints(2), page_size=4)
    with pytest.raises(TypeError, match="kv_indptr"):
        PageTable.from_ragged(_ints(2).short(), _ints(2), _ints(1), page_size=4)


# Found only by looking at the values.
@pytest.mark.parametrize(
    ("indptr", "indices", "last", "match"),
    [
        ([1, 2], [0, 0], [1], "begin with 0"),
        ([0, 2, 1], [0, 0], [1, 1], "not decrease"),
        ([0, 3], [0, 0], [1], "end within kv_indices"),
        ([0, 1], [-1], [1], "not be negative"),
        ([0, 1], [9], [1], "below num_pages = 4"),
        ([0, 1], [0], [5], r"kv_last_page_len must lie in 1\.\.4"),
        ([0, 1], [0], [0], r"kv_last_page_len must lie in 1\.\.4"),
    ],
)
def test_wrong_values_are_found_under_validate(
    indptr: list[int], indices: list[int], last: list[int], match: str
) -> None:
    tensors = [torch.tensor(x, dtype=I32) for x in (indptr, indices, last)]
    PageTable.from_ragged(*tensors, page_size=4)
    with pytest.raises(ValueError, match=match):
        PageTable.from_ragged(*tensors, page_size=4, num_pages=4, validate=True)


def test_a_length_over_the_capacity_is_found_and_stale_ids_are_not_looked_at() -> None:
    table = torch.tensor([[1, 99]], dtype=I32)
    with pytest.raises(ValueError, match="exceed the table's capacity 8"):
        PageTable.from_block_table(
            table, torch.tensor([9], dtype=I32), page_size=4, num_pages=4, validate=True
        )
    PageTable.from_block_table(table, torch.tensor([4], dtype=I32), page_size=4, num_pages=4, validate=True)


def test_a_replaced_descale_is_checked_too() -> None:
    cache = PagedKVCache.empty(2, 4, 1, 64, format="fp8_e4m3fn")
    with pytest.raises(ValueError, match="k_descale must be greater than 0"):
        replace(cache, k_descale=-1.0)
    with pytest.raises(ValueError, match="v_descale does not have the shape of granularity 'head'"):
        replace(cache, v_descale=torch.ones(2), v_granularity="head")
    with pytest.raises(TypeError, match="k_descale must be a tensor for granularity 'head'"):
        replace(cache, k_granularity="head")


# On a GPU an index out of range would end the process's use of the device.
def test_a_wrong_indptr_or_page_id_never_indexes_past_a_tensor() -> None:
    indices, last = torch.tensor([5, 2, 7], dtype=I32), torch.tensor([4], dtype=I32)
    for begin, end in ((-50, 2), (2, 2**31 - 1), (2**31 - 1, -(2**31)), (0, 50)):
        indptr = torch.tensor([begin, end], dtype=I32)
        table = PageTable.from_ragged(indptr, indices, last, page_size=16).to_block_table(60)
        assert table.page_ids.shape == (1, 60)
        assert set(table.page_ids.unique().tolist()) <= {-1, 2, 5, 7}
    cache = PagedKVCache.empty(3, 4, 1, 64, format="bf16")
    for bad in (3, -1, 2**31 - 1):
        table = PageTable.from_block_table(torch.tensor([[1, bad]], dtype=I32), last + 1, page_size=4)
        with pytest.raises(
            ValueError, match=rf"page ids of sequence 0 must lie in \[0, 3\), got \[1, {bad}\]"
        ):
            cache.gather(table, 0)
