"""Wrong metadata never reaches another request: every operation, with wrong lengths, ids, slots, starts.

Each scene is a valid call of one operation with one kernel choice, on tensors and a workspace that lie
between guard zones. A mutated call has wrong numbers in its metadata. It must not write a guard zone, read
outside a tensor (checked address by address in the interpreter; by compute-sanitizer on a GPU), run long, or
change the output or the cache of a sequence whose metadata was not touched. Where a wrong number is
documented to stand for a right one, the call gives the bits that the right one gives.

Scenes begin with different faults; after all of each tensor's come random mixtures, the same in each run.
On a GPU this file is what compute-sanitizer runs (`compute-sanitizer --tool memcheck python -m pytest`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_prefill import plan_append, plan_prefill
from narrowkv.attn_prefill.planning import can_pipeline
from narrowkv.cdna_emulator import EmulatorError
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope, append
from narrowkv.runtime.launch import Executor, executing
from narrowkv.runtime.targets import device_target
from narrowkv.sage import sage_attention
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    IndexKeys,
    KVSource,
    append_index_keys,
    index_logits,
    index_topk,
    latent_decode,
    plan_index_topk,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_fp8,
)
from narrowkv.testing.cases.decode import OUT_SCALE, DecodeCase
from narrowkv.testing.cases.indexer import IndexCase
from narrowkv.testing.cases.latent import LatentCase
from narrowkv.testing.cases.prefill import PrefillCase
from narrowkv.testing.cases.sage import SageCase
from narrowkv.testing.cases.sparse import SparseCase
from narrowkv.testing.emulation import EmulateExecutor
from narrowkv.testing.memory_guards import CheckedInterpreter, GuardZones

pytestmark = pytest.mark.sampled

I32, I64 = torch.int32, torch.int64
Results = dict[str, torch.Tensor]
# Mutated calls of a scene with --run-slow; a plain run makes one of each kind of metadata.
EVERY = 60
STORED = ("k", "v", "k_descale", "v_descale")


# ---- metadata and what may be wrong in it


@dataclass(frozen=True)
class Numbers:
    """Metadata each of whose numbers belongs to one sequence: lengths, page ids, slots, row indices.

    Attributes:
        tensor: what the call reads.
        limit: the largest right number; the smallest is 0.
        of: the index of a sequence's numbers.
        read_as: the right numbers that wrong ones stand for; None if that is not promised.
    """

    tensor: torch.Tensor
    limit: int
    of: Callable[[int], Any]
    read_as: Callable[[torch.Tensor, int], torch.Tensor] | None = None

    def faults(self, sequences: int) -> list[tuple[str, torch.Tensor, set[int]]]:
        """Wrong versions of the tensor: what was changed, the tensor, and whose results may change.

        All sequences but one have wrong numbers at once.
        """
        wrong = [-1, self.limit + 1, -(2**31), 2**31 - 1, -7, 123_457, 2**30 + 54_321, 3 * self.limit + 8]
        if self.tensor.dtype == I64:
            # The low 32 bits of most are right.
            wrong = [2**32 + 1, -(2**40), self.limit + 1, 2**33, 1 - 2**32, 2**62, -(2**63), 2**40 + 3]
        found = []
        for first in range(len(wrong)):
            changed, told = self.tensor.clone(), {}
            for seq in set(range(sequences)) - {first % sequences}:
                told[seq] = changed[self.of(seq)] = wrong[(first + seq) % len(wrong)]
            found.append((f" of sequences {told}", changed, set(told)))
        return found


@dataclass(frozen=True)
class Starts:
    """Metadata that says where sequences begin, from 0 to `limit`.

    Attributes:
        tensor, limit, read_as: as for `Numbers`.
        claims: whether what lies between two starts belongs to one sequence: to the first that claims it, and
            to none that begins or ends outside of all.
    """

    tensor: torch.Tensor
    limit: int
    read_as: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    claims: bool = False

    def faults(self, sequences: int) -> list[tuple[str, torch.Tensor, set[int]]]:
        """As for `Numbers`."""
        right = self.tensor.tolist()

        def at(place: int, value: int) -> list[int]:
            return [*right[:place], value, *right[place + 1 :]]

        wrong = [
            [0, *([self.limit, 0] * sequences)[:sequences]],
            at(2, 2**31 - 1),
            at(1, -(2**31)),
            at(2, right[1] - 1),
            [start + self.limit + 1 for start in right],
            at(sequences, self.limit + 1),
            at(0, -3),
            at(1, self.limit),
            [2**30 + start for start in right],
            at(sequences, 60 * self.limit),
            at(0, 2**31 - 1),
            at(1, 1),
        ]
        if self.tensor.dtype == I64:
            wrong = [at(2, right[2] + 2**32), at(1, -(2**40)), *wrong]
        return [(f" = {starts}", self.tensor.new_tensor(starts), self._touched(starts)) for starts in wrong]

    def _touched(self, wrong: list[int]) -> set[int]:
        right = self.tensor.tolist()
        sequences = range(len(right) - 1)
        touched = {seq for seq in sequences if wrong[seq : seq + 2] != right[seq : seq + 2]}
        if not self.claims:
            return touched
        owner: dict[int, int] = {}
        for seq in sequences:
            if wrong[seq] >= 0 and wrong[seq + 1] <= self.limit:
                for place in range(wrong[seq], wrong[seq + 1]):
                    owner.setdefault(place, seq)
        return touched | {
            seq for seq in sequences if any(owner.get(x) != seq for x in range(right[seq], right[seq + 1]))
        }


def nearest(wrong: torch.Tensor, limit: int) -> torch.Tensor:
    """Wrong numbers stand for the nearest right ones."""
    return wrong.clamp(0, limit)


def skipped(wrong: torch.Tensor, limit: int) -> torch.Tensor:
    """Wrong numbers stand for -1, which names nothing."""
    return torch.where((wrong >= 0) & (wrong <= limit), wrong, -1)


@dataclass(frozen=True)
class Call:
    """One valid call.

    Attributes:
        run: makes the call and returns the outputs.
        metadata: what is mutated, by name.
        sequences: how many there are.
        rows: a sequence's rows of every output, as an index of dimension 0.
        written: tensors that the call writes in place (a cache), restored before each call.
        pages: a sequence's pages in them.
        exact: whether other sequences keep their bits. Where all sequences share the work evenly, a length
            that changes moves the others' splits, and with them the rounding.
        may_lack_keys: whether a plan's bound is too low for the keys of all sequences together. The longest
            ones have no place in the scratch then, and NaN rows; which these are depends on all lengths.
    """

    run: Callable[[], Results]
    metadata: dict[str, Numbers | Starts]
    sequences: int
    rows: Callable[[int], torch.Tensor]
    written: Results = field(default_factory=dict)
    pages: Callable[[int], torch.Tensor] = lambda seq: torch.zeros(0, dtype=I64)
    exact: bool = True
    may_lack_keys: bool = False


class Guarded(GuardZones):
    """Guard zones of one scene, and how its metadata is stored.

    Args:
        device: of the tensors.
        dtype: of integers that the operation takes in 32 and in 64 bits.
        apart: whether such vectors are strided, with wrong numbers in the gaps.
    """

    def __init__(self, device: str, dtype: torch.dtype = I32, apart: bool = False) -> None:
        super().__init__()
        self.device, self.dtype, self.apart = device, dtype, apart
        self.outputs: list[torch.Tensor] = []

    def integers(self, name: str, x: torch.Tensor, contiguous: bool = False) -> torch.Tensor:
        """Metadata of either integer, and of any stride unless it must be contiguous."""
        if not self.apart or contiguous:
            return self.place(name, x.to(self.dtype))
        room = torch.empty([2 * size for size in x.shape], dtype=self.dtype, device=x.device)
        gaps = room[tuple(slice(None, None, 2) for _ in x.shape)]
        return self.place(name, gaps.copy_(x))

    def nan(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An output to be written; `outputs` holds all of them."""
        self.outputs.append(self.place(name, torch.empty(shape, dtype=dtype, device=self.device)))
        return self.outputs[-1].fill_(float("nan"))

    def cache(self, cache: PagedKVCache) -> PagedKVCache:
        """The cache with all its memory between guard zones."""
        stored = {name: getattr(cache, name) for name in STORED}
        return replace(
            cache,
            **{name: self.place(name, x) for name, x in stored.items() if isinstance(x, torch.Tensor)},
        )

    def table(self, table: PageTable, num_pages: int) -> tuple[PageTable, dict[str, Numbers | Starts]]:
        """The table between guard zones, and its tensors as metadata."""
        size = table.page_size
        if table.kind == "ragged":
            assert table.kv_indptr is not None
            assert table.kv_last_page_len is not None
            starts = table.kv_indptr.tolist()
            indptr = self.integers("kv_indptr", table.kv_indptr)
            ids = self.integers("kv_indices", table.page_ids)
            last = self.integers("kv_last_page_len", table.kv_last_page_len)
            return PageTable.from_ragged(indptr, ids, last, page_size=size), {
                "kv_indptr": Starts(indptr, ids.numel(), nearest),
                "kv_indices": Numbers(ids, num_pages - 1, lambda seq: slice(starts[seq], starts[seq + 1])),
                "kv_last_page_len": Numbers(last, size, int, nearest),
            }
        assert table.seq_lens is not None
        ids, lens = self.integers("block_table", table.page_ids), self.integers("seq_lens", table.seq_lens)
        lengths = {"cached_lens" if table.before_append else "seq_lens": lens}
        return PageTable.from_block_table(ids, page_size=size, **lengths), {
            "block_table": Numbers(ids, num_pages - 1, int),
            "seq_lens": Numbers(lens, table.capacity, int, nearest),
        }


# ---- scenes

Scene = Callable[[Guarded], Call]
SCENES: dict[str, Scene] = {}


def _written(cache: PagedKVCache) -> Results:
    """What an append writes."""
    stored = {name: getattr(cache, name) for name in STORED}
    return {
        name: x for name, x in stored.items() if isinstance(x, torch.Tensor) and x.shape[0] == cache.num_pages
    }


def _token_rows(starts: torch.Tensor) -> Callable[[int], torch.Tensor]:
    right = starts.tolist()
    return lambda seq: torch.arange(right[seq], right[seq + 1])


def _decode(
    case: DecodeCase, late: bool = False, options: dict[str, Any] | None = None, **plan: Any
) -> Scene:
    """late: the last program of a sequence merges its splits, as no CPU's plan does by itself."""

    def scene(guarded: Guarded) -> Call:
        q, cache, table = case.build(guarded.device)
        q, cache = guarded.place("q", q), guarded.cache(cache)
        table, metadata = guarded.table(table, cache.num_pages)
        made = plan_decode(q, cache, table, **plan)
        made = replace(made, config=replace(made.config, merge_in_launch=late or made.config.merge_in_launch))
        made = replace(made, workspace=guarded.workspace(made.workspace_bytes(), guarded.device))
        out = guarded.nan("out", *q.shape[:2], cache.v_head_dim, dtype=case.out_dtype or torch.float32)
        lse, given = guarded.nan("lse", *q.shape[:2]), dict(options or {})
        if case.out_dtype is not None and case.out_dtype.itemsize == 1:
            given["out_scale"] = guarded.place("out_scale", torch.tensor([OUT_SCALE], device=guarded.device))

        def run() -> Results:
            paged_decode(q, cache, table, plan=made, out=out, lse=lse, return_lse=True, **given)
            return {"o": out, "lse": lse}

        return Call(
            run, metadata, len(case.lens), lambda seq: torch.arange(case.q_len) + seq * case.q_len,
            exact=made.config.split != "even",
        )  # fmt: skip

    return scene


def _prefill(case: PrefillCase, planned: bool = True, **plan: Any) -> Scene:
    """A prefill or an append, as the case says."""

    def scene(guarded: Guarded) -> Call:
        inputs = case.inputs(guarded.device)
        if plan.get("kernel") == "pipelined" and not can_pipeline(
            device_target(inputs.q.device), inputs.q.dtype, inputs.cache
        ):
            pytest.skip("not for this GPU")
        ids, rows = inputs.table.page_ids.cpu(), _token_rows(inputs.starts)
        cache = guarded.cache(inputs.cache)
        table, metadata = guarded.table(inputs.table, cache.num_pages)
        starts = guarded.place("cu_seqlens_q", inputs.starts)
        metadata["cu_seqlens_q"] = Starts(starts, len(inputs.q), claims=True)
        if (rope := inputs.options.get("rope")) is not None:
            cos, sin = guarded.place("rope.cos", rope.cos), guarded.place("rope.sin", rope.sin)
            positions = guarded.integers("rope.positions", rope.positions)
            inputs.options["rope"] = replace(rope, cos=cos, sin=sin, positions=positions)
            metadata["rope.positions"] = Numbers(positions, len(cos) - 1, rows, nearest)
        q = guarded.place("q", inputs.q)
        new = tuple(guarded.place(f"new {side}", x) for side, x in enumerate(inputs.new))
        inputs = replace(inputs, q=q, cache=cache, table=table, starts=starts, new=new)
        made: Any = None
        if planned:
            make: Any = plan_append if case.appends else plan_prefill
            made = make(q, cache, table, starts, **plan)
            made = made.with_workspace(guarded.workspace(made.workspace_bytes(), guarded.device))
        out = guarded.nan("out", *q.shape[:2], cache.v_head_dim, dtype=case.out_dtype or q.dtype)
        lse = guarded.nan("lse", *q.shape[:2])
        if "out_scale" in inputs.options:
            inputs.options["out_scale"] = guarded.place("out_scale", inputs.options["out_scale"])

        def run() -> Results:
            inputs.run(made, out=out, lse=lse, return_lse=True, validate=False)
            return {"o": out, "lse": lse}

        def pages(seq: int) -> torch.Tensor:
            return ids[seq][(ids[seq] >= 0) & (ids[seq] < cache.num_pages)].long()

        return Call(
            run, metadata, len(case.lens), rows, _written(cache) if case.appends else {}, pages,
            may_lack_keys="max_kv_tokens" in plan,
        )  # fmt: skip

    return scene


def _append(rope: bool = False, **case: Any) -> Scene:
    """`append`: a token is a sequence of its own, and has a page of its own."""

    def scene(guarded: Guarded) -> Call:
        tokens, size = 6, 4
        q, cache, table = DecodeCase.small(
            lens=(size,) * tokens, num_kv_heads=2, page_size=size, **case
        ).build(guarded.device)
        cache, own = guarded.cache(cache), table.page_ids[:, 0].long()
        k_new = guarded.place("k_new", q[:, :2])
        v_new = guarded.place("v_new", q[:, :2, : cache.v_head_dim])
        slots = guarded.integers("slot_mapping", own * size + 1)
        metadata: dict[str, Numbers | Starts] = {
            "slot_mapping": Numbers(slots, cache.num_pages * size - 1, int, skipped)
        }
        turn = None
        if rope:
            angle = torch.rand(5, 16, device=guarded.device)
            positions = guarded.integers("positions", torch.arange(tokens, device=guarded.device) % 5)
            turn = Rope(guarded.place("cos", angle.cos()), guarded.place("sin", angle.sin()), positions)
            metadata["positions"] = Numbers(positions, 4, int, nearest)

        def run() -> Results:
            append(cache, k_new, v_new, slots, rope=turn)
            return {}

        pages = own.cpu()
        return Call(
            run,
            metadata,
            tokens,
            lambda seq: torch.zeros(0),
            _written(cache),
            lambda seq: pages[seq : seq + 1],
        )

    return scene


def _sparse(case: SparseCase, operation: Callable[..., Any], **options: Any) -> Scene:
    def scene(guarded: Guarded) -> Call:
        inputs = case.build(guarded.device)
        q = guarded.place("q", inputs.q)
        metadata: dict[str, Numbers | Starts] = {}
        sources: list[KVSource | None] = []
        for name, source in (("prefix", inputs.prefix), ("extend", inputs.extend)):
            assert source is not None
            starts = source.indptr.tolist()
            indptr = guarded.integers(f"{name}.indptr", source.indptr, contiguous=True)
            # The list is a view: behind it lie indices of row 0.
            longer = torch.cat([source.indices, torch.zeros_like(source.indices)])
            indices = guarded.integers(f"{name}.indices", longer, contiguous=True)[: source.nnz]
            rows = source.rows
            if isinstance(rows, torch.Tensor):
                rows = guarded.place(f"{name}.rows", rows)
            metadata[f"{name}.indptr"] = Starts(indptr, source.nnz, nearest)
            metadata[f"{name}.indices"] = Numbers(
                indices,
                source.num_rows - 1,
                lambda token, at=starts: slice(at[token], at[token + 1]),
                skipped,
            )
            sources.append(KVSource(rows, indptr, indices))
        out, lse = guarded.nan("out", *q.shape, dtype=q.dtype), guarded.nan("lse", *q.shape[:2])

        def run() -> Results:
            operation(q, *sources, attn_sink=inputs.attn_sink, out=out, lse=lse, **options)
            return {"o": out, "lse": lse}

        return Call(run, metadata, case.num_tokens, lambda token: torch.tensor([token]))

    return scene


def _index_logits(case: IndexCase) -> Scene:
    def scene(guarded: Guarded) -> Call:
        inputs = case.inputs(guarded.device)
        q, weights = guarded.place("q", inputs.q), guarded.place("weights", inputs.weights)
        keys = IndexKeys(
            guarded.place("values", inputs.keys.values), guarded.place("scale", inputs.keys.scale),
            case.format, inputs.keys.shuffled,
        )  # fmt: skip
        where = {name: guarded.integers(name, x) for name, x in inputs.where.items()}
        metadata: dict[str, Numbers | Starts] = {}
        columns = keys.num_pages
        if case.layout == "rows":
            metadata = {name: Numbers(x, columns, int, nearest) for name, x in where.items()}
        else:
            columns = where["block_table"].shape[1] * case.page_size
            metadata["block_table"] = Numbers(where["block_table"], keys.num_pages - 1, int)
            metadata["seq_lens"] = Numbers(where["seq_lens"], columns, int, nearest)
        out = guarded.nan("out", q.shape[0], columns)

        def run() -> Results:
            index_logits(q, weights, keys, **where, out=out)
            return {"logits": out}

        return Call(
            run, metadata, len(case.lens), lambda seq: torch.arange(case.q_len) + seq * case.q_len
        )  # fmt: skip

    return scene


def _append_index_keys(layout: str, style: str = "") -> Scene:
    """A token is a sequence of its own, and has a page of its own."""

    def scene(guarded: Guarded) -> Call:
        tokens, size, generator = 6, 16, torch.Generator().manual_seed(0)
        keys = IndexKeys.quantize(torch.zeros(2 * tokens * size, 32), page_size=size)
        values, scale = (
            guarded.place(name, x.contiguous().to(guarded.device))
            for name, x in (("values", keys.values), ("scale", keys.scale))
        )
        if layout == "rows":
            values, scale = values.view(-1, 32), scale.view(-1)
        keys = IndexKeys(values, scale, shuffled=layout == "shuffled")
        k = guarded.place("k", torch.randn(tokens, 32, generator=generator).to(guarded.device))
        pages = torch.randperm(2 * tokens, generator=generator)[:tokens]
        slots = guarded.integers("slot_mapping", (pages * size + 1).to(guarded.device))
        metadata: dict[str, Numbers | Starts] = {
            "slot_mapping": Numbers(slots, 2 * tokens * size - 1, int, skipped)
        }
        rope = None
        if style:
            angle = torch.rand(5, 8, generator=generator).to(guarded.device)
            cos, sin = guarded.place("cos", angle.cos()), guarded.place("sin", angle.sin())
            positions = guarded.integers("positions", torch.arange(tokens, device=guarded.device) % 5)
            rope = Rope(cos, sin, positions, style)
            metadata["positions"] = Numbers(positions, 4, int, nearest)

        def run() -> Results:
            append_index_keys(k, keys, slots, rope=rope)
            return {}

        def written(seq: int) -> torch.Tensor:
            return pages[seq : seq + 1] * (size if layout == "rows" else 1) + (layout == "rows")

        return Call(
            run, metadata, tokens, lambda seq: torch.zeros(0), {"values": values, "scale": scale[..., None]},
            written,
        )  # fmt: skip

    return scene


def _index_topk(by_length: bool, columns: int, blocks: str = "") -> Scene:
    """Of 3 sequences with 2 tokens each, with rows of pages; or of 3 tokens with bounds.

    `blocks`: "choose" for blocks of 8 columns, "within" for columns of given ones.
    """

    def scene(guarded: Guarded) -> Call:
        q_len, topk = 2 if by_length else 1, 5
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(3 * q_len, columns, generator=generator).round().to(guarded.device)
        logits = guarded.place("logits", logits)
        ends = torch.tensor([columns - 3, 40, 2], device=guarded.device)
        options: dict[str, Any] = {}
        metadata: dict[str, Numbers | Starts] = {}
        if by_length:
            pages = -(-columns // 16)
            table = torch.arange(3 * pages, device=guarded.device).view(3, pages)
            options["seq_lens"] = guarded.integers("seq_lens", ends)
            options["block_table"] = guarded.integers("block_table", table)
            options["page_size"] = 16
            metadata["block_table"] = Numbers(options["block_table"], 3 * pages - 1, int)
        else:
            options["starts"] = guarded.integers("starts", ends // 2)
            options["ends"] = guarded.integers("ends", ends)
        for name in set(options) - {"block_table", "page_size"}:
            metadata[name] = Numbers(options[name], columns, int, nearest)
        sizes: dict[str, int] = {}
        if blocks:
            options["block_size"] = sizes["block_size"] = 8
        if blocks == "within":
            sizes["num_blocks"] = 4
            numbers = torch.tensor([0, 1, 4, columns // 8 - 1], device=guarded.device)
            options["blocks"] = guarded.integers("blocks", numbers.repeat(3 * q_len, 1))
            metadata["blocks"] = Numbers(
                options["blocks"], -(-columns // 8) - 1, lambda seq: slice(seq * q_len, (seq + 1) * q_len)
            )
        plan = plan_index_topk(
            topk=topk, num_columns=columns, device=guarded.device, max_num_tokens=6, **sizes
        )
        plan = replace(plan, workspace=guarded.workspace(plan.workspace_bytes(), guarded.device))
        out = guarded.place("out", torch.zeros(3 * q_len, topk, dtype=I32, device=guarded.device))

        def run() -> Results:
            out.fill_(77)
            index_topk(logits, topk, plan=plan, out=out, **options)
            return {"chosen": out}

        return Call(run, metadata, 3, lambda seq: torch.arange(q_len) + seq * q_len)

    return scene


def _latent(case: LatentCase, **options: Any) -> Scene:
    def scene(guarded: Guarded) -> Call:
        q, rows, table = case.build(guarded.device)
        q = guarded.place("q", q)
        if isinstance(rows, DSV4Rows):
            num_pages = rows.data.shape[0]
            rows = replace(rows, data=guarded.place("rows", rows.data))
        else:
            num_pages = rows.shape[0]
            rows = guarded.place("rows", rows)
        table, metadata = guarded.table(table, num_pages)
        out = guarded.nan("out", *q.shape[:2], 512, dtype=q.dtype)
        lse = guarded.nan("lse", *q.shape[:2])

        def run() -> Results:
            latent_decode(q, rows, table, out=out, lse=lse, **options)
            return {"o": out, "lse": lse}

        own = torch.arange(case.q_len)
        return Call(run, metadata, len(case.lens), lambda seq: own + seq * case.q_len)

    return scene


def _sage(case: SageCase, **options: Any) -> Scene:
    def scene(guarded: Guarded) -> Call:
        q, k, v, starts_q, starts_k = case.build(guarded.device)
        assert starts_q is not None
        assert starts_k is not None
        q, k, v = (guarded.place(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        rows = _token_rows(starts_q)
        starts_q = guarded.integers("cu_seqlens_q", starts_q)
        starts_k = guarded.integers("cu_seqlens_k", starts_k)
        out, lse = guarded.nan("out", *q.shape, dtype=q.dtype), guarded.nan("lse", *q.shape[:2])
        if "block_sizes" in options:
            flags = torch.ones(len(case.q_lens), q.shape[1], 1, 1, dtype=torch.bool, device=guarded.device)
            options["block_mask"] = guarded.place("block_mask", flags)

        def run() -> Results:
            sage_attention(q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, out=out, lse=lse, **options)
            return {"o": out, "lse": lse}

        metadata: dict[str, Numbers | Starts] = {
            "cu_seqlens_q": Starts(starts_q, q.shape[0], claims=True),
            "cu_seqlens_k": Starts(starts_k, k.shape[0], claims=True),
        }
        return Call(run, metadata, len(case.q_lens), rows)

    return scene


def _register() -> Iterator[tuple[str, Scene]]:
    small: dict[str, Any] = {"num_kv_heads": 1, "gqa_ratio": 2, "page_size": 8}
    one = DecodeCase.small(lens=(20, 5, 33, 9), **small)
    chunk = PrefillCase.small(q_lens=(5, 1, 12, 3), lens=(20, 5, 40, 9), **small)
    for kind in ("block table", "ragged"):
        w, p = (replace(case, ragged=kind == "ragged") for case in (one, chunk))
        yield f"decode, {kind}", _decode(w, split="none")
        yield f"decode, {kind}, batch invariant", _decode(w, batch_invariant=True)
        yield f"decode, {kind}, window", _decode(replace(w, q_len=2), options={"window_left": 4})
        for split in ("even", "per_sequence"):
            longer = replace(w, lens=(140, 5, 70), granularity="token_head")
            yield f"decode, {kind}, {split}", _decode(longer, split=split)
            yield f"decode, {kind}, {split}, merged late", _decode(longer, late=True, split=split)
        for kernel in ("dense", "fused", "split", None):
            yield f"prefill, {kind}, {kernel}", _prefill(p, kernel=kernel)
    for format in ("fp4_e2m1", "bf16"):
        yield f"decode, {format}", _decode(replace(one, format=format))
        yield f"prefill, {format}", _prefill(replace(chunk, format=format))
    yield "decode, FP8 queries", _decode(replace(one, q_dtype=torch.float8_e4m3fn))
    fp8 = {"out_dtype": torch.float8_e4m3fn}
    yield "decode, FP8 output", _decode(replace(one, **fp8))
    yield "prefill, FP8 output", _prefill(replace(chunk, **fp8))
    append_fp8 = PrefillCase.append(q_lens=(5, 1, 12, 3), lens=(20, 5, 40, 0), **fp8, **small)
    yield "prefill_append, FP8 output", _prefill(append_fp8)
    yield "decode, page size 1", _decode(replace(one, page_size=1, layout="tokens"))
    yield "prefill, without a plan", _prefill(replace(chunk, q_lens=(60, 20, 40), lens=(60, 40, 90)), False)
    yield "prefill, dense, splits", _prefill(chunk, kernel="dense", num_splits=3)
    yield "prefill, fused, splits", _prefill(chunk, kernel="fused", num_splits=3)
    a = PrefillCase.append(q_lens=(5, 1, 12, 3), lens=(20, 5, 40, 0), **small)
    for kernel in ("fused", "append_then_attend", "split", None):
        yield f"prefill_append, {kernel}", _prefill(a, kernel=kernel)
    for kernel in ("fused", "append_then_attend"):
        yield f"prefill_append, {kernel}, rope", _prefill(replace(a, rope="neox"), kernel=kernel)
    yield "prefill_append, pipelined", _prefill(replace(a, page_size=16, gqa_ratio=7), kernel="pipelined")
    for bound in ({"max_q_len": 4}, {"max_seq_len": 16}):
        for kernel in ("dense", "fused", "split", None):
            yield f"prefill, {kernel}, bound too small {bound}", _prefill(chunk, kernel=kernel, **bound)
        for kernel in ("append_then_attend", "fused", "split", None):
            yield f"prefill_append, {kernel}, bound too small {bound}", _prefill(a, kernel=kernel, **bound)
    # Scratch of five blocks of 64 keys, of which the sequences need six.
    bound = {"max_kv_tokens": 64}
    longer = replace(chunk, lens=(20, 5, 140, 9))
    yield f"prefill, dense, bound too small {bound}", _prefill(longer, kernel="dense", **bound)
    longer = PrefillCase.append(q_lens=a.q_lens, lens=(20, 5, 140, 2), **small)
    yield (
        f"prefill_append, append_then_attend, bound too small {bound}",
        _prefill(longer, kernel="append_then_attend", **bound),
    )
    for split in ("none", "even", "per_sequence"):
        longer = replace(one, lens=(140, 5, 70))
        yield f"decode, {split}, bound too small", _decode(longer, split=split, max_seq_len=16)
    for layout in ("NHD", "HND"):
        yield f"append, bf16, {layout}", _append(format="bf16", layout=layout)
        yield f"append, fp4_e2m1, {layout}", _append(format="fp4_e2m1", layout=layout)
    yield "append, fp8", _append()
    widths: dict[str, Any] = {"head_dim": 96, "v_head_dim": 64}
    yield "append, V narrower than K", _append(**widths)
    yield "decode, V narrower than K", _decode(replace(one, **widths), split="even")
    for kernel in ("dense", "fused", "split"):
        yield f"prefill, {kernel}, V narrower than K", _prefill(replace(chunk, **widths), kernel=kernel)
    for kernel in ("append_then_attend", "fused"):
        yield f"prefill_append, {kernel}, V narrower than K", _prefill(replace(a, **widths), kernel=kernel)
    yield "append, heads of 320", _append(head_dim=320, format="fp4_e2m1")
    yield "decode, heads of 320", _decode(replace(one, head_dim=320), split="even")
    for kernel in ("dense", "fused", "split"):
        yield f"prefill, {kernel}, heads of 320", _prefill(replace(chunk, head_dim=320), kernel=kernel)
    for kernel in ("append_then_attend", "fused", "split"):
        yield f"prefill_append, {kernel}, heads of 320", _prefill(replace(a, head_dim=320), kernel=kernel)
    yield "append, fp8, scales by token", _append(granularity="token_head")
    yield "append, fp8, rope", _append(rope=True)
    s = SparseCase.small(
        prefix_lens=(10, 0, 7), extend_lens=(3, 2, 1), num_qo_heads=8, pool_rows=32, extend_rows=16
    )
    wide = replace(s, layout="bf16")
    yield "sparse_prefill", _sparse(wide, sparse_prefill)
    yield "sparse_decode, 16-bit rows", _sparse(wide, sparse_decode, num_splits=2)
    for layout in ("split", "packed584", "row512"):
        yield (
            f"sparse_prefill_fp8, {layout}",
            _sparse(replace(s, layout=layout), sparse_prefill_fp8, mode="fused"),
        )
    yield "sparse_prefill_fp8, prepass", _sparse(s, sparse_prefill_fp8, mode="prepass")
    yield "sparse_decode, FP8 rows", _sparse(s, sparse_decode, num_splits=2)
    for layout in ("rows", "pages", "packed", "shuffled"):
        yield f"index_logits, {layout}", _index_logits(IndexCase.small(layout=layout, lens=(40, 5, 21)))
    yield "index_logits, FP4", _index_logits(IndexCase.small(format="fp4_e2m1", lens=(40, 5, 21)))
    yield "index_logits, 3 tokens", _index_logits(IndexCase.small(q_len=3, lens=(40, 5, 21)))
    for layout in ("rows", "pages", "shuffled"):
        yield f"append_index_keys, {layout}", _append_index_keys(layout)
    yield "append_index_keys, rope", _append_index_keys("pages", style="gptj")
    for columns in (100, 20000):
        yield f"index_topk, bounds, {columns}", _index_topk(False, columns)
        yield f"index_topk, lengths and pages, {columns}", _index_topk(True, columns)
        yield f"index_topk, blocks, {columns}", _index_topk(False, columns, "choose")
        yield f"index_topk, inside blocks, {columns}", _index_topk(True, columns, "within")
    one = LatentCase(lens=(20, 5, 33, 9), page_size=8, num_qo_heads=6)
    for kind in ("block table", "ragged"):
        w = replace(one, ragged=kind == "ragged")
        yield f"latent_decode, {kind}", _latent(w)
        yield f"latent_decode, {kind}, query tokens, splits", _latent(replace(w, q_len=3), num_splits=2)
    yield "latent_decode, one scale", _latent(replace(one, layout="tensor576"))
    yield "latent_decode, page size 1", _latent(replace(one, page_size=1), num_splits=2)
    g = SageCase.small(q_lens=(20, 0, 7, 5), k_lens=(30, 4, 40, 9), ragged=True)
    for precision in ("int8", "fp8"):
        yield f"sage, {precision}", _sage(g, qk_dtype=precision)
    yield "sage, smooth q", _sage(g, smooth_q=True, causal="bottom_right")
    yield "sage, block mask", _sage(g, block_sizes=(128, 64))


SCENES.update(_register())


# ---- what every scene promises


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().contiguous().view(torch.uint8)


def _kinds(call: Call) -> dict[str, list[str]]:
    """The metadata by what it says, such as "indices" of every source."""
    kinds: dict[str, list[str]] = {}
    for key in call.metadata:
        kinds.setdefault(key.rpartition(".")[2], []).append(key)
    return kinds


def _mutations(name: str, call: Call) -> Iterator[dict[str, tuple[str, torch.Tensor, set[int]]]]:
    """Faults without end: of one kind of metadata after the other, and then random mixtures."""
    faults = {key: found.faults(call.sequences) for key, found in call.metadata.items()}
    first, kinds = list(SCENES).index(name), _kinds(call)
    for number in range(max(map(len, faults.values()))):
        for keys in kinds.values():
            yield {key: faults[key][(first + number) % len(faults[key])] for key in keys}
    draw = random.Random(name)
    while True:
        chosen = draw.choices(sorted(faults), k=draw.choice((2, 3)))
        yield {key: draw.choice(faults[key]) for key in chosen}


def _check_mutations(name: str, guarded: Guarded, executor: Executor | None, most: int | None = None) -> None:
    """Makes a scene's call, then mutated ones; compares other sequences' results and guard zones."""
    with nullcontext() if executor is None else executing(executor):
        call = SCENES[name](guarded)
    right = {key: found.tensor.clone() for key, found in call.metadata.items()}
    before = {key: _bits(value) for key, value in call.written.items()}

    def attempt(metadata: Results) -> tuple[Results, Results]:
        """Outputs, and the bytes that were stored, of a call with this metadata."""
        for key, found in call.metadata.items():
            found.tensor.copy_(metadata[key])
        # Rows that a call does not write must not show what an earlier call wrote there.
        for output in guarded.outputs:
            output.fill_(float("nan"))
        for key, value in call.written.items():
            value.view(torch.uint8).copy_(before[key].view(*value.shape[:-1], -1))
        with nullcontext() if executor is None else executing(executor):
            out = {key: value.clone() for key, value in call.run().items()}
        if guarded.device != "cpu":
            torch.cuda.synchronize()
        for key, found in call.metadata.items():
            found.tensor.copy_(right[key])
        return out, {key: _bits(value) for key, value in call.written.items()}

    wanted, stored = attempt(right)
    assert guarded.damaged() == []
    for mutation in islice(_mutations(name, call), most or len(_kinds(call))):
        told = f"{name}: " + ", ".join(key + what for key, (what, _, _) in mutation.items())
        wrong = {key: changed for key, (_, changed, _) in mutation.items()}
        affected = set().union(*(touched for _, _, touched in mutation.values()))
        try:
            out, cache = attempt({**right, **wrong})
        except (AssertionError, EmulatorError) as error:
            raise AssertionError(f"{told}: {error}") from None
        assert guarded.damaged() == [], told
        for seq in set(range(call.sequences)) - affected:
            for key, value in out.items():
                rows = call.rows(seq).to(value.device)
                found, right_ones = value[rows], wanted[key][rows]
                if call.may_lack_keys:
                    found = found.where(~right_ones.isnan(), right_ones)
                    right_ones = right_ones.where(~found.isnan(), found)
                if call.exact:
                    same = torch.equal(_bits(found), _bits(right_ones))
                else:
                    same = torch.allclose(found, right_ones, rtol=1e-2, atol=2e-3)
                assert same, f"{told}: {key} of sequence {seq} changed"
        touched = [call.pages(seq) for seq in affected]
        for key, value in cache.items():
            others = torch.ones(len(value), dtype=torch.bool)
            for pages in touched:
                others[pages] = False
            same = torch.equal(value[others.to(value.device)], stored[key][others.to(value.device)])
            assert same, f"{told}: {key} of other pages changed"
        reading = {key: call.metadata[key].read_as for key in wrong}
        # An emulated call takes a second or more.
        if all(reading.values()) and not isinstance(executor, EmulateExecutor):
            meant = {key: read(wrong[key], call.metadata[key].limit) for key, read in reading.items() if read}
            for got, want in zip((out, cache), attempt({**right, **meant}), strict=True):
                for key, value in got.items():
                    assert torch.equal(_bits(value), _bits(want[key])), f"{told}: {key} is not as documented"
    for got, want in zip(attempt(right), (wanted, stored), strict=True):
        for key, value in got.items():
            assert torch.equal(_bits(value), _bits(want[key])), (
                f"{name}: {key} of the next right call changed"
            )


@pytest.mark.parametrize("most", [None, pytest.param(EVERY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [I32, I64])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu) if "pipelined" in name else name for name in SCENES]
)
def test_wrong_metadata_stays_within_its_own_sequence(
    name: str, dtype: torch.dtype, most: int | None, device: str
) -> None:
    executor = CheckedInterpreter() if device == "cpu" else None
    _check_mutations(name, Guarded(device, dtype), executor, most)


def test_counts_of_a_ragged_table_that_is_split_by_sequence_stay_within_it(device: str) -> None:
    """The one case above that a table's end beyond its pages fails in, which a sample may leave out."""
    executor = CheckedInterpreter() if device == "cpu" else None
    _check_mutations("decode, ragged, per_sequence", Guarded(device, I32), executor, None)


# These scenes in every run, all of them in the slow ones.
EMULATED = {"decode, ragged", "prefill, block table, dense", "prefill_append, append_then_attend, rope"}


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    "name",
    [
        name if name in EMULATED else pytest.param(name, marks=pytest.mark.slow)
        for name in SCENES
        if "pipelined" not in name
    ],
)
def test_wrong_metadata_never_leaves_the_tensors_in_amd_machine_code(name: str, target: str) -> None:
    _check_mutations(name, Guarded("cpu"), EmulateExecutor(target), 3)


@pytest.mark.parametrize(
    "name",
    [
        "decode, block table, even", "decode, ragged, even", "prefill, block table, dense",
        "prefill, ragged, fused", "prefill_append, fused, rope", "append, fp8, rope", "sparse_prefill",
        "sparse_decode, FP8 rows", "sage, int8",
        "index_logits, packed", "index_topk, lengths and pages, 100", "index_topk, inside blocks, 100",
    ],
)  # fmt: skip
def test_metadata_of_either_integer_and_any_stride_is_read_as_it_is(name: str, device: str) -> None:
    def results(dtype: torch.dtype, apart: bool) -> list[torch.Tensor]:
        call = SCENES[name](Guarded(device, dtype, apart))
        return [_bits(x) for x in (*call.run().values(), *call.written.values())]

    torch.manual_seed(0)
    expected = results(I32, False)
    for dtype, apart in ((I32, True), (I64, False), (I64, True)):
        torch.manual_seed(0)
        assert all(map(torch.equal, results(dtype, apart), expected)), f"{dtype}, {apart}"
