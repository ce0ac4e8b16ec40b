"""From sizes, formats and options to the inputs of a decode call, the same for `probe`, `validate` and `bench`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from narrowkv.paged_cache import PagedKVCache, PageTable
