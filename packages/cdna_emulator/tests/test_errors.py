"""What the emulator must refuse, and that it says where."""

import numpy as np
import pytest
from emulator_machine import assembly, launch

from narrowkv.cdna_emulator import (
    DeadlockError,
    EmulatorError,
    Memory,
    MisalignedError,
    OutOfRangeError,
    RaceError,
    UninitialisedError,
    load_program,
    run,
)
from narrowkv.cdna_emulator import launch as launching

either_engine = pytest.mark.parametrize("engine", ["numpy", "compiled"])
ADDRESS = "v_lshlrev_b32 v1, 2, v0\n"  # v1 = 4 * lane


@pytest.fixture
def host():
    return np.zeros(64, np.uint32)


def test_store_past_the_end_names_lane_address_and_line(host):
    with pytest.raises(OutOfRangeError) as caught:
        launch(ADDRESS + "global_store_dword v1, v0, s[2:3] offset:8", host)
    error = caught.value
    assert (error.lane, error.wave, error.workgroup, error.kernel) == (62, 0, (0, 0, 0), "kernel")
    assert error.address == host.ctypes.data + 256
    assert "host" in str(error)
    assert "global_store_dword" in error.source


def test_load_before_the_start(host):
    with pytest.raises(OutOfRangeError, match="4 bytes before buffer 'host'"):
        launch(ADDRESS + "global_load_dword v2, v1, s[2:3] offset:-4", host)


def test_inactive_lanes_may_hold_any_address(host):
    launch("v_cmp_gt_u32_e32 vcc, 8, v0\ns_and_saveexec_b64 s[4:5], vcc\nv_lshlrev_b32 v2, 2, v0\n"
           "global_store_dword v2, v0, s[2:3]", host)  # fmt: skip
    np.testing.assert_array_equal(host[:9], [0, 1, 2, 3, 4, 5, 6, 7, 0])


def test_buffer_descriptor_bounds_read_zero_and_drop_stores(host):
    host[:] = 7
    launch(ADDRESS + "s_mov_b32 s4, s2\ns_mov_b32 s5, s3\ns_mov_b32 s6, 128\ns_mov_b32 s7, 0x27000\n"
           "buffer_load_dword v2, v1, s[4:7], 0 offen\nv_add_u32 v2, 1, v2\n"
           "buffer_store_dword v2, v1, s[4:7], 0 offen\n"
           "v_mul_u32_u24 v3, 0, v0\nv_readlane_b32 s8, v2, 40\nv_mov_b32 v2, s8\n"
           "global_store_dword v3, v2, s[2:3]", host)  # fmt: skip
    assert host[0] == 1
    assert (host[1:32] == 8).all()
    assert (host[32:] == 7).all()


def test_read_only_buffer(host):
    with pytest.raises(OutOfRangeError, match="read-only"):
        launch(ADDRESS + "global_store_dword v1, v0, s[2:3]", host, readonly=True)


def test_misaligned(host):
    with pytest.raises(MisalignedError):
        launch(ADDRESS + "global_atomic_add v1, v0, s[2:3] offset:2", np.zeros(65, np.uint32))
    with pytest.raises(MisalignedError):
        launch(ADDRESS + "ds_read_b32 v2, v1 offset:1", host)


def test_lds_bounds(host):
    with pytest.raises(OutOfRangeError) as caught:
        launch(ADDRESS + "ds_write_b32 v1, v0 offset:772", host)
    assert caught.value.lane == 63
    assert caught.value.address == 1024


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("lines", ["global_store_dword v1, v9, s[2:3]",
"ds_read_b32 v9, v1\nglobal_store_dword v1, v9, s[2:3]"],
                         ids=["register", "lds"])  # fmt: skip
def test_uninitialised_value_is_stored(host, lines, check):
    with pytest.raises(UninitialisedError, match="uninitialised"):
        launch(ADDRESS + lines, host, check_uninitialised=check)


@pytest.mark.parametrize("lines", [
    "v_lshrrev_b32 v2, 3, v9\nglobal_store_dword v1, v2, s[2:3]",
    "ds_read_u8 v2, v0\nglobal_store_byte v0, v2, s[2:3]",
    "v_and_b32 v9, 60, v9\nglobal_store_dword v9, v0, s[2:3]",
    "s_cmp_gt_u32 s9, 0x50000000\ns_cbranch_scc1 L1\nv_mov_b32 v2, 0\nL1:\ns_nop 0",
], ids=["arithmetic", "lds-byte", "address", "branch"])  # fmt: skip
@either_engine
def test_what_depends_on_uninitialised_values_is_found_by_the_check(host, lines, engine):
    with pytest.raises(UninitialisedError):
        launch(ADDRESS + lines, host, check_uninitialised=True, engine=engine)


@either_engine
def test_the_check_lets_unused_uninitialised_values_pass(host, engine):
    launch(ADDRESS + "ds_read_b32 v9, v1\nv_mul_lo_u32 v9, v9, 0\nv_add_u32 v2, v9, v0\n"
    "global_store_dword v1, v2, s[2:3]",
           host, check_uninitialised=True, engine=engine)  # fmt: skip
    np.testing.assert_array_equal(host, np.arange(64))


def test_what_depends_on_the_order_of_workgroups_passes_the_check_of_the_compiled_engine(host, monkeypatch):
    """Where its two runs differ, numpy decides."""
    contents = iter((0, 1))
    run_once = launching.run_translated

    def in_another_order(program, memory, *arguments):
        found = run_once(program, memory, *arguments)
        memory.buffers[0].data[0] = next(contents)
        return found

    monkeypatch.setattr(launching, "run_translated", in_another_order)
    launch(ADDRESS + "global_store_dword v1, v0, s[2:3]", host, check_uninitialised=True, engine="compiled")
    np.testing.assert_array_equal(host, np.arange(64))
    assert not list(contents)


def test_race_between_two_waves(host):
    text = ADDRESS + (
        "v_and_b32 v2, 0xff, v1\nds_write_b32 v2, v0\nds_read_b32 v3, v2 offset:4\n"
        "global_store_dword v2, v3, s[2:3]"
    )
    with pytest.raises(RaceError) as caught:
        launch(text, host, warps=2, detect_races=True, wave_order="lockstep")
    assert caught.value.wave in (0, 1)
    assert caught.value.address is not None


SHARED = "v_and_b32 v2, 0xff, v1\n{first}\nds_write_b32 v2, v4\n{second}\nglobal_store_dword v2, v3, s[2:3]"
READ = "s_barrier\nds_read_b32 v3, v2"


def test_waves_that_write_one_number_to_one_place_do_not_race(host):
    text = ADDRESS + SHARED.format(first="v_mov_b32 v4, 7", second=READ)
    launch(text, host, warps=2, detect_races=True, wave_order="lockstep")
    np.testing.assert_array_equal(host, 7)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("v_lshrrev_b32 v4, 6, v0", READ),
        ("v_mov_b32 v4, 5\nds_write_b32 v2, v4\nv_mov_b32 v4, 7", READ),
        ("v_mov_b32 v4, 7\nds_read_b32 v3, v2", READ),
    ],
    ids=["a number each", "another number before", "a read before"],
)
def test_the_order_of_waves_that_write_to_one_place_matters(host, first, second):
    text = ADDRESS + SHARED.format(first=first, second=second)
    for order in ("turns", "lockstep"):
        with pytest.raises(RaceError):
            launch(text, host, warps=2, detect_races=True, wave_order=order)


def test_no_race_with_a_barrier_and_waves_apart(host):
    far = ADDRESS + (
        "ds_write_b32 v1, v0\ns_barrier\nv_xor_b32 v2, 0x100, v1\nds_read_b32 v3, v2\n"
        "global_store_dword v1, v3, s[2:3]"
    )
    wide = np.zeros(128, np.uint32)
    launch(far, wide, warps=2, detect_races=True)
    np.testing.assert_array_equal(wide, np.arange(128) ^ 64)
    with pytest.raises(RaceError):
        launch(far.replace("s_barrier\n", ""), wide, warps=2, detect_races=True, wave_order="lockstep")


def test_endless_loop(host):
    with pytest.raises(DeadlockError):
        launch("L0:\ns_branch L0", host, max_blocks=500)


@pytest.mark.parametrize(
    ("text", "lds_bytes", "error", "message"),
    [
        ("hello", 0, EmulatorError, "target"), (assembly("gfx90a", "s_nop 0"), 0, EmulatorError, "gfx90a"),
        (b"", 0, TypeError, "asm_text must be a str, got bytes"),
        (assembly("gfx942", "s_nop 0"), 200_000, ValueError, "lds_bytes must be within"),
    ],
    ids=["no assembly", "another target", "bytes", "too much LDS"],
)  # fmt: skip
def test_text_that_is_no_kernel(text, lds_bytes, error, message):
    with pytest.raises(error, match=message):
        load_program(text, lds_bytes=lds_bytes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"args": [1]}, "args must have 0 entries"), ({"grid": (1, 1)}, "grid must be three numbers"),
        ({"grid": (2, 1, 1), "workgroups": [(2, 0, 0)]},
         r"workgroups must lie in the grid \(2, 1, 1\), got \(2, 0, 0\)"),
        ({"wave_order": "random"}, "wave_order"),
    ],
    ids=["args", "grid", "workgroups", "wave_order"],
)  # fmt: skip
def test_misuse_names_the_argument(changes, message):
    program = load_program(assembly("gfx942", "s_nop 0"))
    with pytest.raises(ValueError, match=message):
        run(program, **{"grid": (1, 1, 1), "args": [], "memory": Memory(), **changes})


def test_memory_is_bytes_in_a_row(host):
    with pytest.raises(TypeError, match="uint8"):
        Memory().map(host)
    with pytest.raises(ValueError, match="one-dimensional and contiguous"):
        Memory().map(np.zeros((4, 4), np.uint8))
    with pytest.raises(ValueError, match="written must be a bool array of shape"):
        Memory().map(np.zeros(8, np.uint8), written=np.zeros(4, bool))
