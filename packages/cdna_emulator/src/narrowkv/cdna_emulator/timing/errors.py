"""What the timing model refuses to print."""

from __future__ import annotations


class ModelError(ValueError):
    """The timing model has no figure that could be true."""


class IdleTraceError(ModelError):
    """The workgroups that were looked at do no work, so their time says nothing about the launch."""


class PeakError(ModelError):
    """A result above what the hardware can do at most."""
