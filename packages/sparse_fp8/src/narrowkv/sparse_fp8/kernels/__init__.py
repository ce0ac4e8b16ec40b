"""Triton kernels of sparse attention; they know nothing of validation, planning or the reference."""
