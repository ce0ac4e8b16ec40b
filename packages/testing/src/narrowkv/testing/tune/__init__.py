"""What `narrowkv tune` searches: by family of kernels, its shape classes and the configurations to try.

Example:
    >>> sorted(TUNED_FAMILIES)
    ['decode', 'prefill', 'sage', 'sparse']
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowkv.testing.tune.settings import TUNED_FAMILIES, TUNED_MODELS, SparseHeads, TuneSettings

if TYPE_CHECKING:
    from narrowkv.testing.tune.families import TunedFamily

__all__ = ["TUNED_FAMILIES", "TUNED_MODELS", "SparseHeads", "TuneSettings", "family_of"]


def family_of(name: str, settings: TuneSettings, device: str = "cuda") -> TunedFamily[Any, Any]:
    """The family of that name."""
    families = import_module("narrowkv.testing.tune.families")
    family: TunedFamily[Any, Any] = getattr(families, TUNED_FAMILIES[name])(settings, device)
    return family
