"""Checks at import that a supported Triton is installed, and explains how to get one if not."""

from __future__ import annotations

OLDEST_TRITON = (3, 6)
_HOW_TO_GET_IT = (
    "On ROCm and CUDA install the triton that belongs to your torch (ROCm builds go by other names than "
    "`triton`, and the plain one would be laid over them). With a CPU-only torch: pip install 'triton>=3.6'"
)


def require_triton() -> None:
    """Raises ImportError, saying what to do, unless Triton 3.6 or later can be imported.

    Example:
        >>> require_triton()
    """
    try:
        import triton
    except ImportError as error:
        raise ImportError(
            f"narrowkv needs triton >= 3.6 and found none. {_HOW_TO_GET_IT}", name="triton"
        ) from error
    if _triton_version() < OLDEST_TRITON:
        raise ImportError(
            f"narrowkv needs triton >= 3.6, found {triton.__version__}. {_HOW_TO_GET_IT}", name="triton"
        )


def _triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


require_triton()

TRITON = _triton_version()
"""Major and minor version of the installed Triton."""
