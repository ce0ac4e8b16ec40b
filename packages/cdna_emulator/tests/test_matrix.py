"""MFMA layouts element by element from the ISA document's formulas, and every shape that tl.dot produces."""

import re

import numpy as np
import pytest
from emulator_machine import execute

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import emulator_kernels as kernels  # noqa: E402
import triton.language as tl  # noqa: E402
from emulator_cases import E2M1, ScaledProduct  # noqa: E402
from emulator_support import TARGETS, emulate  # noqa: E402

from narrowkv.cdna_emulator import EmulatorError  # noqa: E402

TORCH = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i8": torch.int8,
    "fp8_gfx942": torch.float8_e4m3fnuz, "bf8_gfx942": torch.float8_e5m2fnuz,
    "fp8_gfx950": torch.float8_e4m3fn, "bf8_gfx950": torch.float8_e5m2,
}  # fmt: skip
# target, mnemonic, (M, N, K, blocks), type of A and B
SHAPES = [
    (t, f"v_mfma_{r}_{m}x{n}x{k}_{x}", (m, n, k, 1), a)
    for t, r, m, n, k, x, a in [
        ("gfx942", "f32", 16, 16, 16, "f16", "f16"), ("gfx942", "f32", 32, 32, 8, "f16", "f16"),
        ("gfx942", "f32", 16, 16, 16, "bf16", "bf16"), ("gfx942", "f32", 32, 32, 8, "bf16", "bf16"),
        ("gfx942", "f32", 16, 16, 4, "f32", "f32"), ("gfx942", "f32", 32, 32, 2, "f32", "f32"),
        ("gfx942", "i32", 16, 16, 32, "i8", "i8"), ("gfx942", "i32", 32, 32, 16, "i8", "i8"),
        ("gfx942", "f32", 16, 16, 32, "fp8_fp8", "fp8"), ("gfx942", "f32", 32, 32, 16, "bf8_bf8", "bf8"),
        ("gfx950", "f32", 16, 16, 32, "fp8_fp8", "fp8"), ("gfx950", "f32", 32, 32, 16, "fp8_fp8", "fp8"),
        ("gfx950", "f32", 16, 16, 32, "f16", "f16"), ("gfx950", "f32", 32, 32, 16, "f16", "f16"),
        ("gfx950", "f32", 16, 16, 32, "bf16", "bf16"), ("gfx950", "f32", 32, 32, 16, "bf16", "bf16"),
        ("gfx950", "i32", 16, 16, 64, "i8", "i8"), ("gfx950", "i32", 32, 32, 32, "i8", "i8"),
    ]
] + [
    ("gfx942", f"v_mfma_f32_4x4x4_16b_f16{sharing}", (4, 4, 4, 16), "f16")
    for sharing in ("", " cbsz:4 abid:11", " cbsz:2 abid:1")
]  # fmt: skip


def random_matrix(rng, kind, target, shape):
    """Storage tensor and its fp64 values."""
    dtype = TORCH.get(kind) or TORCH[f"{kind}_{target}"]
    if kind == "i8":
        stored = torch.from_numpy(rng.integers(-128, 128, shape).astype(np.int8))
    else:
        stored = torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(dtype)
    return stored, stored.to(torch.float64).numpy()


def to_registers(stored, rows, k, blocks):
    """A (or B transposed) ``[blocks, rows, K]`` to registers, by the formula for lane and element."""
    groups = 64 // rows // blocks
    per_lane = k // groups
    lanes = [
        stored[lane // rows // groups, lane % rows, (lane // rows % groups) * per_lane :][:per_lane]
        for lane in range(64)
    ]
    return torch.stack(lanes).contiguous().view(torch.uint8).numpy().view(np.uint32)


@pytest.mark.parametrize(("target", "name", "shape", "kind"), SHAPES, ids=[f"{s[0]}-{s[1]}" for s in SHAPES])
def test_layout(target, name, shape, kind):
    m, n, k, blocks = shape
    rng = np.random.default_rng(3)
    a, a_value = random_matrix(rng, kind, target, (blocks, m, k))
    b, b_value = random_matrix(rng, kind, target, (blocks, n, k))
    words_a, words_b = to_registers(a, m, k, blocks), to_registers(b, n, k, blocks)
    count, per = m * n * blocks // 64, words_a.shape[1]
    integer = "_i32_" in name
    c = rng.integers(-99, 99, (count, 64)).astype(np.int32 if integer else np.float32)
    registers = {40 + r: c[r] for r in range(count)}
    registers |= {r: words_a[:, r].copy() for r in range(per)}
    registers |= {10 + r: words_b[:, r].copy() for r in range(per)}
    d, a_at, b_at, c_at = (
        f"v[{start}:{start + size - 1}]" if size > 1 else f"v{start}"
        for start, size in ((60, count), (0, per), (10, per), (40, count))
    )
    name, *sharing = name.split()
    w = execute(target, f"{name} {d}, {a_at}, {b_at}, {c_at} {' '.join(sharing)}", registers)
    if sharing:  # groups of 2**cbsz blocks have the A of their block number abid
        size, number = (int(text.split(":")[1]) for text in sharing)
        a_value = a_value[[(block >> size << size) + number for block in range(blocks)]]
    product = a_value @ b_value.transpose(0, 2, 1)
    for r in range(count):
        for lane in range(64):
            if m == 32:
                block, i, j = 0, 8 * (r // 4) + 4 * (lane // 32) + r % 4, lane % 32
            elif m == 16:
                block, i, j = 0, 4 * (lane // 16) + r, lane % 16
            else:
                block, i, j = lane // 4, r, lane % 4
            want = product[block, i, j] + c[r, lane]
            got = w.i[60 + r][0, lane] if integer else w.f[60 + r][0, lane]
            assert got == (want if integer else np.float32(want)), (r, lane)


@pytest.mark.parametrize("size", [16, 32])
def test_scaled_mfma_picks_scale_bytes_by_op_sel(size):
    """E4M3 times E2M1 with a scale for each row and block of 32: two runs of 16 k for 8-bit data."""
    rng = np.random.default_rng(5)
    k = 128 if size == 16 else 64
    groups = 64 // size
    a = torch.from_numpy(rng.normal(size=(size, k)).astype(np.float32)).to(torch.float8_e4m3fn)
    nibbles = rng.integers(0, 16, (size, k)).astype(np.uint8)
    codes = a.view(torch.uint8).numpy()
    runs = [
        (codes[l % size, 16 * (l // size) :], codes[l % size, k // 2 + 16 * (l // size) :]) for l in range(64)
    ]
    lane_a = np.stack([np.concatenate([first[:16], second[:16]]) for first, second in runs])
    packed = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
    lane_b = np.stack([packed[l % size, 16 * (l // size) :][:16] for l in range(64)])
    scale_a, scale_b = (rng.integers(120, 134, (size, groups)).astype(np.uint8) for _ in range(2))
    lane = np.arange(64)
    byte_a, byte_b = (s[lane % size, lane // size].astype(np.uint32) for s in (scale_a, scale_b))
    registers = {r: lane_a.view(np.uint32)[:, r].copy() for r in range(8)}
    registers |= {10 + r: lane_b.view(np.uint32)[:, r].copy() for r in range(4)}
    registers |= {20: np.uint32(0x01020300) | byte_a, 21: np.uint32(0x11000022) | byte_b << np.uint32(16)}
    count = size * size // 64
    name = f"v_mfma_scale_f32_{size}x{size}x{k}_f8f6f4"
    line = f"{name} v[60:{59 + count}], v[0:7], v[10:13], 0, v20, v21 op_sel_hi:[0,1,0] blgp:4"
    w = execute("gfx950", line, registers)
    value_a = a.double().numpy() * np.exp2(scale_a.astype(float) - 127).repeat(32, 1)
    value_b = np.array(E2M1)[nibbles] * np.exp2(scale_b.astype(float) - 127).repeat(32, 1)
    want = value_a @ value_b.T
    for r in range(count):
        for lane in range(64):
            i = 4 * (lane // 16) + r if size == 16 else 8 * (r // 4) + 4 * (lane // 32) + r % 4
            assert w.f[60 + r][0, lane] == np.float32(want[i, lane % size])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["f16", "bf16", "i8", "f32", "fp8", "bf8"])
@pytest.mark.parametrize(("size", "warps"), [(16, 1), (32, 4), (64, 4)])
def test_tl_dot(size, warps, kind, target):
    rng = np.random.default_rng(11)
    k = 32 if kind == "f32" else 64
    a, a_value = random_matrix(rng, kind, target, (size, k))
    b, b_value = random_matrix(rng, kind, target, (k, size))
    integer = kind == "i8"
    unset, dtype, acc = (7, torch.int32, tl.int32) if integer else (torch.nan, torch.float32, tl.float32)
    c = torch.full((size, size), unset, dtype=dtype)
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c}
    constants = {"M": size, "N": size, "K": k, "ACC": acc}
    result = emulate(kernels.dot, target, (1,), arguments, constants, num_warps=warps)
    # fp32 operands may go through xf32 on gfx942: ten mantissa bits.
    tolerance = 0 if integer else 2e-3 if kind == "f32" else 2e-6
    np.testing.assert_allclose(c.numpy(), a_value @ b_value, rtol=tolerance, atol=10 * tolerance)
    # Warps that repeat the work of others do at least the flops of the product.
    assert sum(result.counts.mfma.values())
    assert result.counts.mfma_flops >= 2 * size * size * k


@pytest.mark.parametrize(
    ("m", "n", "k", "warps"), [(16, 16, 128, 2), (32, 32, 128, 4), (64, 64, 256, 4), (16, 16, 128, 1)]
)
@pytest.mark.parametrize(
    "formats", [("e4m3", "e2m1"), ("e2m1", "e2m1"), ("e4m3", "e4m3"), ("e5m2", "e2m1")], ids="-".join
)
def test_tl_dot_scaled(formats, m, n, k, warps):
    product = ScaledProduct(formats, m, n, k)
    result = product.run(warps=warps)
    assert product.is_right()
    assert any("_scale_" in name for name in result.counts.mfma) == (warps > 1)


def test_a_changed_scale_selection_is_noticed():
    def is_right(edit):
        product = ScaledProduct(("e4m3", "e2m1"), 32, 32, 128)
        product.run(edit=edit)
        return product.is_right()

    pattern = r"(v_mfma_scale_.*?op_sel_hi:\[)(\d)"
    assert not is_right(lambda text: re.sub(pattern, lambda m: m[1] + str(1 - int(m[2])), text))
    with pytest.raises(EmulatorError):  # the registers of the operand no longer fit the format
        is_right(lambda text: re.sub(r"(v_mfma_scale_.*)(cbsz|blgp):4", r"\1\2:0", text))


def test_xf32_cuts_off_the_mantissa():
    """A factor's bits below the tenth of its mantissa are cut off, not rounded."""
    above = np.full(64, 1 + 2**-11 + 2**-12, np.float32)  # would be rounded up
    one = np.ones(64, np.float32)
    lines = "v_mfma_f32_16x16x8_xf32 v[8:11], v[4:5], v[6:7], 0"
    w = execute("gfx942", lines, v={4: above, 5: -above, 6: one, 7: 3 * one})
    assert (w.f[8] == 4 * (1 - 3)).all()
