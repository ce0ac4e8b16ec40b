"""Compiled Triton kernels on both targets against torch."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import emulator_kernels as kernels  # noqa: E402
from emulator_cases import FP8, NATIVE, PagedDecode  # noqa: E402
from emulator_support import TARGETS, emulate, nans  # noqa: E402

from narrowkv.cdna_emulator import AcquireError, RaceError  # noqa: E402

pytestmark = pytest.mark.sampled

both_targets = pytest.mark.parametrize("target", TARGETS)


@both_targets
def test_softmax_with_a_ragged_row(target):
    torch.manual_seed(0)
    x, o = torch.randn(3, 500).bfloat16(), nans(3, 500)
    arguments = {"x_ptr": x, "o_ptr": o, "n_cols": 500, "stride": 500}
    emulate(kernels.softmax, target, (3,), arguments, {"BLOCK": 512})
    torch.testing.assert_close(o, torch.softmax(x.float(), -1), rtol=2e-6, atol=1e-9)


@both_targets
def test_scans_and_transpose(target):
    x, o = torch.randint(-9, 9, (32, 64)).float(), nans(3, 32, 64)
    emulate(kernels.scans, target, (1,), {"x_ptr": x, "o_ptr": o}, {"R": 32, "C": 64})
    want = torch.stack([x.cumsum(0), x.flip(1).cumsum(1).flip(1), x.reshape(64, 32).T.reshape(32, 64)])
    assert torch.equal(o, want)


KEYS = [
    *(("bf16", False, warps, stages) for warps, stages in ((1, 1), (1, 2), (2, 1), (4, 2), (8, 1), (4, 3))),
    *((kv, fp8_qk, warps, 1) for kv, fp8_qk in (("e4m3fn", False), ("native", False), ("native", True))
      for warps in (1, 4)),
]  # fmt: skip


@both_targets
@pytest.mark.parametrize(("kv", "fp8_qk", "warps", "stages"), KEYS)
def test_paged_decode(kv, fp8_qk, warps, stages, target):
    case = PagedDecode({"bf16": torch.bfloat16, "native": NATIVE[target], **FP8}[kv], fp8_qk=fp8_qk)
    case.run(target, warps=warps, stages=stages)
    assert case.is_right()


@both_targets
@pytest.mark.parametrize("warps", [1, 4])
def test_order_and_batching_do_not_change_bits_or_counts(warps, target):
    outputs, counts = [], []
    for options in (
        {}, {"batch_workgroups": 1}, {"batch_workgroups": 4}, {"wave_order": "lockstep"},
        {"check_uninitialised": False}, {"detect_races": True},
    ):  # fmt: skip
        case = PagedDecode(torch.bfloat16)
        counts.append(case.run(target, warps=warps, **options).counts)
        outputs.append(case.o.view(torch.int16))
    assert all(torch.equal(o, outputs[0]) for o in outputs)
    assert all(c == counts[0] for c in counts)


@both_targets
def test_a_removed_barrier_is_a_race(target):
    """Waves in step read what another wave has not written yet."""

    def without_barriers(text):
        return text.replace("\ts_barrier", "\ts_nop 0")

    case = PagedDecode(torch.bfloat16, batch=1, heads=1, lengths=(70,))
    case.run(target, warps=4, detect_races=True, check_uninitialised=True)
    assert case.is_right()
    options = {"detect_races": True, "check_uninitialised": False, "wave_order": "lockstep"}
    with pytest.raises(RaceError):
        case.run(target, warps=4, edit=without_barriers, **options)


@both_targets
def test_a_sample_of_workgroups_writes_only_theirs(target):
    case = PagedDecode(torch.bfloat16)
    assert case.run(target, workgroups=[(1, 1, 0)]).workgroups == 1
    assert case.is_right((1, slice(case.group, None)))
    for rest in (case.o[0], case.o[2], case.o[1, : case.group]):
        assert rest.isnan().all()


@both_targets
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (torch.float16, (32, 32, 32, 1, 1)), (torch.float16, (128, 64, 32, 3, 8)),
        (torch.float32, (64, 32, 64, 2, 4)), ("native", (16, 64, 64, 2, 2)),
    ],
)  # fmt: skip
def test_matmul_with_ragged_edges(dtype, config, target):
    dtype = NATIVE[target] if dtype == "native" else dtype
    m, n, k = 100, 96, 144
    torch.manual_seed(1)
    a, b, c = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), nans(m, n)
    block_m, block_n, block_k, stages, warps = config
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages}
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": m, "N": n, "K": k}
    grid = (-(-m // block_m), -(-n // block_n))
    emulate(kernels.matmul, target, grid, arguments, constants, num_warps=warps)
    # fp32 goes through ten mantissa bits (xf32) where the compiler allows it.
    atol = 2.0**-10 * 8 * k**0.5 if dtype == torch.float32 else 1e-4
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=atol)


@both_targets
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_last_arriver_merges_the_splits(target, batch):
    x = torch.randint(-5, 5, (3, 500)).float()
    part, count, o = nans(3, 4), torch.zeros(3, dtype=torch.int32), nans(3)
    arguments = {"x_ptr": x, "part_ptr": part, "count_ptr": count, "o_ptr": o, "N": 500}
    emulate(kernels.split_sum, target, (3, 4), arguments, {"SPLITS": 4, "BLOCK": 64}, num_warps=1,
            run_options={"batch_workgroups": batch, "check_uninitialised": True})  # fmt: skip
    assert torch.equal(o, x.sum(1))
    assert not count.any()


@both_targets
@pytest.mark.parametrize("batch", [1, 64])
def test_a_merge_without_an_acquire_is_reported(target, batch):
    def merge(edit=None):
        part, count, o = nans(3, 4), torch.zeros(3, dtype=torch.int32), nans(3)
        arguments = {"x_ptr": torch.ones(3, 500), "part_ptr": part, "count_ptr": count, "o_ptr": o, "N": 500}
        emulate(kernels.split_sum, target, (3, 4), arguments, {"SPLITS": 4, "BLOCK": 64}, num_warps=1,
                edit=edit, run_options={"batch_workgroups": batch, "detect_hazards": True})  # fmt: skip
        return o

    assert torch.equal(merge(), torch.full((3,), 500.0))
    with pytest.raises(AcquireError, match=r"workgroup \(\d, \d, 0\) has stored here") as caught:
        merge(lambda text: re.sub(r"buffer_inv\s+sc1", "s_nop 0", text))
    assert "_load_" in caught.value.source
    assert caught.value.address is not None


@both_targets
def test_atomics(target):
    x, total, top = torch.randint(-5, 5, (1024,)).float(), torch.zeros(8), torch.zeros(4, dtype=torch.int32)
    emulate(kernels.atomics, target, (4,), {"x_ptr": x, "sum_ptr": total, "max_ptr": top}, {"BLOCK": 256})
    assert torch.equal(total, x.reshape(-1, 8).sum(0))
    assert top.tolist() == [1020, 1021, 1022, 1023]


@both_targets
def test_workgroups_that_spin_on_a_lock_make_progress(target):
    lock, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    emulate(kernels.spin_lock, target, (5,), {"lock_ptr": lock, "count_ptr": count}, {}, num_warps=1)
    assert count.item() == 5
    assert lock.item() == 0


@both_targets
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FP8)
def test_fp8_conversions_native_and_software(target, name, wide):
    dtype = FP8[name]
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = codes.float().isfinite()  # software routes of some Triton versions do not keep NaN and infinity
    o = nans(256, dtype=wide)
    emulate(kernels.convert, target, (1,), {"x_ptr": codes, "o_ptr": o}, {"BLOCK": 256})
    assert torch.equal(o.float()[finite], codes.float()[finite])
    torch.manual_seed(2)
    x = torch.cat([torch.randn(500) * s for s in (1, 30, 0.01, 100)] + [torch.zeros(48)]).to(wide)
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    back = torch.zeros(2048, dtype=torch.uint8).view(dtype)
    emulate(kernels.convert, target, (1,), {"x_ptr": x, "o_ptr": back}, {"BLOCK": 2048})
    assert torch.equal(back.float(), x.float().to(dtype).float())


@both_targets
def test_transcendental_and_division(target):
    torch.manual_seed(3)
    x, o = torch.randn(256) * 3, nans(8, 256)
    emulate(kernels.maths, target, (1,), {"x_ptr": x, "o_ptr": o}, {"BLOCK": 256})
    d = x.double()
    a = d.abs()
    want = torch.stack(
        [d.exp(), (a + 0.1).log(), d.sin(), a.sqrt(), (a + 0.1).rsqrt(), d.sigmoid(), d.erf(), d / (a + 0.5)]
    )
    torch.testing.assert_close(o.double(), want, rtol=2e-6, atol=1e-6)


@both_targets
def test_integer_arithmetic(target):
    rng = np.random.default_rng(4)
    x, y = rng.integers(-(10**6), 10**6, 256), rng.integers(1, 5000, 256)
    o = torch.zeros(6, 256, dtype=torch.int32)
    arguments = {f"{name}_ptr": torch.from_numpy(z.astype(np.int32)) for name, z in (("x", x), ("y", y))}
    emulate(kernels.integers, target, (1,), arguments | {"o_ptr": o}, {"BLOCK": 256})
    quotient = np.trunc(x / y).astype(np.int64)
    want = [quotient, x - quotient * y, x * y, ((x % 2**32) * y) >> 32, (x * y) >> 7, quotient]
    np.testing.assert_array_equal(o.numpy(), np.stack(want).astype(np.int32))


@both_targets
def test_rope(target):
    torch.manual_seed(5)
    x, angle = torch.randn(4, 8, 64).bfloat16(), torch.randn(4, 1, 32)
    c, s, o = angle.cos(), angle.sin(), nans(4, 8, 64, dtype=torch.bfloat16)
    arguments = {"x_ptr": x, "cos_ptr": c, "sin_ptr": s, "o_ptr": o}
    emulate(kernels.rope, target, (4,), arguments, {"H": 8, "D": 64})
    a, b = x.float().split(32, -1)
    want = torch.cat([a * c - b * s, b * c + a * s], -1)
    torch.testing.assert_close(o.float(), want, rtol=2**-8, atol=1e-6)


@both_targets
def test_inline_assembly_sort_and_histogram(target):
    x = torch.randint(0, 2**31 - 1, (256,), dtype=torch.int32)
    o = torch.zeros_like(x)
    emulate(kernels.inline_asm, target, (1,), {"x_ptr": x, "o_ptr": o}, {"BLOCK": 256})
    assert torch.equal(o, (x >> 4) & 255)
    x, o = torch.randint(0, 64, (256,), dtype=torch.int32), torch.zeros(320, dtype=torch.int32)
    emulate(kernels.sort_and_count, target, (1,), {"x_ptr": x, "o_ptr": o}, {"BLOCK": 256})
    assert torch.equal(o[:256], x.sort()[0])
    assert torch.equal(o[256:].long(), torch.bincount(x, minlength=64))


@both_targets
def test_counts_of_a_decode_are_those_of_its_shape(target):
    counts = PagedDecode(torch.bfloat16, batch=1, heads=1, lengths=(64,)).run(target).counts
    assert counts.mfma_flops == 2 * 2 * 16 * 64 * 128  # QK and PV over 16 rows
    assert counts.transcendental >= 2 * 64 * 16 / 64
    assert counts.vmem_bytes_stored == 12 * 128 * 2
    assert 2 * 64 * 128 * 2 <= counts.vmem_bytes_loaded < 1.5 * 2 * 64 * 128 * 2
    double = counts + counts
    assert double.per_workgroup() == counts.per_workgroup()
    assert double.workgroups == 2
