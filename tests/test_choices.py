"""No change of code changes by accident which configuration a call gets."""

from __future__ import annotations

import ast
import contextlib
import random
from collections.abc import Callable
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
from narrowkv.attn_prefill import tiles as prefill_tiles
from narrowkv.attn_prefill.config import choose_config as choose_prefill
from narrowkv.attn_prefill.tiles import dense_config, fused_config, split_config
from narrowkv.runtime.choices import ConfigRow
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.targets import TARGETS, UNTRIED, Target
from narrowkv.runtime.toolchain import TRITON
from narrowkv.sparse_fp8 import config as sparse
from narrowkv.sparse_fp8.indexer.config import columns_of_program
from narrowkv.sparse_fp8.layouts import LAYOUTS

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
        "fused prefill": fused_config(target, _CHUNK, 64, "").num_splits,
        "split prefill": split_config(target, _CHUNK, ("bf16", "bf16"), (0, 16), 16, "").num_splits,
        "sparse": sparse.choose_splits(target, rows, 1, 128, 2048),
        "dense prefill": dense_config(target, _CHUNK, 64, "", plain=True).num_splits,
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


def _choose_decode(draw: random.Random, target: Target, formats: tuple[str, str]) -> None:
    heads = (
        (96, 8, 128), (64, 64, 128), (8, 1, 128), (12, 1, 64), (8, 1, 256), (48, 8, 192), (32, 4, 512),
        (28, 4, 80), (64, 2, 256), (16, 1, 576), (64, 4, 192),
    )  # fmt: skip
    shape = DecodeShape(
        draw.choice((1, 4, 16, 64, 128, 256)), draw.choice((1, 1, 2, 4, 16)), *draw.choice(heads), 16,
        draw.choice((128, 1024, 2048, 4096, 32768, 131072)), draw.choice((torch.bfloat16, torch.float16)),
    )  # fmt: skip
    choose_decode(
        target, shape, *formats, scale_group=draw.choice((0, 16, 32)) if "fp4_e2m1" in formats else 0,
        kernel=draw.choice((None, None, "native")),
    )  # fmt: skip


def _choose_prefill(draw: random.Random, target: Target, formats: tuple[str, str]) -> None:
    batch, new, keys = draw.choice((1, 8)), draw.choice((1, 2, 16, 64, 4096)), draw.choice((512, 32768))
    heads = draw.choice((
        (96, 8, 128), (8, 1, 128), (64, 8, 64), (16, 8, 256), (32, 4, 512), (8, 8, 192), (16, 1, 512)
    ))  # fmt: skip
    shape = PrefillShape(
        batch, batch * new, new, *heads, 16, new + keys, batch * (new + keys),
        v_head_dim=128 if heads[2] == 192 else 0,
    )  # fmt: skip
    choose_prefill(
        target, shape, formats, q_fp8=None, scratch_fits=True, can_decode=False,
        can_pipeline=target.name == "sm90" and draw.random() < 0.5, plain_keys=draw.random() < 0.5,
        kernel=draw.choice((None, "dense", "fused", "split")),
    )  # fmt: skip


def _choose_sparse(draw: random.Random, target: Target, formats: tuple[str, str]) -> None:
    kernel, heads = draw.choice(("16bit", "fused")), draw.choice((16, 32, 64, 128))
    layouts = draw.sample(list(LAYOUTS.values()), draw.choice((1, 2))) if kernel == "fused" else ()
    head_dim = draw.choice((576, 512))
    sparse.choose_config(
        target, kernel=kernel, num_heads=heads, head_dim=head_dim, layouts=layouts,
        fp8_qk=draw.random() < 0.5, fp16_query=draw.random() < 0.5, paged=draw.random() < 0.5,
    )  # fmt: skip
    sparse.specialised_config(
        target, kernel=kernel, num_heads=heads, head_dim=head_dim, layouts=layouts,
        two_sources=draw.random() < 0.5,
    )  # fmt: skip


# Rows for another version of Triton than the one that runs.
_OTHER_TRITON = {"sparse": ({"target": "gfx950", "kernel": "fused"},) if TRITON < (3, 9) else ()}


@pytest.mark.parametrize(
    ("operation", "module", "choose"),
    [
        ("decode", decode_tiles, _choose_decode),
        ("prefill", prefill_tiles, _choose_prefill),
        ("sparse", sparse, _choose_sparse),
    ],
)
def test_every_row_is_the_choice_of_some_call(
    monkeypatch: pytest.MonkeyPatch, operation: str, module: ModuleType, choose: Callable[..., None]
) -> None:
    """A row that no call takes is dead: rows before it take all of its calls."""
    fits, left, draw = ConfigRow.fits, _rows_of(module), random.Random(0)
    left = {key: row for key, row in left.items() if row.when not in _OTHER_TRITON.get(operation, ())}
    assert left

    def fits_and_counts(row: ConfigRow[Any], facts: dict[str, Any]) -> bool:
        found = fits(row, facts)
        if found:
            left.pop(id(row), None)
        return found

    monkeypatch.setattr(ConfigRow, "fits", fits_and_counts)
    formats = ("bf16", "fp8_e4m3fn", "fp4_e2m1", "int8", "int4")
    for _ in range(150_000):
        k, v = draw.choice(formats), draw.choice(formats)
        with contextlib.suppress(UnsupportedError):
            choose(draw, draw.choice((*TARGETS.values(), *UNTRIED.values())), (draw.choice((k, v)), v))
        if not left:
            return
    raise AssertionError(list(left.values()))
