"""On an NVIDIA GPU, what is not shipped there is skipped with its own reason."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from narrowkv.quant.errors import UnsupportedError


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """A refusal that names NVIDIA is no failure of a test that asks for every kernel."""
    try:
        return (yield)
    except UnsupportedError as error:
        if "not shipped for NVIDIA" not in str(error):
            raise
        pytest.skip(str(error))
