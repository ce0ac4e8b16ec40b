"""Storing tokens in caches: the plans of `append`, and caches as kernels write to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.checks import check_append, check_stores, rows_meet, written_tensors
from narrowkv.paged_cache.descales import PER_TOKEN_GRANULARITIES, CacheSide
from narrowkv.paged_cache.kernels.append import (
    QUERY_HEADS,
    DescalePointers,
    NewTokens,
    Queries,
    _append_kernel,
)
from narrowkv.paged_cache.kernels.pages import KVPointers
from narrowkv.paged_cache.options import APPEND, StoreArguments
from narrowkv.paged_cache.rope import BOUND_ROPES, BoundRope, Rope, bind_rope
from narrowkv.quant import KeyTransform
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import byte_span, check_instance, has_memory
from narrowkv.runtime.launch import Arg, LaunchOptions, PreparedCall, launch_by_name, named, named_values
from narrowkv.runtime.operation import (
    Bounded,
    ByIdentity,
    Operation,
    Plan,
    Prepared,
    metadata_of,
    spans_of_arguments,
)
from narrowkv.runtime.scales import check_scales
from narrowkv.runtime.targets import device_target

_OPTIONS = LaunchOptions(num_warps=1, num_stages=1, enable_fp_fusion=False)
# Of a call, in the order in which its launch takes them.
_VALUES = (
    "k_new_ptr", "v_new_ptr", "q_ptr", "slots", "slot_step", "tokens", "num_slots", "k_balance", "k_offset",
)  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PreparedStore(Prepared):
    """A checked append.

    Attributes:
        apart: distances in bytes from queries to K and V at which they were found not to share memory.

    The other attributes are those of `Prepared`.
    """

    apart: Bounded[bool] = field(default_factory=partial(Bounded, 256))

    def queries_meet(self, q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor) -> bool:
        """Whether queries share memory with new tokens."""
        begin = q.data_ptr()
        distances = k_new.data_ptr() - begin, v_new.data_ptr() - begin
        if distances in self.apart:
            return False
        met = rows_meet(q, k_new) or rows_meet(q, v_new)
        if not met:
            self.apart.keep(distances, True)
        return met


@dataclass(frozen=True, eq=False, kw_only=True)
class StorePlan(Plan):
    """How tokens are stored in caches of one kind, the layers of a model; made with the first of them.

    Attributes:
        num_kv_heads: of the caches.
        constants: names and values of `tl.constexpr` arguments.

    The other attributes are those of `narrowkv.runtime.operation.Plan`.
    """

    operation: ClassVar[Operation] = APPEND
    compared: ClassVar[bool] = False
    most_calls: ClassVar[int] = 4096
    num_kv_heads: int
    constants: dict[str, Any] = field(repr=False)

    def call(self, given: StoreArguments) -> None:
        """`append` to a cache of this kind.

        The first call with some shapes, dtypes, strides and options checks them. Calls that differ in the
        number of tokens alone share a launch.
        """
        cache, k_new, v_new, slots, rope, k_offset, q, exponent, validate = given
        store, turn = STORES[id(cache)], BOUND_ROPES.get(id(rope))
        try:
            if turn is None:
                turn = bind_rope(check_instance("rope", rope, Rope))
            signature = (
                exponent,
                type(k_new), k_new.shape, k_new.stride(), k_new.dtype, k_new.device, k_new.requires_grad,
                type(v_new), v_new.shape, v_new.stride(), v_new.dtype, v_new.device, v_new.requires_grad,
                type(slots), slots.shape, slots.stride(), slots.dtype, slots.device,
                turn.kind, turn.tokens,
                None if k_offset is None else metadata_of(k_offset),
                None
                if q is None
                else (type(q), q.shape, q.stride(), q.dtype, q.device, q.requires_grad),
            )  # fmt: skip
            call = self.calls.get(signature)
        except (AttributeError, TypeError):
            check_append(given)  # says which argument is of another class
            raise
        if call is None or validate:
            check_append(given)
        if call is None:
            call = self.calls.keep(signature, self._prepare(store, turn, given))
        else:
            taken = []
            for index, size in call.inputs:
                read: Any = given[index]
                begin = read.data_ptr()
                taken.append((begin, begin + size))
            if store.meets(taken) or (q is not None and call.queries_meet(q, k_new, v_new)):
                check_append(given)  # says what lies over what
        if store.scales:
            check_scales(store.scales, validate)
        call.launches.run(
            k_new, v_new, q, slots, slots.stride(0), k_new.shape[0], store.num_slots, store.k_balance,
            store.k_offset if k_offset is None else k_offset,
            store.arguments, turn.arguments,
        )  # fmt: skip

    def _prepare(self, store: Store, turn: BoundRope, given: StoreArguments) -> PreparedStore:
        """The launch of a checked call, which calls with other numbers of tokens share."""
        k_new, v_new, q, k_offset = given.k_new, given.v_new, given.q, given.k_offset
        tensors = (k_new, v_new, given.slot_mapping, q, k_offset)
        key = (
            given.exponent, turn.kind,
            *(None if x is None else (type(x), x.dtype, x.shape[1:], x.stride()) for x in tensors),
        )  # fmt: skip
        launches = self._layouts.get(key)
        if launches is None:
            constants = {**self.constants, **turn.constants, "RULE": given.exponent}
            offset = store.k_offset if k_offset is None else k_offset
            structs: dict[str, Any] = {
                "k_new": new_tokens(k_new), "v_new": new_tokens(v_new), "rope": turn.pointers,
                "q": Queries(None, 0, 0, 0, 0),
            }  # fmt: skip
            programs = self.num_kv_heads
            if q is not None:
                structs["q"] = Queries(q, q.stride(0), q.stride(1), q.shape[1], self.num_kv_heads)
                programs += -(-q.shape[1] // QUERY_HEADS.value)
            step = launch_by_name(
                self.bind(_append_kernel, _OPTIONS, **constants), (Arg("tokens"), programs),
                **store.named(), **{name: named(name, struct) for name, struct in structs.items()},
                k_offset=None if offset is None else Arg("k_offset"),
                k_balance=None if store.k_balance is None else Arg("k_balance"),
                slot_mapping=Arg("slots"), slot_step=Arg("slot_step"), num_slots=Arg("num_slots"),
            )  # fmt: skip
            launches = self._layouts.keep(key, PreparedCall(_VALUES, [step]))
        return PreparedStore(launches=launches, **spans_of_arguments(given))


class Store(NamedTuple):
    """A cache as kernels write to it; made once for each cache, which is checked then.

    Attributes:
        plan: of all caches with the same constants, heads, strides and device.
        k, v, k_descale, v_descale: kernel arguments.
        num_slots: tokens that the cache holds.
        arguments: tensors and descales as values of a call, by name.
        k_offset, k_balance: of the cache's `key_transform`, or None.
        spans: byte addresses of what is written, each as `byte_span` gives it; hull: the least and the
            greatest of them.
        scales: scale tensors that are read and not written, by name.
    """

    plan: StorePlan
    k: KVPointers
    v: KVPointers
    k_descale: DescalePointers
    v_descale: DescalePointers
    num_slots: int
    arguments: dict[str, Any]
    k_offset: torch.Tensor | None
    k_balance: torch.Tensor | None
    spans: tuple[tuple[int, int], ...]
    hull: tuple[int, int]
    scales: dict[str, torch.Tensor]

    def meets(self, taken: Iterable[tuple[int, int]]) -> bool:
        """Whether what an append writes lies over one of these ranges of addresses."""
        met, (first, last) = False, self.hull
        for begin, end in taken:
            if begin < last and first < end:
                for low, high in self.spans:
                    met = met or (begin < high and low < end)
        return met

    def named(self) -> dict[str, Any]:
        """Kernel arguments by the kernel's names, with an `Arg` for what `arguments` holds."""
        return {name: named(f"new_{name}", getattr(self, name)) for name in _STRUCTS}


STORES: ByIdentity[Store] = ByIdentity()
_STRUCTS = ("k", "v", "k_descale", "v_descale")
_plans: dict[Any, StorePlan] = {}


def store_of(cache: PagedKVCache) -> Store:
    """The cache as kernels write to it.

    Raises:
        TypeError: not a `PagedKVCache`.
        ValueError: a cache that cannot be appended to.
    """
    store = STORES.get(id(check_instance("cache", cache, PagedKVCache)))
    return STORES.keep(cache, _make_store(cache)) if store is None else store


def _make_store(cache: PagedKVCache) -> Store:
    check_stores(cache)
    pointers: list[Any] = []
    for stored, strides in ((cache.k, cache.k_strides), (cache.v, cache.v_strides)):
        # The kernel writes FP8 as bytes: casts differ between targets, and FNUZ is no type of CUDA's.
        words = stored.view(torch.uint8) if stored.element_size() == 1 else stored
        pointers.append(KVPointers(words, strides.page, strides.token, strides.head, strides.outer))
    pointers += map(_descale_pointers, cache.sides())
    transform = cache.key_transform or KeyTransform(rotated=False)
    constants = storage_constants(cache)
    constants |= {"PAGE_SIZE": cache.page_size, "HEAD_DIM": cache.head_dim, "V_HEAD_DIM": cache.v_head_dim}
    constants["BUTTERFLIES"] = transform.butterflies(cache.head_dim)
    # Strides and dtypes are fixed by kind; addresses and descales that are numbers vary.
    metadata = tuple(
        value if not isinstance(value, torch.Tensor) else (value.dtype, value.dim())
        for each in pointers
        for value in each
        if not isinstance(value, float)
    )
    absent = transform.offset is None, transform.balance is None
    device, heads = cache.k.device, cache.num_kv_heads
    kind = (*constants.items(), metadata, absent, heads, device)
    plan = _plans.get(kind)
    if plan is None:
        plan = _plans[kind] = StorePlan(
            target=device_target(device), device=device, num_kv_heads=heads, constants=constants
        )
    arguments: dict[str, Any] = {}
    for name, struct in zip(_STRUCTS, pointers, strict=True):
        arguments |= named_values(f"new_{name}", struct)
    spans = tuple(byte_span(x) for x in written_tensors(cache).values() if x.numel() and has_memory(x))
    hull = (min(low for low, _ in spans), max(high for _, high in spans)) if spans else (0, 0)
    k, v, k_descale, v_descale = pointers
    return Store(
        plan, k, v, k_descale, v_descale, cache.num_pages * cache.page_size, arguments, transform.offset,
        transform.balance, spans, hull, cache.static_scales(),
    )  # fmt: skip


def new_tokens(x: torch.Tensor) -> NewTokens:
    """K or V of new tokens as a kernel argument."""
    return NewTokens(x, x.stride(0), x.stride(1))


def storage_constants(cache: PagedKVCache) -> dict[str, Any]:
    """How a kernel quantises into this cache."""
    constants: dict[str, Any] = {}
    for side, strides in zip(cache.sides(), (cache.k_strides, cache.v_strides), strict=True):
        fmt = get_format(side.format)
        if isinstance(side.descale, torch.Tensor):
            scaling = "token" if side.granularity in PER_TOKEN_GRANULARITIES else "tensor"
            if side.descale.dtype == torch.float8_e4m3fn:
                scaling = "token_e4m3" if side.tensor_scale == 1.0 else "tensor_e4m3"
        else:
            scaling = "one" if fmt.kind == "float" and side.descale == 1.0 else "number"
        prefix = side.name.upper()
        constants |= {
            f"{prefix}_FORMAT": fmt.name,
            f"{prefix}_MAX": fmt.max_value,
            f"{prefix}_SCALING": scaling,
            f"{prefix}_GROUP": side.group,
            f"{prefix}_VEC": strides.vec,
        }
    return constants


def _descale_pointers(side: CacheSide) -> DescalePointers:
    value = side.descale
    if not isinstance(value, torch.Tensor):
        return DescalePointers(float(value), None, 0, 0, 0)
    if side.granularity in PER_TOKEN_GRANULARITIES:
        value = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
        return DescalePointers(side.tensor_scale, value, value.stride(0), value.stride(1), value.stride(2))
    return DescalePointers(1.0, value, 0, 0, value.stride(0) if side.granularity == "head" else 0)
