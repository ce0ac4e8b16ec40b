"""What a run says about where its instructions went, and which bytes it stored."""

import numpy as np
import pytest
from emulator_machine import launch

# Wave w of workgroup g passes g + 1 times; every second pass takes the inner path.
LOOP = """v_lshlrev_b32 v1, 2, v0
s_add_u32 s5, {workgroup}, 1
s_mov_b32 s6, 0
LOOP:
s_add_u32 s6, s6, 1
s_and_b32 s7, s6, 1
s_cmp_eq_u32 s7, 0
s_cbranch_scc1 SKIP
v_mov_b32 v2, s6
SKIP:
s_cmp_lt_u32 s6, s5
s_cbranch_scc1 LOOP
v_mov_b32 v2, s6
global_store_dword v1, v2, s[2:3]
"""


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(("passes", "warps"), [(1, 1), (5, 1), (6, 2)])
def test_loops_are_counted_in_passes_and_by_what_they_executed(passes, warps, check):
    host = np.zeros(128, np.uint32)
    result = launch(LOOP.format(workgroup=passes - 1), host, warps=warps, check_uninitialised=check)
    (loop,) = result.profile.loops
    assert loop.passes == passes * warps
    assert loop.mnemonics["s_and_b32"] == passes * warps
    assert loop.mnemonics["v_mov_b32"] == -(-passes // 2) * warps, "a path that is not taken does not count"
    assert result.profile.mnemonics["v_mov_b32"] == (-(-passes // 2) + 1) * warps
    assert "global_store_dword" not in loop.mnemonics
    assert 0 < loop.first_line < loop.last_line
    assert loop.mfma == 0
    assert result.profile.hot_loop is None


# Every second pass leaves the loop's lines for a block behind its end, and comes back.
OUT_OF_LINE = """v_lshlrev_b32 v1, 2, v0
s_mov_b32 s6, 0
LOOP:
s_add_u32 s6, s6, 1
s_bitcmp1_b32 s6, 0
s_cbranch_scc1 RARE
BACK:
s_cmp_lt_u32 s6, 7
s_cbranch_scc1 LOOP
s_branch END
RARE:
v_mov_b32 v2, s6
s_branch BACK
END:
global_store_dword v1, v2, s[2:3]
"""


def test_code_behind_the_loop_that_jumps_back_belongs_to_it():
    (loop,) = launch(OUT_OF_LINE, np.zeros(64, np.uint32)).profile.loops
    assert loop.passes == 7
    assert loop.mnemonics["v_mov_b32"] == 4
    assert loop.mnemonics["s_cmp_lt_u32"] == 7


# A loop that is entered in its middle, and one inside it.
ROTATED = """v_lshlrev_b32 v1, 2, v0
s_mov_b32 s6, 0
s_branch MIDDLE
TOP:
s_mov_b32 s7, 0
INNER:
s_add_u32 s7, s7, 1
s_cmp_lt_u32 s7, 3
s_cbranch_scc1 INNER
MIDDLE:
s_add_u32 s6, s6, 1
s_cmp_lt_u32 s6, 5
s_cbranch_scc1 TOP
v_mov_b32 v2, s6
global_store_dword v1, v2, s[2:3]
"""


def test_a_loop_entered_in_its_middle_and_one_inside_it():
    outer, inner = launch(ROTATED, np.zeros(64, np.uint32)).profile.loops
    assert (outer.passes, inner.passes) == (5, 12)
    assert outer.mnemonics["s_add_u32"] == 5 + 12
    assert inner.mnemonics["s_add_u32"] == 12
    assert outer.first_line < inner.first_line <= inner.last_line < outer.last_line


def test_batches_add_up():
    host = np.zeros(64, np.uint32)
    one = launch(LOOP.format(workgroup=2), host, grid=(5, 1, 1), batch_workgroups=1)
    all_at_once = launch(LOOP.format(workgroup=2), host, grid=(5, 1, 1))
    assert one.profile == all_at_once.profile
    assert one.profile.loops[0].passes == 15


@pytest.mark.parametrize(
    ("store", "bytes_of_a_lane"),
    [("global_store_dword v1, v0, s[2:3]", 4), ("global_store_byte v1, v0, s[2:3]", 1),
     ("global_store_short v1, v0, s[2:3]", 2), ("global_atomic_add v1, v0, s[2:3]", 4)],
)  # fmt: skip
def test_stored_bytes_are_marked_and_no_others(store, bytes_of_a_lane):
    host, written = np.zeros(64, np.uint32), np.zeros(256, bool)
    guard = "v_cmp_gt_u32_e32 vcc, 8, v0\ns_and_saveexec_b64 s[4:5], vcc\nv_lshlrev_b32 v1, 2, v0\n"
    launch(guard + store, host, written=written)
    want = np.zeros((64, 4), bool)
    want[:8, :bytes_of_a_lane] = True
    np.testing.assert_array_equal(written.reshape(64, 4), want)
