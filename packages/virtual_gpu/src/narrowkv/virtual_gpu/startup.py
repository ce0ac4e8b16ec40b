"""Makes the virtual GPU when torch is imported; imported at start-up if TRITON_VIRTUAL_GPU is set.

The distribution's .pth file imports this module, and only if the variable is set. Programs that do not import
torch pay for an import hook and nothing else.
"""

from __future__ import annotations

from . import install_from_environment
from .after_import import after_import

after_import("torch", install_from_environment)
