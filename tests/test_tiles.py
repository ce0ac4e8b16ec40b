"""Every tile that a configuration can choose: right on sm90, and within its block of widened keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from narrowkv.attn_decode import config as decode
from narrowkv.attn_decode.tiles import tall_tile
from narrowkv.attn_prefill import config as prefill
from narrowkv.attn_prefill.tiles import IN_PAGES, PrefillConfig, PrefillShape
from narrowkv.paged_cache.binding import multiplied_parts
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.targets import TARGETS, WARPGROUP_ROWS, Target, get_target, least_columns
from narrowkv.sage import config as sage

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 320, 512)
FORMATS = [
    *((each, each) for each in ("bf16", "fp16", "fp8_e4m3fn", "fp8_e5m2", "fp4_e2m1", "int8")),
    ("fp8_e4m3fn", "fp4_e2m1"), ("int8", "int4"),
]  # fmt: skip
HEADS = ((16, 16), (16, 8), (16, 4), (16, 2), (96, 8), (12, 1))
SM90 = get_target("sm90")


def _parts_of_a_config(config: PrefillConfig) -> Iterator[PrefillConfig]:
    yield config
    for each in (*config.short_queries, config.fallback, config.ping_pong, config.tall):
        if each is not None:
            yield from _parts_of_a_config(each)


def _prefill_configs(target: Target, formats: Any = FORMATS) -> Iterator[tuple[str, int, PrefillConfig]]:
    """Operation, head_dim and configuration."""
    sizes = (
        (1, 1, 40),
        (1, 16, 128),
        (1, 128, 128),
        (4, 128, 3000),
        (1, 1024, 4096),
        (64, 64, 40),
        (1, 128, 32768),
    )
    for head_dim, (qo, kv), of, (batch, q_len, keys) in product(HEAD_DIMS, HEADS, formats, sizes):
        tokens = batch * q_len
        shape = PrefillShape(
            batch, tokens, q_len, qo, kv, head_dim, 16, max(keys, q_len), batch * max(keys, q_len)
        )
        for fits, pipeline in product((True, False), (True, False)):
            common: dict[str, Any] = {"scratch_fits": fits, "can_pipeline": pipeline}
            for kernel, q_fp8 in product((None, "dense", "fused", "split"), (None, of[0])):
                try:
                    config = prefill.choose_config(
                        target, shape, of, q_fp8=q_fp8, can_decode=False, kernel=kernel, **common
                    )
                except UnsupportedError:
                    continue
                for each in _parts_of_a_config(config):
                    yield "prefill", head_dim, each
            for kernel, fp8 in product((None, *prefill.APPEND_KERNELS), (True, False)):
                try:
                    config = prefill.choose_append_config(
                        target, shape, of, "bf16", fp8_compute=fp8, kernel=kernel, **common
                    )
                except UnsupportedError:
                    continue
                for each in _parts_of_a_config(config):
                    yield "append", head_dim, each


def _prefill_tiles() -> Iterator[tuple[str, int, int, int]]:
    """Kernel, rows and keys of a tile, head_dim."""
    for operation, head_dim, config in _prefill_configs(SM90):
        yield f"{operation} {config.kernel}", config.block_m, config.block_n, head_dim


def _decode_tiles() -> Iterator[tuple[str, int, int, int]]:
    sizes = product((1, 4, 64), (1, 2, 4, 8, 16), (64, 1024, 32768), (0, 16, 32))
    for (batch, q_len, keys, group), head_dim, (qo, kv), (k, v) in product(sizes, HEAD_DIMS, HEADS, FORMATS):
        shape = decode.DecodeShape(batch, q_len, qo, kv, head_dim, 16, keys)
        for invariant in (False, True):
            config = decode.choose_config(SM90, shape, k, v, scale_group=group, batch_invariant=invariant)
            yield "decode", config.block_m, config.block_n, head_dim


def test_no_tile_of_a_warpgroup_has_too_few_keys() -> None:
    sage_tiles = [sage.choose_config(SM90, kind, smooth_q=smooth) for kind in ("int8", "int4", "fp8")
                  for smooth in (False, True)]  # fmt: skip
    tiles = {*_prefill_tiles(), *_decode_tiles(), *(("sage", c.block_m, c.block_n, 128) for c in sage_tiles)}
    kernels = {kernel for kernel, *_ in tiles}
    assert {"prefill dense", "prefill fused", "prefill split", "append split", "decode", "sage"} <= kernels
    assert {(rows >= 64, head_dim > 128) for _, rows, _, head_dim in tiles} == {
        (False, False), (False, True), (True, False), (True, True)
    }  # fmt: skip
    assert not [tile for tile in sorted(tiles) if tile[2] < least_columns(SM90, tile[1])]


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_tile_of_widened_keys_leaves_its_block(name: str) -> None:
    """A tile takes one block's factors, and memory that none wrote may follow the last block."""
    tiles = {
        (head_dim, config.kernel, config.block_n, config.scratch_block)
        for _, head_dim, config in _prefill_configs(get_target(name), FORMATS[2:5:2])
        if config.kernel not in (*IN_PAGES, "decode")
    }
    assert {head_dim for head_dim, *_ in tiles} == set(HEAD_DIMS)
    assert not [tile for tile in sorted(tiles) if tile[3] % tile[2]]


def test_no_tall_tile_of_decode_leaves_the_memory_of_the_tiles_in_whose_place_it_stands() -> None:
    for rows in range(WARPGROUP_ROWS // 2 + 1, 4097):
        own, tall = decode.rows_of_tile(SM90, rows, fast=True, head_dim=128), tall_tile(rows)
        assert -(-rows // tall) * tall <= -(-rows // own) * own, rows


def test_no_part_of_v_has_too_few_channels() -> None:
    for columns, parts in product((64, 128, 256), (1, 2, 4)):
        chosen = multiplied_parts(SM90, columns, parts)
        assert columns // chosen >= least_columns(SM90, 64)
        assert multiplied_parts(get_target("gfx942"), columns, parts) == parts


def test_the_rule_is_of_nvidia_and_of_tiles_that_warpgroups_multiply() -> None:
    assert {name: least_columns(target, 64) for name, target in TARGETS.items()} == {
        name: 64 if target.is_nvidia else 1 for name, target in TARGETS.items()
    }
    assert least_columns(SM90, 32) == 1
