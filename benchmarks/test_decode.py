"""Paged decode: device time as a multiple of the floor, against this device's baseline."""

from __future__ import annotations

from typing import Any

import pytest

from narrowkv.testing.bench.decode import DecodeSizes, decode_bench

from .conftest import CLOCK, BenchmarkTimer, Session

pytestmark = pytest.mark.gpu


def shape(
    batch: int, context: int, page_size: int, *, ratio: int = 12, fmt: str = "fp8_e4m3fn"
) -> DecodeSizes:
    return DecodeSizes(batch, context, page_size, 8, ratio, 128, "bf16", fmt)


SHAPES = {
    "the probe, page 1": shape(4, 1024, 1),
    "the probe, page 16": shape(4, 1024, 16),
    "the probe, page 64": shape(4, 1024, 64),
    "one short sequence": shape(1, 1024, 16),
    "one long sequence": shape(1, 32768, 16),
    "medium": shape(16, 8192, 16),
    "large, page 1": shape(64, 8192, 1),
    "large, page 16": shape(64, 8192, 16),
    "large, page 64": shape(64, 8192, 64),
    "large, ratio 4": shape(64, 8192, 16, ratio=4),
    "large, ratio 8": shape(64, 8192, 16, ratio=8),
    "large, bf16 cache": shape(64, 8192, 16, fmt="bf16"),
}


@pytest.mark.benchmark(group="paged_decode", timer=CLOCK)
@pytest.mark.parametrize("name", SHAPES)
def test_decode(name: str, session: Session, benchmark: Any) -> None:
    (row,) = decode_bench().measure(SHAPES[name], session.ceilings, BenchmarkTimer(benchmark))
    benchmark.extra_info.update(
        device_time=True,
        ratio_to_floor=row.ratio_to_floor,
        relative_l1=row.relative_l1,
        floor_us=row.floor_us,
    )
    session.judge(row)
