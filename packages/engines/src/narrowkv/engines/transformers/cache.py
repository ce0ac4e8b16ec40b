"""`NarrowCache`: transformers' cache of keys and values, in pages of a narrow format."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from narrowkv.attn_decode import DecodePlan
from narrowkv.engines.geometry import decoder_reasons
from narrowkv.engines.transformers.rows import PaddedBatch
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable, append
from narrowkv.quant import Calibration, LayerCalibration
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import check_positive_int

# The attribute of a key tensor that tells the attention function where its keys are stored.
LAYER_TAG = "narrowkv_layer"


class NarrowLayer(CacheLayerMixin):
    """One layer's keys and values. `update` hands new tokens on; the attention function stores them.

    Attributes:
        cache: the layer's pages; None before the first tokens.
        near: pages of the first and the newest tokens, or None where `cache` holds all tokens.
        calibration: what queries, keys, values and the output go through; None for nothing.
        pending: keys and values that the attention function has not stored yet.
    """

    is_compileable = False
    supports_early_init = False

    def __init__(self, owner: NarrowCache, *, apart: bool = False) -> None:
        super().__init__()
        self.owner, self.apart = owner, apart
        self.is_croppable = not apart
        self.near: PagedKVCache | None = None
        self.calibration: LayerCalibration | None = None
        self.cache: PagedKVCache | None = None
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.length = 0
        self._planned: tuple[torch.Size, torch.dtype, tuple[DecodePlan, ...]] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the pages for as many rows as the keys `[batch, num_kv_heads, tokens, head_dim]` have."""
        self.batch_size, heads, _, head_dim = key_states.shape
        rows = self.owner.rows_for(self.batch_size, key_states.device)
        transform = None
        if self.calibration is not None:
            self.calibration = self.calibration.to(key_states.device)
            transform = self.calibration.key_transform()
        self.cache = replace(self.owner.allocate(rows, heads, head_dim), key_transform=transform)
        if self.apart:
            self.near = replace(self.owner.allocate_near(rows, heads, head_dim), key_transform=transform)
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the new tokens `[batch, num_kv_heads, tokens, head_dim]` and returns them, not the old ones.

        Raises:
            RuntimeError: the model's attention did not store the tokens before these.
        """
        if self.pending is not None:
            raise RuntimeError(
                "NarrowCache serves models with attn_implementation='narrowkv' only: the tokens of the last "
                "call were never stored; call narrowkv.engines.transformers.register() and load the model "
                "with attn_implementation='narrowkv'"
            )
        if not self.is_initialized or key_states.shape[0] != self.batch_size:
            self.lazy_initialization(key_states, value_states)
        self.pending = key_states, value_states
        self.length += key_states.shape[2]
        setattr(key_states, LAYER_TAG, self)
        return key_states, value_states

    def make_room(self, padding: torch.Tensor | None) -> None:
        """Makes room for the pending tokens, which the first layer of a step does for all of them."""
        if self.pending is not None:
            self.owner.step_at(self.length, self.pending[0].shape[2], padding)

    def store(self, padding: torch.Tensor | None) -> None:
        """Appends the pending tokens to the pages, once there is room for them."""
        self.make_room(padding)
        if self.pending is None:
            return
        assert self.cache is not None
        (k, v), self.pending = self.pending, None
        batch, heads, tokens, head_dim = k.shape
        step = self.owner.rows.step
        assert step is not None
        if tokens == 1:
            k, v = k.squeeze(2), v.squeeze(2)
        else:
            k, v = (x.transpose(1, 2).reshape(batch * tokens, heads, head_dim) for x in (k, v))
        if self.calibration is not None:
            v = self.calibration.values(v)
        if self.near is None:
            append(self.cache, k, v, step.slots)
        else:
            assert step.window is not None
            append(self.near, k, v, step.window.near_slots)
            append(self.cache, k, v, step.window.far_slots)

    def decode_plans(self, q: torch.Tensor) -> tuple[DecodePlan | None, ...]:
        """The plan of a decode step over each of `decode_inputs`; found again without a look-up.

        None where torch.compile traces, as of `PaddedBatch.prefill_plan`.
        """
        if torch.compiler.is_compiling():
            return (None,) * len(self.decode_inputs())
        if self._planned is None or self._planned[0] != q.shape or self._planned[1] != q.dtype:
            plan = self.owner.rows.decode_plan
            self._planned = q.shape, q.dtype, tuple(plan(q, *each) for each in self.decode_inputs())
        return self._planned[2]

    def decode_inputs(self) -> tuple[tuple[PagedKVCache, PageTable], ...]:
        """The caches that a decode step attends to, each with its table."""
        rows = self.owner.rows
        assert self.cache is not None
        if self.near is None:
            return ((self.cache, rows.table),)
        assert rows.window is not None
        return (self.near, rows.window.near), (self.cache, rows.window.far)

    def select(self, index: torch.Tensor) -> None:
        """Keeps these rows, which may repeat, in this order."""
        if self.cache is None:
            return
        self.batch_size = int(index.shape[0])
        self.cache = _select_rows(self.cache, index, self.owner.pages)
        if self.near is not None:
            self.near = _select_rows(self.near, index, 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask covers, and the first of them."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of each row, padding included."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens that a row can hold."""
        return self.owner.max_length

    get_max_cache_shape = get_max_length

    def offload(self) -> None:
        """Refused: pages stay where the kernels read them.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("NarrowCache cannot be offloaded: leave cache offloading off")


def _select_rows(cache: PagedKVCache, index: torch.Tensor, per_row: int) -> PagedKVCache:
    """A cache with the pages of these rows, each of which has `per_row` pages."""

    def select(pages: torch.Tensor) -> torch.Tensor:
        stored = pages.view(torch.uint8) if pages.element_size() == 1 else pages
        rows = stored.view(-1, per_row, *stored.shape[1:])
        return rows.index_select(0, index.to(rows.device)).flatten(0, 1).view(pages.dtype)

    taken: dict[str, Any] = {
        name: select(value)
        for name in ("k", "v", "k_descale", "v_descale")
        if isinstance(value := getattr(cache, name), torch.Tensor) and value.shape[:1] == (cache.num_pages,)
    }
    return replace(cache, num_pages=int(index.shape[0]) * per_row, **taken)


class NarrowCache(Cache):
    """A cache for `model.generate(past_key_values=...)` that stores keys and values in a narrow format.

    Needs a model with `attn_implementation="narrowkv"`. Pages are allocated at the first tokens, for
    `max_length` tokens of every row; padding takes none. Layers without keys and values (linear attention)
    keep the state that transformers' own `DynamicCache` gives them.

    Args:
        config: the model's configuration.
        max_length: tokens that a row can hold: prompt and new tokens.
        format: "bf16", "fp16", an FP8 format, "fp4_e2m1", "int8", "int4", or a `CacheFormat` pair for K and
            V.
        page_size: tokens a page.
        k_descale, v_descale: of an FP8 side: what stored numbers are multiplied by, a float or an fp32 tensor
            `[]`, `[1]` or `[num_kv_heads]`. None computes one for each token and head, which needs no
            calibration and takes 4 bytes.
        scale_group: of an FP4 side: 16 or 32 for a scale per so many channels, None for one per token and
            head.
        scale_format: of an FP4 side: "e8m0" (powers of two) or "e4m3"; with scale_group=16 that is NVFP4.
        calibration: offsets and balances of the model, from `narrowkv.quant.calibrate` or
            `narrowkv.quant.Calibration.load`; one layer for each layer that has keys and values.
        recent: the newest tokens of each row that a new token sees in FP8 with a scale per token and head,
            beside the others in `format`; 0 for none. A prompt sees its own tokens as they are, in 16 bits.
            For FP4, of which it takes away most of the loss. Layers with a sliding window do without, and
            such a cache cannot be cropped.
        first: the same for the first tokens of each row.

    Raises:
        TypeError, ValueError: for sizes and formats that a cache cannot have, and for layers that it cannot
            hold.

    Example:
        >>> cache = NarrowCache(model.config, max_length=4096, format="fp8_e4m3fn")      # doctest: +SKIP
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=64)           # doctest: +SKIP
    """

    def __init__(
        self,
        config: Any,
        *,
        max_length: int,
        format: str | CacheFormat = "fp8_e4m3fn",
        page_size: int = 64,
        k_descale: float | torch.Tensor | None = None,
        v_descale: float | torch.Tensor | None = None,
        scale_group: int | None = None,
        scale_format: str = "e8m0",
        calibration: Calibration | None = None,
        recent: int = 0,
        first: int = 0,
    ) -> None:
        for name, count in (("recent", recent), ("first", first)):
            if type(count) is not int or count < 0:
                raise ValueError(f"{name} must be a number of tokens, 0 or more, got {count!r}")
        if first and not recent:
            raise ValueError(f"recent must be at least 1 beside first={first}, got 0")
        self.first, self.recent = first, recent
        self.max_length = check_positive_int("max_length", max_length)
        self.page_size = check_positive_int("page_size", page_size)
        self.pages = -(-max_length // page_size)
        self.format = CacheFormat.parse(format)
        self.scale_group, self.scale_format = scale_group, scale_format
        self._descales = k_descale, v_descale
        self._rows: PaddedBatch | None = None
        text = config.get_text_config(decoder=True)
        for reason in decoder_reasons(text):
            raise ValueError(f"NarrowCache cannot hold this model: {reason}. Use transformers' own cache")
        layers = DynamicCache(config=text).layers or [DynamicLayer() for _ in range(text.num_hidden_layers)]
        super().__init__(layers=[self._narrow(layer, index) for index, layer in enumerate(layers)])
        if calibration is not None:
            if len(calibration.layers) != len(self.narrow_layers):
                raise ValueError(
                    f"calibration must have {len(self.narrow_layers)} layers for this model, got "
                    f"{len(calibration.layers)}: calibrate the model that is loaded"
                )
            for narrow, own in zip(self.narrow_layers, calibration.layers, strict=True):
                narrow.calibration = own

    def _narrow(self, layer: Any, index: int) -> Any:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            return NarrowLayer(self, apart=self.recent > 0 and type(layer) is DynamicLayer)
        if isinstance(layer, CacheLayerMixin):
            raise ValueError(
                f"NarrowCache holds layers with keys and values of one shape, got {type(layer).__name__} for "
                f"layer {index}: use transformers' own cache for this model"
            )
        return layer

    @property
    def narrow_layers(self) -> list[NarrowLayer]:
        """The layers that hold keys and values."""
        return [layer for layer in self.layers if isinstance(layer, NarrowLayer)]

    @property
    def rows(self) -> PaddedBatch:
        """The rows of the batch.

        Raises:
            RuntimeError: before the first tokens.
        """
        if self._rows is None:
            raise RuntimeError("NarrowCache has no rows before its first tokens")
        return self._rows

    def bytes(self) -> int:
        """Bytes of all pages and their descales; 0 before the first tokens."""
        held = [cache for layer in self.narrow_layers for cache in (layer.cache, layer.near)]
        caches = [cache for cache in held if cache is not None]
        return math.ceil(sum(c.bytes_per_token() * c.num_pages * c.page_size for c in caches))

    def rows_for(self, batch: int, device: torch.device) -> PaddedBatch:
        """The rows of a batch of this size, new ones if the cache was empty or had another."""
        if self._rows is None or self._rows.batch != batch:
            if self._rows is not None and self._rows.length:
                raise ValueError(
                    f"NarrowCache holds {self._rows.batch} rows, got keys of {batch}: call reset() or make a "
                    "new cache"
                )
            self._rows = self._make_rows(batch, device)
        return self._rows

    def _make_rows(self, batch: int, device: torch.device) -> PaddedBatch:
        return PaddedBatch(
            batch, self.max_length, self.page_size, device, first=self.first, recent=self.recent
        )

    def allocate_near(self, rows: PaddedBatch, num_kv_heads: int, head_dim: int) -> PagedKVCache:
        """Pages of the first and the newest tokens of one layer, one for each row."""
        shape = (rows.batch, self.first + self.recent, num_kv_heads)
        scales = [torch.ones(shape, dtype=torch.float32, device=rows.device) for _ in "kv"]
        return PagedKVCache.empty(
            *shape, head_dim, format="fp8_e4m3fn", k_descale=scales[0], v_descale=scales[1],
            device=rows.device,
        )  # fmt: skip

    def allocate(self, rows: PaddedBatch, num_kv_heads: int, head_dim: int) -> PagedKVCache:
        """Pages of one layer."""
        num_pages = rows.batch * rows.pages
        descales: list[float | torch.Tensor | None] = []
        for given, name in zip(self._descales, (self.format.k, self.format.v), strict=True):
            if get_format(name).kind != "fp8":
                descales.append(None)
            elif given is None:
                shape = (num_pages, rows.page_size, num_kv_heads)
                descales.append(torch.ones(shape, dtype=torch.float32, device=rows.device))
            else:
                descales.append(given)
        return PagedKVCache.empty(
            num_pages, rows.page_size, num_kv_heads, head_dim, format=self.format, k_descale=descales[0],
            v_descale=descales[1], scale_group=self.scale_group, scale_format=self.scale_format,
            device=rows.device,
        )  # fmt: skip

    def step_at(self, length: int, tokens: int, padding: torch.Tensor | None) -> Any:
        """The step that brings every row to `length` tokens; the first layer that asks makes it.

        Raises:
            RuntimeError: a layer has not seen the tokens that others have.
        """
        rows = self.rows
        if rows.length == length - tokens:
            return rows.advance(tokens, padding)
        if rows.length != length or rows.step is None or rows.step.tokens != tokens:
            raise RuntimeError(
                f"every layer of a NarrowCache must see the same tokens, got {tokens} that end at {length} "
                f"where another layer ends at {rows.length}"
            )
        return rows.step

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets tokens of every row: the last `-tokens_to_remove`, or those beyond it if it is positive.

        Raises:
            ValueError: the cache keeps newest tokens apart, and the ones before them are no longer there.
        """
        if self.recent:
            raise ValueError("NarrowCache with recent tokens in FP8 cannot forget tokens: use recent=0")
        length = self.get_seq_length()
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(length - tokens_to_remove, 0)
        for layer in self.layers:
            if isinstance(layer, NarrowLayer):
                layer.length -= removed
            else:
                layer.crop(-removed)
        if self._rows is not None:
            self._rows.crop(removed)

    def reset(self) -> None:
        """Forgets all tokens and keeps the memory."""
        for layer in self.layers:
            if isinstance(layer, NarrowLayer):
                layer.length, layer.pending = 0, None
            else:
                layer.reset()
        if self._rows is not None:
            self._rows.clear()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Puts row `beam_idx[b]` in the place of row b; beam search does so, and it copies the pages."""
        self._select(beam_idx, "reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row; copies the pages."""
        if self._rows is not None:
            index = torch.arange(self._rows.batch, device=self._rows.device).repeat_interleave(repeats)
            self._select(index, "batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some rows; copies the pages."""
        self._select(indices, "batch_select_indices", indices)

    def _select(self, index: torch.Tensor, method: str, argument: object) -> None:
        for layer in self.layers:
            if isinstance(layer, NarrowLayer):
                layer.select(index)
            else:
                getattr(layer, method)(argument)
        if self._rows is not None:
            old = self._rows
            self._rows = self._make_rows(int(index.shape[0]), old.device)
            self._rows.set_lens(old.seq_lens.index_select(0, index.to(old.device)))
            self._rows.length = old.length
