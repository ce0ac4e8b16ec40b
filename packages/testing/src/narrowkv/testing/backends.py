"""Who can answer a call: narrowkv, torch's SDPA on the dequantised cache, AITER and FlashInfer if installed.

Others are called through their public functions with the very tensors that narrowkv gets, and what they
refuse is shown in their own words.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any, Protocol

import torch
from torch.nn.attention.bias import causal_lower_right

from narrowkv.paged_cache import PagedKVCache, PageTable

Call = Callable[[], torch.Tensor]
PEER_BOUND = 0.004
"""Of the relative L1 error of a peer, which may round dequantised keys and values to 16 bits once more."""
_AITER_PARTITION = 256
_FLASHINFER_WORKSPACE_BYTES = 256 * 2**20


class Paged(Protocol):
    """The tensors of a decode; with `starts`, of a prefill that finds its own keys in the cache."""

    @property
    def q(self) -> torch.Tensor:
        """The query."""

    @property
    def cache(self) -> PagedKVCache:
        """The paged cache."""

    @property
    def table(self) -> PageTable:
        """Its page table."""


class NotAnsweringError(Exception):
    """The tensors of a call have no form that the backend takes."""


class Backend(Protocol):
    """One implementation."""

    name: str

    def absent(self, on_gpu: bool) -> str | None:
        """Why it cannot run at all, or None; `on_gpu`: whether tensors are on a GPU."""

    def prepare(self, inputs: Any) -> Call:
        """Does the host's work of the call's operation once; peers are asked about decode alone.

        The call that comes back gives `o` and can be captured in a graph. Raises whatever the backend raises.
        """


class Narrowkv:
    """This project's own operations."""

    name = "narrowkv"

    def absent(self, on_gpu: bool) -> str | None:
        """Never."""
        return None

    def prepare(self, inputs: Any) -> Call:
        """The case's operation."""
        prepared: Call = inputs.prepare()
        return prepared


class TorchSdpa:
    """`torch.nn.functional.scaled_dot_product_attention` on the cache expanded to the query's dtype."""

    name = "torch sdpa"

    def absent(self, on_gpu: bool) -> str | None:
        """Never."""
        return None

    def prepare(self, inputs: Paged) -> Call:
        """Gathers and widens every sequence; the call only attends, over dense keys in q's dtype."""
        q, table = inputs.q, inputs.table
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise NotAnsweringError("is asked with 16-bit queries only")
        counts = _query_counts(inputs)
        # [heads, tokens, head_dim]
        sides = [
            [x.to(q.dtype).transpose(0, 1) for x in inputs.cache.gather(table, seq)]
            for seq in range(table.batch_size)
        ]
        rows = [part.transpose(0, 1) for part in torch.split(q, counts)]
        triples = [(x, k, v) for x, (k, v) in zip(rows, sides, strict=True) if x.shape[1]]
        if len({(x.shape, k.shape) for x, k, _ in triples}) == 1:  # sequences of one length are one call
            parts = [tuple(map(torch.stack, zip(*triples, strict=True)))]
        else:
            parts = [tuple(x[None] for x in triple) for triple in triples]

        def attend() -> torch.Tensor:
            found = [sdpa(*part).transpose(1, 2).flatten(0, 1) for part in parts]  # [tokens, heads, head_dim]
            return found[0] if len(found) == 1 else torch.cat(found)

        return attend


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Torch's attention of `[batch, heads, tokens, head_dim]`, causal and aligned bottom-right."""
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, enable_gqa=True)
    if q.shape[2] == 1:
        return attend()
    if q.shape[2] == k.shape[2]:
        return attend(is_causal=True)
    return attend(attn_mask=causal_lower_right(q.shape[2], k.shape[2]))


def _query_counts(inputs: Paged) -> list[int]:
    """Query tokens of each sequence. Waits for the device."""
    starts = getattr(inputs, "starts", None)
    batch = inputs.table.batch_size
    return [inputs.q.shape[0] // batch] * batch if starts is None else starts.diff().tolist()


def _ragged(inputs: Paged) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """kv_indptr, kv_indices, kv_last_page_len, and the longest sequence. Waits for the device."""
    table, device = inputs.table, inputs.q.device
    pages = [table.pages_of(seq) for seq in range(table.batch_size)]
    counts = torch.tensor([0, *(len(ids) for ids, _ in pages)], dtype=torch.int32)
    last = torch.tensor([(n - 1) % table.page_size + 1 if n else 0 for _, n in pages], dtype=torch.int32)
    indices = torch.cat([ids for ids, _ in pages]).int()
    longest = max(n for _, n in pages)
    return counts.cumsum(0).int().to(device), indices.to(device), last.to(device), longest


def _float_descales(inputs: Paged) -> tuple[float, float]:
    cache = inputs.cache
    if isinstance(cache.k_descale, torch.Tensor) or isinstance(cache.v_descale, torch.Tensor):
        raise NotAnsweringError("is compared with one descale per tensor only")
    return float(cache.k_descale), float(cache.v_descale)


def _missing(package: str, on_gpu: bool) -> str | None:
    if importlib.util.find_spec(package) is None:
        return "not installed"
    if not on_gpu:
        return "installed, but needs a GPU"
    return None


class Aiter:
    """AITER's `paged_attention_ragged`, NHD pages."""

    name = "aiter"

    def absent(self, on_gpu: bool) -> str | None:
        """Not installed, or no GPU to run on."""
        return _missing("aiter", on_gpu)

    def prepare(self, inputs: Paged) -> Call:
        """The entry that stands for decode."""
        cache, q = inputs.cache, inputs.q
        if cache.format.k != cache.format.v:
            raise NotAnsweringError("takes one format for K and V")
        if len(set(_query_counts(inputs))) > 1:
            raise NotAnsweringError("is asked with as many queries in every sequence only")
        k_descale, v_descale = (torch.tensor([d], device=q.device) for d in _float_descales(inputs))
        indptr, indices, last, longest = _ragged(inputs)
        scale = cache.head_dim**-0.5
        out = torch.empty_like(q)
        partitions = -(-longest // _AITER_PARTITION)
        slots = q.shape[0] * q.shape[1] * partitions
        workspace = torch.empty(
            slots * (q.shape[2] * q.element_size() + 8), dtype=torch.uint8, device=q.device
        )
        kind = {"fp8_e4m3fn": "fp8_e4m3", "fp8_e4m3fnuz": "fp8_e4m3"}.get(cache.format.k, "auto")

        def decode() -> torch.Tensor:
            torch.ops.aiter.paged_attention_ragged(
                out, workspace, q, cache.k, cache.v, scale, indptr, indices, last, cache.page_size,
                partitions, None, kind, "NHD", 0.0, k_descale, v_descale, None, _AITER_PARTITION,
            )  # fmt: skip
            return out

        return decode


class FlashInfer:
    """FlashInfer's batch decode and prefill wrappers with tensor cores, NHD pages."""

    name = "flashinfer"

    def absent(self, on_gpu: bool) -> str | None:
        """Not installed, or no GPU to run on."""
        return _missing("flashinfer", on_gpu)

    def prepare(self, inputs: Paged) -> Call:
        """Plans; the call runs the plan."""
        import flashinfer

        cache, q = inputs.cache, inputs.q
        if cache.format.k != cache.format.v:
            raise NotAnsweringError("takes one format for K and V")
        k_descale, v_descale = _float_descales(inputs)
        indptr, indices, last, _ = _ragged(inputs)
        workspace = torch.zeros(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        heads = (q.shape[1], cache.num_kv_heads, cache.head_dim, cache.page_size)
        kinds = {"q_data_type": q.dtype, "kv_data_type": cache.k.dtype}
        counts = _query_counts(inputs)
        wrapper: Any
        if set(counts) == {1}:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(indptr, indices, last, *heads, **kinds)
        else:
            starts = torch.tensor([0, *counts]).cumsum(0).int().to(q.device)
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(starts, indptr, indices, last, *heads, causal=True, **kinds)
        return partial(wrapper.run, q, (cache.k, cache.v), k_scale=k_descale, v_scale=v_descale)


OURS = Narrowkv()
PEERS: tuple[Backend, ...] = (TorchSdpa(), Aiter(), FlashInfer())


def peer_version(backend: Backend) -> str | None:
    """The installed version of a peer's distribution, if it has one."""
    names = {
        "aiter": ("aiter", "amd-aiter"),
        "flashinfer": ("flashinfer-python", "flashinfer"),
        "torch sdpa": ("torch",),
    }
    for name in names.get(backend.name, ()):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
