"""The timing model against what was published of the hardware and against loops with known times."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from emulator_machine import assembly

from narrowkv.cdna_emulator import Memory, load_program
from narrowkv.cdna_emulator.timing import (
    MACHINES,
    SOURCE_NAMES,
    SOURCES,
    IdleTraceError,
    PeakError,
    Survey,
    predict,
    predict_launch,
    simulate,
    survey,
    trace_text,
    trace_workgroup,
)
from narrowkv.cdna_emulator.timing.trace import Trace, bank_clocks

BOTH = pytest.mark.parametrize("target", ["gfx942", "gfx950"])
LANES = np.arange(64)


def trace(target: str, body: str, *, passes: int = 32, warps: int = 1, before: str = "") -> Trace:
    """Runs a loop that stores nothing."""
    lines = f"""
        {before}
        s_mov_b32 s8, 0
    LOOP:
        {body}
        s_add_u32 s8, s8, 1
        s_cmp_lt_u32 s8, {passes}
        s_cbranch_scc1 LOOP
    """
    program = load_program(assembly(target, lines, warps=warps), lds_bytes=65536)
    return trace_workgroup(program, grid=(1, 1, 1), args=[], memory=Memory())


def clocks(target: str, body: str, *, warps: int = 1, before: str = "") -> float:
    """Clocks of a pass less what the loop itself costs."""
    machine = MACHINES[target]

    def a_pass(lines: str) -> float:
        loop = simulate(trace(target, lines, warps=warps, before=before), machine).loop
        assert loop is not None
        return loop.clocks

    return a_pass(body) - a_pass("")


# Issue intervals of ds_read_b128 by a thread trace of MI355X (ROCm/gfx950-gluon-tutorials,
# experiments/lds_throughput_validation): lanes' distance in bytes, clocks with one wave, with four.
INTERVALS = {
    "free of conflicts": (16, 8, 16),
    "in twos": (32, 8, 32),
    "in fours": (64, 16, 64),
    "in eights": (128, 32, 128),
    "in sixteens": (256, 64, 256),
}


@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("warps", [1, 4])
def test_intervals_of_lds_reads_as_measured(name: str, warps: int) -> None:
    stride, alone, together = INTERVALS[name]
    before = f"v_and_b32_e32 v1, 63, v0\nv_mul_u32_u24_e32 v1, {stride}, v1\n"
    reads = 16
    body = "\n".join(["ds_read_b128 v[4:7], v1"] * reads) + "\ns_waitcnt lgkmcnt(0)"
    per_read = clocks("gfx950", body, warps=warps, before=before) / reads
    assert per_read == pytest.approx(alone if warps == 1 else together, abs=5)  # the wait is spread over them


@pytest.mark.parametrize(
    ("target", "size", "stride", "is_write", "expected"),
    [
        ("gfx942", 4, 4, False, 2), ("gfx942", 8, 8, False, 4), ("gfx942", 16, 16, False, 8),
        ("gfx942", 16, 16, True, 8), ("gfx942", 4, 128, False, 64), ("gfx942", 4, 0, False, 2),
        ("gfx950", 4, 4, False, 1), ("gfx950", 8, 8, False, 2), ("gfx950", 16, 16, False, 4),
        ("gfx950", 8, 8, True, 4), ("gfx950", 4, 256, False, 64), ("gfx950", 4, 0, False, 1),
    ],
)  # fmt: skip
def test_bank_conflicts_by_address(
    target: str, size: int, stride: int, is_write: bool, expected: int
) -> None:
    assert bank_clocks(LANES * stride, size, target, is_write=is_write) == expected


def test_lanes_that_are_off_take_no_bank() -> None:
    offsets = np.where(LANES < 4, LANES * 128, -1)
    assert bank_clocks(offsets, 4, "gfx942", is_write=False) == 4


MATRIX = "v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[6:7], v[8:11]"


@BOTH
def test_a_matrix_unit_takes_one_instruction_in_16_clocks(target: str) -> None:
    assert clocks(target, "\n".join([MATRIX] * 8)) == pytest.approx(8 * 16, abs=12)
    loop = simulate(trace(target, "\n".join([MATRIX] * 64)), MACHINES[target]).loop
    assert loop is not None
    assert loop.busy["matrix"] == pytest.approx(0.25, abs=0.02)  # one of four SIMDs has a wave


@BOTH
def test_vector_instructions_run_beside_a_matrix_instruction(target: str) -> None:
    free = (16 - MACHINES[target].matrix_shadow) // 4
    body = "\n".join([MATRIX, *["v_add_f32_e32 v1, v2, v3"] * free] * 8)
    assert clocks(target, body) == pytest.approx(8 * 16, abs=12)
    more = "\n".join([MATRIX, *["v_add_f32_e32 v1, v2, v3"] * (free + 2)] * 8)
    assert clocks(target, more) == pytest.approx(8 * 24, abs=12)


@BOTH
def test_slow_vector_instructions(target: str) -> None:
    slow = MACHINES[target].transcendental
    assert clocks(target, "\n".join(["v_exp_f32_e32 v1, v2"] * 16)) == pytest.approx(16 * slow, abs=slow)
    assert clocks(target, "\n".join(["v_mul_lo_u32 v1, v2, v3"] * 16)) == pytest.approx(256, abs=16)
    assert clocks(target, "s_nop 7") == 32


@BOTH
def test_a_barrier_waits_for_the_slowest_wave(target: str) -> None:
    slowest = "\n".join(["v_add_f32_e32 v1, v2, v3"] * 64)
    body = f"""
        v_readfirstlane_b32 s9, v0
        s_cmp_lg_u32 s9, 0
        s_cbranch_scc1 SKIP
        {slowest}
    SKIP:
        s_barrier
    """
    loop = simulate(trace(target, body, warps=4, passes=8), MACHINES[target]).loop
    assert loop is not None
    assert loop.clocks == pytest.approx(64 * 4 + MACHINES[target].barrier + 40, abs=20)
    assert loop.stalls["barrier"] > 0.5


@BOTH
def test_bytes_in_flight_bound_a_stream(target: str) -> None:
    """Loads that nothing waits for: as many bytes a latency as can be under way."""
    machine = dataclasses.replace(MACHINES[target], hbm_bytes_per_s=1e15, hbm_latency=4000, l2=999, l1=999)
    text = assembly(target, """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 4, v0
        s_mov_b32 s8, 0
        s_waitcnt lgkmcnt(0)
    LOOP:
        global_load_dwordx4 v[4:7], v1, s[4:5]
        global_load_dwordx4 v[4:7], v1, s[4:5] offset:1024
        v_add_u32_e32 v1, 0x800, v1
        s_add_u32 s8, s8, 1
        s_cmp_lt_u32 s8, 200
        s_cbranch_scc1 LOOP
    """)  # fmt: skip
    argument = "- .args:\n      - .offset: 0\n        .size: 8\n        .value_kind: global_buffer"
    text = text.replace("- .args: []", argument)
    text = text.replace(".max_flat", ".kernarg_segment_size: 8\n    .max_flat")
    program = load_program(text, lds_bytes=0)
    memory = Memory()
    words = np.zeros(1 << 19, np.uint8)
    stream = trace_workgroup(program, grid=(1, 1, 1), args=[memory.map(words)], memory=memory)
    loop = simulate(stream, machine).loop
    assert loop is not None
    assert 2048 / loop.clocks == pytest.approx(machine.in_flight / 4000, rel=0.15)
    assert loop.stalls["bytes in flight"] > 0.5


@BOTH
def test_loads_of_the_same_lines_hit_the_cache(target: str) -> None:
    loads = trace_text(load_program(assembly(target, """
    LOOP:
        buffer_load_dword v2, v1, s[8:11], 0 offen
        s_waitcnt vmcnt(0)
        s_cbranch_scc1 LOOP
    """), lds_bytes=0), passes=12)  # fmt: skip
    hit = dataclasses.replace(loads, waves=tuple(
        tuple(dataclasses.replace(op, lines=(1, 2)) if op.kind == "load" else op for op in wave)
        for wave in loads.waves
    ))  # fmt: skip
    missed, found = (simulate(t, MACHINES[target]).loop for t in (loads, hit))
    assert missed is not None
    assert found is not None
    assert missed.clocks > MACHINES[target].memory_latency
    assert found.clocks < MACHINES[target].memory_latency / 2


@BOTH
def test_a_prediction_says_that_it_is_a_model(target: str) -> None:
    loop = trace(target, "\n".join([MATRIX] * 16), warps=4)
    units = MACHINES[target].compute_units
    one, many = (predict(loop, workgroups=n * units, passes=1000, lds_bytes=0) for n in (1, 64))
    assert one.summary.startswith("model: ")
    assert one.bound == "matrix"
    assert one.matrix_share > 0.85
    assert one.flops == 1000 * 16 * 4 * 2 * 16**3 * units
    assert many.workgroups_per_unit == 4  # 128 registers
    assert many.seconds / one.seconds == pytest.approx(64, rel=0.15)
    assert one.clock_hz == MACHINES[target].clock(one.matrix_share)


def test_occupancy_by_registers_and_lds() -> None:
    machine = MACHINES["gfx942"]
    assert machine.workgroups_per_unit(4, 128, 0) == 4
    assert machine.workgroups_per_unit(4, 129, 0) == 3
    assert machine.workgroups_per_unit(4, 256, 40 * 1024) == 1
    assert machine.workgroups_per_unit(1, 64, 0) == 32
    assert MACHINES["gfx950"].workgroups_per_unit(4, 256, 40 * 1024) == 2


def test_every_figure_has_a_source() -> None:
    figures = {f.name for f in dataclasses.fields(MACHINES["gfx942"])} - {"name", "chip"}
    assert set(SOURCES) == figures
    assert {text[0] for text in SOURCES.values()} <= set(SOURCE_NAMES)


@BOTH
def test_the_loop_of_a_text_alone(target: str) -> None:
    """Without addresses: no conflicts, coalesced loads, every branch in the loop falls through."""
    body = "\n".join([MATRIX] * 16 + ["ds_read_b128 v[4:7], v1", "s_waitcnt lgkmcnt(0)"])
    run = trace(target, body, before="v_lshlrev_b32_e32 v1, 4, v0")
    text = trace_text(run.program)
    assert not text.has_addresses
    by_run, by_text = (simulate(t, MACHINES[target]).loop for t in (run, text))
    assert by_run is not None
    assert by_text is not None
    assert by_text.clocks == pytest.approx(by_run.clocks, rel=0.4)
    with pytest.raises(ValueError, match="no loop"):
        trace_text(load_program(assembly(target, MATRIX), lds_bytes=0))


UNEVEN = """
    s_cmp_lt_u32 s2, {working}
    s_cbranch_scc0 END
    s_and_b32 s3, s2, 1
    s_lshl_b32 s3, s3, 5
    s_add_u32 s3, s3, 32
LOOP:
    v_mfma_f32_16x16x16_f16 v[8:11], v[4:5], v[4:5], v[8:11]
    s_sub_u32 s3, s3, 1
    s_cmp_eq_u32 s3, 0
    s_cbranch_scc0 LOOP
END:
    s_nop 0
"""


def surveyed(working: int, grid: int, **options: float) -> Survey:
    """A launch whose first workgroups loop, the odd ones twice as often; the others leave at once."""
    program = load_program(assembly("gfx942", UNEVEN.format(working=working)), lds_bytes=0)
    return survey(program, grid=(grid, 1, 1), args=[], memory=Memory(), **options)


def test_a_survey_tells_idle_workgroups_from_those_that_work() -> None:
    found = surveyed(40, 200)
    assert found.working == 40
    counts = {share.is_idle: [] for share in found.shares}
    for number, share in enumerate(found.shares):
        products = sum(op.kind == "mfma" for wave in share.trace.waves for op in wave)
        counts[share.is_idle].append((products, int((found.classes == number).sum())))
    assert counts == {True: [(0, 160)], False: [(32, 20), (64, 20)]}
    assert found.matrix_clocks == 16 * (20 * 32 + 20 * 64)


def test_a_survey_that_runs_out_of_budget_extends_what_it_saw() -> None:
    found = surveyed(2000, 4000, budget=2e4)
    assert found.working == pytest.approx(2000, rel=0.05)


def test_idle_workgroups_do_not_make_a_launch_faster() -> None:
    alone = predict_launch(surveyed(300, 300), lds_bytes=0)
    among_idle = predict_launch(surveyed(300, 2400), lds_bytes=0)
    assert alone.clocks <= among_idle.clocks < 1.5 * alone.clocks
    assert (among_idle.working, among_idle.workgroups) == (300, 2400)
    assert among_idle.flops == alone.flops


def test_rounds_of_unequal_workgroups() -> None:
    """A compute unit takes the next workgroup of its XCD: with one XCD the time is the mean of the shares.

    Of eight XCDs, four get all workgroups of odd numbers, which take longest.
    """
    machine = MACHINES["gfx942"]
    units = machine.compute_units
    found = surveyed(20 * units, 20 * units)
    one, eight = (
        predict_launch(found, lds_bytes=0, workgroups_per_unit=1, machine=each).clocks
        for each in (replace(machine, xcds=1), machine)
    )
    spans = [
        predict(s.trace, lds_bytes=0, workgroups_per_unit=1, workgroups=units).clocks for s in found.shares
    ]
    assert one == pytest.approx(20 * sum(spans) / len(spans), rel=0.1)
    assert eight == pytest.approx(20 * max(spans), rel=0.1)


def test_an_idle_launch_is_refused() -> None:
    with pytest.raises(IdleTraceError, match="leaves without a matrix instruction"):
        surveyed(0, 64)
    found = surveyed(40, 200)
    idle = [number for number, share in enumerate(found.shares) if share.is_idle]
    only = replace(found, shares=tuple(found.shares[k] for k in idle), classes=np.zeros(200, int))
    with pytest.raises(IdleTraceError):
        predict_launch(only, lds_bytes=0)


def test_a_time_above_a_peak_is_refused() -> None:
    found = surveyed(40, 200)
    for unit, clocks in (("matrix", 1e9), ("vector", 1e9), ("lds", 1e9)):
        with pytest.raises(PeakError, match="do not stand for the launch"):
            predict_launch(replace(found, **{f"{unit}_clocks": clocks}), lds_bytes=0)


def test_a_survey_leaves_memory_as_it_was() -> None:
    words = np.arange(64, dtype=np.uint32)
    memory = Memory()
    pointer = memory.map(words.view(np.uint8))
    setup = f"s_mov_b32 s4, {pointer & 0xFFFFFFFF:#x}\ns_mov_b32 s5, {pointer >> 32:#x}\n"
    lines = "v_lshlrev_b32_e32 v1, 2, v0\nv_mov_b32_e32 v2, 0\nglobal_store_dword v1, v2, s[4:5]"
    survey(
        load_program(assembly("gfx942", setup + lines), lds_bytes=0), grid=(3, 1, 1), args=[], memory=memory
    )
    assert words.tolist() == list(range(64))
