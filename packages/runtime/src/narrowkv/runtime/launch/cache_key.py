"""What Triton's cache key of a kernel depends on besides the kernel."""

from __future__ import annotations

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars


def cache_variables() -> dict[str, str]:
    """The environment variables that are set here and are part of Triton's cache key.

    Triton gives "true" or "false" for those that are switches. A process in which they have other values, or
    in which others are set, compiles its kernels again.
    """
    found = dict(get_cache_invalidating_env_vars())
    if knobs.runtime.debug:
        found["TRITON_DEBUG"] = "1"
    if knobs.compilation.instrumentation_mode:
        found["TRITON_INSTRUMENTATION_MODE"] = knobs.compilation.instrumentation_mode
    return found
