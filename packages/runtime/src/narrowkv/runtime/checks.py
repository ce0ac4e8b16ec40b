"""Checks of the arguments that attention operations have in common."""

from __future__ import annotations

import torch

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
