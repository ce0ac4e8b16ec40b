"""Appending new tokens to a paged cache in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.checks import layout_hint
from narrowkv.paged_cache.descales import PER_TOKEN_GRANULARITIES, SCALE_GROUP, check_exponent
from narrowkv.paged_cache.kernels.append import DescalePointers, NewTokens, _append_kernel
from narrowkv.paged_cache.kernels.pages import KVPointers
from narrowkv.paged_cache.rope import (
    BOUND_ROPES,
    FLOATS,
    BoundRope,
    Rope,
    bind_rope,
    check_rope,
    metadata_of,
    rope_constants,
    rope_pointers,
)
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import (
    byte_span,
    check_descale_tensor,
    check_dtype,
    check_index_vector,
    check_instance,
    check_last_dim_contiguous,
    check_no_grad,
    check_no_overlap,
    check_same_device,
    check_shape,
    has_memory,
)
from narrowkv.runtime.identity import ByIdentity
from narrowkv.runtime.launch import VARIES, BoundLaunch, FixedLaunch, LaunchOptions
from narrowkv.runtime.launch.tracing import traceable

_OPTIONS = LaunchOptions(num_warps=1, num_stages=1, enable_fp_fusion=False)
_MAX_PREPARED = 256  # launches that are kept; a server needs a few


class Store(NamedTuple):
    """A cache as kernels write to it; made once for each cache, which is checked then.

    Attributes:
        k, v, k_descale, v_descale: kernel arguments.
        row: shape of a token.
        device: where the cache is.
        num_slots: tokens that the cache holds.
        constants: names and values of `tl.constexpr` arguments.
        kind: a number that caches with the same constants, strides and device share.
        varying: tensors and descales of a `FixedLaunch` over such caches.
        spans: byte addresses of what is written, each as `byte_span` gives it.
    """

    k: KVPointers
    v: KVPointers
    k_descale: DescalePointers
    v_descale: DescalePointers
    row: tuple[int, int]
    device: torch.device
    num_slots: int
    constants: tuple[tuple[str, Any], ...]
    kind: int
    varying: tuple[Any, ...]
    spans: tuple[tuple[int, int], ...]


class _Prepared(NamedTuple):
    """A launch for calls with the same metadata, but for the number of tokens.

    Attributes:
        launch: what varies is what `Store.varying` has, the new tokens, slots and rotary tables.
        k_step, v_step: bytes from a token to the next; k_row, v_row: bytes that a token spans.
    """

    launch: FixedLaunch
    k_step: int
    k_row: int
    v_step: int
    v_row: int


_stores: ByIdentity[Store] = ByIdentity()
_kinds: dict[Any, int] = {}
_prepared: dict[Any, _Prepared] = {}


def store_of(cache: PagedKVCache) -> Store:
    """The cache as kernels write to it.

    Raises:
        TypeError: not a `PagedKVCache`.
        ValueError: a cache that cannot be appended to.
    """
    store = _stores.get(id(check_instance("cache", cache, PagedKVCache)))
    return _stores.keep(cache, _make_store(cache)) if store is None else store


def _make_store(cache: PagedKVCache) -> Store:
    for name, kind in (("k_descale", cache.k_granularity), ("v_descale", cache.v_granularity)):
        if kind in ("page_head", "sequence_head"):
            raise ValueError(
                f"{name} must be per tensor, per head or per token-head to append, got {kind!r}: "
                "a new token cannot change the descale of tokens that are stored already"
            )
    check_no_grad(k=cache.k, v=cache.v)
    pointers: list[Any] = []
    for stored, strides in ((cache.k, cache.k_strides), (cache.v, cache.v_strides)):
        # The kernel writes FP8 as bytes: casts differ between targets, and FNUZ is no type of CUDA's.
        words = stored.view(torch.uint8) if stored.element_size() == 1 else stored
        pointers.append(KVPointers(words, strides.page, strides.token, strides.head, strides.outer))
    constants = tuple(_side_constants(cache).items())
    constants += (("PAGE_SIZE", cache.page_size), ("HEAD_DIM", cache.head_dim))
    pointers.append(_descale_pointers(cache.k_descale, cache.k_granularity))
    pointers.append(_descale_pointers(cache.v_descale, cache.v_granularity))
    # Strides and dtypes are fixed by kind; addresses and descales that are numbers vary.
    fixed = _template(*pointers)
    metadata = tuple(
        value if not isinstance(value, torch.Tensor) else (value.dtype, value.dim())
        for each in pointers
        for value in each
        if not isinstance(value, float)
    )
    number = _kinds.setdefault((constants, metadata, cache.k.device), len(_kinds))
    k, v, k_descale, v_descale = pointers
    return Store(
        k,
        v,
        k_descale,
        v_descale,
        (cache.num_kv_heads, cache.head_dim),
        cache.k.device,
        cache.num_pages * cache.page_size,
        constants,
        number,
        tuple(
            value
            for each, like in zip(pointers, fixed, strict=True)
            for value, mark in zip(each, like, strict=True)
            if mark is VARIES
        ),
        tuple(byte_span(x) for x in _written(cache).values() if x.numel() and has_memory(x)),
    )


def check_new_tokens(
    cache: PagedKVCache,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    rope: Rope | None,
    exponent: str,
    validate: bool,
) -> None:
    """Refuses new tokens that cannot be stored in the cache, before anything is written.

    Args:
        cache, k_new, v_new, rope, exponent: as for `append`.
        validate: also look at the values of descales and positions, which waits for the device.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    store_of(cache)
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        check_dtype(name, new, FLOATS)
        if new.dim() != 3 or new.shape[1:] != (cache.num_kv_heads, cache.head_dim):
            hint = layout_hint(cache, num_kv_heads=new.shape[1]) if new.dim() == 3 else ""
            raise ValueError(
                f"{name} must have shape [tokens, {cache.num_kv_heads}, {cache.head_dim}] for this cache, "
                f"got {list(new.shape)}{hint}"
            )
        check_last_dim_contiguous(name, new)
    check_exponent(exponent, cache.k_descale, cache.v_descale)
    check_shape("v_new", v_new, tuple(k_new.shape))
    check_same_device(k=cache.k, k_new=k_new, v_new=v_new)
    check_no_grad(k_new=k_new, v_new=v_new)
    inputs: dict[str, object] = {"k_new": k_new, "v_new": v_new}
    if rope is not None:
        check_rope(rope, cache.head_dim, k_new)
        inputs |= {"rope.cos": rope.cos, "rope.sin": rope.sin, "rope.positions": rope.positions}
    check_apart(cache, **inputs)
    if validate:
        for name, value, kind in (
            ("k_descale", cache.k_descale, cache.k_granularity),
            ("v_descale", cache.v_descale, cache.v_granularity),
        ):
            # Per token they are written, not read.
            if isinstance(value, torch.Tensor) and kind not in PER_TOKEN_GRANULARITIES:
                check_descale_tensor(name, value, validate=True)
        if rope is not None and k_new.shape[0] and has_memory(rope.positions):
            low, high = int(rope.positions.min()), int(rope.positions.max())
            if low < 0 or high >= rope.cos.shape[0]:
                raise ValueError(f"rope.positions must lie in [0, {rope.cos.shape[0]}), got {low}..{high}")


def check_apart(cache: PagedKVCache, **inputs: object) -> None:
    """Checks that what an append writes overlaps neither itself nor an input.

    Raises:
        ValueError: naming both.
    """
    for name, tensor in _written(cache).items():
        check_no_overlap(name, tensor, **inputs)


def _written(cache: PagedKVCache) -> dict[str, torch.Tensor]:
    """The tensors that an append writes: K, V and descales per token."""
    written = {"cache.k": cache.k, "cache.v": cache.v}
    for name, value, kind in (
        ("cache.k_descale", cache.k_descale, cache.k_granularity),
        ("cache.v_descale", cache.v_descale, cache.v_granularity),
    ):
        if isinstance(value, torch.Tensor) and kind in PER_TOKEN_GRANULARITIES:
            written[name] = value
    return written


def check_append(
    cache: PagedKVCache,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    slot_mapping: torch.Tensor,
    rope: Rope | None,
    k_offset: torch.Tensor | None,
    exponent: str,
    validate: bool,
) -> None:
    """Refuses what `append` cannot do, before anything is written."""
    check_new_tokens(cache, k_new, v_new, rope, exponent, validate)
    check_index_vector("slot_mapping", slot_mapping, k_new.shape[0])
    check_same_device(k=cache.k, slot_mapping=slot_mapping, k_offset=k_offset)
    if k_offset is not None:
        check_dtype("k_offset", k_offset, (torch.float32,))
        check_shape("k_offset", k_offset, (cache.num_kv_heads, cache.head_dim))
        check_no_grad(k_offset=k_offset)
        if not k_offset.is_contiguous():
            raise ValueError(f"k_offset must be contiguous, got strides {k_offset.stride()}")
    check_apart(cache, slot_mapping=slot_mapping, k_offset=k_offset)
    if validate and has_memory(slot_mapping):
        _check_slots(slot_mapping, cache.num_pages * cache.page_size)


def _check_slots(slot_mapping: torch.Tensor, num_slots: int) -> None:
    used = slot_mapping[slot_mapping != -1].cpu()
    if bool(((used < 0) | (used >= num_slots)).any()):
        raise ValueError(f"slot_mapping must hold -1 or slots in [0, {num_slots}), got {used.tolist()[:16]}")
    if len(set(used.tolist())) != used.numel():
        raise ValueError(f"slot_mapping must not hold a slot twice, got {used.sort().values.tolist()[:16]}")


def _template(*pointers: Any) -> list[Any]:
    """Structs of pointers with `VARIES` for tensors and numbers of type float."""
    return [
        type(each)(*(VARIES if isinstance(value, torch.Tensor | float) else value for value in each))
        for each in pointers
    ]


def _key(
    store: Store,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    slot_mapping: torch.Tensor,
    rope: BoundRope | None,
    k_offset: torch.Tensor | None,
    exponent: str,
) -> Any:
    """What a prepared launch can be found by; None for arguments that must be checked one by one.

    Everything that `check_append` looks at is part of the key or tested here or in `append`, but for memory
    that tokens share with the cache.
    """
    shape = k_new.shape
    if shape[1:] != store.row or v_new.shape != shape or slot_mapping.shape != shape[:1]:
        return None
    if rope is not None and rope.tokens != shape[0]:
        return None
    return (
        store.kind, exponent, type(k_new), k_new.dtype, k_new.stride(), k_new.device, k_new.requires_grad,
        type(v_new), v_new.dtype, v_new.stride(), v_new.device, v_new.requires_grad,
        type(slot_mapping), slot_mapping.dtype, slot_mapping.device,
        None if rope is None else rope.kind,
        None if k_offset is None else metadata_of(k_offset),
    )  # fmt: skip


@traceable
def append(
    cache: PagedKVCache,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    rope: Rope | None = None,
    k_offset: torch.Tensor | None = None,
    exponent: str = "mse",
    validate: bool = False,
) -> None:
    """Writes new tokens into the cache: optional RoPE on K, optional K offset, quantise, scatter. One launch.

    The first call of a kind (cache, dtypes, options) checks everything and prepares the launch; later calls
    check what can change and launch. Nothing is allocated and the device is not waited for, so a call can be
    captured in a graph and replayed with other tokens, slots and positions.

    Args:
        cache: written in place; bytes of other slots do not change. Static descales (float, `[1]`,
            `[num_kv_heads]`) are applied as they are (stored = saturate(x / descale)); a per token-head
            descale tensor gets the new tokens' own, and so do the E8M0 or E4M3 scales of FP4.
        k_new, v_new: `[tokens, num_kv_heads, head_dim]`, bf16, fp16 or fp32, last dimension contiguous, not
            within the cache's own memory.
        slot_mapping: `[tokens]` int32 or int64, any stride, `page * page_size + position in the page`; -1
            skips a token. Slots outside the cache are never written. Of two tokens with one slot either may
            be stored, and K may be of one and V of the other.
        rope: rotary embedding of K.
        k_offset: `[num_kv_heads, head_dim]` fp32, subtracted from K after RoPE (`narrowkv.quant.transforms`).
        exponent: FP4: how a group's scale is chosen: "mse" (least squared error), "floor" (OCP MX) or "ceil"
            (nothing saturates); see `narrowkv.quant.e8m0`. E4M3 scales have "mse" only.
        validate: also check the values of slots (in range, none twice), descales and positions, which waits
            for the device.

    Raises:
        TypeError, ValueError: before anything is written.

    Example:
        >>> cache = PagedKVCache.empty(4, 16, 2, 64, format="fp8_e4m3fn")
        >>> new = torch.ones(1, 2, 64)
        >>> append(cache, new, 2 * new, torch.tensor([17]))
        >>> float(cache.dequantize()[1][1, 1, 0, 0])
        2.0
    """
    store, key, prepared, met = _stores.get(id(cache)), None, None, True
    bound_rope = None if rope is None else BOUND_ROPES.get(id(rope))
    tokens = 0
    if store is not None:
        try:
            if rope is not None and bound_rope is None:
                bound_rope = bind_rope(check_instance("rope", rope, Rope))
            key = _key(store, k_new, v_new, slot_mapping, bound_rope, k_offset, exponent)
            prepared = _prepared.get(key)
            if prepared is not None:
                tokens = k_new.shape[0]
                k_begin, v_begin = k_new.data_ptr(), v_new.data_ptr()
                k_end = k_begin + (tokens - 1) * prepared.k_step + prepared.k_row
                v_end = v_begin + (tokens - 1) * prepared.v_step + prepared.v_row
                met = not k_begin or not v_begin
                for low, high in store.spans:
                    met = met or (k_begin < high and low < k_end) or (v_begin < high and low < v_end)
        except (AttributeError, RuntimeError, TypeError):
            pass  # not tensors, or tensors without memory: the checks say which
    if prepared is None or met or validate:
        check_append(cache, k_new, v_new, slot_mapping, rope, k_offset, exponent, validate)
        store = store_of(cache)
        if rope is not None and bound_rope is None:
            bound_rope = bind_rope(rope)
        key = _key(store, k_new, v_new, slot_mapping, bound_rope, k_offset, exponent)
        prepared = _prepared.get(key)
        if prepared is None:
            prepared = _prepare(store, k_new, v_new, rope, k_offset, exponent)
            if len(_prepared) >= _MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = prepared
        tokens = k_new.shape[0]
    assert store is not None
    values = (k_new, v_new, *store.varying)
    if k_offset is not None:
        values = (*values, k_offset)
    if bound_rope is not None:
        values = (*values, *bound_rope.tensors)
    prepared.launch(
        (tokens, store.row[0], 1), (*values, slot_mapping, slot_mapping.stride(0), store.num_slots)
    )


def _prepare(
    store: Store,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    rope: Rope | None,
    k_offset: torch.Tensor | None,
    exponent: str,
) -> _Prepared:
    constants = {
        **dict(store.constants),
        **rope_constants(rope),
        "RULE": exponent,
        "HAS_OFFSET": k_offset is not None,
        "BLOCK_D": 1 << (store.row[1] - 1).bit_length(),
    }
    arguments = (
        *_template(new_tokens(k_new), new_tokens(v_new), *store[:4]),
        None if k_offset is None else VARIES,
        *_template(rope_pointers(rope)),
        VARIES,
        VARIES,
        VARIES,
    )
    heads, head_dim = store.row
    steps = []
    for x in (k_new, v_new):
        size = x.element_size()
        steps += [x.stride(0) * size, ((heads - 1) * x.stride(1) + head_dim) * size]
    launch = FixedLaunch(BoundLaunch(_append_kernel, constants, _OPTIONS), arguments)
    return _Prepared(launch, *steps)


def new_tokens(x: torch.Tensor) -> NewTokens:
    """K or V of new tokens as a kernel argument."""
    return NewTokens(x, x.stride(0), x.stride(1))


def cache_pointers(
    cache: PagedKVCache,
) -> tuple[KVPointers, KVPointers, DescalePointers, DescalePointers]:
    """K, V and their descales as kernel arguments that are written to."""
    return store_of(cache)[:4]


def storage_constants(cache: PagedKVCache, exponent: str) -> dict[str, Any]:
    """How a kernel quantises into this cache."""
    return {**_side_constants(cache), "RULE": exponent}


def _side_constants(cache: PagedKVCache) -> dict[str, Any]:
    constants: dict[str, Any] = {}
    for side, name, descale, kind, vec in (
        ("K", cache.format.k, cache.k_descale, cache.k_granularity, cache.k_strides.vec),
        ("V", cache.format.v, cache.v_descale, cache.v_granularity, cache.v_strides.vec),
    ):
        fmt = get_format(name)
        if isinstance(descale, torch.Tensor):
            scaling = "token" if kind in PER_TOKEN_GRANULARITIES else "tensor"
            if descale.dtype == torch.float8_e4m3fn:
                scaling = "token_e4m3"
        else:
            scaling = "one" if fmt.kind == "float" and descale == 1.0 else "number"
        constants |= {
            f"{side}_FORMAT": name,
            f"{side}_MAX": fmt.max_value,
            f"{side}_SCALING": scaling,
            f"{side}_GROUP": SCALE_GROUP if kind == "token_head_group" else 0,
            f"{side}_VEC": vec,
        }
    return constants


def _descale_pointers(value: float | torch.Tensor, kind: str) -> DescalePointers:
    if not isinstance(value, torch.Tensor):
        return DescalePointers(float(value), None, 0, 0, 0)
    if kind in PER_TOKEN_GRANULARITIES:
        value = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
        return DescalePointers(1.0, value, value.stride(0), value.stride(1), value.stride(2))
    return DescalePointers(1.0, value, 0, 0, value.stride(0) if kind == "head" else 0)
