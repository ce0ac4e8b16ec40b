"""Partial results that ranks have of all heads, merged on the ranks that own the heads."""

from __future__ import annotations

import torch

from narrowkv.context_parallel.exchange import COMMS, PARTIAL_DTYPES, ExchangeSizes, Partial
from narrowkv.context_parallel.groups import Group, group_of
from narrowkv.runtime.errors import check_choice, check_dtype, check_shape


def merge_over_ranks(
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    group: Group = None,
    comm: str = "a2a",
    partial_dtype: torch.dtype = torch.float32,
    sinks: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the ranks' results of attention to their own keys, of any attention; every rank must call it.

    Args:
        o: `[tokens, heads, head_dim]`, bf16, fp16 or fp32: this rank's results of all heads, each normalised,
            without sinks.
        lse: `[tokens, heads]` fp32, natural logarithms; -inf where this rank has no keys.
        group, comm, partial_dtype: as for `plan_cp_decode`, but "symm_mem", which needs a plan.
        sinks: `[heads / ranks]` of this rank's heads: a logit with value 0 in the denominator.
        out_dtype: of the result; default o's.

    Returns:
        `(o, lse)` over all ranks' keys, `[tokens, heads / ranks, head_dim]` and `[tokens, heads / ranks]`, of
        this rank's heads; the heads lie in rank order.

    Raises:
        TypeError, ValueError: for wrong shapes or dtypes, or heads that the ranks do not divide.

    Example:
        >>> o, lse = merge_over_ranks(o_partial, lse_partial, group=mesh["cp"])          # doctest: +SKIP
    """
    ranks = group_of(group)
    check_choice("comm", comm, [name for name in COMMS if name != "symm_mem"])
    check_dtype("o", o, (torch.bfloat16, torch.float16, torch.float32))
    check_shape("o", o, ("tokens", "heads", "head_dim"))
    check_dtype("lse", lse, torch.float32)
    check_shape("lse", lse, tuple(o.shape[:2]))
    if partial_dtype not in PARTIAL_DTYPES:
        raise ValueError(f"partial_dtype must be one of {PARTIAL_DTYPES}, got {partial_dtype}")
    tokens, heads, head_dim = o.shape
    if heads % ranks.size():
        raise ValueError(f"o must have heads that the {ranks.size()} ranks divide, got {heads}")
    sizes = ExchangeSizes(ranks.size(), ranks.rank(), tokens, heads, head_dim)
    if sinks is not None:
        check_shape("sinks", sinks, (sizes.own_heads,))
    partial = Partial(sizes, partial_dtype, comm, o.device)
    partial.o.copy_(o)
    partial.lse.copy_(lse)
    merged = o.new_empty(tokens, sizes.own_heads, head_dim, dtype=out_dtype or o.dtype)
    merged_lse = lse.new_empty(tokens, sizes.own_heads)
    if tokens:
        partial.start(ranks, False, None)
        partial.finish(0, sizes.own_heads, sinks, merged, merged_lse)
    return merged, merged_lse
