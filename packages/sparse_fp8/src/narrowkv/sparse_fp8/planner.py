"""Making plans of sparse attention, from formats and a device, or from the tensors of a call; their modes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from narrowkv.quant.formats import BITS, NATIVE
from narrowkv.runtime.errors import (
    UnsupportedError,
    check_choice,
    check_dtype,
    check_finite_float,
    check_instance,
    check_positive_int,
    check_shape,
)
from narrowkv.runtime.launch import Workspace, active_target, executor, is_compiled
from narrowkv.runtime.operation import Bounded
from narrowkv.runtime.targets import Target
from narrowkv.sparse_fp8.binding import QUERY_FORMATS, RowsFormat
from narrowkv.sparse_fp8.config import (
    MOST_HEADS,
    check_heads,
    check_splits,
    choose_config,
    specialised_config,
)
from narrowkv.sparse_fp8.config_tuned import tuned_plan
from narrowkv.sparse_fp8.kernels.rows import PagedForm
from narrowkv.sparse_fp8.launches import route_of
from narrowkv.sparse_fp8.layouts import HEAD_DIM, LAYOUTS, ROPE_DIM
from narrowkv.sparse_fp8.operation import SparsePlan
from narrowkv.sparse_fp8.options import PLAIN_VALUES, SparseArguments
from narrowkv.sparse_fp8.rows import DSV4Rows, query_heads
from narrowkv.sparse_fp8.sources import KVSource

__all__ = [
    "MODES",
    "ModeChoice",
    "choose_mode",
    "known_plan",
    "make_plan",
    "plan_for",
    "plan_sparse",
    "query_format",
    "remember",
    "suits_specialised",
]

_CACHED_PLANS = 256


def plan_sparse(
    *,
    num_qo_heads: int,
    prefix: RowsFormat | None,
    extend: RowsFormat | None = None,
    query: str | RowsFormat = "bf16",
    device: torch.device | str,
    mode: str = "auto",
    sm_scale: float | None = None,
    has_sink: bool = False,
    return_lse: bool = False,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    max_num_tokens: int | None = None,
    max_indices: int | None = None,
    workspace: Workspace | None = None,
) -> SparsePlan:
    """Plans sparse attention from formats and a device, before there are tensors.

    Args:
        num_qo_heads: query heads, 1 to 128.
        prefix, extend: how the rows of each source are stored, `RowsFormat` (of rows that are there:
            `KVSource.bound.format`); None for a source that is absent.
        query: "bf16" or "fp16", or the `RowsFormat` of a query in `DSV4Rows`.
        device: where all tensors lie.
        mode: "16bit" for 16-bit rows; "fused" or "prepass" for FP8 rows, see `sparse_prefill_fp8`; "auto" is
            "16bit" over 16-bit rows, "prepass" where one source is 16-bit, else "fused".
        sm_scale: softmax scale, default `head_dim ** -0.5`.
        has_sink: whether calls have an `attn_sink`.
        return_lse: whether calls write the log-sum-exp.
        num_splits, batch_invariant: as for `sparse_decode`.
        max_num_tokens, max_indices: the largest call: tokens, and indices of each source. Both or neither;
            without them a call allocates scratch and partial results itself.
        workspace: memory to use, at least `workspace_bytes()`; None makes one. Plans that never run at the
            same time may share one.

    Returns:
        A plan; `plan.run(q, prefix, extend)` attends.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
        UnsupportedError: what no kernel serves.

    Example:
        >>> rows = RowsFormat("packed584", page_size=64, format="fp8_e4m3fn")
        >>> plan = plan_sparse(num_qo_heads=16, prefix=rows, device="cpu", max_num_tokens=8, max_indices=64)
        >>> plan.mode, plan.workspace_bytes() <= plan.workspace.num_bytes
        ('fused', True)
    """
    check_heads(num_qo_heads)
    check_choice("mode", mode, ("auto", "16bit", "fused", "prepass"))
    formats = {"prefix": prefix, "extend": extend}
    if not isinstance(query, str):
        formats["query"] = query
    for name, rows in formats.items():
        if rows is not None and not isinstance(rows, RowsFormat):
            raise TypeError(f"{name} must be a RowsFormat, got {type(rows).__name__}")
    if isinstance(query, str):
        check_choice("query", query, ("bf16", "fp16"))
        given = prefix if prefix is not None else extend
        query = QUERY_FORMATS[query, HEAD_DIM if given is None else given.head_dim]
    scale = query.head_dim**-0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    check_splits(num_splits)
    if (max_num_tokens is None) != (max_indices is None):
        raise ValueError("max_num_tokens and max_indices must both be given or both be None, got one")
    if workspace is not None and check_instance("workspace", workspace, Workspace) and max_num_tokens is None:
        raise ValueError(
            "workspace must be None without max_num_tokens and max_indices, which it is sized by"
        )
    place = torch.empty(0, device=device).device  # with the index of the current GPU
    mode = _resolve_mode(mode, prefix, extend)
    check_formats(mode, query, prefix, extend)
    plan = make_plan(
        mode=mode, target=active_target(place), compiled=is_compiled(torch.empty(0, device=place)),
        device=place, num_qo_heads=num_qo_heads, query=query, prefix=prefix, extend=extend, sm_scale=scale,
        has_sink=has_sink, writes_lse=return_lse, num_splits=num_splits, batch_invariant=batch_invariant,
    )  # fmt: skip
    plan = tuned_plan(plan, max_num_tokens, max_indices)
    if max_num_tokens is None or max_indices is None:
        return plan
    plan = replace(
        plan,
        max_num_tokens=check_positive_int("max_num_tokens", max_num_tokens),
        max_indices=check_positive_int("max_indices", max_indices),
    )
    return plan.with_workspace(workspace)


def _resolve_mode(mode: str, prefix: RowsFormat | None, extend: RowsFormat | None) -> str:
    given = [rows for rows in (prefix, extend) if rows is not None]
    if mode != "auto" or not given:
        return mode
    narrow = [rows.is_quantized for rows in given]
    return "fused" if all(narrow) else "prepass" if any(narrow) else "16bit"


def plan_for(given: SparseArguments, mode: str) -> SparsePlan:
    """The plan of a call that was not planned, from a small cache.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given.
    """
    q, prefix, extend, sm_scale = given.q, given.prefix, given.extend, given.sm_scale
    query = query_format(q)
    formats: list[RowsFormat | None] = []
    for name, source in (("prefix", prefix), ("extend", extend)):
        if source is not None and not isinstance(source, KVSource):
            raise TypeError(f"{name} must be a KVSource or None, got {type(source).__name__}")
        formats.append(None if source is None else source.format)
    first = prefix if prefix is not None else extend
    if first is None:
        raise ValueError("prefix or extend must be a KVSource, got None for both")
    heads = num_heads_of(q, first.num_tokens, given.num_qo_heads)
    if mode == "auto":
        mode = _resolve_mode(mode, formats[0], formats[1])
    check_formats(mode, query, formats[0], formats[1])
    scale = query.head_dim**-0.5 if sm_scale is None else check_finite_float("sm_scale", sm_scale)
    device = q.device
    plan = make_plan(
        mode=mode, target=active_target(device),
        compiled=is_compiled(q.data if isinstance(q, DSV4Rows) else q), device=device, num_qo_heads=heads,
        query=query, prefix=formats[0], extend=formats[1], sm_scale=scale,
        has_sink=given.attn_sink is not None, writes_lse=given.return_lse or given.lse is not None,
        num_splits=given.num_splits, batch_invariant=given.batch_invariant,
    )  # fmt: skip
    return tuned_plan(plan, first.num_tokens, max(x.nnz for x in (prefix, extend) if x is not None))


# Plans of calls that were not planned.
_known: Bounded[SparsePlan] = Bounded(1024)


def known_plan(operation: str, given: SparseArguments) -> tuple[Any, SparsePlan | None]:
    """What calls like this one are remembered by, and the plan that `remember` kept for it.

    Everything that a mode and a plan depend on is part of the key, which is None for wrong classes.
    """
    q = given.q
    try:
        running = executor()
        query = (
            (q.shape[1:], q.dtype, q.requires_grad) if isinstance(q, torch.Tensor)
            else (q.bound.format, q.num_rows)
        )  # fmt: skip
        sources = tuple(
            None if source is None else (source.format_id, source.num_tokens, source.nnz, source.num_rows)
            for source in (given.prefix, given.extend)
        )
        writes = given.return_lse or given.lse is not None
        options = (given[PLAIN_VALUES], type(given.num_splits), given.attn_sink is None, writes)
        target = None if running is None else running.target.name
        key = (operation, query, q.device, sources, options, target)
        return key, _known.get(key)
    except (AttributeError, TypeError):
        return None, None


def remember(key: Any, plan: SparsePlan) -> SparsePlan:
    """Keeps the plan for calls with this key."""
    return plan if key is None else _known.keep(key, plan)


@lru_cache(maxsize=_CACHED_PLANS)
def make_plan(
    *, mode: str, target: Target, compiled: bool, query: RowsFormat, prefix: RowsFormat | None,
    extend: RowsFormat | None, num_qo_heads: int, batch_invariant: bool, pages: PagedForm | None = None,
    **settings: Any,
) -> SparsePlan:  # fmt: skip
    """A plan without maxima; calls that are not planned find theirs here.

    `compiled`: whether kernels are, and not interpreted. The others are attributes of `SparsePlan`.
    """
    kernel = "fused" if mode == "fused" else "16bit"
    rows = [each for each in (prefix, extend) if each is not None]
    layouts = [LAYOUTS[each.layout] for each in rows if each.is_quantized and kernel == "fused"]
    fp8_qk = False
    if kernel == "fused" and query.is_quantized:
        # FP8 by FP8 takes one FP8 type, and a scale for each of the seven tiles of DeepSeek-V4's rows.
        kinds = {(each.format, each.scale_group, route_of(target, each)) for each in (*rows, query)}
        v4_rows = query.scale_group == 64 and LAYOUTS[query.layout].quantized < HEAD_DIM
        fp8_qk = len(kinds) == 1 and v4_rows and route_of(target, query) != BITS
    specialised = None
    # The kernels for CDNA read no page table.
    plain = compiled and not batch_invariant and (pages is None or not target.is_amd)
    if plain and suits_specialised(mode, target, query, prefix, extend):
        specialised = specialised_config(
            target,
            kernel=kernel,
            num_heads=num_qo_heads,
            head_dim=query.head_dim,
            layouts=layouts,
            two_sources=len(rows) > 1,
        )
    portable = choose_config(
        target, kernel=kernel, num_heads=num_qo_heads, head_dim=query.head_dim, fp8_qk=fp8_qk,
        fp16_query=query.layout == "fp16", layouts=layouts, paged=pages is not None,
    )  # fmt: skip
    return SparsePlan(
        mode=mode, target=target, num_qo_heads=num_qo_heads, query=query, prefix=prefix, extend=extend,
        batch_invariant=batch_invariant, pages=pages, portable=portable, specialised=specialised, **settings,
    )  # fmt: skip


def suits_specialised(
    mode: str, target: Target, query: RowsFormat, prefix: RowsFormat | None, extend: RowsFormat | None
) -> bool:
    """Whether the kernels for families of targets can read rows and a query that are stored in these ways.

    They copy 16 bytes at once. FP8 rows they widen to bf16, by power-of-two scales, or by none where scales
    have more bits: those multiply products. A quantised query is widened first, whatever its layout. Those
    for Hopper and for gfx950 take FP8 that the hardware converts. Those for Hopper read both sources one way
    but for their pages, with the layout's own scales; those for CDNA take DeepSeek-V4's rows, in layouts and
    formats of their own.
    """
    rows = [each for each in (prefix, extend) if each is not None]
    if mode == "prepass":
        # Rows that are not widened to scratch memory are read from their source.
        rows = [each for each in rows if not each.is_quantized]
    if (target.is_amd and query.head_dim != HEAD_DIM) or not all(each.aligned for each in rows):
        return False
    if mode != "fused":
        return query.is_quantized or query.aligned
    if query.dtype != torch.bfloat16 or not (query.is_quantized or query.aligned):
        return False
    layouts = [LAYOUTS[each.layout] for each in rows]
    native = all(route_of(target, each) == NATIVE for each in rows)
    if target.is_amd:
        return all(each.quantized < HEAD_DIM for each in layouts) and (native or target.name == "gfx942")
    kinds = {(each.quantized, each.values, each.scale, each.scale_copies) for each in layouts}
    own_scales = all(each.scale_group == layout.group for each, layout in zip(rows, layouts, strict=True))
    alike = native and own_scales and len(kinds) == 1
    first = layouts[0]
    if first.head_dim > HEAD_DIM or first.has_one_scale:
        return alike and len(rows) == 1 and first.scale in ("tensor", "fp32")
    return alike and first.group in (32, 64) and first.scale != "fp32"


def check_formats(mode: str, query: RowsFormat, prefix: RowsFormat | None, extend: RowsFormat | None) -> None:
    """Refuses sources and queries that a mode cannot attend together.

    Raises:
        TypeError, ValueError, UnsupportedError: naming the argument, what was expected and what was given.
    """
    named = {name: rows for name, rows in (("prefix", prefix), ("extend", extend)) if rows is not None}
    if not named:
        raise ValueError("prefix or extend must be given, got None for both")
    if mode == "16bit":
        if query.is_quantized:
            raise TypeError("q must be a bf16 or fp16 tensor over 16-bit rows, got DSV4Rows")
        for name, rows in named.items():
            if rows.is_quantized:
                raise UnsupportedError(
                    f"{name}.rows must be a bf16 or fp16 tensor here, got DSV4Rows: use sparse_prefill_fp8"
                )
    elif not any(rows.is_quantized for rows in named.values()):
        raise UnsupportedError(
            "prefix.rows or extend.rows must be DSV4Rows here, got 16-bit rows: use sparse_prefill"
        )
    for name, rows in named.items():
        if rows.head_dim != query.head_dim:
            raise ValueError(
                f"{name}.rows must have as many columns as q, {query.head_dim}, got {rows.head_dim}"
            )
    if mode == "fused":
        check_fused(named)
    for name, rows in named.items():
        if not rows.is_quantized and rows.dtype != query.dtype:
            raise TypeError(f"{name}.rows must have the dtype of q, {query.dtype}, got {rows.dtype}")


def check_fused(rows: dict[str, RowsFormat]) -> None:
    """Refuses 16-bit rows, which the fused kernels do not read.

    Raises:
        UnsupportedError: naming the source and what works.
    """
    for name, stored in rows.items():
        if not stored.is_quantized:
            raise UnsupportedError(
                f"{name}.rows must be DSV4Rows for the fused kernel, got 16-bit rows: quantise them with "
                "DSV4Rows.quantize, or use mode='prepass' of sparse_prefill_fp8, which takes both kinds"
            )


def query_format(q: torch.Tensor | DSV4Rows) -> RowsFormat:
    """How a query is stored; the addresses of a 16-bit one are looked at in each call.

    Raises:
        TypeError: q is neither a bf16 or fp16 tensor nor `DSV4Rows`.
    """
    if isinstance(q, DSV4Rows):
        return q.bound.format
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q must be a torch.Tensor or DSV4Rows, got {type(q).__name__}")
    check_dtype("q", q, (torch.bfloat16, torch.float16))
    check_shape("q", q, ("num_tokens", "num_qo_heads", _query_columns(q)))
    return QUERY_FORMATS["bf16" if q.dtype is torch.bfloat16 else "fp16", q.shape[-1]]


def _query_columns(q: torch.Tensor) -> int:
    """The columns that a query must have: 512, or 576 if it has those."""
    wide = HEAD_DIM + ROPE_DIM
    return wide if q.shape[-1:] == (wide,) else HEAD_DIM


def num_heads_of(q: torch.Tensor | DSV4Rows, tokens: int, num_qo_heads: int | None) -> int:
    """The query heads of a call that was not planned.

    Raises:
        ValueError: the query cannot hold `tokens` times any supported number of heads.
    """
    if isinstance(q, DSV4Rows):
        heads = query_heads(q, tokens, num_qo_heads)
        spare = q.num_rows - heads * tokens
        if not 1 <= heads <= MOST_HEADS or not 0 <= spare < (1 if num_qo_heads is None else q.page_size):
            raise ValueError(
                f"q must hold num_tokens * num_qo_heads rows, num_qo_heads from 1 to {MOST_HEADS}, for "
                f"{tokens} tokens; got {q.num_rows} rows and num_qo_heads={num_qo_heads}"
            )
        return heads
    if not 1 <= q.shape[1] <= MOST_HEADS:
        raise ValueError(f"q must have 1 to {MOST_HEADS} heads, got {q.shape[1]}")
    if num_qo_heads not in (None, q.shape[1]):
        raise ValueError(f"num_qo_heads must be {q.shape[1]} as q has it, got {num_qo_heads}")
    return q.shape[1]


MODES = ("auto", "fused", "prepass")

# NVIDIA: up to so many heads, how often rows must be read on average for expanding them first to be faster.
# Time of fused over that of prepass, 65536 rows, by how often each row is read:
_READINGS_ON_NVIDIA = (
    # 16 heads, which wait for the widening: H200 0.80 with 4, 0.99 with 8, 1.20 with 32; H100 0.80 with 8,
    # 0.95 and 1.01 with 32. 32 heads: H100 0.51 and 0.76 with 4, 1.06 with 16.
    (32, 10),
    # H200 0.96 with 8, 1.02 and 1.05 with 32, 1.07 with 128.
    (64, 32),
    # 128 heads, which widen a row twice: H200 0.97 with 8, 1.01 with 16; H100 0.94 with 8, 1.00 and 1.02
    # with 32.
    (MOST_HEADS, 12),
)
# AMD, where attention over 16-bit rows is faster, the same for all heads. Model (`narrowkv inspect model
# --case sparse:...`), clocks of a compute unit for a row of the loop, fused and over 16-bit rows: gfx942, 64
# heads 182 and 143, 32 heads 162 and 132, 16 heads 224 and 188; gfx950, 64 heads 88 and 95, 32 heads 71 and
# 67, 16 heads 161 and 103. Expanding a row moves 1.6 KB, which takes 200 clocks of a compute unit's share of
# HBM on gfx942 and 127 on gfx950.
_READINGS_ON_AMD = {"gfx950": 3}
_READINGS_ON_OTHER_AMD = 6


@dataclass(frozen=True)
class ModeChoice:
    """The mode that `mode="auto"` picks, and why.

    Attributes:
        mode: "fused" or "prepass".
        why: one sentence.
    """

    mode: str
    why: str


def _choose_on_nvidia(
    q: torch.Tensor | DSV4Rows,
    query: RowsFormat,
    sources: dict[str, KVSource],
    target: Target,
    num_heads: int,
) -> ModeChoice:
    formats = {name: source.format for name, source in sources.items()}
    config = None
    if (
        is_compiled(q if isinstance(q, torch.Tensor) else q.data)
        and suits_specialised("fused", target, query, formats.get("prefix"), formats.get("extend"))
        and all(source.int32_lists for source in sources.values())
    ):
        config = specialised_config(target, kernel="fused", num_heads=num_heads)
    if config is None:
        return ModeChoice(
            "prepass",
            "no kernel for Hopper widens these rows, and the plain one takes more than twice the 16-bit "
            "kernel's time (measured on an H200)",
        )
    readings = next(count for most, count in _READINGS_ON_NVIDIA if num_heads <= most)
    if not _read_as_often(sources, readings):
        return ModeChoice(
            "fused",
            f"rows are read less than {readings} times each on average, too seldom to expand them first "
            "(measured at 16 to 128 heads)",
        )
    return ModeChoice(
        "prepass",
        f"rows are read {readings} times each or more on average, which pays for expanding them "
        "(measured at 16 to 128 heads)",
    )


def _read_as_often(sources: dict[str, KVSource], readings: int) -> bool:
    """Whether each row is read at least `readings` times on average."""
    named = sum(source.nnz for source in sources.values())
    return named >= readings * sum(min(source.num_rows, source.nnz) for source in sources.values())


def _choose_on_amd(sources: dict[str, KVSource], target: Target, num_heads: int) -> ModeChoice:
    """Chooses by how often a row is read; see `_READINGS_ON_AMD`."""
    v4_rows = all(LAYOUTS[source.format.layout].quantized < HEAD_DIM for source in sources.values())
    if (
        target.name == "gfx950"
        and v4_rows
        and specialised_config(target, kernel="fused", num_heads=num_heads)
    ):
        return ModeChoice("fused", "it is about as fast as attention over 16-bit rows (a model)")
    readings = _READINGS_ON_AMD.get(target.name, _READINGS_ON_OTHER_AMD)
    if _read_as_often(sources, readings):
        return ModeChoice(
            "prepass", f"rows are read {readings} times each or more, which pays for expanding them (a model)"
        )
    return ModeChoice(
        "fused", f"rows are read less than {readings} times each, too seldom to expand them first (a model)"
    )


def choose_mode(
    q: torch.Tensor | DSV4Rows,
    prefix: KVSource | None,
    extend: KVSource | None = None,
    *,
    mode: str = "auto",
    num_qo_heads: int | None = None,
) -> ModeChoice:
    """The mode that `sparse_prefill_fp8` runs in with these arguments, and why.

    Args:
        q, prefix, extend: as for `sparse_prefill_fp8`; only metadata is looked at.
        mode: "auto", or a mode that is forced.
        num_qo_heads: as for `sparse_prefill_fp8`.

    Raises:
        ValueError: an unknown mode.
        UnsupportedError: mode "fused" over 16-bit rows. What else is wrong the call itself refuses.

    Example:
        >>> import torch
        >>> rows = DSV4Rows.quantize(torch.zeros(4, 512))
        >>> one = torch.tensor([0, 1], dtype=torch.int32)
        >>> choose_mode(torch.zeros(1, 16, 512).bfloat16(), KVSource(rows, one, one[:1])).mode
        'fused'
    """
    check_choice("mode", mode, MODES)
    if mode == "prepass":
        return ModeChoice(mode, "asked for")
    query = query_format(q)
    sources = {name: x for name, x in (("prefix", prefix), ("extend", extend)) if x is not None}
    for name, source in sources.items():
        if not isinstance(source, KVSource):
            raise TypeError(f"{name} must be a KVSource or None, got {type(source).__name__}")
    if not sources:
        raise ValueError("prefix or extend must be a KVSource, got None for both")
    formats = [source.format for source in sources.values()]
    if mode == "fused":
        check_fused({name: source.format for name, source in sources.items()})
        return ModeChoice(mode, "asked for")
    if not all(rows.is_quantized for rows in formats):
        return ModeChoice("prepass", "one source is 16-bit, which the fused kernel does not read")
    if any(LAYOUTS[rows.layout].scales_stay_apart for rows in formats):
        return ModeChoice("fused", "a prepass would round the products with fp32 scales to bf16")
    target = active_target(q.device)
    tokens = next(iter(sources.values())).num_tokens
    heads = q.shape[1] if isinstance(q, torch.Tensor) else query_heads(q, tokens, num_qo_heads)
    if target.is_nvidia:
        return _choose_on_nvidia(q, query, sources, target, heads)
    in_software = [rows.format for rows in formats if route_of(target, rows) == BITS]
    if target.is_amd and in_software and (heads <= 16 or target.name == "gfx950"):
        return ModeChoice(
            "prepass",
            f"{target.name} converts these {in_software[0]} bytes in software, so each row once and not each "
            "time it is read (a model: counted instructions)",
        )
    if target.is_amd:
        return _choose_on_amd(sources, target, heads)
    return ModeChoice(
        "fused", "it needs no scratch, gathers half the bytes and converts in hardware (a model: not timed)"
    )
