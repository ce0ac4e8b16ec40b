"""Who can answer a call: narrowkv, torch's SDPA on the dequantised cache, and others if they are installed.

Others are called through their public functions with the very tensors that narrowkv gets, and what they
refuse is shown in their own words.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from narrowkv.runtime.errors import UnsupportedError

if TYPE_CHECKING:
    from narrowkv.testing.cases.decode import DecodeInputs

Call = Callable[[], torch.Tensor]
PEER_BOUND = 0.004
"""Of the relative L1 error of a peer, which may round dequantised keys and values to 16 bits once more."""
_AITER_PARTITION = 256
_SGLANG_SPLITS = 8  # the default of --triton-attention-num-kv-splits
_FLASHINFER_WORKSPACE_BYTES = 256 * 2**20


class NotAnsweringError(UnsupportedError):
    """The tensors of a call have no form that the backend takes."""


@dataclass(frozen=True)
class Backend:
    """One implementation.

    Attributes:
        name: for people.
        prepare: does the host's work of a call's operation once; peers are asked about decode, and with
            `starts` among the tensors about prefills that find their own keys in the cache. The call that
            comes back gives `o` and can be captured in a graph. Raises whatever the backend raises.
        package: what must be installed, on a machine with a GPU; empty for an implementation that is here.
        distributions: the names by which its version is found.
    """

    name: str
    prepare: Callable[[Any], Call]
    package: str = ""
    distributions: tuple[str, ...] = ()

    def absent(self, on_gpu: bool) -> str | None:
        """Why it cannot run at all, or None; `on_gpu`: whether tensors are on a GPU."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return "not installed"
        return "installed, but needs a GPU" if self.package and not on_gpu else None

    @property
    def version(self) -> str | None:
        """The installed version of its distribution, if it has one."""
        for name in self.distributions:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None


def _torch_sdpa(inputs: DecodeInputs) -> Call:
    """`torch.nn.functional.scaled_dot_product_attention` on the cache expanded to the query's dtype.

    Every sequence is gathered and widened beforehand; the call only attends, over dense keys in q's dtype.
    """
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
    from torch.nn.attention.bias import causal_lower_right  # imports all of torch.compile: a second and more

    return attend(attn_mask=causal_lower_right(q.shape[2], k.shape[2]))


def _query_counts(inputs: DecodeInputs) -> list[int]:
    """Query tokens of each sequence. Waits for the device."""
    starts = getattr(inputs, "starts", None)
    batch = inputs.table.batch_size
    return [inputs.q.shape[0] // batch] * batch if starts is None else starts.diff().tolist()


def _ragged(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """kv_indptr, kv_indices, kv_last_page_len, and the longest sequence. Waits for the device."""
    table, device = inputs.table, inputs.q.device
    pages = [table.pages_of(seq) for seq in range(table.batch_size)]
    counts = torch.tensor([0, *(len(ids) for ids, _ in pages)], dtype=torch.int32)
    last = torch.tensor([(n - 1) % table.page_size + 1 if n else 0 for _, n in pages], dtype=torch.int32)
    indices = torch.cat([ids for ids, _ in pages]).int()
    longest = max(n for _, n in pages)
    return counts.cumsum(0).int().to(device), indices.to(device), last.to(device), longest


def _giving(out: torch.Tensor, call: Callable[[], object]) -> Call:
    """A call that gives the output which `call` writes."""

    def run() -> torch.Tensor:
        call()
        return out

    return run


def _float_descales(inputs: DecodeInputs) -> tuple[float, float]:
    cache = inputs.cache
    if isinstance(cache.k_descale, torch.Tensor) or isinstance(cache.v_descale, torch.Tensor):
        raise NotAnsweringError("is compared with one descale per tensor only")
    return float(cache.k_descale), float(cache.v_descale)


def result_of(inputs: DecodeInputs) -> torch.Tensor:
    """Memory for the output, in 16 bits where the query is FP8."""
    q = inputs.q
    return torch.empty_like(q, dtype=q.dtype if q.element_size() == 2 else torch.bfloat16)


def q_descale_of(inputs: DecodeInputs) -> torch.Tensor:
    """The query's descale of a call, `[1]`."""
    descale = inputs.options.get("q_descale", 1.0)
    return torch.as_tensor(descale, dtype=torch.float32, device=inputs.q.device).view(-1)[:1]


def _aiter(inputs: DecodeInputs) -> Call:
    """AITER's `paged_attention_ragged`, NHD pages: its entry for decode."""
    cache, q = inputs.cache, inputs.q
    if cache.format.k != cache.format.v:
        raise NotAnsweringError("takes one format for K and V")
    if len(set(_query_counts(inputs))) > 1:
        raise NotAnsweringError("is asked with as many queries in every sequence only")
    k_descale, v_descale = (torch.tensor([d], device=q.device) for d in _float_descales(inputs))
    indptr, indices, last, longest = _ragged(inputs)
    scale = cache.head_dim**-0.5
    out = result_of(inputs)
    partitions = -(-longest // _AITER_PARTITION)
    slots = q.shape[0] * q.shape[1] * partitions
    workspace = torch.empty(slots * (q.shape[2] * out.element_size() + 8), dtype=torch.uint8, device=q.device)
    kind = {"fp8_e4m3fn": "fp8_e4m3", "fp8_e4m3fnuz": "fp8_e4m3"}.get(cache.format.k, "auto")
    queries: tuple[Any, ...] = ()
    if q.element_size() == 1:  # all in FP8
        queries = (1, q_descale_of(inputs))  # query tokens of a sequence, and the query's scale

    call = partial(
        torch.ops.aiter.paged_attention_ragged, out, workspace, q, cache.k, cache.v, scale, indptr, indices,
        last, cache.page_size, partitions, None, kind, "NHD", 0.0, k_descale, v_descale, None,
        _AITER_PARTITION, *queries,
    )  # fmt: skip
    return _giving(out, call)


def _flashinfer(inputs: DecodeInputs) -> Call:
    """FlashInfer's batch decode and prefill wrappers with tensor cores, NHD pages; the call runs the plan."""
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


def _vllm(inputs: DecodeInputs) -> Call:
    """VLLM's `unified_attention` in Triton, NHD pages; without scratch it does not split keys."""
    from vllm.v1.attention.ops import triton_unified_attention as vllm

    return vllm_call(vllm.unified_attention, inputs)


def vllm_call(attend: Any, inputs: DecodeInputs) -> Call:
    """A call of vLLM's `unified_attention`."""
    q, cache, table = inputs.q, inputs.cache, inputs.table
    if cache.format.k != cache.format.v or cache.format.k.startswith("fp4"):
        raise NotAnsweringError("takes one 16-bit or FP8 format for K and V")
    if table.kind != "block_table":
        raise NotAnsweringError("takes block tables")
    batch, out, counts = table.batch_size, result_of(inputs), _query_counts(inputs)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(q.device)
    shape = (batch, cache.num_kv_heads)
    k_descale, v_descale = (
        torch.tensor(d, dtype=torch.float32, device=q.device).expand(shape) for d in _float_descales(inputs)
    )
    assert table.seq_lens is not None
    call = partial(
        attend, q, cache.k, cache.v, out, starts, max(counts), table.seq_lens, int(table.seq_lens.max()),
        cache.head_dim**-0.5, True, (-1, -1), table.page_ids, 0.0,
        q_descale_of(inputs) if q.element_size() == 1 else None, k_descale, v_descale,
        kv_quant_mode=int(cache.k.element_size() == 1),  # 1: FP8 with a scale a tensor
    )  # fmt: skip
    return _giving(out, call)


def _sglang(inputs: DecodeInputs) -> Call:
    """SGLang's `decode_attention_fwd` in Triton, over slots; keys are split as its backend does at most."""
    from sglang.kernels.ops.attention import decode_attention as sglang

    return sglang_call(sglang.decode_attention_fwd, inputs)


def sglang_call(attend: Any, inputs: DecodeInputs) -> Call:
    """A call of SGLang's `decode_attention_fwd`."""
    q, cache, table = inputs.q, inputs.cache, inputs.table
    if q.shape[0] != table.batch_size or q.element_size() == 1:
        raise NotAnsweringError("is asked with one 16-bit query token a sequence only")
    if cache.format.k != cache.format.v or cache.format.k.startswith("fp4"):
        raise NotAnsweringError("takes one 16-bit or FP8 format for K and V")
    k_descale, v_descale = _float_descales(inputs)
    place = torch.arange(cache.page_size, device=q.device)
    slots = [
        (ids.long()[:, None] * cache.page_size + place).flatten()[:length]
        for ids, length in map(table.pages_of, range(table.batch_size))
    ]
    ends = torch.tensor([0, *(len(s) for s in slots)], dtype=torch.int32, device=q.device).cumsum(0).int()
    rows, heads = q.shape[:2]
    logits = torch.empty(rows, heads, _SGLANG_SPLITS, q.shape[2], dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, heads, _SGLANG_SPLITS, dtype=torch.float32, device=q.device)
    splits = torch.full((rows,), _SGLANG_SPLITS, dtype=torch.int32, device=q.device)
    out = torch.empty_like(q)
    k, v = (x.flatten(0, 1) for x in (cache.k, cache.v))  # [slots, heads, head_dim]
    call = partial(
        attend, q, k, v, out, ends, torch.cat(slots), logits, lse, splits, _SGLANG_SPLITS,
        cache.head_dim**-0.5, k_descale, v_descale,
    )  # fmt: skip
    return _giving(out, call)


OURS = Backend("narrowkv", lambda inputs: inputs.prepare())
PEERS = (
    Backend("torch sdpa", _torch_sdpa, distributions=("torch",)),
    Backend("aiter", _aiter, "aiter", ("aiter", "amd-aiter")),
    Backend("flashinfer", _flashinfer, "flashinfer", ("flashinfer-python", "flashinfer")),
    Backend("vllm triton", _vllm, "vllm", ("vllm", "vllm-rocm")),
    Backend("sglang triton", _sglang, "sglang", ("sglang",)),
)
