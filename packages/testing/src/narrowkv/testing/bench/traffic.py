"""The benches of serving traffic: steps beside other implementations, and automatic beside forced choices.

A step says how many new tokens each sequence has, and over how many keys. Lengths are seeded and lognormal,
as those of served requests are: half of the sequences have fewer than 2000 tokens, and a few have tens of
thousands.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, product
from typing import Any

import torch

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_prefill import batch_prefill, plan_append, plan_prefill, prefill_append
from narrowkv.attn_prefill.config import APPEND_KERNELS, KERNELS
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant.accuracy import compare
from narrowkv.runtime.attention.reference import attention_reference
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.testing.backends import PEER_BOUND, Backend
from narrowkv.testing.bench.large_cache import CacheSizes, LargeCache
from narrowkv.testing.bench.measure import Bench, Call, Columns, keeping_last, ratio_of
from narrowkv.testing.cases.decode import BOUND
from narrowkv.testing.words import SERVED_MODELS, Heads

__all__ = [
    "AUTOMATIC", "FORCED", "LayerStep", "StepInputs", "best_choices", "choices_bench", "grid", "rehearsals",
    "serving_steps", "step_tensors", "traffic_bench",
]  # fmt: skip

_CHECKED_TOKENS = 8  # at either end of a sequence's new tokens
_NO_PAGE = -1  # in a block table past the end of a sequence
_SPLITS = (1, 2, 4, 8, 16)
AUTOMATIC = "automatic"
_STEP = ("model", "traffic", "format", "operation", "batch", "keys")

Run = Callable[[], Any]


SHORTEST, MEDIAN, LONGEST, SPREAD = 100, 2000, 60_000, 1.2  # tokens; of the logarithm
_CAPACITY = 65_536  # tokens that a row of an engine's block table has pages for
_NEW_TOKENS = 2048  # of all chunks of a step, at most
_CHUNKS = 4
_CHUNK_PREFIX = 4096  # keys before a chunk of the grid
_DRAFTED = (2, 4, 8, 16)  # query tokens of a speculative step
_NGRAM = (1, 5)  # of a request for which an n-gram speculator found nothing, and found four tokens
_REHEARSED_SEQUENCES, _REHEARSED_SHARE = 4, 64


@dataclass(frozen=True)
class LayerStep:
    """One attention layer of one step of an engine.

    Attributes:
        model: of `SERVED_MODELS`.
        traffic: what kind of step it is, for tables.
        q_lens: new tokens of each sequence; lens: its keys, the new tokens included.
        format: of the cache, as for `CacheSizes`.
        page_size: tokens a page.
        appends: whether the call stores the new tokens itself, as `prefill_append` does.
        capacity: tokens that a row of the block table has pages for; 0 for the longest sequence's.
        layout: of the cache, as for `CacheSizes`.
    """

    model: str
    traffic: str
    q_lens: tuple[int, ...]
    lens: tuple[int, ...]
    format: str = "fp8_e4m3fn"
    page_size: int = 16
    appends: bool = False
    capacity: int = 0
    layout: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.sizes().items())

    @property
    def heads(self) -> Heads:
        """The heads of the model."""
        return SERVED_MODELS[self.model]

    @property
    def pages(self) -> list[int]:
        """Pages of each sequence."""
        return [-(-n // self.page_size) for n in self.lens]

    @property
    def max_pages(self) -> int:
        """Columns of the block table."""
        return max(-(-self.capacity // self.page_size), *self.pages, 1)

    @property
    def cache(self) -> CacheSizes:
        """A cache of one long sequence, whose pages all sequences share out."""
        heads, tokens = self.heads, sum(self.pages) * self.page_size
        return CacheSizes(
            1, tokens, self.page_size, heads.num_kv_heads, heads.head_dim, self.format, self.layout
        )

    @property
    def bytes_touched(self) -> float:
        """K, V, scales, page ids, q and o, and what an append reads and stores, each byte once."""
        heads, new = self.heads, sum(self.q_lens)
        sixteen_bit = 2 * new * heads.num_qo_heads + (2 * new * heads.num_kv_heads if self.appends else 0)
        tokens = replace(self.cache, context=sum(self.lens))
        return tokens.num_bytes + 2 * sixteen_bit * heads.head_dim

    @property
    def flops(self) -> float:
        """Multiplications and additions of QK and PV that the causal mask leaves."""
        pairs = sum(n * (full - n) + n * (n + 1) / 2 for n, full in zip(self.q_lens, self.lens, strict=True))
        return 4.0 * pairs * self.heads.num_qo_heads * self.heads.head_dim

    def sizes(self) -> dict[str, str | int]:
        """What a table and a JSON row say about the step."""
        heads = self.heads
        return {
            "model": self.model, "heads": f"{heads.num_qo_heads}/{heads.num_kv_heads}",
            "head_dim": heads.head_dim, "traffic": self.traffic, "format": self.format,
            "operation": "append" if self.appends else "attend", "batch": len(self.lens),
            "new_tokens": sum(self.q_lens), "keys": sum(self.lens), "longest": max(self.lens),
        }  # fmt: skip

    def rehearsal(self) -> LayerStep:
        """A few of the sequences, among them the one with the most new tokens, and a 64th of their tokens."""
        order = sorted(range(len(self.lens)), key=lambda i: -self.q_lens[i])
        chosen = sorted(order[:1] + order[-_REHEARSED_SEQUENCES + 1 :]) if len(order) > 1 else order
        few = max(_DRAFTED)
        q_lens = [n if (n := self.q_lens[i]) <= few else few + n // _REHEARSED_SHARE for i in chosen]
        lens = [new + self.lens[i] // _REHEARSED_SHARE for new, i in zip(q_lens, chosen, strict=True)]
        capacity = self.capacity // _REHEARSED_SHARE
        return replace(self, q_lens=tuple(q_lens), lens=tuple(lens), capacity=capacity)


def _length(draw: random.Random) -> int:
    return min(max(round(draw.lognormvariate(math.log(MEDIAN), SPREAD)), SHORTEST), LONGEST)


def _chunks(draw: random.Random) -> Iterator[tuple[int, int]]:
    """New tokens and keys of the prompts that a step prefills: chunks of a budget, the last one cut off."""
    left = _NEW_TOKENS
    for _ in range(draw.randint(1, _CHUNKS)):
        prompt = _length(draw)
        new = min(prompt, left)
        yield new, draw.randint(new, prompt)
        left -= new
        if not left:
            return


def _sequences(traffic: str, batch: int, draw: random.Random) -> list[tuple[int, int]]:
    """New tokens and keys of each sequence of a step."""
    found = list(_chunks(draw))[:batch] if traffic.endswith("mixed") else []
    drafted = draw.choice(_DRAFTED) if traffic == "speculative" else 1
    for _ in range(batch - len(found)):
        new = draw.choice(_NGRAM) if traffic == "speculative-mixed" else drafted
        found.append((new, new + _length(draw)))
    draw.shuffle(found)
    return found


def serving_steps(
    models: Sequence[str], traffic: Sequence[str], batches: Sequence[int], formats: Sequence[str],
    seed: int = 0,
) -> list[LayerStep]:  # fmt: skip
    """A step of every combination; a mixed one also as an append.

    A step's lengths depend on its model, traffic, batch and the seed, and on nothing else.

    Args:
        models: of `SERVED_MODELS`.
        traffic: of `TRAFFIC`: "decode" has one new token in every sequence, "speculative" has 2 to 16,
            "mixed" has chunks of prompts among decodes, "speculative-mixed" has them among decodes of one or
            five tokens.
        batches: sequences of a step.
        formats: of the cache, as for `CacheSizes`.
        seed: of the lengths.

    Example:
        >>> (step,) = serving_steps(["llama-8b"], ["speculative"], [3], ["bf16"])
        >>> len(step.lens), len(set(step.q_lens)), step.q_lens[0] in (2, 4, 8, 16)
        (3, 1, True)
    """
    steps = []
    for fmt, model, kind, batch in product(formats, models, traffic, batches):
        q_lens, lens = zip(
            *_sequences(kind, batch, random.Random(f"{seed} {model} {kind} {batch}")), strict=True
        )
        step = LayerStep(model, kind, q_lens, lens, fmt, capacity=_CAPACITY)
        steps += [step, replace(step, appends=True)] if kind.endswith("mixed") else [step]
    return steps


def _alike(model: str, batch: int, new: int, keys: int, fmt: str = "fp8_e4m3fn") -> LayerStep:
    name = "decode" if new == 1 else "speculative" if new <= max(_DRAFTED) else "prefill"
    return LayerStep(model, f"{name} {new} of {keys}", (new,) * batch, (keys,) * batch, fmt)


def _mixed(model: str, decodes: int, chunks: int, new: int) -> Iterator[LayerStep]:
    draw = random.Random(f"{model} {decodes} {chunks}")
    q_lens = (1,) * decodes + (new,) * chunks
    lens = tuple(n + (_length(draw) if n == 1 else _CHUNK_PREFIX) for n in q_lens)
    step = LayerStep(model, f"{decodes} decodes + {chunks} x {new}", q_lens, lens)
    return iter((step, replace(step, appends=True)))


def grid() -> list[LayerStep]:
    """Steps for which the automatic choice is compared with every forced one."""
    return [
        *(_alike("glm-4.5", *sizes) for sizes in ((4, 1, 1024), (1, 1, 32768), (64, 1, 8192))),
        *(_alike("glm-4.5", 64, 1, keys, fmt) for keys in (1024, 8192)
          for fmt in ("fp4_e2m1", "fp8_e4m3fn/fp4_e2m1")),
        _alike("glm-4.5", 1, 1, 32768, "fp8_e4m3fn/fp4_e2m1"),
        *(_alike("glm-4.5", *sizes) for sizes in (
            (64, 8, 8192), (4, 8, 8192), (64, 4, 8192), (64, 2, 8192), (16, 16, 8192))),
        *_mixed("glm-4.5", 60, 4, 512), *_mixed("llama-8b", 60, 4, 512), *_mixed("llama-70b-tp8", 60, 4, 512),
        *_mixed("glm-4.5", 127, 1, 2048),
        *(_alike("llama-8b", 1, 128, 128 + old, "bf16") for old in (4096, 32768)),
        _alike("qwen3-next", 1, 4096, 4096), _alike("qwen3-next", 1, 1024, 5120),
    ]  # fmt: skip


def rehearsals(steps: Iterable[LayerStep]) -> list[LayerStep]:
    """Small steps for a CPU: one of each model, kind of traffic, format and operation."""
    kinds = {(step.model, step.traffic, step.format, step.appends): step for step in steps}
    return [step.rehearsal() for step in kinds.values()]


@dataclass(frozen=True)
class StepInputs:
    """The tensors of a step.

    Attributes:
        step: it.
        q, cache, table, starts: as `batch_prefill` takes them; an append's lengths are those before it.
        new: k_new and v_new of an append.
        options: of the calls; there are none.
    """

    step: LayerStep
    q: torch.Tensor
    cache: PagedKVCache
    table: PageTable
    starts: torch.Tensor
    new: tuple[torch.Tensor, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def bounds(self) -> dict[str, Any]:
        """What an engine's scheduler knows of a step without asking the device."""
        step = self.step
        tokens = sum(step.pages) * step.page_size
        return {"max_q_len": max(step.q_lens), "max_seq_len": max(step.lens), "max_kv_tokens": tokens}

    @property
    def _paged(self) -> tuple[PagedKVCache, PageTable, torch.Tensor]:
        return self.cache, self.table, self.starts

    def part(self, begin: int, end: int) -> StepInputs:
        """The step of some neighbouring sequences."""
        step = self.step
        first, last = sum(step.q_lens[:begin]), sum(step.q_lens[:end])
        lens = self.table.seq_lens
        assert lens is not None
        table = PageTable.from_block_table(
            self.table.page_ids[begin:end].contiguous(),
            lens[begin:end].contiguous(),
            page_size=step.page_size,
        )
        few = replace(step, q_lens=step.q_lens[begin:end], lens=step.lens[begin:end])
        return StepInputs(
            few, self.q[first:last], self.cache, table, self.starts[begin : end + 1] - first, self.new
        )

    def paged_decode(self, out: torch.Tensor, **forced: Any) -> Run:
        """Plans as an engine does, for the capacity of its block table."""
        plan = plan_decode(self.q, self.cache, self.table, **forced)
        return partial(paged_decode, self.q, self.cache, self.table, out=out, plan=plan)

    def batch_prefill(self, out: torch.Tensor, **forced: Any) -> Run:
        """Plans as an engine does, with the bounds that it knows."""
        plan = plan_prefill(self.q, self.cache, self.table, self.starts, **self.bounds, **forced)
        return partial(batch_prefill, self.q, *self._paged, out=out, plan=plan)

    def prefill_append(self, out: torch.Tensor, **forced: Any) -> Run:
        """The same for a call that stores the new tokens; every replay stores them again."""
        k_new, v_new = self.new
        plan = plan_append(self.q, self.cache, self.table, self.starts, **self.bounds, **forced)
        return partial(prefill_append, self.q, k_new, v_new, *self._paged, out=out, plan=plan)

    def two_calls(self, out: torch.Tensor) -> Run:
        """`paged_decode` for the sequences with one new token, which come first, then `batch_prefill`.

        Raises:
            UnsupportedError: the step cannot be divided so.
        """
        q_lens = self.step.q_lens
        ones = next((i for i, new in enumerate(q_lens) if new != 1), len(q_lens))
        if not 0 < ones < len(q_lens) or 1 in q_lens[ones:]:
            raise UnsupportedError("needs sequences with one new token, then others")
        decode = self.part(0, ones).paged_decode(out[:ones])
        prefill = self.part(ones, len(q_lens)).batch_prefill(out[ones:])

        def run() -> torch.Tensor:
            decode()
            prefill()
            return out

        return run

    def error(self) -> Callable[[torch.Tensor], float]:
        """Relative L1 error of an output: the ends of the shortest, longest and most queried sequences."""
        step = self.step
        order = sorted(range(len(step.lens)), key=lambda i: step.lens[i])
        most = max(order, key=lambda i: step.q_lens[i])
        chosen = {i: self._expected(i) for i in {order[0], order[len(order) // 2], order[-1], most}}

        def error(o: torch.Tensor) -> float:
            return max(compare(o[rows], expected).relative_l1 for rows, expected in chosen.values())

        return error

    def _expected(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Some rows of q that belong to a sequence, and their output."""
        step, device = self.step, self.q.device
        first, new = sum(step.q_lens[:seq]), step.q_lens[seq]
        tokens = [i for i in range(new) if i < _CHECKED_TOKENS or i >= new - _CHECKED_TOKENS]
        rows = torch.tensor([first + i for i in tokens], device=device)
        k, v = self.cache.gather(self.table, seq)
        if step.appends:
            k, v = (
                torch.cat([old, x[first : first + new].float()])
                for old, x in zip((k, v), self.new, strict=True)
            )
        o, _ = attention_reference(
            self.q[rows], k, v, rows - first + step.lens[seq] - new, sm_scale=step.heads.head_dim**-0.5,
            logits_soft_cap=0.0, window_left=-1, window_right=0, sinks=None,
        )  # fmt: skip
        return rows, o


def best_choices(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The automatic calls of each step, the fastest forced one, and what failed."""
    kept: list[Mapping[str, Any]] = []
    for _, rows in groupby(records, key=lambda row: [row[name] for name in _STEP]):
        step = list(rows)
        forced = [row for row in step if row["choice"] != AUTOMATIC and row["median_us"]]
        best = min(forced, key=lambda row: row["median_us"], default=None)
        kept += [row for row in step if row["choice"] == AUTOMATIC or row is best or row["status"] != "pass"]
    return kept


_SIZES = {"batch": "batch", "new": "new_tokens", "keys": "keys"}


def step_tensors(device: str = "cuda") -> Callable[[LayerStep], StepInputs]:
    """A function that makes the tensors of a step, pages shuffled; steps of about one size share a cache.

    Args:
        device: of the tensors.
    """
    caches = keeping_last(partial(LargeCache, device=device), LargeCache.key)

    def inputs(step: LayerStep) -> StepInputs:
        tokens = max(step.cache.context, step.page_size)
        sizes = replace(step.cache, context=step.page_size << (tokens // step.page_size - 1).bit_length())
        cache, _ = caches(sizes).view(sizes)
        random = torch.Generator(device).manual_seed(1)
        heads, new = step.heads, sum(step.q_lens)
        q, k_new, v_new = (
            torch.randn(new, count, heads.head_dim, generator=random, device=device).bfloat16()
            for count in (heads.num_qo_heads, heads.num_kv_heads, heads.num_kv_heads)
        )
        order = torch.randperm(cache.num_pages, generator=random, device=device).int()
        ids = torch.full((len(step.lens), step.max_pages), _NO_PAGE, dtype=torch.int32, device=device)
        begin = 0
        for row, count in zip(ids, step.pages, strict=True):
            row[:count] = order[begin : begin + count]
            begin += count
        starts = torch.tensor([0, *step.q_lens], device=device).cumsum(0).int()
        lens = torch.tensor(step.lens, dtype=torch.int32, device=device)
        known: dict[str, Any] = {"cached_lens": lens - starts.diff()} if step.appends else {"seq_lens": lens}
        table = PageTable.from_block_table(ids, **known, page_size=step.page_size)
        return StepInputs(step, q, cache, table, starts, (k_new, v_new))

    return inputs


def traffic_bench(peers: Sequence[Backend] = (), device: str = "cuda") -> Bench[LayerStep]:
    """Steps of a serving engine, by narrowkv's calls and by other implementations.

    Args:
        peers: other implementations, which are asked about steps that store nothing.
        device: of the tensors.
    """
    tensors = step_tensors(device)

    def calls(step: LayerStep) -> Iterator[Call]:
        """Narrowkv's automatic calls, then the peers'."""
        inputs = tensors(step)
        ours = list(_automatic(inputs))
        yield from ours
        for peer in () if step.appends else peers:
            labels = {"backend": peer.name, "call": "", "choice": ""}
            prepare = partial(peer.prepare, inputs)
            yield replace(ours[0], labels=labels, prepare=prepare, bound=PEER_BOUND, is_peer=True)

    columns = Columns(
        {
            "model": "model",
            "traffic": "traffic",
            "format": "format",
            "by": lambda row: row["call"] or row["backend"],
        },
        _SIZES,
        ("backend", "call", "model"),
        {"x best peer": ratio_of("ratio_to_peer")},
    )
    return Bench(
        name="traffic", columns=columns, calls=calls, sizes=LayerStep.sizes, seconds=0.2,
        ratio="ratio_to_peer", is_baseline=lambda row: row.labels["backend"] != "narrowkv",
    )  # fmt: skip


def choices_bench(device: str = "cuda") -> Bench[LayerStep]:
    """Narrowkv's automatic calls of a step, and every forced kernel and split of the same calls.

    Args:
        device: of the tensors.
    """
    tensors = step_tensors(device)

    def calls(step: LayerStep) -> Iterator[Call]:
        """Automatic calls, then forced ones; what a kernel refuses is left out."""
        inputs = tensors(step)
        ours = list(_automatic(inputs))
        yield from ours
        for name in (*_operations(step), *(() if step.appends else ("two_calls",))):
            for forced in FORCED[name]:
                try:
                    run = getattr(inputs, name)(torch.empty_like(inputs.q), **forced)
                except UnsupportedError:
                    continue
                choice = ", ".join(f"{key}={value}" for key, value in forced.items())
                labels = {"backend": "narrowkv", "call": name, "choice": choice or "the caller's"}
                yield replace(ours[0], labels=labels, prepare=partial(_prepared, run))

    columns = Columns(
        {"model": "model", "step": "traffic", "format": "format", "call": "call", "choice": "choice"},
        _SIZES,
        ("call", "choice"),
        {"x best": ratio_of("ratio_to_best")},
        best_choices,
    )
    return Bench(
        name="choices", columns=columns, calls=calls, sizes=LayerStep.sizes, seconds=0.05,
        ratio="ratio_to_best", is_baseline=lambda row: row.labels["choice"] != AUTOMATIC,
    )  # fmt: skip


def _kernels(names: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    """Each kernel with the splits that it chooses itself, and with others."""
    return tuple(
        {"kernel": name, **splits} for name in names for splits in ({}, *({"num_splits": n} for n in _SPLITS))
    )


FORCED: dict[str, tuple[dict[str, Any], ...]] = {
    "paged_decode": tuple({"split": split} for split in ("none", "even", "per_sequence"))
    + tuple({"tokens_per_split": tokens} for tokens in (256, 512, 1024, 2048, 4096)),
    "batch_prefill": _kernels(tuple(kernel for kernel in KERNELS if kernel != "decode")),
    "prefill_append": _kernels(APPEND_KERNELS),
    "two_calls": ({},),
}
"""By the name of a call: what plans of it are told."""


def _operations(step: LayerStep) -> tuple[str, ...]:
    """The calls that serve a step: an engine takes the first, and the second serves it too."""
    if step.appends:
        return ("prefill_append",)
    return ("paged_decode", "batch_prefill") if len(set(step.q_lens)) == 1 else ("batch_prefill",)


def _automatic(inputs: StepInputs) -> Iterator[Call]:
    """The calls that serve a step, as they are planned without a word on how."""
    step, error = inputs.step, inputs.error()
    for name in _operations(step):
        prepare = partial(getattr(inputs, name), torch.empty_like(inputs.q))
        labels = {"backend": "narrowkv", "call": name, "choice": AUTOMATIC}
        yield Call(labels, prepare, step.bytes_touched, step.flops, error, BOUND)


def _prepared(run: Run) -> Run:
    return run
