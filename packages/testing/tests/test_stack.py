"""Known faults of ROCm by version, and probes that find faults of the compiler."""

from __future__ import annotations

import pytest

from narrowkv.runtime.launch import BoundLaunch, executing
from narrowkv.testing.emulation import EmulateExecutor
from narrowkv.testing.machine import known_faults, masked_load_errors, rocm_version

GRAPHS, CAPTURE = (fault["source"] for fault in known_faults((7, 2)))


@pytest.mark.parametrize(
    ("torch_version", "hip", "rocm"),
    [
        ("2.11.0+rocm7.2.1", "7.2.53211-671d39a55a", (7, 2, 1)),
        ("2.11.0+rocm7.2", "7.2.26015", (7, 2)),
        ("2.12.0+rocm7.13.0a20260501", "7.13.26170", (7, 13, 0)),
        ("2.13.0a0+gitf1d2", "7.14.26222-1a2b", (7, 14)),
        ("2.13.0+cu130", None, None),
        ("2.13.0+cpu", "7.2-virtual", None),
    ],
)
def test_the_version_of_rocm_is_that_of_torchs_build(
    torch_version: str, hip: str | None, rocm: tuple[int, ...] | None
) -> None:
    assert rocm_version(torch_version, hip) == rocm


@pytest.mark.parametrize(
    ("rocm", "sources"),
    [
        ((7, 1, 1), [CAPTURE]), ((7, 2), [GRAPHS, CAPTURE]), ((7, 2, 3), [GRAPHS, CAPTURE]),
        ((7, 2, 4), [CAPTURE]),
        ((7, 13, 0), [CAPTURE]), ((7, 14), []), ((8, 0, 0), []), (None, []),
    ],
)  # fmt: skip
def test_faults_are_those_of_the_version(rocm: tuple[int, ...] | None, sources: list[str]) -> None:
    assert [fault["source"] for fault in known_faults(rocm)] == sources


def test_masked_loads_are_right_in_the_interpreter() -> None:
    assert masked_load_errors("cpu") == 0


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_masked_loads_are_right_in_the_code_of_this_triton(target: str) -> None:
    with executing(EmulateExecutor(target)):
        assert masked_load_errors("cpu") == 0


def test_the_probe_counts_lanes_that_read_behind_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unmasked(BoundLaunch):
        def __call__(self, grid: tuple[int, ...], args: tuple[object, ...]) -> None:
            x, o, passes, _, begin = args
            super().__call__(grid, (x, o, passes, o.numel(), begin))  # type: ignore[attr-defined]

    monkeypatch.setattr("narrowkv.runtime.launch.BoundLaunch", Unmasked)
    assert masked_load_errors("cpu") == 2 * (256 - 100)
