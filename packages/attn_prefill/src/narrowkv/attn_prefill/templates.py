"""The arguments of prefill's launches: what a plan fixes, and where a call's values go."""

from __future__ import annotations

from typing import Any, NamedTuple

from narrowkv.attn_prefill.binding import (
    VARYING_CACHE,
    VARYING_DESTINATION,
    BoundCache,
    Reading,
    matrix_of,
)
from narrowkv.attn_prefill.kernels.arguments import AppendScales, Chunk, Outputs, Queries
from narrowkv.attn_prefill.launch import Numbers, Route
from narrowkv.attn_prefill.memory import Memory, Needs, marks_of
from narrowkv.paged_cache import PagedKVCache
from narrowkv.paged_cache.kernels.append import RopePointers
from narrowkv.paged_cache.kernels.pages import Table
from narrowkv.runtime.launch import FixedLaunch, Varies

# The values of a call, in this order. Of an append those of `VARYING_DESTINATION`, the new keys and values,
# of a cache with a `key_transform` its two tensors and the queries as they are, and the three tensors of a
# rotary embedding follow; then a descriptor of the cache's pages; then memory.
_FIRST = (
    "q", "o", "lse", "starts", "q_descale", "sinks", "shift", "ids", "row", "lens", "num_ids", "max_pages",
    "qk_scale", "out_scale", "k_scale", *Numbers._fields, *(f"cache_{name}" for name in VARYING_CACHE),
)  # fmt: skip
_VALUE = {name: Varies(index) for index, name in enumerate(_FIRST)}
_NUM_NEW = len(VARYING_DESTINATION) + 2
_NUM_ROPE = 3


class Layout(NamedTuple):
    """Properties that the tensors of all calls with the same launches share.

    Attributes:
        q, o: strides of a token and of a head; lse: of a token, 0 without. given_q: of q as it was given.
        new: the same of k_new and of v_new, None of a call that does not append.
        rope: the rotary embedding's tables.
        ragged: whether the page table is; steps: see `TableSteps`.
        empty: the page table or the cache has no pages.
        logit_scale: of logits in base 2, or natural for a soft cap; soft_cap: the cap, or 0.
        has_lse, has_sinks, has_q_descale, has_shift: whether the call has an lse, sinks, a tensor of query
            descales, and shifts of the logits (see `Queries.shift`).
    """

    q: tuple[int, int]
    o: tuple[int, int]
    lse: int
    given_q: tuple[int, int]
    new: tuple[tuple[int, int], tuple[int, int]] | None
    rope: RopePointers
    ragged: bool
    steps: tuple[int | None, int | None, int | None]
    empty: bool
    logit_scale: float
    soft_cap: float
    has_lse: bool
    has_sinks: bool
    has_q_descale: bool
    has_shift: bool


class Launches(NamedTuple):
    """The launches of calls with one layout, and what they need of a call besides its tensors.

    Attributes:
        fill: the launch that fills the scratch, or None; attend: the launch that attends.
        reading: how the kernels read the cache, an attribute of `BoundCache`.
        p_scale: what the output is still to be divided by.
        block_n: keys of a tile that is copied out of the cache's pages, or 0.
    """

    fill: FixedLaunch | None
    attend: FixedLaunch
    reading: str
    p_scale: float
    block_n: int


def fix_launches(route: Route, cache: PagedKVCache, bound: BoundCache, layout: Layout) -> Launches:
    """The launches of a route with all arguments but those that differ from call to call."""
    maker = _Arguments(route, cache, bound, layout)
    fill = None if route.fill is None else FixedLaunch(route.fill, maker.of_fill())
    attend = FixedLaunch(route.attend, maker.of_attention())
    block_n = route.config.block_n if route.in_pages else 0
    return Launches(fill, attend, route.config.reading, route.p_scale, block_n)


class _Arguments:
    """Writes the arguments of a route's kernels."""

    def __init__(self, route: Route, cache: PagedKVCache, bound: BoundCache, layout: Layout) -> None:
        value = _VALUE
        self.route, self.cache, self.bound, self.layout = route, cache, bound, layout
        self.appends = layout.new is not None
        self.behind = len(_FIRST)
        self.queries = Queries(
            value["q"], *layout.q, value["starts"], None, None,
            value["q_descale"] if layout.has_q_descale else None,
            shift=value["shift"] if layout.has_shift else None,
        )  # fmt: skip
        self.outputs = Outputs(
            value["o"], *layout.o, value["lse"] if layout.has_lse else None, layout.lse,
            value["sinks"] if layout.has_sinks else None,
        )  # fmt: skip
        row = value["row"] if layout.ragged else None
        num_pages = 0 if layout.empty else bound.num_pages
        self.table = Table(value["ids"], row, value["lens"], None, num_pages, None, *layout.steps)
        self.reading: Reading = getattr(bound, route.config.reading)
        self.read = _varying(self.reading.cache, VARYING_CACHE, len(_FIRST) - len(VARYING_CACHE))
        self.appended = self._appended() if self.appends else ()
        self.scales = AppendScales(layout.logit_scale, value["k_scale"], value["out_scale"], layout.soft_cap)
        self.page_descriptor = self._next() if route.in_pages else None
        self.memory = self._memory()

    def _next(self, count: int = 1) -> Varies:
        """A mark for the next value, or the first of several."""
        mark = Varies(self.behind)
        self.behind += count
        return mark

    def _appended(self) -> tuple[Any, ...]:
        """New tokens, their rotary embedding and where they are stored."""
        layout = self.layout
        assert layout.new is not None
        assert self.bound.destination is not None
        destination = _varying(self.bound.destination, VARYING_DESTINATION, self._next(_NUM_NEW).index or 0)
        k, v = Varies(self.behind - 2), Varies(self.behind - 1)
        chunk = Chunk(k, *layout.new[0], v, *layout.new[1])
        if (transform := self.bound.transform) is not None:
            first = self._next(3).index or 0
            static = (transform.offset, transform.balance)
            offset, balance = (None if x is None else Varies(first + i) for i, x in enumerate(static))
            chunk = Chunk(*chunk[:6], offset, balance, Varies(first + 2), *layout.given_q)
        rope = layout.rope
        if rope[0] is not None:
            rope = _varying(rope, rope._fields[:_NUM_ROPE], self._next(_NUM_ROPE).index or 0)
        return chunk, rope, destination

    def _memory(self) -> Memory:
        """The plan's memory, or marks for the tensors that a call allocates."""
        needs = self.route.memory
        if not isinstance(needs, Needs):
            return needs
        return marks_of(needs, self.behind)

    def _numbers(self, *names: str) -> tuple[Any, ...]:
        """Marks for numbers of a call; `table_row` of a ragged table is 0."""
        marks = {**_VALUE, "table_row": 0 if self.layout.ragged else _VALUE["row"]}
        return tuple(marks[name] for name in names)

    def of_fill(self) -> tuple[Any, ...]:
        """Arguments of the launch that widens keys into the scratch, and stores new tokens."""
        scratch = self.memory.scratch
        counts: tuple[str, ...] = ("num_blocks", "num_tiles")
        lead: tuple[Any, ...] = (self.queries, self.read, self.table, scratch)
        if self.appends:
            lead = (self.queries, *self.appended, self.read, self.table, scratch, self.scales)
            counts = ("num_groups", *counts)
        sizes = self._numbers("batch", "num_tokens", "max_q_len", "least_len")
        rest = self._numbers("table_row", "num_ids", "max_pages", "max_keys", "key_blocks", *counts)
        return (*lead, *sizes, self.route.config.block_m, *rest)

    def of_attention(self) -> tuple[Any, ...]:
        """Arguments of the launch that attends."""
        if self.route.fill is not None:
            return self._of_pipelined() if self.route.pipelined else self._of_dense()
        layout, memory = self.layout, self.memory
        sizes = (
            "batch", "num_tokens", "max_q_len", "least_len", "most_len", "table_row", "num_ids", "max_pages"
        )  # fmt: skip
        if not self.appends:
            return (
                self.queries, self.outputs, self.read, self.table, memory.partials, _VALUE["qk_scale"],
                _VALUE["out_scale"], layout.soft_cap, *self._numbers(*sizes, "num_splits"),
            )  # fmt: skip
        counts = self._numbers(*sizes, "num_blocks", "num_tiles", "num_splits")
        return (
            self.queries, self.outputs, *self.appended, self.read, self.table, memory.partials, self.scales,
            *counts,
        )  # fmt: skip

    def _of_dense(self) -> tuple[Any, ...]:
        memory, layout = self.memory, self.layout
        # Appended keys are in the scratch unquantised, and the factors of old ones beside them.
        scale = layout.logit_scale if self.appends else _VALUE["qk_scale"]
        rope = self.appended[1] if self.appends else None
        return (
            self.queries, self.outputs, rope, memory.scratch, *memory.descriptors, *self._descales(),
            memory.partials, scale, _VALUE["out_scale"], layout.soft_cap, _VALUE["num_splits"],
        )  # fmt: skip

    def _of_pipelined(self) -> tuple[Any, ...]:
        memory, pages = self.memory, None
        if self.route.in_pages:
            pages = matrix_of(self.bound, self.cache, self.route.config.block_n).pages(self.table)
        return (
            self.queries, self.outputs, memory.scratch, *memory.descriptors, self.page_descriptor, pages,
            *self._descales(), memory.partials, _VALUE["qk_scale"], self.layout.logit_scale,
            _VALUE["out_scale"], self.layout.soft_cap or None,
            *self._numbers("table_row", "num_ids", "max_pages", "num_tiles", "num_splits"),
        )  # fmt: skip

    def _descales(self) -> tuple[Any, Any]:
        """Descales of K and V per head, for kernels that attend to the scratch."""
        bound = self.bound
        return tuple(
            descale._replace(ptr=_VALUE[f"cache_{name}"]) if descale.ptr is not None else descale
            for name, descale in (("k_descale", bound.k_descale), ("v_descale", bound.v_descale))
        )  # type: ignore[return-value]


def _varying(struct: Any, names: tuple[str, ...], begin: int) -> Any:
    """The struct with marks for these fields, from index `begin`, where they are not None."""
    marks = {
        name: Varies(begin + offset) for offset, name in enumerate(names) if getattr(struct, name) is not None
    }
    return struct._replace(**marks)
