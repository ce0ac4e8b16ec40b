"""CSR rows for sparse attention, made on the device without reading it: top-k tables, windows, both joined.

Example:
    >>> import torch
    >>> table = torch.tensor([[4, 2, -1], [7, -1, -1]], dtype=torch.int32)
    >>> csr_from_topk(table)
    (tensor([0, 3, 6], dtype=torch.int32), tensor([ 4,  2, -1,  7, -1, -1], dtype=torch.int32))
    >>> csr_from_topk(table, compact=True)
    (tensor([0, 2, 3], dtype=torch.int32), tensor([4, 2, 7], dtype=torch.int32))
"""

from __future__ import annotations

import torch

from narrowkv.runtime.errors import (
    check_dtype,
    check_int32,
    check_positive_int,
    check_same_device,
    check_shape,
)

__all__ = ["compressed_topk", "concat_csr", "csr_from_topk", "sliding_window"]

Csr = tuple[torch.Tensor, torch.Tensor]
_I32 = torch.int32


def _rows(name: str, table: torch.Tensor) -> None:
    check_int32(name, table)
    check_shape(name, table, ("num_tokens", "topk"))


def csr_from_topk(topk: torch.Tensor, lengths: torch.Tensor | None = None, *, compact: bool = False) -> Csr:
    """A CSR from a table of row numbers padded with -1.

    Args:
        topk: int32 `[num_tokens, topk]`; -1 is padding, anywhere in a row.
        lengths: int32 `[num_tokens]`: entries of a row from there on are padding too, whatever they hold.
        compact: leave the padding out, so that rows are as long as they have entries. This reads the total
            on the host (it waits for the device). Without it rows are `topk` long and keep their -1.

    Returns:
        `(indptr, indices)`, int32.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or devices.
    """
    _rows("topk", topk)
    tokens, width = topk.shape
    valid = topk >= 0
    if lengths is not None:
        check_int32("lengths", lengths)
        check_shape("lengths", lengths, (tokens,))
        check_same_device(topk=topk, lengths=lengths)
        valid &= torch.arange(width, device=topk.device)[None] < lengths[:, None]
    if compact:
        indptr = torch.zeros(tokens + 1, dtype=_I32, device=topk.device)
        indptr[1:] = valid.sum(-1).cumsum(0)
        return indptr, topk[valid]
    indptr = torch.arange(0, tokens * width + 1, max(width, 1), dtype=_I32, device=topk.device)
    if width == 0:
        indptr = torch.zeros(tokens + 1, dtype=_I32, device=topk.device)
    return indptr, torch.where(valid, topk, -1).reshape(-1)


def sliding_window(positions: torch.Tensor, slots: torch.Tensor, *, window: int = 128) -> torch.Tensor:
    """The rows of the last `window` tokens up to and including each query token, oldest first.

    Args:
        positions: int32 `[num_tokens]`: where each query token stands in its sequence, from 0.
        slots: int32 `[num_tokens, length]` or `[length]` (shared): the row of each position of the sequence.
        window: how many tokens; 128 in DeepSeek-V4.

    Returns:
        int32 `[num_tokens, window]`, -1 where the sequence is shorter.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or devices.

    Example:
        >>> sliding_window(torch.tensor([1], dtype=torch.int32), torch.arange(9, dtype=torch.int32), window=3)
        tensor([[-1,  0,  1]], dtype=torch.int32)
    """
    check_int32("positions", positions)
    check_shape("positions", positions, ("num_tokens",))
    check_int32("slots", slots)
    check_positive_int("window", window)
    check_same_device(positions=positions, slots=slots)
    if slots.dim() not in (1, 2) or (slots.dim() == 2 and slots.shape[0] != positions.shape[0]):
        raise ValueError(
            f"slots must have shape [length] or [{positions.shape[0]}, length], got {list(slots.shape)}"
        )
    back = torch.arange(window - 1, -1, -1, device=positions.device)
    wanted = positions[:, None].long() - back
    rows = slots.expand(positions.shape[0], -1) if slots.dim() == 1 else slots
    if rows.shape[-1] == 0:
        return torch.full_like(wanted, -1, dtype=_I32)
    taken = rows.gather(1, wanted.clamp(0, rows.shape[-1] - 1))
    return torch.where((wanted >= 0) & (wanted < rows.shape[-1]), taken, -1).to(_I32)


def compressed_topk(
    scores: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, *, ratio: int, topk: int
) -> torch.Tensor:
    """The rows of the best-scored compressed tokens that lie wholly before each query token.

    Compressed token j replaces tokens `j * ratio .. j * ratio + ratio - 1` (DeepSeek-V4 has ratios 4
    and 128), so a query at position p may attend to the first `(p + 1) // ratio` of them.

    Args:
        scores: fp32, bf16 or fp16 `[num_tokens, num_compressed]`, larger is better.
        positions: int32 `[num_tokens]`.
        slots: int32 `[num_compressed]` (shared) or `[num_tokens, num_compressed]`: the row of each.
        ratio: tokens that one compressed token replaces.
        topk: how many to take; 512 or 1024 in DeepSeek-V4.

    Returns:
        int32 `[num_tokens, topk]`, best first, -1 where there are fewer.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or devices.

    Example:
        >>> scores = torch.tensor([[0.1, 0.9, 0.5]])
        >>> compressed_topk(scores, torch.tensor([7], dtype=torch.int32),
        ...                 torch.tensor([10, 11, 12], dtype=torch.int32), ratio=4, topk=3)
        tensor([[11, 10, -1]], dtype=torch.int32)
    """
    check_dtype("scores", scores, (torch.float32, torch.bfloat16, torch.float16))
    check_shape("scores", scores, ("num_tokens", "num_compressed"))
    tokens, candidates = scores.shape
    check_int32("positions", positions)
    check_shape("positions", positions, (tokens,))
    check_int32("slots", slots)
    check_shape("slots", slots, (candidates,) if slots.dim() == 1 else (tokens, candidates))
    check_positive_int("ratio", ratio)
    check_positive_int("topk", topk)
    check_same_device(scores=scores, positions=positions, slots=slots)
    complete = (positions.long() + 1) // ratio
    allowed = torch.arange(candidates, device=scores.device)[None] < complete[:, None]
    ranked = scores.float().masked_fill(~allowed, -torch.inf)
    best = ranked.topk(min(topk, candidates), dim=-1).indices
    rows = slots.expand(tokens, -1).gather(1, best)
    rows = torch.where(allowed.gather(1, best), rows, -1).to(_I32)
    return torch.nn.functional.pad(rows, (0, topk - rows.shape[1]), value=-1)


def concat_csr(*tables: torch.Tensor, compact: bool = False) -> Csr:
    """One CSR from several -1-padded tables over the same rows: a window and a compressed top-k, say.

    Args:
        tables: int32 `[num_tokens, width]` each.
        compact: as for `csr_from_topk`.

    Returns:
        `(indptr, indices)`, int32: each token's entries of the first table, then of the next.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or devices, or no table.

    Example:
        >>> window = torch.tensor([[-1, 0], [0, 1]], dtype=torch.int32)
        >>> concat_csr(window, torch.tensor([[9], [8]], dtype=torch.int32), compact=True)
        (tensor([0, 2, 5], dtype=torch.int32), tensor([0, 9, 0, 1, 8], dtype=torch.int32))
    """
    if not tables:
        raise ValueError("tables must hold at least one table, got none")
    for i, table in enumerate(tables):
        _rows(f"tables[{i}]", table)
        check_shape(f"tables[{i}]", table, (tables[0].shape[0], None))
    return csr_from_topk(torch.cat(tables, -1), compact=compact)
