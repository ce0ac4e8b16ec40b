"""`NarrowCache`: transformers' cache of keys and values, in pages of a narrow format."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from narrowkv.engines.geometry import decoder_reasons, head_dims, is_latent
from narrowkv.engines.transformers.latent import IndexedLatentLayer, LatentLayer, check_options
from narrowkv.engines.transformers.layers import NarrowLayer
from narrowkv.engines.transformers.rows import PaddedBatch
from narrowkv.paged_cache import CacheFormat, PagedKVCache
from narrowkv.paged_cache.layouts import check_head_dims
from narrowkv.quant import Calibration
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import check_positive_int


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
        self.descales = k_descale, v_descale
        self._rows: PaddedBatch | None = None
        text = config.get_text_config(decoder=True)
        for reason in decoder_reasons(text, latent=True):
            raise ValueError(f"NarrowCache cannot hold this model: {reason}. Use transformers' own cache")
        self._latent = is_latent(text)
        self._attention = getattr(text, "_attn_implementation", None)
        if self._latent:
            check_options(self, calibration is not None)
        elif v_head_dim := getattr(text, "v_head_dim", None):
            for head_dim in head_dims(text):
                check_head_dims(head_dim, v_head_dim, self.format)
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
        if self._latent and type(layer) in (DynamicLayer, DynamicIndexedLayer):
            indexed = type(layer) is DynamicIndexedLayer
            if indexed and self._attention == "narrowkv":  # whose masks the model's indexer cannot read
                raise ValueError(
                    'an indexer chooses the tokens of this model, got attn_implementation="narrowkv": call '
                    "narrowkv.engines.transformers.deepseek_v4.register() and load it with "
                    'attn_implementation="narrowkv-sparse"'
                )
            return IndexedLatentLayer(self, index) if indexed else LatentLayer(self, index)
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
        return sum(layer.bytes() for layer in self.narrow_layers)

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

    def allocate_near(
        self, rows: PaddedBatch, num_kv_heads: int, head_dim: int, v_head_dim: int
    ) -> PagedKVCache:
        """Pages of the first and the newest tokens of one layer, one for each row."""
        shape = (rows.batch, self.first + self.recent, num_kv_heads)
        scales = [torch.ones(shape, dtype=torch.float32, device=rows.device) for _ in "kv"]
        return PagedKVCache.empty(
            *shape, head_dim, v_head_dim=v_head_dim, format="fp8_e4m3fn", k_descale=scales[0],
            v_descale=scales[1], device=rows.device,
        )  # fmt: skip

    def allocate(self, rows: PaddedBatch, num_kv_heads: int, head_dim: int, v_head_dim: int) -> PagedKVCache:
        """Pages of one layer."""
        num_pages = rows.batch * rows.pages
        descales: list[float | torch.Tensor | None] = []
        for given, name in zip(self.descales, (self.format.k, self.format.v), strict=True):
            if get_format(name).kind != "fp8":
                descales.append(None)
            elif given is None:
                shape = (num_pages, rows.page_size, num_kv_heads)
                descales.append(torch.ones(shape, dtype=torch.float32, device=rows.device))
            else:
                descales.append(given)
        return PagedKVCache.empty(
            num_pages, rows.page_size, num_kv_heads, head_dim, v_head_dim=v_head_dim, format=self.format,
            k_descale=descales[0], v_descale=descales[1], scale_group=self.scale_group,
            scale_format=self.scale_format, device=rows.device,
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
                layer.shorten(removed)
            else:
                layer.crop(-removed)
        if self._rows is not None:
            self._rows.crop(removed)

    def reset(self) -> None:
        """Forgets all tokens and keeps the memory."""
        for layer in self.layers:
            if isinstance(layer, NarrowLayer):
                layer.shorten(layer.length)
                layer.pending = None
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
