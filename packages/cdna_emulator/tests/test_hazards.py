"""Results that are used before they are there: waits for memory, LDS across barriers, and wait states."""

from __future__ import annotations

import re

import numpy as np
import pytest
from emulator_machine import assembly, launch

from narrowkv.cdna_emulator import HazardError, RaceError, ReleaseError, load_program
from narrowkv.cdna_emulator.hazards import HazardModel, InFlight, wait_counts
from narrowkv.cdna_emulator.matrix import mfma_shape
from narrowkv.cdna_emulator.parser import parse_instruction
from narrowkv.cdna_emulator.wait_states import matrix_clocks

BOTH = pytest.mark.parametrize("target", ["gfx942", "gfx950"])


def emulate(target: str, lines: str, *, warps: int = 1, detect_hazards: bool = True) -> np.ndarray:
    """Runs lines that find 512 words, which count from 0, at s[4:5], and a lane's offset to its own in v1."""
    words = np.arange(512, dtype=np.uint32)
    launch("v_lshlrev_b32_e32 v1, 2, v0\n" + lines, words, target=target, at=4, warps=warps, lds_bytes=4096,
           detect_hazards=detect_hazards, check_uninitialised=False)  # fmt: skip
    return words


def hazard(target: str, lines: str, **options: int) -> str:
    """The message of the hazard that the lines have."""
    emulate(target, lines, detect_hazards=False, **options)  # it is the waits alone that are wrong
    with pytest.raises(HazardError) as caught:
        emulate(target, lines, **options)
    assert caught.value.line
    assert caught.value.workgroup == (0, 0, 0)
    return str(caught.value)


LOAD = "global_load_dword v2, v1, s[4:5]\n"


@BOTH
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (LOAD + "v_add_u32_e32 v3, 1, v2", r"reads v2 before line \d+ .*vmcnt\(0\)"),
        (LOAD + "v_mov_b32_e32 v2, 0", r"overwrites v2 .*vmcnt\(0\)"),
        (LOAD + "global_load_dword v3, v1, s[4:5]\ns_waitcnt vmcnt(2)\nv_mov_b32_e32 v4, v2", r"vmcnt\(1\)"),
        (LOAD + "s_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v4, v2", r"vmcnt\(0\)"),
        ("s_load_dword s8, s[4:5], 0x0\ns_add_u32 s9, s8, 1", r"reads s8 .*lgkmcnt\(0\)"),
        ("s_load_dword s8, s[4:5], 0x0\ns_load_dword s9, s[4:5], 0x4\ns_waitcnt lgkmcnt(1)\ns_mov_b32 s2, s8",
         r"reads s8 .*lgkmcnt\(0\)"),
        ("ds_write_b32 v1, v0\nds_read_b32 v5, v1\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v6, v5",
         r"reads v5 .*lgkmcnt\(0\)"),
        ("ds_bpermute_b32 v5, v1, v0\nds_read_b32 v6, v1\nv_mov_b32_e32 v7, v5", r"reads v5 .*lgkmcnt\(1\)"),
        ("global_load_dwordx4 v[4:7], v1, s[4:5]\nv_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[6:7], 0", "v4"),
        ("buffer_wbl2 sc1\nglobal_store_dword v1, v0, s[4:5]", "write-back"),
        (LOAD + "buffer_inv sc1", "invalidated"),
    ],
)  # fmt: skip
def test_use_before_the_wait(lines: str, message: str, target: str) -> None:
    assert re.search(message, hazard(target, lines))


@BOTH
def test_what_is_waited_for_is_no_hazard(target: str) -> None:
    words = emulate(target, """
        global_load_dword v2, v1, s[4:5]
        global_load_dword v3, v1, s[4:5] offset:4
        ds_write_b32 v1, v0
        ds_read_b32 v5, v1
        ds_read_b32 v6, v1
        s_waitcnt vmcnt(1) lgkmcnt(1)
        v_add_u32_e32 v2, v2, v5
        s_waitcnt vmcnt(0)
        s_waitcnt lgkmcnt(0)
        v_add3_u32 v2, v2, v3, v6
        global_store_dword v1, v2, s[4:5]
    """)  # fmt: skip
    assert words[:64].tolist() == [4 * k + 1 for k in range(64)]


@BOTH
def test_vector_memory_results_arrive_in_order_so_loads_may_share_a_register(target: str) -> None:
    emulate(target, LOAD + LOAD + "s_waitcnt vmcnt(0)\nv_mov_b32_e32 v3, v2")


EXCHANGE = """
    ds_write_b32 v1, v0
    {first}
    s_barrier
    v_xor_b32_e32 v2, 0x100, v1
    ds_read_b32 v3, v2
    {second}
    s_barrier
    ds_write_b32 v1, v1
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v3, s[4:5]
"""
WAIT = "s_waitcnt lgkmcnt(0)"


@BOTH
def test_a_wave_has_at_most_63_accesses_under_way(target: str) -> None:
    others = "".join(f"global_load_dword v{3 + k}, v1, s[4:5]\n" for k in range(62))
    read = "v_mov_b32_e32 v0, v2\n"
    assert "vmcnt(62)" in hazard(target, LOAD + others + read)
    emulate(target, LOAD + others + "global_load_dword v90, v1, s[4:5]\n" + read)


@BOTH
def test_a_barrier_orders_only_what_was_waited_for(target: str) -> None:
    words = emulate(target, EXCHANGE.format(first=WAIT, second=WAIT), warps=2)
    assert words[:128].tolist() == [k ^ 64 for k in range(128)]
    for missing in ("first", "second"):
        lines = EXCHANGE.format(**({"first": WAIT, "second": WAIT} | {missing: "s_nop 0"}))
        emulate(target, lines, warps=2, detect_hazards=False)
        with pytest.raises(RaceError, match="without having waited"):
            emulate(target, lines, warps=2)


HAND_OVER = """
    v_readfirstlane_b32 s8, v0
    v_mov_b32_e32 v9, 1
    {early}
    global_store_dword v1, v0, s[4:5]
    {settle}
    s_barrier
    s_cmp_lt_u32 s8, 64
    s_cbranch_scc{leader} END
    {late}
    buffer_wbl2 sc1
    {flushed}
    v_mov_b32_e32 v10, 0
    global_atomic_add v11, v10, v9, s[4:5] offset:1024 sc0
    s_waitcnt vmcnt(0)
    buffer_inv sc1
END:
    s_nop 0
"""
SETTLED = "s_waitcnt vmcnt(0)"


def hand_over(target: str, *, wave_order: str = "turns", warps: int = 2, **lines: str) -> None:
    """One wave publishes what all waves stored: wave 0 for leader 0, wave 1 for leader 1."""
    given = {"early": "", "settle": SETTLED, "late": "", "flushed": SETTLED, "leader": "0"} | lines
    words = np.zeros(512, np.uint32)
    text = "v_lshlrev_b32_e32 v1, 2, v0\n" + HAND_OVER.format(**given)
    launch(text, words, target=target, at=4, warps=warps,
           detect_hazards=True, check_uninitialised=False, wave_order=wave_order)  # fmt: skip


@BOTH
@pytest.mark.parametrize("wave_order", ["turns", "lockstep"])
@pytest.mark.parametrize("leader", ["0", "1"])
def test_a_release_publishes_only_stores_that_were_waited_for(
    target: str, wave_order: str, leader: str
) -> None:
    hand_over(target, wave_order=wave_order, leader=leader)
    message = r"buffer_wbl2 publishes line \d+ \(global_store_dword .* of another wave.*: buffer_wbl2 sc1;"
    for settle in ("", "s_waitcnt vmcnt(1)", "s_waitcnt lgkmcnt(0)"):
        with pytest.raises(ReleaseError, match=message):
            hand_over(target, wave_order=wave_order, leader=leader, settle=settle)


@BOTH
def test_a_release_waits_for_its_write_back(target: str) -> None:
    with pytest.raises(ReleaseError, match=r"global_atomic_add publishes before .*buffer_wbl2 sc1"):
        hand_over(target, flushed="")


@BOTH
def test_stores_that_a_release_does_not_publish_are_no_error(target: str) -> None:
    hand_over(target, late="global_store_dword v1, v0, s[4:5] offset:512")  # its own: in order
    hand_over(target, settle="", warps=1)
    # The wait comes behind the first barrier, but ahead of the second.
    hand_over(target, early="global_store_dword v1, v0, s[4:5] offset:512\ns_barrier")


TO_LDS = """
    s_mov_b32 m0, 0
    s_nop 0
    global_load_lds_dword v1, s[4:5]
    {wait}
    ds_read_b32 v3, v1
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v3, s[4:5] offset:256
"""


@BOTH
def test_a_load_to_lds_is_not_visible_to_its_own_wave_before_vmcnt(target: str) -> None:
    assert emulate(target, TO_LDS.format(wait="s_waitcnt vmcnt(0)"))[64:128].tolist() == list(range(64))
    assert "load to LDS" in hazard(target, TO_LDS.format(wait="s_waitcnt lgkmcnt(0)"))


STATES = {
    "transcendental": ("v_exp_f32_e32 v4, v0", "v_add_f32_e32 v5, v4, v4", 1),
    "moved": ("v_cvt_f32_f16_sdwa v4, v0 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1",
              "v_mov_b32_e32 v5, v4", 0),
    "sdwa destination": ("v_add_u16_sdwa v4, v0, v0 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_0 "
                         "src1_sel:WORD_0", "v_mov_b32_e32 v5, v4", 1),
    "compare, select": ("v_cmp_lt_u32_e32 vcc, 5, v0", "v_cndmask_b32_e32 v5, v0, v1, vcc", 2),
    "readfirstlane, add": ("v_readfirstlane_b32 s8, v0", "v_add_u32_e32 v5, s8, v0", 2),
    "readlane of a result": ("v_mov_b32_e32 v4, v0", "v_readlane_b32 s8, v4, 3", 1),
    "lane number": ("v_readfirstlane_b32 s8, v0", "v_readlane_b32 s9, v0, s8", 4),
    "base of a load": ("v_readfirstlane_b32 s8, v0", "global_load_dword v5, v1, s[8:9]", 5),
    "dpp": ("v_mov_b32_e32 v4, v0", "v_mov_b32_dpp v5, v4 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", 2),
    "factor": ("v_mov_b32_e32 v4, v0", "v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[4:5], 0", 2),
    "4 passes, read": ("v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[4:5], 0", "v_mov_b32_e32 v5, v11", 7),
    "8 passes, overwritten": ("v_mfma_f32_32x32x8_f16 v[8:23], v[4:5], v[4:5], 0", "v_mov_b32_e32 v9, 0", 11),
    "4 passes, factor": ("v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[4:5], 0",
                         "v_mfma_f32_16x16x16_f16 v[12:15], v[8:9], v[4:5], 0", 7),
    "the same addend": ("v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[4:5], 0",
                        "v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[4:5], v[8:11]", 0),
    "another addend": ("v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[4:5], 0",
                       "v_mfma_f32_16x16x16_f16 v[12:15], v[4:5], v[4:5], v[10:13]", 5),
    "addend overwritten": ("v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[4:5], v[12:15]",
                           "v_mov_b32_e32 v12, 0", 3),
    "stored data": ("global_store_dwordx4 v1, v[4:7], s[4:5]", "v_mov_b32_e32 v5, 0", 2),
    "m0": ("s_mov_b32 m0, 0", "global_load_lds_dword v1, s[4:5]", 1),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", STATES)
def test_wait_states(name: str, target: str) -> None:
    """Each dependency is a hazard with one wait state less than it needs, and none with as many."""
    before, after, states = STATES[name]
    if target == "gfx950" and before.startswith("v_mfma") and states > 3:
        states += 1
    for given in (states, states - 1):
        lines = [before, *(f"s_nop {given - 1}" for _ in range(1) if given > 0), after]
        program = load_program(assembly(target, "\n".join(lines)), lds_bytes=4096)
        if given == states:
            HazardModel(program).passage(0, 0)
        elif given >= 0:
            with pytest.raises(HazardError, match="wait states are needed"):
                HazardModel(program).passage(0, 0)


@BOTH
def test_a_path_that_the_input_does_not_take_is_checked_too(target: str) -> None:
    """The load must be waited for on the path of which the branch that is always taken keeps clear."""
    lines = (
        LOAD
        + """
        s_cmp_eq_u32 s6, s6
        s_cbranch_scc1 END
        {wait}
        v_mov_b32_e32 v3, v2
    END:
        s_nop 0
    """
    )
    emulate(target, lines.format(wait="s_waitcnt vmcnt(0)"))
    with pytest.raises(HazardError, match=r"reads v2 before line \d+ .*vmcnt\(0\)"):
        emulate(target, lines.format(wait="s_nop 0"))


@BOTH
def test_a_branch_that_is_taken_counts_as_several_wait_states(target: str) -> None:
    """The path that falls through has one: a matrix instruction still reads its addend."""
    product = "v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[4:5], v[12:15]"
    taken = f"s_cmp_eq_u32 s6, s6\n{product}\ns_cbranch_scc1 NEXT\ns_nop 2\nNEXT:\nv_mov_b32_e32 v12, 0"
    HazardModel(load_program(assembly(target, taken), lds_bytes=4096)).explore()
    falls = taken.replace("s_nop 2\nNEXT:\nv_mov_b32_e32 v12, 0", "v_mov_b32_e32 v12, 0\nNEXT:\ns_nop 0")
    with pytest.raises(HazardError, match="addend of a matrix instruction overwritten"):
        HazardModel(load_program(assembly(target, falls), lds_bytes=4096)).explore()


def test_a_later_write_hides_an_earlier_one() -> None:
    """Only the latest matrix instruction that wrote a register matters to its readers."""
    lines = """
        v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[4:5], 0
        v_mfma_f32_16x16x16_f16 v[6:9], v[4:5], v[4:5], v[8:11]
        v_mfma_f32_16x16x16_f16 v[2:5], v[12:13], v[14:15], v[6:9]
    """
    HazardModel(load_program(assembly("gfx942", lines), lds_bytes=4096)).passage(0, 0)


def test_states_of_a_block_are_found_once() -> None:
    program = load_program(assembly("gfx942", LOAD + "v_mov_b32_e32 v9, v1"), lds_bytes=4096)
    model = HazardModel(program)
    passage = model.passage(0, 0)
    assert passage is model.passage(0, 0)
    assert model.state(passage.state) == InFlight(vector=(0,), local=(), recent=((1, 1),))


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("s_waitcnt vmcnt(3) lgkmcnt(0)", {"vmcnt": 3, "lgkmcnt": 0}),
        ("s_waitcnt 0xc07f", {"lgkmcnt": 0}),
        ("s_waitcnt 0x0f70", {"vmcnt": 0}),
        ("s_waitcnt 0", {"vmcnt": 0, "expcnt": 0, "lgkmcnt": 0}),
    ],
)
def test_counts_of_a_wait(text: str, counts: dict[str, int]) -> None:
    assert wait_counts(parse_instruction(text, 1)) == counts


@pytest.mark.parametrize(
    ("target", "text", "clocks"),
    [
        ("gfx942", "v_mfma_f32_32x32x8_bf16 a, a, a, 0", 32),
        ("gfx942", "v_mfma_f32_16x16x32_fp8_fp8 a, a, a, 0", 16),
        ("gfx942", "v_mfma_f32_16x16x8_xf32 a, a, a, 0", 16),
        ("gfx942", "v_mfma_f32_32x32x2_f32 a, a, a, 0", 64),
        ("gfx950", "v_mfma_f32_16x16x16_bf16 a, a, a, 0", 16),
        ("gfx950", "v_mfma_f32_16x16x32_bf16 a, a, a, 0", 16),
        ("gfx950", "v_mfma_f32_32x32x16_f16 a, a, a, 0", 32),
        ("gfx950", "v_mfma_i32_32x32x32_i8 a, a, a, 0", 32),
        ("gfx950", "v_mfma_f32_16x16x32_fp8_fp8 a, a, a, 0", 16),
        ("gfx950", "v_mfma_f32_16x16x128_f8f6f4 a, a, a, 0", 32),
        ("gfx950", "v_mfma_f32_16x16x128_f8f6f4 a, a, a, 0 cbsz:4 blgp:4", 16),
        ("gfx950", "v_mfma_scale_f32_32x32x64_f8f6f4 a, a, a, 0, s, s cbsz:4 blgp:0", 64),
    ],
)
def test_clocks_of_matrix_instructions(target: str, text: str, clocks: int) -> None:
    shape = mfma_shape(parse_instruction(text, 1))
    assert shape is not None
    assert matrix_clocks(shape, target) == clocks
