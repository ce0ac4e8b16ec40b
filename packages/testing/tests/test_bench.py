"""The benches without a GPU: sizes, floors, the checks around a measurement, and every call for real."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowkv.attn_decode import paged_decode, paged_decode_reference
from narrowkv.cdna_emulator.timing import MACHINES
from narrowkv.quant.accuracy import relative_l1
from narrowkv.runtime.errors import UnsupportedError
from narrowkv.runtime.launch import LaunchOptions, executing, launch
from narrowkv.testing.bench.decode import DecodeSizes, checker, decode_bench
from narrowkv.testing.bench.decode import make as make_decode
from narrowkv.testing.bench.indexer import IndexerSizes, indexer_bench
from narrowkv.testing.bench.kernels import _read_kernel
from narrowkv.testing.bench.large_cache import LargeCache
from narrowkv.testing.bench.measure import (
    KEYS,
    Bench,
    Call,
    Row,
    changes,
    measure,
    model_row,
    regressions,
    time_checked,
)
from narrowkv.testing.bench.prefill import PrefillSizes, prefill_bench
from narrowkv.testing.bench.prefill import make as make_prefill
from narrowkv.testing.bench.sage import SageSizes, sage_bench
from narrowkv.testing.bench.sparse import SparseSizes, sparse_bench
from narrowkv.testing.bench.timing import Ceilings, GraphTimer, Timing, measure_ceilings
from narrowkv.testing.cases.decode import BOUND, DecodeCase
from narrowkv.testing.model import ModelExecutor
from narrowkv.testing.operations import DecodeRows, PrefillRows
from narrowkv.testing.plot import plot_roofline

CEILINGS = Ceilings(copy_bytes_per_s=3e12, read_bytes_per_s=3e12, bf16_flops_per_s=8e14)
SIZES = DecodeSizes(2, 32, 16, 1, 3, 64, "bf16", "fp8_e4m3fn")


def test_timing_reports_the_median_and_the_tenths() -> None:
    timing = Timing.of([float(n) for n in range(101, 0, -1)])
    assert (timing.median_us, timing.p10_us, timing.p90_us, timing.samples) == (51.0, 11.0, 91.0, 101)
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0, 1)
    assert Timing.of([1.0, 2.0]).median_us == 1.5
    with pytest.raises(ValueError, match="samples_us"):
        Timing.of([])


def test_the_floor_is_the_larger_of_bytes_and_flops() -> None:
    assert CEILINGS.floor_us(3e9, 0) == pytest.approx(1000)
    assert CEILINGS.floor_us(3e6, 8e11) == pytest.approx(1000)


@pytest.mark.parametrize(
    ("fmt", "row_bytes"),
    [
        ("fp8_e4m3fn", 256), ("fp8_e4m3fn/bf16", 128 + 256), ("fp4_e2m1", 130), ("fp4_e2m1:32", 136),
        ("fp8_e4m3fn/fp4_e2m1", 128 + 65),
    ],
)  # fmt: skip
def test_bytes_and_flops_of_decode_by_hand(fmt: str, row_bytes: int) -> None:
    """K and V of a position and head with their scales; q and o; page ids."""
    sizes = DecodeSizes(4, 1024, 16, 8, 12, 128, "bf16", fmt)
    assert sizes.bytes_touched == 4 * 1024 * 8 * row_bytes + 2 * 4 * 96 * 128 * 2 + 4 * 4 * 64
    assert sizes.flops == 4 * 4 * 1024 * 96 * 128
    assert sizes.cache.layout == ("HND" if "fp4" in fmt else "NHD")


def test_bytes_and_flops_of_prefill_follow_the_causal_triangle() -> None:
    options = PrefillRows(
        new=(128, 1024), prefix=(0, 4096), heads=((96, 8),), cache_format=("fp8_e4m3fn",), head_dim=128,
        page_size=16,
    )  # fmt: skip
    _, rows, _ = make_prefill(options)
    assert [(row.new, row.prefix) for row in rows] == [(128, 0), (128, 4096), (1024, 0), (1024, 4096)]
    pairs = sum(4096 + 1 + i for i in range(1024))
    assert rows[-1].flops == 4 * 128 * 96 * pairs
    cache, q_and_o = 2 * 5120 * 8 * 128, 2 * 1024 * 96 * 128 * 2
    assert rows[-1].bytes_touched == cache + q_and_o + 4 * 5120 / 16


def test_bytes_and_flops_of_sparse_attention_by_hand() -> None:
    sizes = SparseSizes(tokens=2, heads=16, topk=8, pool=100)
    assert sizes.flops == 2 * 2 * 16 * 8 * (512 + 512)
    # 16 rows named of 100; q and o in bf16; indices and their ends.
    assert sizes.bytes_touched(583) == 16 * 583 + 2 * 2 * 16 * 512 * 2 + 2 * 9 * 4
    assert replace(sizes, pool=10).bytes_touched(583) - sizes.bytes_touched(583) == -6 * 583


@pytest.mark.parametrize(
    "fmt",
    [
        "fp4_e2m1", "fp4_e2m1:e4m3", "fp4_e2m1:32", "fp4_e2m1:16+e4m3", "fp8_e4m3fn/fp4_e2m1:32", "int8/int4",
        "int4/fp4_e2m1:32",
    ],
)  # fmt: skip
def test_packed_storage_is_what_the_sizes_say(fmt: str) -> None:
    sizes = DecodeSizes(2, 32, 16, 2, 3, 64, "bf16", fmt)
    cache, table = LargeCache(sizes.cache, device="cpu").view(sizes.cache)
    q = torch.randn(sizes.q_shape).bfloat16()
    stored = cache.v_descale
    if isinstance(stored, torch.Tensor) and "fp4" in fmt:
        assert (stored.dtype == torch.float8_e4m3fn) == fmt.endswith("e4m3")
    assert cache.bytes_per_token() * 64 == sizes.bytes_touched - 2 * q.numel() * 2 - 4 * 4
    o, expected = paged_decode(q, cache, table), paged_decode_reference(q, cache, table)
    assert relative_l1(o, expected) < BOUND  # type: ignore[arg-type]


def test_rows_that_share_a_cache_are_neighbours() -> None:
    options = DecodeRows(
        batch=(1, 2), context=(64,), page_size=(1, 16), num_kv_heads=2, ratio=(4, 12), head_dim=64, q="bf16",
        cache_format=("bf16", "fp8_e4m3fn"),
    )  # fmt: skip
    _, rows, _ = make_decode(options)
    assert len(rows) == len(set(rows)) == 16
    caches = [(r.format, r.batch, r.context) for r in rows]
    changed = sum(a != b for a, b in zip(caches, [None, *caches], strict=False))
    assert len(dict.fromkeys(caches)) == changed


def test_a_cache_is_the_same_tokens_at_every_page_size() -> None:
    large = LargeCache(SIZES.cache, device="cpu")
    cache, table = large.view(SIZES.cache)
    assert sorted(table.page_ids.flatten().tolist()) == [0, 1, 2, 3]
    other = replace(SIZES, page_size=1).cache
    assert large.fits(other)
    assert not large.fits(replace(SIZES, format="bf16").cache)
    token_cache, _ = large.view(other)
    assert token_cache.page_size == 1
    assert token_cache.k.data_ptr() == cache.k.data_ptr()
    assert bool(torch.isfinite(cache.dequantize()[0]).all())


def test_the_reading_kernel_reads_every_element() -> None:
    x = torch.arange(1024 * 37, dtype=torch.int32)
    out = torch.zeros(8, dtype=torch.int32)
    launch(_read_kernel, (8,), (x, out, 37), {"BLOCK": 1024, "STRIDE": 8}, LaunchOptions(num_warps=1))
    assert int(out.sum(dtype=torch.int32)) == int(x.sum(dtype=torch.int32))


class CpuTimer:
    """Stands in for the GPU's timer: runs calls for real, and makes up their times."""

    checked_replays = 4

    def __init__(self, median_us: float = 100.0) -> None:
        self.median_us = median_us
        self.timed = 0

    def capture(self, call: Callable[[], Any]) -> Any:
        call()
        return type("Graph", (), {"replay": staticmethod(call)})

    def replay(self, graph: Any) -> Timing:
        self.timed += 1
        return Timing(self.median_us, self.median_us * 0.9, self.median_us * 1.2, 10)

    def measure(self, call: Callable[[], Any]) -> Timing:
        return self.replay(self.capture(call))

    def wait(self) -> None:
        pass


Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def checked(run: Run, **options: Any) -> Call:
    """A call of decode whose output is made by `run` from the right one and an output tensor."""
    cache, table = LargeCache(SIZES.cache, device="cpu").view(SIZES.cache)
    q = torch.randn(SIZES.q_shape).bfloat16()
    right = paged_decode_reference(q, cache, table)
    assert isinstance(right, torch.Tensor)
    right, out = right.bfloat16(), torch.empty_like(q)
    error = checker(q, cache, table)
    return Call({"backend": "x"}, lambda: lambda: run(right, out), 1.0, 1.0, error, BOUND, **options)


def test_a_right_call_is_timed() -> None:
    timer = CpuTimer()
    error, differing, timing = time_checked(checked(lambda right, out: out.copy_(right)), timer)
    assert differing == 0
    assert error is not None
    assert 0 < error <= BOUND
    assert timing is not None
    assert timer.timed == 1


def test_a_call_that_leaves_an_output_unwritten_is_caught_by_the_poison() -> None:
    def lazy(right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out[:1] = right[:1]
        return out

    call, timer = checked(lazy), CpuTimer()
    error, _, timing = time_checked(call, timer)
    assert error is not None
    assert math.isnan(error)
    assert timing is None
    assert timer.timed == 0
    assert measure(call, {}, CEILINGS, timer).status == "fail"


def test_a_call_that_goes_wrong_while_it_is_timed_is_caught_after() -> None:
    calls = [0]

    def tiring(right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return out.copy_(right if calls[0] < 3 else right * 1.1)

    row = measure(checked(tiring, extra={"more_us": lambda timer: 1.0}), {}, CEILINGS, CpuTimer())
    assert (row.status, row.median_us, row.extra) == ("fail", None, {"more_us": None})
    assert "after timing" in row.detail


def test_replays_with_other_bits_are_counted_though_they_are_within_the_bound() -> None:
    calls = [0]

    def unsteady(right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        out.copy_(right)
        out.view(-1)[0] += 0.01 * (calls[0] % 2)
        return out

    row = measure(checked(unsteady), {}, CEILINGS, CpuTimer())
    assert (row.status, row.differing_replays) == ("pass", CpuTimer.checked_replays // 2)


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (UnsupportedError("one format only"), "one format only"),
        (RuntimeError("no kernel\nat all"), "RuntimeError: no kernel"),
    ],
)
def test_a_peer_may_be_inexact_or_refuse_but_our_own_exceptions_are_raised(
    error: Exception, detail: str
) -> None:
    def refuse() -> Any:
        raise error

    call = checked(lambda right, out: out.copy_(right * 1.1), is_peer=True)
    assert measure(call, {}, CEILINGS, CpuTimer()).status == "inexact"
    row = measure(replace(call, prepare=refuse), {}, CEILINGS, CpuTimer())
    assert (row.status, row.detail) == ("refused", detail)
    with pytest.raises(type(error), match=str(error)):
        measure(replace(call, prepare=refuse, is_peer=False), {}, CEILINGS, CpuTimer())


BENCHES: dict[str, tuple[Callable[..., Bench[Any]], Any, int]] = {
    "decode": (decode_bench, SIZES, 1),
    "decode, FP4, fp16 query": (decode_bench, replace(SIZES, q="fp16", format="fp4_e2m1"), 1),
    "prefill": (prefill_bench, PrefillSizes(8, 24, 1, 2, 64, 16, "bf16"), 1),
    "prefill of one token": (prefill_bench, PrefillSizes(1, 31, 1, 2, 64, 16, "fp8_e4m3fn"), 1),
    "sparse": (
        partial(sparse_bench, ["bf16", "prepass", "fused", "fused-fp8q"]),
        SparseSizes(tokens=3, heads=16, topk=20, pool=64), 4,
    ),
    "sage": (partial(sage_bench, ["int8"], ["per_block"]), SageSizes(1, 128, 1, 64, True), 4),
    "indexer": (
        partial(indexer_bench, ["fp8_e4m3fn", "fp4_e2m1"]), IndexerSizes(2, 192, heads=8, topk=100), 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BENCHES)
def test_every_call_of_a_bench_passes_its_check(name: str) -> None:
    make, sizes, count = BENCHES[name]
    bench, timer = make(device="cpu"), CpuTimer(50.0)
    rows = bench.measure(sizes, CEILINGS, timer)  # type: ignore[arg-type]
    assert len(rows) == count
    ours = [row for row in rows if row.labels.get("backend", "narrowkv") == "narrowkv"]
    assert all(row.status == "pass" for row in ours), [row.detail for row in ours]
    assert all(row.median_us == 50.0 and row.relative_l1 is not None for row in ours)
    record = ours[-1].as_dict()
    assert record["ratio_to_floor"] == pytest.approx(50.0 / record["floor_us"])
    assert record["bytes_per_s"] > 0
    if bench.ratio:
        assert record[bench.ratio] == pytest.approx(1.0)
    if name == "prefill":
        assert record["sdpa_us"] == record["append_us"] == record["two_calls_us"] == 50.0
        assert record["decode_us"] is None
    if name == "prefill of one token":
        assert record["decode_us"] == 50.0


SMALL: dict[str, tuple[Bench[Any], Any]] = {
    "decode": (decode_bench(), DecodeSizes(2, 64, 16, 8, 12, 128, "bf16", "fp8_e4m3fn")),
    "prefill": (prefill_bench(), PrefillSizes(16, 48, 1, 4, 128, 16, "bf16")),
    "sparse": (sparse_bench(["fused"]), SparseSizes(2, 16, 32, 65536)),
    "sage": (sage_bench(["int8"], ["per_block"]), SageSizes(1, 256, 1, 128, False)),
    "indexer": (indexer_bench(["fp8_e4m3fn"]), IndexerSizes(4, 512, heads=64, topk=64)),
}


@pytest.mark.parametrize(
    "name", [name if name == "decode" else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
)
def test_a_modelled_row_says_model_at_every_figure(name: str) -> None:
    bench, sizes = SMALL[name]
    for call in bench.modelled(sizes):
        row = model_row(call, "gfx942")
        assert row.refused == ""
        assert {key for key in vars(row) if "model" not in key} == {"target", "name", "shape", "refused"}
        assert row.model_kernels_us is not None
        assert row.model_us == pytest.approx(sum(row.model_kernels_us.values()))


def test_a_longer_context_takes_longer_by_its_keys() -> None:
    def seconds(context: int) -> float:
        (call,) = decode_bench().modelled(DecodeSizes(512, context, 16, 1, 8, 64, "bf16", "bf16"))
        row = model_row(call, "gfx942")
        assert row.model_us is not None
        return row.model_us

    assert seconds(16384) / seconds(4096) == pytest.approx(4, rel=0.2)


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("split", ["", "even"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_short_call_is_modelled_by_the_workgroups_that_work(batch: int, split: str) -> None:
    case = DecodeCase(lens=(1024,) * batch, num_kv_heads=8, format="fp8_e4m3fn", clean=True, split=split)
    executor = ModelExecutor("gfx942", 1.0)
    with executing(executor):
        case.inputs().prepare()()
    decode = executor.modelled[0].prediction
    assert decode.working == batch * 8 * 16 < decode.workgroups  # a tile of 64 keys each; others leave
    assert decode.clocks > 5 * MACHINES["gfx942"].hbm_latency  # length, ids, K, V, and the stores' latencies


def test_a_row_above_a_peak_is_refused() -> None:
    (call,) = decode_bench().modelled(SMALL["decode"][1])
    row = model_row(replace(call, bytes_touched=1e9), "gfx942")
    assert row.refused.startswith("PeakError: ")
    assert "of HBM" in row.refused
    assert row.model_us is None


def record(**changed: Any) -> dict[str, Any]:
    return {**Row({"backend": "narrowkv"}, vars(SIZES)).as_dict(), "ratio_to_floor": 2.0, **changed}


def test_changes_match_rows_by_what_they_are() -> None:
    assert set(KEYS) <= set(record())
    before = {"rows": [record(), record(batch=8, ratio_to_floor=4.0), record(batch=16, ratio_to_floor=None)]}
    now = [
        record(ratio_to_floor=2.2),
        record(batch=8, ratio_to_floor=3.0),
        record(batch=16),
        record(batch=32),
    ]
    found = changes(before, now)
    assert [(c["batch"], round(c["change"], 6)) for c in found] == [(2, 0.1), (8, -0.25)]
    assert [c["batch"] for c in regressions(found, 0.05)] == [2]
    assert regressions(found, 0.2) == []


def test_the_plot_leaves_out_rows_without_a_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = record(median_us=50.0, bytes_per_s=2e12, flops_per_s=1e13)
    refused = Row({"backend": "peer"}, vars(SIZES), status="refused", detail="no").as_dict()
    path = tmp_path / "plot.svg"
    plot_roofline([measured, refused], CEILINGS, path, title="a GPU", series=("backend", "format"))
    assert "<svg" in path.read_text()
    assert path.stat().st_size > 1000


@pytest.mark.gpu
@pytest.mark.parametrize("name", BENCHES)
def test_every_call_of_a_bench_on_a_gpu(name: str) -> None:
    make, sizes, count = BENCHES[name]
    timer = GraphTimer(samples=10)
    rows = make(device="cuda").measure(sizes, measure_ceilings(timer), timer)
    assert len(rows) == count
    assert all(row.status in ("pass", "refused") for row in rows), [row.detail for row in rows]
