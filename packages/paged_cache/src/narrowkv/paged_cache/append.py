"""Appending new tokens to a paged cache in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from narrowkv.paged_cache.cache import PagedKVCache
from narrowkv.paged_cache.checks import layout_hint
from narrowkv.paged_cache.descales import check_exponent
from narrowkv.paged_cache.kernels.append import QUERY_HEADS, Queries, _append_kernel
from narrowkv.paged_cache.key_transform import transform_tensors
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
from narrowkv.paged_cache.storing import (
    STORES,
    Store,
    new_tokens,
    store_of,
    written_tensors,
)
from narrowkv.runtime.errors import (
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
from narrowkv.runtime.launch import Arg, BoundLaunch, LaunchOptions, PreparedCall, launch_by_name, named
from narrowkv.runtime.launch.tracing import traceable
from narrowkv.runtime.operation import Bounded
from narrowkv.runtime.scales import check_scales

_OPTIONS = LaunchOptions(num_warps=1, num_stages=1, enable_fp_fusion=False)


class _Rows(NamedTuple):
    """Bytes of tokens: from a token to the next, and of one."""

    step: int
    row: int


class _Prepared(NamedTuple):
    """A launch for calls with the same metadata, but for the number of tokens.

    Attributes:
        launches: of the call.
        k, v, q: where tokens lie.
    """

    launches: PreparedCall
    k: _Rows
    v: _Rows
    q: _Rows | None


_prepared: Bounded[_Prepared] = Bounded(256)  # a server needs a few


def check_new_tokens(
    cache: PagedKVCache,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    rope: Rope | None,
    exponent: str,
    validate: bool | None,
) -> None:
    """Refuses new tokens that cannot be stored in the cache, before anything is written.

    Args:
        cache, k_new, v_new, rope, exponent: as for `append`.
        validate: whether to look at the values of positions too, which waits for the device.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    store_of(cache)
    for name, new, head_dim in (("k_new", k_new, cache.head_dim), ("v_new", v_new, cache.v_head_dim)):
        check_dtype(name, new, FLOATS)
        if new.dim() != 3 or new.shape[1:] != (cache.num_kv_heads, head_dim):
            hint = layout_hint(cache, num_kv_heads=new.shape[1]) if new.dim() == 3 else ""
            raise ValueError(
                f"{name} must have shape [tokens, {cache.num_kv_heads}, {head_dim}] for this cache, "
                f"got {list(new.shape)}{hint}"
            )
        check_last_dim_contiguous(name, new)
    check_exponent(exponent, cache.k_descale, cache.v_descale)
    check_shape("v_new", v_new, (k_new.shape[0], cache.num_kv_heads, cache.v_head_dim))
    check_same_device(k=cache.k, k_new=k_new, v_new=v_new)
    check_no_grad(k_new=k_new, v_new=v_new)
    inputs: dict[str, object] = {"k_new": k_new, "v_new": v_new}
    if rope is not None:
        check_rope(rope, cache.head_dim, k_new)
        inputs |= {"rope.cos": rope.cos, "rope.sin": rope.sin, "rope.positions": rope.positions}
    check_apart(cache, **inputs)
    if validate and rope is not None and k_new.shape[0] and has_memory(rope.positions):
        low, high = int(rope.positions.min()), int(rope.positions.max())
        if low < 0 or high >= rope.cos.shape[0]:
            raise ValueError(f"rope.positions must lie in [0, {rope.cos.shape[0]}), got {low}..{high}")


def check_apart(cache: PagedKVCache, **inputs: object) -> None:
    """Checks that what an append writes overlaps neither itself nor an input.

    Raises:
        ValueError: naming both.
    """
    for name, tensor in written_tensors(cache).items():
        check_no_overlap(name, tensor, **inputs)


def check_append(
    cache: PagedKVCache,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    slot_mapping: torch.Tensor,
    rope: Rope | None,
    k_offset: torch.Tensor | None,
    q: torch.Tensor | None,
    exponent: str,
    validate: bool | None,
) -> None:
    """Refuses what `append` cannot do, before anything is written."""
    check_new_tokens(cache, k_new, v_new, rope, exponent, validate)
    if q is not None:
        _check_queries(cache, q, k_new, v_new, slot_mapping, rope, k_offset)
    check_index_vector("slot_mapping", slot_mapping, k_new.shape[0])
    check_same_device(k=cache.k, slot_mapping=slot_mapping, k_offset=k_offset)
    if k_offset is not None:
        if cache.key_transform is not None:
            raise ValueError(
                "k_offset must be None for a cache with a key_transform: put it in as "
                "dataclasses.replace(cache, key_transform=KeyTransform(offset=k_offset, ...))"
            )
        check_dtype("k_offset", k_offset, (torch.float32,))
        check_shape("k_offset", k_offset, (cache.num_kv_heads, cache.head_dim))
        check_no_grad(k_offset=k_offset)
        if not k_offset.is_contiguous():
            raise ValueError(f"k_offset must be contiguous, got strides {k_offset.stride()}")
    check_apart(cache, slot_mapping=slot_mapping, k_offset=k_offset, **transform_tensors(cache.key_transform))
    if validate and has_memory(slot_mapping):
        _check_slots(slot_mapping, cache.num_pages * cache.page_size)
    check_scales(store_of(cache).scales, validate)


def _check_queries(
    cache: PagedKVCache,
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    slot_mapping: torch.Tensor,
    rope: Rope | None,
    k_offset: torch.Tensor | None,
) -> None:
    """Refuses queries that cannot be rotated in place."""
    if rope is None:
        raise ValueError("q must come with rope, which rotates it: leave q out, or pass rope=Rope(...)")
    check_dtype("q", q, FLOATS)
    check_shape("q", q, (k_new.shape[0], "num_qo_heads", cache.head_dim))
    check_last_dim_contiguous("q", q)
    check_same_device(k=cache.k, q=q)
    check_no_grad(q=q)
    others = {"rope.cos": rope.cos, "rope.sin": rope.sin, "rope.positions": rope.positions}
    check_no_overlap("q", q, **written_tensors(cache), **others, slot_mapping=slot_mapping, k_offset=k_offset)
    for name, new in (("k_new", k_new), ("v_new", v_new)):
        if not (q.numel() and has_memory(q) and has_memory(new)):
            continue
        if _rows_meet(q.shape[0], q.data_ptr(), _rows_of(q), new.data_ptr(), _rows_of(new)):
            raise ValueError(f"q must not share memory with {name}, got overlapping tensors")


def _rows_of(x: torch.Tensor) -> _Rows:
    size = x.element_size()
    return _Rows(x.stride(0) * size, ((x.shape[1] - 1) * x.stride(1) + x.shape[2]) * size)


def _rows_meet(tokens: int, a: int, a_rows: _Rows, b: int, b_rows: _Rows) -> bool:
    """Whether tokens at addresses `a` and `b` share memory; those of one packed tensor of Q, K, V do not."""
    if a + (tokens - 1) * a_rows.step + a_rows.row <= b or b + (tokens - 1) * b_rows.step + b_rows.row <= a:
        return False
    step, behind = a_rows.step, (b - a) % max(a_rows.step, 1)
    return step != b_rows.step or behind < a_rows.row or behind + b_rows.row > step


def _check_slots(slot_mapping: torch.Tensor, num_slots: int) -> None:
    used = slot_mapping[slot_mapping != -1].cpu()
    if bool(((used < 0) | (used >= num_slots)).any()):
        raise ValueError(f"slot_mapping must hold -1 or slots in [0, {num_slots}), got {used.tolist()[:16]}")
    if len(set(used.tolist())) != used.numel():
        raise ValueError(f"slot_mapping must not hold a slot twice, got {used.sort().values.tolist()[:16]}")


def _key(
    store: Store,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    slot_mapping: torch.Tensor,
    rope: BoundRope | None,
    k_offset: torch.Tensor | None,
    q: torch.Tensor | None,
    exponent: str,
) -> Any:
    """What a prepared launch can be found by; None for arguments that must be checked one by one.

    Everything that `check_append` looks at is part of the key or tested here or in `append`, but for memory
    that tokens share with the cache.
    """
    shape = k_new.shape
    if shape[1:] != store.row or slot_mapping.shape != shape[:1]:
        return None
    if v_new.shape[0] != shape[0] or v_new.shape[1:] != store.v_row:
        return None
    if rope is not None and rope.tokens != shape[0]:
        return None
    if q is not None and q.shape[0] != shape[0]:
        return None
    return (
        store.kind, exponent, type(k_new), k_new.dtype, k_new.stride(), k_new.device, k_new.requires_grad,
        type(v_new), v_new.dtype, v_new.stride(), v_new.device, v_new.requires_grad,
        type(slot_mapping), slot_mapping.dtype, slot_mapping.device,
        None if rope is None else rope.kind,
        None if k_offset is None else metadata_of(k_offset),
        None if q is None else (type(q), q.dtype, q.shape[1:], q.stride(), q.device, q.requires_grad),
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
    q: torch.Tensor | None = None,
    exponent: str = "mse",
    validate: bool | None = None,
) -> None:
    """Writes new tokens into the cache: RoPE on K and Q, its `key_transform`, quantise, scatter. One launch.

    The first call of a kind (cache, dtypes, options) checks everything and prepares the launch; later calls
    check what can change and launch. Nothing is allocated and the device is not waited for, so a call can be
    captured in a graph and replayed with other tokens, slots and positions.

    Args:
        cache: written in place; bytes of other slots do not change. Static descales (float, `[1]`,
            `[num_kv_heads]`) are applied as they are (stored = saturate(x / descale)); a per token-head
            descale tensor gets the new tokens' own, and so do the E8M0 or E4M3 scales of FP4.
        k_new: `[tokens, num_kv_heads, head_dim]`, bf16, fp16 or fp32, last dimension contiguous, not within
            the cache's own memory. v_new: the same with `v_head_dim` channels.
        slot_mapping: `[tokens]` int32 or int64, any stride, `page * page_size + position in the page`; -1
            skips a token. Slots outside the cache are never written. Of two tokens with one slot either may
            be stored, and K may be of one and V of the other.
        rope: rotary embedding of K, and of `q`.
        k_offset: `[num_kv_heads, head_dim]` fp32, subtracted from K after RoPE (`narrowkv.quant.transforms`),
            of which attention knows nothing; an offset in `cache.key_transform` is also put back into an lse.
        q: `[tokens, num_qo_heads, head_dim]`, bf16, fp16 or fp32, last dimension contiguous: rotated in place
            by `rope`, tokens of slot -1 too. It may be packed with K and V in one tensor; K is left as it is.
        exponent: FP4: how a group's scale is chosen: "mse" (least squared error), "floor" (OCP MX) or "ceil"
            (nothing saturates); see `narrowkv.quant.e8m0`. E4M3 scales have "mse" only.
        validate: True also checks the values of slots (in range, none twice), descales and positions, which
            waits for the device. None reads static descale tensors (and a balance of keys) in the first call
            that has them, and again if they have changed in place; False reads nothing.

    Raises:
        TypeError, ValueError: before anything is written.

    Example:
        >>> cache = PagedKVCache.empty(4, 16, 2, 64, format="fp8_e4m3fn")
        >>> new = torch.ones(1, 2, 64)
        >>> append(cache, new, 2 * new, torch.tensor([17]))
        >>> float(cache.dequantize()[1][1, 1, 0, 0])
        2.0
    """
    store, key, prepared, met = STORES.get(id(cache)), None, None, True
    bound_rope = None if rope is None else BOUND_ROPES.get(id(rope))
    tokens = 0
    if store is not None:
        try:
            if rope is not None and bound_rope is None:
                bound_rope = bind_rope(check_instance("rope", rope, Rope))
            key = _key(store, k_new, v_new, slot_mapping, bound_rope, k_offset, q, exponent)
            prepared = _prepared.get(key)
            if prepared is not None:
                tokens = k_new.shape[0]
                last = tokens - 1
                k_begin, v_begin = k_new.data_ptr(), v_new.data_ptr()
                k_end = k_begin + last * prepared.k.step + prepared.k.row
                v_end = v_begin + last * prepared.v.step + prepared.v.row
                met = not k_begin or not v_begin
                for low, high in store.spans:
                    met = met or (k_begin < high and low < k_end) or (v_begin < high and low < v_end)
                if q is not None and prepared.q is not None:
                    q_begin = q.data_ptr()
                    q_end = q_begin + last * prepared.q.step + prepared.q.row
                    met = met or not q_begin
                    for low, high in store.spans:
                        met = met or (q_begin < high and low < q_end)
                    met = met or _rows_meet(tokens, q_begin, prepared.q, k_begin, prepared.k)
                    met = met or _rows_meet(tokens, q_begin, prepared.q, v_begin, prepared.v)
        except (AttributeError, RuntimeError, TypeError):
            pass  # not tensors, or tensors without memory: the checks say which
    if prepared is None or met or validate:
        check_append(cache, k_new, v_new, slot_mapping, rope, k_offset, q, exponent, validate)
        store = store_of(cache)
        if rope is not None and bound_rope is None:
            bound_rope = bind_rope(rope)
        key = _key(store, k_new, v_new, slot_mapping, bound_rope, k_offset, q, exponent)
        prepared = _prepared.get(key)
        tokens = k_new.shape[0]
    assert store is not None
    if store.scales:
        check_scales(store.scales, validate)
    values = {
        **store.arguments, "k_new_ptr": k_new, "v_new_ptr": v_new, "slots": slot_mapping,
        "slot_step": slot_mapping.stride(0), "tokens": tokens, "num_slots": store.num_slots,
        "k_offset": store.k_offset if k_offset is None else k_offset, "k_balance": store.k_balance,
    }  # fmt: skip
    if bound_rope is not None:
        values |= bound_rope.arguments
    if q is not None:
        values["q_ptr"] = q
    if prepared is None:
        made = _prepare(store, k_new, v_new, rope, q, exponent, values)
        prepared = _prepared.keep(key, made)
    prepared.launches.run(**values)


def _prepare(
    store: Store,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    rope: Rope | None,
    q: torch.Tensor | None,
    exponent: str,
    values: dict[str, Any],
) -> _Prepared:
    constants = {
        **dict(store.constants),
        **rope_constants(rope),
        "RULE": exponent,
    }
    structs = {
        "k_new": new_tokens(k_new),
        "v_new": new_tokens(v_new),
        "rope": rope_pointers(rope),
        "q": _queries(q, store.row[0]),
    }
    programs = store.row[0] + (0 if q is None else -(-q.shape[1] // QUERY_HEADS.value))
    launch = launch_by_name(
        BoundLaunch(_append_kernel, constants, _OPTIONS), (Arg("tokens"), programs),
        **store.named(), **{name: named(name, struct) for name, struct in structs.items()},
        **{name: None if values[name] is None else Arg(name) for name in ("k_offset", "k_balance")},
        slot_mapping=Arg("slots"), slot_step=Arg("slot_step"), num_slots=Arg("num_slots"),
    )  # fmt: skip
    call = PreparedCall(None, [launch])
    return _Prepared(call, _rows_of(k_new), _rows_of(v_new), None if q is None else _rows_of(q))


def _queries(q: torch.Tensor | None, num_kv_heads: int) -> Queries:
    if q is None:
        return Queries(None, 0, 0, 0, 0)
    return Queries(q, q.stride(0), q.stride(1), q.shape[1], num_kv_heads)
