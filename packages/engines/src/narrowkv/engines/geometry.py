"""Which attention shapes narrowkv serves, answered in words."""

from __future__ import annotations

from narrowkv.attn_prefill.plan import HEAD_DIMS


def geometry_reasons(
    num_qo_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int | None = None
) -> list[str]:
    """Why attention of this shape cannot be served.

    Args:
        num_qo_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: channels of a query and of a key.
        v_head_dim: channels of a value; None if they are head_dim.

    Returns:
        Sentences; empty if the shape is served.

    Example:
        >>> geometry_reasons(96, 8, 128)
        []
        >>> geometry_reasons(8, 8, 72)
        ['head_dim is 72, and the kernels have 64, 80, 96, 128, 192, 256']
    """
    reasons = []
    if v_head_dim is not None and v_head_dim != head_dim:
        reasons.append(f"keys have {head_dim} channels and values {v_head_dim}; a cache has one head_dim")
    if head_dim not in HEAD_DIMS:
        reasons.append(f"head_dim is {head_dim}, and the kernels have {', '.join(map(str, HEAD_DIMS))}")
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        reasons.append(f"{num_qo_heads} query heads are no multiple of {num_kv_heads} KV heads")
    return reasons
