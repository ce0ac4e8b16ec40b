"""The warning for a folder of compiled kernels that Triton cannot write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import triton


@contextlib.contextmanager
def explained_cache_errors() -> Iterator[None]:
    """Errors of Triton's cache folder say which variable names another folder; other errors pass.

    Raises:
        OSError: of the same kind and number as the one that Triton caused.
    """
    try:
        yield
    except OSError as error:
        folder = Path(triton.knobs.cache.dir)
        culprit = Path(str(error.filename))
        if culprit not in (folder, *folder.parents) and folder not in culprit.parents:
            raise
        raise type(error)(
            error.errno,
            f"compiled kernels cannot be kept in {folder}: {error.strerror}; set the environment variable "
            "TRITON_CACHE_DIR to a folder that can be written",
            str(culprit),
        ) from error
