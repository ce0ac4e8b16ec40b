"""No change of code changes by accident which configuration a call gets."""

from __future__ import annotations

import ast
import contextlib
import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tool_modules import load_tool

from narrowkv.attn_decode import tiles as decode_tiles
from narrowkv.attn_decode.config import DecodeShape
from narrowkv.attn_decode.config import choose_config as choose_decode
from narrowkv.attn_prefill import PrefillShape
from narrowkv.attn_prefill.tiles import dense_config, fused_config, split_config
from narrowkv.runtime.choices import ConfigRow
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.targets import TARGETS, UNTRIED, Target
from narrowkv.runtime.toolchain import TRITON
from narrowkv.sparse_fp8 import config as sparse
from narrowkv.sparse_fp8.indexer.config import columns_of_program

TOOL = load_tool("choices")
PACKAGES = Path(__file__).resolve().parent.parent / "packages"


@pytest.mark.parametrize("operation", TOOL.TABLES)
def test_every_shape_gets_the_stored_choice(operation: str) -> None:
    """`python tools/choices.py` writes the tables again; their diff belongs to the change that made it."""
    if TRITON[:2] != (3, 8):
        pytest.skip("the tables are those of Triton 3.8, on which a few choices depend")
    assert TOOL.text_of(operation) == (TOOL.CHOICES / f"{operation}.txt").read_text()


_DECODE = DecodeShape(16, 1, 12, 1, 128, 16, 131072)
_CHUNK = PrefillShape(
    batch=1, num_tokens=16, max_q_len=16, num_qo_heads=12, num_kv_heads=1, head_dim=128, page_size=16,
    max_seq_len=65536, kv_tokens=65536,
)  # fmt: skip


def _shares(target: Target) -> dict[str, int]:
    """How many programs share the keys of a call in each family."""
    rows = sparse.choose_config(target, kernel="16bit", num_heads=16)
    return {
        "decode": choose_decode(target, _DECODE, "bf16", "bf16").num_items,
        "fused prefill": fused_config(target, _CHUNK, 64, "", large_head=False).num_splits,
        "split prefill": split_config(target, _CHUNK, (0, 16), 16, "").num_splits,
        "sparse": sparse.choose_splits(target, rows, 1, 128, 2048),
        "dense prefill": dense_config(target, _CHUNK, 64, "", large_head=False, plain=True).num_splits,
        "indexer": -columns_of_program(target, 64, 1, 16384),
    }


@pytest.mark.parametrize("name", ["gfx942", "gfx90a", "cuda"])
def test_a_devices_own_compute_units_decide_how_many_programs_share_keys(name: str) -> None:
    """A GPU of 20 compute units (a partition of an MI308X), 80, 228 and 304: more units, more programs."""
    shares = [_shares(replace(TARGETS[name], compute_units=units)) for units in (4, 20, 80)]
    for family in shares[0]:
        few, more, most = (share[family] for share in shares)
        assert few < more <= most, (family, few, more, most)
    decodes = [
        _shares(replace(TARGETS[name], compute_units=units))["decode"] for units in (20, 38, 80, 228, 304)
    ]
    assert decodes == [units * decodes[0] // 20 for units in (20, 38, 80, 228, 304)]


# Chips' own figures: published ones, the virtual GPU's chips, and the timing model's machines.
_FIGURES = ("runtime/figures.py", "virtual_gpu/chips.py", "timing/machine.py")


def test_no_kernel_or_configuration_names_a_chips_compute_units() -> None:
    """Of an MI300X, an MI300A, one of their dies, and an H100."""
    named = [
        (path, node.lineno)
        for path in PACKAGES.glob("*/src/**/*.py")
        if not path.as_posix().endswith(_FIGURES)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in (304, 228, 38, 132)
    ]
    assert not named
    assert all(list(PACKAGES.glob(f"*/src/**/{name}")) for name in _FIGURES)


def _rows_of(module: ModuleType) -> dict[int, ConfigRow[Any]]:
    """All rows of a module's tables, by their identities."""
    tables = (table for table in vars(module).values() if isinstance(table, tuple))
    return {id(row): row for table in tables for row in table if isinstance(row, ConfigRow)}


def test_every_row_of_decode_is_the_choice_of_some_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that no call takes is dead: rows before it take all of its calls."""
    fits, left, draw = ConfigRow.fits, _rows_of(decode_tiles), random.Random(0)

    def fits_and_counts(row: ConfigRow[Any], facts: dict[str, Any]) -> bool:
        found = fits(row, facts)
        if found:
            left.pop(id(row), None)
        return found

    monkeypatch.setattr(ConfigRow, "fits", fits_and_counts)
    formats = ("bf16", "fp8_e4m3fn", "fp4_e2m1", "int8", "int4")
    heads = (
        (96, 8, 128), (64, 64, 128), (8, 1, 128), (12, 1, 64), (8, 1, 256), (48, 8, 192), (32, 4, 512),
        (28, 4, 80), (64, 2, 256),
    )  # fmt: skip
    for _ in range(150_000):
        k, v = draw.choice(formats), draw.choice(formats)
        k = draw.choice((k, v))
        shape = DecodeShape(
            draw.choice((1, 4, 16, 64, 128)), draw.choice((1, 1, 2, 4, 16)), *draw.choice(heads), 16,
            draw.choice((128, 1024, 2048, 4096, 32768, 131072)), draw.choice((torch.bfloat16, torch.float16)),
        )  # fmt: skip
        with contextlib.suppress(UnsupportedError):
            choose_decode(
                draw.choice((*TARGETS.values(), *UNTRIED.values())), shape, k, v,
                scale_group=draw.choice((0, 16, 32)) if "fp4_e2m1" in (k, v) else 0,
                kernel=draw.choice((None, None, "native")),
            )  # fmt: skip
        if not left:
            return
    raise AssertionError(list(left.values()))
