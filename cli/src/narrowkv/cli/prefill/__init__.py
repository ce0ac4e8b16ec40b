"""Prefill's part of the command line: its contracts' tensors, its bench, what it compiles to."""
