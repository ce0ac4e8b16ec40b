"""The long tables of `probe --full`, and the CSV rows of `probe`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowkv.cli.report import Report
from narrowkv.cli.sheet import Column, Sheet, keys, numbers
from narrowkv.testing.codegen import main_kernel
from narrowkv.testing.probing import FAIL, INEXACT, REFUSED, SKIPPED, Answer
from narrowkv.testing.records import number
from narrowkv.testing.words import AMD_TARGETS

_STYLES = {FAIL: "bold red", REFUSED: "yellow", SKIPPED: "dim", INEXACT: "magenta"}
_CONTRACT = ("operation", "Q", "cache", "page")


def _contract(row: Answer) -> tuple[object, ...]:
    c = row.contract
    return c.function, c.q, c.cache, c.page_size or "-"


def show_full(report: Report, rows: Sequence[Answer]) -> None:
    """Shows every answer, and the code of every contract; long reasons stand below, numbered."""
    notes: dict[str, int] = {}
    errors = ("rel. L1", "max", "bytes/token", "tokens/GiB", "us")
    answers = Sheet([*keys(*_CONTRACT, "backend", "ran on"), *numbers(*errors), Column("verdict")])
    figures = ("VGPR", "AGPR", "spilled", "scratch", "LDS", "waves/SIMD", "matrix", "issue/memory")
    loop = Column("matrix instructions of the loop")
    code = Sheet([*keys(*_CONTRACT, "target"), *numbers(*figures), loop])
    for row in rows:
        verdict = row.status
        if row.detail and row.status != INEXACT:
            verdict += f" [{notes.setdefault(row.detail, len(notes) + 1)}]"
        elif row.status == INEXACT:
            verdict = f"over {row.contract.bound:g}"
        where = f"{row.place} emulated" if row.place in AMD_TARGETS else row.place
        kv_bytes = row.kv_bytes_per_token
        answers.add(
            *_contract(row), row.backend, where if row.ran_on else "-",
            *("-" if error is None else f"{error:.2e}" for error in (row.relative_l1, row.max_abs)),
            number(kv_bytes, 5), number(2**30 / kv_bytes) if kv_bytes else "-",
            number(row.time_us["median"]) if row.time_us else "-", verdict,
            style=_STYLES.get(row.status, ""),
        )  # fmt: skip
        for target, compiled in row.compiled.items():
            if not compiled.kernels:
                code.add(*_contract(row), target, *"-" * 8, compiled.status, style="yellow")
                continue
            k = main_kernel(compiled.kernels)
            mfma = ", ".join(f"{n} x {name.removeprefix('v_mfma_')}" for name, n in k.mfma.items())
            code.add(
                *_contract(row), target, k.vgprs, k.agprs, sum(each.spills for each in compiled.kernels),
                max(each.scratch_bytes for each in compiled.kernels), k.lds_bytes, k.waves_per_simd,
                f"{k.matrix_share:.0%}",
                "-" if compiled.model is None else f"{compiled.model['issue_over_memory']:.2f}",
                mfma or "none", style=_STYLES.get(compiled.status, ""),
            )  # fmt: skip
    report.show(answers)
    for text, index in notes.items():
        report.line(f"[{index}] {text}")
    if code.rows:
        report.say("\nmachine code; matrix and issue/memory are models of the hot loop, not measurements")
        report.show(code)
    report.say("")


def record(row: Answer) -> dict[str, Any]:
    """A CSV row."""
    fields = {name: getattr(row, name) for name in row.__dataclass_fields__ if name != "compiled"}
    return {name: value for name, value in fields.items() if value is not None}
