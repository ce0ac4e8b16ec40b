"""Making plans of sparse attention: from formats and a device, or from the tensors of a call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from narrowkv.quant.device import BITS, NATIVE
from narrowkv.runtime.errors import check_choice, check_finite_float, check_instance, check_positive_int
from narrowkv.runtime.launch import Workspace, active_target, executor, is_compiled
from narrowkv.runtime.operation import Bounded
from narrowkv.runtime.targets import Target
from narrowkv.sparse_fp8.binding import RowsFormat
from narrowkv.sparse_fp8.config import MOST_HEADS, MOST_SPLITS, choose_config, specialised_config
from narrowkv.sparse_fp8.config_tuned import tuned_plan
from narrowkv.sparse_fp8.formats import QUERY_FORMATS, check_formats, num_heads_of, query_format
from narrowkv.sparse_fp8.kernels.rows import PagedForm
from narrowkv.sparse_fp8.launches import route_of
from narrowkv.sparse_fp8.layouts import HEAD_DIM, LAYOUTS
from narrowkv.sparse_fp8.operation import SparsePlan
from narrowkv.sparse_fp8.options import PLAIN_VALUES, SparseArguments
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource

__all__ = ["known_plan", "make_plan", "plan_for", "plan_sparse", "remember", "suits_specialised"]

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
    if check_positive_int("num_qo_heads", num_qo_heads) > MOST_HEADS:
        raise ValueError(f"num_qo_heads must be at most {MOST_HEADS}, got {num_qo_heads}")
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
    if num_splits is not None and check_positive_int("num_splits", num_splits) > MOST_SPLITS:
        raise ValueError(f"num_splits must be at most {MOST_SPLITS}, got {num_splits}")
    if (max_num_tokens is None) != (max_indices is None):
        raise ValueError("max_num_tokens and max_indices must both be given or both be None, got one")
    if workspace is not None and check_instance("workspace", workspace, Workspace) and max_num_tokens is None:
        raise ValueError(
            "workspace must be None without max_num_tokens and max_indices, which it is sized by"
        )
    place = torch.empty(0, device=device).device  # with the index of the current GPU
    mode = _resolve_mode(mode, prefix, extend)
    check_formats(mode, query, prefix, extend)
    target = active_target(place)
    plan = make_plan(
        mode, target, _compiles(place), place, num_qo_heads, query, prefix, extend, scale, has_sink,
        return_lse, num_splits, batch_invariant,
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
    compiled = is_compiled(q.data if isinstance(q, DSV4Rows) else q)
    plan = make_plan(
        mode, active_target(device), compiled, device, heads, query, formats[0], formats[1], scale,
        given.attn_sink is not None, given.return_lse or given.lse is not None, given.num_splits,
        given.batch_invariant,
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


def _compiles(device: torch.device) -> bool:
    return is_compiled(torch.empty(0, device=device))


@lru_cache(maxsize=_CACHED_PLANS)
def make_plan(
    mode: str, target: Target, compiled: bool, device: torch.device, num_heads: int, query: RowsFormat,
    prefix: RowsFormat | None, extend: RowsFormat | None, sm_scale: float, has_sink: bool, writes_lse: bool,
    num_splits: int | None, batch_invariant: bool, pages: PagedForm | None = None,
) -> SparsePlan:  # fmt: skip
    """A plan without maxima; calls that are not planned find theirs here."""
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
    plain = compiled and not batch_invariant and pages is None
    if plain and suits_specialised(mode, target, query, prefix, extend):
        specialised = specialised_config(
            target, kernel=kernel, num_heads=num_heads, layouts=layouts, two_sources=len(rows) > 1
        )
    return SparsePlan(
        mode=mode,
        target=target,
        device=device,
        num_qo_heads=num_heads,
        query=query,
        prefix=prefix,
        extend=extend,
        has_sink=has_sink,
        writes_lse=writes_lse,
        sm_scale=sm_scale,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        pages=pages,
        portable=choose_config(
            target,
            kernel=kernel,
            num_heads=num_heads,
            head_dim=query.head_dim,
            fp8_qk=fp8_qk,
            fp16_query=query.layout == "fp16",
            layouts=layouts,
            paged=pages is not None,
        ),
        specialised=specialised,
    )


def suits_specialised(
    mode: str, target: Target, query: RowsFormat, prefix: RowsFormat | None, extend: RowsFormat | None
) -> bool:
    """Whether the kernels for families of targets can read rows and a query that are stored in these ways.

    They copy 16 bytes at once. FP8 rows they widen to bf16, by power-of-two scales; a quantised query is
    widened first, whatever its layout. Those for Hopper and for gfx950 take FP8 that the hardware converts.
    Those for Hopper read both sources one way but for their pages, with the layout's own scales; those for
    CDNA take DeepSeek-V4's rows, in layouts and formats of their own.
    """
    rows = [each for each in (prefix, extend) if each is not None]
    if mode == "prepass":
        # Rows that are not widened to scratch memory are read from their source.
        rows = [each for each in rows if not each.is_quantized]
    if query.head_dim != HEAD_DIM or not all(each.aligned for each in rows):
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
    powers_of_two = layouts[0].scale != "fp32"
    return native and len(kinds) == 1 and own_scales and layouts[0].group in (32, 64) and powers_of_two
