"""Which way FP8 rows are attended: fused, or expanded first."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowkv.quant.device import BITS, widen_route
from narrowkv.quant.errors import UnsupportedError, check_choice
from narrowkv.quant.launch import active_target
from narrowkv.sparse_fp8.rows import DSV4Rows
from narrowkv.sparse_fp8.sources import KVSource

__all__ = ["MODES", "ModeChoice", "check_fused", "choose_mode"]

MODES = ("auto", "fused", "prepass")


@dataclass(frozen=True)
class ModeChoice:
    """What `mode="auto"` picks, and why.

    Attributes:
        mode: "fused" or "prepass".
        why: one sentence.
    """

    mode: str
    why: str


def _is_16_bit(source: KVSource | None) -> bool:
    return source is not None and isinstance(source.rows, torch.Tensor)


def check_fused(prefix: KVSource | None, extend: KVSource | None) -> None:
    """Refuses 16-bit rows, which the fused kernel does not read.

    Raises:
        UnsupportedError: naming the source and what works.
    """
    for name, source in (("prefix", prefix), ("extend", extend)):
        if _is_16_bit(source):
            raise UnsupportedError(
                f"{name}.rows must be DSV4Rows for the fused kernel, got 16-bit rows: quantise them with "
                "DSV4Rows.quantize, or use mode='prepass' of sparse_prefill_fp8, which takes both kinds"
            )


def choose_mode(
    q: torch.Tensor | DSV4Rows, prefix: KVSource | None, extend: KVSource | None = None, *, mode: str = "auto"
) -> ModeChoice:
    """What `sparse_prefill_fp8` does with these arguments, and why.

    Args:
        q, prefix, extend: as for `sparse_prefill_fp8`; only metadata is looked at.
        mode: "auto", or a mode that is forced.

    Raises:
        TypeError, ValueError: for what `sparse_prefill_fp8` would refuse.

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
    if mode == "fused":
        check_fused(prefix, extend)
        return ModeChoice(mode, "asked for")
    if _is_16_bit(prefix) or _is_16_bit(extend):
        return ModeChoice("prepass", "one source is 16-bit, which the fused kernel does not read")
    target = active_target(q.device)
    if target.is_nvidia:
        # H200, 1024 and 4096 tokens, 16 to 128 heads, top-k 512 and 2048 (`narrowkv bench sparse`).
        return ModeChoice(
            "prepass",
            "measured on an H200 it takes 1.02 to 1.24 of the 16-bit kernel's time, the fused kernel 1.08 "
            "to 1.26",
        )
    rows_of_all = [q, *(source.rows for source in (prefix, extend) if source is not None)]
    fp8 = [rows for rows in rows_of_all if isinstance(rows, DSV4Rows)]
    clean = all(rows.negative_zero_free for rows in fp8)
    if fp8 and target.is_amd and widen_route(target, fp8[0].format, negative_zero_free=clean) == BITS:
        return ModeChoice(
            "prepass",
            f"{target.name} converts these {fp8[0].format} bytes in software, so each row once and not each "
            "time it is read (a model: counted instructions)",
        )
    return ModeChoice(
        "fused", "it needs no scratch, gathers half the bytes and converts in hardware (a model: not timed)"
    )
