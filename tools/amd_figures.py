"""Makes the figures of gfx942 and gfx950 code that the documentation shows, without a GPU.

    python tools/amd_figures.py             # registers, spills, LDS and loops, of every row: compiled only
    python tools/amd_figures.py --models    # also the modelled rows: about four minutes of one core
    python tools/amd_figures.py --models --only decode    # of these the rows named so; the others stay
    make results                            # writes the tables from them

Writes benchmarks/results/amd-code.json and amd-model.json, with the Triton that compiled them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowkv.cli.inspection import parse_call
from narrowkv.testing.codegen import KernelCode, compile_call, main_kernel
from narrowkv.testing.machine import versions
from narrowkv.testing.model import main_launch, model_call, waits
from narrowkv.testing.operation import Family
from narrowkv.testing.operations import families

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
_DECODE = "decode:lens=1024+1024+1024+1024,kv_heads=8,ratio=12,head_dim=128,page_size=16,clean=1,"
_PREFILL = "prefill:q_lens=1024,lens=4096,kv_heads=8,ratio=12,head_dim=128,clean=1,"
_SPARSE = "sparse:lens=512+512,heads=64,pool_rows=4096,"
_LARGE = "prefill:q_lens=704,lens=1024,kv_heads=8,ratio=12,head_dim=128,clean=1,"


@dataclass(frozen=True)
class Figure:
    """One row.

    Attributes:
        table: where it is shown.
        name, target: what is shown.
        case: the call as `narrowkv inspect model --case` reads it; empty for a family of that name.
    """

    table: str
    name: str
    target: str
    case: str


CODE = [
    *(
        Figure("decode", name, target, _DECODE + line)
        for target, name, line in (
            ("gfx942", "FNUZ", "format=fp8_e4m3fnuz"),
            ("gfx942", "OCP (bit arithmetic on words)", "format=fp8_e4m3fn"),
            ("gfx942", "FP4, a scale per head", "format=fp4_e2m1"),
            ("gfx942", "FP8 keys and FP4 values", "format=fp8_e4m3fn/fp4_e2m1"),
            ("gfx942", "FP4, a scale per 32", "format=fp4_e2m1,group=32"),
            ("gfx950", "OCP", "format=fp8_e4m3fn"),
            ("gfx950", "FP4, `native`", "format=fp4_e2m1,kernel=native"),
            ("gfx950", "FP4, `decode`", "format=fp4_e2m1,kernel=decode"),
            ("gfx950", "FP4, a scale per 32", "format=fp4_e2m1,group=32"),
            ("gfx950", "FP8 keys and FP4 values", "format=fp8_e4m3fn/fp4_e2m1"),
        )
    ),
    *(
        Figure("prefill", name, target, _PREFILL + line)
        for target, name, line in (
            ("gfx942", "dense, FP8 cache", "kernel=dense"),
            ("gfx950", "dense, FP8 cache", "kernel=dense"),
            ("gfx942", "fused, FNUZ cache", "kernel=fused,format=fp8_e4m3fnuz"),
            ("gfx950", "fused, OCP cache", "kernel=fused"),
        )
    ),
    *(
        Figure("sparse", name, target, _SPARSE + line)
        for target, fp8 in (("gfx942", "fp8_e4m3fnuz"), ("gfx950", "fp8_e4m3fn"))
        for name, line in (
            ("16-bit rows", "mode=16bit,layout=bf16"),
            ("fused, bf16 query", f"format={fp8}"),
            ("fused, fp16 query", f"format={fp8},q=fp16"),
            ("fused, FP8 query", f"format={fp8},q=fp8"),
        )
    ),
]
LARGE = [
    Figure("large", name, target, _LARGE + line)
    for name, line in (
        ("dense prefill, FP8 cache", "kernel=dense"),
        ("dense prefill, bf16 cache", "kernel=dense,format=bf16"),
        ("prefill, FP8 queries", "kernel=dense,q={fp8},format={fp8}"),
        ("append, then attend, FP8 cache", "operation=append,kernel=append_then_attend"),
    )
    for target in ("gfx942", "gfx950")
]  # fmt: skip


MODELLED = [
    *(Figure("families", name, target, "") for target in ("gfx942", "gfx950") for name in families(target)),
    *LARGE,
]


def family_of(figure: Figure) -> Family:
    """The call of a row; `{fp8}` stands for the format that the target multiplies."""
    if not figure.case:
        return families(figure.target)[figure.name]
    fp8 = "fp8_e4m3fnuz" if figure.target == "gfx942" else "fp8_e4m3fn"
    return parse_call(figure.case.format(fp8=fp8))


def code_row(figure: Figure) -> dict[str, Any]:
    """What the kernel with the matrix instructions compiles to."""
    kernel = main_kernel([KernelCode.of(a) for a in compile_call(figure.target, family_of(figure).call)])
    return {
        **vars(figure), "kernel": kernel.name, "vgprs": kernel.vgprs, "spills": kernel.spills,
        "scratch_bytes": kernel.scratch_bytes, "lds_bytes": kernel.lds_bytes,
        "matrix_instructions": sum(kernel.mfma.values()), "vector_instructions": kernel.loop["valu"],
    }  # fmt: skip


def model_row(figure: Figure) -> dict[str, Any]:
    """The hot loop of a call on a full chip, and the time of all its launches."""
    family = family_of(figure)
    launches = model_call(figure.target, family.call, hbm_share=family.hbm_share)
    p = main_launch(launches).full
    row = {**vars(figure), "kernel": p.kernel, "waves_per_unit": p.waves_per_unit}
    if figure.table == "large":  # calls of full size
        row["model_call_us"] = 1e6 * sum(launch.prediction.seconds for launch in launches)
        row["model_call_flops"] = main_launch(launches).prediction.flops
    if p.loop is not None and p.flops:
        row |= {
            "model_loop_clocks": p.loop.clocks, "model_matrix_share": p.matrix_share,
            "model_flops_per_s": p.loop_flops_per_second,
            "model_flops_at_peak_clock": p.loop_flops_at_peak_clock,
            "model_bound": p.bound.split(" (")[0], "model_waits": waits(p),
            "model_memory_share": p.loop.busy["memory"],
        }  # fmt: skip
    return row


def write(name: str, command: str, figures: list[Figure], row: Callable[[Figure], Any], only: str) -> None:
    """Writes a results file: a row of each figure, and what made it.

    Args:
        only: part of the tables or names of the rows that are made; the others are those stored.

    Raises:
        SystemExit: the stored rows are another Triton's.
    """
    path = RESULTS / f"{name}.json"
    made_with = {"triton": versions()["triton"]}
    stored: list[Any] = [None] * len(figures)
    if only:
        document = json.loads(path.read_text())
        if document["versions"] != made_with:
            raise SystemExit(f"{path.name} is of {document['versions']}: make all rows, without --only")
        kept = {tuple(map(old.get, vars(figures[0]))): old for old in document["rows"]}
        stored = [kept.get(tuple(vars(figure).values())) for figure in figures]
    rows = [
        row(figure) if old is None or only in figure.table or only in figure.name else old
        for figure, old in zip(figures, stored, strict=True)
    ]
    path.write_text(json.dumps({"command": command, "versions": made_with, "rows": rows}, indent=1) + "\n")


def main() -> None:
    """Makes the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", action="store_true", help="also make the modelled rows")
    parser.add_argument("--only", default="", metavar="WORD", help="make the rows named so, keep the others")
    given = parser.parse_args()
    write("amd-code", "python tools/amd_figures.py", CODE, code_row, given.only)
    if given.models:
        write("amd-model", "python tools/amd_figures.py --models", MODELLED, model_row, given.only)


if __name__ == "__main__":
    main()
