"""What this machine and its installation are, and known faults of the software below narrowkv on AMD."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from importlib import metadata
from typing import Any

import torch

from narrowkv.runtime.targets import device_target

_TRITON_NAMES = ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton")
_LIBRARIES = ("numpy", "typer", "rich", "aiter", "amd-aiter", "flashinfer-python", "vllm", "matplotlib")
# Variables of others that change what runs here; shown only where they are set.
_TELLING_PREFIXES = ("TRITON_", "HIP_", "ROCR_", "ROCM_", "CUDA_", "HSA_", "PYTORCH_", "NO_COLOR")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _triton() -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        return {"version": None, "distribution": None, "backends": []}
    import triton
    from triton.backends import backends

    distribution = next((name for name in _TRITON_NAMES if _version(name)), None)
    return {"version": triton.__version__, "distribution": distribution, "backends": sorted(backends)}


def versions() -> dict[str, str | None]:
    """The versions that decide a result."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton()["version"],
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
    }


def gpus() -> list[dict[str, Any]]:
    """Every GPU that torch sees."""
    found = []
    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        properties = torch.cuda.get_device_properties(index)
        try:
            target = device_target(index).name
        except ValueError as error:
            target = f"not supported: {error}"
        found.append(
            {
                "name": properties.name,
                "target": target,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "units": properties.multi_processor_count,
            }
        )
    return found


def describe() -> dict[str, Any]:
    """Everything that `narrowkv env` reports."""
    # All packages in one distribution, or in several.
    own = {
        found.name: found.version
        for found in metadata.distributions()
        if re.fullmatch(r"narrowkv(?:[-_.]\w[-\w]*)?", found.name or "")
    }
    variables = {k: v for k, v in dict(os.environ).items() if k.startswith(_TELLING_PREFIXES)}
    return {
        "system": {
            "platform": platform.platform(),
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            "executable": sys.executable,
            "cores": os.cpu_count(),
        },
        "narrowkv": dict(sorted(own.items())),
        "torch": {
            "version": torch.__version__,
            "hip": torch.version.hip,
            "cuda": torch.version.cuda,
            "gpu": torch.cuda.is_available(),
        },
        "triton": _triton(),
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name))},
        "gpus": gpus(),
        "known_faults": known_faults(rocm_version()),
        "variables": dict(sorted(variables.items())),
    }


def rocm_version(torch_version: str | None = None, hip: str | None = None) -> tuple[int, ...] | None:
    """The version of ROCm that torch was built with: major, minor and, where the build's name has it, patch.

    Args:
        torch_version: `torch.__version__`; default that of this process.
        hip: `torch.version.hip`, whose third number is not ROCm's; default that of this process.

    Returns:
        None if torch is not for ROCm, or its GPU is virtual.

    Example:
        >>> rocm_version("2.11.0+rocm7.2.1", "7.2.53211")
        (7, 2, 1)
        >>> rocm_version("2.13.0a0+gitabc", "7.14.26222-1a2b")
        (7, 14)
    """
    version = torch.__version__ if torch_version is None else torch_version
    hip = torch.version.hip if torch_version is None else hip
    if not hip or hip.endswith("-virtual"):
        return None
    named = re.search(r"rocm(?:sdk)?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if named is None:
        return tuple(int(part) for part in re.findall(r"\d+", hip)[:2])
    return tuple(int(part) for part in named.groups() if part is not None)


def known_faults(rocm: tuple[int, ...] | None) -> list[dict[str, str]]:
    """Faults of a version of ROCm that others reported, as `narrowkv env` shows them; nothing for None.

    That of masked loads has no range of versions: `masked_load_errors` looks for it.
    """
    found = []
    if rocm is not None and rocm[:2] == (7, 2) and (len(rocm) < 3 or rocm[2] <= 3):
        found.append({
            "said": "replays of HIP graphs may give wrong results, in about one process of five (ROCm 7.2.0 "
            "to 7.2.3): compare replays with eager calls, or use another ROCm",
            "source": "https://github.com/ROCm/clr/issues/279",
        })  # fmt: skip
    if rocm is not None and rocm < (7, 14):
        found.append({
            "said": "HIP reports no error for work that a graph cannot capture (before ROCm 7.14), and torch "
            "looks for it in calls of its own only: compare the first replay of a graph with an eager call",
            "source": "https://github.com/ROCm/pytorch/pull/3323",
        })  # fmt: skip
    return found


def masked_load_errors(device: str = "cuda") -> int:
    """Elements of loops over masked loads that are wrong on a device, of 2 x 256; 0 is right.

    Some builds of Triton moved the part of an address that all lanes share to where the mask does not reach
    it, so that lanes outside the mask read memory (triton-lang/triton#10654).
    """
    from narrowkv.runtime.launch import BoundLaunch, LaunchOptions  # needs Triton, which `describe` does not
    from narrowkv.testing.bench.kernels import _masked_sum_kernel

    block, passes, keep = 256, 16, 100
    x = torch.ones(block * (passes + 1), device=device)
    expected = torch.where(torch.arange(block, device=device) < keep, float(passes), 0.0)
    wrong = 0
    for stages in (1, 2):
        o = torch.full((block,), torch.nan, device=device)
        options = LaunchOptions(num_warps=4, num_stages=stages)
        launch = BoundLaunch(_masked_sum_kernel, {"BLOCK": block}, options)
        launch((1,), (x, o, passes, keep, block * passes))
        wrong += int((o != expected).sum())
    return wrong
