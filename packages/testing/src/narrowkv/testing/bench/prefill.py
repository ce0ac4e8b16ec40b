"""The bench of prefill: chunks of one sequence over prefixes, compared with torch SDPA and with an append."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_prefill import (
    batch_prefill,
    batch_prefill_reference,
    plan_append,
    plan_prefill,
    prefill_append,
)
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.quant.accuracy import compare
from narrowkv.testing.backends import sdpa
from narrowkv.testing.bench.large_cache import CacheSizes, LargeCache
from narrowkv.testing.bench.measure import Bench, Call, Columns, ModelCall, microseconds
from narrowkv.testing.bench.timing import GraphTimer
from narrowkv.testing.cases.decode import BOUND
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.model import ModelExecutor, Scale
from narrowkv.testing.operations import PrefillRows

_CHECKED_TOKENS = 16  # at either end of the chunk
_TRACED_TOKENS = 512  # of the chunk, by the model
_TRACED_KEYS = 512  # of each split, by the model
_MOST_SHARES = 32  # splits of a tile of rows, see `narrowkv.attn_prefill.kernels.shares`

Paged = tuple[torch.Tensor, PagedKVCache, PageTable, torch.Tensor]


@dataclass(frozen=True)
class PrefillSizes:
    """A chunk of `new` tokens of one sequence over `prefix` older ones; see `CacheSizes`.

    Attributes:
        ratio: query heads for each KV head.
    """

    new: int
    prefix: int
    num_kv_heads: int
    ratio: int
    head_dim: int
    page_size: int
    format: str

    @property
    def cache(self) -> CacheSizes:
        """Sizes of the cache that holds prefix and chunk."""
        return CacheSizes(1, self.length, self.page_size, self.num_kv_heads, self.head_dim, self.format)

    @property
    def length(self) -> int:
        """Keys, rounded up to whole pages."""
        return -(-(self.new + self.prefix) // self.page_size) * self.page_size

    @property
    def bytes_touched(self) -> float:
        """K, V, scales, page ids, q and o, each byte once."""
        return self.cache.num_bytes + 2 * 2 * self.new * self.num_kv_heads * self.ratio * self.head_dim

    @property
    def flops(self) -> float:
        """Multiplications and additions of QK and PV that the causal mask leaves."""
        pairs = self.new * (self.length - self.new) + self.new * (self.new + 1) / 2
        return 4.0 * self.head_dim * self.num_kv_heads * self.ratio * pairs


def prefill_bench(device: str = "cuda") -> Bench[PrefillSizes]:
    """`batch_prefill`; as further figures torch SDPA, `prefill_append`, and `append` before `batch_prefill`.

    For one new token `paged_decode` takes the place of the two with new tokens.

    Args:
        device: of the tensors.
    """
    columns = Columns(
        {"format": "format"},
        {
            "heads": lambda row: f"{row['num_kv_heads'] * row['ratio']}/{row['num_kv_heads']}",
            "new": "new",
            "prefix": "prefix",
        },
        ("format", "ratio"),
        {
            "sdpa us": microseconds("sdpa_us"),
            "append us": microseconds("append_us"),
            "two calls us": microseconds("two_calls_us"),
            "decode us": microseconds("decode_us"),
        },
    )
    return Bench(
        name="prefill", columns=columns, calls=partial(_calls, device), modelled=_modelled, seconds=0.2
    )


def _calls(device: str, shape: PrefillSizes) -> Iterator[Call]:
    """The one call of a chunk."""
    cache, table = LargeCache(shape.cache, device=device).view(shape.cache)
    random = torch.Generator(device).manual_seed(shape.new)
    size = (shape.new, shape.num_kv_heads * shape.ratio, shape.head_dim)
    q = torch.randn(size, generator=random, device=device).bfloat16()
    starts = torch.tensor([0, shape.new], dtype=torch.int32, device=device)
    plan = plan_prefill(q, cache, table, starts, max_q_len=shape.new)
    out = torch.empty_like(q)
    paged = q, cache, table, starts

    def us(make: Callable[..., Callable[[], object]], *arguments: Any) -> Callable[[GraphTimer], float]:
        return lambda timer: timer.measure(make(*arguments)).median_us

    one = shape.new == 1
    yield Call(
        {"plan": plan.explain()},
        lambda: partial(batch_prefill, *paged, out=out, plan=plan),  # type: ignore[arg-type,return-value]
        shape.bytes_touched,
        shape.flops,
        checker(q, cache, table),
        BOUND,
        extra={
            "sdpa_us": us(_sdpa, q, cache, table),
            "append_us": None if one else us(_append_and_attend, shape, paged),
            "two_calls_us": None if one else us(_append_then_attend, shape, paged),
            "decode_us": us(_decode, q, cache, table) if one else None,
        },
    )


def _modelled(shape: PrefillSizes) -> list[ModelCall]:
    """`batch_prefill` and `prefill_append`: some tokens of one KV head, keys as the middle token has."""
    names = {"batch_prefill": False, "prefill_append": True}
    return [
        ModelCall(name, shape, shape.flops, 0.1, partial(_trace, shape, appends), shape.bytes_touched)
        for name, appends in names.items()
        if shape.new > 1 or not appends
    ]


def checker(q: torch.Tensor, cache: PagedKVCache, table: PageTable) -> Callable[[torch.Tensor], float]:
    """Relative L1 error of an output of `batch_prefill` of one sequence, at its first and last tokens."""
    ends = list(_ends(q, cache, table))
    return lambda o: max(compare(o[rows], expected).relative_l1 for rows, expected in ends)


def _ends(q: torch.Tensor, cache: PagedKVCache, table: PageTable) -> Iterator[tuple[slice, torch.Tensor]]:
    """The first and the last tokens of the chunk, and their expected output."""
    tokens, count = q.shape[0], min(_CHECKED_TOKENS, q.shape[0])
    assert table.seq_lens is not None
    for rows, dropped in ((slice(0, count), tokens - count), (slice(tokens - count, tokens), 0)):
        part = PageTable.from_block_table(table.page_ids, table.seq_lens - dropped, page_size=table.page_size)
        starts = torch.tensor([0, count], dtype=torch.int32, device=q.device)
        expected = batch_prefill_reference(q[rows], cache, part, starts)
        assert isinstance(expected, torch.Tensor)
        yield rows, expected


def _sdpa(q: torch.Tensor, cache: PagedKVCache, table: PageTable) -> Callable[[], torch.Tensor]:
    """Gather, dequantise, attend: what an engine does that has no kernel for its cache."""

    def call() -> torch.Tensor:
        sides = ((cache.k, cache.k_descale), (cache.v, cache.v_descale))
        k, v = (x[table.page_ids[0].long()].flatten(0, 1).to(q.dtype).mul_(descale) for x, descale in sides)
        rows, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return sdpa(rows, k, v)

    return call


def _decode(q: torch.Tensor, cache: PagedKVCache, table: PageTable) -> Callable[[], object]:
    return partial(paged_decode, q, cache, table, out=torch.empty_like(q), plan=plan_decode(q, cache, table))


def _new_tokens(shape: PrefillSizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """k_new and v_new."""
    k_new, v_new = torch.randn(2, shape.new, shape.num_kv_heads, shape.head_dim, device=device).bfloat16()
    return k_new, v_new


def _append_and_attend(shape: PrefillSizes, paged: Paged) -> Callable[[], object]:
    """`prefill_append`."""
    q, cache, table, starts = paged
    assert table.seq_lens is not None
    before = PageTable.from_block_table(
        table.page_ids, cached_lens=table.seq_lens - shape.new, page_size=table.page_size
    )
    plan = plan_append(q, cache, before, starts)
    k_new, v_new = _new_tokens(shape, q.device)
    return partial(prefill_append, q, k_new, v_new, cache, before, starts, plan=plan)


def _append_then_attend(shape: PrefillSizes, paged: Paged) -> Callable[[], object]:
    """`append`, then `batch_prefill`."""
    q, cache, table, starts = paged
    k_new, v_new = _new_tokens(shape, q.device)
    places = torch.arange(shape.length - shape.new, shape.length, device=q.device)
    pages = table.page_ids[0].long()[places // table.page_size]
    slots = (pages * table.page_size + places % table.page_size).int()
    plan = plan_prefill(q, cache, table, starts)

    def call() -> None:
        append(cache, k_new, v_new, slots)
        batch_prefill(q, cache, table, starts, plan=plan)

    return call


def _trace(shape: PrefillSizes, appends: bool, executor: ModelExecutor) -> object:
    """Plans the full call, and makes a smaller one."""
    cache, table = LargeCache(shape.cache, device="cpu").view(shape.cache)
    q = torch.empty(shape.new, shape.num_kv_heads * shape.ratio, shape.head_dim, dtype=torch.bfloat16)
    starts = torch.tensor([0, shape.new], dtype=torch.int32)
    if appends:
        assert table.seq_lens is not None
        table = PageTable.from_block_table(
            table.page_ids, cached_lens=table.seq_lens - shape.new, page_size=table.page_size
        )
        config = plan_append(q, cache, table, starts).config
    else:
        config = plan_prefill(q, cache, table, starts, max_q_len=shape.new).config
    splits, kernel = config.num_splits, ""
    if config.kernel == "split":
        # The loop of "fused", with as many splits as the programs of a KV head give each tile of rows.
        tiles = -(-shape.new * shape.ratio // config.block_m)
        splits, kernel = max(2, min(splits // tiles, _MOST_SHARES)), "fused"
    new = min(shape.new, _TRACED_TOKENS)
    middle = shape.length - shape.new / 2
    prefix = max(int(min(middle, _TRACED_KEYS * splits)) - new // 2, 0)
    executor.scale = Scale(
        workgroups=shape.num_kv_heads * shape.new / new, passes=middle / (prefix + new / 2),
        keys=shape.num_kv_heads * shape.length / (prefix + new),
    )  # fmt: skip
    return PrefillCase(
        operation="append" if appends else "prefill", kernel=kernel, q_lens=(new,), lens=(prefix + new,),
        num_kv_heads=1, gqa_ratio=shape.ratio, head_dim=shape.head_dim, page_size=shape.page_size,
        format=shape.cache.cache_format, scale_group=shape.cache.scale_group or None,
        scale_format=shape.cache.scale_format, num_splits=splits, clean=True,
    ).inputs().call()  # fmt: skip


def make(options: PrefillRows) -> tuple[Bench[PrefillSizes], list[PrefillSizes], dict[str, Any]]:
    """The bench and its rows."""
    lists = options.cache_format, options.heads, options.new, options.prefix
    rows = [
        PrefillSizes(new, prefix, kv_heads, q_heads // kv_heads, options.head_dim, options.page_size, fmt)
        for fmt, (q_heads, kv_heads), new, prefix in product(*lists)
    ]
    return prefill_bench(), rows, {}
