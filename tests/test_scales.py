"""Scale tensors are read when an operation binds them and after they change in place, and never otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import batch_prefill, prefill_append
from narrowkv.context_parallel import (
    PrefillShares,
    ShardLayout,
    cp_chunk_attention,
    cp_paged_decode,
    cp_prefill,
    plan_cp_decode,
)
from narrowkv.paged_cache import PagedKVCache, append
from narrowkv.quant import KeyTransform
from narrowkv.quant.quantize import quantize_per_channel
from narrowkv.quant.sage import quantize_per_token_group, token_groups
from narrowkv.runtime.launch import executing
from narrowkv.runtime.scales import check_scales
from narrowkv.sage.prequantized import SageOperands, sage_attention_quantized
from narrowkv.testing.calls import LaunchRecorder
from narrowkv.testing.cases.decode import DecodeCase
from narrowkv.testing.cases.prefill import PrefillCase

BAD = (0.0, -1.0, math.inf, math.nan)
HEADS, DIM = 2, 64
# What can be bound, beside the place where the tensor of scales goes.
SHAPES: dict[str, tuple[int, ...]] = {"tensor": (1,), "head": (HEADS,), "sequence_head": (2, HEADS)}
Call = Callable[..., Any]


def _cache(**scales: Any) -> PagedKVCache:
    """An FP8 cache whose scales were not looked at."""
    given = {"k_descale": 0.5, "v_descale": 0.5, "validate": False, **scales}
    balance = given.pop("balance", None)
    cache = PagedKVCache.empty(8, 16, HEADS, DIM, format="fp8_e4m3fn", **given)
    return cache if balance is None else replace(cache, key_transform=KeyTransform(balance=balance))


def _decode(*, q_descale: Any = None, **scales: Any) -> Call:
    q, _, table = DecodeCase.small(lens=(20, 5), num_kv_heads=HEADS, gqa_ratio=2).build()
    if q_descale is None:
        return partial(paged_decode, q, _cache(**scales), table)
    return partial(paged_decode, q.to(torch.float8_e4m3fn), _cache(**scales), table, q_descale=q_descale)


def _cp_decode(**scales: Any) -> Call:
    q, _, whole = DecodeCase.small(lens=(20, 5), num_kv_heads=HEADS, gqa_ratio=2).build()
    cache = _cache(**scales)
    table = ShardLayout(world=1, rank=0, interleave=16).shard_table(whole, cache.page_size)
    return partial(cp_paged_decode, q, cache, table, plan=plan_cp_decode(q, cache, table))


def _prefill(*, q_descale: Any = None, **scales: Any) -> Call:
    case = PrefillCase.small(q_lens=(3, 2), lens=(20, 5), num_kv_heads=HEADS, gqa_ratio=2)
    q, _, table, starts = case.build("cpu")
    if q_descale is None:
        return partial(batch_prefill, q, _cache(**scales), table, starts)
    narrow = q.to(torch.float8_e4m3fn)
    return partial(batch_prefill, narrow, _cache(**scales), table, starts, q_descale=q_descale)


def _prefill_append(**scales: Any) -> Call:
    case = PrefillCase.append(q_lens=(3, 2), lens=(20, 5), num_kv_heads=HEADS, gqa_ratio=2)
    q, k, v, _, table, starts, rope = case.build_append("cpu")
    return partial(prefill_append, q, k, v, _cache(**scales), table, starts, rope=rope)


def _append(**scales: Any) -> Call:
    new = torch.ones(3, HEADS, DIM, dtype=torch.bfloat16)
    return partial(append, _cache(**scales), new, new.clone(), torch.arange(3))


def _sage(**scales: Any) -> Call:
    x = torch.randn(1, 70, 2, DIM)
    (q, q_scale), (k, k_scale) = (
        quantize_per_token_group(x, token_groups(side, "per_thread"), "int8") for side in ("q", "k")
    )
    v, v_scale = quantize_per_channel(x[0], "fp8_e4m3fn")
    found = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale[None]}
    for name, value in scales.items():
        found[name] = value.expand_as(found[name]).clone() if value.numel() == 1 else value
    return partial(sage_attention_quantized, SageOperands(q, k, v[None], **found))


# Each operation, with the scales that it takes and the shapes that they can have.
CASES: list[tuple[str, Callable[..., Call], str, str]] = [
    *(
        (name, make, side, shape)
        for name, make in (("decode", _decode), ("cp_decode", _cp_decode), ("prefill", _prefill))
        for side, shape in (("k_descale", "tensor"), ("v_descale", "head"), ("k_descale", "sequence_head"))
    ),
    *(
        (name, make, side, shape)
        for name, make in (("append", _append), ("prefill_append", _prefill_append))
        for side, shape in (("k_descale", "tensor"), ("v_descale", "tensor"), ("k_descale", "head"))
    ),
    *((name, make, "q_descale", "tensor") for name, make in (("decode", _decode), ("prefill", _prefill))),
    *(
        (name, make, "balance", "channel")
        for name, make in (("decode", _decode), ("prefill", _prefill), ("append", _append))
    ),
    *(("sage", _sage, f"{side}_descale", "tensor") for side in "qkv"),
]
every_case = pytest.mark.parametrize(
    ("make", "side", "shape"), [case[1:] for case in CASES], ids=["-".join((c[0], *c[2:])) for c in CASES]
)
every_value = pytest.mark.parametrize("bad", BAD)


def _scale(shape: str) -> torch.Tensor:
    return torch.full((HEADS, DIM) if shape == "channel" else SHAPES[shape], 0.25)


def _spoil(scale: torch.Tensor, bad: float) -> None:
    scale.view(-1)[-1] = bad


def _contents(call: Call) -> list[torch.Tensor]:
    caches = [x for x in (*call.args, *call.keywords.values()) if isinstance(x, PagedKVCache)]  # type: ignore[attr-defined]
    return [x.view(torch.uint8).clone() for cache in caches for x in (cache.k, cache.v)]


@pytest.fixture
def launches() -> Iterator[LaunchRecorder]:
    with executing(LaunchRecorder("gfx950")) as recorder:
        yield recorder


def _assert_refused(call: Call, side: str, launches: LaunchRecorder, **options: Any) -> None:
    before = _contents(call)
    launches.clear()
    with pytest.raises(ValueError, match=rf"{side} must be (finite|greater than 0)"):
        call(**options)
    assert not launches.launches
    assert all(map(torch.equal, before, _contents(call)))


@every_value
@every_case
def test_a_bad_value_is_refused_before_any_launch(
    make: Callable[..., Call], side: str, shape: str, bad: float, launches: LaunchRecorder
) -> None:
    scale = _scale(shape)
    _spoil(scale, bad)
    call = make(**{side: scale})
    _assert_refused(call, side, launches)
    _assert_refused(call, side, launches, **({} if make is _sage else {"validate": None}))
    call(validate=False)
    assert launches.launches


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@every_value
@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("side", ["k_descale", "v_descale"])
def test_ranks_refuse_bad_values_before_they_wait_for_others(
    chunk: bool, side: str, bad: float, launches: LaunchRecorder, one_rank: None, monkeypatch: Any
) -> None:
    monkeypatch.setattr("narrowkv.context_parallel.prefill.gathered", None)
    scale = _scale("tensor")
    _spoil(scale, bad)
    q, k, v, _, table, starts, _ = PrefillCase.append(
        q_lens=(3, 2), lens=(20, 5), num_kv_heads=HEADS, gqa_ratio=2
    ).build_append("cpu")
    layout, cache = ShardLayout(world=1, rank=0, interleave=16), _cache(**{side: scale})
    if chunk:
        call = partial(cp_chunk_attention, q, k, v, cache, table, starts, layout=layout)
    else:
        shares = PrefillShares(layout, (3, 2))
        call = partial(cp_prefill, q, k, v, cache, table, shares=shares, slot_mapping=torch.arange(5))
    _assert_refused(call, side, launches)


@every_value
@pytest.mark.parametrize("side", ["k_descale", "v_descale"])
@pytest.mark.parametrize("make", [torch.Tensor.clone, torch.Tensor.item], ids=["tensor", "number"])
def test_caches_refuse_bad_values(side: str, bad: float, make: Callable[..., Any]) -> None:
    given = {"k_descale": 0.5, "v_descale": 0.5, side: make(torch.tensor([bad]))}
    k = torch.zeros(2, 4, 1, DIM, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{side} must be"):
        PagedKVCache.empty(2, 4, 1, DIM, format="fp8_e4m3fn", **given)
    with pytest.raises(ValueError, match=f"{side} must be"):
        PagedKVCache.from_tensors(k, k, format="fp8_e4m3fn", **given)
    if make is torch.Tensor.clone:
        PagedKVCache.from_tensors(k, k, format="fp8_e4m3fn", **given, validate=False)


@every_value
def test_a_query_descale_that_is_a_number_is_refused(bad: float, launches: LaunchRecorder) -> None:
    _assert_refused(_prefill(q_descale=bad), "q_descale", launches)


@every_case
def test_a_warm_call_reads_nothing_and_a_change_in_place_is_seen(
    make: Callable[..., Call], side: str, shape: str, launches: LaunchRecorder, monkeypatch: Any
) -> None:
    scale = _scale(shape)
    call = make(**{side: scale})
    if make is _sage:
        scale = getattr(call.args[0], side)  # type: ignore[attr-defined]
    reads = []

    def read(self: torch.Tensor, method: Any, name: str) -> Any:
        reads.append(name)
        return method(self)

    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__float__"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, m=method, n=name: read(self, m, n))
    call()
    assert reads, "the first call looks at the values"
    reads.clear()
    for _ in range(3):
        call()
    assert not reads
    scale.mul_(2.0)
    call()
    assert reads, "the first call after a change looks again"
    reads.clear()
    call()
    assert not reads
    for bad in BAD:
        _spoil(scale, bad)
        _assert_refused(call, side, launches)
    scale.fill_(1.0)
    call()


def test_a_view_that_is_made_anew_is_not_read_again(monkeypatch: Any) -> None:
    buffer = torch.ones(2, 4)
    check_scales({"k_descale": buffer[0], "v_descale": buffer[1, :1]})
    monkeypatch.setattr("narrowkv.runtime.scales.check_descale_tensor", None)
    check_scales({"k_descale": buffer[0], "v_descale": buffer[1, :1]})
    monkeypatch.undo()
    buffer[0, 3] = 0.0
    with pytest.raises(ValueError, match=r"k_descale must be finite and greater than 0, got 0\.0"):
        check_scales({"k_descale": buffer[0]})


def test_another_tensor_in_the_same_place_is_read() -> None:
    for value in (1.0, 0.0):
        scale = torch.full((1,), value)
        if value:
            check_scales({"k_descale": scale})
        else:
            with pytest.raises(ValueError, match="k_descale"):
                check_scales({"k_descale": scale})
        del scale


def test_tensors_without_versions_or_memory() -> None:
    with torch.inference_mode():
        scale = torch.zeros(1)
        with pytest.raises(ValueError, match="k_descale"):
            check_scales({"k_descale": scale})
        scale.fill_(1.0)
        check_scales({"k_descale": scale})
    check_scales({"k_descale": torch.zeros(1, device="meta")})
    with FakeTensorMode():
        check_scales({"k_descale": torch.zeros(1)})


@pytest.mark.parametrize("granularity", ["page_head", "token_head"])
def test_scales_of_pages_and_tokens_are_data(granularity: str, launches: LaunchRecorder) -> None:
    """A page that no token has taken may hold any scale."""
    q, cache, table = DecodeCase.small(granularity=granularity, lens=(20, 5)).build()
    assert isinstance(cache.k_descale, torch.Tensor)
    cache.k_descale.fill_(math.nan)
    paged_decode(q, cache, table)
    assert launches.launches
    with pytest.raises(ValueError, match="k_descale"):
        paged_decode(q, cache, table, validate=True)


def test_a_compiled_step_reads_its_scales_once(monkeypatch: Any) -> None:
    """Torch counts a write to every scale that an operator may write, though static ones are only read."""
    q, _, table = DecodeCase.small(lens=(20, 5), num_kv_heads=HEADS, gqa_ratio=2).build()
    cache = _cache(k_descale=_scale("tensor"), v_descale=_scale("head"))
    new = torch.ones(2, HEADS, DIM, dtype=torch.bfloat16)
    seen: list[str] = []
    look = torch.isfinite

    def isfinite(x: torch.Tensor) -> torch.Tensor:
        seen.append("look")
        return look(x)

    monkeypatch.setattr(torch, "isfinite", isfinite)
    slots = torch.arange(2)

    def step() -> None:
        """The operators as compiled code calls them."""
        from narrowkv.attn_decode.torch_ops import traced_decode
        from narrowkv.paged_cache.torch_ops import traced_append

        traced_append(cache, new, new, slots)
        traced_decode(q, cache, table)

    step()
    assert seen == ["look", "look"]
    step()
    step()
    assert seen == ["look", "look"]
    cache.v_descale[1] = math.inf  # type: ignore[index]
    with pytest.raises(ValueError, match="v_descale must be finite"):
        step()


@pytest.mark.gpu
def test_nothing_is_read_in_a_warm_call_or_while_a_graph_is_captured() -> None:
    scale = torch.full((1,), 0.25, device="cuda")
    q, _, table = DecodeCase.small(lens=(20, 5), num_kv_heads=HEADS, gqa_ratio=2).build("cuda")
    cache = PagedKVCache.empty(
        8, 16, HEADS, DIM, format="fp8_e4m3fn", k_descale=scale, v_descale=0.5, device="cuda"
    )
    paged_decode(q, cache, table)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        paged_decode(q, cache, table)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, bad = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    unread = replace(cache, k_descale=bad)
    with torch.cuda.graph(graph):
        paged_decode(q, unread, table)
    with pytest.raises(ValueError, match="k_descale"):
        paged_decode(q, unread, table)
