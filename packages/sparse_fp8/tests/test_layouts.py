"""Layouts against byte maps written out by hand, the quantiser's scale, and round trips."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
import torch

from narrowkv.sparse_fp8 import DSV4Rows, KVSource, packed_page_stride

U8 = torch.uint8

# E4M3FN by hand: sign, four exponent bits of bias 7, three mantissa bits.
ONE, TWO, MINUS_THREE_HALVES, LARGEST, SMALLEST = 0x38, 0x40, 0xBC, 0x7E, 0x01
BF16_HALF, BF16_MINUS_TWO = b"\x00\x3f", b"\x00\xc0"  # little-endian


def _row(codes, rope):
    """The 448 NoPE bytes and the 128 RoPE bytes of a row with these columns set."""
    nope, tail = bytearray(448), bytearray(128)
    for column, code in codes.items():
        nope[column] = code
    for column, two in rope.items():
        tail[2 * column : 2 * column + 2] = two
    return bytes(nope), bytes(tail)


# Two rows: (NoPE bytes, RoPE bytes, seven E8M0 bytes), and what some columns are worth.
ROWS = [
    (
        *_row({0: ONE, 63: LARGEST, 64: TWO, 447: SMALLEST}, {0: BF16_HALF}),
        bytes([127, 128, 127, 127, 127, 127, 126]),
    ),
    (
        *_row({0: MINUS_THREE_HALVES, 200: ONE}, {63: BF16_MINUS_TWO}),
        bytes([120, 127, 127, 130, 127, 127, 127]),
    ),
]
VALUES = {
    (0, 0): 1.0, (0, 63): 448.0, (0, 64): 2.0 * 2, (0, 447): 2.0**-9 / 2, (0, 448): 0.5, (0, 511): 0.0,
    (1, 0): -1.5 * 2**-7, (1, 200): 8.0, (1, 448): 0.0, (1, 511): -2.0,
}  # fmt: skip


def _expect_values(rows, first=0):
    """Rows from `first` on are `ROWS`."""
    wide = rows.dequantize()[first:]
    for (row, column), value in VALUES.items():
        assert wide[row, column] == value, (row, column)
    nonzero = {(int(r), int(c)) for r, c in wide[:2].nonzero()}
    assert nonzero == {place for place, value in VALUES.items() if value}


def _packed(page_size, stride):
    """One page that holds `ROWS`, written byte by byte."""
    page = bytearray(stride)
    for p, (nope, rope, scales) in enumerate(ROWS):
        page[p * 576 : p * 576 + 448] = nope
        page[p * 576 + 448 : p * 576 + 576] = rope
        page[page_size * 576 + p * 8 : page_size * 576 + p * 8 + 7] = scales
    return bytes(page)


def _from_bytes(text):
    return torch.frombuffer(bytearray(text), dtype=U8)


def _unpacked():
    nope = _from_bytes(b"".join(row[0] for row in ROWS)).view(2, 448).view(torch.float8_e4m3fn)
    rope = _from_bytes(b"".join(row[1] for row in ROWS)).view(2, 128).view(torch.bfloat16)
    scale = torch.tensor([[2.0 ** (byte - 127) for byte in row[2]] for row in ROWS])
    return nope, rope, scale


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("page_size", [2, 3, 64])
def test_packed584_byte_for_byte(page_size, padded):
    stride = packed_page_stride(page_size) if padded else page_size * 584
    by_hand = _from_bytes(_packed(page_size, stride)).view(1, stride)
    _expect_values(DSV4Rows.packed584(by_hand, page_size=page_size))
    packed = DSV4Rows.pack(*_unpacked(), "packed584", page_size=page_size, padded=padded)
    assert packed.data.shape == (1, stride)
    assert torch.equal(packed.data, by_hand)
    assert packed.num_rows == page_size


def test_packed584_starts_a_page_for_the_row_that_does_not_fit():
    packed = DSV4Rows.pack(*_unpacked(), "packed584", page_size=1, padded=False)
    assert packed.data.shape == (2, 584)
    for row, (nope, rope, scales) in enumerate(ROWS):
        assert bytes(packed.data[row].tolist()) == nope + rope + scales + b"\x00"


def test_packed584_takes_pages_of_rows_and_the_page_stride_of_the_tensor():
    page = _from_bytes(_packed(2, 2 * 584))
    _expect_values(DSV4Rows.packed584(page.view(1, 2, 584), page_size=2))
    spacious = torch.full((3, 2000), 0x7F, dtype=U8)
    spacious[1, : 2 * 584] = page
    rows = DSV4Rows.packed584(spacious[:, : 2 * 584], page_size=2)
    assert rows.data.stride(0) == 2000
    _expect_values(rows, first=2)


def test_row512_byte_for_byte():
    by_hand = bytearray()
    for nope, _, scales in ROWS:
        by_hand += nope + bytes(byte for s in scales for byte in (s, s)) + bytes(50)
    rows = _from_bytes(bytes(by_hand)).view(2, 512)
    nope, rope, scale = _unpacked()
    _expect_values(DSV4Rows.row512(rows, rope))
    assert torch.equal(DSV4Rows.pack(nope, rope, scale, "row512").data, rows)


def test_row512_read_as_fourteen_scales():
    _, rope, _ = _unpacked()
    row = torch.zeros(1, 512, dtype=U8)
    row[0, :448] = ONE
    row[0, 448:462] = torch.arange(120, 134, dtype=U8)
    wide = DSV4Rows.row512(row, rope[:1], scale_group=32).dequantize()[0, :448]
    assert wide.tolist() == [2.0 ** (120 + c // 32 - 127) for c in range(448)]
    every_other = DSV4Rows.row512(row, rope[:1]).dequantize()[0, :448]
    assert every_other.tolist() == [2.0 ** (120 + 2 * (c // 64) - 127) for c in range(448)]


def test_split512_is_two_tensors_with_any_scales():
    """Eight fp32 scales for 64 columns each, RoPE columns among the 512 in FP8."""
    values, scale = torch.zeros(2, 512, dtype=U8), torch.arange(1, 17).view(2, 8) * 0.3
    values[0, [0, 63, 64, 511]] = torch.tensor([ONE, TWO, MINUS_THREE_HALVES, LARGEST], dtype=U8)
    values[1, 448] = SMALLEST
    rows = DSV4Rows.split(values.view(torch.float8_e4m3fn), None, scale)
    assert (rows.layout, rows.head_dim, rows.bytes_per_row()) == ("split512", 512, 512 + 32)
    worth = {(0, 0): 0.3, (0, 63): 0.6, (0, 64): -0.9, (0, 511): 448 * 2.4, (1, 448): 2.0**-9 * 4.8}
    wide = rows.dequantize()
    assert {(int(r), int(c)) for r, c in wide.nonzero()} == set(worth)
    for place, value in worth.items():
        assert float(wide[place]) == pytest.approx(value, rel=1e-6)
    again = DSV4Rows.pack(*rows.unpack(), "split512")
    assert torch.equal(again.data.view(U8), values)
    assert torch.equal(again.scale, scale)


def test_split512_scales_are_the_largest_magnitudes_over_the_format_s_largest():
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    for fmt, largest in (("fp8_e4m3fn", 448), ("fp8_e4m3fnuz", 240)):
        rows = DSV4Rows.quantize(x, layout="split512", format=fmt)
        assert torch.equal(rows.scale, x.view(5, 8, 64).abs().amax(-1) / torch.tensor(float(largest)))
        assert float((rows.dequantize() - x).abs().sum() / x.abs().sum()) < 0.03
        assert float(rows.data.float().abs().max()) == largest


def test_split_is_three_tensors():
    nope, rope, scale = _unpacked()
    _expect_values(DSV4Rows.split(nope, rope, scale))
    _expect_values(DSV4Rows.split(nope.view(U8), rope, scale, format="fp8_e4m3fn"))
    halves = DSV4Rows.split(nope, rope, scale.repeat_interleave(2, -1).contiguous())
    assert halves.scale_group == 32
    _expect_values(halves)


def _hand_scale(amax):
    return 2.0 ** math.ceil(math.log2(max(amax / 448, 1e-4)))


@pytest.mark.parametrize("amax", [0.0, 1e-9, 0.0447, 0.0449, 1.0, 447.0, 448.0, 448.1, 896.0, 1e6])
def test_tile_scale_follows_the_rule(amax):
    x = torch.zeros(1, 512)
    x[0, 70] = -amax
    _, _, scale = DSV4Rows.quantize(x).unpack()
    amax = struct.unpack("f", struct.pack("f", amax))[0]
    assert scale[0].tolist() == [_hand_scale(amax if tile == 1 else 0.0) for tile in range(7)]


@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "fp8_e4m3fnuz"])
def test_quantised_rows_are_within_half_a_unit_and_free_of_negative_zero(fmt):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    x[1, :64] *= 1e-6
    rows = DSV4Rows.quantize(x, format=fmt)
    assert rows.negative_zero_free
    assert not bool((rows.data.view(U8) == 0x80).any())
    nope, rope, scale = rows.unpack()
    assert float(nope.float().abs().max()) <= (448 if fmt == "fp8_e4m3fn" else 240)
    assert torch.equal(rope, x[:, 448:].bfloat16())
    wide, unit = rows.dequantize()[:, :448], scale.repeat_interleave(64, -1)
    # Round to nearest: 2^-4 of a normal number, half the smallest subnormal below.
    bound = torch.maximum(x[:, :448].abs() * 2**-4, unit * 2**-10)
    assert bool(((wide - x[:, :448]).abs() <= bound).all())


def test_nan_stays_in_its_tile():
    x = torch.ones(2, 512)
    x[0, 100] = math.nan
    wide = DSV4Rows.quantize(x).dequantize()
    assert bool(wide[0, 64:128].isnan().any())
    assert not bool(wide[0, :64].isnan().any())
    assert not bool(wide[0, 128:].isnan().any())
    assert not bool(wide[1].isnan().any())


@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", "fp8_e4m3fnuz"])
@pytest.mark.parametrize("layout", ["split", "packed584", "row512"])
def test_every_layout_holds_the_same_numbers(layout, fmt):
    x = torch.randn(5, 3, 512, generator=torch.Generator().manual_seed(1))
    want = DSV4Rows.quantize(x, format=fmt)
    rows = DSV4Rows.quantize(x, layout=layout, page_size=4, format=fmt)
    assert torch.equal(rows.dequantize()[:15], want.dequantize())
    for got, expected in zip(rows.unpack(), want.unpack(), strict=True):
        assert torch.equal(got[:15].float(), expected.float())
    again = DSV4Rows.pack(*rows.unpack(), layout, page_size=4)
    assert torch.equal(again.data.view(U8), rows.data.view(U8))
    assert rows.bytes_per_row() == 448 + 128 + {"split": 28, "packed584": 7, "row512": 7}[layout]


def test_page_strides():
    assert [packed_page_stride(p) for p in (1, 2, 64, 72, 73)] == [1152, 1728, 37440, 42048, 43200]


GOOD = DSV4Rows.quantize(torch.zeros(4, 512))
ROWS_512 = torch.zeros(4, 512).to(torch.float8_e4m3fn)
ROPE, SCALES = torch.zeros(4, 64).bfloat16(), torch.ones(4, 7)
BAD_ROWS = {
    "NoPE of another width": lambda: DSV4Rows.split(GOOD.data[:, :440], ROPE, SCALES),
    "NoPE bytes without a format": lambda: DSV4Rows.split(torch.zeros(4, 448, dtype=U8), ROPE, SCALES),
    "format that is not E4M3": lambda: DSV4Rows.split(GOOD.data.to(torch.float8_e5m2), ROPE, SCALES),
    "format unlike the dtype": lambda: DSV4Rows.split(GOOD.data, ROPE, SCALES, format="fp8_e4m3fnuz"),
    "RoPE in fp16": lambda: DSV4Rows.split(GOOD.data, ROPE.half(), SCALES),
    "RoPE columns beside 512": lambda: DSV4Rows("split512", ROWS_512, ROPE, torch.ones(4, 8)),
    "512 columns with seven scales": lambda: DSV4Rows.split(ROWS_512, None, SCALES),
    "448 columns without RoPE": lambda: DSV4Rows.split(GOOD.data, None, torch.ones(4, 8)),
    "512 columns, group of 32": lambda: DSV4Rows(
        "split512", ROWS_512, None, torch.ones(4, 16), scale_group=32
    ),
    "scales of another count": lambda: DSV4Rows.split(GOOD.data, ROPE, torch.ones(4, 8)),
    "buffer too short": lambda: DSV4Rows.packed584(torch.zeros(2, 583, dtype=U8), page_size=1),
    "buffer of another dtype": lambda: DSV4Rows.packed584(torch.zeros(2, 584), page_size=1),
    "odd page stride": lambda: DSV4Rows.packed584(torch.zeros(2, 585, dtype=U8), page_size=1),
    "page size zero": lambda: DSV4Rows.packed584(torch.zeros(2, 584, dtype=U8), page_size=0),
    "row of another width": lambda: DSV4Rows.row512(torch.zeros(4, 511, dtype=U8), ROPE),
    "group of 16": lambda: DSV4Rows.row512(torch.zeros(4, 512, dtype=U8), ROPE, scale_group=16),
    "transposed bytes": lambda: DSV4Rows.row512(torch.zeros(512, 512, dtype=U8).T[:4], ROPE),
    "unknown layout": lambda: DSV4Rows.quantize(torch.zeros(4, 512), layout="NHD"),
    "width that is not 512": lambda: DSV4Rows.quantize(torch.zeros(4, 448)),
    "integers to quantise": lambda: DSV4Rows.quantize(torch.zeros(4, 512).int()),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_refused_in_words(name):
    with pytest.raises((TypeError, ValueError), match=r"must|pass one of"):
        BAD_ROWS[name]()


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("indptr", torch.tensor([0.0, 1.0]), TypeError),
        ("indptr", torch.zeros(0, dtype=torch.int32), ValueError),
        ("indices", torch.zeros(1), TypeError),
        ("indices", torch.zeros(1, 1, dtype=torch.int32), ValueError),
        ("indices", torch.zeros(4, dtype=torch.int32)[::2], ValueError),
        ("rows", torch.zeros(4, 512), TypeError),
        ("rows", torch.zeros(4, 448).bfloat16(), ValueError),
        ("rows", None, TypeError),
    ],
)
def test_bad_sources_are_refused_in_words(field, value, error):
    one = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(error, match=field):
        replace(KVSource(GOOD, one, one[:1]), **{field: value})
