"""The choice between attending FP8 rows in one kernel and expanding them to 16 bits first."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowkv.quant.device import BITS
from narrowkv.runtime.errors import check_choice
from narrowkv.runtime.launch import active_target, is_compiled
from narrowkv.runtime.targets import Target
from narrowkv.sparse_fp8.binding import RowsFormat
from narrowkv.sparse_fp8.config import specialised_config
from narrowkv.sparse_fp8.formats import check_fused, query_format
from narrowkv.sparse_fp8.launches import route_of
from narrowkv.sparse_fp8.layouts import HEAD_DIM, LAYOUTS
from narrowkv.sparse_fp8.planner import suits_specialised
from narrowkv.sparse_fp8.rows import DSV4Rows, query_heads
from narrowkv.sparse_fp8.sources import KVSource

__all__ = ["MODES", "ModeChoice", "choose_mode"]

MODES = ("auto", "fused", "prepass")


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
    readings = _readings_that_pay(num_heads)
    if readings is None:
        return ModeChoice(
            "fused",
            "at 64 heads it takes 0.80 to 1.02 of the prepass's time (measured on H100 and H200)",
        )
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
    """Chooses by how often a row is read, because attention over 16-bit rows is faster.

    Model (`narrowkv inspect model --case sparse:...`), clocks of a compute unit for a row of the loop, fused
    and over 16-bit rows: gfx942, 64 heads 182 and 143, 32 heads 162 and 132, 16 heads 224 and 188; gfx950, 64
    heads 88 and 95, 32 heads 71 and 67, 16 heads 161 and 103. Expanding a row moves 1.6 KB, which takes 200
    clocks of a compute unit's share of HBM on gfx942 and 127 on gfx950.
    """
    v4_rows = all(LAYOUTS[source.format.layout].quantized < HEAD_DIM for source in sources.values())
    if (
        target.name == "gfx950"
        and v4_rows
        and specialised_config(target, kernel="fused", num_heads=num_heads)
    ):
        return ModeChoice("fused", "it is about as fast as attention over 16-bit rows (a model)")
    readings = 3 if target.name == "gfx950" else 6
    if _read_as_often(sources, readings):
        return ModeChoice(
            "prepass", f"rows are read {readings} times each or more, which pays for expanding them (a model)"
        )
    return ModeChoice(
        "fused", f"rows are read less than {readings} times each, too seldom to expand them first (a model)"
    )


def _readings_that_pay(num_heads: int) -> int | None:
    """How often rows must be read on average for expanding them first to be faster; None if it never is.

    Time of fused over that of prepass, 65536 rows, by how often each row is read:

    - 16 heads, which wait for the widening: H200 0.80 with 4, 0.99 with 8, 1.20 with 32; H100 0.80 with 8,
      0.95 and 1.01 with 32.
    - 64 heads: H200 0.88 with 8, 0.97 with 24, 0.99 with 32, 1.02 with 128; H100 0.80 with 8, 0.87 and 0.93
      with 32, 0.96 with 128.
    - 128 heads, which widen a row twice: H200 0.97 with 8, 1.01 with 16; H100 0.94 with 8, 1.00 and 1.02
      with 32.
    - 32 heads: H100 0.51 and 0.76 with 4, 1.06 with 16.
    """
    if num_heads <= 32:
        return 10
    return None if num_heads <= 64 else 12


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
