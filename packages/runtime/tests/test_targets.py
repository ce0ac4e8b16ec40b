"""Targets: the figures' consistency with the published peaks, look-up, and the device mapping."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from narrowkv.runtime import TARGETS, UnsupportedError, device_target, get_target, targets


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A GPU whose vendor, architecture and capability a test sets; counts how often it is asked."""
    gpu = SimpleNamespace(arch="", capability=(9, 0), units=132, asked=0)

    def answer(value: Callable[[], Any]) -> Callable[[int], Any]:
        def asked(index: int) -> Any:
            gpu.asked += 1
            return value()

        return asked

    def become(hip: str | None, **changes: Any) -> None:
        vars(gpu).update(changes)
        monkeypatch.setattr(torch.version, "hip", hip)

    def properties() -> SimpleNamespace:
        major, minor = gpu.capability
        return SimpleNamespace(
            gcnArchName=gpu.arch, major=major, minor=minor, multi_processor_count=gpu.units
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", answer(properties))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    gpu.use_amd = lambda arch: become("7.0", arch=arch)
    gpu.use_nvidia = lambda capability: become(None, capability=capability)
    targets._gpu_target.cache_clear()
    yield gpu
    targets._gpu_target.cache_clear()


@pytest.mark.parametrize(
    ("name", "bf16_tflops", "fp8_tflops"),
    [("gfx942", 1307.4, 2614.9), ("gfx950", 2516.6, 5033.2), ("sm90", 989.4, 1978.9)],
)
def test_peaks_are_the_published_ones(name: str, bf16_tflops: float, fp8_tflops: float) -> None:
    figures = get_target(name).figures
    assert figures is not None
    assert figures.peak_bf16_flops_per_s / 1e12 == pytest.approx(bf16_tflops, rel=1e-3)
    assert figures.peak_fp8_flops_per_s / 1e12 == pytest.approx(fp8_tflops, rel=1e-3)
    assert figures.sources


def test_what_each_target_has() -> None:
    assert [t.native_fp8 for t in TARGETS.values()] == [
        "fp8_e4m3fnuz",
        "fp8_e4m3fn",
        None,
        "fp8_e4m3fn",
        "fp8_e4m3fn",
        None,
    ]
    assert [t.name for t in TARGETS.values() if t.has_scaled_mfma] == ["gfx950"]
    assert [t.wave_size for t in TARGETS.values()] == [64, 64, 64, 32, 32, 1]
    assert [t.name for t in TARGETS.values() if t.is_amd] == ["gfx942", "gfx950", "gfx90a"]
    assert [t.name for t in TARGETS.values() if t.is_nvidia] == ["sm90", "cuda"]
    assert "fp8_e4m3fnuz" not in get_target("sm90").fp8_formats


def test_get_target_lists_the_known() -> None:
    assert get_target(get_target("gfx950")) is TARGETS["gfx950"]
    with pytest.raises(
        ValueError, match="target must be one of gfx942, gfx950, gfx90a, sm90, cuda, cpu; got 'gfx908'"
    ):
        get_target("gfx908")
    with pytest.raises(TypeError, match="target must be a name or a Target, got int"):
        get_target(90)  # type: ignore[arg-type]


def test_cpu_device() -> None:
    assert device_target("cpu") is device_target(torch.device("cpu")) is TARGETS["cpu"]


@pytest.mark.parametrize(
    ("arch", "name"),
    [(f"{t}{flags}", t) for t in ("gfx942", "gfx950", "gfx90a") for flags in ("", ":sramecc+:xnack-")],
)
def test_amd_device_with_and_without_feature_flags(fake_gpu: SimpleNamespace, arch: str, name: str) -> None:
    fake_gpu.use_amd(arch)
    assert device_target("cuda:0").name == name


@pytest.mark.parametrize("arch", ["gfx1100", "gfx908", "sm90"])
def test_unknown_amd_architecture_lists_the_known(fake_gpu: SimpleNamespace, arch: str) -> None:
    fake_gpu.use_amd(arch)
    with pytest.raises(UnsupportedError, match=f"architecture '{arch}' is not known; known: gfx942, gfx950"):
        device_target("cuda:0")


@pytest.mark.parametrize(
    ("capability", "name"), [((9, 0), "sm90"), ((8, 9), "cuda"), ((10, 0), "cuda"), ((12, 0), "cuda")]
)
def test_nvidia_device(fake_gpu: SimpleNamespace, capability: tuple[int, int], name: str) -> None:
    fake_gpu.use_nvidia(capability)
    assert device_target(0).name == name


# MI300X, MI300A, MI308X, a die of an MI300X and of an MI308X; a die of an MI355X; MI210, a die of an MI250X.
_UNITS = [("gfx942", units) for units in (304, 228, 80, 38, 20)]
_UNITS += [("gfx950", 32), ("gfx90a", 104), ("gfx90a", 110)]


@pytest.mark.parametrize(("arch", "units"), _UNITS)
def test_the_compute_units_are_the_devices_own(fake_gpu: SimpleNamespace, arch: str, units: int) -> None:
    fake_gpu.use_amd(arch)
    fake_gpu.units = units
    target, published = device_target("cuda:0"), TARGETS[arch]
    assert target.compute_units == units
    assert target.figures is None or target.figures.compute_units == units
    assert (target is published) == (units == published.compute_units)


@pytest.mark.parametrize(
    ("arch", "units", "xcds"),
    [("gfx942", 304, 8), ("gfx942", 228, 6), ("gfx942", 80, 4), ("gfx942", 38, 1), ("gfx942", 20, 1),
     ("gfx942", 76, 2), ("gfx942", 40, 2), ("gfx950", 256, 8), ("gfx950", 128, 4), ("gfx950", 32, 1),
     ("gfx942", 307, 1), ("gfx90a", 104, 1)],
)  # fmt: skip
def test_xcds_follow_from_the_devices_compute_units(
    fake_gpu: SimpleNamespace, arch: str, units: int, xcds: int
) -> None:
    """MI300X, MI300A, MI308X, their dies, a quarter of an MI300X, a half of an MI308X; gfx950 likewise."""
    fake_gpu.use_amd(arch)
    fake_gpu.units = units
    assert device_target("cuda:0").xcds == xcds


def test_other_gpus_and_the_cpu_have_no_xcds() -> None:
    assert {name: TARGETS[name].xcds for name in ("sm90", "cuda", "cpu", "gfx90a")} == {
        "sm90": 1, "cuda": 1, "cpu": 1, "gfx90a": 1,
    }  # fmt: skip


def test_a_gpu_without_figures_has_its_own_compute_units(fake_gpu: SimpleNamespace) -> None:
    fake_gpu.use_nvidia((12, 0))
    fake_gpu.units = 188
    assert (device_target(0).compute_units, device_target(0).figures) == (188, None)


def test_without_a_device_the_compute_units_are_the_published_ones() -> None:
    published = {name: target.compute_units for name, target in TARGETS.items() if target.chip}
    assert published == {"gfx942": 304, "gfx950": 256, "sm90": 132}
    assert all(t.figures is None or t.figures.compute_units == t.compute_units for t in TARGETS.values())


def test_nvidia_device_without_fp8_is_refused(fake_gpu: SimpleNamespace) -> None:
    fake_gpu.use_nvidia((8, 0))
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.9 or higher \(FP8\), got 8\.0"):
        device_target("cuda:0")


def test_a_device_is_asked_once(fake_gpu: SimpleNamespace) -> None:
    fake_gpu.use_nvidia((9, 0))
    for device in ("cuda:3", 3, torch.device("cuda", 3), "cuda"):
        assert device_target(device).name == "sm90"
    assert fake_gpu.asked == 1


def test_other_device_kinds_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="device must be a CPU, a ROCm GPU or a CUDA GPU, got meta"):
        device_target("meta")
