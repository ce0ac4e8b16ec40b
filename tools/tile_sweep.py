"""Runs every tile that a configuration chooses for decode, prefill and appends, and prints each one's error.

A row is an operation, its kernels with rows x keys of a tile, warps and stages, a format, a head_dim, and the
relative L1 error against the fp32 reference. Calls are those of `SIZES` and `HEADS`; of calls that have the
same tiles, the first runs.

    python tools/tile_sweep.py --processes 14 --rows tiles.jsonl --seconds 600

`--rows` gets each row as it comes; a later run goes on where it ends.
    python tools/tile_sweep.py --device cpu --small --formats bf16 --head-dims 64
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from narrowkv.paged_cache import CacheFormat, PagedKVCache, PageTable
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.testing.cases.decode import DecodeCase, DecodeInputs
from narrowkv.testing.cases.prefill import PrefillCase, PrefillInputs
from narrowkv.testing.checking import check

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 320, 512)
FORMATS: dict[str, dict[str, Any]] = {
    **{
        name: {"format": name}
        for name in ("bf16", "fp16", "fp8_e4m3fn", "fp8_e5m2", "fp4_e2m1", "int8", "int4")
    },
    "K8V4": {"format": CacheFormat("fp8_e4m3fn", "fp4_e2m1")},
    "FP4 by 32": {"format": "fp4_e2m1", "scale_group": 32},
    "FP4 by 16, E4M3": {"format": "fp4_e2m1", "scale_group": 16, "scale_format": "e4m3"},
    "FP8 queries": {"format": "fp8_e4m3fn", "q_dtype": torch.float8_e4m3fn},
}
OPERATIONS = ("decode", "prefill", "append")
HEADS = ((16, 1), (8, 2), (4, 4), (2, 8), (1, 12))
"""KV heads, and query heads of each."""
SIZES: dict[str, list[dict[str, Any]]] = {
    "decode": [
        {"lens": lens, "q_len": q_len}
        for lens, q_len in product(((900, 33), (3000,), (130,) * 64), (1, 2, 4, 8, 16))
    ],
    "prefill": [
        {"q_lens": q_lens, "lens": lens}
        for q_lens, lens in (
            # Odd numbers of blocks of 16 and of 64 keys, which a larger tile would leave.
            ((128,), (133,)), ((1, 40), (40, 2990)), ((400, 16), (400, 900)), ((4,) * 8, (700, 680) * 4),
            ((1024,), (2027,)),
        )
    ],
}  # fmt: skip
SMALL: dict[str, list[dict[str, Any]]] = {
    "decode": [{"lens": (70, 5)}, {"lens": (40,), "q_len": 4}],
    "prefill": [{"q_lens": (9, 1), "lens": (70, 5)}],
}
KERNELS: dict[str, tuple[str, ...]] = {
    "decode": ("",),
    "prefill": ("", "dense", "fused", "split"),
    "append": ("", "append_then_attend", "fused", "split"),
}


@dataclass(frozen=True)
class Row:
    """The tiles of a call and its error; `case` repeats it."""

    operation: str
    tiles: str
    format: str
    head_dim: int
    error: float
    passed: bool
    case: str


def calls(operation: str, of: str, head_dim: int, small: bool) -> Iterator[Any]:
    """The cases of a group."""
    sizes = (SMALL if small else SIZES)["prefill" if operation == "append" else operation]
    for size, (kv, ratio), kernel in product(sizes, HEADS[2:3] if small else HEADS, KERNELS[operation]):
        values = {**FORMATS[of], **size, "num_kv_heads": kv, "gqa_ratio": ratio, "head_dim": head_dim}
        if operation == "decode":
            yield DecodeCase(**values)
        else:
            yield PrefillCase(**values, operation=operation, kernel=kernel)


def tiles_of(config: Any) -> str:
    """Kernels and tiles of a configuration, of all launches that it can choose among."""
    parts = [
        config,
        *getattr(config, "short_queries", ()),
        *(getattr(config, name, None) for name in ("fallback", "ping_pong")),
    ]
    return "; ".join(
        f"{part.kernel} {part.block_m}x{part.block_n}, {part.options.num_warps} warps, "
        f"{part.options.num_stages} stages"
        for part in parts
        if part is not None
    )


@dataclass(frozen=True)
class Tile:
    """The tiles of a call, which `case` makes."""

    operation: str
    tiles: str
    format: str
    head_dim: int
    device: str
    case: Any


@lru_cache(maxsize=32)
def _cache_of_one_page(
    operation: str, of: str, head_dim: int, num_kv_heads: int, device: str
) -> PagedKVCache:
    shape = {**FORMATS[of], "head_dim": head_dim, "num_kv_heads": num_kv_heads}
    return DecodeCase(lens=(1,), stale_columns=0, **shape).cache(torch.Generator(), device)[0]


def planned(case: Any, operation: str, of: str, device: str) -> Any:
    """The plan of a case, from shapes and lengths: every page of its table is the first of a small cache.

    Raises:
        UnsupportedError, ValueError: the case is refused.
    """
    cache = _cache_of_one_page(operation, of, case.head_dim, case.num_kv_heads, device)
    integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
    pages = torch.zeros(len(case.lens), -(-max(case.lens) // case.page_size), **integers)
    lens = torch.tensor(case.lens, **integers)
    tokens = len(case.lens) * case.q_len if operation == "decode" else sum(case.q_lens)
    size = tokens, case.num_kv_heads * case.gqa_ratio, case.head_dim
    q = torch.empty(size, dtype=case.q_dtype, device=device)
    if operation == "decode":
        table = PageTable.from_block_table(pages, lens, page_size=case.page_size)
        return DecodeInputs(q, cache, table).plan()
    new = torch.tensor(case.q_lens, **integers)
    appends = operation == "append"
    table = PageTable.from_block_table(
        pages,
        None if appends else lens,
        cached_lens=lens - new if appends else None,
        page_size=case.page_size,
    )
    starts = torch.tensor([0, *case.q_lens], **integers).cumsum(0, dtype=torch.int32)
    return PrefillInputs(case, q, cache, table, starts, {}).plan()


def chosen_tiles(group: tuple[str, str, int, str, bool]) -> list[Tile]:
    """The tiles of the calls of an operation, format and head_dim, each with the first call that has them."""
    operation, of, head_dim, device, small = group
    found: dict[str, Tile] = {}
    try:
        cases = list(calls(operation, of, head_dim, small))
    except ValueError:
        return []  # no such call, as an append of FP8 queries
    for case in cases:
        try:
            tiles = tiles_of(planned(case, operation, of, device).config)
        except (UnsupportedError, ValueError):
            continue  # refused, with the reason
        found.setdefault(tiles, Tile(operation, tiles, of, head_dim, device, case))
    return list(found.values())


def measured_row(tile: Tile) -> Row:
    """The error of the call of `tile`."""
    error, passed, case = float("nan"), False, str(tile.case)
    try:
        result = check(tile.case, tile.case.inputs(tile.device))
        passed = result.passed
        if result.error is not None:
            error = result.error.relative_l1
    except Exception as fault:  # an illegal access ends the process's use of the device: said in its row
        case = f"{case}: {fault}"[:200]
    return Row(tile.operation, tile.tiles, tile.format, tile.head_dim, error, passed, case)


def measured_rows(group: tuple[str, str, int, str, bool]) -> list[Row]:
    """The rows of an operation, format and head_dim."""
    return [measured_row(tile) for tile in chosen_tiles(group)]


def _most_telling_first(tiles: list[Tile]) -> list[Tile]:
    """Each tile once, then once for each head_dim, then for each format."""
    seen: Counter[tuple[Any, ...]] = Counter()
    ranked: list[tuple[int, int, Tile]] = []
    for tile in tiles:
        once, of_head_dim = (tile.operation, tile.tiles), (tile.operation, tile.tiles, tile.head_dim)
        ranked.append(((seen[once] > 0) + (seen[of_head_dim] > 0), len(ranked), tile))
        seen.update([once, of_head_dim])
    return [tile for *_, tile in sorted(ranked, key=lambda entry: entry[:2])]


def _table(rows: list[Row]) -> str:
    lines = ["| operation | tiles | format | head_dim | relative L1 error |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row.operation, row.tiles, row.format, row.head_dim)):
        mark = "" if row.passed else " WRONG"
        lines.append(
            f"| {row.operation} | {row.tiles} | {row.format} | {row.head_dim} | {row.error:.2g}{mark} |"
        )
    return "\n".join(lines)


def _rows_of(path: Path | None) -> list[Row]:
    """The rows of earlier runs."""
    if path is None or not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def main() -> int:
    """Prints the table; 1 if a row is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--head-dims", nargs="+", type=int, default=HEAD_DIMS)
    parser.add_argument(
        "--small", action="store_true", help="few and short calls, which the interpreter runs"
    )
    parser.add_argument("--seconds", type=float, default=220.0, help="when to stop and print what ran")
    parser.add_argument("--rows", type=Path, help="JSON lines: rows of earlier runs and of this")
    given = parser.parse_args()
    groups = [
        (operation, of, head_dim, given.device, given.small)
        for head_dim, of, operation in product(given.head_dims, given.formats, given.operations)
    ]
    rows = _rows_of(given.rows)
    ran = {(row.operation, row.tiles, row.format, row.head_dim) for row in rows}
    end = time.monotonic() + given.seconds
    # A process computes in one thread: threads of many processes would take turns on the cores.
    with multiprocessing.get_context("spawn").Pool(given.processes, torch.set_num_threads, (1,)) as pool:
        tiles = [tile for found in pool.imap(chosen_tiles, groups) for tile in found]
        left = [
            tile
            for tile in _most_telling_first(tiles)
            if (tile.operation, tile.tiles, tile.format, tile.head_dim) not in ran
        ]
        results = pool.imap_unordered(measured_row, left)
        for _ in left:
            try:
                rows.append(results.next(timeout=max(end - time.monotonic(), 0.1)))
            except multiprocessing.TimeoutError:
                break
            if given.rows is not None:
                with given.rows.open("a") as file:
                    file.write(json.dumps(asdict(rows[-1])) + "\n")
    wrong = [row for row in rows if not row.passed]
    print(_table(rows))
    for row in wrong:
        print(f"WRONG {row.error:.3g} {row.tiles}: {row.case}")
    shapes = {(tile.operation, tile.tiles) for tile in tiles}
    reached = shapes & {(row.operation, row.tiles) for row in rows}
    print(f"{len(reached)} of {len(shapes)} tile shapes, {len(rows)} of {len(tiles)} rows ran")
    print(f"{len(wrong)} wrong")
    return 1 if wrong or len(rows) < len(tiles) else 0


if __name__ == "__main__":
    sys.exit(main())
