"""Prefill over a paged cache in a narrow format: 16-bit queries at any GQA ratio, or FP8 throughout."""

import narrowkv.quant.toolchain  # noqa: F401  # first: it says how to get Triton
