"""What the order of workgroups over XCDs is worth by the timing model, for docs/amd-timing.md.

    python tools/xcd_figures.py    # about two minutes of one core
    make results                   # writes the table from it

Each call is traced small. Caches, and which XCD gets which workgroup, are simulated at full size, in the
order of the launch and in that of `narrowkv.runtime.attention.xcds`. Writes amd-xcds.json in
benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from amd_figures import Figure, family_of  # type: ignore[import-not-found]
from numpy.typing import NDArray

from narrowkv.attn_prefill import PrefillShape
from narrowkv.attn_prefill.tiles import xcd_rows
from narrowkv.cdna_emulator.timing import MACHINES, Reads, cache_shares, until_the_last_ends
from narrowkv.runtime.attention.xcds import order_of_programs, xcd_order
from narrowkv.runtime.targets import get_target
from narrowkv.sage.config import choose_config
from narrowkv.testing.machine import versions
from narrowkv.testing.model import Modelled, main_launch, model_call

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
_TARGETS = ("gfx942", "gfx950")
_TRACED = {
    "dense prefill": "prefill:q_lens=704,lens=1024,kv_heads=12,ratio=8,head_dim=128,clean=1,kernel=dense",
    "Sage, int8": "",
    "sparse, 16-bit rows": "",
    "decode, bf16": "",
    "decode, E4M3FN": "",
}
_OWN_KEYS = ("sparse", "decode")  # every row of programs reads keys of its own


@dataclass(frozen=True)
class Launch:
    """A launch whose programs read keys in tiles.

    Attributes:
        family: a key of `_TRACED`; what: the call.
        columns, rows: the launch is a table of programs; a column is a head, and row 0 runs first.
        shared: neighbouring columns that read the same keys.
        tiles: how many tiles of keys the programs of each row read; tile_keys, tile_bytes: keys and bytes of
            a tile.
        xcd_rows: that of the shipped configuration; 1 where a column is a block of heads of one token.
        together: neighbouring columns that the launch's own order takes as one group, row by row, before it
            goes on to the next group; 0 if all columns are one group.
    """

    family: str
    what: str
    columns: int
    rows: int
    shared: int
    tiles: NDArray[np.int64]
    tile_keys: int
    tile_bytes: int
    xcd_rows: int
    together: int = 0

    def programs(self, xcds: int, ordered: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and column of each workgroup."""
        count = self.columns * self.rows
        if ordered or not self.together:
            order = xcd_order(xcds, self.columns, self.xcd_rows) if ordered else None
            number = np.array(order_of_programs(count, order))
            return number // self.columns, number % self.columns
        number = np.arange(count)
        group, within = np.divmod(number, self.together * self.rows)
        size = np.minimum(self.together, self.columns - group * self.together)
        return within // size, group * self.together + within % size


def launches(target: str) -> Iterator[Launch]:
    """The calls."""
    tile = 256 if target == "gfx950" else 128  # rows of a tile of dense prefill

    def prefill(heads: int, ratio: int, length: int) -> Launch:
        rows = length * ratio // tile
        tiles = -(-(rows - np.arange(rows)) * tile // ratio // 128)
        what = f"{heads * ratio}/{heads} heads, {length} tokens"
        shape = PrefillShape(
            batch=1, num_tokens=length, max_q_len=length, num_qo_heads=heads * ratio, num_kv_heads=heads,
            head_dim=128, page_size=16, max_seq_len=length, kv_tokens=length,
        )  # fmt: skip
        runs = xcd_rows(get_target(target), shape, tile)
        return Launch("dense prefill", what, heads, rows, 1, tiles, 128, 2 * 2 * 128 * 128, runs)

    def sage(heads: int, kv_heads: int, length: int, causal: bool) -> Launch:
        rows = length // 128
        tiles = rows - np.arange(rows) if causal else np.full(rows, rows)
        together = min(-(-800 // rows), heads) if causal and 4 * rows <= 800 else 1
        runs = choose_config(get_target(target)).xcd_rows
        what = f"{heads}/{kv_heads} heads, {length} tokens, {'causal' if causal else 'no mask'}"
        return Launch("Sage, int8", what, heads, rows, heads // kv_heads, tiles, 128, 2 * 128 * 128, runs,
                      together)  # fmt: skip

    yield prefill(8, 12, 4096)
    yield prefill(12, 8, 4096)
    yield prefill(32, 1, 8192)
    yield prefill(128, 1, 8192)
    yield sage(32, 8, 8192, True)
    yield sage(28, 4, 8192, True)
    yield sage(32, 8, 8192, False)
    yield sage(40, 40, 16384, False)
    what = "128 heads, 4096 tokens, top-k 2048"
    yield Launch("sparse, 16-bit rows", what, 16, 512, 2, np.full(512, 32), 64, 64 * 1152, 1)
    # A column is a block of rows of a split on one of eight XCDs.
    splits = MACHINES[target].compute_units * 4 // 8
    for family, item in (("decode, bf16", 2), ("decode, E4M3FN", 1)):
        what = "1 KV head, 2 blocks of rows, 2048 keys a split"
        yield Launch(family, what, 16, splits, 2, np.full(splits, 64), 32, 32 * 2 * 128 * item, 1)


def modelled(
    launch: Launch, traced: Modelled, target: str, ordered: bool
) -> tuple[float, float, float, float]:
    """Shares that L2 and HBM serve, the last XCD's time over the mean, and the launch's time in clocks."""
    machine, held = MACHINES[target], traced.full.workgroups_per_unit
    row, column = launch.programs(machine.xcds, ordered)
    tiles, stream = launch.tiles[row], column // launch.shared
    if launch.family.startswith(_OWN_KEYS):
        stream = row * launch.columns + stream
    reads = Reads(stream, np.zeros_like(tiles), tiles, launch.tile_bytes)
    caches = cache_shares(reads, machine, workgroups_per_unit=held)
    p = traced.full_with(caches)
    assert p.loop is not None
    passes = launch.tile_keys / _keys_of_a_pass(launch, target)
    clocks = p.loop.first_pass + p.loop.after + tiles * passes * p.loop.clocks
    slots = held * machine.compute_units
    time = until_the_last_ends(clocks, slots, machine.xcds)
    return caches.l2_hits, caches.hbm, time * slots / float(clocks.sum()), time


def _keys_of_a_pass(launch: Launch, target: str) -> int:
    if launch.family.startswith("decode"):
        return launch.tile_keys
    return 32 if launch.family.startswith("sparse") and target == "gfx942" else 64


def main() -> None:
    """Makes the rows."""
    rows: list[dict[str, Any]] = []
    for target in _TARGETS:
        traced = {}
        for family, case in _TRACED.items():
            call = family_of(Figure("families" if not case else "", family, target, case))
            traced[family] = main_launch(model_call(target, call.call, hbm_share=call.hbm_share))
        for launch in launches(target):
            plain, ordered = (modelled(launch, traced[launch.family], target, each) for each in (False, True))
            rows.append({
                "family": launch.family, "what": launch.what, "target": target,
                "l2_hits": plain[0], "l2_hits_ordered": ordered[0], "hbm_ordered": ordered[1],
                "last": plain[2],
                "last_ordered": ordered[2], "speedup": plain[3] / ordered[3],
            })  # fmt: skip
            print(rows[-1], flush=True)
    body = {
        "command": "python tools/xcd_figures.py",
        "versions": {"triton": versions()["triton"]},
        "rows": rows,
    }
    (RESULTS / "amd-xcds.json").write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
