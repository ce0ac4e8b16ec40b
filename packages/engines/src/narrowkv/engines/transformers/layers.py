"""A layer of a `NarrowCache`: one layer's keys and values, in pages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin

from narrowkv.attn_decode import DecodePlan
from narrowkv.engines.transformers.rows import PaddedBatch
from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable, append
from narrowkv.quant import LayerCalibration

# The attribute of a key tensor that tells the attention function where its keys are stored.
LAYER_TAG = "narrowkv_layer"


class Owner(Protocol):
    """What a layer asks of its `NarrowCache`."""

    max_length: int
    page_size: int
    pages: int
    recent: int
    format: CacheFormat
    descales: tuple[float | torch.Tensor | None, float | torch.Tensor | None]
    scale_group: int | None
    scale_format: str

    @property
    def rows(self) -> PaddedBatch:
        """The rows of the batch."""

    def rows_for(self, batch: int, device: torch.device) -> PaddedBatch:
        """The rows of a batch of this size."""

    def allocate(self, rows: PaddedBatch, num_kv_heads: int, head_dim: int, v_head_dim: int) -> PagedKVCache:
        """Pages of one layer."""

    def allocate_near(
        self, rows: PaddedBatch, num_kv_heads: int, head_dim: int, v_head_dim: int
    ) -> PagedKVCache:
        """Pages of the first and the newest tokens of one layer."""

    def step_at(self, length: int, tokens: int, padding: torch.Tensor | None) -> Any:
        """The step that brings every row to `length` tokens."""


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

    def __init__(self, owner: Owner, *, apart: bool = False) -> None:
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
        shape = heads, head_dim, value_states.shape[-1]
        self.cache = replace(self.owner.allocate(rows, *shape), key_transform=transform)
        if self.apart:
            self.near = replace(self.owner.allocate_near(rows, *shape), key_transform=transform)
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
        step, tokens = self.owner.rows.step, k.shape[2]
        assert step is not None
        if tokens == 1:
            k, v = k.squeeze(2), v.squeeze(2)
        else:
            k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
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

    def shorten(self, removed: int) -> None:
        """Forgets the last tokens, of which the rows of the batch forget the lengths."""
        self.length -= removed

    def bytes(self) -> int:
        """Bytes of the pages and their descales; 0 before the first tokens."""
        caches = [cache for cache in (self.cache, self.near) if cache is not None]
        return math.ceil(sum(c.bytes_per_token() * c.num_pages * c.page_size for c in caches))

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
