"""Single instructions against Python integers and numpy, none of it through the emulator's own tables."""

import math

import numpy as np
import pytest
from emulator_machine import assembly, execute

from narrowkv.cdna_emulator import Memory, UnknownInstructionError, load_program, run

M = 0xFFFFFFFF
RNG = np.random.default_rng(7)
A, B, C = (RNG.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32) for _ in range(3))
A[:4], B[:4], C[:4] = (0, M, 0x80000000, 1), (M, M, 0x7FFFFFFF, 0), (0, 31, 32, 5)
X, Y, Z = (
    RNG.normal(size=64).astype(np.float32) * 10 ** RNG.uniform(-3, 3, 64).astype(np.float32) for _ in range(3)
)


def signed(x):
    return int(x) - 2**32 if int(x) & 0x80000000 else int(x)


def each(function, *sources):
    return np.array([function(*map(int, values)) & M for values in zip(*sources, strict=True)], np.uint32)


def bits_reversed(x):
    return int(f"{x:032b}"[::-1], 2)


def perm(hi, lo, sel):
    wide, out = (hi << 32) | lo, 0
    for k in range(4):
        c = (sel >> 8 * k) & 255
        if c < 8:
            byte = (wide >> 8 * c) & 255
        elif c < 12:
            byte = 255 if (wide >> (16 * (c - 8) + 15)) & 1 else 0
        else:
            byte = 0 if c == 12 else 255
        out |= byte << 8 * k
    return out


def bfe_i(x, offset, width):
    offset, width = offset & 31, width & 31
    field = (signed(x) >> offset) & ((1 << width) - 1)
    return field - (1 << width) if width and field >> (width - 1) else field


INTEGER = {
    "v_add_u32": lambda a, b: a + b, "v_sub_u32": lambda a, b: a - b, "v_subrev_u32": lambda a, b: b - a,
    "v_and_b32": lambda a, b: a & b, "v_or_b32": lambda a, b: a | b, "v_xor_b32": lambda a, b: a ^ b,
    "v_lshlrev_b32": lambda a, b: b << (a & 31), "v_lshrrev_b32": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32": lambda a, b: signed(b) >> (a & 31), "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: (a * b) >> 32, "v_mul_hi_i32": lambda a, b: (signed(a) * signed(b)) >> 32,
    "v_mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF), "v_min_u32": min, "v_max_u32": max,
    "v_min_i32": lambda a, b: min(signed(a), signed(b)), "v_max_i32": lambda a, b: max(signed(a), signed(b)),
    "v_bcnt_u32_b32": lambda a, b: a.bit_count() + b,
    "v_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "v_add3_u32": lambda a, b, c: a + b + c, "v_or3_b32": lambda a, b, c: a | b | c,
    "v_and_or_b32": lambda a, b, c: (a & b) | c, "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32": lambda a, b, c: ((a + b) & M) << (c & 31),
    "v_lshl_or_b32": lambda a, b, c: (a << (b & 31)) | c, "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
    "v_bfe_u32": lambda a, b, c: (a >> (b & 31)) & ((1 << (c & 31)) - 1), "v_bfe_i32": bfe_i,
    "v_alignbit_b32": lambda a, b, c: ((a << 32) | b) >> (c & 31),
    "v_alignbyte_b32": lambda a, b, c: ((a << 32) | b) >> 8 * (c & 3),
    "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_med3_u32": lambda a, b, c: sorted((a, b, c))[1],
    "v_med3_i32": lambda a, b, c: sorted(map(signed, (a, b, c)))[1],
    "v_perm_b32": lambda a, b, c: perm(a, b, c & 0x0F0F0F0F),
    "v_not_b32": lambda a: ~a, "v_bfrev_b32": bits_reversed,
    "v_ffbh_u32": lambda a: 32 - a.bit_length() if a else M,
    "v_ffbl_b32": lambda a: (a & -a).bit_length() - 1 if a else M,
}  # fmt: skip


@pytest.mark.parametrize("name", INTEGER)
def test_integer(name):
    function = INTEGER[name]
    count = function.__code__.co_argcount if hasattr(function, "__code__") else 2
    third = C & np.uint32(0x0F0F0F0F) if name == "v_perm_b32" else C
    sources = [A, B, third][:count]
    w = execute("gfx942", f"{name} v3, {', '.join(f'v{k}' for k in range(count))}", {0: A, 1: B, 2: third})
    np.testing.assert_array_equal(w.u[3][0], each(function, *sources))


@pytest.mark.parametrize("table", [0x00, 0x36, 0x6C, 0x78, 0xDE, 0xE8, 0x96, 0xCA, 0xFF, 0x1B])
def test_bitop3_is_its_truth_table(table):
    want = np.zeros(64, np.uint32)
    for bit in range(32):
        index = ((A >> bit) & 1) * 4 + ((B >> bit) & 1) * 2 + ((C >> bit) & 1)
        want |= ((table >> index) & 1).astype(np.uint32) << np.uint32(bit)
    w = execute("gfx950", f"v_bitop3_b32 v3, v0, v1, v2 bitop3:{table:#x}", {0: A, 1: B, 2: C})
    np.testing.assert_array_equal(w.u[3][0], want)


def test_perm_with_a_constant_selector_agrees_with_one_per_lane():
    for selector in (0x07060302, 0x05040100, 0x0C0C0004, 0x0D010C07, 0x0B0A0908, 0x03070206):
        w = execute("gfx942", "v_perm_b32 v3, v0, v1, s4", {0: A, 1: B}, {4: selector})
        np.testing.assert_array_equal(w.u[3][0], each(lambda a, b, s=selector: perm(a, b, s), A, B))


def test_carry_chain_adds_64_bits():
    w = execute(
        "gfx942", "v_add_co_u32 v4, vcc, v0, v1\nv_addc_co_u32 v5, vcc, v1, v2, vcc", {0: A, 1: B, 2: C}
    )
    wide = (A.astype(object) + (B.astype(object) << 32)) + (B.astype(object) + (C.astype(object) << 32))
    np.testing.assert_array_equal(w.u[4][0], [int(x) & M for x in wide])
    np.testing.assert_array_equal(w.u[5][0], [(int(x) >> 32) & M for x in wide])
    np.testing.assert_array_equal(w.lanes(53)[0], [int(x) >> 64 != 0 for x in wide])


def test_mad_u64_u32_and_64_bit_shifts():
    lines = (
        "v_mad_u64_u32 v[4:5], s[2:3], v0, v1, v[2:3]\nv_lshlrev_b64 v[6:7], 7, v[4:5]\n"
        "v_lshl_add_u64 v[8:9], v[4:5], 3, v[2:3]"
    )
    w = execute("gfx942", lines, {0: A, 1: B, 2: C, 3: A})
    for lane in range(64):
        addend = int(C[lane]) | (int(A[lane]) << 32)
        total = int(A[lane]) * int(B[lane]) + addend
        assert int(w.u[4][0, lane]) | int(w.u[5][0, lane]) << 32 == total % 2**64
        assert bool(w.lanes(1)[0, lane]) == (total >= 2**64)
        assert int(w.u[6][0, lane]) | int(w.u[7][0, lane]) << 32 == (total << 7) % 2**64
        assert int(w.u[8][0, lane]) | int(w.u[9][0, lane]) << 32 == ((total << 3) + addend) % 2**64


FLOAT = {
    "v_add_f32": lambda x, y: x + y, "v_sub_f32": lambda x, y: x - y, "v_mul_f32": lambda x, y: x * y,
    "v_max_f32": max, "v_min_f32": min,
}  # fmt: skip


@pytest.mark.parametrize("name", FLOAT)
def test_float(name):
    w = execute("gfx942", f"{name} v3, -v0, |v1|", {0: X, 1: Y})
    want = [np.float32(FLOAT[name](-float(x), abs(float(y)))) for x, y in zip(X, Y, strict=True)]
    np.testing.assert_array_equal(w.f[3][0], np.array(want, np.float32))


def test_output_modifiers():
    w = execute("gfx942", "v_add_f32_e64 v3, v0, v1 mul:2\nv_mul_f32_e64 v4, v0, v1 clamp", {0: X, 1: Y})
    np.testing.assert_array_equal(w.f[3][0], (X + Y) * 2)
    np.testing.assert_array_equal(w.f[4][0], np.clip(X * Y, 0, 1))


def test_min_max_prefer_the_number_over_nan():
    x = np.where(np.arange(64) % 2, np.float32(np.nan), X)
    w = execute("gfx942", "v_max_f32 v3, v0, v1\nv_min_f32 v4, v1, v0", {0: x, 1: Y})
    assert not np.isnan(w.f[3]).any()
    np.testing.assert_array_equal(w.f[4][0, 1::2], Y[1::2])


def test_fma_rounds_once():
    from fractions import Fraction

    near = (1 + 2.0**-12) * np.ones(64)
    x = np.concatenate([X[:32], near[:32]]).astype(np.float32)
    z = np.concatenate([Z[:32], RNG.choice([-1, 1], 32) * 2.0 ** RNG.integers(-60, -24, 32)]).astype(
        np.float32
    )
    w = execute("gfx942", "v_fma_f32 v3, v0, v0, v2", {0: x, 2: z})
    for lane in range(64):
        exact = Fraction(float(x[lane])) ** 2 + Fraction(float(z[lane]))
        got = float(w.f[3][0, lane])
        spacing = Fraction(float(np.spacing(np.float32(abs(got)))))
        assert abs(Fraction(got) - exact) <= spacing / 2


def test_division_sequence_is_correctly_rounded():
    lines = """
        v_div_scale_f32 v3, s[2:3], v1, v1, v0
        v_rcp_f32_e32 v4, v3
        v_div_scale_f32 v5, vcc, v0, v1, v0
        v_fma_f32 v6, -v3, v4, 1.0
        v_fmac_f32_e32 v4, v6, v4
        v_mul_f32_e32 v6, v5, v4
        v_fma_f32 v7, -v3, v6, v5
        v_fmac_f32_e32 v6, v7, v4
        v_fma_f32 v3, -v3, v6, v5
        v_div_fmas_f32 v3, v3, v4, v6
        v_div_fixup_f32 v8, v3, v1, v0"""
    with np.errstate(all="ignore"):
        x, y = X.copy(), Y.copy()
        x[:9] = (1, -1, 0, np.inf, 1, np.nan, 3e38, 1e-38, 1e38)
        y[:9] = (0, 0, 0, 2, np.inf, 1, 3e-3, 1e3, 1e38)
        x[9:12], y[9:12] = (2e38, 1.5e-38, 1.1e-30), (1e-6, 3e37, 2.7e38)
        w = execute("gfx942", lines, {0: x, 1: y})
        np.testing.assert_array_equal(w.f[8][0], x / y)
        for _ in range(20):  # every exponent; then subnormal quotients
            y = RNG.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32).view(np.float32)
            for x in (RNG.permutation(y), y * RNG.integers(0, 2**23, 64).astype(np.uint32).view(np.float32)):
                w = execute("gfx942", lines, {0: x, 1: y})
                np.testing.assert_array_equal(w.f[8][0], x / y)


@pytest.mark.parametrize(("name", "function"), [
    ("v_exp_f32", lambda x: 2.0**x), ("v_log_f32", lambda x: math.log2(abs(x))),
    ("v_rcp_f32", lambda x: 1 / x),
    ("v_sqrt_f32", lambda x: math.sqrt(abs(x))), ("v_rsq_f32", lambda x: abs(x) ** -0.5),
    ("v_sin_f32", lambda x: math.sin(2 * math.pi * x)), ("v_rndne_f32", round), ("v_floor_f32", math.floor),
    ("v_fract_f32", lambda x: x - math.floor(x)), ("v_trunc_f32", math.trunc),
])  # fmt: skip
def test_unary_float(name, function):
    x = np.clip(X, -20, 20)
    source = "|v0|" if name in ("v_log_f32", "v_sqrt_f32", "v_rsq_f32") else "v0"
    w = execute("gfx942", f"{name}_e64 v3, {source}", {0: x})
    np.testing.assert_allclose(w.f[3][0], [function(float(v)) for v in x], rtol=2e-7, atol=2e-7)


def test_compares_and_select():
    w = execute("gfx942", """
        v_cmp_lt_f32_e32 vcc, v0, v1
        v_cmp_gt_i32_e64 s[4:5], v2, v3
        v_cmp_u_f32_e64 s[6:7], v0, v0
        v_cndmask_b32_e32 v4, v2, v3, vcc
        v_cndmask_b32_e64 v5, 1.0, -v1, s[4:5]""", {0: X, 1: Y, 2: A, 3: B})  # fmt: skip
    np.testing.assert_array_equal(w.u[4][0], np.where(X < Y, B, A))
    np.testing.assert_array_equal(w.f[5][0], np.where(A.view(np.int32) > B.view(np.int32), -Y, np.float32(1)))
    assert int(w.sq[3][0, 0]) == 0
    assert int(w.sq[53][0, 0]) == sum(1 << k for k in range(64) if X[k] < Y[k])


def test_inactive_lanes_keep_their_values():
    w = execute("gfx942", "v_add_u32 v0, v0, v1\nv_cmp_eq_u32_e32 vcc, v1, v1\nv_mul_lo_u32 v2, v1, v1",
                {0: A, 1: B, 2: C}, exec_mask=0xF0)  # fmt: skip
    on = np.zeros(64, bool)
    on[4:8] = True
    np.testing.assert_array_equal(w.u[0][0], np.where(on, A + B, A))
    np.testing.assert_array_equal(w.u[2][0], np.where(on, B * B, C))
    assert int(w.sq[53][0, 0]) == 0xF0


@pytest.mark.parametrize(("control", "source"), [
    ("row_shr:3", lambda k: k - 3 if k % 16 >= 3 else None),
    ("row_shl:5", lambda k: k + 5 if k % 16 < 11 else None),
    ("row_ror:4", lambda k: k // 16 * 16 + (k - 4) % 16),
    ("row_mirror", lambda k: k // 16 * 16 + 15 - k % 16),
    ("row_half_mirror", lambda k: k // 8 * 8 + 7 - k % 8), ("quad_perm:[1,0,3,2]", lambda k: k ^ 1),
    ("row_bcast:15", lambda k: k // 16 * 16 - 1 if k >= 16 else None),
    ("row_bcast:31", lambda k: 31 if k >= 32 else None),
    ("row_newbcast:6", lambda k: k // 16 * 16 + 6), ("wave_shr:1", lambda k: k - 1 if k else None),
])  # fmt: skip
def test_dpp(control, source):
    w = execute("gfx942", f"v_add_u32_dpp v2, v0, v1 {control} row_mask:0xf bank_mask:0xf\n"
                f"v_mov_b32_dpp v3, v0 {control} row_mask:0xa bank_mask:0xf bound_ctrl:1",
                {0: A, 1: B, 2: C, 3: C})  # fmt: skip
    for k in range(64):
        at = source(k)
        assert w.u[2][0, k] == (C[k] if at is None else (int(A[at]) + int(B[k])) & M)
        assert w.u[3][0, k] == (C[k] if k // 16 % 2 == 0 else 0 if at is None else A[at])


def test_sdwa_selects_and_places_parts():
    w = execute("gfx942", """
        v_or_b32_sdwa v3, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1
        v_add_u16_sdwa v4, v0, v1 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:BYTE_1
        v_mov_b32_sdwa v5, sext(v0) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_3
        v_lshlrev_b32_sdwa v6, v2, v0 dst_sel:BYTE_1 dst_unused:UNUSED_SEXT src0_sel:DWORD src1_sel:DWORD""",
        {0: A, 1: B, 2: np.zeros(64, np.uint32), 4: C})  # fmt: skip
    np.testing.assert_array_equal(w.u[3][0], ((A >> 16) & 255) | (B >> 16))
    total = ((A >> 16) + ((B >> 8) & 255)) & 0xFFFF
    np.testing.assert_array_equal(w.u[4][0], (total << 16) | (C & 0xFFFF))
    np.testing.assert_array_equal(w.i[5][0], A.view(np.int32) >> 24)
    np.testing.assert_array_equal(
        w.u[6][0], each(lambda a: ((a & 255) - 256 if a & 128 else a & 255) << 8, A)
    )


def test_cross_lane():
    w = execute("gfx950", """
        v_readlane_b32 s4, v0, 37
        v_readfirstlane_b32 s5, v1
        v_writelane_b32 v2, s4, 3
        v_mov_b32 v3, v0
        v_mov_b32 v4, v1
        v_permlane32_swap_b32 v3, v4
        v_mov_b32 v5, v0
        v_mov_b32 v6, v1
        v_permlane16_swap_b32 v5, v6""", {0: A, 1: B, 2: C})  # fmt: skip
    assert w.su[4][0, 0] == A[37]
    assert w.su[5][0, 0] == B[0]
    assert w.u[2][0, 3] == A[37]
    np.testing.assert_array_equal(w.u[3][0], np.concatenate([A[:32], B[:32]]))
    np.testing.assert_array_equal(w.u[4][0], np.concatenate([A[32:], B[32:]]))
    np.testing.assert_array_equal(w.u[5][0], np.concatenate([A[:16], B[:16], A[32:48], B[32:48]]))
    np.testing.assert_array_equal(w.u[6][0], np.concatenate([A[16:32], B[16:32], A[48:], B[48:]]))


def test_packed_halves_and_words():
    h = [RNG.normal(size=128).astype(np.float16) for _ in range(3)]
    w = execute("gfx942", """
        v_pk_fma_f16 v3, v0, v1, v2 op_sel_hi:[1,0,1] neg_lo:[1,0,0]
        v_pk_mul_f32 v[4:5], v[10:11], v[12:13] op_sel:[1,0] op_sel_hi:[0,1] neg_hi:[0,1]
        v_pk_add_f32 v[6:7], v[10:11], s[8:9] op_sel_hi:[1,0]
        v_pk_mov_b32 v[14:15], v[10:11], v[12:13] op_sel:[1,0]""",
        {0: h[0], 1: h[1], 2: h[2], 10: X, 11: Y, 12: Z, 13: X}, {8: int(np.float32(1.5).view(np.uint32))})  # fmt: skip  # noqa: E501
    a, b, c = (x.reshape(64, 2).astype(np.float64) for x in h)
    want = np.stack([-a[:, 0] * b[:, 0] + c[:, 0], a[:, 1] * b[:, 0] + c[:, 1]], 1).astype(np.float16)
    np.testing.assert_array_equal(w.u[3][0].view(np.float16).reshape(64, 2), want)
    np.testing.assert_array_equal(w.f[4][0], Y * Z)
    np.testing.assert_array_equal(w.f[5][0], X * -X)
    np.testing.assert_array_equal(w.f[6][0], X + np.float32(1.5))
    np.testing.assert_array_equal(w.f[7][0], Y + np.float32(1.5))
    np.testing.assert_array_equal(w.u[14][0], Y.view(np.uint32))
    np.testing.assert_array_equal(w.u[15][0], Z.view(np.uint32))


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_fp8_converts_every_code(target):
    torch = pytest.importorskip("torch")
    dtype = torch.float8_e4m3fnuz if target == "gfx942" else torch.float8_e4m3fn
    codes = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(codes.copy()).view(dtype).float().numpy()
    w = execute(target, """
        v_cvt_pk_f32_fp8_e32 v[2:3], v0
        v_cvt_pk_f32_fp8_sdwa v[4:5], v0 src0_sel:WORD_1
        v_cvt_f32_fp8_sdwa v6, v0 src0_sel:BYTE_2
        v_cvt_pk_fp8_f32 v7, v2, v3
        v_cvt_pk_fp8_f32 v7, v4, v5 op_sel:[0,0,1]""", {0: codes})  # fmt: skip
    got = np.stack([w.f[k][0] for k in (2, 3, 4, 5)], 1).ravel()
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(w.f[6][0], want[2::4])
    again = w.u[7][0].view(np.uint8)
    same = ~np.isnan(want)
    np.testing.assert_array_equal(again[same], codes[same])


def test_fp16_overflow_mode_saturates_fp8():
    big = np.full(64, 1e4, np.float32)
    lines = (
        "v_cvt_pk_fp8_f32 v1, v0, v0\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
        "v_cvt_pk_fp8_f32 v2, v0, v0"
    )
    w = execute("gfx950", lines, {0: big})
    assert (w.u[1] & 0xFFFF == 0x7F7F).all()
    assert (w.u[2] & 0xFFFF == 0x7E7E).all()


def test_scaled_converts():
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    scale = np.full(64, 4.0, np.float32)
    w = execute("gfx950", """
        v_cvt_scalef32_pk_f32_fp8 v[2:3], v0, v1 op_sel:[1,0,0]
        v_cvt_scalef32_pk_bf16_fp8 v4, v0, v1
        v_cvt_scalef32_pk_f32_fp4 v[6:7], v0, v1 op_sel:[0,1,0]
        v_cvt_scalef32_pk_fp8_bf16 v8, v4, v1
        v_cvt_scalef32_pk_fp4_f32 v9, v6, v7, v1 op_sel:[0,0,1,0]""", {0: codes, 1: scale, 9: C})  # fmt: skip
    fp8 = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy() * 4
    np.testing.assert_array_equal(w.f[2][0], fp8[2::4])
    np.testing.assert_array_equal(w.f[3][0], fp8[3::4])
    low = (w.u[4][0] << np.uint32(16)).view(np.float32)
    np.testing.assert_array_equal(low, fp8[0::4])
    np.testing.assert_array_equal((w.u[8][0] & 0xFF)[:31], codes[0::4][:31])
    fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]) * 4
    np.testing.assert_array_equal(w.f[6][0], fp4[codes[2::4] & 15])
    np.testing.assert_array_equal(w.f[7][0], fp4[codes[2::4] >> 4])
    np.testing.assert_array_equal(w.u[9][0], (C & 0xFFFF00FF) | (codes[2::4].astype(np.uint32) << 8))


@pytest.mark.parametrize(
    ("field", "factor"), [(0, 2.0**-127), (1, 2.0**-126), (254, 2.0**127), (255, np.nan)]
)
def test_the_scale_of_a_convert_is_an_e8m0_byte(field, factor):
    """Its mantissa does not count, and 255 is NaN, not infinity, for zeros too."""
    codes = np.arange(64, dtype=np.uint32) & 7
    scale = np.full(64, (field << 23) | 0x123456, np.uint32)
    w = execute("gfx950", "v_cvt_scalef32_pk_f32_fp4 v[2:3], v0, v1", {0: codes, 1: scale})
    want = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes] * factor
    np.testing.assert_array_equal(w.f[2][0], want.astype(np.float32))


def test_minima_and_maxima_of_zeros_and_nans():
    zero, minus, quiet, signalling, one = 0, 0x80000000, 0x7FC00000, 0x7FA00000, 0x3F800000
    x = np.resize(np.array([zero, minus, quiet, one, signalling, one], np.uint32), 64)
    y = np.resize(np.array([minus, zero, one, quiet, one, signalling], np.uint32), 64)
    w = execute("gfx950", """
        v_max_f32 v2, v0, v1
        v_min_f32 v3, v0, v1
        v_maximum3_f32 v4, v0, v1, v1""", {0: x, 1: y})  # fmt: skip
    assert w.u[2][0, :4].tolist() == [zero, zero, one, one]
    assert w.u[3][0, :4].tolist() == [minus, minus, one, one]
    assert np.isnan(w.f[2][0, 4:6]).all()
    assert np.isnan(w.f[3][0, 4:6]).all()
    assert w.u[4][0, :2].tolist() == [zero, zero]
    assert np.isnan(w.f[4][0, 2:6]).all()


def test_the_carry_of_a_signed_wide_sum_is_its_sign():
    factors = np.array([2**31 - 1, -(2**31), 3, -3] * 16, np.int64).astype(np.int32)
    high = np.array([0x7FFFFFFF, 0x80000000, 0, 0] * 16, np.uint32)
    line = "v_mad_i64_i32 v[4:5], s[2:3], v0, v1, v[2:3]"
    w = execute(
        "gfx942", line, {0: factors, 1: np.full(64, 2**31 - 1, np.int32), 2: np.zeros(64, np.uint32), 3: high}
    )
    addends = [int(h) - (2**32 if h >> 31 else 0) << 32 for h in high.tolist()]
    sums = [int(f) * (2**31 - 1) + a for f, a in zip(factors, addends, strict=True)]
    np.testing.assert_array_equal(w.lanes(1)[0], [total < 0 for total in sums])


SCALAR = {
    "s_add_i32": lambda a, b: a + b, "s_sub_u32": lambda a, b: a - b, "s_and_b32": lambda a, b: a & b,
    "s_andn2_b32": lambda a, b: a & ~b, "s_lshl_b32": lambda a, b: a << (b & 31),
    "s_lshr_b32": lambda a, b: a >> (b & 31),
    "s_ashr_i32": lambda a, b: signed(a) >> (b & 31), "s_mul_i32": lambda a, b: a * b,
    "s_mul_hi_u32": lambda a, b: (a * b) >> 32, "s_min_i32": lambda a, b: min(signed(a), signed(b)),
    "s_max_u32": max, "s_lshl2_add_u32": lambda a, b: (a << 2) + b,
    "s_bfe_u32": lambda a, b: (a >> (b & 31)) & ((1 << min((b >> 16) & 127, 32)) - 1),
    "s_pack_lh_b32_b16": lambda a, b: (a & 0xFFFF) | (b & 0xFFFF0000),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALAR)
def test_scalar(name):
    for a, b in ((5, 3), (M, 1), (0x80000000, 31), (0x12345678, 0x80004), (0, M), (7, 0x10010)):
        w = execute("gfx942", f"{name} s6, s4, s5", {}, {4: a, 5: b})
        assert int(w.su[6][0, 0]) == SCALAR[name](a, b) & M


@pytest.mark.parametrize(
    ("name", "of_greater", "of_less", "of_equal"),
    [("s_max_i32", 1, 0, 1), ("s_min_i32", 0, 1, 0), ("s_max_u32", 1, 0, 1), ("s_min_u32", 0, 1, 0)],
)
def test_scc_of_minima_and_maxima_says_whether_the_first_operand_won(name, of_greater, of_less, of_equal):
    for a, b, expected in ((5, 3, of_greater), (3, 5, of_less), (4, 4, of_equal)):
        w = execute("gfx942", f"{name} s6, s4, s5\ns_cselect_b32 s7, 1, 0", {}, {4: a, 5: b})
        assert int(w.su[7][0, 0]) == expected, (a, b)


def test_a_signed_field_past_the_top_goes_on_with_the_sign():
    w = execute("gfx942", "s_bfe_i32 s6, s4, s5", {}, {4: 0x80000000, 5: 28 | 8 << 16})
    assert int(w.su[6][0, 0]) == -8 & M


def test_scalar_condition_code_and_masks():
    w = execute("gfx942", """
        s_add_u32 s8, s4, s5
        s_addc_u32 s9, s6, 0
        s_cmp_lt_i32 s4, 0
        s_cselect_b32 s10, 7, 9
        s_cselect_b64 s[12:13], -1, 0
        s_and_saveexec_b64 s[14:15], s[6:7]
        v_mov_b32 v0, 1
        s_or_b64 exec, exec, s[14:15]
        s_movk_i32 s16, 0xfffe
        s_bcnt1_i32_b64 s17, s[6:7]""", {0: C}, {4: M, 5: 2, 6: 0xF, 7: 0x8000})  # fmt: skip
    assert [int(w.su[k][0, 0]) for k in (8, 9, 10, 16, 17)] == [1, 0x10, 7, M - 1, 5]
    assert int(w.sq[6][0, 0]) == 2**64 - 1
    assert w.full
    on = np.array([(0x80000000000F >> k) & 1 for k in range(64)], bool)
    np.testing.assert_array_equal(w.u[0][0], np.where(on, 1, C))


def test_lds_round_trips_permutes_and_swizzles():
    lane = np.arange(64, dtype=np.uint32)
    w = execute("gfx942", """
        ds_write_b32 v0, v1
        ds_write2st64_b32 v0, v2, v1 offset0:1 offset1:2
        ds_read_b32 v3, v0 offset:256
        ds_read2_b32 v[4:5], v0 offset1:128
        ds_read_u8 v6, v0 offset:3
        ds_read_u16_d16_hi v7, v0 offset:2
        ds_bpermute_b32 v8, v9, v1
        ds_permute_b32 v10, v9, v1
        ds_swizzle_b32 v11, v1 offset:swizzle(BITMASK_PERM,"01pip")
        ds_swizzle_b32 v12, v1 offset:swizzle(SWAP,16)""",
        {0: lane * 4, 1: A, 2: B, 7: C, 9: (63 - lane) * 4})  # fmt: skip
    np.testing.assert_array_equal(w.u[3][0], B)
    np.testing.assert_array_equal(w.u[4][0], A)
    np.testing.assert_array_equal(w.u[5][0], A)
    np.testing.assert_array_equal(w.u[6][0], A >> 24)
    np.testing.assert_array_equal(w.u[7][0], (C & 0xFFFF) | (A & 0xFFFF0000))
    np.testing.assert_array_equal(w.u[8][0], A[::-1])
    np.testing.assert_array_equal(w.u[10][0], A[::-1])
    np.testing.assert_array_equal(
        w.u[11][0], [A[(k & 32) | (((k & 5) | 8) ^ (0 if k & 2 else 2))] for k in range(64)]
    )
    np.testing.assert_array_equal(w.u[12][0], A[lane ^ 16])


@pytest.mark.parametrize("bits", [16, 8])
def test_lds_transposing_read(bits):
    """Each group of 16 lanes reads a matrix with rows of 16 elements; lane i gets column i."""
    lane = np.arange(64, dtype=np.uint32)
    w = execute(
        "gfx950", f"ds_write_b64 v0, v[2:3]\nds_read_b64_tr_b{bits} v[4:5], v0", {0: lane * 8, 2: A, 3: B}
    )
    data = (
        np.stack([A, B], 1).reshape(4, 32).view({16: np.uint16, 8: np.uint8}[bits]).reshape(4, 64 // bits, 16)
    )
    got = np.stack([w.u[4][0], w.u[5][0]], 1).view(data.dtype).reshape(4, 16, -1)
    np.testing.assert_array_equal(got, data.swapaxes(1, 2))


def test_unknown_instructions_and_modifiers_are_errors_that_name_the_line():
    for line in ("v_frobnicate_b32 v0, v1", "v_smfmac_f32_16x16x32_f16 v[0:3], v[4:5], v[8:11], v12",
                 "v_cndmask_b32_dpp v0, v1, v2, vcc row_shr:1 row_mask:0xf bank_mask:0xf",
                 "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 3", "v_add_u32 v0, v1, v200"):  # fmt: skip
        with pytest.raises(UnknownInstructionError) as caught:
            execute("gfx942", line)
        assert caught.value.source == line
        assert caught.value.line == 5


def test_a_program_that_is_bound_at_its_first_run_has_the_same_errors_then():
    with pytest.raises(UnknownInstructionError):
        load_program(assembly("gfx942", "v_frobnicate_b32 v0, v1"))
    program = load_program(assembly("gfx942", "v_frobnicate_b32 v0, v1"), lazy=True)
    for _ in range(2):
        with pytest.raises(UnknownInstructionError, match="v_frobnicate_b32"):
            run(program, grid=(1, 1, 1), args=[], memory=Memory())


@pytest.mark.parametrize("line", ["v_bitop3_b32 v0, v1, v2, v3 bitop3:1",
                                  "v_cvt_pk_bf16_f32 v0, v1, v2", "ds_read_b64_tr_b16 v[0:1], v2",
                                  "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0"])  # fmt: skip
def test_gfx950_instructions_are_unknown_on_gfx942(line):
    with pytest.raises(UnknownInstructionError, match="gfx942"):
        execute("gfx942", line)
    execute("gfx950", line, {2: np.zeros(64, np.uint32)})
