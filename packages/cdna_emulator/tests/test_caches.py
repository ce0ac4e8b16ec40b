"""Caches of several XCDs: who shares keys with whom follows from the order of workgroups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from narrowkv.cdna_emulator.state import Array
from narrowkv.cdna_emulator.timing import MACHINES, Reads, cache_shares, until_the_last_ends

MACHINE = MACHINES["gfx942"]


def _whole(streams: Array, tiles: int, tile_bytes: int = 2**16) -> Reads:
    return Reads(streams, np.zeros(len(streams), int), np.full(len(streams), tiles), tile_bytes)


def test_programs_that_share_keys_hit_in_l2_on_one_xcd_only() -> None:
    number = np.arange(256)
    neighbours = cache_shares(_whole(number // 2, 8), MACHINE)
    on_one_xcd = cache_shares(_whole(number % 8 + number // 16 * 8, 8), MACHINE)
    assert (neighbours.l2_hits, on_one_xcd.l2_hits) == (0.0, 0.5)
    # The Infinity Cache is shared by all XCDs.
    assert neighbours.hbm == on_one_xcd.hbm == 0.5


def test_one_die_has_one_l2() -> None:
    pairs = _whole(np.arange(256) // 2, 8)
    assert cache_shares(pairs, replace(MACHINE, xcds=1, l2_bytes=8 * MACHINE.l2_bytes)).l2_hits == 0.5


def test_what_no_cache_holds_comes_from_hbm() -> None:
    alone = cache_shares(_whole(np.arange(64), 8), MACHINE)
    assert (alone.l2_misses, alone.hbm) == (1.0, 1.0)
    # Read a second time, by later workgroups: 64 streams of 8 tiles of 1 MB exceed L2 and the Infinity Cache.
    twice = _whole(np.arange(4096) % 2048, 8, 2**20)
    assert cache_shares(twice, MACHINE).hbm == 1.0


def test_whole_heads_in_turn_hit_where_all_heads_at_once_do_not() -> None:
    """arXiv 2511.02132 measured hit rates of 80 to 97% in this order, on an MI300X."""
    heads, tiles = 128, 64
    number = np.arange(heads * tiles)
    at_once = cache_shares(_whole(number % heads, tiles), MACHINE, workgroups_per_unit=2)
    slot = number // 8
    in_turn = cache_shares(_whole(number % 8 + slot // tiles * 8, tiles), MACHINE, workgroups_per_unit=2)
    assert at_once.l2_hits < 0.5
    assert 0.8 < in_turn.l2_hits < 1.0


@pytest.mark.parametrize(("tiles", "slower"), [(8, 8 / 4.5), (16, 24 / 17), (64, 288 / 260)])
def test_xcds_have_unequal_work_where_tiles_of_a_causal_head_run_fastest(tiles: int, slower: float) -> None:
    clocks = np.tile(np.arange(1.0, tiles + 1), 64 * 8)
    slots = 64
    least = clocks.sum() / slots
    assert until_the_last_ends(clocks, slots, 8) == pytest.approx(slower * least, rel=0.02)
    assert until_the_last_ends(clocks, slots, 1) == pytest.approx(least, rel=0.02)
