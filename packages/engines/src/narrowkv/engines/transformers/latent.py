"""Latent attention (MLA) inside transformers: a layer's cache of latent rows, and attention over them.

transformers hands a cache the latent of each token before it is expanded to keys and values of heads. Here
the latents are stored in pages. A step of few tokens attends to them by `latent_decode`, with the
up-projections absorbed into queries and outputs; a chunk of a prompt attends to keys and values that the
model expands.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch

from narrowkv.engines.deepseek import attend_to_rows, listed_rows
from narrowkv.engines.geometry import latent_reasons
from narrowkv.engines.latent import MOST_QUERIES, latent_plan
from narrowkv.engines.transformers.dense import attend_dense
from narrowkv.engines.transformers.layers import NarrowLayer, Owner
from narrowkv.quant import cast_fp8
from narrowkv.sparse_fp8 import DSV4Rows, latent_decode
from narrowkv.sparse_fp8.layouts import HEAD_DIM, LAYOUTS

__all__ = [
    "IndexedLatentLayer",
    "LatentLayer",
    "attend_latent",
    "attend_listed",
    "check_options",
    "latent_layer",
]

# The layouts that hold a scale for each token's columns, by the columns of a row and the cache's format.
_RECORDS = {
    (576, "fp8_e4m3fn"): "record656",
    (576, "fp8_e4m3fnuz"): "record656",
    (576, "fp4_e2m1"): "record352",
    (512, "fp8_e4m3fn"): "record528",
    (512, "fp8_e4m3fnuz"): "record528",
    (512, "fp4_e2m1"): "record288",
}
_SIXTEEN_BIT = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Handover(threading.local):
    """The layer whose `update` was the last to be called: the model's attention is called next."""

    layer: LatentLayer | None = None


_handover = _Handover()


def check_options(owner: Owner, calibrated: bool) -> None:
    """Refuses what a `NarrowCache` of latent rows does not have.

    Raises:
        ValueError: naming the argument, and what to pass instead.
    """
    stored, descales = owner.format, owner.descales
    formats = (*_SIXTEEN_BIT, *dict.fromkeys(name for _, name in _RECORDS))
    if stored.k != stored.v or stored.k not in formats:
        raise ValueError(
            f"format must be one of {', '.join(formats)} for latent rows, got {stored}: a row is key "
            "and value"
        )
    if descales[1] is not None or (descales[0] is not None and not stored.k.startswith("fp8")):
        raise ValueError(
            "v_descale must be None for latent rows, and k_descale for those that are not FP8: k_descale is "
            "the scale of the whole row"
        )
    if isinstance(descales[0], torch.Tensor) and descales[0].numel() != 1:
        raise ValueError(f"k_descale must be one number for latent rows, got {list(descales[0].shape)}")
    if owner.recent or calibrated:
        name = "recent" if owner.recent else "calibration"
        raise ValueError(f"{name} must be left out for latent rows: use a cache without it")
    groups = (owner.scale_group, owner.scale_format)
    if stored.k == "fp4_e2m1" and groups not in ((None, "e8m0"), (16, "e4m3")):
        raise ValueError(
            "scale_group and scale_format must be 16 and 'e4m3' for latent rows in FP4, or left out; got "
            f"{groups[0]} and {groups[1]!r}"
        )


class LatentLayer(NarrowLayer):
    """One layer's latent rows, in pages; a page more than the rows have takes the padding.

    Attributes:
        rows: the pages as `latent_decode` takes them, 16-bit `[pages, page_size, columns]` or `DSV4Rows`;
            None before the first tokens.
    """

    def __init__(self, owner: Owner, layer_idx: int) -> None:
        super().__init__(owner)
        self.layer_idx = layer_idx
        self.rows: torch.Tensor | DSV4Rows | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the pages for as many sequences as the latents `[batch, 1, tokens, 512]` have.

        Raises:
            ValueError: latents of another width, or RoPE columns.
        """
        latent, rope = key_states.shape[-1], value_states.shape[-1]
        for reason in latent_reasons(latent, rope):
            raise ValueError(f"NarrowCache cannot hold this model: {reason}. Use transformers' own cache")
        self.batch_size = key_states.shape[0]
        own = self.owner.rows_for(self.batch_size, key_states.device)
        self.rows = self._allocate((own.batch * own.pages + 1), latent + rope, key_states.device)
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def _allocate(self, pages: int, columns: int, device: torch.device) -> torch.Tensor | DSV4Rows:
        name, size = self.owner.format.k, self.owner.page_size
        if name in _SIXTEEN_BIT:
            return torch.zeros(pages, size, columns, dtype=_SIXTEEN_BIT[name], device=device)
        scale = self.owner.descales[0]
        layout = _RECORDS[columns, name] if scale is None else f"tensor{columns}"
        data = torch.zeros(pages, size, LAYOUTS[layout].row_bytes, dtype=torch.uint8, device=device)
        if isinstance(scale, torch.Tensor):
            scale = scale.to(device, torch.float32).reshape(1)
        return DSV4Rows.paged(data, layout, page_size=size, format=name, scale=scale)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the new tokens' latents and RoPE columns, `[batch, 1, tokens, columns]`, and returns them.

        Raises:
            RuntimeError: the model's attention did not store the tokens before these, or torch.compile
                traces.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("NarrowCache with latent rows must not be compiled: call the model as it is")
        _handover.layer = self
        return super().update(key_states, value_states, *args, **kwargs)

    def store(self, padding: torch.Tensor | None) -> None:
        """Quantises and stores the pending tokens, once there is room for them."""
        self.make_room(padding)
        if self.pending is None:
            return
        (latent, rope), self.pending = self.pending, None
        step = self.owner.rows.step
        assert step is not None
        new = torch.cat([latent, rope], -1).flatten(0, 2)
        stored, new = self._flat(), self._stored(new)
        # -1 is the last row, of the page for padding.
        stored.index_copy_(0, step.slots.long().remainder(stored.shape[0]), new)

    def _flat(self) -> torch.Tensor:
        """The pages as one row after another."""
        return self._pages.view(self._pages.shape[0] * self.owner.page_size, -1)

    @property
    def _pages(self) -> torch.Tensor:
        assert self.rows is not None
        return self.rows.data if isinstance(self.rows, DSV4Rows) else self.rows

    def _stored(self, new: torch.Tensor) -> torch.Tensor:
        """Rows `[tokens, columns]` as they are stored."""
        rows = self.rows
        if not isinstance(rows, DSV4Rows):
            assert rows is not None
            return new.to(rows.dtype)
        if rows.scale is not None:
            return cast_fp8(new.float() / rows.scale, rows.format).view(torch.uint8)
        return DSV4Rows.quantize(new, layout=rows.layout, page_size=1, padded=False, format=rows.format).data

    def history(self, tokens: int) -> torch.Tensor:
        """The first tokens of each sequence, as 16-bit rows `[batch, tokens, columns]`."""
        own = self.owner.rows
        flat, size = self._flat(), own.pages * own.page_size
        kept = flat[: own.batch * size].view(own.batch, size, -1)[:, :tokens]
        if isinstance(self.rows, DSV4Rows):
            data = kept.reshape(own.batch * tokens, -1)
            kept = replace(self.rows, data=data, page_size=1).dequantize().to(self.dtype)
        return kept.reshape(own.batch, tokens, -1)

    def select(self, index: torch.Tensor) -> None:
        """Keeps these sequences, which may repeat, in this order."""
        if self.rows is None:
            return
        per_row, self.batch_size, data = self.owner.pages, int(index.shape[0]), self._pages
        held = data[:-1].view(-1, per_row, *data.shape[1:]).index_select(0, index.to(data.device))
        taken = torch.cat([held.flatten(0, 1), data[-1:]])
        self.rows = replace(self.rows, data=taken) if isinstance(self.rows, DSV4Rows) else taken

    def bytes(self) -> int:
        """Bytes of the pages."""
        return 0 if self.rows is None else self._pages.nbytes


class IndexedLatentLayer(LatentLayer):
    """The same with the keys of DeepSeek-V3.2's indexer, in 16 bits as the model computes them."""

    indexer_keys: torch.Tensor | None = None

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Takes the index keys of the new tokens, `[batch, tokens, head_dim]`, and returns those of all."""
        held = [] if self.indexer_keys is None else [self.indexer_keys]
        self.indexer_keys = torch.cat([*held, indexer_key_states], 1)
        return self.indexer_keys

    def select(self, index: torch.Tensor) -> None:
        """Keeps these sequences, which may repeat, in this order."""
        super().select(index)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys.index_select(0, index.to(self.indexer_keys.device))

    def shorten(self, removed: int) -> None:
        """Forgets the last tokens."""
        super().shorten(removed)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : max(self.indexer_keys.shape[1] - removed, 0)]

    def bytes(self) -> int:
        """Bytes of the pages and of the index keys."""
        return super().bytes() + (0 if self.indexer_keys is None else self.indexer_keys.nbytes)


def latent_layer(module: torch.nn.Module) -> LatentLayer | None:
    """The layer that took the latents of a module's attention call; None where a `NarrowCache` did not."""
    layer = _handover.layer
    if layer is None:  # and nothing is written: torch.compile guards what it found
        return None
    _handover.layer = None
    if layer.pending is None or getattr(module, "layer_idx", None) != layer.layer_idx:
        return None
    return layer if hasattr(module, "kv_b_proj") else None


def _up_projections(module: Any, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What expands a latent to keys and to values: `[heads, channels, latent]` each.

    Raises:
        TypeError: the weight is not in 16 bits.
    """
    weight = getattr(module.kv_b_proj, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype not in _SIXTEEN_BIT.values():
        found = getattr(weight, "dtype", type(module.kv_b_proj).__name__)
        raise TypeError(
            f"NarrowCache needs kv_b_proj in bf16 or fp16 to absorb it into queries, got {found}: leave it "
            "out of the model's quantisation"
        )
    both = weight.view(heads, -1, weight.shape[1])
    return both[:, : module.qk_nope_head_dim], both[:, module.qk_nope_head_dim :]


def _absorbed(query: torch.Tensor, up_keys: torch.Tensor) -> torch.Tensor:
    """Queries `[batch, heads, tokens, head_dim]` over latents, `[batch * tokens, heads, columns]`."""
    plain, rope = query.tensor_split((up_keys.shape[1],), -1)
    absorbed = torch.einsum("bhtd,hdc->bthc", plain, up_keys)
    return torch.cat([absorbed, rope.transpose(1, 2)], -1).flatten(0, 1)


def attend_latent(
    module: Any, layer: LatentLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    padding: torch.Tensor | None, scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of a layer's new tokens over its latent rows, which take them in.

    Args:
        module: the attention module, with `kv_b_proj`.
        layer: the layer's cache.
        query: `[batch, num_qo_heads, tokens, head_dim]`.
        key, value: of the new tokens, expanded, `[batch, num_qo_heads, tokens, channels]`.
        padding: `[batch, tokens]`, 0 for padding, or None.
        scaling: of the logits; None for `head_dim ** -0.5`.

    Returns:
        `[batch, tokens, num_qo_heads, value's channels]`.
    """
    batch, heads, tokens, head_dim = query.shape
    before = layer.length - tokens
    scale = head_dim**-0.5 if scaling is None else scaling
    if tokens > 1 and (not before or tokens > MOST_QUERIES):
        layer.make_room(padding)
        o = _attend_expanded(module, layer, query, key, value, padding, scale)
        layer.store(padding)
        return o
    layer.store(padding)
    own, rows = layer.owner.rows, layer.rows
    assert rows is not None
    up_keys, up_values = _up_projections(module, heads)
    order = None
    if padding is not None and tokens > 1:  # padding in front: the last query is the newest token's
        order = padding.bool().to(torch.uint8).argsort(stable=True, dim=1)
        query = query.gather(2, order[:, None, :, None].expand_as(query))
    q = _absorbed(query, up_keys)
    plan = latent_plan(
        rows, num_qo_heads=heads, page_size=own.page_size, q_len=tokens, dtype=q.dtype,
        device=q.device, sm_scale=scale, max_batch=own.batch, max_seq_len=own.max_length,
    )  # fmt: skip
    latent = latent_decode(q, rows, own.table, plan=plan)
    assert isinstance(latent, torch.Tensor)
    o = torch.einsum("nhc,hvc->nhv", latent, up_values).view(batch, tokens, heads, -1)
    if order is None or padding is None:
        return o
    o = torch.empty_like(o).scatter_(1, order[:, :, None, None].expand_as(o), o)
    return o.masked_fill(~padding.bool()[:, :, None, None], 0)


def _attend_expanded(
    module: Any, layer: LatentLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    padding: torch.Tensor | None, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Attention of a chunk to its own keys and values, as they are, and to those before it, expanded."""
    batch, _, tokens, _ = query.shape
    before, seen = layer.length - tokens, padding
    if before:
        rows = layer.history(before)[:, None]
        k, v = module.expand_kv(*rows.tensor_split((HEAD_DIM,), -1))
        key, value = torch.cat([k, key], 2), torch.cat([v, value], 2)
    if before and padding is not None:
        held = layer.owner.rows.seq_lens - padding.sum(1)
        places = torch.arange(before, device=query.device)
        seen = torch.cat([places < held[:, None], padding.bool()], 1)
    return attend_dense(
        query, key, value, seen, padding, sm_scale=scale, logits_soft_cap=0.0, window_left=-1, sinks=None
    ).view(batch, tokens, query.shape[1], -1)


def attend_listed(
    module: Any, layer: LatentLayer, query: torch.Tensor, mask: torch.Tensor, indices: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """Sparse attention of a layer's new tokens to the latent rows that an indexer chose for them.

    Args:
        module, layer, scaling: as for `attend_latent`.
        query: `[batch, num_qo_heads, tokens, head_dim]`.
        mask: `[batch or 1, 1, tokens, keys]`, 0 for keys that a token may see, else negative.
        indices: `[batch, tokens, topk]` int32, keys of each token, padding counted; keys that the mask hides
            are left out.

    Returns:
        `[batch, tokens, num_qo_heads, value's channels]`.
    """
    batch, heads, tokens, head_dim = query.shape
    may = (mask[:, 0, -tokens:] == 0).expand(batch, -1, -1)
    keys = may[:, -1]  # the newest token sees every key that is a token
    layer.store(keys[:, -tokens:])
    assert layer.rows is not None
    places = layer.owner.rows.first_slot[:, None] + keys.cumsum(1, dtype=torch.int32) - 1
    chosen = indices.long()
    slots = places[:, None].expand_as(may).gather(-1, chosen).masked_fill(~may.gather(-1, chosen), -1)
    up_keys, up_values = _up_projections(module, heads)
    rows = layer.rows.flatten(0, 1) if isinstance(layer.rows, torch.Tensor) else layer.rows
    source = listed_rows(rows, slots.to(torch.int32))
    scale = head_dim**-0.5 if scaling is None else scaling
    o = attend_to_rows(_absorbed(query, up_keys), source, None, attn_sink=None, sm_scale=scale)
    return torch.einsum("nhc,hvc->nhv", o, up_values).view(batch, tokens, heads, up_values.shape[1])
