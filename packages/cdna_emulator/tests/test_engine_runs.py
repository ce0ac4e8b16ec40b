"""Runs of the compiled engine: errors, checks, workgroups that wait for others, and building its library."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from emulator_machine import assembly, launch

import narrowkv.cdna_emulator as emulator
from narrowkv.cdna_emulator import Memory, engine_of, engine_refusal, load_program, run
from narrowkv.cdna_emulator.compiled import building
from narrowkv.cdna_emulator.valu_ops import VALU

pytestmark = pytest.mark.skipif(
    engine_refusal(load_program(assembly("gfx942", "s_nop 0"))) is not None, reason="no C compiler"
)


def test_transcendentals_are_the_same_for_a_million_numbers():
    count = 1 << 20
    rng = np.random.default_rng(11)
    x = (rng.normal(size=count) * 10 ** rng.uniform(-4, 2, count)).astype(np.float32)
    x[: count // 4] = rng.integers(0, 0x7F800000, count // 4, dtype=np.uint32).view(np.float32)
    names = ("v_exp_f32", "v_log_f32", "v_rsq_f32", "v_sin_f32", "v_cos_f32", "v_rcp_f32", "v_sqrt_f32")
    lines = "s_mul_i32 s6, s2, 256\nv_lshlrev_b32 v1, 2, v0\nv_add_u32 v1, s6, v1\n"
    lines += "global_load_dword v2, v1, s[4:5]\n"
    for name in names:
        lines += f"{name} v3, v2\nglobal_store_dword v1, v3, s[8:9]\n"
        lines += f"s_add_u32 s8, s8, {4 * count}\ns_addc_u32 s9, s9, 0\n"
    memory, out = Memory(), np.zeros((len(names), count), np.uint32)
    pointers = {4: memory.map(x.view(np.uint8)), 8: memory.map(out.reshape(-1).view(np.uint8))}
    setup = "".join(
        f"s_mov_b32 s{r + k}, {p >> 32 * k & 0xFFFFFFFF:#x}\n" for r, p in pointers.items() for k in (0, 1)
    )
    program = load_program(assembly("gfx942", setup + lines), lds_bytes=0)
    results = []
    for engine in ("numpy", "compiled"):
        options = {"check_uninitialised": False, "batch_workgroups": 2048, "engine": engine}
        run(program, grid=(count // 64, 1, 1), args=[], memory=memory, **options)
        results.append(out.copy())
    nan = np.isnan(results[0].view(np.float32)) & np.isnan(results[1].view(np.float32))
    assert {
        name: int(n)
        for name, n in zip(names, ((results[0] != results[1]) & ~nan).sum(axis=1), strict=True)
        if n
    } == {}


FAULTS = {
    "load out of range": "global_load_dword v1, v0, s[2:3] offset:1000",
    "unaligned load past the end": "global_load_dwordx2 v[2:3], v0, s[2:3] offset:765",
    "store out of range": "v_mov_b32 v1, 1\nglobal_store_dword v0, v1, s[2:3] offset:1000",
    "unaligned store past the end": "v_mov_b32 v1, 1\nglobal_store_dwordx2 v0, v[0:1], s[2:3] offset:767",
    "uninitialised": "global_store_dword v0, v9, s[2:3]",
    "LDS past the end": "v_lshlrev_b32 v0, 5, v0\nds_read_b32 v1, v0",
    "misaligned LDS": "ds_read_b32 v1, v0 offset:2",
    "atomic out of range": "v_mov_b32 v1, 1\nglobal_atomic_add v0, v1, s[2:3] offset:1000",
    "misaligned atomic": "v_mov_b32 v1, 1\nglobal_atomic_add v0, v1, s[2:3] offset:2",
    "scalar load out of range": "s_load_dwordx4 s[4:7], s[2:3], 0x3f8",
    "endless": "loop:\ns_branch loop",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_the_same_errors(fault):
    lines = "v_lshlrev_b32 v0, 2, v0\n" * (not fault.startswith("LDS")) + FAULTS[fault]
    host, found = np.zeros(256, np.uint32), []
    for engine in ("numpy", "compiled"):
        with pytest.raises(emulator.EmulatorError) as caught:
            launch(lines, host, engine=engine, check_uninitialised=False, max_blocks=1000)
        error: Any = caught.value
        place = error.workgroup, error.wave, error.lane, error.address
        found.append(
            (type(error), error.message, error.line, error.source, *(() if fault == "endless" else place))
        )
    if fault == "endless":  # numpy names the last instruction that it knows of
        found = [entry[:2] for entry in found]
    assert found[0] == found[1]


@pytest.mark.parametrize("engine", ["numpy", "compiled"])
@pytest.mark.parametrize(("name", "size"), [("short", 2), ("dword", 4), ("dwordx3", 12), ("dwordx4", 16)])
def test_loads_and_stores_need_no_alignment(engine, name, size):
    """Lane l loads at byte 3 + 17 l and stores at 1101 + 11 l; the last lane wins."""
    host = np.random.default_rng(2).integers(0, 256, 2048).astype(np.uint8)
    want, written = host.copy(), np.zeros(2048, bool)
    for lane in range(64):
        want[1101 + 11 * lane :][:size] = host[3 + 17 * lane :][:size]
    data = {2: "v4", 4: "v4", 12: "v[4:6]", 16: "v[4:7]"}[size]
    load = f"global_load_{'ushort' if size == 2 else name} {data}, v1, s[2:3] offset:3"
    lines = f"v_mul_u32_u24 v1, 17, v0\n{load}\nv_mul_u32_u24 v2, 11, v0\n"
    lines += f"global_store_{name} v2, {data}, s[2:3] offset:1101"
    launch(lines, host, engine=engine, check_uninitialised=False, written=written)
    np.testing.assert_array_equal(host, want)
    stored = (1101 + 11 * np.arange(64)[:, None] + np.arange(size)).reshape(-1)
    np.testing.assert_array_equal(np.flatnonzero(written), np.unique(stored))


def test_a_store_to_a_read_only_buffer_is_refused():
    host = np.zeros(64, np.uint32)
    with pytest.raises(emulator.OutOfRangeError, match="read-only"):
        launch(
            "v_lshlrev_b32 v0, 2, v0\nglobal_store_dword v0, v0, s[2:3]",
            host,
            readonly=True,
            engine="compiled",
        )


def test_stores_are_marked():
    host, written = np.zeros(64, np.uint32), np.zeros(256, bool)
    lines = "v_lshlrev_b32 v0, 3, v0\ns_mov_b64 exec, 0xff\nglobal_store_short v0, v0, s[2:3] offset:2"
    launch(lines, host, written=written, engine="compiled")
    assert np.flatnonzero(written).tolist() == [8 * lane + k for lane in range(8) for k in (2, 3)]


def test_private_memory():
    lines = "v_lshlrev_b32 v2, 3, v0\nv_mov_b32 v1, 7\nscratch_store_dwordx2 off, v[0:1], off offset:8\n"
    lines += "scratch_load_dwordx2 v[4:5], off, off offset:8\nglobal_store_dwordx2 v2, v[4:5], s[2:3]"
    host = np.zeros(128, np.uint32)
    memory = Memory()
    pointer = memory.map(host.view(np.uint8))
    text = assembly(
        "gfx942", f"s_mov_b32 s2, {pointer & 0xFFFFFFFF:#x}\ns_mov_b32 s3, {pointer >> 32:#x}\n{lines}"
    )
    text = text.replace(
        ".amdhsa_kernel kernel", ".amdhsa_kernel kernel\n\t\t.amdhsa_private_segment_fixed_size 16"
    )
    run(load_program(text, lds_bytes=0), grid=(1, 1, 1), args=[], memory=memory, engine="compiled")
    assert host.reshape(64, 2).tolist() == [[lane, 7] for lane in range(64)]


def test_workgroups_that_wait_for_later_ones_end():
    """The first workgroup spins until the last has stored: both make progress, on one core too."""
    lines = """
        v_mov_b32 v1, 0
        v_mov_b32 v2, 1
        s_mov_b64 exec, 1
        s_cmp_eq_u32 s2, 0
        s_cbranch_scc0 writes
        wait:
        global_load_dword v3, v1, s[4:5] sc1
        s_waitcnt vmcnt(0)
        v_readfirstlane_b32 s6, v3
        s_cmp_eq_u32 s6, 40
        s_cbranch_scc0 wait
        s_branch done
        writes:
        global_atomic_add v1, v2, s[4:5]
        done:
        s_nop 0"""
    host = np.zeros(4, np.uint32)
    result = launch(lines, host, at=4, grid=(41, 1, 1), engine="compiled", max_blocks=1 << 40)
    assert host[0] == 40
    assert result.workgroups == 41


def test_waves_of_a_workgroup_pass_barriers_together():
    lines = """
        v_lshlrev_b32 v1, 2, v0
        ds_write_b32 v1, v0
        s_waitcnt lgkmcnt(0)
        s_barrier
        v_xor_b32 v2, 0x80, v0
        v_lshlrev_b32 v2, 2, v2
        ds_read_b32 v3, v2
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v3, s[2:3]"""
    host = np.zeros(256, np.uint32)
    launch(lines, host, warps=4, engine="compiled")
    assert host.tolist() == [k ^ 0x80 for k in range(256)]


def test_checks_that_only_numpy_makes_are_refused_or_sampled():
    host = np.zeros(64, np.uint32)
    lines = "v_lshlrev_b32 v1, 2, v0\nglobal_store_dword v1, v0, s[4:5]"
    with pytest.raises(emulator.EngineUnavailableError, match="detect_races"):
        launch(lines, host, at=4, engine="compiled", detect_races=True)
    race = "ds_write_b32 v2, v0\nds_read_b32 v3, v2\n" + lines  # of two waves
    race = "v_mov_b32 v2, 0\n" + race
    with pytest.raises(emulator.RaceError):
        launch(
            race,
            np.zeros(128, np.uint32),
            at=4,
            warps=2,
            grid=(9, 1, 1),
            engine="auto",
            checked=2,
            detect_races=True,
        )
    result = launch(lines, host, at=4, grid=(9, 1, 1), engine="compiled", checked=2, detect_hazards=True)
    assert result == launch(lines, host, at=4, grid=(9, 1, 1))


def test_auto_takes_numpy_with_a_warning_where_an_operation_is_missing(monkeypatch):
    monkeypatch.setitem(VALU, "v_made_up_u32", VALU["v_add_u32"])
    program = load_program(assembly("gfx942", "v_made_up_u32 v1, v0, v0"))
    assert engine_of(program) == "numpy"
    assert "v_made_up_u32 (line 5" in str(engine_refusal(program))
    options: dict[str, Any] = {"grid": (1, 1, 1), "args": [], "memory": Memory()}
    with pytest.warns(UserWarning, match="v_made_up_u32"):
        assert run(program, engine="auto", **options) == run(program, **options)
    with pytest.raises(emulator.EngineUnavailableError, match="v_made_up_u32"):
        run(program, engine="compiled", **options)


def test_a_missing_compiler_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "one.c").write_text("int one(void) { return 1; }")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(building.BuildError) as caught:
        building.build_library("one", [tmp_path / "one.c"])
    assert (
        str(caught.value) == "no C compiler: CC=no-such-compiler does not run; install one, or name it in CC"
    )


def test_a_library_is_built_once_by_processes_at_once(monkeypatch, tmp_path):
    (tmp_path / "one.c").write_text("int one(void) { return 1; }")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    counter = tmp_path / "cc"
    counter.write_text(
        f'#!/bin/sh\ncase "$*" in *-c*) echo x >> {tmp_path}/builds; sleep 0.3;; esac\nexec gcc "$@"\n'
    )
    counter.chmod(0o755)
    monkeypatch.setenv("CC", str(counter))
    code = (
        "import sys, pathlib; from narrowkv.cdna_emulator.compiled.building import build_library; "
        "print(build_library('one', [pathlib.Path(sys.argv[1])]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "one.c")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate()[0] for process in running}
    assert len(paths) == 1
    assert (tmp_path / "builds").read_text() == "x\n"
    (tmp_path / "one.c").write_text("int one(void) { return 2 }")
    with pytest.raises(building.BuildError, match=r"failed with status 1: .*error"):
        building.build_library("one", [tmp_path / "one.c"])
