"""A probe for a fault of some builds of Triton for AMD, which no version tells."""

from __future__ import annotations

import torch

from narrowkv.runtime.launch import BoundLaunch, LaunchOptions
from narrowkv.testing.bench.kernels import _masked_sum_kernel

__all__ = ["masked_load_errors"]


def masked_load_errors(device: str = "cuda") -> int:
    """Elements of loops over masked loads that are wrong on a device, of 2 x 256; 0 is right.

    Some builds of Triton moved the part of an address that all lanes share to where the mask does not reach
    it, so that lanes outside the mask read memory (triton-lang/triton#10654).
    """
    block, passes, keep = 256, 16, 100
    x = torch.ones(block * (passes + 1), device=device)
    expected = torch.where(torch.arange(block, device=device) < keep, float(passes), 0.0)
    wrong = 0
    for stages in (1, 2):
        o = torch.full((block,), torch.nan, device=device)
        options = LaunchOptions(num_warps=4, num_stages=stages)
        launch = BoundLaunch(_masked_sum_kernel, {"BLOCK": block}, options)
        launch((1,), (x, o, passes, keep, block * passes))
        wrong += int((o != expected).sum())
    return wrong
