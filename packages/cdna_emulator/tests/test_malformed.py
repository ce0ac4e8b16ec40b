"""Text that no compiler prints is refused by the emulator's own errors, whatever is wrong with it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import pytest
from emulator_machine import assembly

from narrowkv.cdna_emulator import EmulatorError, Memory, load_program, run

CODE = """
s_load_dwordx2 s[2:3], s[0:1], 0x0
s_load_dword s6, s[0:1], 0x8
v_lshlrev_b32 v1, 2, v0
v_mov_b32 v4, 0
s_waitcnt lgkmcnt(0)
s_mov_b32 s4, 0
again:
global_load_dword v2, v1, s[2:3]
s_waitcnt vmcnt(0)
v_add_u32 v2, s6, v2
v_cvt_f32_u32_e32 v3, v2
v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[2:3], 0
ds_write_b32 v1, v2 offset:16
s_waitcnt lgkmcnt(0)
s_barrier
ds_read2_b32 v[2:3], v1 offset0:4 offset1:5
s_waitcnt lgkmcnt(0)
v_add_f32_dpp v3, v3, v3 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
v_cmp_gt_u32_e32 vcc, 8, v0
s_and_saveexec_b64 s[8:9], vcc
global_store_dword v1, v2, s[2:3]
s_mov_b64 exec, s[8:9]
s_add_u32 s4, s4, 1
s_cmp_lt_u32 s4, 2
s_cbranch_scc1 again
"""
ARGUMENTS = """- .args:
      - .offset: 0
        .size: 8
        .value_kind: global_buffer
      - .offset: 8
        .size: 4
        .value_kind: by_value
    .kernarg_segment_size: 16"""


def _text() -> str:
    return assembly("gfx942", CODE).replace("- .args: []", ARGUMENTS)


def _delete(rng: random.Random, lines: list[str]) -> None:
    del lines[rng.randrange(len(lines))]


def _duplicate(rng: random.Random, lines: list[str]) -> None:
    lines.insert(rng.randrange(len(lines)), rng.choice(lines))


def _cut(rng: random.Random, lines: list[str]) -> None:
    k = rng.randrange(len(lines))
    lines[k] = lines[k][: rng.randrange(len(lines[k]) + 1)]


def _change_number(rng: random.Random, lines: list[str]) -> None:
    numbered = [k for k, line in enumerate(lines) if re.search(r"\d", line)]
    k = rng.choice(numbered)
    found = rng.choice(list(re.finditer(r"\d+", lines[k])))
    number = rng.choice(["", "-1", "0", "7", "63", "255", "600", "65536", "99999999999", "0x", "1.5", "x"])
    lines[k] = lines[k][: found.start()] + number + lines[k][found.end() :]


def _change_character(rng: random.Random, lines: list[str]) -> None:
    k = rng.choice([k for k, line in enumerate(lines) if line])
    at = rng.randrange(len(lines[k]))
    lines[k] = lines[k][:at] + rng.choice("[](),:;.-_ \tax0") + lines[k][at + 1 :]


def _drop_operand(rng: random.Random, lines: list[str]) -> None:
    k = rng.randrange(len(lines))
    parts = lines[k].split(",")
    del parts[rng.randrange(len(parts))]
    lines[k] = ",".join(parts)


MUTATIONS: list[Callable[[random.Random, list[str]], None]] = [
    _delete, _duplicate, _cut, _change_number, _change_character, _drop_operand,
]  # fmt: skip


def _load_and_run(text: str) -> None:
    host = np.zeros(64, np.uint32)
    memory = Memory()
    pointer = memory.map(host.view(np.uint8), name="host")
    program = load_program(text)
    explicit = [argument for argument in program.kernarg if not argument.kind.startswith("hidden_")]
    args = [pointer if argument.kind == "global_buffer" else 3 for argument in explicit]
    run(program, grid=(1, 1, 1), args=args, memory=memory, max_blocks=200)


def test_the_text_itself_runs() -> None:
    _load_and_run(_text())


@pytest.mark.parametrize("seed", range(8))
def test_mutated_text_gives_the_emulators_own_errors(seed: int) -> None:
    rng = random.Random(seed)
    refused = 0
    for k in range(150):
        lines = _text().splitlines()
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            rng.choice(MUTATIONS)(rng, lines)
        text = "\n".join(lines)
        try:
            _load_and_run(text)
        except EmulatorError:
            refused += 1
        except Exception as error:
            pytest.fail(f"seed {seed}, mutation {k}: {type(error).__name__}: {error}\n{text}")
    assert refused > 30, "the mutations do harm"
