"""DeepSeek's sparse attention over pages that an engine allocated, by narrowkv's kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch

from narrowkv.sparse_fp8 import DSV4Rows, KVSource, sparse_decode, sparse_prefill, sparse_prefill_fp8

__all__ = ["LAYOUTS", "RECORDS", "attend_to_rows", "listed_rows", "page_rows"]

# Layouts of pages by the bytes of a token. Here the scales of a page follow the values of all its tokens.
LAYOUTS = {584: "packed584", 528: "packed528", 288: "packed288"}
# Here each token's scales follow its own values.
RECORDS = {528: "record528", 288: "record288"}
# Query tokens from which a call fills the device without sharing a token's rows out.
_PREFILL_TOKENS = 256


def page_rows(cache: torch.Tensor, fp8: str, *, interleaved: bool = False) -> DSV4Rows:
    """An engine's pages as rows, where they are.

    Args:
        cache: `[pages, page_size, bytes]`, FP8 or bytes, pages padded or not; the bytes of a token say the
            layout: 584 is DeepSeek-V4, 528 V4.1, 288 V4.1 in NVFP4.
        fp8: "fp8_e4m3fn" or "fp8_e4m3fnuz": what the writer stored; 288 bytes hold E2M1 and no FP8.
        interleaved: whether each token's scales follow its own values.

    Raises:
        ValueError: for other bytes.

    Example:
        >>> page_rows(torch.zeros(2, 16, 528, dtype=torch.uint8), "fp8_e4m3fn").num_rows
        32
    """
    layouts = RECORDS if interleaved else LAYOUTS
    if cache.shape[-1] not in layouts:
        raise ValueError(
            f"cache must have {', '.join(map(str, layouts))} bytes a token"
            f"{' in interleaved pages' if interleaved else ''}, got {cache.shape[-1]}: "
            "use the engine's own kernel for other layouts"
        )
    layout = layouts[cache.shape[-1]]
    return DSV4Rows.paged(
        cache.view(torch.uint8),
        layout,
        page_size=cache.shape[1],
        format=None if layout.endswith("288") else fp8,
    )


@functools.lru_cache(maxsize=64)
def _starts(tokens: int, width: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, (tokens + 1) * width, width, dtype=torch.int32, device=device)


def listed_rows(
    rows: DSV4Rows | torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None = None
) -> KVSource:
    """A source whose tokens have lists of one width.

    Args:
        rows: the rows, quantised or 16-bit.
        indices: `[..., width]` row numbers; -1 is skipped.
        lengths: for each list, how many of its first entries count; None for all.
    """
    width = indices.shape[-1]
    named = indices.reshape(-1, width)
    if lengths is not None:
        place = torch.arange(width, device=named.device)
        named = named.masked_fill(place >= lengths.reshape(-1, 1), -1)
    return KVSource(rows, _starts(named.shape[0], width, named.device), named.reshape(-1))


def attend_to_rows(
    q: torch.Tensor,
    source: KVSource,
    extra: KVSource | None,
    *,
    attn_sink: torch.Tensor | None,
    sm_scale: float | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of tokens `[tokens, heads, 512]` to the rows of one or two sources, as a decode or a prefill.

    Args:
        q: bf16 or fp16; 1 to 128 heads.
        source, extra: rows and lists.
        attn_sink: `[heads]` fp32.
        sm_scale: of the logits; None for `512 ** -0.5`.
        out: like q, or None.
    """
    options: dict[str, Any] = {"attn_sink": attn_sink, "sm_scale": sm_scale, "out": out}
    if q.shape[0] < _PREFILL_TOKENS:
        found = sparse_decode(q, source, extra, **options)
    elif isinstance(source.rows, DSV4Rows):
        found = sparse_prefill_fp8(q, source, extra, mode="fused", **options)
    else:
        found = sparse_prefill(q, source, extra, **options)
    assert isinstance(found, torch.Tensor)
    return found
