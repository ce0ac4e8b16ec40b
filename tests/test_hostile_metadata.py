"""Wrong metadata never reaches another request: every operation, with mutated lengths, ids and slots.

Each scene is a valid call of one operation with one kernel choice, on tensors that lie between guard zones. A
mutated call changes one to three entries of its metadata. It must not write a guard zone, read outside a
tensor (checked address by address in the interpreter; by compute-sanitizer on a GPU), run long, or change the
output or the cache of a sequence whose metadata was not touched.

The mutations are random and repeat themselves: a failure names the scene and the number that draws them.
On a GPU this file is what compute-sanitizer runs (`compute-sanitizer --tool memcheck python -m pytest`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode, plan_decode
from narrowkv.attn_decode.cases import DecodeCase
from narrowkv.attn_prefill import batch_prefill, plan_append, plan_prefill, prefill_append
from narrowkv.attn_prefill.cases import PrefillCase
from narrowkv.cdna_emulator import EmulatorError
from narrowkv.paged_cache import PagedKVCache, PageTable, Rope, append
from narrowkv.runtime.launch import Executor, executing
from narrowkv.sage import sage_attention
from narrowkv.sage.cases import SageCase
from narrowkv.sparse_fp8 import KVSource, sparse_decode, sparse_prefill, sparse_prefill_fp8
from narrowkv.sparse_fp8.cases import SparseCase
from narrowkv.testing.emulation import EmulateExecutor
from narrowkv.testing.memory_guards import CheckedInterpreter, GuardZones

pytestmark = pytest.mark.sampled


class Guarded(GuardZones):
    """Guard zones of one scene, whose tensors are on one device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device


Results = dict[str, torch.Tensor]
SAMPLE, EVERY = 3, 90


@dataclass
class Metadata:
    """A tensor that is mutated.

    Attributes:
        tensor: the guarded tensor that the call reads.
        values: what an entry is replaced by.
        owners: which sequences may change when this entry does (None: all).
    """

    tensor: torch.Tensor
    values: tuple[int, ...]
    owners: Callable[[tuple[int, ...]], set[int] | None]


@dataclass
class Call:
    """One valid call.

    Attributes:
        run: makes the call and returns the outputs.
        metadata: what is mutated, by name.
        rows: a sequence's rows of every output, as an index of dimension 0.
        exact: whether other sequences keep their bits. Where all sequences share the work evenly, a length
            that changes moves the others' splits, and with them the rounding.
        written: tensors that the call writes in place (a cache), restored before each call.
        kept: which bytes of the written tensors belong to others than these sequences.
    """

    run: Callable[[], Results]
    metadata: dict[str, Metadata]
    rows: Callable[[int], torch.Tensor]
    sequences: int
    written: Results = field(default_factory=dict)
    pages: Callable[[int], torch.Tensor] | None = None
    exact: bool = True


Scene = Callable[[Guarded], Call]
SCENES: dict[str, Scene] = {}


def _register(name: str, scene: Scene) -> None:
    assert name not in SCENES
    SCENES[name] = scene


HUGE = (-1, -2, -(2**31), 2**31 - 1, 2**30 + 5)


def _beyond(limit: int) -> tuple[int, ...]:
    """Values that are wrong for an index below `limit`; none becomes right when it wraps at 32 bits."""
    return (*HUGE, limit, limit + 1, 3 * limit + 7, 123_457)


def _at(index: tuple[int, ...]) -> set[int]:
    return {index[0]}


def _both_sides(index: tuple[int, ...]) -> set[int]:
    return {index[0] - 1, index[0]}


def _place_cache(guarded: Guarded, cache: PagedKVCache) -> PagedKVCache:
    fields = {
        name: guarded.place(f"cache.{name}", value)
        for name in ("k", "v", "k_descale", "v_descale")
        if isinstance(value := getattr(cache, name), torch.Tensor)
    }
    return replace(cache, **fields)


def _place_table(guarded: Guarded, table: PageTable, num_pages: int) -> tuple[PageTable, dict[str, Metadata]]:
    """The table between guard zones, and its tensors as metadata."""
    beyond = _beyond(num_pages)
    if table.kind == "ragged":
        assert table.kv_indptr is not None
        assert table.kv_last_page_len is not None
        starts = table.kv_indptr.tolist()
        indptr = guarded.place("kv_indptr", table.kv_indptr)
        ids = guarded.place("kv_indices", table.page_ids)
        last = guarded.place("kv_last_page_len", table.kv_last_page_len)

        def owner(index: tuple[int, ...]) -> set[int]:
            return {seq for seq in range(len(starts) - 1) if starts[seq] <= index[0] < starts[seq + 1]}

        return PageTable.from_ragged(indptr, ids, last, page_size=table.page_size), {
            "kv_indptr": Metadata(indptr, (*HUGE, ids.numel() + 1, ids.numel() * 50), _both_sides),
            "kv_indices": Metadata(ids, beyond, owner),
            "kv_last_page_len": Metadata(last, (*HUGE, table.page_size + 1, table.page_size * 100), _at),
        }
    assert table.seq_lens is not None
    ids = guarded.place("block_table", table.page_ids)
    lens = guarded.place("seq_lens", table.seq_lens)
    capacity = table.page_ids.shape[1] * table.page_size
    lengths = {"cached_lens": lens} if table.before_append else {"seq_lens": lens}
    return PageTable.from_block_table(ids, page_size=table.page_size, **lengths), {
        "block_table": Metadata(ids, beyond, _at),
        "seq_lens": Metadata(lens, (*HUGE, capacity + 1, capacity * 40), _at),
    }


def _q_starts(starts: torch.Tensor, tokens: int) -> Metadata:
    """`cu_seqlens_q` as metadata: whoever claims a token may change its row."""
    right = starts.tolist()

    def owners(index: tuple[int, ...]) -> set[int] | None:
        now = [min(max(value, 0), tokens) for value in starts.tolist()]
        moved = {seq for seq in range(len(now) - 1) if index[0] in (seq, seq + 1)}
        claimed = {token for seq in moved for token in range(now[seq], now[seq + 1])}
        return moved | {
            seq for seq in range(len(now) - 1) if claimed & set(range(right[seq], right[seq + 1]))
        }

    return Metadata(starts, (*HUGE, tokens + 1, tokens * 60), owners)


def _nans(guarded: Guarded, name: str, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    return guarded.place(name, torch.full(tuple(shape), float("nan"), dtype=dtype, device=guarded.device))


def _decode(workload: DecodeCase, plan: dict[str, Any], **options: Any) -> Scene:
    def scene(guarded: Guarded) -> Call:
        q, cache, table = workload.build(guarded.device)
        q, cache = guarded.place("q", q), _place_cache(guarded, cache)
        table, metadata = _place_table(guarded, table, cache.num_pages)
        made = plan_decode(q, cache, table, **plan)
        out = _nans(guarded, "out", q.shape, torch.float32)
        lse = _nans(guarded, "lse", q.shape[:2], torch.float32)

        def run() -> Results:
            paged_decode(q, cache, table, plan=made, out=out, lse=lse, return_lse=True, **options)
            return {"o": out, "lse": lse}

        step = workload.q_len
        return Call(
            run, metadata, lambda seq: torch.arange(seq * step, (seq + 1) * step), len(workload.lens),
            exact=made.config.split != "even",
        )  # fmt: skip

    return scene


def _token_rows(starts: torch.Tensor) -> Callable[[int], torch.Tensor]:
    right = starts.tolist()
    return lambda seq: torch.arange(right[seq], right[seq + 1])


def _prefill(workload: PrefillCase, plan: dict[str, Any] | None, **options: Any) -> Scene:
    def scene(guarded: Guarded) -> Call:
        q, cache, table, starts = workload.build(guarded.device)
        q, cache = guarded.place("q", q), _place_cache(guarded, cache)
        table, metadata = _place_table(guarded, table, cache.num_pages)
        rows = _token_rows(starts)
        starts = guarded.place("cu_seqlens_q", starts)
        made = None if plan is None else plan_prefill(q, cache, table, starts, **plan)
        dtype = q.dtype if q.element_size() == 2 else torch.bfloat16
        out = _nans(guarded, "out", q.shape, dtype)
        lse = _nans(guarded, "lse", q.shape[:2], torch.float32)

        def run() -> Results:
            batch_prefill(q, cache, table, starts, plan=made, out=out, lse=lse, return_lse=True, **options)
            return {"o": out, "lse": lse}

        metadata["cu_seqlens_q"] = _q_starts(starts, q.shape[0])
        return Call(run, metadata, rows, len(workload.lens))

    return scene


def _prefill_append(workload: PrefillCase, plan: dict[str, Any], **options: Any) -> Scene:
    def scene(guarded: Guarded) -> Call:
        q, k_new, v_new, cache, table, starts, rope = workload.build_append(guarded.device)
        q, cache = guarded.place("q", q), _place_cache(guarded, cache)
        k_new, v_new = guarded.place("k_new", k_new), guarded.place("v_new", v_new)
        own = [table.page_ids[seq].cpu() for seq in range(len(workload.lens))]
        table, metadata = _place_table(guarded, table, cache.num_pages)
        rows = _token_rows(starts)
        starts = guarded.place("cu_seqlens_q", starts)
        metadata["cu_seqlens_q"] = _q_starts(starts, q.shape[0])
        if rope is not None:
            positions = guarded.place("rope.positions", rope.positions)
            rope = replace(
                rope,
                cos=guarded.place("rope.cos", rope.cos),
                sin=guarded.place("rope.sin", rope.sin),
                positions=positions,
            )
            owner = torch.repeat_interleave(
                torch.arange(len(workload.q_lens)), torch.tensor(workload.q_lens)
            ).tolist()
            metadata["rope.positions"] = Metadata(
                positions, _beyond(rope.cos.shape[0]), lambda index: {owner[index[0]]}
            )
        made = plan_append(q, cache, table, starts, **plan)
        out = _nans(guarded, "out", q.shape, q.dtype)
        lse = _nans(guarded, "lse", q.shape[:2], torch.float32)

        def run() -> Results:
            prefill_append(
                q, k_new, v_new, cache, table, starts,
                rope=rope, plan=made, out=out, lse=lse, return_lse=True, **options,
            )  # fmt: skip
            return {"o": out, "lse": lse}

        def pages(seq: int) -> torch.Tensor:
            return own[seq][(own[seq] >= 0) & (own[seq] < cache.num_pages)].long()

        written = {
            name: value
            for name in ("k", "v", "k_descale", "v_descale")
            if isinstance(value := getattr(cache, name), torch.Tensor) and value.shape[0] == cache.num_pages
        }
        return Call(run, metadata, rows, len(workload.lens), written, pages)

    return scene


def _append(
    format: str,
    granularity: str | None,
    layout: str = "NHD",
    dtype: torch.dtype = torch.int32,
    rope: bool = False,
) -> Scene:
    """`append`: a token is a sequence of its own, and so is its page (page size 1 apart)."""

    def scene(guarded: Guarded) -> Call:
        tokens, page_size = 6, 4
        workload = DecodeCase.small(
            lens=(page_size,) * tokens, num_kv_heads=2, page_size=page_size, format=format, layout=layout,
            granularity=granularity or "float",
        )  # fmt: skip
        _, cache, table = workload.build(guarded.device)
        cache = _place_cache(guarded, cache)
        own = table.page_ids[:, 0].cpu().long()
        new = torch.randn(2, tokens, 2, 64, device=guarded.device).bfloat16()
        k_new, v_new = guarded.place("k_new", new[0]), guarded.place("v_new", new[1])
        slots = guarded.place("slot_mapping", (own * page_size + 1).to(guarded.device, dtype))

        angles, turn = torch.rand(5, 16, device=guarded.device), None
        far = (2**32 + 3, 2**33 + 5, -(2**40)) if dtype == torch.int64 else ()
        metadata = {
            "slot_mapping": Metadata(slots, (-2, *_beyond(cache.num_pages * page_size)[1:], *far), _at)
        }
        if rope:
            # A column of a table, as an engine may keep it: what lies between the positions is wrong.
            wide = torch.full((tokens, 2), 2**31 - 1, dtype=dtype, device=guarded.device)
            positions = guarded.place("positions", wide)[:, 0]
            positions.copy_(torch.arange(tokens) % 5)
            turn = Rope(guarded.place("cos", angles.cos()), guarded.place("sin", angles.sin()), positions)
            metadata["positions"] = Metadata(positions, (*_beyond(5), *far), _at)

        def run() -> Results:
            append(cache, k_new, v_new, slots, rope=turn)
            return {}

        written = {
            name: value
            for name in ("k", "v", "k_descale", "v_descale")
            if isinstance(value := getattr(cache, name), torch.Tensor) and value.shape[0] == cache.num_pages
        }
        return Call(
            run, metadata, lambda seq: torch.tensor([]), tokens, written, lambda seq: own[seq : seq + 1]
        )

    return scene


def _sparse(workload: SparseCase, op: Callable[..., Any], **options: Any) -> Scene:
    def scene(guarded: Guarded) -> Call:
        inputs = workload.build(guarded.device)
        q = guarded.place("q", inputs.q)
        metadata: dict[str, Metadata] = {}
        sources: list[KVSource | None] = []
        for name, source in (("prefix", inputs.prefix), ("extend", inputs.extend)):
            if source is None:
                sources.append(None)
                continue
            starts = source.indptr.tolist()

            def owner(index: tuple[int, ...], starts: list[int] = starts) -> set[int]:
                return {
                    token for token in range(len(starts) - 1) if starts[token] <= index[0] < starts[token + 1]
                }

            indptr = guarded.place(f"{name}.indptr", source.indptr)
            indices = guarded.place(f"{name}.indices", source.indices)
            rows = source.rows
            if isinstance(rows, torch.Tensor):
                rows = guarded.place(f"{name}.rows", rows)
            nnz = indices.numel()
            metadata[f"{name}.indptr"] = Metadata(indptr, (*HUGE, nnz + 1, nnz * 90), _both_sides)
            # -1 means skipped; the others are faults.
            metadata[f"{name}.indices"] = Metadata(indices, _beyond(source.num_rows), owner)
            sources.append(KVSource(rows, indptr, indices))
        out = _nans(guarded, "out", q.shape, q.dtype)

        def run() -> Results:
            _, lse = op(q, *sources, attn_sink=inputs.attn_sink, out=out, return_lse=True, **options)
            return {"o": out, "lse": lse}

        return Call(run, metadata, lambda token: torch.tensor([token]), workload.num_tokens)

    return scene


def _sage(workload: SageCase, **options: Any) -> Scene:
    def scene(guarded: Guarded) -> Call:
        q, k, v, starts_q, starts_k = workload.build(guarded.device)
        assert starts_q is not None
        assert starts_k is not None
        q, k, v = (guarded.place(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        rows = _token_rows(starts_q)
        starts_q, starts_k = guarded.place("cu_seqlens_q", starts_q), guarded.place("cu_seqlens_k", starts_k)
        tokens = k.shape[0]

        def run() -> Results:
            o, lse = sage_attention(
                q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, return_lse=True, **options
            )
            return {"o": o, "lse": lse}

        # A group of keys has one descale, so a sequence that takes over another's keys may change both.
        metadata = {
            "cu_seqlens_q": replace(_q_starts(starts_q, q.shape[0]), owners=lambda index: None),
            "cu_seqlens_k": Metadata(starts_k, (*HUGE, tokens + 1, tokens * 60), lambda index: None),
        }
        return Call(run, metadata, rows, len(workload.q_lens))

    return scene


SMALL: dict[str, Any] = {"num_kv_heads": 1, "gqa_ratio": 2, "page_size": 8}
for ragged in (False, True):
    kind = "ragged" if ragged else "block table"
    w = DecodeCase.small(lens=(20, 5, 33, 9), ragged=ragged, **SMALL)
    _register(f"decode, {kind}", _decode(w, {}))
    _register(f"decode, {kind}, batch invariant", _decode(w, {"batch_invariant": True}))
    _register(f"decode, {kind}, even", _decode(replace(w, lens=(150, 5, 300)), {"split": "even"}))
    _register(f"decode, {kind}, window", _decode(replace(w, q_len=2), {}, window_left=4))
    p = PrefillCase.small(q_lens=(5, 1, 12), lens=(20, 5, 40), ragged=ragged, **SMALL)
    for kernel in ("dense", "fused"):
        _register(f"prefill, {kind}, {kernel}", _prefill(p, {"kernel": kernel}))
for format in ("fp4_e2m1", "bf16"):
    _register(f"decode, {format}", _decode(replace(w, format=format, ragged=False), {}))
    _register(f"prefill, {format}", _prefill(replace(p, format=format, ragged=False), {}))
_register("decode, scales by token", _decode(replace(w, granularity="token_head", ragged=False), {}))
_register("decode, page size 1", _decode(replace(w, page_size=1, layout="tokens", ragged=False), {}))
_register(
    "prefill, without a plan",
    _prefill(replace(p, q_lens=(60, 20, 40), lens=(60, 40, 90), ragged=False), None),
)
for bounds in ({"max_q_len": 4}, {"max_seq_len": 16}, {"max_kv_tokens": 24}):
    _register(
        f"prefill, dense, bounds too small {bounds}",
        _prefill(replace(p, ragged=False), {"kernel": "dense", **bounds}),
    )
a = PrefillCase.append(q_lens=(5, 1, 12), lens=(20, 5, 40), **SMALL)
for kernel in ("fused", "append_then_attend"):
    for rope in (None, "neox"):
        _register(
            f"prefill_append, {kernel}, rope {rope}",
            _prefill_append(replace(a, rope=rope), {"kernel": kernel}),
        )
for format, granularity in (
    ("fp8_e4m3fn", None),
    ("fp8_e4m3fn", "token_head"),
    ("fp4_e2m1", None),
    ("bf16", None),
):
    for dtype in (torch.int32, torch.int64):
        _register(f"append, {format}, {granularity}, {dtype}", _append(format, granularity, dtype=dtype))
_register("append, HND", _append("bf16", None, layout="HND"))
for dtype in (torch.int32, torch.int64):
    _register(f"append, rope, {dtype}", _append("fp8_e4m3fn", None, dtype=dtype, rope=True))
s = SparseCase.small(
    prefix_lens=(40, 0, 33, 17), extend_lens=(3, 2, 0, 1), num_qo_heads=8, pool_rows=64, extend_rows=16
)
_register("sparse_prefill", _sparse(replace(s, layout="bf16"), sparse_prefill))
_register("sparse_decode, 16-bit rows", _sparse(replace(s, layout="bf16"), sparse_decode))
for layout in ("split", "packed584", "row512"):
    _register(
        f"sparse_prefill_fp8, fused, {layout}",
        _sparse(replace(s, layout=layout), sparse_prefill_fp8, mode="fused"),
    )
_register("sparse_prefill_fp8, prepass", _sparse(s, sparse_prefill_fp8, mode="prepass"))
_register("sparse_decode, FP8 rows", _sparse(s, sparse_decode))
g = SageCase.small(q_lens=(30, 5, 12), k_lens=(30, 40, 3), ragged=True)
for qk_dtype in ("int8", "fp8"):
    _register(f"sage, {qk_dtype}", _sage(g, qk_dtype=qk_dtype))
_register("sage, smooth q", _sage(g, smooth_q=True, causal="bottom_right"))


def _mutate(call: Call, draw: random.Random) -> tuple[str, set[int]]:
    """Changes one to three entries; returns what was changed and whose outputs may change."""
    told, entries = [], []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        name = draw.choice(sorted(call.metadata))
        found = call.metadata[name]
        index = tuple(draw.randrange(size) for size in found.tensor.shape)
        value = draw.choice(found.values)
        found.tensor[index] = value
        told.append(f"{name}{list(index)} = {value}")
        entries.append((found, index))
    affected: set[int] = set()
    for found, index in entries:
        owners = found.owners(index)
        affected |= set(range(call.sequences)) if owners is None else owners
    return ", ".join(told), affected


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().contiguous().view(torch.uint8)


def _run(call: Call) -> Results:
    return {name: value.clone() for name, value in call.run().items()}


def _check_mutations(name: str, count: int, device: str, executor: Executor | None) -> None:
    """Makes a scene's call, then `count` mutated ones; compares other sequences' results and guard zones."""
    guarded = Guarded(device)
    with nullcontext() if executor is None else executing(executor):
        call = SCENES[name](guarded)
    right = {key: found.tensor.clone() for key, found in call.metadata.items()}
    before = {key: value.clone() for key, value in call.written.items()}

    def attempt() -> tuple[Results, Results]:
        for key, value in before.items():
            call.written[key].view(torch.uint8).copy_(value.view(torch.uint8))
        with nullcontext() if executor is None else executing(executor):
            out = _run(call)
        if device != "cpu":
            torch.cuda.synchronize()
        return out, {key: _bits(value) for key, value in call.written.items()}

    wanted, stored = attempt()
    assert guarded.damaged() == []
    for number in range(count):
        what, affected = _mutate(call, random.Random(f"{name} {number}"))
        told = f"{name}, mutation {number}: {what}"
        try:
            out, cache = attempt()
        except (AssertionError, EmulatorError) as error:
            raise AssertionError(f"{told}: {error}") from None
        assert guarded.damaged() == [], told
        for seq in set(range(call.sequences)) - affected:
            rows = call.rows(seq)
            for key, value in out.items():
                got, right_rows = (x[rows.to(x.device)] for x in (value, wanted[key]))
                if call.exact:
                    same = torch.equal(_bits(got), _bits(right_rows))
                else:
                    same = torch.allclose(got, right_rows, rtol=1e-2, atol=2e-3)
                assert same, f"{told}: {key} of sequence {seq} changed"
        if call.pages is not None:
            own = torch.cat([call.pages(seq) for seq in affected]) if affected else torch.tensor([])
            for key, value in cache.items():
                others = torch.ones(len(value), dtype=torch.bool)
                others[own.long()] = False
                others = others.to(value.device)
                same = torch.equal(value[others], stored[key][others])
                assert same, f"{told}: {key} of other pages changed"
        for key, found in call.metadata.items():
            found.tensor.copy_(right[key])


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(EVERY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCENES)
def test_wrong_metadata_stays_within_its_own_sequence(name: str, count: int, device: str) -> None:
    executor = CheckedInterpreter() if device == "cpu" else None
    _check_mutations(name, count, device, executor)


# An emulated call takes a second or more: these scenes in every run, all of them in the slow ones.
EMULATED = {
    "decode, ragged",
    "prefill, block table, dense",
    "prefill_append, fused, rope None",
    "prefill_append, append_then_attend, rope neox",
}

EMULATED_SCENES = [x if x in EMULATED else pytest.param(x, marks=pytest.mark.slow) for x in SCENES]


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", EMULATED_SCENES)
def test_wrong_metadata_never_leaves_the_tensors_in_amd_machine_code(name: str, target: str) -> None:
    _check_mutations(name, SAMPLE, "cpu", EmulateExecutor(target))


def test_the_full_run_makes_at_least_two_thousand_calls() -> None:
    assert len(SCENES) * EVERY >= 2000
