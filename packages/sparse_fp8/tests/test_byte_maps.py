"""Rows of DeepSeek V4.1 and V3.2 against bytes written by hand, as SGLang, vLLM and FlashMLA store them."""

from __future__ import annotations

import struct

import pytest
import torch

from narrowkv.sparse_fp8 import DSV4Rows, packed_page_stride
from narrowkv.sparse_fp8.layouts import LAYOUTS

U8 = torch.uint8
P = 3  # tokens of a page

# E4M3FN by hand: sign, four exponent bits of bias 7, three mantissa bits.
ONE, TWO, MINUS_THREE_HALVES, LARGEST = 0x38, 0x40, 0xBC, 0x7E
# E2M1 in a half byte: sign, two exponent bits of bias 1, one mantissa bit.
HALF4, ONE4, SIX4, MINUS_TWO4 = 0x1, 0x2, 0x7, 0xC

# In a page of three tokens: where values, scales and RoPE columns of tokens 0 and 1 begin.
VALUES_AT = {
    "packed528": (0, 512), "packed288": (0, 256), "packed272": (0, 256),
    "record528": (0, 528), "record288": (0, 288), "record272": (0, 272),
    "record656": (0, 656), "record352": (0, 352),
}  # fmt: skip
SCALES_AT = {
    "packed528": (1536, 1552), "packed288": (768, 800), "packed272": (768, 784),
    "record528": (512, 1040), "record288": (256, 544), "record272": (256, 528),
    "record656": (512, 1168), "record352": (320, 672),
}  # fmt: skip
ROPE_AT = {"record656": (528, 1184), "record352": (256, 608)}
PAGE_BYTES = {
    "packed528": 2048, "packed288": 1024, "packed272": 1024,  # multiples of 512 and 256
    "record528": 1584, "record288": 864, "record272": 816, "record656": 1968, "record352": 1056,
}  # fmt: skip


def _page(layout):
    """A page with some columns of tokens 0 and 1 set, and what they are worth."""
    page = bytearray(PAGE_BYTES[layout])
    worth = {}
    fp4 = LAYOUTS[layout].values == "fp4"
    for token in (0, 1):
        value, scale = VALUES_AT[layout][token], SCALES_AT[layout][token]
        if fp4:
            page[value] = ONE4 | MINUS_TWO4 << 4  # columns 0 and 1
            page[value + 41] = SIX4 | HALF4 << 4  # columns 82 and 83
            page[value + 255] = HALF4 | SIX4 << 4  # columns 510 and 511
            columns = {0: 1.0, 1: -2.0, 82: 6.0, 83: 0.5, 510: 0.5, 511: 6.0}
        else:
            page[value], page[value + 33], page[value + 511] = ONE, MINUS_THREE_HALVES, LARGEST
            columns = {0: 1.0, 33: -1.5, 511: 448.0}
        kind, group = LAYOUTS[layout].scale, LAYOUTS[layout].group
        for i in range(512 // group):
            if kind == "e8m0":
                page[scale + i], factor = 127 + i % 3 - token, 2.0 ** (i % 3 - token)
            elif kind == "e4m3":
                # Of 352 bytes, every fourth scale lies beside the next: 0, 4, ... 28, 1, 5, ... 31.
                place = 8 * (i & 3) + (i >> 2) if layout == "record352" else i
                # Codes from that of one on: eight in each power of two.
                page[scale + place], factor = ONE + i, 2.0 ** (i // 8) * (1 + i % 8 / 8)
            else:
                factor = 0.3 + i + token
                page[scale + 4 * i : scale + 4 * i + 4] = struct.pack("<f", factor)
                (factor,) = struct.unpack("<f", page[scale + 4 * i : scale + 4 * i + 4])
            for column, number in columns.items():
                if column // group == i:
                    worth[token, column] = float(torch.tensor(number) * torch.tensor(factor))
        if layout in ROPE_AT:
            rope = ROPE_AT[layout][token]
            if layout == "record656":
                page[rope + 2 : rope + 4] = b"\x00\x3f"  # 0.5 in bf16, column 513
                page[rope + 126 : rope + 128] = b"\x00\xc0"  # -2, column 575
                worth |= {(token, 513): 0.5, (token, 575): -2.0}
            else:
                page[rope + 1], page[rope + 63] = TWO, MINUS_THREE_HALVES
                worth |= {(token, 513): 2.0, (token, 575): -1.5}
    return torch.frombuffer(page, dtype=U8).view(1, -1), worth


@pytest.mark.parametrize("layout", VALUES_AT)
def test_a_page_byte_for_byte(layout):
    page, worth = _page(layout)
    assert packed_page_stride(P, layout) == PAGE_BYTES[layout]
    assert LAYOUTS[layout].row_bytes == int(layout[-3:])
    rows = DSV4Rows.paged(page, layout, page_size=P)
    wide = rows.dequantize()
    assert wide.shape == (P, LAYOUTS[layout].head_dim)
    found = {(int(r), int(c)): float(wide[r, c]) for r, c in wide[:2].nonzero()}
    assert found == worth
    # Written again, tokens 0 and 1 are the same bytes; token 2 has scales that stand for zeros.
    again = DSV4Rows.pack(*rows.unpack(), layout, page_size=P)
    assert torch.equal(again.data, page)


@pytest.mark.parametrize("layout", VALUES_AT)
def test_pages_of_the_tensor_s_own_stride(layout):
    page, worth = _page(layout)
    need = P * LAYOUTS[layout].row_bytes
    spacious = torch.full((3, 4096), 0x7F, dtype=U8)
    spacious[1, :need] = page[0, :need]
    wide = DSV4Rows.paged(spacious[:, :need], layout, page_size=P).dequantize()
    for (row, column), value in worth.items():
        assert wide[P + row, column] == value
    by_token = spacious[:, :need].unflatten(1, (P, -1))
    assert torch.equal(DSV4Rows.paged(by_token, layout, page_size=P).dequantize()[P:5], wide[P:5])


def test_scales_are_chosen_as_the_engines_choose_them():
    x = torch.zeros(1, 576)
    x[0, :8] = torch.tensor([449.0, 1.0, 0, 0, 0, 0, 0, 0])
    x[0, 40], x[0, 300] = 7.0, 2.0**-13
    e8m0 = DSV4Rows.quantize(x[:, :512], layout="packed528").unpack()[2]
    # 2^ceil(log2(max(amax / 448, 1e-4)))
    assert e8m0[0, :3].tolist() == [2.0, 2.0**-6, 2.0**-13]
    nvfp4 = DSV4Rows.quantize(x[:, :512], layout="packed288").unpack()[2]
    # amax / 6 in E4M3, from 2^-9 up: 74.83 is nearest to 72, 7 / 6 to 1.125
    assert [float(nvfp4[0, i]) for i in (0, 1, 2, 18)] == [72.0, 2.0**-9, 1.125, 2.0**-9]
    # of 352 bytes from 2^-9 up too, and nothing saturates: the next ones above 74.83 and 7 / 6
    nvfp4 = DSV4Rows.quantize(x, layout="record352").unpack()[2]
    assert [float(nvfp4[0, i]) for i in (0, 1, 2, 18)] == [80.0, 2.0**-9, 1.25, 2.0**-9]
    assert float(DSV4Rows.quantize(x * 1e4, layout="record352").unpack()[2][0, 0]) == 448.0
    mxfp4 = DSV4Rows.quantize(x[:, :512], layout="packed272").unpack()[2]
    assert [float(mxfp4[0, i]) for i in (0, 1)] == [128.0, 2.0]  # nothing saturates at 6
    fp32 = DSV4Rows.quantize(x, layout="record656").unpack()[2]
    assert fp32[0, 0] == torch.tensor(449.0) / 448


@pytest.mark.parametrize("layout", [*VALUES_AT, "packed584"])
def test_quantised_rows_are_near_what_they_stand_for(layout):
    places = LAYOUTS[layout]
    x = torch.randn(7, places.head_dim, generator=torch.Generator().manual_seed(0))
    rows = DSV4Rows.quantize(x, layout=layout, page_size=4)
    assert rows.num_rows == 8
    error = (rows.dequantize()[:7] - x).abs().sum() / x.abs().sum()
    assert error < (0.03 if places.values == "fp8" else 0.15)
    assert rows.bytes_per_row() == {"packed584": 583}.get(layout, int(layout[-3:]))


@pytest.mark.parametrize(
    ("layout", "format"), [("packed528", "fp4_e2m1"), ("packed288", "fp8_e4m3fn"), ("record352", "fp8_e5m2")]
)
def test_values_in_a_format_that_the_layout_has_not(layout, format):
    with pytest.raises(ValueError, match="format"):
        DSV4Rows.paged(_page(layout)[0], layout, page_size=P, format=format)


def test_words_must_be_aligned():
    page = torch.zeros(2, 658, dtype=U8)
    with pytest.raises(ValueError, match="multiple of 4 bytes"):
        DSV4Rows.paged(page, "record656", page_size=1)
