"""Tensors of a prefill contract, and how the operations are called with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowkv.attn_prefill import plan_append, plan_prefill, prefill_append_reference
from narrowkv.attn_prefill.workloads import copy_cache
from narrowkv.cli.cases import DecodeCase, DecodeInputs, build
from narrowkv.cli.contracts import Contract, Shape
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.quant.quantize import quantize_per_tensor

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def contract_case(contract: Contract, shape: Shape, clean: bool) -> DecodeCase:
    """The paged cache of a contract: sequences of the full context, pages shuffled."""
    return DecodeCase(
        lens="+".join([str(shape.context)] * shape.batch),
        q_len=shape.q_len,
        kv_heads=shape.num_kv_heads,
        ratio=shape.gqa_ratio,
        head_dim=shape.head_dim,
        page_size=contract.page_size,
        q="bf16" if contract.q.startswith("fp8_") else contract.q,
        k=contract.k,
        v=contract.v,
        group=contract.scale_group,
        clean=clean,
    )


def paged_inputs(contract: Contract, shape: Shape, device: str = "cpu", clean: bool = False) -> DecodeInputs:
    """Queries over a paged cache, quantised if the contract asks for FP8 ones."""
    inputs = build(contract_case(contract, shape, clean), device)
    if not contract.q.startswith("fp8_"):
        return inputs
    stored, _ = quantize_per_tensor(inputs.q.float(), contract.q, descale=1.0)
    return replace(inputs, q=stored)


def ragged_inputs(contract: Contract, shape: Shape, device: str = "cpu", clean: bool = False) -> DecodeInputs:
    """The same with ragged metadata, as batch prefill is asked."""
    case = replace(contract_case(contract, shape, clean), table="ragged")
    table = build(case, device).table
    return replace(paged_inputs(contract, shape, device, clean), table=table)


def cu_seqlens_q(inputs: DecodeInputs) -> torch.Tensor:
    """Where each sequence's queries begin, `[batch + 1]` int32."""
    batch = inputs.table.batch_size
    q_len = inputs.q.shape[0] // batch
    return torch.arange(batch + 1, dtype=torch.int32, device=inputs.q.device) * q_len


def tensor(value: object) -> torch.Tensor:
    """`value`, which must be the one tensor that an operation gives."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"an operation must give a tensor here, got {type(value).__name__}")
    return value


def prepare_prefill(function: Any, inputs: DecodeInputs) -> Callable[[], torch.Tensor]:
    """A planned `batch_prefill`. It is not told that sequences have one query: decode has its own rows."""
    starts = cu_seqlens_q(inputs)
    plan = plan_prefill(inputs.q, inputs.cache, inputs.table, starts)
    return lambda: tensor(function(inputs.q, inputs.cache, inputs.table, starts, causal=True, plan=plan))


@dataclass(frozen=True)
class AppendInputs:
    """The tensors of a `prefill_append`: a chunk, and the cache that it attends to and is stored in."""

    q: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    cache: PagedKVCache
    table: PageTable
    starts: torch.Tensor

    def bytes_per_token(self) -> float:
        """Bytes of K and V that a token takes, over all heads."""
        return self.cache.bytes_per_token()

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` in fp32, on a copy of the cache."""
        o, lse = prefill_append_reference(
            self.q, self.k_new, self.v_new, copy_cache(self.cache), self.table, self.starts, return_lse=True
        )
        return o, lse


def append_inputs(contract: Contract, shape: Shape, device: str = "cpu", clean: bool = False) -> AppendInputs:
    """A chunk of `q_len` new tokens of each sequence over `context` older ones."""
    grown = replace(shape, context=shape.context + shape.q_len)
    inputs = build(contract_case(contract, grown, clean), device)
    lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
    table = PageTable.from_block_table(
        inputs.table.page_ids, cached_lens=lens, page_size=inputs.table.page_size
    )
    random = torch.Generator().manual_seed(1)
    size = (inputs.q.shape[0], shape.num_kv_heads, shape.head_dim)
    k_new, v_new = (torch.randn(size, generator=random).to(device, _DTYPES[contract.q]) for _ in range(2))
    return AppendInputs(inputs.q, k_new, v_new, inputs.cache, table, cu_seqlens_q(inputs))


def prepare_append(function: Any, inputs: AppendInputs) -> Callable[[], torch.Tensor]:
    """A planned `prefill_append`; every call stores the same tokens in the same places."""
    plan = plan_append(inputs.q, inputs.cache, inputs.table, inputs.starts)
    arguments = inputs.q, inputs.k_new, inputs.v_new, inputs.cache, inputs.table, inputs.starts
    return lambda: tensor(function(*arguments, plan=plan))
