"""A paged cache and a page table as the arguments of kernels, found once for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.descales import CacheSide
from narrowkv.paged_cache.kernels.pages import Descale, KVPointers, Stored
from narrowkv.paged_cache.layouts import KVStrides
from narrowkv.paged_cache.page_table import PageTable
from narrowkv.paged_cache.storing import Store, store_of
from narrowkv.quant import KeyTransform
from narrowkv.quant.formats import BITS, NATIVE, get_format, widen_route, widening_exponent
from narrowkv.runtime.errors import spans_of
from narrowkv.runtime.launch import Arg
from narrowkv.runtime.operation import Bounded, ByIdentity
from narrowkv.runtime.targets import WARPGROUP_ROWS, Target, least_columns

# Routes of widening: packed conversions in inline PTX; FP4 by way of bytes of FP8; FP4 by gfx950's own
# instruction.
PTX = "ptx"
PTX8 = "ptx8"
CDNA4 = "cdna4"
ABSENT = Descale(None, 0, 0, 0)
_INT32_MAX = 2**31 - 1


class ReadOptions(NamedTuple):
    """How a kind of kernel reads a cache.

    Attributes:
        k_parts, v_parts: elements per loaded word, at most.
        k_route, v_route: how stored numbers are widened; None takes the target's fastest route.
        computes_in_fp16: whether the kernel multiplies in fp16.
        fp4_as_bytes: NVIDIA converts FP4 as bytes of E4M3; see `packed_route`.
        fp4_by_cdna4: gfx950 may convert FP4 by its own instruction; see `has_own_conversion`.
        k_exponent, v_exponent: of the power of two that widened numbers are still to be multiplied by; None
            takes that of the route.
    """

    k_parts: int
    v_parts: int
    k_route: str | None = None
    v_route: str | None = None
    computes_in_fp16: bool = True
    fp4_as_bytes: bool = False
    fp4_by_cdna4: bool = False
    k_exponent: int | None = None
    v_exponent: int | None = None


@dataclass(frozen=True, eq=False, slots=True)  # every call reads it: fields of slots are the fastest
class Reading:
    """A cache as one kind of kernel reads it.

    Attributes:
        k, v: pointers and strides; k_descale, v_descale: of the descales that are tensors.
        k_stored, v_stored: constants.
        k_factor, v_factor: what logits and output are multiplied by: descales that are numbers, and the
            powers of two that the conversion leaves out.
        arguments: the tensors as values of a call, by name: `cache_k`, `cache_v`, and of descales
            `cache_k_descale` and `cache_v_descale` what there is.
    """

    k: KVPointers
    v: KVPointers
    k_descale: Descale
    v_descale: Descale
    k_stored: Stored
    v_stored: Stored
    k_factor: float
    v_factor: float
    arguments: dict[str, torch.Tensor]

    def named(self) -> dict[str, Any]:
        """`k`, `v`, `k_descale` and `v_descale` with an `Arg` for each tensor: a name of `arguments`."""
        structs: dict[str, Any] = {"k": self.k, "v": self.v}
        structs |= {"k_descale": self.k_descale, "v_descale": self.v_descale}
        return {
            name: struct if struct.ptr is None else struct._replace(ptr=Arg(f"cache_{name}"))
            for name, struct in structs.items()
        }


@dataclass(frozen=True, eq=False, slots=True)
class BoundCache:
    """A cache as the arguments of the kernels of a plan.

    Attributes:
        readings: the cache as each kind of kernel reads it, by the names that `bind_cache` was given.
        store: the cache as new tokens are written to it; None for a plan that does not append. new_arguments:
            its tensors and numbers, and those of the transform, as values of a call, by name.
        transform: what keys and queries go through, without effect if the cache has no `key_transform`.
        transforms: whether it has one.
        num_pages: pages of the cache.
        int64_offsets: offsets need 64 bits.
        spans: addresses that the cache, its descales and its transform take.
        scales: scale tensors whose values are read once, by name; see `narrowkv.runtime.scales`.
        number: the same for all caches that ask for the same kernels and pass the same checks.
    """

    readings: dict[str, Reading]
    store: Store | None
    new_arguments: dict[str, Any]
    transform: KeyTransform
    transforms: bool
    num_pages: int
    int64_offsets: bool
    spans: list[tuple[int, int]]
    scales: dict[str, torch.Tensor]
    number: int


# By cache, and by what a plan's kernels read it as. An entry goes with its cache.
_bound_caches: ByIdentity[dict[Any, BoundCache]] = ByIdentity()
_cache_numbers: dict[Any, int] = {}
_NO_TRANSFORM = KeyTransform(rotated=False)


def bind_cache(
    cache: PagedKVCache, target: Target, options: tuple[tuple[str, ReadOptions], ...], *, stores: bool = False
) -> BoundCache:
    """The cache as kernel arguments, found once.

    Args:
        cache: any cache; with `stores` one that can be appended to.
        target: what the kernels run on.
        options: names of kinds of kernels, and how each reads the cache.
        stores: whether the kernels append to it, too.

    Raises:
        ValueError: `stores`, and the cache cannot be appended to.
    """
    key = (target.name, options, stores)
    known = _bound_caches.get(id(cache))
    if known is None:
        known = _bound_caches.keep(cache, {})
    if key in known:
        return known[key]
    readings = {name: _reading(cache, target, each) for name, each in options}
    store = store_of(cache) if stores else None
    transform, int64_offsets = cache.key_transform, cache.needs_64_bit_addresses
    static = () if transform is None else (transform.offset, transform.balance)
    sequences = [
        side.descale.shape[0]
        for side in cache.sides()
        if side.granularity == "sequence_head" and isinstance(side.descale, torch.Tensor)
    ]
    signature = (
        key, cache.k.device, cache.num_pages, cache.k_strides, cache.v_strides, cache.k_granularity,
        cache.v_granularity, cache.negative_zero_free, int64_offsets, *sequences,
        cache.k.requires_grad or cache.v.requires_grad, None if store is None else store.plan,
        None if transform is None else (transform.rotated, *(x is None for x in static)),
        *(_kind_of(reading) for reading in readings.values()),
    )  # fmt: skip
    new: dict[str, Any] = {} if store is None else {**store.arguments}
    if store is not None and transform is not None:
        new |= {"k_offset": transform.offset, "k_balance": transform.balance}
    known[key] = BoundCache(
        readings, store, new, transform or _NO_TRANSFORM, transform is not None, cache.num_pages,
        int64_offsets, spans_of(cache.k, cache.v, cache.k_descale, cache.v_descale, *static),
        cache.static_scales(), _cache_numbers.setdefault(signature, len(_cache_numbers)),
    )  # fmt: skip
    return known[key]


def _reading(cache: PagedKVCache, target: Target, options: ReadOptions) -> Reading:
    """The cache as a kind of kernel reads it."""
    # With two formats gfx950's conversion of scales of groups spills 6 to 15 registers at heads of 128.
    grouped = cache.head_dim if cache.format.k == cache.format.v else 0
    pointers: list[Any] = []
    descales: list[Any] = []
    stored: list[Stored] = []
    factors: list[float] = []
    for cached, strides, parts, given, exponent in zip(
        cache.sides(), (cache.k_strides, cache.v_strides), (options.k_parts, options.v_parts),
        (options.k_route, options.v_route), (options.k_exponent, options.v_exponent), strict=True,
    ):  # fmt: skip
        name = cached.format
        kind, factor, descale = descale_pointers(cached)
        side = side_of(cached.stored, strides, name, given or widen_route(target, name), parts)
        route = packed_route(
            target, name, side, options.computes_in_fp16, as_bytes=options.fp4_as_bytes,
            cdna4=options.fp4_by_cdna4 and has_own_conversion(side, kind, descale, grouped),
        )  # fmt: skip
        _, _, group = kind.partition("_")
        factors_of_keys = kind not in ("scalar", "head") and not kind.startswith("e4m3_")
        aligned = group.isdigit() and scales_are_words(descale)
        pointers.append(side.pointers)
        descales.append(descale)
        stored.append(Stored(name, route, side.parts, side.vec, kind, factors_of_keys, aligned))
        factors.append(factor * 2.0 ** (widening_power(name, route, kind) if exponent is None else exponent))
    names = ("k", "v", "k_descale", "v_descale")
    structs = (pointers[0], pointers[1], descales[0], descales[1])
    arguments = {
        f"cache_{name}": struct.ptr
        for name, struct in zip(names, structs, strict=True)
        if struct.ptr is not None
    }
    return Reading(*structs, stored[0], stored[1], factors[0], factors[1], arguments)


def _kind_of(reading: Reading) -> tuple[Any, ...]:
    """What launches over caches of one kind share: strides, dtypes and alignment of tensors, constants."""
    structs = (reading.k, reading.v, reading.k_descale, reading.v_descale)
    tensors = [(x.ptr.dtype, x.ptr.dim(), x.ptr.data_ptr() % 16) for x in structs if x.ptr is not None]
    strides = [x[1:] for x in structs]
    return (*tensors, *strides, reading.k_stored, reading.v_stored, reading.k_factor == 1.0)


class Side(NamedTuple):
    """K or V as a kernel reads it: words, how they are widened, elements per word, x if vectorised."""

    pointers: KVPointers
    route: str
    parts: int
    vec: int


def descale_pointers(side: CacheSide) -> tuple[str, float, Descale]:
    """How kernels take the descale of K or V.

    Returns:
        The kind (`Stored.descale`), the factor to fold into a scale on the host, and pointers with strides.
    """
    value, granularity = side.descale, side.granularity
    if not isinstance(value, torch.Tensor):
        return "scalar", float(value), ABSENT
    if granularity == "tensor":
        return "head", 1.0, Descale(value, 0, 0, 0)
    if granularity == "head":
        return "head", 1.0, Descale(value, 0, 0, value.stride(0))
    if granularity == "sequence_head":
        return "head", 1.0, Descale(value, value.stride(0), 0, value.stride(1))
    if granularity == "page_head":
        return "token", 1.0, Descale(value, value.stride(0), 0, value.stride(1))
    kinds = {torch.float32: "token", torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}
    kind = kinds[value.dtype]
    if side.format == "int4":
        kind, value = "token_zero", value.view(torch.int32)
    if kind == "e4m3":
        value = value.view(torch.uint8)  # not every target has the type
    if side.group:
        kind = f"{kind}_{side.group}"
    return kind, side.tensor_scale, Descale(value, value.stride(0), value.stride(1), value.stride(2))


def widening_power(format_name: str, route: str, descale_kind: str) -> int:
    """The power of two that a widened tile is still to be multiplied by; see `widen_tile`."""
    if descale_kind.startswith("e8m0_"):
        # Taken along by the groups' factors, of which those for bytes are at most 2**15 and those of
        # gfx950's own instruction at most 2**13.
        return {PTX8: widening_exponent(format_name, route) - 15, CDNA4: -13}.get(route, 0)
    return widening_exponent(format_name, route)


def scales_are_words(descale: Descale) -> bool:
    """Whether the scales of a key's groups can be read as one word."""
    strides = (descale.ptr.data_ptr(), descale.major, descale.token, descale.head)
    return not any(stride % descale.ptr.shape[-1] for stride in strides)


def has_own_conversion(side: Side, kind: str, descale: Descale, head_dim: int) -> bool:
    """Whether gfx950's conversion applies to FP4 words: see `fp4_quads_cdna4` and `widen_groups_cdna4`.

    It takes few instructions where a lane loads four adjacent words: the compiler does so if it knows rows to
    begin at multiples of 16 bytes. There is one scale a head, or those of a key's groups are one integer.

    Args:
        side, kind, descale: of K or V; the kind as `descale_pointers` returns it.
        head_dim: of the model; 0 leaves scales of groups out.
    """
    words = side.pointers
    if any(step % 16 for step in (words.ptr.data_ptr(), words.page, words.token, words.head)):
        return False
    scales, _, group = kind.partition("_")
    if scales not in ("e8m0", "e4m3"):
        return False
    return not group or (head_dim // int(group) in (2, 4, 8) and scales_are_words(descale))


def side_of(stored: torch.Tensor, strides: KVStrides, format_name: str, route: str, parts: int) -> Side:
    """K or V as the words that the kernel loads, with fewer elements per word if a stride is odd."""
    fmt = get_format(format_name)
    if parts > 1:
        even = not any(s % 2 for s in (strides.page, strides.token, strides.head, stored.data_ptr()))
        if strides.vec == 0 and even:
            words = stored.view(torch.int16)
            pointers = KVPointers(words, strides.page // 2, strides.token // 2, strides.head // 2, 0)
            return Side(pointers, route, parts, 0)
        parts = 2 if fmt.is_packed else 1
    if fmt.bits == 8:
        dtype = fmt.storage_dtype if route == NATIVE else torch.uint8
        stored = stored if stored.dtype == dtype else stored.view(dtype)
    pointers = KVPointers(stored, strides.page, strides.token, strides.head, strides.outer)
    return Side(pointers, route, parts, strides.vec)


def packed_route(
    target: Target, format_name: str, side: Side, half: bool, *, as_bytes: bool = False, cdna4: bool = False
) -> str:
    """The route of a side: inline assembly for 16-bit words on NVIDIA and gfx950, else the route that it has.

    as_bytes: FP4 is converted as bytes of E4M3, which takes fewer instructions; the kernel then takes the
        scales of groups in relation to the tile's largest. H100, decode, 96/8 heads, one scale a head: B128
        ctx1024 91 us instead of 96, B64 ctx8192 248 and 254.
    cdna4: gfx950 converts FP4 by its own instruction, which needs more registers at a time, and a kernel
        whose matrix instructions take at most four passes.
    """
    if cdna4 and target.name == "gfx950" and format_name == "fp4_e2m1" and side.parts == 4:
        return CDNA4
    by_cast = format_name == "fp8_e4m3fn" and side.route == NATIVE
    packed = (side.parts == 2 and (by_cast or format_name == "int8")) or side.parts == 4
    if not packed or not half or target.vendor != "nvidia":
        return side.route
    return PTX8 if as_bytes and format_name == "fp4_e2m1" else PTX


def parts_of(target: Target, format_name: str, *, is_key: bool) -> int:
    """Elements per loaded word, at most."""
    if get_format(format_name).is_packed:
        return 4
    if format_name == "int8":
        return 2
    if not format_name.startswith("fp8_"):
        return 1
    # Bit arithmetic on words takes no bytes out of them: 7.6 instructions an element on gfx942 become 3.2.
    # NVIDIA's LDS can transpose 16-bit elements only, and V is transposed on its way to the matrix unit.
    if target.is_amd:
        return 2 if widen_route(target, format_name) == BITS else 1
    return 2 if target.vendor == "nvidia" and not is_key else 1


def multiplied_parts(target: Target, columns: int, parts: int) -> int:
    """Parts in which matrix instructions multiply V, which is widened in `parts`: that many, or one.

    No part has fewer columns than `least_columns` allows a warpgroup.

    Args:
        target: what the kernel runs on.
        columns: of V, `head_dim` rounded up to a power of two.
        parts: `Stored.parts` of V.
    """
    return 1 if columns < least_columns(target, WARPGROUP_ROWS) * parts else parts


def repeats_loads(target: Target, num_warps: int, keys: int) -> bool:
    """Whether the compiler has each thread load factors of keys that others load; see `computed_once`.

    sm90, 8 tokens at ratio 12, instructions of the loop over tiles with factors computed once and without:
    FP4 1053 and 2199, FP8 keys with FP4 values 920 and 1608.
    """
    return target.is_nvidia and 32 * num_warps > keys


class BoundTable(NamedTuple):
    """A page table as the arguments of kernels.

    Attributes:
        ids, row, lens, num_ids, max_pages: see `Table`. `ids` has an element even if the table has none.
        steps: strides of ids, row and lens, as `TableSteps` has them.
        batch: sequences.
        spans: addresses that the tensors take.
        ranges, tree: `key_ranges` and `tree_mask` of the table, or None.
        number: the same for all tables that ask for the same kernels and, with the same batch, pass the same
            checks.
    """

    ids: torch.Tensor
    row: torch.Tensor | int
    lens: torch.Tensor
    num_ids: int
    max_pages: int
    steps: tuple[int | None, int | None, int | None]
    batch: int
    spans: list[tuple[int, int]]
    ranges: torch.Tensor | None
    tree: torch.Tensor | None
    number: int


BOUND_TABLES: ByIdentity[BoundTable] = ByIdentity()
_table_numbers: dict[Any, int] = {}
# By a block table's shape: its bound form without tensors, and the bytes that its page ids and lengths span.
_table_layouts: Bounded[tuple[tuple[Any, ...], int, int]] = Bounded(4096)


def bind_table(table: PageTable) -> BoundTable:
    """The page table as kernel arguments; `BOUND_TABLES` has it from then on.

    Engines make a table in each step: a block table is looked at once for each shape.

    Raises:
        ValueError: it spans more page ids than kernels count.
    """
    ids, lens = table.page_ids, table.seq_lens
    if lens is None or table.key_ranges is not None or table.tree_mask is not None:
        return BOUND_TABLES.keep(table, _bound_table(table))
    key = (
        table.page_size, table.before_append, ids.shape, ids.stride(), ids.dtype, ids.device,
        lens.shape, lens.stride(), lens.dtype, lens.device,
    )  # fmt: skip
    found = _table_layouts.get(key)
    if found is None:
        bound = _bound_table(table)
        if ids.numel() and lens.numel():
            (_, ids_end), (_, lens_end) = bound.spans
            sizes = ids_end - ids.data_ptr(), lens_end - lens.data_ptr()
            _table_layouts.keep(
                key, ((bound.num_ids, bound.max_pages, bound.steps, bound.batch, bound.number), *sizes)
            )
        return BOUND_TABLES.keep(table, bound)
    (num_ids, max_pages, steps, batch, number), ids_bytes, lens_bytes = found
    first, begin = ids.data_ptr(), lens.data_ptr()
    spans = [(first, first + ids_bytes), (begin, begin + lens_bytes)]
    bound = BoundTable(ids, ids.stride(0), lens, num_ids, max_pages, steps, batch, spans, None, None, number)
    return BOUND_TABLES.keep(table, bound)


def _bound_table(table: PageTable) -> BoundTable:
    ids, indptr = table.page_ids, table.kv_indptr
    lens = table.kv_last_page_len if table.seq_lens is None else table.seq_lens
    assert lens is not None
    num_ids = 1 + sum((size - 1) * stride for size, stride in zip(ids.shape, ids.stride(), strict=True))
    if num_ids > _INT32_MAX:
        raise ValueError(
            f"page_table must span fewer than 2**31 page ids, got shape {tuple(ids.shape)} with strides "
            f"{ids.stride()}"
        )
    steps = step_of(ids), None if indptr is None else step_of(indptr), step_of(lens)
    signature = (
        table.kind, table.page_size, table.before_append, steps, ids.device, ids.dtype, lens.dtype,
        lens.dim(), lens.device, ids.shape[-1] == 0,
        None if indptr is None else (indptr.dtype, indptr.device),
        None if table.key_ranges is None else table.key_ranges.shape[1:],
        None if table.tree_mask is None else (table.tree_mask.shape[1:], table.tree_mask.dtype),
    )  # fmt: skip
    return BoundTable(
        ids if ids.numel() else ids.new_zeros(1, 1),
        ids.stride(0) if indptr is None else indptr, lens, max(num_ids, 1), ids.shape[-1], steps,
        lens.shape[0], spans_of(ids, lens, indptr, table.key_ranges, table.tree_mask), table.key_ranges,
        table.tree_mask, _table_numbers.setdefault(signature, len(_table_numbers)),
    )  # fmt: skip


def step_of(tensor: torch.Tensor) -> int | None:
    """The stride of the last dimension, or None for 1, as `Table` has it."""
    return None if tensor.shape[-1] < 2 or tensor.stride(-1) == 1 else tensor.stride(-1)
