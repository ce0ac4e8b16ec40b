"""What this machine and its installation are: for bug reports, and beside every result."""

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
from narrowkv.testing.stack import known_faults, rocm_version

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
