"""The host work of a prefill, done once: checks, the choice of kernel, workspace."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from narrowkv.attn_decode import DecodePlan, plan_decode
from narrowkv.attn_decode.kernels import Workspace
from narrowkv.attn_prefill.checks import check_values
from narrowkv.attn_prefill.config import (
    SCRATCH_BLOCK,
    PrefillConfig,
    PrefillShape,
    choose_append_config,
    choose_config,
)
from narrowkv.attn_prefill.kernels.arguments import Scratch
from narrowkv.paged_cache import PagedKVCache, PageTable
from narrowkv.paged_cache.append import EXPONENT_RULES
from narrowkv.paged_cache.page_table import check_table
from narrowkv.quant.formats import get_format
from narrowkv.runtime.errors import (
    check_choice,
    check_dtype,
    check_instance,
    check_int32,
    check_last_dim_contiguous,
    check_positive_int,
    check_same_device,
    check_shape,
)
from narrowkv.runtime.launch import active_target, is_compiled
from narrowkv.runtime.launch.gluon import has_gluon
from narrowkv.runtime.targets import Target

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
SCRATCH_LIMIT_BYTES = 4 * 2**30
_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True)
class PrefillPlan:
    """Everything about a prefill that does not depend on the values of lengths and page ids.

    A plan serves every layer with the same shapes. It owns scratch and workspace, so one plan must not serve
    two streams at once.

    Attributes:
        target: what the configuration was chosen for.
        shape: the shapes, and the bounds that the caller gave.
        q_dtype: of the query; k_format, v_format: of the cache.
        k_granularity, v_granularity: of the descales.
        config: the kernel, its tiles and splits.
        device: where the memory is.
        scratch: widened keys of the dense kernel, else None.
        workspace: partial results of splits, else None.
        decode: the plan of `paged_decode` where that serves, else None.
        exponent: of `plan_append`: how FP4 scales of appended tokens are chosen; None for a plan that does
            not append.
        batch_invariant: a sequence's result has the same bits alone and in any batch.
        arrivals: what a staged append counts (a pipelined one may fall back to it), else None.
    """

    target: Target
    shape: PrefillShape
    q_dtype: torch.dtype
    k_format: str
    v_format: str
    k_granularity: str
    v_granularity: str
    config: PrefillConfig
    device: torch.device
    scratch: Scratch | None = field(repr=False, default=None)
    workspace: Workspace | None = field(repr=False, default=None)
    decode: DecodePlan | None = field(repr=False, default=None)
    exponent: str | None = None
    batch_invariant: bool = False
    arrivals: tuple[torch.Tensor, torch.Tensor] | None = field(repr=False, default=None)

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        cache: PagedKVCache,
        target: Target,
        shape: PrefillShape,
        config: PrefillConfig,
    ) -> PrefillPlan:
        """A plan for queries and a cache like these, without its memory."""
        formats = (cache.format.k, cache.format.v, cache.k_granularity, cache.v_granularity)
        return cls(target, shape, q.dtype, *formats, config, q.device)

    def explain(self) -> str:
        """Why this configuration: one line for a person."""
        c = self.config
        if self.decode is not None:
            return f"paged_decode, because {c.why}: {self.decode.explain()}"
        warps = f"{c.options.num_warps} warps"
        if c.otherwise is not None:
            warps = "two warpgroups that attend and a warp that copies"
        splits = "" if c.num_splits == 1 else f", the keys of each shared by {c.num_splits} programs"
        pages = ", K from its pages where they allow it" if c.k_in_pages else ""
        return (
            f"{self.target.name}: {c.kernel}, because {c.why}; tiles of {c.block_m} rows x {c.block_n} keys, "
            f"{warps}, {c.options.num_stages} stages{splits}{pages}"
        )


def prefill_shape(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    before_append: bool = False,
) -> PrefillShape:
    """Checks what a call's metadata can tell without reading the device, and returns its shape.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    check_table(page_table, cache, before_append=before_append)
    check_dtype("q", q, _QUERY_DTYPES)
    check_shape("q", q, ("tokens", "num_qo_heads", "head_dim"))
    check_last_dim_contiguous("q", q)
    num_tokens, num_qo_heads, head_dim = q.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"q must have head_dim in {HEAD_DIMS}, got {head_dim}")
    if head_dim != cache.head_dim:
        raise ValueError(f"q must have the cache's head_dim {cache.head_dim}, got {head_dim}")
    if num_qo_heads % cache.num_kv_heads or num_qo_heads == 0:
        raise ValueError(
            f"q must have a multiple of the cache's {cache.num_kv_heads} KV heads, "
            f"got num_qo_heads={num_qo_heads}"
        )
    batch = page_table.batch_size
    check_int32("cu_seqlens_q", cu_seqlens_q)
    check_shape("cu_seqlens_q", cu_seqlens_q, (batch + 1,))
    if not cu_seqlens_q.is_contiguous():
        raise ValueError(f"cu_seqlens_q must be contiguous, got stride {cu_seqlens_q.stride(0)}")
    check_same_device(q=q, k=cache.k, v=cache.v, page_table=page_table.page_ids, cu_seqlens_q=cu_seqlens_q)
    if batch == 0 and num_tokens:
        raise ValueError(f"q must have no tokens for an empty batch, got {num_tokens}")
    capacity = page_table.capacity
    return PrefillShape(
        batch=batch,
        num_tokens=num_tokens,
        max_q_len=num_tokens,
        num_qo_heads=num_qo_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=head_dim,
        page_size=cache.page_size,
        max_seq_len=capacity,
        kv_tokens=capacity if page_table.kind == "ragged" else batch * capacity,
    )


def bounded(
    shape: PrefillShape, max_q_len: int | None, max_seq_len: int | None, max_kv_tokens: int | None
) -> PrefillShape:
    """The shape with the caller's tighter bounds."""
    bounds = {"max_q_len": max_q_len, "max_seq_len": max_seq_len, "kv_tokens": max_kv_tokens}
    for name, value in bounds.items():
        if value is not None:
            check_positive_int("max_kv_tokens" if name == "kv_tokens" else name, value)
            shape = replace(shape, **{name: min(getattr(shape, name), value)})
    return replace(shape, kv_tokens=min(shape.kv_tokens, shape.batch * shape.max_seq_len))


def plan_prefill(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    max_q_len: int | None = None,
    max_seq_len: int | None = None,
    max_kv_tokens: int | None = None,
    kernel: str | None = None,
    num_splits: int | None = None,
    scratch_limit_bytes: int = SCRATCH_LIMIT_BYTES,
    batch_invariant: bool = False,
    validate: bool = False,
) -> PrefillPlan:
    """Plans a prefill for these shapes: checks metadata, chooses the kernel, allocates scratch.

    Nothing is read from the device unless `validate`. The plan holds for any lengths within its bounds, so a
    captured graph can be replayed with other lengths.

    Args:
        q: `[tokens, num_qo_heads, head_dim]`; only its metadata is used.
        cache, page_table, cu_seqlens_q: as for `batch_prefill`.
        max_q_len: the most query tokens of one sequence, where known. 1 lets `paged_decode` serve the call.
        max_seq_len: the most keys of one sequence; default the table's capacity.
        max_kv_tokens: the most keys of all sequences together. It bounds the scratch of widened keys, which
            an engine's wide block table would otherwise make large.
        kernel: forces "dense", "fused" or "decode".
        num_splits: forces how many programs share a tile's keys.
        scratch_limit_bytes: the most scratch that the automatic choice may take.
        batch_invariant: choose kernel, tiles and splits by the model alone, so that a sequence's result has
            the same bits alone, in any batch and with any table width. The kernel is "fused" unless it is
            forced to be "dense", and there is one split unless `num_splits` says otherwise: long prompts take
            longer than by the kernel that the shapes would choose.
        validate: also look at the values of cu_seqlens_q, of the table, of descales and at whether the bounds
            above hold, which waits for the device.

    Returns:
        A `PrefillPlan` for `batch_prefill(..., plan=plan)`.

    Raises:
        TypeError, ValueError: for metadata that `batch_prefill` would refuse.
        UnsupportedError: for a forced kernel that cannot serve the call.

    Example:
        >>> plan = plan_prefill(q, cache, table, cu_seqlens_q, max_q_len=512)      # doctest: +SKIP
        >>> o = batch_prefill(q, cache, table, cu_seqlens_q, plan=plan)            # doctest: +SKIP
    """
    shape = bounded(prefill_shape(q, cache, page_table, cu_seqlens_q), max_q_len, max_seq_len, max_kv_tokens)
    if validate:
        check_values(shape, cache, page_table, cu_seqlens_q)
    target = active_target(q.device)
    needed = 4 * shape.scratch_rows(SCRATCH_BLOCK) * shape.num_kv_heads * shape.head_dim
    q_format = get_format(q.dtype)
    if batch_invariant and kernel is None:
        kernel = "fused"
    config = choose_config(
        target,
        shape.of_any_sequence() if batch_invariant else shape,
        (cache.format.k, cache.format.v),
        q_fp8=q_format.name if q_format.kind == "fp8" else None,
        scratch_fits=needed <= scratch_limit_bytes,
        can_decode=(
            q_format.kind == "float"
            and shape.num_tokens == shape.batch
            and shape.max_q_len == 1
            and not batch_invariant
        ),
        can_pipeline=can_pipeline(target, q, cache) and not batch_invariant,
        plain_keys=plain_keys(q.dtype, cache),
        kernel=kernel,
    )
    if num_splits is not None:
        config = with_splits(config, num_splits)
    plan = replace(PrefillPlan.of(q, cache, target, shape, config), batch_invariant=batch_invariant)
    if config.kernel == "decode":
        return replace(plan, decode=plan_decode(q, cache, page_table, max_seq_len=max_seq_len))
    if config.kernel == "dense":
        rows = shape.scratch_rows(config.scratch_block)
        plan = replace(
            plan,
            scratch=allocate_scratch(
                shape,
                rows,
                config.scratch_block,
                q.dtype,
                cache,
                q.device,
                in_units=False,
                pipelined=config.otherwise is not None,
                k_in_pages=config.k_in_pages,
                schedule=allocate_schedule(shape, config, q.device),
            ),
        )
    return replace(plan, workspace=allocate_workspace(shape, config, q.device))


def plan_append(
    q: torch.Tensor,
    cache: PagedKVCache,
    page_table: PageTable,
    cu_seqlens_q: torch.Tensor,
    *,
    fp8_compute: bool = False,
    exponent: str = "mse",
    max_q_len: int | None = None,
    max_seq_len: int | None = None,
    max_kv_tokens: int | None = None,
    kernel: str | None = None,
    num_splits: int | None = None,
    scratch_limit_bytes: int = SCRATCH_LIMIT_BYTES,
    validate: bool = False,
) -> PrefillPlan:
    """Plans a `prefill_append` for these shapes: checks metadata, chooses the kernel, allocates scratch.

    Args:
        q, cache, page_table, cu_seqlens_q: as for `prefill_append`; only their metadata is used.
        fp8_compute: multiply queries and old tokens on FP8 matrix units.
        exponent: FP4: how a group's scale is chosen; see `narrowkv.paged_cache.append`.
        max_q_len, max_seq_len, max_kv_tokens: bounds as for `plan_prefill`, new tokens included.
        kernel: forces "pipelined", "apart", "staged" or "paged".
        num_splits: forces how many programs share a tile's keys.
        scratch_limit_bytes: the most scratch that the automatic choice may take.
        validate: also look at the values of cu_seqlens_q, of the table and its room for the new tokens, of
            descales and at whether the bounds above hold, which waits for the device.

    Returns:
        A `PrefillPlan` for `prefill_append(..., plan=plan)`.

    Raises:
        TypeError, ValueError: for metadata that `prefill_append` would refuse.
        UnsupportedError: for a forced kernel that cannot serve the call.

    Example:
        >>> plan = plan_append(q, cache, table, cu_seqlens_q)                       # doctest: +SKIP
        >>> o = prefill_append(q, k, v, cache, table, cu_seqlens_q, plan=plan)      # doctest: +SKIP
    """
    shape = bounded(append_shape(q, cache, page_table, cu_seqlens_q), max_q_len, max_seq_len, max_kv_tokens)
    check_choice("exponent", exponent, EXPONENT_RULES)
    if validate:
        check_values(shape, cache, page_table, cu_seqlens_q)
    target = active_target(q.device)
    rows = SCRATCH_BLOCK * append_blocks(shape, SCRATCH_BLOCK, staged=True)
    config = choose_append_config(
        target,
        shape,
        (cache.format.k, cache.format.v),
        get_format(q.dtype).name,
        fp8_compute=fp8_compute,
        scratch_fits=4 * rows * shape.num_kv_heads * shape.head_dim <= scratch_limit_bytes,
        can_pipeline=can_pipeline(target, q, cache),
        kernel=kernel,
    )
    if num_splits is not None:
        config = with_splits(config, num_splits)
    plan = replace(
        PrefillPlan.of(q, cache, target, shape, config),
        workspace=allocate_workspace(shape, config, q.device),
        exponent=exponent,
    )
    if config.kernel == "paged":
        return plan
    # Programs leave the counters at zero, so this is done once and not per call.
    ready, left = torch.zeros(
        (2, max(shape.batch * shape.num_kv_heads, 1)), dtype=torch.int32, device=q.device
    )
    rows = config.scratch_block * append_blocks(shape, config.scratch_block, staged=True)
    ordered = config.kernel in ("pipelined", "apart")
    scratch = allocate_scratch(
        shape, rows, config.scratch_block, q.dtype, cache, q.device,
        in_units=True, pipelined=config.otherwise is not None, k_in_pages=config.k_in_pages,
        schedule=allocate_schedule(shape, config, q.device) if ordered else None,
    )  # fmt: skip
    return replace(plan, scratch=scratch, arrivals=(ready, left))


def with_splits(config: PrefillConfig, num_splits: int) -> PrefillConfig:
    """The configuration with the caller's number of splits."""
    config = replace(config, num_splits=check_positive_int("num_splits", num_splits))
    if config.otherwise is not None:
        config = replace(config, otherwise=replace(config.otherwise, num_splits=num_splits))
    return config


def append_shape(
    q: torch.Tensor, cache: PagedKVCache, page_table: PageTable, cu_seqlens_q: torch.Tensor
) -> PrefillShape:
    """`prefill_shape` for an append, which needs 16-bit queries and a block table."""
    check_dtype("q", q, (torch.bfloat16, torch.float16))
    return prefill_shape(q, cache, page_table, cu_seqlens_q, before_append=True)


def append_blocks(shape: PrefillShape, size: int, *, staged: bool) -> int:
    """A bound of the blocks of `size` keys that an append takes in one head: new ones, old ones if staged."""
    new = min(shape.num_tokens // size + shape.batch, shape.batch * -(-shape.max_q_len // size))
    return new + shape.scratch_rows(size) // size if staged else new


def per_key(cache: PagedKVCache) -> tuple[bool, bool]:
    """Whether K and V have descales that differ from key to key."""
    shared = ("tensor", "head", "sequence_head")
    return cache.k_granularity not in shared, cache.v_granularity not in shared


def plain_keys(q_dtype: torch.dtype, cache: PagedKVCache) -> bool:
    """Whether widened keys have no factors of their own, and Q is one term beside them."""
    return not any(per_key(cache)) and (cache.format.k != "bf16" or q_dtype != torch.float16)


def key_type(q_dtype: torch.dtype, k_format: str) -> torch.dtype:
    """The 16-bit type that keys are widened to: exact, and Q's own where it can be; bytes for FP8 queries."""
    if q_dtype.itemsize == 1:
        return torch.uint8
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(k_format, q_dtype)


def allocate_scratch(
    shape: PrefillShape,
    rows: int,
    block: int,
    q_dtype: torch.dtype,
    cache: PagedKVCache,
    device: torch.device,
    *,
    in_units: bool,
    pipelined: bool,
    k_in_pages: bool,
    schedule: torch.Tensor | None,
) -> Scratch:
    """Memory for every sequence's widened keys; `in_units` where a block's keys may be short of a factor.

    `pipelined` where the kernel for Hopper may attend, which must know of unusual blocks beforehand;
    `k_in_pages` where it may read K from its pages.
    """
    heads = shape.num_kv_heads
    sizes = (heads, rows, shape.head_dim)
    k_per_key, v_per_key = per_key(cache)
    # Keys that stay in their pages have a factor that tells of their V.
    has_v_units = in_units or k_in_pages or cache.format.v == "bf16"

    def numbers(width: int, wanted: bool) -> torch.Tensor | None:
        return torch.empty((heads, width), dtype=torch.float32, device=device) if wanted else None

    return Scratch(
        k=torch.empty(sizes, dtype=key_type(q_dtype, cache.format.k), device=device),
        v=torch.empty(sizes, dtype=torch.float16, device=device),
        k_factor=numbers(rows, k_per_key or k_in_pages),
        v_factor=numbers(rows, v_per_key),
        k_unit=numbers(rows // block, in_units),
        v_unit=numbers(rows // block, has_v_units),
        # The pipelined kernel puts both back to zero, so this is done once and not per call. What a call by
        # another kernel leaves costs the next pipelined one some time.
        unusual=torch.zeros(2, dtype=torch.int32, device=device) if has_v_units and pipelined else None,
        starts=torch.empty(max(shape.batch, 1), dtype=torch.int32, device=device),
        schedule=schedule,
        rows=rows,
        max_keys=shape.max_seq_len,
        key_blocks=shape.scratch_rows(block) // block,
    )


def can_pipeline(target: Target, q: torch.Tensor, cache: PagedKVCache) -> bool:
    """Whether `kernels/pipelined.py` serves the call: in Gluon for Hopper, it cannot be interpreted."""
    return (
        target.name == "sm90"
        and is_compiled(q)
        and has_gluon()
        and cache.head_dim in (64, 128)
        and not any(per_key(cache))
        and key_type(q.dtype, cache.format.k) == q.dtype
    )


def allocate_schedule(shape: PrefillShape, config: PrefillConfig, device: torch.device) -> torch.Tensor:
    """Memory for the order of tiles; see `scheduled_tile`."""
    num_tiles = max(shape.row_tiles(c.block_m) for c in (config, config.otherwise or config))
    return torch.empty((max(num_tiles, 1), 8), dtype=torch.int32, device=device)


def allocate_workspace(shape: PrefillShape, config: PrefillConfig, device: torch.device) -> Workspace | None:
    """Memory for the partial results of splits."""
    configs = [c for c in (config, config.otherwise) if c is not None and c.num_splits > 1]
    if not configs:
        return None
    slots = max(shape.row_tiles(c.block_m) * shape.num_kv_heads * c.num_splits * c.block_m for c in configs)
    # The pipelined kernel counts halves of a tile.
    units = 2 * max(shape.row_tiles(c.block_m) * shape.num_kv_heads for c in configs)
    block_d = 1 << (shape.head_dim - 1).bit_length()
    return Workspace(
        acc=torch.empty(slots * block_d, dtype=torch.float32, device=device),
        ml=torch.empty(slots * 2, dtype=torch.float32, device=device),
        # The merging program puts its counter back to zero, so this is done once and not per call.
        arrived=torch.zeros(max(units, 1), dtype=torch.int32, device=device),
    )


def planned_shape(plan: PrefillPlan, shape: PrefillShape) -> PrefillShape:
    """A call's shape with the bounds that its plan was made with."""
    bounds = {name: getattr(plan.shape, name) for name in ("max_q_len", "max_seq_len", "kv_tokens")}
    return replace(shape, **bounds)


def check_plan(
    plan: PrefillPlan,
    shape: PrefillShape,
    q: torch.Tensor,
    cache: PagedKVCache,
    target: Target,
    *,
    maker: str,
) -> None:
    """Refuses a plan that was made for another call, and says what is needed."""
    check_instance("plan", plan, PrefillPlan)
    made = (
        replace(plan.shape, max_q_len=0, max_seq_len=0, kv_tokens=0),
        plan.q_dtype,
        (plan.k_format, plan.v_format, plan.k_granularity, plan.v_granularity),
        plan.device,
        plan.target.name,
        "plan_prefill" if plan.exponent is None else "plan_append",
    )
    called = (
        replace(shape, max_q_len=0, max_seq_len=0, kv_tokens=0),
        q.dtype,
        (cache.format.k, cache.format.v, cache.k_granularity, cache.v_granularity),
        q.device,
        target.name,
        maker,
    )
    if made != called:
        raise ValueError(f"plan must be made for {called}, got a plan for {made}: call {maker} again")
