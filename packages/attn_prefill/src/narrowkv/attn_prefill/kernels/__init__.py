"""Kernels of attn_prefill."""
