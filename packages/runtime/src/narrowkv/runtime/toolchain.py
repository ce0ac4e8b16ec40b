"""Checks at import that a supported Triton is installed, and gives the line that installs one if not."""

from __future__ import annotations

import re

import torch

__all__ = ["OLDEST_TRITON", "TRITON", "TritonVersionError", "require_triton", "triton_version"]

OLDEST_TRITON = (3, 8)
_INSTALL = "pip install triton==3.8.0"
# AMD's wheels of torch require the wheel of AMD's fork of Triton that belongs to them.
_INSTALL_ROCM = (
    "pip install --upgrade 'torch[device-all]>=2.11' --index-url https://repo.amd.com/rocm/whl-multi-arch/"
)


class TritonVersionError(ImportError):
    """Triton is not installed, or is older than narrowkv supports; the message has the line to run."""


def require_triton() -> tuple[int, int]:
    """Major and minor version of the installed Triton.

    The version is that of the module: its distribution may be `triton`, `triton-rocm` or
    `pytorch-triton-rocm`, and a fork's version may end in "+git" and a commit.

    Raises:
        TritonVersionError: Triton cannot be imported, or is older than 3.8.

    Example:
        >>> require_triton() >= OLDEST_TRITON
        True
    """
    try:
        import triton
    except ImportError as error:
        raise TritonVersionError(
            f"narrowkv needs triton >= 3.8 and found none: {_line_to_run()}", name="triton"
        ) from error
    major, minor = re.findall(r"\d+", triton.__version__)[:2]
    version = int(major), int(minor)
    if version < OLDEST_TRITON:
        raise TritonVersionError(
            f"narrowkv needs triton >= 3.8, found {triton.__version__}: {_line_to_run()}", name="triton"
        )
    return version


def triton_version() -> str:
    """Version of the installed Triton, a fork's suffix included."""
    import triton

    version: str = triton.__version__
    return version


def _line_to_run() -> str:
    if torch.version.hip is None:
        return f"run `{_INSTALL}`"
    return (
        f"this torch is for ROCm, so take the Triton of AMD's wheels (`{_INSTALL_ROCM}`), "
        "not `triton` from PyPI"
    )


TRITON = require_triton()
"""Major and minor version of the installed Triton."""
