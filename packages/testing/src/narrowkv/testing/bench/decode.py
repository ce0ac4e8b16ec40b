"""The bench of paged decode, over batches, contexts, page sizes, ratios and formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference, plan_decode
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant.accuracy import compare
from narrowkv.testing.backends import PEER_BOUND, PEERS, Backend
from narrowkv.testing.bench.large_cache import CacheSizes, LargeCache
from narrowkv.testing.bench.measure import Bench, Call, Columns, ModelCall, keeping_last
from narrowkv.testing.cases.decode import BOUND, DecodeCase, DecodeInputs
from narrowkv.testing.model import ModelExecutor, Scale
from narrowkv.testing.operations import DecodeCall, DecodeRows

# Of more tokens than this a sample of the sequences is compared; NaN is looked for in all outputs.
_CHECK_ALL_TOKENS = 2**18
_CHECKED_SEQUENCES = 4
_TRACED_KEYS = 512  # of each split, by the model


@dataclass(frozen=True)
class DecodeSizes:
    """Sizes and formats of one decode call; see `CacheSizes`.

    Attributes:
        ratio: query heads for each KV head.
        q: "bf16" or "fp16".
    """

    batch: int
    context: int
    page_size: int
    num_kv_heads: int
    ratio: int
    head_dim: int
    q: str
    format: str

    @property
    def cache(self) -> CacheSizes:
        """Sizes of the cache."""
        return CacheSizes(
            self.batch, self.context, self.page_size, self.num_kv_heads, self.head_dim, self.format
        )

    @property
    def q_shape(self) -> tuple[int, int, int]:
        """`[batch, num_qo_heads, head_dim]`."""
        return self.batch, self.num_kv_heads * self.ratio, self.head_dim

    @property
    def q_dtype(self) -> torch.dtype:
        """The dtype of queries and output."""
        return torch.bfloat16 if self.q == "bf16" else torch.float16

    def case(self, kernel: str = "") -> DecodeCase:
        """The case of these sizes, by a kernel or the target's."""
        formats = self.cache.cache_format
        return DecodeCase(
            lens=(self.context,) * self.batch,
            num_kv_heads=self.num_kv_heads,
            gqa_ratio=self.ratio,
            head_dim=self.head_dim,
            page_size=self.page_size,
            q_dtype=self.q_dtype,
            format=formats.k if formats.k == formats.v else formats,
            scale_group=self.cache.scale_group or None,
            scale_format=self.cache.scale_format,
            kernel=kernel,
        )

    @property
    def bytes_touched(self) -> float:
        """K, V, scales, page ids, q and o, each byte once."""
        return self.cache.num_bytes + 2 * 2 * self.batch * self.num_kv_heads * self.ratio * self.head_dim

    @property
    def flops(self) -> float:
        """Multiplications and additions of QK and PV."""
        return 4.0 * self.batch * self.context * self.num_kv_heads * self.ratio * self.head_dim


def decode_bench(
    *, batch_invariant: bool = False, peers: Sequence[Backend] = (), device: str = "cuda"
) -> Bench[DecodeSizes]:
    """Paged decode, and other implementations on the same tensors.

    Args:
        batch_invariant: measures plans whose results do not depend on the batch.
        peers: other implementations.
        device: of the tensors.
    """
    caches = keeping_last(partial(LargeCache, device=device), LargeCache.key)

    def calls(shape: DecodeSizes) -> Iterator[Call]:
        """Narrowkv's call, then the peers'."""
        cache, table = caches(shape.cache).view(shape.cache)
        random = torch.Generator(device).manual_seed(1)
        q = torch.randn(shape.q_shape, generator=random, device=device).to(shape.q_dtype)
        error = checker(q, cache, table)

        def ours() -> Callable[[], torch.Tensor]:
            plan = plan_decode(q, cache, table, batch_invariant=batch_invariant)
            out = torch.empty_like(q)
            return partial(paged_decode, q, cache, table, out=out, plan=plan)  # type: ignore[return-value]

        call = Call({"backend": "narrowkv"}, ours, shape.bytes_touched, shape.flops, error, BOUND)
        yield call
        for peer in peers:
            prepare = partial(peer.prepare, DecodeInputs(q, cache, table))
            labels = {"backend": peer.name}
            yield replace(call, labels=labels, prepare=prepare, bound=PEER_BOUND, is_peer=True)

    columns = Columns(
        {"backend": "backend", "format": "format", "Q": "q"},
        {"batch": "batch", "context": "context", "page": "page_size", "ratio": "ratio"},
        ("backend", "format"),
    )
    return Bench(name="decode", columns=columns, calls=calls, modelled=_modelled)


def _modelled(shape: DecodeSizes) -> list[ModelCall]:
    """Sequences share their pages, and are as short as keeps some passes in every split."""

    def trace(executor: ModelExecutor) -> object:
        one = replace(shape.cache, batch=1)
        cache, table = LargeCache(one, device="cpu").view(one)
        q = torch.zeros(shape.q_shape, dtype=shape.q_dtype)
        lens = torch.full((shape.batch,), shape.context, dtype=torch.int32)
        ids = table.page_ids.expand(shape.batch, -1).contiguous()
        table = PageTable.from_block_table(ids, lens, page_size=shape.page_size)
        plan = plan_decode(q, cache, table)
        splits = max(plan.config.num_items // shape.batch, 1) if plan.config.split != "none" else 1
        shorter = max(shape.context // (splits * _TRACED_KEYS), 1)
        lens.fill_(max(shape.context // shorter, 1))
        executor.scale = Scale(passes=shape.context / int(lens[0]))
        return paged_decode(q, cache, table, plan=plan)

    return [ModelCall("decode", shape, shape.flops, shape.cache.hbm_share, trace, shape.bytes_touched)]


def checker(q: torch.Tensor, cache: PagedKVCache, table: PageTable) -> Callable[[torch.Tensor], float]:
    """Relative L1 error of an output of decode; of large calls four sequences are compared."""
    assert table.seq_lens is not None
    batch, tokens = len(table.seq_lens), table.page_ids.numel() * table.page_size
    count = batch if tokens <= _CHECK_ALL_TOKENS else min(batch, _CHECKED_SEQUENCES)
    chosen = torch.linspace(0, batch - 1, count, device=q.device).round().long()
    part = PageTable.from_block_table(
        table.page_ids[chosen].contiguous(), table.seq_lens[chosen].contiguous(), page_size=table.page_size
    )
    expected = paged_decode_reference(q[chosen], cache, part)
    assert isinstance(expected, torch.Tensor)
    return lambda o: compare(o[chosen], expected).relative_l1


def make(options: DecodeRows) -> tuple[Bench[DecodeSizes], list[DecodeSizes], dict[str, Any]]:
    """The bench, its rows, and the settings that they depend on.

    Raises:
        ValueError: a context is not a multiple of a page size.
    """
    for context, page_size in product(options.context, options.page_size):
        if context % page_size:
            why = f"contexts must be multiples of every page size, got {context} and {page_size}"
            raise ValueError(f"--context, --page-size: {why}")
    lists = options.cache_format, options.batch, options.context, options.ratio, options.page_size
    rows = [  # those that can share a `LargeCache` are neighbours
        DecodeSizes(batch, context, page_size, options.num_kv_heads, ratio, options.head_dim, options.q, fmt)
        for fmt, batch, context, ratio, page_size in product(*lists)
    ]
    peers = [peer for peer in PEERS if peer.absent(True) is None] if options.peers else []
    settings = {"peers": options.peers, "batch_invariant": options.batch_invariant}
    return decode_bench(batch_invariant=options.batch_invariant, peers=peers), rows, settings


def case_of(options: DecodeCall) -> DecodeCase:
    """The case of one call."""
    sizes = DecodeSizes(
        options.batch, options.context, options.page_size, options.num_kv_heads, options.ratio,
        options.head_dim, options.q, options.cache_format,
    )  # fmt: skip
    return sizes.case(options.kernel)
