"""Compiled Triton kernels on both targets against torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import emulator_kernels as kernels  # noqa: E402
from emulator_support import TARGETS, emulate  # noqa: E402

pytestmark = pytest.mark.sampled

both_targets = pytest.mark.parametrize("target", TARGETS)
FP8 = {
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
NATIVE = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


def nans(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


@both_targets
def test_softmax_with_a_ragged_row(target):
    torch.manual_seed(0)
    x, o = torch.randn(3, 500).bfloat16(), nans(3, 500)
    emulate(
        kernels.softmax, target, (3,), {"x_ptr": x, "o_ptr": o, "n_cols": 500, "stride": 500}, {"BLOCK": 512}
    )
    torch.testing.assert_close(o, torch.softmax(x.float(), -1), rtol=2e-6, atol=1e-9)


@both_targets
def test_scans_and_transpose(target):
    x, o = torch.randint(-9, 9, (32, 64)).float(), nans(3, 32, 64)
    emulate(kernels.scans, target, (1,), {"x_ptr": x, "o_ptr": o}, {"R": 32, "C": 64})
    want = torch.stack([x.cumsum(0), x.flip(1).cumsum(1).flip(1), x.reshape(64, 32).T.reshape(32, 64)])
    assert torch.equal(o, want)


def paged_case(
    kv_dtype, *, batch=3, heads=2, lengths=(70, 33, 1), fp8_qk=False, dim=128, group=12, page=16, seed=0
):
    """Arguments, constants and the fp32 result of a paged decode with shuffled pages."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-max(lengths) // page)
    table = torch.randperm(batch * pages, generator=generator).int().reshape(batch, pages)
    k, v = (torch.randn(batch * pages, page, heads, dim, generator=generator).to(kv_dtype) for _ in range(2))
    q = torch.randn(batch, heads * group, dim, generator=generator).bfloat16()
    arguments = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": nans(batch, heads * group, dim, dtype=torch.bfloat16),
        "table_ptr": table, "lens_ptr": torch.tensor(lengths).int(), "sm_scale": dim**-0.5,
        "stride_qb": heads * group * dim, "stride_qh": dim, "stride_kp": page * heads * dim,
        "stride_kt": heads * dim, "stride_kh": dim, "stride_tb": pages,
    }  # fmt: skip
    want = torch.empty(batch, heads * group, dim)
    for b, n in enumerate(lengths):
        keys, values = (x[table[b].long()].reshape(-1, heads, dim)[:n].float() for x in (k, v))
        query = (q[b].to(kv_dtype) if fp8_qk else q[b]).float().reshape(heads, group, dim)
        scores = torch.einsum("hgd,thd->hgt", query, keys) * dim**-0.5
        want[b] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values).reshape(-1, dim)
    constants = {"GROUP": group, "BLOCK_N": 32, "D": dim, "PAGE": page, "FP8_QK": fp8_qk}
    return arguments, constants, want


def close_to_bf16(got, want):
    """bf16 P and O cost up to three roundings of 2^-9 of the largest value."""
    assert not got.isnan().any()
    assert (got.float() - want).abs().max() < 3 * 2**-9 * want.abs().max()


def _decode_cases():
    for target in TARGETS:
        for warps, stages in ((1, 1), (1, 2), (2, 1), (4, 2), (8, 1), (4, 3)):
            yield pytest.param(target, "bf16", False, warps, stages, id=f"{target}-bf16-w{warps}-s{stages}")
        for name, fp8_qk in (("e4m3fn", False), ("native", False), ("native", True)):
            for warps in (1, 4):
                yield pytest.param(
                    target,
                    name,
                    fp8_qk,
                    warps,
                    1,
                    id=f"{target}-{name}-{'fp8' if fp8_qk else 'bf16'}qk-w{warps}",
                )


@pytest.mark.parametrize(("target", "kv", "fp8_qk", "warps", "stages"), list(_decode_cases()))
def test_paged_decode(target, kv, fp8_qk, warps, stages):
    dtype = torch.bfloat16 if kv == "bf16" else NATIVE[target] if kv == "native" else FP8[kv]
    arguments, constants, want = paged_case(dtype, fp8_qk=fp8_qk)
    emulate(kernels.paged_decode, target, (3, 2), arguments, constants | {"STAGES": stages}, num_warps=warps)
    close_to_bf16(arguments["o_ptr"], want)


@both_targets
@pytest.mark.parametrize("warps", [1, 4])
def test_order_and_batching_do_not_change_bits_or_counts(target, warps):
    outputs, counts = [], []
    for options in (
        {}, {"batch_workgroups": 1}, {"batch_workgroups": 4}, {"wave_order": "lockstep"},
        {"check_uninitialised": False}, {"detect_races": True},
    ):  # fmt: skip
        arguments, constants, _ = paged_case(torch.bfloat16)
        result = emulate(
            kernels.paged_decode,
            target,
            (3, 2),
            arguments,
            constants | {"STAGES": 1},
            num_warps=warps,
            run_options=options,
        )
        outputs.append(arguments["o_ptr"].view(torch.int16))
        counts.append(result.counts)
    assert all(torch.equal(o, outputs[0]) for o in outputs)
    assert all(c == counts[0] for c in counts)


@both_targets
def test_a_sample_of_workgroups_writes_only_theirs(target):
    arguments, constants, want = paged_case(torch.bfloat16)
    result = emulate(kernels.paged_decode, target, (3, 2), arguments, constants | {"STAGES": 1}, num_warps=1,
                     run_options={"workgroups": [(1, 1, 0)]})  # fmt: skip
    got = arguments["o_ptr"]
    assert result.workgroups == 1
    close_to_bf16(got[1, 12:], want[1, 12:])
    assert got[0].isnan().all()
    assert got[2].isnan().all()
    assert got[1, :12].isnan().all()


@both_targets
@pytest.mark.parametrize(("dtype", "config"), [
    (torch.float16, (32, 32, 32, 1, 1)), (torch.float16, (128, 64, 32, 3, 8)), (torch.float32,
    (64, 32, 64, 2, 4)),
    ("native", (16, 64, 64, 2, 2)),
])  # fmt: skip
def test_matmul_with_ragged_edges(target, dtype, config):
    dtype = NATIVE[target] if dtype == "native" else dtype
    m, n, k = 100, 96, 144
    torch.manual_seed(1)
    a, b, c = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), nans(m, n)
    block_m, block_n, block_k, stages, warps = config
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages}
    grid = (-(-m // block_m), -(-n // block_n))
    emulate(
        kernels.matmul,
        target,
        grid,
        {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": m, "N": n, "K": k},
        constants,
        num_warps=warps,
    )
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
    arguments = {
        "x_ptr": torch.from_numpy(x.astype(np.int32)),
        "y_ptr": torch.from_numpy(y.astype(np.int32)),
        "o_ptr": o,
    }
    emulate(kernels.integers, target, (1,), arguments, {"BLOCK": 256})
    quotient = np.trunc(x / y).astype(np.int64)
    want = [quotient, x - quotient * y, x * y, ((x % 2**32) * y) >> 32, (x * y) >> 7, quotient]
    np.testing.assert_array_equal(o.numpy(), np.stack(want).astype(np.int32))


@both_targets
def test_rope(target):
    torch.manual_seed(5)
    x, angle = torch.randn(4, 8, 64).bfloat16(), torch.randn(4, 1, 32)
    c, s, o = angle.cos(), angle.sin(), nans(4, 8, 64, dtype=torch.bfloat16)
    emulate(
        kernels.rope, target, (4,), {"x_ptr": x, "cos_ptr": c, "sin_ptr": s, "o_ptr": o}, {"H": 8, "D": 64}
    )
    a, b = x.float().split(32, -1)
    torch.testing.assert_close(
        o.float(), torch.cat([a * c - b * s, b * c + a * s], -1), rtol=2**-8, atol=1e-6
    )


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
    arguments, constants, _ = paged_case(torch.bfloat16, batch=1, heads=1, lengths=(64,))
    result = emulate(kernels.paged_decode, target, (1, 1), arguments, constants | {"STAGES": 1}, num_warps=1)
    counts = result.counts
    assert counts.mfma_flops == 2 * 2 * 16 * 64 * 128  # QK and PV over 16 rows
    assert counts.transcendental >= 2 * 64 * 16 / 64
    assert counts.vmem_bytes_stored == 12 * 128 * 2
    assert 2 * 64 * 128 * 2 <= counts.vmem_bytes_loaded < 1.5 * 2 * 64 * 128 * 2
    double = counts + counts
    assert double.per_workgroup() == counts.per_workgroup()
    assert double.workgroups == 2
