"""Triton kernels of the indexer; they know nothing of validation, planning or the reference."""
