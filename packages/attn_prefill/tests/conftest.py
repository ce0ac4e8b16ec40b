"""What tests of several kernels of prefill share."""

from __future__ import annotations

import pytest

from narrowkv.attn_prefill import tiles


@pytest.fixture
def always_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a 16-bit cache stay in their pages, whatever their number and that of rows."""
    monkeypatch.setattr(tiles, "_KEYS_IN_PAGES", 0)
    monkeypatch.setattr(tiles, "_TILES_OF_PAGES", 2**20)
