"""Sparse attention on Hopper (sm90) in Gluon, by warps with different tasks."""
