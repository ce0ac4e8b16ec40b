"""Continuous batching: transformers' own paged cache, read and written by narrowkv's kernels.

transformers lets continuous batching run with few attention implementations by name, and "paged|eager" is the
one that can be replaced; so this module replaces it.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from narrowkv.attn_decode import paged_decode
from narrowkv.attn_prefill import PrefillPlan, batch_prefill, plan_prefill
from narrowkv.engines.transformers.attention import refuse_unknown
from narrowkv.engines.versions import adapting
from narrowkv.paged_cache import PagedKVCache, PageTable, append
from narrowkv.runtime.errors import check_choice

with adapting("transformers"):
    from transformers import AttentionInterface
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.continuous_api import PagedAttentionCache

__all__ = [
    "attend_paged",
    "register_continuous_batching",
]

NAME = "paged|eager"
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2": torch.float8_e5m2,
}
_FORMATS = {dtype: name for name, dtype in _DTYPES.items()}


class _Layer(NamedTuple):
    """Where a layer's tokens are: its slots, the number of its group, and the name of the group's lengths."""

    cache: PagedKVCache
    group: int
    kind: str


_layers: WeakKeyDictionary[Any, dict[int, _Layer]] = WeakKeyDictionary()
_plans: WeakKeyDictionary[Any, tuple[Any, PrefillPlan]] = WeakKeyDictionary()
_descales = (1.0, 1.0)


class _Cache(PagedAttentionCache):
    """The engine's cache, which leaves storing to `attend_paged`.

    From transformers 5.24 on the model's attention module stores new tokens before it calls the attention
    function, and hands on its keywords, which then no longer name the cache.
    """

    def update(self, key_states: Any, value_states: Any, *args: Any, **options: Any) -> Any:
        keywords = options.get("kwargs")
        if keywords is None or self.config._attn_implementation != NAME:
            return super().update(key_states, value_states, *args, **options)
        keywords["cache"] = self
        return key_states, value_states


def register_continuous_batching(
    format: str | None = None, *, k_descale: float = 1.0, v_descale: float = 1.0
) -> None:
    """Replaces transformers' "paged|eager" attention, and what its paged cache stores.

    Models then run continuous batching with `attn_implementation="paged|eager"`. Layers with sliding windows
    are refused when they are called: transformers keeps their tokens in a ring.

    Args:
        format: "fp8_e4m3fn", "fp8_e4m3fnuz" or "fp8_e5m2": the engine's cache is allocated in it, and
            holds twice the tokens. None leaves it in the model's dtype.
        k_descale, v_descale: of an FP8 cache: what stored numbers are multiplied by.

    Raises:
        ValueError: for another format.
    """
    global _descales
    AttentionInterface.register(NAME, attend_paged)
    _descales = k_descale, v_descale
    if format is None:
        continuous_api.PagedAttentionCache = _Cache
        return
    stored = _DTYPES[check_choice("format", format, tuple(_DTYPES))]

    def narrow_cache(*args: Any, **kwargs: Any) -> Any:
        return _Cache(*args, **{**kwargs, "dtype": stored})

    continuous_api.PagedAttentionCache = narrow_cache


def attend_paged(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a continuous batch: stores its tokens in the engine's cache and attends to the pages.

    Args:
        module: the attention module; its `layer_idx` finds the layer's slots.
        query: `[1, num_qo_heads, tokens, head_dim]` of all requests, one after the other.
        key, value: `[1, num_kv_heads, tokens, head_dim]`, the new tokens.
        attention_mask: not read: requests are told by their lengths.
        scaling, softcap, s_aux: as for `attend`.
        **kwargs: the engine's `cache`, `read_index`, `write_index`, `cu_seq_lens_q`, `cu_seq_lens_k` and
            bounds, which are used as they are.

    Returns:
        `[1, tokens, num_qo_heads, head_dim]`, and None.

    Raises:
        TypeError, ValueError: without the engine's cache, and for what narrowkv does not serve.
    """
    engine = kwargs.get("cache")
    if engine is None:
        raise ValueError(
            '"paged|eager" needs the cache of continuous batching: call generate_batch, or load the model '
            'with attn_implementation="narrowkv" for generate'
        )
    refuse_unknown(kwargs, kwargs.get("dropout") or 0.0)
    layer = _layer_of(engine, module.layer_idx)
    cache = layer.cache
    k, v = (x[0].transpose(0, 1) for x in (key, value))
    written, read = kwargs["write_index"][layer.group], kwargs["read_index"][layer.group]
    append(cache, k, v, written)
    starts, ends = kwargs["cu_seq_lens_q"], _named(kwargs["cu_seq_lens_k"], layer.kind)
    # An empty read index means that nothing but this call's tokens is to be read.
    slots = read if read.numel() else written
    table = PageTable.from_ragged(ends, slots, torch.ones_like(starts[1:]), page_size=1)
    q = query[0].transpose(0, 1)
    options: dict[str, Any] = {"sm_scale": scaling, "logits_soft_cap": softcap or 0.0, "sinks": s_aux}
    bound = "max_length" if "max_length_q" in kwargs else "max_seqlen"  # the second up to transformers 5.17
    longest_q, longest_k = (_named(kwargs[f"{bound}_{side}"], layer.kind) for side in "qk")
    if longest_q == 1 and q.shape[0] == table.batch_size:
        o: Any = paged_decode(q, cache, table, **options)
        return o[None], None
    plan = _plan(engine, q, cache, table, starts, (longest_q, longest_k))
    o = batch_prefill(q, cache, table, starts, plan=plan, **options)
    return o[None], None


def _plan(
    engine: Any, q: torch.Tensor, cache: PagedKVCache, table: PageTable, starts: torch.Tensor,
    bounds: tuple[int, int],
) -> PrefillPlan:  # fmt: skip
    """The plan of this batch's shapes, which all layers share; the plan before it is dropped."""
    key = q.shape, cache.num_kv_heads, table.batch_size, table.page_ids.shape, bounds
    found = _plans.get(engine)
    if found is None or found[0] != key:
        made = plan_prefill(q, cache, table, starts, max_q_len=bounds[0], max_seq_len=bounds[1])
        _plans[engine] = found = (key, made)
    return found[1]


def _named(value: Any, kind: str) -> Any:
    return value[kind] if isinstance(value, dict) else value


def _layer_of(engine: Any, index: int) -> _Layer:
    """A layer's slots as a narrowkv cache, made once."""
    layers = _layers.setdefault(engine, {})
    if index not in layers:
        k, v, group, kind = _slots(engine, index)
        slots = min(k.shape[0], v.shape[0])
        name = _FORMATS[k.dtype]
        descales = _descales if name.startswith("fp8") else (1.0, 1.0)
        made = PagedKVCache.from_tensors(
            k[:slots], v[:slots], format=name, layout="tokens", k_descale=descales[0], v_descale=descales[1]
        )
        layers[index] = _Layer(made, group, kind)
    return layers[index]


def _slots(engine: Any, index: int) -> tuple[torch.Tensor, torch.Tensor, int, str]:
    """K and V `[slots, num_kv_heads, head_dim]` of a layer, its group, and the group's kind of attention."""
    if hasattr(engine, "layer_to_allocator"):
        allocator = engine.layer_to_allocator[index]
        if allocator.layer_type != "full_attention":
            raise _no_windows(index)
        return (*allocator._kv_token_views[index], allocator.index, allocator.layer_type)
    group, place = engine.layer_index_to_group_indices[index]
    if engine.sliding_windows[index] != 1:
        raise _no_windows(index)
    return engine.key_cache[place], engine.value_cache[place], group, "full_attention"


def _no_windows(index: int) -> ValueError:
    return ValueError(
        f"continuous batching keeps layer {index} in a ring of its sliding window, which narrowkv does not "
        "read: use generate with a NarrowCache for this model"
    )
