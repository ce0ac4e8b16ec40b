"""One sparse call as text and as tensors; see `narrowkv.cli.cases` for the form of the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from narrowkv.cli.cases import CaseResult, check, parse_case, parse_lens, spell_case
from narrowkv.cli.names import one_of
from narrowkv.cli.places import Place
from narrowkv.cli.validate import Kind
from narrowkv.sparse_fp8 import (
    DSV4Rows,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_fp8,
    sparse_prefill_reference,
)
from narrowkv.sparse_fp8.workloads import SparseInputs, SparseWorkload

BOUND_16_BIT_QUERY = 0.004
BOUND_FP8_QK = 0.02

MODES = ("wide", "prepass", "fused", "decode")
LAYOUTS = ("bf16", "fp16", "split", "packed584", "row512")
QUERIES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class SparseCase:
    """Sizes, formats and options of one sparse call.

    Attributes:
        mode: "wide" (16-bit rows), "prepass" or "fused" (FP8 rows), or "decode" (either).
        layout: "bf16" or "fp16" rows, or a layout of FP8 rows.
        lens, extend: indices of each token into the pool and into this forward's rows, joined by "+"; an
            empty `extend` is no second source.
        heads: query heads.
        q: "bf16", "fp16", or "fp8": in the layout of the rows.
        format: of FP8 rows.
        page_size, padded: of packed584.
        clean: whether rows are known to hold no negative zero.
        skipped: share of the indices that are -1.
        spread: size of the logits.
        sink: whether there is one.
        splits: of decode.
        seed: of the inputs.
    """

    mode: str = "fused"
    layout: str = "packed584"
    lens: str = "70+0+33"
    extend: str = ""
    heads: int = 16
    q: str = "bf16"
    format: str = "fp8_e4m3fn"
    page_size: int = 64
    padded: bool = True
    clean: bool = True
    skipped: float = 0.1
    spread: float = 1.0
    sink: bool = False
    splits: int = 3
    seed: int = 0

    @property
    def bound(self) -> float:
        """The largest relative L1 error that passes."""
        return BOUND_FP8_QK if self.q == "fp8" else BOUND_16_BIT_QUERY

    def __str__(self) -> str:
        return spell_case(self)

    @classmethod
    def parse(cls, text: str) -> SparseCase:
        """The case that `str` spells.

        Raises:
            UsageError: naming the part that is wrong and what is known.
        """
        case = parse_case(cls, text)
        for name, value, known in (
            ("mode", case.mode, MODES),
            ("layout", case.layout, LAYOUTS),
            ("q", case.q, tuple(QUERIES)),
        ):
            one_of(f"--case {name}", value, known)
        for name, value in (("lens", case.lens), ("extend", case.extend)):
            parse_lens(name, value)
        return case


@dataclass(frozen=True)
class SparseCall:
    """The tensors of a case and how the operation is called with them."""

    case: SparseCase
    inputs: SparseInputs
    q: torch.Tensor | DSV4Rows

    def _options(self) -> dict[str, Any]:
        return {"attn_sink": self.inputs.attn_sink if self.case.sink else None}

    def call(self, **options: Any) -> Any:
        """The case's operation; `(o, lse)` unless `return_lse=False` is given."""
        arguments = (self.q, self.inputs.prefix, self.inputs.extend)
        options = {"return_lse": True, **self._options(), **options}
        if self.case.mode != "wide":
            options["num_qo_heads"] = self.case.heads
        if self.case.mode == "decode":
            return sparse_decode(*arguments, num_splits=self.case.splits, **options)
        if self.case.mode == "wide":
            if isinstance(self.q, DSV4Rows):
                raise TypeError("q must be bf16 or fp16 in mode wide, got fp8")
            return sparse_prefill(self.q, *arguments[1:], **options)
        return sparse_prefill_fp8(*arguments, mode=self.case.mode, **options)

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`(o, lse)` in fp32 on the dequantised rows."""
        o, lse = sparse_prefill_reference(
            self.q,
            self.inputs.prefix,
            self.inputs.extend,
            return_lse=True,
            num_qo_heads=self.case.heads,
            **self._options(),
        )
        return o, lse

    def bytes_per_token(self) -> float | None:
        """Bytes of a row of the pool."""
        source = self.inputs.prefix or self.inputs.extend
        if source is None:
            return None
        return float(source.rows.bytes_per_row()) if isinstance(source.rows, DSV4Rows) else 1024.0


def build(case: SparseCase, device: str = "cpu") -> SparseCall:
    """The tensors of a case; rows that nobody names hold NaN.

    Raises:
        ValueError, TypeError: what the rows say to formats, layouts or sizes that they do not take.
    """
    workload = SparseWorkload(
        prefix_lens=parse_lens("lens", case.lens),
        extend_lens=parse_lens("extend", case.extend) if case.extend else None,
        num_qo_heads=case.heads,
        layout=case.layout,
        page_size=case.page_size,
        padded=case.padded,
        skipped=case.skipped,
        q_dtype=QUERIES[case.q],
        spread=case.spread,
        format=case.format,
    )
    inputs = workload.build(device, case.seed)
    if not case.clean:
        inputs = replace(inputs, prefix=_foreign(inputs.prefix), extend=_foreign(inputs.extend))
    q: torch.Tensor | DSV4Rows = inputs.q
    if case.q == "fp8":
        q = DSV4Rows.quantize(inputs.q, layout=case.layout, page_size=case.page_size, format=case.format)
    return SparseCall(case, inputs, q)


def _foreign(source: Any) -> Any:
    if source is None or not isinstance(source.rows, DSV4Rows):
        return source
    return replace(source, rows=replace(source.rows, negative_zero_free=False))


def run(case: SparseCase, place: Place) -> CaseResult:
    """Runs a case at a place and compares it with the reference."""
    call = build(case, place.device)
    with place.context():
        results = call.call()
    return check(case, call, case.bound, lambda: results)


# Each value alone is one case of the quick sweep; the full one crosses the last five.
AXES: dict[str, tuple[Any, ...]] = {
    "mode": ("prepass", "decode"),
    "layout": ("split", "row512"),
    "extend": ("3+64+0",),
    "q": ("fp16", "fp8"),
    "format": ("fp8_e4m3fnuz",),
    "page_size": (1, 3, 256),
    "padded": (False,),
    "clean": (False,),
    "spread": (0.0, 20.0),
    "sink": (True,),
    "lens": ("0", "1+63", "64+65", "127+128+129", "256"),
    "heads": (8, 32, 64, 128),
    "skipped": (0.0, 0.5, 1.0),
}


def quick() -> Iterator[SparseCase]:
    """The default case of each mode, and each value of each axis alone."""
    yield SparseCase()
    yield SparseCase(mode="wide", layout="bf16")
    yield SparseCase(mode="wide", layout="fp16", q="fp16")
    for name, values in AXES.items():
        for value in values:
            yield replace(SparseCase(), **{name: value})


def full() -> Iterator[SparseCase]:
    """Ways to attend by row lengths, heads and shares of skipped indices."""
    ways = [
        SparseCase(mode="wide", layout="bf16"),
        SparseCase(mode="prepass"),
        SparseCase(),
        SparseCase(q="fp8"),
        SparseCase(mode="decode"),
    ]
    for way, lens, heads, skipped in product(ways, AXES["lens"], (16, 32, 64, 128), AXES["skipped"]):
        yield replace(way, lens=lens, heads=heads, skipped=skipped, sink=True)


def sweep(*, everything: bool) -> list[SparseCase]:
    """The cases of a sweep, each once."""
    return list(dict.fromkeys([*quick(), *(full() if everything else ())]))


def _group(line: str) -> tuple[str, str]:
    case = SparseCase.parse(line)
    rows = case.layout if case.layout in QUERIES else f"{case.layout} {case.format}"
    return case.q, f"{case.mode}, {rows}"


SPARSE_CASES = Kind(
    "sparse_prefill, sparse_prefill_fp8 and sparse_decode",
    "sparse",
    run,
    _group,
    {"relative_l1": BOUND_16_BIT_QUERY, "with Q in FP8": BOUND_FP8_QK},
)
"""For `narrowkv validate sparse`."""
