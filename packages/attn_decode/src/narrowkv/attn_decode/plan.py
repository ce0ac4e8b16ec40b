"""The host work of a decode step, done once: checks, configuration, workspace."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from narrowkv.attn_decode.config import DecodeConfig, DecodeShape, choose_config
from narrowkv.attn_decode.kernels import Workspace
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.page_table import check_table
from narrowkv.quant.errors import (
    check_dtype,
    check_last_dim_contiguous,
    check_positive_int,
    check_same_device,
)
from narrowkv.quant.launch import active_target
from narrowkv.quant.targets import Target

_HEAD_DIMS = (64, 80, 96, 128, 192, 256)


@dataclass(frozen=True)
class DecodePlan:
    """Everything about a decode step that does not depend on the sequences' lengths.

    A plan serves every layer and every step with the same shapes: `paged_decode` then only launches. It owns
    a workspace, so one plan must not serve two streams at once.

    Attributes:
        target: what the configuration was chosen for.
        shape: the shapes that it serves.
        k_format: storage format of K; v_format: of V.
        config: tile sizes and the split of the keys.
        workspace: partial results and arrival counters; None without splits.
    """

    target: Target
    shape: DecodeShape
    k_format: str
    v_format: str
    config: DecodeConfig
    device: torch.device
    workspace: Workspace | None = field(repr=False)

    def explain(self) -> str:
        """Why this configuration: one line for a person."""
        c = self.config
        how = {
            "none": "one program per sequence and head block",
            "uniform": f"{c.num_units // max(self.shape.batch, 1)} equal splits of every sequence",
            "even": f"an even share of all keys over {c.num_units} work units",
        }[c.split]
        merge = (
            ""
            if c.split == "none"
            else ", merged in the launch"
            if c.merge_in_launch
            else ", merged by a second kernel"
        )
        return (
            f"{self.target.name}, {c.kernel}: tiles of {c.block_m} rows x {c.block_n} keys, "
            f"{c.options.num_warps} warps, {c.options.num_stages} stages; {how}{merge}"
        )


def decode_shape(q: torch.Tensor, cache: PagedKVCache, page_table: PageTable) -> DecodeShape:
    """Checks what a decode call's metadata can tell without reading the device, and returns its shape.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    check_table(page_table, cache)
    check_dtype("q", q, (torch.bfloat16, torch.float16))
    if q.dim() != 3:
        raise ValueError(f"q must have shape [batch * q_len, num_qo_heads, head_dim], got {tuple(q.shape)}")
    check_last_dim_contiguous("q", q)
    num_tokens, num_qo_heads, head_dim = q.shape
    batch = page_table.batch_size
    if head_dim not in _HEAD_DIMS:
        raise ValueError(f"q must have head_dim in {_HEAD_DIMS}, got {head_dim}")
    if head_dim != cache.head_dim:
        raise ValueError(f"q must have the cache's head_dim {cache.head_dim}, got {head_dim}")
    if num_qo_heads % cache.num_kv_heads:
        raise ValueError(
            f"q must have a multiple of the cache's {cache.num_kv_heads} KV heads, "
            f"got num_qo_heads={num_qo_heads}"
        )
    if (batch == 0 and num_tokens) or (batch and num_tokens % batch):
        raise ValueError(f"q must have batch * q_len rows for batch {batch}, got {num_tokens}")
    check_same_device(q=q, k=cache.k, v=cache.v, page_table=page_table.page_ids)
    return DecodeShape(
        batch=batch,
        q_len=num_tokens // batch if batch else 1,
        num_qo_heads=num_qo_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=head_dim,
        page_size=cache.page_size,
        capacity=page_table.capacity,
        q_dtype=q.dtype,
    )


def plan_decode(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    *,
    max_seq_len: int | None = None,
    tokens_per_split: int | None = None,
    split: str | None = None,
    kernel: str | None = None,
) -> DecodePlan:
    """Plans decode for these shapes: checks the metadata, chooses the configuration, allocates the workspace.

    Nothing is read from the device. The plan holds for any lengths within the page table's capacity, so a
    captured graph can be replayed with other `seq_lens`.

    Args:
        q: `[batch * q_len, num_qo_heads, head_dim]`, bf16 or fp16; only its metadata is used.
        cache: the paged cache.
        page_table: the page table; its capacity bounds the lengths.
        max_seq_len: a tighter bound in tokens, if one is known; only speed depends on it.
        tokens_per_split: a fixed split size in tokens (rounded up to key tiles). Results of a sequence are
            then bitwise the same alone or in any batch.
        split: forces "none", "even" or "uniform".
        kernel: forces "native" (scaled matrix instructions on FP4 keys, Q as a sum of E4M3 terms: gfx950) or
            "decode" (the cache widened to 16 bits: everywhere). None takes native where it can.

    Returns:
        A `DecodePlan` for `paged_decode(..., plan=plan)`.

    Raises:
        TypeError, ValueError: for metadata that `paged_decode` would refuse.

    Example:
        >>> plan = plan_decode(q, cache, table)                 # doctest: +SKIP
        >>> o = paged_decode(q, cache, table, plan=plan)        # doctest: +SKIP
    """
    shape = decode_shape(q, cache, page_table)
    if max_seq_len is not None:
        check_positive_int("max_seq_len", max_seq_len)
    if split not in (None, "none", "even", "uniform"):
        raise ValueError(f"split must be 'none', 'even' or 'uniform', got {split!r}")
    target = active_target(q.device)
    k_format, v_format = cache.format.k, cache.format.v
    if tokens_per_split is None:
        bound = shape.capacity if max_seq_len is None else min(max_seq_len, shape.capacity)
        shape = replace(shape, capacity=bound)
    else:
        # Splits of a fixed size must be enough for any length that the table can hold.
        check_positive_int("tokens_per_split", tokens_per_split)
    config = choose_config(
        target, shape, k_format, v_format,
        scale_groups="token_head_group" in (cache.k_granularity, cache.v_granularity),
        kernel=kernel, split=split,
        tokens_per_split=tokens_per_split or 0,
    )  # fmt: skip
    return DecodePlan(target, shape, k_format, v_format, config, q.device, _allocate(config, shape, q.device))


def _allocate(config: DecodeConfig, shape: DecodeShape, device: torch.device) -> Workspace | None:
    if config.split == "none" or shape.batch == 0:
        return None
    row_blocks = -(-shape.q_len * shape.gqa_ratio // config.block_m)
    slots = config.num_units * shape.num_kv_heads * row_blocks
    block_d = 1 << (shape.head_dim - 1).bit_length()
    return Workspace(
        acc=torch.empty(slots * config.block_m * block_d, dtype=torch.float32, device=device),
        ml=torch.empty(slots * 2 * config.block_m, dtype=torch.float32, device=device),
        # The merging program puts its counter back to zero, so this is done once and not per call.
        arrived=torch.zeros(shape.batch * shape.num_kv_heads * row_blocks, dtype=torch.int32, device=device),
    )


def check_plan(
    plan: DecodePlan, shape: DecodeShape, cache: PagedKVCache, device: torch.device, target: Target
) -> None:
    """Refuses a plan that was made for another call, and says what is needed."""
    planned = plan.shape
    same = (
        (shape.batch, shape.q_len, shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
        == (
            planned.batch,
            planned.q_len,
            planned.num_qo_heads,
            planned.num_kv_heads,
            planned.head_dim,
            planned.page_size,
        )
        and (cache.format.k, cache.format.v) == (plan.k_format, plan.v_format)
        and device == plan.device
        and target.name == plan.target.name
    )
    if not same:
        raise ValueError(
            f"plan must be made for {shape} on {device} ({target.name}) with a {cache.format} "
            "cache, got a plan for "
            f"{planned} on {plan.device} ({plan.target.name}) with {plan.k_format}/{plan.v_format}: "
            "call plan_decode again"
        )
    if plan.config.tiles_per_split and shape.capacity > planned.capacity:
        raise ValueError(
            f"plan must cover {shape.capacity} tokens a sequence, got one for {planned.capacity}"
        )
