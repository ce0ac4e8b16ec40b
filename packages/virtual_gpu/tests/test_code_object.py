"""Reading code objects: MessagePack against its specification, malformed files."""

import struct

import pytest

from narrowkv.virtual_gpu.code_object import CodeObjectError, _MessagePack, read_code_object


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x07", 7), (b"\xff", -1), (b"\xe0", -32), (b"\xc0", None), (b"\xc2", False), (b"\xc3", True),
        (b"\xcc\x80", 128), (b"\xcd\x01\x00", 256), (b"\xce\x00\x01\x00\x00", 65536), (b"\xd1\xff\x00", -256),
        (b"\xcf" + b"\x00" * 7 + b"\x05", 5), (b"\xa3abc", "abc"), (b"\xd9\x02hi", "hi"), (b"\xda\x00\x01z", "z"),
        (b"\x92\x01\xa1x", [1, "x"]), (b"\xdc\x00\x01\x09", [9]), (b"\x81\xa1k\x92\x01\x02", {"k": [1, 2]}),
        (b"\xde\x00\x01\xa1a\x01", {"a": 1}),
    ],
)  # fmt: skip
def test_message_pack(data: bytes, value: object) -> None:
    assert _MessagePack(data).value() == value


@pytest.mark.parametrize(
    "data",
    [b"", b"\x7fELF", b"MZ" * 100, b"\x7fELF" + b"\0" * 14 + struct.pack("<H", 62) + b"\0" * 60,
     b"\x7fELF" + b"\0" * 14 + struct.pack("<H", 224) + b"\xff" * 60],
)  # fmt: skip
def test_what_is_no_code_object_is_refused(data: bytes) -> None:
    with pytest.raises(CodeObjectError):
        read_code_object(data)
