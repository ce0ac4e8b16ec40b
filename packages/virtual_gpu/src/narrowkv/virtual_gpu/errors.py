"""The package's own errors."""

from __future__ import annotations


class VirtualGpuError(RuntimeError):
    """The virtual GPU cannot be made, or was asked for something that it does not have."""
